"""Move the linear operations that join a summed result's parts from several stages to after the loop.

A sum over microbatches commutes with linear operations. The last operations of a summed result may join
values of several stages. For example, the gradient of a weight that two stages share is the sum of two
values, and the gradient of a stack of layers from several stages is a concatenation. These operations move to
after the loop as an `Epilogue`, and each stage accumulates its own part, so that no array of a weight's size
is sent inside the loop. Widening casts, scalings, negations and choices between the stages' values and the
joining operations are instead computed in each stage before accumulating (`stage_parts`).

Several results may be made of one sum, such as the differences of gradients from their mean. The sum is then
computed once after the loop, and each result from it. If something else reads it, it stays in the loop.

Only gradients are accumulated in parts. Other results, such as metrics, are small, so this would save little.
Their terms may also cancel in each microbatch, and would not cancel if each term were summed separately.

Source: the JaxPP paper, section "Weight Sharing" (loop commuting).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from msgspec import structs

from jaxpp_async.compiler.gradient_expressions import (
    Expr,
    LayoutExpr,
    LeafExpr,
    SharedExpr,
    SumExpr,
    cast_constant,
    expr_shape,
    leaves,
    shared_in,
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
from jaxpp_async.compiler.stage_parts import StageOps, add_arrays, multiply, negate
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

    An operation may read what an epilogue of an earlier result of the loop makes.
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


_MAX_LEAVES = 128
"""The size of the largest expression that several results are made of."""

_MAX_RATIO = 1024
"""How many times as large or small as a value another may be that is made of its sum over microbatches."""

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
        # What is computed once after the loop, and the values to accumulate for it.
        self.shared: dict[Expr, tuple[int, dict[OutputPart, None]]] = {}
        # For a value of a task: the multiple of it that the task accumulates.
        self.accumulated: dict[tuple[int, TaskKey], tuple[int, float]] = {}
        self.expressions = self._expressions()

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
        if not any(made in op.outputs for op in ops):  # an earlier result's epilogue makes it
            made, known = self._new_strong(made), made
            ops.append(Op("copy", (known,), (made,), list, stages.loop.line))
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
            operand = stages.resolve(stages.ops[p].inputs[0])
            expr = self._expression(operand) if self._is_alone(p) else self._leaf(value)
            self.split_operands[p] = self.stage_ops.merge_terms(expr)
            if not isinstance(expr, LeafExpr):
                self.dropped.add(p)
        return p if not isinstance(self.split_operands[p], LeafExpr) else None

    def _is_alone(self, position: int) -> bool:
        """Return whether all results of a `split` are summed results of the loop, and nothing else."""
        outputs = [o for o in self.stages.ops[position].outputs if o >= 0]
        return all(self._summed[o] == 1 == self.stages.num_uses[o] for o in outputs)

    @cached_property
    def _summed(self) -> Counter[Ref]:
        """How many summed results of the loop each value is."""
        reduced = zip(self.stages.body.outputs, self.stages.loop.reductions, strict=True)
        values = [self.stages.resolve(o) for o, r in reduced if r.commutes_with_add]
        return Counter(v for v in values if isinstance(v, int))

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
        return self._operand(value, self.expressions)

    def _operand(self, ref: Ref, known: dict[int, Expr]) -> Expr:
        ref = self.stages.resolve(ref)
        found = known.get(ref) if isinstance(ref, int) else None
        return found or self._leaf(ref)

    def _expressions(self) -> dict[int, Expr]:
        """Return the expressions of values that are used only to compute summed results of the loop.

        A value of several tasks that is used several times is computed either after the loop for all uses, or
        in the loop.
        """
        stages, kept = self.stages, set[int]()
        while True:
            known: dict[int, Expr] = {}
            refused: set[int] = set()
            shared: dict[Expr, int] = {}
            for p in sorted(self._region(kept)):
                op = stages.ops[p]
                (value,) = op.outputs
                operands = [self._operand(r, known) for r in op.inputs]
                expr = self._combine(p, op, operands)
                if isinstance(expr, LeafExpr):
                    refused |= {shared[s.expr] for e in operands for s in shared_in(e)}
                elif stages.num_uses[value] > 1:
                    expr = expr if isinstance(expr, SharedExpr) else SharedExpr(expr, expr.dropped)
                    shared.setdefault(expr.expr, value)
                    if len(list(leaves(expr))) > _MAX_LEAVES:
                        refused.add(value)
                        expr = self._leaf(value)
                known[value] = expr
            if not refused:
                return known
            kept |= refused

    def _region(self, kept: Collection[int]) -> set[int]:
        """Return the positions of the linear operations whose results are used only to compute summed
        results of the loop.

        Args:
            kept: values that are computed in the loop.
        """
        stages, found, uses = self.stages, set[int](), self._summed.copy()
        for p in reversed(range(len(stages.ops))):
            op = stages.ops[p]
            if len(op.outputs) == 1 and op.name in _MOVABLE:
                (value,) = op.outputs
                if value in kept or not 0 < uses[value] == stages.num_uses[value]:
                    continue
                found.add(p)
            elif op.name not in SPLITS or len(op.inputs) != 1 or not self._is_alone(p):
                continue
            uses.update(r for r in map(stages.resolve, op.inputs) if isinstance(r, int))
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
        if op.name in CHOICES and isinstance(operands[0], LeafExpr):
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
            value = self.stage_ops.with_id(expr)
            assert isinstance(value, int)
            base, factor = self.stage_ops.multiples.get(value, (value, 1.0))
            added, times = self.accumulated.setdefault((base, expr.place), (value, factor))
            if not 1 / _MAX_RATIO <= abs(factor / times) <= _MAX_RATIO:
                added, times = value, factor
            parts[OutputPart(added, expr.place)] = None
            return self._multiplied(added, factor / times, ops)
        if isinstance(expr, SharedExpr):
            if expr.expr not in self.shared:
                own: dict[OutputPart, None] = {}
                self.shared[expr.expr] = self._emit(self.stage_ops.merge_terms(expr.expr), own, ops), own
            made, own = self.shared[expr.expr]
            parts.update(own)
            return self._multiplied(made, expr.factor, ops)
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

    def _multiplied(self, value: int, factor: float, ops: list[Op]) -> int:
        """Append an operation that multiplies a value by a number, unless this is 1; return the result's
        id."""
        if factor == 1:
            return value
        made, line = self._new_strong(value), self.stages.loop.line
        if factor == -1:
            ops.append(Op("neg", (value,), (made,), negate, line))
        else:
            number = Lit(np.asarray(factor, self.types[value].aval.dtype))
            ops.append(Op("mul", (value, number), (made,), multiply, line))
        return made

    def _new_strong(self, like: int) -> int:
        """Return the id of a new value with the type of `like`, but without JAX's weak type."""
        return self.types.new(replace(self.types[like], weak=False))
