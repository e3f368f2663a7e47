"""Direct tests of what is read from timelines: each time is assigned to one cause."""

from __future__ import annotations

import pytest
from measured_step import FIRST, SECOND, STEP, WORKS, event, timeline

from jaxpp_async.errors import CostError
from jaxpp_async.planning.measurements import fit_link, read_timelines
from jaxpp_async.timeline import ActorTimeline, TimelineTransfer


def test_every_delay_is_read_as_the_one_that_the_replay_has():
    found = read_timelines([STEP])
    assert dict(found.tasks) == {"small": [2, 0.5], "large": [3.75, 1.875]}
    assert found.works == {"small": WORKS[0], "large": WORKS[1]}
    assert found.queue == [1] and found.skew == [0, 0.5] and found.reply == [8]
    assert dict(found.arguments) == {4: [0.5]}
    assert found.dispatch == [0.5, 0.125]  # back to back
    assert found.wake == [0.5, 0.25]  # by an argument, and by a transfer
    assert found.post == [0.25]
    assert dict(found.transfers) == {"same host": [(100, 1.75)]}
    assert found.actors_per_host == 0


@pytest.mark.parametrize(
    ("places", "kind", "actors_per_host"),
    [
        ((("a", 1), ("a", 1)), "memory", 0),
        ((("a", 1), ("a", 2)), "same host", 0),
        ((("a", 0), ("a", 0)), "same host", 0),
        ((("a", 1), ("b", 1)), "between hosts", 1),
    ],
)
def test_a_link_is_of_the_kind_that_its_ends_make_it(places, kind, actors_per_host):
    actors = [
        ActorTimeline(k, events, host=host, pid=pid)
        for k, (events, (host, pid)) in enumerate(zip((FIRST, SECOND), places, strict=True))
    ]
    found = read_timelines([timeline(*actors, transfers=STEP.transfers)])
    assert list(found.transfers) == [kind] and found.actors_per_host == actors_per_host


def test_transfers_that_wait_for_the_link_are_left_out_if_others_do_not():
    second = TimelineTransfer(
        event(0, 4, "send", 5, 8, 1, size=100, peer=1), event(1, 3, "recv", 1.5, 8, size=100, peer=0)
    )
    step = timeline(*STEP.actors, transfers=[*STEP.transfers, second])
    assert dict(read_timelines([step]).transfers) == {"same host": [(100, 1.75)]}


def test_steps_without_what_is_needed_are_refused():
    with pytest.raises(CostError, match=r"no timeline of one; collect `mesh.last_step_timeline\(\)`"):
        read_timelines([])
    with pytest.raises(CostError, match="step 3 of 'train' does not say which work its tasks are"):
        read_timelines([timeline(*STEP.actors, works=())])
    with pytest.raises(CostError, match="step 3 of 'train' has no task"):
        read_timelines([timeline()])


def test_a_link_has_its_rate_from_large_and_its_latency_from_all_messages():
    link = fit_link([(size, 1e-4 + size / 1e9) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)])
    assert link.bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert link.latency.mean == pytest.approx(1e-4, rel=1e-6)


def test_delays_that_do_not_come_from_bytes_are_latency():
    late = [1e-4, 1e-4, 5e-3]
    link = fit_link([(size, x + size / 1e9) for size in (1 << 10, 1 << 20, 1 << 24) for x in late])
    assert link.bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert link.latency.quantile(0.99) == pytest.approx(5e-3, rel=1e-6)


def test_messages_of_one_size_are_latency_if_small_and_bytes_if_large():
    small, large = fit_link([(1024, 1e-4)] * 3), fit_link([(1 << 20, 1e-3)] * 3)
    assert (small.bytes_per_s, small.latency.mean) == (None, 1e-4)
    assert large.bytes_per_s == pytest.approx((1 << 20) / 1e-3)
    assert large.latency.mean == pytest.approx(0, abs=1e-12)


def test_a_task_that_reads_no_late_argument_does_not_wait_for_it():
    events = (
        event(0, 0, "input", 1, 1, label="arg 0"),
        event(0, 1, "input", 1, 4, label="arg 1"),
        event(0, 2, "run", 1.25, 2, 0, executable=0),
        event(0, 3, "run", 4.5, 5, 1, executable=0),
    )
    found = read_timelines([timeline(ActorTimeline(0, events))])
    assert found.dispatch == [0.25] and found.wake == [0.5]
    assert dict(found.arguments) == {0: [0], 1: [3]}
