"""Decide from heartbeats and a clock which processes are suspect, heard again, or dead.

A silence counts only while this process could have heard: time in which it was stopped, or its event loop
blocked, does not count (`SuspendAwareClock`). Wall clocks are not used. The clock is a parameter, so that
tests choose the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.actor_info import Position

SUSPECT_S, DEAD_S = 3.0, 10.0
"""Seconds of silence after which a process is suspect, and after which it is given up."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """The verdict that a process was silent for a while.

    Args:
        position: its last known position, if any.
    """

    process: ProcessId
    silence_s: float
    position: Position | None


@dataclass(frozen=True, slots=True)
class Recovered:
    """The verdict that a suspect was heard again, after `silence_s` seconds."""

    process: ProcessId
    silence_s: float


@dataclass(frozen=True, slots=True)
class DeclaredDead:
    """The verdict that a process was silent for so long that it is given up; it is watched no longer."""

    process: ProcessId
    silence_s: float
    position: Position | None


Verdict: TypeAlias = Suspect | Recovered | DeclaredDead


@dataclass(slots=True)
class _ProcessHealth:
    heard_at: float
    position: Position | None = None
    suspect: bool = False
    silence_s: float = 0.0


class FailureDetector:
    """The watched processes and when each was last heard. Times are a `SuspendAwareClock`'s, in seconds.

    Args:
        suspect_s, dead_s: seconds of silence after which a process is suspect, and dead.
    """

    def __init__(self, suspect_s: float = SUSPECT_S, dead_s: float = DEAD_S):
        self._suspect_s, self._dead_s = suspect_s, dead_s
        self._watched: dict[ProcessId, _ProcessHealth] = {}

    @property
    def watched(self) -> tuple[ProcessId, ...]:
        """The processes that are judged, in order of id."""
        return tuple(sorted(self._watched))

    def watch(self, process: ProcessId, now: float) -> None:
        """Judge a process from now on, as if it had just been heard."""
        self._watched[process] = _ProcessHealth(now)

    def unwatch(self, process: ProcessId) -> None:
        """Stop judging a process. Does nothing if it is not watched."""
        self._watched.pop(process, None)

    def record_heartbeat(self, process: ProcessId, now: float, position: Position | None) -> None:
        """Note that a process lives, and its position. Does nothing if it is not watched."""
        health = self._watched.get(process)
        if health is not None:
            health.silence_s = max(health.silence_s, now - health.heard_at)
            health.heard_at, health.position = now, position

    def position(self, process: ProcessId) -> Position | None:
        """Give the last known position of a process."""
        health = self._watched.get(process)
        return health.position if health is not None else None

    def silent(self, now: float, for_s: float) -> frozenset[ProcessId]:
        """Find the processes that were silent for `for_s` seconds."""
        return frozenset(
            process for process, health in self._watched.items() if now - health.heard_at >= for_s
        )

    def judge(self, now: float) -> list[Verdict]:
        """Give the verdicts that have changed since the last call."""
        found: list[Verdict] = []
        for process in self.watched:
            health = self._watched[process]
            silence_s = now - health.heard_at
            if silence_s >= self._dead_s:
                self.unwatch(process)
                found.append(DeclaredDead(process, silence_s, health.position))
            elif silence_s >= self._suspect_s and not health.suspect:
                health.suspect, health.silence_s = True, silence_s
                found.append(Suspect(process, silence_s, health.position))
            elif silence_s < self._suspect_s and health.suspect:
                health.suspect = False
                found.append(Recovered(process, health.silence_s))
            if not health.suspect:
                health.silence_s = 0.0
        return found
