"""keeper_link: the launcher's end of one keeper. A stream of bytes to a host in, `ActorHandle`s on it out.

It decides nothing about hosts, and knows no ssh: whatever carries bytes to a keeper and its lines back will do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from jaxpp_async.actors import keeper_protocol as kp
from jaxpp_async.actors.actor_request import ActorRequest
from jaxpp_async.actors.exit_codes import ExitCode
from jaxpp_async.actors.progress import Position
from jaxpp_async.actors.warden import TAIL_LINES, Death

_LOG = logging.getLogger("jaxpp_async")

T = TypeVar("T")


class Stream(Protocol):
    """Bytes to a keeper's stdin. It keeps the lease: a sign of life every few seconds, from a thread."""

    def write(self, data: bytes) -> None:
        """Send, in order and without waiting; nothing happens once it is over."""
        ...

    def kill(self) -> None:
        """End it at once, and so the keeper."""
        ...

    async def wait_over(self) -> Death:
        """Wait until it is over; how its process ended, and the last lines that were no records."""
        ...


class KeeperError(Exception):
    """A keeper did not come up.

    Attributes:
        said: what came instead. ended: exit status of its stream; None: it took too long.
        is_logged_in: the host let us in before.
    """

    def __init__(self, said: tuple[str, ...], ended: int | None, is_logged_in: bool):
        super().__init__(f"no keeper: {ended}, {said[-3:]}")
        self.said, self.ended, self.is_logged_in = said, ended, is_logged_in


@dataclass(slots=True)
class _Actor:
    """An actor that was asked for."""

    started: asyncio.Future[int]
    dead: asyncio.Future[Death]
    forward: Callable[[str], None]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    position: Position | None = None


class KeeperLink:
    """One keeper.

    Args:
        name: of its host, for messages.
        forward: called with each line that is no record.

    Attributes:
        logged_in: set by the first line `login_mark`, or the hello.
        hello: the keeper's first word.
    """

    def __init__(self, name: str, forward: Callable[[str], None], *, login_mark: str | None = None):
        self._loop = asyncio.get_running_loop()
        self.name, self._forward, self._login_mark = name, forward, login_mark
        self.hello: asyncio.Future[kp.Hello] = self._loop.create_future()
        self.logged_in = asyncio.Event()
        self.over: asyncio.Task[None] | None = None
        self._said: list[str] = []
        self._actors: dict[str, _Actor] = {}
        self._stream: Stream | None = None
        self._end: Death | None = None

    # ------------------------------------------------------------ its life

    def on_line(self, line: str) -> None:
        """Take a line of the keeper's output. Any thread may call this."""
        try:
            self._loop.call_soon_threadsafe(self._take, line)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            return

    def attach(self, stream: Stream) -> None:
        """The stream has begun."""
        self._stream = stream
        self.over = self._loop.create_task(self._watch(stream), name=f"watch the keeper of {self.name}")

    async def wait_login(self, timeout_s: float) -> None:
        """Wait until the host's login shell, or what stands for it, has answered.

        Raises:
            KeeperError: it has not.
        """
        await self._wait(self.logged_in.wait(), timeout_s)

    async def wait_hello(self, timeout_s: float) -> kp.Hello:
        """Wait until the keeper is up.

        Raises:
            KeeperError: it is not.
        """
        hello = await self._wait(asyncio.shield(self.hello), timeout_s)
        for line in self._said:
            self._forward(line)
        return hello

    async def _wait(self, wanted: Awaitable[T], timeout_s: float) -> T:
        assert self.over is not None
        task = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait([task, self.over], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            ended = self._end.returncode if self._end is not None else None
            raise KeeperError(tuple(self._said), ended, self.logged_in.is_set())
        finally:
            task.cancel()

    async def start(self, key: str, request: ActorRequest, folder: str, forward: Callable[[str], None]) -> KeeperHandle:
        """Have an actor started.

        Raises:
            OSError: it could not be.
        """
        actor = _Actor(self._loop.create_future(), self._loop.create_future(), forward)
        if self._end is not None or self._stream is None:
            raise OSError(f"the connection to {self.name} has ended")
        self._actors[key] = actor
        self._stream.write(kp.write_order(kp.Start(key, request, folder)))
        pid = await actor.started
        return KeeperHandle(self, key, actor, self.hello.result().host, pid)

    def signal(self, key: str, signum: int) -> None:
        """Signal an actor and what it started."""
        if self._stream is not None:
            self._stream.write(kp.write_order(kp.Signal(key, signum)))

    async def aclose(self, timeout_s: float) -> None:
        """Have the keeper end, with what is left of its actors; kill the stream if it has not in time."""
        if self._stream is None or self.over is None:
            return
        self._stream.write(kp.write_order(kp.Close()))
        await asyncio.wait([self.over], timeout=timeout_s)
        self._stream.kill()
        await self.over

    # ------------------------------------------------------------ what comes

    def _take(self, line: str) -> None:
        try:
            record = kp.read_record(line)
        except ValueError as error:
            _LOG.warning("host %s: %s", self.name, error)
            return
        if record is None:
            self._take_other(line)
        elif isinstance(record, kp.Hello):
            if not self.hello.done():
                self.hello.set_result(record)
            self.logged_in.set()
        elif record.key in self._actors:
            self._take_record(self._actors[record.key], record)

    def _take_other(self, line: str) -> None:
        if line.strip() == self._login_mark:
            self.logged_in.set()
        elif self.hello.done():
            self._forward(line)
        elif line.strip():
            self._said.append(line)
            del self._said[:-TAIL_LINES]

    def _take_record(self, actor: _Actor, record: kp.Started | kp.Failed | kp.Line | kp.Dead) -> None:
        if isinstance(record, kp.Line):
            actor.tail.append(record.text)
            actor.forward(record.text)
        elif isinstance(record, kp.Dead):
            actor.position = record.progress()
            if not actor.dead.done():
                actor.dead.set_result(Death(record.returncode, tuple(actor.tail)))
        elif not actor.started.done():
            if isinstance(record, kp.Started):
                actor.started.set_result(record.pid)
            else:
                actor.started.set_exception(OSError(record.error))

    async def _watch(self, stream: Stream) -> None:
        self._end = end = await stream.wait_over()
        said = [x for x in end.output_tail if not x.startswith(kp.RECORD) and x.strip() != self._login_mark]
        for actor in self._actors.values():
            if not actor.started.done():
                actor.started.set_exception(OSError(f"the connection to {self.name} has ended"))
                actor.started.exception()  # whoever awaits it still gets it
            if not actor.dead.done():
                last_words = (*actor.tail, f"the connection to {self.name} has ended", *said[-3:])
                actor.dead.set_result(Death(ExitCode.HOST_LOST, last_words))


class KeeperHandle:
    """An `ActorHandle` on an actor of a keeper."""

    def __init__(self, link: KeeperLink, key: str, actor: _Actor, host: str, pid: int):
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
