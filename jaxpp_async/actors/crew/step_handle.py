"""step_handle: one step under way. In: the replies of the processes that run it. Out: its end, told to whoever asked.

A `rpc.Waiter`. It starts nothing and asks nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any

from jaxpp_async.actors.crew.rpc import ActorLink
from jaxpp_async.actors.messages import StepDone, StepId, StepStats, step_text
from jaxpp_async.actors.owned_tasks import retrieve
from jaxpp_async.errors import ProtocolError
from jaxpp_async.program import ProcessId


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
