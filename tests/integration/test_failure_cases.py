"""Rows of `docs/failures.md` that `integration/test_failures.py` has not: waiting senders, memory, wrong
sizes, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import faults
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from memory_limit import memory_limit
from resources import inspect_actors

import jaxpp_async as jpp
from jaxpp_async.actors import step_run
from jaxpp_async.errors import (
    ActorDiedError,
    ActorError,
    MeshClosedError,
    ProtocolError,
    RemoteError,
    ScheduleError,
)
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.testing import assert_close
from tests.integration import test_failures
from tests.integration.test_failures import Said

MIB = 1 << 20
warm = test_failures.warm


def wide(schedule: Any, *, train: bool) -> Any:
    """A step that sends a MiB from actor 0 to actor 1 in each microbatch."""

    def loss_fn(params, x):
        return jnp.sum(jnp.cos(jpp.pipeline_yield(jnp.sin(x @ params[0])) @ params[1]))

    def step(params, batch):
        each = (lambda x: jax.grad(loss_fn)(params, x)) if train else (lambda x: loss_fn(params, x))
        return jpp.accumulate_grads(each, schedule)(batch)

    return step


def wide_arguments(num_microbatches: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = [rng.normal(size=shape).astype(np.float32) for shape in ((2, 4096), (4096, 1))]
    return params, rng.normal(size=(num_microbatches, 64, 2)).astype(np.float32)


async def check_over(mesh: jpp.RemoteMesh, step: Any, args: Any, cause: ActorError) -> None:
    """Whatever is asked of a failed mesh is refused because of the first failure."""
    with pytest.raises(MeshClosedError) as refusal:
        await mesh.run(step, *args)
    assert refusal.value.__cause__ is cause and str(cause).splitlines()[0] in str(refusal.value)


# ---------------------------------------------------------------- deaths


async def test_the_receiver_of_a_waiting_sender_is_killed():
    """Case 2, the other way: actor 0 has sent all it has, which actor 1 does not take."""
    said, env = Said(), faults.at(1, "fwd(stage 1, mb 0)", "hang")
    launcher = LocalLauncher(forward=said)
    async with jpp.RemoteMesh(2, launcher=launcher, setup="faults:install", env=env) as mesh:
        step, args = mesh.distributed(wide(jpp.GPipe(2), train=False)), wide_arguments(4)
        await mesh.run(step, *args)
        future = await mesh.submit(step, *args)
        await said.wait_for("hanging")
        os.kill(mesh.actors[1].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ActorDiedError, match=r"actor 1 .*SIGKILL.* during step 1") as error:
            await future
        assert time.monotonic() - began < 3
        assert (error.value.actor, error.value.step) == (1, 1)
        await check_over(mesh, step, args, error.value)


# ---------------------------------------------------------------- memory


X = np.ones(3, np.float32)


def add(x):
    return x + 1


@contextlib.asynccontextmanager
async def one_faulty_actor(what: str) -> AsyncIterator[tuple[jpp.RemoteMesh, Any]]:
    """A mesh of one actor on which the second `add` goes wrong, and that step."""
    probe = jpp.RemoteMesh(1, launcher="inline")
    async with probe:
        program = str((await probe.distributed(add).compile(X)).as_text())
    (label,) = re.findall(r'run +"([^"]*)"', program)
    async with jpp.RemoteMesh(1, setup="faults:install", env=faults.at(1, label, what)) as mesh:
        step = mesh.distributed(add)
        await mesh.run(step, X)
        yield mesh, step


async def test_xla_finds_no_memory():
    """Case 8 where the allocator says no: the actor lives, the step has failed."""
    async with one_faulty_actor("exhaust") as (mesh, step):
        began = time.monotonic()
        with pytest.raises(RemoteError) as error:
            await mesh.run(step, X)
        assert time.monotonic() - began < 3
        first, *rest = str(error.value).splitlines()
        assert re.match(
            r"actor 0 .*, step 1, .*RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes", first
        )
        assert any("the actor ran out of memory" in line for line in rest)
        await check_over(mesh, step, [X], error.value)


async def test_the_kernel_ends_an_actor_at_its_memory_limit():
    """Case 8 where the kernel says no."""
    async with one_faulty_actor("fill") as (mesh, step):
        with memory_limit(mesh.actors[0].pid, 128 * MIB):
            began = time.monotonic()
            with pytest.raises(ActorDiedError) as error:
                await mesh.run(step, X)
            assert time.monotonic() - began < 3
        assert (
            "was killed by SIGKILL (possibly out of memory) during step 1" in str(error.value).splitlines()[0]
        )
        await check_over(mesh, step, [X], error.value)


# ---------------------------------------------------------------- transfers


async def test_a_transfer_of_the_wrong_size(monkeypatch):
    """Case 13. Between processes, over UCX:
    `transport/ucx/test_transport.py::test_wrong_size_from_another_process`."""
    memories = step_run.send_memories
    monkeypatch.setattr(
        step_run,
        "send_memories",
        lambda *args: [m._replace(size_bytes=m.size_bytes // 2) for m in memories(*args)],
    )
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        step, args = mesh.distributed(wide(jpp.GPipe(2), train=False)), wide_arguments(1)
        await step.compile(*args)
        began = time.monotonic()
        with pytest.raises(ProtocolError, match=rf"expected {MIB} bytes, got {MIB // 2}") as error:
            await mesh.run(step, *args)
        assert time.monotonic() - began < 2
        assert (error.value.actor, error.value.step) == (1, 0) and "recv" in (error.value.instruction or "")
        await check_over(mesh, step, args, error.value)


async def test_a_slow_reader_is_waited_for_in_bounded_memory():
    """Case 11."""
    num_microbatches, env = 24, faults.at(0, "fwd_bwd(stage 1", "slow")
    async with jpp.RemoteMesh(2, setup="faults:install", env=env) as mesh:
        step, args = mesh.distributed(wide(jpp.Std1F1B(2), train=True)), wide_arguments(num_microbatches)
        compiled = await step.compile(*args)
        assert MIB in [t.size_bytes for t in compiled.report().transfers]
        await mesh.run(step, *args)
        actors = [psutil.Process(a.pid) for a in mesh.actors]
        before = [p.memory_info().rss for p in actors]
        running, most = asyncio.ensure_future(mesh.run(step, *args)), list(before)
        while not running.done():
            await asyncio.wait([running], timeout=0.01)
            most = [max(m, p.memory_info().rss) for m, p in zip(most, actors, strict=True)]
        grads = await running
        grown = max(m - b for m, b in zip(most, before, strict=True))
        assert grown < num_microbatches * MIB / 2, grown  # it does not take as much as is under way in a step
        assert_close(await mesh.fetch(grads), jax.jit(wide(None, train=True))(*args))


# ---------------------------------------------------------------- before anything runs


async def test_a_schedule_that_deadlocks_stops_before_anything_runs(remote_mesh):
    """Case 12."""
    mesh = await remote_mesh(2, launcher="inline")
    before = await inspect_actors(mesh._running())
    F, B = (lambda i, s: jpp.Task(i, "fwd", s)), (lambda i, s: jpp.Task(i, "bwd", s))
    crossed = [[F(0, 0), B(0, 0), F(1, 0), B(1, 0)], [F(1, 1), B(1, 1), F(0, 1), B(0, 1)]]
    with pytest.raises(
        ScheduleError, match=r"(?s)deadlocks: 2 actors wait for one another.*actor 0.*actor 1"
    ):
        await mesh.run(mesh.distributed(wide(crossed, train=True)), *wide_arguments(2))
    after = await inspect_actors(mesh._running())
    assert [n["compilations"] for n in after.values()] == [n["compilations"] for n in before.values()]
