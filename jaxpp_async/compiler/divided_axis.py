"""Say how each operation computes its results in parts, if an operand or a result is divided along an axis.

`relate` is asked about one operation and one of its values that is divided along one axis. Its answer, a
relation, names the axes of the other operands and results that are divided with it, or says that the
operation cannot be computed in parts. `RULES` has one rule per primitive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from jaxpp_async.compiler.ir import Lit, Op, Ref, Types
from jaxpp_async.compiler.primitives import (
    BATCHED_MATRIX,
    CUMULATIVE,
    ELEMENTWISE,
    INDEX,
    KEY_ARRAYS,
    REDUCTIONS,
    STACK,
)
from jaxpp_async.jax_bridge import private_api

Shape: TypeAlias = tuple[int, ...]

MOST_COPIED_ROWS = 512
"""The most rows that one operation copies one by one. The axis of a flattened array has a row per element."""


@dataclass(frozen=True, slots=True)
class Along:
    """An axis of a value, of which each `unit` indices belong to one row of the layers' stack."""

    axis: int
    unit: int = 1


@dataclass(frozen=True, slots=True)
class Aligned:
    """An operation that computes each part of its results from the same part of its operands.

    Args:
        operands: for each operand, the axis that is divided; None for an operand that every part reads whole.
        results: for each result, the axis that is divided.
        resize: a function that takes the parameters of the equation, the first row of a part and the row
            behind its last, and returns the parameters for this part; None if all parts have the same.
    """

    operands: tuple[Along | None, ...]
    results: tuple[Along, ...]
    resize: Callable[[Mapping[str, Any], int, int], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Combined:
    """An operation whose one result is a combination of what it computes from each part of its operands.

    Args:
        operands: for each operand, the axis that is divided; None for an operand that is read whole.
        combine: the name of the function of `jax.lax` that combines the results of two parts.
    """

    operands: tuple[Along | None, ...]
    combine: str


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows that an operation copies from an operand to a result.

    Args:
        operand: the position of the operand.
        operand_start: the first row that is copied.
        result: the position of the result.
        result_start: the row of the result to which the first one is copied.
        length: the number of rows.
    """

    operand: int
    operand_start: int
    result: int
    result_start: int
    length: int


@dataclass(frozen=True, slots=True)
class MovedRows:
    """An operation that copies rows of its operands to its results: a slice, a pad, a concatenation.

    Args:
        axis: the axis of the rows, in all operands and results.
        pieces: the copies.
        fill: the position of the operand with which all other rows are filled; None if there are no others.
        is_reversed: whether the one operand's rows come in the reverse order.
    """

    axis: int
    pieces: tuple[CopiedRows, ...]
    fill: int | None = None
    is_reversed: bool = False


@dataclass(frozen=True, slots=True)
class Picked:
    """An operation that reads one row of its operand; the result has no axis of rows."""

    row: int


@dataclass(frozen=True, slots=True)
class Stacked:
    """An operation that makes one row of its result of each of its operands, which have no axis of rows."""


@dataclass(frozen=True, slots=True)
class Chained:
    """A scan over the rows, which runs over one part after the other and passes its carries on.

    Args:
        scan: the `ScanParts` of the equation.
    """

    scan: Any


@dataclass(frozen=True, slots=True)
class Looped:
    """A scan whose body is computed in parts, in every iteration. The body says which values are divided.

    Args:
        scan: the `ScanParts` of the equation.
    """

    scan: Any


@dataclass(frozen=True, slots=True)
class Branched:
    """A cond whose branches are computed in parts.

    Args:
        axis: the axis of the operand or result that was asked about. The branches say which others are
            divided.
    """

    axis: int


Relation: TypeAlias = Aligned | Combined | MovedRows | Picked | Stacked | Chained | Looped | Branched


@dataclass(frozen=True, slots=True)
class AxisQuestion:
    """A question to `relate`: how is an operation computed if one of its values is divided along an axis.

    Args:
        op: the operation.
        params: the parameters of its equation; empty for an operation of the compiler's own.
        operands: the shape of each operand.
        results: the shape of each result.
        is_result: whether the divided value is a result.
        position: the position of the value among the operands or the results.
        axis: the axis along which the value is divided.
        key_impl: the generator of the keys among the operands; None if there are none.
    """

    op: Op
    params: Mapping[str, Any]
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    is_result: bool
    position: int
    axis: int
    key_impl: str | None = None

    @property
    def shape(self) -> Shape:
        """The shape of the divided value."""
        return (self.results if self.is_result else self.operands)[self.position]

    @property
    def length(self) -> int:
        """The length of the divided axis."""
        return self.shape[self.axis]


def relate(op: Op, types: Types, *, is_result: bool, position: int, axis: int) -> Relation | None:
    """Return how an operation is computed if one of its values is divided along an axis.

    Args:
        op: the operation.
        types: the type of each value.
        is_result: whether the divided value is a result of the operation.
        position: the position of the value among the operands or the results.
        axis: the axis along which the value is divided.

    Returns:
        The relation; None if the operation cannot be computed in parts.
    """
    rule = RULES.get(op.name)
    if rule is None:
        return None
    operands = tuple(_shape(r, types) for r in op.inputs)
    results = tuple(types[o].aval.shape if o >= 0 else () for o in op.outputs)
    impls = {types[r].key_impl for r in op.reads} - {None}
    return rule(
        AxisQuestion(
            op, equation_params(op), operands, results, is_result, position, axis, next(iter(impls), None)
        )
    )


def bound_argument(op: Op) -> Any:
    """Return what an operation's `run` is bound to: its equation, the row that it reads, or its sharding."""
    return cast(functools.partial, op.run).args[0]


def equation_params(op: Op) -> Mapping[str, Any]:
    """Return the parameters of the JAX equation that an operation runs; empty if it runs none."""
    args = getattr(op.run, "args", ())
    return args[0].params if args and getattr(op.run, "func", None) is private_api.bind_eqn else {}


def _shape(ref: Ref, types: Types) -> Shape:
    return tuple(np.shape(ref.value)) if isinstance(ref, Lit) else types[ref].aval.shape


# ---------------------------------------------------------------- operations that keep the axis


def _elementwise(q: AxisQuestion) -> Relation | None:
    """Operands of the result's rank are divided as the result is; scalars and single rows are read whole."""
    rank = len(q.shape)
    if any(len(shape) not in (0, rank) for shape in q.operands):
        return None
    along = Along(q.axis)
    operands = tuple(along if shape and shape[q.axis] == q.length else None for shape in q.operands)
    return Aligned(operands, (along,) * len(q.results))


def _constraint(q: AxisQuestion) -> Relation | None:
    """A constraint to a sharding that splits the divided axis over devices does not fit the parts."""
    sharding = q.params["sharding"] if q.params else bound_argument(q.op)
    spec = getattr(sharding, "spec", None)
    if spec is None or (q.axis < len(spec) and spec[q.axis] is not None):
        return None
    return _elementwise(q)


_THREEFRY = "threefry2x32"
"""The generator that draws for each key what it would draw for that key alone."""


def _keys(q: AxisQuestion) -> Relation | None:
    """Arrays of keys, and what is made of each key, have the keys' axes first.

    Generators other than threefry may draw the bits of all keys of an array from one of them.
    """
    if q.key_impl not in (None, _THREEFRY) and q.op.name not in ("random_wrap", "random_unwrap"):
        return None
    rank = min(len(shape) for shape in (*q.operands, *q.results) if shape)
    if q.axis >= rank or any(shape[q.axis : q.axis + 1] not in ((), (q.length,)) for shape in q.operands):
        return None
    along = Along(q.axis)
    return Aligned(tuple(along if shape else None for shape in q.operands), (along,) * len(q.results))


def _batched_matrix(q: AxisQuestion) -> Relation | None:
    """Factorizations of matrices have the batch's axes first and the matrix's two last."""
    if any(q.axis >= len(shape) - 2 for shape in q.operands):
        return None
    along = Along(q.axis)
    return Aligned((along,) * len(q.operands), (along,) * len(q.results))


def _other_axis(name: str) -> Callable[[AxisQuestion], Relation | None]:
    """Return the rule of operations that compute along one axis, which must be another one."""

    def rule(q: AxisQuestion) -> Relation | None:
        if q.params[name] in (q.axis, q.axis - len(q.shape)):
            return None
        return _elementwise(q)

    return rule


def _rev(q: AxisQuestion) -> Relation | None:
    """Rows whose order is reversed are copied one by one. `row_access` reverses one axis after the other."""
    if q.axis not in q.params["dimensions"]:
        return _elementwise(q)
    if len(q.params["dimensions"]) > 1 or q.length > MOST_COPIED_ROWS:
        return None
    last = q.length - 1
    rows = tuple(CopiedRows(0, last - k, 0, k, 1) for k in range(q.length))
    return MovedRows(q.axis, rows, is_reversed=True)


def _tile(q: AxisQuestion) -> Relation | None:
    repeats = tuple(q.params["reps"])
    return _elementwise(q) if len(repeats) == len(q.shape) and repeats[q.axis] == 1 else None


def _top_k(q: AxisQuestion) -> Relation | None:
    """The largest elements along one axis, the last unless the equation names another."""
    axis = q.params.get("axis", -1) % len(q.operands[0])
    along = Along(q.axis)
    return None if q.axis == axis else Aligned((along,), (along,) * len(q.results))


def _barrier(q: AxisQuestion) -> Relation | None:
    """Values that pass a barrier together are divided alike, or are not passed in parts."""
    if any(len(shape) <= q.axis or shape[q.axis] != q.length for shape in q.operands):
        return None
    along = Along(q.axis)
    return Aligned((along,) * len(q.operands), (along,) * len(q.results))


def _broadcast(q: AxisQuestion) -> Relation | None:
    dims = tuple(map(int, q.params["broadcast_dimensions"]))
    shape = q.operands[0]
    out = q.axis if q.is_result else dims[q.axis]
    inner = dims.index(out) if out in dims else None
    if len(q.operands) > 1 or (not q.is_result and q.results[0][out] != q.length):
        return None
    is_repeated = inner is None or shape[inner] != q.results[0][out]
    operand = None if is_repeated or inner is None else Along(inner)
    return Aligned((operand,), (Along(out),), _resized("shape", out))


def _iota(q: AxisQuestion) -> Relation | None:
    if len(q.operands) or q.params["dimension"] == q.axis:
        return None
    return Aligned((), (Along(q.axis),), _resized("shape", q.axis))


def _reshape(q: AxisQuestion) -> Relation | None:
    """The axis stays, or it becomes a larger one together with axes behind it, or the reverse."""
    there = (q.operands if q.is_result else q.results)[0]
    if len(q.operands) > 1 or (found := _same_rows(q.shape, q.axis, there)) is None:
        return None
    here, other = found
    operand, result = (other, here) if q.is_result else (here, other)
    return Aligned((operand,), (result,), _resized("new_sizes", result.axis, result.unit))


def _same_rows(shape: Shape, axis: int, there: Shape) -> tuple[Along, Along] | None:
    """Return the axes of two shapes of one array whose indices begin the same rows.

    Args:
        shape: the first shape.
        axis: an axis of it.
        there: the second shape.

    Returns:
        The axis in the first shape and the axis in the second; None if the second has no such axis.
    """
    before, length = math.prod(shape[:axis]), shape[axis]
    for b, size in enumerate(there):
        if math.prod(there[:b]) != before or size == 1:
            continue
        if size % length == 0 and _is_product(size // length, shape[axis + 1 :]):
            return Along(axis), Along(b, size // length)
        if length % size == 0 and _is_product(length // size, there[b + 1 :]):
            return Along(axis, length // size), Along(b)
    return None


def _is_product(size: int, sizes: Sequence[int]) -> bool:
    """Return whether a size is the product of the first of some sizes."""
    return any(math.prod(sizes[:n]) == size for n in range(len(sizes) + 1))


def _transpose(q: AxisQuestion) -> Relation:
    permutation = tuple(q.params["permutation"])
    result = q.axis if q.is_result else permutation.index(q.axis)
    return Aligned((Along(permutation[result]),), (Along(result),))


def _squeeze(q: AxisQuestion) -> Relation | None:
    removed = {d % len(q.operands[0]) for d in q.params["dimensions"]}
    kept = [d for d in range(len(q.operands[0])) if d not in removed]
    operand = kept[q.axis] if q.is_result else q.axis
    if operand in removed:
        return None
    return Aligned((Along(operand),), (Along(kept.index(operand)),))


def _dot_general(q: AxisQuestion) -> Relation | None:
    contracting, batch = q.params["dimension_numbers"]
    axes: list[
        list[int | None]
    ] = []  # for each axis of the product: that of the left and of the right operand
    axes += [[left, right] for left, right in zip(*batch, strict=True)]
    for side in (0, 1):
        taken = {*contracting[side], *batch[side]}
        free = (d for d in range(len(q.operands[side])) if d not in taken)
        axes += [[d, None] if side == 0 else [None, d] for d in free]
    if not q.is_result and q.axis in contracting[q.position]:
        k = tuple(contracting[q.position]).index(q.axis)
        return Combined((Along(contracting[0][k]), Along(contracting[1][k])), "add")
    pairs = (i for i, pair in enumerate(axes) if pair[q.position] == q.axis)
    result = q.axis if q.is_result else next(pairs)
    left, right = (None if d is None else Along(d) for d in axes[result])
    return Aligned((left, right), (Along(result),))


def _reduction(q: AxisQuestion) -> Relation | None:
    axes = {d % len(q.operands[0]) for d in q.params["axes"]}
    kept = [d for d in range(len(q.operands[0])) if d not in axes]
    if q.is_result or q.axis not in axes:
        operand = kept[q.axis] if q.is_result else q.axis
        return Aligned((Along(operand),), (Along(kept.index(operand)),) * len(q.results))
    combine = _COMBINES.get(q.op.name)
    return None if combine is None else Combined((Along(q.axis),), combine)


_COMBINES = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "bitwise_and",
    "reduce_or": "bitwise_or",
}
"""The function of `jax.lax` that combines two results of each reduction."""


# ---------------------------------------------------------------- operations that move rows


def _slice(q: AxisQuestion) -> Relation | None:
    """The rows that stay are copied. `row_access` slices one axis after the other."""
    starts, limits = q.params["start_indices"], q.params["limit_indices"]
    strides = q.params["strides"] or (1,) * len(starts)
    shape = q.operands[0][: len(starts)]  # an array of keys has one axis more
    whole = [
        (start, limit, stride) == (0, size, 1)
        for start, limit, stride, size in zip(starts, limits, strides, shape, strict=True)
    ]
    if q.axis >= len(whole):
        return None
    if whole[q.axis]:
        return Aligned((Along(q.axis),), (Along(q.axis),), _resized("limit_indices", q.axis))
    if whole.count(False) > 1:
        return None
    start, stop, stride = int(starts[q.axis]), int(limits[q.axis]), int(strides[q.axis])
    if stride == 1:
        return MovedRows(q.axis, (CopiedRows(0, start, 0, 0, stop - start),))
    rows = range(start, stop, stride)
    if len(rows) > MOST_COPIED_ROWS:
        return None
    return MovedRows(q.axis, tuple(CopiedRows(0, row, 0, k, 1) for k, row in enumerate(rows)))


def _dynamic_slice(q: AxisQuestion) -> Relation | None:
    if not q.is_result and q.position > 0:
        return None
    whole, length = q.operands[0][q.axis], q.params["slice_sizes"][q.axis]
    if length == whole:
        others = (None,) * (len(q.operands) - 1)
        return Aligned((Along(q.axis), *others), (Along(q.axis),), _resized("slice_sizes", q.axis))
    starts = q.op.inputs[1:]
    if any(not isinstance(start, Lit) for start in starts):
        return None
    sizes = q.params["slice_sizes"]
    if any(q.operands[0][d] != sizes[d] for d in range(len(sizes)) if d != q.axis):
        return None
    at = starts[q.axis]
    assert isinstance(at, Lit)
    start = min(max(int(at.value), 0), whole - length)
    return MovedRows(q.axis, (CopiedRows(0, start, 0, 0, length),))


def _dynamic_update_slice(q: AxisQuestion) -> Relation | None:
    """The rows of the update take the place of rows at a known position."""
    whole, part = q.operands[:2]
    starts = [int(at.value) if isinstance(at, Lit) else None for at in q.op.inputs[2:]]
    if (not q.is_result and q.position > 1) or any(
        part[d] != whole[d] for d in range(len(whole)) if d != q.axis
    ):
        return None
    if (at := starts[q.axis]) is None:
        return None
    first, length = min(max(at, 0), whole[q.axis] - part[q.axis]), part[q.axis]
    behind = first + length
    pieces = [
        CopiedRows(0, 0, 0, 0, first),
        CopiedRows(1, 0, 0, first, length),
        CopiedRows(0, behind, 0, behind, whole[q.axis] - behind),
    ]
    return MovedRows(q.axis, tuple(piece for piece in pieces if piece.length))


def _pad(q: AxisQuestion) -> Relation | None:
    low, high, interior = (int(n) for n in q.params["padding_config"][q.axis])
    if (low, high, interior) == (0, 0, 0):
        return Aligned((Along(q.axis), None), (Along(q.axis),))
    others = (config for d, config in enumerate(q.params["padding_config"]) if d != q.axis)
    if low < 0 or high < 0 or interior or any(any(config) for config in others):
        return None
    return MovedRows(q.axis, (CopiedRows(0, 0, 0, low, q.operands[0][q.axis]),), fill=1)


def _concatenate(q: AxisQuestion) -> Relation | None:
    if q.params["dimension"] != q.axis:
        return _elementwise(q)
    ends = np.cumsum([0, *(shape[q.axis] for shape in q.operands)]).tolist()
    return MovedRows(
        q.axis, tuple(CopiedRows(k, 0, 0, ends[k], shape[q.axis]) for k, shape in enumerate(q.operands))
    )


def _split(q: AxisQuestion) -> Relation | None:
    if q.params["axis"] != q.axis:
        return _elementwise(q)
    sizes = tuple(map(int, q.params["sizes"]))
    starts = np.cumsum([0, *sizes]).tolist()
    return MovedRows(q.axis, tuple(CopiedRows(0, starts[k], k, 0, size) for k, size in enumerate(sizes)))


def _pick(q: AxisQuestion) -> Relation:
    """Rule of the compiler's own operation that reads the row of one layer."""
    if not q.is_result and q.axis == 0:
        return Picked(bound_argument(q.op))
    operand = q.axis + q.is_result
    return Aligned((Along(operand),), (Along(operand - 1),))


def _stack(q: AxisQuestion) -> Relation:
    """Rule of the compiler's own operation that stacks the values of all layers."""
    if q.is_result and q.axis == 0:
        return Stacked()
    operand = q.axis - q.is_result
    return Aligned((Along(operand),) * len(q.operands), (Along(operand + 1),))


# ---------------------------------------------------------------- operations with equations inside


def _scan(q: AxisQuestion) -> Relation | None:
    """A scan over the rows, which are the first axis of what it iterates over and of what it stacks. Or one
    that computes something for all rows in every iteration."""
    if not equation_params(q.op):
        return None  # one that was split
    scan = private_api.scan_parts(bound_argument(q.op))
    first = scan.num_carry if q.is_result else scan.first_x
    if q.axis == 0 and q.position >= first:
        return Chained(scan)
    return None if q.op.body is None else Looped(scan)


def _cond(q: AxisQuestion) -> Relation | None:
    if q.op.branches is None or (not q.is_result and q.position == 0):
        return None
    return Branched(q.axis)


# ---------------------------------------------------------------- the table


def _resized(name: str, axis: int, unit: int = 1) -> Callable[[Mapping[str, Any], int, int], dict[str, Any]]:
    """Return a function that sets one axis of a parameter, which is a shape, to the length of a part."""

    def resize(params: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        sizes = list(params[name])
        sizes[axis] = (stop - start) * unit
        return {**params, name: tuple(sizes)}

    return resize


Rule: TypeAlias = Callable[[AxisQuestion], Relation | None]

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(KEY_ARRAYS, _keys),
    **dict.fromkeys(BATCHED_MATRIX, _batched_matrix),
    **dict.fromkeys(REDUCTIONS | {"argmax", "argmin"}, _reduction),
    **dict.fromkeys(CUMULATIVE, _other_axis("axis")),
    "sort": _other_axis("dimension"),
    "rev": _rev,
    "tile": _tile,
    "top_k": _top_k,
    "optimization_barrier": _barrier,
    "sharding_constraint": _constraint,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "dot_general": _dot_general,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "split": _split,
    INDEX: _pick,
    STACK: _stack,
    "scan": _scan,
    "cond": _cond,
}
"""The rule of each primitive; an operation whose primitive is not here is not computed in parts."""
