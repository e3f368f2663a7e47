"""Find the rows at which the stages of a loop cut the arrays that stack layers.

A stacked array has one row per layer, and each stage takes the rows of its layers. So the array is cut where
the stages that take the rows change, and between rows of one stage that no operation takes together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from jaxpp_async.compiler.divided_axis import MovedRows, bound_argument, relate
from jaxpp_async.compiler.ir import Op, Types
from jaxpp_async.compiler.partition import StagedLoop
from jaxpp_async.compiler.primitives import ELEMENTWISE, INDEX, MOVES_ONLY, STACK

SMALL_ROW_BYTES = 1 << 10
"""The size in bytes below which rows that are taken one at a time stay one part for each stage. To copy such
a row costs less than another array, with another operation for each one that is applied to it."""

MOST_ROWS = 512
"""The most rows of a value that become parts of their own. A value with more is cut between stages only."""

Cuts: TypeAlias = tuple[int, int, tuple[int, ...]]
"""A value, an axis of it, and row numbers on this axis at which it is cut."""


def stage_cuts(staged: StagedLoop, types: Types) -> Iterator[Cuts]:
    """Yield the cuts of values of a loop's body of which different stages read, or make, different rows.

    Values that depend on the microbatch are not cut where they are read, since only what is the same in all
    microbatches lives on actors. Gradients of layers are cut where they are stacked.
    """
    body = staged.loop.body
    ops = [op for op in body.ops if isinstance(op, Op)]
    taken: dict[tuple[int, int], _TakenRows] = defaultdict(_TakenRows)
    constant = set(staged.loop.body_inputs()[0])
    for op in ops:
        if constant.issuperset(op.reads):
            constant.update(op.outputs)
    maker: dict[int, int] = {}
    for (_, stage), task in staged.tasks.items():
        maker.update(dict.fromkeys(task.made, stage))
        for op in task.ops:
            window = _window(op, types)
            if window is not None and window[0] in constant:
                value, axis, rows = window
                taken[value, axis].add(rows, stage)
    returned = {r for r in body.outputs if isinstance(r, int)}
    for op in reversed(ops):
        if returned.isdisjoint(op.outputs):
            continue
        if op.name in ELEMENTWISE | MOVES_ONLY:
            returned.update(op.reads)
        if op.name == STACK:
            for row, ref in enumerate(op.inputs):
                if isinstance(ref, int) and ref in maker:
                    taken[op.outputs[0], 0].add([row], maker[ref])
    for (value, axis), rows in taken.items():
        row_bytes = types.sizes[value] // types[value].aval.shape[axis]
        if cuts := rows.cuts() if row_bytes >= SMALL_ROW_BYTES else rows.cuts_between_stages():
            yield value, axis, cuts


class _TakenRows:
    """The rows of one value that the stages of a loop take, and which of them they take together."""

    def __init__(self) -> None:
        self._stages: dict[int, set[int]] = defaultdict(set)
        self._with_last: set[int] = set()  # rows that an operation takes together with the row before

    def add(self, rows: Sequence[int], stage: int) -> None:
        """Add the rows that one operation of a stage takes."""
        for row in rows:
            self._stages[row].add(stage)
        self._with_last.update(range(min(rows, default=0) + 1, max(rows, default=0) + 1))

    def cuts_between_stages(self) -> tuple[int, ...]:
        """Return the rows at which the stages change; none if all stages take the same rows."""
        pairs = pairwise(sorted(self._stages))
        return tuple(row for last, row in pairs if self._stages[last] != self._stages[row])

    def cuts(self) -> tuple[int, ...]:
        """Return the rows at which the value is cut; none if all stages take the same rows.

        The value is cut where the stages change, and between rows that no operation takes together, as where
        a scan with marks inside takes them one at a time. XLA compiles longer, and a step runs longer, where
        each layer is copied out of an array of several and its gradient back into one.
        """
        between_stages = self.cuts_between_stages()
        if not between_stages or len(self._stages) > MOST_ROWS:
            return between_stages
        alone = self._stages.keys() - self._with_last - {min(self._stages)}
        return tuple(sorted(alone.union(between_stages)))


def _window(op: Op, types: Types) -> tuple[int, int, Sequence[int]] | None:
    """Return the value, the axis and the rows that an operation reads if it reads some rows of one value."""
    if op.name not in (INDEX, "slice", "dynamic_slice") or not isinstance(op.inputs[0], int):
        return None
    value = op.inputs[0]
    if op.name == INDEX:
        row = bound_argument(op)
        return value, 0, range(row, row + 1)
    whole, read = types[value].aval.shape, types[op.outputs[0]].aval.shape
    axes = [d for d, (a, b) in enumerate(zip(whole, read, strict=True)) if a != b]
    if len(axes) != 1:
        return None
    relation = relate(op, types, is_result=False, position=0, axis=axes[0])
    if not isinstance(relation, MovedRows):
        return None
    rows = (range(p.operand_start, p.operand_start + p.length) for p in relation.pieces)
    return value, axes[0], tuple(row for each in rows for row in each)
