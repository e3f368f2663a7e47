"""Cases: weights that several stages share, that are frozen, partly trained, or not used."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxpp_async as jpp
from tests.torture.blocks import chain, cut, dense, descended, error
from tests.torture.registry import array, batch, loss, step, weights

# ---------------------------------------------------------------- tied weights


@loss(stages=2, on="processes")
def tied_weight_in_two_stages(w, mb):
    return error(cut(dense(mb["x"], w[0])) @ w[0].T, mb)


@loss(stages=3)
def tied_weight_in_three_stages(w, mb):
    return error(chain([w[0], w[0], w[0]], mb["x"]), mb)


@loss(stages=4, on="inline")
def tied_weight_in_four_stages(w, mb):
    x = cut(dense(mb["x"], w[0]))
    x = cut(dense(x, w[1] @ w[0]))
    x = cut(dense(x @ w[2], w[0].T))
    return error(x @ w[0], mb)


@loss(stages=2)
def two_tied_weights_of_equal_shape(w, mb):
    x = cut(dense(dense(mb["x"], w[0]), w[1]))
    return error(dense(x, w[1].T) @ w[0].T, mb)


@loss(stages=4)
def two_tied_weights_of_equal_shape_in_four_stages(w, mb):
    x = mb["x"]
    for k in range(4):
        x = dense(dense(cut(x) if k else x, w[0]), w[1])
    return error(x, mb)


@loss(stages=3)
def three_tied_weights_in_different_pairs_of_stages(w, mb):
    x = cut(dense(dense(mb["x"], w[0]), w[1]))
    x = cut(dense(dense(x, w[1]), w[2]))
    return error(dense(dense(x, w[2]), w[0]), mb)


@loss(stages=3)
def tied_weight_used_twice_in_each_stage(w, mb):
    return error(chain([w[0] @ w[0], w[0] + w[0].T, w[0] * w[0]], mb["x"]), mb)


@loss(stages=2)
def tied_embedding_as_lookup_and_head(w, mb):
    x = cut(w[0][mb["tokens"]])
    logits = dense(x, w[1]) @ w[0].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), mb["tokens"][:, None], axis=1))


@loss(stages=3)
def tied_parts_of_one_array(w, mb):
    """Each stage takes rows of one stacked array: the array is what is shared."""
    stacked = jnp.stack(w[:3])
    return error(chain([stacked[0], stacked[1], stacked[2]], mb["x"]), mb)


@loss(stages=3, make_args=lambda: (array(0, 3, 4, 4), batch()))
def one_stacked_leaf_for_all_stages(w, mb):
    return error(chain([w[0], w[1], w[2]], mb["x"]), mb)


@loss(stages=3)
def tied_weight_with_a_regularizer(w, mb):
    return (
        error(chain([w[0], w[1], w[0]], mb["x"]), mb) + 1e-2 * jnp.sum(w[0] ** 2) + 1e-3 * jnp.sum(w[1] ** 2)
    )


@loss(stages=3)
def tied_scalar_and_tied_weight(w, mb):
    gain = w[1][0, 0]
    return error(chain([w[0] * gain, w[2] * gain, w[0] * gain], mb["x"]), mb)


@step(stages=3)
def tied_weights_trained_for_two_loops(pipe, w, batches):
    def fn(w, mb):
        return error(chain([w[0], w[1], w[0]], mb["x"]), mb)

    w = w[:2]
    for _ in range(2):
        now = w
        w = descended(now, jpp.accumulate_grads(lambda mb, now=now: jax.grad(fn)(now, mb), pipe(3))(batches))
    return w


# ---------------------------------------------------------------- frozen and partly trained


def frozen(which):
    def fn(w, mb):
        stages = [jax.lax.stop_gradient(x) if k in which else x for k, x in enumerate(w[:3])]
        return error(chain(stages, mb["x"]), mb)

    return fn


for name, which in {
    "frozen_first_stage": {0},
    "frozen_middle_stage": {1},
    "frozen_last_stage": {2},
    "frozen_first_and_middle_stage": {0, 1},
    "frozen_middle_and_last_stage": {1, 2},
    "frozen_everything": {0, 1, 2},
}.items():
    fn = frozen(which)
    fn.__name__ = name
    loss(stages=3)(fn)


@step(stages=3)
def gradients_of_some_parameters(pipe, w, batches):
    def of_one(mb):
        def fn(middle):
            return error(chain([w[0], middle, w[2]], mb["x"]), mb)

        return jax.grad(fn)(w[1])

    return w[1] - 0.1 * jpp.accumulate_grads(of_one, pipe(3))(batches)


@step(stages=3)
def gradients_of_the_first_stage_alone(pipe, w, batches):
    def of_one(mb):
        return jax.grad(lambda first: error(chain([first, *w[1:3]], mb["x"]), mb))(w[0])

    return descended(w[0], jpp.accumulate_grads(of_one, pipe(3))(batches))


@step(stages=3)
def gradients_of_the_last_stage_alone(pipe, w, batches):
    def of_one(mb):
        return jax.grad(lambda last: error(chain([*w[:2], last], mb["x"]), mb))(w[2])

    return descended(w[2], jpp.accumulate_grads(of_one, pipe(3))(batches))


@loss(stages=2)
def stop_gradient_between_stages(w, mb):
    x = cut(jax.lax.stop_gradient(dense(mb["x"], w[0])))
    return error(x @ w[1], mb)


@loss(stages=3)
def stop_gradient_on_one_of_two_paths(w, mb):
    x = dense(mb["x"], w[0])
    kept, dropped = cut((x, jax.lax.stop_gradient(dense(x, w[1]))))
    return error(cut(dense(kept, w[2]) + dropped) @ w[3], mb)


@loss(stages=2)
def straight_through_estimator(w, mb):
    x = dense(mb["x"], w[0])
    return error(cut(x + jax.lax.stop_gradient(jnp.round(x) - x)) @ w[1], mb)


@loss(
    stages=2,
    make_args=lambda: ({"used": weights(2), "unused": array(1, 7), "none": None}, batch()),
    on="inline",
)
def parameters_not_used(w, mb):
    return error(chain(w["used"], mb["x"]), mb)


@loss(stages=3)
def only_the_last_stage_has_weights(w, mb):
    x = cut(jnp.sin(mb["x"]))
    return error(cut(jnp.cos(x)) @ w[0], mb)


@loss(stages=3)
def only_the_first_stage_has_weights(w, mb):
    x = cut(dense(mb["x"], w[0]))
    return error(jnp.sin(cut(jnp.cos(x))), mb)


@step(
    stages=2,
    make_args=lambda: (weights(2), [(array(20 + k, 4, 2), array(30 + k, 2, 4)) for k in range(2)], batch()),
)
def low_rank_adapters(pipe, base, adapters, batches):
    """LoRA: the base is frozen, each stage trains two thin matrices."""

    def of_one(mb):
        def fn(adapters):
            x = mb["x"]
            for k, (w, (down, up)) in enumerate(zip(base, adapters, strict=True)):
                x = cut(x) if k else x
                x = jnp.tanh(x @ w + 0.5 * (x @ down) @ up)
            return error(x, mb)

        value, grads = jax.value_and_grad(fn)(adapters)
        return grads, value

    grads, losses = jpp.accumulate_grads(of_one, pipe(2))(batches)
    return descended(adapters, grads), losses
