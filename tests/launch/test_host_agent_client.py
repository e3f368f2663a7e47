"""Direct tests of the launcher's end of one host's agent: lines in, handles on actors out."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from jaxpp_async.launch.host_agent_client import HostAgentClient, ProgramNotStartedError
from jaxpp_async.launch.host_agent_protocol import (
    ActorEnded,
    ActorStarted,
    AgentHello,
    Close,
    OutputLine,
    SignalActor,
    StartActor,
    StartFailed,
    read_order,
    read_record,
    write_order,
    write_record,
)
from jaxpp_async.launch.process_supervisor import Death
from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.protocol.actor_info import ExitCode, Position

HELLO = AgentHello("node1", 77, "/usr/bin/python3", {"jax": "0.10", "ray": None})
REQUEST = ActorRequest("python3", {"A": "1"}, {"secret": "s3cret"}, index=1, count=2, cpus=(0, 1))


class Stream:
    """A connection to a host; the test says when it ends."""

    def __init__(self):
        self.orders, self.killed = [], 0
        self.over: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    def write(self, data: bytes) -> None:
        self.orders.append(read_order(data))

    def kill(self) -> None:
        self.killed += 1
        if not self.over.done():
            self.over.set_result(Death(-9, ()))

    async def wait_ended(self) -> Death:
        return await self.over


class Host:
    """A link to a host, and the host's side of it. `closed_links` closes it."""

    links: ClassVar[list[HostAgentClient]] = []

    def __init__(self, *, login_mark: str | None = None):
        self.forwarded: list[str] = []
        self.link = HostAgentClient("node1", self.forwarded.append, login_mark=login_mark)
        self.stream = Stream()
        self.link.attach(self.stream)
        self.links.append(self.link)

    async def say(self, *said: object) -> None:
        """Print records, or lines of text, and let the link take them."""
        for one in said:
            self.link.on_line(one if isinstance(one, str) else write_record(one).decode().rstrip("\n"))
        for _ in range(3):
            await asyncio.sleep(0)

    async def end(self, returncode: int, *tail: str) -> None:
        self.stream.over.set_result(Death(returncode, tail))
        for _ in range(3):
            await asyncio.sleep(0)

    def start(self, key: str = "a", forward=lambda line: None) -> asyncio.Task:
        return asyncio.ensure_future(self.link.start(key, REQUEST, "/tmp", forward))


@pytest.fixture(autouse=True)
async def closed_links():
    """Close what a test has opened, which would be an asyncio task that nobody ends."""
    yield
    while Host.links:
        await Host.links.pop().aclose(0.0)


async def started_actor(forward=lambda line: None):
    host = Host()
    starting = host.start(forward=forward)
    await host.say(HELLO, ActorStarted("a", 4711))
    return host, await starting


# ---------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    "order", [StartActor("a", REQUEST, "/tmp"), SignalActor("a", 15), Close()], ids=lambda o: type(o).__name__
)
def test_an_order_arrives_as_it_was_written(order):
    assert read_order(write_order(order)) == order


@pytest.mark.parametrize(
    "record",
    [
        HELLO,
        ActorStarted("a", 1),
        StartFailed("a", "no such file"),
        OutputLine("a", "\x1b[0m"),
        ActorEnded("a", -9, Position(1, 2, 3, True, False)),
    ],
    ids=lambda r: type(r).__name__,
)
def test_a_record_arrives_as_it_was_written(record):
    assert read_record(write_record(record).decode()) == record


@pytest.mark.parametrize("signum", [0, -1, 65])
def test_what_is_no_signal_is_refused(signum):
    with pytest.raises(ValueError, match=rf"^{signum} is no signal$"):
        SignalActor("a", signum)
    with pytest.raises(ValueError, match=r"^no message of a host agent \(ValidationError\)$"):
        read_order(f'["SignalActor", ["a", {signum}]]'.encode())


def test_a_request_prints_without_its_secret():
    assert "s3cret" not in repr(StartActor("a", REQUEST, "/tmp")) + repr(REQUEST)


def test_a_death_tells_where_the_actor_was_if_that_is_known():
    for position in (Position(7, 0, 3, waiting=True), None):
        told = read_record(write_record(ActorEnded("a", 1, position)).decode())
        assert told.position == position and type(told.position) is type(position)


# ---------------------------------------------------------------- coming up


async def test_the_first_word_of_a_host_says_that_it_is_up_and_what_it_has():
    host = Host()
    await host.say("Welcome to node1!", HELLO, "a late line")
    assert await host.link.wait_hello(60.0) == HELLO
    await host.link.wait_login(60.0)
    assert host.forwarded == ["a late line", "Welcome to node1!"]


async def test_a_login_mark_says_that_the_host_let_us_in_and_is_no_line_of_its():
    host = Host(login_mark="let in")
    await host.say("motd", "  let in ")
    await host.link.wait_login(60.0)
    await host.end(1)
    with pytest.raises(ProgramNotStartedError) as caught:
        await host.link.wait_hello(60.0)
    assert (caught.value.said, caught.value.exit_status, caught.value.is_logged_in) == (("motd",), 1, True)


async def test_a_host_that_says_nothing_in_time_is_not_up():
    host = Host()
    with pytest.raises(ProgramNotStartedError) as caught:
        await host.link.wait_login(0.0)
    assert (caught.value.said, caught.value.exit_status, caught.value.is_logged_in) == ((), None, False)


async def test_a_broken_record_is_kept_as_a_word_of_the_host():
    host = Host()
    await host.say('\x1e["Nonsense"]')
    await host.end(2)
    with pytest.raises(ProgramNotStartedError) as caught:
        await host.link.wait_hello(60.0)
    assert caught.value.said == ("no message of a host agent (ValidationError)",)


# ---------------------------------------------------------------- actors


async def test_an_actor_is_started_by_an_order_and_known_by_its_process():
    host, actor = await started_actor()
    assert host.stream.orders == [StartActor("a", REQUEST, "/tmp")]
    assert (actor.host, actor.pid, actor.progress(), actor.output_tail()) == ("node1", 4711, None, ())


async def test_lines_of_an_actor_are_forwarded_and_the_last_ones_kept():
    lines = []
    host, actor = await started_actor(lines.append)
    await host.say(OutputLine("a", "one"), OutputLine("b", "of nobody"), OutputLine("a", "two"))
    assert lines == ["one", "two"]
    assert actor.output_tail() == ("one", "two")


async def test_signals_go_to_the_actor_that_is_meant():
    host, actor = await started_actor()
    actor.terminate()
    actor.kill()
    assert host.stream.orders[1:] == [SignalActor("a", 15), SignalActor("a", 9)]


async def test_the_end_of_an_actor_comes_with_its_last_lines_and_its_position():
    host, actor = await started_actor()
    await host.say(OutputLine("a", "Killed"), ActorEnded("a", -9, Position(7, 0, 3, False, True)))
    assert await actor.wait_dead() == Death(-9, ("Killed",))
    assert actor.progress() == Position(7, 0, 3, waiting=False, computing=True)


async def test_an_actor_that_could_not_be_started_raises_the_reason():
    host = Host()
    starting = host.start()
    await host.say(HELLO, StartFailed("a", "no such interpreter"))
    with pytest.raises(OSError, match=r"^no such interpreter$"):
        await starting


@pytest.mark.parametrize(("returncode", "code"), [(255, ExitCode.HOST_LOST), (82, ExitCode.LEASE_EXPIRED)])
async def test_the_end_of_a_connection_is_the_end_of_all_of_its_actors(returncode, code):
    host, actor = await started_actor()
    late = host.start("b")
    await host.say(OutputLine("a", "working"))
    await host.end(returncode, "\x1e[record]", "Connection closed by peer")
    end = "the connection to node1 has ended"
    assert await actor.wait_dead() == Death(code, ("working", end, "Connection closed by peer"))
    with pytest.raises(OSError, match=rf"^{end}$"):
        await late
    with pytest.raises(OSError, match=rf"^{end}$"):
        await host.start("c")
    assert host.link.is_over


async def test_closing_asks_the_host_to_end_and_then_kills_the_connection():
    host, _ = await started_actor()
    await host.link.aclose(0.0)
    assert host.stream.orders[-1] == Close()
    assert host.stream.killed == 1
