"""vigil: keeps an actor's event loop awake for a moment behind a step, where the next one is likely to come soon. Looks
at nothing itself: a loop that does not sleep sees whatever comes.

Sleeping and being woken costs some ten microseconds, and where the core has gone idle meanwhile some hundred. A
training loop sends the next step as soon as it has heard of the last one. So an actor without a step stays awake for as
long as the lookout says; where steps have been coming later than that, it sleeps at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from jaxpp_async.transport.lookout import Lookout

LONGEST_S = 1e-3
"""Of one vigil: what a training loop takes to send the next step, when it does little else."""


class Vigil:
    """One actor's.

    Args:
        loop: the actor's own; kept awake by a callback in each pass, which offers the core to whoever wants it.
        is_idle: whether the actor has no step.
        now_s: a clock, in seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        is_idle: Callable[[], bool],
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._loop, self._is_idle, self._now_s, self._lookout = loop, is_idle, now_s, Lookout(LONGEST_S)
        self._is_kept = self._is_scheduled = False

    def begin(self) -> None:
        """A step has been answered: from now on the next may come."""
        self._is_kept = True
        self._look_again()

    def end(self) -> None:
        """A request has come, or none will."""
        if self._is_kept:
            self._is_kept = False
            self._lookout.came(self._now_s())

    def _look_again(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_scheduled = False
        if not self._is_idle():
            self._is_kept = False  # the next step was here before the last one's reply had left: nobody waits
            self._lookout.stop()
        elif self._is_kept and self._lookout.goes_on(self._now_s()):
            os.sched_yield()
            self._look_again()
