"""Send requests to actors, pass each reply to the request that it answers, and remember requests for
restarts.

A restart replaces lost actors, restores the arrays of all actors to an earlier state, and sends again the
requests that were made since then.

Reading order: `PendingRequest` and `StepHandle` receive replies. `ActorLink` is the connection to one
process, with its open requests. `RequestLog` sends requests to all processes and sends them again in a
restart. `FreeList` collects arrays that are to be freed.

A request needs no asyncio task, and no additional pass of the event loop: when the last reply of a step
arrives, its `StepHandle` ends within the same pass.
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
    """A request to one process, from its sending until its reply. Awaiting this object returns the reply or
    raises the error.

    Args:
        expected: the type of the reply.
        awaited: whether a caller will await this request and so get the error if the mesh fails. If no caller
            gets that error, the next call on the mesh raises it.

    Attributes:
        future: the future reply. If it is cancelled, the request continues on the actor.
    """

    def __init__(self, expected: type, *, awaited: bool = True):
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.future.add_done_callback(retrieve)
        self._expected, self._awaited = expected, awaited

    def __await__(self) -> Generator[Any, None, Any]:
        return self.future.__await__()

    @property
    def error_is_seen(self) -> bool:
        """Whether a caller would get an error that ends this request now. This is so if the request is open
        and a caller awaits it.
        """
        return self._awaited and not self.future.done()

    @property
    def done(self) -> bool:
        """Whether the request has ended: it was answered, has failed, or its future was cancelled."""
        return self.future.done()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the next pass of the event loop after the request has ended."""
        self.future.add_done_callback(lambda _: callback())

    def reset(self) -> None:
        """Forget the parts of the reply that have arrived, since a restart is about to send the request
        again.
        """

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        """End the request with its reply, or with a `ProtocolError` if the reply has the wrong type.

        Failures are passed to `fail` instead. A reply after the end of the request is ignored.

        Args:
            link: the process that replied.
            reply: the reply, of any type except `Failed`.
        """
        if self.future.done():
            return
        if isinstance(reply, self._expected):
            self.future.set_result(reply)
        else:
            expected = self._expected.__name__
            self.fail(ProtocolError(f"{link.info} answered with {type(reply).__name__}, expected {expected}"))

    def fail(self, error: Exception) -> None:
        """End the request with an error, because it failed or no reply will come."""
        if not self.future.done():
            self.future.set_exception(error)


class StepHandle:
    """A step that has been sent to its actors.

    Awaiting the handle waits until every actor has finished the step, and then returns each actor's
    `StepStats` by actor id, or raises the step's error. If an await is cancelled, the step continues and can
    be awaited again.

    The handle is not a future. When the step ends, the handle calls its callbacks immediately, and callers
    that await it continue in the next pass of the event loop. With a shielded future that would take two
    passes.

    Args:
        step: the step's id.
        program_id: the program that the step runs.
        processes: the processes that run the step. Of the processes of one actor, only the first one's
            statistics are kept.

    Attributes:
        sends: the future of each transfer of the step's large host values.
        error: the error with which the step failed, or None.
        sent_s: the time at which the step was last sent, in seconds of this process's monotonic clock.
        heard_s: the time at which the reply of each actor's first process arrived, by actor id, in seconds of
            the same clock.
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
        """Return the statistics of a finished step, by actor id.

        Raises:
            Exception: the step's error, if it failed.
        """
        if self.error is not None:
            # The original traceback is restored, since otherwise every await would add to it.
            raise self.error.with_traceback(self._traceback)
        return self._stats

    @property
    def error_is_seen(self) -> bool:
        """Whether a caller would see an error that ends this step now.

        Every step has a caller, so this is True until the step has ended.
        """
        return not self._done

    @property
    def done(self) -> bool:
        """Whether the step has finished or failed."""
        return self._done

    async def wait_sent(self) -> None:
        """Wait until the step's host values (numpy arrays) have been sent, so that the arrays may be changed.

        This also returns when the step has failed. The transfers of a failed step may continue for a long
        time, since UCX releases memory only when all transfers that use the memory have ended. The transfers
        keep their memory alive, and the receiving actors ignore the data.
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
        """Call `callback` as soon as the step has ended, or immediately if it already has.

        Callbacks are called in the order in which they were passed to this method. If a callback raises an
        error, the event loop's exception handler gets the error, and the other callbacks are still called.
        """
        if self._done:
            self._call(callback)
        else:
            self._callbacks.append(callback)

    def waits_for(self, process: ProcessId) -> bool:
        """Return whether this process has not finished the step yet."""
        return process in self._waiting

    def reset(self) -> None:
        """Forget all replies, since a restart is about to send the step again to all its processes."""
        self._waiting = set(self._processes)
        self._stats.clear()
        self.sent_s = time.monotonic()

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        """Record the reply of one process; the step finishes with the last process's reply.

        A reply after the step's end is ignored. Such replies arrive if a restart runs a finished step again.

        Args:
            link: the process that replied.
            reply: the reply.

        Raises:
            ProtocolError: the reply is not a `StepDone` of this step.
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
        """End the step successfully, and run its callbacks."""
        self._end(None)

    def fail(self, error: Exception) -> None:
        """End the step with an error and run its callbacks; do nothing if the step has already ended."""
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
        except Exception as error:
            # An error in a caller's callback must not keep the step's end from all others who wait for it.
            what = f"a callback at the end of {step_text(self.step)} failed"
            asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


ReplyHandler: TypeAlias = PendingRequest | StepHandle
"""The objects that handle replies; `RequestLog` and `ActorLink` use the methods that both classes have."""


class ActorLink:
    """The controller's end of one actor process: its handle, its control connection and its open requests.

    Args:
        info: the description of the process.
        handle: the handle to the process, from its launcher.
        connection: the control connection.

    Attributes:
        info: the host, pid, devices and state of the process.
        known_blobs: the content keys of the executables that have been sent to the process.
        address: the process's address on the data plane, in a form that depends on the transport.
        reply_handlers: the handler that receives the reply to each open request, by request number.
        is_detached: whether `detach` has been called; if so, messages of the process are ignored.
    """

    is_detached = False

    def __init__(self, info: ActorInfo, handle: ActorHandle, connection: Connection):
        self.info, self.handle, self.connection = info, handle, connection
        self.reply_handlers: dict[int, ReplyHandler] = {}
        self.known_blobs: set[str] = set()
        self.address = b""
        self._dropped: set[int] = set()

    def request(self, message: Request, reply_handler: ReplyHandler, encoded: bytes | None = None) -> None:
        """Send a request immediately, and pass its reply to `reply_handler` when it arrives.

        Args:
            message: the request.
            reply_handler: receives the reply.
            encoded: the encoded message, if the caller has it already (see `Connection.send`).

        Raises:
            MeshError: the message cannot be encoded; no reply is expected then.
        """
        self.connection.send(message, encoded)
        self.reply_handlers[message.request] = reply_handler

    def ask(self, message: Request, expected: type, *, awaited: bool = False) -> PendingRequest:
        """Send a request immediately, and return an object that can be awaited for the reply.

        If a restart (the replacement of lost actors) begins before the reply, the request is not sent again.

        Args:
            message: the request.
            expected: the type of the reply.
            awaited: whether a caller will await the request and so get the error if the mesh fails. If no
                caller gets that error, the next call on the mesh raises it.
        """
        pending = PendingRequest(expected, awaited=awaited)
        self.request(message, pending)
        return pending

    async def call(self, message: Request, expected: type) -> Any:
        """Send a request and return its reply.

        If a restart (the replacement of lost actors) begins before the reply, the request is not sent again.

        Args:
            message: the request.
            expected: the type of the reply.

        Raises:
            RemoteError: the request failed on the actor.
            ActorError: the mesh failed meanwhile.
        """
        pending = self.ask(message, expected, awaited=True)
        await self.connection.drain()
        return await pending

    def listen(self, on_failed: OnFailed, on_closed: OnClosed) -> None:
        """Dispatch the messages of the process from now on, and tell the caller about failures of the
        process. A further call replaces the callbacks; `detach` removes them.

        A reply is passed to the handler of the request that it answers. A log record is logged. A failure
        that concerns only one request ends that request with an error.

        Args:
            on_failed: called with this link and with each failure of a step or of the whole actor that the
                process reports, or with the error about a message that the protocol does not allow.
            on_closed: called with this link when the connection is closed, and with the error that ended it,
                or None.
        """
        self.connection.on_message = partial(self._on_message, on_failed)
        self.connection.on_closed = partial(on_closed, self)

    def _on_message(self, on_failed: OnFailed, message: Any) -> None:
        try:
            failed = self._dispatch(message)
        except ProtocolError as error:
            failed = error
        if failed is not None:
            on_failed(self, failed)

    def _dispatch(self, reply: Any) -> Failed | None:
        """Pass a message to the object that handles it.

        Returns:
            The failure of a step or of the whole actor, if the message reports one. None for all other
            messages.

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
            # The failure concerns the mesh. The handler stays registered until the mesh's failure or, after a
            # restart, a reply ends its request.
            return failed
        del self.reply_handlers[failed.request]
        reply_handler.fail(remote_error(self.info, failed))
        return None

    def detach(self) -> None:
        """Ignore all further messages of this process, and the closing of its connection."""
        self.is_detached = True
        self.connection.on_message = _ignore_late_reply
        self.connection.on_closed = None

    def drop_reply_handlers(self) -> None:
        """Forget the open requests, because a restart begins. If replies to them still arrive, ignore these
        replies.
        """
        self._dropped.update(self.reply_handlers)
        self.reply_handlers.clear()


OnFailed: TypeAlias = Callable[[ActorLink, Failed | ProtocolError], None]
OnClosed: TypeAlias = Callable[[ActorLink, Exception | None], None]
"""The callbacks of `ActorLink.listen`."""


def _ignore_late_reply(message: Any) -> None:
    """Ignore a message of a process from which no replies are expected any more."""


# ---------------------------------------------------------------- request log

StartTransfers: TypeAlias = Callable[[], None]
"""A function that starts the data transfers that go with a request. Their tags have the mesh's epoch at the
time of the call.
"""

_STATE_CHANGES = (Store, Step, BeginSnapshot, ReadFile)
"""The types of the requests that change which arrays an actor holds."""

_PRUNE_AFTER = 256
"""The number of remembered requests above which those that are no longer needed are dropped."""


@dataclass(slots=True)
class SentRequest:
    """A request to one process, with all that is needed to send it now, and to send it again in a restart.

    Args:
        process: the process.
        message: the request. When the request is sent again, it gets a new request number, and a step also
            gets the current epoch (a number that counts aborts of the whole mesh).
        reply_handler: receives the reply.
        transfers: starts the data transfers of the request; called each time that the request has been sent.
            None: there are no transfers.
        size_bytes: the size in bytes of the host arrays that this object keeps in memory, since `transfers`
            refers to them.
        serial: the request's position in the order of all requests.
    """

    process: ProcessId
    message: Request
    reply_handler: ReplyHandler
    transfers: StartTransfers | None = None
    size_bytes: int = 0
    serial: int = -1

    @property
    def is_needed(self) -> bool:
        """Whether a restart has to send the request again.

        This is so in two cases: the request is unanswered, or the request succeeded and is of a type that
        changes which arrays an actor has.
        """
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
    """A log of the requests to the actors of one mesh, which sends the requests and can send them again in a
    restart.

    The arrays of an actor follow from the requests that it was sent, in their order. In a restart, every
    actor first returns to a replica (copy) of its arrays. Two kinds of requests since that replica are then
    sent again: all that change which arrays an actor has, answered or not, and all that have not been
    answered. If `options` allow no restarts, requests are sent without being remembered.

    Args:
        links: the link of each current process, by process number.
        check_usable: raises an error if the mesh is closed or has failed.
        options: tells whether lost actors are replaced, and the length of the longest control frame.
    """

    def __init__(
        self,
        links: Mapping[ProcessId, ActorLink],
        check_usable: Callable[[], None],
        options: ControllerOptions,
    ):
        self._links, self._check_usable, self._remembers = links, check_usable, options.restarts
        self._numbers, self._serials = itertools.count(), itertools.count()
        # These include handlers that have their reply and wait for the data that follows it.
        self._open: set[ReplyHandler] = set()
        self._encoder = Encoder(options.max_frame_bytes)
        self._sent: list[SentRequest] = []
        self._size_bytes = 0
        self._prune_at = _PRUNE_AFTER
        self._is_open = asyncio.Event()
        self._is_open.set()

    # ------------------------------------------------------------ sending

    def number(self) -> int:
        """Return a request number that no request has had before."""
        return next(self._numbers)

    def post(self, *posts: SentRequest) -> None:
        """Send requests in the given order, after all earlier requests. During a restart, the requests are
        sent when the restart ends.

        Raises:
            MeshError: one of the requests cannot be encoded. None of them is sent or remembered then.
        """
        # Encode first: if a request that cannot be encoded were remembered, every later restart would fail.
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
        """Send one request to a process, and return a future of the reply. A restart sends the request again
        if necessary.

        Args:
            process: the process to send to.
            make: makes the request from its request number.
            expected: the type of the reply.
            awaited: whether a caller will await the future and so get the error if the mesh fails. If no
                caller gets that error, the next call on the mesh raises it.

        Returns:
            A future of the reply, which raises `RemoteError` if the request failed on the actor, and
            `ActorError` if the mesh failed.

        Raises:
            MeshClosedError: the mesh is closed or has failed.
            MeshError: the request cannot be encoded.
        """
        return self.send_each({process: make}, expected, awaited=awaited)[process]

    def send_each(
        self, makes: Mapping[ProcessId, Callable[[int], Request]], expected: type, *, awaited: bool = True
    ) -> dict[ProcessId, asyncio.Future[Any]]:
        """Send one request to each of several processes, and return a future of each reply, by process.

        If one of the requests cannot be encoded, none is sent. The errors are those of `send`.

        Args:
            makes: for each process, a function that makes its request from the request's number.
            expected: the type of the replies.
            awaited: see `send`.
        """
        self._check_usable()
        calls = {process: PendingRequest(expected, awaited=awaited) for process in makes}
        self.post(
            *(SentRequest(process, make(self.number()), calls[process]) for process, make in makes.items())
        )
        return {process: call.future for process, call in calls.items()}

    def info(self, process: ProcessId) -> ActorInfo:
        """Return the host, pid, devices and state of a process."""
        return self._links[process].info

    async def drain(self, process: ProcessId) -> None:
        """Wait until most of the data for a process has been sent on its connection, or the connection has
        closed.
        """
        await self._links[process].connection.drain()

    # ------------------------------------------------------------ remembering

    def new_mark(self) -> int:
        """Return a mark: a number that separates the requests made so far from later ones.

        The number can be passed to `unanswered` and `forget_before`.
        """
        return next(self._serials)

    @property
    def size_bytes(self) -> int:
        """The bytes of host memory that remembered requests keep alive."""
        return self._size_bytes

    def unanswered(self, mark: int) -> tuple[ReplyHandler, ...]:
        """Return the handlers of all unanswered requests from before a mark (see `RequestLog.new_mark`)."""
        return tuple(
            sent.reply_handler for sent in self._sent if sent.serial < mark and not sent.reply_handler.done
        )

    @property
    def has_snapshot(self) -> bool:
        """Whether a checkpoint is being saved.

        During a save, actors keep additional arrays that a replica (copy of the actors' arrays, kept for
        restarts) would not contain, so no replica may be started.
        """
        return any(isinstance(sent.message, BeginSnapshot) for sent in self._needed())

    @property
    def needs_files(self) -> bool:
        """Whether a restart would have to read arrays from files again, so that the files must not be deleted
        yet.
        """
        return any(isinstance(sent.message, ReadFile) for sent in self._needed())

    @property
    def is_open(self) -> bool:
        """Whether requests are sent as soon as they are posted; False during a restart."""
        return self._is_open.is_set()

    async def wait_open(self) -> None:
        """Wait until no restart is in progress, so that requests are sent as soon as they are posted."""
        await self._is_open.wait()

    def forget_before(self, mark: int) -> None:
        """Forget all requests from before a mark.

        This is called when a replica (copy of the actors' arrays, kept for restarts) as of that mark is
        complete, since a restart then needs no earlier requests.
        """
        self._keep([sent for sent in self._needed() if sent.serial > mark])

    def _remember(self, sent: SentRequest) -> None:
        sent.serial = next(self._serials)
        self._sent.append(sent)
        self._size_bytes += sent.size_bytes
        # Requests that are not needed use memory: for example, a fetch keeps the fetched arrays alive.
        if len(self._sent) > self._prune_at:
            self._keep(self._needed())
            self._prune_at = 2 * len(self._sent) + _PRUNE_AFTER

    def _keep(self, sent: list[SentRequest]) -> None:
        self._sent, self._size_bytes = sent, sum(one.size_bytes for one in sent)

    def _needed(self) -> list[SentRequest]:
        """Return the remembered requests that a restart has to send again, in their order.

        The first request of a checkpoint's save (`BeginSnapshot`) is left out if the last one (`Sweep`) has
        been answered.
        """
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
        """Stop sending requests, because a restart begins; only remember them until `replay` sends them."""
        self._is_open.clear()
        for link in self._links.values():
            link.drop_reply_handlers()

    def replay(self, epoch: int) -> int:
        """Send again all requests that a restart has to repeat, in their old order, and end the restart.

        After this, new requests are sent as soon as they are posted.

        A request that was answered before is also sent again if it changes which arrays its actor has. Its
        handler ignores the second reply, even if that reply is a failure. If arrays cannot be stored or read
        again, later requests that use these arrays fail instead.

        Args:
            epoch: the epoch in which the steps run from now on; it counts aborts of the whole mesh.

        Returns:
            The number of the user's steps that had already finished and now run again.
        """
        self._keep(self._needed())
        for reply_handler in {sent.reply_handler for sent in self._sent if not sent.reply_handler.done}:
            reply_handler.reset()
        self._is_open.set()
        again = set()
        for sent in self._sent:
            sent.serial = next(self._serials)  # after every mark so far
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

        Requests, and the step with the id `step`, end with the error itself. All other steps end with a
        `StepAbortedError` whose cause is the error.

        Args:
            error: the failure of the mesh.
            step: the id of the step that failed, or None.

        Returns:
            Whether a caller will get `error` itself. If not, the next call on the mesh has to raise it.
        """
        seen = False
        for reply_handler in self._take_reply_handlers():
            if isinstance(reply_handler, StepHandle) and reply_handler.step != step:
                text = f"{step_text(reply_handler.step)} was aborted: {str(error).splitlines()[0]}"
                where = {"step": step_number(reply_handler.step)}
                reply_handler.fail(abandoned(error, text, StepAbortedError, **where))
            else:
                seen |= reply_handler.error_is_seen
                reply_handler.fail(error)
        return seen

    def close(self, error: ActorError) -> None:
        """End every open request and step with this error, because the mesh is closed."""
        for reply_handler in self._take_reply_handlers():
            reply_handler.fail(error)

    def _take_reply_handlers(self) -> set[ReplyHandler]:
        reply_handlers = set(self._open)
        for link in self._links.values():
            reply_handlers.update(link.reply_handlers.values())
            link.reply_handlers.clear()
        self._keep([])
        self._is_open.set()  # nobody may wait for a restart any more
        return reply_handlers


# ---------------------------------------------------------------- frees


class FreeList:
    """A list of arrays that are no longer needed. Later requests tell the actors to free them.

    `add` takes no lock, because garbage collection may call `add` on any thread at any time, even during
    `take`, where waiting for a lock could deadlock.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[ActorId, ArrayId]] = deque()

    def add(self, actor: ActorId, array_id: ArrayId) -> None:
        """Add an array that is to be freed later. This may be called from any thread."""
        self._pending.append((actor, array_id))

    def take(self) -> dict[ActorId, tuple[ArrayId, ...]]:
        """Remove all arrays from the list, and return their ids by actor; the caller has to send the ids with
        requests.
        """
        if not self._pending:
            return {}
        frees: dict[ActorId, list[ArrayId]] = defaultdict(list)
        with contextlib.suppress(IndexError):  # the list is empty
            while True:
                actor, array_id = self._pending.popleft()
                frees[actor].append(array_id)
        return {actor: tuple(array_ids) for actor, array_ids in frees.items()}

    def give_back(self, frees: Mapping[ActorId, Sequence[ArrayId]]) -> None:
        """Put back on the list the ids that `take` returned but that could not be sent."""
        for actor, array_ids in frees.items():
            self._pending.extend((actor, array_id) for array_id in array_ids)
