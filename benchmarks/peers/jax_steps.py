"""jax_steps: the training steps of `shapes.py` as plain JAX, without this package. Import it after the
environment that JAX reads (affinity, XLA_FLAGS) is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from first_values import Array
from shapes import NUM_STAGES, Shape

Weights = Any
Step = Callable[[Weights, jax.Array, jax.Array], tuple[Weights, jax.Array]]
"""Weights, batch and targets to new weights and loss."""


def blocks(weights: Weights, x: jax.Array) -> jax.Array:
    """One stage of `shapes.BIG`; weights: w1 and w2 of each block in turn."""
    for w1, w2 in zip(weights[::2], weights[1::2], strict=True):
        x = x + jax.nn.gelu(x @ w1) @ w2
    return x


def forward(shape: Shape, weights: Weights, x: jax.Array) -> jax.Array:
    """The whole model: every stage's weights."""
    if shape.num_blocks:
        for stage in weights:
            x = blocks(stage, x)
        return x
    ((a,), (b,)) = weights
    return jnp.tanh(x @ a) @ b


def updated(shape: Shape, weights: Weights, grads: Weights) -> Weights:
    """Plain SGD."""
    return jax.tree.map(lambda w, g: w - shape.learning_rate * g, weights, grads)


def microbatched_step(shape: Shape) -> Step:
    """A step that takes the microbatches one after the other, as a pipeline has to."""

    def step(weights: Weights, x: jax.Array, target: jax.Array) -> tuple[Weights, jax.Array]:
        def loss_of(weights: Weights, x: jax.Array, target: jax.Array) -> jax.Array:
            return jnp.mean((forward(shape, weights, x) - target) ** 2)

        def add(carry: tuple[Weights, jax.Array], microbatch: tuple[jax.Array, jax.Array]):
            grads, loss = carry
            more_loss, more = jax.value_and_grad(loss_of)(weights, *microbatch)
            return (jax.tree.map(jnp.add, grads, more), loss + more_loss), None

        zeros = jax.tree.map(jnp.zeros_like, weights), jnp.zeros(())
        (grads, loss), _ = jax.lax.scan(add, zeros, (x, target))
        num = shape.num_microbatches
        return updated(shape, weights, jax.tree.map(lambda g: g / num, grads)), loss / num

    return step


def whole_step(shape: Shape) -> Step:
    """The same step with all rows at once: larger matrices, the same mathematics."""

    def step(weights: Weights, x: jax.Array, target: jax.Array) -> tuple[Weights, jax.Array]:
        def loss_of(weights: Weights) -> jax.Array:
            rows = (-1, shape.width)
            return jnp.mean((forward(shape, weights, x.reshape(rows)) - target.reshape(rows)) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return updated(shape, weights, grads), loss

    return step


def stacked(stages: tuple[tuple[Array, ...], ...]) -> Weights:
    """The stages' weights, matrix by matrix, with the stage as their first axis."""
    return tuple(jnp.stack(matrices) for matrices in zip(*stages, strict=True))


def spmd_step(shape: Shape, mesh: jax.sharding.Mesh) -> Step:
    """GPipe as one program for all stages: weights stacked over the axis `stage`, values handed on by
    ppermute.

    A scan over microbatches + stages - 1 ticks, in each of which every stage computes; what it computes while
    the pipeline fills and drains is thrown away. The backward pipeline is the derivative of the scan.
    """

    def loss_of(weights: Weights, x: jax.Array, target: jax.Array) -> jax.Array:
        index = jax.lax.axis_index("stage")
        own = jax.tree.map(lambda w: w[0], weights)
        idle = jnp.zeros((NUM_STAGES - 1, *x.shape[1:]), x.dtype)

        def tick(received: jax.Array, fed: jax.Array) -> tuple[jax.Array, jax.Array]:
            made = stage_of(shape, own, jnp.where(index == 0, fed, received), index)
            return jax.lax.ppermute(made, "stage", [(i, i + 1) for i in range(NUM_STAGES - 1)]), made

        start = jax.lax.pcast(jnp.zeros(x.shape[1:], x.dtype), ("stage",), to="varying")
        _, made = jax.lax.scan(tick, start, jnp.concatenate([x, idle]))
        loss = jnp.mean((made[NUM_STAGES - 1 :] - target) ** 2)
        return jax.lax.psum(jnp.where(index == NUM_STAGES - 1, loss, 0.0), "stage")

    by_stage, everywhere = jax.P("stage"), jax.P()
    loss_of = jax.shard_map(
        loss_of, mesh=mesh, in_specs=(by_stage, everywhere, everywhere), out_specs=everywhere
    )

    def step(weights: Weights, x: jax.Array, target: jax.Array) -> tuple[Weights, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(weights, x, target)
        return updated(shape, weights, grads), loss

    return step


def stage_of(shape: Shape, weights: Weights, x: jax.Array, index: jax.Array) -> jax.Array:
    """What the stage `index` computes. One program runs on all devices: tiny's stages differ by a select."""
    if shape.num_blocks:
        return blocks(weights, x)
    y = x @ weights[0]
    return jnp.where(index == 0, jnp.tanh(y), y)
