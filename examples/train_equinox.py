"""Train a small equinox language model on real text through a pipeline of actor processes.

    python examples/train_equinox.py --help

Has: a model of one sequence under `vmap`, `eqx.partition` of arrays and static fields,
    `eqx.filter_value_and_grad`,
`eqx.filter_checkpoint` around blocks, dropout keys, `eqx.nn.State` of BatchNorm, a tied embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxpp_async as jpp
from training import SEQ_LEN, VOCAB_SIZE, Program, main

ADAMW = optax.adamw(3e-3)


class Block(eqx.Module):
    """Causal attention, then an MLP with BatchNorm; dropout behind each. (seq, dim) to the same."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    batch_norm: eqx.nn.BatchNorm
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, dim: int, key: jax.Array):
        attention_key, up_key, down_key = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(dim)
        self.attention = eqx.nn.MultiheadAttention(2, dim, key=attention_key)
        self.up = eqx.nn.Linear(dim, 2 * dim, use_bias=False, key=up_key)
        self.batch_norm = eqx.nn.BatchNorm(2 * dim, axis_name="batch", momentum=0.9, mode="batch")
        self.down = eqx.nn.Linear(2 * dim, dim, key=down_key)
        self.dropout = eqx.nn.Dropout(0.1)
        self.activation = jax.nn.relu

    def __call__(self, x: jax.Array, state: eqx.nn.State, key: jax.Array) -> tuple[jax.Array, eqx.nn.State]:
        keys = jax.random.split(key)
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        normed = jax.vmap(self.norm)(x)
        x = x + self.dropout(self.attention(normed, normed, normed, mask=causal), key=keys[0])
        hidden, state = self.batch_norm(jax.vmap(self.up)(x).T, state)  # Channels come first.
        return x + self.dropout(jax.vmap(self.down)(self.activation(hidden.T)), key=keys[1]), state


class Model(eqx.Module):
    """Tokens (seq,) to logits (seq, vocabulary)."""

    embed: eqx.nn.Embedding
    position: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, dim: int, num_layers: int, key: jax.Array):
        embed_key, position_key, *block_keys = jax.random.split(key, 2 + num_layers)
        self.embed = eqx.nn.Embedding(weight=0.02 * jax.random.normal(embed_key, (VOCAB_SIZE, dim)))
        self.position = 0.02 * jax.random.normal(position_key, (SEQ_LEN, dim))
        self.blocks = [Block(dim, key) for key in block_keys]
        self.norm = eqx.nn.LayerNorm(dim)

    def __call__(
        self, tokens: jax.Array, state: eqx.nn.State, key: jax.Array
    ) -> tuple[jax.Array, eqx.nn.State]:
        x = jax.vmap(self.embed)(tokens) + self.position[: len(tokens)]
        for index, block in enumerate(self.blocks):
            x, state = eqx.filter_checkpoint(block)(x, state, jax.random.fold_in(key, index))
            x = jpp.pipeline_yield(x)  # Of the activations only: the statistics stay in their stage.
        return jax.vmap(self.norm)(x) @ self.embed.weight.T, state


def loss_fn(
    model: Model, state: eqx.nn.State, microbatch: Any, key: jax.Array
) -> tuple[jax.Array, eqx.nn.State]:
    """Mean cross-entropy in nats a byte, and the statistics to go on with."""
    keys = jax.random.split(key, microbatch["tokens"].shape[0])
    batched = jax.vmap(model, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")
    logits, state = batched(microbatch["tokens"], state, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["labels"]).mean(), state


def make_program(
    schedule: Any, optimizer: optax.GradientTransformation = ADAMW, *, dim: int = 64, num_layers: int = 4
) -> Program:
    """A model with a mark behind each layer, of which the schedule chooses, and its training step."""
    make = eqx.nn.make_with_state(lambda key: Model(dim, num_layers, key))
    # Shapes suffice to tell arrays from the rest (functions, flags), which the step closes over.
    shapes, _ = eqx.filter_eval_shape(make, jax.random.key(0))
    _, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def init(key: jax.Array) -> dict[str, Any]:
        model_key, dropout_key = jax.random.split(key)
        model, statistics = make(model_key)
        params = eqx.filter(model, eqx.is_array)
        optimizer_state = optimizer.init(params)
        return {"params": params, "optimizer": optimizer_state, "statistics": statistics, "key": dropout_key}

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], jax.Array]:
        step_key, next_key = jax.random.split(state["key"])

        def microbatch_grads(microbatch: Any, index: jax.Array) -> tuple[Any, jax.Array, Any]:
            model = eqx.combine(state["params"], static)
            key = jax.random.fold_in(step_key, index)
            value_and_grad = eqx.filter_value_and_grad(loss_fn, has_aux=True)
            (loss, statistics), grads = value_and_grad(model, state["statistics"], microbatch, key)
            return grads, loss, statistics

        # Gradients and losses are averaged. Statistics hold a counter, so their last value is taken, not the
        # mean.
        reduce = (jpp.Mean(), jpp.Mean(), jpp.Stack())
        loop = jpp.accumulate_grads(microbatch_grads, schedule, reduce=reduce, pass_index=True)
        grads, loss, stacked = loop(batch)
        statistics = jax.tree.map(lambda leaf: leaf[-1], stacked)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = eqx.apply_updates(state["params"], updates)
        return {
            "params": params,
            "optimizer": optimizer_state,
            "statistics": statistics,
            "key": next_key,
        }, loss

    return Program(init, train_step)


if __name__ == "__main__":
    main(make_program)
