"""Draw a schedule: each task of each actor, with the activations that the actor holds.

No times are known, so a whole backward takes twice as long as any other task.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import TaskType
from jaxpp_async.program.task_label import TASK_TRAITS
from jaxpp_async.schedules.timing import ACTIVATION_CHANGES, idle_fraction, time_schedule
from jaxpp_async.schedules.validate import plural, resolve
from jaxpp_async.view import Cell, Drawable, Drawing, Row

if TYPE_CHECKING:
    from jaxpp_async.schedules.base import Schedule

FORWARDS: Mapping[TaskType, float] = MappingProxyType({"fwd": 1, "bwd": 2, "bwd_input": 1, "bwd_weight": 1})
"""The time of each type of task, in forwards."""

MOST_TASKS = 500_000
"""The number of tasks up to which a schedule is drawn, which takes about 20 seconds."""

USUAL_TASKS = 50_000
"""The number of tasks at most if the number of microbatches is not given, where one microbatch allows it."""


class DrawableSchedule(Drawable):
    """A base class of schedules, which gives them pictures.

    Attributes:
        stages_per_actor: the numbers of stages an actor that are worth trying, the usual one first.
    """

    stages_per_actor: ClassVar[tuple[int, ...]] = (1,)

    def to_drawing(self, **options: Any) -> Drawing:
        """Return the schedule as a drawing; the options are those of `draw_schedule`."""
        return draw_schedule(self, **options)  # pyright: ignore[reportArgumentType] # a subclass is one


def draw_schedule(
    schedule: Schedule, num_microbatches: int | None = None, num_actors: int | None = None
) -> Drawing:
    """Return any schedule as a drawing.

    Args:
        schedule: the schedule, of this package or of the user.
        num_microbatches: the number of microbatches; None: twice the number of actors, but fewer for a
            schedule that would have more than `USUAL_TASKS` tasks.
        num_actors: the number of actors; None: as many as suit the schedule.

    Raises:
        ScheduleError: the schedule is not valid for these numbers, or has more than `MOST_TASKS` tasks.
    """
    given: Any = schedule  # one of a plan has the only numbers for which it is valid
    usual = getattr(given, "stages_per_actor", (1,))[0]
    num_stages: int = given.num_stages or 0  # `check_size` refuses a schedule that has no stages yet
    actors: int = num_actors or getattr(given, "num_actors", 0) or max(1, num_stages // usual)
    usual_microbatches = min(2 * actors, max(1, USUAL_TASKS // (2 * max(1, num_stages))))
    microbatches: int = num_microbatches or getattr(given, "num_microbatches", 0) or usual_microbatches
    check_size(schedule, microbatches)
    tasks = resolve(
        schedule,
        num_stages=schedule.num_stages,
        num_microbatches=microbatches,
        num_actors=actors,
    )
    timing = time_schedule(tasks, FORWARDS)
    rows = []
    for actor, row in enumerate(tasks):
        cells, memory, held = [], [], 0
        for task, start, end in zip(row, timing.starts[actor], timing.ends[actor], strict=True):
            cells.append(Cell(start, end, TASK_TRAITS[task.ty].kind, str(task.i), str(task)))
            held += ACTIVATION_CHANGES[task.ty]
            memory.append((start if task.ty == "fwd" else end, float(held)))
        rows.append(Row(f"actor {actor}", tuple(cells), memory=tuple(memory)))
    title = (
        f"{schedule!r}: {plural(microbatches, 'microbatch', 'es')} on {plural(actors, 'actor')}, "
        f"bubble {idle_fraction(timing):z.0%}"
    )
    return Drawing(title, tuple(rows), "forwards", "activations")


def check_size(schedule: Schedule, num_microbatches: int) -> None:
    """Check that a schedule is not too large to be drawn.

    Args:
        schedule: the schedule.
        num_microbatches: the number of microbatches.

    Raises:
        ScheduleError: it has too many tasks, or no number of stages yet.
    """
    given: Any = schedule
    if given.num_stages is None:
        raise ScheduleError(
            f"{schedule!r} has no stages before a step is planned; name a schedule, such as Std1F1B(4)"
        )
    each = 2 * schedule.num_stages  # tasks of a microbatch, at least
    if each * num_microbatches > MOST_TASKS:
        fewer = (
            f"{plural(MOST_TASKS // each, 'microbatch', 'es')} or fewer"
            if each <= MOST_TASKS
            else "fewer stages"
        )
        raise ScheduleError(
            f"{plural(schedule.num_stages, 'stage')} and {plural(num_microbatches, 'microbatch', 'es')} are "
            f"{each * num_microbatches:,} tasks, and at most {MOST_TASKS:,} are drawn; give {fewer}"
        )
