"""Two stages of a residual block on (batch, sequence, features), and a head: what tests of parallelism inside
actors train. The ways to split it are in the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpp_async as jpp

ROWS, SEQUENCE, DIM, HIDDEN, OUT = 4, 6, 8, 16, 4
MICROBATCHES = 4

SHAPES = {
    "up": (DIM, HIDDEN),
    "down": (HIDDEN, DIM),
    "act": (ROWS, SEQUENCE, DIM),
    "hidden": (ROWS, SEQUENCE, HIDDEN),
    "shards of act": (2, ROWS // 2, SEQUENCE, DIM),
    "shards of up": (2, DIM, HIDDEN),
}
"""Global shapes of weights (and their accumulators) and of what goes between tasks."""

_BLOCK = {"up": P(None, "model"), "down": P("model")}
TENSOR_PARALLEL = {"blocks": [_BLOCK, _BLOCK], "head": P()}


def make_params() -> Any:
    def wave(n: int, *shape: int) -> jax.Array:
        return jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32) * (n + 0.7)).reshape(shape) * 0.4

    blocks = [{"up": wave(i, DIM, HIDDEN), "down": wave(i + 2, HIDDEN, DIM)} for i in range(2)]
    return {"blocks": blocks, "head": wave(4, DIM, OUT)}


def make_batch() -> Any:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(MICROBATCHES, ROWS, SEQUENCE, DIM)).astype(np.float32),
        "y": rng.normal(size=(MICROBATCHES, ROWS, SEQUENCE, OUT)).astype(np.float32),
    }


def make_loss(
    constrain: Callable[[jax.Array, str], jax.Array] = lambda x, what: x, down: Callable = jnp.matmul
) -> Callable:
    """The loss of one microbatch.

    Args:
        constrain: called on activations with `"act"` or `"hidden"`.
        down: the product that ends a block.
    """

    def loss(params: Any, mb: Any) -> jax.Array:
        x = constrain(mb["x"], "act")
        for i, block in enumerate(params["blocks"]):
            h = constrain(jax.nn.relu(x @ block["up"]), "hidden")
            x = constrain(x + down(h, block["down"]), "act")
            if i == 0:
                x = jpp.pipeline_yield(x)
        return jnp.mean((x @ params["head"] - mb["y"]) ** 2)

    return loss


def make_step(grads_of: Callable, after: Callable = lambda grads, params: grads) -> Callable:
    """A step of gradient descent.

    Args:
        grads_of: (parameters, microbatch) to (gradients, loss).
        after: (summed gradients, parameters) to gradients like the parameters.
    """

    def step(params: Any, batch: Any) -> Any:
        grads, losses = jpp.accumulate_grads(lambda mb: grads_of(params, mb), jpp.Std1F1B(2))(batch)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, after(grads, params)), losses

    return step


def plain_grads(loss: Callable) -> Callable:
    """(parameters, microbatch) to (gradients, loss)."""

    def grads_of(params: Any, mb: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, mb)
        return grads, value

    return grads_of
