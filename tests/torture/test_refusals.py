"""Programs that cannot be pipelined: the error, or the warning, names the user's line and says what to do
instead."""

from __future__ import annotations

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from planning import plan_step

import jaxpp_async as jpp
from jaxpp_async.errors import StageError, UnsupportedError
from tests.torture.blocks import chain, cut, dense, descended, error
from tests.torture.registry import gradients_of, usual


def line_of(fn, text):
    """`file:line` of the line of a function that has this text."""
    lines, first = inspect.getsourcelines(fn)
    (found,) = [first + k for k, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(fn)}:{found}"


def chain_loss(w, mb):
    return error(chain(w[:2], mb["x"]), mb)


# ---------------------------------------------------------------- losses


def gradient_of_a_gradient_through_a_marker(w, mb):
    slope = jax.grad(lambda x: jnp.sum(cut(dense(x, w[0])) @ w[1]))(mb["x"])  # here
    return jnp.mean(slope**2)


def hessian_in_reverse_mode(w, mb):
    slope = jax.grad(lambda x: jnp.sum(cut(dense(x, w[0])) @ w[1]))  # here
    return jnp.sum(jax.jacrev(slope)(mb["x"]))


def a_stage_that_needs_the_backward_of_a_later_one(w, mb):
    slope = jax.grad(lambda x: jnp.sum(cut(dense(x, w[0])) @ w[1]))(mb["x"])  # here
    return error(cut(slope), mb)


def a_marker_in_a_while(w, mb):
    x = lax.while_loop(lambda x: jnp.sum(x) < 10, lambda x: cut(x + 1), mb["x"])  # here
    return error(lax.stop_gradient(x) @ w[0], mb)


def a_marker_in_a_fori_loop_of_unknown_length(w, mb):
    x = lax.fori_loop(0, mb["tokens"][0], lambda i, x: cut(x + 1), mb["x"])  # here
    return error(lax.stop_gradient(x) @ w[0], mb)


def a_marker_in_a_cond(w, mb):
    x = lax.cond(mb["x"][0, 0] > 0, lambda x: cut(x @ w[0]), lambda x: x, mb["x"])  # here
    return error(x, mb)


def a_marker_on_integers_alone(w, mb):
    tokens = cut(mb["tokens"])  # here
    return error(dense(mb["x"], w[0]) * tokens[0], mb)


LOSSES = {
    gradient_of_a_gradient_through_a_marker: (
        2,
        StageError,
        "take the inner gradient without a pipeline_yield",
    ),
    hessian_in_reverse_mode: (2, StageError, "take the inner gradient without a pipeline_yield"),
    a_stage_that_needs_the_backward_of_a_later_one: (
        3,
        StageError,
        "use it behind the last one, or make it in an accumulate_grads loop of its own",
    ),
    a_marker_in_a_while: (2, UnsupportedError, "pipeline_yield inside `while`"),
    a_marker_in_a_fori_loop_of_unknown_length: (2, UnsupportedError, "pipeline_yield inside `while`"),
    a_marker_in_a_cond: (2, UnsupportedError, "pipeline_yield inside `cond`"),
    a_marker_on_integers_alone: (2, StageError, "no floating value; pass the activations"),
}


@pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: fn.__name__)
def test_a_loss_is_refused_with_its_line(fn):
    stages, kind, says = LOSSES[fn]

    def step(w, batches):
        return gradients_of(fn, stages)(jpp.GPipe, w, batches)

    with pytest.raises(kind, match=says) as caught:
        plan_step(step, *usual())
    assert str(caught.value).startswith(line_of(fn, "# here"))


# ---------------------------------------------------------------- steps


def a_loop_in_a_cond(w, batches):
    def grads():
        return jpp.accumulate_grads(lambda mb: chain_loss(w, mb), jpp.GPipe(2))(batches)

    return lax.cond(batches["x"][0, 0, 0] > 0, grads, lambda: 0.0)  # here


def a_loop_in_a_fori_loop(w, batches):
    def body(_, w):
        return descended(
            w, jpp.accumulate_grads(lambda mb: jax.grad(chain_loss)(w, mb), jpp.GPipe(2))(batches)
        )

    return lax.fori_loop(0, 2, body, w)  # here


def a_loop_in_a_loop(w, batches):
    def of_one(mb):
        return jpp.accumulate_grads(lambda row: jnp.sum(row @ w[0]), jpp.GPipe(1))(mb["x"])  # here

    return jpp.accumulate_grads(of_one, jpp.GPipe(1))(batches)


STEPS = {
    a_loop_in_a_cond: "accumulate_grads inside `cond`",
    a_loop_in_a_fori_loop: "accumulate_grads inside `scan`",
    a_loop_in_a_loop: "accumulate_grads inside another accumulate_grads",
}


@pytest.mark.parametrize("fn", STEPS, ids=lambda fn: fn.__name__)
def test_a_step_is_refused_with_its_line(fn):
    with pytest.raises(UnsupportedError, match=STEPS[fn]) as caught:
        plan_step(fn, *usual())
    assert str(caught.value).startswith(line_of(fn, "# here"))


# ---------------------------------------------------------------- not pipelined, but right


def a_gradient_of_the_whole_loop(w, batches):
    def total(w):
        return jpp.accumulate_grads(lambda mb: chain_loss(w, mb), jpp.GPipe(2))(batches)

    return jax.grad(total)(w)


def a_vmap_of_the_whole_loop(w, batches):
    def total(scale):
        return jpp.accumulate_grads(lambda mb: chain_loss([x * scale for x in w], mb), jpp.GPipe(2))(batches)

    return jax.vmap(total)(jnp.array([1.0, 2.0]))


@pytest.mark.parametrize(
    "fn", [a_gradient_of_the_whole_loop, a_vmap_of_the_whole_loop], ids=lambda fn: fn.__name__
)
def test_transforming_the_whole_loop_warns(fn):
    """The loop becomes a plain one, on one actor."""
    with pytest.warns(UserWarning, match="is not pipelined") as caught:
        done = plan_step(fn, *usual())
    assert not done.placed.loops
    assert {w.filename for w in caught} == {inspect.getsourcefile(chain)}


def test_a_pipelined_step_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_step(lambda w, b: gradients_of(chain_loss, 2)(jpp.GPipe, w, b), *usual())
