"""What is read from, and made of, an expression of a summed gradient."""

from __future__ import annotations

import numpy as np
import pytest
from compiler_inputs import two_stages

from jaxpp_async.compiler.gradient_expressions import (
    Expr,
    LayoutExpr,
    LeafExpr,
    SumExpr,
    cast_constant,
    expr_shape,
    expr_type,
    has_layout,
    leaves,
    map_leaves,
    sum_terms,
)
from jaxpp_async.compiler.ir import Lit

BODY = two_stages()
A, B = LeafExpr(BODY.ref("a"), ("bwd", 1)), LeafExpr(BODY.ref("b"), ("bwd", 0))
ZERO = LeafExpr(Lit(np.float32(0)), None)
SUM = SumExpr((A, ZERO, B), frozenset({8}))
STACK = LayoutExpr(
    BODY.add("s[6,3] = concatenate a b '"), (A, SumExpr((B, A), frozenset())), frozenset({8, 9})
)


def shown(expr: Expr) -> object:
    """An expression as nested tuples, with its leaves by name."""
    if isinstance(expr, LeafExpr):
        return BODY.name(expr.value)
    inner = expr.terms if isinstance(expr, SumExpr) else (expr.op.name, *expr.operands)
    return tuple([e if isinstance(e, str) else shown(e) for e in inner])


@pytest.mark.parametrize(
    ("expr", "names", "has", "shape", "terms"),
    [
        pytest.param(A, "a", False, (3, 3), 1, id="a leaf"),
        pytest.param(ZERO, "#0.0", False, (), 1, id="a constant"),
        pytest.param(SUM, "a #0.0 b", False, (3, 3), 3, id="a sum"),
        pytest.param(STACK, "a b a", True, (6, 3), 1, id="a layout"),
        pytest.param(SumExpr((B, STACK), frozenset()), "b a b a", True, (3, 3), 2, id="a layout in a sum"),
    ],
)
def test_what_an_expression_consists_of(expr, names, has, shape, terms):
    assert BODY.names(leaf.value for leaf in leaves(expr)) == names
    assert (has_layout(expr), expr_shape(expr, BODY.types), len(sum_terms(expr))) == (has, shape, terms)


def test_the_type_is_that_of_the_first_value_with_one():
    assert expr_type(SumExpr((ZERO, B), frozenset()), BODY.types) is BODY.types[B.value]


def test_a_value_that_any_task_makes_is_placed_in_the_first_forward():
    assert (A.place, ZERO.place) == (("bwd", 1), ("fwd", 0))


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        pytest.param(A, "b", id="a leaf"),
        pytest.param(SUM, ("b", "#0.0", "b"), id="a sum"),
        pytest.param(STACK, ("concatenate", "b", ("b", "b")), id="a layout"),
    ],
)
def test_a_change_is_made_to_each_leaf(expr, expected):
    found = map_leaves(expr, lambda leaf: LeafExpr(B.value, leaf.task), frozenset({5}), "float32")
    assert shown(found) == expected
    assert [leaf.task for leaf in leaves(found)] == [leaf.task for leaf in leaves(expr)]
    assert isinstance(found, LeafExpr) or found.dropped == {5}


def test_constants_are_cast_instead():
    found = map_leaves(SUM, lambda leaf: leaf, frozenset(), "float16")
    assert isinstance(found, SumExpr)
    first, constant, _ = found.terms
    assert first is A and isinstance(constant, LeafExpr)
    assert isinstance(constant.value, Lit) and constant.value.value.dtype == "float16"
    assert cast_constant(B.value, "float16") == B.value
