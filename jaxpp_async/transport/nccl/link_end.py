"""Run one end of a link (an NCCL communicator for one direction between two devices): pass posted transfers
to NCCL, each when its turn has come, and report each transfer when it has ended.

Each end has two threads for the calls that take time. The first thread owns the communicator from `join` to
`abort` and makes every call on it. A non-blocking communicator executes each call in the background, and NCCL
allows no further call (not even recording an event) until the previous one has finished, so the first thread
waits for each call. The second thread sleeps until the oldest transfer has ended. The event loop puts posted
transfers in order, and reports them when they have ended. The buffer of a transfer that fails is given back
to its owner only when the communicator has been freed and its stream is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpp_async.errors import TransferError
from jaxpp_async.transport.base import Memory, OnEnd, Peer
from jaxpp_async.transport.nccl.library import Channel, CompletionEvent, NcclFailure, NcclLibrary
from jaxpp_async.transport.nccl.order import LinkOrder, NcclLink, TurnQueue

_LOG = logging.getLogger("jaxpp_async")

RELEASE_TIMEOUT_S = 5.0
"""The longest time in seconds that NCCL may take to stop using the buffers of transfers."""

_CHECK_S = 1.0
"""The time in seconds between two checks whether an idle communicator has failed."""

_LOOKS, _BUSY_S = 20, 100e-6
"""The number of times that NCCL is asked without a pause whether it has started a call, and the pause in
seconds before each further time."""


@dataclass(slots=True, eq=False)
class NcclTransfer:
    """A transfer that was posted. This object keeps the memory alive, because NCCL keeps no reference to it.

    Args:
        memory: the memory to send or to receive into.
        tag: the message's tag.
        done: a callback that is called when the transfer has ended, with None or the error.
        check: a function that is called on the thread that waits for the transfer, and raises NcclFailure if
            the received data is wrong; None if there is nothing to check.
    """

    memory: Memory
    tag: int
    done: OnEnd
    check: Callable[[], None] | None = None


class LinkEnd:
    """One end of a link, with the two threads that serve it. A link is an NCCL communicator for one direction
    between two devices.

    Args:
        link: the link.
        here: the process at this end.

    Attributes:
        peer: the process at the other end.
        sends: True at the sending end; False at the receiving end.
        failure: the reason why no transfer can be posted any more; None while transfers can be posted.
    """

    def __init__(self, link: NcclLink, here: Peer):
        self.link, self.peer, self.sends = link, link.peer_of(here), link.sender == here
        self.failure: str | None = None
        self._loop, self._here = asyncio.get_running_loop(), here
        self._queue: TurnQueue[NcclTransfer] = TurnQueue()
        self._going: deque[NcclTransfer] = deque()  # passed on to NCCL; oldest first
        self._to_call: queue.SimpleQueue[NcclTransfer | None] = queue.SimpleQueue()
        self._marks: queue.SimpleQueue[tuple[CompletionEvent, NcclTransfer] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._opened: asyncio.Future[Memory] = self._loop.create_future()
        self._gone: asyncio.Future[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """The number of transfers that were passed on to NCCL and have not ended."""
        return len(self._going)

    # ------------------------------------------------------------ opening

    async def open(self, library: NcclLibrary, unique_id: bytes, greeting: int) -> None:
        """Make the communicator and pass a first message over it, while the process at the other end does the
        same.

        NCCL connects the two ends only when they exchange their first message. The message is sent here so
        that no step has to wait for the connection.

        Args:
            library: the calls of NCCL.
            unique_id: the communicator's id.
            greeting: the content of the first message, 64 bits that both ends know and that no other link
                uses.

        Raises:
            NcclFailure: NCCL refused a call, a message with other content arrived, or `end` was called
                meanwhile.
        """
        self._gone = self._loop.create_future()
        self._start(
            f"{self.link}", lambda: self._call_nccl(library, unique_id, greeting if self.sends else 0)
        )
        self._start(f"wait for the {self.link}", self._wait_for_marks)
        word = await self._opened
        greeted: asyncio.Future[None] = self._loop.create_future()

        def check() -> None:
            if (got := library.read_word(word)) != greeting:
                raise NcclFailure(
                    f"the first message is {got:#x}, not {greeting:#x}: communicators were mixed up"
                )

        def done(error: Exception | None) -> None:
            _set_outcome(greeted, None, error and NcclFailure(self.failure or str(error)))

        self._go(NcclTransfer(word, 0, done, check))
        await greeted

    # ------------------------------------------------------------ transferring

    def begin(self, order: LinkOrder) -> None:
        """Begin a step, whose transfers on this link go in the given order.

        Raises:
            ProtocolError: not all transfers of the previous step have been posted.
        """
        self._queue.begin(order)

    def post(self, sequence: int, transfer: NcclTransfer) -> None:
        """Add a transfer, and pass it to NCCL when its turn comes.

        Args:
            sequence: the sequence number in the transfer's tag.
            transfer: the transfer.

        Raises:
            ProtocolError: the current step has no transfer with this sequence number on this link, or the
                transfer was posted already.
        """
        for one in self._queue.offer(sequence, transfer):
            self._go(one)

    def _go(self, transfer: NcclTransfer) -> None:
        self._going.append(transfer)
        self._to_call.put(transfer)

    def _finish_oldest(self) -> None:
        """If the link has not failed, report that the oldest transfer has succeeded. If the link has failed,
        do nothing, because `_end` then reports the transfer."""
        if self.failure is None:  # otherwise `_end` reports it, when its memory is not used any more
            self._report(self._going.popleft(), None)

    def _report(self, transfer: NcclTransfer, error: Exception | None) -> None:
        try:
            transfer.done(error)
        except Exception as failure:
            # An error of the caller's code: the other transfers have to be reported all the same.
            self._loop.call_exception_handler({"message": f"{transfer.done} failed", "exception": failure})

    # ------------------------------------------------------------ ending

    async def end(self, cause: str) -> None:
        """End the communicator, wait until its stream is empty, and fail the transfers that are open. A
        second call waits until the first has finished.

        Args:
            cause: the reason, for error messages.

        Raises:
            TransferError: NCCL does not release the buffers in time. In this case no transfer is reported as
                ended, because NCCL may still use the buffers.
        """
        self.failure = self.failure or cause
        await asyncio.shield(self._begin_end())

    def _fail(self, cause: str) -> None:
        """End a communicator that NCCL reports broken, and fail its transfers when NCCL has released their
        buffers."""
        if self.failure is None:
            self.failure = f"link lost ({cause})" if self._opened.done() else cause
            self._begin_end().add_done_callback(_log_failure)

    def _begin_end(self) -> asyncio.Task[None]:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end(), name=f"end the {self.link}")
        return self._ending

    async def _end(self) -> None:
        self._stop.set()
        self._to_call.put(None)
        _set_outcome(self._opened, None, NcclFailure(self.failure or "ended"))
        if self._gone is not None:
            await asyncio.wait([self._gone], timeout=RELEASE_TIMEOUT_S)
            if not self._gone.done() and self._going:  # without open transfers, there is no hurry
                raise TransferError(
                    f"{self.link}: NCCL still holds {self.num_open} buffers {RELEASE_TIMEOUT_S:.0f} s after "
                    "the abort; this process has to end"
                )
        left = [*self._going, *self._queue.clear()]
        self._going.clear()
        for transfer in left:
            what = (
                f"transfer from peer {self.link.sender} to peer {self.link.receiver}, tag {transfer.tag:#x}"
            )
            self._report(transfer, TransferError(f"{what} failed: {self.failure}"))

    # ------------------------------------------------------------ the thread that calls NCCL

    def _call_nccl(self, library: NcclLibrary, unique_id: bytes, initial_word: int) -> None:
        """Make every call on the communicator, from creating the communicator to aborting it. The thread that
        owns the communicator runs this function.

        Args:
            library: the calls of NCCL.
            unique_id: the communicator's id.
            initial_word: the initial value of the device memory for the first message.
        """
        channel: Channel | None = None
        try:
            channel = library.join(unique_id, self.link.rank_of(self._here), self.link.device_of(self._here))
            self._wait_ready(channel)
            self._call_on_loop(
                _set_outcome, self._opened, library.word(self.link.device_of(self._here), initial_word), None
            )
            while (transfer := self._next_transfer(channel)) is not None:
                (channel.send if self.sends else channel.recv)(transfer.memory)
                self._wait_ready(channel)
                self._marks.put((channel.mark(), transfer))
        except Exception as error:
            # NCCL reports the communicator broken, or this code has a bug; tell the loop in both cases.
            self._call_on_loop(self._fail, _error_text(error))
        if channel is not None:
            with contextlib.suppress(Exception):
                # The communicator may have failed already; its stream has to be emptied all the same.
                channel.abort()
        self._marks.put(None)

    def _next_transfer(self, channel: Channel) -> NcclTransfer | None:
        while not self._stop.is_set():
            try:
                return self._to_call.get(timeout=_CHECK_S)
            except queue.Empty:
                channel.is_ready()  # raises if the communicator has failed
        return None

    def _wait_ready(self, channel: Channel) -> None:
        looks = 0
        while not channel.is_ready():
            looks += 1
            if looks > _LOOKS and self._stop.wait(_BUSY_S):
                raise NcclFailure("ended before NCCL took it up")

    # ------------------------------------------------------------ the thread that waits

    def _wait_for_marks(self) -> None:
        while (item := self._marks.get()) is not None:
            mark, transfer = item
            try:
                mark.wait()
                if transfer.check is not None and not self._stop.is_set():
                    transfer.check()
            except Exception as error:  # as in `_call_nccl`
                self._call_on_loop(self._fail, _error_text(error))
            else:
                self._call_on_loop(self._finish_oldest)
        self._call_on_loop(_set_outcome, self._gone, None, None)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"jaxpp NCCL peer {self._here}: {name}", daemon=True).start()

    def _call_on_loop(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, so that nobody waits
            self._loop.call_soon_threadsafe(function, *args)


def _set_outcome(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # marks the error as retrieved, because nobody may await the future any more


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, NcclFailure) else repr(error)


def _log_failure(ending: asyncio.Task[None]) -> None:
    if not ending.cancelled() and (error := ending.exception()) is not None:
        _LOG.error("%s", error)
