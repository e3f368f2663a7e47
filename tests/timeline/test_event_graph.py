"""Direct tests of when events happen that wait for each other."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpp_async.timeline.event_graph import EventGraph


def test_an_event_happens_its_delay_after_the_latest_that_it_needs():
    graph = EventGraph([[], [0], [0, 1], [1]])
    assert graph.times([1, 2, 3, 4]) == [1, 3, 6, 7]
    assert graph.times([1, -1, 3, 0]) == [1, 0, 4, 0]  # a delay may be negative


def test_events_need_not_be_sorted():
    assert EventGraph([[2], [0], []]).times([1, 1, 5]) == [6, 7, 5]


def test_a_graph_may_be_empty():
    assert EventGraph([]).times([]) == []
    assert EventGraph([]).times_of_draws(np.zeros((0, 2))).shape == (0, 2)


def test_a_circle_is_an_error():
    with pytest.raises(ValueError, match=r"^tasks wait for each other in a circle$"):
        EventGraph([[], [2, 0], [1]])


@pytest.mark.parametrize("draws", [1, 2, 7])
def test_draws_at_once_are_the_draws_one_by_one(draws):
    random = np.random.default_rng(draws)
    needs = [sorted({int(k) for k in random.integers(0, event, 3)}) if event else [] for event in range(40)]
    delays = random.random((40, draws))
    graph = EventGraph(needs)
    found = graph.times_of_draws(delays)
    for draw in range(draws):
        assert found[:, draw].tolist() == graph.times(delays[:, draw].tolist())
