"""Find the actors that cannot continue a step, and determine the reason from their reports.

An actor makes no progress while its position in its program does not change. Consider an actor together with
all actors that it may be waiting for, directly or through other actors. The actor is stuck if none of these
actors has made progress until the deadline, none of them computes, and all of them send heartbeats. Every
actor with an unfinished step is then asked which transfers it waits for (`Report`), and `_Examination` finds
the reason. The time is a parameter of each method, so that tests can choose it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxpp_async.program.actor_program import ActorProgram, format_instruction
from jaxpp_async.program.instructions import CONTROLLER, ActorId, Recv, Run, Send
from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.clocks import TICK_S
from jaxpp_async.protocol.messages import OpenTransfer, Reported, StepId, step_text

PROGRESS_S = 10.0
"""The seconds for which a step may make no progress before it counts as stuck."""

SLOW_BYTES_PER_S = 50e6
"""The bytes per second below which a link between actors may be taken for a broken one."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A group of actors that may be waiting for each other and that have made no progress for some time.

    Args:
        actors: one actor, then all actors that it may be waiting for, directly or through other actors.
        still_s: the number of seconds for which none of the actors has made progress.
    """

    actors: tuple[ActorId, ...]
    still_s: float


@dataclass(slots=True)
class _ActorProgress:
    """A record of the position at which an actor has stopped, and of the time at which it stopped there.

    Args:
        at: the step's id and the actor's position in its program.
        since: the time in seconds at which the actor was first seen at that position.
        extra_s: how many seconds longer than usual the actor may stay at that position, because of the bytes
            in transfer.
        done: the index of the instruction and the number of finished transfers from the actor's last report;
            None: no report yet.
    """

    at: tuple[int, Position | None]
    since: float
    extra_s: float = 0.0
    done: tuple[int, int] | None = None


class StallDetector:
    """A detector of steps that make no progress.

    Args:
        program_of: called with a program id and an actor; returns the actor's part of the program, or None if
            there is none.
        progress_s: the number of seconds for which a step may make no progress. Each 50 MB in transfer add a
            second.
    """

    def __init__(self, program_of: ProgramOf, progress_s: float = PROGRESS_S):
        self._program_of, self._progress_s = program_of, progress_s
        self._progress_of: dict[ActorId, _ActorProgress] = {}

    def restart(self) -> None:
        """Forget for how long actors have made no progress.

        This is needed after an abort, a restart or the loading of a program, during which no step progresses.
        """
        self._progress_of.clear()

    def judge(
        self,
        now: float,
        unfinished: Mapping[ActorId, int],
        positions: Mapping[ActorId, Position | None],
        silent: Collection[ActorId] = (),
    ) -> Stall | None:
        """Return a group of actors that seem stuck, or None if no group seems stuck.

        This uses only the positions that the actors have sent with their heartbeats, and sends no request to
        them.

        This must be called at every tick of the monitor's clock.

        Args:
            now: the time in seconds.
            unfinished: for each actor, the id of the oldest step that it has not finished. Actors that have
                finished all steps are left out.
            positions: the last known position of each of these actors in its program, or None.
            silent: the actors whose heartbeats have been missing for a while. Such actors may be making
                progress unseen, so groups with one of them are not returned.
        """
        self._update(now, unfinished, positions)
        still = {a for a, c in self._progress_of.items() if now - c.since >= self._progress_s + c.extra_s}
        for actor in sorted(still - set(silent)):
            chain = self._may_wait_for(actor, positions, unfinished)
            if still.issuperset(chain) and not chain & set(silent):
                others = tuple(sorted(chain - {actor}))
                return Stall((actor, *others), min(now - self._progress_of[a].since for a in chain))
        return None

    def conclude(
        self,
        now: float,
        stall: Stall,
        unfinished: Mapping[ActorId, int],
        reports: Mapping[ActorId, Reported | None],
        silent: Collection[ActorId] = (),
    ) -> StallDiagnosis | None:
        """Determine from reports why a group of actors is stuck. Return None if the group is not stuck, or if
        that is uncertain.

        Args:
            now: the time in seconds.
            stall: the group of actors, as returned by `judge`.
            unfinished: for each actor, the id of the oldest step that it has not finished. Actors that have
                finished all steps are left out.
            reports: the report of each actor that was asked; None if the actor did not answer.
            silent: the actors whose heartbeats are missing, so that their state is not known. If the reason
                may lie with one of them, the result is None.
        """
        progress = [self._progress_of.get(actor) for actor in stall.actors]
        gone_on = any(p is None or p.since > now - self._progress_s for p in progress)
        for actor, reported in reports.items():
            if reported is not None and actor in unfinished:
                gone_on |= self._has_moved(actor, reported, now)
        if gone_on or not set(stall.actors) <= set(unfinished):
            return None
        diagnosis = _Examination(unfinished, reports, self._program_of).follow(stall.actors[0])
        if diagnosis is None or set(diagnosis.chain) & set(silent):
            return None
        extra_s = _extra_s([r for a in diagnosis.chain if (r := reports.get(a)) is not None])
        for actor in diagnosis.chain:
            if actor in self._progress_of:
                self._progress_of[actor].extra_s = extra_s
        return diagnosis if stall.still_s >= self._progress_s + extra_s else None

    def _update(
        self, now: float, unfinished: Mapping[ActorId, int], positions: Mapping[ActorId, Position | None]
    ) -> None:
        for actor in self._progress_of.keys() - unfinished.keys():
            del self._progress_of[actor]
        for actor, step in unfinished.items():
            position, progress = positions.get(actor), self._progress_of.get(actor)
            computing = position is not None and position.computing
            if progress is None or computing or progress.at != (step, position):
                self._progress_of[actor] = _ActorProgress((step, position), now)

    def _has_moved(self, actor: ActorId, reported: Reported, now: float) -> bool:
        """Return whether an actor executes a task, or has made progress since its last report.

        Args:
            actor: the actor.
            reported: the actor's new report.
            now: the time in seconds.
        """
        progress = self._progress_of.get(actor)
        if progress is None:
            return False
        before, progress.done = progress.done, (reported.instruction, reported.transfers_done)
        _, position = progress.at
        moved = before is not None and before != progress.done
        if before is None and position is not None and position.waiting and position.step == reported.step:
            moved = position.instruction != reported.instruction
        if moved or reported.running:
            progress.since, progress.extra_s = now, 0.0
        return moved or reported.running

    def _may_wait_for(
        self, actor: ActorId, positions: Mapping[ActorId, Position | None], unfinished: Mapping[ActorId, int]
    ) -> set[ActorId]:
        """Return an actor together with all actors that it may be waiting for, directly or through other
        actors.

        Actors that have finished their steps are left out, since they wait for no other actor.
        """
        found, left = {actor}, [actor]
        while left:
            one = left.pop()
            new = self._peers(one, positions.get(one)) & unfinished.keys() - found
            found |= new
            left += new
        return found

    def _peers(self, actor: ActorId, at: Position | None) -> set[ActorId]:
        """Return the actors that an actor may be waiting for at a position in its program, because they send
        it data or receive its data.

        The result may include actors that `actor` does not wait for, since this method does not know which
        transfers are still open.

        Args:
            actor: the actor.
            at: the actor's position, or None if not known; the result is then empty.
        """
        part = self._program_of(at.program_id, actor) if at is not None else None
        if at is None or part is None or at.instruction > len(part.instructions):
            return set()
        wanted: set[int] | None = None  # None at the end of the program: every buffer
        if at.instruction < len(part.instructions):
            run = part.instructions[at.instruction]
            wanted = set(run.inputs) if isinstance(run, Run) else set()
        peers: set[ActorId] = set()
        for instruction in part.instructions[: at.instruction]:
            if isinstance(instruction, Recv | Send) and (wanted is None or instruction.buffer in wanted):
                peers.add(instruction.from_actor if isinstance(instruction, Recv) else instruction.to_actor)
        return peers - {CONTROLLER}


def _extra_s(reports: Collection[Reported]) -> float:
    """Return how many seconds longer than usual a step may make no progress because of the bytes in transfer.

    The result is one second for each 50 MB that are in transfer for one actor, namely the actor with the most
    such bytes. The result is 0 if it would be less than one tick of the monitor.

    Args:
        reports: the actors' reports, which contain their open transfers.
    """
    most = max((sum(t.size_bytes for t in r.transfers if t.posted) for r in reports), default=0)
    extra_s = most / SLOW_BYTES_PER_S
    return extra_s if extra_s >= TICK_S else 0.0


# ---------------------------------------------------------------- diagnosis

ProgramOf: TypeAlias = Callable[[int, ActorId], ActorProgram | None]
"""A function that returns an actor's part of a program for (program id, actor), or None if it has none."""

Cause: TypeAlias = Literal["lost", "deaf", "idle", "controller", "none", "cycle"]
"""The reason why a step makes no progress, the surest reason first: a transfer that both ends have begun is
lost; an actor does not answer, has not begun the step, waits for the controller, or waits for nothing; or
actors wait for each other in a cycle.
"""

_CAUSES: tuple[Cause, ...] = ("lost", "deaf", "idle", "controller", "none", "cycle")
_MOST_WAITS, _MOST_LINES = 4, 32  # the most lines about one actor, and in one list


@dataclass(frozen=True, slots=True)
class ActorWait:
    """A transfer that an actor waits for, because it cannot continue a step without this transfer.

    Args:
        actor: the actor that waits.
        step: the id of the step.
        transfer: the transfer, as the actor reported it.
    """

    actor: ActorId
    step: StepId
    transfer: OpenTransfer

    @property
    def sender(self) -> ActorId:
        """The actor that sends the data."""
        return self.actor if self.transfer.kind == "send" else self.transfer.peer

    @property
    def receiver(self) -> ActorId:
        """The actor that receives the data."""
        return self.transfer.peer if self.transfer.kind == "send" else self.actor

    def __str__(self) -> str:
        t = self.transfer
        if t.kind == "argument":
            what = f"argument b{t.buffer} ({t.size_bytes:,} bytes) from the controller"
            return f"actor {self.actor} waits for {what}"
        what = f"(tag {t.tag}, {t.size_bytes:,} bytes)"
        if t.kind == "send":
            return f"actor {self.actor} waits until its b{t.buffer} has gone to actor {t.peer} {what}"
        return f"actor {self.actor} waits for b{t.buffer} from actor {t.peer} {what}"


@dataclass(frozen=True, slots=True)
class StallDiagnosis:
    """The reason why a step makes no progress.

    Args:
        step: the id of the oldest step that an actor of the chain has not finished.
        cause: the kind of the reason; if several reasons were found, the most certain one.
        culprit: a clause that describes the reason.
        actor: the actor to blame, which for a lost transfer is its receiver; None: the controller.
        instruction: the text of the instruction at which the reason was found, or None if the actor there
            reported no instruction.
        lost: the transfer that was lost, if the cause is `"lost"`; otherwise None.
        chain: the actors that were examined, in order. Each one after the first is waited for by an earlier
            one.
        waits: lines of text that say which actor waits for which transfer.
        places: for each actor with an unfinished step, a text that says where in its program it is.
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
        """Return the diagnosis as lines of text.

        Args:
            names: for each actor, a name that tells its host and process.
        """
        places = [f"{names.get(a, f'actor {a}')}: {where}" for a, where in sorted(self.places.items())]
        waits = _lines(self.waits) or " nobody"
        return f"{self.culprit}\nWho waits for whom:{waits}\nWhere each actor is:{_lines(places)}"


def describe_position(program_of: ProgramOf, actor: ActorId, at: Position) -> str:
    """Return a text for a position of an actor, such as `"run fwd(stage 1, mb 3) of step 7, waiting for
    data"`.

    Args:
        program_of: called with a program id and an actor; returns the actor's part of the program, or None if
            there is none.
        actor: the actor.
        at: the position in a program.
    """
    program = program_of(at.program_id, actor)
    if program is None or not 0 <= at.instruction <= len(program.instructions):
        return step_text(at.step)
    if at.instruction == len(program.instructions):
        return f"the end of {step_text(at.step)}, with transfers open"
    text = _short(program, at.instruction)
    return f"{text} of {step_text(at.step)}{', waiting for data' if at.waiting else ''}"


class _Examination:
    """A search for the reason of a stall. The search goes from each actor to the actors that it waits for.

    The search is breadth first.

    Args:
        unfinished: for each actor, the id of the oldest step that it has not finished.
        reports: the report of each of these actors; None if the actor did not answer.
        program_of: called with a program id and an actor; returns the actor's part of the program, or None if
            there is none.
    """

    def __init__(
        self,
        unfinished: Mapping[ActorId, int],
        reports: Mapping[ActorId, Reported | None],
        program_of: ProgramOf,
    ):
        self._unfinished, self._reports, self._program_of = unfinished, reports, program_of
        self._causes: dict[Cause, tuple[ActorId, ActorWait | None]] = {}  # the first cause found of each kind
        self._chain: list[ActorId] = []
        self._waits: list[ActorWait] = []

    def follow(self, first: ActorId) -> StallDiagnosis | None:
        """Begin the search at the actor `first`, and return the reason why `first` cannot continue.

        The result is None if one of the actors executes a task, since then the others only have to wait for
        it.
        """
        self._chain.append(first)
        for actor in self._chain:  # `_follow_waits` appends to the chain
            reported = self._reports.get(actor)
            if reported is not None and reported.running:
                return None
            self._follow_waits(actor, reported)
        for cause in _CAUSES:
            if cause in self._causes:
                return self._diagnosis(cause, *self._causes[cause])
        return self._diagnosis("cycle", first, None)

    def _follow_waits(self, actor: ActorId, reported: Reported | None) -> None:
        if reported is None:
            self._note_cause("deaf", actor)
            return
        if reported.step is None:
            self._note_cause("idle", actor)
            return
        wanted = [t for t in reported.transfers if t.needed or t.kind == "argument"]
        if not wanted:
            self._note_cause("none", actor)
        for transfer in wanted:
            wait = ActorWait(actor, reported.step, transfer)
            self._waits.append(wait)
            if transfer.kind == "argument" or transfer.peer == CONTROLLER:
                self._note_cause("controller", actor, wait)
            elif self._other_end_has_begun(wait):
                self._note_cause("lost", actor, wait)
            elif transfer.peer not in self._chain:
                self._chain.append(transfer.peer)

    def _note_cause(self, cause: Cause, actor: ActorId, wait: ActorWait | None = None) -> None:
        self._causes.setdefault(cause, (actor, wait))

    def _other_end_has_begun(self, wait: ActorWait) -> bool:
        """Return whether the actor at the other end of a transfer has already started its send or receive."""
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
            actor = self._find_cycle(actor)[0]
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
                f"b{t.buffer} of actor {wait.actor} ({t.size_bytes:,} bytes, tag {t.tag}) is on its way "
                f"from actor {wait.sender} to actor {wait.receiver}, both of which live, and does not arrive"
                ": the link between them is broken"
            )
        if cause == "controller" and wait is not None:
            why = "the link between them is broken, or the controller was blocked"
            return f"{wait}, which does not arrive: {why}"
        if cause == "cycle":
            circle = [str(a) for a in self._find_cycle(actor)]
            return f"actors {', '.join(circle)} wait for each other in a circle"
        if cause == "deaf":
            return f"actor {actor} lives but does not answer: its event loop is blocked"
        if cause == "idle":
            step = step_text(self._unfinished[actor])
            return f"actor {actor} has not begun {step}, which it was told to run"
        return f"actor {actor} waits for nothing and does not go on"

    def _find_cycle(self, actor: ActorId) -> list[ActorId]:
        """Follow the first wait of each actor, from `actor` on, until an actor appears for the second time.
        Return the actors of the cycle that was found, in which each waits for the next one.
        """
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
        at = _short(program, reported.instruction)
        return f"{step_text(reported.step)}, #{reported.instruction} {at}"


def _lines(lines: Sequence[str]) -> str:
    """Join lines to one indented text.

    If there are more than `_MOST_LINES` lines, the middle ones are left out, because the first and last lines
    are the most useful.
    """
    half, more = _MOST_LINES // 2, len(lines) - _MOST_LINES
    if more > 0:
        lines = [*lines[:half], f"... and {more} more ...", *lines[-half:]]
    return "".join(f"\n  {line}" for line in lines)


def _short(program: ActorProgram, index: int) -> str:
    """Return the text of an instruction: only the task's label for a `Run`, the whole text for any other."""
    instruction = program.instructions[index]
    if isinstance(instruction, Run) and instruction.label:
        return f"run {instruction.label}"
    return format_instruction(program, index)
