"""Small training steps in which something of a weight's size might cross between actors in the loop.

Each model is a step `step(pipe, *args)`, where `pipe(num_stages)` makes the schedule of its loop, and a
function that draws its arguments. `in_loop` lists what a planned step sends in the loop. Weights and
activations have different sizes, so that one is told from the other by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp_async as jpp
from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.session import report
from jaxpp_async.session.report import TransferLine

WIDTH, ROWS, LENGTH, NUM_MICROBATCHES = 12, 2, 5, 4
WEIGHT_BYTES = 4 * WIDTH * WIDTH
BUCKETS, HEADS = 9, 3


def array(seed: int, *shape: int, scale: float = 0.3) -> np.ndarray:
    """Normal draws in float32."""
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def weights(count: int) -> list[np.ndarray]:
    return [array(k, WIDTH, WIDTH) for k in range(count)]


def batch(count: int = NUM_MICROBATCHES) -> dict[str, np.ndarray]:
    return {name: array(seed, count, ROWS, LENGTH, WIDTH) for name, seed in (("x", 90), ("y", 91))}


@dataclass(frozen=True)
class LoopModel:
    """A training step with its arguments.

    Args:
        name: the name of the step's function.
        step: `step(pipe, *args)`.
        stages: the number of stages of its loop.
        make_args: draws the arguments.
        rtol: the tolerance against plain JAX.
    """

    name: str
    step: Callable[..., Any]
    stages: int
    make_args: Callable[[], tuple[Any, ...]]
    rtol: float = 2e-5

    def under(self, pipe: Callable[[int], Any]) -> Callable[..., Any]:
        """Return the step under a kind of schedule."""
        return partial(self.step, pipe)


MODELS: dict[str, LoopModel] = {}


def model(
    stages: int, make_args: Callable[[], tuple[Any, ...]], **options: Any
) -> Callable[[Callable], Callable]:
    """Register a step."""

    def register(fn: Callable) -> Callable:
        MODELS[fn.__name__] = LoopModel(fn.__name__, fn, stages, make_args, **options)
        return fn

    return register


def in_loop(done: CompilePlan) -> tuple[TransferLine, ...]:
    """Return what a planned step sends in its loop, from the step's report."""
    return tuple(t for t in report.make(done, {}, {}).transfers if t.in_loop)


def outside(done: CompilePlan) -> tuple[TransferLine, ...]:
    """Return what a planned step sends outside its loop."""
    return tuple(t for t in report.make(done, {}, {}).transfers if not t.in_loop)


def usual(count: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (weights(count), batch())


def trained(loss: Callable, pipe: Any, stages: int, params: Any, batches: Any) -> Any:
    """One step of descent: the new parameters, and each microbatch's loss."""

    def of_one(microbatch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, microbatch)
        return grads, value

    grads, losses = jpp.accumulate_grads(of_one, pipe(stages))(batches)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), losses


def chain_loss(params: list[Any], mb: Any) -> Any:
    """A weight a stage."""
    x = mb["x"]
    for w in params[:-1]:
        x = jpp.pipeline_yield(jnp.tanh(x @ w))
    return jnp.mean(jnp.square(x @ params[-1] - mb["y"]))


# ---------------------------------------------------------------- linear ends of gradients


def combined(combine: Callable[..., Any]) -> Callable[..., Any]:
    """The step that sums `combine(gradients, *more)` over microbatches, of three stages."""

    def step(pipe: Any, params: Any, batches: Any, *more: Any) -> Any:
        def of_one(mb: Any) -> Any:
            value, grads = jax.value_and_grad(chain_loss)(params, mb)
            return combine(grads, value, *more), value

        return jpp.accumulate_grads(of_one, pipe(3))(batches)

    return step


def from_mean(g: list[Any]) -> list[Any]:
    """The difference of each gradient from the mean of all."""
    mean = sum(g[1:], g[0]) / len(g)
    return [x - mean for x in g]


def made_of(s: Any, g: list[Any], value: Any, flag: Any) -> tuple[Any, ...]:
    """Results that are linear in a sum of gradients."""
    return s, s, -s, 2 * s, s * value, s.T / 3, jnp.stack([s, g[2]]), s + s, jnp.where(flag > 0, s, 0.0)


LINEAR_ENDS: dict[str, Callable[..., Any]] = {
    "a difference": lambda g, *_: g[0] - g[2],
    "a difference of sums": lambda g, *_: (g[0] + g[1]) - (g[2] - g[1]),
    "a negated sum": lambda g, *_: -(g[0] - g[1]),
    "a choice by an argument": lambda g, _, flag: jnp.where(flag > 0, g[0], g[2]),
    "a choice of sums by an argument": lambda g, _, flag: jnp.where(flag > 0, g[0] - g[1], g[2]),
    "a choice by a mask": lambda g, *_: jnp.where(jnp.eye(WIDTH) > 0, g[0], g[1] - g[2]),
    "a stack that an argument scales": lambda g, _, flag: jnp.stack(g) * flag,
    "a choice of stacks by an argument": lambda g, _, flag: jnp.where(flag > 0, jnp.stack(g), 0.0),
    "a difference that the loss scales": lambda g, value, _: (g[0] - g[2]) * value,
    "a difference that is chosen by the loss": lambda g, value, _: jnp.where(value < 9.0, g[0] - g[2], 0.0),
    "a mean with a constant": lambda g, *_: (g[0] - 3.0 * g[2] + g[1] / 2.0) * 0.25,
    "differences from a mean": lambda g, *_: from_mean(g),
    "a mean and a difference from it": lambda g, *_: (lambda mean: (mean, mean - g[0]))((g[0] + g[2]) / 2),
    "differences from a mean that the loss scales": lambda g, value, _: [x * value for x in from_mean(g)],
    "a sum and what is made of it": lambda g, *more: made_of(g[0] - g[2], g, *more),
}


@model(3, usual(2))
def tied_weight_returned_twice(pipe: Any, params: Any, batches: Any) -> Any:
    """The first and the last stage use one weight, whose gradient is summed and averaged."""

    def of_one(mb: Any) -> Any:
        grads = jax.grad(lambda p: chain_loss([p[0], p[1], p[0]], mb))(params)
        return grads, grads, [2 * g for g in grads]

    reduce = (jpp.Sum(), jpp.Mean(), jpp.Sum())
    total, mean, double = jpp.accumulate_grads(of_one, pipe(3), reduce=reduce)(batches)
    return [p - 0.1 * (t + m + d) for p, t, m, d in zip(params, total, mean, double, strict=True)], mean


# ---------------------------------------------------------------- projections of an earlier value


def encoder_decoder_args() -> tuple[Any, ...]:
    names = ["encode", *(f"{kind}{k}" for k in range(3) for kind in ("query", "key", "value", "out"))]
    params = {name: array(seed, WIDTH, WIDTH) for seed, name in enumerate(names)}
    params |= {f"bias{k}": array(40 + k, WIDTH) for k in range(3)}
    return params, batch()


def attend(params: Any, k: int, y: Any, memory: Any) -> Any:
    """Cross-attention of one decoder layer to the encoder's output."""
    query = y @ params[f"query{k}"]
    key = jnp.tanh(memory @ params[f"key{k}"] + params[f"bias{k}"]).reshape(ROWS, LENGTH, HEADS, -1)
    value = (memory @ params[f"value{k}"]).reshape(ROWS, LENGTH, HEADS, -1)
    scores = jnp.einsum("bthd,bshd->bhts", query.reshape(ROWS, LENGTH, HEADS, -1), key)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
    return y + mixed.reshape(ROWS, LENGTH, WIDTH) @ params[f"out{k}"]


def decoder_loss(params: Any, mb: Any, marks: tuple[int, ...]) -> Any:
    """An encoder, and three decoder layers; marks stand before the given layers."""
    memory = jnp.tanh(mb["x"] @ params["encode"])
    y = mb["y"] * 0.5
    for k in range(3):
        if k in marks:
            y = jpp.pipeline_yield(y + jnp.mean(memory) if k == 0 else y)
        y = attend(params, k, y, memory)
    return jnp.mean(jnp.square(y - mb["x"]))


@model(2, encoder_decoder_args)
def encoder_decoder(pipe: Any, params: Any, batches: Any) -> Any:
    """The encoder is stage 0, the three decoder layers are stage 1."""
    return trained(partial(decoder_loss, marks=(0,)), pipe, 2, params, batches)


@model(3, encoder_decoder_args)
def decoder_of_two_stages(pipe: Any, params: Any, batches: Any) -> Any:
    """The encoder is stage 0, the decoder layers are stages 1 (one layer) and 2 (two layers)."""
    return trained(partial(decoder_loss, marks=(0, 1)), pipe, 3, params, batches)


# ---------------------------------------------------------------- penalties over weights


def orthogonal(params: list[Any]) -> Any:
    eye = jnp.eye(WIDTH)
    return 0.1 * sum(jnp.sum(jnp.square(w.T @ w - eye)) for w in params)


@model(3, usual(3))
def orthogonal_penalty(pipe: Any, params: Any, batches: Any) -> Any:
    """|W'W - I|^2 of every weight is added to each microbatch's loss."""
    return trained(lambda p, mb: chain_loss(p, mb) + orthogonal(p), pipe, 3, params, batches)


@model(3, usual(3))
def penalty_that_the_loss_weighs(pipe: Any, params: Any, batches: Any) -> Any:
    """The penalty's weight differs between microbatches."""

    def loss(p: Any, mb: Any) -> Any:
        return chain_loss(p, mb) + jnp.mean(mb["y"] ** 2) * orthogonal(p)

    return trained(loss, pipe, 3, params, batches)


@model(3, lambda: (weights(3), batch(), weights(6)[3:], [np.abs(w) for w in weights(9)[6:]]))
def elastic_weight_consolidation(pipe: Any, params: Any, batches: Any, old: Any, fisher: Any) -> Any:
    """sum F (W - W0)^2 is added to each microbatch's loss."""

    def loss(p: Any, mb: Any) -> Any:
        terms = zip(p, old, fisher, strict=True)
        return chain_loss(p, mb) + 0.5 * sum(jnp.sum(f * jnp.square(w - o)) for w, o, f in terms)

    return trained(loss, pipe, 3, params, batches)


# ---------------------------------------------------------------- what depends on weights alone


def with_bias(params: Any, mb: Any, length: int = LENGTH) -> Any:
    """Attention in three stages whose scores have one position bias, gathered from a table."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    bias = params["table"][jnp.clip(distance + BUCKETS // 2, 0, BUCKETS - 1)].transpose(2, 0, 1)
    x = mb["x"]
    for k in range(3):
        heads = (x @ params["qk"][k]).reshape(ROWS, length, HEADS, -1)
        scores = jnp.einsum("bthd,bshd->bhts", heads, heads) + bias
        x = jnp.einsum("bhts,bsd->btd", jax.nn.softmax(scores), x @ params["v"][k])
        x = x if k == 2 else jpp.pipeline_yield(x)
    return jnp.mean(jnp.square(x - mb["y"]))


@model(3, lambda: ({"table": array(80, BUCKETS, HEADS), "qk": weights(3), "v": weights(6)[3:]}, batch()))
def position_bias(pipe: Any, params: Any, batches: Any) -> Any:
    """A relative position bias that all stages use."""
    return trained(with_bias, pipe, 3, params, batches)


@model(2, usual(3))
def cholesky_factor(pipe: Any, params: Any, batches: Any) -> Any:
    """Both stages use the Cholesky factor of one matrix."""

    def loss(p: Any, mb: Any) -> Any:
        factor = jnp.linalg.cholesky(p[2] @ p[2].T + jnp.eye(WIDTH))
        x = jpp.pipeline_yield(jnp.tanh(mb["x"] @ p[0] @ factor))
        return jnp.mean(jnp.square(x @ p[1] @ factor.T - mb["y"]))

    return trained(loss, pipe, 2, params, batches)


@model(2, usual(2))
def product_of_one_stage(pipe: Any, params: Any, batches: Any) -> Any:
    """Stage 0 multiplies by W W'."""

    def loss(p: Any, mb: Any) -> Any:
        x = jpp.pipeline_yield(jnp.tanh(mb["x"] @ (p[0] @ p[0].T)))
        return jnp.mean(jnp.square(x @ p[1] - mb["y"]))

    return trained(loss, pipe, 2, params, batches)


# ---------------------------------------------------------------- clipping in the loop


@model(3, usual(3))
def clipped_gradients(pipe: Any, params: Any, batches: Any) -> Any:
    """Each microbatch's gradients are scaled by min(1, C / norm), as DP-SGD does."""

    def of_one(mb: Any) -> Any:
        value, grads = jax.value_and_grad(chain_loss)(params, mb)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, 0.05 / norm)
        return jax.tree.map(lambda g: g * scale, grads), (value, norm)

    grads, rest = jpp.accumulate_grads(of_one, pipe(3))(batches)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest


@model(3, usual(3))
def clipped_rows(pipe: Any, params: Any, batches: Any) -> Any:
    """Each row's gradients are clipped by their own norm and then added, as DP-SGD does."""

    def of_one(mb: Any) -> Any:
        values, grads = jax.vmap(jax.value_and_grad(chain_loss), in_axes=(None, 0))(params, mb)
        norms = jnp.sqrt(sum(jnp.sum(jnp.square(g), axis=(1, 2)) for g in grads))
        scales = jnp.minimum(1.0, 0.05 / norms)
        return [jnp.einsum("b,bij->ij", scales, g) for g in grads], (values, norms)

    grads, rest = jpp.accumulate_grads(of_one, pipe(3))(batches)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], rest


@model(3, usual(3))
def clipped_by_optax(pipe: Any, params: Any, batches: Any) -> Any:
    """Each microbatch's gradients go through a transformation of optax."""
    clip = optax.clip_by_global_norm(0.05)

    def of_one(mb: Any) -> Any:
        value, grads = jax.value_and_grad(chain_loss)(params, mb)
        return clip.update(grads, clip.init(params))[0], value

    grads, losses = jpp.accumulate_grads(of_one, pipe(3), reduce=(jpp.Mean(), jpp.Stack()))(batches)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], losses


@model(3, lambda: (*usual(3)(), jax.random.key(3)))
def clipped_with_noise(pipe: Any, params: Any, batches: Any, key: Any) -> Any:
    """Noise of each microbatch's own is added to its clipped gradients."""

    def of_one(mb: Any, i: Any) -> Any:
        value, grads = jax.value_and_grad(chain_loss)(params, mb)
        scale = jnp.minimum(1.0, 0.05 / jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads)))
        keys = jax.random.split(jax.random.fold_in(key, i), len(grads))
        noisy = [g * scale + 0.01 * jax.random.normal(k, g.shape) for g, k in zip(grads, keys, strict=True)]
        return noisy, value

    grads, losses = jpp.accumulate_grads(of_one, pipe(3), pass_index=True)(batches)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], losses
