"""Train a small flax.linen language model on real text through a pipeline of actor processes.

    python examples/train_linen.py --help

Has: layers of a stage as one `nn.scan` over `nn.remat`, a tied embedding, dropout with a key for each step
    and
microbatch, BatchNorm statistics as a mutable collection, a `TrainState`.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

import jaxpp_async as jpp
from training import SEQ_LEN, VOCAB_SIZE, Program, main

ADAMW = optax.adamw(3e-3)


class Block(nn.Module):
    """Causal attention, then an MLP with BatchNorm; dropout behind each. (batch, seq, dim) to the same."""

    dim: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        causal = nn.make_causal_mask(x[..., 0])
        # The gradient of a key's bias is zero but for rounding, which Adam would blow up.
        mixed = nn.MultiHeadDotProductAttention(2, use_bias=False)(nn.LayerNorm()(x), mask=causal)
        x = x + nn.Dropout(0.1, deterministic=False)(mixed)
        hidden = nn.Dense(2 * self.dim, use_bias=False)(x)
        hidden = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(hidden))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(self.dim)(hidden)), None


class Model(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocabulary)."""

    num_stages: int
    dim: int
    layers_per_stage: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB_SIZE, self.dim)
        position = self.param("position", nn.initializers.normal(0.02), (SEQ_LEN, self.dim))
        # One scan a stage: a scan over all layers would stack the parameters of all stages in one array.
        stage = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers_per_stage,
        )
        x = embed(tokens) + position[: tokens.shape[-1]]
        for index in range(self.num_stages):
            x, _ = stage(self.dim, name=f"stage{index}")(x, None)
            if index < self.num_stages - 1:
                x = jpp.pipeline_yield(x)
        return embed.attend(nn.LayerNorm()(x))


class TrainState(train_state.TrainState):
    """With what changes beside the parameters, and the key that dropout draws from."""

    batch_stats: Any
    key: jax.Array


def make_program(
    schedule: Any, optimizer: optax.GradientTransformation = ADAMW, *, dim: int = 64, num_layers: int = 4
) -> Program:
    """A model cut into the schedule's stages, and its training step."""
    model = Model(schedule.num_stages, dim, max(1, num_layers // schedule.num_stages))

    def init(key: jax.Array) -> TrainState:
        init_key, dropout_key = jax.random.split(key)
        variables = model.init(
            {"params": init_key, "dropout": dropout_key}, jnp.zeros((1, SEQ_LEN), jnp.int32)
        )
        return TrainState.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=optimizer,
            batch_stats=variables["batch_stats"],
            key=dropout_key,
        )

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        step_key = jax.random.fold_in(state.key, state.step)

        def microbatch_grads(microbatch: Any, index: jax.Array) -> tuple[Any, jax.Array, Any]:
            def loss_fn(params: Any) -> tuple[jax.Array, Any]:
                logits, updated = state.apply_fn(
                    {"params": params, "batch_stats": state.batch_stats},
                    microbatch["tokens"],
                    rngs={"dropout": jax.random.fold_in(step_key, index)},
                    mutable=["batch_stats"],
                )
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["labels"])
                return losses.mean(), updated["batch_stats"]

            (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            return grads, loss, statistics

        # All three are averaged: gradients, losses and the statistics that each microbatch would go on with.
        loop = jpp.accumulate_grads(microbatch_grads, schedule, reduce=jpp.Mean(), pass_index=True)
        grads, loss, statistics = loop(batch)
        return state.apply_gradients(grads=grads, batch_stats=statistics), loss

    return Program(init, train_step)


if __name__ == "__main__":
    main(make_program)
