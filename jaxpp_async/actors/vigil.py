"""vigil: keeps an actor's event loop awake for a moment behind a step, where the next one is likely to come soon. Looks
at nothing itself: a loop that does not sleep sees whatever comes.

Sleeping and being woken costs some ten microseconds, and where the core has gone idle meanwhile some hundred. A training
loop sends the next step as soon as it has heard of the last one. So an actor without a step stays awake for as long as
that may take, if it has been taking less; else it sleeps at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from jaxpp_async.transport.lookout import Lookout

LONGEST_S = 600e-6
"""Of one vigil: what a training loop takes to send the next step, when it does little else."""


class Vigil:
    """One actor's.

    Args:
        loop: kept awake by a callback in each of its passes, which offers the core to whoever wants it. The actor's own.
        is_idle: whether the actor has no step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, is_idle: Callable[[], bool]):
        self._loop, self._is_idle, self._lookout = loop, is_idle, Lookout(LONGEST_S)
        self._is_kept = self._is_scheduled = False

    def begin(self) -> None:
        """A step has been answered: from now on the next may come."""
        self._is_kept = True
        self._look_again()

    def end(self) -> None:
        """A request has come, or none will."""
        if self._is_kept:
            self._is_kept = False
            self._lookout.came(time.monotonic())

    def _look_again(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_scheduled = False
        if self._is_kept and self._is_idle() and self._lookout.goes_on(time.monotonic()):
            os.sched_yield()
            self._look_again()
