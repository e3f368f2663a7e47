"""Decide from heartbeats and a clock which processes are suspect, which have recovered, and which are dead.

Time in which this process was stopped, or in which its event loop was blocked, does not count as silence,
because this process could not have received a heartbeat then (see `SuspendAwareClock`). Wall clocks are not
used. The time is a parameter of each method, so that tests can choose it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.actor_info import Position

SUSPECT_S, DEAD_S = 3.0, 10.0
"""The seconds without a heartbeat after which a process is suspect, and after which it is declared dead."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finding that a process has become suspect, has recovered or is dead.

    Args:
        process: the process.
        health: `"suspect"`: the process has sent no heartbeat for long enough to raise a warning.
            `"recovered"`: a suspect process has sent a heartbeat again. `"dead"`: the process has been silent
            for so long that it is given up and no longer watched.
        silence_s: the seconds since its last heartbeat; for a process that has recovered, the longest time
            between two of its heartbeats while it was suspect.
        position: the position in its program that the process reported last, or None.
    """

    process: ProcessId
    health: Literal["suspect", "recovered", "dead"]
    silence_s: float
    position: Position | None


@dataclass(slots=True)
class _ProcessHealth:
    heard_at: float
    position: Position | None = None
    suspect: bool = False
    silence_s: float = 0.0


class FailureDetector:
    """A detector of silent processes, which remembers when each watched process sent its last heartbeat.

    All times are in seconds and are read from one `SuspendAwareClock`.

    Args:
        suspect_s, dead_s: the seconds of silence after which a process is suspect, and after which it is
            dead.
    """

    def __init__(self, suspect_s: float = SUSPECT_S, dead_s: float = DEAD_S):
        self._suspect_s, self._dead_s = suspect_s, dead_s
        self._watched: dict[ProcessId, _ProcessHealth] = {}

    @property
    def watched(self) -> tuple[ProcessId, ...]:
        """The processes that are watched, in ascending order."""
        return tuple(sorted(self._watched))

    def watch(self, process: ProcessId, now: float) -> None:
        """Start to watch a process, as if it had sent a heartbeat at the time `now`."""
        self._watched[process] = _ProcessHealth(now)

    def unwatch(self, process: ProcessId) -> None:
        """Stop watching a process; do nothing if it is not watched."""
        self._watched.pop(process, None)

    def record_heartbeat(self, process: ProcessId, now: float, position: Position | None) -> None:
        """Record a heartbeat of a process, and the position in its program that came with it.

        This does nothing if the process is not watched.
        """
        health = self._watched.get(process)
        if health is not None:
            health.silence_s = max(health.silence_s, now - health.heard_at)
            health.heard_at, health.position = now, position

    def position(self, process: ProcessId) -> Position | None:
        """Return the position in its program that a process reported last. Return None if the process has
        reported no position or is not watched.
        """
        health = self._watched.get(process)
        return health.position if health is not None else None

    def silent(self, now: float, for_s: float) -> frozenset[ProcessId]:
        """Return the processes that at the time `now` have sent no heartbeat for at least `for_s` seconds."""
        return frozenset(
            process for process, health in self._watched.items() if now - health.heard_at >= for_s
        )

    def judge(self, now: float) -> list[Verdict]:
        """Return a verdict for each process that became suspect, recovered or was declared dead since the
        last call.

        Processes that are declared dead are no longer watched.
        """
        found: list[Verdict] = []
        for process in self.watched:
            health = self._watched[process]
            silence_s = now - health.heard_at
            if silence_s >= self._dead_s:
                self.unwatch(process)
                found.append(Verdict(process, "dead", silence_s, health.position))
            elif silence_s >= self._suspect_s and not health.suspect:
                health.suspect, health.silence_s = True, silence_s
                found.append(Verdict(process, "suspect", silence_s, health.position))
            elif silence_s < self._suspect_s and health.suspect:
                health.suspect = False
                found.append(Verdict(process, "recovered", health.silence_s, health.position))
            if not health.suspect:
                health.silence_s = 0.0
        return found
