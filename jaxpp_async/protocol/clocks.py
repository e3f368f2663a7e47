"""Compare the clocks of processes on other machines with this process's clock, and count the time for which
this process was awake.

Every process measures time with `time.monotonic()`. Processes on one machine share this clock (`clock_name`
identifies it), so nothing has to be estimated for them. The clock of a process on another machine is read
repeatedly by a request and a reply, as in NTP. The other process reads its clock at some time between the
request and the reply, so the error of a reading is at most half of the time between the two. The reading with
the fastest reply is therefore the most precise.

`SuspendAwareClock` does not count the time for which the process was stopped or its event loop was blocked,
because the process could not receive messages then. Wall clocks are not used.

Source: D. Mills, RFC 5905, Network Time Protocol Version 4, 2010, section 10.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from jaxpp_async.program.instructions import ProcessId

NUM_READINGS = 16
"""The number of readings that are kept of each process's clock: those of the last eight seconds."""

FORGET_S = 5.0
"""The seconds after which a reading that has no answer is begun again, since a restart may have dropped the
question.
"""

DRIFT = 1e-4
"""The most seconds by which two clocks may drift apart in a second. Quartz is good to some 30 parts in a
million; a clock that is being corrected may run 500 off for a while, which the next readings show.
"""


@functools.cache  # a process has one clock
def clock_name() -> str:
    """Return a name for the clock behind this process's `time.monotonic()`; processes that share the clock
    get the same name.

    Returns:
        The name; empty if the clock cannot be identified. Such a process is assumed to share its clock with
        no other process.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # A time namespace shifts the clock of the processes in it.
        namespace = os.readlink("/proc/self/ns/time") if os.path.lexists("/proc/self/ns/time") else ""
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Offset:
    """The number of seconds by which another process's clock is ahead of this process's clock, and the
    largest possible error of that number.
    """

    offset_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of another process's clock.

    Args:
        sent_s: when this process asked for the reading, in seconds of this process's clock.
        shown_s: the time that the other clock showed, in seconds.
        received_s: when this process received the answer, in seconds of this process's clock.
    """

    sent_s: float
    shown_s: float
    received_s: float

    def offset(self, at_s: float) -> Offset:
        """Compute from this reading how many seconds the other clock was ahead of this process's clock when
        the latter showed `at_s`. Clocks drift, so the error grows with the time between the reading and
        `at_s`.
        """
        away_s = max(0.0, self.sent_s - at_s, at_s - self.received_s)
        middle_s, half_s = (self.sent_s + self.received_s) / 2, (self.received_s - self.sent_s) / 2
        return Offset(self.shown_s - middle_s, half_s + DRIFT * away_s)


Readings: TypeAlias = tuple[Reading, ...]


class Clock:
    """An estimate of another process's clock relative to this process's clock. Each `Clock` describes one
    process. If that process dies and is replaced, a new `Clock` is made for the replacement.

    Args:
        is_own: whether the clock is known to be this process's own clock, which needs no readings.

    Attributes:
        name: the other process's `clock_name()`; None until that process has sent this name.
        is_own: the argument `is_own`, updated when the name is known.
        readings: the latest readings. The tuple is never changed in place, so that a caller can store the
            tuple and still have the readings of that time later.
    """

    __slots__ = ("is_own", "name", "readings")

    def __init__(self, *, is_own: bool = False):
        self.name: str | None = None
        self.is_own = is_own
        self.readings: Readings = ()

    def note(self, reading: Reading) -> None:
        """Add a reading. If there are `NUM_READINGS` already, drop the oldest."""
        self.readings = (*self.readings[1 - NUM_READINGS :], reading)

    def offset(self, at_s: float, kept: Readings = ()) -> Offset | None:
        """Estimate how far the other clock was ahead of this process's clock at some time; return None if
        there is no reading yet.

        Args:
            at_s: the time, in seconds of this process's clock.
            kept: readings that the caller stored near that time, which are more precise for that time than
                much later readings.
        """
        if self.is_own:
            return Offset(0.0, 0.0)
        return min((r.offset(at_s) for r in (*kept, *self.readings)), key=lambda o: o.error_s, default=None)


OWN_CLOCK = Clock(is_own=True)
"""The clock of an actor that lives in this process."""


class Clocks:
    """A collection of the `Clock`s of a mesh's actor processes, by process number.

    Args:
        own: this process's `clock_name()`.
    """

    def __init__(self, own: str):
        self._own = own
        self._clocks: defaultdict[ProcessId, Clock] = defaultdict(Clock)
        self._begun_s: dict[ProcessId, float] = {}

    def clock_of(self, process: ProcessId) -> Clock:
        """Return the clock of a process; later calls of `note` add readings to it."""
        return self._clocks[process]

    def name(self, process: ProcessId, name: str) -> None:
        """Record the `clock_name()` that a process has sent. If a different name is recorded for this process
        number, the earlier process has been replaced, and its clock is forgotten.
        """
        clock = self.clock_of(process)
        if clock.name == name:
            return
        if clock.name is not None:
            self.forget(process)
            clock = self.clock_of(process)
        clock.name, clock.is_own = name, bool(self._own) and name == self._own

    def forget(self, process: ProcessId) -> None:
        """Forget the clock of a process that is about to be replaced."""
        self._clocks.pop(process, None)
        self._begun_s.pop(process, None)

    def begin_reading(self, process: ProcessId, name: str, now_s: float) -> bool:
        """Record the clock that a heartbeat names, and return whether the process has to be asked for its
        time now.

        The clock of this process needs no readings, and a process is asked one question at a time. If the
        result is True, the caller asks the process, and calls `end_reading` when the answer is there.

        Args:
            process: the process that sent the heartbeat.
            name: the `clock_name()` of the process.
            now_s: the time, in seconds of this process's clock.
        """
        self.name(process, name)
        begun_s = self._begun_s.get(process)
        if self.clock_of(process).is_own or (begun_s is not None and now_s - begun_s < FORGET_S):
            return False
        self._begun_s[process] = now_s
        return True

    def end_reading(
        self, process: ProcessId, sent_s: float, shown_s: float | None, received_s: float
    ) -> None:
        """Add the reading that `begin_reading` has begun. Do nothing if another reading has begun since, or
        if the process was replaced.

        Args:
            process: the process that was asked.
            sent_s, received_s: as in `Reading`; `sent_s` is the time that was passed to `begin_reading`.
            shown_s: as in `Reading`, or None if the process did not tell its time.
        """
        if self._begun_s.get(process) != sent_s:
            return
        del self._begun_s[process]
        if shown_s is not None:
            self.note(process, sent_s, shown_s, received_s)

    def note(self, process: ProcessId, sent_s: float, shown_s: float, received_s: float) -> None:
        """Add a reading of a process's clock; the other arguments are those of `Reading`."""
        self.clock_of(process).note(Reading(sent_s, shown_s, received_s))


# ---------------------------------------------------------------- awake

TICK_S = 0.5
"""The seconds between two ticks of a `SuspendAwareClock`."""


class SuspendAwareClock:
    """A clock that counts the seconds for which this process was awake.

    The owner calls `tick` at regular times. Of the time between two ticks, at most `2 * tick_s` is counted,
    since a longer gap means that the process was stopped or its event loop was blocked.

    Args:
        now: the time on the monotonic clock when counting begins, in seconds.
        tick_s: the intended time between two ticks, in seconds.
    """

    def __init__(self, now: float, tick_s: float = TICK_S):
        self._last, self._awake, self._most = now, 0.0, 2 * tick_s

    def tick(self, now: float) -> float:
        """Record a tick at the time `now`, and return the seconds counted so far."""
        self._awake, self._last = self.read(now), now
        return self._awake

    def read(self, now: float) -> float:
        """Return the seconds counted up to the time `now`, without recording a tick."""
        return self._awake + min(now - self._last, self._most)
