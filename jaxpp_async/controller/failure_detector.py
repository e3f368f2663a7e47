"""monitor: signs of life and a clock in, who is suspect, back, or dead out. Pure: no I/O, and the clock is a parameter.

Silence is a process's only if this process could have heard: time in which it was stopped, or its event loop blocked,
is nobody's silence (`AwakeClock`). Wall clocks are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.actor_info import Position

SUSPECT_S, DEAD_S = 3.0, 10.0
"""Silence after which a process is suspect, and after which it is given up."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Nothing was heard of a process for a while. `position`: where it was then, if that was ever heard."""

    process: ProcessId
    silence_s: float
    position: Position | None


@dataclass(frozen=True, slots=True)
class Recovered:
    """A suspect was heard again, after so much silence."""

    process: ProcessId
    silence_s: float


@dataclass(frozen=True, slots=True)
class DeclaredDead:
    """Nothing was heard of a process for so long that it is given up; it is watched no longer."""

    process: ProcessId
    silence_s: float
    position: Position | None


Verdict: TypeAlias = Suspect | Recovered | DeclaredDead


@dataclass(slots=True)
class _Patient:
    heard_at: float
    position: Position | None = None
    suspect: bool = False
    silence_s: float = 0.0


class FailureDetector:
    """Who of the watched processes lives. `now` is an `AwakeClock`'s.

    Args:
        suspect_s, dead_s: silence after which a process is suspect, and dead.
    """

    def __init__(self, suspect_s: float = SUSPECT_S, dead_s: float = DEAD_S):
        self._suspect_s, self._dead_s = suspect_s, dead_s
        self._patients: dict[ProcessId, _Patient] = {}

    @property
    def watched(self) -> tuple[ProcessId, ...]:
        """Those that are judged, in order of id."""
        return tuple(sorted(self._patients))

    def watch(self, process: ProcessId, now: float) -> None:
        """Judge a process from now on, as if it had just been heard."""
        self._patients[process] = _Patient(now)

    def unwatch(self, process: ProcessId) -> None:
        """Judge it no longer. Nothing happens if it is not watched."""
        self._patients.pop(process, None)

    def record_heartbeat(self, process: ProcessId, now: float, position: Position | None) -> None:
        """It lives, and is there. Nothing happens if it is not watched."""
        patient = self._patients.get(process)
        if patient is not None:
            patient.silence_s = max(patient.silence_s, now - patient.heard_at)
            patient.heard_at, patient.position = now, position

    def position(self, process: ProcessId) -> Position | None:
        """Where it was last heard to be."""
        patient = self._patients.get(process)
        return patient.position if patient is not None else None

    def silent(self, now: float, for_s: float) -> frozenset[ProcessId]:
        """Those of whom nothing was heard for so long."""
        return frozenset(
            process for process, patient in self._patients.items() if now - patient.heard_at >= for_s
        )

    def judge(self, now: float) -> list[Verdict]:
        """What has changed since the last judgement."""
        found: list[Verdict] = []
        for process in self.watched:
            patient = self._patients[process]
            silence_s = now - patient.heard_at
            if silence_s >= self._dead_s:
                self.unwatch(process)
                found.append(DeclaredDead(process, silence_s, patient.position))
            elif silence_s >= self._suspect_s and not patient.suspect:
                patient.suspect, patient.silence_s = True, silence_s
                found.append(Suspect(process, silence_s, patient.position))
            elif silence_s < self._suspect_s and patient.suspect:
                patient.suspect = False
                found.append(Recovered(process, patient.silence_s))
            if not patient.suspect:
                patient.silence_s = 0.0
        return found
