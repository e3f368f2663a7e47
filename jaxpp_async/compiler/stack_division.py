"""Find the values of a step that stack layers, and divide them between the layers of different stages.

A stacked leaf has one row per layer, and the stages of a loop cut it (see `stage_cuts`). The cuts spread:
what is computed row by row from a divided value, or what a divided value is computed from row by row, is
divided at the same rows. So the gradient of a leaf, its optimizer state and its update are divided as the
leaf is. `divided_axis` says for each operation how rows correspond.

Where an operation needs a divided value whole, the value and all others that are divided with it stay whole,
unless it is small. `KeptWhole` then says why.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from jaxpp_async.compiler.divided_axis import (
    Aligned,
    Along,
    Chained,
    Combined,
    Looped,
    MovedRows,
    Relation,
    bound_argument,
    equation_params,
    relate,
)
from jaxpp_async.compiler.ir import KeptWhole, Loop, Op, Ref, Traced, Types
from jaxpp_async.compiler.partition import StagedLoop
from jaxpp_async.compiler.stage_cuts import stage_cuts
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.markers.reductions import Concat, Stack
from jaxpp_async.program.instructions import SpecEntry
from jaxpp_async.program.leaf_parts import Parts

JOINED_BYTES = 1 << 14
"""The size in bytes up to which a divided value is joined for an operation that needs it whole."""

MOST_PARTS = 512
"""The most parts of one value, unless the stages have cut the leaves into more. Operations that shift rows
against each other would make ever more."""


@dataclass(frozen=True, eq=False)
class Division:
    """The parts of every divided value of a step.

    Args:
        parts: the parts of each divided value, by its id.
        kept_whole: the stacked arrays that are not divided: argument leaves, and what is made of others.
    """

    parts: Mapping[int, Parts]
    kept_whole: tuple[KeptWhole, ...] = ()


def find_division(
    traced: Traced,
    staged: Mapping[int, StagedLoop],
    continues: Mapping[int, int],
    shardings: Mapping[int, Sequence[SpecEntry] | None],
    wanted: Mapping[int, Parts],
) -> Division:
    """Choose the values of a step that are divided, and their parts.

    Args:
        traced: the traced step, cut at the boundaries of its stages.
        staged: each loop of the step, split into the tasks of its stages, by its position.
        continues: the argument leaf that each result leaf is the next value of, by position.
        shardings: the sharding that the user gave to an argument or result, by its value. An axis that is
            divided over an actor's devices is not divided between stages as well.
        wanted: the parts in which results are to be computed, by the position of the result leaf.
    """
    hidden = [kept for loop in staged.values() for kept in _taken_in_loops(loop, traced)]
    seeds = [seed for loop in staged.values() for seed in stage_cuts(loop, traced.types)]
    results = ((traced.flat.outputs[k], parts) for k, parts in wanted.items())
    seeds += [(ref, parts.axis, parts.bounds) for ref, parts in results if isinstance(ref, int)]
    if not seeds:
        return Division({}, tuple(hidden))
    most_parts = max(MOST_PARTS, 2 * sum(len(cuts) for *_, cuts in seeds))
    spreading = _Spreading(traced, continues, shardings, most_parts)
    for value, axis, cuts in seeds:
        spreading.cut(value, axis, cuts)
    spreading.run()
    found = spreading.division()
    named = {kept.leaf for kept in found.kept_whole}
    return replace(found, kept_whole=(*found.kept_whole, *(k for k in hidden if k.leaf not in named)))


# ---------------------------------------------------------------- where stages cut

_FOR_EACH_LAYER = (
    "write it for each layer (jax.vmap, or a scan over the layers), or apply it to a small result of each"
)


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """The use that stands against the parts of a value.

    Args:
        what: the operation, or another use of the value.
        line: `file:line` of it; empty if there is none.
        needs: text that says why the value has no parts for it.
        instead: text that says what to write instead.
    """

    what: str
    line: str
    needs: str = "is not computed in parts"
    instead: str = _FOR_EACH_LAYER

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"{self.what}{at} {self.needs}"


def _taken_in_loops(staged: StagedLoop, traced: Traced) -> Iterator[KeptWhole]:
    """Yield the argument leaves of which loops inside several stages take rows that they count themselves."""
    invariants, _, _ = staged.loop.body_inputs()
    outer = dict(zip(invariants, staged.loop.invariants, strict=True))
    leaves = {v: k for k, v in enumerate(traced.flat.inputs[: len(traced.arg_names)])}
    stages: dict[int, dict[int, Op]] = defaultdict(dict)
    for (_, stage), task in staged.tasks.items():
        for op in task.ops:
            if op.name == "scan" and equation_params(op):
                for position in private_api.rows_taken_inside(bound_argument(op)):
                    if isinstance(value := op.inputs[position], int) and value in outer:
                        stages[value].setdefault(stage, op)
    for value, by_stage in stages.items():
        leaf = leaves.get(ref) if isinstance(ref := outer[value], int) else None
        if leaf is not None and len(by_stage) > 1 and traced.types.sizes[value] > JOINED_BYTES:
            line = next(iter(by_stage.values())).line
            needs = "takes layers by an index that it counts"
            instead = "give the loop the stage's layers to iterate over, such as by a scan over w[4:8]"
            why = _Obstacle("a loop inside a stage", line, needs)
            yield KeptWhole(leaf, traced.types[value].aval, str(why), instead)


# ---------------------------------------------------------------- how cuts spread


@dataclass(frozen=True, slots=True)
class _Link:
    """Rows of another value that correspond to rows of a value.

    Args:
        value: the other value.
        here: the axis of the value.
        start: the index on this axis of the first row.
        there: the axis of the other value.
        other_start: the index on that axis of the first row.
        length: the number of rows.
        is_reversed: whether the other value has the rows in the reverse order.
    """

    value: int
    here: Along
    start: int
    there: Along
    other_start: int
    length: int
    is_reversed: bool = False

    def carry(self, cuts: Iterable[int]) -> set[int] | None:
        """Return the cuts of the other value that correspond to `cuts`; None if one is within a row."""
        found = set()
        for cut in cuts:
            row, rest = divmod(cut - self.start, self.here.unit)
            if 0 <= row <= self.length:
                if rest:
                    return None
                other = self.length - row if self.is_reversed else row
                found.add(self.other_start + other * self.there.unit)
        return found


_AxisMap: TypeAlias = Callable[[int], int | None]


@dataclass(eq=False)
class _Uses:
    """The operations that make and use each value, and the values that are one value under two ids.

    Args:
        makers: the operation that makes a value, and the position of the result.
        users: the operations that read a value, and the position of the operand.
        same: for each value, its other ids, such as that in a loop's body. With each comes a function from an
            axis of the value to the axis of the other, or to None if no axis of the other corresponds, and
            the `file:line` of the loop or cond.
        whole: the uses of a value that need it whole, as text and `file:line`.
    """

    makers: dict[int, tuple[Op, int]] = field(default_factory=dict)
    users: dict[int, list[tuple[Op, int]]] = field(default_factory=lambda: defaultdict(list))
    same: dict[int, list[tuple[int, _AxisMap, str]]] = field(default_factory=lambda: defaultdict(list))
    whole: dict[int, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    _scans: set[Op] = field(default_factory=set)  # whose bodies are added

    def add(self, items: Iterable[Op | Loop]) -> None:
        for item in items:
            if isinstance(item, Loop):
                self._add_loop(item)
                continue
            for k, ref in enumerate(item.inputs):
                if isinstance(ref, int):
                    self.users[ref].append((item, k))
            self.makers.update((o, (item, k)) for k, o in enumerate(item.outputs) if o >= 0)
            for body in item.branches.bodies if item.branches is not None else ():
                self.join(zip(item.inputs[1:], body.inputs, strict=True), item.line)
                self.join(zip(item.outputs, body.outputs, strict=True), item.line)
                self.add(body.ops)

    def _add_loop(self, loop: Loop) -> None:
        invariants, _, _ = loop.body_inputs()
        self.join(zip(loop.invariants, invariants, strict=True), loop.line)
        for ref in loop.batch:
            if isinstance(ref, int):
                self.whole[ref].append(("the batch of accumulate_grads", loop.line))
        for made, ref, reduction in zip(loop.outputs, loop.body.outputs, loop.reductions, strict=True):
            if isinstance(ref, int):
                outward, inward = _axis_maps(reduction)
                self.same[ref].append((made, outward, loop.line))
                self.same[made].append((ref, inward, loop.line))
        self.add(loop.body.ops)

    def add_scan(self, op: Op, scan: Any) -> None:
        """Add the body of a scan that is computed in parts, unless that has been done.

        Args:
            op: the scan.
            scan: its `ScanParts`.
        """
        if op in self._scans or op.body is None:
            return
        self._scans.add(op)
        body, first_x, num_carry = op.body(), scan.first_x, scan.num_carry
        self.join(zip(op.inputs[:first_x], body.inputs, strict=False), op.line)
        self.join(zip(body.outputs[:num_carry], body.inputs[scan.num_consts :], strict=False), op.line)
        self.join(zip(op.outputs[:num_carry], body.outputs, strict=False), op.line)
        stacked = [
            *zip(op.inputs[first_x:], body.inputs[first_x:], strict=True),
            *zip(op.outputs[num_carry:], body.outputs[num_carry:], strict=True),
        ]
        outward, inward = _axis_maps(Stack())
        for whole, element in stacked:
            if isinstance(whole, int) and whole >= 0 and isinstance(element, int):
                self.same[element].append((whole, outward, op.line))
                self.same[whole].append((element, inward, op.line))
        self.add(body.ops)

    def join(self, pairs: Iterable[tuple[Ref, Ref]], line: str) -> None:
        for one, other in pairs:
            if isinstance(one, int) and isinstance(other, int) and one >= 0 and one != other:
                self.same[one].append((other, _keep, line))
                self.same[other].append((one, _keep, line))


def _keep(axis: int) -> int:
    return axis


def _keep_unless(joined: int, axis: int) -> int | None:
    return None if joined in (axis, -1) else axis


def _axis_maps(reduction: object) -> tuple[_AxisMap, _AxisMap]:
    """Return how the axes of one microbatch's value become those of a loop's result, and the reverse."""
    if isinstance(reduction, Stack):
        return (lambda axis: axis + 1), (lambda axis: axis - 1 if axis else None)
    if isinstance(reduction, Concat):
        kept = functools.partial(_keep_unless, reduction.axis)
        return kept, kept
    return _keep, _keep


class _Spreading:
    """The cuts of a step's values, which spread from value to value."""

    def __init__(
        self,
        traced: Traced,
        continues: Mapping[int, int],
        shardings: Mapping[int, Sequence[SpecEntry] | None],
        most_parts: int = MOST_PARTS,
    ) -> None:
        self.traced, self.types, self.shardings = traced, traced.types, shardings
        self.most_parts = most_parts
        self.uses = _Uses()
        self.uses.add(traced.flat.ops)
        for result, leaf in continues.items():
            if isinstance(ref := traced.flat.outputs[result], int):
                self.uses.join([(ref, traced.flat.inputs[leaf])], "")
        for ref in traced.hidden_results:
            if isinstance(ref, int):
                self.uses.whole[ref].append(("a printed value", ""))
        self.axis: dict[int, int] = {}
        self.cuts: dict[int, set[int]] = defaultdict(set)
        self.linked: dict[int, set[int]] = defaultdict(set)
        self.obstacles: dict[int, _Obstacle] = {}  # by the value that stays whole
        self.queue: deque[int] = deque()

    def cut(self, value: int, axis: int, cuts: Iterable[int], why: str = "", line: str = "") -> None:
        """Cut a value at some indices of an axis; those at its ends count for nothing.

        Args:
            value: the value.
            axis: the axis.
            cuts: the indices.
            why: the operation for which it is cut; empty for a stage's.
            line: `file:line` of that operation.
        """
        known, length = self.axis.get(value), self.types[value].aval.shape[axis]
        if known not in (None, axis):
            needs = f"takes layers on axis {axis}, and others take them on axis {known}"
            self._keep(
                value,
                _Obstacle(
                    why or "a stage",
                    line,
                    needs,
                    "take layers on one axis everywhere, or let stages end between groups of layers",
                ),
            )
            return
        new = {c for c in cuts if 0 < c < length} - self.cuts[value]
        if not new:
            return
        self.axis[value] = axis
        self.cuts[value] |= new
        if self._is_sharded(value, axis):
            needs = f"divides axis {axis}, on which the layers are, over an actor's devices"
            self.obstacles.setdefault(
                value, _Obstacle("its sharding", "", needs, "divide another axis, such as by P(None, 'data')")
            )
        if len(self.cuts[value]) >= self.most_parts:
            needs = "shifts layers against each other"
            self.obstacles.setdefault(value, _Obstacle(why or "an operation", line, needs))
        else:
            self.queue.append(value)

    def _is_sharded(self, value: int, axis: int) -> bool:
        known = self.types[value].sharding
        specs = (self.shardings.get(value), None if known is None else known.spec)
        return any(spec is not None and axis < len(spec) and spec[axis] for spec in specs)

    def run(self) -> None:
        """Spread the cuts until no value gets more."""
        while self.queue:
            self._spread(self.queue.popleft())

    def _spread(self, value: int) -> None:
        axis, cuts = self.axis[value], self.cuts[value]
        makers = [self.uses.makers[value]] if value in self.uses.makers else []
        uses = [(*use, True) for use in makers] + [(*use, False) for use in self.uses.users.get(value, ())]
        for op, position, is_result in uses:
            relation = relate(op, self.types, is_result=is_result, position=position, axis=axis)
            if isinstance(relation, Looped):
                self.uses.add_scan(op, relation.scan)
            links = _links(op, position, is_result, axis, self.types, relation)
            if links is None and not is_result:  # else it is divided once it is made
                self._keep(value, _Obstacle(op.name, op.line))
            for link in links or ():
                self._pass_on(value, link, op.name, op.line)
        for why, line in self.uses.whole.get(value, ()):
            self._keep(value, _Obstacle(why, line))
        for other, map_axis, line in self.uses.same.get(value, ()):
            there = map_axis(axis)
            if there is None:
                self._keep(value, _Obstacle("accumulate_grads", line))
            else:
                self._pass_on(value, _Link(other, Along(axis), 0, Along(there), 0, max(cuts)), "", line)

    def _pass_on(self, value: int, link: _Link, name: str, line: str) -> None:
        carried = link.carry(self.cuts[value])
        if carried is None:
            self._keep(value, _Obstacle(name, line))
            return
        self.linked[value].add(link.value)
        self.linked[link.value].add(value)
        self.cut(link.value, link.there.axis, carried, name, line)

    def _keep(self, value: int, obstacle: _Obstacle) -> None:
        """Keep a value whole for an obstacle; a small one is joined for it."""
        if self.types.sizes[value] > JOINED_BYTES:
            self.obstacles.setdefault(value, obstacle)

    def division(self) -> Division:
        """Return the parts of all values that have no obstacle."""
        whole: dict[int, _Obstacle] = {}
        kept: list[KeptWhole] = []
        leaves = {v: k for k, v in enumerate(self.traced.flat.inputs[: len(self.traced.arg_names)])}
        for value, obstacle in self.obstacles.items():
            group, stack = [value], [value]
            while stack:
                if (v := stack.pop()) not in whole:
                    whole[v] = obstacle
                    group.append(v)
                    stack += self.linked[v]
            arguments = [v for v in dict.fromkeys(group) if v in leaves and self.cuts[v]]
            kept += [
                KeptWhole(leaves.get(v), self.types[v].aval, str(obstacle), obstacle.instead)
                for v in arguments or ([value] if len(group) > 1 else [])
            ]
        parts = {
            v: Parts(self.axis[v], (0, *sorted(cuts), self.types[v].aval.shape[self.axis[v]]))
            for v, cuts in self.cuts.items()
            if cuts and v not in whole
        }
        return Division(parts, tuple(kept))


def _links(
    op: Op, position: int, is_result: bool, axis: int, types: Types, relation: Relation | None
) -> Sequence[_Link] | None:
    """Return the links from one operand or result of an operation to its others; None if it has no parts."""
    match relation:
        case None:
            return None
        case Aligned(operands, results):
            ends = [*zip(op.inputs, operands, strict=True), *zip(op.outputs, results, strict=True)]
            here = (results if is_result else operands)[position]
            value = (op.outputs if is_result else op.inputs)[position]
        case Combined(operands):
            ends, here, value = (
                list(zip(op.inputs, operands, strict=True)),
                operands[position],
                op.inputs[position],
            )
        case Chained(scan):
            ends = [(r, Along(0)) for r in (*op.inputs[scan.first_x :], *op.outputs[scan.num_carry :])]
            here, value = Along(0), (op.outputs if is_result else op.inputs)[position]
        case MovedRows(is_reversed=True):
            other = op.inputs[0] if is_result else op.outputs[0]
            length = len(relation.pieces)
            return (
                [_Link(other, Along(axis), 0, Along(axis), 0, length, True)] if isinstance(other, int) else []
            )
        case MovedRows(moved_axis, pieces):
            return _moved_links(op, position, is_result, moved_axis, pieces)
        case _:  # one row each, or a body or branches, whose values are listed as the same
            return ()
    if here is None or any(r == value and along != here for r, along in ends if along is not None):
        return None
    assert isinstance(value, int)
    length = types[value].aval.shape[axis] // here.unit
    return [
        _Link(r, here, 0, along, 0, length)
        for r, along in ends
        if along is not None and isinstance(r, int) and r >= 0 and r != value
    ]


def _moved_links(op: Op, position: int, is_result: bool, axis: int, pieces: Sequence) -> list[_Link] | None:
    along, found = Along(axis), []
    for piece in pieces:
        if (piece.result if is_result else piece.operand) != position:
            continue
        other = op.inputs[piece.operand] if is_result else op.outputs[piece.result]
        starts = piece.operand_start, piece.result_start
        here, there = starts[::-1] if is_result else starts
        if isinstance(other, int) and other >= 0:
            found.append(_Link(other, along, here, along, there, piece.length))
    return found
