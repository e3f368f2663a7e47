"""stuck: where actors are, step by step, and a clock in; which of them cannot go on out. Pure: no I/O, and the clock is
a parameter.

An actor stands still while its position does not change. It is stuck when it and everyone that it may wait for, and
they in turn, have stood still for the deadline, and none of them computes or is silent. Then the actors are asked what
they wait for (`Report`), and `autopsy` says why.

autopsy: what the actors of a step that does not go on have reported in, who waits for whom and who was first out.
Pure: plain data and text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxpp_async.program.actor_program import ActorProgram, format_instruction
from jaxpp_async.program.instructions import CONTROLLER, ActorId, Instruction, Recv, Run, Send
from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.clocks import TICK_S
from jaxpp_async.protocol.messages import OpenTransfer, Reported, StepId, step_text

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


class StallDetector:
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
    ) -> StallDiagnosis | None:
        """Why they are stuck, now that all actors with unfinished steps were asked; None: after all, they are not.

        Args:
            reports: what they said; None: nothing.
        """
        gone_on = [
            a for a in stall.actors if a not in self._clocks or self._clocks[a].since > now - self._progress_s
        ]
        for actor, reported in reports.items():
            if reported is not None and actor in unfinished and self._has_moved(actor, reported, now):
                gone_on.append(actor)
        if gone_on or not set(stall.actors) <= set(unfinished):
            return None
        diagnosis = examine(stall.actors[0], unfinished, reports, self._program_of)
        if diagnosis is None or set(diagnosis.chain) & set(silent):
            return None
        extra_s = _extra_s([r for a in diagnosis.chain if (r := reports.get(a)) is not None])
        for actor in diagnosis.chain:
            if actor in self._clocks:
                self._clocks[actor].extra_s = extra_s
        return diagnosis if stall.still_s >= self._progress_s + extra_s else None

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


# ---------------------------------------------------------------- autopsy

ProgramOf: TypeAlias = Callable[[int, ActorId], ActorProgram | None]
"""(program id, actor) to the actor's part, or None if there is none."""

Cause: TypeAlias = Literal["lost", "deaf", "idle", "controller", "none", "cycle"]
"""Why nothing goes on, the surest first: a transfer that both ends have begun; an actor that does not answer, that has
not begun the step, that waits for the controller, that waits for nothing; a circle of actors."""

_CAUSES: tuple[Cause, ...] = ("lost", "deaf", "idle", "controller", "none", "cycle")
_MOST_WAITS, _MOST_LINES = 4, 32  # lines about one actor, and in one list


@dataclass(frozen=True, slots=True)
class ActorWait:
    """An actor and what it cannot go on without, in a step."""

    actor: ActorId
    step: StepId
    transfer: OpenTransfer

    @property
    def sender(self) -> ActorId:
        """Who sends."""
        return self.actor if self.transfer.kind == "send" else self.transfer.peer

    @property
    def receiver(self) -> ActorId:
        """Who receives."""
        return self.transfer.peer if self.transfer.kind == "send" else self.actor

    def __str__(self) -> str:
        t = self.transfer
        if t.kind == "argument":
            return f"actor {self.actor} waits for argument b{t.buffer} ({t.size_bytes:,} bytes) from the controller"
        what = f"(tag {t.tag}, {t.size_bytes:,} bytes)"
        if t.kind == "send":
            return f"actor {self.actor} waits until its b{t.buffer} has gone to actor {t.peer} {what}"
        return f"actor {self.actor} waits for b{t.buffer} from actor {t.peer} {what}"


@dataclass(frozen=True, slots=True)
class StallDiagnosis:
    """Why a step does not go on.

    Args:
        step: the id of the oldest that one of the chain has not finished.
        cause: of what kind the first culprit is.
        culprit: the first culprit, as a clause.
        actor: that actor; of a lost transfer its receiver; None: the controller.
        instruction: text of the instruction it is at, if it told.
        lost: the transfer, if the cause is `"lost"`.
        chain: the actors that wait, in the order in which the one leads to the other.
        waits: who waits for what, a line each.
        places: where each actor with an unfinished step is, as far as it told.
    """

    step: StepId
    cause: Cause
    culprit: str
    actor: ActorId | None
    instruction: str | None
    lost: ActorWait | None
    chain: tuple[ActorId, ...]
    waits: tuple[str, ...]
    places: Mapping[ActorId, str]

    def text(self, names: Mapping[ActorId, str]) -> str:
        """All of it, in lines.

        Args:
            names: of actors, with host and process.
        """
        places = [f"{names.get(a, f'actor {a}')}: {where}" for a, where in sorted(self.places.items())]
        waits = _lines(self.waits) or " nobody"
        return f"{self.culprit}\nWho waits for whom:{waits}\nWhere each actor is:{_lines(places)}"


def examine(
    first: ActorId,
    unfinished: Mapping[ActorId, int],
    reports: Mapping[ActorId, Reported | None],
    program_of: ProgramOf,
) -> StallDiagnosis | None:
    """Follow who waits for whom.

    Args:
        first: an actor that waits.
        unfinished: each actor's oldest step that it has not finished.
        reports: of all these actors; None of one that did not answer.
        program_of: the programs.

    Returns:
        What was found; None if one of those that are waited for is at work.
    """
    return _Examination(unfinished, reports, program_of).follow(first)


def place(program_of: ProgramOf, actor: ActorId, at: Position) -> str:
    """Where an actor is, by what it told last; such as `"run fwd(stage 1, mb 3) ... of step 7"`."""
    program = program_of(at.program_id, actor)
    if program is None or not 0 <= at.instruction <= len(program.instructions):
        return step_text(at.step)
    if at.instruction == len(program.instructions):
        return f"the end of {step_text(at.step)}, with transfers open"
    text = _short(program.instructions[at.instruction])
    return f"{text} of {step_text(at.step)}{', waiting for data' if at.waiting else ''}"


class _Examination:
    """One walk from wait to wait, breadth first."""

    def __init__(
        self,
        unfinished: Mapping[ActorId, int],
        reports: Mapping[ActorId, Reported | None],
        program_of: ProgramOf,
    ):
        self._unfinished, self._reports, self._program_of = unfinished, reports, program_of
        self._found: dict[Cause, tuple[ActorId, ActorWait | None]] = {}  # the first of each kind
        self._chain: list[ActorId] = []
        self._waits: list[ActorWait] = []

    def follow(self, first: ActorId) -> StallDiagnosis | None:
        self._chain.append(first)
        for actor in self._chain:  # grows meanwhile
            reported = self._reports.get(actor)
            if reported is not None and reported.running:
                return None
            self._look_at(actor, reported)
        for cause in _CAUSES:
            if cause in self._found:
                return self._diagnosis(cause, *self._found[cause])
        return self._diagnosis("cycle", first, None)

    def _look_at(self, actor: ActorId, reported: Reported | None) -> None:
        if reported is None:
            self._find("deaf", actor)
            return
        if reported.step is None:
            self._find("idle", actor)
            return
        wanted = [t for t in reported.transfers if t.needed or t.kind == "argument"]
        if not wanted:
            self._find("none", actor)
        for transfer in wanted:
            wait = ActorWait(actor, reported.step, transfer)
            self._waits.append(wait)
            if transfer.kind == "argument" or transfer.peer == CONTROLLER:
                self._find("controller", actor, wait)
            elif self._other_end_has_begun(wait):
                self._find("lost", actor, wait)
            elif transfer.peer not in self._chain:
                self._chain.append(transfer.peer)

    def _find(self, cause: Cause, actor: ActorId, wait: ActorWait | None = None) -> None:
        self._found.setdefault(cause, (actor, wait))

    def _other_end_has_begun(self, wait: ActorWait) -> bool:
        """Whether the peer has posted its half of the transfer, or is done with it."""
        peer, tag = wait.transfer.peer, wait.transfer.tag
        reported = self._reports.get(peer)
        if reported is None or reported.step is None:
            return self._unfinished.get(peer, wait.step + 1) > wait.step
        if reported.step != wait.step:
            return reported.step > wait.step
        kind, half = ("send", Send) if wait.transfer.kind == "receive" else ("receive", Recv)
        for other in reported.transfers:
            if (other.kind, other.tag, other.peer) == (kind, tag, wait.actor):
                return other.posted
        program = self._program_of(reported.program_id, peer)
        passed = program.instructions[: reported.instruction] if program is not None else ()
        return any(isinstance(i, half) and i.tag == tag for i in passed)

    # ------------------------------------------------------------ text

    def _diagnosis(self, cause: Cause, actor: ActorId, wait: ActorWait | None) -> StallDiagnosis:
        if cause == "cycle":
            actor = self._circle(actor)[0]
        blamed = None if cause == "controller" else actor
        if cause == "lost" and wait is not None:
            blamed = wait.receiver
        reported = self._reports.get(actor)
        return StallDiagnosis(
            step=min(self._unfinished[a] for a in self._chain),
            cause=cause,
            culprit=self._culprit(cause, actor, wait),
            actor=blamed,
            instruction=reported.at if reported is not None and reported.step is not None else None,
            lost=wait if cause == "lost" else None,
            chain=tuple(self._chain),
            waits=tuple(self._wait_lines()),
            places={a: self._place(a) for a in sorted(self._unfinished)},
        )

    def _culprit(self, cause: Cause, actor: ActorId, wait: ActorWait | None) -> str:
        if cause == "lost" and wait is not None:
            t = wait.transfer
            return (
                f"b{t.buffer} of actor {wait.actor} ({t.size_bytes:,} bytes, tag {t.tag}) is on its way from actor "
                f"{wait.sender} to actor {wait.receiver}, both of which live, and does not arrive: the link between "
                "them is broken"
            )
        if cause == "controller" and wait is not None:
            return f"{wait}, which does not arrive: the link between them is broken, or the controller was blocked"
        if cause == "cycle":
            circle = [str(a) for a in self._circle(actor)]
            return f"actors {', '.join(circle)} wait for each other in a circle"
        return {
            "deaf": f"actor {actor} lives but does not answer: its event loop is blocked",
            "idle": f"actor {actor} has not begun {step_text(self._unfinished[actor])}, which it was told to run",
        }.get(cause, f"actor {actor} waits for nothing and does not go on")

    def _circle(self, actor: ActorId) -> list[ActorId]:
        path: list[ActorId] = []
        while actor not in path:
            path.append(actor)
            actor = next((w.transfer.peer for w in self._waits if w.actor == actor), actor)
        return path[path.index(actor) :]

    def _wait_lines(self) -> list[str]:
        lines: list[str] = []
        by_actor: dict[ActorId, list[ActorWait]] = {}
        for wait in self._waits:
            by_actor.setdefault(wait.actor, []).append(wait)
        for actor, waits in by_actor.items():
            for wait in waits[:_MOST_WAITS]:
                posted = wait.transfer.kind != "argument" and self._other_end_has_begun(wait)
                half = "is ready to receive it" if wait.transfer.kind == "send" else "has sent it"
                lines.append(f"{wait}{f', which {half}' if posted else ''}")
            if len(waits) > _MOST_WAITS:
                lines.append(f"actor {actor} waits for {len(waits) - _MOST_WAITS} more")
        return lines

    def _place(self, actor: ActorId) -> str:
        reported = self._reports.get(actor)
        if reported is None:
            return "did not answer"
        if reported.step is None:
            return "between steps"
        program = self._program_of(reported.program_id, actor)
        if program is None or reported.instruction >= len(program.instructions):
            return f"{step_text(reported.step)}, {reported.at}"
        at = _short(program.instructions[reported.instruction])
        return f"{step_text(reported.step)}, #{reported.instruction} {at}"


def _lines(lines: Sequence[str]) -> str:
    """Indented, and not too many: the first and the last tell most."""
    half, more = _MOST_LINES // 2, len(lines) - _MOST_LINES
    if more > 0:
        lines = [*lines[:half], f"... and {more} more ...", *lines[-half:]]
    return "".join(f"\n  {line}" for line in lines)


def _short(instruction: Instruction) -> str:
    """A run by its task alone; other instructions as they are."""
    if isinstance(instruction, Run) and instruction.label:
        return f"run {instruction.label}"
    return format_instruction(instruction)
