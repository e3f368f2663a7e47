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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpp_async.compiler.flop_counts import equation_flops
from jaxpp_async.compiler.live_bytes import Operation, OperationKind, peak_live_bytes
from jaxpp_async.compiler.primitives import CUMULATIVE, EXCHANGES, NOT_FUSED, READS_ALL, REDUCTIONS, RENAMES
from jaxpp_async.program.work import Collective, CollectiveKind

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
        operations: the operations in their order, for the estimate of temporaries.
    """

    sizes: Mapping[str, int]
    flops: float = 0.0
    size_bytes: float = 0.0
    collectives: list[Collective] = field(default_factory=list)
    counted: set[ShardedArray] = field(default_factory=set)
    read: set[ShardedArray] = field(default_factory=set)
    operations: list[Operation] = field(default_factory=list)
    _moved: dict[tuple[ShardedArray, Axes], ShardedArray] = field(default_factory=dict)

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

    def note(
        self,
        kind: OperationKind,
        reads: Sequence[ShardedArray],
        makes: Sequence[ShardedArray],
        inside_bytes: float = 0.0,
    ) -> None:
        """Append an operation to `operations`."""
        self.operations.append(Operation(kind, reads, makes, inside_bytes))

    def temp_bytes(self, outside: Iterable[ShardedArray]) -> float:
        """Return the estimate of temporaries of the operations so far.

        Args:
            outside: the arguments and results, which do not count.
        """
        return peak_live_bytes(self.operations, set(outside), self.local_bytes)

    def exchange(self, kind: CollectiveKind, axes: Iterable[str], size_bytes: float) -> None:
        """Count an exchange along mesh axes; there is none along axes of one device."""
        if split := tuple((a, self.sizes[a]) for a in axes if self.sizes[a] > 1):
            self.collectives.append(Collective(kind, split, size_bytes))

    def sum_over(self, x: ShardedArray, axes: tuple[str, ...]) -> ShardedArray:
        """Count an all-reduce of an array over mesh axes, and return the array that it makes."""
        if self.num_devices(axes) <= 1:
            return x
        self.exchange("all-reduce", axes, self.local_bytes(x))
        return replace(x, summed=axes, exchange=len(self.collectives) - 1)

    def reshard(self, x: ShardedArray, wanted: Axes, *, sliced: bool = True) -> ShardedArray:
        """Count the exchanges that give an array another sharding, and return the array that they make.

        Args:
            x: the array.
            wanted: the other sharding.
            sliced: whether an all-reduce that made the array becomes a reduce-scatter if each device needs
                only its part of the sum.
        """
        if x.axes == wanted:
            return x
        if (found := self._moved.get((x, wanted))) is not None:
            return found
        had = {a: d for d, axes in enumerate(x.axes) for a in axes}
        wants = {a: d for d, axes in enumerate(wanted) for a in axes}
        if sliced and x.exchange >= 0:
            old, added = self.collectives[x.exchange], [a for a in wants if a not in had]
            kind = "reduce-scatter" if all(a in wants for a in x.summed) else old.kind
            size = old.size_bytes / self.num_devices(a for a in added if a not in x.summed)
            self.collectives[x.exchange] = Collective(kind, old.axes, size)
        moved = replace(x, axes=wanted, summed=(), exchange=-1)
        self.exchange(
            "all-to-all", [a for a in had if wants.get(a, had[a]) != had[a]], self.local_bytes(moved)
        )
        self.exchange("all-gather", [a for a in had if a not in wants], self.local_bytes(moved))
        self.read.add(x)
        # Without an exchange each device takes a part of what it has.
        self.note(
            "kernel" if any(a not in wants or wants[a] != d for a, d in had.items()) else "fused",
            [x],
            [moved],
        )
        self._moved[x, wanted] = moved
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
        rule = _find_rule(name, operands, results)
        operands, made, split = rule(tally, params, list(operands), list(results))
    tally.flops += flops / tally.num_devices(split)
    if name in RENAMES or name == "dynamic_update_slice":
        kind: OperationKind = "alias"
    elif name in READS_ALL:
        kind = "reduction"
    else:
        kind = "kernel" if name in NOT_FUSED else "fused"
    tally.note(kind, operands, made)
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

Params = Mapping[str, Any]
Arrays = list[ShardedArray]
Rule = Callable[[Tally, Params, Arrays, Arrays], Ruled]


def _find_rule(name: str, operands: Sequence[ShardedArray], results: Sequence[ShardedArray]) -> Rule:
    if name in _RULES:
        return _RULES[name]
    if name.startswith("scatter"):
        return _scatter
    return _elementwise if _is_elementwise(operands, results) else _not_split


def _is_elementwise(operands: Sequence[ShardedArray], results: Sequence[ShardedArray]) -> bool:
    """Return whether the shapes of an equation are those of an elementwise operation."""
    whole = results[0].shape if results else ()
    return all(x.shape == whole for x in results) and all(
        not x.shape
        or (len(x.shape) == len(whole) and all(n in (1, m) for n, m in zip(x.shape, whole, strict=True)))
        for x in operands
    )


def _not_split(_: Tally, __: Params, operands: Arrays, results: Arrays) -> Ruled:
    return operands, results, []


def _elementwise(tally: Tally, _: Params, operands: Arrays, results: Arrays) -> Ruled:
    wanted = _joined([x.axes for x in operands if x.shape])

    def read_as(x: ShardedArray) -> ShardedArray:
        if not x.shape:
            return x
        return tally.reshard(x, tuple(() if n == 1 else a for n, a in zip(x.shape, wanted, strict=True)))

    read = [read_as(x) for x in operands]
    made = [replace(r, axes=wanted) for r in results]
    pending = [x for x in read if x.exchange >= 0]
    if len(pending) == 1:  # a later reader may still turn the sum's exchange into a reduce-scatter
        made = [replace(r, summed=pending[0].summed, exchange=pending[0].exchange) for r in made]
    return read, made, axes_of(wanted)


def _joined(all_axes: Sequence[Axes]) -> Axes:
    """Return the sharding in which arrays of one rank meet: in each dimension that of the first array that
    has one."""
    used: set[str] = set()
    joined: list[tuple[str, ...]] = []
    for splits in zip(*all_axes, strict=True):
        found = next((s for s in splits if s and used.isdisjoint(s)), ())
        used.update(found)
        joined.append(found)
    return tuple(joined)


def _dot(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    shared = {d: ("b", i) for i, d in enumerate(lhs_batch)} | {
        d: ("k", i) for i, d in enumerate(lhs_contracted)
    }
    lhs = [shared.get(d, ("m", d)) for d in range(len(operands[0].shape))]
    shared = {d: ("b", i) for i, d in enumerate(rhs_batch)} | {
        d: ("k", i) for i, d in enumerate(rhs_contracted)
    }
    rhs = [shared.get(d, ("n", d)) for d in range(len(operands[1].shape))]
    free = [label for label in (*lhs, *rhs) if label[0] in "mn"]
    return _product(tally, operands, results, lhs, rhs, [*(("b", i) for i in range(len(lhs_batch))), *free])


def _convolution(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    numbers, rank = params["dimension_numbers"], len(results[0].shape)
    names: dict[str, list[Any]] = {"lhs": [None] * rank, "rhs": [None] * rank, "out": [None] * rank}
    if params["batch_group_count"] == 1:
        names["lhs"][numbers.lhs_spec[0]] = names["out"][numbers.out_spec[0]] = "batch"
        if params["feature_group_count"] == 1:
            names["rhs"][numbers.rhs_spec[0]] = names["out"][numbers.out_spec[1]] = "feature"
            names["lhs"][numbers.lhs_spec[1]] = names["rhs"][numbers.rhs_spec[1]] = "summed"
    return _product(tally, operands, results, names["lhs"], names["rhs"], names["out"])


def _product(
    tally: Tally,
    operands: Arrays,
    results: Arrays,
    lhs: Sequence[Hashable],
    rhs: Sequence[Hashable],
    out: Sequence[Hashable],
) -> Ruled:
    """Shard a product of two arrays, of which each dimension has a label, as in an einsum.

    An axis that splits different labels of the operands goes to the label that comes first in the result; the
    other operand is gathered.

    Args:
        tally: where exchanges are counted.
        operands, results: the two operands, and the one result.
        lhs, rhs, out: the labels of the dimensions of the operands and the result; None for a dimension that
            cannot be split. A label that the result lacks is summed over.
    """
    a, b = operands[:2]
    left = {axis: n for n, axes in zip(lhs, a.axes, strict=True) for axis in axes if n is not None}
    right = {axis: n for n, axes in zip(rhs, b.axes, strict=True) for axis in axes if n is not None}
    chosen: dict[str, Hashable] = {}
    for axis in (*left, *(x for x in right if x not in left)):
        one, other = left.get(axis, right.get(axis)), right.get(axis, left.get(axis))
        chosen[axis] = min(one, other, key=lambda n: out.index(n) if n in out else len(out))

    def axes_for(labels: Sequence[Hashable]) -> Axes:
        return tuple(tuple(x for x, n in chosen.items() if n == label) for label in labels)

    read = [tally.reshard(a, axes_for(lhs), sliced=False), tally.reshard(b, axes_for(rhs), sliced=False)]
    made = replace(results[0], axes=axes_for(out))
    made = tally.sum_over(made, tuple(x for x, n in chosen.items() if n not in out))
    return [*read, *operands[2:]], [made], list(chosen)


def _reduction(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    dims = params["axes"] if "axes" in params else params["dimensions"]
    over = tuple(a for d in dims for a in operands[0].axes[d])
    kept = tuple(axes for d, axes in enumerate(operands[0].axes) if d not in dims)
    made = [tally.sum_over(replace(r, axes=kept), over) for r in results]
    return operands, made, axes_of(operands[0].axes)


def _same_dims(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    """Keep the axes of each dimension that is as long in the result as in the first operand."""
    made = []
    for r in results:
        sizes = zip(operands[0].axes, operands[0].shape, r.shape, strict=True)
        made.append(replace(r, axes=tuple(axes if n == m else () for axes, n, m in sizes)))
    return operands, made, axes_of(made[0].axes)


def _along(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    """Gather arrays along the dimension in which the equation mixes their elements."""
    last = len(operands[0].shape) - 1
    dim = next((params[k] for k in ("dimension", "axis", "reduction_dimension") if k in params), last) % (
        last + 1
    )
    joined = _joined([x.axes for x in operands])
    wanted = tuple(() if d == dim else axes for d, axes in enumerate(joined))
    read = [tally.reshard(x, wanted) for x in operands]
    return read, [replace(r, axes=wanted) for r in results], axes_of(wanted)


def _stack(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    wanted, dim = _joined([x.axes for x in operands]), params["axis"] % len(results[0].shape)
    read = [tally.reshard(x, wanted) for x in operands]
    return read, [replace(results[0], axes=(*wanted[:dim], (), *wanted[dim:]))], []


def _without_dims(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    rank = len(operands[0].shape)
    gone = {d % rank for d in params.get("dimensions", (params.get("axis", 0),))}
    kept = tuple(axes for d, axes in enumerate(operands[0].axes) if d not in gone)
    return operands, [replace(r, axes=kept) for r in results], []


def _carry(x: ShardedArray, result: ShardedArray, axes: Axes) -> ShardedArray:
    return replace(result, axes=axes, summed=x.summed, exchange=x.exchange)


def _transpose(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    (x,) = operands
    return operands, [_carry(x, results[0], tuple(x.axes[d] for d in params["permutation"]))], []


def _broadcast(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    axes: list[tuple[str, ...]] = [()] * len(results[0].shape)
    for d, to in enumerate(params["broadcast_dimensions"]):
        if operands[0].shape[d] == results[0].shape[to]:
            axes[to] = operands[0].axes[d]
    return operands, [replace(results[0], axes=tuple(axes))], []


def _reshape(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    """Keep the axes of the first dimension of each group of dimensions that is joined or divided."""
    x, (result,) = operands[0], results
    keeps: list[tuple[str, ...]] = [()] * len(x.shape)
    axes: list[tuple[str, ...]] = [()] * len(result.shape)
    for old, new in _groups(x.shape, result.shape):
        if old and new and result.shape[new[0]] % tally.num_devices(x.axes[old[0]]) == 0:
            keeps[old[0]] = axes[new[0]] = x.axes[old[0]]
    read = tally.reshard(x, tuple(keeps))
    return [read], [_carry(read, result, tuple(axes))], []


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the groups of dimensions that a reshape turns into each other, without those of length 1."""
    before, after = ([d for d, n in enumerate(shape) if n != 1] for shape in (old, new))
    groups: list[tuple[list[int], list[int]]] = []
    while before and after:
        left, right = [before.pop(0)], [after.pop(0)]
        while (n := math.prod(old[d] for d in left)) != (m := math.prod(new[d] for d in right)):
            short, rest = (left, before) if n < m else (right, after)
            if not rest:  # an empty array
                return groups
            short.append(rest.pop(0))
        groups.append((left, right))
    return groups


def _update_slice(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    x, part = operands[:2]
    whole = [n == m for n, m in zip(x.shape, part.shape, strict=True)]
    met = _joined([x.axes, tuple(a if full else () for a, full in zip(part.axes, whole, strict=True))])
    split = tuple(a if full else () for a, full in zip(met, whole, strict=True))
    read = [tally.reshard(x, met), tally.reshard(part, split), *operands[2:]]
    return read, [replace(results[0], axes=met)], axes_of(split)


def _gather(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    numbers, (x, indices), (result,) = params["dimension_numbers"], operands, results
    shared = _batching(numbers, "start_indices_batching_dims")
    gone = {*numbers.collapsed_slice_dims, *shared}
    kept = [d for d in range(len(x.shape)) if d not in gone]
    batch = [d for d in range(len(result.shape)) if d not in numbers.offset_dims]
    axes: list[tuple[str, ...]] = [()] * len(result.shape)
    for d, split in zip(batch, indices.axes, strict=False):
        axes[d] = split
    for d, at in shared.items():
        axes[batch[at]] = axes[batch[at]] or x.axes[d]
    used = set(axes_of(tuple(axes)))
    for d, to in zip(kept, numbers.offset_dims, strict=True):
        if params["slice_sizes"][d] == x.shape[d] and used.isdisjoint(x.axes[d]):
            axes[to] = x.axes[d]
    indexed = tuple(a for d in numbers.start_index_map for a in x.axes[d] if a not in used)
    held = set(axes_of(tuple(axes))).difference(used).union(indexed)
    wanted = tuple(
        axes[batch[shared[d]]] if d in shared else tuple(a for a in split if a in held)
        for d, split in enumerate(x.axes)
    )
    made = tally.sum_over(replace(result, axes=tuple(axes)), indexed)
    return [tally.reshard(x, wanted), indices], [made], axes_of(tuple(axes))


def _scatter(tally: Tally, params: Params, operands: Arrays, results: Arrays) -> Ruled:
    numbers, x, updates = params["dimension_numbers"], operands[0], operands[2]
    shared = _batching(numbers, "scatter_indices_batching_dims")
    gone = {*numbers.inserted_window_dims, *shared}
    kept = [d for d in range(len(x.shape)) if d not in gone]
    batch = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    axes = list(x.axes)
    for d, at in (
        *zip(kept, numbers.update_window_dims, strict=True),
        *((d, batch[n]) for d, n in shared.items()),
    ):
        if not axes[d] and x.shape[d] == updates.shape[at]:
            axes[d] = updates.axes[at]
    over = tuple(a for d in batch for a in updates.axes[d] if a not in axes_of(tuple(axes)))
    made = tally.sum_over(replace(results[0], axes=tuple(axes)), over)
    return operands, [made], axes_of(updates.axes)


def _batching(numbers: Any, name: str) -> dict[int, int]:
    """Return, for each dimension of the operand that is a batch of gathers or scatters, the indices' one."""
    return dict(zip(getattr(numbers, "operand_batching_dims", ()), getattr(numbers, name, ()), strict=True))


_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _along,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_update_slice": _update_slice,
    "gather": _gather,
    "reshape": _reshape,
    "squeeze": _without_dims,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _without_dims,
    **dict.fromkeys(REDUCTIONS | {"argmax", "argmin", "reduce_xor"}, _reduction),
    **dict.fromkeys(CUMULATIVE | {"sort", "top_k", "approx_top_k"}, _along),
    **dict.fromkeys(("dynamic_slice", "pad", "rev", "select_and_scatter_add", "slice", "split"), _same_dims),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"), _same_dims
    ),
}


# ---------------------------------------------------------------- exchanges that the user wrote


def count_exchange(
    tally: Tally, name: str, params: Params, operands: Sequence[ShardedArray], results: Sequence[ShardedArray]
) -> bool:
    """Count an exchange that a `shard_map` makes, such as `jax.lax.psum`.

    Returns:
        Whether the equation is such an exchange.
    """
    kind = EXCHANGES.get(name)
    if kind is None:
        return False
    named = params["axes"] if "axes" in params else params["axis_name"]
    axes = [a for a in ((named,) if isinstance(named, str) else named) if a in tally.sizes]
    for x, made in zip(operands, results, strict=True):
        tally.exchange(kind, axes, tally.local_bytes(made if kind == "all-gather" else x))
        tally.note("kernel", [x], [made])
    return True
