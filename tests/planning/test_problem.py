"""Problems: sums of layers, transfers between actors, and what is refused."""

from __future__ import annotations

import math

import pytest

from jaxpp_async.planning.problem import Assignment, Layer, PipelineProblem
from jaxpp_async.program.instructions import Task

LAYERS = (
    Layer(1, 0, 2, kept_bytes=10, weight_kept_bytes=4, sent_bytes=6, static_bytes=100),
    Layer(2, 3, 4, kept_bytes=20, weight_kept_bytes=5, sent_bytes=8, static_bytes=200),
    Layer(5, 6, 7, kept_bytes=30, weight_kept_bytes=6, sent_bytes=9, static_bytes=300),
)


def test_stages_sum_their_layers_and_are_dispatched():
    problem = PipelineProblem(LAYERS, 2, 4, latency_s=1, bytes_per_s=2, dispatch_s=0.5)
    stages = problem.stages((2,))
    assert len(stages) == 2
    assert stages.forward_s == (3.5, 5.5)
    assert stages.input_gradient_s == (3.5, 6.5)
    assert stages.weight_gradient_s == (6.5, 7.5)
    assert stages.backward_s(0) == 9.5  # dispatched once
    assert stages.kept_bytes == (30, 30)
    assert stages.weight_kept_bytes == (9, 6)
    assert stages.static_bytes == (300, 300)
    assert stages.transfer_s == (5,)  # a second, and 8 bytes at 2 bytes a second
    assert stages.hops((0, 1)) == [5]
    assert stages.hops((1, 1)) == [0]


def test_a_problem_knows_its_caps_and_its_perfect_balance():
    assert PipelineProblem(LAYERS, 2, 4).caps == (math.inf, math.inf)
    assert PipelineProblem(LAYERS, 2, 4, cap_bytes=7).caps == (7, 7)
    assert PipelineProblem(LAYERS, 2, 4, cap_bytes=(7, 8)).caps == (7, 8)
    assert PipelineProblem(LAYERS, 2, 4).balanced_s == 4 * 30 / 2


@pytest.mark.parametrize("cut", [(0,), (3,), (2, 1), (1, 1)])
def test_a_cut_that_leaves_a_stage_empty_is_refused(cut):
    with pytest.raises(ValueError, match="ascending boundaries from 1 to 2"):
        PipelineProblem(LAYERS, 2, 4).stages(cut)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ()}, "layers: expected at least one"),
        ({"num_actors": 0}, "num_actors: expected a positive int, got 0"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"latency_s": -1}, "latency_s: expected a number of at least 0, got -1"),
        ({"dispatch_s": math.nan}, "dispatch_s"),
        ({"bytes_per_s": 0}, "bytes_per_s: expected a positive number, got 0"),
        ({"cap_bytes": (1.0,)}, "cap_bytes: 1 numbers for 2 actors"),
        ({"cap_bytes": -1.0}, "cap_bytes: expected numbers of at least 0"),
    ],
)
def test_wrong_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PipelineProblem(**({"layers": LAYERS, "num_actors": 2, "num_microbatches": 4} | options))


def test_a_layer_of_negative_time_is_refused():
    with pytest.raises(ValueError, match="input_gradient_s: expected a number of at least 0, got -2"):
        Layer(1, -2, 1)


def test_an_assignment_says_which_actor_has_which_stage_and_which_marks_are_boundaries():
    rows = ((Task(0, "fwd", 1), Task(0, "bwd", 1)), (Task(0, "fwd", 0), Task(0, "bwd", 0)))
    assignment = Assignment((2,), rows)
    assert assignment.num_stages == 2
    assert assignment.actors == (1, 0)
    assert assignment.marks == (1,)


def test_the_static_bytes_of_an_actor_are_those_of_its_stages():
    stages = PipelineProblem(tuple(Layer(1, 1, 1, static_bytes=size) for size in (1, 2, 4)), 3, 4).stages(
        (1, 2)
    )
    assert stages.static_bytes_of_actors((0, 2, 0), 3) == [5, 0, 2]
