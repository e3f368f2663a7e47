"""vigil: keeps an event loop awake for a moment, where a message is likely to come soon: an actor's behind a step, the
controller's before its replies. Looks at nothing itself: a loop that does not sleep sees whatever comes.

Sleeping and being woken costs some ten microseconds, and where the core has gone idle meanwhile some hundred. A
training loop sends the next step as soon as it has heard of the last one, and small steps end soon. So an actor without
a step, and a controller with one, stay awake for as long as the lookout says; where messages have been coming later
than that, they sleep at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterable

from jaxpp_async.transport.adaptive_spin import AdaptiveSpin

LONGEST_S = 1e-3
"""Of one vigil: what a training loop takes to send the next step, when it does little else."""


def has_spare_core(hosts: Iterable[str]) -> bool:
    """Whether this process may use a core of its own while actors compute: each of them keeps one busy.

    A mesh asks once, as it starts, and counts its own actors: neither those of other meshes of this process nor a
    container's quota of CPU time, which may be less than its cores. Where these leave no core, up to `LONGEST_S` before
    a reply are taken from an actor, and none where replies have been taking longer.

    Args:
        hosts: where each actor's processes are.
    """
    here = socket.gethostname()
    return len(os.sched_getaffinity(0)) > sum(host == here for host in hosts)


class LoopSpin:
    """One event loop's.

    Args:
        loop: kept awake by a callback in each pass, which offers the core to whoever wants it.
        is_idle: whether the loop has nothing to do but to wait: the actor no step, the controller one under way.
        now_s: a clock, in seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        is_idle: Callable[[], bool],
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._loop, self._is_idle, self._now_s, self._adaptive_spin = (
            loop,
            is_idle,
            now_s,
            AdaptiveSpin(LONGEST_S),
        )
        self._is_kept = self._is_scheduled = False

    def begin(self) -> None:
        """From now on a message may come: the next step, or a reply to one."""
        self._is_kept = True
        self._look_again()

    def end(self) -> None:
        """It has come, or none will."""
        if self._is_kept:
            self._is_kept = False
            self._adaptive_spin.record_message(self._now_s())

    def _look_again(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_scheduled = False
        if not self._is_idle():
            self._is_kept = False  # the next step was here before the last one's reply had left: nobody waits
            self._adaptive_spin.cancel_wait()
        elif self._is_kept and self._adaptive_spin.should_spin(self._now_s()):
            os.sched_yield()
            self._look_again()
