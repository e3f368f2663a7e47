"""Cancelling any await, at any moment, leaves the mesh usable and nothing behind (case 26 of
`docs/failures.md`).

Each operation is cancelled at each of its waits in turn, in several ways and some turns of the event loop
later.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest
import stacked
from fake_actor import start_fakes
from interrupting import WAYS, Point, interrupted, points
from models import grads_step, mlp
from paths import SUPPORT
from resources import complaints, differences, everything, inspect_actors, nothing_left

import jaxpp_async as jpp
from jaxpp_async.controller import submitted_step
from jaxpp_async.controller.options import ActorConfig
from jaxpp_async.errors import ArrayError, MeshClosedError
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.launch.hosts import parse_hosts
from jaxpp_async.launch.remote import CommandReach, RemoteLauncher
from jaxpp_async.session.step_runner import StepRunner
from jaxpp_async.testing import assert_close

MODEL = mlp(2)
STEP = grads_step(MODEL, jpp.Std1F1B(2))
BIG = (64, 128)  # 32 KiB: goes over the data plane
Operation: TypeAlias = Callable[[], Awaitable[Any]]


def arguments() -> tuple[Any, Any]:
    return MODEL.init(0), MODEL.batch(0, 4)


class Bench:
    """A mesh and what the operations use of it."""

    def __init__(self, mesh: jpp.RemoteMesh, folder: Any):
        self.mesh, self.folder = mesh, folder
        self.step = mesh.distributed(STEP)
        self.params, self.batch = arguments()
        self.losses: bytes | None = None
        self.saved = -1

    async def check(self) -> None:
        """A step gives the same bits as ever."""
        async with asyncio.timeout(5):
            _, _, losses = await self.mesh.run(self.step, self.params, self.batch)
            value = await losses
        if self.losses is None:
            assert_close(value, jax.jit(STEP)(self.params, self.batch)[2])
            self.losses = value.tobytes()
        assert value.tobytes() == self.losses


# ---------------------------------------------------------------- operations


def run(bench: Bench) -> Operation:
    return lambda: bench.mesh.run(bench.step, bench.params, bench.batch)


def submit_with_back_pressure(bench: Bench) -> Operation:
    async def submit() -> None:
        first = await bench.mesh.submit(bench.step, bench.params, bench.batch)
        second = await bench.mesh.submit(bench.step, first.outputs[0], bench.batch)
        third = await bench.mesh.submit(bench.step, second.outputs[0], bench.batch)  # waits for a place
        await first
        await third

    return submit


def fetch(bench: Bench) -> Operation:
    async def fetch() -> None:
        params, grads, losses = await bench.mesh.run(bench.step, bench.params, bench.batch)
        await bench.mesh.fetch([params, grads])
        await losses

    return fetch


def values_over_the_data_plane(bench: Bench) -> Operation:
    step = bench.mesh.distributed(lambda x, y: (x + 1, y + x), donate_argnums=0, name="large")
    x = np.ones(BIG, np.float32)

    async def large() -> None:
        await step.compile(x, x)
        there = await bench.mesh.put(x, like=(step, 0))
        new, total = await bench.mesh.run(step, there, x)
        assert (await new == 2).all()
        assert (await bench.mesh.fetch(total) == 2).all()
        await new.delete()

    return large


def compile_anew(bench: Bench) -> Operation:
    async def compile_anew() -> None:
        constant = np.arange(3, dtype=np.float32)  # captured: goes to the actors before the first run
        step = bench.mesh.distributed(lambda x: (x + constant, constant * 2))
        await bench.mesh.run(step, constant)

    return compile_anew


def init(bench: Bench) -> Operation:
    return lambda: bench.step.init(0, lambda: MODEL.init(1))


def move(bench: Bench) -> Operation:
    async def move() -> None:
        future = await bench.mesh.submit(bench.step, bench.params, bench.batch)
        blocks = future.outputs[0]["blocks"]
        # Each block lies where the other one is needed.
        await bench.mesh.run(bench.step, {**future.outputs[0], "blocks": blocks[::-1]}, bench.batch)

    return move


def divide(bench: Bench) -> Operation:
    halves, quarters = (
        bench.mesh.distributed(stacked.train_step(schedule))
        for schedule in (jpp.Std1F1B(2), jpp.Interleaved1F1B(4))
    )
    batch = stacked.make_batch()

    async def divide() -> None:
        state = await bench.mesh.put(stacked.make_state())
        for step in (halves, quarters, halves):  # each takes it in other parts
            await bench.mesh.run(step, state, batch)
        assert_close(await bench.mesh.fetch(state), stacked.make_state())

    return divide


def prints(bench: Bench) -> Operation:
    said: list[float] = []

    def noisy(x):
        jax.debug.callback(lambda value: said.append(float(value)), x[0])
        return x * 2

    step = bench.mesh.distributed(noisy)
    return lambda: bench.mesh.run(step, np.ones(3, np.float32))


def save(bench: Bench) -> Operation:
    async def save() -> None:
        params, _, _ = await bench.mesh.run(bench.step, bench.params, bench.batch)
        bench.saved += 1
        tree = {"params": params, "number": bench.saved}
        await bench.mesh.save(bench.folder / "whole", tree)
        saving = await bench.mesh.save(bench.folder / "background", tree, wait=False)
        await bench.mesh.save(bench.folder / "waits", tree)
        await saving

    return save


def restore(bench: Bench) -> Operation:
    async def restore() -> None:
        found = await bench.mesh.restore(bench.folder / "whole", {"params": (bench.step, 0), "number": 0})
        assert 0 <= found["number"] <= bench.saved

    return restore


OPERATIONS: dict[str, Callable[[Bench], Operation]] = {
    f.__name__: f
    for f in (
        run,
        submit_with_back_pressure,
        fetch,
        values_over_the_data_plane,
        compile_anew,
        init,
        move,
        divide,
        prints,
        save,
        restore,
    )
}
TURNS = {"compile_anew": (0, 2, 8), "init": (0, 2, 8)}
MANY_TURNS = (0, 2, 8, 21)


# ---------------------------------------------------------------- a mesh goes on


@contextlib.asynccontextmanager
async def goes_on(bench: Bench, caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Checks that mesh and process hold in the end what they held, and that asyncio had nothing to complain
    of."""
    await bench.check()
    before = await everything(bench.mesh)
    yield
    await bench.mesh.save(bench.folder / "end", {})  # a save that was under way until here held arrays
    changed = differences(before, await everything(bench.mesh))
    # How many receive buffers lie ready depends on what was under way at once. Arrays of an earlier test may
    # have gone meanwhile.
    left = {name: n for name, n in changed.items() if "compilations" not in name and "receive" not in name}
    left = {
        name: n for name, n in left.items() if ("arrays" not in name and "bytes" not in name) or n[1] > n[0]
    }
    assert left == {} and complaints(caplog) == []


@pytest.fixture(scope="module")
async def inline() -> AsyncIterator[jpp.RemoteMesh]:
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        yield mesh


@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_operation_is_cancelled_at_each_of_its_waits(inline, name, tmp_path, caplog):
    bench = Bench(inline, tmp_path)
    await bench.check()
    if name == "restore":
        await save(bench)()
    operation, count = OPERATIONS[name](bench), 0
    await operation()
    async with goes_on(bench, caplog):
        async for point in points(operation, TURNS.get(name, MANY_TURNS)):
            count += 1
            try:
                await bench.check()
                if name == "save":
                    await whole_or_absent(bench)
            except BaseException as error:
                error.add_note(str(point))
                raise
    assert count >= 5


async def whole_or_absent(bench: Bench) -> None:
    """Each checkpoint can be read, whatever was cancelled."""
    for name in ("whole", "background", "waits"):
        if (bench.folder / name / "manifest.json").exists():
            found = await bench.mesh.restore(bench.folder / name, {"params": (bench.step, 0), "number": 0})
            assert found["number"] <= bench.saved


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_many_operations_at_once_are_cancelled_at_random(remote_mesh, launcher, tmp_path, caplog):
    rng, bench = np.random.default_rng(0), Bench(await remote_mesh(2, launcher=launcher), tmp_path)
    await bench.check()
    await save(bench)()
    names = [name for name in OPERATIONS if name not in ("compile_anew", "init", "save")]
    operations = [OPERATIONS[name](bench) for name in names]
    for operation in operations:
        await operation()
    async with goes_on(bench, caplog):
        for _ in range(12 if launcher == "inline" else 6):
            chosen = rng.choice(len(operations), 4)
            cuts = [Point(int(rng.integers(6)), int(rng.integers(30)), str(rng.choice(WAYS))) for _ in chosen]
            try:
                async with asyncio.timeout(10):
                    pairs = zip(chosen, cuts, strict=True)
                    await asyncio.gather(*(interrupted(operations[i], cut) for i, cut in pairs))
                await bench.check()
            except BaseException as error:
                error.add_note(str([(names[i], str(cut)) for i, cut in zip(chosen, cuts, strict=True)]))
                raise


async def test_operations_are_cancelled_while_actors_die_and_are_replaced(tmp_path, caplog):
    rng = np.random.default_rng(0)
    async with jpp.RemoteMesh(2, launcher="inline", max_restarts=1000) as mesh:
        bench = Bench(mesh, tmp_path)
        await bench.check()
        await save(bench)()
        names = [name for name in OPERATIONS if name not in ("compile_anew", "init")]
        operations = [OPERATIONS[name](bench) for name in names]
        for operation in operations:
            await operation()
        await copied_anew(mesh)
        before = await everything(mesh)
        for number in range(2 * len(names)):
            cut = Point(int(rng.integers(8)), int(rng.integers(30)), str(rng.choice(WAYS)))
            actor, turns = int(rng.integers(2)), int(rng.integers(20))

            async def kill(actor: int = actor, turns: int = turns) -> None:
                for _ in range(turns):
                    await asyncio.sleep(0)
                mesh._running()._actor_group.handles[actor].kill()

            try:
                async with asyncio.timeout(20):
                    await asyncio.gather(interrupted(operations[number % len(names)], cut), kill())
                await bench.check()
                await whole_or_absent(bench)
                await copied(mesh)
            except BaseException as error:
                error.add_note(
                    f"{names[number % len(names)]} {cut}, actor {actor} killed after {turns} turns"
                )
                raise
        await mesh.save(tmp_path / "end", {})
        await copied_anew(mesh)
        changed = differences(before, await everything(mesh))
        kept = {
            name: n for name, n in changed.items() if "store_arrays" in name or not name.startswith("actor ")
        }
        live, now = kept.pop("driver's arrays", ((0, 0), (0, 0)))
        assert kept == {} and complaints(caplog) == []
        assert now[0] - live[0] < 10  # each dead actor had more than that


async def copied(mesh: jpp.RemoteMesh) -> None:
    """Wait for a replica of the state: without one, two deaths in a row end the mesh."""
    await mesh._running()._recovery_driver._no_replica_in_making.wait()


async def copied_anew(mesh: jpp.RemoteMesh) -> None:
    """Have the replica be of what there is now, and not of what there was in the middle of some operation."""
    await copied(mesh)
    gc.collect()
    await inspect_actors(mesh._running())  # sends what is to be freed: the copy would have it too
    await mesh._running()._recovery_driver.make_replica()


# ---------------------------------------------------------------- a mesh begins and ends


def local_fake() -> Any:
    """Processes without JAX."""
    return LocalLauncher(actor="fake_actor:FakeActor")


def through_a_command() -> Any:
    """The same, through host agents, as on other hosts."""
    reach = CommandReach(lambda placement, host_agent: ["sh", "-c", 'exec "$@"', "sh", *host_agent])
    options: dict[str, Any] = {"control_address": "127.0.0.1", "actor": "fake_actor:FakeActor"}
    return RemoteLauncher(reach, parse_hosts(["a", "b"]), **options)


async def entered(launcher: Any) -> Any:
    """A mesh; of fake actors, its controller."""
    if launcher == "inline":
        return await jpp.RemoteMesh(2, launcher="inline").__aenter__()
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    config = ActorConfig(env={"PYTHONPATH": path})
    return await start_fakes(2, launcher(), config)


async def test_who_waits_behind_a_step_that_was_cancelled_is_told_once(inline, monkeypatch, caplog):
    monkeypatch.setattr(submitted_step, "PATIENCE_S", 0.0)
    long = inline.distributed(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: y @ x, x), name="long")
    x = await inline.run(long, np.eye(400, dtype=np.float32))  # compiled, and its argument lies there
    events = inline.events(history=False)
    cancelled = asyncio.create_task(inline.run(long, x))
    await asyncio.sleep(0)  # it has been sent
    cancelled.cancel()
    await asyncio.wait([cancelled])
    future = await inline.submit(long, x)
    await inline.run(long, x)
    async for event in events:
        assert (event.kind, event.step, event.details["name"]) == (
            "waiting",
            future.timeline().step - 1,
            "long",
        )
        break
    assert len([r for r in caplog.records if "cancelled by its caller" in r.message]) == 1
    await inline.run(long, x)
    assert not inline._runner._unfinished_steps._steps


async def cancelled(call: Coroutine[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel a call that has just sent its step."""
    is_sent, start = asyncio.Event(), StepRunner._start
    with monkeypatch.context() as patch:
        patch.setattr(StepRunner, "_start", lambda *args: (start(*args), is_sent.set())[0])
        task = asyncio.create_task(call)
        await is_sent.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_step_that_is_refused_has_not_waited(inline, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(submitted_step, "PATIENCE_S", 0.0)
    monkeypatch.setattr(
        inline._runner._unfinished_steps, "_report", lambda ahead, waiting: told.append(waiting.name)
    )
    long = inline.distributed(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: y @ x, x), name="long")
    short = inline.distributed(lambda x: x + 1, name="short")
    x = await inline.run(long, np.eye(400, dtype=np.float32))
    gone = await inline.run(short, x)
    await gone.delete()
    await cancelled(inline.run(long, x), monkeypatch)
    with pytest.raises(ArrayError, match="deleted"):
        await inline.run(short, gone)
    await asyncio.sleep(0.001)
    assert told == []
    await inline.run(short, x)
    assert told == ["short"] and not inline._runner._unfinished_steps._steps


async def test_who_waits_behind_an_init_that_was_cancelled_is_told(inline, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(submitted_step, "PATIENCE_S", 0.0)
    monkeypatch.setattr(
        inline._runner._unfinished_steps, "_report", lambda ahead, waiting: told.append(waiting.name)
    )
    step = inline.distributed(lambda x: x + 1, name="after")
    x = await inline.run(step, np.eye(400, dtype=np.float32))
    await cancelled(step.init(0, lambda k: jax.lax.fori_loop(0, 30, lambda _, y: y @ k, k), x), monkeypatch)
    await inline.run(step, x)
    assert told == ["after"]


# Which launcher, and after how many turns of the loop.
LAUNCHERS = [
    pytest.param("inline", (0, 3, 21), id="inline"),
    pytest.param(local_fake, (1,), id="local"),
    pytest.param(through_a_command, (1,), id="command"),
]


@pytest.mark.parametrize(("launcher", "turns"), LAUNCHERS)
async def test_entering_a_mesh_is_cancelled_at_each_of_its_waits(inline, launcher, turns, caplog):
    async def enter() -> None:
        await (await entered(launcher)).aclose()

    await enter()  # what a first mesh opens for good
    async with nothing_left(caplog):
        assert [point async for point in points(enter, turns)]


@pytest.mark.parametrize(("launcher", "turns"), LAUNCHERS)
async def test_closing_a_mesh_is_cancelled_at_each_of_its_waits(inline, launcher, turns, caplog):
    await (await entered(launcher)).aclose()
    async with nothing_left(caplog):
        for after, way in itertools.product(turns, WAYS if launcher == "inline" else ("timeout", "twice")):
            mesh = await entered(launcher)
            if launcher == "inline":
                step, x = mesh.distributed(lambda x: x + 1), np.ones(3, np.float32)
                future = await mesh.submit(step, x)
                await interrupted(mesh.aclose, Point(0, after, way))
                assert mesh.is_closed
                for refused in (future, mesh.run(step, x)):
                    with pytest.raises(MeshClosedError):
                        await refused
            else:
                await interrupted(mesh.aclose, Point(0, after, way))
