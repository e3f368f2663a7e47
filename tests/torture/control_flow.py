"""Cases: `scan`, `cond`, `while`, solvers and custom derivative rules inside stages, and markers inside
those."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

import jaxpp_async as jpp
from tests.torture.blocks import cut, dense, error
from tests.torture.registry import array, batch, loss, step


def stacked(layers=4):
    return array(50, layers, 4, 4), batch()


def two_stacks():
    return (array(50, 2, 4, 4), array(51, 2, 4, 4)), batch()


def layer(x, w):
    return dense(x, w), None


# ---------------------------------------------------------------- scan inside a stage


@loss(stages=2, make_args=two_stacks)
def scan_over_layers_inside_a_stage(w, mb):
    x, _ = lax.scan(layer, mb["x"], w[0])
    x, _ = lax.scan(layer, cut(x), w[1])
    return error(x, mb)


@loss(stages=2, make_args=two_stacks)
def scan_with_a_checkpointed_body(w, mb):
    body = jax.checkpoint(layer, prevent_cse=False)
    x, _ = lax.scan(body, mb["x"], w[0])
    x, _ = lax.scan(body, cut(x), w[1])
    return error(x, mb)


@loss(stages=2, make_args=two_stacks)
def scan_that_returns_what_every_layer_made(w, mb):
    def body(x, w):
        x = dense(x, w)
        return x, jnp.mean(x, 0)

    x, first = lax.scan(body, mb["x"], w[0])
    x, second = lax.scan(body, cut(x), w[1], reverse=True, unroll=2)
    return error(x, mb) + jnp.sum(first * second)


@loss(stages=2)
def scan_as_a_recurrent_network(w, mb):
    def body(state, x):
        state = jnp.tanh(x @ w[0] + state @ w[1])
        return state, state

    _, states = lax.scan(body, jnp.zeros(4), mb["x"])
    _, states = lax.scan(lambda s, x: (dense(s, w[2]) + x, s), jnp.ones(4), cut(states))
    return error(states, mb)


@loss(stages=2)
def map_and_associative_scan(w, mb):
    x = lax.map(lambda row: jnp.tanh(row @ w[0]), mb["x"])
    x = lax.associative_scan(jnp.add, cut(x), axis=0)
    return error(x @ w[1], mb)


@loss(stages=2)
def fori_loop_of_fixed_length(w, mb):
    x = lax.fori_loop(0, 3, lambda i, x: dense(x, w[0]) * (i + 1), mb["x"])
    return error(lax.fori_loop(0, 2, lambda i, x: dense(x, w[1]), cut(x)), mb)


# ---------------------------------------------------------------- a marker inside a scan


@loss(stages=5, make_args=stacked, on="inline")
def marker_inside_a_scan_over_layers(w, mb):
    x, _ = lax.scan(lambda x, w: (cut(dense(x, w)), None), mb["x"], w)
    return error(x, mb)


@loss(stages=4, make_args=lambda: stacked(3))
def marker_first_inside_a_scan(w, mb):
    x, _ = lax.scan(lambda x, w: (dense(cut(x), w), None), mb["x"], w)
    return error(x, mb)


@loss(stages=4, make_args=lambda: stacked(3))
def marker_inside_a_scan_with_a_checkpointed_body(w, mb):
    x, _ = lax.scan(jax.checkpoint(lambda x, w: (cut(dense(x, w)), None)), mb["x"], w)
    return error(x, mb)


@loss(stages=4, make_args=lambda: stacked(3))
def marker_inside_a_scan_with_results_a_layer(w, mb):
    def body(carry, w):
        x, total = carry
        x = cut(dense(x, w))
        return (x, total + jnp.sum(x)), jnp.mean(x**2)

    (x, total), each = lax.scan(body, (mb["x"], 0.0), w)
    return error(x, mb) + 0.01 * total + jnp.sum(each)


@loss(stages=4, make_args=lambda: stacked(3))
def marker_inside_a_reversed_scan(w, mb):
    x, _ = lax.scan(lambda x, w: (cut(dense(x, w)), None), mb["x"], w, reverse=True)
    return error(x, mb)


@loss(stages=4, make_args=lambda: stacked(3))
def marker_inside_a_scan_with_a_shared_weight(w, mb):
    x, _ = lax.scan(lambda x, i: (cut(dense(x, w[0] * (i + 1))), None), mb["x"], jnp.arange(3))
    return error(x, mb)


@loss(stages=3, make_args=lambda: (array(50, 2, 2, 4, 4), batch()))
def marker_inside_a_scan_of_scans(w, mb):
    def stage(x, w):
        return cut(lax.scan(layer, x, w)[0]), None

    return error(lax.scan(stage, mb["x"], w)[0], mb)


@loss(stages=3)
def marker_inside_a_fori_loop_of_fixed_length(w, mb):
    return error(lax.fori_loop(0, 2, lambda i, x: cut(dense(x, w[0])) * (i + 1), mb["x"]) @ w[1], mb)


@loss(stages=4)
def marker_inside_a_map(w, mb):
    return error(lax.map(lambda row: cut(jnp.tanh(row @ w[0])), mb["x"]) @ w[1], mb)


@loss(stages=3, make_args=lambda: (array(50, 2, 4, 4), batch()))
def marker_inside_a_jitted_scan_inside_checkpoint(w, mb):
    @jax.checkpoint
    @jax.jit
    def layers(w, x):
        return lax.scan(lambda x, w: (cut(dense(x, w)), None), x, w)[0]

    return error(layers(w, mb["x"]), mb)


# ---------------------------------------------------------------- cond and while


@loss(stages=2)
def cond_inside_a_stage(w, mb):
    x = lax.cond(jnp.sum(mb["x"]) > 0, lambda x: dense(x, w[0]), lambda x: jnp.sin(x @ w[1]), mb["x"])
    x = cut(x)
    x = lax.cond(jnp.sum(x) > 0, lambda x: x @ w[2], lambda x: x * 0.5, x)
    return error(x, mb)


@loss(stages=3)
def cond_on_a_value_of_an_earlier_stage(w, mb):
    early = dense(mb["x"], w[0])
    x = cut(dense(cut(early), w[1]))
    return error(lax.cond(jnp.sum(early) > 0, lambda: x @ w[2], lambda: x @ w[3]), mb)


@loss(stages=2)
def switch_inside_a_stage(w, mb):
    branches = [lambda x, k=k: jnp.tanh(x @ w[k]) for k in range(3)]
    x = lax.switch(mb["tokens"][0], branches, mb["x"])
    return error(lax.switch(mb["tokens"][1], branches, cut(x)), mb)


@loss(stages=2)
def while_inside_a_stage(w, mb):
    """A while has no reverse-mode derivative: what it makes is a constant to the gradient."""
    scale = lax.while_loop(
        lambda s: jnp.sum(s) < 10, lambda s: s * 2 + 1, lax.stop_gradient(jnp.abs(mb["x"]))
    )
    x = cut(dense(mb["x"] / scale, w[0]))
    found = lax.while_loop(lambda s: jnp.max(s) > 0.1, lambda s: s / 2, jnp.abs(lax.stop_gradient(x)))
    return error(x @ w[1] + found, mb)


@step(stages=2)
def while_in_an_evaluation(pipe, w, batches):
    def of_one(mb):
        x = lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 0.2, lambda x: dense(x, w[0]) * 0.5, mb["x"])
        return lax.while_loop(lambda x: jnp.sum(x) < 5, lambda x: x + 1, cut(x))

    return jpp.accumulate_grads(of_one, pipe(2), reduce=jpp.Stack())(batches)


@loss(stages=2)
def platform_dependent_inside_a_stage(w, mb):
    x = lax.platform_dependent(mb["x"], cpu=lambda x: dense(x, w[0]), default=lambda x: dense(x, w[0]))
    return error(cut(x) @ w[1], mb)


# ---------------------------------------------------------------- custom rules


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.1, 0.1),))


@jax.custom_jvp
def softened(x):
    return jnp.abs(x)


softened.defjvp(lambda primals, tangents: (jnp.abs(primals[0]), tangents[0] * jnp.tanh(primals[0] * 3)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, factor):
    return x * factor


scaled.defvjp(lambda x, factor: (x * factor, None), lambda factor, _, g: (g * factor * 0.5,))


@loss(stages=2, on="inline")
def custom_vjp_inside_a_stage(w, mb):
    return error(clipped(cut(clipped(mb["x"] @ w[0])) @ w[1]), mb)


@loss(stages=2)
def custom_jvp_inside_a_stage(w, mb):
    return error(softened(cut(softened(mb["x"] @ w[0])) @ w[1]), mb)


@loss(stages=2)
def custom_vjp_with_static_arguments(w, mb):
    return error(scaled(cut(scaled(mb["x"] @ w[0], 2.0)) @ w[1], 3.0), mb)


@loss(stages=2)
def custom_vjp_of_a_weight_used_in_both_stages(w, mb):
    return error(cut(dense(mb["x"], clipped(w[0]))) @ clipped(w[0]), mb)


@loss(stages=2)
def custom_jvp_around_a_marker(w, mb):
    @jax.custom_jvp
    def block(x, w):
        return cut(jnp.tanh(x @ w))

    @block.defjvp
    def rule(primals, tangents):
        x, w = primals
        y = block(x, w)
        return y, (1 - y**2) * (tangents[0] @ w + x @ tangents[1])

    return error(block(mb["x"], w[0]) @ w[1], mb)


@loss(stages=2)
def custom_vjp_around_a_marker(w, mb):
    @jax.custom_vjp
    def block(x, w0, w1):
        return cut(jnp.tanh(x @ w0)) @ w1

    def forward(x, w0, w1):
        hidden = cut(jnp.tanh(x @ w0))
        return hidden @ w1, (x, w0, w1, hidden)

    def backward(kept, g):
        x, w0, w1, hidden = kept
        inner = (g @ w1.T) * (1 - hidden**2)
        return inner @ w0.T, x.T @ inner, hidden.T @ g

    block.defvjp(forward, backward)
    return error(block(mb["x"], w[0], w[1]), mb)


@loss(stages=3)
def custom_vjp_whose_rule_takes_the_gradient_of_a_marked_function(w, mb):
    def plain(x, w):
        return dense(cut(dense(x, w[0])), w[1])

    @jax.custom_vjp
    def block(x, w):
        return plain(x, w)

    def forward(x, w):
        y, pullback = jax.vjp(plain, x, w)
        return y, pullback

    block.defvjp(forward, lambda pullback, g: pullback(jnp.clip(g, -0.05, 0.05)))
    return error(cut(block(mb["x"], w[:2])) @ w[2], mb)


# ---------------------------------------------------------------- other primitives with bodies


@loss(stages=2)
def linear_solve_inside_a_stage(w, mb):
    solved = jnp.linalg.solve(w[0] @ w[0].T + 2 * jnp.eye(4), mb["x"].T).T
    return error(cut(solved) @ w[1], mb)


@loss(stages=2)
def optimization_barrier_inside_a_stage(w, mb):
    x = lax.optimization_barrier(dense(mb["x"], w[0]))
    return error(cut(x) @ w[1], mb)


@loss(stages=2)
def sort_top_k_and_cumulative_sum(w, mb):
    x = jnp.sort(dense(mb["x"], w[0]), axis=-1)
    values, indices = lax.top_k(cut(x) @ w[1], 2)
    return jnp.mean(jnp.cumsum(values) * indices.reshape(-1)) + error(x, mb)


@loss(stages=2)
def convolution_and_pooling(w, mb):
    image = jnp.einsum("rw,wk->rwk", mb["x"], w[0])[None, :, :, :]  # (1, 3, 4, 4)
    kernel = w[1].reshape(2, 2, 4, 1)
    x = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    pooled = lax.reduce_window(cut(jnp.tanh(x)), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    return error(pooled[0, :, :, 0], mb)


@loss(stages=2)
def gather_and_scatter(w, mb):
    x = dense(mb["x"], w[0]).at[:, mb["tokens"]].add(1.0)
    return error(cut(x)[::-1] @ w[1][mb["tokens"][0]][:, None] + mb["x"].at[0].set(0), mb)


@loss(stages=2)
def dynamic_slices_across_a_boundary(w, mb):
    i = mb["tokens"][0]
    x = cut(lax.dynamic_slice(dense(mb["x"], w[0]), (0, i % 2), (3, 2)))
    return error(x @ lax.dynamic_slice(w[1], (i % 2, 0), (2, 4)), mb)


@loss(stages=2)
def a_root_found_inside_a_stage(w, mb):
    def newton(fn, x):
        return lax.fori_loop(0, 20, lambda _, x: x - fn(x) / (3 * x**2 + 1e-3), x)

    size = jnp.sum(w[0] ** 2) + 1
    root = lax.custom_root(lambda x: x**3 - size, jnp.float32(1), newton, lambda g, y: y / g(1.0))
    return error(cut(mb["x"] * root) @ w[1], mb)


@loss(stages=2)
def gradients_summed_by_a_scan_inside_a_stage(w, mb):
    def body(total, row):
        return total + jax.grad(lambda v: jnp.sum(jnp.tanh(row @ v)))(w[0]), None

    total, _ = lax.scan(body, jnp.zeros((4, 4)), mb["x"])
    return error(cut(mb["x"] @ total) @ w[1], mb)


@loss(stages=2)
def named_scopes_and_calls(w, mb):
    with jax.named_scope("first"):
        x = jax.named_call(dense, name="layer")(mb["x"], w[0])
    with jax.named_scope("second"):
        return error(cut(x, name="middle") @ w[1], mb)
