"""shapes: the two models that all contenders train, as plain numbers. Standard library only, for every
environment.

Both are pipelines of two stages, float32, plain SGD. A step's loss is the mean squared error of a microbatch
against its target (mean over all its elements), and the mean of that over the microbatches; gradients are
those of this loss. Nothing has a bias.

tiny: stage 0 is tanh(x @ a), stage 1 is h @ b.
big:  each stage is four blocks x + gelu(x @ w1) @ w2, gelu in its tanh approximation.

`first_values.py` makes the values that everybody starts from, so that all contenders report the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass

SEED = 20260
NUM_STAGES = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of one model."""

    name: str
    num_microbatches: int
    num_rows: int
    """Of one microbatch."""
    width: int
    """Of what a stage takes and makes."""
    num_blocks: int
    """Of each stage; 0: the stages are one matrix each (tiny)."""
    hidden: int
    """Within a block; 0 where there are none."""
    learning_rate: float


TINY = Shape("tiny", num_microbatches=8, num_rows=8, width=8, num_blocks=0, hidden=0, learning_rate=0.1)
BIG = Shape("big", num_microbatches=8, num_rows=64, width=512, num_blocks=4, hidden=2048, learning_rate=0.003)
SHAPES = {shape.name: shape for shape in (TINY, BIG)}
