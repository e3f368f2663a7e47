"""Count the floating-point operations of one primitive equation on unsharded arrays.

Products and convolutions are counted exactly, where a multiply-add counts as two. Each element of the result
of an elementwise primitive counts as one operation, and each element that a reduction reads as one. Layout
changes, casts and copies count as none. Factorizations count by the leading term of the textbook's formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp_async.compiler.primitives import LAYOUT, READS_ALL

Shape = tuple[int, ...]


def equation_flops(
    name: str, params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]
) -> float:
    """Return the floating-point operations of one equation that has no jaxpr inside.

    Args:
        name: the name of the primitive.
        params: the parameters of the equation.
        operands: the shape of each operand.
        results: the shape of each result.
    """
    if name in LAYOUT or not results:
        return 0.0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * math.prod(results[0]) * math.prod(operands[0][d] for d in contracted)
    if name == "conv_general_dilated":
        return _convolution_flops(params, operands[0], operands[1], results[0])
    if name == "ragged_dot_general":
        return _ragged_dot_flops(params, operands)
    if name == "sort":
        length = max(2, operands[0][params["dimension"]])
        return math.prod(operands[0]) * math.log2(length)
    if name.startswith(("reduce_window", "select_and_gather_add")):
        return float(math.prod(results[0]) * math.prod(params["window_dimensions"]))
    if name.startswith("scatter"):
        return float(math.prod(operands[-1]))  # the updates
    if name in ("cholesky", "triangular_solve", "lu", "fft"):
        return _linear_algebra_flops(name, params, operands)
    if name in READS_ALL:
        return float(math.prod(operands[0]))
    return float(math.prod(results[0]))


def _convolution_flops(params: Mapping[str, Any], lhs: Shape, kernel: Shape, result: Shape) -> float:
    """Return the operations of a convolution, without products with padding or with a dilation's zeros."""
    numbers = params["dimension_numbers"]
    pairs = 1
    for dim, (low, _) in enumerate(params["padding"]):
        size, width = lhs[numbers.lhs_spec[2 + dim]], kernel[numbers.rhs_spec[2 + dim]]
        count = result[numbers.out_spec[2 + dim]]
        spread = params["lhs_dilation"][dim]
        first = np.arange(count) * params["window_strides"][dim] - low
        read = first[:, None] + np.arange(width) * params["rhs_dilation"][dim]
        inside = (read >= 0) & (read <= (size - 1) * spread) & (read % spread == 0)
        pairs *= int(np.count_nonzero(inside))
    batch = lhs[numbers.lhs_spec[0]] // params["batch_group_count"]
    summed = kernel[numbers.rhs_spec[1]]  # features of one group
    return 2.0 * batch * kernel[numbers.rhs_spec[0]] * summed * pairs


def _ragged_dot_flops(params: Mapping[str, Any], operands: Sequence[Shape]) -> float:
    """Return the operations of a product in which each row belongs to one of several groups."""
    numbers = params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    skipped = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = math.prod(n for d, n in enumerate(operands[1]) if d not in skipped)
    return 2.0 * math.prod(operands[0]) * free


def _linear_algebra_flops(name: str, params: Mapping[str, Any], operands: Sequence[Shape]) -> float:
    *batch, rows, columns = (1, 1, *operands[0])
    many = math.prod(batch)
    if name == "cholesky":
        return many * rows**3 / 3
    if name == "lu":
        least = min(rows, columns)
        return many * (rows * columns * least - (rows + columns) * least**2 / 2 + least**3 / 3)
    if name == "triangular_solve":
        return float(rows * math.prod(operands[1]))
    lengths = math.prod(params["fft_lengths"])
    return 5.0 * math.prod(operands[0]) * math.log2(max(2, lengths))
