"""What an executable computes, as plain data."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from compiler_inputs import Body

from jaxpp_async.compiler.ir import Lit, Recipe, ValueType, literal_type, outside_reads
from jaxpp_async.program.instructions import Aval


@pytest.mark.parametrize(
    ("name", "stem"),
    [("fwd0", "fwd"), ("fwd_bwd12", "fwd_bwd"), ("outer3_actor10", "outer3_actor"), ("f", "f")],
)
def test_a_stem_is_the_name_without_its_last_number(name, stem):
    assert Recipe(name, (), ()).stem == stem


def test_what_operations_read_from_outside_is_listed_once_in_order_of_first_use():
    body = Body(x=(2,), y=(2,), z=(2,), w=(2,))
    body.add("a = mul z #2.0", "b _ = add a x", "c = mul z x")
    found = outside_reads(body.ops, (*body.refs("c y x"), Lit(1)))
    assert body.names(found) == "z x y"


def test_an_operand_that_is_made_later_is_not_outside():
    body = Body(x=(2,))
    body.add("a = neg x", "b = neg a")
    assert body.names(outside_reads(body.ops[::-1], ())) == "x"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float16(1), Aval((), "float16")),
        (np.zeros((2, 0), "int8"), Aval((2, 0), "int8")),
        (jnp.ones((3,), "bfloat16"), Aval((3,), "bfloat16")),
        (True, Aval((), "bool")),
    ],
)
def test_a_constant_has_the_type_of_its_value(value, expected):
    assert literal_type(Lit(value)) == ValueType(expected)
