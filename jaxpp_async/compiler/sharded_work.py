"""Count the work of single equations on sharded arrays: operations a device, bytes, and exchanges.

A rule for each kind of primitive says how the mesh axes that split the operands split the results, and which
exchanges between devices follow. A dimension that is summed up while it is split makes an all-reduce of the
result. An operand that is needed in another sharding is gathered, exchanged or, at no cost, sliced. A
primitive without a rule gives results that are not split.

The rules look forward only, from operands to results. XLA's partitioner also looks back from results, so it
may split an operation that counts as whole here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpp_async.compiler.flop_counts import equation_flops
from jaxpp_async.compiler.primitives import NOT_FUSED
from jaxpp_async.program.work import Collective

Axes = tuple[tuple[str, ...], ...]
"""The mesh axes that split each dimension of an array; () for a dimension that no axis splits."""


@dataclass(frozen=True, eq=False, slots=True)
class ShardedArray:
    """An array of an executable, with the mesh axes that split it.

    Args:
        shape: the shape of the whole array, in elements.
        itemsize: the bytes of one element.
        axes: the mesh axes that split each dimension.
        summed: the mesh axes of the all-reduce that made the array; () if no all-reduce made it.
        exchange: the position of this all-reduce in `Tally.collectives`, or -1. A reader that needs only a
            part of the array turns the all-reduce into a reduce-scatter.
    """

    shape: tuple[int, ...]
    itemsize: int
    axes: Axes
    summed: tuple[str, ...] = ()
    exchange: int = -1


@dataclass(eq=False)
class Tally:
    """The work that has been counted so far in one executable, or in one iteration of a loop in it.

    Args:
        sizes: the number of devices along each mesh axis.

    Attributes:
        flops: the floating-point operations of each device.
        size_bytes: the bytes that each device reads or writes.
        collectives: the exchanges between devices, in the order of the operations.
        counted: the arrays whose bytes are already in `size_bytes`.
        read: the arrays that some operation reads.
    """

    sizes: Mapping[str, int]
    flops: float = 0.0
    size_bytes: float = 0.0
    collectives: list[Collective] = field(default_factory=list)
    counted: set[ShardedArray] = field(default_factory=set)
    read: set[ShardedArray] = field(default_factory=set)

    def num_devices(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def local_bytes(self, x: ShardedArray) -> float:
        """Return the bytes of an array that each device has."""
        whole = math.prod(x.shape) * x.itemsize
        return whole / self.num_devices(axes_of(x.axes)) if self.sizes else float(whole)

    def touch(self, x: ShardedArray, size_bytes: float | None = None) -> None:
        """Count that an array is read or written.

        Args:
            x: the array.
            size_bytes: the bytes of each device that are read or written; None for all.
        """
        self.size_bytes += self.local_bytes(x) if size_bytes is None else size_bytes
        self.counted.add(x)

    def exchange(self, kind: str, axes: Iterable[str], size_bytes: float) -> None:
        if (devices := self.num_devices(axes)) > 1:
            self.collectives.append(Collective(kind, devices, size_bytes))

    def sum_over(self, x: ShardedArray, axes: tuple[str, ...]) -> ShardedArray:
        """Count an all-reduce of an array over mesh axes, and return the array that it makes."""
        if self.num_devices(axes) <= 1:
            return x
        self.exchange("all-reduce", axes, self.local_bytes(x))
        return replace(x, summed=axes, exchange=len(self.collectives) - 1)

    def reshard(self, x: ShardedArray, wanted: Axes) -> ShardedArray:
        """Count the exchanges that give an array another sharding, and return the array that they make."""
        if x.axes == wanted:
            return x
        had = {a: d for d, axes in enumerate(x.axes) for a in axes}
        wants = {a: d for d, axes in enumerate(wanted) for a in axes}
        if x.exchange >= 0 and all(a in wants for a in x.summed):
            old = self.collectives[x.exchange]
            self.collectives[x.exchange] = Collective("reduce-scatter", old.devices, old.size_bytes)
        moved = replace(x, axes=wanted, summed=(), exchange=-1)
        self.exchange(
            "all-to-all", [a for a in had if wants.get(a, had[a]) != had[a]], self.local_bytes(moved)
        )
        self.exchange("all-gather", [a for a in had if a not in wants], self.local_bytes(moved))
        self.read.add(x)
        return moved


def axes_of(axes: Axes) -> list[str]:
    """Return all mesh axes that split an array, in the order of its dimensions."""
    return [a for split in axes for a in split]


def count_equation(
    tally: Tally,
    name: str,
    params: Mapping[str, Any],
    operands: Sequence[ShardedArray],
    results: Sequence[ShardedArray],
) -> list[ShardedArray]:
    """Add the work of one equation without a jaxpr inside to a tally.

    Args:
        tally: the tally to add to.
        name: the name of the primitive.
        params: the parameters of the equation.
        operands: the operands, with their shardings.
        results: the results, not split.

    Returns:
        The results, with the shardings that follow from those of the operands.
    """
    flops = equation_flops(name, params, [x.shape for x in operands], [x.shape for x in results])
    tally.read.update(operands)
    made, split = list(results), []
    if tally.sizes and any(map(axes_of, (x.axes for x in operands))):
        rule = _RULES.get(name, _elementwise if _is_elementwise(operands, results) else _not_split)
        operands, made, split = rule(tally, params, list(operands), list(results))
    tally.flops += flops / tally.num_devices(split)
    if name in NOT_FUSED:
        _touch(tally, name, operands, made)
    elif name == "dynamic_update_slice":  # in place, so that only the part is written
        tally.touch(operands[1])
        tally.touch(made[0], tally.local_bytes(operands[1]))
        tally.counted.add(operands[0])
    return made


def _touch(
    tally: Tally, name: str, operands: Sequence[ShardedArray], results: Sequence[ShardedArray]
) -> None:
    if name == "gather":  # the operand is read only where an index points
        tally.touch(operands[0], tally.local_bytes(results[0]))
        operands = operands[1:]
    elif name.startswith("scatter"):
        tally.counted.add(operands[0])
        operands = operands[1:]
    for x in (*operands, *results):
        tally.touch(x)


# ---------------------------------------------------------------- rules

Ruled = tuple[list[ShardedArray], list[ShardedArray], list[str]]
"""The operands in the shardings in which an equation reads them, the results with their shardings, and the
mesh axes that split the equation's work."""

Rule = Callable[[Tally, Mapping[str, Any], list[ShardedArray], list[ShardedArray]], Ruled]


def _not_split(
    _: Tally, __: Mapping[str, Any], operands: list[ShardedArray], results: list[ShardedArray]
) -> Ruled:
    return operands, results, []


_RULES: dict[str, Rule] = {}


def _is_elementwise(operands: Sequence[ShardedArray], results: Sequence[ShardedArray]) -> bool:
    shapes = {x.shape for x in (*operands, *results) if x.shape}
    return len(shapes) == 1


def _elementwise(
    tally: Tally, params: Mapping[str, Any], operands: list[ShardedArray], results: list[ShardedArray]
) -> Ruled:
    wanted = _joined([x.axes for x in operands if x.shape], range(len(results[0].shape)))
    read = [tally.reshard(x, wanted) if x.shape else x for x in operands]
    return read, [replace(r, axes=wanted) for r in results], axes_of(wanted)


def _joined(all_axes: Sequence[Axes], dims: Iterable[int]) -> Axes:
    """Return the sharding in which arrays of one shape meet: for each dimension, the first array's that has
    one."""
    used: set[str] = set()
    joined: list[tuple[str, ...]] = []
    for d in dims:
        found = next((a[d] for a in all_axes if a[d] and used.isdisjoint(a[d])), ())
        used.update(found)
        joined.append(found)
    return tuple(joined)
