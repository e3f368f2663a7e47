"""Keep an event loop awake for a moment where a message is likely to come soon.

An event loop that sleeps takes some ten microseconds to wake up, and some hundred where the core has become
idle. A training loop sends the next step as soon as it has the reply to the last one, and small steps end
soon. An actor without a step, and a controller with a step under way, therefore stay awake for as long as
`AdaptiveSpin` recommends. Where messages have been coming later than that, they sleep at once. The loop
itself finds the message when it is awake.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterable

from jaxpp_async.transport.adaptive_spin import AdaptiveSpin

LONGEST_S = 1e-3
"""The longest time to stay awake: as long as a training loop takes to send the next step when it does little
else.
"""


def has_spare_core(hosts: Iterable[str]) -> bool:
    """Whether this process may use a core of its own while actors compute: each actor keeps one core busy.

    A mesh asks once, as it starts, and counts its own actors. Other meshes of this process are not counted,
    and neither is a container's quota of CPU time, which may be less than its cores. If these leave no core,
    an actor loses up to `LONGEST_S` before a reply, and nothing where replies have been taking longer.

    Args:
        hosts: the host of each actor's process.
    """
    here = socket.gethostname()
    return len(os.sched_getaffinity(0)) > sum(host == here for host in hosts)


class LoopSpin:
    """Keeps one event loop awake.

    Args:
        loop: kept awake by a callback in each pass, which offers the core to other processes.
        is_idle: whether the loop can only wait: the actor has no step, or the controller has a step under
            way.
        now_s: gives the time in seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        is_idle: Callable[[], bool],
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._loop, self._is_idle, self._now_s = loop, is_idle, now_s
        self._adaptive_spin = AdaptiveSpin(LONGEST_S)
        self._is_expecting = self._is_scheduled = False

    def begin(self) -> None:
        """Begin to stay awake: a message may come now, the next step or a reply to one."""
        self._is_expecting = True
        self._schedule()

    def end(self) -> None:
        """Stop staying awake: the message has come, or none will."""
        if self._is_expecting:
            self._is_expecting = False
            self._adaptive_spin.record_message(self._now_s())

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        self._is_scheduled = False
        if not self._is_idle():
            self._is_expecting = False  # the next step came before the reply to the last one had left
            self._adaptive_spin.cancel_wait()
        elif self._is_expecting and self._adaptive_spin.should_spin(self._now_s()):
            os.sched_yield()
            self._schedule()
