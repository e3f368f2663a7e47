"""Direct tests of the orders of the built-in schedules, written out for small counts."""

from __future__ import annotations

import pytest

from jaxpp_async.schedules.builtin import (
    DualPipeV,
    Eager1F1B,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    Std1F1B,
    ZeroBubbleH1,
    ZeroBubbleH2,
    ZeroBubbleV,
)
from jaxpp_async.schedules.timing import bubble_fraction, idle_times, peak_activations, time_schedule
from jaxpp_async.schedules.validate import short_task

HALVES = {"fwd": 1, "bwd": 2, "bwd_input": 1, "bwd_weight": 1}


def rows(tasks) -> list[str]:
    return [" ".join(map(short_task, row)) for row in tasks]


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "num_actors", "order"),
    [
        (GPipe(2), 2, 2, ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]),
        (GPipe(2), 2, 1, ["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"]),
        (Std1F1B(2), 3, 2, ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        (Std1F1B(3), 1, 3, ["0F0 0B0", "1F0 1B0", "2F0 2B0"]),
        (Std1F1B(2), 2, 3, ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", ""]),
        (Eager1F1B(2), 4, 2, ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]),
        (Interleaved1F1B(4), 2, 2, ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"]),
        (
            Interleaved1F1B(4),
            4,
            2,
            [
                "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
                "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
            ],
        ),
        (Interleaved1F1B(3), 1, 2, ["0F0 2F0 2B0 0B0", "1F0 1B0"]),
        (Interleaved1F1B(1), 1, 2, ["0F0 0B0", ""]),
        (LoopedBFS(3), 2, 2, ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 1B0 1B1"]),
        (ZeroBubbleH1(2), 2, 2, ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]),
        (
            ZeroBubbleH2(2),
            3,
            2,
            ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"],
        ),
    ],
    ids=str,
)
def test_each_actor_runs_its_tasks_in_the_published_order(schedule, num_microbatches, num_actors, order):
    assert rows(schedule.tasks(num_microbatches, num_actors)) == order


def test_warm_up_and_delay_grow_with_the_distance_from_the_ends():
    order = rows(ZeroBubbleH1(2).tasks(4, 2))
    assert order[0].startswith("0F0 0F1 0I0 0W0 0F2")
    assert order[1].startswith("1F0 1I0 1F1 1I1 1W0")


# ---------------------------------------------------------------- V-shaped schedules


@pytest.mark.parametrize("cls", [ZeroBubbleV, DualPipeV])
def test_the_first_actor_has_the_first_and_the_last_stage(cls):
    tasks = cls(4).tasks(4, 2)
    assert [{task.stage for task in row} for row in tasks] == [{0, 3}, {1, 2}]
    assert time_schedule(tasks).makespan > 0  # it does not deadlock


def test_zero_bubble_v_idles_on_no_actor_between_its_first_and_its_last_task():
    tasks = ZeroBubbleV(4).tasks(3, 2)
    assert idle_times(tasks, HALVES) == (0, 0)
    assert bubble_fraction(tasks, HALVES) == pytest.approx(1 / 19)
    assert peak_activations(tasks) == (4, 4)


def test_dual_pipe_v_has_the_published_bubble_and_activations():
    tasks = DualPipeV(4).tasks(4, 2)
    assert bubble_fraction(tasks, HALVES) == pytest.approx(1 / 25)
    assert peak_activations(tasks) == (5, 5)


def test_with_too_few_microbatches_dual_pipe_v_runs_the_order_of_zero_bubble_v():
    assert DualPipeV(4).tasks(3, 2) == ZeroBubbleV(4).tasks(3, 2)


@pytest.mark.parametrize("cls", [ZeroBubbleV, DualPipeV])
def test_with_a_stage_an_actor_nothing_folds(cls):
    assert cls(2).tasks(4, 3) == ZeroBubbleH1(2).tasks(4, 3)
