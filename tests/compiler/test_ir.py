"""Operations over integer values: who reads what, types, and operations with other operands."""

from __future__ import annotations

import jax
import pytest
from compiler_inputs import Body
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from planning import f32

from jaxpp_async.compiler.ir import Lit, Types, ValueType, renamed, stacked_type, used_ids
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
    assert (traced.out_names, len(traced.shown)) == (("result['y']",), 1)
    assert [traced.result_name(k) for k in (0, 1)] == ["result['y']", "a printed value"]
