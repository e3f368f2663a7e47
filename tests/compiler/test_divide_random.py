"""Random chains of operations give the same, computed in parts and by plain JAX."""

from __future__ import annotations

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dividing import check_parts
from jax import lax

SEEDS_OF_A_TEST = 12


def first_of(x: jax.Array, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, 0, 1, axis=axis)


def some_rows(r: random.Random, x: jax.Array, axis: int) -> jax.Array:
    first = r.randrange(x.shape[axis])
    return lax.slice_in_dim(x, first, r.randrange(first, x.shape[axis]) + 1, axis=axis)


def halved(r: random.Random, x: jax.Array, axis: int) -> jax.Array:
    return x if x.shape[axis] % 2 else jnp.split(x, 2, axis)[r.randrange(2)]


def merged(r: random.Random, x: jax.Array, axis: int) -> jax.Array:
    k = r.randrange(max(1, x.ndim - 1))
    return x.reshape(*x.shape[:k], -1, *x.shape[k + 2 :]) if x.ndim > 1 else x


def grouped(r: random.Random, x: jax.Array, axis: int) -> jax.Array:
    even = next((k for k, size in enumerate(x.shape) if size % 2 == 0), None)
    return x if even is None else x.reshape(*x.shape[:even], 2, -1, *x.shape[even + 1 :])


def padded(r: random.Random, x: jax.Array, axis: int) -> jax.Array:
    return jnp.pad(x, [(r.randrange(2), r.randrange(2)) if k == axis else (0, 0) for k in range(x.ndim)])


def updated(r: random.Random, x: jax.Array, axis: int) -> jax.Array:
    starts = [jnp.int32(r.randrange(2)) if k == axis else 0 for k in range(x.ndim)]
    return lax.dynamic_update_slice(x, first_of(x, axis) * 2, starts)


def iterated(r: random.Random, x: jax.Array, axis: int) -> jax.Array:
    return lax.fori_loop(0, 2, lambda _, x: x * 0.9 + jnp.tanh(x), x)


STEPS: list[Callable[[random.Random, jax.Array, int], jax.Array]] = [
    lambda r, x, axis: jnp.tanh(x),
    lambda r, x, axis: x + first_of(x, axis),
    lambda r, x, axis: x.sum(axis) if x.ndim > 1 else x,
    lambda r, x, axis: x.max(axis, keepdims=True) + x,
    lambda r, x, axis: jnp.transpose(x, r.sample(range(x.ndim), x.ndim)),
    lambda r, x, axis: x.reshape(-1),
    lambda r, x, axis: jnp.expand_dims(x, axis),
    some_rows,
    lambda r, x, axis: x[tuple(slice(r.randrange(size), None) for size in x.shape)],
    padded,
    lambda r, x, axis: jnp.concatenate([x, 2 * x], axis),
    lambda r, x, axis: lax.scan(lambda s, row: (s + row.sum(), row * s), jnp.float32(1), x)[1],
    lambda r, x, axis: jnp.cumsum(x, axis) / 3,
    lambda r, x, axis: lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, x),
    halved,
    lambda r, x, axis: x @ jnp.swapaxes(x, -1, -2) / 3 if x.ndim > 1 else x,
    grouped,
    merged,
    lambda r, x, axis: jnp.where(x > 0, x, 0.5),
    lambda r, x, axis: x + lax.broadcasted_iota(jnp.float32, x.shape, axis),
    lambda r, x, axis: x / (1 + jnp.linalg.norm(x)),
    lambda r, x, axis: jnp.flip(x, axis),
    lambda r, x, axis: jnp.stack([row * k for k, row in enumerate(x)]),
    lambda r, x, axis: jnp.take(x, r.randrange(x.shape[axis]), axis=axis) if x.ndim > 1 else x,
    lambda r, x, axis: x.at[r.randrange(len(x))].add(1.0),
    lambda r, x, axis: x.at[: 1 + r.randrange(len(x))].set(0.5),
    lambda r, x, axis: lax.slice_in_dim(x, 0, x.shape[axis], 2, axis),
    updated,
    iterated,
]


def chain(seed: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    r, y = random.Random(seed), x
    for _ in range(r.randrange(1, 7)):
        if 0 < y.ndim < 5 and y.size < 4000:
            y = r.choice(STEPS)(r, y, r.randrange(y.ndim))
    return y, x * 2


@pytest.mark.parametrize("first", range(0, 72, SEEDS_OF_A_TEST))
def test_a_chain_in_parts_equals_jax(first):
    for seed in range(first, first + SEEDS_OF_A_TEST):
        r = random.Random(~seed)
        axis, cuts = r.randrange(2), tuple(sorted(r.sample(range(1, 6), 2)))
        x = np.random.default_rng(seed).normal(size=(4, 6, 3) if axis else (6, 4, 3)).astype(np.float32)
        try:
            check_parts(lambda x, seed=seed: chain(seed, x), [x], axis, cuts, tolerance=1e-4)
        except Exception as error:
            raise AssertionError(f"seed {seed}, axis {axis}, cuts {cuts}") from error
