"""nccl_end: our end of one link: what is posted on it goes to NCCL in turn, and is told of once it is done.

It never waits on the event loop's thread: a thread of its own sleeps until the oldest transfer is done. It gives no
buffer back before the communicator is gone and its stream is empty, and calls nothing on a communicator after that.
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
from typing import Any, TypeVar

from jaxpp_async.errors import TransferError
from jaxpp_async.transport.base import OnEnd, Peer
from jaxpp_async.transport.buffers import Memory
from jaxpp_async.transport.nccl_library import Channel, Mark, NcclFailure, NcclLibrary
from jaxpp_async.transport.nccl_plan import Line, Link, Queue

_LOG = logging.getLogger("jaxpp_async")

RELEASE_TIMEOUT_S = 5.0
"""How long NCCL may take to let go of the buffers."""

_BUSY_S = 0.0005
"""How long to wait before asking a busy communicator again."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Transfer:
    """A posted transfer. Holds the memory: NCCL keeps no reference."""

    memory: Memory
    tag: int
    done: OnEnd


class LinkEnd:
    """One end of a link.

    Args:
        link: which. here: whose end.

    Attributes:
        sends: whether this is the end that sends.
        failure: why nothing can be posted any more; None while something can.
    """

    def __init__(self, link: Link, here: Peer):
        self.link, self.sends = link, link.sender == here
        self.failure: str | None = None
        self._loop, self._here = asyncio.get_running_loop(), here
        self._channel: Channel | None = None
        self._opening: asyncio.Future[None] | None = None
        self._queue: Queue[Transfer] = Queue()
        self._waiting: deque[Transfer] = deque()  # it is their turn, and NCCL is busy
        self._going: deque[Transfer] = deque()  # NCCL has them, oldest first
        self._is_busy = False  # NCCL has not taken up the last call yet, and is asked again
        self._is_unmarked = False  # the youngest that NCCL has is not marked yet
        self._marks: queue.SimpleQueue[Mark | None] = queue.SimpleQueue()
        self._waiter: asyncio.Future[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def peer(self) -> Peer:
        """Who has the other end."""
        return self.link.peer_of(self._here)

    @property
    def num_open(self) -> int:
        """How many transfers have begun and not ended."""
        return len(self._waiting) + len(self._going)

    # ------------------------------------------------------------ opening

    async def open(self, library: NcclLibrary, unique_id: bytes, greeting: int) -> None:
        """Make the communicator and pass one word: NCCL connects two ends at their first message, and a step must not
        wait for that. The other end does the same meanwhile.

        Args:
            greeting: what both know, and no other link has.

        Raises:
            NcclFailure: NCCL refused, or the word is another's.
        """
        rank, device = self.link.rank_of(self._here), self.link.device

        def make() -> None:
            self._channel = library.join(unique_id, rank, device)

        self._opening = self._on_thread("join", make)
        await asyncio.shield(self._opening)
        while True:
            if self._is_ready():
                break
            await asyncio.sleep(_BUSY_S)
        self._waiter = self._start_waiter()
        word = await self._on_thread("make a word", lambda: library.word(device, greeting if self.sends else 0))
        heard: asyncio.Future[None] = self._loop.create_future()
        self._go(Transfer(word, 0, lambda error: _settle(heard, None, error and NcclFailure(str(error)))))
        await heard
        got = await self._on_thread("read a word", lambda: library.read_word(word))
        if got != greeting:
            raise NcclFailure(f"the first message is {got:#x}, not {greeting:#x}: communicators were mixed up")
        if self.failure is not None:
            raise NcclFailure(self.failure)

    def _is_ready(self) -> bool:
        if self.failure is not None or self._channel is None:
            raise NcclFailure(self.failure or "NCCL made no communicator")
        return self._channel.is_ready()

    # ------------------------------------------------------------ transferring

    def begin(self, line: Line) -> None:
        """A step begins, with these transfers in this order.

        Raises:
            ProtocolError: as `Queue.begin`.
        """
        self._queue.begin(line)

    def post(self, sequence: int, transfer: Transfer) -> None:
        """Take a transfer, to go when it is its turn.

        Raises:
            ProtocolError: as `Queue.offer`.
        """
        for one in self._queue.offer(sequence, transfer):
            self._go(one)

    def check(self) -> None:
        """Ask NCCL whether the communicator has failed; end it if so."""
        if self.failure is None and self._channel is not None:
            try:
                self._channel.is_ready()
            except NcclFailure as error:
                self._fail(str(error))

    def _go(self, transfer: Transfer) -> None:
        self._waiting.append(transfer)
        if not self._is_busy and self.failure is None:
            self._give()

    def _give(self) -> None:
        """Give NCCL what waits. Where it is still busy with a call, neither another nor a mark may follow yet."""
        channel = self._channel
        assert channel is not None  # it is open, or being opened
        try:
            while self._is_unmarked or self._waiting:
                if not channel.is_ready():
                    self._is_busy = True
                    self._loop.call_later(_BUSY_S, self._ask_again)
                    return
                if self._is_unmarked:
                    self._marks.put(channel.mark())
                    self._is_unmarked = False
                else:
                    self._going.append(transfer := self._waiting.popleft())
                    (channel.send if self.sends else channel.recv)(transfer.memory)
                    self._is_unmarked = True
        except NcclFailure as error:
            self._fail(str(error))

    def _ask_again(self) -> None:
        self._is_busy = False
        if self.failure is None:
            self._give()

    def _finished(self, error: str | None) -> None:
        """The oldest transfer is done; or the device has failed."""
        if self.failure is not None:
            return  # `_end` tells of it, when nothing can be written any more
        if error is not None:
            self._fail(error)
            return
        self._tell(self._going.popleft(), None)

    def _tell(self, transfer: Transfer, error: Exception | None) -> None:
        try:
            transfer.done(error)
        except Exception as failure:  # of the caller's code; the other transfers' ends have to be told all the same
            self._loop.call_exception_handler({"message": f"{transfer.done} failed", "exception": failure})

    # ------------------------------------------------------------ ending

    async def end(self, cause: str) -> None:
        """End the communicator, wait until its stream is empty, and tell what was open. Again: wait for the first time.

        Raises:
            TransferError: NCCL does not let go in time; nothing is told, since the buffers are still NCCL's.
        """
        self.failure = self.failure or cause
        await asyncio.shield(self._begin_end())

    def _fail(self, cause: str) -> None:
        """NCCL reports the communicator broken: end it, and then what it had."""
        if self.failure is None:
            self.failure = f"link lost ({cause})"
            self._begin_end().add_done_callback(_log_failure)

    def _begin_end(self) -> asyncio.Task[None]:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end(), name=f"end the {self.link}")
        return self._ending

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                if self._opening is not None:
                    await asyncio.wait([self._opening])
                if self._channel is not None:
                    with contextlib.suppress(NcclFailure):  # it has failed already: what matters is the stream
                        await self._on_thread("abort", self._channel.abort)
                self._marks.put(None)
                if self._waiter is not None:
                    await asyncio.wait([self._waiter])
        except TimeoutError:
            self._marks.put(None)  # should it let go later, the thread ends too
            raise TransferError(
                f"{self.link}: NCCL still holds {self.num_open} buffers {RELEASE_TIMEOUT_S:.0f} s after the abort; "
                "this process has to end"
            ) from None
        self._channel = None
        left = [*self._going, *self._waiting, *self._queue.clear()]
        self._going.clear()
        self._waiting.clear()
        for transfer in left:
            what = f"transfer from peer {self.link.sender} to peer {self.link.receiver}, tag {transfer.tag:#x}"
            self._tell(transfer, TransferError(f"{what} failed: {self.failure}"))

    # ------------------------------------------------------------ threads

    def _start_waiter(self) -> asyncio.Future[None]:
        """A thread that sleeps until the oldest mark is reached, again and again."""
        gone: asyncio.Future[None] = self._loop.create_future()

        def wait() -> None:
            while (mark := self._marks.get()) is not None:
                error = None
                try:
                    mark.wait()
                except NcclFailure as failure:
                    error = str(failure)
                self._call_on_loop(self._finished, error)
            self._call_on_loop(_settle, gone, None, None)

        threading.Thread(target=wait, name=self._thread_name(str(self.link)), daemon=True).start()
        return gone

    def _on_thread(self, name: str, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run what may take long on a thread of its own: one that hangs must not keep others waiting."""
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as failure:  # belongs to whoever awaits the future
                error = failure
            self._call_on_loop(_settle, future, result, error)

        threading.Thread(target=run, name=self._thread_name(name), daemon=True).start()
        return future

    def _thread_name(self, what: str) -> str:
        return f"jaxpp NCCL peer {self._here}: {what}"

    def _call_on_loop(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            self._loop.call_soon_threadsafe(function, *args)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # marks it as seen: whoever waited may have gone


def _log_failure(ending: asyncio.Task[None]) -> None:
    if not ending.cancelled() and (error := ending.exception()) is not None:
        _LOG.error("%s", error)
