"""Own asyncio tasks and end them together, and limit how long a block of code may take.

Limits count only the time for which this process was awake and could have received an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from jaxpp_async.protocol.clocks import TICK_S, SuspendAwareClock

_LOG = logging.getLogger("jaxpp_async")


class OwnedTasks:
    """The asyncio tasks that one owner has started and will end together. An error of a task is logged,
    unless the code that awaits the task raises it.
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
            is_awaited: whether other code awaits the task and so raises its error; the error is not logged
                then.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done_awaited if is_awaited else self._on_done)
        return task

    async def aclose(self) -> None:
        """Cancel all tasks except the one that calls this, and wait until they have ended. Their errors are
        logged, not raised.
        """
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

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
