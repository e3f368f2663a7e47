"""Talk to a program on a host, such as a host agent, over a stream of bytes, and control the actors that a
host agent starts.

A `Reach` is an object that starts programs on hosts, and opens such a stream to each program. The stream may
be a connection by ssh, by srun, through Ray, or by any other command that passes on stdin and stdout.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from jaxpp_async.launch import host_agent_protocol as kp
from jaxpp_async.launch.hosts import Host, ProcessPlacement
from jaxpp_async.launch.login_errors import Explanation
from jaxpp_async.launch.process_supervisor import TAIL_LINES, Death
from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.protocol.actor_info import ExitCode, Position
from jaxpp_async.protocol.line_protocol import RECORD
from jaxpp_async.protocol.parent_watch import Lease

R = TypeVar("R")
T = TypeVar("T")


class Stream(Protocol):
    """A connection that carries bytes to the stdin of a program on a host.

    A separate thread sends a heartbeat (one byte) every few seconds, so that the program knows that this
    process still runs.
    """

    def write(self, data: bytes) -> None:
        """Send bytes to the program's stdin, in order and without waiting. Does nothing once the stream has
        ended.
        """
        ...

    def kill(self) -> None:
        """End the stream immediately, and with it the program."""
        ...

    async def wait_ended(self) -> Death:
        """Wait until the stream has ended.

        Returns:
            How the process that carries the stream (such as ssh) ended, with the last lines of its output.
        """
        ...


class ProgramNotStartedError(Exception):
    """An error which says that a program on a host did not start, or did not answer in time.

    Attributes:
        said: the lines that the host printed instead of an answer.
        exit_status: the exit status of the stream's process; None if that process still runs, so that the
            program took too long.
        is_logged_in: whether the host had accepted the login.
    """

    def __init__(self, said: tuple[str, ...], exit_status: int | None, is_logged_in: bool):
        super().__init__(f"no answer: {exit_status}, {said[-3:]}")
        self.said, self.exit_status, self.is_logged_in = said, exit_status, is_logged_in


class Reach(Protocol):
    """The interface of the objects that run programs on hosts, such as by ssh.

    Launchers use it to start host agents, the programs that start actors on other hosts. The command `doctor`
    uses it to start the program that examines a host.
    """

    agent_per_process: bool
    """True if every process has a host agent, and so a stream, of its own; False if there is one per host. If
    every process has its own, a slot is a process (such as a Slurm task or a Ray bundle); otherwise a slot is
    a device.
    """

    login_mark: str | None
    """A line of output that shows that the host has accepted the login, printed before Python starts; None if
    the connection prints no such line.
    """

    lease: Lease
    """The time for which the started programs continue without a sign of life from the launcher, which sets
    this attribute.
    """

    async def resolve(self, hosts: Sequence[Host]) -> list[str]:
        """Return, for each host, the name or address by which to look up the network route to it; the name
        that the user gave may be an alias.
        """
        ...

    async def open(
        self, placement: ProcessPlacement, host_agent: Sequence[str], on_line: Callable[[str], None]
    ) -> Stream:
        """Start a program on the placement's host and return a stream connected to it.

        Args:
            placement: the process of the mesh for which the program is started, and its host.
            host_agent: the program's argument vector.
            on_line: a function that is called with each line of the program's stdout, and with error messages
                of the connection (such as ssh); any thread may call it.

        Raises:
            OSError: the connection could not be started at all.
        """
        ...

    def explain(self, host: Host, error: ProgramNotStartedError) -> Explanation | None:
        """Explain why a program did not start, if the reason lies in the connection to the host (such as ssh)
        and not in the program; else return None.

        Args:
            host: the host on which the program did not start.
            error: the error that waiting for the program raised.
        """
        ...

    async def aclose(self) -> None:
        """Release all that this object has started or reserved."""
        ...


class HostProgram(Generic[R]):
    """The local end of the connection to one program on a host.

    A line of the program's output is either a record (a message to this process) or text, such as a login
    banner. Each kind of program has a subclass, which handles its records.

    Args:
        name: the name of the host, for error messages.
        read_record: a function that returns the record in a line, or None if the line is text, and that
            raises ValueError for a line that begins like a record and is not a valid one.
        login_mark: a line of output that shows that the host has accepted the login; a record shows that too.
            None if the connection prints no such line.
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
        """Whether the stream to the program was opened and has since ended."""
        return self._over is not None and self._over.done()

    def on_line(self, line: str) -> None:
        """Have the event loop handle one line of the program's output. Any thread may call this."""
        try:
            self._loop.call_soon_threadsafe(self._take, line)
        except RuntimeError:  # the loop has closed
            return

    def attach(self, stream: Stream) -> None:
        """Begin to use a stream that is connected to the program. Call this once, before the methods that
        wait for the program.
        """
        self._stream = stream
        self._over = self._loop.create_task(self._watch(stream), name=f"watch what runs on {self.name}")

    async def wait_login(self, timeout_s: float) -> None:
        """Wait until the host has accepted the login, which the login mark or a record shows.

        Raises:
            ProgramNotStartedError: the stream ended, or the login took longer than `timeout_s` seconds.
        """
        await self._wait(self._logged_in.wait(), timeout_s)

    async def _wait(self, wanted: Awaitable[T], timeout_s: float) -> T:
        """Wait for an answer of the program, and return the result of `wanted`.

        Args:
            wanted: an awaitable that completes when the program has answered.
            timeout_s: the number of seconds to wait at most.

        Raises:
            ProgramNotStartedError: the stream ended first, or the program did not answer in time.
        """
        assert self._over is not None
        task = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait([task, self._over], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            exit_status = self._over.result().returncode if self._over.done() else None
            raise ProgramNotStartedError(tuple(self._said), exit_status, self._logged_in.is_set())
        finally:
            task.cancel()

    async def _end(self, timeout_s: float = 0.0) -> None:
        """Wait at most `timeout_s` seconds for the program to exit, then end the stream, which also ends a
        program that still runs. A second call does nothing.
        """
        if self._stream is None or self._over is None:
            return
        if timeout_s:
            await asyncio.wait([self._over], timeout=timeout_s)
        self._stream.kill()
        await self._over

    async def _watch(self, stream: Stream) -> Death:
        end = await stream.wait_ended()
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
        """Handle a line of the program's output that is text and not a record (a message to this process).

        By default the line is kept for the error message about a program that did not start.
        """
        if line.strip():
            self._said.append(line)
            del self._said[:-TAIL_LINES]

    def _take_end(self, end: Death) -> None:
        """Handle the end of the stream to the program. This method does nothing; subclasses may override
        it.
        """


# ---------------------------------------------------------------- host agents


class HostAgentClient(HostProgram[kp.Record]):
    """A client that controls one host agent, the program that starts and ends the actors of its host.

    Args:
        name: the name of the agent's host, for error messages.
        forward: a function that is called with each line of output that is not a record (a message of the
            agent), once the agent has started.
        login_mark: a line of output that shows that the host has accepted the login; None if there is no such
            line.

    Attributes:
        hello: a future whose result is the agent's greeting.
    """

    def __init__(self, name: str, forward: Callable[[str], None], *, login_mark: str | None = None):
        super().__init__(name, kp.read_record, login_mark)
        self._forward = forward
        self.hello: asyncio.Future[kp.AgentHello] = self._loop.create_future()
        self._actors: dict[str, HostAgentHandle] = {}

    async def wait_hello(self, timeout_s: float) -> kp.AgentHello:
        """Wait until the agent has started, and return its greeting.

        Raises:
            ProgramNotStartedError: the agent did not start within `timeout_s` seconds, or its stream ended.
        """
        hello = await self._wait(asyncio.shield(self.hello), timeout_s)
        for line in self._said:
            self._forward(line)
        return hello

    async def start(
        self, key: str, request: ActorRequest, folder: str, forward: Callable[[str], None]
    ) -> HostAgentHandle:
        """Have the agent start an actor process, and return its handle once the process exists.

        Args:
            key: the name by which the agent and this client refer to the process.
            request: the description of the process.
            folder: the working directory for the process, which is used if it exists on the agent's host.
            forward: a function that is called with each line that the process prints.

        Raises:
            OSError: the process could not be started, or the connection to the agent has ended.
        """
        if self.is_over or self._stream is None:
            raise OSError(f"the connection to {self.name} has ended")
        actor = self._actors[key] = HostAgentHandle(self, key, forward)
        self._stream.write(kp.write_order(kp.StartActor(key, request, folder)))
        actor.pid = await actor.started
        actor.host = self.hello.result().host
        return actor

    def signal(self, key: str, signum: int) -> None:
        """Have the agent send a signal to an actor process and to the processes that it started.

        Args:
            key: the name that `start` got for the process.
            signum: the number of the signal.
        """
        if self._stream is not None:
            self._stream.write(kp.write_order(kp.SignalActor(key, signum)))

    async def aclose(self, timeout_s: float) -> None:
        """Have the agent end the actors that still run, and then end itself. If that takes longer than
        `timeout_s` seconds, kill the stream.
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
            self._actors[record.key].take(record)

    def _take_end(self, end: Death) -> None:
        said = [x for x in end.output_tail if not x.startswith(RECORD) and x.strip() != self._login_mark]
        expired = end.returncode == ExitCode.LEASE_EXPIRED
        code = ExitCode.LEASE_EXPIRED if expired else ExitCode.HOST_LOST
        for actor in self._actors.values():
            actor.lose(code, f"the connection to {self.name} has ended", said[-3:])


class HostAgentHandle:
    """A handle on an actor process on another host, which a host agent was told to start (see `ActorHandle`).

    Args:
        agent: the client of the agent.
        key: the name by which the agent and its client refer to the process.
        forward: a function that is called with each line that the process prints.

    Attributes:
        host, pid: the host and the process id; not set until the process has started.
        started: a future whose result is the process id; the future fails with OSError if the process could
            not be started.
        dead: a future whose result is a report on how the process ended.
    """

    host: str
    pid: int

    def __init__(self, agent: HostAgentClient, key: str, forward: Callable[[str], None]):
        self._agent, self._key, self._forward = agent, key, forward
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = loop.create_future()
        self.dead: asyncio.Future[Death] = loop.create_future()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._position: Position | None = None

    def take(self, record: kp.ActorStarted | kp.StartFailed | kp.OutputLine | kp.ActorEnded) -> None:
        """Take in a record (a message of the agent) about this process."""
        if isinstance(record, kp.OutputLine):
            self._tail.append(record.text)
            self._forward(record.text)
        elif isinstance(record, kp.ActorEnded):
            self._position = record.position
            if not self.dead.done():
                self.dead.set_result(Death(record.returncode, self.output_tail()))
        elif not self.started.done():
            if isinstance(record, kp.ActorStarted):
                self.started.set_result(record.pid)
            else:
                self.started.set_exception(OSError(record.error))

    def lose(self, code: ExitCode, what: str, last_words: Sequence[str]) -> None:
        """Note that nothing more will be heard of the process, because the agent has ended.

        Args:
            code: the exit status to report if the process was alive.
            what: text that says what happened.
            last_words: the last lines of the agent's output.
        """
        if not self.started.done():
            self.started.set_exception(OSError(what))
            self.started.exception()  # mark it as retrieved; code that awaits it still gets it
        if not self.dead.done():
            self.dead.set_result(Death(code, (*self._tail, what, *last_words)))

    async def wait_dead(self) -> Death:
        """Wait until the process has died, and return how it died (see `ActorHandle.wait_dead`)."""
        return await asyncio.shield(self.dead)

    def terminate(self) -> None:
        """Have the agent send SIGTERM to the process and to the processes that it started (see
        `ActorHandle.terminate`).
        """
        self._agent.signal(self._key, 15)

    def kill(self) -> None:
        """Have the agent send SIGKILL to the process and to the processes that it started (see
        `ActorHandle.kill`).
        """
        self._agent.signal(self._key, 9)

    def output_tail(self) -> tuple[str, ...]:
        """Return the last lines that the process printed (see `ActorHandle.output_tail`)."""
        return tuple(self._tail)

    def progress(self) -> Position | None:
        """Return the process's last position in its program (the instruction that it had reached); None until
        the process has died, or if the position is not known.
        """
        return self._position
