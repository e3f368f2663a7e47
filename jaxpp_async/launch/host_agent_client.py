"""Talk to a program on a host, such as a host agent, over a stream of bytes, and control the actors that an
agent starts.

A `Reach` opens the stream: ssh, srun, Ray, or any other way that carries bytes to the program and its lines
back.
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
    """Carries bytes to a program's stdin, and gives a sign of life every few seconds from a thread of its
    own.
    """

    def write(self, data: bytes) -> None:
        """Send bytes, in order and without waiting. Does nothing once the stream has ended."""
        ...

    def kill(self) -> None:
        """End the stream at once, and with it the program."""
        ...

    async def wait_over(self) -> Death:
        """Wait until the stream has ended.

        Returns:
            How its process ended, with the last lines that were no records.
        """
        ...


class NotUpError(Exception):
    """A program on a host did not start, or did not answer.

    Attributes:
        said: the lines that came instead.
        ended: exit status of the stream; None: the program took too long.
        is_logged_in: the host had accepted the login.
    """

    def __init__(self, said: tuple[str, ...], ended: int | None, is_logged_in: bool):
        super().__init__(f"no answer: {ended}, {said[-3:]}")
        self.said, self.ended, self.is_logged_in = said, ended, is_logged_in


class Reach(Protocol):
    """A way to run a program on a host."""

    agent_per_process: bool
    """Whether every process has a host agent, and so a stream, of its own; else there is one for each host.
    With one for each process a slot is a process (a task, a bundle), else a device.
    """

    login_mark: str | None
    """A line that shows that the host has accepted the login, before Python starts; None if there is no such
    line.
    """

    lease: Lease
    """How long the programs that it runs go on without a sign of life; the launcher sets it."""

    async def resolve(self, hosts: Sequence[Host]) -> list[str]:
        """Give the names or addresses by which to find the route to the hosts."""
        ...

    async def open(
        self, placement: ProcessPlacement, host_agent: Sequence[str], on_line: Callable[[str], None]
    ) -> Stream:
        """Run a program on the placement's host.

        Args:
            placement: says which host.
            host_agent: the program's argument vector.
            on_line: called with each line of the program's stdout, and with errors of the way there; from any
                thread.

        Raises:
            OSError: the way there could not be used at all.
        """
        ...

    def explain(self, host: Host, error: NotUpError) -> Explanation | None:
        """Explain why the program did not start, if the reason lies in the way there."""
        ...

    async def aclose(self) -> None:
        """Give everything back."""
        ...


class HostProgram(Generic[R]):
    """This end of one program on a host. A subclass for each kind of program handles its records.

    Args:
        name: of the host, for messages.
        read_record: gives the record in a line, None if the line is none; raises ValueError with what is
            wrong.
        login_mark: a line that shows that the host has accepted the login; a record shows it too.
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
        """Whether the stream was opened and has ended."""
        return self._over is not None and self._over.done()

    def on_line(self, line: str) -> None:
        """Take a line of the program's output. Any thread may call this."""
        try:
            self._loop.call_soon_threadsafe(self._take, line)
        except RuntimeError:  # the loop has closed
            return

    def attach(self, stream: Stream) -> None:
        """Begin to use a stream."""
        self._stream = stream
        self._over = self._loop.create_task(self._watch(stream), name=f"watch what runs on {self.name}")

    async def wait_login(self, timeout_s: float) -> None:
        """Wait until the host's login shell, or its equivalent, has answered.

        Raises:
            NotUpError: it has not.
        """
        await self._wait(self._logged_in.wait(), timeout_s)

    async def _wait(self, wanted: Awaitable[T], timeout_s: float) -> T:
        """Wait for something that the program does.

        Raises:
            NotUpError: the program ended, or took longer.
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
        """Wait for the program's end, and kill the stream if that takes longer. A second call
        does nothing.
        """
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

    # ------------------------------------------------------------ for subclasses

    def _take_record(self, record: R) -> None:
        raise NotImplementedError

    def _take_text(self, line: str) -> None:
        """Take a line that is no record. By default it is kept, to explain why the program did not start."""
        if line.strip():
            self._said.append(line)
            del self._said[:-TAIL_LINES]

    def _take_end(self, end: Death) -> None:
        """Act on the end of the stream."""


# ---------------------------------------------------------------- host agents


@dataclass(slots=True)
class _Actor:
    """An actor process that an agent was told to start."""

    started: asyncio.Future[int]
    dead: asyncio.Future[Death]
    forward: Callable[[str], None]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    position: Position | None = None


class HostAgentClient(HostProgram[kp.Record]):
    """Controls one host agent.

    Args:
        name: of its host, for messages.
        forward: called with each line that is no record, once the agent has started.
        login_mark: a line that shows that the host has accepted the login.

    Attributes:
        hello: the agent's greeting.
    """

    def __init__(self, name: str, forward: Callable[[str], None], *, login_mark: str | None = None):
        super().__init__(name, kp.read_record, login_mark)
        self._forward = forward
        self.hello: asyncio.Future[kp.AgentHello] = self._loop.create_future()
        self._actors: dict[str, _Actor] = {}

    async def wait_hello(self, timeout_s: float) -> kp.AgentHello:
        """Wait until the agent has started.

        Raises:
            NotUpError: it has not.
        """
        hello = await self._wait(asyncio.shield(self.hello), timeout_s)
        for line in self._said:
            self._forward(line)
        return hello

    async def start(
        self, key: str, request: ActorRequest, folder: str, forward: Callable[[str], None]
    ) -> HostAgentHandle:
        """Have the agent start an actor process.

        Args:
            key: names the process to the agent.
            request: describes the process.
            folder: to work in, where it exists.
            forward: called with each line that the process prints.

        Raises:
            OSError: the process could not be started.
        """
        actor = _Actor(self._loop.create_future(), self._loop.create_future(), forward)
        if self.is_over or self._stream is None:
            raise OSError(f"the connection to {self.name} has ended")
        self._actors[key] = actor
        self._stream.write(kp.write_order(kp.StartActor(key, request, folder)))
        pid = await actor.started
        return HostAgentHandle(self, key, actor, self.hello.result().host, pid)

    def signal(self, key: str, signum: int) -> None:
        """Signal an actor process and all that it started."""
        if self._stream is not None:
            self._stream.write(kp.write_order(kp.SignalActor(key, signum)))

    async def aclose(self, timeout_s: float) -> None:
        """Have the agent end what is left of its actors, and then itself. Kill the stream if that takes
        longer.
        """
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
                actor.started.exception()  # code that awaits it still gets it
            if not actor.dead.done():
                last_words = (*actor.tail, f"the connection to {self.name} has ended", *said[-3:])
                expired = end.returncode == ExitCode.LEASE_EXPIRED
                code = ExitCode.LEASE_EXPIRED if expired else ExitCode.HOST_LOST
                actor.dead.set_result(Death(code, last_words))


class HostAgentHandle:
    """An `ActorHandle` on a process of a host agent."""

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
        """See `ActorHandle`; the position is known once the process has died."""
        return self._actor.position
