"""clocks: what the clocks of processes on other machines show beside ours. Readings of both in, offsets out.

Every process stamps with `time.monotonic()`. Under one kernel that is one clock (`clock_name` says which), and nothing
is to be estimated. Other clocks are asked for their time again and again, and the answer that came back soonest says
most, as in NTP: the clock was read between our two readings, so half of the time between them bounds the error.

Source: D. Mills, RFC 5905, Network Time Protocol Version 4, 2010, section 10.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from jaxpp_async.program import ActorId

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
class _Reading:
    sent_s: float
    there_s: float
    received_s: float

    def offset(self, at_s: float) -> Offset:
        away_s = max(0.0, self.sent_s - at_s, at_s - self.received_s)
        middle_s, half_s = (self.sent_s + self.received_s) / 2, (self.received_s - self.sent_s) / 2
        return Offset(self.there_s - middle_s, half_s + DRIFT * away_s)


class Clocks:
    """The clocks of a mesh's actors beside ours.

    Args:
        own: this process's `clock_name()`.
    """

    def __init__(self, own: str):
        self._own = own
        self._names: dict[ActorId, str] = {}
        self._readings: dict[ActorId, deque[_Reading]] = {}

    def is_ours(self, actor: ActorId) -> bool:
        """Whether an actor is known to share our clock."""
        return bool(self._own) and self._names.get(actor) == self._own

    def name(self, actor: ActorId, name: str) -> None:
        """An actor says which clock it has; that of another life of it is forgotten."""
        if self._names.get(actor) != name:
            self._names[actor] = name
            self._readings.pop(actor, None)

    def forget(self, actor: ActorId) -> None:
        """It is about to be another process."""
        self._names.pop(actor, None)
        self._readings.pop(actor, None)

    def note(self, actor: ActorId, sent_s: float, there_s: float, received_s: float) -> None:
        """An actor was asked at `sent_s`, its clock showed `there_s`, and its answer came at `received_s`."""
        self._readings.setdefault(actor, deque(maxlen=NUM_READINGS)).append(_Reading(sent_s, there_s, received_s))

    def offset(self, actor: ActorId, at_s: float) -> Offset | None:
        """How far its clock was ahead at some time of ours; None: nothing is known of it yet."""
        if self.is_ours(actor):
            return Offset(0.0, 0.0)
        found = [reading.offset(at_s) for reading in self._readings.get(actor, ())]
        return min(found, key=lambda o: o.error_s, default=None)
