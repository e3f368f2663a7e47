"""Pieces that the cases are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jaxpp_async as jpp

cut = jpp.pipeline_yield


def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    """One layer, (rows, width) to (rows, width)."""
    return jnp.tanh(x @ w)


def error(x: jax.Array, microbatch: Any) -> jax.Array:
    """Mean squared distance from the microbatch's `y`."""
    return jnp.mean((x - microbatch["y"]) ** 2)


def chain(ws: Any, x: jax.Array) -> jax.Array:
    """A layer and a stage for each weight."""
    for k, w in enumerate(ws):
        x = dense(cut(x) if k else x, w)
    return x


def descended(params: Any, grads: Any, rate: float = 0.1) -> Any:
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)
