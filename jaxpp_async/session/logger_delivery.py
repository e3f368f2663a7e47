"""Call one logger with each entry of its queue, so that no logger can slow training down or end it.

Each logger has a queue of its own, which drops its oldest entries when it is full, and a thread of its own,
which calls `logger.log(step, values)`. A logger whose `log` is an `async def` has a task of the event loop
instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from jaxpp_async.base.printable import shown_value

_LOG = logging.getLogger("jaxpp_async")

QUEUED = 1_000
"""The number of entries that wait for a logger, or for a value that is being fetched, at most."""

SLOW_S = 10.0
"""The seconds after which a logger that has not returned is reported."""

HELD_S = 1.0
"""The seconds without an `await` in an `async def log` after which it is reported: nothing else runs then."""


@dataclass(frozen=True, slots=True)
class LoggerState:
    """How a logger does at one moment.

    Args:
        name: the class of the logger, with a number if there are several of the class.
        num_waiting: how many steps wait for it.
        num_dropped: how many steps it did not get, because too many waited or the mesh closed.
        num_failed: how many errors it raised.
        busy_s: the seconds that the call under way has taken so far; 0 if there is none.
        last_error: the last error that it raised, in one line; empty without one.
    """

    name: str
    num_waiting: int = 0
    num_dropped: int = 0
    num_failed: int = 0
    busy_s: float = 0.0
    last_error: str = ""

    @property
    def keeps_up(self) -> bool:
        """Whether it gets everything in time and raises nothing."""
        return not (self.num_dropped or self.num_failed or self.busy_s > SLOW_S)


class _Queue:
    """The entries that wait for one logger, and what is told of it: each thing once. Threads share it.

    Args:
        logger: the user's logger.
        name: its name in messages.
    """

    def __init__(self, logger: Any, name: str):
        self.logger, self.name = logger, name
        self.changed = threading.Condition()
        self.is_ended = False
        self._entries: deque[tuple[int, dict[str, float]]] = deque()
        self._busy: tuple[float, int] | None = None
        self._num_dropped = self._num_failed = self._num_left = 0
        self._last_error = ""
        self._is_slow_told = self._is_held_told = False

    def state(self) -> LoggerState:
        """Return how the logger does."""
        with self.changed:
            return LoggerState(
                self.name,
                len(self._entries),
                self._num_dropped + self._num_left,
                self._num_failed,
                0.0 if self._busy is None else time.monotonic() - self._busy[0],
                self._last_error,
            )

    def put(self, step: int, values: dict[str, float]) -> None:
        """Add an entry; if the queue is full, drop the oldest.

        Args:
            step: the number of the step.
            values: the values by name.
        """
        with self.changed:
            if len(self._entries) == QUEUED:
                self._entries.popleft()
                self._num_dropped += 1
            self._entries.append((step, values))
            busy = self._busy
            self.changed.notify()
        busy_s = 0.0 if busy is None else time.monotonic() - busy[0]
        if busy is not None and not self._is_slow_told and (busy_s > SLOW_S or self._num_dropped):
            self._is_slow_told = True
            _LOG.warning(
                "logger %s has been busy with step %d for %.1f s; training goes on, and of what waits for "
                "the logger the latest %d steps are kept",
                self.name,
                busy[1],
                busy_s,
                QUEUED,
            )

    def take(self, *, waits: bool = False) -> tuple[int, dict[str, float]] | None:
        """Return the oldest entry, with which the logger is busy from now on; None if there is none.

        Args:
            waits: whether to wait for an entry until the queue has ended.
        """
        with self.changed:
            while waits and not self._entries and not self.is_ended:
                self._busy = None
                self.changed.wait()
            if not self._entries:
                self._busy = None
                return None
            entry = self._entries.popleft()
            self._busy = (time.monotonic(), entry[0])
            return entry

    def note_failed(self, step: int, error: BaseException) -> None:
        """Count an error that the logger raised, and tell the user of the first one.

        Args:
            step: the number of the step that the logger got.
            error: the error.
        """
        shown = shown_value(error, str)
        with self.changed:
            self._num_failed += 1
            self._last_error = f"{type(error).__name__}: {shown}"
        if self._num_failed == 1:
            _LOG.warning(
                "logger %s raised %s at step %d: %s; training goes on, and so do calls of the logger",
                self.name,
                type(error).__name__,
                step,
                shown,
                exc_info=error,
            )

    def note_held(self, step: int, seconds: float) -> None:
        """Tell the user once that an `async def log` did not let the event loop go on.

        Args:
            step: the number of the step that the logger got.
            seconds: the seconds without an `await`.
        """
        if seconds < HELD_S or self._is_held_told:
            return
        self._is_held_told = True
        _LOG.warning(
            "logger %s held the event loop for %.1f s at step %d, and nothing else ran meanwhile; its `async "
            "def log` has to await what takes long, or write `def log`, which is called in a thread",
            self.name,
            seconds,
            step,
        )

    def note_ended(self, waited_s: float | None) -> None:
        """Tell the user what the logger did not get.

        Args:
            waited_s: the seconds after which nobody waits for the logger any more; None if it has ended.
        """
        with self.changed:
            num_left, self._busy = len(self._entries), None
            self._num_left = num_left + (waited_s is not None)  # with that of the call that has not returned
            self._entries.clear()
        if waited_s is not None:
            _LOG.warning(
                "logger %s had not returned %g s after the mesh closed; %d steps are not logged",
                self.name,
                waited_s,
                num_left,
            )
        if self._num_dropped:
            _LOG.warning(
                "logger %s was too slow for %d steps, which it did not get", self.name, self._num_dropped
            )
        if self._num_failed > 1:
            _LOG.warning("logger %s raised %d errors in all", self.name, self._num_failed)


class ThreadDelivery:
    """A thread that calls one logger, which starts with the first entry and ends behind the last one.

    The thread is a daemon, so that a logger that never returns does not keep the process from ending.

    Args:
        logger: the user's logger.
        name: its name in messages.
    """

    def __init__(self, logger: Any, name: str):
        self._queue = _Queue(logger, name)
        self.state = self._queue.state
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_ended: asyncio.Future[None] | None = None

    def put(self, step: int, values: dict[str, float]) -> None:
        """Queue an entry for the logger.

        Args:
            step: the number of the step.
            values: the values by name.
        """
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._has_ended = self._loop.create_future()
            target, name = _call_logger, f"jaxpp-logger-{self._queue.name}"
            args = (self._queue, self._loop, self._has_ended)
            self._thread = threading.Thread(target=target, args=args, name=name, daemon=True)
            self._thread.start()
        self._queue.put(step, values)

    def end(self) -> None:
        """Let the thread end when its queue is empty; any thread may call this."""
        with self._queue.changed:
            self._queue.is_ended = True
            self._queue.changed.notify()

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until the thread has ended, and tell the user what the logger did not get.

        Args:
            timeout_s: the most seconds to wait.
        """
        if self._has_ended is None:
            return
        await asyncio.wait([self._has_ended], timeout=timeout_s)
        self._queue.note_ended(None if self._has_ended.done() else timeout_s)


def _call_logger(queue: _Queue, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    """Call a logger with each entry of its queue until the queue has ended; the body of a thread.

    Args:
        queue: the queue of the logger.
        loop: the mesh's event loop.
        ended: a future of the loop, which is done when the thread ends.
    """
    while (entry := queue.take(waits=True)) is not None:
        try:
            returned = queue.logger.log(*entry)
            if inspect.isawaitable(returned):
                if inspect.iscoroutine(returned):
                    returned.close()
                raise TypeError("log returned an awaitable; write it as `async def log(self, step, values)`")
        except BaseException as error:  # the user's logger may raise anything, and training goes on
            queue.note_failed(entry[0], error)
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_set_done, ended)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class TaskDelivery:
    """A task of the event loop that awaits one logger's `async def log`.

    Args:
        logger: the user's logger.
        name: its name in messages.
    """

    def __init__(self, logger: Any, name: str):
        self._queue = _Queue(logger, name)
        self.state = self._queue.state
        self._task: asyncio.Task[None] | None = None

    def put(self, step: int, values: dict[str, float]) -> None:
        """Queue an entry for the logger.

        Args:
            step: the number of the step.
            values: the values by name.
        """
        self._queue.put(step, values)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(
                _await_logger(self._queue), name=f"logger {self._queue.name}"
            )

    def end(self) -> None:
        """Do nothing: the task ends when its queue is empty."""

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until the logger has got all entries, or cancel it; tell the user what it did not get.

        Args:
            timeout_s: the most seconds to wait.
        """
        if self._task is None:
            return
        await asyncio.wait([self._task], timeout=timeout_s)
        is_late = not self._task.done()
        self._task.cancel()
        self._queue.note_ended(timeout_s if is_late else None)
        await asyncio.wait([self._task], timeout=1.0)


async def _await_logger(queue: _Queue) -> None:
    while (entry := queue.take()) is not None:
        try:
            await _Timed(queue.logger.log(*entry), partial(queue.note_held, entry[0]))
        except (KeyboardInterrupt, GeneratorExit):  # by the user, or the loop has ended
            raise
        except BaseException as error:  # as in a thread
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            queue.note_failed(entry[0], error)
        await asyncio.sleep(0)  # a logger that awaits nothing would hold the loop until the queue is empty


class _Timed(Awaitable[Any]):
    """An awaitable that goes on as another one does, and tells how long each of its steps took.

    Args:
        awaited: the other one.
        on_step: called with the seconds from when it went on until it waited again or ended.
    """

    def __init__(self, awaited: Awaitable[Any], on_step: Callable[[float], None]):
        self._awaited, self._on_step = awaited, on_step

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._awaited.__await__()
        go_on = partial(steps.send, None)
        while True:
            began_s = time.monotonic()
            try:
                waits_for = go_on()
            except StopIteration as stop:
                return stop.value
            finally:
                self._on_step(time.monotonic() - began_s)
            try:
                yield waits_for
            except (
                BaseException
            ) as error:  # such as CancelledError: it goes to the awaited one, which decides
                go_on = partial(steps.throw, error)
            else:
                go_on = partial(steps.send, None)


Delivery: TypeAlias = ThreadDelivery | TaskDelivery


def make_delivery(logger: Any, name: str) -> Delivery:
    """Return what calls a logger: a task if its `log` is an `async def`, else a thread.

    Args:
        logger: the user's logger.
        name: its name in messages.
    """
    make: Callable[[Any, str], Delivery] = (
        TaskDelivery if inspect.iscoroutinefunction(logger.log) else ThreadDelivery
    )
    return make(logger, name)
