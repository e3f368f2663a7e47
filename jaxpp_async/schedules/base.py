"""Define the protocol of schedules, and helpers that several built-in schedules share."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Protocol, SupportsIndex, TypeVar, runtime_checkable

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task, TaskType
from jaxpp_async.schedules.drawing import DrawableSchedule

_T = TypeVar("_T")


@runtime_checkable
class Schedule(Protocol):
    """A schedule: the order in which each actor runs its tasks, passed by the user to `accumulate_grads`.

    A user's own schedule is one class in any file; nothing has to be registered. The following example runs
    one microbatch at a time, with stage s on actor s % num_actors:

        from dataclasses import dataclass, field, fields
        from jaxpp_async.schedules import Task

        @dataclass(frozen=True)
        class OneAtATime:
            num_stages: int

            def tasks(self, num_microbatches, num_actors):
                rows = [[] for _ in range(num_actors)]
                for i in range(num_microbatches):
                    forward = [Task(i, "fwd", stage) for stage in range(self.num_stages)]
                    backward = [Task(i, "bwd", task.stage) for task in reversed(forward)]
                    for task in forward + backward:
                        rows[task.stage % num_actors].append(task)
                return rows

        accumulate_grads(grads_of, OneAtATime(num_stages=4))(batch)

    A frozen dataclass is best: equal schedules then share one traced step. Any object with these two members
    can be used, whether its class is a subclass of this one or not. `resolve` checks the lists before a step
    is compiled and names the rule of docs/schedules.md that is broken; `format_grid` draws the lists.

    A schedule may have a third member, `stages`: the marks (calls of `pipeline_yield`) of the loop body that
    are stage boundaries, as `BuiltIn` describes. Without it, or if it is None, every mark is a boundary.
    """

    @property
    def num_stages(self) -> int:
        """The number of stages of the loop body.

        Without `stages` this is the number of the body's `pipeline_yield`s plus one.
        """
        ...

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        """Return one list of tasks per actor, each in order of execution.

        Args:
            num_microbatches: the number of microbatches of one step, at least 1.
            num_actors: the number of actors of the mesh, at least 1.
        """
        ...


_GIVEN_ELSEWHERE = {
    "num_microbatches": "how many there are says the leading axis of the batch that the loop is called with; "
    "accumulate_grads(..., num_microbatches=) checks it",
    "num_actors": "the mesh says how many there are: RemoteMesh(num_actors)",
}
"""Options that schedules of other libraries take and ours do not, each with advice where to give its number
instead."""


def advise_on_options(cls: type[_T]) -> type[_T]:
    """Make a schedule's constructor reject options that other objects take, and say where to give them.

    These options are the keys of `_GIVEN_ELSEWHERE`, such as `num_actors`, which is an argument of
    `RemoteMesh`. The constructor raises a `TypeError` for these options, also in subclasses that inherit the
    constructor.

    Returns:
        The class itself, with the changed constructor.
    """
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: _T, *args: Any, **options: Any) -> None:
        for name in options:
            if name in _GIVEN_ELSEWHERE:
                raise TypeError(f"{type(self).__name__} has no option {name}=; {_GIVEN_ELSEWHERE[name]}")
        init(self, *args, **options)

    cls.__init__ = checked
    return cls


@advise_on_options
@dataclass(frozen=True)
class BuiltIn(DrawableSchedule):
    """A base class of the built-in schedules, which checks the numbers of stages, microbatches and actors.

    A subclass implements `_rows`, which returns one list of tasks per actor.

    Args:
        num_stages: the number of stages of the loop body; without `stages` one more than its
            `pipeline_yield`s.
        stages: the marks (calls of `pipeline_yield`) that are stage boundaries, by their numbers or names. In
            the order of the forward, from 0. The other marks have no effect. `"balanced"` chooses the marks
            by the work between them. None: every mark is a boundary.

    Raises:
        ScheduleError: `num_stages` is not a positive int, or `stages` is no list, `"balanced"` or None.
    """

    num_stages: int
    stages: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_count(f"{type(self).__name__}(num_stages=...)", self.num_stages)
        frozen = freeze_stages(self.stages, f"{type(self).__name__}(stages=...)")
        object.__setattr__(self, "stages", frozen)

    def __init_subclass__(cls) -> None:
        # A dataclass makes no `__repr__` for a class that has one: that of this class leaves out `stages`.
        if "__repr__" not in vars(cls):
            cls.__repr__ = BuiltIn.__repr__

    def __repr__(self) -> str:
        return repr_without(self, stages=None)

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        """Return one list of tasks per actor, each in order of execution.

        An actor beyond the number of stages gets an empty list.

        Args:
            num_microbatches: the number of microbatches of one step, at least 1.
            num_actors: the number of actors of the mesh, at least 1.

        Raises:
            ScheduleError: a count is not a positive int.
        """
        check_count("num_microbatches", num_microbatches)
        check_count("num_actors", num_actors)
        return self._rows(num_microbatches, num_actors)

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        raise NotImplementedError


BALANCED = "balanced"


def freeze_stages(stages: Any, where: str) -> Any:
    """Return the `stages` of a schedule as a hashable value: a tuple, `"balanced"` or None.

    Args:
        stages: the value that the user gave.
        where: the beginning of the error message.

    Raises:
        ScheduleError: `stages` is no list, `"balanced"` or None. The entries of a list are not checked.
    """
    if stages is None or (isinstance(stages, str) and stages == BALANCED):
        return stages
    if isinstance(stages, str | bytes | bytearray | Mapping) or not isinstance(stages, Iterable):
        raise ScheduleError(
            f"{where}: stages is {stages!r} (type {type(stages).__name__}); write a list of marks, such as "
            "[5, 11, 17], or 'balanced', or None for every mark"
        )
    return tuple(
        s.__index__() if isinstance(s, SupportsIndex) and not isinstance(s, bool) else s for s in stages
    )


def repr_without(schedule: Any, **defaults: Any) -> str:
    """Return the text of a dataclass without the fields that `repr` leaves out or that have a default value.

    Args:
        schedule: the dataclass.
        defaults: the default values of fields, by name.
    """
    shown = [
        f"{f.name}={value!r}"
        for f in fields(schedule)
        if f.repr and (value := getattr(schedule, f.name)) is not defaults.get(f.name, ...)
    ]
    return f"{type(schedule).__qualname__}({', '.join(shown)})"


def check_count(name: str, value: object) -> None:
    """Check that a count is a positive int.

    Args:
        name: the name of the count, for the error message.
        value: the value that the user gave.

    Raises:
        ScheduleError: it is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScheduleError(f"{name}: expected a positive int, got {value!r}")


def neighbouring_stages(num_stages: int, num_actors: int) -> list[range]:
    """Divide the stages into one group of neighbouring stages per actor, and return the range of each group.

    With S stages and A actors, stage s is on actor s*A//S, so the groups are as equal in size as possible.
    With fewer stages than actors it is on actor s, so that neighbours are on neighbouring actors, which are
    likely to be on one host; the groups of the other actors are empty.
    """
    used = min(num_stages, num_actors)
    return divided_stages(num_stages, used) + [range(num_stages, num_stages)] * (num_actors - used)


def divided_stages(num_stages: int, num_parts: int) -> list[range]:
    """Divide the stages into parts of neighbouring stages, and return the range of each part.

    Stage s is in part s*P//S for S stages and P parts. If there are fewer stages than parts, some parts
    between others are empty.
    """
    bounds = [-(-part * num_stages // num_parts) for part in range(num_parts + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def tasks_through(stages: range, ty: TaskType, i: int) -> list[Task]:
    """Return the tasks that run microbatch `i` through all stages of a range, one after the other.

    Args:
        stages: the range of stages.
        ty: the type of all the tasks. Forwards visit the stages in ascending order, every type of backward in
            descending order.
        i: the index of the microbatch.
    """
    return [Task(i, ty, stage) for stage in (stages if ty == "fwd" else reversed(stages))]


def flat(parts: Iterable[list[Task]]) -> list[Task]:
    """Join lists of tasks into one list."""
    return [task for part in parts for task in part]
