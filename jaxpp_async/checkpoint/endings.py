"""endings: how work on a checkpoint ends that failed, or was cancelled while a thread was at it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from jaxpp_async.errors import CheckpointError
from jaxpp_async.printable import shown

T = TypeVar("T")


def failed(folder: str, what: str, error: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be `what`, with its cause."""
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
    result = CheckpointError(f"{shown(folder)} could not be {what}: {text or type(error).__name__}")
    result.__cause__ = error
    return result


async def in_thread(work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Run `work` in a thread. When cancelled, `stop` is set and the thread's end awaited: nothing is written later."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):  # once more; the thread does not end for it
                await asyncio.wait([future])
        with contextlib.suppress(Exception, asyncio.CancelledError):  # seen: the cancellation is what is raised
            future.result()
        raise
