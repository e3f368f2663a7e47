"""Keep a process awake for a moment where a message is likely to come soon.

To sleep and be woken costs some ten microseconds, and some hundred where the core has become idle; to look
for a message that does not come costs a core's time. `AdaptiveSpin` chooses how long to look, from how long
the last waits took: a short wait makes the next look longer, a long one makes it shorter, down to none.

`LoopSpin` keeps an event loop awake for that long. A training loop sends the next step as soon as it has the
reply to the last one, and small steps end soon. An actor without a step, and a controller with a step under
way, therefore stay awake. Where messages have been coming later than that, they sleep at once. The loop
itself finds the message when it is awake.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterable

SHORTEST_S = 20e-6
"""A look shorter than this is not worth its cost, so that it becomes none."""

LONGEST_S = 1e-3
"""The longest time that a `LoopSpin` stays awake: as long as a training loop takes to send the next step when
it does little else.
"""


class AdaptiveSpin:
    """The length of one waiter's busy look for messages, which follows the lengths of its last waits.

    A wait up to `longest_s` could have been covered by looking, so it doubles the length; a longer one halves
    it. The caller passes the time, in seconds of any one clock.

    Args:
        longest_s: the longest look for one message.

    Attributes:
        limit_s: how long to look for the next message.
    """

    __slots__ = ("_longest_s", "_since_s", "limit_s")

    def __init__(self, longest_s: float) -> None:
        self.limit_s = self._longest_s = longest_s
        self._since_s: float | None = None

    def should_spin(self, now_s: float) -> bool:
        """Whether to look on for the next message. The first call after a message begins a wait."""
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s < self.limit_s

    def record_message(self, now_s: float) -> None:
        """End the wait because a message came, and adapt `limit_s`: whether it was looked for or slept
        for."""
        since_s, self._since_s = self._since_s, None
        if since_s is None:
            return
        if now_s - since_s <= self._longest_s:
            self.limit_s = min(max(self.limit_s * 2, SHORTEST_S), self._longest_s)
        else:
            self.limit_s = self.limit_s / 2 if self.limit_s > SHORTEST_S else 0.0

    def cancel_wait(self) -> None:
        """End the wait without a message, because nobody waits any more; `limit_s` stays."""
        self._since_s = None


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
