"""Say how an argument or a result of a step that stacks layers is divided into parts along one axis.

A stacked leaf has one row per layer, and the stages of a pipeline use different rows. The compiler divides
such a leaf into parts, and each part lives where its rows are used. For the user it stays one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an array along one axis. Part `k` has the rows from `bounds[k]` to `bounds[k + 1]`.

    Args:
        axis: the axis along which the array is divided, 0 or more.
        bounds: ascending row numbers. The first is 0, the last is the array's length along `axis`.
    """

    axis: int
    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of parts."""
        return len(self.bounds) - 1

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The first row of each part, and the row behind its last."""
        return tuple(pairwise(self.bounds))

    @property
    def slices(self) -> tuple[tuple[slice, ...], ...]:
        """The index of each part in the whole array, as numpy takes it."""
        before = (slice(None),) * self.axis
        return tuple((*before, slice(start, stop)) for start, stop in self.ranges)

    def starts(self, ndim: int) -> tuple[tuple[int, ...], ...]:
        """Return the index of each part's first element in the whole array, one number per axis of it."""
        before, after = (0,) * self.axis, (0,) * (ndim - self.axis - 1)
        return tuple((*before, start, *after) for start, _ in self.ranges)

    def shapes(self, whole: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each part of an array of shape `whole`."""
        before, after = tuple(whole[: self.axis]), tuple(whole[self.axis + 1 :])
        return tuple((*before, stop - start, *after) for start, stop in self.ranges)

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole array, from the shape of any part."""
        return (*part[: self.axis], self.bounds[-1], *part[self.axis + 1 :])

    def joined(self, keys: Sequence[object]) -> Parts:
        """Return the parts with neighbours joined that have equal keys, such as the actors they live on.

        Args:
            keys: one key per part.
        """
        inner = [bound for bound, (a, b) in zip(self.bounds[1:-1], pairwise(keys), strict=True) if a != b]
        return Parts(self.axis, (self.bounds[0], *inner, self.bounds[-1]))

    def names(self, leaf: str) -> tuple[str, ...]:
        """Return the name of each part of a leaf, such as `"params['w'][0:4]"`."""
        before = ":, " * self.axis
        return tuple(f"{leaf}[{before}{start}:{stop}]" for start, stop in self.ranges)


def leaf_names(names: Sequence[str], leaves: Sequence[Parts | None]) -> tuple[str, ...]:
    """Return the name of each leaf, from the names of all parts; an undivided leaf has its own."""
    firsts = [names[positions[0]] for positions in part_positions(leaves)]
    return tuple(
        name if parts is None else name.removesuffix(parts.names("")[0])
        for name, parts in zip(firsts, leaves, strict=True)
    )


def part_positions(leaves: Sequence[Parts | None]) -> tuple[range, ...]:
    """Return the positions of each leaf's parts in the list of all parts; an undivided leaf has one."""
    found, position = [], 0
    for parts in leaves:
        count = 1 if parts is None else parts.count
        found.append(range(position, position + count))
        position += count
    return tuple(found)
