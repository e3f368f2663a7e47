"""parts: an array's type and the shape of an actor in, its distinct parts out: where each lies, and who sends it.

An array that is split over an actor's devices has as many distinct parts as its spec says; devices that hold the same
one are replicas. The devices belong to the actor's processes, neighbouring ones to one. Of the processes that hold a
part one is its owner: it alone sends it elsewhere, and passes it on to the others after it was received. Pure: every
process and the controller work out the same. No jax.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp_async.program import Aval


@dataclass(frozen=True, slots=True)
class Part:
    """One distinct part of an array.

    Args:
        number: its place among all parts, which are in the order in which the actor's devices first hold them.
        index: which part of the whole array.
        shape: its shape.
        positions: the devices that hold it, in the mesh's flat order.
        ranks: the processes that hold it, in order.
    """

    number: int
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    positions: tuple[int, ...]
    ranks: tuple[int, ...]

    def owner(self, salt: int) -> int:
        """The rank of the process that sends it.

        Args:
            salt: what is sent, so that not all of it falls to one process: a transfer's tag, or an array's id.
        """
        return self.ranks[(self.number + salt) % len(self.ranks)]


def parts_of(aval: Aval, axes: Sequence[tuple[str, int]], num_processes: int = 1) -> tuple[Part, ...]:
    """The distinct parts of an array.

    Args:
        axes: the actor's mesh: (axis name, size), outermost first.
        num_processes: how many the devices belong to; it divides their number.

    Raises:
        ValueError: the spec names an axis that the mesh does not have, or does not divide the shape.
    """
    sizes = dict(axes)
    splits = [_axes_of(entry) for entry in aval.spec]
    splits += [()] * (len(aval.shape) - len(splits))
    counts = [math.prod(_size(sizes, axis, aval) for axis in names) for names in splits]
    if any(n % count for n, count in zip(aval.shape, counts, strict=True)):
        raise ValueError(f"{aval} cannot be split over a mesh of {sizes}")
    shape = tuple(n // count for n, count in zip(aval.shape, counts, strict=True))
    each = math.prod(sizes.values()) // num_processes
    holders: dict[tuple[int, ...], list[int]] = {}
    # What is still to be added up differs along those axes, though it stands for one part of the array.
    keys = [*splits, *((axis,) for axis in aval.unreduced)]
    for position, coordinates in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        at = dict(zip(sizes, coordinates, strict=True))
        holders.setdefault(tuple(_block(names, at, sizes) for names in keys), []).append(position)
    return tuple(
        Part(
            number,
            tuple(_slice(b, n, c) for b, n, c in zip(key, shape, counts, strict=False)),
            shape,
            tuple(positions),
            tuple(dict.fromkeys(position // each for position in positions)),
        )
        for number, (key, positions) in enumerate(holders.items())
    )


def _axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _size(sizes: dict[str, int], axis: str, aval: Aval) -> int:
    if axis not in sizes:
        raise ValueError(f"{aval} names the axis {axis!r}, the mesh has {sorted(sizes)}")
    return sizes[axis]


def _block(names: tuple[str, ...], at: dict[str, int], sizes: dict[str, int]) -> int:
    block = 0
    for axis in names:
        block = block * sizes[axis] + at[axis]
    return block


def _slice(block: int, length: int, count: int) -> slice:
    return slice(None) if count == 1 else slice(block * length, (block + 1) * length)
