"""keeper_link: the launcher's end of one keeper. A stream of bytes to a host in, `ActorHandle`s on it out.

It decides nothing about hosts, and knows no ssh: whatever carries bytes to a keeper and its lines back will do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxpp_async.actors.launch.host_program import HostProgram
from jaxpp_async.actors.processes import keeper_protocol as kp
from jaxpp_async.actors.processes.actor_request import ActorRequest
from jaxpp_async.actors.processes.exit_codes import ExitCode
from jaxpp_async.actors.processes.progress import Position
from jaxpp_async.actors.processes.warden import TAIL_LINES, Death
from jaxpp_async.actors.protocol.line_protocol import RECORD


@dataclass(slots=True)
class _Actor:
    """An actor that was asked for."""

    started: asyncio.Future[int]
    dead: asyncio.Future[Death]
    forward: Callable[[str], None]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    position: Position | None = None


class KeeperLink(HostProgram[kp.Record]):
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
        self.hello: asyncio.Future[kp.Hello] = self._loop.create_future()
        self._actors: dict[str, _Actor] = {}

    async def wait_hello(self, timeout_s: float) -> kp.Hello:
        """Wait until the keeper is up.

        Raises:
            NotUpError: it is not.
        """
        hello = await self._wait(asyncio.shield(self.hello), timeout_s)
        for line in self._said:
            self._forward(line)
        return hello

    async def start(self, key: str, request: ActorRequest, folder: str, forward: Callable[[str], None]) -> KeeperHandle:
        """Have an actor started.

        Raises:
            OSError: it could not be.
        """
        actor = _Actor(self._loop.create_future(), self._loop.create_future(), forward)
        if self.is_over or self._stream is None:
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
        if self._stream is not None:
            self._stream.write(kp.write_order(kp.Close()))
        await self._end(timeout_s)

    def _take_text(self, line: str) -> None:
        if self.hello.done():
            self._forward(line)
        else:
            super()._take_text(line)

    def _take_record(self, record: kp.Record) -> None:
        if isinstance(record, kp.Hello):
            if not self.hello.done():
                self.hello.set_result(record)
        elif record.key in self._actors:
            self._tell(self._actors[record.key], record)

    def _tell(self, actor: _Actor, record: kp.Started | kp.Failed | kp.Line | kp.Dead) -> None:
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
