"""What a user sees when something fails under a real mesh: the error, in time, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import faults
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from faulty_network import FaultyNetwork
from models import grads_step, mlp
from paths import ROOT
from resources import nothing_left

import jaxpp_async as jpp
from jaxpp_async.errors import (
    ActorDiedError,
    ActorError,
    ArrayError,
    LaunchError,
    MeshClosedError,
    RemoteError,
    StepAbortedError,
    TransferError,
)
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.launch.hosts import Settings
from jaxpp_async.launch.inline import InlineLauncher
from jaxpp_async.program.instructions import CONTROLLER
from jaxpp_async.testing import assert_close
from jaxpp_async.transport.memory import MemoryTransport

MODEL = mlp(2)
STEP = grads_step(MODEL, jpp.Std1F1B(2))
# From the event to the error, in seconds, as in `docs/failures.md`.
IDLE_DEATH_S, DEATH_S, OWN_END_S, EXCEPTION_S = 2.0, 3.0, 2.0, 2.0


def arguments() -> tuple[Any, Any]:
    return MODEL.init(0), MODEL.batch(0, 4)


@pytest.fixture(autouse=True)
async def warm(remote_mesh, caplog) -> AsyncIterator[None]:
    """What a first mesh opens for good (libraries, pools) is open before; what each test's mesh opens is gone
    after.

    Another mesh of this driver works all the while.
    """
    for launcher in ("inline", "local"):
        mesh = await remote_mesh(2, launcher=launcher)
    async with nothing_left(caplog):
        yield
        assert await (await mesh.run(mesh.distributed(_add), np.float32(1))) == 2


def _add(x: Any) -> Any:
    return x + 1


class Said:
    """What actors print, line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[str, asyncio.Event]] = []

    def __call__(self, line: str) -> None:
        self._loop.call_soon_threadsafe(self._take, line)

    def _take(self, line: str) -> None:
        self.lines.append(line)
        for text, event in self._waiting:
            if text in line:
                event.set()

    async def wait_for(self, text: str) -> None:
        self._waiting.append((text, event := asyncio.Event()))
        if not any(text in line for line in self.lines):
            async with asyncio.timeout(20):
                await event.wait()


@contextlib.asynccontextmanager
async def faulty_mesh(step: int, label: str, what: str) -> AsyncIterator[tuple[jpp.RemoteMesh, Said]]:
    """Two actors, of which the one that runs `label` does `what`."""
    said = Said()
    launcher, env = LocalLauncher(forward=said), faults.at(step, label, what)
    async with jpp.RemoteMesh(2, launcher=launcher, setup="faults:install", env=env) as mesh:
        yield mesh, said


async def check_over(mesh: jpp.RemoteMesh, step: Any, cause: ActorError) -> None:
    """Whatever is asked of a failed mesh is refused because of the first failure."""
    assert mesh.is_closed
    for ask in (mesh.run, mesh.submit):
        with pytest.raises(MeshClosedError) as refusal:
            await ask(step, *arguments())
        assert refusal.value.__cause__ is cause and str(cause).splitlines()[0] in str(refusal.value)


# ---------------------------------------------------------------- deaths


async def test_an_idle_actor_is_killed_and_another_mesh_works():
    async with jpp.RemoteMesh(2) as mesh:
        step = mesh.distributed(STEP)
        params, _, losses = await mesh.run(step, *arguments())
        victim = mesh.actors[1]
        os.kill(victim.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ActorDiedError) as error:
            while True:
                await mesh.run(step, *arguments())
        assert time.monotonic() - began < IDLE_DEATH_S
        where = (
            f"actor 1 (host {victim.host}, pid {victim.pid}) was killed by SIGKILL (possibly out of memory)"
        )
        assert str(error.value).startswith(where)
        assert (error.value.actor, error.value.host, error.value.pid) == (1, victim.host, victim.pid)
        assert [a.state for a in mesh.actors] == ["closed", "failed"]
        await check_over(mesh, step, error.value)
        for call in (losses, mesh.put(np.zeros(3)), mesh.run(step, params, arguments()[1])):
            with pytest.raises(MeshClosedError, match=r"has failed: actor 1 .* was killed by SIGKILL"):
                await call
    async with jpp.RemoteMesh(2) as mesh:
        _, _, losses = await mesh.run(mesh.distributed(STEP), *arguments())
        assert_close(await losses, jax.jit(STEP)(*arguments())[2])
        with pytest.raises(ArrayError, match="another mesh"):
            await mesh.run(mesh.distributed(STEP), params, arguments()[1])


@pytest.mark.parametrize("victim", [0, 1], ids=["who computes", "who waits"])
async def test_an_actor_is_killed_in_the_middle_of_a_step(victim):
    async with faulty_mesh(1, "fwd_bwd(stage 1, mb 0)", "hang") as (mesh, said):
        step = mesh.distributed(STEP)
        await mesh.run(step, *arguments())
        first, second = [await mesh.submit(step, *arguments()) for _ in range(2)]
        await said.wait_for("hanging")  # actor 0 waits for what actor 1 is to send
        os.kill(mesh.actors[1 - victim].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ActorDiedError, match=rf"actor {1 - victim} .*SIGKILL.* during step 1") as error:
            await first
        assert time.monotonic() - began < DEATH_S
        assert (error.value.actor, error.value.step) == (1 - victim, 1)
        with pytest.raises(StepAbortedError, match=rf"step 2 was aborted: actor {1 - victim}") as aborted:
            await second
        assert aborted.value.__cause__ is error.value
        for outputs in (first.outputs, second.outputs):
            with pytest.raises(ArrayError, match=r"its step failed: .*SIGKILL"):
                await outputs[2]
        await check_over(mesh, step, error.value)


async def test_an_actor_is_killed_while_it_sends_64_mib():
    def large(params, batch):
        def forward(x):
            x = jpp.pipeline_yield(jnp.sin(x @ params[0]))
            return jnp.sum(x @ params[1])

        return jpp.accumulate_grads(forward, jpp.GPipe(2))(batch)

    params, batch = (
        [np.ones((2, 4096), np.float32), np.ones((4096, 1), np.float32)],
        np.ones((1, 4096, 2), np.float32),
    )
    async with faulty_mesh(0, "", "die while sending") as (mesh, _):
        step = mesh.distributed(large)
        report = (await step.compile(params, batch)).report()
        assert [t.size_bytes for t in report.transfers] == [64 << 20]
        began = time.monotonic()
        with pytest.raises(ActorDiedError, match=r"actor 0 .*was killed by SIGKILL.* during step 0"):
            await mesh.run(step, params, batch)
        assert time.monotonic() - began < DEATH_S


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("exit", "exited with code 3 during step 1, .*last words"),
        ("crash", "was killed by SIGSEGV during step 1, .*Current thread .*in _crash"),
    ],
)
async def test_an_actor_ends_by_itself(what, said):
    async with faulty_mesh(1, "fwd_bwd(stage 1, mb 2)", what) as (mesh, _):
        step = mesh.distributed(STEP)
        await mesh.run(step, *arguments())
        began = time.monotonic()
        with pytest.raises(ActorDiedError, match=rf"(?s)actor 1 .*{said}") as error:
            await mesh.run(step, *arguments())
        assert time.monotonic() - began < OWN_END_S
        await check_over(mesh, step, error.value)


# ---------------------------------------------------------------- exceptions


async def test_an_executable_fails_on_an_actor():
    async with faulty_mesh(1, "fwd_bwd(stage 1, mb 2)", "raise") as (mesh, _):
        step = mesh.distributed(STEP)
        await mesh.run(step, *arguments())
        began = time.monotonic()
        with pytest.raises(RemoteError) as raised:
            await mesh.run(step, *arguments())
        assert time.monotonic() - began < EXCEPTION_S
        error, actor = raised.value, mesh.actors[1]
        assert (error.actor, error.host, error.pid, error.step) == (1, actor.host, actor.pid, 1)
        assert error.exception_type == "ValueError" and error.instruction is not None
        assert "fwd_bwd(stage 1, mb 2)" in error.instruction
        assert "in _raise" in error.remote_traceback and "in _raise" in str(error)
        assert str(error).startswith(f"actor 1 (host {actor.host}, pid {actor.pid}), step 1, ")
        assert "ValueError: this executable fails" in str(error).splitlines()[0]
        await check_over(mesh, step, error)


async def test_launches_that_fail(tmp_path):
    env = {"PYTHONPATH": faults.HERE}
    with pytest.raises(
        LaunchError, match=r"(?s)actor \d .*RuntimeError: this hook refuses.*in refuse"
    ) as error:
        async with jpp.RemoteMesh(2, setup="faults:refuse", env=env):
            pass
    assert error.value.actor in (0, 1) and error.value.pid
    absent = LocalLauncher(settings=Settings(python=str(tmp_path / "absent")))
    with pytest.raises(LaunchError, match=r"actor \d could not be started: .*No such file"):
        async with jpp.RemoteMesh(2, launcher=absent):
            pass


# ---------------------------------------------------------------- cancellation


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_a_cancelled_run_leaves_the_mesh_usable(remote_mesh, launcher):
    mesh = await remote_mesh(2, launcher=launcher)
    step, (params, batch) = mesh.distributed(STEP), arguments()
    compiling = asyncio.create_task(mesh.run(step, params, batch))
    while not mesh._running()._actor_group.links[0].open:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    compiling.cancel()  # while actors compile
    with pytest.raises(asyncio.CancelledError):
        await compiling
    for _ in range(3):
        running = asyncio.create_task(mesh.run(step, params, batch))
        while not mesh._running()._under_way:  # noqa: ASYNC110 - the moment is what counts
            await asyncio.sleep(0)
        running.cancel()  # while they compute
        with pytest.raises(asyncio.CancelledError):
            await running
    _, _, losses = await mesh.run(step, params, batch)
    assert_close(await losses, jax.jit(STEP)(params, batch)[2])
    assert not mesh._running()._under_way


DRIVER = """
import asyncio
import faults
from tests.integration import test_failures as t
import jaxpp_async as jpp

async def main():
    env = faults.at(1, "fwd_bwd(stage 1, mb 0)", "hang")
    async with jpp.RemoteMesh(2, setup="faults:install", env=env) as mesh:
        print(*(a.pid for a in mesh.actors), flush=True)
        step = mesh.distributed(t.STEP)
        params, batch = t.arguments()
        while True:
            params, _, losses = await mesh.run(step, params, batch)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_ctrl_c_in_the_middle_of_a_step():
    driver = subprocess.Popen(
        [sys.executable, "-W", "default::ResourceWarning", "-c", DRIVER],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([faults.HERE, str(ROOT)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    too_late = threading.Timer(60, driver.kill)
    too_late.start()
    try:
        assert driver.stdout is not None and driver.stderr is not None
        actors = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        before: list[str] = []
        while "hanging" not in "".join(before):
            before.append(driver.stderr.readline())
            assert before[-1], "".join(before)
        driver.send_signal(signal.SIGINT)
        began = time.monotonic()
        said = driver.communicate()[1]
        assert time.monotonic() - began < 10, time.monotonic() - began
    finally:
        too_late.cancel()
        driver.kill()
    assert len(actors) == 2 and not any(actor.is_running() for actor in actors)
    assert driver.returncode == -signal.SIGINT and said.rstrip().endswith("KeyboardInterrupt")
    for complaint in ("never retrieved", "was destroyed", "Warning", "Fatal"):
        assert complaint not in said and not any(complaint in line for line in before)


@pytest.mark.parametrize("sender", [CONTROLLER, 0])
async def test_host_values_that_get_lost_on_their_way(sender):
    """No step waits for them: their transfers have a deadline of their own."""
    network = FaultyNetwork()
    launcher = InlineLauncher(make_transport=lambda kind, peer: MemoryTransport(network, peer))
    large = np.zeros(1 << 16, np.float32)
    async with jpp.RemoteMesh(1, launcher=launcher, progress_timeout_s=0.5) as mesh:
        array = await mesh.distributed(lambda x: x + 1)(large)
        network.drop = lambda source, to, tag, size: source == sender
        broken = r"262,144 bytes between the controller and actor 0 .* on their way since [1-9] s: the link"
        async with asyncio.timeout(5):
            with pytest.raises(TransferError, match=broken):
                await (mesh.put(large, like=array) if sender == CONTROLLER else mesh.fetch(array))
