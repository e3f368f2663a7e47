"""Define `Auto`, the schedule that a mesh plans after it has measured a few steps.

Until then a loop with an `Auto` runs under a `WarmUp`, which is a `Std1F1B` on a balanced cut. The compiler
makes one from the other by `schedule_in_use`, since only the compiler knows a loop's marks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxpp_async.base.quantities import parse_bytes
from jaxpp_async.errors import PlanError, ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.base import BALANCED, check_count
from jaxpp_async.schedules.builtin import Std1F1B


@dataclass(frozen=True)
class Auto:
    """A schedule that is planned at compile time from measured costs.

    The first steps of a training are measured, under `Std1F1B` on the cut with the least work in the largest
    stage. Then a call of the step plans as `mesh.plan` does, and the step runs by this plan. The log says
    what was chosen, and `step.plan` has the plan. Nothing is run twice. See docs/planning.md.

    Args:
        num_stages: the number of stages that the plan must have; None for any. While steps are measured there
            are as many stages, or one an actor; with too few marks for that, every mark is a boundary.
        memory: the memory of each device that the step may use, in bytes or as text such as `"70GB"`; None
            for any.

    Raises:
        ScheduleError: `num_stages` is not a positive int or None, or `memory` is no number of bytes.
    """

    num_stages: int | None = None
    memory: int | str | None = None

    def __post_init__(self) -> None:
        if self.num_stages is not None:
            check_count("Auto(num_stages=...)", self.num_stages)
        try:
            parse_bytes(1 if self.memory is None else self.memory)
        except PlanError as error:
            raise ScheduleError(f"Auto(memory=...): {error}") from None

    @property
    def stages(self) -> str:
        """The cut while steps are measured, which schedules without `stages` keep in `with_schedule`."""
        return BALANCED

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        """Return the lists of tasks while steps are measured, for a loop with enough marks.

        Args:
            num_microbatches: the number of microbatches of one step, at least 1.
            num_actors: the number of actors of the mesh, at least 1.
        """
        return Std1F1B(self.num_stages or num_actors).tasks(num_microbatches, num_actors)


@dataclass(frozen=True, repr=False)
class WarmUp(Std1F1B):
    """The schedule of a loop with an `Auto` while steps are measured.

    Args:
        num_stages, stages: as for `Std1F1B`.
        auto: the schedule that the user wrote.
    """

    auto: Auto = field(default=Auto(), kw_only=True)

    def __repr__(self) -> str:
        return f"{self.plain} for jpp.Auto"

    @property
    def plain(self) -> Std1F1B:
        """The schedule under which the first steps run."""
        return Std1F1B(self.num_stages, stages=self.stages)


def schedule_in_use(schedule: Any, num_marks: int, num_actors: int) -> Any:
    """Return the schedule by which a loop is compiled: a `WarmUp` for an `Auto`, any other as it is.

    Args:
        schedule: the schedule of the loop.
        num_marks: the number of marks (calls of `pipeline_yield`) of the loop's body.
        num_actors: the number of actors of the mesh.
    """
    if not isinstance(schedule, Auto):
        return schedule
    count = min(schedule.num_stages or num_actors, num_marks + 1)
    return WarmUp(count, stages=BALANCED, auto=schedule)
