"""Shardings of values between executables, inferred from a few that the user gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from compiler_inputs import placed_step
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from planning import f32

import jaxpp_async as jpp
from jaxpp_async.compiler.export import Target, lowering_context
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.compiler.sharding_propagation import propagate, sharded
from jaxpp_async.errors import ShardingError
from jaxpp_async.program.instructions import Aval


def target(kind=AxisType.Auto) -> Target:
    return Target(AbstractMesh((2, 2), ("x", "y"), axis_types=(kind, kind)), "cpu", {})


def specs_of(fn, *args, in_specs, out_specs=None, continues=None, to=None):
    """Specs of the arguments and results of a step."""
    to = to or target()
    with lowering_context(to):
        traced, placed = placed_step(fn, *args, actors=1)
    outs = out_specs or [None] * len(traced.out_names)
    found = propagate(traced, placed, to, in_specs, outs, continues or {})
    results = [found[v] for v in placed.output_ids]
    return [found[v] for v in traced.flat.inputs], results, found, placed


def test_actors_of_one_device_have_no_shardings():
    traced, placed = placed_step(lambda x: x * 2, f32(4), actors=1)
    assert propagate(traced, placed, Target(None, "cpu", {}), [None], [None], {}) == {}


@pytest.mark.parametrize(
    ("fn", "in_specs", "arguments", "results"),
    [
        pytest.param(lambda a, b: a + b, [("x",), None], [("x",), ("x",)], [("x",)], id="to an argument"),
        pytest.param(
            lambda a, b: a @ b, [("x",), (None, "y")], [("x",), (None, "y")], [("x", "y")], id="a product"
        ),
        pytest.param(
            lambda a, b: (a.T, b), [("x", "y"), ()], [("x", "y"), ()], [("y", "x"), ()], id="a transpose"
        ),
    ],
)
def test_what_the_user_leaves_open_follows_from_what_is_given(fn, in_specs, arguments, results):
    def plain(specs):
        found = [list(spec) for spec in specs]
        for spec in found:
            while spec and spec[-1] is None:
                spec.pop()
        return [tuple(spec) for spec in found]

    found = specs_of(fn, f32(4, 4), f32(4, 4), in_specs=in_specs)
    assert (plain(found[0]), plain(found[1])) == (arguments, results)


def test_a_result_that_continues_an_argument_keeps_its_sharding_and_the_users_wish_goes_first():
    def step(a, b):
        return a + b, a * 2

    _, results, *_ = specs_of(step, f32(4), f32(4), in_specs=[("x",), ("y",)], continues={0: 1, 1: 1})
    assert results == [("y",), ("y",)]
    _, results, *_ = specs_of(
        step, f32(4), f32(4), in_specs=[("x",), ("y",)], continues={0: 1, 1: 1}, out_specs=[("x",), None]
    )
    assert results == [("x",), ("y",)]


def test_accumulators_have_the_sharding_of_their_final_values_and_a_stack_splits_no_microbatches():
    def step(w, batch):
        def of_one(x):
            value, grad = jax.value_and_grad(lambda w: jnp.sum(x @ w))(w)
            return grad, x @ w, value

        reduce = (jpp.Sum(), jpp.Stack(), jpp.Sum())
        return jpp.accumulate_grads(of_one, jpp.GPipe(1), reduce=reduce)(batch)

    _, results, found, placed = specs_of(step, f32(4, 8), f32(3, 2, 4), in_specs=[(None, "x"), (None, "y")])
    assert placed.same_sharding
    assert all(found[inside] == found[final] for inside, final in placed.same_sharding.items())
    assert tuple(results[1]) == (None, "y", "x")
    assert tuple(results[2]) == ()


def test_on_explicit_axes_shardings_stand_in_the_types():
    to = target(AxisType.Explicit)
    leaf = jax.ShapeDtypeStruct((4, 4), "float32", sharding=NamedSharding(to.mesh, PartitionSpec("x", None)))
    arguments, results, *_ = specs_of(lambda a: a.T, leaf, in_specs=[("x",)], to=to)
    assert (tuple(arguments[0]), tuple(results[0])) == (("x", None), (None, "x"))


def test_a_result_that_is_not_added_up_is_refused():
    to = target(AxisType.Explicit)

    def leaf(*spec):
        return jax.ShapeDtypeStruct((4, 4), "float32", sharding=NamedSharding(to.mesh, PartitionSpec(*spec)))

    def step(a, b):
        return {"h": jax.numpy.einsum("ij,jk->ik", a, b, out_sharding=PartitionSpec(unreduced={"x"}))}

    with pytest.raises(ShardingError) as caught:
        specs_of(step, leaf(None, "x"), leaf("x", None), in_specs=[None, None], to=to)
    assert str(caught.value) == (
        "result['h'] is unreduced over x: each device has a part of a sum; add the parts up with "
        "jax.sharding.reshard before the step returns it"
    )


@pytest.mark.parametrize(
    ("spec", "expected"), [((), ()), ((None, None), ()), (("x", None), ("x",)), ((None, "x"), (None, "x"))]
)
def test_equal_shardings_are_equal_avals(spec, expected):
    aval = Aval((4, 4), "float32")
    assert sharded(aval, ValueType(aval), spec) == Aval((4, 4), "float32", expected)


def test_what_is_unreduced_is_part_of_an_aval():
    mesh = target(AxisType.Explicit).mesh
    value_type = ValueType(
        Aval((4,), "float32"), sharding=NamedSharding(mesh, PartitionSpec(unreduced={"y"}))
    )
    assert sharded(value_type.aval, value_type, ()) == Aval((4,), "float32", (), ("y",))
