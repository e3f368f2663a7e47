"""Expressions of a loop's summed gradient, whose leaves are values that single tasks of the loop make.

A summed gradient may join values of several stages: as a sum, or by an operation that only lays values out,
such as a concatenation. `loop_commuting` reads such an expression from the loop's body, and computes it after
the loop from the totals that the tasks accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from jaxpp_async.compiler.ir import Lit, Op, Ref, Types, ValueType
from jaxpp_async.compiler.stage_assignment import TaskKey


@dataclass(frozen=True, eq=False)
class LeafExpr:
    """A value that one task makes, as a leaf of an expression.

    `task` is None for a value that any task can make by cheap operations alone.
    """

    value: Ref
    task: TaskKey | None

    @property
    def place(self) -> TaskKey:
        """The task that makes the value; the forward of stage 0 for a value that any task can make."""
        return self.task or ("fwd", 0)


@dataclass(frozen=True, eq=False)
class SumExpr:
    """An expression that is a sum of values of several tasks.

    `dropped` has the positions in the loop's body of the operations that the sum replaces.
    """

    terms: tuple[Expr, ...]
    dropped: frozenset[int]


@dataclass(frozen=True, eq=False)
class LayoutExpr:
    """An expression that applies a layout operation (such as a concatenation) to values of several tasks.

    `dropped` has the positions in the loop's body of the operations that the expression replaces.
    """

    op: Op
    operands: tuple[Expr, ...]  # the operation's first inputs; the other inputs are constants
    dropped: frozenset[int]


@dataclass(frozen=True, eq=False)
class SharedExpr:
    """A number times an expression of a value that several operations read, or that is returned several
    times.

    The expression is computed once after the loop for all of them, unless an operation is applied to its
    leaves.
    `dropped` has the positions in the loop's body of the operations that the expression replaces.
    """

    expr: SumExpr | LayoutExpr
    dropped: frozenset[int]
    factor: float = 1.0
    changes: tuple[Callable[[LeafExpr], LeafExpr], ...] = ()  # multiply a leaf by the factor


Expr: TypeAlias = LeafExpr | SumExpr | LayoutExpr | SharedExpr
"""A value of the loop's body, as an expression of values that single tasks make."""


def leaves(expr: Expr) -> Iterable[LeafExpr]:
    """Yield the leaves of an expression, in the order of the operands."""
    if isinstance(expr, LeafExpr):
        yield expr
    else:
        for e in operands_of(expr):
            yield from leaves(e)


def operands_of(expr: Expr) -> tuple[Expr, ...]:
    """Return the expressions that an expression is made of; none for a leaf."""
    if isinstance(expr, LeafExpr):
        return ()
    if isinstance(expr, SharedExpr):
        return (expr.expr,)
    return expr.terms if isinstance(expr, SumExpr) else expr.operands


def shared_in(expr: Expr) -> Iterable[SharedExpr]:
    """Yield the outermost shared expressions in an expression."""
    if isinstance(expr, SharedExpr):
        yield expr
    else:
        for e in operands_of(expr):
            yield from shared_in(e)


def has_layout(expr: Expr) -> bool:
    """Return whether an expression has a layout operation, so that a part may have another shape than the
    whole."""
    return isinstance(expr, LayoutExpr) or any(map(has_layout, operands_of(expr)))


def map_leaves(
    expr: Expr,
    change: Callable[[LeafExpr], LeafExpr],
    dropped: frozenset[int],
    dtype: str,
    factor: float | None = None,
) -> Expr:
    """Return an expression with `change` applied to each leaf; constants are cast to `dtype` instead.

    A shared expression is replaced by a copy of its own, unless `factor` is given.

    Args:
        expr: the expression.
        change: a function from a leaf to the leaf that replaces it.
        dropped: the positions of the operations that the new expression replaces.
        dtype: the dtype of constants.
        factor: the number that `change` multiplies by; shared expressions are then multiplied as a whole.
    """
    if isinstance(expr, SharedExpr):
        if factor is not None:
            return SharedExpr(expr.expr, dropped, expr.factor * factor, (*expr.changes, change))
        own: Expr = expr.expr
        for f in (*expr.changes, change):
            own = map_leaves(own, f, dropped, dtype)
        return own
    if isinstance(expr, LeafExpr):
        return (
            change(expr)
            if isinstance(expr.value, int)
            else LeafExpr(cast_constant(expr.value, dtype), expr.task)
        )
    if isinstance(expr, SumExpr):
        terms = tuple(map_leaves(t, change, frozenset(), dtype, factor) for t in expr.terms)
        return SumExpr(terms, dropped)
    operands = tuple(map_leaves(e, change, frozenset(), dtype, factor) for e in expr.operands)
    return LayoutExpr(expr.op, operands, dropped)


def cast_constant(ref: Ref, dtype: str) -> Ref:
    """Return a constant in another dtype; a value that is no constant is returned as it is."""
    return Lit(np.asarray(ref.value).astype(dtype)) if isinstance(ref, Lit) else ref


def sum_terms(expr: Expr) -> tuple[Expr, ...]:
    """Return the terms of a sum; any other expression is its own single term."""
    return expr.terms if isinstance(expr, SumExpr) else (expr,)


def expr_shape(expr: Expr, types: Types) -> tuple[int, ...]:
    """Return the shape of an expression's value."""
    if isinstance(expr, LayoutExpr):
        return types[expr.op.outputs[0]].aval.shape
    if isinstance(expr, SumExpr | SharedExpr):
        return expr_shape(operands_of(expr)[0], types)
    value = expr.value
    return types[value].aval.shape if isinstance(value, int) else np.shape(value.value)


def expr_type(expr: Expr, types: Types) -> ValueType:
    """Return the type of the first leaf of an expression that is no constant."""
    value = next(leaf.value for leaf in leaves(expr) if isinstance(leaf.value, int))
    assert isinstance(value, int)
    return types[value]
