"""Heartbeats: their own channel, who may connect to it, the thread that sends them, and what ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from paths import SUPPORT

import jaxpp_async
from jaxpp_async.actors import heartbeat
from jaxpp_async.actors.heartbeat import Heartbeat, start_beating
from jaxpp_async.controller.listener import ControlListener
from jaxpp_async.controller.startup import Startup
from jaxpp_async.errors import HandshakeError, ProtocolError
from jaxpp_async.launch import LaunchSpec, LocalLauncher
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import ExitCode, Position, ProgressPage
from jaxpp_async.protocol.clocks import clock_name
from jaxpp_async.protocol.connection import Connection, connect_tcp
from jaxpp_async.protocol.frames import MAX_BEAT_BYTES, FrameKey, Identity, Wire
from tests.protocol.test_frames import SECRET, frame, greet, pair

ACTOR = Identity(3, 1)
BEATS = Identity(3, 1, "beats")
BEAT = m.Beat((2**62, 2**62, 2**62, True, False), clock_name())

# ---------------------------------------------------------------- the channel


def test_a_beat_round_trips_and_fits():
    actor, controller = greet(*pair(actor={"identity": BEATS}))
    assert controller.identity == BEATS
    for beat in (BEAT, m.Beat(None)):
        assert len(data := frame(actor, beat)) < MAX_BEAT_BYTES
        assert controller.feed(data) == [(None, beat)]


@pytest.mark.parametrize(
    ("identity", "message"),
    [(BEATS, m.Done()), (BEATS, m.Log(20, "root", "hello")), (ACTOR, BEAT)],
    ids=["a reply as a beat", "a log line as a beat", "a beat as a reply"],
)
def test_each_channel_has_its_own_messages(identity, message):
    actor, controller = greet(*pair(actor={"identity": identity}))
    with pytest.raises(ProtocolError, match=f"unknown message '{type(message).__name__}'"):
        controller.feed(frame(actor, message))


def test_nothing_is_asked_over_the_beats_channel_and_beats_are_short():
    actor, controller = greet(*pair(actor={"identity": BEATS}))
    with pytest.raises(ProtocolError, match="a message came, and none is expected"):
        actor.feed(b"".join(controller.encode(m.Inspect())))
    actor, controller = greet(*pair(actor={"identity": BEATS}))
    with pytest.raises(ProtocolError, match=f"at most {MAX_BEAT_BYTES} are allowed"):
        controller.feed(frame(actor, m.Log(20, "root", "x" * 300)))


def test_the_channel_is_proved():
    """A greeting for one channel made into one for the other is refused by both sides."""
    nonce = b"n" * 32
    said = pair(actor={"identity": BEATS, "nonce": nonce})[0].take_outgoing()
    actor, controller = pair(actor={"identity": ACTOR, "nonce": nonce})
    assert actor.take_outgoing() != said
    controller.feed(said)
    with pytest.raises(HandshakeError, match="does not know this mesh's secret"):
        actor.feed(controller.take_outgoing())


def test_an_unknown_channel_is_refused():
    stranger = pair(actor={"identity": Identity(3, 1, "x" * 5)})[0].take_outgoing()  # type: ignore[arg-type]
    with pytest.raises(HandshakeError, match=r"bad greeting.*invalid enum value"):
        pair()[1].feed(stranger)


# ---------------------------------------------------------------- the listener


class Heard:
    """Keeps the heartbeats that the listener hands over."""

    def __init__(self) -> None:
        self.beats: list[tuple[Identity, m.Beat]] = []
        self._next = asyncio.Event()

    def __call__(self, identity: Identity, beat: m.Beat) -> None:
        self.beats.append((identity, beat))
        self._next.set()

    async def one(self) -> m.Beat:
        """The next one."""
        self._next.clear()
        async with asyncio.timeout(10):
            await self._next.wait()
        return self.beats[-1][1]


@contextlib.asynccontextmanager
async def open_listener() -> AsyncIterator[tuple[ControlListener, tuple[str, int], Heard]]:
    """Open a listener, and close it at the end."""
    listener = ControlListener(SECRET, version=jaxpp_async.__version__, max_frame_bytes=1 << 20)
    listener.on_beat = record_heartbeat = Heard()
    try:
        yield listener, await listener.listen("127.0.0.1"), record_heartbeat
    finally:
        await listener.aclose()


async def knock(address: tuple[str, int], identity: Identity) -> Connection:
    wire = Wire("actor", SECRET, version=jaxpp_async.__version__, identity=identity)
    connection = Connection(wire)
    await connect_tcp(connection, *address)
    return connection


async def closed(connection: Connection) -> None:
    async with asyncio.timeout(5):
        await connection.wait_closed()


async def test_only_heartbeats_of_connected_actors_are_taken(caplog):
    async with open_listener() as (listener, address, record_heartbeat):
        arrival = listener.expect(ACTOR)
        early = await knock(address, BEATS)
        await closed(early)
        control = await knock(address, ACTOR)
        link = await arrival
        for stranger in (Identity(3, 0, "beats"), Identity(3, 2, "beats"), Identity(4, 1, "beats")):
            await closed(await knock(address, stranger))
        beats = await knock(address, BEATS)
        beats.send(BEAT)
        assert await record_heartbeat.one() == BEAT and record_heartbeat.beats == [(BEATS, BEAT)]
        second = await knock(address, BEATS)
        await closed(beats)  # an actor has one such connection
        control.close()
        await closed(link)
        second.send(BEAT)
        await closed(await knock(address, BEATS))  # by when that beat has come, too
        assert len(record_heartbeat.beats) == 1
        refused = [r.getMessage() for r in caplog.records if "refused a heartbeat" in r.getMessage()]
        assert len(refused) == 5 and not any(SECRET.hex() in text for text in refused)
        second.close()
        await closed(second)


async def test_a_forged_beat_ends_its_connection_and_no_other():
    async with open_listener() as (listener, address, record_heartbeat):
        arrival = listener.expect(ACTOR)
        control, beats = await knock(address, ACTOR), await knock(address, BEATS)
        beats.wire._send_key = FrameKey(b"x" * 32)
        beats.send(BEAT)
        await closed(beats)
        assert record_heartbeat.beats == [] and (await arrival).is_open
        good = await knock(address, BEATS)
        good.send(BEAT)
        assert await record_heartbeat.one() == BEAT
        for connection in (control, good, await arrival):
            connection.abort()
            await closed(connection)


# ---------------------------------------------------------------- the thread


async def test_the_thread_says_where_the_actor_is_and_ends_it_when_nobody_listens(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "_PAUSE_S", 0.02)
    monkeypatch.setattr(heartbeat, "_SETTLED_S", 0.0)
    monkeypatch.setattr(heartbeat, "ORDERLY_S", 0.0)
    left: asyncio.Future[ExitCode] = asyncio.get_running_loop().create_future()
    leave = lambda code: left.get_loop().call_soon_threadsafe(left.set_result, code)  # noqa: E731
    page = ProgressPage(None)
    async with open_listener() as (listener, address, record_heartbeat):
        arrival = listener.expect(ACTOR)
        control = await knock(address, ACTOR)
        link = await arrival
        thread = start_beating(Heartbeat(ACTOR, SECRET, address), page.read, leave)
        assert (await record_heartbeat.one()).position is None
        page.note(7, 1, 12, False, True)
        while await record_heartbeat.one() != m.Beat((7, 1, 12, False, True), clock_name()):
            pass
        assert not left.done() and threading.active_count() > 1
        for connection in (control, link):
            connection.abort()
            await closed(connection)
    async with asyncio.timeout(5):
        assert await left == ExitCode.CONNECTION_LOST
    thread.join(5)
    page.close()


async def test_the_thread_tries_again_until_it_is_let_in(monkeypatch):
    monkeypatch.setattr(heartbeat, "_PAUSE_S", 0.02)
    left: list[ExitCode] = []
    async with open_listener() as (listener, address, record_heartbeat):
        refused, refuse = asyncio.Event(), listener._is_connected
        monkeypatch.setattr(listener, "_is_connected", lambda identity: refused.set() or refuse(identity))
        thread = start_beating(Heartbeat(ACTOR, SECRET, address), lambda: None, left.append)
        await refused.wait()
        arrival = listener.expect(ACTOR)
        control = await knock(address, ACTOR)
        await record_heartbeat.one()
        monkeypatch.setattr(heartbeat, "_ATTEMPTS", 0)
        monkeypatch.setattr(heartbeat, "ORDERLY_S", 0.0)
        monkeypatch.setattr(heartbeat, "_SETTLED_S", 0.0)
        for connection in (control, await arrival):
            connection.abort()
            await closed(connection)
    await asyncio.to_thread(thread.join, 10)
    assert left == [ExitCode.CONNECTION_LOST]


# ---------------------------------------------------------------- a process


async def test_a_process_beats_and_a_stopped_one_does_not():
    launcher = LocalLauncher(actor="fake_actor:FakeActor", forward=lambda line: None)
    async with open_listener() as (listener, address, record_heartbeat):
        env = {"PYTHONPATH": f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        spec: Any = LaunchSpec(0, 1, 0, SECRET, address, env=env)
        link = await Startup(launcher, listener, None, timeout_s=30, on_progress=lambda text: None).start(
            spec
        )
        try:
            assert (await record_heartbeat.one()).position is None
            os.kill(link.handle.pid, signal.SIGSTOP)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):  # what was on its way
                    await record_heartbeat.one()
            count = len(record_heartbeat.beats)
            await asyncio.sleep(2.2 * heartbeat.BEAT_S)
            assert len(record_heartbeat.beats) == count
            os.kill(link.handle.pid, signal.SIGCONT)
            await record_heartbeat.one()
            link.connection.abort()  # the actor notices by itself
            async with asyncio.timeout(10):
                assert (await link.handle.wait_dead()).returncode == ExitCode.CONNECTION_LOST
        finally:
            await launcher.aclose()


def test_the_shared_page_holds_the_position_that_was_written():
    page = ProgressPage(None)
    assert page.read() is None
    page.note(7, 1, 12, True)
    assert page.read() == Position(7, 1, 12, True, False)
    page.close()
    assert page.read() is None
