"""Steps whose schedules name the boundaries among many marks compute what plain `jax.jit` does."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import models
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import ScheduleError
from jaxpp_async.testing import assert_close

NUM_MICROBATCHES, NUM_STEPS = 4, 3
MODEL = models.gpt(num_stages=4, layers=4, tied=True)  # marks "after block 0", "1" and "2"


def momentum_step(schedule):
    """SGD with momentum: (state, batch) to (new state, losses)."""

    def step(state, batch):
        def of_one(microbatch):
            loss, grads = jax.value_and_grad(MODEL.loss)(state["params"], microbatch)
            return grads, loss

        grads, losses = jpp.accumulate_grads(of_one, schedule)(batch)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
        params = jax.tree.map(lambda p, v: p - 0.02 * v, state["params"], velocity)
        return {"params": params, "velocity": velocity}, losses

    return step


def first_state():
    params = MODEL.init(0)
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}


async def check(mesh, schedule):
    fn = momentum_step(schedule)
    step, plain_step = mesh.distributed(fn, donate_argnums=0), jax.jit(fn)
    state = plain = first_state()
    for seed in range(NUM_STEPS):
        batch = MODEL.batch(seed, NUM_MICROBATCHES)
        state, losses = await mesh.run(step, state, batch)
        plain, plain_losses = plain_step(plain, batch)
        assert_close(await losses, plain_losses)
    assert_close(await mesh.fetch(state), plain)


@pytest.mark.parametrize(
    "schedule",
    [
        jpp.Std1F1B(2, stages=[0]),
        jpp.ZeroBubbleH1(2, stages="balanced"),
        jpp.Interleaved1F1B(3, stages=["after block 0", 2]),
        jpp.GPipe(1, stages=[]),
    ],
    ids=str,
)
async def test_equals_jit(remote_mesh, schedule):
    await check(await remote_mesh(2, launcher="inline"), schedule)


async def test_equals_jit_across_processes(remote_mesh):
    await check(await remote_mesh(2), jpp.Std1F1B(2, stages=["after block 2"]))


async def test_another_cut_lowers_only_what_is_new_and_takes_the_state_along(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(momentum_step(jpp.GPipe(2, stages=[1])), donate_argnums=0)
    plain_step = jax.jit(momentum_step(None))
    state = plain = first_state()
    batch = MODEL.batch(0, NUM_MICROBATCHES)
    counts = []
    for schedule in (
        None,
        jpp.GPipe(2),  # the same cut
        jpp.GPipe(2, stages=(1,)),  # an equal one
        jpp.GPipe(2, stages=[0]),  # a new one
        jpp.GPipe(2, stages=[1]),  # the first again
        jpp.GPipe(2, stages="balanced"),  # which is the first, too
    ):
        form = step if schedule is None else step.with_schedule(schedule)
        before = step._exports.count
        state, losses = await mesh.run(form, state, batch)
        plain, plain_losses = plain_step(plain, batch)
        assert_close(await losses, plain_losses)
        counts.append(step._exports.count - before)
    assert_close(await mesh.fetch(state), plain)
    assert counts[0] > 0 and 0 < counts[3] <= counts[0]
    assert [counts[k] for k in (1, 2, 4, 5)] == [0] * 4


async def test_a_wrong_cut_is_an_error_before_anything_runs(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(momentum_step(jpp.GPipe(2, stages=[1])), donate_argnums=0)
    state, batch = first_state(), MODEL.batch(0, NUM_MICROBATCHES)
    for schedule, message in (
        (jpp.GPipe(2, stages=[7]), r"stages\[0\] names mark 7 .* its 3 marks are 0 to 2"),
        (jpp.GPipe(3), "stages names 1 mark for 2 stages, and the schedule has 3"),
        (jpp.GPipe(5, stages="balanced"), "it has 5 stages, and the 3 pipeline_yields .* make 4 at most"),
    ):
        with pytest.raises(ScheduleError, match=message) as caught:
            await step.with_schedule(schedule)(state, batch)
        assert str(caught.value).startswith(f"{__file__}:")
        assert "2: " in str(caught.value) and "'after block 2'" in str(caught.value)
    state, _ = await mesh.run(step, state, batch)  # which was not donated to what failed
    assert (await mesh.fetch(state))["params"]["embed"].shape == (17, 8)


async def test_the_log_and_the_report_say_which_marks_were_chosen(remote_mesh, caplog):
    mesh = await remote_mesh(2, launcher="inline")
    with caplog.at_level(logging.INFO, "jaxpp_async"):
        step = mesh.distributed(momentum_step(jpp.Std1F1B(2, stages="balanced")))
        compiled = await step.compile(first_state(), MODEL.batch(0, NUM_MICROBATCHES))
    chosen = "1 of 3 (counted from 0), balanced: the stages have 4"
    assert f"step 'step': stages end behind mark {chosen}" in caplog.text
    assert ": stage 0 ends behind mark 1 of 3 (counted from 0; 'after block 1'; " in str(compiled.report())
    assert "; balanced: the stages have 4" in str(compiled.report())


async def test_a_timeline_knows_how_its_step_was_cut(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(momentum_step(jpp.Std1F1B(2, stages="balanced")))
    await mesh.run(step, first_state(), MODEL.batch(0, NUM_MICROBATCHES))
    assert mesh.last_step_timeline().cut_choice == "work"


async def test_an_evaluation_takes_the_cut_of_the_training_step(remote_mesh):
    """The training computes the first two layers again, so that its balanced cut is another one."""
    depths = (5, 2, 6)

    def loss(params, x):
        for k, (w, depth) in enumerate(zip(params, depths, strict=True)):

            def layer(w, x, depth=depth):
                for _ in range(depth):
                    x = jnp.tanh(x @ w)
                return x

            x = jpp.pipeline_yield((jax.checkpoint(layer) if k < 2 else layer)(w, x))
        return jnp.mean(x**2)

    def train(params, batch):
        grads, losses = jpp.accumulate_grads(
            lambda x: jax.value_and_grad(loss)(params, x)[::-1], jpp.Std1F1B(2, stages="balanced")
        )(batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), losses

    def evaluate(params, batch):
        return jpp.accumulate_grads(lambda x: loss(params, x), jpp.Std1F1B(2, stages="balanced"))(batch)

    mesh = await remote_mesh(2, launcher="inline")
    params, batch = [jnp.eye(8) * (k + 1) for k in range(3)], jnp.ones((4, 2, 8))
    trained, balanced = mesh.distributed(train), mesh.distributed(evaluate)
    compiled = await trained.compile(params, batch)
    assert (compiled.stages, (await balanced.compile(params, batch)).stages) == ((0,), (1,))
    params, _ = await mesh.run(trained, params, batch)
    same = balanced.with_schedule(jpp.Std1F1B(2, stages=compiled.stages))
    submitted = await mesh.submit(same, params, batch)
    assert_close(await mesh.fetch(submitted.outputs), jax.jit(evaluate)(await mesh.fetch(params), batch))
    assert not submitted.moves
    assert (await mesh.submit(balanced, params, batch)).moves
