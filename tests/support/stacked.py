"""A small model whose layers are stacked in one array, and its training step under any cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp_async as jpp

LAYERS, WIDTH, MICROBATCHES = 8, 4, 4
OPTIMIZER = optax.adam(1e-2)


def loss_fn(params: Any, x: Any, num_stages: int) -> Any:
    """Scan over the layers of each stage."""
    each, hidden = LAYERS // num_stages, x
    for stage in range(num_stages):
        layers = params["w"][stage * each : (stage + 1) * each]
        hidden, _ = jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), hidden, layers)
        if stage < num_stages - 1:
            hidden = jpp.pipeline_yield(hidden)
    return jnp.mean((hidden @ params["head"] - x) ** 2)


def marked_loss(params: Any, x: Any, num_stages: int) -> Any:
    """Scan over all layers, with a mark behind each: the stages take their layers one at a time."""
    del num_stages  # `stages=` of the schedule says which marks end one
    hidden, _ = jax.lax.scan(lambda h, layer: (jpp.pipeline_yield(jnp.tanh(h @ layer)), None), x, params["w"])
    return jnp.mean((hidden @ params["head"] - x) ** 2)


def train_step(schedule: Any, loss_fn: Callable = loss_fn) -> Callable[[Any, Any], Any]:
    """Return a training step with as many stages as the schedule has."""

    def step(state: Any, batch: Any) -> Any:
        params, opt = state

        def grads_of(mb: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, mb, schedule.num_stages)
            return grads, loss

        grads, losses = jpp.accumulate_grads(grads_of, schedule)(batch)
        updates, opt = OPTIMIZER.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), losses

    return step


def evaluate(schedule: Any) -> Callable[[Any, Any], Any]:
    """Return a step that computes the losses, and hands the state back."""

    def step(state: Any, batch: Any) -> Any:
        def loss_of(mb: Any) -> Any:
            return jnp.zeros(()), loss_fn(state[0], mb, schedule.num_stages)

        return state, jpp.accumulate_grads(loss_of, schedule)(batch)[1]

    return step


def median(state: Any, _: Any) -> Any:
    """Return a number for which all layers are needed on one actor."""
    return jnp.median(state[0]["w"])


def init_fn(seed: Any) -> Any:
    """Make the training state."""
    w = jax.random.normal(jax.random.key(seed), (LAYERS, WIDTH, WIDTH)) / 2
    params = {"head": jnp.eye(WIDTH), "w": w}
    return params, OPTIMIZER.init(params)


def make_state(seed: int = 0) -> Any:
    """Return the training state as numpy."""
    return jax.device_get(init_fn(seed))


def make_batch(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(MICROBATCHES, 2, WIDTH)).astype("float32")


_PLAIN = jax.jit(train_step(jpp.Std1F1B(2)))


def reference(state: Any, *batches: Any) -> Any:
    """Return the state after training on some batches, by plain JAX."""
    for batch in batches:
        state, _ = _PLAIN(state, batch)
    return jax.device_get(state)
