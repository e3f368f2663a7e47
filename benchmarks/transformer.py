"""transformer: the model that benchmarks train: one transformer block a stage, small shapes. Holds no data.

The first stage also embeds and the last has the head, so all stages between are one computation. The step
takes gradients over microbatches, clips by their global norm and updates with adam.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpp_async as jpp

Tree = Any


@dataclass(frozen=True)
class Shape:
    """Args: num_stages: blocks, a stage each; the others as usual."""

    num_stages: int
    dim: int = 16
    num_heads: int = 2
    seq_len: int = 8
    vocab: int = 32
    microbatch: int = 2


def parameters(shape: Shape) -> Tree:
    """Types of all parameters, float32."""

    def f32(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, "float32")

    d = shape.dim
    block = {
        "norm1": f32(d), "qkv": f32(d, 3 * d), "out": f32(d, d),
        "norm2": f32(d), "up": f32(d, 4 * d), "up_bias": f32(4 * d),
        "down": f32(4 * d, d), "down_bias": f32(d),
    }  # fmt: skip
    return {"embed": f32(shape.vocab, d), "blocks": [dict(block) for _ in range(shape.num_stages)],
            "head": f32(d, shape.vocab)}  # fmt: skip


def _norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale


def _block(shape: Shape, p: Tree, x: jax.Array) -> jax.Array:
    batch, length, dim = x.shape
    qkv = (_norm(p["norm1"], x) @ p["qkv"]).reshape(batch, length, 3, shape.num_heads, -1)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / (dim / shape.num_heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v).reshape(batch, length, dim)
    x = x + mixed @ p["out"]
    hidden = jax.nn.gelu(_norm(p["norm2"], x) @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"] + p["down_bias"]


def _loss(shape: Shape, params: Tree, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens[:, :-1]]
    for stage, block in enumerate(params["blocks"]):
        x = _block(shape, block, x if stage == 0 else jpp.pipeline_yield(x))
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(shape: Shape, schedule: Any) -> tuple[Callable, Tree]:
    """A training step and the types of its arguments, less the number of microbatches.

    Returns:
        The step, `(state, batch) -> (state, losses)`, and its state's types.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(state, batch):
        def gradients(tokens):
            loss, grads = jax.value_and_grad(lambda p: _loss(shape, p, tokens))(state["params"])
            return grads, loss

        grads, losses = jpp.accumulate_grads(gradients, schedule)(batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, losses

    params = parameters(shape)
    return step, {"params": params, "opt": jax.eval_shape(optimizer.init, params)}


def batch(shape: Shape, num_microbatches: int) -> jax.ShapeDtypeStruct:
    """Types of a batch: microbatch, row, token."""
    return jax.ShapeDtypeStruct((num_microbatches, shape.microbatch, shape.seq_len + 1), "int32")
