"""Devices of known speed: each task of a step lasts as long as a model says, and nothing else changes.

Lower bounds are exact: no task is shorter than its model says. How much longer it is depends on the machine,
and is not asserted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from docs_code import doc_code
from models import grads_step, mlp
from resources import nothing_left

import jaxpp_async as jpp
from jaxpp_async.errors import ActorDiedError, MeshClosedError, MeshError
from jaxpp_async.program.work import TaskWork
from jaxpp_async.testing import assert_close
from jaxpp_async.timeline import Timeline

MODEL = mlp(3)
STEP = grads_step(MODEL, jpp.Std1F1B(3))
MICROBATCHES = 4
TASK_S, TOLERANCE_S = 0.02, 1e-9
HOUR_S = 3600.0


@dataclass
class Flops:
    """A device that takes some seconds for anything with floating-point operations, and no time otherwise."""

    seconds: float = TASK_S
    asked: list[TaskWork] = field(default_factory=list)

    def task_s(self, work: TaskWork) -> float:
        self.asked.append(work)
        return self.seconds if work.flops >= 100 else 0.0


def arguments() -> tuple[Any, Any]:
    return MODEL.init(0), MODEL.batch(0, MICROBATCHES)


@dataclass
class LastStage(Flops):
    """A device that takes some seconds for the only task of the last of two stages."""

    seconds: float = HOUR_S

    def task_s(self, work: TaskWork) -> float:
        return self.seconds if work.flops > 1500 else 0.0


TWO_STAGES = grads_step(mlp(2), jpp.GPipe(2))


def one_microbatch() -> tuple[Any, Any]:
    return mlp(2).init(0), mlp(2).batch(0, 1)


@contextlib.asynccontextmanager
async def a_mesh(model: Any, num_actors: int = 3, **options: Any) -> AsyncIterator[jpp.RemoteMesh]:
    options = {"launcher": "inline"} | options
    async with jpp.RemoteMesh(num_actors, device_model=model, **options) as mesh:
        yield mesh


def check_lengths(timeline: Timeline, seconds: float = TASK_S) -> int:
    """Check that no forward or backward task was too short; returns how many there were."""
    tasks = [run for actor in timeline.actors for run in actor.runs if run.label.startswith(("fwd", "bwd"))]
    assert min(run.duration_s for run in tasks) >= seconds - TOLERANCE_S
    return len(tasks)


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_tasks_last_as_the_model_says_in_the_same_order_with_the_same_numbers(launcher):
    model = Flops()
    async with a_mesh(model, launcher=launcher) as mesh:
        step, expected = mesh.distributed(STEP), jax.jit(STEP)(*arguments())
        for _ in range(2):
            found = await mesh.fetch(await mesh.run(step, *arguments()))
            assert_close(found, expected)
        timeline = mesh.last_step_timeline()
        compiled = await step.compile(*arguments())
    assert check_lengths(timeline) == 2 * 2 * MICROBATCHES + MICROBATCHES  # the last stage's are joined
    assert tuple(model.asked) == compiled.works
    for actor in timeline.actors:  # a device does one after the other
        for first, second in zip(actor.runs, actor.runs[1:], strict=False):
            assert first.end_s <= second.start_s + TOLERANCE_S
    ends = {(event.actor, event.instruction): event.end_s for event in timeline.events}
    for transfer in timeline.transfers:  # the data leaves when the task has ended
        (made,) = transfer.send.needs
        assert ends[transfer.send.actor, made] <= transfer.send.start_s + TOLERANCE_S
    # The last microbatch enters when the first has come back, after five tasks; it passes five tasks itself.
    assert timeline.end_s - timeline.begin_s >= 10 * TASK_S - TOLERANCE_S


async def test_each_executable_lasts_its_own_time_and_a_longer_computation_takes_longer():
    class Hundredths:
        def task_s(self, work: TaskWork) -> float:
            return 0.01 if work.flops < 50 else 1e-9

    def slow(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3_000_000, lambda _, y: jnp.sin(y), x)

    async with a_mesh(Hundredths(), 1) as mesh:
        quick_step, slow_step = mesh.distributed(lambda x: x + 1), mesh.distributed(slow)
        assert await (await mesh.run(quick_step, np.float32(1))) == 2
        (run,) = mesh.last_step_timeline().actors[0].runs
        assert run.duration_s >= 0.01 - TOLERANCE_S
        await mesh.run(slow_step, np.ones(64, np.float32))
        (run,) = mesh.last_step_timeline().actors[0].runs
        assert run.duration_s > 0.001


async def test_what_initializes_or_moves_arrays_is_not_lengthened():
    model, two = Flops(0.0), mlp(2)
    async with a_mesh(model, 2) as mesh, asyncio.timeout(30):
        step = mesh.distributed(TWO_STAGES)
        scaled = mesh.distributed(lambda params: jax.tree.map(lambda x: 2 * x, params))
        params, batch = two.init(0), two.batch(0, 2)
        await step.compile(params, batch)
        elsewhere = await mesh.run(scaled, params)
        asked, model.seconds = len(model.asked), HOUR_S
        await step.init(0, lambda: jax.tree.map(lambda x: jnp.asarray(x) + 1, params))
        future = await mesh.submit(step, elsewhere, batch)
        await future
        assert len(model.asked) == asked, "only steps are asked about"
        assert future.moves, "arrays were moved"


async def test_an_actor_of_several_devices_and_one_of_several_processes():
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x.T).sum()

    x = np.ones((8, 8), np.float32)
    for options in ({}, {"launcher": "local", "processes_per_actor": 2}):
        async with a_mesh(Flops(), 1, spmd_mesh={"data": 2}, **options) as mesh:
            distributed = mesh.distributed(step, in_shardings=jax.sharding.PartitionSpec("data"))
            for _ in range(2):
                assert_close(await (await mesh.run(distributed, x)), step(x))
                (run,) = mesh.last_step_timeline().actors[0].runs
                assert run.duration_s >= TASK_S - TOLERANCE_S


async def test_inline_actors_that_share_devices_wait_beside_each_other():
    """They compute one after the other, but the devices that the model describes are different ones."""
    async with a_mesh(Flops(0.05), 2, spmd_mesh={"data": 2}) as mesh:
        await mesh.run(mesh.distributed(TWO_STAGES), mlp(2).init(0), mlp(2).batch(0, 4))
        first, second = (actor.runs for actor in mesh.last_step_timeline().actors)
    assert any(max(a.start_s, b.start_s) + 0.001 < min(a.end_s, b.end_s) for a in first for b in second), (
        "no two tasks were under way at the same time"
    )


async def test_the_example_of_the_page_runs():
    timeline = await doc_code("planning.md")["time_of_step"](TWO_STAGES, *one_microbatch())
    assert all(run.duration_s >= 50e-6 for actor in timeline.actors for run in actor.runs)


async def test_a_long_modelled_task_is_no_stall():
    """While one actor seems to compute, no other counts as stuck, as with a computation that takes long."""
    for launcher in ("inline", "local"):
        async with a_mesh(LastStage(3.0), 2, launcher=launcher, progress_timeout_s=0.3) as mesh:
            *_, losses = await mesh.run(mesh.distributed(TWO_STAGES), *one_microbatch())
            assert_close(await losses, jax.jit(TWO_STAGES)(*one_microbatch())[2])
            assert mesh.last_step_timeline().duration_s >= 3


# ---------------------------------------------------------------- failures


async def test_a_successor_of_a_killed_actor_is_as_slow_and_the_numbers_are_the_same(caplog):
    async with nothing_left(caplog), a_mesh(Flops(0.05), launcher="local", max_restarts=2) as mesh:
        step, expected = mesh.distributed(STEP), jax.jit(STEP)(*arguments())
        await mesh.run(step, *arguments())
        pid = mesh.actors[1].pid
        running = asyncio.ensure_future(mesh.run(step, *arguments()))
        await asyncio.sleep(3.5 * 0.05)  # about when actor 1 waits in a task
        os.kill(pid, signal.SIGKILL)
        assert_close(await mesh.fetch(await running), expected)
        assert mesh.actors[1].pid != pid
        assert check_lengths(mesh.last_step_timeline(), 0.05) == 5 * MICROBATCHES


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_a_step_that_fails_while_a_task_waits_ends_at_once(launcher):
    model = LastStage()
    async with a_mesh(model, 2, launcher=launcher) as mesh:
        step = mesh.distributed(TWO_STAGES)
        compiled = await step.compile(*one_microbatch())
        assert max(work.flops for work in compiled.works) > 1500
        running = asyncio.ensure_future(mesh.run(step, *one_microbatch()))
        await asyncio.sleep(0.5)
        assert not running.done()
        began_s = time.monotonic()
        mesh._running()._actor_group.handles[0].kill()
        with pytest.raises(ActorDiedError):
            await running
        assert time.monotonic() - began_s < 10


async def test_a_mesh_closes_while_a_task_waits(caplog):
    for launcher in ("inline", "local"):
        async with nothing_left(caplog), a_mesh(LastStage(), 2, launcher=launcher) as mesh:
            step = mesh.distributed(TWO_STAGES)
            future = await mesh.submit(step, *one_microbatch())
            await asyncio.sleep(0.3)
            began_s = time.monotonic()
            await mesh.aclose()
            # The compute thread of an actor is waited for, for up to five seconds.
            assert time.monotonic() - began_s < 5
            with pytest.raises(MeshClosedError):
                await future


# ---------------------------------------------------------------- models that are wrong


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (-1.0, r"returned -1\.0; let it return a finite number of seconds, 0 or more, for every executable"),
        (math.nan, "returned nan; let it return"),
        (math.inf, "returned inf; let it return"),
        (True, "returned True; let it return"),
        (10**400, "returned 10000.*; let it return"),
        (SystemExit(3), "raised SystemExit: 3; let it return"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt: ; let it return"),
        (ValueError("a\n\x1b[31m"), r"raised ValueError: a\\n\\x1b\[31m; let it return"),
        (None, "returned None; let it return"),
        ("1", "returned '1'; let it return"),
        (
            KeyError("fwd"),
            r"raised KeyError: 'fwd'; let it return seconds for every executable of the step, ",
        ),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_a_model_without_an_answer_is_an_error_before_anything_is_loaded(answer, says, monkeypatch):
    class Model:
        broken = True

        def task_s(self, work: TaskWork) -> float:
            if not self.broken:
                return np.float32(0.001)
            if isinstance(answer, BaseException):
                raise answer
            return answer

    model = Model()
    async with a_mesh(model, 1) as mesh:
        step = mesh.distributed(lambda x: x + 1)
        with monkeypatch.context() as patch, pytest.raises(MeshError) as error:
            patch.setattr(mesh._controller, "load", None)
            await mesh.run(step, np.float32(1))
        said = r"step '<lambda>': device_model.task_s of '[^']+' \(1 FLOPs\) " + says
        assert re.match(said, str(error.value)), str(error.value)
        assert str(error.value).endswith("of the step, of which nothing has been loaded")
        assert error.value.__cause__ is (answer if isinstance(answer, BaseException) else None)
        model.broken = False
        assert await (await mesh.run(step, np.float32(1))) == 2
