"""The branches of a `cond` as functions of arrays: the one at a position is run or selected."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler_inputs import Body

from jaxpp_async.compiler.evaluate import branches
from jaxpp_async.compiler.ir import Lit
from jaxpp_async.compiler.trace import trace
from jaxpp_async.program.instructions import Aval


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_choice_runs_the_branch_at_its_position(which):
    outer = Body()
    bodies = []
    for line in ("r = neg a", "r = mul a b", "r = add b b"):
        bodies.append(Body(outer.types, a=(2,), b=(2,)))
        bodies[-1].add(line)
    made = branches([body.flat("r") for body in bodies], outer.types, terminates=True)
    a, b = jnp.arange(2.0), jnp.arange(2.0) + 5
    (found,) = made.choose(made.bodies)([jnp.int32(which), a, b])
    np.testing.assert_array_equal(found, (-a, a * b, b + b)[which])


@pytest.mark.parametrize(
    ("constant", "dtype", "expected"),
    [(1, "bfloat16", "bfloat16"), (True, "bool", "bool"), (2.5, "float32", "float32")],
)
def test_a_constant_result_gets_the_type_that_another_branch_gives(constant, dtype, expected):
    body, other = Body(a=Aval((), dtype)), None
    other = Body(body.types, a=Aval((), dtype))
    flats = [body.flat("a"), type(body.flat("a"))(other.inputs, (), (Lit(constant),))]
    made = branches(flats, body.types, terminates=True)
    for which in (0, 1):
        (found,) = made.choose(flats)([jnp.int32(which), jnp.asarray(0, dtype)])
        assert found.dtype.name == expected and found.weak_type is False


def test_a_choice_between_constants_alone_follows_the_first():
    body = Body()
    flats = [type(body.flat(""))((), (), (Lit(value),)) for value in (np.float16(1), np.float16(2))]
    (found,) = branches(flats, body.types, terminates=True).choose(flats)([jnp.int32(1)])
    assert (float(found), found.dtype.name) == (2.0, "float16")


def test_a_choice_may_return_keys():
    key_type = trace(lambda k: k, (jax.eval_shape(lambda: jax.random.key(0)),))
    body = Body()
    ids = [body.types.new(key_type.types[0]) for _ in range(2)]
    flats = [type(body.flat(""))((ids[0],), (), (ids[0],)), type(body.flat(""))((ids[1],), (), (ids[1],))]
    key = jax.random.key(3)
    (found,) = branches(flats, body.types, terminates=True).choose(flats)([jnp.int32(0), key])
    assert found == key


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        pytest.param((jnp.bfloat16(3), 7), jnp.bfloat16(7), id="a constant takes the array's type"),
        pytest.param((np.int16(3), np.int16(7)), jnp.int16(7), id="two constants"),
    ],
)
def test_a_selected_constant_is_an_array_of_the_others_type(cases, expected):
    select = branches([], Body().types, terminates=True).select
    (found,) = select([jnp.int32(1), *cases])
    assert found == expected and found.dtype == expected.dtype


def test_whether_branches_end_is_kept():
    assert [branches([], Body().types, terminates=ends).terminates for ends in (True, False)] == [True, False]
