"""first_values: a shape in, the weights, batch and targets that every contender starts from out. Needs numpy
only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from shapes import NUM_STAGES, SEED, Shape

Array = np.ndarray


class Values(NamedTuple):
    """Where a training run starts. All float32, C order.

    Attributes:
        stages: the weights of each stage. tiny: one matrix of [width, width]; big: w1 [width, hidden] and
            w2 [hidden, width] of each block in turn.
        x: the batch, [microbatches, rows, width]; every step trains on the same one.
        target: as x.
    """

    stages: tuple[tuple[Array, ...], ...]
    x: Array
    target: Array


def first_values(shape: Shape) -> Values:
    """The same values in every process, from `shapes.SEED`."""
    rng = np.random.default_rng(SEED)
    stages = tuple(tuple(_matrix(rng, *size) for size in _sizes(shape)) for _ in range(NUM_STAGES))
    batch = (shape.num_microbatches, shape.num_rows, shape.width)
    x, target = (rng.standard_normal(batch, np.float32) for _ in range(2))
    return Values(stages, x, target)


def _sizes(shape: Shape) -> list[tuple[int, int]]:
    """Of one stage's matrices, [in, out]."""
    if not shape.num_blocks:
        return [(shape.width, shape.width)]
    return [(shape.width, shape.hidden), (shape.hidden, shape.width)] * shape.num_blocks


def _matrix(rng: np.random.Generator, num_in: int, num_out: int) -> Array:
    # Scaled by the fan-in, so that what goes through keeps its size, whatever the width.
    return rng.standard_normal((num_in, num_out), np.float32) / np.float32(np.sqrt(num_in))
