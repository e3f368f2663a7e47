"""Account for the time of a step: for each actor what it did, and for the whole step what the time was spent
on.

`divide_time` measures: each moment, from the first actor's first instruction to the last actor's last one,
counts as computing, waiting, transfer, dispatch or idle. The five shares add up to that time span.

`break_down_step` finds causes: the step is simulated with the task times that were measured, first without
any delays; then the causes of delay are added one after another. Each item is the time that its cause adds to
the length of the step, so the items add up to the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from jaxpp_async.program.instructions import ActorId
from jaxpp_async.timeline.event_graph import EventGraph
from jaxpp_async.timeline.events import ActorTimeline, TimelineEvent, TimelineTransfer


@dataclass(frozen=True, slots=True)
class TimeShares:
    """The shares of one actor's time in one step, in seconds.

    The shares add up to the time from when the first actor began the step until the last one finished it.

    Args:
        actor: the actor.
        compute_s: time spent in tasks.
        wait_s: time without a task because the next task's inputs did not exist yet: another actor had not
            made and sent one, or an argument of the step was not available.
        transfer_s: time without a task because an input of the next task had been sent but had not arrived;
            after the last task, the time until the last transfer ended.
        dispatch_s: time without a task although all inputs of the next one had arrived.
        idle_s: time before the actor began the step and after its last instruction.
    """

    actor: ActorId
    compute_s: float
    wait_s: float
    transfer_s: float
    dispatch_s: float
    idle_s: float

    @property
    def duration_s(self) -> float:
        """The sum of the shares, which is the same for all actors of a step."""
        return self.compute_s + self.wait_s + self.transfer_s + self.dispatch_s + self.idle_s


Cause: TypeAlias = Literal["compute", "wait", "transfer", "dispatch"]
"""An actor computes during an interval of its part in a step, or this is why it does not."""


def divide_time(
    timeline: ActorTimeline, transfers: Mapping[int, TimelineTransfer], span_s: float
) -> TimeShares:
    """Divide one actor's time in a step into shares, such as computing, waiting and transfer.

    Args:
        timeline: the actor's events.
        transfers: the transfers to this actor, each under the instruction index of its receive.
        span_s: the seconds from when the first actor began the step until the last one finished it.
    """
    taken_s = dict.fromkeys(get_args(Cause), 0.0)
    end_s = timeline.begin_s
    for cause, start_s, until_s in intervals(timeline, transfers):
        taken_s[cause] += until_s - start_s
        end_s = until_s
    idle_s = span_s - (end_s - timeline.begin_s)
    return TimeShares(timeline.actor, idle_s=idle_s, **{f"{cause}_s": t for cause, t in taken_s.items()})


def intervals(
    timeline: ActorTimeline, transfers: Mapping[int, TimelineTransfer]
) -> Iterator[tuple[Cause, float, float]]:
    """Return what an actor did from its first instruction of a step to its last one, without gaps.

    Args:
        timeline: the actor's events.
        transfers: the transfers to this actor, each under the instruction index of its receive.

    Returns:
        The cause, start and end of each interval, in seconds since the step's start; some have no length.
    """
    by_instruction = {e.instruction: e for e in timeline.events}
    free_s = timeline.begin_s  # the end of the last task so far
    for run in timeline.runs:
        start_s = max(run.start_s, free_s)
        made_s, there_s = _find_arrival(run, by_instruction, transfers)
        there_s = min(max(there_s, free_s), start_s)
        made_s = min(max(made_s, free_s), there_s)
        yield "wait", free_s, made_s
        yield "transfer", made_s, there_s
        yield "dispatch", there_s, start_s
        free_s = max(run.end_s, start_s)
        yield "compute", start_s, free_s
    moved_s = max((e.end_s for e in timeline.events if e.kind in ("send", "recv")), default=free_s)
    yield "transfer", free_s, max(moved_s, free_s)
    yield "dispatch", max(moved_s, free_s), max(timeline.end_s, moved_s, free_s)


def _find_arrival(
    run: TimelineEvent, by_instruction: Mapping[int, TimelineEvent], transfers: Mapping[int, TimelineTransfer]
) -> tuple[float, float]:
    """Return when the input that arrived last for a task was sent, and when it arrived.

    Inputs are data from other actors and arguments of the step. For an argument, both times are the time when
    it arrived. The times are in seconds since the step's start. For a task without inputs, both are minus
    infinity.

    Args:
        run: the task.
        by_instruction: the actor's events by instruction index.
        transfers: the transfers to this actor, each under the instruction index of its receive.
    """
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
    """The causes that one step's time was spent on, in seconds.

    The items add up to `total_s`. None is negative, except by as much as the clocks of two hosts may differ.

    Args:
        queue_s: the time from when the controller sent the step until the first actor began it, in which the
            message travelled to the actor and earlier steps may still have been running.
        compute_s: the time of all tasks divided by the number of actors: the length of the step if no actor
            ever waited.
        imbalance_s: how much longer the tasks of the busiest actor take than that average.
        schedule_s: how much the order of the tasks adds, because tasks wait for tasks of other actors: the
            bubble.
        transfer_s: how much transfers add, because data takes time from the start of its send until it has
            arrived.
        start_s: how much is added because some actors began the step later than the first one, or got
            arguments late.
        dispatch_s: the rest of the time between the start of the first actor and the end of the last one, in
            which all data was available but the next instruction had not begun.
        reply_s: the time from the end of the last instruction until the controller had all replies.
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
        """The length of the whole step, from when the controller sent it until it had all replies."""
        return self.queue_s + self.bound_s + self.transfer_s + self.start_s + self.dispatch_s + self.reply_s

    @property
    def bound_s(self) -> float:
        """The length of the critical path of the step's tasks.

        This is the shortest time that the schedule and the measured task times allow.
        """
        return self.compute_s + self.imbalance_s + self.schedule_s

    @property
    def span_s(self) -> float:
        """The time from when the first actor began the step until the end of the last instruction."""
        return self.bound_s + self.transfer_s + self.start_s + self.dispatch_s

    @property
    def efficiency(self) -> float:
        """The ratio of `bound_s` to `span_s`: 1 for a step that loses no time except in its schedule's
        bubble.
        """
        return self.bound_s / self.span_s if self.span_s > 0 else 1.0


def break_down_step(
    actors: Sequence[ActorTimeline], transfers: Sequence[TimelineTransfer], duration_s: float
) -> StepBreakdown:
    """Return what the time of a step was spent on.

    Args:
        actors: the events of each actor.
        transfers: the transfers of the step.
        duration_s: the seconds from when the controller sent the step until it had the last actor's reply.

    Raises:
        ValueError: tasks wait for each other in a cycle, so these cannot be the events of one step.
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
    """A simulation of a step's tasks with their measured durations.

    Each actor runs its tasks in their recorded order, and each task begins as soon as the actor is free and
    the task's inputs are available.

    Args:
        actors: the events of each actor.
        transfers: the transfers of the step.

    Raises:
        ValueError: tasks wait for each other in a cycle.
    """

    def __init__(self, actors: Sequence[ActorTimeline], transfers: Sequence[TimelineTransfer]):
        first_s = min((a.begin_s for a in actors), default=0.0)
        events = [e for a in actors for e in a.events]
        numbers = {(e.actor, e.instruction): number for number, e in enumerate(events)}
        begins = {a.actor: len(events) + k for k, a in enumerate(actors)}  # events of their own
        needs: list[list[int]] = [[] for _ in (*events, *actors)]
        delays = np.zeros((3, len(needs)))
        self._runs_s, self._moves_s, self._starts_s = delays
        self._run_numbers: dict[tuple[ActorId, int], int] = {}

        def number_needs(actor: ActorId, instructions: Sequence[int]) -> list[int]:
            return [numbers[actor, i] for i in instructions if (actor, i) in numbers]

        for t in transfers:
            number = numbers[t.receive.actor, t.receive.instruction]
            needs[number] = number_needs(t.send.actor, t.send.needs)
            self._moves_s[number] = max(0.0, t.duration_s)
        for a in actors:
            previous = begins[a.actor]
            self._starts_s[previous] = a.begin_s - first_s
            for run in a.runs:
                number = numbers[a.actor, run.instruction]
                needs[number] = [previous, *number_needs(a.actor, run.needs)]
                self._runs_s[number] = run.duration_s
                self._run_numbers[a.actor, run.instruction] = number
                previous = number
            for e in a.events:
                if e.kind == "input":
                    self._starts_s[numbers[a.actor, e.instruction]] = e.end_s - first_s
        self._graph = EventGraph(needs)

    def length_s(self, *, moves: bool = False, starts: bool = False) -> float:
        """Return the length of the simulated step in seconds.

        Args:
            moves: whether each transfer takes its measured time; otherwise transfers take no time.
            starts: whether each actor begins, and gets its arguments, at the measured times; otherwise all
                actors begin together and have their arguments from the beginning.
        """
        return max(self._times(moves, starts), default=0.0)

    def run_ends(self) -> dict[tuple[ActorId, int], float]:
        """Return when each task ends if no transfer takes time and all actors begin together, in seconds.

        Returns:
            A dictionary. Its keys are the actor and the index of the instruction.
        """
        times = self._times(moves=False, starts=False)
        return {key: times[number] for key, number in self._run_numbers.items()}

    def _times(self, moves: bool, starts: bool) -> list[float]:
        delays = self._runs_s + moves * self._moves_s + starts * self._starts_s
        return self._graph.times(delays.tolist())
