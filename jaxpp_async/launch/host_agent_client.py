"""keeper_link: the launcher's end of one keeper. A stream of bytes to a host in, `ActorHandle`s on it out.

It decides nothing about hosts, and knows no ssh: whatever carries bytes to a keeper and its lines back will do.

host_program: this end of one program on a host, behind a login. What it prints in; its records out.

It knows no ssh, and not what the program is for: whatever carries bytes there and lines back will do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from jaxpp_async.launch import host_agent_protocol as kp
from jaxpp_async.launch.hosts import Host, ProcessPlacement
from jaxpp_async.launch.login_errors import Explanation
from jaxpp_async.launch.process_supervisor import TAIL_LINES, Death
from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.line_protocol import RECORD
from jaxpp_async.protocol.parent_watch import ExitCode, Lease

R = TypeVar("R")
T = TypeVar("T")


class Stream(Protocol):
    """Bytes to a program's stdin. It keeps the lease: a sign of life every few seconds, from a thread."""

    def write(self, data: bytes) -> None:
        """Send, in order and without waiting; nothing happens once it is over."""
        ...

    def kill(self) -> None:
        """End it at once, and so the program."""
        ...

    async def wait_over(self) -> Death:
        """Wait until it is over; how its process ended, and the last lines that were no records."""
        ...


class NotUpError(Exception):
    """A program on a host did not come up, or did not answer.

    Attributes:
        said: what came instead. ended: exit status of its stream; None: it took too long.
        is_logged_in: the host let us in before.
    """

    def __init__(self, said: tuple[str, ...], ended: int | None, is_logged_in: bool):
        super().__init__(f"no answer: {ended}, {said[-3:]}")
        self.said, self.ended, self.is_logged_in = said, ended, is_logged_in


class Reach(Protocol):
    """How a program is run on a host."""

    agent_per_process: bool
    """Whether every process has a keeper, and so a stream, of its own, instead of one a host. A slot is a process there
    (a task, a bundle), elsewhere a device."""

    login_mark: str | None
    """A line that tells that the host let us in, before Python starts; None if there is none."""

    lease: Lease
    """How long what it runs waits for a sign of life; its launcher sets it."""

    async def resolve(self, hosts: Sequence[Host]) -> list[str]:
        """Names or addresses by which to find the route to the hosts."""
        ...

    async def open(
        self, placement: ProcessPlacement, host_agent: Sequence[str], on_line: Callable[[str], None]
    ) -> Stream:
        """Run `keeper` (an argument vector) on the placement's host.

        Args:
            on_line: to be called with each line of its stdout, and of whatever complains on the way; from any thread.

        Raises:
            OSError: not even that could begin.
        """
        ...

    def explain(self, host: Host, error: NotUpError) -> Explanation | None:
        """Why there is no keeper, if it has to do with the way there."""
        ...

    async def aclose(self) -> None:
        """Give everything back."""
        ...


class HostProgram(Generic[R]):
    """One program. Whoever makes a kind of it says what its records mean.

    Args:
        name: of its host, for messages.
        read_record: the record in a line, None if it is none; a ValueError says what is wrong with it.
        login_mark: a line that tells that the host let us in; a record tells it as well.
    """

    def __init__(self, name: str, read_record: Callable[[str], R | None], login_mark: str | None):
        self._loop = asyncio.get_running_loop()
        self.name, self._read_record, self._login_mark = name, read_record, login_mark
        self._logged_in = asyncio.Event()
        self._said: list[str] = []
        self._stream: Stream | None = None
        self._over: asyncio.Task[Death] | None = None

    @property
    def is_over(self) -> bool:
        """Its stream was there, and has ended."""
        return self._over is not None and self._over.done()

    def on_line(self, line: str) -> None:
        """Take a line of its output. Any thread may call this."""
        try:
            self._loop.call_soon_threadsafe(self._take, line)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            return

    def attach(self, stream: Stream) -> None:
        """The stream has begun."""
        self._stream = stream
        self._over = self._loop.create_task(self._watch(stream), name=f"watch what runs on {self.name}")

    async def wait_login(self, timeout_s: float) -> None:
        """Wait until the host's login shell, or what stands for it, has answered.

        Raises:
            NotUpError: it has not.
        """
        await self._wait(self._logged_in.wait(), timeout_s)

    async def _wait(self, wanted: Awaitable[T], timeout_s: float) -> T:
        """Wait for something that the program does.

        Raises:
            NotUpError: it ended, or took longer.
        """
        assert self._over is not None
        task = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait([task, self._over], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            ended = self._over.result().returncode if self._over.done() else None
            raise NotUpError(tuple(self._said), ended, self._logged_in.is_set())
        finally:
            task.cancel()

    async def _end(self, timeout_s: float = 0.0) -> None:
        """Wait for its end, and kill the stream if that takes longer. A second call does nothing."""
        if self._stream is None or self._over is None:
            return
        if timeout_s:
            await asyncio.wait([self._over], timeout=timeout_s)
        self._stream.kill()
        await self._over

    async def _watch(self, stream: Stream) -> Death:
        end = await stream.wait_over()
        self._take_end(end)
        return end

    def _take(self, line: str) -> None:
        try:
            record = self._read_record(line)
        except ValueError as error:
            self._take_text(str(error))
            return
        if record is not None:
            self._logged_in.set()
            self._take_record(record)
        elif line.strip() == self._login_mark:
            self._logged_in.set()
        else:
            self._take_text(line)

    # ------------------------------------------------------------ for each kind to say

    def _take_record(self, record: R) -> None:
        raise NotImplementedError

    def _take_text(self, line: str) -> None:
        """A line that is no record: by default kept, for whoever has to say why it did not come up."""
        if line.strip():
            self._said.append(line)
            del self._said[:-TAIL_LINES]

    def _take_end(self, end: Death) -> None:
        """Its stream has ended."""


# ---------------------------------------------------------------- keeper link


@dataclass(slots=True)
class _Actor:
    """An actor that was asked for."""

    started: asyncio.Future[int]
    dead: asyncio.Future[Death]
    forward: Callable[[str], None]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    position: Position | None = None


class HostAgentClient(HostProgram[kp.Record]):
    """One keeper.

    Args:
        name: of its host, for messages.
        forward: called with each line that is no record, once the keeper is up.
        login_mark: a line that tells that the host let us in.

    Attributes:
        hello: the keeper's first word.
    """

    def __init__(self, name: str, forward: Callable[[str], None], *, login_mark: str | None = None):
        super().__init__(name, kp.read_record, login_mark)
        self._forward = forward
        self.hello: asyncio.Future[kp.AgentHello] = self._loop.create_future()
        self._actors: dict[str, _Actor] = {}

    async def wait_hello(self, timeout_s: float) -> kp.AgentHello:
        """Wait until the keeper is up.

        Raises:
            NotUpError: it is not.
        """
        hello = await self._wait(asyncio.shield(self.hello), timeout_s)
        for line in self._said:
            self._forward(line)
        return hello

    async def start(
        self, key: str, request: ActorRequest, folder: str, forward: Callable[[str], None]
    ) -> HostAgentHandle:
        """Have an actor started.

        Raises:
            OSError: it could not be.
        """
        actor = _Actor(self._loop.create_future(), self._loop.create_future(), forward)
        if self.is_over or self._stream is None:
            raise OSError(f"the connection to {self.name} has ended")
        self._actors[key] = actor
        self._stream.write(kp.write_order(kp.StartActor(key, request, folder)))
        pid = await actor.started
        return HostAgentHandle(self, key, actor, self.hello.result().host, pid)

    def signal(self, key: str, signum: int) -> None:
        """Signal an actor and what it started."""
        if self._stream is not None:
            self._stream.write(kp.write_order(kp.SignalActor(key, signum)))

    async def aclose(self, timeout_s: float) -> None:
        """Have the keeper end, with what is left of its actors; kill the stream if it has not in time."""
        if self._stream is not None:
            self._stream.write(kp.write_order(kp.Close()))
        await self._end(timeout_s)

    def _take_text(self, line: str) -> None:
        if self.hello.done():
            self._forward(line)
        else:
            super()._take_text(line)

    def _take_record(self, record: kp.Record) -> None:
        if isinstance(record, kp.AgentHello):
            if not self.hello.done():
                self.hello.set_result(record)
        elif record.key in self._actors:
            self._deliver(self._actors[record.key], record)

    def _deliver(
        self, actor: _Actor, record: kp.ActorStarted | kp.StartFailed | kp.OutputLine | kp.ActorEnded
    ) -> None:
        if isinstance(record, kp.OutputLine):
            actor.tail.append(record.text)
            actor.forward(record.text)
        elif isinstance(record, kp.ActorEnded):
            actor.position = record.progress()
            if not actor.dead.done():
                actor.dead.set_result(Death(record.returncode, tuple(actor.tail)))
        elif not actor.started.done():
            if isinstance(record, kp.ActorStarted):
                actor.started.set_result(record.pid)
            else:
                actor.started.set_exception(OSError(record.error))

    def _take_end(self, end: Death) -> None:
        said = [x for x in end.output_tail if not x.startswith(RECORD) and x.strip() != self._login_mark]
        for actor in self._actors.values():
            if not actor.started.done():
                actor.started.set_exception(OSError(f"the connection to {self.name} has ended"))
                actor.started.exception()  # whoever awaits it still gets it
            if not actor.dead.done():
                last_words = (*actor.tail, f"the connection to {self.name} has ended", *said[-3:])
                expired = end.returncode == ExitCode.LEASE_EXPIRED
                code = ExitCode.LEASE_EXPIRED if expired else ExitCode.HOST_LOST
                actor.dead.set_result(Death(code, last_words))


class HostAgentHandle:
    """An `ActorHandle` on an actor of a keeper."""

    def __init__(self, link: HostAgentClient, key: str, actor: _Actor, host: str, pid: int):
        self._link, self._key, self._actor = link, key, actor
        self.host, self.pid = host, pid

    async def wait_dead(self) -> Death:
        """See `ActorHandle`."""
        return await asyncio.shield(self._actor.dead)

    def terminate(self) -> None:
        """See `ActorHandle`."""
        self._link.signal(self._key, 15)

    def kill(self) -> None:
        """See `ActorHandle`."""
        self._link.signal(self._key, 9)

    def output_tail(self) -> tuple[str, ...]:
        """See `ActorHandle`."""
        return tuple(self._actor.tail)

    def progress(self) -> Position | None:
        """See `ActorHandle`: known once it has died."""
        return self._actor.position
