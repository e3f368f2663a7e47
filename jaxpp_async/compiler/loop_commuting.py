"""Move the linear operations that join a summed result's parts from several stages to after the loop.

A sum over microbatches commutes with linear operations. The last operations of a summed result may join
values of several stages. For example, the gradient of a weight that two stages share is the sum of two
values, and the gradient of a stack of layers from several stages is a concatenation. These operations move to
after the loop as an `Epilogue`, and each stage accumulates its own part, so that no array of a weight's size
is sent inside the loop. Widening casts, scalings, negations and choices between the stages' values and the
joining operations are instead computed in each stage before accumulating (`stage_parts`).

Only gradients are accumulated in parts. Other results, such as metrics, are small, so this would save little.
Their terms may also cancel in each microbatch, and would not cancel if each term were summed separately.

Source: the JaxPP paper, section "Weight Sharing" (loop commuting).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from jaxpp_async.compiler.gradient_expressions import (
    Expr,
    LayoutExpr,
    LeafExpr,
    SumExpr,
    cast_constant,
    expr_shape,
    leaves,
    sum_terms,
)
from jaxpp_async.compiler.ir import Lit, Op, Ref, Types
from jaxpp_async.compiler.ir_slicing import select_needed
from jaxpp_async.compiler.primitives import (
    ADDITIONS,
    CHOICES,
    DIFFERENCES,
    LINEAR_IN_STAGE,
    MOVES_ONLY,
    SPLITS,
)
from jaxpp_async.compiler.stage_assignment import StageAssignment, TaskKey
from jaxpp_async.compiler.stage_parts import StageOps, add_arrays
from jaxpp_async.compiler.sum_distribution import PARTIAL_SUM


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One part of a result of the loop: a value that one task accumulates over microbatches."""

    value: Ref
    task: TaskKey


@dataclass(frozen=True, eq=False)
class Epilogue:
    """The operations after a loop that compute one of its results from the totals accumulated by the stages.

    Args:
        ops: the operations, in program order. An operation that reads the id of a part's value gets the total
            of that part.
        value: the id of the result.
    """

    ops: tuple[Op, ...]
    value: int


@dataclass(frozen=True, eq=False)
class LoopResults:
    """A plan of how tasks accumulate each result of a loop in parts, and how the parts are joined after the
    loop.

    Args:
        parts: for each result, the values that are accumulated separately.
        epilogues: for each result, the operations that join its parts after the loop; None if the result is
            the total of a single part.
        dropped: the positions in the loop's body of the operations that the epilogues replace.
        added: for each task, the operations that are added at its end, in order.
    """

    parts: tuple[tuple[OutputPart, ...], ...]
    epilogues: tuple[Epilogue | None, ...]
    dropped: frozenset[int]
    added: dict[TaskKey, list[Op]]


_MOVABLE = ADDITIONS | DIFFERENCES | CHOICES | MOVES_ONLY | LINEAR_IN_STAGE
"""The primitives among the last operations of a summed result that may join values of several stages."""


def commute_results(stages: StageAssignment, types: Types) -> LoopResults:
    """For every result of a loop, choose the parts to accumulate and the epilogue that joins them.

    A part is a value that one task accumulates over microbatches. An epilogue is a list of operations that
    run after the loop.

    Args:
        stages: the loop's body with a stage for each operation.
        types: the type of every value id; types of new values are added to it.
    """
    commuter = _Commuter(stages, types)
    found = [commuter.result(i) for i in range(len(stages.loop.outputs))]
    read = {part.value for parts, _ in found for part in parts if isinstance(part.value, int)}
    added = {task: list(select_needed(ops, read)) for task, ops in commuter.stage_ops.added.items()}
    return LoopResults(
        tuple(parts for parts, _ in found),
        tuple(epilogue for _, epilogue in found),
        frozenset(commuter.dropped),
        added,
    )


class _Commuter:
    """A search for the linear operations that can move from a loop's body to after the loop."""

    def __init__(self, stages: StageAssignment, types: Types) -> None:
        self.stages, self.types = stages, types
        self.dropped: set[int] = set()
        self.stage_ops = StageOps(stages, types)
        # The operand of each `split`, by the position of the `split`.
        self.split_operands: dict[int, Expr] = {}

    def result(self, index: int) -> tuple[tuple[OutputPart, ...], Epilogue | None]:
        stages = self.stages
        value = stages.resolve(stages.body.outputs[index])
        if not stages.loop.reductions[index].commutes_with_add:
            return (self._whole_part(value),), None
        split = self._split_of(value)
        if split is None:
            expr = self.stage_ops.merge_terms(self._expression(value))
        else:
            expr = self.split_operands[split]
        if isinstance(expr, LeafExpr):
            return (self._whole_part(value),), None
        self.dropped |= expr.dropped
        parts: dict[OutputPart, None] = {}
        ops: list[Op] = []
        made = self._emit(expr, parts, ops)
        if split is not None and isinstance(value, int):
            op, whole = stages.ops[split], made
            made = self._new_strong(value)
            outputs = tuple(made if o == value else -1 for o in op.outputs)
            ops.append(Op(op.name, (whole,), outputs, op.run, op.line))
        return tuple(parts), Epilogue(tuple(ops), made)

    def _split_of(self, value: Ref) -> int | None:
        """Find the `split` operation that makes a value, if the operand of the `split` can be accumulated in
        parts.

        This is possible if all results of the `split` are summed results of the loop and the operand joins
        values of several stages. The operand is then added to `split_operands`, so that its parts are
        accumulated once for all of these results.

        Returns:
            The position in the loop's body. None if no `split` makes the value, or if its operand cannot be
            accumulated in parts.
        """
        stages = self.stages
        p = stages.producer.get(value) if isinstance(value, int) else None
        if p is None or stages.ops[p].name not in SPLITS or len(stages.ops[p].inputs) != 1:
            return None
        if p not in self.split_operands:
            reduced = zip(stages.body.outputs, stages.loop.reductions, strict=True)
            summed = {stages.resolve(o) for o, r in reduced if r.commutes_with_add}
            outputs = [o for o in stages.ops[p].outputs if o >= 0]
            alone = all(o in summed and stages.num_uses[o] == 1 for o in outputs)
            expr = self._expression(stages.resolve(stages.ops[p].inputs[0])) if alone else self._leaf(value)
            self.split_operands[p] = self.stage_ops.merge_terms(expr)
            if not isinstance(expr, LeafExpr):
                self.dropped.add(p)
        return p if not isinstance(self.split_operands[p], LeafExpr) else None

    def _whole_part(self, value: Ref) -> OutputPart:
        return OutputPart(value, self._leaf(value).place)

    def _leaf(self, value: Ref) -> LeafExpr:
        task = self.stages.task_of(value)
        if task is None and isinstance(value, int):
            held = self._stages_that_hold(value)
            task = ("fwd", min(held)) if held else None
        return LeafExpr(value, task)

    def _stages_that_hold(self, value: int) -> set[int]:
        """Return the stages whose forwards make or use an input of the loop's body from which `value` is
        computed.

        Args:
            value: the id of a value that is made by cheap operations alone, which each task that needs the
                value repeats.
        """
        found: set[int] = set()
        stack = [value]
        while stack:
            v = self.stages.root(stack.pop())
            p = self.stages.producer.get(v)
            if p is None:
                found |= self.stages.forward_stages.get(v, set())
            else:
                stack += self.stages.ops[p].reads
        return found

    # ---- a result as an expression of the tasks' values

    def _expression(self, value: Ref) -> Expr:
        """Return a value as an expression whose leaves are values that single tasks make.

        The operations of the expression are the linear operations that join values of several tasks.
        """
        if not isinstance(value, int):
            return self._leaf(value)
        known: dict[int, Expr] = {}
        for p in sorted(self._region(value)):
            op = self.stages.ops[p]
            operands = [self._operand(r, known) for r in op.inputs]
            known[op.outputs[0]] = self._combine(p, op, operands)
        return known.get(value) or self._leaf(value)

    def _operand(self, ref: Ref, known: dict[int, Expr]) -> Expr:
        ref = self.stages.resolve(ref)
        found = known.get(ref) if isinstance(ref, int) else None
        return found or self._leaf(ref)

    def _region(self, value: int) -> set[int]:
        """Return the positions of the linear operations whose results are used only to compute a value."""
        found: set[int] = set()
        stack = [value]
        while stack:
            v = stack.pop()
            p = self.stages.producer.get(v)
            if p is None or p in found or self.stages.num_uses[v] != 1:
                continue
            op = self.stages.ops[p]
            if op.name not in _MOVABLE or len(op.outputs) != 1:
                continue
            found.add(p)
            stack += [r for r in map(self.stages.resolve, op.inputs) if isinstance(r, int)]
        return found

    def _combine(self, position: int, op: Op, operands: Sequence[Expr]) -> Expr:
        """Return the expression of an operation's result, made from the expressions of its operands.

        If the operation cannot move to after the loop, the expression is a leaf, which stands for the result
        that the operation's task computes.

        Args:
            position: the operation's position in the loop's body.
            op: the operation.
            operands: one expression per operand.
        """
        whole = self._leaf(op.outputs[0])
        tasks = [leaf.task for e in operands for leaf in leaves(e) if leaf.task is not None]
        if len({stage for _, stage in tasks}) < 2:
            return whole
        # A metric is small, and terms that cancel would not do so when accumulated separately.
        if not any(kind == "bwd" for kind, _ in tasks):
            return whole
        dropped = frozenset((position,)).union(*(e.dropped for e in operands if not isinstance(e, LeafExpr)))
        # JAX stretches dimensions of size 1 in arithmetic; a sum does not commute with that.
        same = all(expr_shape(e, self.types) == self.types[op.outputs[0]].aval.shape for e in operands)
        if op.name in ADDITIONS | DIFFERENCES and same and all(not isinstance(r, Lit) for r in op.inputs):
            first, second = operands
            if op.name in DIFFERENCES:
                second = self.stage_ops.negated(second, op)
            return SumExpr((*sum_terms(first), *sum_terms(second)), dropped)
        if op.name in CHOICES:
            return self.stage_ops.chosen(op, operands, dropped) or whole
        if op.name in MOVES_ONLY and (movable := self._movable(op, operands)) is not None:
            return LayoutExpr(op, movable, dropped)
        if op.name in LINEAR_IN_STAGE:
            return self.stage_ops.move_into_stages(op, operands, dropped) or whole
        return whole

    def _movable(self, op: Op, operands: Sequence[Expr]) -> tuple[Expr, ...] | None:
        """Return the operands of a layout operation that may come from several tasks if it runs after the
        loop.

        Returns:
            For a `pad` with zeros, only the padded array. None for a `pad` with any other value, which is not
            linear and so cannot move to after the loop. For all other operations, all operands.
        """
        if op.name != "pad":
            return tuple(operands)
        padding = op.inputs[1]
        return (operands[0],) if isinstance(padding, Lit) and not np.any(padding.value) else None

    # ---- the epilogue's operations

    def _emit(self, expr: Expr, parts: dict[OutputPart, None], ops: list[Op]) -> int:
        """Append operations that compute an expression after the loop, and return the id of the result.

        Args:
            expr: the expression.
            parts: an ordered set of the values to accumulate; the values that `expr` reads are added to it.
            ops: the list that operations are appended to.
        """
        if isinstance(expr, LeafExpr):
            part = OutputPart(self.stage_ops.with_id(expr), expr.place)
            parts[part] = None
            assert isinstance(part.value, int)
            return part.value
        if isinstance(expr, LayoutExpr):
            operands = [self._emit(e, parts, ops) for e in expr.operands]
            out, dtype = self.types[expr.op.outputs[0]], self.types[operands[0]].aval.dtype
            made = self.types.new(replace(out, aval=structs.replace(out.aval, dtype=dtype), weak=False))
            constants = [cast_constant(r, dtype) for r in expr.op.inputs[len(operands) :]]
            ops.append(Op(expr.op.name, (*operands, *constants), (made,), expr.op.run, expr.op.line))
            return made
        terms = [self._emit(t, parts, ops) for t in expr.terms]
        total = terms[0]
        for t in terms[1:]:
            made = self._new_strong(total)
            ops.append(Op(PARTIAL_SUM, (total, t), (made,), add_arrays, self.stages.loop.line))
            total = made
        return total

    def _new_strong(self, like: int) -> int:
        """Return the id of a new value with the type of `like`, but without JAX's weak type."""
        return self.types.new(replace(self.types[like], weak=False))
