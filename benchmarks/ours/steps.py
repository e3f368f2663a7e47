"""Make this package's step function, state and batch for a shape of `shapes.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from first_values import first_values
from shapes import Shape

import jaxpp_async as jpp


@dataclass(frozen=True)
class Training:
    """What a contender trains.

    Args:
        step: (state, batch) -> (new state, losses of the microbatches); its first argument may be donated.
        state, batch: where it starts; every step sees the same batch.
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch: Any


def training(shape: Shape, schedule: Any, *, blocks_per_stage: int | None = None) -> Training:
    """The training step of `shape`, pipelined by `schedule`.

    Args:
        shape: TINY or BIG.
        schedule: of as many stages as the model is cut into.
        blocks_per_stage: cut the model of BIG after every so many blocks; None: as the shape says.
    """
    values = first_values(shape)
    batch = {"x": values.x, "target": values.target}
    if shape.num_blocks:
        matrices = [m for stage in values.stages for m in stage]
        state = [{"w1": w1, "w2": w2} for w1, w2 in zip(matrices[::2], matrices[1::2], strict=True)]
        forward = _blocks(blocks_per_stage or shape.num_blocks)
    else:
        state = [{"w": w} for (w,) in values.stages]
        forward = _tiny
    return Training(sgd(forward, schedule, shape), state, batch)


def _tiny(state: Any, x: Any) -> Any:
    return jpp.pipeline_yield(jnp.tanh(x @ state[0]["w"])) @ state[1]["w"]


def _blocks(per_stage: int) -> Callable[[Any, Any], Any]:
    def forward(state: Any, x: Any) -> Any:
        for i, block in enumerate(state):
            if i and i % per_stage == 0:
                x = jpp.pipeline_yield(x)
            x = x + jax.nn.gelu(x @ block["w1"]) @ block["w2"]
        return x

    return forward


def sgd(
    forward: Callable[[Any, Any], Any], schedule: Any, shape: Shape
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A training step: the mean squared error of `forward`, and plain SGD."""

    def loss_fn(state: Any, microbatch: Any) -> Any:
        return jnp.mean((forward(state, microbatch["x"]) - microbatch["target"]) ** 2)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def gradients(microbatch: Any) -> tuple[Any, Any]:
            loss, grads = jax.value_and_grad(loss_fn)(state, microbatch)
            return grads, loss

        grads, losses = jpp.accumulate_grads(gradients, schedule)(batch)
        # The loss is the mean over the microbatches, and `grads` are summed.
        rate = shape.learning_rate / shape.num_microbatches
        return jax.tree.map(lambda w, g: w - rate * g, state, grads), losses

    return step
