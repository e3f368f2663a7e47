"""Direct tests of the orders in which each actor holds an early and a late part of the model."""

from __future__ import annotations

import pytest

from jaxpp_async.schedules.linear import ZeroBubbleH1
from jaxpp_async.schedules.simulate import bubble_fraction, idle_times, peak_activations, simulate
from jaxpp_async.schedules.v_shaped import DualPipeV, ZeroBubbleV

HALVES = {"fwd": 1, "bwd": 2, "bwd_input": 1, "bwd_weight": 1}


@pytest.mark.parametrize("cls", [ZeroBubbleV, DualPipeV])
def test_the_first_actor_has_the_first_and_the_last_stage(cls):
    tasks = cls(4).tasks(4, 2)
    assert [{task.stage for task in row} for row in tasks] == [{0, 3}, {1, 2}]
    assert simulate(tasks).makespan > 0  # it does not deadlock


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
