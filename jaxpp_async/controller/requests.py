"""rpc: requests out, each one's reply back to whoever waits for it. The controller's view of its actors.

No asyncio task and no extra trip through the loop a request: a step's replies settle its `StepHandle` directly.

outbox: every request to an actor leaves through here, and is remembered for as long as it may have to be made again.

What an actor holds follows from the requests it was sent, in their order. So after a restart, with every actor back at
a copy of its arrays, the same requests bring it to where it was: those that change what it holds, answered or not, and
whatever has had no answer yet. Decides nothing about failures; knows neither processes nor clocks.

frees: arrays that nobody needs any more, collected from any thread until the next request to their actor.

step_handle: one step under way. In: the replies of the processes that run it. Out: its end, told to whoever asked.

A `rpc.Waiter`. It starts nothing and asks nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeAlias, cast

from jaxpp_async.controller.error_messages import abandoned, is_consequence, remote_error
from jaxpp_async.errors import ActorError, ProtocolError, StepAbortedError
from jaxpp_async.launch import ActorHandle
from jaxpp_async.program.instructions import ActorId, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.codec import Encoder
from jaxpp_async.protocol.connection import Connection
from jaxpp_async.protocol.frames import DEFAULT_MAX_FRAME_BYTES
from jaxpp_async.protocol.log_forwarding import log_remote
from jaxpp_async.protocol.messages import (
    ArrayId,
    BeginSnapshot,
    Failed,
    Log,
    ReadFile,
    Request,
    Step,
    StepDone,
    StepId,
    StepStats,
    Store,
    Sweep,
    step_kind,
    step_number,
    step_text,
)
from jaxpp_async.protocol.task_group import retrieve


class ReplyHandler(Protocol):
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


class PendingRequest:
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
                ProtocolError(
                    f"{link.info} answered with {type(reply).__name__}, expected {self._expected.__name__}"
                )
            )

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class DiscardedReply:
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
        self.reply_handlers: dict[int, ReplyHandler] = {}
        self.known_blobs: set[str] = set()
        self.address = b""
        self._dropped: set[int] = set()

    def request(self, message: Request, reply_handler: ReplyHandler, encoded: bytes | None = None) -> None:
        """Send now; the reply goes to `waiter`.

        Args:
            encoded: as of `Connection.send`.

        Raises:
            MeshError: the message cannot be encoded; nobody waits for it then.
        """
        self.connection.send(message, encoded)
        self.reply_handlers[message.request] = reply_handler

    async def call(self, message: Request, expected: type) -> Any:
        """Send, wait until it has left, and wait for the reply.

        Raises:
            RemoteError: the request failed on the actor. ActorError: the mesh failed meanwhile.
        """
        call = PendingRequest(expected)
        self.request(message, call)
        await self.connection.drain()
        return await call.future

    def settle(self, reply: Any) -> Failed | None:
        """Give a reply to its waiter; gives back a failure that concerns more than one waiter: a step's or the actor's.

        Raises:
            ProtocolError: nobody waits for it.
        """
        if (
            type(reply) is StepDone
            and (reply_handler := self.reply_handlers.pop(reply.request, None)) is not None
        ):
            reply_handler.on_reply(self, reply)
            return None
        if type(reply) is Failed:
            reply_handler = self.reply_handlers.get(reply.request) if reply.request is not None else None
            if reply.request in self._dropped:
                self._dropped.discard(reply.request)
                return None
            if (
                reply.request is None
                or reply_handler is None
                or not reply_handler.takes_failures
                or is_consequence(reply)
            ):
                return (
                    reply  # the waiter stays: the mesh's failure will reach it, or the reply after a restart
                )
            del self.reply_handlers[reply.request]
            reply_handler.fail(remote_error(self.info, reply))
            return None
        if type(reply) is Log:
            log_remote(self.info, reply)
            return None
        reply_handler = self.reply_handlers.pop(reply.request, None)
        if reply_handler is None and reply.request in self._dropped:
            self._dropped.discard(reply.request)
            return None
        if reply_handler is None:
            raise ProtocolError(
                f"{self.info} answered request {reply.request}, which nobody made", actor=self.info.id
            )
        reply_handler.on_reply(self, reply)
        return None

    def let_go(self) -> None:
        """Whatever comes of it from here on, replies or its end, is of no interest any more."""
        self.is_let_go = True
        self.connection.on_message = _ignore_late_reply
        self.connection.on_closed = None

    def drop_waiters(self) -> None:
        """Replies to what was asked so far are of no interest any more."""
        self._dropped.update(self.reply_handlers)
        self.reply_handlers.clear()


def _ignore_late_reply(message: Any) -> None:
    """Nobody waits for it."""


# ---------------------------------------------------------------- outbox

StartTransfers: TypeAlias = Callable[[], None]
"""Starts the data that goes with a request, in the data plane's epoch of then."""

_CHANGES = (Store, Step, BeginSnapshot, ReadFile)
"""Requests on which it depends what an actor holds."""

_LOOK_OVER = 256
"""How many requests are remembered before it is asked which of them are still needed."""


@dataclass(slots=True)
class SentRequest:
    """A request to one process, as it is made, and made again.

    Args:
        message: its request number, and a step's epoch, are others when it is made again.
        waiter: gets the reply.
        transfers: called behind the request, each time that it is made.
        size_bytes: of host arrays that `transfers` holds: the memory that remembering the request takes.
        serial: its place in the order of all that were made.
    """

    process: ProcessId
    message: Request
    reply_handler: ReplyHandler
    transfers: StartTransfers | None = None
    size_bytes: int = 0
    serial: int = -1

    @property
    def is_needed(self) -> bool:
        return not self.reply_handler.done or (isinstance(self.message, _CHANGES) and not self._failed)

    @property
    def _failed(self) -> bool:
        """Its actor refused it: it has changed nothing."""
        call = self.reply_handler
        return (
            isinstance(call, PendingRequest)
            and not call.future.cancelled()
            and call.future.exception() is not None
        )


class RequestLog:
    """Requests to the actors of one mesh.

    Args:
        links: the processes as they are now, by number.
        check_usable: raises if the mesh is closed or has failed.
        remembers: whether requests are remembered at all.
        max_frame_bytes: the longest that a request may be.
    """

    def __init__(
        self,
        links: Mapping[ProcessId, ActorLink],
        check_usable: Callable[[], None],
        *,
        remembers: bool,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ):
        self._links, self._check_usable, self._remembers = links, check_usable, remembers
        self._numbers, self._serials = itertools.count(), itertools.count()
        # also those that have had their reply, and wait for what comes behind it
        self._open: set[ReplyHandler] = set()
        self._encoder = Encoder(max_frame_bytes)
        self._sent: list[SentRequest] = []
        self._size_bytes = 0
        self._look_over_at = _LOOK_OVER
        self._is_open = asyncio.Event()
        self._is_open.set()

    # ------------------------------------------------------------ asking

    def number(self) -> int:
        """A request number that none has had."""
        return next(self._numbers)

    def post(self, *posts: SentRequest) -> None:
        """Send now, behind what was posted before; during a restart, as soon as it is over.

        Raises:
            MeshError: one of them cannot be encoded. None is sent then, and nothing remembered.
        """
        # First: what is remembered and cannot be encoded would end every restart from then on.
        encoded = [self._encoder.encode(post.message) for post in posts]
        is_open = self._is_open.is_set()
        for post, data in zip(posts, encoded, strict=True):
            reply_handler = post.reply_handler
            if reply_handler not in self._open:  # a step is posted to several processes
                self._open.add(reply_handler)
                reply_handler.when_done(partial(self._open.discard, reply_handler))
            if self._remembers:
                self._remember(post)
            if is_open:
                self._links[post.process].request(post.message, reply_handler, data)
                if post.transfers is not None:
                    post.transfers()

    def send(
        self, process: ProcessId, make: Callable[[int], Request], expected: type, *, awaited: bool = True
    ) -> asyncio.Future[Any]:
        """Make one request, for those who need no more of the controller.

        Args:
            make: request number to request.
            expected: the reply's type.
            awaited: whether somebody will see a failure of the mesh through this.

        Returns:
            The reply, to come; `RemoteError` if the request failed on the actor, `ActorError` if the mesh failed.

        Raises:
            MeshClosedError: the mesh is closed or has failed. MeshError: the request cannot be encoded.
        """
        return self.send_each({process: make}, expected, awaited=awaited)[process]

    def send_each(
        self, makes: Mapping[ProcessId, Callable[[int], Request]], expected: type, *, awaited: bool = True
    ) -> dict[ProcessId, asyncio.Future[Any]]:
        """Make one request to each of several processes, or none at all: else as `send`."""
        self._check_usable()
        calls = {process: PendingRequest(expected, awaited=awaited) for process in makes}
        self.post(
            *(SentRequest(process, make(self.number()), calls[process]) for process, make in makes.items())
        )
        return {process: call.future for process, call in calls.items()}

    def info(self, process: ProcessId) -> ActorInfo:
        """Where a process is."""
        return self._links[process].info

    async def drain(self, process: ProcessId) -> None:
        """Wait until little is left unsent to a process, or it has gone."""
        await self._links[process].connection.drain()

    # ------------------------------------------------------------ remembering

    @property
    def mark(self) -> int:
        """This point between two requests."""
        return next(self._serials)

    @property
    def size_bytes(self) -> int:
        """Host memory that remembered requests hold."""
        return self._size_bytes

    def unanswered(self, mark: int) -> tuple[ReplyHandler, ...]:
        """Who still waits for requests before a mark."""
        return tuple(
            sent.reply_handler for sent in self._sent if sent.serial < mark and not sent.reply_handler.done
        )

    @property
    def has_snapshot(self) -> bool:
        """Arrays were taken for a save that is not over: a copy of what actors hold would lack them."""
        return any(isinstance(sent.message, BeginSnapshot) for sent in self._needed())

    @property
    def needs_files(self) -> bool:
        """What actors hold would be read from files again, which may by then be gone."""
        return any(isinstance(sent.message, ReadFile) for sent in self._needed())

    @property
    def is_open(self) -> bool:
        """Requests are sent when they are made; False during a restart."""
        return self._is_open.is_set()

    async def wait_open(self) -> None:
        """Wait until requests are sent when they are made."""
        await self._is_open.wait()

    def forget_before(self, mark: int) -> None:
        """A copy of what the actors held at `mark` is safe: nothing before is needed again."""
        self._keep([sent for sent in self._needed() if sent.serial > mark])

    def _remember(self, sent: SentRequest) -> None:
        sent.serial = next(self._serials)
        self._sent.append(sent)
        self._size_bytes += sent.size_bytes
        if len(self._sent) > self._look_over_at:  # what was fetched hangs on its request
            self._keep(self._needed())
            self._look_over_at = 2 * len(self._sent) + _LOOK_OVER

    def _keep(self, sent: list[SentRequest]) -> None:
        self._sent, self._size_bytes = sent, sum(one.size_bytes for one in sent)

    def _needed(self) -> list[SentRequest]:
        swept: set[tuple[ProcessId, bytes]] = set()
        needed: list[SentRequest] = []
        for sent in reversed(self._sent):
            message = sent.message
            if isinstance(message, Sweep) and sent.reply_handler.done:
                swept.add((sent.process, message.folder))
            is_swept = isinstance(message, BeginSnapshot) and (sent.process, message.folder) in swept
            if sent.is_needed and not is_swept:
                needed.append(sent)
        return needed[::-1]

    # ------------------------------------------------------------ restarts

    def hold_back(self) -> None:
        """From here on requests are remembered and not sent, until `replay`."""
        self._is_open.clear()
        for link in self._links.values():
            link.drop_waiters()

    def replay(self, epoch: int) -> int:
        """Make again what is needed, in the order of old, then go on as ever.

        Args:
            epoch: of the steps from here on.

        Returns:
            How many steps of the user's were run before and run again.
        """
        self._keep(self._needed())
        for reply_handler in {
            id(sent.reply_handler): sent.reply_handler for sent in self._sent if not sent.reply_handler.done
        }.values():
            reply_handler.again()
        self._is_open.set()
        again = set()
        for sent in self._sent:
            sent.serial = next(self._serials)  # behind every mark so far
            changed: dict[str, Any] = {"request": self.number()}
            if isinstance(sent.message, Step):
                changed["epoch"] = epoch
            sent.message = replace(cast(Any, sent.message), **changed)
            if sent.reply_handler.done:
                if isinstance(sent.message, Step) and step_kind(sent.message.step) == "step":
                    again.add(step_number(sent.message.step))
                # What is put or read and cannot be had again fails whoever uses it, if anyone still does.
                sent.reply_handler = DiscardedReply(takes_failures=not isinstance(sent.message, Step))
            self._links[sent.process].request(sent.message, sent.reply_handler)
            if sent.transfers is not None:
                sent.transfers()
        return len(again)

    # ------------------------------------------------------------ the end

    def fail_all(self, error: ActorError, step: StepId | None) -> bool:
        """End everything that waits, because of `error`.

        Calls and the step under way (id `step`) get the error itself; steps behind it are aborted because of it.

        Returns:
            Whether somebody will see the error.
        """
        seen = False
        for reply_handler in self._take_waiters():
            if isinstance(reply_handler, StepHandle) and reply_handler.step != step:
                text = f"{step_text(reply_handler.step)} was aborted: {str(error).splitlines()[0]}"
                reply_handler.fail(
                    abandoned(error, text, StepAbortedError, step=step_number(reply_handler.step))
                )
            else:
                seen |= reply_handler.is_awaited
                reply_handler.fail(error)
        return seen

    def close(self, error: ActorError) -> None:
        """End everything that waits with the same error."""
        for reply_handler in self._take_waiters():
            reply_handler.fail(error)

    def _take_waiters(self) -> list[ReplyHandler]:
        reply_handlers = {
            reply_handler for link in self._links.values() for reply_handler in link.reply_handlers.values()
        } | self._open
        for link in self._links.values():
            link.reply_handlers.clear()
        self._keep([])
        self._is_open.set()  # nothing is sent any more; nobody is to wait for it
        return list(reply_handlers)


# ---------------------------------------------------------------- frees


class FreeList:
    """Arrays to free.

    `add` takes no lock: garbage collection may call it on any thread at any point, also inside `take`.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[ActorId, ArrayId]] = deque()

    def add(self, actor: ActorId, array_id: ArrayId) -> None:
        """Free this array sometime. Any thread may call this."""
        self._pending.append((actor, array_id))

    def take(self) -> dict[ActorId, tuple[ArrayId, ...]]:
        """All that was added, by actor; the caller sees to it."""
        if not self._pending:
            return {}
        frees: dict[ActorId, list[ArrayId]] = defaultdict(list)
        with contextlib.suppress(IndexError):  # empty
            while True:
                actor, array_id = self._pending.popleft()
                frees[actor].append(array_id)
        return {actor: tuple(array_ids) for actor, array_ids in frees.items()}

    def give_back(self, frees: dict[ActorId, tuple[ArrayId, ...]]) -> None:
        """What `take` gave and no request took along."""
        for actor, array_ids in frees.items():
            self._pending.extend((actor, array_id) for array_id in array_ids)


# ---------------------------------------------------------------- step handle


class StepHandle:
    """One step under way.

    Awaiting it waits until every actor has finished the step and gives each actor's `StepStats`, or raises the step's
    error. A cancelled await leaves the step running: it may be awaited again.

    Not a future itself: its end calls back at once and wakes those who await it with the next pass of the event loop,
    where a shielded future takes two.

    Attributes:
        step: the step's id.
        program_id: what it runs.
        sends: the transfers of its host values, one future each.
        error: why it failed, or None.
        sent_s, heard_s: when it was sent, and when each actor's reply came, by this process's monotonic clock.

    Args:
        processes: those that run it; the first of each actor speaks for it.
    """

    takes_failures = False
    error: Exception | None = None
    _traceback: TracebackType | None = None
    _done = False

    def __init__(self, step: StepId, program_id: int, processes: Sequence[ProcessId]):
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
            raise self.error.with_traceback(self._traceback)  # each time anew: it would grow by every await
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
        future.add_done_callback(retrieve)
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
                f"{link.info} answered {step_text(self.step)} with {type(reply).__name__}", actor=link.info.id
            )
        info = link.info
        if info.rank == 0:
            self._stats[info.id], self.heard_s[info.id] = reply.stats, time.monotonic()
        self._waiting.discard(info.process)
        if not self._waiting:
            self._end(None)

    def fail(self, error: Exception) -> None:
        self._end(error)

    def end_without_actors(self) -> None:
        """End it as finished, since no actor has a part in it."""
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done:
            return
        self._done, self.error, self._traceback = True, error, error and error.__traceback__
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
            what = f"a callback at the end of {step_text(self.step)} failed"
            asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})

    def _tell(self, future: asyncio.Future[dict[int, StepStats]]) -> None:
        if future.done():
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self._stats)
