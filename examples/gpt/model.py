"""model: bytes in, the loss of a small decoder-only transformer out. Plain JAX; never touches a device or a
mesh.

Two calls make it a pipeline: `jpp.pipeline_yield` behind each layer, where a stage may end (the schedule's
`stages` say where one does), and `jpp.shard`, which says how an activation is cut inside one actor. Under
plain `jax.jit` both are the identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jaxpp_async as jpp

VOCAB_SIZE = 256

AXIS_RULES = {"batch": "data", "heads": "model", "mlp": "model"}
"""Logical axis to mesh axis: batches over "data", attention heads and hidden units over "model"
(Megatron-LM's cut)."""

LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "qkv": (None, None, "heads", None),
    "out": ("heads", None, None),
    "up": (None, "mlp"),
    "down": ("mlp", None),
}
"""Logical axes of each split parameter; every other one is whole on all devices of its actor."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model."""

    num_layers: int
    dim: int
    num_heads: int
    seq_len: int
    tie_embedding: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


def init_params(key: jax.Array, config: ModelConfig) -> dict[str, Any]:
    """Random parameters, one dict a block, so that each leaf lives where its stage does."""
    keys = iter(jax.random.split(key, 2 + 4 * config.num_layers))
    params = {
        "embed": _normal(next(keys), (VOCAB_SIZE, config.dim), std=0.02),
        "blocks": [_init_block(keys, config) for _ in range(config.num_layers)],
        "norm": jnp.ones(config.dim),
    }
    if not config.tie_embedding:
        params["head"] = _normal(next(keys), (config.dim, VOCAB_SIZE), std=config.dim**-0.5)
    return params


def _init_block(keys: Iterator[jax.Array], config: ModelConfig) -> dict[str, jax.Array]:
    dim, heads, head_dim = config.dim, config.num_heads, config.head_dim
    # GPT-2: keeps the residual stream's variance near one at any depth.
    residual = (2 * config.num_layers) ** -0.5
    return {
        "norm_attention": jnp.ones(dim),
        "qkv": _normal(next(keys), (dim, 3, heads, head_dim), std=dim**-0.5),
        "out": _normal(next(keys), (heads, head_dim, dim), std=residual * dim**-0.5),
        "norm_mlp": jnp.ones(dim),
        "up": _normal(next(keys), (dim, 4 * dim), std=dim**-0.5),
        "down": _normal(next(keys), (4 * dim, dim), std=residual * (4 * dim) ** -0.5),
    }


def _normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    return std * jax.random.normal(key, shape)


def forward(params: dict[str, Any], tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Logits (batch, seq, 256) of the byte after each of `tokens` (batch, seq)."""
    x = jpp.shard(params["embed"][tokens], ("batch", None, None))
    for index, block in enumerate(params["blocks"]):
        x = _attention(block, x) + x
        x = _mlp(block, x) + x
        x = jpp.pipeline_yield(x, name=f"layer {index}")
    head = params["embed"].T if config.tie_embedding else params["head"]
    return _rms_norm(x, params["norm"]) @ head


def loss_fn(params: dict[str, Any], microbatch: dict[str, jax.Array], config: ModelConfig) -> jax.Array:
    """Mean cross-entropy in nats a byte of `labels` given `tokens`, both (microbatch_size, seq)."""
    log_probs = jax.nn.log_softmax(forward(params, microbatch["tokens"], config))
    return -jnp.mean(jnp.take_along_axis(log_probs, microbatch["labels"][..., None], axis=-1))


def _attention(block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    qkv = jnp.einsum("btd,dchk->cbhtk", _rms_norm(x, block["norm_attention"]), block["qkv"])
    qkv = jpp.shard(qkv, (None, "batch", "heads", None, None))
    q, k, v = _rotate(qkv[0]), _rotate(qkv[1]), qkv[2]
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    mixed = jnp.einsum("bhts,bhsk->bhtk", weights, v)
    return jpp.shard(jnp.einsum("bhtk,hkd->btd", mixed, block["out"]), ("batch", None, None))


def _mlp(block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(_rms_norm(x, block["norm_mlp"]) @ block["up"])
    hidden = jpp.shard(hidden, ("batch", None, "mlp"))
    return jpp.shard(hidden @ block["down"], ("batch", None, None))


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of (batch, heads, seq, head_dim). Source: Su et al., RoFormer, 2021, section
    3.4."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[-2])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def state_specs(state: Any) -> Any:
    """A `PartitionSpec` for each leaf of `state`: a parameter's, also for the optimizer's moments of that
    parameter.

    Args:
        state: any tree whose leaves hang below the parameter names of `init_params`; shapes suffice.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _leaf: _spec(path), state)


def _spec(path: tuple[Any, ...]) -> PartitionSpec:
    names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    axes = LOGICAL_AXES.get(names[-1], ()) if names else ()
    return PartitionSpec(*(AXIS_RULES[axis] if axis else None for axis in axes))


def sample(
    params: dict[str, Any],
    config: ModelConfig,
    prompt: bytes,
    num_bytes: int,
    *,
    seed: int,
    temperature: float = 0.7,
) -> bytes:
    """Continue `prompt` by `num_bytes` bytes, with plain `jax.jit` on this process's device."""

    params = jax.tree.map(jnp.asarray, params)

    @jax.jit
    def next_byte(window: jax.Array, last: int, key: jax.Array) -> jax.Array:
        logits = forward(params, window[None], config)[0, last]
        return jax.random.categorical(key, logits / temperature)

    text = list(prompt)
    for key in jax.random.split(jax.random.key(seed), num_bytes):
        context = text[-config.seq_len :]
        # Later positions are masked out.
        window = jnp.asarray(context + [0] * (config.seq_len - len(context)))
        text.append(int(next_byte(window, len(context) - 1, key)))
    return bytes(text)
