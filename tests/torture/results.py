"""Cases: what a loop and a step return: metrics of any stage, any operator, any type; arguments, constants,
slices."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxpp_async as jpp
from tests.torture.blocks import chain, cut, dense, descended, error
from tests.torture.placing_markers import Layer
from tests.torture.registry import batch, step, weights

OPERATORS = {
    "sum": jpp.Sum(),
    "max": jpp.Max(),
    "min": jpp.Min(),
    "mean": jpp.Mean(),
    "stack": jpp.Stack(),
    "concat": jpp.Concat(),
    "concat_last": jpp.Concat(-1),
}


@step(stages=3)
def metrics_of_every_stage_with_every_operator(pipe, w, batches):
    def fn(w, mb):
        metrics, x = {}, mb["x"]
        for k in range(3):
            x = dense(cut(x) if k else x, w[k])
            metrics[f"stage{k}"] = dict.fromkeys(OPERATORS, x)
        return error(x, mb), metrics

    def of_one(mb):
        (value, metrics), grads = jax.value_and_grad(fn, has_aux=True)(w[:3], mb)
        return grads, value, metrics

    reduce = (jpp.Sum(), jpp.Stack(), {f"stage{k}": OPERATORS for k in range(3)})
    return jpp.accumulate_grads(of_one, pipe(3), reduce=reduce)(batches)


def every_type(x):
    return {
        "f32": x,
        "bf16": jnp.round(x * 4).astype(jnp.bfloat16),
        "f16": jnp.round(x * 4).astype(jnp.float16),
        "i32": (x * 10).astype(jnp.int32),
        "i8": (x * 10).astype(jnp.int8),
        "u8": jnp.abs(x * 10).astype(jnp.uint8),
        "bool": x > 0,
        "c64": jax.lax.complex(x, x * 2),
    }


INTEGERS, BOOLEAN = ("i32", "i8", "u8"), ("bool",)


def types_with(operator, without=()):
    def fn(pipe, w, batches):
        def of_one(mb):
            first = jnp.sin(mb["x"] @ w[0])
            last = jnp.sin(cut(first) @ w[1])
            return [{k: v for k, v in every_type(x).items() if k not in without} for x in (first, last)]

        return jpp.accumulate_grads(of_one, pipe(2), reduce=operator)(batches)

    return fn


for name, operator, without in [
    ("sum", jpp.Sum(), BOOLEAN),
    ("mean", jpp.Mean(), INTEGERS + BOOLEAN),
    ("max", jpp.Max(), ("c64",)),
    ("min", jpp.Min(), ("c64",)),
    ("stack", jpp.Stack(), ()),
    ("concat", jpp.Concat(), ()),
]:
    fn = types_with(operator, without)
    fn.__name__ = f"every_type_under_{name}"
    step(stages=2)(fn)


@step(stages=3)
def outputs_of_early_stages(pipe, w, batches):
    def of_one(mb):
        first = dense(mb["x"], w[0])
        second = dense(cut(first), w[1])
        third = dense(cut(second), w[2])
        return error(third, mb), first, (second, jnp.max(first))

    return jpp.accumulate_grads(of_one, pipe(3))(batches)


@step(stages=3)
def an_output_of_the_first_stage_alone(pipe, w, batches):
    def of_one(mb):
        first = dense(mb["x"], w[0])
        cut(dense(cut(first), w[1]))
        return jnp.mean(first)

    return jpp.accumulate_grads(of_one, pipe(3), reduce=jpp.Stack())(batches)


@step(stages=2, on="inline")
def constants_as_outputs(pipe, w, batches):
    def of_one(mb):
        x = cut(dense(mb["x"], w[0])) @ w[1]
        return error(x, mb), 1.0, jnp.arange(3), {"two": 2, "zeros": jnp.zeros((2, 2))}

    return jpp.accumulate_grads(of_one, pipe(2))(batches), 7, jnp.ones(2), {"pi": 3.14}


@step(stages=2)
def a_loop_that_returns_only_constants(pipe, w, batches):
    def of_one(mb):
        cut(dense(mb["x"], w[0]))
        return jnp.float32(1), jnp.arange(2)

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=2)
def the_same_value_returned_twice(pipe, w, batches):
    def of_one(mb):
        value, grads = jax.value_and_grad(lambda w: error(chain(w, mb["x"]), mb))(w[:2])
        return grads, grads, value, value

    first, second, one, two = jpp.accumulate_grads(of_one, pipe(2))(batches)
    return first, first, second, one, one, two


@step(stages=2)
def the_same_value_under_two_operators(pipe, w, batches):
    def of_one(mb):
        value, grads = jax.value_and_grad(lambda w: error(chain(w, mb["x"]), mb))(w[:2])
        return grads, grads, value, value

    reduce = (jpp.Sum(), jpp.Stack(), jpp.Max(), jpp.Mean())
    return jpp.accumulate_grads(of_one, pipe(2), reduce=reduce)(batches)


@step(stages=2)
def an_argument_returned_unchanged(pipe, w, batches):
    grads = jpp.accumulate_grads(lambda mb: jax.grad(lambda w: error(chain(w, mb["x"]), mb))(w[:2]), pipe(2))(
        batches
    )
    return w, grads, batches["tokens"], w[5], w[0]


@step(stages=2)
def slices_of_the_batch_as_outputs(pipe, w, batches):
    def of_one(mb, i):
        x = cut(dense(mb["x"], w[0])) @ w[1]
        return error(x, mb), mb["tokens"], mb["y"][0], i, mb

    return jpp.accumulate_grads(of_one, pipe(2), pass_index=True)(batches), batches["x"][1:3]


@step(stages=2)
def weights_as_outputs_of_the_loop(pipe, w, batches):
    def of_one(mb):
        return error(cut(dense(mb["x"], w[0])) @ w[1], mb), w[0], w[3] * 2

    return jpp.accumulate_grads(of_one, pipe(2), reduce=(jpp.Sum(), jpp.Max(), jpp.Sum()))(batches)


@step(stages=3)
def weights_statistics_in_the_loop(pipe, w, batches):
    def fn(w, mb):
        return error(chain(w, mb["x"]), mb), {"norms": [jnp.sum(x**2) for x in w], "batch": jnp.max(mb["x"])}

    def of_one(mb):
        (value, aux), grads = jax.value_and_grad(fn, has_aux=True)(w[:3], mb)
        return grads, {"loss": value, **aux, "grads": [jnp.sqrt(jnp.sum(g**2)) for g in grads]}

    return jpp.accumulate_grads(of_one, pipe(3), reduce=(jpp.Sum(), jpp.Max()))(batches)


class Out(NamedTuple):
    grads: list
    loss: jax.Array


@step(stages=2)
def a_named_tuple_is_summed_as_a_whole(pipe, w, batches):
    def of_one(mb):
        value, grads = jax.value_and_grad(lambda w: error(chain(w, mb["x"]), mb))(w[:2])
        return Out(grads, value)

    return jpp.accumulate_grads(of_one, pipe(2))(batches)


@step(stages=2)
def none_and_empty_containers_as_outputs(pipe, w, batches):
    def of_one(mb):
        grads = jax.grad(lambda w: error(chain(w, mb["x"]), mb))(w[:2])
        return grads, None, {}, [None, ()]

    return jpp.accumulate_grads(of_one, pipe(2))(batches), None, {"empty": []}


@step(stages=2)
def outputs_in_a_pytree_of_ones_own(pipe, w, batches):
    def of_one(mb):
        first, second = jax.grad(lambda w: error(chain(w, mb["x"]), mb))(w[:2])
        return Layer(first, second, "gradients")

    return Layer(jpp.accumulate_grads(of_one, pipe(2))(batches), w[0], "out")


@step(stages=2, make_args=lambda: (weights(2), {"mean": weights(1)[0][0], "count": 0}, batch()), on="inline")
def running_statistics_as_in_batch_norm(pipe, w, running, batches):
    def fn(w, mb):
        hidden = mb["x"] @ w[0]
        mean = jnp.mean(hidden, 0)
        x = cut(jnp.tanh(hidden - mean))
        return error(x @ w[1], mb), mean

    def of_one(mb):
        (value, mean), grads = jax.value_and_grad(fn, has_aux=True)(w, mb)
        return grads, value, mean

    reduce = (jpp.Sum(), jpp.Mean(), jpp.Mean())
    grads, value, mean = jpp.accumulate_grads(of_one, pipe(2), reduce=reduce)(batches)
    running = {"mean": 0.9 * running["mean"] + 0.1 * mean, "count": running["count"] + 1}
    return descended(w, grads), running, value


@step(stages=2)
def gradients_thrown_away(pipe, w, batches):
    def of_one(mb):
        value, grads = jax.value_and_grad(lambda w: error(chain(w, mb["x"]), mb))(w[:2])
        return grads, value

    _, losses = jpp.accumulate_grads(of_one, pipe(2))(batches)
    return losses


@step(stages=3)
def one_gradient_of_three_returned(pipe, w, batches):
    def of_one(mb):
        return jax.grad(lambda w: error(chain(w, mb["x"]), mb))(w[:3])[1]

    return jpp.accumulate_grads(of_one, pipe(3))(batches)
