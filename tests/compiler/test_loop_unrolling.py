"""A scheduled loop's tasks as nodes of a task graph, the recipes that they run, and what they accumulate."""

from __future__ import annotations

import pytest
from compiler_inputs import Body, scheduled, two_stages

import jaxpp_async as jpp
from jaxpp_async.compiler.ir import Types, ValueType
from jaxpp_async.compiler.loop_unrolling import TaskGraphBuilder, needs_index, unroll_loop
from jaxpp_async.markers.reductions import Stack, Sum
from jaxpp_async.program.instructions import Aval, Task, Value

F4, S8 = Aval((4,), "float32"), Aval((), "int8")


# ---------------------------------------------------------------- a graph that grows


def empty_graph() -> tuple[TaskGraphBuilder, int, int]:
    types = Types()
    ids = types.new(ValueType(F4)), types.new(ValueType(S8))
    return TaskGraphBuilder(types, num_actors=3), *ids


def test_values_are_labelled_by_their_name_or_by_the_task_that_makes_them():
    graph, x, y = empty_graph()
    numbers = [graph.add_named(x, "batch", "input")]
    numbers += graph.add_values((y,), (S8,), ("temp",), "fwd(stage 0, mb 1)", 1)
    numbers += graph.add_values((y, x), (S8, F4), ("temp", "accumulator"), "bwd(stage 0, mb 1)", 1)
    assert numbers == [0, 1, 2, 3]
    assert list(graph.values()) == [
        Value(F4, "batch", "input"),
        Value(S8, "%1@fwd(stage 0, mb 1)", "temp"),
        Value(S8, "%1@bwd(stage 0, mb 1)", "temp"),
        Value(F4, "batch", "accumulator"),
    ]
    assert graph.value_ids == [x, y, y, x]


def test_a_value_is_read_at_home_or_from_the_lowest_actor_that_has_it():
    graph, x, _ = empty_graph()
    graph.value_by_actor.update({(x, 2): 7, (x, 1): 5})
    assert [graph.value_on(x, actor) for actor in (0, 1, 2)] == [5, 5, 7]


# ---------------------------------------------------------------- a loop's tasks


def unrolled(body: Body, outputs: str, reductions, schedule) -> tuple[TaskGraphBuilder, dict[int, str]]:
    loop = body.loop(outputs, reductions=reductions)
    cut = scheduled(loop, body.types, schedule, 2)
    graph = TaskGraphBuilder(body.types, num_actors=2)
    for v in loop.inputs:
        number = graph.add_named(v, f"arg{v}", "input")
        graph.value_by_actor.update({(v, actor): number for actor in (0, 1)})
    for i in range(loop.num_microbatches):
        graph.index_ids.append(body.types.new(ValueType(Aval((), "int32"))))
        graph.value_by_actor[graph.index_ids[-1], 0] = graph.value_by_actor[graph.index_ids[-1], 1] = 100 + i
    finals = [[body.types.new(body.types[p.value]) for p in parts] for parts in cut.staged.outputs]
    unroll_loop(graph, cut, finals)
    names = {v: f"final{k}.{j}" for k, ids in enumerate(finals) for j, v in enumerate(ids)}
    return graph, names


def test_a_loop_becomes_a_node_a_task_in_the_order_of_its_schedule():
    body = two_stages()
    body.add("g = add_any a b '")
    graph, finals = unrolled(body, "g loss", [Sum(), Stack()], jpp.GPipe(2))
    names = {0: "w", 1: "x", 100: "i0", 101: "i1"}
    lines = []
    for n in graph.nodes:
        ins, outs = ([names.get(v, f"v{v}") for v in refs] for refs in (n.inputs, n.outputs))
        lines.append(f"{n.actor} {n.label}: {' '.join(ins)} -> {' '.join(outs)} {n.donatable}")
    assert lines == [
        "0 fwd(stage 0, mb 0): x w i0 -> v2 ()",
        "0 fwd(stage 0, mb 1): x w i1 -> v3 ()",
        "1 start(fwd, stage 1):  -> v4 ()",
        "1 fwd(stage 1, mb 0): v2 w i0 v4 -> v5 v6 (3,)",
        "1 fwd(stage 1, mb 1): v3 w i1 v6 -> v7 v8 (3,)",
        "1 start(bwd, stage 1):  -> v9 ()",
        "1 bwd(stage 1, mb 0): v2 v5 w v9 -> v10 v11 (3,)",
        "0 start(bwd, stage 0):  -> v12 ()",
        "0 bwd(stage 0, mb 0): x v10 i0 v12 -> v13 (3,)",
        "1 bwd(stage 1, mb 1): v3 v7 w v11 -> v14 v15 (3,)",
        "0 bwd(stage 0, mb 1): x v14 i1 v13 -> v16 (3,)",
    ]
    tasks = [n.task for n in graph.nodes if n.task is not None]
    assert tasks[2:4] == [Task(0, "fwd", 1), Task(1, "fwd", 1)]
    # Last accumulators are the loop's results where they were added up; all microbatches run one executable.
    held = {finals[v]: (actor, number) for (v, actor), number in graph.value_by_actor.items() if v in finals}
    assert held == {"final0.0": (1, 15), "final1.0": (1, 8), "final0.1": (0, 16)}
    assert [n.executable for n in graph.nodes] == [0, 0, 1, 2, 2, 3, 4, 5, 6, 4, 6]
    recipes = ["fwd0", "start_fwd1", "fwd1", "start_bwd1", "bwd1", "start_bwd0", "bwd0"]
    assert [r.name for r in graph.recipes] == recipes
    kinds = [value.kind for value in graph.values()]
    assert [kinds[v] for v in (4, 6, 8, 9, 11, 2, 10)] == ["result"] * 3 + ["accumulator"] * 2 + ["temp"] * 2


def test_a_stages_forward_and_backward_that_run_as_one_start_what_both_add_to():
    body = two_stages()
    graph, _ = unrolled(body, "a loss", [Sum(), Stack()], jpp.Std1F1B(2))
    labels = [n.label for n in graph.nodes if n.actor == 1]
    fused = [f"fwd_bwd(stage 1, mb {i})" for i in (0, 1)]
    assert labels == ["start(fwd, stage 1)", "start(bwd, stage 1)", *fused]
    assert [len(n.donatable) for n in graph.nodes if n.actor == 1] == [0, 0, 2, 2]


def test_recipes_cut_the_microbatch_and_accumulate_under_ids_of_their_own():
    body = two_stages()
    graph, _ = unrolled(body, "b", [Sum()], jpp.GPipe(2))
    recipe = graph.recipes[-1]
    (whole, part), (add,) = recipe.slices[0], recipe.accumulates
    assert recipe.name == "bwd0" and part == body.ref("x") and recipe.index == body.ref("i")
    assert whole in recipe.inputs and part not in recipe.inputs
    assert (add.value, recipe.outputs) == (body.ref("b"), (add.result,))
    assert recipe.inputs[-1] == add.accumulator != add.result
    finals = {graph.same_sharding[add.accumulator], graph.same_sharding[add.result]}
    assert len(finals) == 1 and finals.isdisjoint((add.accumulator, add.result))


@pytest.mark.parametrize(
    ("lines", "outputs", "reduction", "expected"),
    [
        pytest.param(["r = mul w w"], "r", Sum(), False, id="weights alone"),
        pytest.param(["r = mul w x"], "r", Sum(), True, id="the microbatch"),
        pytest.param(["r = mul w i"], "r", Sum(), True, id="the index"),
        pytest.param(["r = mul w w"], "r", Stack(), True, id="a row of a stack"),
    ],
)
def test_a_task_takes_the_index_where_it_cuts_writes_or_reads_by_it(lines, outputs, reduction, expected):
    body = Body(w=(2,), x=(2,), i=Aval((), "int32"))
    body.add(*lines)
    cut = scheduled(body.loop(outputs, reductions=[reduction]), body.types, jpp.GPipe(1), 1)
    (variant,) = cut.variants.values()
    assert needs_index(cut.staged, variant.task) is expected
