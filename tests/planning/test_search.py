"""The search: optimal on problems that are small enough to enumerate, never worse than a named schedule."""

from __future__ import annotations

import math
import random

import pytest
from small_pipelines import drawn_problem, least_step_of_all

from jaxpp_async.planning.bound import bound_of_cut
from jaxpp_async.planning.evaluation import evaluate
from jaxpp_async.planning.named import on_equal_cut
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.planning.search import NothingFits, search, usual_iterations
from jaxpp_async.schedules import resolve


def heavy_head(num_actors=4, num_microbatches=12, cap=1.0, head=4):
    """Four layers an actor and a head; the cap is relative to 1F1B's memory on the equal cut."""
    layers = [Layer(1, 1, 1, 1, 0.5)] * (4 * num_actors)
    layers += [Layer(head, head, head, head, head / 2)] if head else []
    return PipelineProblem(tuple(layers), num_actors, num_microbatches, cap * 4 * num_actors)


@pytest.mark.parametrize("seed", range(10))
def test_optimal_where_every_order_can_be_looked_at(seed):
    rng = random.Random(seed)
    num_layers = rng.choice((2, 2, 3))
    num_microbatches = rng.choice((2, 3)) if num_layers == 2 else 2
    drawn = drawn_problem(
        rng, num_layers=num_layers, num_actors=2, num_microbatches=num_microbatches, is_tight=seed % 2 == 1
    )
    problem = PipelineProblem(drawn.layers, 2, num_microbatches, drawn.caps, drawn.latency_s)
    best = least_step_of_all(problem, num_layers)
    if best == math.inf:
        with pytest.raises(NothingFits, match="no cut into stages fits"):
            search(problem, iterations=400)
    else:
        assert search(problem, iterations=400).best.step_s == pytest.approx(best)


@pytest.mark.parametrize("seed", range(6))
def test_found_lists_are_valid_fit_and_are_not_slower_than_any_named_schedule(seed):
    rng = random.Random(seed)
    drawn = drawn_problem(
        rng, num_layers=rng.randint(3, 8), num_actors=rng.randint(1, 4), num_microbatches=rng.randint(1, 6)
    )
    needed = sum(layer.kept_bytes + layer.static_bytes for layer in drawn.layers)
    problem = PipelineProblem(
        drawn.layers, drawn.num_actors, drawn.num_microbatches, 1.2 * needed, drawn.latency_s, math.inf, 0.1
    )
    result = search(problem, iterations=150, seed=seed)
    assignment = result.best.assignment
    resolve(
        [list(row) for row in assignment.rows],
        num_stages=assignment.num_stages,
        num_microbatches=problem.num_microbatches,
        num_actors=problem.num_actors,
    )
    found = evaluate(problem, assignment)
    assert found.fits
    assert found.step_s == pytest.approx(result.best.step_s)
    assert result.named is None or found.step_s <= result.named.step_s * (1 + 1e-9)
    for timed in on_equal_cut(problem):
        assert not timed.fits or found.step_s <= timed.step_s * (1 + 1e-9)


def test_the_same_arguments_give_the_same_result():
    first, second = (search(heavy_head(2, 6), iterations=100, seed=3) for _ in range(2))
    assert first == second


def test_an_uneven_model_gets_a_much_shorter_step_at_the_memory_of_1f1b():
    """The goal is 20 % less than the best named schedule on the equal cut, and 5 % less than on the best."""
    problem = heavy_head()
    result = search(problem, iterations=800)
    assert result.best.step_s <= 0.75 * on_equal_cut(problem)[0].step_s
    assert result.gain >= 0.05
    assert result.best.fits
    text = str(result)
    assert text.startswith("the searched order takes") and "on its best cut" in text


def test_equal_stages_have_nothing_to_win_and_it_says_so():
    problem = heavy_head(head=0, num_microbatches=8)
    result = search(problem, iterations=200)
    assert result.gain < 0.01
    assert str(result).startswith("a search has nothing to win over ZeroBubbleV(8)")
    assert result.best.step_s <= 1.01 * bound_of_cut(problem, result.best.assignment.cut)


def test_many_microbatches_are_judged_by_the_first_few_and_end_near_the_bound():
    problem = heavy_head(3, 40, cap=1.5)
    result = search(problem, iterations=300)
    assert result.best.step_s <= 1.05 * bound_of_cut(problem, result.best.assignment.cut)


def test_large_problems_get_fewer_iterations():
    assert usual_iterations(heavy_head()) == 6000
    assert usual_iterations(heavy_head(8, 64)) == 2517
    assert usual_iterations(heavy_head(64, 512)) == 300


def test_fewer_layers_than_actors():
    result = search(PipelineProblem((Layer(1, 1, 1),), 3, 2), iterations=20)
    assert result.named is None
    assert result.gain == 1
    assert result.best.step_s == 6
    assert "no named schedule fits" in str(result)


def test_a_cap_that_nothing_fits_says_what_takes_the_memory():
    layers = (Layer(1, 1, 1, 2, 1), Layer(1, 1, 1, 5, 1, static_bytes=30))
    with pytest.raises(
        NothingFits, match=r"layers 1 to 1 .* need 35 bytes .*, 30 of them static; .* is 20 b"
    ):
        search(PipelineProblem(layers, 2, 2, cap_bytes=20), iterations=20)


@pytest.mark.parametrize("num_stages", [2, 5, 7])
def test_a_search_keeps_the_number_of_stages(num_stages):
    problem = PipelineProblem((Layer(1, 1, 1),) * 8, 3, 4, num_stages=num_stages)
    assert search(problem, iterations=100).best.assignment.num_stages == num_stages


def test_a_search_tells_how_far_it_is():
    told: list[str] = []
    search(PipelineProblem((Layer(1, 1, 1),) * 8, 2, 4), iterations=100, on_progress=told.append)
    assert told[0] == "searching, 16 of 100" and told[-1] == "searching, the order of single tasks"


def test_a_search_goes_on_where_another_one_ended():
    first = search(heavy_head(2, 6, cap=2.0), iterations=100)
    again = search(heavy_head(2, 6, cap=1.5), iterations=0, named=(), points=first.points)
    assert first.points and again.best.assignment.cut in {point.cut for point in first.points}


def test_what_is_found_fits_where_an_input_gradient_leaves_more_than_the_forward():
    layers = (Layer(1, 1, 1, 1, 2),) * 8 + (Layer(4, 4, 4, 4, 8),)
    problem = PipelineProblem(layers, 2, 6, 16.0)
    found = search(problem, iterations=200).best
    assert found.fits and evaluate(problem, found.assignment).fits
