"""stuck: where actors are, step by step, and a clock in; which of them cannot go on out. Pure: no I/O, and the clock is
a parameter.

An actor stands still while its position does not change. It is stuck when it and everyone that it may wait for, and
they in turn, have stood still for the deadline, and none of them computes or is silent. Then the actors are asked what
they wait for (`Report`), and `autopsy` says why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxpp_async.actors.failures.autopsy import Autopsy, ProgramOf, examine
from jaxpp_async.actors.failures.awake import TICK_S
from jaxpp_async.actors.messages import Reported
from jaxpp_async.actors.processes.progress import Position
from jaxpp_async.program import CONTROLLER, ActorId, Recv, Run, Send

PROGRESS_S = 10.0
"""How long a step may stand still."""

SLOW_BYTES_PER_S = 50e6
"""A link that is slower than this may be taken for a broken one."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Actors that wait for each other and have stood still for `still_s`; the first one's wait led to the others."""

    actors: tuple[ActorId, ...]
    still_s: float


@dataclass(slots=True)
class _Clock:
    """Since when an actor is where it is, and how much longer than usual it may be there.

    Args:
        done: the instruction and transfers that it reported last.
    """

    at: tuple[int, Position | None]
    since: float
    extra_s: float = 0.0
    done: tuple[int, int] | None = None


class StuckSteps:
    """Finds steps that do not go on.

    Args:
        program_of: the programs.
        progress_s: how long a step may stand still; more by a second for each 50 MB that are under way.
    """

    def __init__(self, program_of: ProgramOf, progress_s: float = PROGRESS_S):
        self._program_of, self._progress_s = program_of, progress_s
        self._clocks: dict[ActorId, _Clock] = {}

    def restart(self) -> None:
        """Forget since when everyone is where it is: an abort, a restart, a program that is loaded."""
        self._clocks.clear()

    def judge(
        self,
        now: float,
        unfinished: Mapping[ActorId, int],
        positions: Mapping[ActorId, Position | None],
        silent: Collection[ActorId] = (),
    ) -> Stall | None:
        """Who is stuck, as far as can be known without asking; to be called every tick.

        Args:
            unfinished: each actor's oldest step that it has not finished; actors without one are left out.
            positions: where they are.
            silent: actors that were not heard for a while: it is not known whether they stand still.
        """
        self._run_clocks(now, unfinished, positions)
        still = {a for a, c in self._clocks.items() if now - c.since >= self._progress_s + c.extra_s}
        for actor in sorted(still - set(silent)):
            chain = self._may_wait_for(actor, positions, unfinished)
            if still.issuperset(chain) and not chain & set(silent):
                others = tuple(sorted(chain - {actor}))
                return Stall((actor, *others), min(now - self._clocks[a].since for a in chain))
        return None

    def conclude(
        self,
        now: float,
        stall: Stall,
        unfinished: Mapping[ActorId, int],
        reports: Mapping[ActorId, Reported | None],
        silent: Collection[ActorId] = (),
    ) -> Autopsy | None:
        """Why they are stuck, now that all actors with unfinished steps were asked; None: after all, they are not.

        Args:
            reports: what they said; None: nothing.
        """
        gone_on = [a for a in stall.actors if a not in self._clocks or self._clocks[a].since > now - self._progress_s]
        for actor, reported in reports.items():
            if reported is not None and actor in unfinished and self._has_moved(actor, reported, now):
                gone_on.append(actor)
        if gone_on or not set(stall.actors) <= set(unfinished):
            return None
        autopsy = examine(stall.actors[0], unfinished, reports, self._program_of)
        if autopsy is None or set(autopsy.chain) & set(silent):
            return None
        extra_s = _extra_s([r for a in autopsy.chain if (r := reports.get(a)) is not None])
        for actor in autopsy.chain:
            if actor in self._clocks:
                self._clocks[actor].extra_s = extra_s
        return autopsy if stall.still_s >= self._progress_s + extra_s else None

    def _run_clocks(
        self, now: float, unfinished: Mapping[ActorId, int], positions: Mapping[ActorId, Position | None]
    ) -> None:
        for actor in self._clocks.keys() - unfinished.keys():
            del self._clocks[actor]
        for actor, step in unfinished.items():
            position, clock = positions.get(actor), self._clocks.get(actor)
            computing = position is not None and position.computing
            if clock is None or computing or clock.at != (step, position):
                self._clocks[actor] = _Clock((step, position), now)

    def _has_moved(self, actor: ActorId, reported: Reported, now: float) -> bool:
        """Whether it executes, or something was done since it was asked the last time."""
        clock = self._clocks.get(actor)
        if clock is None:
            return False
        before, clock.done = clock.done, (reported.instruction, reported.transfers_done)
        _, position = clock.at
        moved = before is not None and before != clock.done
        if before is None and position is not None and position.waiting and position.step == reported.step:
            moved = position.instruction != reported.instruction
        if moved or reported.running:
            clock.since, clock.extra_s = now, 0.0
        return moved or reported.running

    def _may_wait_for(
        self, actor: ActorId, positions: Mapping[ActorId, Position | None], unfinished: Mapping[ActorId, int]
    ) -> set[ActorId]:
        """The actor, everyone whom it may wait for, and so on; those that have finished have nobody to wait for."""
        found, left = {actor}, [actor]
        while left:
            one = left.pop()
            new = self._peers(one, positions.get(one)) & unfinished.keys() - found
            found |= new
            left += new
        return found

    def _peers(self, actor: ActorId, at: Position | None) -> set[ActorId]:
        """Those whose data, or whose receives, the instruction may wait for: more than those for which it does."""
        part = self._program_of(at.program_id, actor) if at is not None else None
        if at is None or part is None or at.instruction > len(part.instructions):
            return set()
        wanted: set[int] | None = None  # at the end of the program: every buffer
        if at.instruction < len(part.instructions):
            run = part.instructions[at.instruction]
            wanted = set(run.inputs) if isinstance(run, Run) else set()
        peers: set[ActorId] = set()
        for instruction in part.instructions[: at.instruction]:
            if isinstance(instruction, Recv | Send) and (wanted is None or instruction.buffer in wanted):
                peers.add(instruction.from_actor if isinstance(instruction, Recv) else instruction.to_actor)
        return peers - {CONTROLLER}


def _extra_s(reports: Collection[Reported]) -> float:
    """How much longer a step may stand still, because so much is under way. What takes less than a tick counts not."""
    most = max((sum(t.size_bytes for t in r.transfers if t.posted) for r in reports), default=0)
    return most / SLOW_BYTES_PER_S if most / SLOW_BYTES_PER_S >= TICK_S else 0.0
