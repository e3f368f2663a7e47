"""Add to a loop's tasks the operations that each stage applies to its own part of a summed gradient.

Widening casts, scalings, negations and choices are computed in each stage before accumulating: a sum in a
narrower type would round, and a factor or a choice may differ between microbatches. If such an operation also
reads a value of another task, this value is sent only if it is small (a scalar, or an array that a scalar
fills). `loop_commuting` says which operations of a loop these are.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs

from jaxpp_async.compiler.gradient_expressions import (
    Expr,
    LayoutExpr,
    LeafExpr,
    SharedExpr,
    SumExpr,
    expr_shape,
    expr_type,
    has_layout,
    leaves,
    map_leaves,
    sum_terms,
)
from jaxpp_async.compiler.ir import Lit, Op, Ref, Types, ValueType, literal_type
from jaxpp_async.compiler.primitives import ENLARGING
from jaxpp_async.compiler.stage_assignment import StageAssignment, TaskKey
from jaxpp_async.program.instructions import itemsize

Run: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""A function that runs an operation on its operands' arrays, as `Op.run`."""

_WIDE = ("float32", "float64")
"""The types in which a sum that several results need is multiplied by a constant after the loop."""


class StageOps:
    """The operations that are added to the tasks of a loop, so that each stage makes its part of a gradient.

    Args:
        stages: the loop's body with a stage for each operation.
        types: the type of every value id; types of new values are added to it.

    Attributes:
        added: for each task, the operations that are added at its end, in order.
        multiples: for each value that an added operation makes of another value by multiplying it by a
            constant number, the other value and the number.
    """

    def __init__(self, stages: StageAssignment, types: Types) -> None:
        self.stages, self.types = stages, types
        self.added: dict[TaskKey, list[Op]] = defaultdict(list)
        self.multiples: dict[int, tuple[int, float]] = {}

    # ---- expressions of which each stage computes its part

    def move_into_stages(self, op: Op, operands: Sequence[Expr], dropped: frozenset[int]) -> Expr | None:
        """Return an expression that applies an operation to each stage's value before the values are joined.

        Args:
            op: the operation.
            operands: one expression per operand.
            dropped: the positions of the operations that the new expression replaces.

        Returns:
            The expression. None if applying the operation to each stage's value could give another result,
            for example by rounding or overflow, or if another operand is not available to every stage.
        """
        several = [k for k, e in enumerate(operands) if not isinstance(e, LeafExpr)]
        if len(several) != 1 or (op.name == "div" and several != [0]):
            return None
        k = several[0]
        out, source = self.types[op.outputs[0]], expr_type(operands[k], self.types)
        if op.name in ("convert_element_type", "div") and not (_is_real(out) and _is_real(source)):
            return None  # integer results are rounded, so the operation is not linear
        if op.name == "convert_element_type" and itemsize(out.aval.dtype) < itemsize(source.aval.dtype):
            return None  # a narrower type may overflow on a part where the sum fits
        if op.name == "reduce_sum":
            others = () if not has_layout(operands[k]) else None
        elif expr_shape(operands[k], self.types) != out.aval.shape:
            return None
        else:
            others = self._in_every_stage([r for j, r in enumerate(op.inputs) if j != k], operands[k])
        if others is None:
            return None
        read = tuple(self.stages.resolve(r) for j, r in enumerate(op.inputs) if j != k)
        run = op.run if op.name == "reduce_sum" or others == read else _OnPart(op.run, k)
        factor = self._constant_factor(op, k)

        def change(leaf: LeafExpr) -> LeafExpr:
            return self._run_in_stage(op, k, leaf, others, run, factor)

        return map_leaves(operands[k], change, dropped, out.aval.dtype, factor)

    def _constant_factor(self, op: Op, position: int) -> float | None:
        """Return the number by which an operation multiplies one of its operands.

        Args:
            op: the operation.
            position: the position of the operand.

        Returns:
            The number. None if it is not a constant, or if a sum of values that are multiplied and the
            multiplied sum of the values may round or overflow differently.
        """
        if op.name == "neg":
            return -1.0
        if op.name not in ("mul", "div") or self.types[op.outputs[0]].aval.dtype not in _WIDE:
            return None
        scalar = self._filling_scalar(op.inputs[1 - position])
        number = float(scalar.value) if isinstance(scalar, Lit) and self._aval(scalar)[0] == () else 0.0
        if number == 0 or not np.isfinite(number):
            return None
        return number if op.name == "mul" else 1 / number

    def negated(self, expr: Expr, op: Op) -> Expr:
        """Return the negative of an expression, which each stage computes of its own value.

        Args:
            expr: the expression.
            op: the subtraction that the negative is for.
        """
        negation = Op("neg", op.inputs[1:], op.outputs, negate, op.line, op.transposed)
        dropped = frozenset[int]() if isinstance(expr, LeafExpr) else expr.dropped
        dtype = self.types[op.outputs[0]].aval.dtype

        def change(leaf: LeafExpr) -> LeafExpr:
            return self._run_in_stage(negation, 0, leaf, (), negate, -1.0)

        return map_leaves(expr, change, dropped, dtype, -1.0)

    def chosen(self, op: Op, operands: Sequence[Expr], dropped: frozenset[int]) -> Expr | None:
        """Return an expression for a choice between values: the sum of what is chosen of each.

        Each stage replaces the elements of its value that are not chosen by zeros.

        Args:
            op: the choice, whose first operand says which of the others to take.
            operands: one expression per operand.
            dropped: the positions of the operations that the new expression replaces.

        Returns:
            The expression. None if what to choose is not available to every stage.
        """
        out = self.types[op.outputs[0]].aval
        which, change = op.inputs[0], list[tuple[Expr, Callable[[LeafExpr], LeafExpr]]]()
        for k, expr in enumerate(operands[1:]):
            if isinstance(expr, LeafExpr) and self._is_zero(expr.value):
                continue
            others = self._in_every_stage((which,), expr)
            is_light = isinstance(expr, LeafExpr) and expr.task is None
            if others is None or is_light or expr_shape(expr, self.types) != out.shape:
                return None
            run = _ChosenPart(op.run, k, len(operands) - 1)
            change.append((expr, functools.partial(self._run_in_stage, op, 1, others=others, run=run)))
        if len({leaf.task for expr, _ in change for leaf in leaves(expr)}) < 2:
            return None
        terms = [map_leaves(expr, in_stage, dropped, out.dtype) for expr, in_stage in change]
        joined = tuple(t for e in terms for t in sum_terms(e))
        return terms[0] if len(terms) == 1 else SumExpr(joined, dropped)

    def merge_terms(self, expr: Expr) -> Expr:
        """Return a copy of `expr` in which each sum has at most one term per task.

        If a sum has several values of one task, operations that add these values are added to the task.
        """
        if isinstance(expr, LeafExpr | SharedExpr):
            return expr
        if isinstance(expr, LayoutExpr):
            return LayoutExpr(expr.op, tuple(map(self.merge_terms, expr.operands)), expr.dropped)
        terms = [self.merge_terms(t) for t in expr.terms]
        first = next((t.task for t in terms if isinstance(t, LeafExpr) and t.task is not None), ("fwd", 0))
        by_task: dict[TaskKey, list[Ref]] = defaultdict(list)
        for t in terms:
            if isinstance(t, LeafExpr):
                by_task[t.task or first].append(t.value)
        merged = [LeafExpr(self._sum_in_stage(task, values), task) for task, values in by_task.items()]
        return SumExpr((*merged, *(t for t in terms if not isinstance(t, LeafExpr))), expr.dropped)

    def _sum_in_stage(self, task: TaskKey, values: Sequence[Ref]) -> Ref:
        total = values[0]
        for v in values[1:]:
            like = self.types[next(x for x in (total, v) if isinstance(x, int))]
            made = self.types.new(replace(like, weak=False))
            self.added[task].append(Op("add_any", (total, v), (made,), add_arrays, "a sum of gradients"))
            total = made
        return total

    def with_id(self, leaf: LeafExpr) -> Ref:
        """Return the id of a leaf's value, since an accumulator needs a value with an id.

        If the leaf is a constant, add an operation to its task that makes a value of the constant.
        """
        if isinstance(leaf.value, int):
            return leaf.value
        made = self.types.new(literal_type(leaf.value))
        op = Op("constant", (leaf.value,), (made,), list, self.stages.loop.line)
        self.added[leaf.place].append(op)
        return made

    # ---- operands and operations of a stage

    def _is_zero(self, ref: Ref) -> bool:
        """Return whether a value is a constant, or an array filled with one, that is zero everywhere."""
        *_, source = self._sources(ref)
        return isinstance(source, Lit) and not np.any(source.value)

    def _filling_scalar(self, ref: Ref) -> Ref:
        """Return a scalar of the same type that fills a value everywhere; the value itself if there is
        none."""
        same = [r for r in self._sources(ref) if self._aval(r) == ((), self._aval(ref)[1])]
        return same[-1] if same else self.stages.resolve(ref)

    def _sources(self, ref: Ref) -> Iterable[Ref]:
        """Yield a value, the value that it is cast, copied or enlarged from, and so on."""
        ref = self.stages.resolve(ref)
        yield ref
        while isinstance(ref, int) and (p := self.stages.producer.get(ref)) is not None:
            op = self.stages.ops[p]
            if op.name not in ENLARGING or len(op.inputs) != 1:
                return
            ref = self.stages.resolve(op.inputs[0])
            yield ref

    def _aval(self, ref: Ref) -> tuple[tuple[int, ...], str]:
        aval = (self.types[ref] if isinstance(ref, int) else literal_type(ref)).aval
        return aval.shape, aval.dtype

    def _in_every_stage(self, refs: Sequence[Ref], expr: Expr) -> tuple[Ref, ...] | None:
        """Return operands that each stage can combine with its own part of an expression.

        A value that is computed in a task is sent to the stages if it is a scalar, or filled with one. A
        value that every task can make by cheap operations is left as it is. If the parts are laid out in the
        expression, only scalars fit each of them.

        Args:
            refs: the other operands of an operation on the expression.
            expr: the expression.

        Returns:
            One value per operand; None if there is an operand that some stage does not have.
        """
        found: list[Ref] = []
        for ref in map(self.stages.resolve, refs):
            if self.stages.task_of(ref) is None and not has_layout(expr):
                found.append(ref)
                continue
            scalar = self._filling_scalar(ref)
            if self._aval(scalar)[0] != () or not all(self._comes_before(scalar, e) for e in leaves(expr)):
                return None
            found.append(scalar)
        return tuple(found)

    def _comes_before(self, ref: Ref, leaf: LeafExpr) -> bool:
        """Return whether a value is made before the task of a leaf ends, in every microbatch."""
        task = self.stages.task_of(ref)
        if task is None:
            return True
        kind, stage = leaf.place
        if kind == "fwd":
            return task[0] == "fwd" and task[1] <= stage
        return task[0] == "fwd" or task[1] >= stage

    def _run_in_stage(
        self,
        op: Op,
        position: int,
        leaf: LeafExpr,
        others: Sequence[Ref],
        run: Run,
        factor: float | None = None,
    ) -> LeafExpr:
        """Add an operation to the task that computes one of its operands, and return the operation's result.

        Args:
            op: the operation.
            position: the position of the operand among the inputs of the operation that is added.
            leaf: the operand.
            others: the other inputs of the operation that is added.
            run: the function that runs it.
            factor: the constant number by which the operation multiplies; None for any other operation.
        """
        assert isinstance(leaf.value, int)
        task, new_type = leaf.place, self.types[op.outputs[0]]
        if op.name != "reduce_sum":  # the part may have another rank than what is laid out from it
            part = self.types[leaf.value]
            aval = structs.replace(part.aval, dtype=new_type.aval.dtype)
            new_type = replace(part, aval=aval, weak=new_type.weak)
        made = self.types.new(new_type)
        inputs = (*others[:position], leaf.value, *others[position:])
        self.added[task].append(Op(op.name, inputs, (made,), run, op.line, op.transposed))
        if factor is not None:
            base, times = self.multiples.get(leaf.value, (leaf.value, 1.0))
            self.multiples[made] = base, times * factor
        return LeafExpr(made, task)


def _is_real(value_type: ValueType) -> bool:
    return value_type.aval.dtype.startswith(("float", "bfloat"))


def add_arrays(xs: Sequence[Any]) -> list[Any]:
    """Add two arrays; an `Op.run`."""
    return [xs[0] + xs[1]]


def negate(xs: Sequence[Any]) -> list[Any]:
    """Return the negative of an array; an `Op.run`."""
    return [-xs[0]]


def multiply(xs: Sequence[Any]) -> list[Any]:
    """Multiply two arrays; an `Op.run`."""
    return [xs[0] * xs[1]]


@dataclass(frozen=True)
class _OnPart:
    """A callable for `Op.run` that applies an elementwise operation to a part; scalars are filled in.

    Args:
        run: the operation on arrays of equal shapes.
        position: the position of the part among the operands.
    """

    run: Run
    position: int

    def __call__(self, xs: Sequence[Any]) -> Sequence[Any]:
        part = xs[self.position]
        return self.run([x if np.shape(x) == np.shape(part) else _filled(x, part) for x in xs])


@dataclass(frozen=True)
class _ChosenPart:
    """A callable for `Op.run` that takes a choice's first operand and a part, and returns what is chosen of
    the part, with zeros elsewhere.

    Args:
        run: the choice between arrays.
        position: the position of the part among the arrays.
        count: the number of arrays.
    """

    run: Run
    position: int
    count: int

    def __call__(self, xs: Sequence[Any]) -> Sequence[Any]:
        which, part = xs
        others = _zeros_like(part)
        return self.run([which, *(part if k == self.position else others for k in range(self.count))])


def _filled(scalar: Any, like: Any) -> Any:
    return _zeros_like(like) + scalar


def _zeros_like(part: Any) -> Any:
    """Return zeros of the shape, type and sharding of an array, by methods that it has under any trace.

    XLA knows that the result does not depend on the array.
    """
    return ((part == part) & False).astype(part.dtype)  # also where it is not finite
