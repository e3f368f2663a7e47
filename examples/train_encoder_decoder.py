"""Train a small encoder-decoder in plain JAX on real text through a pipeline of actor processes.

    python examples/train_encoder_decoder.py --help

The encoder reads the first half of a window, the decoder predicts the second. The encoder's result is used
by every stage of the decoder, and the decoder's own input once more at its end: such values skip stages, and
are passed on as in any JAX program; the compiler sends each from the stage that makes it straight to those
that use it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpp_async as jpp
from training import SEQ_LEN, VOCAB_SIZE, Program, main

ADAMW = optax.adamw(3e-3)

Params = dict[str, Any]


def init_params(key: jax.Array, dim: int, num_layers: int) -> Params:
    """Random parameters; the first half of the layers is the encoder's."""

    def normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
        return std * jax.random.normal(key, shape)

    def layer(key: jax.Array) -> Params:
        keys = jax.random.split(key, 4)
        return {
            "attention": normal(keys[0], (4, dim, dim), dim**-0.5),
            "cross": normal(keys[1], (4, dim, dim), dim**-0.5),
            "up": normal(keys[2], (dim, 2 * dim), dim**-0.5),
            "down": normal(keys[3], (2 * dim, dim), (2 * dim) ** -0.5),
        }

    keys = jax.random.split(key, 3 + num_layers)
    layers = [layer(k) for k in keys[3:]]
    for encoder_layer in layers[: num_layers // 2]:
        del encoder_layer["cross"]
    return {
        "embed": normal(keys[0], (VOCAB_SIZE, dim), 0.02),
        "position": normal(keys[1], (SEQ_LEN, dim), 0.02),
        "skip": normal(keys[2], (dim, dim), dim**-0.5),
        "layers": layers,
    }


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(
    weights: jax.Array, x: jax.Array, source: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """One head from `x` (batch, to, dim) to `source` (batch, from, dim)."""
    query, key, value, out = weights
    scores = jnp.einsum("btd,bsd->bts", norm(x) @ query, norm(source) @ key) * x.shape[-1] ** -0.5
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jax.nn.softmax(scores) @ (norm(source) @ value) @ out


def loss_fn(params: Params, microbatch: Any) -> jax.Array:
    """Mean cross-entropy in nats a byte of the second half of each window, given all before it."""
    num_layers, half = len(params["layers"]), microbatch["tokens"].shape[-1] // 2
    embedded = params["embed"][microbatch["tokens"]] + params["position"][: 2 * half]
    encoded, decoder_input = embedded[:, :half], embedded[:, half:]
    x, causal = encoded, jnp.tril(jnp.ones((half, half), bool))
    for index, layer in enumerate(params["layers"]):
        if index < num_layers // 2:
            x = x + attention(layer["attention"], x, x)
        else:
            x = x + attention(layer["attention"], x, x, causal)
            x = x + attention(layer["cross"], x, encoded)
        x = x + jax.nn.relu(norm(x) @ layer["up"]) @ layer["down"]
        x = jpp.pipeline_yield(x)
        if index == num_layers // 2 - 1:
            encoded, x = x, decoder_input
    logits = norm(x + decoder_input @ params["skip"]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["labels"][:, half:]).mean()


def make_program(
    schedule: Any, optimizer: optax.GradientTransformation = ADAMW, *, dim: int = 64, num_layers: int = 4
) -> Program:
    """A model with a mark behind each layer, of which the schedule chooses, and its training step."""

    def init(key: jax.Array) -> dict[str, Any]:
        params = init_params(key, dim, num_layers)
        return {"params": params, "optimizer": optimizer.init(params)}

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], jax.Array]:
        def microbatch_grads(microbatch: Any) -> tuple[Any, jax.Array]:
            loss, grads = jax.value_and_grad(loss_fn)(state["params"], microbatch)
            return grads, loss

        grads, loss = jpp.accumulate_grads(microbatch_grads, schedule, reduce=jpp.Mean())(batch)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer_state}, loss

    return Program(init, train_step)


if __name__ == "__main__":
    main(make_program)
