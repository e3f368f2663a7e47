"""Cases: dropout and other randomness. The numbers are those of `jax.jit`, bit for bit where they are not
rounded."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxpp_async as jpp
from tests.torture.blocks import chain, cut, dense, descended, error
from tests.torture.registry import step, usual


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)


def dropout_step(pipe, w, batches, key):
    """A key a microbatch by `fold_in`, a key a layer by `split`; a new key for the next step."""
    next_key, key = jax.random.split(key)

    def of_one(mb, i):
        def fn(w):
            x = mb["x"]
            for k, layer_key in enumerate(jax.random.split(jax.random.fold_in(key, i), 3)):
                x = dropped(dense(cut(x) if k else x, w[k]), layer_key)
            return error(x, mb)

        value, grads = jax.value_and_grad(fn)(w[:3])
        return grads, value

    grads, losses = jpp.accumulate_grads(of_one, pipe(3), pass_index=True)(batches)
    return descended(w[:3], grads), losses, next_key


KEYS = {
    "dropout_with_a_new_style_key": lambda: jax.random.key(1),
    "dropout_with_an_old_style_key": lambda: jax.random.PRNGKey(1),
    "dropout_with_rbg": lambda: jax.random.key(1, impl="rbg"),
    "dropout_with_unsafe_rbg": lambda: jax.random.key(1, impl="unsafe_rbg"),
}

for name, make in KEYS.items():

    def fn(*args):
        return dropout_step(*args)

    fn.__name__ = name
    step(stages=3, make_args=lambda make=make: (*usual(), make()))(fn)


@step(stages=2, make_args=lambda: (*usual(), jax.random.key(2)))
def keys_split_before_the_loop(pipe, w, batches, key):
    """A key for each microbatch, as a leaf of the batch."""
    batches = {**batches, "key": jax.random.split(key, 4)}

    def of_one(mb):
        def fn(w):
            first, second = jax.random.split(mb["key"])
            x = cut(dropped(dense(mb["x"], w[0]), first))
            return error(dropped(x @ w[1], second), mb)

        return jax.grad(fn)(w[:2])

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=2, make_args=lambda: (*usual(), {"key": jax.random.key(3), "count": 0}))
def keys_in_a_state_updated_each_step(pipe, w, batches, state):
    use = jax.random.fold_in(state["key"], state["count"])

    def of_one(mb, i):
        def fn(w):
            noise = jax.random.normal(jax.random.fold_in(use, i), (3, 4))
            return error(cut(dense(mb["x"] + noise, w[0])) @ w[1], mb)

        return jax.grad(fn)(w[:2])

    grads = jpp.accumulate_grads(of_one, pipe(2), pass_index=True)(batches)
    return descended(w[:2], grads), {"key": jax.random.split(state["key"])[0], "count": state["count"] + 1}


@step(stages=3, make_args=lambda: (*usual(), jax.random.key(4)))
def one_key_used_in_every_stage(pipe, w, batches, key):
    def fn(w, mb):
        x = mb["x"]
        for k in range(3):
            x = dropped(dense(cut(x) if k else x, w[k]), key)
        return error(x, mb)

    return jpp.accumulate_grads(lambda mb: jax.grad(fn)(w[:3], mb), pipe(3))(batches)


@step(stages=2)
def a_key_that_the_function_closes_over(pipe, w, batches):
    key = jax.random.key(9)

    def fn(w, mb):
        return error(dropped(cut(dense(mb["x"], w[0])) @ w[1], key), mb)

    return jpp.accumulate_grads(lambda mb: jax.grad(fn)(w[:2], mb), pipe(2))(batches)


@step(stages=2, make_args=lambda: (*usual(), jax.random.key(5)))
def keys_as_results(pipe, w, batches, key):
    def of_one(mb, i):
        used = jax.random.fold_in(key, i)
        x = cut(dense(mb["x"], w[0]) + jax.random.uniform(used, (3, 4)))
        return jnp.sum(x @ w[1]), used

    return jpp.accumulate_grads(of_one, pipe(2), pass_index=True)(batches), key


@step(stages=2, make_args=lambda: (*usual(), jax.random.key(6)))
def noise_made_before_the_loop(pipe, w, batches, key):
    noise = jax.random.normal(key, (4, 3, 4))
    batches = {**batches, "x": batches["x"] + noise}
    return jpp.accumulate_grads(lambda mb: jax.grad(lambda w: error(chain(w, mb["x"]), mb))(w[:2]), pipe(2))(
        batches
    )


@step(stages=2, make_args=lambda: (*usual(), jax.random.key(7)))
def gradient_noise_after_the_loop(pipe, w, batches, key):
    fn = lambda w, mb: error(chain(w, mb["x"]), mb)  # noqa: E731
    grads = jpp.accumulate_grads(lambda mb: jax.grad(fn)(w[:2], mb), pipe(2))(batches)
    keys = jax.random.split(key, 2)
    return [g + 0.1 * jax.random.normal(k, g.shape) for g, k in zip(grads, keys, strict=True)]


@step(stages=2, make_args=lambda: (*usual(), jax.random.key(8)))
def sampling_that_decides_a_stage(pipe, w, batches, key):
    """Stochastic depth: a layer is left out at random."""

    def of_one(mb, i):
        def fn(w):
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5)
            x = cut(jax.lax.cond(keep, lambda x: dense(x, w[0]), lambda x: x, mb["x"]))
            return error(x @ w[1] + jax.random.permutation(key, 4), mb)

        return jax.grad(fn)(w[:2])

    return jpp.accumulate_grads(of_one, pipe(2), pass_index=True)(batches)
