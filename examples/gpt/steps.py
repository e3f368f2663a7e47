"""steps: the step functions that run on a mesh, or unchanged under `jax.jit`. Pure JAX and optax."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp_async as jpp
from gpt.model import ModelConfig, init_params, loss_fn

State = dict[str, Any]
"""`params` and `optimizer`, both trees of arrays."""


def make_optimizer(num_steps: int, peak_learning_rate: float = 3e-3) -> optax.GradientTransformation:
    """AdamW under a global-norm clip; the learning rate warms up for a tenth of the steps, then falls as a
    cosine."""
    warmup_steps = max(1, min(50, num_steps // 10))
    learning_rate = optax.warmup_cosine_decay_schedule(
        init_value=peak_learning_rate / warmup_steps,
        peak_value=peak_learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=max(num_steps, warmup_steps + 1),
        end_value=peak_learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate, b2=0.95, weight_decay=0.1, mask=_is_matrix),
    )


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # Norm scales are not decayed.


def make_init(config: ModelConfig, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`key -> state` at step 0."""

    def init(key: jax.Array) -> State:
        params = init_params(key, config)
        return {"params": params, "optimizer": optimizer.init(params)}

    return init


def make_train_step(
    config: ModelConfig, optimizer: optax.GradientTransformation, schedule: Any
) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """`(state, batch) -> (new state, mean loss)`."""
    microbatch_loss = partial(loss_fn, config=config)

    def train_step(state: State, batch: Any) -> tuple[State, jax.Array]:
        def microbatch_grads(microbatch: Any) -> tuple[Any, jax.Array]:
            loss, grads = jax.value_and_grad(microbatch_loss)(state["params"], microbatch)
            return grads, loss

        grads, losses = jpp.accumulate_grads(microbatch_grads, schedule)(batch)
        grads = jax.tree.map(lambda grad: grad / losses.size, grads)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer_state}, jnp.mean(losses)

    return train_step


def num_steps(state: State) -> Any:
    """The leaf of a state that counts its steps: the optimizer does."""
    return optax.tree_utils.tree_get_all_with_path(state["optimizer"], "count")[0][1]


def make_eval_step(config: ModelConfig, schedule: Any) -> Callable[[Any, Any], jax.Array]:
    """`(params, batch) -> mean loss`: a loop without gradients, in which the schedule's backward tasks are
    empty."""

    def eval_step(params: Any, batch: Any) -> jax.Array:
        return jpp.accumulate_grads(partial(loss_fn, params, config=config), schedule, reduce=jpp.Mean())(
            batch
        )

    return eval_step


def run_plain(train_step: Callable, state: State, batches: Iterable[Any]) -> tuple[State, list[float]]:
    """The state and losses after `batches` under plain `jax.jit` in this process: what the pipeline must
    agree with."""
    step = jax.jit(train_step, donate_argnums=0)
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return state, losses


def largest_relative_difference(tree: Any, expected: Any) -> float:
    """Over all leaves: the largest difference within the leaf divided by its largest expected magnitude."""

    def difference(leaf: Any, expected_leaf: Any) -> float:
        got, want = np.asarray(leaf, np.float64), np.asarray(expected_leaf, np.float64)
        return float(np.max(np.abs(got - want)) / max(np.max(np.abs(want)), np.finfo(np.float32).tiny))

    # numpy's max, unlike Python's, lets a NaN through.
    return float(np.max(jax.tree.leaves(jax.tree.map(difference, tree, expected))))
