"""`max_restarts`: actors are killed at every kind of moment; the numbers are those of an undisturbed run, bit
for bit.

Inline actors die when their task is cancelled: same controller, same protocol, no process to start. One test
    has
processes, UCX and SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faulty_network import FaultyNetwork
from models import grads_step, mlp
from resources import everything, inspect_actors, nothing_left
from waiting import until

import jaxpp_async as jpp
from jaxpp_async.actors import host_values
from jaxpp_async.controller import failure_policy, recovery
from jaxpp_async.controller.recovery import FailureFound, State
from jaxpp_async.controller.requests import ActorLink, PendingRequest
from jaxpp_async.errors import (
    ActorDiedError,
    MeshClosedError,
    MeshError,
    RemoteError,
    RestartBudgetExceeded,
    StateLostError,
    TransferError,
)
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.launch.inline import InlineLauncher
from jaxpp_async.protocol.messages import ReceiveReplica, ReplicaTaken, SendReplica, Step
from jaxpp_async.protocol.task_group import awake_timeout
from jaxpp_async.storage import tensor_files
from jaxpp_async.transport.base import COPY_CHANNEL, SEQUENCE_BITS
from jaxpp_async.transport.memory import MemoryTransport

pytestmark = pytest.mark.filterwarnings("error")

MODEL = mlp(2)
BATCHES = [MODEL.batch(seed, 4) for seed in range(8)]
RESTART_S = 30.0
TURNS = (0, 1, 2, 3, 5, 8, 13, 21)
"""Turns of the event loop between the start of an operation and the death: all of it lies within the first
dozens."""


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    params, count = state
    params, _, losses = grads_step(MODEL, jpp.Std1F1B(2))(params, batch)
    return (params, count + 1), losses


def start() -> tuple[Any, Any]:
    return MODEL.init(0), np.int32(0)


@contextlib.asynccontextmanager
async def a_mesh(num_actors: int = 2, **options: Any) -> AsyncIterator[jpp.RemoteMesh]:
    options = {"launcher": "inline", "max_restarts": 1000, "backup_every": 3} | options
    async with jpp.RemoteMesh(num_actors, **options) as mesh:
        yield mesh


@pytest.fixture(scope="module")
async def mesh() -> AsyncIterator[jpp.RemoteMesh]:
    async with a_mesh() as mesh:
        yield mesh


@pytest.fixture(scope="module")
async def undisturbed(remote_mesh) -> list[Any]:
    """Losses of each step, then the state."""
    mesh = await remote_mesh(2, launcher="inline")
    return await train(mesh, mesh.distributed(train_step, donate_argnums=0))


async def train(
    mesh: jpp.RemoteMesh,
    step: Any,
    before: Callable[[int], Awaitable[None]] | None = None,
    model: Any = MODEL,
) -> list[Any]:
    state, losses = (model.init(0), np.int32(0)), []
    for i, batch in enumerate([model.batch(seed, 4) for seed in range(len(BATCHES))]):
        if before is not None:
            await before(i)
        async with asyncio.timeout(RESTART_S):
            state, loss = await mesh.run(step, state, batch)
            losses.append(await loss)
    return [*losses, await mesh.fetch(state)]


def assert_same(found: Any, expected: Any) -> None:
    """Bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def kill(mesh: jpp.RemoteMesh, *actors: int) -> None:
    for actor in actors:
        mesh._running()._actor_group.handles[actor].kill()


async def killing(mesh: jpp.RemoteMesh, actor: int, turns: int, work: Awaitable[Any]) -> Any:
    """The result of `work`, `actor` being killed so many turns of the event loop after its start."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    kill(mesh, actor)
    return await task


async def killing_one_of_all(mesh: jpp.RemoteMesh, actor: int, turns: int, work: Awaitable[Any]) -> Any:
    """The same, until it is replaced too, which may be after the result: if another one died meanwhile, the
    state would be lost."""
    controller: Any = mesh._running()
    before = controller._actor_group.handles[actor]
    result = await killing(mesh, actor, turns, work)
    async with asyncio.timeout(RESTART_S):
        await until(
            lambda: (
                controller._actor_group.handles[actor] is not before
                and not controller._recovery.is_restarting
            ),
            every_s=0,
        )
    return result


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("actor", [0, 1])
async def test_killed_in_the_middle_of_steps(mesh, undisturbed, actor):
    step = mesh.distributed(train_step, donate_argnums=0)
    state = start()
    for i, batch in enumerate(BATCHES):
        state, losses = await killing(mesh, actor, TURNS[i], mesh.run(step, state, batch))
        assert_same(await losses, undisturbed[i])
    assert_same(await mesh.fetch(state), undisturbed[-1])


async def test_killed_between_steps_that_were_submitted_ahead(mesh, undisturbed):
    step = mesh.distributed(train_step, donate_argnums=0)
    state, futures, fetches = start(), [], []
    for i, batch in enumerate(BATCHES):
        futures.append(await mesh.submit(step, state, batch))
        state, loss = futures[-1].outputs
        # before the next step is given it
        fetches.append(asyncio.ensure_future(mesh.fetch([state[1], loss])))
        await asyncio.sleep(0)
        if i in (1, 4):
            kill(mesh, i % 2)
    await futures[-1]
    for i, fetch in enumerate(fetches):
        count, loss = await fetch
        assert count == i + 1
        assert_same(loss, undisturbed[i])
    assert_same(await mesh.fetch(state), undisturbed[-1])


@pytest.mark.parametrize("victim", [0, 1])
async def test_what_is_fetched_of_steps_that_a_death_kept_from_starting(undisturbed, victim):
    """The death is not noticed yet: the other actor only knows that its step failed, or was not begun."""
    async with a_mesh(max_restarts=100, backup_every=2) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        await mesh.run(step, start(), BATCHES[0])
        for turns in range(4):
            state, fetches = start(), []
            kill(mesh, victim)
            for _ in range(turns):
                await asyncio.sleep(0)
            for batch in BATCHES[:3]:
                future = await mesh.submit(step, state, batch)
                state, losses = future.outputs
                fetches.append(asyncio.ensure_future(mesh.fetch([losses, state[1]])))
                await asyncio.sleep(0)
            async with asyncio.timeout(RESTART_S):
                for i, (losses, count) in enumerate(await asyncio.gather(*fetches)):
                    assert_same(losses, undisturbed[i])
                    assert count == i + 1
            await settled(mesh)


async def test_every_other_operation_goes_on(mesh, undisturbed, tmp_path):
    step = mesh.distributed(train_step, donate_argnums=0)
    state, _ = await mesh.run(step, start(), BATCHES[0])
    large = np.arange(1 << 16, dtype=np.float32)  # takes the data plane
    for actor, turns in ((0, 0), (1, 2), (1, 6), (0, 12)):
        one = await killing(mesh, actor, turns, mesh.put([large, np.float32(3)], like=[state[1], state[1]]))
        np.testing.assert_array_equal((await killing(mesh, actor, turns, mesh.fetch(one)))[0], large)
        await killing(mesh, actor, turns, mesh.save(tmp_path / "saved", state))
        back = await killing(mesh, actor, turns, mesh.restore(tmp_path / "saved", ((step, 0))))
        assert_same(await mesh.fetch(back), await mesh.fetch(state))
        made = await killing(mesh, actor, turns, step.init(0, lambda: jax.tree.map(jnp.asarray, start())))
        assert_same(await mesh.fetch(made), start())
        other = mesh.distributed(lambda x, scale=float(turns + actor): x * scale)
        np.testing.assert_array_equal(
            await (await killing(mesh, actor, turns, other(large))), large * (turns + actor)
        )


async def test_a_copy_asks_for_nothing_more_once_a_restart_begins(undisturbed, monkeypatch, caplog):
    """What it asked would fail with the abort, and count as a failure of its own."""
    copied: list[Any] = []
    asked: list[Any] = []
    on_reply, send = PendingRequest.on_reply, ActorLink.send

    def reply(self: PendingRequest, link: ActorLink, message: Any) -> None:
        on_reply(self, link, message)
        copied.extend([message] if type(message) is ReplicaTaken else [])
        if len(copied) == 2 and message is copied[1]:  # the last word that the first copy waits for
            mesh._running()._recovery_driver.handle(FailureFound(ActorDiedError("made up", actor=1)))

    def ask(self: ActorLink, request: Any, encoded: Any = None) -> None:
        asked.extend([request.message] if isinstance(request.message, ReceiveReplica | SendReplica) else [])
        send(self, request, encoded)

    monkeypatch.setattr(PendingRequest, "on_reply", reply)
    monkeypatch.setattr(ActorLink, "send", ask)
    async with a_mesh(max_restarts=1, backup_every=1) as mesh:
        before = mesh._running()._actor_group.epoch
        assert_same(await train(mesh, mesh.distributed(train_step, donate_argnums=0)), undisturbed)
        await until(lambda: asked, every_s=0)
    assert all(message.epoch > before for message in asked)
    assert sum("restarting because" in record.message for record in caplog.records) == 1


async def test_what_is_printed_is_printed_once(mesh, capsys):
    def noisy(batch):
        def microbatch(mb):
            jax.debug.print("saw {}", mb.sum())
            return jpp.pipeline_yield(mb).sum()

        return jpp.accumulate_grads(lambda mb: (jnp.zeros(()), microbatch(mb)), jpp.GPipe(2))(batch)

    step = mesh.distributed(noisy)
    for i in range(6):
        await killing_one_of_all(mesh, i % 2, TURNS[i], mesh.run(step, np.full((2, 3), i, np.float32)))
    said = capsys.readouterr().out.split("\n")
    assert [line for line in said if line] == [f"saw {3.0 * i}" for i in range(6) for _ in range(2)]


@pytest.mark.parametrize(("num_actors", "spmd"), [(1, {}), (2, {"data": 2})])
async def test_other_meshes(num_actors, spmd):
    """One actor has no peer: the controller holds its replicas. Shards go back where they were."""
    model = mlp(num_actors)

    def sgd(params, batch):
        return grads_step(model, jpp.Std1F1B(num_actors))(params, batch)[::2]

    results = []
    for dead in (None, 0):
        async with a_mesh(num_actors, spmd_mesh=spmd) as mesh:
            step = mesh.distributed(sgd, donate_argnums=0)
            params, losses = model.init(0), None
            for i in range(5):
                if i == 3 and dead is not None:
                    kill(mesh, dead)
                params, losses = await mesh.run(step, params, model.batch(i, 4))
            results.append(await mesh.fetch((params, losses)))
            restarts: Any = mesh._running()._recovery
            assert len(restarts._budget._times) == (dead is not None)
    assert_same(*results)


async def test_nothing_is_left_of_a_restart(mesh, undisturbed):
    step = mesh.distributed(train_step, donate_argnums=0)
    await train(mesh, step)
    before = await settled(mesh)
    await train(mesh, step, lambda i: _killed_at(mesh, i, 4))
    assert await settled(mesh) == before


async def settled(mesh: jpp.RemoteMesh) -> dict[str, Any]:
    """What is held, once the last replica of the state is complete."""
    await mesh._running()._recovery_driver._no_replica_in_making.wait()
    gc.collect()
    found = await everything(mesh)
    # Inline actors share one process: JAX's own count has what the test itself and the copies hold.
    return {
        k: v
        for k, v in found.items()
        if "live_" not in k and k != "driver's arrays" and "compilations" not in k
    }


async def _killed_at(mesh: jpp.RemoteMesh, i: int, when: int) -> None:
    if i == when:
        kill(mesh, 1)


# ---------------------------------------------------------------- failures of failures


async def test_a_second_death_while_the_first_is_mended(undisturbed):
    async with a_mesh() as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        state = start()
        for i, batch in enumerate(BATCHES):
            run = asyncio.ensure_future(mesh.run(step, state, batch))
            await asyncio.sleep(0)
            if i in (2, 5):
                kill(mesh, 0)
                for _ in range(TURNS[i]):
                    await asyncio.sleep(0)
                # its successor is being started
                await until(lambda: mesh._running()._recovery.state is State.RENEWING, every_s=0)
                kill(mesh, 0)
            state, losses = await run
            assert_same(await losses, undisturbed[i])


async def test_a_transfer_that_a_restart_aborts_is_no_further_failure(monkeypatch, undisturbed):
    """A copy of the state was being made: its end of the survivor fails while the restart is under way."""
    monkeypatch.setattr(failure_policy, "GRACE_S", 0.0)
    async with a_mesh(max_restarts=1) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        state = start()
        for i, batch in enumerate(BATCHES[:3]):
            run = asyncio.ensure_future(mesh.run(step, state, batch))
            await asyncio.sleep(0)
            if i == 1:
                kill(mesh, 0)
                await until(lambda: mesh._running()._recovery.state is State.RENEWING, every_s=0)
                mesh._running()._on_transfer_error(TransferError("it was aborted", actor=1))
            state, losses = await run
            assert_same(await losses, undisturbed[i])


async def test_neighbours_die_one_after_the_other(undisturbed):
    """Each holds the other's copy, and no new one is taken in between."""
    async with a_mesh(backup_every=1000) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)

        async def before(i: int) -> None:
            if i == 1:
                await settled(mesh)
            elif i > 2:
                kill(mesh, i % 2)

        assert_same(await train(mesh, step, before), undisturbed)


async def test_a_death_before_all_are_connected_ends_the_launch(caplog):
    class Dying(InlineLauncher):
        # the controller's own: its actors are up, and not yet connected
        async def start(self, spec, adopt):
            self.latest = await super().start(spec, adopt)
            return self.latest

        def make_transport(self, kind, network):
            self.latest.kill()
            return super().make_transport(kind, network)

    async with nothing_left(caplog), asyncio.timeout(20):
        with pytest.raises(ActorDiedError, match="actor 1"):
            await a_mesh(launcher=Dying()).__aenter__()


async def test_a_link_that_stays_broken_counts(monkeypatch):
    """A living actor that cannot connect anew is a failure like another, however often it is the same one."""
    async with a_mesh(max_restarts=3) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        state, _ = await mesh.run(step, start(), BATCHES[0])

        async def connect(self: Any, peer: int, address: bytes) -> None:
            raise TransferError("no route to host")

        monkeypatch.setattr(MemoryTransport, "connect", connect)
        monkeypatch.setattr(recovery, "GRACE_S", 0.01)
        monkeypatch.setattr(failure_policy, "GRACE_S", 0.01)
        kill(mesh, 1)
        async with asyncio.timeout(20):
            with pytest.raises(
                RestartBudgetExceeded, match=r"max_restarts=3 allows 3 .*no route to host.*checkpoint"
            ):
                await mesh.run(step, state, BATCHES[1])


async def test_copies_are_taken_between_saves_that_follow_each_other(mesh, tmp_path):
    step, state = mesh.distributed(train_step, donate_argnums=0), start()
    replicas: Any = mesh._running()._recovery.replicas
    state, _ = await mesh.run(step, state, BATCHES[0])
    await settled(mesh)
    before, saving = replicas.whole.generation, None
    for batch in BATCHES[1:]:
        saving = await mesh.save(tmp_path / "saved", state, wait=False)
        state, _ = await mesh.run(step, state, batch)
    assert saving is not None
    await saving
    await settled(mesh)
    assert replicas.whole.generation > before
    remembered = mesh._running()._recovery.history.needed()
    assert sum(isinstance(sent.message, Step) for sent in remembered) < 2 * len(BATCHES)


async def test_what_is_restored_beside_a_save_does_not_need_its_files_later(tmp_path, monkeypatch):
    async with a_mesh(backup_every=1000) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        state, _ = await mesh.run(step, start(), BATCHES[0])
        await mesh.save(tmp_path / "one", state)
        write, go_on = tensor_files.write, threading.Event()
        monkeypatch.setattr(tensor_files, "write", lambda *args: go_on.wait(10) and write(*args))
        saving = await mesh.save(tmp_path / "two", state, wait=False)
        restoring = asyncio.ensure_future(mesh.restore(tmp_path / "one", ((step, 0))))
        await until(lambda: mesh._running()._recovery.history.needs_files, every_s=0)
        go_on.set()
        back = await restoring
        await saving
        shutil.rmtree(tmp_path / "one")
        kill(mesh, 1)
        assert_same(await mesh.fetch(back), await mesh.fetch(state))


async def test_a_copy_that_lacks_an_array_is_none(monkeypatch, caplog):
    refused, real = [], host_values.fetch_shards

    def fetch(array: Any, layout: Any) -> Any:
        if array.ndim == 2 and not refused:
            refused.append(array)
            raise MemoryError("no host memory")
        return real(array, layout)

    async with a_mesh(backup_every=1000) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        state, _ = await mesh.run(step, start(), BATCHES[0])
        await settled(mesh)
        driver: Any = mesh._running()._recovery_driver
        before = driver.recovery.replicas.whole
        monkeypatch.setattr(host_values, "fetch_shards", fetch)
        await driver.make_replica()
        assert (
            driver.recovery.replicas.whole is before
            and "no replica of the state could be made" in caplog.text
        )
        kill(mesh, 1)
        state, _ = await mesh.run(step, state, BATCHES[1])


async def test_a_disk_that_hangs_holds_no_restart_up(tmp_path, monkeypatch, undisturbed):
    """The disk of an actor that lives: a thread of a process that dies would die with it, but not inline."""
    real, go_on = tensor_files.write, threading.Event()

    def write(path: str, *args: Any) -> Any:
        if "actor-0" in path:
            go_on.wait(10)
        return real(path, *args)

    monkeypatch.setattr(tensor_files, "write", write)
    async with a_mesh() as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        state, _ = await mesh.run(step, start(), BATCHES[0])
        saving = await mesh.save(tmp_path / "saved", state, wait=False)
        await asyncio.sleep(0.05)
        kill(mesh, 1)
        async with asyncio.timeout(5):
            state, losses = await mesh.run(step, state, BATCHES[1])
            assert_same(await losses, undisturbed[1])
        go_on.set()
        await saving
        back = await mesh.restore(tmp_path / "saved", ((step, 0)))
        assert_same((await mesh.fetch(back))[1], np.int32(1))


async def test_time_in_which_the_driver_was_blocked_counts_for_nobody():
    """What came meanwhile is heard before the time is over."""
    loop = asyncio.get_running_loop()
    late = loop.create_future()
    answer = threading.Timer(0.1, lambda: loop.call_soon_threadsafe(late.set_result, "here"))
    async with awake_timeout(0.7):
        await asyncio.sleep(0)
        answer.start()
        time.sleep(1.5)  # noqa: ASYNC251 - that is the point
        assert await late == "here"
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.1):
            await asyncio.sleep(10)


@pytest.mark.parametrize("dies", [False, True], ids=["in training", "in a restart"])
async def test_copies_that_do_not_arrive(undisturbed, dies):
    """A link that swallows them is found, and what they are needed for does not wait for ever."""
    network = FaultyNetwork()
    launcher = InlineLauncher(make_transport=lambda kind, peer: MemoryTransport(network, peer))
    swallowed: list[int] = []

    def swallow(source: int, to: int, tag: int, size: int) -> bool:
        is_copy = tag >> SEQUENCE_BITS & 0xFF == COPY_CHANNEL
        swallowed.extend([tag] * is_copy)
        return is_copy and len(swallowed) < 2

    async with a_mesh(launcher=launcher, progress_timeout_s=0.3) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)

        async def before(i: int) -> None:
            if i == 2:
                await settled(mesh)
                network.eager_bytes, network.drop = 0, swallow
                if dies:
                    kill(mesh, 1)
            if i == 6:
                await until(lambda: bool(swallowed) and mesh._running()._actor_group.epoch > 0, every_s=0)

        assert_same(await train(mesh, step, before), undisturbed)
        assert mesh._running()._actor_group.epoch == (2 if dies else 1)


async def test_a_crash_loop_ends(caplog):
    async with nothing_left(caplog), a_mesh(max_restarts=2) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        state, _ = await mesh.run(step, start(), BATCHES[0])
        with pytest.raises(RestartBudgetExceeded, match=r"allows 2 restarts within 10 minutes") as caught:
            for _ in range(3):
                kill(mesh, 1)
                state, _ = await mesh.run(step, state, BATCHES[0])
        assert isinstance(caught.value.__cause__, ActorDiedError)
        assert caught.value.actor == 1
        for given in (start(), state):  # `state` was donated to the step that failed
            with pytest.raises(MeshClosedError, match=r"the mesh has failed: max_restarts=2 allows 2"):
                await mesh.run(step, given, BATCHES[0])


async def test_an_actor_and_the_holder_of_its_copy_are_lost_together():
    async with a_mesh() as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        state, _ = await mesh.run(step, start(), BATCHES[0])
        await settled(mesh)
        kill(mesh, 0, 1)
        with pytest.raises(StateLostError, match=r"were lost together.*mesh\.restore"):
            await mesh.run(step, state, BATCHES[1])


async def test_an_error_of_the_users_own_is_no_reason_to_restart():
    async with a_mesh() as mesh:
        failing = mesh.distributed(lambda x: x + 1)
        array = await failing(np.float32(1))
        handle: Any = mesh._running()._actor_group.handles[0]
        error = RemoteError("it does not divide", exception_type="ValueError")
        mesh._running()._act_on(FailureFound(error))
        with pytest.raises((RemoteError, MeshClosedError), match="it does not divide"):
            await failing(array)
        assert not mesh._running()._recovery.is_restarting
        assert not handle._task.cancelled()


async def test_a_mesh_is_closed_in_the_middle_of_a_restart(caplog):
    async with nothing_left(caplog):
        for turns in TURNS:
            async with a_mesh() as mesh:
                step = mesh.distributed(train_step)
                run = asyncio.ensure_future(mesh.run(step, start(), BATCHES[0]))
                kill(mesh, turns % 2)
                for _ in range(turns):
                    await asyncio.sleep(0)
            with pytest.raises(MeshClosedError):
                await run


@pytest.mark.parametrize(
    "options", [{"max_restarts": -1}, {"max_restarts": True}, {"backup_every": 0}, {"progress_timeout_s": 0}]
)
def test_options(options):
    with pytest.raises(MeshError, match=f"{next(iter(options))} is"):
        jpp.RemoteMesh(2, **options)


# ---------------------------------------------------------------- processes


async def test_sigkill_of_processes(caplog):
    """Case 19. The others keep their processes and what they have compiled."""
    async with a_mesh(3, max_restarts=0) as mesh:
        undisturbed = await train(mesh, mesh.distributed(three_stages, donate_argnums=0), model=mlp(3))
    async with nothing_left(caplog), a_mesh(3, launcher=LocalLauncher()) as mesh:
        seen, states = [], set()

        async def watch() -> None:
            while True:
                if mesh._running()._recovery.is_restarting:
                    states.add(tuple(sorted(info.state for info in mesh.actors)))
                await asyncio.sleep(0.002)

        async def before(i: int) -> None:
            if i in (2, 5):
                numbers = await inspect_actors(mesh._running())
                seen.append([(info.pid, numbers[info.id]["compilations"]) for info in mesh.actors])
                os.kill(mesh.actors[i % 3].pid, signal.SIGKILL)

        step = mesh.distributed(three_stages, donate_argnums=0)
        watching = asyncio.ensure_future(watch())
        assert_same(await train(mesh, step, before, model=mlp(3)), undisturbed)
        watching.cancel()
        assert states == {("restarting", "waiting", "waiting")}
        assert [info.state for info in mesh.actors] == ["ready"] * 3
        assert [a == b for a, b in zip(*seen, strict=True)] == [True, True, False]


def three_stages(state: Any, batch: Any) -> tuple[Any, Any]:
    params, _, losses = grads_step(mlp(3), jpp.Std1F1B(3))(state[0], batch)
    return (params, state[1] + 1), losses
