"""Cuts: against all cuts, with and without a cap; and the moments at which memory peaks."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from small_pipelines import drawn_problem

from jaxpp_async.planning.cut import best_cut, equal_cut, peak_counts
from jaxpp_async.planning.evaluation import TaskTable
from jaxpp_async.planning.named import named_order
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.schedules import NAMED


def busiest_s(problem, cut, actors):
    loads = [0.0] * problem.num_actors
    bounds = (0, *cut, len(problem.layers))
    for stage, actor in enumerate(actors):
        loads[actor] += sum(layer.work_s for layer in problem.layers[bounds[stage] : bounds[stage + 1]])
        loads[actor] += 3 * problem.dispatch_s
    return max(loads)


def all_cuts(problem, num_stages):
    return combinations(range(1, len(problem.layers)), num_stages - 1)


@pytest.mark.parametrize("actors", [(0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 1, 0)])
def test_the_busiest_actor_has_as_little_work_as_any_cut_gives_it(actors):
    rng = random.Random(str(actors))
    for _ in range(5):
        problem = drawn_problem(rng, num_layers=9, num_actors=1 + max(actors), num_microbatches=4)
        cut = best_cut(problem, actors)
        assert cut is not None
        least = min(busiest_s(problem, other, actors) for other in all_cuts(problem, len(actors)))
        assert busiest_s(problem, cut, actors) == pytest.approx(least, rel=2e-6)


@pytest.mark.parametrize("schedule", NAMED)
def test_under_a_cap_too(schedule):
    rng = random.Random(schedule.__name__)
    num_stages = schedule.stages_per_actor[0] * 2
    order = named_order(schedule(num_stages), 4, 2)
    fitting = 0
    for _ in range(6):
        problem = drawn_problem(rng, num_layers=7, num_actors=2, num_microbatches=4)
        whole = sum(layer.kept_bytes for layer in problem.layers)
        problem = PipelineProblem(problem.layers, 2, 4, whole * rng.uniform(1, 4))

        def fits(cut, problem=problem):
            peaks = order.peak_bytes(problem.stages(cut))
            return all(peak <= cap for peak, cap in zip(peaks, problem.caps, strict=True))

        works = [busiest_s(problem, cut, order.actors) for cut in all_cuts(problem, num_stages) if fits(cut)]
        cut = best_cut(problem, order.actors, order.moments)
        assert (cut is None) == (not works)
        if cut is not None:
            fitting += 1
            assert fits(cut)
            assert busiest_s(problem, cut, order.actors) == pytest.approx(min(works), rel=2e-6)
    assert fitting


def test_units_do_not_matter():
    rng = random.Random(5)
    problem = drawn_problem(rng, num_layers=9, num_actors=2, num_microbatches=4)
    small = [
        Layer(1e-7 * layer.forward_s, 1e-7 * layer.input_gradient_s, 1e-7 * layer.weight_gradient_s)
        for layer in problem.layers
    ]
    actors = (0, 1, 1, 0)
    cut = best_cut(PipelineProblem(problem.layers, 2, 4), actors)
    assert best_cut(PipelineProblem(tuple(small), 2, 4), actors) == cut


def test_large_problems_end_with_a_good_cut():
    layers = tuple(Layer(1 + k % 3, 1, 1) for k in range(60))
    problem = PipelineProblem(layers, 6, 8)
    cut = best_cut(problem, (*range(6), *reversed(range(6))), max_states=300)
    assert cut is not None
    assert busiest_s(problem, cut, (*range(6), *reversed(range(6)))) <= 1.1 * 240 / 6


@pytest.mark.parametrize("schedule", NAMED)
def test_an_actors_peak_is_at_one_of_the_moments_whatever_the_bytes_are(schedule):
    rng = random.Random(schedule.__name__)
    num_stages = schedule.stages_per_actor[0] * 3
    order = named_order(schedule(num_stages), 7, 3)
    assert len(order.moments) < 60
    for _ in range(4):
        problem = drawn_problem(rng, num_layers=num_stages, num_actors=3, num_microbatches=7)
        stages = problem.stages(tuple(range(1, num_stages)))
        table = TaskTable(stages, order.actors, 7, 3)
        expected = table.peak_bytes(table.rows_of(order.rows))
        assert order.peak_bytes(stages) == pytest.approx(expected)
    assert peak_counts(order.rows, num_stages) == order.moments


def test_equal_cuts():
    assert equal_cut(17, 4) == (4, 8, 12)
    assert equal_cut(3, 3) == (1, 2)
    assert equal_cut(3, 1) == ()
    with pytest.raises(ValueError, match="expected 1 to 3 for 3 layers, got 4"):
        equal_cut(3, 4)
