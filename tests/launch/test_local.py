"""Actor processes: no orphans by any of the three means, no secret in sight, output kept, cores shared."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from paths import ROOT, SUPPORT

from jaxpp_async.controller.error_messages import describe_end
from jaxpp_async.errors import MeshError
from jaxpp_async.launch import share_out
from jaxpp_async.launch.local import LocalLauncher
from jaxpp_async.launch.process_supervisor import TAIL_LINES, OutputLines, ProcessSupervisor
from jaxpp_async.launch.spawn import ActorRequest, spawn_actor
from jaxpp_async.protocol.actor_info import ExitCode
from jaxpp_async.transport.registry import make_process_transport

HERE = SUPPORT

DRIVER = """
import asyncio, sys
from fake_actor import scripted, start_fakes
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.launch import LocalLauncher

async def main():
    launcher = LocalLauncher(actor="fake_actor:FakeActor", **{options})
    controller = await start_fakes(2, launcher)
    try:
        program, _ = await controller.load(LoadableProgram(scripted("hang")))
        step = controller.start_step(SubmittedStep(program), {{}}, {{}})
        print(*(info.pid for info in controller.actors), flush=True)
        {then}
    finally:
        if {close}:
            await controller.aclose()
asyncio.run(main())
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}


class Driver:
    """A driver process of its own, with two fake actors in the middle of a step."""

    def __init__(self, then: str = "await step", close: bool = True, **options: Any):
        code = DRIVER.format(then=then, close=close, options=options)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise AssertionError(self.popen.communicate()[1])
        self.actors: list[psutil.Process] = []
        for pid in line.split():
            with contextlib.suppress(psutil.NoSuchProcess):  # gone already, with a driver that ends at once
                self.actors.append(psutil.Process(int(pid)))

    def actors_gone_within(self, timeout_s: float) -> bool:
        """Whether all actors end in time (they may remain as zombies where no init reaps them)."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not any(is_running(actor) for actor in self.actors):
                return True
            time.sleep(0.02)
        return False

    def end(self) -> None:
        for process in (
            [psutil.Process(self.popen.pid), *self.actors] if self.popen.poll() is None else self.actors
        ):
            if is_running(process):
                process.kill()
        self.popen.communicate(timeout=10)


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def driver(request) -> Iterator[Driver]:
    driver = Driver(**getattr(request, "param", {}))
    yield driver
    driver.end()


# ---------------------------------------------------------------- no orphans


def test_sigkill_of_the_driver_ends_all_actors(driver):
    driver.popen.kill()
    assert driver.actors_gone_within(2)


@pytest.mark.parametrize("driver", [{"lease_s": 0.6}], indirect=True)
def test_actors_of_a_stopped_driver_end_by_their_lease(driver):
    time.sleep(0.8)  # renewed until here, or they would be gone
    assert all(is_running(actor) for actor in driver.actors)
    driver.popen.send_signal(signal.SIGSTOP)
    assert driver.actors_gone_within(3)
    driver.popen.send_signal(signal.SIGCONT)
    _, errors = driver.popen.communicate(timeout=10)
    assert "exited with code 82 (the driver, this process, was silent" in errors


def test_a_blocked_event_loop_keeps_the_lease():
    driver = Driver(then="__import__('time').sleep(1.2)", lease_s=0.5)
    try:
        time.sleep(1.0)
        assert all(is_running(actor) for actor in driver.actors)
        assert driver.popen.wait(timeout=10) == 0
        assert driver.actors_gone_within(0.5)
    finally:
        driver.end()


HOLD_THE_GIL = "__import__('ctypes').PyDLL(None).usleep(1_800_000); "


def test_a_native_call_that_holds_the_gil_for_longer_than_the_lease_is_named():
    driver = Driver(then=HOLD_THE_GIL + "await step", lease_s=0.6)
    _, errors = driver.popen.communicate(timeout=20)
    assert (
        "exited with code 82 (the driver, this process, was silent for longer than lease_s: it, or" in errors
    )
    assert (
        "the driver was silent for 0.6 s (lease_s=0.6): it was stopped, or a native call in it holds"
        in errors
    )
    driver.end()


def test_a_longer_lease_waits_for_a_native_call():
    driver = Driver(
        then=HOLD_THE_GIL + "await asyncio.sleep(0.3); print('still', controller.cause)", lease_s=10
    )
    assert driver.popen.communicate(timeout=20)[0] == "still None\n"
    driver.end()


SPEECHLESS = """
import os, sys, threading
from jaxpp_async.protocol.parent_watch import leave, watch_stdin

threading.Thread(target=lambda: print("x" * 1_000_000), daemon=True).start()
watch_stdin(0, 0.5, leave)
threading.Event().wait(30)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_actor_whose_words_nobody_reads_ends_all_the_same(unbuffered):
    """A stopped driver reads nothing, and a pipe holds 64 KiB."""
    actor = subprocess.Popen(
        [sys.executable, "-c", SPEECHLESS],
        env=environment() | {"PYTHONUNBUFFERED": unbuffered},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert actor.wait(timeout=10) == ExitCode.LEASE_EXPIRED
    finally:
        actor.kill()
        actor.communicate()


def test_ctrl_c_reaches_the_driver_alone_which_ends_cleanly(driver):
    os.killpg(driver.popen.pid, signal.SIGINT)
    _, errors = driver.popen.communicate(timeout=10)
    assert errors.rstrip().endswith("KeyboardInterrupt") and "never retrieved" not in errors
    assert driver.actors_gone_within(0.5)


@pytest.mark.parametrize(
    "driver", [{"then": "return", "close": False}, {"then": "1 / 0", "close": False}], indirect=True
)
def test_a_driver_that_forgets_to_close_leaves_no_actor(driver):
    _, errors = driver.popen.communicate(timeout=10)
    assert driver.actors_gone_within(1)
    assert "Fatal" not in errors


CONFIG = {
    "process_id": 0,
    "incarnation": 0,
    "secret": "ab" * 32,
    "controller": ["127.0.0.1", 9],
    "parent_pid": None,
    "cores": [],
    "lease_s": 20,
    "actor": "fake_actor:FakeActor",
    "max_frame_bytes": 1 << 20,
}


def start_by_hand(**changes: Any) -> subprocess.Popen[str]:
    """An actor process with this test as its controller, whose first line is changed."""
    config = CONFIG | {"parent_pid": os.getpid()} | changes
    actor = subprocess.Popen(
        [sys.executable, "-m", "jaxpp_async.actors"],
        env=environment(),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert actor.stdin is not None
    actor.stdin.write(json.dumps(config) + "\n")
    actor.stdin.flush()
    return actor


async def test_end_of_file_on_stdin_ends_an_actor():
    connected: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda reader, writer: connected.set_result(writer), "127.0.0.1", 0)
    actor = start_by_hand(controller=list(server.sockets[0].getsockname()))
    async with asyncio.timeout(10):
        writer = await connected  # it waits for the handshake now
    assert actor.stdin is not None and actor.stderr is not None
    actor.stdin.close()
    assert await asyncio.to_thread(actor.wait, 2) == ExitCode.CONTROLLER_GONE
    actor.stderr.close()
    writer.close()
    server.close()
    await asyncio.gather(writer.wait_closed(), server.wait_closed(), return_exceptions=True)


def test_the_kernel_ends_an_actor_whose_stdin_stays_open():
    read_end, write_end = os.pipe()
    code = (
        "import subprocess, sys, os, time\n"
        f"actor = subprocess.Popen([sys.executable, '-m', 'jaxpp_async.actors'], stdin={read_end})\n"
        "print(actor.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[read_end],
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        config = CONFIG | {"parent_pid": parent.pid, "controller": server.getsockname()}
        os.write(write_end, json.dumps(config).encode() + b"\n")
        assert parent.stdout is not None
        actor = psutil.Process(int(parent.stdout.readline()))
        connection, _ = server.accept()  # it has come as far as its handshake
        with connection:
            assert is_running(actor)
            parent.kill()
            parent.communicate()
            _, alive = psutil.wait_procs([actor], timeout=2)
            assert not any(map(is_running, alive))
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"secret": "xyz"}, ExitCode.CONFIG, "started by a mesh, not by hand"),
        ({"surprise": 1}, ExitCode.CONFIG, "started by a mesh"),
        ({"parent_pid": 1}, ExitCode.CONTROLLER_GONE, ""),
        ({}, ExitCode.CONNECTION_LOST, "lost the controller at"),
    ],
)
def test_an_actor_that_cannot_begin_says_why(changes, code, said):
    actor = start_by_hand(**changes)
    actor.wait(timeout=10)  # before `communicate`, which closes its stdin
    _, errors = actor.communicate()
    assert actor.returncode == code and said in errors
    assert "xyz" not in errors and "abab" not in errors


# ---------------------------------------------------------------- the supervisor of processes


async def spawn(supervisor: ProcessSupervisor, code: str, lines: list[str]):
    spawned = supervisor.spawn([sys.executable, "-c", code], environment(), b"config\n", lines.append)
    return await asyncio.wrap_future(spawned)


async def test_the_supervisor_keeps_output_and_exit_status():
    supervisor, lines = ProcessSupervisor(beat_s=1.0), []
    code = (
        "import sys; print(sys.stdin.readline().strip()); "
        "[print(i) for i in range(80)]; sys.exit('oh \\u00e9')"
    )
    process = await spawn(supervisor, code, lines)
    death = await asyncio.wrap_future(process.dead)
    assert lines == ["config", *map(str, range(80)), "oh \u00e9"]
    assert death.returncode == 1 and death.output_tail == tuple(lines[-TAIL_LINES:])
    await asyncio.wrap_future(supervisor.close())


async def test_noise_is_no_output():
    supervisor, lines = ProcessSupervisor(beat_s=1.0), []
    code = "print('first'); print('[Gloo] hums a tune'); print('last')"
    spawned = supervisor.spawn(
        [sys.executable, "-c", code], environment(), b"\n", lines.append, noise="hums a"
    )
    death = await asyncio.wrap_future((await asyncio.wrap_future(spawned)).dead)
    assert lines == ["first", "last"] == list(death.output_tail), (
        "neither what is forwarded nor what an error has"
    )
    await asyncio.wrap_future(supervisor.close())


def test_what_gloo_says_of_its_groups_is_noise():
    found: dict[str, Any] = {}

    def spawn(*_: Any, **options: Any) -> concurrent.futures.Future[Any]:
        found.update(options)
        return concurrent.futures.Future()

    supervisor: Any = SimpleNamespace(spawn=spawn)
    spawn_actor(supervisor, ActorRequest(sys.executable, {}, {}, 0, 1), lambda line: None)
    os.close(found["descriptors"][0])
    line = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    assert found["noise"] and found["noise"] in line


async def test_grandchildren_end_with_their_actor():
    supervisor, lines = ProcessSupervisor(beat_s=1.0), []
    code = "import subprocess, os; print(subprocess.Popen(['sleep', '60']).pid, flush=True); os._exit(3)"
    process = await spawn(supervisor, code, lines)
    death = await asyncio.wrap_future(process.dead)
    grandchild = int(lines[0])
    deadline = time.monotonic() + 2
    while psutil.pid_exists(grandchild) and is_running(psutil.Process(grandchild)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert death.returncode == 3
    await asyncio.wrap_future(supervisor.close())


async def test_without_pidfds_deaths_are_polled(monkeypatch):
    def missing(pid: int) -> int:
        raise OSError("no pidfd_open here")

    monkeypatch.setattr(os, "pidfd_open", missing)
    supervisor = ProcessSupervisor(beat_s=5.0)
    process = await spawn(supervisor, "import os; os._exit(4)", [])
    async with asyncio.timeout(5):
        assert (await asyncio.wrap_future(process.dead)).returncode == 4
    await asyncio.wrap_future(supervisor.close())


async def test_a_death_that_is_seen_before_the_last_words(monkeypatch):
    """Both in one round, the death first: what is then left of the round is about descriptors that are
    closed."""
    supervisor, select, lines = ProcessSupervisor(beat_s=5.0), selectors.DefaultSelector.select, []

    def deaths_first(self, timeout=None):
        return sorted(select(self, timeout), key=lambda found: not isinstance(found[0].fileobj, int))

    monkeypatch.setattr(selectors.DefaultSelector, "select", deaths_first)
    process = await spawn(supervisor, "print('bye')", lines)
    supervisor._do(lambda: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) and None)
    async with asyncio.timeout(10):
        assert (await asyncio.wrap_future(process.dead)).output_tail == ("bye",)
        await asyncio.wrap_future(supervisor.close())


async def test_closing_the_supervisor_kills_what_is_left():
    supervisor = ProcessSupervisor(beat_s=1.0)
    process = await spawn(supervisor, "import time; time.sleep(60)", [])
    await asyncio.wrap_future(supervisor.close())
    assert process.dead.result().returncode == -signal.SIGKILL
    await asyncio.wrap_future(supervisor.close())
    with pytest.raises(OSError, match="the mesh is closing"):
        await spawn(supervisor, "", [])


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb", b"c\n"], ["a", "bc"]),
        ([b"caf\xc3", b"\xa9\n"], ["caf\u00e9"]),
        ([b"\xff\n"], ["\ufffd"]),
        ([b"50%\r60%\r\n"], ["50%\r60%"]),
        ([b"a\n\nb"], ["a", "", "b"]),
        ([b"x" * 5000], ["x" * 4096]),
    ],
)
def test_output_becomes_lines(pieces, lines):
    output, forwarded = OutputLines(forward=(seen := []).append), []
    for piece in pieces:
        output.feed(piece)
    output.feed(b"", final=True)
    forwarded += seen
    assert forwarded == lines == list(output.tail)


# ---------------------------------------------------------------- small things


@pytest.mark.parametrize(
    ("cores", "num_actors", "shares"),
    [
        ([0, 1], 1, [[0, 1]]),
        ([0, 1], 2, [[0], [1]]),
        ([4, 5, 8, 9, 12], 2, [[4, 5], [8, 9, 12]]),
        ([0, 1], 5, [[0], [1], [0], [1], [0]]),
    ],
)
def test_cores_are_shared_out(cores, num_actors, shares):
    assert share_out(cores, num_actors) == shares


@pytest.mark.parametrize(
    ("returncode", "tail", "text"),
    [
        (-9, (), "was killed by SIGKILL (possibly out of memory)"),
        (
            -6,
            ("terminate called after throwing", "std::bad_alloc"),
            "was killed by SIGABRT (possibly out of memory)",
        ),
        (-11, ("Fatal Python error",), "was killed by SIGSEGV"),
        (3, (), "exited with code 3"),
        (3, ("MemoryError",), "exited with code 3 (possibly out of memory)"),
        (81, (), "exited with code 81 (its stdin reached end of file: the controller was gone)"),
    ],
)
def test_ends_are_described(returncode, tail, text):
    assert describe_end(returncode, tail) == text


@pytest.mark.parametrize(
    ("kind", "said"), [("memory", "does not leave a process"), ("pigeon", "unknown transport")]
)
def test_transports_that_do_not_join_processes(kind, said):
    with pytest.raises(MeshError, match=said):
        make_process_transport(kind, 0)


def test_specs_hide_their_secret():
    from jaxpp_async.launch import LaunchSpec

    spec = LaunchSpec(0, 1, 0, b"secret" * 5, ("127.0.0.1", 1))
    assert "secret" not in repr(spec)
    assert bytes.fromhex(spec.config()["secret"]) == b"secret" * 5


def test_a_launcher_here_carries_control_connections_within_this_machine():
    launcher = LocalLauncher()
    assert launcher.listen_host == "127.0.0.1"
