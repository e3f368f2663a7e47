"""Hung actors and stuck steps under real meshes: cases 4, 5, 9 (without namespaces) and 21 of the table of
failures.

They take ten seconds each by design, most of it waiting, so they run beside each other: every test awaits its
    own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import faults
import jax
import pytest
from models import grads_step, mlp
from resources import differences, held

import jaxpp_async as jpp
from jaxpp_async.errors import ActorUnresponsiveError, TransferError
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.testing import assert_close
from tests.integration.test_failures import Said

MODEL = mlp(2)
STEP = grads_step(MODEL, jpp.Std1F1B(2))
LABEL = "fwd_bwd(stage 1, mb 0)"

HOUR_S = 3600.0


@functools.cache
def expected() -> Any:
    return jax.jit(STEP)(*arguments())[2]


def arguments() -> tuple[Any, Any]:
    return MODEL.init(0), MODEL.batch(0, 4)


class Records(logging.Handler):
    """What the package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.ready = asyncio.Barrier(len(CASES))
        self._more = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {record.getMessage()}")
        self._more.set()

    async def more(self) -> None:
        """Wait for the next one."""
        self._more.clear()
        await self._more.wait()

    def about(self, pid: int) -> list[str]:
        return [text for text in self.said if f"pid {pid})" in text and "heard" in text]


@contextlib.asynccontextmanager
async def running(what: str, records: Records) -> AsyncIterator[tuple[jpp.RemoteMesh, Any, Said]]:
    """A mesh that has run step 0; from step 1 on, `what` goes wrong."""
    said = Said()
    launcher, env = LocalLauncher(forward=said), faults.at(1, LABEL, what)
    async with jpp.RemoteMesh(2, launcher=launcher, setup="faults:install", env=env) as mesh:
        step = mesh.distributed(STEP)
        await mesh.run(step, *arguments())
        await records.ready.wait()  # tracing and launching hold up the event loop, and with it all judgements
        yield mesh, step, said


async def stopped(records: Records) -> None:
    """Case 4."""
    async with running("hang", records) as (mesh, step, said):
        future = await mesh.submit(step, *arguments())
        await said.wait_for("hanging")
        await asyncio.sleep(0.6)  # a beat has told so
        actor = mesh.actors[1]
        os.kill(actor.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(ActorUnresponsiveError) as caught:
            await future
        assert 9 < time.monotonic() - began < 12
        error = caught.value
        assert (error.actor, error.host, error.pid, error.step) == (1, actor.host, actor.pid, 1)
        where = f"actor 1 (host {actor.host}, pid {actor.pid})"
        assert str(error).startswith(f"{where} has not been heard of for 10.") and "SIGSTOP" in str(error)
        assert (
            error.instruction is not None and LABEL in error.instruction and "of step 1" in error.instruction
        )
        assert [a.state for a in mesh.actors] == ["closed", "failed"]
        # suspect, died
        assert [text.partition(" ")[0] for text in records.about(actor.pid)] == ["WARNING", "ERROR"]
        began = time.monotonic()
    assert time.monotonic() - began < 5  # what is stopped does not hold up the end


async def holds_the_lock(records: Records) -> None:
    """Case 5, and case 21 in the driver."""
    async with running("hold", records) as (mesh, step, _):
        with clock_that_jumps():
            _, _, losses = await mesh.run(step, *arguments())
            assert_close(await losses, expected())
        pid = mesh.actors[1].pid
        async with asyncio.timeout(5):
            while len(records.about(pid)) < 2:
                await records.more()
        suspect, recovered = records.about(pid)
        assert (
            "has not been heard of for 3." in suspect
            and LABEL in suspect
            and "given up after 10 s" in suspect
        )
        assert "is heard again, after" in recovered
        assert records.about(mesh.actors[0].pid) == []
        await mesh.run(step, *arguments())


async def loses_what_is_sent(records: Records) -> None:
    """A link that takes data and does not bring it, while both ends live."""
    async with running("lose", records) as (mesh, step, _):
        began = time.monotonic()
        with pytest.raises(TransferError) as caught:
            await mesh.run(step, *arguments())
        assert 9 < time.monotonic() - began < 15
        error, text = caught.value, str(caught.value)
        assert error.step == 1 and error.actor == 1 and error.pid == mesh.actors[1].pid
        assert text.startswith("step 1 has not gone on for 10.")
        assert "is on its way from actor 0 to actor 1, both of which live" in text.splitlines()[0]
        assert "Who waits for whom:" in text and "which has sent it" in text
        for actor in mesh.actors:
            assert f"\n  actor {actor.id} (host {actor.host}, pid {actor.pid}): step 1, #" in text


CASES: dict[str, Callable[[Records], Any]] = {
    f.__name__: f for f in (stopped, holds_the_lock, loses_what_is_sent)
}


@contextlib.contextmanager
def clock_that_jumps() -> Any:
    """Every look at the wall clock finds it an hour before or behind."""
    real, ways = time.time, itertools.cycle((HOUR_S, -HOUR_S))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + next(ways))
        yield


@pytest.fixture(scope="module")
async def cases(remote_mesh) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    for launcher in ("inline", "local"):  # what a first mesh opens for good
        await remote_mesh(2, launcher=launcher)
    expected()
    before, records = held(), Records()
    logging.getLogger("jaxpp_async").addHandler(records)
    tasks = {name: asyncio.create_task(case(records), name=name) for name, case in CASES.items()}
    yield tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    logging.getLogger("jaxpp_async").removeHandler(records)
    assert not differences(before, held())


@pytest.mark.parametrize("name", CASES)
async def test_hung(cases, name):
    await cases[name]
