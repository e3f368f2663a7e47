"""jax_contender: what contenders of plain JAX share: a step function in, a served line out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from contender import Channel, timed
from first_values import first_values
from jax_steps import Step
from shapes import Shape
from warm_up import checked_losses

Start = tuple[Any, Any, Any]
"""Weights, batch, targets."""


def serve(channel: Channel, shape: Shape, step: Step, place: Callable[[Start], Start], **facts: Any) -> None:
    """Train until told to quit; the weights are donated from step to step.

    Args:
        place: puts the first values, all of `first_values`, onto devices.
        facts: beside JAX's version and the first loss.
    """
    jitted = jax.jit(step, donate_argnums=0)
    weights, x, target = place(first_values(shape))

    def run() -> jax.Array:
        nonlocal weights
        weights, loss = jax.block_until_ready(jitted(weights, x, target))
        return loss

    loss = checked_losses(lambda num_steps: [float(run()) for _ in range(num_steps)], shape)
    channel.serve(lambda num_steps: timed(run, num_steps), jax=jax.__version__, loss=loss, **facts)
