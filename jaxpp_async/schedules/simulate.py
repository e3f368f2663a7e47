"""Run lists of tasks without computing anything: dependencies, times, deadlocks, one order of all tasks.

`Rows` below are one sequence of tasks an actor, as `resolve` returns them. Transfers take no time here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import TASK_TYPES, ActorId, Task, TaskType

Rows: TypeAlias = Sequence[Sequence[Task]]
Durations: TypeAlias = Mapping[TaskType, float] | Callable[[Task], float]

UNIT: Mapping[TaskType, float] = MappingProxyType({"fwd": 1, "bwd": 1, "bwd_input": 1, "bwd_weight": 1})
"""One unit of time for every task."""


# ---------------------------------------------------------------- dependencies


def dependencies(task: Task, num_stages: int, split: Collection[tuple[int, int]] = ()) -> tuple[Task, ...]:
    """Return the tasks that must be done before `task` starts, within its microbatch.

    Args:
        task: any task of the schedule.
        num_stages: stages of the loop body.
        split: (stage, microbatch) of every backward that is split into `bwd_input` and `bwd_weight`; see
            `split_backwards`.
    """
    i, stage = task.i, task.stage
    if task.ty == "fwd":
        return (Task(i, "fwd", stage - 1),) if stage > 0 else ()
    if task.ty == "bwd_weight":
        return (Task(i, "bwd_input", stage),)
    forward = Task(i, "fwd", stage)
    if stage + 1 >= num_stages:
        return (forward,)
    return forward, Task(i, "bwd_input" if (stage + 1, i) in split else "bwd", stage + 1)


def split_backwards(tasks: Rows) -> frozenset[tuple[int, int]]:
    """Find (stage, microbatch) of every backward in `tasks` that is split."""
    return frozenset((task.stage, task.i) for row in tasks for task in row if task.ty == "bwd_input")


def stage_actors(tasks: Rows) -> tuple[ActorId, ...]:
    """Return the actor of each stage."""
    actors = {task.stage: actor for actor, row in enumerate(tasks) for task in row}
    return tuple(actors[stage] for stage in range(len(actors)))


def num_stages_of(tasks: Rows) -> int:
    """Return one more than the largest stage index in `tasks`; 0 where there is no task."""
    return 1 + max((task.stage for row in tasks for task in row), default=-1)


# ---------------------------------------------------------------- running a schedule in thought


@dataclass(frozen=True, slots=True)
class ScheduleTiming:
    """The times of all tasks, `starts[actor][step]` and `ends[actor][step]`, in the unit of the durations."""

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """The end of the last task."""
        return max((row[-1] for row in self.ends if row), default=0)


def simulate(tasks: Rows, durations: Durations = UNIT) -> ScheduleTiming:
    """Run every actor's list in order, each task as soon as its actor is free and its dependencies are done.

    Args:
        tasks: one sequence of tasks an actor.
        durations: time by task type, or of each task. Transfers take none.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    timeline = run_ahead(tasks, durations)
    waits = find_deadlock(tasks, timeline)
    if waits:
        raise ScheduleError("the schedule deadlocks:\n" + "\n".join(f"  {wait}" for wait in waits))
    return timeline


def run_ahead(tasks: Rows, durations: Durations = UNIT) -> ScheduleTiming:
    """Run the lists as `simulate` does; of a schedule that deadlocks, return the times of what runs."""
    duration = durations if callable(durations) else lambda task: durations[task.ty]
    rows = _number_tasks(tasks)
    starts: list[list[float]] = [[] for _ in tasks]
    ends: list[list[float]] = [[] for _ in tasks]
    done: dict[int, float] = {}
    waiting: dict[int, list[ActorId]] = {}
    runnable = list(range(len(tasks)))
    while runnable:
        actor = runnable.pop()
        began, ended, row = starts[actor], ends[actor], tasks[actor]
        now = ended[-1] if ended else 0
        for step in range(len(ended), len(row)):
            number, needs = rows[actor][step]
            missing = None
            for need in needs:
                if (end := done.get(need)) is None:
                    missing = need
                    break
                if end > now:
                    now = end
            if missing is not None:
                waiting.setdefault(missing, []).append(actor)
                break
            began.append(now)
            now = done[number] = now + duration(row[step])
            ended.append(now)
            if number in waiting:
                runnable += waiting.pop(number)
    return ScheduleTiming(tuple(map(tuple, starts)), tuple(map(tuple, ends)))


_CODES: Mapping[TaskType, int] = MappingProxyType({ty: code for code, ty in enumerate(TASK_TYPES)})


def _number_tasks(tasks: Rows) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Return for each entry a number for its task and the numbers of its `dependencies`.

    Large schedules have ten thousand tasks, and a number is found in a dict in a tenth of the time that a
    task takes.
    """
    num_stages = num_stages_of(tasks)
    next_stage = 4 * (1 + max((task.i for row in tasks for task in row), default=0))

    numbers = [[task.stage * next_stage + 4 * task.i + _CODES[task.ty] for task in row] for row in tasks]
    entries = [list(zip(row, own, strict=True)) for row, own in zip(tasks, numbers, strict=True)]
    split = {own for row in entries for task, own in row if task.ty == "bwd_input"}

    def needs(task: Task, own: int) -> tuple[int, ...]:
        if task.ty == "fwd":
            return (own - next_stage,) if task.stage > 0 else ()
        if task.ty == "bwd_weight":
            return (own - _CODES["bwd_weight"] + _CODES["bwd_input"],)
        forward = own - _CODES[task.ty]
        if task.stage + 1 >= num_stages:
            return (forward,)
        halved = forward + next_stage + _CODES["bwd_input"]
        return forward, halved if halved in split else forward + next_stage + _CODES["bwd"]

    return [[(own, needs(task, own)) for task, own in row] for row in entries]


@dataclass(frozen=True, slots=True)
class ScheduleWait:
    """An actor that cannot go on: its task `task` at `step` of its list needs `need`.

    `need_actor` and `need_step` say where `need` is in the lists, None where it is nowhere; `head` is the
    task at which `need_actor` waits.
    """

    actor: ActorId
    step: int
    task: Task
    need: Task
    need_actor: ActorId | None = None
    need_step: int | None = None
    head: Task | None = None

    def __str__(self) -> str:
        start = f"actor {self.actor}, step {self.step}: {self.task} waits for {self.need}"
        if self.need_actor is None:
            return f"{start}, which no actor runs"
        after = "" if self.head == self.need else f", which comes after {self.head}"
        return f"{start} on actor {self.need_actor}, step {self.need_step}{after}"


def find_deadlock(tasks: Rows, timeline: ScheduleTiming) -> tuple[ScheduleWait, ...]:
    """Find the cycle of actors that wait for one another; () if `timeline` (from `run_ahead`) is complete."""
    heads = {actor: len(ends) for actor, ends in enumerate(timeline.ends) if len(ends) < len(tasks[actor])}
    if not heads:
        return ()
    num_stages, split = num_stages_of(tasks), split_backwards(tasks)
    places = {task: (actor, step) for actor, row in enumerate(tasks) for step, task in enumerate(row)}
    done = {task for actor, row in enumerate(tasks) for task in row[: len(timeline.ends[actor])]}
    actor, chain, position = min(heads), [], {}
    while actor not in position:
        position[actor] = len(chain)
        task = tasks[actor][heads[actor]]
        need = next(need for need in dependencies(task, num_stages, split) if need not in done)
        if need not in places:
            return (ScheduleWait(actor, heads[actor], task, need),)
        need_actor, need_step = places[need]
        chain.append(
            ScheduleWait(
                actor, heads[actor], task, need, need_actor, need_step, tasks[need_actor][heads[need_actor]]
            )
        )
        actor = need_actor
    return tuple(chain[position[actor] :])


def global_order(tasks: Rows) -> list[tuple[ActorId, Task]]:
    """Put all tasks in one topological order: by simulated start in unit time, then by actor.

    Restricted to one actor the order is that actor's list.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    starts = simulate(tasks).starts
    slots = [(start, actor, step) for actor, row in enumerate(starts) for step, start in enumerate(row)]
    return [(actor, tasks[actor][step]) for _, actor, step in sorted(slots)]


# ---------------------------------------------------------------- figures


def bubble_fraction(tasks: Rows, durations: Durations = UNIT) -> float:
    """Return the share of the actors' time, from first task to last, in which they run nothing.

    Actors without a task count as idle throughout.
    """
    timeline = simulate(tasks, durations)
    busy = sum(
        end - start
        for row in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(*row, strict=True)
    )
    total = timeline.makespan * len(tasks)
    return 1 - busy / total if total else 0.0


def idle_times(tasks: Rows, durations: Durations = UNIT) -> tuple[float, ...]:
    """Return for each actor how long it runs nothing between its own first and last task.

    Papers call a schedule without such time zero bubble: where no actor waits for all others at the end of a
    step, the next step can begin on an actor as soon as it is done with this one.
    """
    timeline = simulate(tasks, durations)
    return tuple(
        sum(start - end for start, end in zip(starts[1:], ends[:-1], strict=True))
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    )


def peak_activations(tasks: Rows) -> tuple[int, ...]:
    """Return for each actor the most activations that it holds.

    An activation is a (stage, microbatch) pair whose forward the actor has run and whose backward it has not
    finished (`bwd`, or for a split backward `bwd_weight`).
    """
    change = {"fwd": 1, "bwd": -1, "bwd_input": 0, "bwd_weight": -1}
    peaks = []
    for row in tasks:
        held = peak = 0
        for task in row:
            held += change[task.ty]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
