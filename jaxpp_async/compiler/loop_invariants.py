"""Move computations that do not depend on the microbatch out of a loop, and the gradients through them.

A body's value is invariant if it is computed from the loop's invariants alone, such as weights. Cheap
operations on invariants stay in the loop: tasks repeat them, and XLA fuses them into their readers. Any other
operation on invariants alone (a product of weights, a Cholesky factor, a gather from a table, a sum over a
weight) runs once a step, before the loop, and the loop reads its result.

The gradient of such a result goes back through operations that are linear in it, so it is summed over
microbatches first: f(a) + f(b) = f(a + b). These operations run once, after the loop, on the sum. So do the
operations behind them, up to the loop's result. A term of a summed gradient that is invariant itself, as the
gradient of a penalty over weights is, is added once after the loop, times the number of microbatches. Only
gradients are treated so.

`hoist_invariants` is the pass. A traced step is changed before its loops are split into stages, so that
stages, placement and the report see smaller loops, and ordinary operations around them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import structs

from jaxpp_async.compiler.cond_split import SMALL_BYTES
from jaxpp_async.compiler.ir import Flat, Lit, Loop, Op, Ref, Traced, Types, used_ids
from jaxpp_async.compiler.ir_slicing import eliminate_dead
from jaxpp_async.compiler.primitives import (
    AFFINE,
    CHEAP_OR_FIXED,
    ENLARGING,
    LIGHT,
    LINEAR_IN_ONE,
    MARKER,
    MARKER_SIDE,
    PER_CALL,
    REDUCTIONS,
)
from jaxpp_async.program.instructions import itemsize

HOISTED = "hoisted"
"""The key in `Op.params` of an operation that was moved before its loop. Its value is the number of bytes of
the loop's invariants from which the operation's result is computed."""


def hoist_invariants(traced: Traced) -> Traced:
    """Return a traced step in which each loop's invariant computations run once a step, outside the loop."""
    items: list[Op | Loop] = []
    changed = False
    for item in traced.flat.ops:
        moved = _InvariantCodeMotion(item, traced.types).moved() if isinstance(item, Loop) else None
        items += (item,) if moved is None else moved
        changed |= moved is not None
    if not changed:
        return traced
    flat = eliminate_dead(Flat(traced.flat.inputs, tuple(items), traced.flat.outputs))
    # Every argument stays an input, so that arguments and inputs keep their numbers.
    return dataclasses.replace(traced, flat=flat)


@dataclass(frozen=True)
class _Times:
    """A callable for `Op.run` that multiplies an array by a whole number."""

    factor: int

    def __call__(self, xs: Sequence[Any]) -> list[Any]:
        return [xs[0] * xs[0].dtype.type(self.factor)]


@dataclass(frozen=True)
class _Cast:
    """A callable for `Op.run` that casts an array."""

    dtype: str

    def __call__(self, xs: Sequence[Any]) -> list[Any]:
        return [xs[0].astype(self.dtype)]


@dataclass(frozen=True, eq=False)
class _LoopResult:
    """A result of the smaller loop.

    Args:
        value: the value of the body that is combined over microbatches.
        reduction: how it is combined.
        total: the id of the result outside the loop.
        casts: the operations to add at the end of the body, which make the value.
    """

    value: Ref
    reduction: Any
    total: int
    casts: tuple[Op, ...] = ()


class _InvariantCodeMotion:
    """The operations of one loop's body, and the search for those that can run outside the loop.

    Operations are identified by their position in the body. A stage marker returns the values that it is
    given, so that a value behind markers stands for the value before them (`resolve`).
    """

    def __init__(self, loop: Loop, types: Types) -> None:
        self.loop, self.types = loop, types
        self.ops = [op for op in loop.body.ops if isinstance(op, Op)]
        self.producer = {o: i for i, op in enumerate(self.ops) for o in op.outputs if o >= 0}
        self.alias: dict[int, Ref] = {}
        for op in self.ops:
            if op.name == MARKER:
                self.alias.update(zip(op.outputs[:-1], op.inputs, strict=True))
            elif op.name == MARKER_SIDE:
                self.alias.update(zip(op.outputs, op.inputs[1:], strict=True))

    def resolve(self, ref: Ref) -> Ref:
        """Return the value that an operand stands for, if stage markers are ignored."""
        while isinstance(ref, int) and ref in self.alias:
            ref = self.alias[ref]
        return ref

    def reads(self, op: Op) -> Iterable[int]:
        return (r for r in map(self.resolve, op.inputs) if isinstance(r, int))

    def moved(self) -> tuple[Op | Loop, ...] | None:
        """Return the operations before the loop, the smaller loop, and the operations after it.

        Returns:
            The items that replace the loop; None if nothing can be moved.
        """
        if not self.heavy and not any(op.transposed for op in self.ops):
            return None
        tail = _choose_tail(self)
        if not self.heavy and not tail:
            return None
        gone = self.heavy | tail
        kept = [self._without_moved(op, gone) for i, op in enumerate(self.ops) if i not in gone]
        entering = self._entering(kept, tail)
        before, after = _OuterCopies(self, {}), list[Op]()
        invariants = {v: before.ref(v) for v in entering}
        results = self._after(tail, invariants, after)
        own, batch, index = self.loop.body_inputs()
        body = Flat(
            (*own, *entering, *batch, index),
            (*kept, *(cast for r in results for cast in r.casts)),
            tuple(r.value for r in results),
        )
        loop = dataclasses.replace(
            self.loop,
            body=body,
            invariants=(*self.loop.invariants, *invariants.values()),
            outputs=tuple(r.total for r in results),
            reductions=tuple(r.reduction for r in results),
        )
        return (*before.ops, loop, *after)

    def _entering(self, kept: Sequence[Op], tail: Collection[int]) -> list[int]:
        """Return the ids of the values that are computed before the loop and that the loop still reads.

        Args:
            kept: the operations that stay in the loop.
            tail: the positions of the operations that run after the loop.
        """
        made_after = {o for i in tail for o in self.ops[i].outputs}
        returned = [r for r in map(self.resolve, self.loop.body.outputs) if r not in made_after]
        returned += [r for i in tail for r in self.reads(self.ops[i]) if r not in self.invariant | made_after]
        left = eliminate_dead(Flat(self.loop.body.inputs, tuple(kept), tuple(returned)))
        used = used_ids(left.ops, left.outputs)
        return [o for i in sorted(self.heavy) for o in self.ops[i].outputs if o in used]

    # ---- invariants

    @cached_property
    def invariant(self) -> frozenset[int]:
        """The values that are the same for all microbatches, by id."""
        found = set(self.loop.body_inputs()[0])
        for op in self.ops:
            if op.name not in PER_CALL and found.issuperset(self.reads(op)):
                found.update(o for o in op.outputs if o >= 0)
        return frozenset(found)

    def is_invariant(self, ref: Ref) -> bool:
        ref = self.resolve(ref)
        return not isinstance(ref, int) or ref in self.invariant

    @cached_property
    def heavy(self) -> frozenset[int]:
        """The positions of the operations on invariants alone that run before the loop: those that are not
        cheap, but for parts of a backward, which belong to the stages whose cotangents they make."""
        return frozenset(
            i
            for i, op in enumerate(self.ops)
            if not (op.name in CHEAP_OR_FIXED or op.transposed or self.invariant.isdisjoint(op.outputs))
        )

    def roots(self, value: int) -> set[int]:
        """Return the loop's invariants from which an invariant value is computed, by their ids in the
        body."""
        found, seen, stack = set[int](), set[int](), [value]
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            if (p := self.producer.get(v)) is None:
                found.add(v)
            else:
                stack += self.reads(self.ops[p])
        return found

    def root_bytes(self, op: Op) -> int:
        """Return the bytes of the loop's invariants from which the results of an operation are computed."""
        roots = set[int]().union(*(self.roots(r) for r in self.reads(op)))
        return sum(self.types.sizes[r] for r in roots)

    # ---- the operations after the loop

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """The positions of the operations that read each value, stage markers left out."""
        found: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            if op.name not in (MARKER, MARKER_SIDE):
                for r in self.reads(op):
                    found[r].append(i)
        return found

    @cached_property
    def results_of(self) -> dict[int, list[int]]:
        """The positions of the loop's results that each value is, by the value's id."""
        found: dict[int, list[int]] = defaultdict(list)
        for k, ref in enumerate(self.loop.body.outputs):
            if isinstance(ref := self.resolve(ref), int):
                found[ref].append(k)
        return found

    def _without_moved(self, op: Op, gone: Collection[int]) -> Op:
        """Return a copy of a marker of cotangents without the values that are made after the loop."""
        if op.name != MARKER_SIDE:
            return op
        kept = [
            k
            for k, r in enumerate(op.inputs[1:])
            if not isinstance(v := self.resolve(r), int)
            or self.producer.get(v) not in gone
            or v in self.invariant
        ]
        if len(kept) == len(op.outputs):
            return op
        inputs = (op.inputs[0], *(op.inputs[1 + k] for k in kept))
        return dataclasses.replace(op, inputs=inputs, outputs=tuple(op.outputs[k] for k in kept))

    def _after(
        self, tail: Collection[int], invariants: Mapping[int, Ref], ops: list[Op]
    ) -> list[_LoopResult]:
        """Make the operations after the loop, and choose what the loop accumulates for them.

        An invariant value that the loop does not read is computed again after the loop: this costs less than
        to keep it while the loop runs.

        Args:
            tail: the positions of the operations that run after the loop.
            invariants: the values outside the loop that the loop reads, by the body's ids.
            ops: the list that the operations are appended to.
        """
        made_after = {o for i in tail for o in self.ops[i].outputs if o >= 0}
        results = [
            _LoopResult(ref, self.loop.reductions[k], self.loop.outputs[k])
            for k, ref in enumerate(self.loop.body.outputs)
            if self.resolve(ref) not in made_after
        ]
        copies = _OuterCopies(self, invariants, ops)
        taken: dict[int, int] = {}
        for i in sorted(tail):
            op, reduction = self.ops[i], self._reduction(i)
            inputs = list[Ref]()
            for r in map(self.resolve, op.inputs):
                if self.is_invariant(r):
                    inputs.append(self._scaled(op, len(inputs), r, reduction, copies))
                    continue
                assert isinstance(r, int)
                if r not in taken:
                    taken[r] = self._total(r, self._widest(r, tail), reduction, results, ops)
                inputs.append(taken[r])
            outputs = tuple(self._result_id(o) if o >= 0 else -1 for o in op.outputs)
            ops.append(Op(op.name, tuple(inputs), outputs, op.run, op.line, op.transposed))
            for o, new in zip(op.outputs, outputs, strict=True):
                if o >= 0:
                    taken[o] = new
                    others = [self.loop.outputs[k] for k in self.results_of.get(o, ())[1:]]
                    ops += [Op("copy", (new,), (result,), list, self.loop.line) for result in others]
        return results

    def _result_id(self, value: int) -> int:
        at = self.results_of.get(value)
        return self.loop.outputs[at[0]] if at else self.types.new(self.types[value], like=value)

    def _scaled(self, op: Op, position: int, ref: Ref, reduction: Any, copies: _OuterCopies) -> Ref:
        """Return an invariant operand of an operation after the loop.

        A term of a sum is added once for each microbatch, so it is multiplied by their number.
        """
        value = copies.ref(ref)
        weight = reduction.total_weight(self.loop.num_microbatches)
        if weight == 1 or position not in AFFINE.get(op.name, ()) or self.is_zero(ref):
            return value
        assert isinstance(value, int)
        made = self.types.new(self.types[value], like=value)
        copies.ops.append(Op("mul", (value,), (made,), _Times(weight), op.line, op.transposed))
        return made

    def is_zero(self, ref: Ref) -> bool:
        """Return whether a value is a constant, or an array filled with one, that is zero everywhere."""
        ref = self.resolve(ref)
        while isinstance(ref, int) and (p := self.producer.get(ref)) is not None:
            op = self.ops[p]
            if op.name not in ENLARGING or len(op.inputs) != 1:
                return False
            ref = self.resolve(op.inputs[0])
        return isinstance(ref, Lit) and not np.any(ref.value)

    def _widest(self, value: int, tail: Collection[int]) -> str:
        """Return the widest type among a value and the loop's results that are computed from it."""
        widest, stack, seen = self.types[value].aval.dtype, [value], {value}
        while stack:
            v = stack.pop()
            dtype = self.types[v].aval.dtype
            if v in self.results_of and itemsize(dtype) > itemsize(widest):
                widest = dtype
            for i in self.users[v]:
                new = [o for o in self.ops[i].outputs if o >= 0 and o not in seen] if i in tail else []
                seen.update(new)
                stack += new
        return widest

    def _total(
        self,
        value: int,
        dtype: str,
        reduction: Any,
        results: list[_LoopResult],
        ops: list[Op],
    ) -> int:
        """Add a result to the loop: the sum of a value over microbatches, and return the sum's id.

        The sum is made in a type as wide as the results that are computed from it, and then cast back.
        """
        kind = self.types[value]
        total_type = dataclasses.replace(kind, weak=False)
        if kind.aval.dtype == dtype:
            total = self.types.new(total_type, like=value)
            results.append(_LoopResult(value, reduction, total))
            return total
        wide = dataclasses.replace(total_type, aval=structs.replace(kind.aval, dtype=dtype))
        inside, total = self.types.new(wide, like=value), self.types.new(wide, like=value)
        cast = Op("convert_element_type", (value,), (inside,), _Cast(dtype), self.loop.line, True)
        results.append(_LoopResult(inside, reduction, total, (cast,)))
        back = self.types.new(total_type, like=value)
        ops.append(
            Op("convert_element_type", (total,), (back,), _Cast(kind.aval.dtype), self.loop.line, True)
        )
        return back

    def _reduction(self, position: int) -> Any:
        """Return how the results that an operation of the tail leads to are combined over microbatches."""
        stack = [position]
        while True:
            for o in self.ops[stack.pop()].outputs:
                if o in self.results_of:
                    return self.loop.reductions[self.results_of[o][0]]
                stack += self.users.get(o, ())


class _OuterCopies:
    """Copies of operations on invariant values, which run outside the loop.

    Args:
        body: the loop's body.
        known: values outside the loop that equal values of the body, by the body's ids, beside the loop's
            invariants.
        ops: the list that copies are appended to.
    """

    def __init__(
        self, body: _InvariantCodeMotion, known: Mapping[int, Ref], ops: list[Op] | None = None
    ) -> None:
        self.body, self.ops = body, [] if ops is None else ops
        loop = body.loop
        self._known: dict[int, Ref] = {
            **dict(zip(loop.body_inputs()[0], loop.invariants, strict=True)),
            **known,
        }
        # The operations that were copied, with their copies, by name and operands.
        self._copied: dict[tuple[Any, ...], tuple[Op, tuple[int, ...]]] = {}

    def ref(self, ref: Ref) -> Ref:
        """Return the value outside the loop that equals an invariant value of the body.

        The operations that make the value are copied, unless they have been already.
        """
        ref = self.body.resolve(ref)
        stack = [ref]
        while stack:
            v = stack[-1]
            if not isinstance(v, int) or v in self._known:
                stack.pop()
                continue
            op = self.body.ops[self.body.producer[v]]
            missing = [r for r in self.body.reads(op) if r not in self._known]
            stack += missing
            if not missing:
                self._copy(op)
        return self._known[ref] if isinstance(ref, int) else ref

    def _copy(self, op: Op) -> None:
        operands = map(self.body.resolve, op.inputs)
        inputs = tuple(self._known[r] if isinstance(r, int) else r for r in operands)
        key = (op.name, *(r if isinstance(r, int) else (str(r.value), str(type(r.value))) for r in inputs))
        twin, made = self._copied.get(key, (None, ()))
        repeats = op.params.get("repeats")  # of an operation that a checkpoint computes again
        if twin is None or repeats is None or not repeats(twin):
            types = self.body.types
            made = tuple(types.new(types[o], like=o) if o >= 0 else -1 for o in op.outputs)
            params = {} if op.name in LIGHT else {HOISTED: self.body.root_bytes(op)}
            self.ops.append(
                Op(op.name, inputs, made, op.run, op.line, op.transposed, params, op.expand, op.split)
            )
            self._copied.setdefault(key, (op, made))
        self._known.update((o, m) for o, m in zip(op.outputs, made, strict=True) if o >= 0)


# ---------------------------------------------------------------- what runs after the loop


def _choose_tail(body: _InvariantCodeMotion) -> frozenset[int]:
    """Choose the operations of a body that run once after its loop, on sums over microbatches.

    Returns:
        The positions of the operations. If an operation is among them, so are all that read its results.
    """
    shapes = {body.types[o].aval.shape for i in body.heavy for o in body.ops[i].outputs if o >= 0}
    ends = [
        i
        for i in range(len(body.ops))
        if _adds_invariant(body, i) or (shapes and _goes_through_invariant(body, i, shapes))
    ]
    if not ends:
        return frozenset()
    linear = _linear_ends(body)
    tail = linear.intersection(ends)
    for i in sorted(linear):  # whatever reads their results runs later
        if any(body.producer.get(r) in tail for r in body.reads(body.ops[i])):
            tail.add(i)
    grown = True
    while grown:  # a sum of what is smaller, or what two operations read, is taken instead
        grown = False
        for i in sorted(linear - tail, reverse=True):
            op = body.ops[i]
            users = {u for o in op.outputs for u in body.users.get(o, ())}
            varying = [r for r in op.inputs if not body.is_invariant(r)]
            if not users or not users <= tail or any(o in body.results_of for o in op.outputs):
                continue
            smaller = len(varying) == 1 and _bytes(body, varying) <= _bytes(body, op.outputs)
            if smaller and op.name not in ("convert_element_type", *REDUCTIONS):
                tail.add(i)
                grown = True
    return frozenset(tail)


def _bytes(body: _InvariantCodeMotion, refs: Iterable[Ref]) -> int:
    return sum(body.types.sizes[r] for r in map(body.resolve, refs) if isinstance(r, int) and r >= 0)


def _linear_ends(body: _InvariantCodeMotion) -> set[int]:
    """Return the positions of the operations that are linear and lead to summed gradients alone."""
    gradients: set[int] = set()
    held: set[int] = set()  # what markers of the forward read
    for op in body.ops:
        if op.name == MARKER:
            held.update(body.reads(op))
        elif op.transposed or op.name == MARKER_SIDE or not gradients.isdisjoint(body.reads(op)):
            gradients.update(o for o in op.outputs if o >= 0)
    found: set[int] = set()
    kinds: dict[int, type] = {}
    for i in reversed(range(len(body.ops))):
        op = body.ops[i]
        made = [o for o in op.outputs if o >= 0]
        if not gradients.issuperset(made) or body.invariant.issuperset(made) or not held.isdisjoint(made):
            continue
        users = {u for o in made for u in body.users.get(o, ())}
        ends = [body.loop.reductions[k] for o in made for k in body.results_of.get(o, ())]
        if not users <= found or not all(r.commutes_with_add for r in ends) or not _is_linear(body, op):
            continue
        reached = {type(r) for r in ends} | {kinds[u] for u in users}
        if len(reached) == 1:
            found.add(i)
            kinds[i] = reached.pop()
    return found


def _is_linear(body: _InvariantCodeMotion, op: Op) -> bool:
    """Return whether an operation is linear in its operands that differ between microbatches."""
    varying = {k for k, r in enumerate(op.inputs) if not body.is_invariant(r)}
    types = [body.types[v] for v in (*body.reads(op), *op.outputs) if v >= 0]
    if op.name == "convert_element_type":
        source, result = types
        return (
            _is_float(source)
            and _is_float(result)
            and itemsize(result.aval.dtype) >= itemsize(source.aval.dtype)
        )
    if not all(_is_float(body.types[o]) for o in op.outputs if o >= 0):
        return False
    if op.name in AFFINE:
        if op.name in ("add", "add_any", "sub") and len({t.aval.shape for t in types}) != 1:
            return False  # JAX stretches a scalar, which a sum does not commute with
        return varying <= AFFINE[op.name]
    return len(varying) == 1 and varying <= LINEAR_IN_ONE.get(op.name, frozenset())


def _is_float(value_type: Any) -> bool:
    return value_type.aval.dtype.startswith(("float", "bfloat"))


def _goes_through_invariant(
    body: _InvariantCodeMotion, position: int, shapes: Collection[tuple[int, ...]]
) -> bool:
    """Return whether an operation takes the gradient of an invariant that is computed before the loop.

    Args:
        body: the body.
        position: the position of the operation.
        shapes: the shapes of these invariants.
    """
    op = body.ops[position]
    varying = [r for r in map(body.resolve, op.inputs) if not body.is_invariant(r)]
    if op.name == "broadcast_in_dim":  # as the gradient of a sum or a norm
        return (
            op.transposed
            and 2 * _bytes(body, varying) <= _bytes(body, op.outputs)
            and all(body.types[r].aval.shape in shapes for r in varying if isinstance(r, int))
        )
    if op.name in LIGHT or op.name in REDUCTIONS:
        return False
    return all(body.types[r].aval.shape in shapes for r in varying if isinstance(r, int))


def _adds_invariant(body: _InvariantCodeMotion, position: int) -> bool:
    """Return whether an operation adds an array that is computed from weights alone to a gradient."""
    op = body.ops[position]
    if op.name not in ("add", "add_any", "sub"):
        return False
    terms = [r for r in map(body.resolve, op.inputs) if isinstance(r, int) and body.is_invariant(r)]
    return any(body.types.sizes[r] > SMALL_BYTES and body.roots(r) for r in terms)
