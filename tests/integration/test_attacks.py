"""Attacks on the control port of a mesh whose actors are at work (cases 22 and 23): each is refused in time,
logged without the secret, and the job goes on. The actors are fakes in processes of their own; the port is
the real one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import logging
import os
import random
import socket
import struct
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_actor import scripted, start_fakes
from paths import SUPPORT, TESTS
from waiting import until

import jaxpp_async
from jaxpp_async.base.descriptors import num_descriptors
from jaxpp_async.controller import listener as listener_module
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.listener import MOST, WINDOW_S, ControlListener, RateLimitedLog
from jaxpp_async.controller.options import ActorConfig
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import HandshakeError, LaunchError, ProtocolError
from jaxpp_async.launch import LaunchSpec, LocalLauncher
from jaxpp_async.launch.hosts import Settings, parse_hosts
from jaxpp_async.launch.remote import CommandReach, RemoteLauncher
from jaxpp_async.protocol import connection as connection_module
from jaxpp_async.protocol.frames import HANDSHAKE_TIMEOUT_S, Identity, Wire
from jaxpp_async.protocol.messages import Done

HERE = str(SUPPORT)
sys.path.append(str(TESTS / "protocol_fuzz"))

from conversations import converse  # noqa: E402
from mutations import STRANGERS, mutate_pieces  # noqa: E402

FAKE = "fake_actor:FakeActor"
VERSION = jaxpp_async.__version__
WITHIN_S = 5.0
MIB = 1 << 20


@contextlib.contextmanager
def listeners_made() -> Iterator[list[ControlListener]]:
    """The listeners made meanwhile: whose they are is the controller's affair."""
    made: list[ControlListener] = []
    original = ControlListener.__init__

    def init(self: ControlListener, *args: Any, **options: Any) -> None:
        made.append(self)
        original(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlListener, "__init__", init)
        yield made


class Job:
    """A mesh at work: steps, one after the other, for as long as the tests last."""

    def __init__(self, controller: Controller, listener: ControlListener, printed: list[str]):
        self.controller, self.printed, self.num_steps = controller, printed, 0
        self.listener, self.secret = listener, listener._secret
        self.address: tuple[str, int] = self.listener._server.sockets[0].getsockname()[:2]  # type: ignore[union-attr]
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        program_id, _ = await self.controller.load(LoadableProgram(scripted("done")))

        async def work() -> None:
            while True:
                await self.controller.start_step(SubmittedStep(program_id), {}, {})
                self.num_steps += 1
                await asyncio.sleep(0.001)

        self._task = asyncio.create_task(work(), name="the job")

    async def goes_on(self) -> None:
        """Wait for more steps; fails if the job ended."""
        assert self._task is not None
        task, target = self._task, self.num_steps + 3
        await until(lambda: task.done() or self.num_steps >= target)
        assert not task.done(), task

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@pytest.fixture(scope="module")
async def job() -> AsyncIterator[Job]:
    printed: list[str] = []
    config = ActorConfig(env={"PYTHONPATH": HERE})
    launcher = LocalLauncher(actor=FAKE, forward=printed.append)
    with listeners_made() as listeners:
        controller = await start_fakes(2, launcher, config)
    try:
        job = Job(controller, listeners[0], printed)
        await job.start()
        yield job
        await job.goes_on()
        await job.stop()
    finally:
        await controller.aclose()


@pytest.fixture
async def attacked(job: Job, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Job]:
    """The job, which must go on after the test, with nothing of the attack left over and no secret told."""
    gc.collect()
    # what earlier tests hid is theirs
    job.listener._refusals = RateLimitedLog(job.listener._refusals._log, time.monotonic)
    caplog.set_level(logging.DEBUG)
    began_s, before = time.monotonic(), psutil.Process().memory_info().rss
    yield job
    await job.goes_on()
    await until(lambda: not job.listener._unproven)
    assert time.monotonic() - began_s < 2 * WITHIN_S
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 16 * MIB
    no_secret_in(job.secret, (record.getMessage() for record in caplog.records), "log")
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio" and r.levelno > logging.INFO] == []


async def knock(job: Job, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*job.address)
    writer.write(data)
    return reader, writer


async def is_refused(job: Job, *pieces: bytes, eof: bool = False) -> bytes:
    """Say these things; what came back before the other side closed, which it must in time."""
    reader, writer = await knock(job, pieces[0])
    said = b""
    async with asyncio.timeout(WITHIN_S):
        with contextlib.suppress(ConnectionError):
            for piece in pieces[1:]:
                said += await reader.read(4096)
                writer.write(piece)
            if eof:
                writer.write_eof()
            said += await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return said


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.name == "jaxpp_async.control" and "refused" in r.getMessage()
    ]


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until a refusal says so."""
    await until(lambda: any(text in line for line in refusals(caplog)))


# ---------------------------------------------------------------- the secret


def forms_of(secret: bytes) -> list[bytes]:
    """Ways in which a secret could be written down."""
    encoded = [base64.b64encode(secret), base64.urlsafe_b64encode(secret), base64.b32encode(secret)]
    encoded += [secret.hex().encode(), secret.hex().upper().encode(), secret.hex(":").encode()]
    written = [
        repr(secret)[2:-1].encode(),
        repr(list(secret))[1:-1].encode(),
        str(int.from_bytes(secret)).encode(),
    ]
    # A part of it would do for a leak, too.
    return [secret[:12], *(text.rstrip(b"=")[:20] for text in encoded), *(text[:40] for text in written)]


def no_secret_in(secret: bytes, texts: Iterator[str | bytes] | list[Any], where: str) -> None:
    forms = forms_of(secret)
    for text in texts:
        data = text if isinstance(text, bytes) else text.encode(errors="replace")
        assert not any(form in data for form in forms), f"the secret is in a {where}"


def test_the_search_would_find_it():
    secret = bytes(range(7, 39))
    for text in (
        secret,
        secret.hex(),
        repr(secret),
        f"x{base64.b64encode(secret).decode()}y",
        str(list(secret)),
    ):
        with pytest.raises(AssertionError, match="the secret is in a text"):
            no_secret_in(secret, [text], "text")


def told_to_the_system(pid: int) -> list[bytes]:
    """What other users and the system see of a process."""
    return [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ", "status", "maps")]


async def test_the_secret_is_in_no_argv_environment_or_output(job):
    here = psutil.Process()
    pids = {
        here.pid,
        *(p.pid for p in here.children(recursive=True)),
        *(a.pid for a in job.controller.actors),
    }
    assert len(pids) >= 3
    no_secret_in(job.secret, [text for pid in pids for text in told_to_the_system(pid)], "process")
    no_secret_in(job.secret, job.printed, "line of output")
    things = [
        job.listener,
        job.listener._accepted,
        job.controller,
        next(iter(job.listener._accepted.values())).wire,
        os.environ,
    ]
    no_secret_in(job.secret, [repr(thing) for thing in things], "repr")


async def test_the_secret_is_in_no_argv_environment_or_output_of_a_host_agent():
    printed: list[str] = []
    reach = CommandReach(lambda placement, host_agent: ["sh", "-c", 'exec "$@"', "sh", *host_agent])
    options: Any = {"control_address": "127.0.0.1", "settings": Settings(env={"PYTHONPATH": HERE})}
    launcher = RemoteLauncher(reach, parse_hosts(["a"]), actor=FAKE, forward=printed.append, **options)
    with listeners_made() as listeners:
        controller = await start_fakes(1, launcher)
    try:
        secret = listeners[0]._secret
        actor = psutil.Process(controller.actors[0].pid)
        assert "host_agent" in " ".join(actor.parent().cmdline())  # type: ignore[union-attr]
        seen = told_to_the_system(actor.pid) + told_to_the_system(actor.ppid())
        no_secret_in(secret, seen + printed, "process of a host")  # type: ignore[arg-type]
    finally:
        await controller.aclose()


@pytest.mark.parametrize("setup", ["exit", "raise"])
async def test_the_secret_is_in_no_error_text(setup, caplog):
    caplog.set_level(logging.DEBUG)
    printed: list[str] = []
    config = ActorConfig(env={"PYTHONPATH": HERE}, setup=setup)
    launcher = LocalLauncher(actor=FAKE, forward=printed.append)
    with listeners_made() as listeners, pytest.raises(LaunchError) as caught:
        await start_fakes(1, launcher, config)
    texts = [*traceback.format_exception(caught.value), *printed, *(r.getMessage() for r in caplog.records)]
    no_secret_in(listeners[0]._secret, texts, "error")
    spec = LaunchSpec(0, 1, 0, listeners[0]._secret, ("127.0.0.1", 1))
    no_secret_in(listeners[0]._secret, [repr(spec)], "repr of a launch")


# ---------------------------------------------------------------- case 22: who is let in


async def test_strangers_without_a_token(attacked, caplog):
    for data in STRANGERS:
        if b"jpp3".startswith(data[:4]):
            continue  # a beginning: see below
        assert await is_refused(attacked, data) == b""
    await logged(caplog, "does not speak this protocol")


async def test_a_wrong_token(attacked, caplog):
    wire = Wire("actor", b"w" * 32, version=VERSION, identity=Identity(0, 1))
    challenge = await is_refused(attacked, wire.take_outgoing(), b"", eof=True)
    with pytest.raises(HandshakeError, match="does not know this mesh's secret"):
        wire.feed(challenge)  # this side would refuse as well
    proof = Wire("actor", b"w" * 32, version=VERSION, identity=Identity(0, 1), nonce=b"n" * 32)
    other = Wire("controller", b"w" * 32, version=VERSION)
    hello = proof.take_outgoing()
    other.feed(hello)
    proof.feed(other.take_outgoing())
    await is_refused(attacked, hello, proof.take_outgoing())
    await logged(caplog, "claimed to be the actor but does not know this mesh's secret")


async def test_reflected_greetings(attacked, caplog):
    wire = Wire("actor", b"w" * 32, version=VERSION, identity=Identity(0, 0))
    hello = wire.take_outgoing()
    challenge = await is_refused(attacked, hello, b"", eof=True)
    assert challenge.startswith(b"jpp3")
    await is_refused(attacked, challenge)  # the controller's own words as an actor's first
    await logged(caplog, "bad greeting")
    caplog.clear()
    reader, writer = await knock(attacked, hello)
    answer = await reader.read(4096)
    body = b"\x91\xc4\x20" + answer[-32:]  # the controller's proof as an actor's
    writer.write(b"jpp3" + struct.pack(">H", len(body)) + body)
    async with asyncio.timeout(WITHIN_S):
        assert await reader.read() == b""
    writer.close()
    await logged(caplog, "does not know this mesh's secret")


async def knock_as(job: Job, identity: Identity) -> tuple[list[bytes], bytes]:
    """A handshake with the right secret: what this side said, and what came after it."""
    wire = Wire("actor", job.secret, version=VERSION, identity=identity)
    said = [wire.take_outgoing()]
    reader, writer = await knock(job, said[0])
    wire.feed(await reader.read(4096))
    said.append(wire.take_outgoing())
    writer.write(said[1])
    async with asyncio.timeout(WITHIN_S):
        with contextlib.suppress(ConnectionError):
            rest = await reader.read()
    writer.close()
    return said, rest


@pytest.mark.parametrize("channel", ["control", "beats"])
async def test_other_lives_and_second_comings(attacked, caplog, channel):
    """Of an epoch that is over, of one that is to come, and of one that is here already."""
    for actor, incarnation in ((0, -1), (0, 1), (7, 0), *([(0, 0)] if channel == "control" else [])):
        caplog.clear()
        _, rest = await knock_as(attacked, Identity(actor, incarnation, channel))
        assert rest == b""
        await logged(caplog, "is not expected" if channel == "control" else "is not here")


async def test_a_replayed_handshake(attacked, caplog):
    said, _ = await knock_as(attacked, Identity(1, 3))  # refused, but proved
    caplog.clear()
    await is_refused(attacked, *said)
    await logged(caplog, "does not know this mesh's secret")


# ---------------------------------------------------------------- case 23: floods and fragments


async def test_mutated_conversations(attacked, caplog):
    rng = random.Random(3)
    here, elsewhere = converse(rng, attacked.secret), converse(rng)

    async def attack() -> None:
        pieces = mutate_pieces(list(here.to_controller), "controller", elsewhere, here, rng)
        await is_refused(attacked, b"".join(pieces) or b"x", eof=True)

    async with asyncio.timeout(WITHIN_S):
        for _ in range(20):
            await asyncio.gather(*(attack() for _ in range(15)))
    assert 0 < len(refusals(caplog)) <= MOST + 1


async def test_half_open_and_slow_peers(attacked, caplog, monkeypatch):
    """Nothing at all, the beginning of a greeting, a byte now and then: each has until the deadline and no
    longer."""
    assert HANDSHAKE_TIMEOUT_S <= WITHIN_S
    monkeypatch.setattr(connection_module, "HANDSHAKE_TIMEOUT_S", 0.6)
    hello = Wire("actor", b"w" * 32, version=VERSION, identity=Identity(0, 0)).take_outgoing()
    began_s = time.monotonic()
    ends = [await knock(attacked, data) for data in (b"", b"j", b"jpp3", b"jpp3\x0f\x00", hello[:40], hello)]
    slow = await knock(attacked, b"")

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            for byte in hello:
                slow[1].write(bytes([byte]))
                await asyncio.sleep(0.1)

    dripping = asyncio.create_task(drip(), name="a byte now and then")
    async with asyncio.timeout(WITHIN_S):
        for reader, writer in [*ends, slow]:
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
    assert 0.5 < time.monotonic() - began_s < 2
    dripping.cancel()
    await logged(caplog, "did not prove itself within")


async def test_lengths_that_are_none(attacked):
    for size in (4090, 4091, 65535):
        await is_refused(attacked, b"jpp3" + struct.pack(">H", size) + b"\x91" * size, eof=True)
    for size in (2**31, 2**63, 2**64 - 1):
        await is_refused(attacked, struct.pack(">QQ", size, 0) + bytes(16))
    reader, writer = await knock(attacked, b"")
    with contextlib.suppress(ConnectionError):
        for _ in range(64):  # as much as it takes, from a peer that is refused at its first byte
            writer.write(bytes(1 << 18))
            await writer.drain()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert reader.at_eof() or reader.exception()


async def test_a_flood_of_connections(attacked, caplog):
    """More than may be in their handshake: they go, oldest first, and whoever knows the secret gets in
    meanwhile."""
    before = psutil.Process().num_fds()
    loop, silent = asyncio.get_running_loop(), []
    began_s = time.monotonic()
    try:
        for number in range(1500):
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, attacked.address)
            silent.append(sock)
            if len(silent) > 300:
                silent.pop(0).close()
            if number % 300 == 299:
                assert len(attacked.listener._unproven) <= listener_module.MAX_UNPROVEN
                assert psutil.Process().num_fds() - before < 2 * 300 + 50
                await knock_as(attacked, Identity(5, 0))
                await attacked.goes_on()
        assert time.monotonic() - began_s < WITHIN_S
    finally:
        for sock in silent:
            sock.close()
    lines = refusals(caplog)
    assert any("later ones are in their handshake" in line for line in lines) and len(lines) <= MOST + 1
    await until(lambda: psutil.Process().num_fds() <= before)


async def test_a_flood_from_one_address_keeps_nobody_from_another_out(attacked):
    """An actor that takes its time over the handshake is not the oldest of those who crowd the listener."""
    loop, silent = asyncio.get_running_loop(), []
    reader, writer = await knock(attacked, b"j")
    try:
        for _ in range(listener_module.MAX_UNPROVEN + 100):
            silent.append(socket.socket())
            silent[-1].setblocking(False)
            silent[-1].bind(("127.0.0.2", 0))
            await loop.sock_connect(silent[-1], attacked.address)
        await attacked.goes_on()
        sources = [connection.source for connection in attacked.listener._unproven]
        assert sources[0] == "127.0.0.1"
        assert len(sources) == listener_module.MAX_UNPROVEN
        assert not reader.at_eof()
    finally:
        writer.close()
        for sock in silent:
            sock.close()


async def test_the_control_listener_never_takes_all_descriptors(monkeypatch):
    monkeypatch.setattr(listener_module, "free_descriptors", lambda: 100)
    listener = listener_module.ControlListener(bytes(32), version=VERSION, max_frame_bytes=1 << 20)
    address = await listener.listen("127.0.0.1")
    silent = [await asyncio.open_connection(*address) for _ in range(40)]
    await until(lambda: len(listener._unproven) == 25)
    for _, writer in silent:
        writer.close()
    await listener.aclose()


async def test_a_flood_that_comes_at_once_takes_no_more_descriptors(monkeypatch):
    """The event loop accepted a hundred, whatever was left, before the listener heard of the first."""
    monkeypatch.setattr(listener_module, "free_descriptors", lambda: 40)
    listener, used = ControlListener(bytes(32), version=VERSION, max_frame_bytes=1 << 20), list[int]()
    make = listener._make_connection
    monkeypatch.setattr(listener, "_make_connection", lambda: (used.append(num_descriptors()), make())[1])
    address = await listener.listen("127.0.0.1")
    with contextlib.ExitStack() as stack:
        for silent in [stack.enter_context(socket.socket()) for _ in range(60)]:
            silent.setblocking(False)
            silent.connect_ex(address)
        before = num_descriptors()
        await until(lambda: len(listener._unproven) == 10)
        await asyncio.sleep(0.1)
        await listener.aclose()
    assert 0 < max(used) - before <= 30


async def test_an_actor_gets_in_during_a_flood():
    listener = ControlListener(b"s" * 32, version="1", max_frame_bytes=MIB)
    host, port = await listener.listen("127.0.0.1")
    arrival = listener.expect(Identity(0, 0))
    silent = [await asyncio.open_connection(host, port) for _ in range(listener_module.MAX_UNPROVEN + 50)]
    try:
        connection = connection_module.Connection(
            Wire("actor", b"s" * 32, version="1", identity=Identity(0, 0))
        )
        async with asyncio.timeout(1):
            await connection_module.connect_tcp(connection, host, port)
            assert (await arrival).is_open
        (await arrival).abort()
        await connection.wait_closed()
    finally:
        await listener.aclose()
        for _, writer in silent:
            writer.close()


async def test_a_connection_that_is_over_before_it_has_a_socket():
    connection = connection_module.Connection(Wire("controller", b"s" * 32, version="1"))
    connection.abort()
    here, there = socket.socketpair()
    there.settimeout(1)
    await connection_module.attach_socket(connection, here)
    async with asyncio.timeout(1):
        await connection.wait_closed()
    with pytest.raises(HandshakeError):
        await connection.opened
    assert there.recv(1) == b""
    there.close()


async def test_an_authenticated_peer_that_breaks_the_rules_ends_its_connection_only(caplog):
    def refuse(message: Any, number: int | None) -> None:
        raise ProtocolError(f"nobody asked for {type(message).__name__}")

    ended: list[Any] = []
    ours = connection_module.Connection(
        Wire("controller", b"s" * 32, version="1"), on_message=refuse, on_closed=ended.append
    )
    theirs = connection_module.Connection(Wire("actor", b"s" * 32, version="1", identity=Identity(0, 0)))
    for connection, sock in zip((ours, theirs), socket.socketpair(), strict=True):
        await connection_module.attach_socket(connection, sock)
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(ours.opened, theirs.opened)
        theirs.send(Done(), 7)
        theirs.send(Done(), 8)
        await asyncio.gather(ours.wait_closed(), theirs.wait_closed())
    assert [str(error) for error in ended] == ["nobody asked for Done"]
    assert [r for r in caplog.records if r.name == "asyncio" and r.levelno > logging.INFO] == []


async def test_what_came_before_a_broken_frame_is_told_before_the_connection_ends():
    record_heartbeat: list[Any] = []
    ours = connection_module.Connection(
        Wire("controller", b"s" * 32, version="1"),
        on_message=lambda message, number: record_heartbeat.append((number, message)),
        on_closed=record_heartbeat.append,
    )
    theirs = connection_module.Connection(Wire("actor", b"s" * 32, version="1", identity=Identity(0, 0)))
    for connection, sock in zip((ours, theirs), socket.socketpair(), strict=True):
        await connection_module.attach_socket(connection, sock)
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(ours.opened, theirs.opened)
        ours.data_received(b"".join(theirs.wire.encode(Done(), 7)) + b"\xff" * 60)
        await asyncio.gather(ours.wait_closed(), theirs.wait_closed())
    assert record_heartbeat[0] == (7, Done())
    assert [str(error) for error in record_heartbeat[1:]] == ["frame 1: the MAC of its length does not match"]


# ---------------------------------------------------------------- the log


def test_refusals_are_few_and_counted():
    now_s, lines = 0.0, []
    refused = RateLimitedLog(lines.append, lambda: now_s)
    for number in range(1000):
        refused.write(f"no {number}")
    assert lines == [f"no {number}" for number in range(MOST)]
    now_s = WINDOW_S + 1
    refused.write("no more")
    assert lines[MOST:] == [f"refused {1000 - MOST} more connections", "no more"]
    refused.flush()
    assert len(lines) == MOST + 2
    assert issubclass(HandshakeError, ProtocolError)
