"""schedules.base: what every built-in schedule shares: the protocol, the checked counts, groups of neighbouring stages.
Pure order: never looks at a program, never validates a schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar, dataclass_transform, runtime_checkable

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task, TaskType

_T = TypeVar("_T")


@runtime_checkable
class Schedule(Protocol):
    """What `accumulate_grads` takes: the order in which each actor runs its tasks.

    A schedule of one's own is best a frozen dataclass: equal schedules then share one traced step.
    """

    @property
    def num_stages(self) -> int:
        """How many stages the loop body has: its `pipeline_yield`s plus one."""
        ...

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        """One list of tasks an actor, in order of execution."""
        ...


_ELSEWHERE = {
    "num_microbatches": "how many there are says the leading axis of the batch that the loop is called with; "
    "accumulate_grads(..., num_microbatches=) checks it",
    "num_actors": "the mesh says how many there are: RemoteMesh(num_actors)",
}
"""What no built-in schedule takes, though schedules elsewhere do."""


@dataclass_transform(frozen_default=True)
def frozen_schedule(cls: type[_T]) -> type[_T]:
    """A frozen dataclass that says where to give what a schedule does not take."""
    made = dataclass(frozen=True)(cls)
    init = made.__init__

    @functools.wraps(init)
    def checked(self: _T, *args: Any, **options: Any) -> None:
        for name in options:
            if name in _ELSEWHERE:
                raise TypeError(f"{type(self).__name__} has no option {name}=; {_ELSEWHERE[name]}")
        init(self, *args, **options)

    made.__init__ = checked
    return made


@frozen_schedule
class BuiltIn:
    """Args: num_stages: stages of the loop body, one more than its `pipeline_yield`s.

    Raises:
        ScheduleError: `num_stages` is not a positive int.
    """

    num_stages: int

    def __post_init__(self) -> None:
        check_count(f"{type(self).__name__}(num_stages=...)", self.num_stages)

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        """One list of tasks an actor, in order of execution; empty for actors beyond the number of stages.

        Args:
            num_microbatches: microbatches of one step, at least 1.
            num_actors: actors of the mesh, at least 1.

        Raises:
            ScheduleError: a count is not a positive int.
        """
        check_count("num_microbatches", num_microbatches)
        check_count("num_actors", num_actors)
        return self._rows(num_microbatches, num_actors)

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        raise NotImplementedError


def check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScheduleError(f"{name}: expected a positive int, got {value!r}")


def neighbouring_stages(num_stages: int, num_actors: int) -> list[range]:
    """Each actor's stages when stage s is on actor s*A//S."""
    bounds = [-(-actor * num_stages // num_actors) for actor in range(num_actors + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def through(stages: range, ty: TaskType, i: int) -> list[Task]:
    """Microbatch `i` through neighbouring `stages` that run as one: the last stage first, but for a forward."""
    return [Task(i, ty, stage) for stage in (stages if ty == "fwd" else reversed(stages))]


def flat(parts: Iterable[list[Task]]) -> list[Task]:
    return [task for part in parts for task in part]
