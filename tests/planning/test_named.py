"""Named schedules on equal cuts and on cuts that suit them."""

from __future__ import annotations

import pytest

from jaxpp_async.planning.evaluation import evaluate
from jaxpp_async.planning.named import moved, named_orders, named_schedules, on_best_cut, on_equal_cut
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.schedules import ControllableMemory

HEAVY = (*[Layer(1, 1, 1, 1, 0.5)] * 8, Layer(3, 3, 3, 3, 1.5))


def test_a_better_cut_is_never_slower_than_the_equal_one_if_that_fits():
    problem = PipelineProblem(HEAVY, 2, 6, cap_bytes=12)
    equal = [timed for timed in on_equal_cut(problem) if timed.fits]
    best = on_best_cut(problem)
    assert [timed.step_s for timed in best] == sorted(timed.step_s for timed in best)
    assert best[0].step_s <= equal[0].step_s
    for timed in [*best, *equal]:
        found = evaluate(problem, timed.assignment)
        assert (found.step_s, found.fits) == (timed.step_s, True)
        assert found.peak_bytes == pytest.approx(timed.peak_bytes)


def test_a_heavy_head_gets_fewer_layers():
    best = {timed.assignment.name: timed for timed in on_best_cut(PipelineProblem(HEAVY, 2, 6))}
    assert best["Std1F1B(2)"].assignment.cut[0] > 4


def test_nothing_fits_a_cap_of_nothing():
    assert on_best_cut(PipelineProblem(HEAVY, 2, 6, cap_bytes=1)) == []


def test_only_schedules_with_enough_layers_are_tried():
    names = {order.name for order in named_orders(PipelineProblem(HEAVY[:3], 2, 4))}
    assert "Std1F1B(2)" in names
    assert not any("(4)" in name for name in names)
    assert list(named_orders(PipelineProblem(HEAVY[:1], 2, 4))) == []


def test_schedules_for_a_memory_cap_are_among_them():
    names = {order.name for order in named_orders(PipelineProblem(HEAVY, 4, 4))}
    assert {"VHalf(8)", "VMin(8)"} <= names
    activations = [s.activations for s in named_schedules(99, 8) if isinstance(s, ControllableMemory)]
    assert activations == [6, 7]


def test_a_boundary_does_not_pass_another():
    assert moved((2, 3), 0, -1, 5) == (1, 3)
    assert moved((2, 3), 0, 1, 5) is None
    assert moved((2, 3), 1, 1, 5) == (2, 4)
    assert moved((2, 4), 1, 1, 5) is None


def test_named_schedules_of_so_many_stages():
    def names(num_stages):
        return sorted({type(s).__name__ for s in named_schedules(40, 4, num_stages)})

    assert names(4) == ["Eager1F1B", "GPipe", "Std1F1B", "ZeroBubbleH1", "ZeroBubbleH2"] == names(3)
    assert "VHalf" in names(8) and "GPipe" not in names(8)
    assert names(24) == ["Interleaved1F1B", "LoopedBFS"] and names(10) == []
    assert all(s.num_stages == 24 for s in named_schedules(40, 4, 24))
