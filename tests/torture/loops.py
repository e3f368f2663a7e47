"""Cases: how many loops a step has, what they compute, how many microbatches, and `jit` around anything."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp_async as jpp
from tests.torture.blocks import chain, cut, dense, descended, error
from tests.torture.registry import batch, gradients_of, loss, step, usual, weights


def chain_loss(w, mb):
    return error(chain(w, mb["x"]), mb)


def chain_grads(pipe, w, batches):
    """Gradients and losses of a chain, a stage for each weight."""
    return gradients_of(chain_loss, len(w))(pipe, w, batches)


# ---------------------------------------------------------------- how many loops


@step(stages=3, on="processes")
def several_accumulate_loops(pipe, w, batches):
    """Each loop trains what the one before it made."""
    w, losses = w[:3], []
    for _ in range(3):
        grads, values = chain_grads(pipe, w, batches)
        w = descended(w, grads)
        losses.append(values)
    return w, losses


@step(stages=4)
def loops_of_different_numbers_of_stages(pipe, w, batches):
    first, _ = chain_grads(pipe, w[:4], batches)
    second, _ = chain_grads(pipe, w[:2], batches)
    third, _ = chain_grads(pipe, w[:3], batches)
    return descended(w[:4], first), descended(w[:2], second), descended(w[:3], third)


@step(stages=2)
def loops_over_different_numbers_of_microbatches(pipe, w, batches):
    half = jax.tree.map(lambda x: x[:2], batches)
    return chain_grads(pipe, w[:2], batches), chain_grads(pipe, w[:2], half)


@step(stages=2)
def a_loop_over_the_results_of_a_loop(pipe, w, batches):
    hidden = jpp.accumulate_grads(lambda mb: cut(dense(mb["x"], w[0])) @ w[1], pipe(2), reduce=jpp.Stack())(
        batches
    )
    return chain_grads(pipe, w[2:4], {"x": hidden, "y": batches["y"]})


@step(stages=2)
def a_training_and_an_evaluation_loop(pipe, w, batches):
    grads, losses = chain_grads(pipe, w[:2], batches)
    new = descended(w[:2], grads)
    after = jpp.accumulate_grads(lambda mb: chain_loss(new, mb), pipe(2), reduce=jpp.Mean())(batches)
    return new, losses, after


@step(stages=2)
def two_losses_with_a_loop_each(pipe, w, batches):
    """As in a GAN: the second loss sees what the first update made, each trains its own half."""
    generator, critic = w[:2], w[2:4]

    def score(critic, x):
        return jnp.mean(dense(x, critic[0]) @ critic[1])

    def critic_loss(critic, mb):
        fake = chain(generator, mb["x"])
        return score(critic, fake) - score(critic, mb["y"])

    def generator_loss(generator, mb):
        return -score(critic, chain(generator, mb["x"]))

    grads = jpp.accumulate_grads(lambda mb: jax.grad(critic_loss)(critic, mb), jpp.Std1F1B(2))(batches)
    critic = descended(critic, grads)
    grads, losses = gradients_of(generator_loss, 2)(pipe, generator, batches)
    return descended(generator, grads), critic, losses


# ---------------------------------------------------------------- loops without gradients, steps without
# loops


@step(stages=3, on="inline")
def evaluation_loop(pipe, w, batches):
    def of_one(mb):
        x = chain(w[:3], mb["x"])
        return {"loss": error(x, mb), "worst": jnp.max(jnp.abs(x - mb["y"])), "predictions": x}

    reduce = {"loss": jpp.Mean(), "worst": jpp.Max(), "predictions": jpp.Concat()}
    return jpp.accumulate_grads(of_one, pipe(3), reduce=reduce)(batches)


@step(stages=1)
def a_loop_without_markers(pipe, w, batches):
    return gradients_of(lambda w, mb: error(dense(mb["x"], w[0]) @ w[1], mb), 1)(pipe, w[:2], batches)


@step(stages=1, on="inline")
def a_step_without_a_loop(pipe, w, batches):
    """Markers outside a loop mark nothing."""
    one = jax.tree.map(lambda x: x[0], batches)
    value, grads = jax.value_and_grad(chain_loss)(w[:3], one)
    return descended(w[:3], grads), value


@step(stages=1)
def a_step_that_only_returns_its_arguments(pipe, w, batches):
    return w, batches


@step(stages=2)
def a_loop_and_a_marked_function_outside_it(pipe, w, batches):
    first = jax.tree.map(lambda x: x[0], batches)
    return chain_grads(pipe, w[:2], batches), chain_loss(w[:3], first)


# ---------------------------------------------------------------- counts


@step(stages=3, make_args=lambda: (weights(), batch(1)), on="inline")
def one_microbatch(pipe, w, batches):
    return chain_grads(pipe, w[:3], batches)


@step(stages=4, make_args=lambda: (weights(), batch(2)))
def fewer_microbatches_than_stages(pipe, w, batches):
    return chain_grads(pipe, w[:4], batches)


@step(stages=2, make_args=lambda: (weights(), batch(7)))
def microbatches_that_no_number_of_actors_divides(pipe, w, batches):
    return chain_grads(pipe, w[:2], batches)


# ---------------------------------------------------------------- jit


@step(stages=3)
def the_loop_inside_jit(pipe, w, batches):
    return jax.jit(functools.partial(chain_grads, pipe))(w[:3], batches)


@step(stages=2)
def accumulate_grads_inside_jit_called_twice(pipe, w, batches):
    grads = jax.jit(functools.partial(chain_grads, pipe))
    w = w[:2]
    for _ in range(2):
        w = descended(w, grads(w, batches)[0])
    return w


@loss(stages=2)
def markers_inside_jit(w, mb):
    @jax.jit
    def forward(w, x):
        return cut(dense(x, w[0])) @ w[1]

    return error(forward(w, mb["x"]), mb)


@loss(stages=4, on="inline")
def one_jitted_block_for_several_stages(w, mb):
    @jax.jit
    def block(w, x):
        return cut(dense(x, w))

    x = mb["x"]
    for k in range(3):
        x = block(w[k], x)
    return error(x @ w[3], mb)


@loss(stages=4)
def one_jitted_block_with_the_same_weight_for_several_stages(w, mb):
    @jax.jit
    def block(w, x):
        return cut(dense(x, w))

    return error(block(w[0], block(w[0], block(w[0], mb["x"]))) @ w[1], mb)


@loss(stages=3)
def nested_jits(w, mb):
    inner = jax.jit(lambda w, x: cut(dense(x, w)))
    middle = jax.jit(lambda w, x: jax.nn.silu(inner(w[1], inner(w[0], x))))
    return jax.jit(lambda w: error(middle(w, mb["x"]) @ w[2], mb))(w)


@loss(stages=3)
def jit_with_static_arguments(w, mb):
    @functools.partial(jax.jit, static_argnums=2, static_argnames="marked")
    def block(x, w, activation, *, marked):
        x = activation(x @ w)
        return cut(x) if marked else x

    x = block(mb["x"], w[0], jnp.tanh, marked=True)
    x = block(x, w[1], jax.nn.relu, marked=True)
    return error(block(x, w[2], jnp.sin, marked=False), mb)


@loss(stages=2)
def jit_inlined(w, mb):
    return error(jax.jit(lambda x: cut(dense(x, w[0])), inline=True)(mb["x"]) @ w[1], mb)


@loss(stages=3)
def jit_of_the_loss(w, mb):
    return jax.jit(chain_loss)(w[:3], mb)


@step(stages=3)
def jit_of_value_and_grad(pipe, w, batches):
    value_and_grad = jax.jit(jax.value_and_grad(chain_loss))
    return jpp.accumulate_grads(lambda mb: value_and_grad(w[:3], mb)[::-1], pipe(3))(batches)


@step(stages=2)
def jit_of_the_microbatch_function(pipe, w, batches):
    @jax.jit
    def of_one(mb, i):
        value, grads = jax.value_and_grad(chain_loss)(w[:2], mb)
        return grads, value * i

    return jpp.accumulate_grads(of_one, pipe(2), pass_index=True)(batches)


@step(stages=3)
def jit_of_an_update_and_of_a_cast_before(pipe, w, batches):
    w = jax.jit(lambda w: [x * 0.5 for x in w[:3]])(w)
    grads, losses = chain_grads(pipe, w, jax.jit(lambda b: jax.tree.map(lambda x: x * 2, b))(batches))
    return jax.jit(descended)(w, grads), losses


@loss(stages=2)
def a_jitted_helper_that_both_stages_call(w, mb):
    normalize = jax.jit(lambda x: x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3))
    return error(normalize(cut(normalize(dense(mb["x"], w[0])))) @ w[1], mb)


# ---------------------------------------------------------------- what depends on the microbatch


@step(stages=2)
def index_decides_the_branch(pipe, w, batches):
    def of_one(mb, i):
        def fn(w):
            x = cut(dense(mb["x"], w[0]))
            x = jax.lax.switch(i % 3, [lambda x: x @ w[1], lambda x: jnp.sin(x) @ w[2], lambda x: x], x)
            return error(x, mb)

        return jax.grad(fn)(w)

    return jpp.accumulate_grads(of_one, pipe(2), pass_index=True)(batches)


@step(stages=2)
def index_weighs_the_loss(pipe, w, batches):
    def of_one(mb, i):
        value, grads = jax.value_and_grad(lambda w: chain_loss(w, mb) * (i + 1) / 4)(w[:2])
        return grads, value

    return jpp.accumulate_grads(of_one, pipe(2), pass_index=True)(batches)


@step(stages=2)
def index_selects_a_row_of_a_shared_table(pipe, w, batches):
    table = jnp.stack(w[2:6])

    def of_one(mb, i):
        return jax.grad(lambda w: error(cut(dense(mb["x"], w[0] * table[i])) @ (w[1] + table[i]), mb))(w[:2])

    return jpp.accumulate_grads(of_one, pipe(2), pass_index=True)(batches)


@loss(stages=2)
def the_data_decides_the_branch(w, mb):
    x = jax.lax.cond(mb["tokens"][0] > 1, lambda x: dense(x, w[0]), lambda x: x * 2, mb["x"])
    return error(cut(x) @ w[1], mb)


@step(stages=3, make_args=lambda: (*usual(), np.int32(5)))
def a_step_count_in_the_loop_and_after_it(pipe, w, batches, count):
    scale = 1 / (1 + count.astype(jnp.float32))
    grads, losses = gradients_of(lambda w, mb: chain_loss([x * scale for x in w], mb), 3)(
        pipe, w[:3], batches
    )
    return descended(w[:3], grads), losses, count + 1
