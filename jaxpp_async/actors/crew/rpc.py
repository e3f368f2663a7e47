"""rpc: requests out, each one's reply back to whoever waits for it. The controller's view of its actors.

No asyncio task and no extra trip through the loop a request: a step's replies settle its handle directly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from jaxpp_async.actors.control.connection import Connection
from jaxpp_async.actors.control.records import log_remote
from jaxpp_async.actors.failures.failure import is_consequence, remote_error
from jaxpp_async.actors.launch import ActorHandle
from jaxpp_async.actors.messages import Failed, Log, Request, StepDone, StepStats
from jaxpp_async.actors.processes.actor_info import ActorInfo
from jaxpp_async.errors import ProtocolError
from jaxpp_async.program import ProcessId


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
        self.future.add_done_callback(_retrieve)
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


class StepHandle:
    """One step under way.

    Awaiting it waits until every actor has finished the step and gives each actor's `StepStats`, or raises the step's
    error. A cancelled await leaves the step running: it may be awaited again.

    Not a future itself: its end calls back at once and wakes those who await it with the next pass of the event loop,
    where a shielded future takes two.

    Attributes:
        step: the step's number, counted from 0 over the mesh's life.
        program_id: what it runs.
        sends: the transfers of its host values, one future each.
        error: why it failed, or None.
        sent_s, heard_s: when it was sent, and when each actor's reply came, by this process's monotonic clock.

    Args:
        processes: those that run it; the first of each actor speaks for it.
    """

    takes_failures = False
    error: Exception | None = None
    _done = False

    def __init__(self, step: int, program_id: int, processes: Sequence[ProcessId]):
        self.step, self.program_id = step, program_id
        self.sends: list[asyncio.Future[None]] = []
        self.sent_s, self.heard_s = time.monotonic(), dict[int, float]()
        self._processes = tuple(processes)
        self._waiting = set(processes)
        self._stats: dict[int, StepStats] = {}
        self._callbacks: list[Callable[[], object]] = []
        self._awaiting: list[asyncio.Future[None]] = []

    def __await__(self) -> Generator[Any, None, dict[int, StepStats]]:
        if not self._done:
            awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaiting.append(awaited)
            yield from awaited
        return self.result()

    def result(self) -> dict[int, StepStats]:
        """Each actor's statistics, of a step that is done.

        Raises:
            The step's error, if it failed.
        """
        if self.error is not None:
            raise self.error
        return self._stats

    @property
    def is_awaited(self) -> bool:
        return not self._done

    async def wait_sent(self) -> None:
        """Wait until its host values have left, or it has failed: their arrays may then be changed again.

        A failed step's transfers may go on for long (UCX lets go of memory that is under way elsewhere, too, when all
        of that ends). They keep their memory alive, and nobody takes what they bring.
        """
        waiting = sum(not send.done() for send in self.sends)
        if not waiting or self.error is not None:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        def on_sent(_: object) -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                wake()

        for send in self.sends:
            if not send.done():
                send.add_done_callback(on_sent)
        self.when_done(lambda: wake() if self.error is not None else None)
        await ended

    @property
    def done(self) -> bool:
        """It has finished or failed."""
        return self._done

    @property
    def future(self) -> asyncio.Future[dict[int, StepStats]]:
        """A future of its own for each who asks. Cancelling it does not touch the step."""
        future: asyncio.Future[dict[int, StepStats]] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self.when_done(lambda: self._tell(future))
        return future

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call back when it is done, at once and in the order of these calls; now, if it is.

        One that raises keeps nobody else from hearing of it: its error goes to the event loop's exception handler.
        """
        if self._done:
            self._call(callback)
        else:
            self._callbacks.append(callback)

    def waits_for(self, process: ProcessId) -> bool:
        """Whether this process has not finished the step yet."""
        return process in self._waiting

    def again(self) -> None:
        self._waiting = set(self._processes)
        self._stats.clear()
        self.sent_s = time.monotonic()

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        if not isinstance(reply, StepDone) or reply.step != self.step:
            raise ProtocolError(
                f"{link.info} answered step {self.step} with {type(reply).__name__}", actor=link.info.id
            )
        info = link.info
        if info.rank == 0:
            self._stats[info.id], self.heard_s[info.id] = reply.stats, time.monotonic()
        self._waiting.discard(info.process)
        if not self._waiting:
            self._end(None)

    def fail(self, error: Exception) -> None:
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._done:
            return
        self._done, self.error = True, error
        callbacks, self._callbacks = self._callbacks, []
        awaiting, self._awaiting = self._awaiting, []
        for callback in callbacks:
            self._call(callback)
        for awaited in awaiting:
            if not awaited.done():
                awaited.set_result(None)

    def _call(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception as error:  # of the caller's code: who else waits for the step must hear of its end
            what = f"a callback at the end of step {self.step} failed"
            asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})

    def _tell(self, future: asyncio.Future[dict[int, StepStats]]) -> None:
        if future.done():
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self._stats)


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

    def request(self, message: Request, waiter: Waiter) -> None:
        """Send now; the reply goes to `waiter`."""
        self.connection.send(message)
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


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as seen: nobody is obliged to await it."""
    if not future.cancelled():
        future.exception()
