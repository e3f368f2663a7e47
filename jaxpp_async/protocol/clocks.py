"""Compare the clocks of processes on other machines with this process's clock, and count the time in which
this process was awake.

Every process takes times with `time.monotonic()`. Under one kernel that is one clock (`clock_name` identifies
it), and nothing has to be estimated. Other clocks are read again and again, and the reply that came soonest
is the most precise, as in NTP: the clock was read between two readings of ours, so that half of the time
between them bounds the error.

`SuspendAwareClock` leaves out time in which the process was stopped or its event loop was blocked, since it
could not hear others then. Wall clocks are not used.

Source: D. Mills, RFC 5905, Network Time Protocol Version 4, 2010, section 10.
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from jaxpp_async.program.instructions import ActorId

NUM_READINGS = 16
"""Number of readings kept of an actor: those of the last eight seconds."""

DRIFT = 1e-4
"""Seconds by which two clocks may drift apart in a second, at most. Quartz is good to some 30 parts in a
million; a clock that is being corrected may run 500 off for a while, which the next readings show.
"""


@functools.cache  # a process has one
def clock_name() -> str:
    """Identify the clock behind this process's `time.monotonic()`; processes that share the clock get the
    same name.

    Returns:
        The name. Empty where the clock cannot be identified: such a process is taken to share it with nobody.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # A time namespace shifts the clock for those in it.
        namespace = os.readlink("/proc/self/ns/time") if os.path.lexists("/proc/self/ns/time") else ""
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Offset:
    """The number of seconds by which an actor's clock is ahead of ours, and the largest error
    of that number.
    """

    offset_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of another clock: it was asked for at `sent_s`, showed `there_s`, and was received at
    `received_s`.
    """

    sent_s: float
    there_s: float
    received_s: float

    def offset(self, at_s: float) -> Offset:
        """Compute the offset that this reading gives for a time of our clock."""
        away_s = max(0.0, self.sent_s - at_s, at_s - self.received_s)
        middle_s, half_s = (self.sent_s + self.received_s) / 2, (self.received_s - self.sent_s) / 2
        return Offset(self.there_s - middle_s, half_s + DRIFT * away_s)


Readings: TypeAlias = tuple[Reading, ...]


class Clock:
    """Estimates the offset of one process's clock. The object stays with that process also when another takes
    its place.

    Args:
        is_ours: whether it is known to be our own clock, which needs no readings.

    Attributes:
        name: the process's `clock_name()`; None: the process has not sent it.
        is_ours: as above.
        readings: the latest ones. The tuple is never changed in place, so that callers can keep it as it was
            at some time.
    """

    __slots__ = ("is_ours", "name", "readings")

    def __init__(self, *, is_ours: bool = False):
        self.name: str | None = None
        self.is_ours = is_ours
        self.readings: Readings = ()

    def note(self, reading: Reading) -> None:
        """Add a reading, in place of the oldest if there are many."""
        self.readings = (*self.readings[1 - NUM_READINGS :], reading)

    def offset(self, at_s: float, kept: Readings = ()) -> Offset | None:
        """Estimate how far the clock was ahead at a time of ours; None: there is no reading yet.

        Args:
            at_s: the time, in seconds of our clock.
            kept: readings from that time, which are more precise for it than much later ones.
        """
        if self.is_ours:
            return Offset(0.0, 0.0)
        return min((r.offset(at_s) for r in (*kept, *self.readings)), key=lambda o: o.error_s, default=None)


OUR_CLOCK = Clock(is_ours=True)
"""The clock of an actor inside of this process."""


class Clocks:
    """Keeps the clocks of a mesh's actors.

    Args:
        own: this process's `clock_name()`.
    """

    def __init__(self, own: str):
        self._own = own
        self._clocks: dict[ActorId, Clock] = {}

    def clock_of(self, actor: ActorId) -> Clock:
        """Give the clock of the process that is this actor now."""
        if actor not in self._clocks:
            self._clocks[actor] = Clock()
        return self._clocks[actor]

    def name(self, actor: ActorId, name: str) -> None:
        """Record which clock an actor has. The clock of the process that was this actor before
        is forgotten.
        """
        clock = self.clock_of(actor)
        if clock.name == name:
            return
        if clock.name is not None:
            self.forget(actor)
            clock = self.clock_of(actor)
        clock.name, clock.is_ours = name, bool(self._own) and name == self._own

    def forget(self, actor: ActorId) -> None:
        """Forget the clock of an actor whose process is about to be replaced."""
        self._clocks.pop(actor, None)

    def note(self, actor: ActorId, sent_s: float, there_s: float, received_s: float) -> None:
        """Add a reading of an actor's clock; the arguments are those of `Reading`."""
        self.clock_of(actor).note(Reading(sent_s, there_s, received_s))


# ---------------------------------------------------------------- awake

TICK_S = 0.5
"""Seconds between two ticks of a `SuspendAwareClock`."""


class SuspendAwareClock:
    """Counts the seconds in which this process was awake: between two ticks never more than twice their
    distance.

    Args:
        now: time of the monotonic clock, in seconds.
        tick_s: distance of the ticks, in seconds.
    """

    def __init__(self, now: float, tick_s: float = TICK_S):
        self._last, self._awake, self._most = now, 0.0, 2 * tick_s

    def tick(self, now: float) -> float:
        """Take a tick and give the time counted so far."""
        self._awake, self._last = self.read(now), now
        return self._awake

    def read(self, now: float) -> float:
        """Give the time counted so far, between two ticks."""
        return self._awake + min(now - self._last, self._most)
