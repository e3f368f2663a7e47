"""The task graph of a whole step: nodes outside the loops, arguments, results, and what may be donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from compiler_inputs import placed_step
from planning import f32

import jaxpp_async as jpp
from jaxpp_async.compiler.describe import format_graph
from jaxpp_async.compiler.verify import verify_graph
from jaxpp_async.markers.reductions import Mean
from jaxpp_async.program.instructions import Aval


def test_a_step_without_loops_is_one_node_on_the_lowest_actor():
    def step(x, y):
        return jnp.sin(x) * 2, y

    _, placed = placed_step(step, f32(2), f32(2))
    assert format_graph(placed).splitlines() == [
        "in  v0 arg0 on [0]",
        "in  v1 arg1 on []",
        "actor 0: outer(0, actor 0) exe 0 (v0) -> (v2)",
        "out 0 v2 on [0]",
        "exe 0 outer0_actor0 (%0) -> (%3) ops 2",
    ]
    assert placed.placement.handed_back == {1: 1}


def train():
    def step(ws, batch):
        def loss(ws, x):
            return jnp.sum(jpp.pipeline_yield(x @ ws[0]) @ ws[1])

        def of_one(x):
            value, grads = jax.value_and_grad(loss)(ws, x)
            return grads, value

        grads, losses = jpp.accumulate_grads(of_one, jpp.GPipe(2))(batch)
        return [w - 0.5 * g for w, g in zip(ws, grads, strict=True)], losses

    return placed_step(step, [f32(3, 3)] * 2, f32(2, 4, 3), donated=True)


def test_an_update_runs_behind_the_loop_where_its_gradient_is_and_takes_its_weights_place():
    _, placed = train()
    verify_graph(placed.graph)
    nodes = {n.label: n for n in placed.graph.nodes}
    labels = {i.value: placed.graph.values[i.value].label for i in placed.graph.inputs}
    for actor in (0, 1):
        node = nodes[f"outer(1, actor {actor})"]
        (donated,) = [labels.get(node.inputs[p]) for p in node.donatable if node.inputs[p] in labels]
        assert donated == f"arg0[{actor}]"
    assert placed.outer_levels == {"outer(1, actor 0)": 1, "outer(1, actor 1)": 1}
    assert [(o.result, o.actors) for o in placed.graph.outputs] == [(0, (0,)), (1, (1,)), (2, (1,))]


def test_microbatch_indices_are_hidden_arguments_behind_the_others():
    traced, placed = train()
    hidden = placed.graph.inputs[len(traced.flat.inputs) :]
    assert [placed.graph.values[i.value].label for i in hidden] == [
        "microbatch index 0",
        "microbatch index 1",
    ]
    assert [(i.arg, i.actors, i.donated) for i in hidden] == [(3, (0, 1), False), (4, (0, 1), False)]
    assert placed.num_indices == 2


def test_a_reduction_with_an_end_is_ended_behind_the_loop():
    def step(w, batch):
        return jpp.accumulate_grads(lambda x: jnp.sum(x * w), jpp.GPipe(1), reduce=Mean())(batch)

    traced, placed = placed_step(step, f32(3), f32(4, 3), actors=1)
    (op,) = [op for op in placed.placement.items if getattr(op, "name", "") == "reduction_end"]
    assert placed.parts == {0: [[op.inputs[0]]]} and op.outputs == traced.flat.outputs
    assert [float(x) for x in op.run([jnp.float32(10)])] == [2.5]


def test_a_constant_result_is_made_by_an_operation():
    _, placed = placed_step(lambda x: (x + 1, 3.0), f32(2), actors=1)
    assert placed.graph.values[placed.graph.outputs[1].value].aval == Aval((), "float32")
    assert [op.name for op in placed.recipes[0].ops] == ["add", "constant"]


def test_an_argument_that_is_returned_twice_is_a_result_twice_and_not_handed_back():
    _, placed = placed_step(lambda x: (x, x), f32(2), actors=1)
    assert placed.placement.handed_back == {}
    assert [(o.value, o.result) for o in placed.graph.outputs] == [(0, 0), (0, 1)]


@pytest.mark.parametrize("homes", [{0: frozenset((1,))}, {0: frozenset((0, 1))}])
def test_a_result_is_where_the_caller_wants_it(homes):
    _, placed = placed_step(lambda x: x * 2, f32(2), result_homes=homes)
    assert {a for o in placed.graph.outputs for a in o.actors} == homes[0]
    assert placed.placement.caller_placed_results == frozenset((0,))


@pytest.mark.parametrize(("donated", "expected"), [(True, ["arg0"]), (False, [])])
def test_only_arguments_that_the_caller_gives_away_are_donated(donated, expected):
    _, placed = placed_step(lambda x, y: x * y[0], f32(2), f32(3), actors=1, donated=donated)
    (node,) = placed.graph.nodes
    assert [placed.graph.values[node.inputs[p]].label for p in node.donatable] == expected


def test_a_captured_array_is_a_kept_argument_behind_the_leaves():
    table = jnp.arange(1000.0)
    _, placed = placed_step(lambda x: x + table, f32(1000), actors=1)
    assert placed.graph.nodes[0].donatable == ()
    captured = placed.graph.inputs[1]
    assert (placed.graph.values[captured.value].label, captured.donated) == ("captured[0]", False)
