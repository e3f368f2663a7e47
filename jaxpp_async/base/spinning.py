"""Keep a process awake for a short time when a message is likely to come soon.

To sleep and be woken costs about ten microseconds, or about a hundred if the core has become idle; to poll
for a message that does not come costs a core's time. `AdaptiveSpin` chooses for how long to poll, based on
the lengths of the last waits: a short wait makes the next poll longer, a long wait makes it shorter, down to
none.

`LoopSpin` keeps an event loop running for that long, so that the loop receives a message without having to be
woken. A training loop sends the next step as soon as it has the reply to the last one, and small steps end
soon. Therefore an actor without a step, and a controller with a step under way, stay awake. If the latest
messages came later than the longest time to poll, both sleep immediately.

`sleep_until` waits for a time instead of a message: it sleeps, and polls for the last moment, in order to end
on time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterable

SHORTEST_S = 20e-6
"""The shortest time in seconds that is worth polling; instead of a shorter time, a waiter does not poll at
all.
"""

LONGEST_S = 1e-3
"""The longest time in seconds for which a `LoopSpin` polls: as long as a training loop that does little else
takes to send the next step.
"""

_LATE_S = 100e-6
"""The time in seconds before its end from which `sleep_until` polls. Linux wakes a sleeping thread about this
much later than asked."""

_CHECK_S = 0.02
"""The longest time in seconds for which `sleep_until` sleeps without asking whether it should end."""


class AdaptiveSpin:
    """A rule for how long one waiter polls for a message before it sleeps, based on the lengths of its last
    waits.

    A wait of at most `longest_s` could have been spent polling, so such a wait doubles `limit_s`; a longer
    wait halves `limit_s`. Callers pass the current time to the methods, in seconds, always from the same
    clock.

    Args:
        longest_s: the longest time to poll for one message, in seconds.

    Attributes:
        limit_s: how long to poll for the next message, in seconds.
    """

    __slots__ = ("_longest_s", "_since_s", "limit_s")

    def __init__(self, longest_s: float) -> None:
        self.limit_s = self._longest_s = longest_s
        self._since_s: float | None = None

    def should_spin(self, now_s: float) -> bool:
        """Return whether to go on polling for the next message at the time `now_s`. The first call after a
        message begins a new wait.
        """
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s < self.limit_s

    def record_message(self, now_s: float) -> None:
        """End the current wait, because a message arrived at the time `now_s`, and adapt `limit_s` to the
        length of the wait. The waiter may have been polling or sleeping.
        """
        since_s, self._since_s = self._since_s, None
        if since_s is None:
            return
        if now_s - since_s <= self._longest_s:
            self.limit_s = min(max(self.limit_s * 2, SHORTEST_S), self._longest_s)
        else:
            self.limit_s = self.limit_s / 2 if self.limit_s > SHORTEST_S else 0.0

    def cancel_wait(self) -> None:
        """End the current wait, because no message is expected any more; leave `limit_s` as it is."""
        self._since_s = None


def has_spare_core(hosts: Iterable[str]) -> bool:
    """Return whether this host has a core left for this process to keep busy, if each actor process on this
    host keeps one core busy.

    A mesh asks once, when it starts, and counts its own actors. Other meshes of this process are not counted,
    and neither is a container's quota of CPU time, which may be less than its cores. If such a mesh or quota
    leaves no core free, polling delays an actor by up to `LONGEST_S` per reply. If replies take longer than
    that, this process does not poll, and no time is lost.

    Args:
        hosts: the host name of each actor process.
    """
    here = socket.gethostname()
    return len(os.sched_getaffinity(0)) > sum(host == here for host in hosts)


class LoopSpin:
    """A switch that keeps one event loop awake while a message is expected, for as long as an `AdaptiveSpin`
    allows.

    Args:
        loop: the event loop. A callback in each pass of the loop keeps the loop awake and offers the core to
            other processes.
        is_idle: returns whether the loop has nothing to do but wait for a message. For an actor this means
            that no step is under way; for the controller, that a step is under way.
        now_s: returns the current time in seconds.
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
        """Start keeping the loop awake, because a message may come soon: the next step, or a reply to one."""
        self._is_expecting = True
        self._schedule()

    def end(self) -> None:
        """Stop keeping the loop awake, because the message has come or none will come."""
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
            self._is_expecting = False  # the next step came before the last one's reply was sent
            self._adaptive_spin.cancel_wait()
        elif self._is_expecting and self._adaptive_spin.should_spin(self._now_s()):
            os.sched_yield()
            self._schedule()


def sleep_until(
    end_s: float,
    is_over: Callable[[], bool],
    *,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Block the calling thread until a time, and end at most a fraction of a millisecond after it if the
    machine has a core free.

    Args:
        end_s: the time at which to return, in seconds on the clock of `now_s`.
        is_over: asked every 20 ms whether to return early.
        now_s: returns the current time in seconds.
        sleep: suspends the thread for some seconds.

    Returns:
        The time of the return, in seconds: at least `end_s`, unless `is_over` returned true.
    """
    while (left_s := end_s - now_s()) > _LATE_S:
        if is_over():
            return now_s()
        sleep(min(left_s - _LATE_S, _CHECK_S))
    while (now := now_s()) < end_s:
        sleep(0)  # lets this process's other threads run Python
    return now
