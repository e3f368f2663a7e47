"""What once went wrong: programs that broke the compiler, and calls that came in between one another."""

from __future__ import annotations

import asyncio
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import ArrayError, StageError
from jaxpp_async.session.remote_array import RemoteArray
from jaxpp_async.testing import assert_close

NUM_MICROBATCHES = 3


def array(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.3


PARAMS = {"a": array(0, 6, 6), "b": array(1, 6, 6), "c": array(2, 6, 6)}
BATCH = {"x": array(3, NUM_MICROBATCHES, 2, 6), "y": array(4, NUM_MICROBATCHES, 2, 6)}


def loss_fn(params, mb):
    hidden = jpp.pipeline_yield(jnp.tanh(mb["x"] @ params["a"]))
    return jnp.mean((hidden @ params["b"] - mb["y"]) ** 2)


def sgd(schedule):
    def step(params, batch):
        def grads_of(mb):
            loss, grads = jax.value_and_grad(loss_fn)(params, mb)
            return grads, loss

        grads, losses = jpp.accumulate_grads(grads_of, schedule)(batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses

    return step


# ---------------------------------------------------------------- programs


def a_part_of_a_sum_enters_a_later_loop(params, batch):
    def three_parts(mb):
        first = jpp.pipeline_yield(jnp.tanh(mb["x"] @ params["a"]))
        second = jpp.pipeline_yield(jnp.tanh(first @ params["b"]))
        return first.sum(), second.sum(), (second @ params["c"]).sum()

    a, b, c = jpp.accumulate_grads(three_parts, jpp.GPipe(3), reduce=jpp.Sum())(batch)
    part = a + b

    def scaled(mb):
        return (jpp.pipeline_yield(mb["x"] @ params["a"] * part) @ params["b"]).sum()

    return part + c, jpp.accumulate_grads(scaled, jpp.GPipe(2))(batch)


def a_marked_sum_is_returned_and_used_again(params, batch):
    def body(mb):
        hidden = jpp.pipeline_yield(mb["x"] @ params["a"] + mb["y"] @ params["b"])
        return hidden + hidden @ params["c"]

    return jpp.accumulate_grads(body, jpp.GPipe(2))(batch)


def a_schedule_with_split_backwards(params, batch):
    mbs = range(NUM_MICROBATCHES)
    first = [jpp.Task(i, "fwd", 0) for i in mbs]
    first += [jpp.Task(i, ty, 0) for i in mbs for ty in ("bwd_input", "bwd_weight")]
    second = [jpp.Task(i, ty, 1) for i in mbs for ty in ("fwd", "bwd_input")]
    second += [jpp.Task(i, "bwd_weight", 1) for i in mbs]
    return sgd([first, second])(params, batch)


@pytest.mark.parametrize(
    "fn",
    [
        a_part_of_a_sum_enters_a_later_loop,
        a_marked_sum_is_returned_and_used_again,
        a_schedule_with_split_backwards,
    ],
    ids=lambda fn: fn.__name__,
)
async def test_equals_jit(remote_mesh, fn):
    mesh = await remote_mesh(2, launcher="inline")
    found = await mesh.fetch(await mesh.run(mesh.distributed(fn), PARAMS, BATCH))
    assert_close(found, jax.jit(fn)(PARAMS, BATCH))


async def test_a_gradient_of_a_gradient_through_a_marker_is_a_stage_error(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")

    def penalty(params, mb):
        slope = jax.grad(lambda x: jnp.sum(jpp.pipeline_yield(jnp.tanh(x @ params["a"])) @ params["b"]))
        return jnp.mean(slope(mb["x"]) ** 2)

    def fn(params, batch):
        return jpp.accumulate_grads(lambda mb: jax.grad(penalty)(params, mb), jpp.Std1F1B(2))(batch)

    with pytest.raises(StageError, match=r"test_regressions\.py:\d+: the gradient of a gradient"):
        await mesh.run(mesh.distributed(fn), PARAMS, BATCH)


# ---------------------------------------------------------------- calls in between


async def test_a_fetch_comes_before_a_later_step_that_is_given_the_array(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(sgd(jpp.Std1F1B(2)), donate_argnums=0)
    params, _ = await mesh.run(step, PARAMS, BATCH)
    expected = await mesh.fetch(params)
    fetched, _ = await asyncio.gather(mesh.fetch(params), mesh.run(step, params, BATCH))
    assert_close(fetched, expected)


async def test_fetching_what_still_lies_on_the_controller_copies_it(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    held = await mesh.put(np.ones(3, np.float32))
    (await held)[:] = 5
    assert_close(await held, np.ones(3, np.float32))


async def test_one_array_as_two_arguments_on_different_actors(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step, value = sgd(jpp.Std1F1B(2)), array(5, 6, 6)
    held = await mesh.put(value)
    found = await mesh.run(mesh.distributed(step), {"a": held, "b": held}, BATCH)
    assert_close(await mesh.fetch(found), jax.jit(step)({"a": value, "b": value}, BATCH))


def doubled(params):
    return params["a"] * 2, params["b"] * 2, params["c"] * 2


def two_in_the_second_stage(params, batch):
    def body(mb):
        return (jpp.pipeline_yield(jnp.tanh(mb["x"] @ params["a"])) @ params["b"] @ params["c"]).sum()

    return jpp.accumulate_grads(body, jpp.GPipe(2))(batch)


async def test_deleting_or_cancelling_while_arrays_are_moved(remote_mesh):
    """Whatever the loop is at: the step refuses the array or has it, and the mesh and the array go on."""
    mesh = await remote_mesh(2, launcher="inline")
    double, step = mesh.distributed(doubled), mesh.distributed(two_in_the_second_stage)
    await step.compile(PARAMS, BATCH)
    expected = jax.jit(two_in_the_second_stage)({k: v * 2 for k, v in PARAMS.items()}, BATCH)
    for num_turns, delete in itertools.product(range(12), (False, True)):
        a, b, c = await mesh.run(double, PARAMS)
        assert b.actors == c.actors == (0,)  # the step needs them on actor 1
        running = asyncio.ensure_future(mesh.run(step, {"a": a, "b": b, "c": c}, BATCH))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if delete:
            await c.delete()
        else:
            running.cancel()
        (result,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(result, RemoteArray | ArrayError | asyncio.CancelledError), result
        if not delete:
            assert_close(await (await mesh.run(step, {"a": a, "b": b, "c": c}, BATCH)), expected)


async def test_a_copied_result_is_moved_only_once_it_is_whole(remote_mesh):
    """A step that gives an argument back makes a copy of it. JAX tells where it lies before it is there."""
    size = 1 << 22

    def scaled(first, second):
        def step(params, batch):
            def body(x):
                h = jpp.pipeline_yield(jnp.mean(params[first] * x[0]) * x)
                return jnp.sum(h * jnp.mean(params[second]))

            return params, jpp.accumulate_grads(body, jpp.GPipe(2))(batch)

        return step

    mesh = await remote_mesh(2, launcher="inline")
    there, crossed = mesh.distributed(scaled("a", "b")), mesh.distributed(scaled("b", "a"))
    batch = np.ones((1, 4), np.float32)
    for k in range(3):
        params = {"a": np.full(size, 2.0 + k, np.float32), "b": np.full(size, 3.0, np.float32)}
        kept = (await mesh.submit(there, params, batch)).outputs[0]
        moving = await mesh.submit(crossed, kept, batch)  # both arrays are on the other actor now
        moved, total = await moving
        assert len(moving.moves) == 2
        np.testing.assert_array_equal((await mesh.fetch(moved))["a"], params["a"])
        np.testing.assert_array_equal((await mesh.fetch(moved))["b"], params["b"])
        assert await total == pytest.approx(4 * 3.0 * (2.0 + k))
