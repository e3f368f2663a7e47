"""Operations over integer values: who reads what, types, other operands, and the step outside its loops."""

from __future__ import annotations

import jax
import pytest
from compiler_inputs import Body
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from planning import f32

from jaxpp_async.compiler.ir import (
    Lit,
    OuterStep,
    Types,
    ValueType,
    renamed,
    replaced,
    source_actor,
    stacked_type,
    used_ids,
    without_dead,
)
from jaxpp_async.compiler.trace import trace
from jaxpp_async.program.instructions import Aval


@pytest.mark.parametrize(
    ("line", "reads"),
    [("y = f a b", "a b"), ("y = f a #1.0 a", "a a"), ("y[] = f #1.0", ""), ("y[] = f", "")],
)
def test_an_operation_reads_its_operands_that_are_no_constants(line, reads):
    body = Body(a=(2,), b=(2,))
    assert body.names(body.add(line).reads) == reads


def test_ids_count_from_zero_and_sizes_are_found_when_asked_for():
    types = Types()
    ids = [types.new(ValueType(Aval((2, 3), d))) for d in ("float32", "bfloat16", "no such type")]
    assert ids == [0, 1, 2]
    assert [types.sizes[0], types.sizes[1]] == [24, 12]
    with pytest.raises(ValueError, match="unknown dtype 'no such type'"):
        types.sizes[2]
    assert [v for v, _ in types.items()] == ids


def test_a_stack_has_a_leading_axis_that_no_mesh_axis_splits_and_is_never_weak():
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    known = ValueType(
        Aval((4,), "uint32"), "rbg", weak=True, sharding=NamedSharding(mesh, PartitionSpec("x"))
    )
    found = stacked_type(known, 3)
    assert (found.aval, found.key_impl, found.weak) == (Aval((3, 4), "uint32"), "rbg", False)
    assert found.sharding.spec == PartitionSpec(None, "x")
    assert stacked_type(ValueType(Aval((), "int8")), 2) == ValueType(Aval((2,), "int8"))


def test_used_ids_are_those_read_or_returned():
    body = Body(a=(2,), b=(2,), c=(2,))
    body.add("x = mul a #2.0", "y = neg x")
    assert used_ids(body.ops, (*body.refs("c"), Lit(1))) == set(body.refs("a x c"))


def test_a_loop_reads_its_operands_and_knows_its_body_inputs():
    body = Body(u=(2,), v=(2,), x=(2,), y=(2,), i=())
    loop = body.loop("x", batch=2)
    assert loop.reads == loop.inputs == loop.invariants + loop.batch
    assert tuple(map(body.names, (loop.body_inputs()[0], loop.body_inputs()[1]))) == ("u v", "x y")
    assert loop.body_inputs()[2] == body.ref("i")


# ---------------------------------------------------------------- other operands


def test_an_operation_without_renamed_operands_is_itself():
    body = Body(a=(2,), b=(2,))
    op = body.add("y = neg a")
    assert renamed(op, {body.ref("b"): 9}.keys(), lambda r: r) is op


def test_renaming_reaches_inside_and_leaves_results():
    body = Body(a=(2,), b=(2,))
    inner = body.inside()
    inside = (inner.add("p = neg a"), inner.add("q = mul p a"), inner.add("r = neg p"))
    op = body.add("y z = checkpoint a #1.0", expand=lambda: (inside, inner.refs("q a")))
    names = {body.ref("a"): body.ref("b")}
    found = renamed(op, names.keys(), lambda r: names.get(r, r) if isinstance(r, int) else r)
    assert body.show([found]) == ["y z = checkpoint b #1.0"]
    ops, results = found.expand()
    assert body.show(ops) == ["p = neg b", "q = mul p b", "r = neg p"]
    assert ops[2] is inside[2] and body.names(results) == "q b"
    assert body.names(found.reads) == "b"


# ---------------------------------------------------------------- a traced step


def test_results_have_names_and_what_prints_show_are_hidden_results_behind_them():
    def step(x):
        jax.debug.print("{}", x * 3)
        return {"y": x * 2}

    traced = trace(step, [f32(2)])
    assert (traced.out_names, len(traced.hidden_results)) == (("result['y']",), 1)
    assert [traced.result_name(k) for k in (0, 1)] == ["result['y']", "a printed value"]


# ---------------------------------------------------------------- a step outside its loops


@pytest.mark.parametrize(
    ("holders", "wanted", "expected"), [({2, 1, 3}, 3, 3), ({2, 1, 3}, 0, 1), ([2], 2, 2), ([5, 4], 9, 4)]
)
def test_a_value_comes_from_the_actor_itself_or_else_from_the_lowest(holders, wanted, expected):
    assert source_actor(holders, wanted) == expected


def outer_step() -> tuple[Body, OuterStep]:
    """An operation for the loop, one for nobody, the loop, and one behind it."""
    body = Body(w=(2,))
    body.add("cast = neg w", "idle = neg cast", "idle2 = neg idle")
    body.ops.append(Body(body.types, v=(2,), x=(2,), i=()).loop("v"))
    body.value("g", (2,))
    body.add("new = add w g", "unused[] _ = tanh g")
    needs = {3: {body.ref("cast"): frozenset((0,))}}
    makes = {3: {body.ref("g"): 1}}
    return body, OuterStep(body.inputs, tuple(body.ops), body.refs("new"), needs, makes, {0: 0}, 2)


def item_names(body: Body, found: OuterStep) -> list[str]:
    return [body.name(i.outputs[0]) if hasattr(i, "name") else "loop" for i in found.items]


def test_replaced_operations_stand_in_their_place_and_the_loop_is_known_by_its_new_position():
    body, old = outer_step()
    more = body.inside()
    more.add("p = neg w", "q = neg p", "cast2 = neg q")
    found = replaced(old, {0: more.ops}, {1, 2})
    assert item_names(body, found) == ["p", "q", "cast2", "loop", "new", "unused"]
    assert (found.loop_needs, found.loop_makes) == (old.loop_needs, old.loop_makes)
    found = replaced(old, {}, [1])
    assert found.loop_needs == {2: old.loop_needs[3]} and found.loop_makes == {2: old.loop_makes[3]}
    assert (found.outputs, found.continues, found.inputs) == (old.outputs, old.continues, old.inputs)


def test_what_no_result_and_no_loop_needs_is_dropped():
    body, old = outer_step()
    found = without_dead(old)
    assert item_names(body, found) == ["cast", "loop", "new"]
    assert list(found.loop_needs) == [1]
    assert without_dead(found) is found
