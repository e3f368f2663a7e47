"""Cases: types of weights, activations and boundaries, integers and keys through markers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxpp_async as jpp
from tests.torture.blocks import chain, cut, dense, descended, error
from tests.torture.registry import array, batch, loss, step, usual, weights

# bfloat16 keeps 8 bits: sums in another order differ by several units in the last place, 2**-8 each.
BF16, FP16 = 2e-2, 5e-3


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


@step(stages=3, rtol=BF16)
def bfloat16_compute_with_float32_masters(pipe, w, batches):
    """The cast is before the loop, gradients accumulate in float32."""
    low = cast(w[:3], jnp.bfloat16)

    def of_one(mb):
        def fn(low):
            return error(chain(low, mb["x"].astype(jnp.bfloat16)).astype(jnp.float32), mb)

        value, grads = jax.value_and_grad(fn)(low)
        return cast(grads, jnp.float32), value

    grads, losses = jpp.accumulate_grads(of_one, pipe(3))(batches)
    return descended(w[:3], grads), losses


@loss(stages=3, rtol=BF16)
def bfloat16_cast_inside_the_loop(w, mb):
    x = chain(cast(w[:3], jnp.bfloat16), mb["x"].astype(jnp.bfloat16))
    return error(x.astype(jnp.float32), mb)


@loss(stages=2, make_args=lambda: (cast(weights(2), ml_dtypes.bfloat16), batch()), rtol=BF16)
def bfloat16_weights_and_accumulators(w, mb):
    return error(chain(w, mb["x"].astype(jnp.bfloat16)).astype(jnp.float32), mb)


@step(stages=2, make_args=lambda: (*usual(), np.float32(64)), rtol=FP16)
def float16_with_a_loss_scale(pipe, w, batches, scale):
    def of_one(mb):
        def fn(w):
            x = chain(cast(w, jnp.float16), mb["x"].astype(jnp.float16))
            return (error(x.astype(jnp.float32), mb) * scale).astype(jnp.float32)

        value, grads = jax.value_and_grad(fn)(w[:2])
        return grads, value

    grads, losses = jpp.accumulate_grads(of_one, pipe(2))(batches)
    return [g / scale for g in grads], losses / scale


@loss(stages=3, rtol=BF16)
def a_type_of_its_own_for_every_boundary(w, mb):
    x = cut(dense(mb["x"], w[0]).astype(jnp.bfloat16))
    x = cut(dense(x.astype(jnp.float32), w[1]).astype(jnp.float16))
    return error(x.astype(jnp.float32) @ w[2], mb)


def eighths(x):
    """Values that float8 holds exactly: rounding must not depend on what XLA fuses."""
    return (np.round(np.clip(x, -1, 1) * 4) / 4).astype(ml_dtypes.float8_e4m3fn)


@step(stages=2, make_args=lambda: ([eighths(x) for x in weights(2)], array(5, 4), batch()))
def float8_weights_and_a_trained_gain(pipe, low, gain, batches):
    def of_one(mb):
        def fn(gain):
            x = cut(dense(mb["x"], low[0].astype(jnp.float32)) * gain)
            return error(x @ low[1].astype(jnp.float32) * gain, mb)

        return jax.grad(fn)(gain)

    return gain - 0.1 * jpp.accumulate_grads(of_one, pipe(2))(batches), low


@step(stages=2, make_args=lambda: (weights(2), [np.ones((4, 4), np.int8) * k for k in (1, 2)], batch()))
def int8_weights_beside_trained_ones(pipe, w, quantized, batches):
    def of_one(mb):
        def fn(w):
            x = cut(dense(mb["x"], w[0] * quantized[0]))
            return error(x @ (w[1] + quantized[1] * 0.1), mb)

        return jax.grad(fn)(w)

    return descended(w, jpp.accumulate_grads(of_one, pipe(2))(batches)), quantized


@loss(stages=2)
def float8_activations_cross(w, mb):
    scaled = jnp.round(jnp.clip(mb["x"], -1, 1) * 4) / 4
    x, low = cut((dense(mb["x"], w[0]), scaled.astype(jnp.float8_e4m3fn)))
    return error(x @ w[1] + low.astype(jnp.float32), mb)


def complex_weights():
    return [(array(k, 4, 4) + 1j * array(k + 5, 4, 4)).astype(np.complex64) for k in range(2)], batch()


@loss(stages=2, make_args=complex_weights, on="inline")
def complex_weights_and_activations(w, mb):
    x = cut(mb["x"].astype(jnp.complex64) @ w[0])
    return error(jnp.abs(x @ w[1]), mb)


@loss(stages=2)
def fourier_transform_across_a_boundary(w, mb):
    x = cut(jnp.fft.fft(dense(mb["x"], w[0])))
    return error(jnp.fft.ifft(x).real @ w[1], mb)


@loss(stages=3)
def integers_and_booleans_through_markers(w, mb):
    x, tokens, mask = cut((dense(mb["x"], w[0]), mb["tokens"], mb["x"] > 0))
    x, tokens = cut((jnp.where(mask, dense(x, w[1]), x), tokens + 1))
    return error(x @ w[2][(tokens + 1) % 4].T @ jnp.ones((3, 4)), mb)


@loss(stages=3)
def integers_computed_from_activations(w, mb):
    x = dense(mb["x"], w[0])
    x, best = cut((x, jnp.argmax(x @ w[1], axis=-1)))
    x, best = cut((dense(x, w[2]), best))
    return error(x * jax.nn.one_hot(best, 4), mb)


@step(stages=3, make_args=lambda: (*usual(), jax.random.key(5)))
def keys_through_markers(pipe, w, batches, key):
    def of_one(mb, i):
        def fn(w):
            k = jax.random.fold_in(key, i)
            x, k = cut((dense(mb["x"], w[0]), k))
            k, use = jax.random.split(k)
            x, k = cut((dense(x, w[1]) * jax.random.bernoulli(use, 0.5, x.shape), k))
            return error(x @ w[2] + jax.random.normal(k, x.shape), mb)

        return jax.grad(fn)(w[:3])

    return jpp.accumulate_grads(of_one, pipe(3), pass_index=True)(batches)


@loss(stages=2)
def weak_types_and_python_scalars(w, mb):
    x, factor = cut((dense(mb["x"], w[0]), 2.0 * jnp.sum(mb["x"])))
    return error(x @ w[1] * factor + 1 * (factor > 0), mb)


@step(stages=2, make_args=lambda: (*usual(), 0.5, 3))
def python_scalars_as_arguments(pipe, w, batches, rate, count):
    grads = jpp.accumulate_grads(lambda mb: jax.grad(lambda w: error(chain(w, mb["x"]), mb))(w[:2]), pipe(2))(
        batches
    )
    return descended(w[:2], grads, rate), count + 1, rate * 0.9


@step(
    stages=2,
    make_args=lambda: (weights(2), {**batch(), "small": np.arange(12, dtype=np.uint8).reshape(4, 3)}),
)
def small_integers_in_the_batch(pipe, w, batches):
    def fn(w, mb):
        x = cut(dense(mb["x"], w[0]))
        return error(x @ w[1] * mb["small"][:, None].astype(jnp.float32), mb), mb["small"] + mb["small"]

    def of_one(mb):
        grads, small = jax.grad(fn, has_aux=True)(w, mb)
        return grads, small

    return jpp.accumulate_grads(of_one, pipe(2))(batches)
