"""Controller and actors together, over real sockets and processes, with a fake actor in place of JAX."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import psutil
import pytest
from fake_actor import NullTransport, scripted, start_fakes
from paths import SUPPORT
from resources import inspect_actors

from jaxpp_async.controller import actor_group, failure_policy
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.failure_policy import FailureFound, ProcessDied
from jaxpp_async.controller.host_values import HostValue
from jaxpp_async.controller.listener import ControlListener
from jaxpp_async.controller.options import ActorConfig, ControllerOptions
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import (
    ActorDiedError,
    HandshakeError,
    LaunchError,
    MeshClosedError,
    RemoteError,
    StepAbortedError,
    TransferError,
)
from jaxpp_async.launch import LaunchSpec, LocalLauncher
from jaxpp_async.launch.hosts import Settings
from jaxpp_async.launch.inline import InlineLauncher
from jaxpp_async.launch.process_supervisor import Death
from jaxpp_async.launch.run_module import command_here
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.connection import Connection
from jaxpp_async.protocol.frames import DEFAULT_MAX_FRAME_BYTES, Identity, Wire
from jaxpp_async.protocol.task_group import retrieve

HERE = str(SUPPORT)
FAKE = "fake_actor:FakeActor"


def local_launcher(**options: Any) -> LocalLauncher:
    return LocalLauncher(actor=FAKE, **options)


def inline_launcher() -> InlineLauncher:
    return InlineLauncher(actor=FAKE, make_transport=lambda kind, peer: NullTransport())


LAUNCHERS = {"local": local_launcher, "inline": inline_launcher}


@contextlib.asynccontextmanager
async def mesh(num_actors: int = 2, launcher: Any = None, setup: str | None = None, **options: Any):
    """A controller with fake actors, closed at the end."""
    python_path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    config = ActorConfig(env={"PYTHONPATH": python_path}, setup=setup)
    controller = await start_fakes(num_actors, launcher or local_launcher(), config, **options)
    try:
        yield controller
    finally:
        await controller.aclose()


async def load(controller: Controller, text: str, **executables: Any) -> int:
    """Load a fake program; the text says what a step does."""
    program = LoadableProgram(scripted(text, len(controller.actors)), **executables)
    program_id, _ = await controller.load(program)
    return program_id


def start(controller: Controller, program_id: int, **options: Any):
    return controller.start_step(SubmittedStep(program_id), {}, {}, **options)


@pytest.fixture(params=sorted(LAUNCHERS), scope="module")
async def any_mesh(request) -> AsyncIterator[Controller]:
    async with mesh(launcher=LAUNCHERS[request.param]()) as controller:
        yield controller


@contextlib.asynccontextmanager
async def nothing_left(caplog: pytest.LogCaptureFixture):
    """Checks that children, descriptors, threads and asyncio tasks are as before, and that asyncio had no
    complaint."""

    def now() -> tuple[Any, ...]:
        gc.collect()
        process = psutil.Process()
        threads = {t.name for t in threading.enumerate() if t.name.startswith("jaxpp")}
        return [p.pid for p in process.children(True)], process.num_fds(), threads, len(asyncio.all_tasks())

    before = now()
    yield
    assert now() == before
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio" and r.levelno > logging.INFO] == []


# ---------------------------------------------------------------- the usual life


async def test_a_step_answers_with_each_actors_stats(any_mesh):
    handle = start(any_mesh, await load(any_mesh, "done"))
    stats = await handle
    assert sorted(stats) == [0, 1] and stats[0].peak_bytes == 4096
    assert await handle == stats and handle.done


async def test_steps_are_numbered_and_may_overlap(any_mesh):
    program = await load(any_mesh, "done")
    handles = [start(any_mesh, program) for _ in range(3)]
    assert len({h.id for h in handles}) == 3
    await asyncio.gather(*handles)


async def test_host_values_there_and_back(any_mesh):
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(7, np.int32),
        np.zeros((0, 4), np.float32),
    ]
    avals = [Aval(a.shape, str(a.dtype)) for a in arrays]
    ids = [any_mesh.new_array_id() for _ in arrays]
    values = [HostValue(i, aval, array) for i, aval, array in zip(ids, avals, arrays, strict=True)]
    await any_mesh.put({0: values, 1: values[:1]})
    wanted = [(0, i, aval) for i, aval in zip(ids, avals, strict=True)] + [(1, ids[0], avals[0])]
    fetched = await any_mesh.fetch(wanted)
    for got, expected in zip(fetched, [*arrays, arrays[0]], strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == expected.dtype and got.flags.writeable


async def test_frees_from_any_thread_ride_with_the_next_request(any_mesh):
    aval, ids = Aval((1,), "float32"), [any_mesh.new_array_id() for _ in range(20)]
    await any_mesh.put({0: [HostValue(i, aval, np.ones(1, np.float32)) for i in ids]})
    before = (await inspect_actors(any_mesh))[0]["arrays"]
    thread = threading.Thread(target=lambda: [any_mesh.free(0, i) for i in ids])
    thread.start()
    thread.join()
    await start(any_mesh, await load(any_mesh, "done"))
    assert (await inspect_actors(any_mesh))[0]["arrays"] == before - 20


async def test_each_blob_is_sent_to_an_actor_once(any_mesh):
    blobs = {"k1": b"1", "k2": b"2"}
    await load(any_mesh, "done", keys={0: {0: "k1"}, 1: {0: "k1", 5: "k2"}}, blobs=blobs)
    _, loaded = await any_mesh.load(LoadableProgram(scripted("done", 1), {0: {0: "k1", 1: "k2"}}, blobs))
    assert loaded[0].temp_bytes == {0: 1}  # the fake answers with the number of blobs that came


async def test_a_failed_load_or_fetch_leaves_the_mesh_usable(any_mesh):
    with pytest.raises(RemoteError, match="cannot compile") as error:
        await load(any_mesh, "bad")
    assert error.value.exception_type == "ValueError" and "Traceback" in error.value.remote_traceback
    with pytest.raises(RemoteError, match="KeyError"):
        await any_mesh.fetch([(1, 10**6, Aval((1,), "float32"))])
    await start(any_mesh, await load(any_mesh, "done"))


async def test_a_cancelled_await_does_not_lose_the_step(any_mesh):
    handle = start(any_mesh, await load(any_mesh, "done"))

    async def wait() -> None:
        await handle

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sorted(await handle) == [0, 1]


async def test_start_and_stop_leave_nothing(caplog):
    for name in ("local", "inline"):
        async with mesh(launcher=LAUNCHERS[name]()) as controller:
            await start(controller, await load(controller, "done"))
        async with nothing_left(caplog):
            async with mesh(launcher=LAUNCHERS[name]()) as controller:
                await start(controller, await load(controller, "done"))
            await controller.aclose()  # a second call does nothing
        with pytest.raises(MeshClosedError, match="the mesh is closed"):
            start(controller, 0)


async def test_progress_is_reported_and_every_actor_says_where_it_runs():
    said: list[str] = []
    async with mesh(on_progress=said.append) as controller:
        await load(controller, "done")
        infos = controller.actors
    assert said[0] == "starting 2 actors" and said[-1] == "compiling on 2 actors"
    ready, counts = zip(*(text.rsplit(" (", 1) for text in said[1:3]), strict=True)
    assert sorted(ready) == [f"{info} is ready: fake:0" for info in infos]
    assert counts == ("1 of 2)", "2 of 2)")
    assert all(info.host == socket.gethostname() and info.pid != os.getpid() for info in infos)


async def test_actors_share_cores_and_see_no_secret():
    async with mesh() as controller:
        numbers = await inspect_actors(controller)
        cores = len(os.sched_getaffinity(0))
        assert sum(n["cores"] for n in numbers.values()) == max(cores, 2)
        assert all(n["secrets"] == 0 for n in numbers.values())
        for info in controller.actors:
            assert psutil.Process(info.pid).cmdline() == command_here("jaxpp_async.actors")


# ---------------------------------------------------------------- failures


async def test_sigkill_during_a_step(caplog):
    async with nothing_left(caplog), mesh() as controller:
        program = await load(controller, "hang")
        first, second = start(controller, program), start(controller, program)
        began = time.monotonic()
        os.kill(controller.actors[1].pid, signal.SIGKILL)
        with pytest.raises(
            ActorDiedError, match=r"actor 1 \(host .*, pid \d+\) was killed by SIGKILL"
        ) as error:
            await first
        assert time.monotonic() - began < 3
        assert (error.value.actor, error.value.step, error.value.pid) == (1, 0, controller.actors[1].pid)
        with pytest.raises(StepAbortedError, match="step 1 was aborted: actor 1") as aborted:
            await second
        assert aborted.value.__cause__ is error.value
        with pytest.raises(MeshClosedError, match=r"actor 1 .* was killed by SIGKILL") as closed:
            start(controller, program)
        assert closed.value.__cause__ is error.value
        assert [info.state for info in controller.actors] == ["closed", "failed"]


async def test_sigkill_of_an_idle_actor_is_raised_by_the_next_call():
    async with mesh() as controller:
        os.kill(controller.actors[0].pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            await controller.ended
        with pytest.raises(ActorDiedError, match="actor 0"):
            await inspect_actors(controller)
        with pytest.raises(MeshClosedError, match="actor 0"):
            await inspect_actors(controller)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (
            "1:exit 0:hang",
            ActorDiedError,
            r"actor 1 .* exited with code 3 during step 0\n.*output:\n  .*last words",
        ),
        (
            "1:raise 0:hang",
            RemoteError,
            r"actor 1 .*, step 0, run fwd\(stage 1, mb 3\): ValueError: boom\n\nTraceback",
        ),
    ],
)
async def test_failures_name_actor_step_and_reason(text, error, said):
    async with mesh() as controller:
        began = time.monotonic()
        with pytest.raises(error, match=said) as caught:
            await start(controller, await load(controller, text))
        assert time.monotonic() - began < 3
        assert caught.value.actor == 1 and caught.value.step == 0


async def test_a_remote_exception_inline(caplog):
    async with nothing_left(caplog), mesh(launcher=inline_launcher()) as controller:
        with pytest.raises(RemoteError, match="boom") as error:
            await start(controller, await load(controller, "0:raise 1:hang"))
        assert error.value.instruction == "run fwd(stage 1, mb 3)"


class HoldingTransport(NullTransport):
    """UCX, where the array is under way to another mesh, too: it lets go of nothing."""

    def send(self, buffer: Any, peer: int, tag: int) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    async def abort(self, peer: int | None = None) -> None:
        raise TransferError("still holds 1 buffers")


async def test_a_failed_step_does_not_wait_for_sends_that_go_on(caplog):
    async with asyncio.timeout(10):
        controller = await Controller.start(
            1, inline_launcher(), ControllerOptions(make_transport=lambda kind: HoldingTransport())
        )
        try:
            program, array = await load(controller, "hang"), np.zeros(1 << 20, np.uint8)
            puts = {0: [HostValue(controller.new_array_id(), Aval(array.shape, "uint8"), array)] * 2}
            handle = start(controller, program, puts=puts)
            assert len(handle.sends) == 2
            waiting = [asyncio.create_task(handle.wait_sent()) for _ in range(2)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            assert not waiting[1].done()
            controller._act_on(FailureFound(ActorDiedError("it died")))
            await waiting[1]
            await handle.wait_sent()
            with pytest.raises(ActorDiedError, match="it died"):
                await handle
            assert not any(send.done() for send in handle.sends), "its memory stays the transport's"
        finally:
            await controller.aclose()
    said = [record for record in caplog.records if "still holds" in record.getMessage()]
    assert [(record.levelname, record.exc_info) for record in said] == [("WARNING", None)]


@pytest.mark.parametrize(
    ("then", "cause"),
    [
        ("nothing", "the link broke"),
        ("another", "the link broke"),
        ("a death", "was killed by SIGKILL"),
        ("a restart", None),
        ("the end", None),
    ],
)
async def test_a_failure_that_may_be_a_consequence_waits_for_its_cause(monkeypatch, then, cause):
    monkeypatch.setattr(failure_policy, "GRACE_S", 0.05)
    async with asyncio.timeout(10):
        controller = await Controller.start(1, inline_launcher())
        controller._on_transfer_error(TransferError("the link broke"))
        assert controller.cause is None
        if then == "another":
            controller._on_transfer_error(TransferError("another one, too"))
        elif then == "a death":
            controller._observe(ProcessDied(controller.actors[0], Death(-9, ())))
            assert controller.cause is not None
        elif then == "a restart":
            controller._on_restarted([], 0, 0.0)
        elif then == "the end":
            await controller.aclose()
        await asyncio.sleep(0.1)
        assert (controller.cause is None) == (cause is None)
        assert cause is None or cause in str(controller.cause)
        await controller.aclose()


async def test_host_values_may_change_once_all_of_them_have_left():
    handle = SubmittedStep(0)
    handle.sends += [asyncio.get_running_loop().create_future() for _ in range(3)]
    for send in handle.sends:
        send.add_done_callback(retrieve)  # as `HostPlane` does, which tells the mesh of errors
    handle.sends[0].set_result(None)
    waiting = asyncio.create_task(handle.wait_sent())
    await asyncio.sleep(0)
    handle.sends[1].set_exception(TransferError("lost"))
    await asyncio.sleep(0)
    assert not waiting.done()
    handle.sends[2].set_result(None)
    await waiting


async def test_a_death_wins_over_the_transfer_errors_it_causes():
    async with mesh(launcher=local_launcher()) as controller:
        handle = start(controller, await load(controller, "0:transfer 1:hang"))
        os.kill(controller.actors[1].pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="actor 1"):
            await handle


async def test_the_living_are_told_to_abort():
    told, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_line(line: str) -> None:
        if line.startswith("[actor 0] aborted: actor 1"):
            loop.call_soon_threadsafe(told.set)

    async with mesh(launcher=local_launcher(forward=on_line)) as controller:
        with pytest.raises(RemoteError):
            await start(controller, await load(controller, "1:raise 0:hang"))
        async with asyncio.timeout(2):
            await told.wait()


async def test_nobody_awaits_and_nobody_complains(caplog):
    async with nothing_left(caplog), mesh() as controller:
        start(controller, await load(controller, "0:raise 1:hang"))
        await controller.ended
    async with nothing_left(caplog), mesh() as controller:
        handle = start(controller, await load(controller, "hang"))
    with pytest.raises(MeshClosedError, match="was closed while"):
        await handle


async def test_death_while_compiling_ends_load():
    async with mesh() as controller:
        os.kill(controller.actors[0].pid, signal.SIGSTOP)  # it will not answer
        loading = asyncio.create_task(load(controller, "done"))
        await asyncio.sleep(0)
        os.kill(controller.actors[0].pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="actor 0"):
            await loading


async def test_stubborn_and_stopped_actors_are_killed(monkeypatch):
    for name in ("SHUTDOWN_S", "TERMINATE_S"):
        monkeypatch.setattr(actor_group, name, 0.2)
    async with mesh() as controller:
        await load(controller, "stubborn")
        pids = [info.pid for info in controller.actors]
        os.kill(pids[1], signal.SIGSTOP)
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


# ---------------------------------------------------------------- launch


@pytest.mark.parametrize(
    ("setup", "error", "said"),
    [
        (
            "raise",
            LaunchError,
            "could not start JAX and the transport on actor .* RuntimeError: no such setup",
        ),
        ("exit", LaunchError, r"exited with code 7 before it was ready\n.*output:\n  about to leave"),
        ("silent", LaunchError, "within 1 s"),
        ("old jax", HandshakeError, r"runs jax 0.0.1, the controller \d.*install the same version"),
    ],
)
async def test_launches_that_fail_say_why(setup, error, said, caplog):
    async with nothing_left(caplog):
        with pytest.raises(error, match=f"(?s){said}"):
            async with mesh(1, setup=setup, launch_timeout_s=1 if setup == "silent" else 30):
                pass


async def test_an_interpreter_that_cannot_start(caplog, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named jaxpp >&2\nexit 1\n")
    broken.chmod(0o755)
    async with nothing_left(caplog):
        with pytest.raises(LaunchError, match=r"(?s)exited with code 1.*no module named jaxpp"):
            async with mesh(1, launcher=local_launcher(settings=Settings(python=str(broken)))):
                pass
        with pytest.raises(LaunchError, match=r"could not be started: .*No such file"):
            async with mesh(1, launcher=local_launcher(settings=Settings(python=str(tmp_path / "absent")))):
                pass


async def test_a_cancelled_launch_leaves_nothing(caplog):
    async with nothing_left(caplog):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), mesh(1, setup="silent"):
                pass


# ---------------------------------------------------------------- the listener


async def test_a_listener_that_closes_while_a_peer_connects_leaves_no_socket_open(recwarn):
    for turns in range(8):
        listener = ControlListener(b"s" * 32, version="1", max_frame_bytes=DEFAULT_MAX_FRAME_BYTES)
        address = await listener.listen("127.0.0.1")
        with socket.create_connection(address):
            for _ in range(turns):
                await asyncio.sleep(0)
            await listener.aclose()
    gc.collect()
    assert not recwarn.list


@pytest.mark.parametrize("turns", range(3))
async def test_an_inline_actor_that_is_killed_before_it_began_leaves_no_socket_open(turns, recwarn):
    listener, launcher = (
        ControlListener(b"s" * 32, version="1", max_frame_bytes=DEFAULT_MAX_FRAME_BYTES),
        inline_launcher(),
    )
    handle = await launcher.start(LaunchSpec(0, 1, 0, b"s" * 32, None), listener.adopt)
    for _ in range(turns):
        await asyncio.sleep(0)
    handle.kill()
    await listener.aclose()
    await launcher.aclose()
    del handle
    gc.collect()
    assert not recwarn.list


async def test_the_listener_refuses_strangers_and_goes_on(caplog):
    secret, identity = b"s" * 32, Identity(0, 0)
    listener = ControlListener(secret, version="1", max_frame_bytes=DEFAULT_MAX_FRAME_BYTES)
    host, port = await listener.listen("127.0.0.1")
    arrival = listener.expect(identity)
    loop = asyncio.get_running_loop()

    async def knock(wire: Wire) -> Connection:
        connection = Connection(wire)
        await loop.create_connection(lambda: connection, host, port)
        with contextlib.suppress(HandshakeError):
            await connection.opened
        return connection

    try:
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        refused = await knock(Wire("actor", b"w" * 32, version="1", identity=identity))
        await refused.wait_closed()
        unknown = await knock(Wire("actor", secret, version="1", identity=Identity(9, 0)))
        await unknown.wait_closed()
        assert not arrival.done()
        good = await knock(Wire("actor", secret, version="1", identity=identity))
        assert (await arrival).is_open
        again = await knock(Wire("actor", secret, version="1", identity=identity))
        await again.wait_closed()
        assert good.is_open
        other = listener.expect(Identity(1, 0))
        await knock(Wire("actor", secret, version="2", identity=Identity(1, 0)))
        with pytest.raises(HandshakeError, match="process 1 runs jaxpp-async 2, the controller 1"):
            await other
        said = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
        assert len(said) >= 4 and not any(secret.decode() in s or secret.hex() in s for s in said)
    finally:
        (await arrival).abort()
        await listener.aclose()


async def test_a_silent_peer_is_dropped(monkeypatch):
    monkeypatch.setattr("jaxpp_async.protocol.connection.HANDSHAKE_TIMEOUT_S", 0.1)
    listener = ControlListener(b"s" * 32, version="1", max_frame_bytes=1 << 20)
    host, port = await listener.listen("127.0.0.1")
    reader, writer = await asyncio.open_connection(host, port)
    async with asyncio.timeout(2):
        assert await reader.read() == b""
    writer.close()
    await listener.aclose()


# ---------------------------------------------------------------- with the real actor


@pytest.mark.parametrize("launcher", [LocalLauncher, InlineLauncher])
async def test_large_values_take_the_data_plane(launcher):
    arrays = [np.arange(300_000, dtype=np.float32).reshape(3, -1), np.arange(5, dtype=np.int32)]
    avals = [Aval(a.shape, str(a.dtype)) for a in arrays]
    controller = await Controller.start(2, launcher())
    try:
        ids = [[controller.new_array_id() for _ in arrays] for _ in range(2)]
        await controller.put(
            {a: [HostValue(i, v, x) for i, v, x in zip(ids[a], avals, arrays, strict=True)] for a in (0, 1)}
        )
        wanted = [(a, i, v) for a in (0, 1) for i, v in zip(ids[a], avals, strict=True)]
        for got, expected in zip(await controller.fetch(wanted), arrays * 2, strict=True):
            np.testing.assert_array_equal(got, expected)
        with pytest.raises(RemoteError):
            await controller.fetch([(1, 10**6, avals[0])])  # its receive is taken back
        np.testing.assert_array_equal((await controller.fetch(wanted[2:3]))[0], arrays[0])
        if launcher is LocalLauncher:
            os.kill(controller.actors[1].pid, signal.SIGSTOP)
            fetching = asyncio.create_task(controller.fetch(wanted))
            await asyncio.sleep(0)
            os.kill(controller.actors[1].pid, signal.SIGKILL)
            async with asyncio.timeout(3):
                with pytest.raises(ActorDiedError, match="actor 1"):
                    await fetching
    finally:
        await controller.aclose()


def test_the_controller_imports_no_jax():
    import subprocess
    import sys

    code = (
        "import jaxpp_async.controller.controller, jaxpp_async.launch.inline, sys; "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
