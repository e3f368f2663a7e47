"""deadlines: how long something may take, counted in time in which this process could have heard that it is done."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from jaxpp_async.actors.failures.awake import TICK_S, AwakeClock


@contextlib.asynccontextmanager
async def awake_timeout(seconds: float) -> AsyncIterator[None]:
    """`asyncio.timeout`, counted in time awake: what came while the loop was blocked is heard before it is too late.

    Raises:
        TimeoutError: the time is over.
    """
    loop, clock = asyncio.get_running_loop(), AwakeClock(time.monotonic())
    async with asyncio.timeout(None) as scope:

        def look() -> None:
            nonlocal timer
            left = seconds - clock.tick(time.monotonic())
            if left > 0:
                timer = loop.call_later(min(left, TICK_S), look)
            else:
                scope.reschedule(loop.time())

        timer = loop.call_later(min(seconds, TICK_S), look)
        try:
            yield
        finally:
            timer.cancel()
