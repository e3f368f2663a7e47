"""Time task lists with transfers and memory: the step of one `Assignment`, many thousand times a second.

`TaskTable` numbers the tasks of a cut and a placement once. Orders are then lists of ints, and one evaluation
looks at each task once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite

from jaxpp_async.errors import CostError, ScheduleError
from jaxpp_async.planning.problem import Assignment, PipelineProblem, StageCosts
from jaxpp_async.program.instructions import ActorId, Task, TaskType

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD = range(4)
KINDS: tuple[TaskType, ...] = ("fwd", "bwd_input", "bwd_weight", "bwd")
_CODES = {ty: kind for kind, ty in enumerate(KINDS)}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The time and memory of an assignment.

    Attributes:
        step_s: the time from the first task's start to the last task's end, in seconds.
        peak_bytes: the largest memory of each actor: static bytes and what forwards keep.
        busy_s: the time that each actor spends in tasks.
        fits: whether no actor needs more than its cap.
    """

    step_s: float
    peak_bytes: tuple[float, ...]
    busy_s: tuple[float, ...]
    fits: bool


class TaskTable:
    """The tasks of one cut and placement as numbers, with what an evaluation needs to know of each.

    Task number (kind * S + stage) * M + microbatch, for S stages, M microbatches and the kinds `FORWARD`,
    `INPUT_GRADIENT`, `WEIGHT_GRADIENT` and `BACKWARD`. Numbers of the last two kinds are not both used for
    one stage and microbatch.

    Args:
        stages: the costs of the stages.
        actors: the actor of each stage.
        num_microbatches: the number of microbatches.
        num_actors: the number of actors.

    Attributes:
        durations: the time of each task, by number.
        needs: the number of the task whose result each task receives; the number of tasks for none.
        delays: the time of that transfer.
        changes: the bytes by which the actor's memory changes: at the start of a forward, at the end of any
            other task.
    """

    def __init__(
        self, stages: StageCosts, actors: Sequence[ActorId], num_microbatches: int, num_actors: int
    ) -> None:
        self.stages, self.actors = stages, tuple(actors)
        self.num_microbatches, self.num_actors = num_microbatches, num_actors
        num, last = len(stages), len(stages) - 1
        none = 4 * num * num_microbatches
        hops = stages.hops(actors)
        kept, weight_kept = stages.kept_bytes, stages.weight_kept_bytes
        per_kind = (
            stages.forward_s,
            stages.input_gradient_s,
            stages.weight_gradient_s,
            tuple(map(stages.backward_s, range(num))),
        )
        changes = (
            kept,
            tuple(left - all_ for left, all_ in zip(weight_kept, kept, strict=True)),
            tuple(-left for left in weight_kept),
            tuple(-all_ for all_ in kept),
        )
        self.durations: list[float] = []
        self.changes: list[float] = []
        self.delays: list[float] = []
        self.needs: list[int] = []
        every = range(num_microbatches)
        for kind, times in enumerate(per_kind):
            for stage in range(num):
                if kind == FORWARD:
                    source, delay = stage - 1, hops[stage - 1] if stage else 0.0
                elif kind == WEIGHT_GRADIENT or stage == last:
                    source, delay = -1, 0.0
                else:
                    # Where the next stage's backward is whole, `end_times` enters its end under this number.
                    source, delay = num + stage + 1, hops[stage]
                first = source * num_microbatches
                self.needs += [none if source < 0 else first + i for i in every]
                self.delays += [delay] * num_microbatches
                self.durations += [times[stage]] * num_microbatches
                self.changes += [changes[kind][stage]] * num_microbatches
        self.static_bytes = stages.static_bytes_of_actors(actors, num_actors)

    def number(self, task: Task) -> int:
        """Return the number of a task."""
        return task_number(task, len(self.stages), self.num_microbatches)

    def task(self, number: int) -> Task:
        """Return the task of a number."""
        place, i = divmod(number, self.num_microbatches)
        kind, stage = divmod(place, len(self.stages))
        return Task(i, KINDS[kind], stage)

    def rows_of(self, rows: Sequence[Sequence[Task]]) -> list[list[int]]:
        """Return the numbers of lists of tasks."""
        return [[self.number(task) for task in row] for row in rows]

    def tasks_of(self, rows: Sequence[Sequence[int]]) -> tuple[tuple[Task, ...], ...]:
        """Return the tasks of lists of numbers."""
        return tuple(tuple(self.task(number) for number in row) for row in rows)

    def end_times(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the end of each task when every actor runs its list in order, each task as early as it can.

        A list must have each task behind the tasks of the same actor that it depends on.

        Args:
            rows: one list of task numbers per actor.

        Returns:
            The ends by task number, and one entry more. Tasks that are not in `rows`, or that wait for each
            other in a circle, have a negative end. The end of a whole backward is entered as that of the
            input gradient, too.
        """
        durations, needs, delays = self.durations, self.needs, self.delays
        none = len(durations)
        whole, as_input = 3 * none // 4, -none // 2
        ends = [-1.0] * none
        ends.append(0.0)
        waiting: dict[int, list[ActorId]] = {}
        position, clock = [0] * len(rows), [0.0] * len(rows)
        runnable = list(range(len(rows)))
        while runnable:
            actor = runnable.pop()
            now, row = clock[actor], rows[actor]
            for step in range(position[actor], len(row)):
                number = row[step]
                need = needs[number]
                end = ends[need]
                if end < 0:
                    position[actor], clock[actor] = step, now
                    waiting.setdefault(need, []).append(actor)
                    break
                end += delays[number]
                if end > now:
                    now = end
                now += durations[number]
                ends[number] = now
                if number >= whole:
                    number += as_input
                    ends[number] = now
                if number in waiting:
                    runnable += waiting.pop(number)
            else:
                position[actor], clock[actor] = len(row), now
        return ends

    def step_s(self, rows: Sequence[Sequence[int]]) -> float:
        """Return the time of the step, in seconds; infinite if the lists deadlock."""
        ends = self.end_times(rows)
        lasts = [ends[row[-1]] for row in rows if row]
        return max(lasts, default=0.0) if min(lasts, default=0.0) >= 0 else float("inf")

    def peak_bytes(self, rows: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Return the largest memory of each actor."""
        changes = self.changes.__getitem__
        return tuple(
            static + max(0.0, *accumulate(map(changes, row))) if row else static
            for static, row in zip(self.static_bytes, rows, strict=True)
        )


def task_number(task: Task, num_stages: int, num_microbatches: int) -> int:
    """Return the number of a task in any `TaskTable` of so many stages and microbatches."""
    return (_CODES[task.ty] * num_stages + task.stage) * num_microbatches + task.i


def table_of(problem: PipelineProblem, assignment: Assignment) -> TaskTable:
    """Return the table of an assignment's tasks."""
    return TaskTable(
        problem.stages(assignment.cut), assignment.actors, problem.num_microbatches, problem.num_actors
    )


def evaluate(problem: PipelineProblem, assignment: Assignment) -> Evaluation:
    """Time an assignment and count its memory.

    Args:
        problem: the layers and the machine.
        assignment: valid task lists of the problem's microbatches and actors.

    Raises:
        ScheduleError: the lists deadlock.
        CostError: a task or a transfer takes no finite time.
    """
    table = table_of(problem, assignment)
    rows = table.rows_of(assignment.rows)
    step_s = table.step_s(rows)
    if not isfinite(step_s):
        if not all(map(isfinite, table.durations)):
            raise CostError("a task takes no finite time by the costs of the layers; correct the costs")
        raise ScheduleError(f"the task lists of {assignment.name or 'the assignment'} deadlock")
    peaks = table.peak_bytes(rows)
    busy = tuple(sum(map(table.durations.__getitem__, row)) for row in rows)
    return Evaluation(step_s, peaks, busy, fits(peaks, problem.caps))


def fits(peak_bytes: Sequence[float], caps: Sequence[float]) -> bool:
    """Return whether no actor needs more than its cap; the last digits of a sum of floats do not count."""
    return all(peak <= cap * (1 + 1e-9) for peak, cap in zip(peak_bytes, caps, strict=True))
