"""Send requests to actors, pair each reply with its request, and remember what a restart has to send again.

Reading order: `PendingRequest` and `StepHandle` take replies; `ActorLink` is one process's connection with
its open requests; ordinary requests to all processes go through `RequestLog`; `FreeList` collects arrays to
free.

A request takes no asyncio task and no extra pass of the event loop: a step's replies end its `StepHandle`.
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
from typing import Any, TypeAlias, cast

from jaxpp_async.controller.error_messages import abandoned, is_consequence, remote_error
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.errors import ActorError, ProtocolError, StepAbortedError
from jaxpp_async.launch import ActorHandle
from jaxpp_async.program.instructions import ActorId, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.codec import Encoder
from jaxpp_async.protocol.connection import Connection
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


class PendingRequest:
    """A request to one process that waits for its reply. Awaiting it gives the reply or raises the error.

    Args:
        expected: the reply's type.
        awaited: whether somebody will see an error of this request.

    Attributes:
        future: the reply. A cancelled future leaves the request running on the actor.
    """

    def __init__(self, expected: type, *, awaited: bool = True):
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.future.add_done_callback(retrieve)
        self._expected, self._awaited = expected, awaited

    def __await__(self) -> Generator[Any, None, Any]:
        return self.future.__await__()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody will see its error."""
        return self._awaited and not self.future.done()

    @property
    def done(self) -> bool:
        """Whether the reply has come, the request has failed, or nobody waits for it any more."""
        return self.future.done()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call back with the next pass of the event loop after this is done."""
        self.future.add_done_callback(lambda _: callback())

    def reset(self) -> None:
        """Forget what has come so far: after a restart the request is about to be sent again."""

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        """Take the one reply of the process at `link`, never `Failed`. A reply after the end is dropped."""
        if self.future.done():
            return
        if isinstance(reply, self._expected):
            self.future.set_result(reply)
        else:
            expected = self._expected.__name__
            self.fail(ProtocolError(f"{link.info} answered with {type(reply).__name__}, expected {expected}"))

    def fail(self, error: Exception) -> None:
        """End with an error, since no reply will come."""
        if not self.future.done():
            self.future.set_exception(error)


class StepHandle:
    """One step under way.

    Awaiting it waits until every actor has finished the step and gives each actor's `StepStats`, or raises
    the step's error. A cancelled await leaves the step running, and the step may be awaited again.

    The handle is not a future itself: its end calls back at once and wakes those who await it with the next
    pass of the event loop, where a shielded future takes two passes.

    Args:
        step: the step's id.
        program_id: the program that the step runs.
        processes: the processes that run it; the statistics of the first process of each actor count.

    Attributes:
        sends: the transfers of its host values, one future each.
        error: why it failed, or None.
        sent_s, heard_s: when it was sent, and when each actor's reply came, by this process's monotonic
            clock.
    """

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
        """Give each actor's statistics of a step that is done.

        Raises:
            The step's error, if it failed.
        """
        if self.error is not None:
            raise self.error.with_traceback(
                self._traceback
            )  # the same one each time: every await would add to it
        return self._stats

    @property
    def is_awaited(self) -> bool:
        """Whether somebody will see its error: whoever runs a step does."""
        return not self._done

    @property
    def done(self) -> bool:
        """Whether the step has finished or failed."""
        return self._done

    async def wait_sent(self) -> None:
        """Wait until the step's host values have left, or it has failed, so that their arrays may be changed.

        The transfers of a failed step may go on for long, since UCX releases memory that another transfer
        also uses only when all of them end. The transfers keep their memory alive, and their data goes
        nowhere.
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

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call back when the step is done, at once and in the order of these calls; now, if it is done.

        A callback that raises does not keep the others from being called: the event loop's exception handler
        gets its error.
        """
        if self._done:
            self._call(callback)
        else:
            self._callbacks.append(callback)

    def waits_for(self, process: ProcessId) -> bool:
        """Whether this process has not finished the step yet."""
        return process in self._waiting

    def reset(self) -> None:
        """Forget all replies: after a restart the step is about to be sent again to all its processes."""
        self._waiting = set(self._processes)
        self._stats.clear()
        self.sent_s = time.monotonic()

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        """Take the reply of the process at `link`. A reply after the step's end is of a second run: drop it.

        Raises:
            ProtocolError: the reply is not this step's `StepDone`.
        """
        if not isinstance(reply, StepDone) or reply.step != self.step:
            raise ProtocolError(
                f"{link.info} answered {step_text(self.step)} with {type(reply).__name__}", actor=link.info.id
            )
        if self._done:
            return
        info = link.info
        if info.rank == 0:
            self._stats[info.id], self.heard_s[info.id] = reply.stats, time.monotonic()
        self._waiting.discard(info.process)
        if not self._waiting:
            self.finish()

    def finish(self) -> None:
        """End the step without an error."""
        self._end(None)

    def fail(self, error: Exception) -> None:
        """End the step with an error, since not all replies will come."""
        self._end(error)

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
        except (
            Exception
        ) as error:  # of the caller's code: everyone else who waits must still learn of the step's end
            what = f"a callback at the end of {step_text(self.step)} failed"
            asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


ReplyHandler: TypeAlias = PendingRequest | StepHandle
"""The objects that take replies; `RequestLog` and `ActorLink` use the methods that both classes have."""


class ActorLink:
    """The controller's end of one actor process: its handle, its connection, and who takes which reply.

    Attributes:
        info: where the process is and how it does.
        known_blobs: content keys of the executables that the process has been sent.
        address: the process's address on the data plane, as bytes of its transport.
        reply_handlers: who takes the reply, by request number.
        is_detached: whether `detach` was called.
    """

    is_detached = False

    def __init__(self, info: ActorInfo, handle: ActorHandle, connection: Connection):
        self.info, self.handle, self.connection = info, handle, connection
        self.reply_handlers: dict[int, ReplyHandler] = {}
        self.known_blobs: set[str] = set()
        self.address = b""
        self._dropped: set[int] = set()

    def request(self, message: Request, reply_handler: ReplyHandler, encoded: bytes | None = None) -> None:
        """Send a request now, whose reply goes to `reply_handler`.

        Args:
            encoded: the encoded message, as of `Connection.send`.

        Raises:
            MeshError: the message cannot be encoded; no reply is expected then.
        """
        self.connection.send(message, encoded)
        self.reply_handlers[message.request] = reply_handler

    def ask(self, message: Request, expected: type, *, awaited: bool = False) -> PendingRequest:
        """Send a request now that a restart does not send again.

        Args:
            expected: the reply's type.
            awaited: whether somebody will see an error of the mesh through this request.
        """
        pending = PendingRequest(expected, awaited=awaited)
        self.request(message, pending)
        return pending

    async def call(self, message: Request, expected: type) -> Any:
        """Send a request, wait until it has left, and wait for the reply.

        Raises:
            RemoteError: the request failed on the actor. ActorError: the mesh failed meanwhile.
        """
        pending = self.ask(message, expected, awaited=True)
        await self.connection.drain()
        return await pending

    def handle_reply(self, reply: Any) -> Failed | None:
        """Give a reply to its handler.

        Returns:
            A failure that concerns more than one caller: a step's failure, or the actor's.

        Raises:
            ProtocolError: the reply answers no request.
        """
        if type(reply) is Failed:
            return self._handle_failure(reply)
        if type(reply) is Log:
            log_remote(self.info, reply)
            return None
        reply_handler = self.reply_handlers.pop(reply.request, None)
        if reply_handler is not None:
            reply_handler.on_reply(self, reply)
        elif reply.request in self._dropped:
            self._dropped.discard(reply.request)
        else:
            raise ProtocolError(
                f"{self.info} answered request {reply.request}, which nobody made", actor=self.info.id
            )
        return None

    def _handle_failure(self, failed: Failed) -> Failed | None:
        if failed.request is None:
            return failed
        if failed.request in self._dropped:
            self._dropped.discard(failed.request)
            return None
        reply_handler = self.reply_handlers.get(failed.request)
        if not isinstance(reply_handler, PendingRequest) or is_consequence(failed):
            # It concerns the mesh. A handler stays: the mesh's failure or a reply after a restart will reach
            # it.
            return failed
        del self.reply_handlers[failed.request]
        reply_handler.fail(remote_error(self.info, failed))
        return None

    def detach(self) -> None:
        """Ignore whatever comes of this process from here on: replies, and the end of its connection."""
        self.is_detached = True
        self.connection.on_message = _ignore_late_reply
        self.connection.on_closed = None

    def drop_reply_handlers(self) -> None:
        """Ignore the replies to all requests so far."""
        self._dropped.update(self.reply_handlers)
        self.reply_handlers.clear()


def _ignore_late_reply(message: Any) -> None:
    """Take no notice of a message that nobody waits for."""


# ---------------------------------------------------------------- request log

StartTransfers: TypeAlias = Callable[[], None]
"""Starts the data transfers that go with a request, in the data plane's epoch at the time of the call."""

_STATE_CHANGES = (Store, Step, BeginSnapshot, ReadFile)
"""The requests that decide which arrays an actor holds."""

_PRUNE_AFTER = 256
"""How many requests are remembered before those that are no longer needed are dropped."""


@dataclass(slots=True)
class SentRequest:
    """A request to one process as it is sent, and after a restart sent again.

    Args:
        message: the request; when it is sent again it gets another request number, and a step another epoch.
        reply_handler: takes the reply.
        transfers: called behind the request, each time that it is sent.
        size_bytes: size of the host arrays that `transfers` holds: the memory that remembering the request
            takes.
        serial: its place in the order of all requests that were sent.
    """

    process: ProcessId
    message: Request
    reply_handler: ReplyHandler
    transfers: StartTransfers | None = None
    size_bytes: int = 0
    serial: int = -1

    @property
    def is_needed(self) -> bool:
        """Whether a restart has to send it again: it is unanswered, or has changed what its actor holds."""
        handler = self.reply_handler
        if not handler.done:
            return True
        refused = (
            isinstance(handler, PendingRequest)
            and not handler.future.cancelled()
            and handler.future.exception() is not None
        )
        return isinstance(self.message, _STATE_CHANGES) and not refused


class RequestLog:
    """The requests to the actors of one mesh, remembered while a restart may have to send them again.

    An actor's arrays follow from the requests that it was sent, in their order. After a restart, when every
    actor is back at a copy of its arrays, the same requests bring it to where it was: all requests that
    change what it holds, answered or not, and all requests that have had no answer yet.

    Args:
        links: the processes as they are now, by number.
        check_usable: raises if the mesh is closed or has failed.
    """

    def __init__(
        self,
        links: Mapping[ProcessId, ActorLink],
        check_usable: Callable[[], None],
        options: ControllerOptions,
    ):
        self._links, self._check_usable, self._remembers = links, check_usable, options.restarts
        self._numbers, self._serials = itertools.count(), itertools.count()
        # Also handlers whose reply has come and that wait for the data behind it.
        self._open: set[ReplyHandler] = set()
        self._encoder = Encoder(options.max_frame_bytes)
        self._sent: list[SentRequest] = []
        self._size_bytes = 0
        self._prune_at = _PRUNE_AFTER
        self._is_open = asyncio.Event()
        self._is_open.set()

    # ------------------------------------------------------------ sending

    def number(self) -> int:
        """Give a request number that no request has had."""
        return next(self._numbers)

    def post(self, *posts: SentRequest) -> None:
        """Send requests now, behind all that were posted before; during a restart, as soon as it is over.

        Raises:
            MeshError: one of them cannot be encoded. None of them is sent then, and none remembered.
        """
        # Encode first: a request that is remembered and cannot be encoded would end every restart from then
        # on.
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
        """Send one request, for callers that need nothing else of the controller.

        Args:
            make: makes the request from its number.
            expected: the reply's type.
            awaited: whether somebody will see a failure of the mesh through this.

        Returns:
            The reply, to come; `RemoteError` if the request failed on the actor, `ActorError` if the mesh
            failed.

        Raises:
            MeshClosedError: the mesh is closed or has failed. MeshError: the request cannot be encoded.
        """
        return self.send_each({process: make}, expected, awaited=awaited)[process]

    def send_each(
        self, makes: Mapping[ProcessId, Callable[[int], Request]], expected: type, *, awaited: bool = True
    ) -> dict[ProcessId, asyncio.Future[Any]]:
        """Send one request to each of several processes, or none at all; otherwise as `send`."""
        self._check_usable()
        calls = {process: PendingRequest(expected, awaited=awaited) for process in makes}
        self.post(
            *(SentRequest(process, make(self.number()), calls[process]) for process, make in makes.items())
        )
        return {process: call.future for process, call in calls.items()}

    def info(self, process: ProcessId) -> ActorInfo:
        """Say where a process is."""
        return self._links[process].info

    async def drain(self, process: ProcessId) -> None:
        """Wait until little is left unsent to a process, or its connection has ended."""
        await self._links[process].connection.drain()

    # ------------------------------------------------------------ remembering

    @property
    def mark(self) -> int:
        """A new mark: the point between the requests so far and those to come."""
        return next(self._serials)

    @property
    def size_bytes(self) -> int:
        """Size of the host memory that remembered requests hold."""
        return self._size_bytes

    def unanswered(self, mark: int) -> tuple[ReplyHandler, ...]:
        """Give the handlers that still wait for replies to requests before a mark."""
        return tuple(
            sent.reply_handler for sent in self._sent if sent.serial < mark and not sent.reply_handler.done
        )

    @property
    def has_snapshot(self) -> bool:
        """Whether a save that is not over has taken arrays, which a copy of the actors' arrays would lack."""
        return any(isinstance(sent.message, BeginSnapshot) for sent in self._needed())

    @property
    def needs_files(self) -> bool:
        """Whether a restart would read arrays from files again, which may be gone by then."""
        return any(isinstance(sent.message, ReadFile) for sent in self._needed())

    @property
    def is_open(self) -> bool:
        """Whether requests are sent when they are posted; False during a restart."""
        return self._is_open.is_set()

    async def wait_open(self) -> None:
        """Wait until requests are sent when they are posted."""
        await self._is_open.wait()

    def forget_before(self, mark: int) -> None:
        """Forget the requests before a mark, because a copy of the actors' arrays at that mark is safe."""
        self._keep([sent for sent in self._needed() if sent.serial > mark])

    def _remember(self, sent: SentRequest) -> None:
        sent.serial = next(self._serials)
        self._sent.append(sent)
        self._size_bytes += sent.size_bytes
        if len(self._sent) > self._prune_at:  # a remembered fetch keeps the arrays that it fetched alive
            self._keep(self._needed())
            self._prune_at = 2 * len(self._sent) + _PRUNE_AFTER

    def _keep(self, sent: list[SentRequest]) -> None:
        self._sent, self._size_bytes = sent, sum(one.size_bytes for one in sent)

    def _needed(self) -> list[SentRequest]:
        """List the remembered requests that a restart has to send again, in their order."""
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
        """From here on only remember requests, without sending them, until `replay`."""
        self._is_open.clear()
        for link in self._links.values():
            link.drop_reply_handlers()

    def replay(self, epoch: int) -> int:
        """Send again all requests that are needed, in their old order, and from then on new ones at once.

        A request that had its answer before is sent again as well if it changes what its actor holds. Its
        handler is done, so it drops the second reply and a second failure: arrays that cannot be put or read
        again fail their users, if there are any left.

        Args:
            epoch: the epoch of the steps from here on.

        Returns:
            How many steps of the user's had run before and run again.
        """
        self._keep(self._needed())
        for reply_handler in {sent.reply_handler for sent in self._sent if not sent.reply_handler.done}:
            reply_handler.reset()
        self._is_open.set()
        again = set()
        for sent in self._sent:
            sent.serial = next(self._serials)  # behind every mark so far
            changed: dict[str, Any] = {"request": self.number()}
            if isinstance(sent.message, Step):
                changed["epoch"] = epoch
                if sent.reply_handler.done and step_kind(sent.message.step) == "step":
                    again.add(step_number(sent.message.step))
            sent.message = replace(cast(Any, sent.message), **changed)
            self._links[sent.process].request(sent.message, sent.reply_handler)
            if sent.transfers is not None:
                sent.transfers()
        return len(again)

    # ------------------------------------------------------------ the end

    def fail_all(self, error: ActorError, step: StepId | None) -> bool:
        """End every open request and step because of `error`.

        Requests and the step with the id `step` get the error itself; steps behind it are aborted because of
        it.

        Returns:
            Whether somebody will see the error.
        """
        seen = False
        for reply_handler in self._take_reply_handlers():
            if isinstance(reply_handler, StepHandle) and reply_handler.step != step:
                text = f"{step_text(reply_handler.step)} was aborted: {str(error).splitlines()[0]}"
                where = {"step": step_number(reply_handler.step)}
                reply_handler.fail(abandoned(error, text, StepAbortedError, **where))
            else:
                seen |= reply_handler.is_awaited
                reply_handler.fail(error)
        return seen

    def close(self, error: ActorError) -> None:
        """End every open request and step with the same error."""
        for reply_handler in self._take_reply_handlers():
            reply_handler.fail(error)

    def _take_reply_handlers(self) -> set[ReplyHandler]:
        reply_handlers = set(self._open)
        for link in self._links.values():
            reply_handlers.update(link.reply_handlers.values())
            link.reply_handlers.clear()
        self._keep([])
        self._is_open.set()  # nothing is sent any more, and nobody is to wait for that
        return reply_handlers


# ---------------------------------------------------------------- frees


class FreeList:
    """Arrays that are no longer needed, collected from any thread for the next request to their actor.

    `add` takes no lock: garbage collection may call it on any thread at any point, also inside `take`.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[ActorId, ArrayId]] = deque()

    def add(self, actor: ActorId, array_id: ArrayId) -> None:
        """Note an array to free later. Any thread may call this."""
        self._pending.append((actor, array_id))

    def take(self) -> dict[ActorId, tuple[ArrayId, ...]]:
        """Remove all arrays from the list and give them, by actor, to the caller, who has them freed."""
        if not self._pending:
            return {}
        frees: dict[ActorId, list[ArrayId]] = defaultdict(list)
        with contextlib.suppress(IndexError):  # empty
            while True:
                actor, array_id = self._pending.popleft()
                frees[actor].append(array_id)
        return {actor: tuple(array_ids) for actor, array_ids in frees.items()}

    def give_back(self, frees: Mapping[ActorId, Sequence[ArrayId]]) -> None:
        """Put arrays back that `take` gave and no request took along."""
        for actor, array_ids in frees.items():
            self._pending.extend((actor, array_id) for array_id in array_ids)
