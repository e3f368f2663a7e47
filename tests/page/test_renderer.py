"""Parts are written seldom enough, and only what has changed is sent."""

from __future__ import annotations

import pytest
from measured_step import STEP
from run_states import actors, state_of, trained_record

from jaxpp_async.page import renderer as module
from jaxpp_async.page.renderer import LEAST_S, MOST_PAIRS, MOST_SHARE, PARTS, Renderer, Snapshot

ALL = frozenset(PARTS)


@pytest.fixture
def cpu(monkeypatch):
    """A clock of the CPU on which writing each part takes 0.1 s."""
    now = [0.0]

    def read():
        now[0] += 0.1
        return now[0]

    monkeypatch.setattr(module.time, "thread_time", read)


def snapshot(**more):
    return Snapshot(state_of(trained_record()), trained_record().curves(), {}, lambda: STEP, **more)


def test_everything_is_due_at_first_and_nothing_right_afterwards():
    renderer = Renderer()
    assert renderer.due(0.0) == ALL
    renderer.write(snapshot(), ALL, 0.0)
    assert renderer.due(0.99 * LEAST_S) == frozenset()
    assert renderer.due_in(0.0) > 0 and renderer.due_in(1e6) == 0.0


def test_a_part_is_due_so_seldom_that_it_takes_its_share_of_the_time(cpu):
    renderer = Renderer()
    renderer.write(snapshot(), ALL, 0.0)
    for part in PARTS:
        due_s = 0.1 / MOST_SHARE[part]
        assert part not in renderer.due(0.99 * due_s) and part in renderer.due(1.01 * due_s)
    assert sum(MOST_SHARE.values()) < 0.005


def test_a_large_run_may_take_more_up_to_a_bound(cpu):
    renderer = Renderer()
    large = Snapshot(state_of(trained_record(), actors=actors(1000)), (), {}, lambda: STEP)
    renderer.write(large, ALL, 0.0)
    due_s = 0.1 / MOST_SHARE["step"] / MOST_PAIRS
    assert "step" not in renderer.due(0.99 * due_s) and "step" in renderer.due(1.01 * due_s)


def test_only_sections_that_changed_are_sent_again():
    renderer = Renderer()
    renderer.write(snapshot(step_key=1), ALL, 0.0)
    assert "grid" in renderer.changed_since(0)
    seen = renderer.seen
    renderer.write(snapshot(step_key=1), ALL, 1.0)
    assert renderer.changed_since(seen) == {}
    record = trained_record(5)
    renderer.write(Snapshot(state_of(record), record.curves(), {}, lambda: STEP, 2), ALL, 2.0)
    changed = renderer.changed_since(seen)
    assert "figures" in changed and "curves" in changed and "actors" not in changed
    assert renderer.run is not None and renderer.run.steps[0].count == 5


def test_the_drawing_of_a_step_is_not_made_twice():
    made = []
    renderer = Renderer()
    step = Snapshot(state_of(trained_record()), (), {}, lambda: made.append(1) or STEP, step_key=7)
    renderer.write(step, ALL, 0.0)
    renderer.write(step, ALL, 1.0)
    assert made == [1]
