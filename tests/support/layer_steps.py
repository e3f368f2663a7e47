"""A training step of equal layers, one a stage, on which what a compiler plans can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxpp_async as jpp


def layer_step(num_stages: int, schedule: Any) -> Callable[[Any, Any], Any]:
    """Return a step that takes a list of matrices and a batch (microbatches, rows, width), and returns new
    matrices and the losses.

    Args:
        num_stages: the number of matrices.
        schedule: the schedule of the step.
    """

    def loss(ws, x):
        for k, w in enumerate(ws):
            x = jnp.sin(x @ w)
            x = jpp.pipeline_yield(x) if k < num_stages - 1 else x
        return jnp.sum(x**2)

    def train_step(ws, xs):
        grads, losses = jpp.accumulate_grads(lambda mb: jax.value_and_grad(loss)(ws, mb)[::-1], schedule)(xs)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), losses

    return train_step
