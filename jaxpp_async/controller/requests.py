"""Send requests to actor processes, and pass each reply to the caller that waits for it.

All requests are sent through `Requests`, and all replies arrive in `ActorLink`. The rules of each type of
request (`protocol.messages.Rules`) say which reply it gets, and whether a restart makes it again. If so, the
request is remembered (`request_history`), and held back while a restart is under way. All other requests are
sent at once.

Reading order: `PendingRequest` waits for one reply (`submitted_step.SubmittedStep` for those of a step).
`ActorLink` is the connection to one process. `FreeList` collects arrays that are to be freed.

A request needs no asyncio task, and no additional pass of the event loop: when the last reply of a step
arrives, its callers continue within the same pass.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from msgspec import Raw

from jaxpp_async.controller.error_messages import abandoned, is_consequence, remote_error
from jaxpp_async.controller.recovery import Recovery
from jaxpp_async.controller.request_history import OutgoingRequest
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorError, ProtocolError, StepAbortedError
from jaxpp_async.launch import ActorHandle
from jaxpp_async.program.instructions import ActorId, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.codec import Encoder
from jaxpp_async.protocol.connection import Connection
from jaxpp_async.protocol.log_forwarding import log_remote
from jaxpp_async.protocol.messages import (
    ArrayId,
    CompileProgress,
    Failed,
    Log,
    Message,
    Request,
    StepId,
    step_number,
    step_text,
)
from jaxpp_async.protocol.task_group import all_of, retrieve


class PendingRequest:
    """A request to one process, from its sending until its reply. Awaiting this object returns the reply or
    raises the error.

    Args:
        awaited: whether a caller will await this request and so get the error if the mesh fails. If no caller
            gets that error, the next call on the mesh raises it.

    Attributes:
        future: the future reply. If it is cancelled, the request continues on the actor.
    """

    fails_mesh = False
    """Whether a failure of the request, other than of the mesh, concerns the whole mesh."""

    def __init__(self, *, awaited: bool = True):
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.future.add_done_callback(retrieve)
        self._awaited = awaited

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

    @property
    def is_refused(self) -> bool:
        """Whether the request has failed."""
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is not None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the next pass of the event loop after the request has ended."""
        self.future.add_done_callback(lambda _: callback())

    def reset(self) -> None:
        """Forget the parts of the reply that have arrived, since a restart is about to send the request
        again.
        """

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        """End the request with its reply. A reply after the end of the request is ignored.

        Args:
            link: the process that replied.
            reply: the reply, of the type that the rules of the request name.
        """
        if not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: Exception) -> None:
        """End the request with an error, because it failed or no reply will come."""
        if not self.future.done():
            self.future.set_exception(error)


Waiter: TypeAlias = PendingRequest | SubmittedStep
"""The objects that wait for replies; this module uses the methods that both classes have."""


class ActorLink:
    """The controller's end of one actor process: its handle, its control connection and its open requests.

    Args:
        info: the description of the process.
        handle: the handle to the process, from its launcher.
        connection: the control connection.

    Attributes:
        info: the host, pid, devices and state of the process.
        known_blobs: the content keys of the executables that have been sent to the process.
        on_compiled: called with each report of how far the process is with a `Load`.
        address: the process's address on the data plane, in a form that depends on the transport.
        open: the requests without a reply, by number. The requests of a process count up from 0.
        is_detached: whether `detach` has been called; if so, messages of the process are ignored.
    """

    is_detached = False

    def __init__(self, info: ActorInfo, handle: ActorHandle, connection: Connection):
        self.info, self.handle, self.connection = info, handle, connection
        self.open: dict[int, OutgoingRequest] = {}
        self.known_blobs: set[str] = set()
        self.on_compiled: Callable[[CompileProgress], None] = lambda _: None
        self.address = b""
        self._next_number = self._first_number = 0

    def send(self, request: OutgoingRequest, encoded: Raw | None = None) -> None:
        """Give a request the next number, and send it immediately.

        Args:
            request: the request.
            encoded: the encoded message, if the caller has it already (see `codec.Encoder.encode_message`).

        Raises:
            MeshError: the message cannot be encoded; no reply is expected then.
        """
        number = self._next_number
        self.connection.send(request.message if encoded is None else encoded, number)
        self._next_number = number + 1
        self.open[number] = request

    def listen(self, on_failed: OnFailed, on_closed: OnClosed) -> None:
        """Dispatch the messages of the process from now on, and tell the caller about failures of the
        process. A further call replaces the callbacks; `detach` removes them.

        A reply is passed to the waiter of the request that it answers. A log record is logged. A failure
        that concerns only one request ends that request with an error.

        Args:
            on_failed: called with this link and with each failure of a step or of the whole actor that the
                process reports, or with the error about a message that the protocol does not allow.
            on_closed: called with this link when the connection is closed, and with the error that ended it,
                or None.
        """
        self.connection.on_message = partial(self._on_message, on_failed)
        self.connection.on_closed = partial(on_closed, self)

    def _on_message(self, on_failed: OnFailed, message: Message, number: int | None) -> None:
        try:
            failed = self._dispatch(message, number)
        except ProtocolError as error:
            failed = error
        if failed is not None:
            on_failed(self, failed)

    def _dispatch(self, message: Message, number: int | None) -> Failed | None:
        """Pass a message to the object that handles it.

        Args:
            message: the message.
            number: the number of the request that it answers, or None.

        Returns:
            The failure of a step or of the whole actor, if the message reports one. None for all other
            messages.

        Raises:
            ProtocolError: the message answers no request, or is not the reply that the request gets.
        """
        if type(message) is Log:
            log_remote(self.info, message)
            return None
        if type(message) is CompileProgress:
            self.on_compiled(message)
            return None
        request = self.open.get(number) if number is not None else None
        if number is None or request is None:
            return self._dispatch_without_request(message, number)
        waiter = request.waiter
        if type(message) is Failed:
            if waiter.fails_mesh or is_consequence(message):
                # The failure concerns the mesh. The request stays open until the mesh's failure or, after a
                # restart, a reply ends it.
                return message
            del self.open[number]
            waiter.fail(remote_error(self.info, message))
        elif type(message) is request.message.rules.reply:
            del self.open[number]
            waiter.on_reply(self, message)
        else:
            asked, expected = type(request.message).__name__, request.message.rules.reply.__name__
            text = f"{self.info} answered {asked} with {type(message).__name__}, expected {expected}"
            error = ProtocolError(text, actor=self.info.id)
            if waiter.fails_mesh:
                raise error
            del self.open[number]
            waiter.fail(error)
        return None

    def _dispatch_without_request(self, message: Message, number: int | None) -> Failed | None:
        if number is None and type(message) is Failed:
            return message
        if number is not None and 0 <= number < self._first_number:
            return None  # a late reply to a request that a restart has made again
        raise ProtocolError(f"{self.info} answered request {number}, which nobody made", actor=self.info.id)

    def detach(self) -> None:
        """Ignore all further messages of this process, and the closing of its connection."""
        self.is_detached = True
        self.connection.on_message = _ignore_message
        self.connection.on_closed = None

    def forget_requests(self) -> list[OutgoingRequest]:
        """Forget the open requests, because a restart begins, and return them. If replies to them still
        arrive, ignore these replies.
        """
        forgotten = list(self.open.values())
        self.open.clear()
        self._first_number = self._next_number
        return forgotten


OnFailed: TypeAlias = Callable[[ActorLink, Failed | ProtocolError], None]
OnClosed: TypeAlias = Callable[[ActorLink, Exception | None], None]
"""The callbacks of `ActorLink.listen`."""


def _ignore_message(message: Message, number: int | None) -> None:
    """Ignore a message of a process from which no replies are expected any more."""


class Requests:
    """The way by which all requests are sent to the actors of one mesh.

    Args:
        links: the link of each current process, by process number.
        recovery: remembers the requests that a restart makes again, and tells whether one is under way.
        check_usable: raises an error if the mesh is closed or has failed.
        max_frame_bytes: the length of the longest control frame.
    """

    def __init__(
        self,
        links: Mapping[ProcessId, ActorLink],
        recovery: Recovery,
        check_usable: Callable[[], None],
        max_frame_bytes: int,
    ):
        self._links, self._recovery, self._check_usable = links, recovery, check_usable
        # These include waiters that have their reply and wait for the data that follows it.
        self._waiters: set[Waiter] = set()
        self._encoder = Encoder(max_frame_bytes)
        self._is_open = asyncio.Event()
        self._is_open.set()

    def info(self, process: ProcessId) -> ActorInfo:
        """Return the host, pid, devices and state of a process."""
        return self._links[process].info

    # ------------------------------------------------------------ sending

    def post(self, *requests: OutgoingRequest) -> None:
        """Send requests in the given order, after all earlier ones, and remember them if restarts are
        allowed. During a restart, the requests are sent when the restart ends.

        Raises:
            MeshError: one of the requests cannot be encoded. None of them is sent or remembered then.
        """
        # Encode first: if a request that cannot be encoded were remembered, every later restart would fail.
        encoded = [self._encoder.encode_message(request.message) for request in requests]
        recovery, waiters = self._recovery, self._waiters
        for request, data in zip(requests, encoded, strict=True):
            waiter = request.waiter
            if waiter not in waiters:  # a step is posted to several processes
                waiters.add(waiter)
                waiter.when_done(partial(waiters.discard, waiter))
            if recovery.is_enabled:
                recovery.history.add(request)
            if recovery.is_running:
                self._send(request, data)

    def send(
        self, process: ProcessId, message: Request, *, awaited: bool = True, in_restart: bool = False
    ) -> PendingRequest:
        """Send one request to a process, and return an object that can be awaited for the reply.

        Args:
            process: the process to send to.
            message: the request.
            awaited: whether a caller will await the reply and so get the error if the mesh fails. If no
                caller gets that error, the next call on the mesh raises it.
            in_restart: whether a restart itself sends the request, which is then neither held back nor made
                again.

        Returns:
            The request. Awaiting it raises `RemoteError` if the request failed on the actor, and `ActorError`
            if the mesh failed.

        Raises:
            MeshClosedError: the mesh is closed or has failed, and the request is of a kind that is made again
                by a restart.
            MeshError: the request cannot be encoded.
        """
        if message.rules.repeated and not in_restart:
            return self.send_each({process: message}, awaited=awaited)[process]
        pending = PendingRequest(awaited=awaited)
        self._links[process].send(OutgoingRequest(process, message, pending))
        return pending

    def send_each(
        self, messages: Mapping[ProcessId, Request], *, awaited: bool = True
    ) -> dict[ProcessId, PendingRequest]:
        """Send one request to each of several processes, and return the requests by process. A restart makes
        them again if that is needed.

        If one of the requests cannot be encoded, none is sent. The errors are those of `send`.

        Args:
            messages: the request for each process.
            awaited: see `send`.
        """
        self._check_usable()
        pending = {process: PendingRequest(awaited=awaited) for process in messages}
        self.post(
            *(OutgoingRequest(process, messages[process], waiter) for process, waiter in pending.items())
        )
        return pending

    async def call(self, process: ProcessId, message: Request, *, in_restart: bool = False) -> Any:
        """Send a request, and return its reply. The arguments and errors are those of `send`."""
        return await self.reply_to(process, self.send(process, message, in_restart=in_restart))

    async def call_each(self, messages: Mapping[ProcessId, Request], what: str) -> dict[ProcessId, Any]:
        """Send one request to each given process, and return the replies by process once all have arrived.

        The first failure is raised.

        Args:
            messages: the request for each process.
            what: a phrase that names the asyncio tasks, for debugging.
        """
        return await all_of({p: self.call(p, message) for p, message in messages.items()}, what)

    async def reply_to(self, process: ProcessId, request: PendingRequest) -> Any:
        """Wait until most of the data for a process has been sent, and then for the reply to a request."""
        await self._links[process].connection.drain()
        return await request

    def _send(self, request: OutgoingRequest, encoded: Raw | None = None) -> None:
        self._links[request.process].send(request, encoded)
        if request.transfers is not None:
            request.transfers()

    # ------------------------------------------------------------ restarts

    async def wait_open(self) -> None:
        """Wait until no restart is under way, so that requests are sent as soon as they are posted."""
        await self._is_open.wait()

    def hold_back(self) -> None:
        """Take note that a restart begins. Replies to earlier requests are ignored. Requests that the restart
        does not make again fail.
        """
        self._is_open.clear()
        for link in self._links.values():
            for request in link.forget_requests():
                if request.waiter not in self._waiters:
                    what = f"{type(request.message).__name__} was not answered by {link.info}"
                    request.waiter.fail(StepAbortedError(f"{what} before a restart began"))

    def resume(self, requests: Sequence[OutgoingRequest], epoch: int) -> int:
        """Send requests again at the end of a restart, in the given order.

        A request that was answered before may be among them, because it changes which arrays its actor has.
        Its waiter ignores the second reply, even if that reply is a failure. If arrays cannot be stored or
        read again, later requests that use these arrays fail instead.

        Args:
            requests: the requests.
            epoch: the epoch in which the steps run from now on.

        Returns:
            The number of the user's steps that had already finished and now run again.
        """
        for waiter in {request.waiter for request in requests if not request.waiter.done}:
            waiter.reset()
        again = set()
        for request in requests:
            waiter = request.waiter
            if isinstance(waiter, SubmittedStep) and waiter.done and waiter.kind == "step":
                again.add(step_number(waiter.id))
            request.message = request.message.again(epoch)
            self._send(request)
        self._is_open.set()
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
        for waiter in self._take_waiters():
            if isinstance(waiter, SubmittedStep) and waiter.id != step:
                text = f"{step_text(waiter.id)} was aborted: {str(error).splitlines()[0]}"
                waiter.fail(abandoned(error, text, StepAbortedError, step=step_number(waiter.id)))
            else:
                seen |= waiter.error_is_seen
                waiter.fail(error)
        return seen

    def close(self, error: ActorError) -> None:
        """End every open request and step with this error, because the mesh is closed."""
        for waiter in self._take_waiters():
            waiter.fail(error)

    def _take_waiters(self) -> set[Waiter]:
        waiters = set(self._waiters)
        for link in self._links.values():
            waiters.update(request.waiter for request in link.open.values())
            link.open.clear()
        self._is_open.set()  # nobody may wait for a restart any more
        return waiters


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
