"""Define a schedule that was planned for one step, and check that it is used for no other step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpp_async.errors import PlanError, ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.drawing import DrawableSchedule
from jaxpp_async.schedules.timing import stage_actors
from jaxpp_async.schedules.validate import plural


@dataclass(frozen=True)
class PlannedSchedule(DrawableSchedule):
    """A schedule whose order of tasks was planned for one step, valid for its microbatches and actors alone.

    Args:
        rows: the tasks of each actor, in order of execution.
        stages: the marks that are stage boundaries, counted from 0.
        name: the schedule's name in messages, such as `"Std1F1B(4)"` or `"searched"`.
        mark_names: the name of each mark of the loop that the schedule was made for, None for a mark without
            a name; None if the schedule is for any loop.
    """

    rows: tuple[tuple[Task, ...], ...] = field(repr=False)
    stages: tuple[int, ...]
    name: str = "planned"
    mark_names: tuple[str | None, ...] | None = None

    def __repr__(self) -> str:
        return f"planned ({self.name})"

    @property
    def num_stages(self) -> int:
        """The number of stages, one more than there are boundaries."""
        return len(self.stages) + 1

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of the step that the schedule was made for."""
        return 1 + max((task.i for row in self.rows for task in row), default=-1)

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

    def check_marks(self, names: Sequence[str | None], where: str) -> None:
        """Check that the schedule was planned for a loop with these marks.

        A mark that has got a name since then is accepted.

        Args:
            names: the name of each mark of the loop, None for a mark without a name.
            where: the user's source line of the loop.

        Raises:
            PlanError: the loop has another number of marks, or a mark of another name.
        """
        if self.mark_names is None:
            return
        made, has = self.mark_names, tuple(names)
        if len(made) != len(has):
            raise PlanError(
                f"this plan was made for a step with {plural(len(made), 'mark')} (calls of pipeline_yield), "
                f"and the loop at {where} has {len(has)}; plan again for this step"
            )
        for k, (planned, name) in enumerate(zip(made, has, strict=True)):
            if planned not in (None, name):
                raise PlanError(
                    f"this plan was made for a step whose mark {k} has the name {planned!r}, and in the loop "
                    f"at {where} mark {k} has {'no name' if name is None else f'the name {name!r}'}; plan "
                    "again for this step"
                )


def check_one_loop(schedules: Sequence[tuple[object, str]]) -> None:
    """Check that at most one loop of a step has a schedule that was planned for a step with one loop.

    Args:
        schedules: the schedule of each loop, and the user's source line of the loop.

    Raises:
        PlanError: several loops have such a schedule.
    """
    lines = [
        line
        for schedule, line in schedules
        if isinstance(schedule, PlannedSchedule) and schedule.mark_names is not None
    ]
    if len(lines) > 1:
        raise PlanError(
            f"this plan was made for a step with one loop, and the step has {len(lines)} loops, at "
            f"{' and '.join(lines)}; give each loop a schedule of its own instead of the plan"
        )


def _counts(num_microbatches: int, num_actors: int) -> str:
    return f"{plural(num_microbatches, 'microbatch', 'es')} on {plural(num_actors, 'actor')}"
