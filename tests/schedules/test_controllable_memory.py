"""Schedules with a cap on activations: published peaks and bubbles, any counts, caps that are refused."""

from __future__ import annotations

import math
import pickle
from functools import partial

import pytest
from paths import ROOT

from jaxpp_async.errors import ScheduleError
from jaxpp_async.schedules import (
    Schedule,
    ZeroBubbleH1,
    ZeroBubbleV,
    bubble_fraction,
    idle_times,
    peak_activations,
    resolve,
    stage_actors,
)
from jaxpp_async.schedules.controllable_memory import ControllableMemory, VHalf, VMin
from jaxpp_async.schedules.validate import short_task

PUBLISHED = {VHalf: lambda a: (a + 2) // 2, VMin: lambda a: (a + 4) // 3}
ACTORS = range(2, 13)


def _resolved(schedule, m, a):
    return resolve(schedule, num_stages=schedule.num_stages, num_microbatches=m, num_actors=a)


def _idle(rows, m: int) -> float:
    """Return the idle time of an actor over a step of 2 stages an actor; a task takes one unit."""
    busy = 6 * m
    return round(busy / (1 - bubble_fraction(rows)) - busy, 6)


# ---------------------------------------------------------------- V-Half and V-Min


@pytest.mark.parametrize("cls", PUBLISHED)
@pytest.mark.parametrize("a", ACTORS)
def test_peak_activations_are_the_published_counts(cls, a):
    """Microbatches are counted on a whole device, hence two (part, microbatch) pairs each."""
    for m in (1, a - 1, a, a + 1, 40):
        for k in (1, 3):
            rows = _resolved(cls(2 * k * a), m, a)
            assert peak_activations(rows) == (2 * k * min(m, PUBLISHED[cls](a)),) * a


@pytest.mark.parametrize(("cls", "published"), [(VHalf, 1 / 2), (VMin, 2 / 3)])
@pytest.mark.parametrize("a", ACTORS)
def test_bubbles_are_at_most_the_published_ones(cls, published, a):
    """The paper gives idle time as a share of the work of A microbatches, about; here it is exact."""
    for m in (a, 2 * a, 40):
        idle = _idle(_resolved(cls(2 * a), m, a), m)
        assert idle == (6 * (a - PUBLISHED[cls](a)) - 1 if a > 2 else 1)
        assert idle <= published * 6 * a


@pytest.mark.parametrize("cls", PUBLISHED)
@pytest.mark.parametrize("a", [4, 7, 8])
def test_no_actor_has_to_idle_once_the_pipeline_is_full(cls, a):
    idle = {_idle(_resolved(cls(2 * a), m, a), m) for m in (2 * a, 3 * a, 60)}
    assert len(idle) == 1


def test_v_half_stays_full_where_input_gradients_take_longer():
    durations = {"fwd": 1, "bwd_input": 1.2, "bwd_weight": 0.8}
    for a in (4, 5, 7, 8):
        idle = [
            6 * m / (1 - bubble_fraction(_resolved(VHalf(2 * a), m, a), durations)) - 6 * m
            for m in (3 * a, 60)
        ]
        assert idle[0] == pytest.approx(idle[1])


def test_the_order_of_v_min_for_two_actors():
    rows = [" ".join(map(short_task, row)) for row in VMin(4).tasks(3, 2)]
    assert rows == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2",
        "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2",
    ]


# ---------------------------------------------------------------- any cap


@pytest.mark.parametrize("a", [1, 2, 3, 5, 6])
def test_more_memory_never_makes_a_step_longer(a):
    for m in (1, a, 30):
        times = []
        for pairs in range(2, 2 * a + 3):
            rows = _resolved(ControllableMemory(2 * a, activations=pairs / 2), m, a)
            assert max(peak_activations(rows)) <= min(pairs, 2 * a, 2 * m)
            times.append(_idle(rows, m))
        assert times == sorted(times, reverse=True)
        assert times[-1] <= _idle(_resolved(ZeroBubbleV(2 * a), m, a), m)


@pytest.mark.parametrize("a", ACTORS)
def test_v_half_and_v_min_are_members_of_the_family(a):
    for cls, count in PUBLISHED.items():
        member = ControllableMemory(2 * a, activations=count(a))
        assert member.tasks(9, a) == cls(2 * a).tasks(9, a)


def test_half_a_microbatch_counts_and_less_is_rounded_down():
    peaks = [
        max(peak_activations(_resolved(ControllableMemory(8, activations=cap), 8, 4)))
        for cap in (1, 1.5, 2, 2.49, 2.5, 3, 4, 5, 100, math.inf)
    ]
    assert peaks == [2, 3, 4, 4, 5, 6, 8, 8, 8, 8]


KINDS = {"VHalf": VHalf, "VMin": VMin} | {
    f"cap of {cap}": partial(ControllableMemory, activations=cap) for cap in (1, 1.5, 3)
}


def _count(kind, a: int) -> float:
    return PUBLISHED[kind](a) if kind in PUBLISHED else kind.keywords["activations"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_any_counts_are_valid_within_the_cap(kind):
    for a in (1, 2, 3, 4, 7):
        for stages in (1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 15, 21):
            for m in (1, 2, 5, 9):
                rows = _resolved(kind(stages), m, a)
                tasks = [task for row in rows for task in row]
                assert len(tasks) == 3 * stages * m and not any(task.ty == "bwd" for task in tasks)
                if stages <= a:
                    assert max(peak_activations(rows)) <= min(m, math.floor(_count(kind, stages)))
                    assert stage_actors(rows) == stage_actors(ZeroBubbleH1(stages).tasks(m, a))
                else:
                    pairs = math.floor(2 * min(m, _count(kind, a)))
                    assert max(peak_activations(rows)) <= pairs * math.ceil(stages / (2 * a))
                    assert stage_actors(rows) == stage_actors(ZeroBubbleV(stages).tasks(m, a))


def test_with_a_stage_an_actor_and_memory_enough_the_order_is_that_of_zero_bubble_h1():
    for stages, actors in ((1, 1), (1, 3), (3, 3), (3, 4), (4, 4)):
        capped = ControllableMemory(stages, activations=stages)
        assert capped.tasks(5, actors) == ZeroBubbleH1(stages).tasks(5, actors)


def test_the_figures_in_the_docs():
    lines = (ROOT / "docs" / "schedules.md").read_text().splitlines()
    table = [_resolved(ControllableMemory(16, activations=cap), 32, 8) for cap in range(1, 9)]
    assert f"| `I`, `M = 32` | {' | '.join(f'{_idle(rows, 32):g}' for rows in table)} |" in lines
    assert f"| bubble, `M = 32` | {' | '.join(f'{bubble_fraction(rows):.3f}' for rows in table)} |" in lines
    rows = _resolved(ControllableMemory(8, activations=2.5), 8, 4)
    time, idle = (6 * 8 + _idle(rows, 8)) / 2, ", ".join(f"{value / 2:g}" for value in idle_times(rows))
    assert (
        f"| `ControllableMemory(8, activations=2.5)` | {time:g} | {bubble_fraction(rows):.3f} | {idle} | "
        "2.5, 2.5, 2.5, 2.5 |"
    ) in lines
    assert bubble_fraction(_resolved(ControllableMemory(4, activations=3), 32, 4)) == pytest.approx(
        0.392, abs=1e-3
    )


# ---------------------------------------------------------------- the object


def test_it_is_one_key_and_says_its_cap():
    made = ControllableMemory(4, activations=2.5)
    assert made == ControllableMemory(num_stages=4, activations=2.5) != ControllableMemory(4, activations=3)
    assert hash(made) == hash(pickle.loads(pickle.dumps(made)))
    assert repr(made) == "ControllableMemory(num_stages=4, activations=2.5)"
    assert isinstance(made, Schedule) and VHalf(4) != VMin(4)


@pytest.mark.parametrize("cap", [0, 0.99, -1, math.nan, "2", None, True, 2j])
def test_a_cap_is_a_number_of_at_least_one(cap):
    with pytest.raises(
        ScheduleError,
        match=r"^ControllableMemory\(activations=\.\.\.\): expected a number .*; the least possible is 1,",
    ):
        ControllableMemory(4, activations=cap)


def test_the_number_of_stages_is_checked_too():
    with pytest.raises(ScheduleError, match=r"ControllableMemory\(num_stages=\.\.\.\): expected a positive"):
        ControllableMemory(0, activations=2)


def test_the_number_of_actors_is_no_option():
    with pytest.raises(TypeError, match="has no option num_actors=; the mesh says how many"):
        ControllableMemory(8, activations=2, num_actors=4)


def test_many_actors_keep_the_published_counts():
    for cls, published in PUBLISHED.items():
        rows = _resolved(cls(64), 40, 32)
        assert max(peak_activations(rows)) == 2 * published(32)
    rows = _resolved(ControllableMemory(64, activations=3), 40, 32)
    assert max(peak_activations(rows)) <= 6
