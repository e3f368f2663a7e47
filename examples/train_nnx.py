"""Train a small flax.nnx language model on real text through a pipeline of actor processes.

    python examples/train_nnx.py --help

Has: a tied embedding, dropout whose keys are the model's own state, BatchNorm statistics, remat around
    blocks.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx

import jaxpp_async as jpp
from training import SEQ_LEN, VOCAB_SIZE, Program, main

ADAMW = optax.adamw(3e-3)


class Block(nnx.Module):
    """Causal attention, then an MLP with BatchNorm; dropout behind each. (batch, seq, dim) to the same."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        # The gradient of a key's bias is zero but for rounding, which Adam would blow up.
        self.attention = nnx.MultiHeadAttention(
            2, dim, use_bias=False, decode=False, deterministic=False, rngs=rngs
        )
        self.up = nnx.Linear(dim, 2 * dim, use_bias=False, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(2 * dim, momentum=0.9, rngs=rngs)
        self.down = nnx.Linear(2 * dim, dim, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        causal = nnx.make_causal_mask(x[..., 0])
        x = x + self.dropout(self.attention(self.norm(x), mask=causal))
        return x + self.dropout(self.down(nnx.relu(self.batch_norm(self.up(x)))))


class Model(nnx.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocabulary)."""

    def __init__(self, dim: int, num_layers: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB_SIZE, dim, rngs=rngs)
        self.position = nnx.Param(0.02 * rngs.params.normal((SEQ_LEN, dim)))
        self.blocks = nnx.List([Block(dim, rngs=rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(dim, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position[: tokens.shape[-1]]
        for block in self.blocks:
            x = jpp.pipeline_yield(nnx.remat(Block.__call__)(block, x))
        return self.embed.attend(self.norm(x))


def loss_fn(model: Model, microbatch: Any) -> jax.Array:
    """Mean cross-entropy in nats a byte."""
    logits = model(microbatch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["labels"]).mean()


def make_program(
    schedule: Any, optimizer: optax.GradientTransformation = ADAMW, *, dim: int = 64, num_layers: int = 4
) -> Program:
    """A model with a mark behind each layer, of which the schedule chooses, and its training step."""

    def make(key: jax.Array) -> tuple[Model, nnx.Optimizer]:
        model = Model(dim, num_layers, rngs=nnx.Rngs(key))
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    graphdef = nnx.graphdef(nnx.eval_shape(make, jax.random.key(0)))

    def train_step(state: nnx.State, batch: Any) -> tuple[nnx.State, jax.Array]:
        model, updater = nnx.merge(graphdef, state)
        num_microbatches = batch["tokens"].shape[0]
        # Every dropout gets a key for each microbatch; like the batch, they come with a leading axis.
        forks = nnx.split_rngs(model, splits=num_microbatches)
        structure, params, rngs, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)

        def microbatch_grads(inputs: Any) -> tuple[Any, jax.Array, Any]:
            microbatch, rngs = inputs
            # `copy`: a microbatch changes variables of its own, not those of the step around it.
            model = nnx.merge(structure, params, rngs, rest, copy=True)
            loss, grads = nnx.value_and_grad(loss_fn)(model, microbatch)
            return grads, loss, nnx.state(model, nnx.BatchStat)

        # All three are averaged: gradients, losses and the statistics that each microbatch would go on with.
        loop = jpp.accumulate_grads(microbatch_grads, schedule, reduce=jpp.Mean())
        grads, loss, statistics = loop((batch, rngs))
        nnx.restore_rngs(forks)
        nnx.update(model, statistics)
        updater.update(model, grads)
        return nnx.state((model, updater)), loss

    return Program(lambda key: nnx.state(make(key)), train_step)


if __name__ == "__main__":
    main(make_program)
