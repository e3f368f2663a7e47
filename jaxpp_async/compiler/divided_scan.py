"""Write a scan whose body is computed in parts as one scan for each part.

An update may run a scan in every iteration of which all layers are computed, such as the Newton iterations
of Muon. If the iterations of a part need no other part, the part gets a scan of its own, which runs where the
part lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxpp_async.compiler.ir import Op, Ref
from jaxpp_async.compiler.ir_slicing import split_needed
from jaxpp_async.compiler.scan import FlatScan


@dataclass(frozen=True, slots=True)
class Carry:
    """A carry of a scan, or a part of one.

    Args:
        start: its id in the body at the start of an iteration.
        end: its value at the end of an iteration.
        first: its value before the scan.
        result: the id of its value behind the scan; -1 if that is not used.
        part: the position of the part; None for an undivided carry.
    """

    start: int
    end: Ref
    first: Ref
    result: int
    part: int | None


@dataclass(frozen=True, slots=True)
class Collected:
    """A value of each iteration that a scan stacks, or a part of one.

    Args:
        element: the value in the body.
        result: the id of the stack; -1 if it is not used.
        part: the position of the part; None for an undivided value.
    """

    element: Ref
    result: int
    part: int | None


@dataclass(frozen=True, slots=True)
class PartScan:
    """One of the scans that `scans_by_part` makes.

    Args:
        inputs: the operands: constants, first values of the carries, and what is iterated over.
        outputs: the ids of the results.
        scan: the computation.
    """

    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]
    scan: FlatScan


@dataclass(frozen=True, slots=True)
class DividedScan:
    """A scan whose body is in parts.

    Args:
        consts: for each value that all iterations share, its id in the body and outside.
        carries: the carries, those in parts as one for each part.
        xs: for each value that is iterated over, the id of its element in the body, and its value outside.
        ys: the values that are stacked.
        ops: the operations of the body.
        length: the number of iterations.
        reverse: whether the iterations run from the last element to the first.
    """

    consts: Sequence[tuple[int, Ref]]
    carries: Sequence[Carry]
    xs: Sequence[tuple[int, Ref]]
    ys: Sequence[Collected]
    ops: Sequence[Op]
    length: int
    reverse: bool

    def scans_by_part(self) -> Iterator[PartScan]:
        """Yield a scan for each part, and one for the rest; a single scan if parts need each other."""
        wanted = [(c.part, c.result, c.end) for c in self.carries]
        wanted += [(y.part, y.result, y.element) for y in self.ys]
        groups = dict.fromkeys(part for part, result, _ in wanted if result >= 0)
        found = {part: self._needed(ref for p, r, ref in wanted if p == part and r >= 0) for part in groups}
        is_apart = all(
            self.carries[k].part in (None, part) for part, (_, carried) in found.items() for k in carried
        )
        if not is_apart:
            ops, carried = self._needed(ref for _, result, ref in wanted if result >= 0)
            yield self._scan(ops, carried, None, is_whole=True)
            return
        for part, (ops, carried) in found.items():
            yield self._scan(ops, carried, part, is_whole=False)

    def _needed(self, refs: Iterable[Ref]) -> tuple[list[Op], set[int]]:
        """Return the operations and the positions of the carries that some values of an iteration need."""
        wanted = {ref for ref in refs if isinstance(ref, int)}
        carried: set[int] = set()
        while True:
            ends = {end for k in carried if isinstance(end := self.carries[k].end, int)}
            ops, _ = split_needed(self.ops, wanted | ends)
            read = wanted.union(ends, *(op.reads for op in ops))
            more = {k for k, carry in enumerate(self.carries) if carry.start in read} - carried
            more |= {k for k, carry in enumerate(self.carries) if carry.end in wanted} - carried
            if not more:
                return ops, carried
            carried |= more

    def _scan(self, ops: Sequence[Op], carried: set[int], part: int | None, *, is_whole: bool) -> PartScan:
        def belongs(one: Carry | Collected) -> bool:
            return one.result >= 0 and (is_whole or one.part == part)

        kept = [c for k, c in enumerate(self.carries) if k in carried or belongs(c)]
        ys = [y for y in self.ys if belongs(y)]
        read = {r for op in ops for r in op.reads}.union(
            (c.end for c in kept if isinstance(c.end, int)),
            (y.element for y in ys if isinstance(y.element, int)),
        )
        consts = [pair for pair in self.consts if pair[0] in read]
        xs = [pair for pair in self.xs if pair[0] in read]
        return PartScan(
            inputs=(*(ref for _, ref in consts), *(c.first for c in kept), *(ref for _, ref in xs)),
            outputs=(*(c.result if belongs(c) else -1 for c in kept), *(y.result for y in ys)),
            scan=FlatScan(
                consts=tuple(value for value, _ in consts),
                carry=tuple((c.start, c.end) for c in kept),
                xs=tuple(value for value, _ in xs),
                ops=tuple(ops),
                ys=tuple(y.element for y in ys),
                length=self.length,
                reverse=self.reverse,
            ),
        )
