"""Three small models, cut into stages, and training steps made of them. The same code runs under plain
`jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp_async as jpp

Tree = Any


@dataclass(frozen=True)
class Model:
    """A model of `num_stages` stages.

    Args:
        init: seed to parameters, numpy (drawing them with JAX would compile more than the steps do).
        loss: parameters and one microbatch to a scalar.
        batch: (seed, number of microbatches) to a batch, numpy.
    """

    name: str
    num_stages: int
    init: Callable[[int], Tree]
    loss: Callable[[Tree, Tree], jax.Array]
    batch: Callable[[int, int], Tree]

    def __str__(self) -> str:
        return self.name


def grads_step(model: Model, schedule: Any) -> Callable:
    """SGD: (parameters, batch) to (new parameters, gradients, losses)."""

    def step(params, batch):
        def microbatch_grads(mb):
            loss, grads = jax.value_and_grad(model.loss)(params, mb)
            return grads, loss

        grads, losses = jpp.accumulate_grads(microbatch_grads, schedule)(batch)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), grads, losses

    return step


class _Draw:
    """Draws of a normal distribution in float32."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def __call__(self, shape: tuple[int, ...], scale: float) -> np.ndarray:
        return (self._rng.normal(size=shape) * scale).astype(np.float32)


# ---------------------------------------------------------------- linear and relu


def mlp(num_stages: int = 4, width: int = 8) -> Model:
    """`num_stages` blocks of linear, bias and relu, a stage each; a linear head in the last."""

    def init(seed):
        draw = _Draw(seed)
        blocks = [
            {"w": draw((width, width), (2 / width) ** 0.5), "b": np.full((width,), 0.1, np.float32)}
            for _ in range(num_stages)
        ]
        return {"blocks": blocks, "head": draw((width, 3), 0.3)}

    def loss(params, mb):
        x = mb["x"]
        for i, block in enumerate(params["blocks"]):
            x = jax.nn.relu(x @ block["w"] + block["b"])
            if i < num_stages - 1:
                x = jpp.pipeline_yield(x)
        return jnp.mean((x @ params["head"] - mb["y"]) ** 2)

    def batch(seed, num_microbatches):
        rng = np.random.default_rng(seed)
        return {
            "x": rng.normal(size=(num_microbatches, 4, width)).astype(np.float32),
            "y": rng.normal(size=(num_microbatches, 4, 3)).astype(np.float32),
        }

    return Model("mlp", num_stages, init, loss, batch)


# ---------------------------------------------------------------- a tiny GPT


def gpt(num_stages: int = 2, layers: int = 4, tied: bool = False, dim: int = 8, vocab: int = 17) -> Model:
    """Embedding, `layers` blocks of causal attention and MLP, head (`tied`: the embedding again)."""
    assert layers % num_stages == 0
    heads = 2

    def init(seed):
        draw, ones = _Draw(seed), np.ones((dim,), np.float32)
        params = {
            "embed": draw((vocab, dim), 0.5),
            "blocks": [
                {
                    "norm1": ones,
                    "qkv": draw((dim, 3, heads, dim // heads), dim**-0.5),
                    "out": draw((heads, dim // heads, dim), dim**-0.5),
                    "norm2": ones,
                    "up": draw((dim, 2 * dim), dim**-0.5),
                    "down": draw((2 * dim, dim), (2 * dim) ** -0.5),
                }
                for _ in range(layers)
            ],
        }
        return params if tied else {**params, "head": draw((dim, vocab), dim**-0.5)}

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale

    def attention(block, x):
        q, k, v = jnp.einsum("btd,dchf->cbthf", x, block["qkv"])
        scores = jnp.einsum("bthf,bshf->bhts", q, k) * (dim // heads) ** -0.5
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
        return jnp.einsum("bhts,bshf,hfd->btd", weights, v, block["out"])

    def loss(params, mb):
        x = params["embed"][mb["tokens"]]
        for i, block in enumerate(params["blocks"]):
            x = x + attention(block, norm(x, block["norm1"]))
            x = x + jax.nn.gelu(norm(x, block["norm2"]) @ block["up"]) @ block["down"]
            if (i + 1) % (layers // num_stages) == 0 and i + 1 < layers:
                x = jpp.pipeline_yield(x, name=f"after block {i}")
        logits = x @ (params["embed"].T if tied else params["head"])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), mb["labels"][..., None], axis=-1)
        return -jnp.mean(picked)

    def batch(seed, num_microbatches):
        tokens = np.random.default_rng(seed).integers(0, vocab, size=(num_microbatches, 4, 7), dtype=np.int32)
        return {"tokens": tokens[..., :-1], "labels": tokens[..., 1:]}

    return Model("gpt_tied" if tied else "gpt", num_stages, init, loss, batch)


# ---------------------------------------------------------------- stages that have nothing in common


def uneven() -> Model:
    """Three stages of different shapes, ranks and dtypes: int32, bool, bfloat16 and complex64 values cross
    them too."""

    def init(seed):
        draw = _Draw(seed)
        return {
            "conv": draw((3, 2, 5), 0.4),
            "gain": np.float32(0.7),
            "mix": (draw((5, 6), 0.5), draw((6, 4), 0.5)),
            "out": {"w": draw((4, 2), 0.5), "b": np.zeros(2, np.float32)},
        }

    def loss(params, mb):
        x = jnp.stack([mb["signal"][:, i : i + 6] for i in range(3)], axis=-1)  # (batch, 6, 2, 3)
        x = jnp.tanh(jnp.einsum("bncw,wcd->bnd", x, params["conv"]))
        # Values that bfloat16 holds exactly: rounding must not depend on what XLA fuses.
        gate = (jnp.einsum("bnc,c->bn", mb["signal"][:, :6], jnp.array([1.0, -1.0])) > -1.0).astype(
            jnp.bfloat16
        )
        sent = {"x": x, "gate": gate, "length": mb["length"], "used": jnp.arange(6) < mb["length"][:, None]}
        got = jpp.pipeline_yield(sent)
        pooled = jnp.sum(
            got["x"] * got["gate"].astype(jnp.float32)[..., None] * got["used"][..., None], axis=1
        )
        pooled = pooled / got["length"][:, None] * params["gain"]
        first, second = jnp.sin(pooled @ params["mix"][0]), jnp.cos(pooled @ params["mix"][0])
        wave, length = jpp.pipeline_yield((jax.lax.complex(first, second), got["length"]))
        y = jnp.real(wave * jnp.conj(wave[:, ::-1])) @ params["mix"][1]
        y = jax.nn.relu(y) @ params["out"]["w"] + params["out"]["b"]
        return 0.1 * jnp.mean((y - mb["target"]) ** 2) + 0.01 * jnp.mean(length.astype(jnp.float32))

    def batch(seed, num_microbatches):
        rng = np.random.default_rng(seed)
        return {
            "signal": rng.normal(size=(num_microbatches, 4, 8, 2)).astype(np.float32),
            "length": rng.integers(1, 7, size=(num_microbatches, 4), dtype=np.int32),
            # Far from what the model starts with: gradients that nearly cancel would be noise.
            "target": rng.normal(size=(num_microbatches, 4, 2)).astype(np.float32) + 2,
        }

    return Model("uneven", 3, init, loss, batch)
