"""Waiting for what nobody tells: threads, other processes, sockets, logs. Whatever has an event is awaited
instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any], *, within_s: float = 20.0, every_s: float = 0.001) -> None:
    """Look until `condition()` holds.

    Args:
        within_s: a TimeoutError if it takes longer.
        every_s: between two looks; 0: at each turn of the loop, where the moment is what counts.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(every_s)
