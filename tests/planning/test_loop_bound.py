"""No compiled loop is faster than its bound."""

from __future__ import annotations

import random

import pytest
from uneven_model import arguments, uneven_step

import jaxpp_async as jpp
from jaxpp_async.planning.calibration import TaskTimes
from jaxpp_async.planning.cost_model import CostModel, TaskFormula
from jaxpp_async.planning.loop_bound import LoopBounds, bounds_of_loop, one_machine_s
from jaxpp_async.planning.named import named_schedules
from jaxpp_async.planning.samples import LinkCost, Samples


def costs_of(rng: random.Random) -> CostModel:
    link = LinkCost(Samples((rng.choice((0.0, 1e-5, 1e-3)),)), rng.choice((None, 1e6, 1e9)))
    times = [Samples((rng.choice((0.0, 1e-5, 1e-3)),)) for _ in range(2)]
    formula = TaskFormula(flops_per_s=1e7, overhead_s=rng.choice((0.0, 1e-4)))
    return CostModel(formula=formula, links={"same host": link}, dispatch=times[0], wake=times[1])


def bounds_of(step: object, costs: CostModel) -> LoopBounds:
    return bounds_of_loop(step.compiled.placed.graph, step.works, costs, TaskTimes(costs, step.compiled.cut))


@pytest.mark.parametrize("seed", range(20))
def test_no_loop_is_faster_than_its_bound(seed):
    rng = random.Random(seed)
    layers, num_actors = rng.randint(1, 5), rng.randint(1, 3)
    fn, args = uneven_step(layers, rng.randint(1, 4)), arguments(layers, num_microbatches=rng.randint(1, 6))
    costs, machine = costs_of(rng), jpp.Machine(num_actors)
    for schedule in rng.sample(list(named_schedules(layers + 1, num_actors)) or [jpp.Std1F1B(1)], 1):
        stages = sorted(rng.sample(range(layers), schedule.num_stages - 1))
        chosen = type(schedule)(schedule.num_stages, stages=stages)
        step = jpp.compile_for(machine, fn, args, schedule=chosen, donate_argnums=0)
        simulated, bounds = jpp.simulate(step, costs), bounds_of(step, costs)
        assert 0 < bounds.any_placement_s <= bounds.this_placement_s <= simulated.loop_s * (1 + 1e-9)
        assert simulated.loop_s <= simulated.step_s.p50 * (1 + 1e-9)


def test_one_actor_has_no_gap():
    step = jpp.compile_for(jpp.Machine(1), uneven_step(3), arguments(3), schedule=jpp.Std1F1B(1, stages=[]))
    costs = CostModel(formula=TaskFormula(flops_per_s=1e7))
    assert jpp.simulate(step, costs).loop_s == pytest.approx(bounds_of(step, costs).any_placement_s, rel=2e-4)


def test_the_placement_counts_transfers_and_uneven_actors():
    links = {"same host": LinkCost(Samples((0.5,)), None)}
    costs = CostModel(formula=TaskFormula(flops_per_s=1e7), links=links)
    step = jpp.compile_for(jpp.Machine(2), uneven_step(3), arguments(3), schedule=jpp.Std1F1B(2, stages=[0]))
    bounds, simulated = bounds_of(step, costs), jpp.simulate(step, costs)
    assert bounds.this_placement_s > bounds.any_placement_s + 0.45
    assert simulated.loop_s >= bounds.this_placement_s


def test_one_machine_by_hand():
    assert one_machine_s([(0, 2, 0), (0, 3, 4)]) == 7  # the one with the tail first
    assert one_machine_s([(0, 4, 0), (1, 1, 9)]) == 11  # a job that comes later interrupts
    assert one_machine_s([(3, 1, 1)]) == 5
