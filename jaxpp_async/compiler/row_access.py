"""Write operations that take or set rows at known positions as slices, pads and concatenations.

A model takes the layers of a stacked array in many ways: it iterates over the array, splits it, or indexes it
with a number that its code computes. `divided_axis` knows slices along one axis. The table `REWRITES` has one
function per primitive that returns the same result in such terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from jax import lax

Known: TypeAlias = Sequence[np.ndarray | None]
"""For each operand of an equation, its value if it is known while the step is traced, else None."""


_MOST_RUNS = 64
"""The most runs of neighbouring rows that one operation may name; each becomes a slice."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """An equation in other terms.

    Args:
        operands: the positions of the operands that are read.
        run: a function of their arrays that returns the results of the equation.
    """

    operands: tuple[int, ...]
    run: Callable[..., Sequence[Any]]


def rewrite(eqn: Any, known: Known, zeros: Sequence[bool]) -> Rewrite | None:
    """Return an equation in terms of slices along one axis, pads and concatenations.

    Args:
        eqn: the equation; its primitive is in `REWRITES`.
        known: the operands that are known integers.
        zeros: for each operand, whether it is known to be zero everywhere.

    Returns:
        The rewritten equation; None if it has to stay as it is.
    """
    return REWRITES[eqn.primitive.name](eqn.params, [v.aval for v in eqn.invars], known, zeros)


def _slice_each(x: Any, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int]) -> Any:
    """Slice one axis after the other."""
    for axis, (start, limit, stride) in enumerate(zip(starts, limits, strides, strict=True)):
        if (start, limit, stride) != (0, x.shape[axis], 1):
            x = lax.slice_in_dim(x, start, limit, stride, axis)
    return x


def _slice(params: Mapping[str, Any], avals: Sequence[Any], known: Known, zeros: Any) -> Rewrite | None:
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    whole = zip(starts, limits, strides, avals[0].shape, strict=True)
    if sum((start, limit, stride) != (0, size, 1) for start, limit, stride, size in whole) < 2:
        return None
    return Rewrite((0,), lambda x: [_slice_each(x, starts, limits, strides)])


def _pad(params: Mapping[str, Any], avals: Sequence[Any], known: Known, zeros: Any) -> Rewrite | None:
    config = params["padding_config"]
    if sum(tuple(axis) != (0, 0, 0) for axis in config) < 2:
        return None

    def run(x: Any, value: Any) -> list[Any]:
        for axis, padding in enumerate(config):
            if tuple(padding) != (0, 0, 0):
                x = lax.pad(x, value, [padding if d == axis else (0, 0, 0) for d in range(x.ndim)])
        return [x]

    return Rewrite((0, 1), run)


def _rev(params: Mapping[str, Any], avals: Sequence[Any], known: Known, zeros: Any) -> Rewrite | None:
    axes = params["dimensions"]

    def run(x: Any) -> list[Any]:
        for axis in axes:
            x = lax.rev(x, (axis,))
        return [x]

    return Rewrite((0,), run) if len(axes) > 1 else None


def _split(params: Mapping[str, Any], avals: Sequence[Any], known: Known, zeros: Any) -> Rewrite:
    axis, ends = params["axis"], np.cumsum([0, *params["sizes"]]).tolist()
    return Rewrite((0,), lambda x: [lax.slice_in_dim(x, a, b, axis=axis) for a, b in pairwise(ends)])


def _unstack(params: Mapping[str, Any], avals: Sequence[Any], known: Known, zeros: Any) -> Rewrite:
    axis, count = params["axis"], avals[0].shape[params["axis"]]
    return Rewrite((0,), lambda x: [lax.index_in_dim(x, k, axis, keepdims=False) for k in range(count)])


def _stack(params: Mapping[str, Any], avals: Sequence[Any], known: Known, zeros: Any) -> Rewrite:
    axis = params["axis"]
    positions = tuple(range(len(avals)))
    return Rewrite(positions, lambda *xs: [lax.concatenate([lax.expand_dims(x, (axis,)) for x in xs], axis)])


def _window_starts(known: Known, whole: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """Return where a window begins on each axis, moved into the array as JAX does; None if not known."""
    starts = [None if at is None else int(at) for at in known]
    if any(start is None for start in starts):
        return None
    pairs = zip(starts, whole, sizes, strict=True)
    return [min(max(start or 0, 0), size - length) for start, size, length in pairs]


def _dynamic_slice(params: Any, avals: Sequence[Any], known: Known, zeros: Any) -> Rewrite | None:
    sizes = params["slice_sizes"]
    if (starts := _window_starts(known[1:], avals[0].shape, sizes)) is None:
        return None
    limits = [start + size for start, size in zip(starts, sizes, strict=True)]
    return Rewrite((0,), lambda x: [_slice_each(x, starts, limits, (1,) * len(sizes))])


def _dynamic_update_slice(
    params: Any, avals: Sequence[Any], known: Known, zeros: Sequence[bool]
) -> Rewrite | None:
    """The gradient of a slice; XLA updates any other array in its place, where that is possible."""
    whole, part = avals[0].shape, avals[1].shape
    starts = _window_starts(known[2:], whole, part)
    if starts is None or not zeros[0]:
        return None
    return Rewrite((1,), lambda update: [_pad_to(update, starts, whole)])


def _replaced(x: Any, start: int, rows: Any) -> Any:
    """Return an array whose rows from `start` on are others."""
    stop, size = start + rows.shape[0], x.shape[0]
    before = [lax.slice_in_dim(x, 0, start)] if start else []
    behind = [lax.slice_in_dim(x, stop, size)] if stop < size else []
    return lax.concatenate([*before, rows, *behind], 0)


def _pad_to(x: Any, starts: Sequence[int], whole: Sequence[int]) -> Any:
    """Return an array of zeros with `x` in it, one axis after the other."""
    for axis, (start, size) in enumerate(zip(starts, whole, strict=True)):
        if x.shape[axis] != size:
            config = [(0, 0, 0)] * x.ndim
            config[axis] = (start, size - start - x.shape[axis], 0)
            x = lax.pad(x, np.zeros((), x.dtype), config)
    return x


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of neighbouring rows: the position of the first, that behind the last, and the first row."""
    first = 0
    for k in range(1, len(rows) + 1):
        if k == len(rows) or rows[k] != rows[k - 1] + 1:
            yield first, k, rows[first]
            first = k


def _numbered_rows(indices: np.ndarray | None, count: int) -> list[int] | None:
    """Return the rows that indices name, one or a list of them; None if that is not known or not allowed.

    Args:
        indices: the indices of a gather or scatter, whose last axis has one entry; None if not known.
        count: the number of rows that there are.
    """
    if indices is None or indices.ndim > 2 or indices.shape[-1] != 1 or indices.size == 0:
        return None
    rows = indices.reshape(-1).tolist()
    allowed = all(0 <= row < count for row in rows) and len(list(_runs(rows))) <= _MOST_RUNS
    return rows if allowed else None


def _gather(params: Mapping[str, Any], avals: Sequence[Any], known: Known, zeros: Any) -> Rewrite | None:
    numbers, whole = params["dimension_numbers"], avals[0].shape
    rows = _numbered_rows(known[1], whole[0] if whole else 0)
    if rows is None or tuple(params["slice_sizes"]) != (1, *whole[1:]):
        return None
    is_single = len(avals[1].shape) == 1
    window = tuple(range(0 if is_single else 1, len(whole) - is_single))
    if (
        (numbers.collapsed_slice_dims, numbers.start_index_map) != ((0,), (0,))
        or numbers.operand_batching_dims
        or numbers.offset_dims != window
    ):
        return None

    def run(x: Any) -> list[Any]:
        parts = [lax.slice_in_dim(x, row, row + stop - start) for start, stop, row in _runs(rows)]
        found = lax.concatenate(parts, 0) if len(parts) > 1 else parts[0]
        return [lax.squeeze(found, (0,)) if is_single else found]

    return Rewrite((0,), run)


def _scatter(combine: Callable[[Any, Any], Any]) -> Callable[..., Rewrite | None]:
    """Return the function for a primitive that combines rows of an array with others."""

    def rule(
        params: Mapping[str, Any], avals: Sequence[Any], known: Known, zeros: Sequence[bool]
    ) -> Rewrite | None:
        rows = _scattered_rows(params["dimension_numbers"], avals, known[1])
        if rows is None or (combine is _second and len(list(_runs(rows))) > 1):
            return None  # rows that are set twice have no defined value
        whole, is_sum = avals[0].shape, combine is lax.add and zeros[0]

        def run(*operands: Any) -> list[Any]:
            *totals, updates = operands
            total: Any = totals[0] if totals else None
            updates = lax.reshape(updates, (len(rows), *whole[1:]))
            for start, stop, row in _runs(rows):
                part = updates if stop - start == len(rows) else lax.slice_in_dim(updates, start, stop)
                if is_sum:
                    padded = _pad_to(part, [row] + [0] * (len(whole) - 1), whole)
                    total = padded if total is None else lax.add(total, padded)
                else:
                    total = _replaced(
                        total, row, combine(lax.slice_in_dim(total, row, row + stop - start), part)
                    )
            return [total]

        return Rewrite((2,) if is_sum else (0, 2), run)

    return rule


def _scattered_rows(numbers: Any, avals: Sequence[Any], indices: np.ndarray | None) -> list[int] | None:
    """Return the rows of axis 0 that a scatter changes, in the order of its updates; None for others."""
    whole, updates = avals[0].shape, avals[2].shape
    rows = _numbered_rows(indices, whole[0] if whole else 0)
    if rows is None or numbers.scatter_dims_to_operand_dims != (0,) or numbers.operand_batching_dims:
        return None
    if numbers.inserted_window_dims == (0,):  # one row for each index
        is_single = len(avals[1].shape) == 1
        window = tuple(range(0 if is_single else 1, len(whole) - is_single))
        shape = whole[1:] if is_single else (len(rows), *whole[1:])
    else:  # a window of rows, which begins at the only index
        window, shape = tuple(range(len(whole))), (*updates[:1], *whole[1:])
        if numbers.inserted_window_dims or len(avals[1].shape) != 1 or rows[0] + updates[0] > whole[0]:
            return None
        rows = list(range(rows[0], rows[0] + updates[0]))
    return rows if rows and (numbers.update_window_dims, updates) == (window, shape) else None


def _second(old: Any, new: Any) -> Any:
    return new


REWRITES: dict[str, Callable[..., Rewrite | None]] = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "rev": _rev,
    "scatter": _scatter(_second),
    "scatter-add": _scatter(lax.add),
    "scatter-mul": _scatter(lax.mul),
    "scatter_mul": _scatter(lax.mul),
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
}
"""For each primitive, a function of the parameters of an equation, the types of its operands, those that are
known integers, and those that are zero."""
