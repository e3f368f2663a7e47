"""Recipes and operations as functions of arrays, and JAX's types as the compiler knows them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler_inputs import Body
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxpp_async.compiler.evaluate import (
    checked_function,
    key_data,
    read_operand,
    recipe_function,
    run_ops,
    unwrap_result,
    value_type,
    wrap_input,
)
from jaxpp_async.compiler.ir import Accumulate, AccumulatorStart, Lit, Op, Recipe, ValueType
from jaxpp_async.jax_bridge import jax_config, private_api
from jaxpp_async.markers.reductions import Max, Stack, Sum
from jaxpp_async.program.instructions import Aval

INDEX = Aval((), "int32")
THREEFRY = "threefry2x32"


def test_a_recipe_runs_its_operations_in_order_on_arguments_and_constants():
    body = Body(x=(2,), y=(2,), c=())
    body.add("a = mul x c", "b = add a y")
    recipe = Recipe(
        "r",
        body.refs("x y"),
        (*body.refs("b a x"), Lit(7)),
        tuple(body.ops),
        literals={body.ref("c"): Lit(3.0)},
    )
    x, y = jnp.arange(2.0), jnp.ones(2)
    found = recipe_function(recipe, body.types)(x, y)
    np.testing.assert_array_equal(found[0], x * 3 + y)
    np.testing.assert_array_equal(found[1], x * 3)
    assert found[2] is x and int(found[3]) == 7 and isinstance(found[3], jax.Array)


def test_a_recipe_cuts_the_microbatch_by_its_index_first_and_accumulates_last():
    body = Body(whole=(3, 2), w=(2,), i=INDEX, acc=(2,), rows=(3, 2), x=(2,), new=(2,), new_rows=(3, 2))
    body.add("y = mul x w")
    value = body.ref("y")
    recipe = Recipe(
        "fwd0",
        body.refs("whole w i acc rows"),
        body.refs("new new_rows"),
        tuple(body.ops),
        slices=((body.ref("whole"), body.ref("x")),),
        index=body.ref("i"),
        accumulates=(
            Accumulate(body.ref("acc"), value, Sum(), body.ref("new")),
            Accumulate(body.ref("rows"), value, Stack(), body.ref("new_rows")),
        ),
    )
    whole, w = jnp.arange(6.0).reshape(3, 2), jnp.asarray([10.0, 100.0])
    new, rows = recipe_function(recipe, body.types)(whole, w, jnp.int32(1), jnp.ones(2), jnp.zeros((3, 2)))
    np.testing.assert_array_equal(new, [21, 301])
    np.testing.assert_array_equal(rows, [[0, 0], [20, 300], [0, 0]])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [(Sum(), np.zeros(2)), (Max(), np.full(2, -np.inf)), (Stack(), np.zeros((3, 2)))],
)
def test_a_recipe_of_starts_makes_accumulators(reduction, expected):
    body = Body(acc=(2,))
    (acc,) = body.inputs
    recipe = Recipe(
        "start_fwd0", (), (acc,), starts=(AccumulatorStart(Aval((2,), "float32"), reduction, 3, acc),)
    )
    (found,) = recipe_function(recipe, body.types)()
    np.testing.assert_array_equal(found, expected)


def test_keys_are_their_data_at_the_boundary_and_keys_inside():
    keyed = ValueType(Aval((2,), "uint32"), key_impl=THREEFRY)
    body = Body(k=keyed)
    seen = []
    op = Op(
        "random_split", body.refs("k"), (body.value("s", keyed),), lambda xs: seen.append(xs[0]) or xs, "l"
    )
    key = jax.random.key(3)
    (data,) = recipe_function(Recipe("r", body.refs("k"), body.refs("s"), (op,)), body.types)(
        jax.random.key_data(key)
    )
    assert seen[0] == key
    np.testing.assert_array_equal(data, jax.random.key_data(key))


def test_an_accumulator_of_keys_is_stacked_as_their_data():
    key, keys = ValueType(Aval((2,), "uint32"), THREEFRY), ValueType(Aval((3, 2), "uint32"), THREEFRY)
    body = Body(k=key, i=INDEX, old=keys, new=keys)
    add = Accumulate(body.ref("old"), body.ref("k"), Stack(), body.ref("new"))
    recipe = Recipe("r", body.refs("k i old"), body.refs("new"), index=body.ref("i"), accumulates=(add,))
    data = jnp.asarray([5, 6], "uint32")
    (found,) = recipe_function(recipe, body.types)(data, jnp.int32(2), jnp.zeros((3, 2), "uint32"))
    np.testing.assert_array_equal(found, [[0, 0], [0, 0], [5, 6]])


def test_results_that_nobody_wants_are_forgotten():
    env = {0: 2}
    run_ops([Op("f", (0, Lit(3)), (-1, 5), lambda xs: [xs[0], xs[0] * xs[1]], "l")], env)
    assert env == {0: 2, 5: 6}
    assert read_operand(env, 5) == 6 and read_operand(env, Lit("c")) == "c"


def test_wrapping_and_leaving_are_inverse():
    key = jax.random.key(1)
    keyed = value_type(jax.typeof(key))
    assert wrap_input(keyed, key_data(key)) == key
    np.testing.assert_array_equal(unwrap_result(key), jax.random.key_data(key))
    assert key_data(x := jnp.ones(2)) is x
    assert unwrap_result(2.5).dtype == jnp.float32


@pytest.fixture
def forbidding_nans():
    with jax.debug_nans(True):
        yield


def test_a_checked_recipe_says_at_which_line_each_value_was_made(forbidding_nans):
    body = Body(whole=(2, 2), i=INDEX, x=(2,), acc=(2,), new=(2,))
    log = Op("log", body.refs("x"), (body.value("y", (2,)),), lambda xs: [jnp.log(xs[0])], "model.py:3")
    recipe = Recipe(
        "fwd0",
        body.refs("whole i acc"),
        body.refs("new"),
        (log,),
        slices=((body.ref("whole"), body.ref("x")),),
        index=body.ref("i"),
        accumulates=(Accumulate(body.ref("acc"), body.ref("y"), Sum(), body.ref("new")),),
    )
    with jax.debug_nans(False):  # else plain JAX, which runs it here, raises first
        whole = jnp.asarray([[1.0, 2.0], [jnp.nan, 1.0]])
        args = (whole, jnp.int32(0), jnp.zeros(2))
    fn = checked_function(recipe, body.types)
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    (places,) = shape[1]
    assert places.split("\n") == ["", "", "", "model.py:3: log", "accumulate_grads: Sum()"]
    with jax.debug_nans(False):
        flat = private_api.closed_call(closed, (whole, jnp.int32(0), jnp.zeros(2)))
        np.testing.assert_array_equal(flat[-1], [0, 0, 0, 0, 0])
        flat = private_api.closed_call(closed, (whole, jnp.int32(1), jnp.zeros(2)))
        np.testing.assert_array_equal(flat[-1], [1, 0, 0, 1, 1])


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("aval", "expected"),
    [
        (jax.typeof(np.zeros((2, 3), "int8")), ValueType(Aval((2, 3), "int8"))),
        (jax.typeof(jnp.zeros((), "bfloat16")), ValueType(Aval((), "bfloat16"))),
        (jax.typeof(1.5), ValueType(Aval((), "float32"), weak=True)),
        (jax.typeof(jax.random.split(jax.random.key(0), 3)), ValueType(Aval((3, 2), "uint32"), THREEFRY)),
        (jax.typeof(jax.random.key(0, impl="rbg")), ValueType(Aval((4,), "uint32"), "rbg")),
    ],
)
def test_a_type_of_jax_is_known_by_shape_dtype_key_and_weakness(aval, expected):
    assert value_type(aval) == expected


@pytest.mark.parametrize(("kind", "kept"), [(AxisType.Explicit, True), (AxisType.Auto, False)])
def test_a_type_has_a_sharding_on_explicit_axes_alone(kind, kept):
    mesh = AbstractMesh((2,), ("x",), axis_types=(kind,))
    with jax_config.mesh_context(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("x", None))
        closed = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct((4, 3), "float32", sharding=sharding))
        found = value_type(closed.in_avals[0])
    assert found.aval == Aval((4, 3), "float32")
    assert (found.sharding is not None and found.sharding.spec) == (kept and PartitionSpec("x", None))
