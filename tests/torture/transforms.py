"""Cases: `vmap`, forward mode, and the ways of taking a gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxpp_async as jpp
from tests.torture.blocks import chain, cut, dense, error
from tests.torture.registry import array, batch, loss, step, weights


def chain_loss(w, mb):
    return error(chain(w, mb["x"]), mb)


def one_row(w, x, y):
    return jnp.mean((cut(dense(x, w[0])) @ w[1] - y) ** 2)


# ---------------------------------------------------------------- vmap


@loss(stages=2, on="inline")
def vmap_over_a_marked_function(w, mb):
    return jnp.sum(jax.vmap(lambda x, y: one_row(w, x, y))(mb["x"], mb["y"]))


@step(stages=2)
def vmap_of_grad_gives_gradients_a_row(pipe, w, batches):
    def of_one(mb):
        each = jax.vmap(jax.grad(one_row), in_axes=(None, 0, 0))(w[:2], mb["x"], mb["y"])
        norms = sum(jnp.sum(g**2, axis=(1, 2)) for g in each)
        scale = jnp.minimum(1.0, 0.1 / jnp.sqrt(norms))
        return jax.tree.map(lambda g: jnp.einsum("r,rij->ij", scale, g), each), norms

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@loss(stages=3)
def vmap_with_other_axes(w, mb):
    marked = jax.vmap(lambda column: cut(jnp.sin(column)), in_axes=1, out_axes=1)
    return error(marked(dense(marked(dense(mb["x"], w[0])), w[1])) @ w[2], mb)


@loss(stages=2)
def vmap_of_vmap(w, mb):
    marked = jax.vmap(jax.vmap(lambda x: cut({"x": jnp.sin(x), "n": 1})["x"]))
    return error(marked(mb["x"] @ w[0]) @ w[1], mb)


@loss(stages=2, make_args=lambda: ([array(60, 2, 4, 4), array(61, 2, 4, 4)], batch()))
def vmap_over_an_ensemble(w, mb):
    return jnp.sum(jax.vmap(lambda w: chain_loss(w, mb))(w))


@loss(stages=2)
def vmap_where_only_one_marked_value_is_mapped(w, mb):
    shared = dense(mb["x"], w[0])

    def fn(row):
        a, b = cut((row @ w[1], shared))
        return a + jnp.mean(b @ w[2], 0)

    return error(jax.vmap(fn)(mb["x"]), mb)


@loss(stages=2)
def vmap_of_a_checkpoint_around_a_marker(w, mb):
    return jnp.sum(jax.vmap(jax.checkpoint(lambda x, y: one_row(w, x, y)))(mb["x"], mb["y"]))


@loss(stages=2)
def vmap_of_jit(w, mb):
    return jnp.sum(jax.vmap(jax.jit(lambda x, y: one_row(w, x, y)))(mb["x"], mb["y"]))


# ---------------------------------------------------------------- forward mode


@step(stages=3)
def jvp_through_markers(pipe, w, batches):
    directions = [x * 0.1 for x in w[3:6]]
    return jpp.accumulate_grads(
        lambda mb: jax.jvp(lambda w: chain_loss(w, mb), (w[:3],), (directions,)), pipe(3), reduce=jpp.Stack()
    )(batches)


@step(stages=2)
def jvp_with_respect_to_one_weight(pipe, w, batches):
    def of_one(mb):
        return jax.jvp(lambda first: chain_loss([first, w[1]], mb), (w[0],), (w[2],))[1]

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=3)
def linearize_through_markers(pipe, w, batches):
    def of_one(mb):
        value, tangent = jax.linearize(lambda w: chain_loss(w, mb), w[:3])
        return tangent(w[3:6]), value

    return jpp.accumulate_grads(of_one, pipe(3))(batches)


@step(stages=2)
def jacobian_in_forward_mode(pipe, w, batches):
    def of_one(mb):
        return jax.jacfwd(lambda row: cut(dense(row, w[0])) @ w[1])(mb["x"][0])

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=2)
def jacobian_in_reverse_mode(pipe, w, batches):
    def of_one(mb):
        return jax.jacrev(lambda row: cut(dense(row, w[0])) @ w[1])(mb["x"][0])

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=2)
def hessian_times_vector(pipe, w, batches):
    def of_one(mb):
        return jax.jvp(jax.grad(lambda w: chain_loss(w, mb)), (w[:2],), (w[2:4],))[1]

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


# ---------------------------------------------------------------- ways to take a gradient


@step(stages=3)
def value_and_grad_with_aux(pipe, w, batches):
    def fn(w, mb):
        first = dense(mb["x"], w[0])
        x = dense(cut(dense(cut(first), w[1])), w[2])
        return error(x, mb), {"early": jnp.mean(first), "late": x, "nothing": None}

    def of_one(mb):
        (value, aux), grads = jax.value_and_grad(fn, has_aux=True)(w[:3], mb)
        return grads, value, aux

    return jpp.accumulate_grads(of_one, pipe(3))(batches)


@step(stages=3)
def vjp_by_hand(pipe, w, batches):
    def of_one(mb):
        value, pullback = jax.vjp(lambda w: chain_loss(w, mb), w[:3])
        return pullback(jnp.float32(0.5))[0], value

    return jpp.accumulate_grads(of_one, pipe(3))(batches)


@step(stages=2)
def vjp_of_a_vector_with_its_own_cotangent(pipe, w, batches):
    def of_one(mb):
        y, pullback = jax.vjp(lambda w: chain(w, mb["x"]), w[:2])
        return pullback((y - mb["y"]) * 0.1)[0], jnp.mean(y)

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=2)
def vjp_with_has_aux_and_two_pullbacks(pipe, w, batches):
    def of_one(mb):
        y, pullback, aux = jax.vjp(lambda w: (chain(w, mb["x"]), jnp.sum(w[0])), w[:2], has_aux=True)
        return pullback(y)[0], pullback(jnp.ones_like(y))[0], aux

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=3)
def gradients_of_several_arguments(pipe, w, batches):
    def fn(first, rest, mb):
        return error(chain([first, *rest], mb["x"]), mb)

    return jpp.accumulate_grads(lambda mb: jax.grad(fn, argnums=(0, 1))(w[0], w[1:3], mb), pipe(3))(batches)


@step(stages=3, on="inline")
def gradients_of_the_inputs(pipe, w, batches):
    """Adversarial examples: the gradient of each microbatch, joined to a batch."""

    def of_one(mb):
        return jax.grad(lambda x: error(chain(w[:3], x), mb))(mb["x"])

    return batches["x"] + 0.1 * jnp.sign(jpp.accumulate_grads(of_one, pipe(3), reduce=jpp.Stack())(batches))


@step(stages=2)
def gradients_of_inputs_and_weights(pipe, w, batches):
    def of_one(mb):
        by_weights, by_inputs = jax.grad(lambda w, x: error(chain(w, x), mb), argnums=(0, 1))(w[:2], mb["x"])
        return by_weights, by_inputs

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=2, make_args=lambda: (weights(), batch(), array(1)))
def gradient_of_the_loss_scale(pipe, w, batches, scale):
    def of_one(mb):
        grads, by_scale = jax.grad(lambda w, s: chain_loss(w, mb) * s**2, argnums=(0, 1))(w[:2], scale)
        return (grads, by_scale), by_scale

    (grads, by_scale), each = jpp.accumulate_grads(of_one, pipe(2))(batches)
    return grads, scale - 0.1 * by_scale, each


@step(stages=2)
def two_gradients_of_one_microbatch(pipe, w, batches):
    """Two losses over one forward, each for its own half of the weights."""

    def of_one(mb):
        def fn(w, factor):
            return factor * chain_loss(w, mb)

        return jax.vmap(lambda factor: jax.grad(fn)(w[:2], factor))(jnp.array([1.0, -2.0]))

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@loss(stages=2)
def an_inner_gradient_without_a_marker(w, mb):
    """A gradient penalty whose inner function lies inside one stage."""
    slope = jax.grad(lambda x: jnp.sum(dense(x, w[0]) ** 2))(mb["x"])
    return error(cut(slope) @ w[1], mb)


@loss(stages=2)
def an_inner_gradient_in_the_last_stage(w, mb):
    x = cut(dense(mb["x"], w[0]))
    slope = jax.grad(lambda x: jnp.sum(dense(x, w[1]) ** 2))(x)
    return error(x, mb) + jnp.mean(slope**2)


@loss(stages=2)
def an_inner_training_step_in_a_stage(w, mb):
    """Meta-learning: one step of descent inside the first stage."""

    def inner(fast):
        return error(dense(mb["x"], fast), mb)

    fast = w[0] - 0.1 * jax.grad(inner)(w[0])
    return error(cut(dense(mb["x"], fast)) @ w[1], mb)


# ---------------------------------------------------------------- what is done with gradients inside the loop


@step(stages=2)
def gradients_clipped_in_the_loop(pipe, w, batches):
    """Each microbatch's gradients are scaled by their norm over all stages."""

    def of_one(mb):
        grads = jax.grad(chain_loss)(w[:2], mb)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        return [g / jnp.maximum(norm, 0.1) for g in grads], norm

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=3)
def gradients_of_different_stages_combined_in_the_loop(pipe, w, batches):
    def of_one(mb):
        g = jax.grad(chain_loss)(w[:3], mb)
        return [g[0] + g[2], g[1] @ g[0], g[2] * jnp.sum(g[0])]

    return jpp.accumulate_grads(of_one, pipe(3))(batches)


@step(stages=2)
def gradients_weighed_by_the_loss(pipe, w, batches):
    def of_one(mb):
        value, grads = jax.value_and_grad(chain_loss)(w[:2], mb)
        return [g * value for g in grads], jnp.exp(-value)

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=2)
def one_gradient_in_several_forms(pipe, w, batches):
    def of_one(mb):
        grad = jax.grad(lambda first: chain_loss([first, w[1]], mb))(w[0])
        return grad, grad * 2, grad.T, grad.astype(jnp.bfloat16).astype(jnp.float32)[:2]

    return jpp.accumulate_grads(of_one, pipe(2), reduce=jpp.Sum())(batches)


@step(stages=4)
def two_forwards_of_one_model_in_a_microbatch(pipe, w, batches):
    """As in contrastive learning: the same weights for two views."""

    def of_one(mb):
        def fn(w):
            one, other = cut(dense(mb["x"], w[0])) @ w[1], cut(dense(mb["y"], w[0])) @ w[1]
            return jnp.mean(cut(one - other) ** 2)

        return jax.grad(fn)(w[:2])

    return jpp.accumulate_grads(of_one, pipe(4))(batches)


@step(stages=3)
def two_backwards_in_a_microbatch(pipe, w, batches):
    def of_one(mb):
        first = jax.grad(chain_loss)(w[:2], mb)
        second = jax.grad(lambda w: jnp.mean(chain(w, mb["y"]) ** 2))(w[:2])
        return jax.tree.map(jnp.add, first, second)

    return jpp.accumulate_grads(of_one, pipe(3))(batches)


@step(stages=6)
def generator_and_critic_in_one_loop(pipe, w, batches):
    """Two losses that share a forward, each for its own weights."""

    def of_one(mb):
        def generated(generator):
            return cut(dense(mb["x"], generator))

        def score(critic, x):
            return jnp.mean(cut(dense(x, critic)) @ w[5])

        def critic_loss(critic):
            return score(critic, jax.lax.stop_gradient(generated(w[0]))) - score(critic, mb["y"])

        return jax.grad(lambda g: -score(w[1], generated(g)))(w[0]), jax.grad(critic_loss)(w[1])

    return jpp.accumulate_grads(of_one, pipe(6), reduce=jpp.Sum())(batches)


@step(stages=2, make_args=lambda: ({"used": weights(2), "rows": array(1, 0, 4)}, batch()))
def parameters_of_size_zero(pipe, params, batches):
    def fn(params, mb):
        return chain_loss(params["used"], mb) + jnp.sum(params["rows"])

    return jpp.accumulate_grads(lambda mb: jax.grad(fn)(params, mb), pipe(2))(batches)


@step(stages=2)
def no_parameters_at_all(pipe, w, batches):
    def of_one(mb):
        return jax.value_and_grad(lambda nothing: error(jnp.sin(cut(mb["x"])), mb))({})[::-1]

    return jpp.accumulate_grads(of_one, pipe(2))(batches)
