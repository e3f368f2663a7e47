"""Rewrite a step so that its stacked leaves, and what is computed from them, are computed in parts.

A divided argument leaf becomes one argument per part, a divided result one result per part, and an operation
on divided values one operation per part. Later passes see no difference: they place each part where it is
used. `stack_division` chooses the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpp_async.compiler import evaluate, scan
from jaxpp_async.compiler.divided_axis import (
    Aligned,
    Along,
    Branched,
    Chained,
    Combined,
    Looped,
    MovedRows,
    Picked,
    Relation,
    Stacked,
    bound_argument,
    equation_params,
    relate,
)
from jaxpp_async.compiler.divided_scan import Carry, Collected, DividedScan
from jaxpp_async.compiler.divided_values import BodyValues, PartIds, concatenate
from jaxpp_async.compiler.ir import (
    Flat,
    Lit,
    Loop,
    Op,
    Ref,
    Traced,
    literal_type,
    renamed,
)
from jaxpp_async.compiler.primitives import ADDITIONS, JOINS_PARTS
from jaxpp_async.compiler.stack_division import Division
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.program.leaf_parts import Parts, part_positions


def divide(traced: Traced, division: Division, wanted: Mapping[int, Parts]) -> Traced:
    """Return a traced step in which the values of a division are computed in parts.

    Args:
        traced: the traced step, in which nothing is divided.
        division: the parts of each divided value.
        wanted: the parts in which the caller wants results, by the position of the result leaf.
    """
    traced = replace(traced, kept_whole=division.kept_whole)
    if not division.parts and not wanted:
        return traced
    divider = PartIds(traced.types, division.parts)
    num_arguments, num_results = len(traced.arg_names), len(traced.out_names)
    inputs, ids = traced.flat.inputs, divider.in_parts(traced.flat.inputs)
    body = _Body(divider)
    body.add(traced.flat.ops)
    of_result = tuple(
        wanted.get(k) or (division.parts.get(ref) if isinstance(ref, int) else None)
        for k, ref in enumerate(traced.flat.outputs[:num_results])
    )
    pairs = zip(traced.flat.outputs[:num_results], of_result, strict=True)
    outputs = [part for ref, parts in pairs for part in body.result(ref, parts)]
    outputs += [body.whole(r) for r in traced.hidden_results]
    of_argument = tuple(division.parts.get(v) for v in inputs[:num_arguments])
    return replace(
        traced,
        flat=Flat(ids, tuple(body.ops), tuple(outputs)),
        arg_names=_names(traced.arg_names, of_argument),
        arg_of=tuple(expand_leaves(traced.arg_of, of_argument)),
        captured=tuple(part for c in traced.captured for part in divider.captured_parts(c)),
        out_names=_names(traced.out_names, of_result),
        argument_parts=of_argument,
        result_parts=of_result,
    )


def expand_pairs(pairs: Mapping[int, int], traced: Traced) -> dict[int, int]:
    """Return pairs of a result leaf and an argument leaf as pairs of their parts.

    Args:
        pairs: a dictionary from the position of a result leaf to that of an argument leaf. A pair of leaves
            that have other parts is left out.
        traced: the step in parts.
    """
    results, arguments = part_positions(traced.result_parts), part_positions(traced.argument_parts)
    return {
        part: own
        for result, leaf in pairs.items()
        if traced.result_parts[result] == traced.argument_parts[leaf]
        for part, own in zip(results[result], arguments[leaf], strict=True)
    }


def expand_leaves(values: Sequence[Any], parts: Sequence[Parts | None]) -> list[Any]:
    """Return one entry per part, from one entry per leaf.

    Args:
        values: one entry per leaf, such as its sharding.
        parts: the parts of each leaf; None for an undivided leaf.
    """
    pairs = zip(values, parts, strict=True)
    return [value for value, of_leaf in pairs for _ in range(1 if of_leaf is None else of_leaf.count)]


def _names(leaves: Sequence[str], parts: Sequence[Parts | None]) -> tuple[str, ...]:
    return tuple(
        name
        for leaf, of_leaf in zip(leaves, parts, strict=True)
        for name in ((leaf,) if of_leaf is None else of_leaf.names(leaf))
    )


class _Body(BodyValues):
    """The rewritten operations of one body: the step, a loop's body, or a branch of a cond."""

    def __init__(self, divider: PartIds) -> None:
        super().__init__(divider)
        self._made_apart: dict[tuple[int, Parts], tuple[int, ...]] = {}

    # ---- operations

    def add(self, items: Sequence[Op | Loop]) -> None:
        """Add operations in program order."""
        for item in items:
            if isinstance(item, Loop):
                self.ops.append(self._loop(item))
            elif any(map(self.is_divided, (*item.inputs, *item.outputs))):
                self._add_divided(item)
            else:
                self.ops.append(renamed(item, self.renamed.keys(), self.whole))

    def _add_divided(self, op: Op) -> None:
        match self._relation(op):
            case Aligned() as aligned:
                self._add_aligned(op, aligned)
            case Combined(operands, combine):
                self._add_combined(op, operands, combine)
                self.slice_whole(op.outputs[0], op.line)
            case MovedRows() as moved:
                self._add_moved(op, moved)
            case Picked(row):
                self._add_picked(op, row)
                self.slice_whole(op.outputs[0], op.line)
            case Stacked():
                self._add_stacked(op)
            case Chained(parts):
                self._add_chained(op, parts)
                for carry in op.outputs[: parts.num_carry]:
                    self.slice_whole(carry, op.line)
            case Looped(parts):
                self._add_looped(op, parts)
            case Branched():
                self._add_cond(op)
            case None:
                self._add_whole(op)

    def _relation(self, op: Op) -> Relation | None:
        """Return how an operation is computed in parts; None if it has to be computed whole."""
        for is_result, refs in ((True, op.outputs), (False, op.inputs)):
            for position, ref in enumerate(refs):
                if isinstance(ref, int) and ref in self.parts:
                    axis = self.parts[ref].axis
                    found = relate(op, self.types, is_result=is_result, position=position, axis=axis)
                    if found is not None and self._fits(op, found):
                        return found
        return None

    def _fits(self, op: Op, relation: Relation) -> bool:
        """Return whether all values that a relation divides are divided, at the same rows."""
        ends: list[tuple[Ref, Along | None]] = []
        match relation:
            case Aligned(operands, results):
                ends = [*zip(op.inputs, operands, strict=True), *zip(op.outputs, results, strict=True)]
            case Combined(operands):
                ends = list(zip(op.inputs, operands, strict=True))
            case Chained(scan_parts):
                stacked = (*op.inputs[scan_parts.first_x :], *op.outputs[scan_parts.num_carry :])
                ends = [(ref, Along(0)) for ref in stacked]
            case Looped(scan_parts):
                stacked = (*op.inputs[scan_parts.first_x :], *op.outputs[scan_parts.num_carry :])
                divided = (self.parts.get(ref) for ref in stacked if isinstance(ref, int))
                return all(parts is None or parts.axis > 0 for parts in divided)
        rows = {
            self._rows_along(ref, along)
            for ref, along in ends
            if along is not None and isinstance(ref, int) and ref >= 0
        }
        return None not in rows and len(rows) <= 1

    def _rows_along(self, value: int, along: Along) -> tuple[tuple[int, int], ...] | None:
        """Return the first row of each part of a value, and that behind its last; None if the parts do not
        begin at rows of this axis."""
        parts = self.parts.get(value)
        if parts is None or parts.axis != along.axis or any(bound % along.unit for bound in parts.bounds):
            return None
        return tuple((start // along.unit, stop // along.unit) for start, stop in parts.ranges)

    def _add_whole(self, op: Op) -> None:
        for ref in op.reads:
            self.whole(ref)  # joined under its own id
        self.ops.append(renamed(op, self.renamed.keys(), self.whole))
        for value in op.outputs:
            self.slice_whole(value, op.line)

    def _add_aligned(self, op: Op, aligned: Aligned) -> None:
        bounds = self._row_bounds(op, aligned.operands, aligned.results)
        for part, (start, stop) in enumerate(bounds):
            inputs = self._part_operands(op, aligned.operands, part, (start, stop))
            outputs = tuple(o if o < 0 else self.divider.ids(o)[part] for o in op.outputs)
            if op.name in ADDITIONS and (other := self._other_term(inputs)) is not None:
                self.divider.rename(op.outputs[0], part, other)
                continue
            run = op.run
            if aligned.resize is not None:
                params = aligned.resize(equation_params(op), start, stop)
                run = _with_params(op, params)
            self.ops.append(replace(op, inputs=inputs, outputs=outputs, run=run))

    def _other_term(self, terms: Sequence[Ref]) -> int | None:
        """Return the term of a sum whose other term is known to be zero."""
        for term, other in (terms, terms[::-1]):
            if term in self.divider.zeros and isinstance(other, int):
                return other
        return None

    def _row_bounds(
        self, op: Op, operands: Sequence[Along | None], results: Sequence[Along]
    ) -> tuple[tuple[int, int], ...]:
        """Return the first row of each part, and the row behind its last."""
        ends = [*zip(op.outputs, results, strict=False), *zip(op.inputs, operands, strict=True)]
        value, along = next((v, a) for v, a in ends if a is not None and self.is_divided(v))
        assert isinstance(value, int) and along is not None
        return tuple((a // along.unit, b // along.unit) for a, b in self.parts[value].ranges)

    def _part_operands(
        self, op: Op, operands: Sequence[Along | None], part: int, rows: tuple[int, int]
    ) -> tuple[Ref, ...]:
        """Return the operands for one part: parts of the divided ones, and all others whole."""
        found: list[Ref] = []
        for ref, along in zip(op.inputs, operands, strict=True):
            if along is None:
                found.append(self.whole(ref))
            elif isinstance(ref, int):
                found.append(self.divider.ids(ref)[part])
            else:
                index = (slice(None),) * along.axis
                start, stop = (row * along.unit for row in rows)
                found.append(Lit(np.asarray(ref.value)[*index, start:stop]))
        return tuple(found)

    def _add_combined(self, op: Op, operands: Sequence[Along | None], combine: str) -> None:
        (result,) = op.outputs
        bounds = self._row_bounds(op, operands, ())
        total: int | None = None
        for part, rows in enumerate(bounds):
            made = self.types.new(self.types[result], like=result)
            self.ops.append(
                replace(op, inputs=self._part_operands(op, operands, part, rows), outputs=(made,))
            )
            if total is None:
                total = made
                continue
            is_last = part == len(bounds) - 1
            joined = result if is_last else self.types.new(self.types[result], like=result)
            name = combine.removeprefix("bitwise_")
            run = partial(_combine, combine)
            params = {JOINS_PARTS: True}
            self.ops.append(Op(name, (total, made), (joined,), run, op.line, op.transposed, params))
            total = joined

    def _add_picked(self, op: Op, row: int) -> None:
        (value,) = op.reads
        for part, (start, stop) in enumerate(self.parts[value].ranges):
            if start <= row < stop:
                run = partial(scan.pick_row, row - start)
                self.ops.append(replace(op, inputs=(self.divider.ids(value)[part],), run=run))

    def _add_stacked(self, op: Op) -> None:
        (value,) = op.outputs
        inputs = tuple(map(self.whole, op.inputs))
        for (start, stop), made in zip(self.parts[value].ranges, self.divider.ids(value), strict=True):
            self.ops.append(replace(op, inputs=inputs[start:stop], outputs=(made,)))

    # ---- operations that move rows

    def _add_moved(self, op: Op, moved: MovedRows) -> None:
        for k, result in enumerate(op.outputs):
            if result < 0:
                continue
            if result not in self.parts:
                length = self.types[result].aval.shape[moved.axis]
                self.renamed[result] = self._assembled(op, moved, k, 0, length, result)
                continue
            for part, (start, stop) in enumerate(self.parts[result].ranges):
                made = self._assembled(op, moved, k, start, stop, self.divider.ids(result)[part])
                self.divider.rename(result, part, made)

    def _assembled(self, op: Op, moved: MovedRows, result: int, start: int, stop: int, into: int) -> int:
        """Return rows of a result of an operation that copies rows.

        Args:
            op: the operation.
            moved: the copies.
            result: the position of the result.
            start: the first row.
            stop: the row behind the last.
            into: the id for the rows if they have to be made; they may already be a value.
        """
        segments: list[
            tuple[int, int, Ref, int, int]
        ] = []  # rows of the result, then the operand and its rows
        for piece in moved.pieces:
            first = max(start, piece.result_start)
            last = min(stop, piece.result_start + piece.length)
            if piece.result == result and first < last:
                offset = piece.operand_start - piece.result_start
                segments.append((first, last, op.inputs[piece.operand], first + offset, last + offset))
        found, at = list[Ref](), start
        for first, last, operand, operand_first, operand_last in sorted(segments, key=lambda s: s[0]):
            if at < first:
                found.append(self._filled(op, moved, first - at, into))
            found += self.rows(operand, moved.axis, operand_first, operand_last, op.line)
            at = last
        if at < stop:
            found.append(self._filled(op, moved, stop - at, into))
        if len(found) == 1 and isinstance(found[0], int):
            return found[0]
        run = partial(concatenate, moved.axis)
        self.ops.append(Op("concatenate", tuple(found), (into,), run, op.line, op.transposed))
        return into

    def _filled(self, op: Op, moved: MovedRows, length: int, like: int) -> int:
        assert moved.fill is not None
        shape = list(self.types[like].aval.shape)
        shape[moved.axis] = length
        fill, made = op.inputs[moved.fill], self.divider.resized(like, shape)
        run = partial(_fill, tuple(shape), self.types[made].sharding)
        self.ops.append(Op("broadcast_in_dim", (self.whole(fill),), (made,), run, op.line, op.transposed))
        if isinstance(fill, Lit) and not np.any(np.asarray(fill.value)):
            self.divider.zeros.add(made)
        return made

    # ---- operations with others inside

    def _add_chained(self, op: Op, parts: Any) -> None:
        stacked = [*op.inputs[parts.first_x :], *op.outputs[parts.num_carry :]]
        value = next(r for r in stacked if isinstance(r, int) and r in self.parts)
        consts = tuple(map(self.whole, op.inputs[: parts.num_consts]))
        carry = tuple(map(self.whole, op.inputs[parts.num_consts : parts.first_x]))
        order = list(enumerate(self.parts[value].ranges))
        order = order[::-1] if parts.reverse else order
        for part, (start, stop) in order:
            is_last = part == order[-1][0]
            along = (*(None,) * parts.first_x, *(Along(0),) * (len(op.inputs) - parts.first_x))
            xs = self._part_operands(op, along, part, (start, stop))[parts.first_x :]
            carried = op.outputs[: parts.num_carry]
            ends = carried if is_last else tuple(self._carry_id(op, parts, k) for k in range(parts.num_carry))
            ys = tuple(o if o < 0 else self.divider.ids(o)[part] for o in op.outputs[parts.num_carry :])
            run = _with_params(op, {**equation_params(op), "length": stop - start})
            self.ops.append(
                replace(op, inputs=(*consts, *carry, *xs), outputs=(*ends, *ys), run=run, split=None)
            )
            carry = ends

    def _add_looped(self, op: Op, parts: Any) -> None:
        """Add a scan in every iteration of which all parts are computed."""
        assert op.body is not None
        body, inner = op.body(), _Body(self.divider)
        first_carry, first_x, num_carry = parts.num_consts, parts.first_x, parts.num_carry
        divided = [self.parts.get(v) for v in body.inputs]
        inner.add(body.ops)
        operands = [
            self.result(ref, known and (_stacked(known) if k >= first_x else known))
            for k, (ref, known) in enumerate(zip(op.inputs, divided, strict=True))
        ]
        inputs = [
            list(zip(self.divider.in_parts((v,)), refs, strict=True))
            for v, refs in zip(body.inputs, operands, strict=True)
        ]
        carries, ys = list[Carry](), list[Collected]()
        for k, (value, ref) in enumerate(zip(op.outputs, body.outputs, strict=True)):
            if k < num_carry:
                known = divided[first_carry + k]
                ends = inner.result(ref, known) if known else [inner.whole(ref)]
                pairs = zip(inputs[first_carry + k], ends, self._made(value, known), strict=True)
                carries += [
                    Carry(start, end, first, made, None if known is None else part)
                    for part, ((start, first), end, made) in enumerate(pairs)
                ]
            else:
                known = self.parts.get(value)
                inside = known and Parts(known.axis - 1, known.bounds)
                elements = inner.result(ref, inside) if inside else [inner.whole(ref)]
                ys += [
                    Collected(element, made, None if known is None else part)
                    for part, (element, made) in enumerate(
                        zip(elements, self._made(value, known), strict=True)
                    )
                ]
        looped = DividedScan(
            consts=[pair for pairs in inputs[:first_carry] for pair in pairs],
            carries=carries,
            xs=[pair for pairs in inputs[first_x:] for pair in pairs],
            ys=ys,
            ops=[each for each in inner.ops if isinstance(each, Op)],
            length=parts.length,
            reverse=parts.reverse,
        )
        for made in looped.scans_by_part():
            run = made.scan.run
            self.ops.append(
                replace(op, inputs=made.inputs, outputs=made.outputs, run=run, split=None, body=None)
            )
        for k, value in enumerate(op.outputs):
            known = divided[first_carry + k] if k < num_carry else self.parts.get(value)
            if value >= 0 and known != self.parts.get(value):
                if known is not None:  # it is divided in the scan alone, or otherwise
                    run = partial(concatenate, known.axis)
                    self.ops.append(Op("concatenate", self._made(value, known), (value,), run, op.line))
                self.slice_whole(value, op.line)

    def _made(self, value: int, parts: Parts | None) -> tuple[int, ...]:
        """Return the ids of the parts that a scan makes of a result; its own id if it makes no parts."""
        if parts is None or value < 0:
            return (value,) * (1 if parts is None else parts.count)
        if self.parts.get(value) == parts:
            return self.divider.ids(value)
        if (value, parts) not in self._made_apart:
            shapes = parts.shapes(self.types[value].aval.shape)
            self._made_apart[value, parts] = tuple(self.divider.resized(value, shape) for shape in shapes)
        return self._made_apart[value, parts]

    def _carry_id(self, op: Op, parts: Any, position: int) -> int:
        """Return the id of a carry between two parts of a scan, which is of the type of the scan's result."""
        if (result := op.outputs[position]) >= 0:
            return self.types.new(self.types[result], like=result)
        start = op.inputs[parts.num_consts + position]
        if isinstance(start, int):
            return self.types.new(self.types[start], like=start)
        return self.types.new(literal_type(start))

    def _add_cond(self, op: Op) -> None:
        assert op.branches is not None
        bodies = []
        for branch in op.branches.bodies:
            inner = _Body(self.divider)
            inputs = inner.enter(op.inputs[1:], branch.inputs, op.line)
            inner.add(branch.ops)
            outputs = [
                part
                for made, ref in zip(op.outputs, branch.outputs, strict=True)
                for part in (inner.results([ref]) if made in self.parts else [inner.whole(ref)])
            ]
            bodies.append(Flat(inputs, tuple(inner.ops), tuple(outputs)))
        chosen = evaluate.branches(bodies, self.types, terminates=op.branches.terminates)
        choice, *operands = op.inputs
        self.ops.append(
            replace(
                op,
                inputs=(self.whole(choice), *self.results(operands)),
                outputs=self.divider.in_parts(op.outputs),
                run=chosen.choose(bodies),
                branches=chosen,
            )
        )

    def _loop(self, loop: Loop) -> Loop:
        invariants, batch, index = loop.body_inputs()
        inner = _Body(self.divider)
        inputs = inner.enter(loop.invariants, invariants, loop.line)
        for leaf in batch:
            inner.slice_whole(leaf, loop.line)
        inner.add(loop.body.ops)
        outputs, results, reductions = list[Ref](), list[int](), list[Any]()
        for made, ref, reduction in zip(loop.outputs, loop.body.outputs, loop.reductions, strict=True):
            ids = self.divider.ids(made) if made in self.parts else (made,)
            outputs += inner.results([ref]) if made in self.parts else [inner.whole(ref)]
            results += ids
            reductions += [reduction] * len(ids)
        body = Flat((*inputs, *batch, index), tuple(inner.ops), tuple(outputs))
        return replace(
            loop,
            body=body,
            invariants=tuple(self.results(loop.invariants)),
            batch=tuple(map(self.whole, loop.batch)),
            outputs=tuple(results),
            reductions=tuple(reductions),
        )


# ---------------------------------------------------------------- functions of arrays


def _stacked(parts: Parts) -> Parts:
    """Return the parts of a stack over iterations, from those of the value of one iteration."""
    return Parts(parts.axis + 1, parts.bounds)


def _with_params(op: Op, params: Mapping[str, Any]) -> Any:
    """Return an `Op.run` that runs the equation of an operation with other parameters."""
    return partial(private_api.bind_eqn, bound_argument(op).replace(params=dict(params)))


def _fill(shape: tuple[int, ...], sharding: Any, xs: Sequence[Any]) -> list[Any]:
    return [lax.broadcast(jnp.asarray(xs[0]), shape, out_sharding=sharding)]


def _combine(name: str, xs: Sequence[Any]) -> list[Any]:
    return [getattr(lax, name)(*xs)]
