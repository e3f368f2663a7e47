"""Cases of connected stages: skips, branches, towers, shared constants, what each takes of the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp_async as jpp
from tests.torture.blocks import chain, cut, dense, error
from tests.torture.registry import array, batch, loss, step, weights

# ---------------------------------------------------------------- skips


def skip_over(stages):
    def fn(w, mb):
        x = early = dense(mb["x"], w[0])
        for k in range(stages):
            x = dense(cut(x), w[1 + k])
        return error(x + early, mb)

    return fn


for count in (1, 2, 3):
    fn = skip_over(count)
    fn.__name__ = f"skip_over_{('one_stage', 'two_stages', 'three_stages')[count - 1]}"
    loss(stages=count + 1)(fn)


@loss(stages=4)
def skip_from_the_input_to_every_stage(w, mb):
    x = mb["x"]
    for k in range(4):
        x = dense(cut(x) if k else x, w[k]) + mb["x"]
    return error(x, mb)


@loss(stages=4)
def skips_as_in_a_u_net(w, mb):
    down0 = dense(mb["x"], w[0])
    down1 = dense(cut(down0), w[1])
    up1 = dense(cut(down1) + down1, w[2])
    return error(dense(cut(up1) + down0, w[3]), mb)


@loss(stages=4)
def every_stage_takes_all_earlier_ones(w, mb):
    made = [mb["x"]]
    for k in range(4):
        x = sum(made[1:], made[0])
        made.append(dense(cut(x) if k else x, w[k]))
    return error(made[-1], mb)


@loss(stages=3)
def skip_with_a_weight_of_its_own(w, mb):
    x = cut(dense(cut(dense(mb["x"], w[0])), w[1]))
    return error(x @ w[2] + mb["x"] @ w[3], mb)


@loss(stages=3)
def a_loss_in_every_stage(w, mb):
    total, x = 0.0, mb["x"]
    for k in range(3):
        x = dense(cut(x) if k else x, w[k])
        total = total + error(x, mb) / (k + 1)
    return total


@loss(stages=3)
def one_of_the_stages_is_skipped_by_all(w, mb):
    first = dense(mb["x"], w[0])
    second = cut(first)
    third = cut(dense(second, w[1]))
    return error(first @ w[2], mb) + jnp.sum(third) * 0


# ---------------------------------------------------------------- branches


@loss(stages=3)
def parallel_branches_that_merge(w, mb):
    left = cut(dense(mb["x"], w[0]))
    right = cut(dense(mb["x"], w[1]))
    return error(dense(left, w[2]) * dense(right, w[3]), mb)


@loss(stages=4)
def branches_of_different_lengths(w, mb):
    left = cut(dense(cut(dense(mb["x"], w[0])), w[1]))
    right = cut(dense(mb["x"], w[2]))
    return error(dense(left + right, w[3]), mb)


@loss(stages=2)
def branches_marked_together(w, mb):
    left, right = cut((dense(mb["x"], w[0]), dense(mb["x"], w[1])))
    return error(dense(left, w[2]) + dense(right, w[3]), mb)


@loss(stages=3)
def two_towers(w, mb):
    """As in CLIP: two encoders that meet in the loss."""
    image = cut(dense(mb["x"], w[0]) @ w[1])
    text = cut(dense(mb["y"], w[2]) @ w[3])
    scores = image @ text.T
    labels = jnp.arange(3)
    rows, columns = jax.nn.log_softmax(scores, 0), jax.nn.log_softmax(scores, 1)
    return -jnp.mean(rows[labels, labels] + columns[labels, labels])


@loss(stages=3)
def two_heads(w, mb):
    trunk = cut(dense(mb["x"], w[0]))
    first = error(dense(trunk, w[1]), mb)
    return first + jnp.mean(cut(dense(trunk, w[2])) ** 2)


@loss(stages=4, on="processes")
def encoder_decoder(w, mb):
    """The decoder's stages all take the encoder's result."""

    def attend(x, memory, w):
        return jax.nn.softmax(x @ w @ memory.T) @ memory

    memory = cut(dense(cut(dense(mb["x"], w[0])), w[1]))
    y = dense(mb["y"], w[2]) + attend(mb["y"], memory, w[3])
    y = cut(y)
    return error(dense(y, w[4]) + attend(y, memory, w[5]), mb)


@loss(stages=3)
def an_encoder_that_two_stages_read(w, mb):
    memory = dense(mb["x"], w[0])
    y = cut(memory)
    y = dense(y, w[1]) + memory
    return error(dense(cut(y), w[2]) * memory, mb)


# ---------------------------------------------------------------- shapes


def widths():
    return [array(70, 4, 6), array(71, 2, 3, 5), array(72, 5, 4)], batch()


@loss(stages=3, make_args=widths)
def stages_of_different_shapes(w, mb):
    x = cut(jnp.tanh(mb["x"] @ w[0]).reshape(3, 2, 3))
    x = cut(jnp.einsum("rgc,gcd->rd", x, w[1]))
    return error(jnp.tanh(x) @ w[2], mb)


@loss(stages=3)
def boundaries_of_different_trees(w, mb):
    got = cut({"a": dense(mb["x"], w[0]), "b": jnp.sum(mb["x"], 0)})
    pair = cut((got["a"] @ w[1], [got["b"] * 2, got["a"][0]]))
    return error(pair[0] + pair[1][0] + pair[1][1], mb)


@loss(stages=3)
def an_empty_array_crosses(w, mb):
    x, empty = cut((dense(mb["x"], w[0]), jnp.zeros((0, 4))))
    x, empty = cut((dense(x, w[1]), empty))
    return error(x @ w[2], mb) + jnp.sum(empty)


# ---------------------------------------------------------------- constants that stages share


def rotate(x, sin, cos):
    half = x.shape[-1] // 2
    return x * cos + jnp.concatenate([-x[:, half:], x[:, :half]], axis=-1) * sin


@loss(stages=3)
def rotary_tables_for_all_stages(w, mb):
    angle = jnp.arange(3.0)[:, None] * jnp.tile(10.0 ** -jnp.arange(2.0), 2)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    x = mb["x"]
    for k in range(3):
        x = rotate(dense(cut(x) if k else x, w[k]), sin, cos)
    return error(x, mb)


@loss(stages=3)
def a_causal_mask_for_all_stages(w, mb):
    mask = jnp.tril(jnp.ones((3, 3), bool))
    x = mb["x"]
    for k in range(3):
        x = cut(x) if k else x
        x = x + jax.nn.softmax(jnp.where(mask, x @ w[k] @ x.T, -1e9)) @ x
    return error(x, mb)


LARGE = array(80, 20, 4)  # 320 bytes
LARGER = array(81, 100, 4)  # 1,600 bytes: larger than what stands in an executable as a constant


@loss(stages=3)
def captured_arrays_for_all_stages(w, mb):
    table = jnp.asarray(LARGE)[mb["tokens"]] + jnp.asarray(LARGER)[mb["tokens"] * 7]
    x = mb["x"]
    for k in range(3):
        x = dense(cut(x) if k else x, w[k]) + table * LARGER.mean()
    return error(x, mb)


@step(stages=2)
def captured_arrays_outside_and_inside_the_loop(pipe, w, batches):
    def fn(w, mb):
        return error(cut(dense(mb["x"], w[0])) @ w[1] + LARGER[:3], mb)

    grads = jpp.accumulate_grads(lambda mb: jax.grad(fn)(w[:2], mb), pipe(2))(batches)
    return [g + jnp.mean(LARGER, 0) for g in grads], jnp.asarray(LARGER)


@step(stages=3)
def a_table_made_before_the_loop(pipe, w, batches):
    table = jnp.sin(w[4] @ w[5])

    def fn(w, mb):
        return error(chain([x + table for x in w], mb["x"]), mb)

    return jpp.accumulate_grads(lambda mb: jax.grad(fn)(w[:3], mb), pipe(3))(batches)


@loss(stages=3)
def numpy_and_python_constants(w, mb):
    x = cut(dense(mb["x"] * 2, w[0]) + np.float32(0.1))
    x = cut(dense(x * np.arange(4, dtype=np.float32), w[1]))
    return error(x @ w[2] - 1, mb) * True


# ---------------------------------------------------------------- the batch


@loss(stages=3)
def a_batch_leaf_used_by_several_stages(w, mb):
    x = cut(dense(mb["x"], w[0]) + mb["y"])
    x = cut(dense(x, w[1]) * mb["x"])
    return error(x @ w[2] + mb["x"], mb)


@loss(stages=2, make_args=lambda: (weights(2), {**batch(), "unused": array(90, 4, 9), "empty": {}}))
def a_batch_leaf_not_used(w, mb):
    return error(chain(w, mb["x"]), mb)


@loss(stages=3)
def a_batch_leaf_used_by_the_middle_stage_alone(w, mb):
    x = cut(dense(jnp.ones((3, 4)), w[0]))
    x = cut(dense(x + mb["x"], w[1]))
    return jnp.mean((x @ w[2]) ** 2)


@loss(stages=2)
def the_first_stage_takes_nothing_of_the_batch(w, mb):
    return error(cut(dense(jnp.ones((3, 4)), w[0])) @ w[1] * mb["x"], mb)


@step(stages=2)
def batch_preprocessing_before_the_loop(pipe, w, batches):
    x = (batches["x"] - jnp.mean(batches["x"])) / (jnp.std(batches["x"]) + 1e-3)
    batches = {"x": x, "y": jax.nn.one_hot(batches["tokens"], 4)}

    def fn(w, mb):
        return error(chain(w, mb["x"]), mb)

    return jpp.accumulate_grads(lambda mb: jax.grad(fn)(w[:2], mb), pipe(2))(batches)


@step(stages=2, make_args=lambda: (weights(2), array(91, 12, 4), array(92, 12, 4)))
def a_batch_split_into_microbatches_in_the_step(pipe, w, x, y):
    batches = {"x": x.reshape(4, 3, 4), "y": y.reshape(4, 3, 4)}
    grads = jpp.accumulate_grads(lambda mb: jax.grad(lambda w: error(chain(w, mb["x"]), mb))(w), pipe(2))(
        batches
    )
    return grads, x[:1]


@step(stages=2)
def one_leaf_twice_in_the_batch(pipe, w, batches):
    pair = (batches["x"], batches["x"], batches["y"])

    def fn(w, mb):
        return jnp.mean((cut(dense(mb[0], w[0])) @ w[1] + mb[1] - mb[2]) ** 2)

    return jpp.accumulate_grads(lambda mb: jax.grad(fn)(w[:2], mb), pipe(2))(pair)


@step(stages=2)
def the_microbatch_is_a_bare_array(pipe, w, batches):
    fn = lambda w, x: jnp.sum(cut(dense(x, w[0])) @ w[1])  # noqa: E731
    return jpp.accumulate_grads(lambda x: jax.grad(fn)(w[:2], x), pipe(2))(batches["x"])


@step(stages=2)
def arrays_that_all_microbatches_share(pipe, w, batches):
    shared = batches["y"][0]

    def fn(w, mb):
        return jnp.mean((cut(dense(mb["x"] + shared, w[0])) @ w[1] - shared) ** 2)

    return jpp.accumulate_grads(lambda mb: jax.grad(fn)(w[:2], mb), pipe(2))(batches)
