"""Time a schedule's lists of tasks, to find task times, idle times, deadlocks and one order of all tasks.

The type `Rows` below is one sequence of tasks per actor, as `resolve` returns it. Transfers take no time
here, and no step is compiled: `planning/simulation.py` simulates the compiled programs of a step, with
transfers and measured times.
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
"""Durations with which every task takes one unit of time."""


# ---------------------------------------------------------------- dependencies


def dependencies(task: Task, num_stages: int, split: Collection[tuple[int, int]] = ()) -> tuple[Task, ...]:
    """Return the tasks that must have ended before `task` starts; all are of the same microbatch.

    Args:
        task: any task of the schedule.
        num_stages: the number of stages of the loop body.
        split: the (stage, microbatch) of every backward that is split into `bwd_input` and `bwd_weight`, as
            `split_backwards` returns them.
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
    """Return the (stage, microbatch) of each backward that is split into `bwd_input` and `bwd_weight`."""
    return frozenset((task.stage, task.i) for row in tasks for task in row if task.ty == "bwd_input")


def stage_actors(tasks: Rows) -> tuple[ActorId, ...]:
    """Return the actor that runs each stage, by stage index."""
    actors = {task.stage: actor for actor, row in enumerate(tasks) for task in row}
    return tuple(actors[stage] for stage in range(len(actors)))


def num_stages_of(tasks: Rows) -> int:
    """Return the number of stages in `tasks`: the largest stage index plus one, or 0 if there is no task."""
    return 1 + max((task.stage for row in tasks for task in row), default=-1)


# ---------------------------------------------------------------- times


@dataclass(frozen=True, slots=True)
class ScheduleTiming:
    """The start and end of each task of a schedule, as `time_schedule` computes them.

    Attributes:
        starts: `starts[actor][step]` is the start of the task at position `step` of the actor's list, in the
            unit of the durations that `time_schedule` was given.
        ends: the ends of the tasks, with the same indices.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """The time at which the last task ends; 0 if there are no tasks."""
        return max((row[-1] for row in self.ends if row), default=0)


def time_schedule(tasks: Rows, durations: Durations = UNIT) -> ScheduleTiming:
    """Return the start and end of each task of a schedule.

    Every actor runs its list in order, each task as soon as the actor is free and the task's dependencies
    have ended.

    Args:
        tasks: one sequence of tasks per actor.
        durations: the time of each type of task, or a function from a task to its time. Transfers take no
            time.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    timeline = time_until_deadlock(tasks, durations)
    waits = find_deadlock(tasks, timeline)
    if waits:
        raise ScheduleError("the schedule deadlocks:\n" + "\n".join(f"  {wait}" for wait in waits))
    return timeline


def time_until_deadlock(tasks: Rows, durations: Durations = UNIT) -> ScheduleTiming:
    """Return the times of a schedule's tasks as `time_schedule` does, but raise no error if it deadlocks.

    Returns:
        The times of the tasks that run before the deadlock, or of all tasks if there is no deadlock.
    """
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
    """Number all tasks, and return for each task its number and the numbers of the tasks that it depends on.

    Numbers make this fast: large schedules have ten thousand tasks, and looking up a number in a
    dict takes a tenth of the time that looking up a `Task` takes.
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
    """A task that an actor of a deadlocked schedule can never start, and the task that it waits for.

    Attributes:
        actor: the actor that waits.
        step: the position of `task` in the actor's list.
        task: the task that cannot start.
        need: the task that has to end first.
        need_actor: the actor whose list contains `need`; None if no list does.
        need_step: the position of `need` in that list; None if no list contains it.
        head: the first task in the list of `need_actor` that cannot start; None if no list contains `need`.
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
    """Find the tasks that wait for one another in a cycle in a schedule that deadlocks.

    Args:
        tasks: one sequence of tasks per actor.
        timeline: the result of `time_until_deadlock` for `tasks`.

    Returns:
        One entry per actor of the cycle. If a task waits for a task that no list contains, the result has one
        entry, for the waiting task. Empty if all tasks run.
    """
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
    """Return all tasks with their actors in one topological order.

    The order is by start, with one unit of time per task, then by actor. The tasks of one actor are
    in the order of its list.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    starts = time_schedule(tasks).starts
    slots = [(start, actor, step) for actor, row in enumerate(starts) for step, start in enumerate(row)]
    return [(actor, tasks[actor][step]) for _, actor, step in sorted(slots)]


# ---------------------------------------------------------------- bubbles and memory


def bubble_fraction(tasks: Rows, durations: Durations = UNIT) -> float:
    """Return the fraction of time that the actors idle between the schedule's first task and its last.

    An actor without a task counts as idle for the whole time.

    Args:
        tasks: one sequence of tasks per actor.
        durations: the time of each type of task, or a function from a task to its time.
    """
    return idle_fraction(time_schedule(tasks, durations))


def idle_fraction(timing: ScheduleTiming) -> float:
    """Return the fraction of time that the actors idle, as `bubble_fraction` does, from known times."""
    busy = sum(map(sum, timing.ends)) - sum(map(sum, timing.starts))
    total = timing.makespan * len(timing.ends)
    return 1 - busy / total if total else 0.0


def idle_times(tasks: Rows, durations: Durations = UNIT) -> tuple[float, ...]:
    """Return, for each actor, how long the actor idles between its first task and its last.

    Papers call a schedule zero-bubble if all these times are 0. An actor can then begin the next step as soon
    as its last task of this step has ended, unless the actors all wait for one another at the end of a step.

    Args:
        tasks: one sequence of tasks per actor.
        durations: the time of each type of task, or a function from a task to its time.
    """
    timeline = time_schedule(tasks, durations)
    return tuple(
        sum(start - end for start, end in zip(starts[1:], ends[:-1], strict=True))
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    )


ACTIVATION_CHANGES: Mapping[TaskType, int] = MappingProxyType(
    {"fwd": 1, "bwd": -1, "bwd_input": 0, "bwd_weight": -1}
)
"""By how many activations each type of task changes those that its actor stores."""


def peak_activations(tasks: Rows) -> tuple[int, ...]:
    """Return for each actor the largest number of activations that it stores at one time.

    An activation is counted for each (stage, microbatch) pair whose forward the actor has run and whose
    backward it has not finished. A whole backward finishes with `bwd`, a split one with `bwd_weight`.
    """
    peaks = []
    for row in tasks:
        held = peak = 0
        for task in row:
            held += ACTIVATION_CHANGES[task.ty]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
