"""Define the schedule of a plan: an order of tasks for one number of microbatches and of actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpp_async.errors import PlanError, ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules import stage_actors
from jaxpp_async.schedules.torch_csv import KINDS, TASK
from jaxpp_async.schedules.validate import LETTERS, plural


@dataclass(frozen=True)
class PlannedSchedule:
    """A schedule whose order of tasks was planned for one step, valid for its microbatches and actors alone.

    Args:
        rows: the tasks of each actor, in order of execution.
        stages: the marks that are stage boundaries, counted from 0.
        name: the schedule's name in messages, such as `"Std1F1B(4)"` or `"searched"`.
    """

    rows: tuple[tuple[Task, ...], ...] = field(repr=False)
    stages: tuple[int, ...]
    name: str = "planned"

    @property
    def num_stages(self) -> int:
        """The number of stages, one more than there are boundaries."""
        return len(self.stages) + 1

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of the step that the schedule was made for."""
        return 1 + max(task.i for row in self.rows for task in row)

    @property
    def num_actors(self) -> int:
        """The number of actors that the schedule was made for."""
        return len(self.rows)

    @property
    def stage_actors(self) -> tuple[int, ...]:
        """The actor of each stage."""
        return stage_actors(self.rows)

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        """Return the planned tasks: one list per actor, in order of execution.

        Args:
            num_microbatches: the number of microbatches of the step.
            num_actors: the number of actors of the mesh.

        Raises:
            ScheduleError: the plan was made for another number of microbatches or actors.
        """
        asked = (num_microbatches, num_actors)
        if asked != (self.num_microbatches, self.num_actors):
            made = _counts(self.num_microbatches, self.num_actors)
            raise ScheduleError(
                f"this schedule was planned for {made}, and the step has {_counts(*asked)}; plan again for "
                "this step, or run the step that was planned"
            )
        return [list(row) for row in self.rows]


def _counts(num_microbatches: int, num_actors: int) -> str:
    return f"{plural(num_microbatches, 'microbatch', 'es')} on {plural(num_actors, 'actor')}"


def format_row(row: Sequence[Task]) -> str:
    """Return an actor's tasks as text, such as `"0F0 0F1 0B0"`: stage, kind and microbatch of each."""
    return " ".join(f"{task.stage}{LETTERS[task.ty]}{task.i}" for task in row)


def parse_row(text: str) -> tuple[Task, ...]:
    """Return the tasks of a text that `format_row` has made.

    Raises:
        PlanError: a word of the text is no task.
    """
    found = []
    for word in text.split():
        match = TASK.fullmatch(word)
        if match is None or match[2] not in KINDS:
            raise PlanError(f"{word!r} is no task of a plan")
        found.append(Task(int(match[3]), KINDS[match[2]], int(match[1])))
    return tuple(found)
