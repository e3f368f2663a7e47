"""Move the linear operations that join a summed result's parts from several stages to after the loop.

A sum over microbatches commutes with linear operations. The last operations of a summed result may join
values of several stages. For example, the gradient of a weight that two stages share is the sum of two
values, and the gradient of a stack of layers from several stages is a concatenation. These operations move to
after the loop as an `Epilogue`, and each stage accumulates its own part, so that no array of a weight's size
is sent inside the loop. Widening casts, scalings, negations and choices between the stages' values and the
joining operations are instead computed in each stage before accumulating: a sum in a narrower type would
round, and a factor or a choice may differ between microbatches. If such an operation also reads a value of
another task, this value is sent only if it is small (a scalar, or an array that a scalar fills).

Only gradients are accumulated in parts. Other results, such as metrics, are small, so this would save little.
Their terms may also cancel in each microbatch, and would not cancel if each term were summed separately.

Source: the JaxPP paper, section "Weight Sharing" (loop commuting).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs

from jaxpp_async.compiler.ir import Lit, Op, Ref, Types, ValueType, literal_type
from jaxpp_async.compiler.ir_slicing import select_needed
from jaxpp_async.compiler.primitives import (
    ADDITIONS,
    CHOICES,
    DIFFERENCES,
    ENLARGING,
    LINEAR_IN_STAGE,
    MOVES_ONLY,
    SPLITS,
)
from jaxpp_async.compiler.stage_assignment import StageAssignment, TaskKey
from jaxpp_async.compiler.sum_distribution import PARTIAL_SUM
from jaxpp_async.program.instructions import itemsize


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


@dataclass(frozen=True, eq=False)
class _Leaf:
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
class _Sum:
    """An expression that is a sum of values of several tasks.

    `dropped` has the positions in the loop's body of the operations that the sum replaces.
    """

    terms: tuple[_Expr, ...]
    dropped: frozenset[int]


@dataclass(frozen=True, eq=False)
class _Layout:
    """An expression that applies a layout operation (such as a concatenation) to values of several tasks.

    `dropped` has the positions in the loop's body of the operations that the expression replaces.
    """

    op: Op
    operands: tuple[_Expr, ...]  # the operation's first inputs; the other inputs are constants
    dropped: frozenset[int]


_Expr: TypeAlias = _Leaf | _Sum | _Layout

Run: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""A function that runs an operation on its operands' arrays, as `Op.run`."""

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
    added = {task: list(select_needed(ops, read)) for task, ops in commuter.added.items()}
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
        self.added: dict[TaskKey, list[Op]] = defaultdict(list)
        # The operand of each `split`, by the position of the `split`.
        self.split_operands: dict[int, _Expr] = {}

    def result(self, index: int) -> tuple[tuple[OutputPart, ...], Epilogue | None]:
        stages = self.stages
        value = stages.resolve(stages.body.outputs[index])
        if not stages.loop.reductions[index].commutes_with_add:
            return (self._whole_part(value),), None
        split = self._split_of(value)
        expr = self._merge_terms(self._expression(value)) if split is None else self.split_operands[split]
        if isinstance(expr, _Leaf):
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
            self.split_operands[p] = self._merge_terms(expr)
            if not isinstance(expr, _Leaf):
                self.dropped.add(p)
        return p if not isinstance(self.split_operands[p], _Leaf) else None

    def _whole_part(self, value: Ref) -> OutputPart:
        return OutputPart(value, self._leaf(value).place)

    def _leaf(self, value: Ref) -> _Leaf:
        task = self.stages.task_of(value)
        if task is None and isinstance(value, int):
            held = self._stages_that_hold(value)
            task = ("fwd", min(held)) if held else None
        return _Leaf(value, task)

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

    def _expression(self, value: Ref) -> _Expr:
        """Return a value as an expression whose leaves are values that single tasks make.

        The operations of the expression are the linear operations that join values of several tasks.
        """
        if not isinstance(value, int):
            return self._leaf(value)
        known: dict[int, _Expr] = {}
        for p in sorted(self._region(value)):
            op = self.stages.ops[p]
            operands = [self._operand(r, known) for r in op.inputs]
            known[op.outputs[0]] = self._combine(p, op, operands)
        return known.get(value) or self._leaf(value)

    def _operand(self, ref: Ref, known: dict[int, _Expr]) -> _Expr:
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

    def _combine(self, position: int, op: Op, operands: Sequence[_Expr]) -> _Expr:
        """Return the expression of an operation's result, made from the expressions of its operands.

        If the operation cannot move to after the loop, the expression is a leaf, which stands for the result
        that the operation's task computes.

        Args:
            position: the operation's position in the loop's body.
            op: the operation.
            operands: one expression per operand.
        """
        whole = self._leaf(op.outputs[0])
        tasks = [leaf.task for e in operands for leaf in _leaves(e) if leaf.task is not None]
        if len({stage for _, stage in tasks}) < 2:
            return whole
        if not any(kind == "bwd" for kind, _ in tasks):
            return (
                whole  # a metric is small, and terms that cancel would not do so when accumulated separately
            )
        dropped = frozenset((position,)).union(*(e.dropped for e in operands if not isinstance(e, _Leaf)))
        # JAX stretches dimensions of size 1 in arithmetic; a sum does not commute with that.
        same = all(self._shape(e) == self.types[op.outputs[0]].aval.shape for e in operands)
        if op.name in ADDITIONS | DIFFERENCES and same and all(not isinstance(r, Lit) for r in op.inputs):
            first, second = operands
            if op.name in DIFFERENCES:
                second = self._negated(second, op)
            return _Sum((*_terms(first), *_terms(second)), dropped)
        if op.name in CHOICES:
            return self._chosen(op, operands, dropped) or whole
        if op.name in MOVES_ONLY and (movable := self._movable(op, operands)) is not None:
            return _Layout(op, movable, dropped)
        if (
            op.name in LINEAR_IN_STAGE
            and (spread := self._move_into_stages(op, operands, dropped)) is not None
        ):
            return spread
        return whole

    def _movable(self, op: Op, operands: Sequence[_Expr]) -> tuple[_Expr, ...] | None:
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

    # ---- operations computed in each stage

    def _move_into_stages(self, op: Op, operands: Sequence[_Expr], dropped: frozenset[int]) -> _Expr | None:
        """Return an expression that applies an operation to each stage's value before the values are joined.

        Args:
            op: the operation.
            operands: one expression per operand.
            dropped: the positions of the operations that the new expression replaces.

        Returns:
            The expression. None if applying the operation to each stage's value could give another result,
            for example by rounding or overflow, or if another operand is not available to every stage.
        """
        several = [k for k, e in enumerate(operands) if not isinstance(e, _Leaf)]
        if len(several) != 1 or (op.name == "div" and several != [0]):
            return None
        k = several[0]
        out, source = self.types[op.outputs[0]], self._type(operands[k])
        if op.name in ("convert_element_type", "div") and not (_is_real(out) and _is_real(source)):
            return None  # integer results are rounded, so the operation is not linear
        if op.name == "convert_element_type" and itemsize(out.aval.dtype) < itemsize(source.aval.dtype):
            return None  # a narrower type may overflow on a part where the sum fits
        if op.name == "reduce_sum":
            others = () if not _has_layout(operands[k]) else None
        elif self._shape(operands[k]) != out.aval.shape:
            return None
        else:
            others = self._in_every_stage([r for j, r in enumerate(op.inputs) if j != k], operands[k])
        if others is None:
            return None
        read = tuple(self.stages.resolve(r) for j, r in enumerate(op.inputs) if j != k)
        run = op.run if op.name == "reduce_sum" or others == read else _OnPart(op.run, k)
        return _map_leaves(
            operands[k], lambda leaf: self._run_in_stage(op, k, leaf, others, run), dropped, out.aval.dtype
        )

    def _negated(self, expr: _Expr, op: Op) -> _Expr:
        """Return the negative of an expression, which each stage computes of its own value.

        Args:
            expr: the expression.
            op: the subtraction that the negative is for.
        """
        negation = Op("neg", op.inputs[1:], op.outputs, _negate, op.line, op.transposed)
        dropped = frozenset[int]() if isinstance(expr, _Leaf) else expr.dropped
        dtype = self.types[op.outputs[0]].aval.dtype
        return _map_leaves(
            expr, lambda leaf: self._run_in_stage(negation, 0, leaf, (), _negate), dropped, dtype
        )

    def _chosen(self, op: Op, operands: Sequence[_Expr], dropped: frozenset[int]) -> _Expr | None:
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
        which, change = op.inputs[0], list[tuple[_Expr, Callable[[_Leaf], _Leaf]]]()
        for k, expr in enumerate(operands[1:]):
            if isinstance(expr, _Leaf) and self._is_zero(expr.value):
                continue
            others = self._in_every_stage((which,), expr)
            is_light = isinstance(expr, _Leaf) and expr.task is None
            if others is None or is_light or self._shape(expr) != out.shape:
                return None
            run = _ChosenPart(op.run, k, len(operands) - 1)
            change.append((expr, functools.partial(self._run_in_stage, op, 1, others=others, run=run)))
        if len({leaf.task for expr, _ in change for leaf in _leaves(expr)}) < 2:
            return None
        terms = [_map_leaves(expr, in_stage, dropped, out.dtype) for expr, in_stage in change]
        return terms[0] if len(terms) == 1 else _Sum(tuple(t for e in terms for t in _terms(e)), dropped)

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

    def _in_every_stage(self, refs: Sequence[Ref], expr: _Expr) -> tuple[Ref, ...] | None:
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
            if self.stages.task_of(ref) is None and not _has_layout(expr):
                found.append(ref)
                continue
            scalar = self._filling_scalar(ref)
            if self._aval(scalar)[0] != () or not all(self._comes_before(scalar, e) for e in _leaves(expr)):
                return None
            found.append(scalar)
        return tuple(found)

    def _comes_before(self, ref: Ref, leaf: _Leaf) -> bool:
        """Return whether a value is made before the task of a leaf ends, in every microbatch."""
        task = self.stages.task_of(ref)
        if task is None:
            return True
        kind, stage = leaf.place
        if kind == "fwd":
            return task[0] == "fwd" and task[1] <= stage
        return task[0] == "fwd" or task[1] >= stage

    def _shape(self, expr: _Expr) -> tuple[int, ...]:
        if isinstance(expr, _Layout):
            return self.types[expr.op.outputs[0]].aval.shape
        if isinstance(expr, _Sum):
            return self._shape(expr.terms[0])
        value = expr.value
        return self.types[value].aval.shape if isinstance(value, int) else np.shape(value.value)

    def _type(self, expr: _Expr) -> ValueType:
        value = next(leaf.value for leaf in _leaves(expr) if isinstance(leaf.value, int))
        assert isinstance(value, int)
        return self.types[value]

    def _run_in_stage(self, op: Op, position: int, leaf: _Leaf, others: Sequence[Ref], run: Run) -> _Leaf:
        """Add an operation to the task that computes one of its operands, and return the operation's result.

        Args:
            op: the operation.
            position: the position of the operand among the inputs of the operation that is added.
            leaf: the operand.
            others: the other inputs of the operation that is added.
            run: the function that runs it.
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
        return _Leaf(made, task)

    # ---- the epilogue's operations

    def _merge_terms(self, expr: _Expr) -> _Expr:
        """Return a copy of `expr` in which each sum has at most one term per task.

        If a sum has several values of one task, operations that add these values are added to the task.
        """
        if isinstance(expr, _Leaf):
            return expr
        if isinstance(expr, _Layout):
            return _Layout(expr.op, tuple(map(self._merge_terms, expr.operands)), expr.dropped)
        terms = [self._merge_terms(t) for t in expr.terms]
        first = next((t.task for t in terms if isinstance(t, _Leaf) and t.task is not None), ("fwd", 0))
        by_task: dict[TaskKey, list[Ref]] = defaultdict(list)
        for t in terms:
            if isinstance(t, _Leaf):
                by_task[t.task or first].append(t.value)
        merged = [_Leaf(self._sum_in_stage(task, values), task) for task, values in by_task.items()]
        return _Sum((*merged, *(t for t in terms if not isinstance(t, _Leaf))), expr.dropped)

    def _sum_in_stage(self, task: TaskKey, values: Sequence[Ref]) -> Ref:
        total = values[0]
        for v in values[1:]:
            made = self._new_strong(next(x for x in (total, v) if isinstance(x, int)))
            self.added[task].append(Op("add_any", (total, v), (made,), _add, "a sum of gradients"))
            total = made
        return total

    def _emit(self, expr: _Expr, parts: dict[OutputPart, None], ops: list[Op]) -> int:
        """Append operations that compute an expression after the loop, and return the id of the result.

        Args:
            expr: the expression.
            parts: an ordered set of the values to accumulate; the values that `expr` reads are added to it.
            ops: the list that operations are appended to.
        """
        if isinstance(expr, _Leaf):
            part = OutputPart(self._with_id(expr), expr.place)
            parts[part] = None
            assert isinstance(part.value, int)
            return part.value
        if isinstance(expr, _Layout):
            operands = [self._emit(e, parts, ops) for e in expr.operands]
            out, dtype = self.types[expr.op.outputs[0]], self.types[operands[0]].aval.dtype
            made = self.types.new(replace(out, aval=structs.replace(out.aval, dtype=dtype), weak=False))
            constants = [_cast(r, dtype) for r in expr.op.inputs[len(operands) :]]
            ops.append(Op(expr.op.name, (*operands, *constants), (made,), expr.op.run, expr.op.line))
            return made
        terms = [self._emit(t, parts, ops) for t in expr.terms]
        total = terms[0]
        for t in terms[1:]:
            made = self._new_strong(total)
            ops.append(Op(PARTIAL_SUM, (total, t), (made,), _add, self.stages.loop.line))
            total = made
        return total

    def _with_id(self, leaf: _Leaf) -> Ref:
        """Return the id of a leaf's value, since an accumulator needs a value with an id.

        If the leaf is a constant, add an operation to its task that makes a value of the constant.
        """
        if isinstance(leaf.value, int):
            return leaf.value
        made = self.types.new(literal_type(leaf.value))
        op = Op("constant", (leaf.value,), (made,), list, self.stages.loop.line)
        self.added[leaf.place].append(op)
        return made

    def _new_strong(self, like: int) -> int:
        """Return the id of a new value with the type of `like`, but without JAX's weak type."""
        return self.types.new(replace(self.types[like], weak=False))


def _leaves(expr: _Expr) -> Iterable[_Leaf]:
    if isinstance(expr, _Leaf):
        yield expr
    else:
        for e in expr.terms if isinstance(expr, _Sum) else expr.operands:
            yield from _leaves(e)


def _has_layout(expr: _Expr) -> bool:
    return isinstance(expr, _Layout) or (isinstance(expr, _Sum) and any(map(_has_layout, expr.terms)))


def _map_leaves(expr: _Expr, change: Callable[[_Leaf], _Leaf], dropped: frozenset[int], dtype: str) -> _Expr:
    """Return an expression with `change` applied to each leaf; constants are cast to `dtype` instead.

    Args:
        expr: the expression.
        change: a function from a leaf to the leaf that replaces it.
        dropped: the positions of the operations that the new expression replaces.
        dtype: the dtype of constants.
    """
    if isinstance(expr, _Leaf):
        return change(expr) if isinstance(expr.value, int) else _Leaf(_cast(expr.value, dtype), expr.task)
    if isinstance(expr, _Sum):
        return _Sum(tuple(_map_leaves(t, change, frozenset(), dtype) for t in expr.terms), dropped)
    return _Layout(expr.op, tuple(_map_leaves(e, change, frozenset(), dtype) for e in expr.operands), dropped)


def _cast(ref: Ref, dtype: str) -> Ref:
    return Lit(np.asarray(ref.value).astype(dtype)) if isinstance(ref, Lit) else ref


def _is_real(value_type: ValueType) -> bool:
    return value_type.aval.dtype.startswith(("float", "bfloat"))


def _terms(expr: _Expr) -> tuple[_Expr, ...]:
    return expr.terms if isinstance(expr, _Sum) else (expr,)


def _add(xs):
    return [xs[0] + xs[1]]


def _negate(xs):
    return [-xs[0]]


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
