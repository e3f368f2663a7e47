"""Run a long computation in a thread that has an owner: the coroutine that waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from jaxpp_async.jax_bridge.jax_config import with_settings_of_this_thread

_T = TypeVar("_T")


class _Abandoned(Exception):
    """The await was cancelled, so that nobody waits for the computation any more."""


async def run_in_owned_thread(work: Callable[[Callable[[str], None]], _T]) -> _T:
    """Run a computation in a thread, and return only when the thread is done with it.

    The thread has the settings of JAX and the context variables of the caller. If the await is cancelled, the
    function that `work` is given raises when it is called next; the await ends when `work` has ended.

    Args:
        work: a function that takes a function to call often, with text that says what is being done.

    Returns:
        The result of `work`.
    """
    abandoned = threading.Event()

    def tell(_: str) -> None:
        if abandoned.is_set():
            raise _Abandoned

    context, settled = contextvars.copy_context(), with_settings_of_this_thread(work)
    # a future of the loop, and no task, which the end of the loop would cancel while the thread goes on
    done = asyncio.get_running_loop().run_in_executor(None, lambda: context.run(settled, tell))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        abandoned.set()
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError:
                continue  # cancelled again: the thread ends soon
        if not done.cancelled():
            done.exception()  # read, so that asyncio does not log it
        raise
