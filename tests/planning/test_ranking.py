"""Named schedules of several problems, ranked by memory, a closed form and a replay."""

from __future__ import annotations

import random

import pytest
from small_pipelines import drawn_problem

from jaxpp_async.planning.evaluation import evaluate
from jaxpp_async.planning.named import on_best_cut
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.planning.ranking import rank_named

HEAVY = (*[Layer(1, 1, 1, 1, 0.5)] * 8, Layer(3, 3, 3, 3, 1.5))


def test_every_figure_is_that_of_a_replay_and_the_fastest_is_first():
    problems = [PipelineProblem(HEAVY, 2, 6, dispatch_s=0.01 * k) for k in range(2)]
    ranked = rank_named(problems)
    assert {number for number, _ in ranked} == {0, 1}
    assert [timed.step_s for _, timed in ranked] == sorted(timed.step_s for _, timed in ranked)
    for number, timed in ranked:
        found = evaluate(problems[number], timed.assignment)
        assert (found.step_s, found.fits) == (timed.step_s, True)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_is_hardly_ever_slower_than_if_all_cuts_were_replayed(seed):
    problem = drawn_problem(
        random.Random(seed), num_layers=9, num_actors=3, num_microbatches=6, is_tight=seed % 2 > 0
    )
    best = on_best_cut(problem)
    ranked = rank_named([problem])
    assert bool(ranked) == bool(best)
    if best:
        assert ranked[0][1].step_s <= 1.01 * best[0].step_s


def test_only_the_best_by_the_closed_form_are_replayed():
    problem = PipelineProblem(HEAVY, 2, 6)
    every = rank_named([problem], rounds=0)
    few = rank_named([problem, PipelineProblem(HEAVY, 2, 6, dispatch_s=0.01)], rounds=0, num_replayed=5)
    assert len(few) == 5 and few[0][1] == every[0][1]


def test_nothing_fits_a_cap_of_nothing():
    assert rank_named([PipelineProblem(HEAVY, 2, 6, cap_bytes=1)]) == []
