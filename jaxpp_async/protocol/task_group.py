"""Keep asyncio tasks together so that their owner can end all of them, and limit how long a block of code may
take.

Time limits count only the time for which this process was awake and could have received an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from jaxpp_async.protocol.clocks import TICK_S, SuspendAwareClock

_LOG = logging.getLogger("jaxpp_async")

T = TypeVar("T")


class OwnedTasks:
    """The asyncio tasks that one owner has started and will end together. If a task fails and no other code
    awaits the task, its error is logged.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self, name: str, work: Coroutine[Any, Any, None], *, is_awaited: bool = False
    ) -> asyncio.Task[None]:
        """Start a task that runs `work` until its end, or until the owner cancels it with `aclose`.

        Args:
            name: the task's name, for logs.
            work: the coroutine to run.
            is_awaited: whether other code awaits the task. If so, an error of the task is raised in that code
                and is not logged; otherwise the error is logged.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done_awaited if is_awaited else self._on_done)
        return task

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks except the one that calls this, and return them, without waiting for their end."""
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        return others

    async def aclose(self) -> None:
        """Cancel all tasks except the one that calls this, and wait until they have ended. Their errors are
        logged, not raised.
        """
        await asyncio.gather(*self.cancel(), return_exceptions=True)

    def _on_done_awaited(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        retrieve(task)  # everyone who awaited the task may have been cancelled

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("%s failed", task.get_name(), exc_info=error)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved, so that asyncio does not complain if nobody awaits the future;
    code that does await it still gets the exception.
    """
    if not future.cancelled():
        future.exception()


@contextlib.asynccontextmanager
async def awake_timeout(seconds: float) -> AsyncIterator[None]:
    """Limit how long a `with` block may take, like `asyncio.timeout`, but count only the time for which this
    process was awake. A message that arrived while the event loop was blocked is therefore handled before the
    limit ends the block.

    Args:
        seconds: the limit.

    Raises:
        TimeoutError: the block did not end within the limit.
    """
    loop, clock = asyncio.get_running_loop(), SuspendAwareClock(time.monotonic())
    async with asyncio.timeout(None) as scope:

        def check() -> None:
            nonlocal timer
            left = seconds - clock.tick(time.monotonic())
            if left > 0:
                timer = loop.call_later(min(left, TICK_S), check)
            else:
                scope.reschedule(loop.time())

        timer = loop.call_later(min(seconds, TICK_S), check)
        try:
            yield
        finally:
            timer.cancel()


async def all_of(coroutines: Mapping[int, Coroutine[Any, Any, T]], what: str) -> dict[int, T]:
    """Run coroutines concurrently, and return the result of each under the coroutine's key.

    If a coroutine raises an error, the other coroutines are cancelled, and the error is raised.

    Args:
        coroutines: the coroutines. Keys are numbers of actors or processes.
        what: a phrase that names the asyncio tasks, for debugging.
    """
    loop = asyncio.get_running_loop()
    tasks = {number: loop.create_task(c, name=f"{what} {number}") for number, c in coroutines.items()}
    if not tasks:
        return {}
    try:
        done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return {number: task.result() for number, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def run_bounded(work: Coroutine[Any, Any, None], timeout_s: float, complaint: str) -> None:
    """Await `work` for at most `timeout_s` seconds, and log any error instead of raising it.

    This is used while a mesh is closed: if one part of the mesh cannot be closed, the other parts must still
    be closed.

    Args:
        work: the coroutine.
        timeout_s: the limit in seconds.
        complaint: the beginning of the log line in case of an error.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except Exception as error:  # closing goes on, and the log says so
        _LOG.warning("%s: %r", complaint, error)


async def wait_uninterrupted(task: asyncio.Task[None], on_cancel: Callable[[], None]) -> None:
    """Wait until a task has ended, even if the caller is cancelled meanwhile, once or several times. The task
    must end within a limited time.

    This is used to close a mesh. If closing were interrupted, processes and sockets would be left that no
    code can close any more.

    Args:
        task: the task.
        on_cancel: called whenever the caller is cancelled; it should shorten the rest of the task.

    Raises:
        CancelledError: the caller was cancelled meanwhile.
        BaseException: the error of the task, if the caller was not cancelled.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        raise cancelled
    task.result()
