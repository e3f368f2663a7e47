"""ending: bounded waits for the end of things, so that closing a mesh always ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from jaxpp_async.actors.launch import ActorHandle
from jaxpp_async.program import ActorId

_LOG = logging.getLogger("jaxpp_async")


async def wait_all_dead(handles: Mapping[ActorId, ActorHandle], timeout_s: float) -> bool:
    """Wait until every actor has ended; False if one has not in time."""
    loop = asyncio.get_running_loop()
    waits = [
        loop.create_task(handle.wait_dead(), name=f"wait for the end of actor {actor}")
        for actor, handle in handles.items()
    ]
    if not waits:
        return True
    try:
        _, pending = await asyncio.wait(waits, timeout=timeout_s)
    finally:
        for wait in waits:
            wait.cancel()
    return not pending


async def bounded(work: Coroutine[Any, Any, None], timeout_s: float, complaint: str) -> None:
    """Wait for `work`, but not for ever, and go on whatever it raises: the end must be reached."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except Exception as error:  # closing goes on, and this is said
        _LOG.warning("%s: %r", complaint, error)


async def to_the_end(task: asyncio.Task[None], hurry: Callable[[], None]) -> None:
    """Wait for a task of bounded length to end, whoever cancels the caller, and however often.

    Cancelled half way, an end would leave processes and sockets that nobody owns any more.

    Args:
        hurry: called when the caller is cancelled, to make the rest short.

    Raises:
        CancelledError: the caller was cancelled meanwhile. Whatever `task` raises.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            hurry()
    if cancelled is not None:
        raise cancelled
    task.result()
