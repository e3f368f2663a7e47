"""rpc: requests out, each one's reply back to whoever waits for it. The controller's view of its actors.

No asyncio task and no extra trip through the loop a request: a step's replies settle its `StepHandle` directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from jaxpp_async.actors.control.connection import Connection
from jaxpp_async.actors.control.records import log_remote
from jaxpp_async.actors.failures.failure import is_consequence, remote_error
from jaxpp_async.actors.launch import ActorHandle
from jaxpp_async.actors.messages import Failed, Log, Request, StepDone
from jaxpp_async.actors.owned_tasks import retrieve
from jaxpp_async.actors.processes.actor_info import ActorInfo
from jaxpp_async.errors import ProtocolError


class Waiter(Protocol):
    """Waits for replies."""

    @property
    def is_awaited(self) -> bool:
        """Somebody will see its error."""
        ...

    @property
    def future(self) -> asyncio.Future[Any]:
        """Done when this is, or a moment later."""
        ...

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call back when this is done, or a moment later."""
        ...

    @property
    def done(self) -> bool:
        """It has what it waited for, has failed, or nobody waits any more."""
        ...

    @property
    def takes_failures(self) -> bool:
        """A request that fails on the actor concerns this alone, not the mesh."""
        ...

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        """The one reply of `link`'s actor, never `Failed`."""
        ...

    def again(self) -> None:
        """The request is about to be made anew, after a restart: forget what came of it so far."""
        ...

    def fail(self, error: Exception) -> None:
        """No reply will come."""
        ...


class Call:
    """A request to one actor.

    Args:
        expected: the reply's type.
        awaited: False for a request made in passing.

    Attributes:
        future: the reply. A cancelled future leaves the request running on the actor.
    """

    takes_failures = True

    def __init__(self, expected: type, *, awaited: bool = True):
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.future.add_done_callback(retrieve)
        self._expected, self._awaited = expected, awaited

    @property
    def is_awaited(self) -> bool:
        return self._awaited and not self.future.done()

    @property
    def done(self) -> bool:
        return self.future.done()

    def when_done(self, callback: Callable[[], object]) -> None:
        self.future.add_done_callback(lambda _: callback())

    def again(self) -> None:
        """Nothing has come of it."""

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        if self.future.done():
            return
        if isinstance(reply, self._expected):
            self.future.set_result(reply)
        else:
            self.future.set_exception(
                ProtocolError(f"{link.info} answered with {type(reply).__name__}, expected {self._expected.__name__}")
            )

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Replayed:
    """Takes the replies to a request that was answered before and is made once more, after a restart."""

    is_awaited, done = False, True

    def __init__(self, *, takes_failures: bool) -> None:
        self.takes_failures = takes_failures
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.future.set_result(None)

    def when_done(self, callback: Callable[[], object]) -> None:
        callback()

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        """Whoever asked has his answer."""

    def again(self) -> None:
        """Nothing to forget."""

    def fail(self, error: Exception) -> None:
        """Nobody to tell."""


class ActorLink:
    """The controller's end of one actor: its process, its connection, and who waits for which reply.

    Attributes:
        info: where the actor is and how it does.
        known_blobs: content keys that the actor has been sent.
        waiters: by request number.
        is_let_go: see `let_go`.
    """

    is_let_go = False

    def __init__(self, info: ActorInfo, handle: ActorHandle, connection: Connection):
        self.info, self.handle, self.connection = info, handle, connection
        self.waiters: dict[int, Waiter] = {}
        self.known_blobs: set[str] = set()
        self.address = b""
        self._dropped: set[int] = set()

    def request(self, message: Request, waiter: Waiter, encoded: bytes | None = None) -> None:
        """Send now; the reply goes to `waiter`.

        Args:
            encoded: as of `Connection.send`.

        Raises:
            MeshError: the message cannot be encoded; nobody waits for it then.
        """
        self.connection.send(message, encoded)
        self.waiters[message.request] = waiter

    async def call(self, message: Request, expected: type) -> Any:
        """Send, wait until it has left, and wait for the reply.

        Raises:
            RemoteError: the request failed on the actor. ActorError: the mesh failed meanwhile.
        """
        call = Call(expected)
        self.request(message, call)
        await self.connection.drain()
        return await call.future

    def settle(self, reply: Any) -> Failed | None:
        """Give a reply to its waiter; gives back a failure that concerns more than one waiter: a step's or the actor's.

        Raises:
            ProtocolError: nobody waits for it.
        """
        if type(reply) is StepDone and (waiter := self.waiters.pop(reply.request, None)) is not None:
            waiter.on_reply(self, reply)
            return None
        if type(reply) is Failed:
            waiter = self.waiters.get(reply.request) if reply.request is not None else None
            if reply.request in self._dropped:
                self._dropped.discard(reply.request)
                return None
            if reply.request is None or waiter is None or not waiter.takes_failures or is_consequence(reply):
                return reply  # the waiter stays: the mesh's failure will reach it, or the reply after a restart
            del self.waiters[reply.request]
            waiter.fail(remote_error(self.info, reply))
            return None
        if type(reply) is Log:
            log_remote(self.info, reply)
            return None
        waiter = self.waiters.pop(reply.request, None)
        if waiter is None and reply.request in self._dropped:
            self._dropped.discard(reply.request)
            return None
        if waiter is None:
            raise ProtocolError(f"{self.info} answered request {reply.request}, which nobody made", actor=self.info.id)
        waiter.on_reply(self, reply)
        return None

    def let_go(self) -> None:
        """Whatever comes of it from here on, replies or its end, is of no interest any more."""
        self.is_let_go = True
        self.connection.on_message = _ignore_late_reply
        self.connection.on_closed = None

    def drop_waiters(self) -> None:
        """Replies to what was asked so far are of no interest any more."""
        self._dropped.update(self.waiters)
        self.waiters.clear()


def _ignore_late_reply(message: Any) -> None:
    """Nobody waits for it."""
