"""Bounds: never above the best of all orders, placements and cuts; and what each of them sees, by hand."""

from __future__ import annotations

import math
import random

import pytest
from small_pipelines import cuts, drawn_problem, least_step, placements

from jaxpp_async.planning.bound import bound_of_all, bound_of_cut
from jaxpp_async.planning.named import on_best_cut, on_equal_cut
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.planning.search import search


@pytest.mark.parametrize("seed", range(12))
def test_no_bound_is_above_the_best_order(seed):
    """Over every cut, placement and order of tiny problems, half of them with tight memory."""
    rng = random.Random(seed)
    num_layers = rng.choice((2, 2, 3))
    num_microbatches = rng.choice((2, 3)) if num_layers == 2 else 2
    problem = drawn_problem(
        rng, num_layers=num_layers, num_actors=2, num_microbatches=num_microbatches, is_tight=seed % 2 == 1
    )
    best = math.inf
    for cut in cuts(num_layers, num_layers):
        best_of_cut = math.inf
        for actors in placements(len(cut) + 1, 2):
            best_of_cut = min(best_of_cut, least_step(problem, cut, actors))
        assert bound_of_cut(problem, cut) <= best_of_cut * (1 + 1e-9)
        best = min(best, best_of_cut)
    assert bound_of_all(problem) <= best * (1 + 1e-9)


@pytest.mark.parametrize("times", [(1, 5, 1, 1, 1, 20), (1, 1, 9, 4, 1, 1), (6, 1, 1, 1, 1, 9)])
def test_no_bound_is_above_the_best_order_where_one_kind_of_task_is_long(times):
    problem = PipelineProblem((Layer(*times[:3]), Layer(*times[3:])), 2, 3)
    for cut in cuts(2, 2):
        least = min(least_step(problem, cut, actors) for actors in placements(len(cut) + 1, 2))
        assert bound_of_all(problem) <= bound_of_cut(problem, cut) <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_no_schedule_that_anything_finds_is_below_a_bound(seed):
    rng = random.Random(seed)
    problem = drawn_problem(
        rng, num_layers=rng.randint(4, 9), num_actors=rng.randint(2, 4), num_microbatches=rng.randint(2, 9)
    )
    if seed % 2:
        needed = max(on_equal_cut(problem)[0].peak_bytes)
        problem = PipelineProblem(
            problem.layers,
            problem.num_actors,
            problem.num_microbatches,
            needed * 1.2,
            problem.latency_s,
            problem.bytes_per_s,
            problem.dispatch_s,
        )
    found = [*on_equal_cut(problem), *on_best_cut(problem), search(problem, iterations=60).best]
    for timed in found:
        if timed.fits:
            bound = bound_of_cut(problem, timed.assignment.cut)
            assert bound_of_all(problem) <= bound <= timed.step_s * (1 + 1e-9)


def test_pieces_that_do_not_divide_evenly():
    """Five equal layers on two actors: one actor has three of them."""
    problem = PipelineProblem((Layer(1, 1, 1),) * 5, 2, 8)
    assert bound_of_all(problem) == pytest.approx(8 * 9, rel=1e-6)


def test_stages_that_cannot_be_divided_evenly():
    """Two stages of 4 make 8 seconds, a third of all work; but the actor with the 6 has 6 or at least 9."""
    layers = tuple(Layer(0, 0, work) for work in (6, 4, 4, 4, 3, 3))
    problem = PipelineProblem(layers, 3, 10)
    assert bound_of_cut(problem, (1, 2, 3, 4, 5)) == pytest.approx(10 * 9, rel=1e-3)


def test_one_microbatch_takes_its_path():
    problem = PipelineProblem((Layer(1, 2, 3), Layer(4, 5, 1)), 2, 1, latency_s=0.5)
    assert bound_of_cut(problem, (1,)) == pytest.approx(1 + 4 + 5 + 2 + 3)


def test_more_different_sums_than_can_be_listed():
    rng = random.Random(1)
    problem = drawn_problem(rng, num_layers=24, num_actors=4, num_microbatches=8)
    free = PipelineProblem(problem.layers, 4, 8)
    bound = bound_of_all(free)
    assert free.balanced_s <= bound < 1.2 * free.balanced_s
