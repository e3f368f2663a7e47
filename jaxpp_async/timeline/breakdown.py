"""Account for the time of a step: for each actor what it did, for the whole step what it was spent on.

`divide_time` measures: each moment from the first actor's first instruction to the last one's last is
computing, waiting, transfer, dispatch or idle, so that the five add up to it.

`break_down_step` finds causes. It plays the step again with the task times that were measured, first without
anything that holds it up, then with one cause after the other. An item is what its cause adds to the length
of the step, so the items add up to the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpp_async.program.instructions import ActorId
from jaxpp_async.timeline.events import ActorTimeline, TimelineEvent, TimelineTransfer


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Where one actor's time went in one step, in seconds. The shares add up to the time from when the first
    actor took the step up until the last one was done.

    Args:
        actor: the actor.
        compute_s: in tasks.
        wait_s: nothing to compute: what the next task reads had not been made yet, on another actor or by
            whoever gives the step its arguments.
        transfer_s: nothing to compute: that had been sent, and was not there yet. After the last task: until
            the last transfer has ended.
        dispatch_s: everything was there, and no task ran.
        idle_s: before the actor took the step up, and after its last instruction.
    """

    actor: ActorId
    compute_s: float
    wait_s: float
    transfer_s: float
    dispatch_s: float
    idle_s: float

    @property
    def duration_s(self) -> float:
        """The sum of the shares, the same for all actors of a step."""
        return self.compute_s + self.wait_s + self.transfer_s + self.dispatch_s + self.idle_s


def divide_time(
    timeline: ActorTimeline, transfers: Mapping[int, TimelineTransfer], span_s: float
) -> TimeShares:
    """Divide one actor's time in a step by what it did.

    Args:
        timeline: the actor's events.
        transfers: those that the actor receives, by the receive's instruction.
        span_s: of the step.
    """
    by_instruction = {e.instruction: e for e in timeline.events}
    compute_s = wait_s = transfer_s = dispatch_s = 0.0
    free_s = timeline.begin_s  # since when it computes nothing
    for run in timeline.runs:
        start_s = max(run.start_s, free_s)
        made_s, there_s = _find_arrival(run, by_instruction, transfers)
        there_s = min(max(there_s, free_s), start_s)
        made_s = min(max(made_s, free_s), there_s)
        wait_s += made_s - free_s
        transfer_s += there_s - made_s
        dispatch_s += start_s - there_s
        free_s = max(run.end_s, start_s)
        compute_s += free_s - start_s
    moved_s = max((e.end_s for e in timeline.events if e.kind in ("send", "recv")), default=free_s)
    transfer_s += max(0.0, moved_s - free_s)
    free_s = max(free_s, moved_s)
    end_s = max(timeline.end_s, free_s)
    dispatch_s += end_s - free_s
    idle_s = span_s - (end_s - timeline.begin_s)
    return TimeShares(timeline.actor, compute_s, wait_s, transfer_s, dispatch_s, idle_s)


def _find_arrival(
    run: TimelineEvent, by_instruction: Mapping[int, TimelineEvent], transfers: Mapping[int, TimelineTransfer]
) -> tuple[float, float]:
    """Find when the last thing that a task reads was made elsewhere and sent, and when it was here."""
    read = (by_instruction[i] for i in run.needs if i in by_instruction)
    arrived = (e for e in read if e.kind in ("recv", "input"))
    last = max(arrived, key=lambda e: e.end_s, default=None)
    if last is None:
        return float("-inf"), float("-inf")
    sent = transfers.get(last.instruction)
    return (sent.send.start_s if sent is not None else last.end_s), last.end_s


# ---------------------------------------------------------------- breakdown of a step


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Where the time of one step went, in seconds. The items add up to `total_s`; none is negative, but by
    what the clocks of two hosts may be off.

    Args:
        queue_s: from when the controller sent the step until the first actor took it up: the way there, and
            steps that were under way before it.
        compute_s: all tasks, shared evenly by the actors: the step if nothing ever waited.
        imbalance_s: what the busiest actor has to compute beyond that.
        schedule_s: what the order of tasks adds to that, since tasks wait for others: the bubble.
        transfer_s: what it adds that data takes a while from the start of its send until it is there.
        start_s: what it adds that some actors took the step up later than the first, or got arguments late.
        dispatch_s: the rest between taking up and end: everything was there, and the next thing had not
            begun.
        reply_s: from the end of the last instruction until the controller had the reply.
    """

    queue_s: float
    compute_s: float
    imbalance_s: float
    schedule_s: float
    transfer_s: float
    start_s: float
    dispatch_s: float
    reply_s: float

    @property
    def total_s(self) -> float:
        """The whole step, from when it was sent until the controller had all replies."""
        return self.queue_s + self.bound_s + self.transfer_s + self.start_s + self.dispatch_s + self.reply_s

    @property
    def bound_s(self) -> float:
        """The critical path of the step's tasks: the least that the schedule and the measured task times
        allow."""
        return self.compute_s + self.imbalance_s + self.schedule_s

    @property
    def span_s(self) -> float:
        """The time from when the first actor took the step up to the end of the last instruction."""
        return self.bound_s + self.transfer_s + self.start_s + self.dispatch_s

    @property
    def efficiency(self) -> float:
        """`bound_s` over `span_s`: 1 is a step that loses nothing beside what its schedule loses."""
        return self.bound_s / self.span_s if self.span_s > 0 else 1.0


def break_down_step(
    actors: Sequence[ActorTimeline], transfers: Sequence[TimelineTransfer], duration_s: float
) -> StepBreakdown:
    """Find what the time of a step was spent on.

    Args:
        actors: each actor's events.
        transfers: of the step.
        duration_s: from when the controller sent the step until it had the last actor's reply.

    Raises:
        ValueError: the tasks wait for each other in a circle: these are not events of one step.
    """
    working = [a for a in actors if a.events]
    begin_s = min((a.begin_s for a in working), default=0.0)
    end_s = max((a.end_s for a in working), default=0.0)
    replay = StepReplay(working, transfers)
    work_s = [sum(run.duration_s for run in a.runs) for a in working] or [0.0]
    bound_s = replay.length_s()
    moved_s = replay.length_s(moves=True)
    started_s = replay.length_s(moves=True, starts=True)
    return StepBreakdown(
        queue_s=begin_s,
        compute_s=sum(work_s) / len(work_s),
        imbalance_s=max(work_s) - sum(work_s) / len(work_s),
        schedule_s=bound_s - max(work_s),
        transfer_s=moved_s - bound_s,
        start_s=started_s - moved_s,
        dispatch_s=end_s - begin_s - started_s,
        reply_s=duration_s - end_s,
    )


class StepReplay:
    """Plays the tasks of a step again: each actor's in its order, each as soon as what it reads is there.

    Args:
        actors: each actor's events.
        transfers: of the step.
    """

    def __init__(self, actors: Sequence[ActorTimeline], transfers: Sequence[TimelineTransfer]):
        self._runs = {a.actor: a.runs for a in actors}
        self._events = {(a.actor, e.instruction): e for a in actors for e in a.events}
        self._transfers = {(t.receive.actor, t.receive.instruction): t for t in transfers}
        self._first_s = min((a.begin_s for a in actors), default=0.0)
        self._begins = {a.actor: a.begin_s - self._first_s for a in actors}

    def length_s(self, *, moves: bool = False, starts: bool = False) -> float:
        """Return how long the step then takes, in seconds.

        Args:
            moves: transfers take as long as they did; else no time.
            starts: actors begin, and have their arguments, when they did; else at once.

        Raises:
            ValueError: the tasks wait for each other in a circle.
        """
        ready: dict[tuple[ActorId, int], float] = {}
        free_s = {actor: self._begins[actor] if starts else 0.0 for actor in self._runs}
        at = dict.fromkeys(self._runs, 0)
        moved = True
        while moved:
            moved = False
            for actor, runs in self._runs.items():
                while at[actor] < len(runs):
                    run = runs[at[actor]]
                    there = [self._ready((actor, i), ready, moves, starts) for i in run.needs]
                    if any(t is None for t in there):
                        break
                    start_s = max([free_s[actor], *(t for t in there if t is not None)])
                    free_s[actor] = ready[actor, run.instruction] = start_s + run.duration_s
                    at[actor], moved = at[actor] + 1, True
        if any(at[actor] < len(runs) for actor, runs in self._runs.items()):
            raise ValueError("tasks wait for each other in a circle")
        arrivals = [self._ready(key, ready, moves, starts) for key in self._transfers]
        return max([0.0, *free_s.values(), *(t for t in arrivals if t is not None)])

    def _ready(
        self, key: tuple[ActorId, int], ready: dict[tuple[ActorId, int], float], moves: bool, starts: bool
    ) -> float | None:
        """Return when the replay has what an instruction makes; None: that is not known yet."""
        if key in ready:
            return ready[key]
        event = self._events.get(key)
        if event is None:
            return 0.0
        if event.kind == "input":
            return event.end_s - self._first_s if starts else 0.0
        transfer = self._transfers.get(key)
        if event.kind != "recv" or transfer is None:
            return None if event.kind == "run" else 0.0
        sent = [self._ready((transfer.send.actor, i), ready, moves, starts) for i in transfer.send.needs]
        if any(t is None for t in sent):
            return None
        took_s = max(0.0, transfer.duration_s) if moves else 0.0
        ready[key] = max([0.0, *(t for t in sent if t is not None)]) + took_s
        return ready[key]
