"""clocks: what the clocks of processes on other machines show beside ours. Readings of both in, offsets out.

Every process stamps with `time.monotonic()`. Under one kernel that is one clock (`clock_name` says which), and nothing
is to be estimated. Other clocks are asked for their time again and again, and the answer that came back soonest says
most, as in NTP: the clock was read between our two readings, so half of the time between them bounds the error.

Source: D. Mills, RFC 5905, Network Time Protocol Version 4, 2010, section 10.

awake: a clock in, the time in which this process could have heard others out. Pure: the clock is a parameter.

Time in which the process was stopped, or its event loop blocked, is nobody's silence. Wall clocks are not used.
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
"""How many of an actor's readings are kept: the last eight seconds."""

DRIFT = 1e-4
"""Seconds by which two clocks may part each second, at most: quartz is good to some 30 parts in a million, a clock that
is being corrected may run 500 off for a while, which the next readings show."""


@functools.cache  # a process has one
def clock_name() -> str:
    """Names the clock behind this process's `time.monotonic()`; processes that share it give the same name.

    Empty where it cannot be told: such a process shares its clock with nobody.
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
    """By how many seconds an actor's clock is ahead of ours, and by how much that may be wrong."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """We asked at `sent_s`, its clock showed `there_s`, and we had that at `received_s`."""

    sent_s: float
    there_s: float
    received_s: float

    def offset(self, at_s: float) -> Offset:
        """What it says of some time of ours."""
        away_s = max(0.0, self.sent_s - at_s, at_s - self.received_s)
        middle_s, half_s = (self.sent_s + self.received_s) / 2, (self.received_s - self.sent_s) / 2
        return Offset(self.there_s - middle_s, half_s + DRIFT * away_s)


Readings: TypeAlias = tuple[Reading, ...]


class Clock:
    """What is known of one process's clock. Whoever keeps it keeps that process's, also when another takes its place.

    Attributes:
        name: the process's `clock_name()`; None: it has not said.
        is_ours: whether it is known to be our own clock, of which nothing has to be read.
        readings: the latest. Never changed in place, so that they can be kept as they were at some time.
    """

    __slots__ = ("is_ours", "name", "readings")

    def __init__(self, *, is_ours: bool = False):
        self.name: str | None = None
        self.is_ours = is_ours
        self.readings: Readings = ()

    def note(self, reading: Reading) -> None:
        """Take one more reading, in place of the oldest if there are many."""
        self.readings = (*self.readings[1 - NUM_READINGS :], reading)

    def offset(self, at_s: float, kept: Readings = ()) -> Offset | None:
        """How far it was ahead at some time of ours; None: nothing is known of it yet.

        Args:
            kept: readings of then, which say more about that time than those of much later.
        """
        if self.is_ours:
            return Offset(0.0, 0.0)
        return min((r.offset(at_s) for r in (*kept, *self.readings)), key=lambda o: o.error_s, default=None)


OUR_CLOCK = Clock(is_ours=True)
"""That of an actor inside of this process."""


class Clocks:
    """The clocks of a mesh's actors beside ours.

    Args:
        own: this process's `clock_name()`.
    """

    def __init__(self, own: str):
        self._own = own
        self._clocks: dict[ActorId, Clock] = {}

    def clock_of(self, actor: ActorId) -> Clock:
        """The clock of the process that is this actor now."""
        if actor not in self._clocks:
            self._clocks[actor] = Clock()
        return self._clocks[actor]

    def name(self, actor: ActorId, name: str) -> None:
        """An actor says which clock it has; that of another life of it is forgotten."""
        clock = self.clock_of(actor)
        if clock.name == name:
            return
        if clock.name is not None:
            self.forget(actor)
            clock = self.clock_of(actor)
        clock.name, clock.is_ours = name, bool(self._own) and name == self._own

    def forget(self, actor: ActorId) -> None:
        """It is about to be another process."""
        self._clocks.pop(actor, None)

    def note(self, actor: ActorId, sent_s: float, there_s: float, received_s: float) -> None:
        """An actor was asked at `sent_s`, its clock showed `there_s`, and its answer came at `received_s`."""
        self.clock_of(actor).note(Reading(sent_s, there_s, received_s))


# ---------------------------------------------------------------- awake

TICK_S = 0.5
"""Between two looks at the clock."""


class SuspendAwareClock:
    """Counts the time that this process was awake, in seconds: between two ticks never more than twice their distance.

    Args:
        now: of the monotonic clock. tick_s: the ticks' distance.
    """

    def __init__(self, now: float, tick_s: float = TICK_S):
        self._last, self._awake, self._most = now, 0.0, 2 * tick_s

    def tick(self, now: float) -> float:
        """The time at a tick."""
        self._awake, self._last = self.read(now), now
        return self._awake

    def read(self, now: float) -> float:
        """The time in between."""
        return self._awake + min(now - self._last, self._most)
