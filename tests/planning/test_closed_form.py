"""Closed forms against replays of the task lists, with transfers."""

from __future__ import annotations

import random
import statistics

import pytest

from jaxpp_async.planning.closed_form import OrderEstimate, estimate_step_s
from jaxpp_async.planning.evaluation import TaskTable
from jaxpp_async.planning.named import named_order
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.schedules import NAMED, GPipe, LoopedBFS, Std1F1B, ZeroBubbleH1


def drawn_stages(rng, num_stages, num_actors, spread=3.0):
    layers = tuple(
        Layer((f := rng.uniform(1, spread)), f * rng.uniform(0.8, 1.2), f * rng.uniform(0.7, 1.1), f)
        for _ in range(num_stages)
    )
    problem = PipelineProblem(
        layers, num_actors, 1, latency_s=rng.choice((0, 0.1, 0.5)), dispatch_s=rng.choice((0, 0.1))
    )
    return problem.stages(tuple(range(1, num_stages)))


def replayed_s(schedule, stages, num_microbatches, num_actors):
    order = named_order(schedule, num_microbatches, num_actors)
    table = TaskTable(stages, order.actors, num_microbatches, num_actors)
    return table.step_s(table.rows_of(order.rows))


@pytest.mark.parametrize("schedule", NAMED)
def test_the_median_error_is_below_two_percent(schedule):
    rng = random.Random(schedule.__name__)
    errors = []
    for _ in range(25):
        num_actors = rng.choice((2, 3, 4, 6))
        num_microbatches = num_actors * rng.choice((1, 2, 4)) + rng.choice((0, 1))
        named = schedule(rng.choice(schedule.stages_per_actor) * num_actors)
        stages = drawn_stages(rng, named.num_stages, num_actors)
        found = estimate_step_s(named, stages, num_microbatches, num_actors)
        expected = replayed_s(named, stages, num_microbatches, num_actors)
        errors.append(abs(found / expected - 1))
    assert statistics.median(errors) < 0.02
    assert max(errors) < 0.25


@pytest.mark.parametrize("schedule", [GPipe, LoopedBFS, Std1F1B])
@pytest.mark.parametrize("num_microbatches", [1, 2, 9])
def test_equal_stages_are_exact(schedule, num_microbatches):
    num_stages = schedule.stages_per_actor[0] * 3
    stages = PipelineProblem((Layer(1, 1, 1),) * num_stages, 3, 1, latency_s=0.25).stages(
        tuple(range(1, num_stages))
    )
    named = schedule(num_stages)
    found = estimate_step_s(named, stages, num_microbatches, 3)
    if schedule is LoopedBFS and num_microbatches < 3:
        assert found >= replayed_s(named, stages, num_microbatches, 3) * 0.9
    else:
        assert found == pytest.approx(replayed_s(named, stages, num_microbatches, 3))


def test_by_hand():
    """1F1B of two actors, stages of 3 and 6 seconds, without transfers: 1 + 4 x 6 + 2."""
    stages = PipelineProblem((Layer(1, 1, 1), Layer(2, 2, 2)), 2, 4).stages((1,))
    assert estimate_step_s(Std1F1B(2), stages, 4, 2) == pytest.approx(1 + 4 * 6 + 2)
    assert estimate_step_s(ZeroBubbleH1(2), stages, 4, 2) == pytest.approx(1 + 4 * 6)


def test_an_estimate_of_any_order_is_at_most_its_replay():
    rng = random.Random(3)
    order = named_order(ZeroBubbleH1(4), 6, 4)
    estimate = OrderEstimate(order.rows, 4)
    for _ in range(10):
        stages = drawn_stages(rng, 4, 4)
        assert estimate.step_s(stages) <= replayed_s(ZeroBubbleH1(4), stages, 6, 4) * (1 + 1e-9)
    one = named_order(Std1F1B(2), 3, 1)
    stages = drawn_stages(rng, 2, 1)
    assert OrderEstimate(one.rows, 2).step_s(stages) == pytest.approx(replayed_s(Std1F1B(2), stages, 3, 1))
