"""Choose which marks (calls of `pipeline_yield`) of a loop's body are the boundaries of its stages.

A model may have a mark behind every layer. The `stages` of a schedule say which of the marks end a stage: a
list of marks, or `"balanced"`, or None for every mark. Marks are counted from 0, in the order in which the
forward of the loop's body calls `pipeline_yield`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, groupby, pairwise
from typing import Any, NamedTuple, NoReturn

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.schedules.base import BALANCED, freeze_stages
from jaxpp_async.schedules.planned import PlannedSchedule
from jaxpp_async.schedules.timing import num_stages_of
from jaxpp_async.schedules.validate import as_int, describe_schedule, describe_value, plural


class Mark(NamedTuple):
    """A call of `pipeline_yield` in a loop's body.

    Args:
        line: `file:line` of the call in the user's code.
        name: the name that the user gave to it, or None.
    """

    line: str
    name: str | None = None

    def __str__(self) -> str:
        return self.line if self.name is None else f"{self.line} {self.name!r}"


@dataclass(frozen=True)
class Cut:
    """The marks of a loop's body that are stage boundaries, if a schedule named them.

    Args:
        marks: all marks, in the order of the forward.
        boundaries: the numbers of the marks that end a stage, ascending.
        shares: the share of each stage in the work of the loop's body; empty unless the cut was chosen by
            work.
    """

    marks: tuple[Mark, ...]
    boundaries: tuple[int, ...]
    shares: tuple[float, ...] = ()

    @property
    def boundary_marks(self) -> list[str]:
        """The number and the source line of each mark that ends a stage, such as `"5 (model.py:41)"`."""
        return [f"{k} ({self.marks[k]})" for k in self.boundaries]

    @property
    def stage_ends(self) -> str:
        """Text that says behind which mark each stage ends, and how a balanced cut divides the work.

        A source line is given once, if several boundaries in a row are there (a mark inside a scan).
        """
        texts, line = list[str](), None
        for stage, k in enumerate(self.boundaries):
            mark, first = self.marks[k], not stage
            details = ["counted from 0"] if first else []
            details += [repr(mark.name)] if mark.name is not None else []
            details += [mark.line] if mark.line != line else []
            line = mark.line
            text = f"stage {stage}{' ends' * first} behind mark {k}{f' of {len(self.marks)}' * first}"
            texts.append(f"{text} ({'; '.join(details)})" if details else text)
        named = ", ".join(texts) or f"one stage, with {plural(len(self.marks), 'mark')} inside it"
        return f"{named}; {self._balance}" if self.shares else named

    @property
    def _balance(self) -> str:
        return f"balanced: the stages have {', '.join(f'{share:z.1%}' for share in self.shares)} of the work"

    def __str__(self) -> str:
        chosen = ", ".join(str(k) for k in self.boundaries) or "none"
        text = f"{chosen} of {len(self.marks)} (counted from 0)"
        return f"{text}, {self._balance}" if self.shares else text


def balanced_cut_on(costs: Sequence[int], actors: Sequence[ActorId]) -> tuple[int, ...]:
    """Divide segments into stages of neighbouring segments so that the busiest actor has little work.

    If each actor has one stage, this is `balanced_cut`. Else neighbouring boundaries of that cut move
    together by a segment, as long as the busiest of the actors concerned gets less work, or equally busy
    actors get a smaller largest stage. The result is never worse than the cut that it begins with; of small
    cuts nine in ten are the best.

    Args:
        costs: the cost of each segment between two marks, at least 0; one more than there are marks.
        actors: the actor of each stage, by stage index.

    Returns:
        The marks that end a stage, ascending: mark k is behind segment k.
    """
    boundaries = balanced_cut(costs, len(actors))
    if len(set(actors)) in (1, len(actors)):
        return boundaries
    before = list(accumulate(costs, initial=0))
    bounds = [0, *(k + 1 for k in boundaries), len(costs)]
    works = [before[end] - before[first] for first, end in pairwise(bounds)]
    loads = dict.fromkeys(actors, 0)
    for actor, work in zip(actors, works, strict=True):
        loads[actor] += work

    def largest_first(stages: range) -> tuple[list[int], list[int]]:
        """Return the work of the actors of some stages, and of these stages: the less, the better the cut."""
        concerned = {actors[stage] for stage in stages}
        return (
            sorted((loads[actor] for actor in concerned), reverse=True),
            sorted((works[stage] for stage in stages), reverse=True),
        )

    def move(first: int, end: int, step: int) -> None:
        for k in range(first, end):
            moved = before[bounds[k] + step] - before[bounds[k]]
            bounds[k] += step
            for stage, change in ((k - 1, moved), (k, -moved)):
                works[stage] += change
                loads[actors[stage]] += change

    is_better = True
    while is_better:
        is_better = False
        for first, end in combinations(range(1, len(bounds)), 2):
            for step in (-1, 1):
                if bounds[first - 1] == bounds[first] + step or bounds[end - 1] + step == bounds[end]:
                    continue  # a stage would be empty
                stages = range(first - 1, end)
                now = largest_first(stages)
                move(first, end, step)
                if largest_first(stages) < now:
                    is_better = True
                else:
                    move(first, end, -step)
    return tuple(bound - 1 for bound in bounds[1:-1])


def balanced_cut(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Divide segments into stages of neighbouring segments so that the largest stage costs least.

    Of the cuts with the least largest stage, the one with the least sum of squared costs is chosen; of
    several such cuts, the one whose boundaries are latest, so that an early stage is the larger one.

    Args:
        costs: the cost of each segment between two marks, at least 0; one more than there are marks. Ints are
            computed with exactly.
        num_stages: the number of stages, from 1 to the number of segments.

    Returns:
        The marks that end a stage, ascending: mark k is behind segment k.
    """
    count = len(costs)
    assert 1 <= num_stages <= count
    before = list(accumulate(costs, initial=0))
    infinite = float("inf")
    # The keys are compared in this order: largest stage, then sum of squares. For each number of stages,
    # `largest[i]` is the cost of the largest stage if the segments from i on are divided best.
    largest = [before[count] - before[i] for i in range(count)]
    for stages in range(2, num_stages + 1):
        previous, largest = largest, [infinite] * count
        for i in range(count - stages + 1):
            for j in range(i + 1, count - stages + 2):
                first = before[j] - before[i]
                largest[i] = min(largest[i], max(first, previous[j]))
                if first > largest[i]:
                    break
    limit = largest[0]

    def square(i: int, j: int) -> float:
        cost = before[j] - before[i]
        return cost * cost if cost <= limit else infinite

    squares = [square(i, count) for i in range(count)]
    ends: list[list[int]] = []
    for stages in range(2, num_stages + 1):
        previous, squares, chosen = squares, [infinite] * count, [count] * count
        for i in range(count - stages + 1):
            for j in range(i + 1, count - stages + 2):
                if before[j] - before[i] > limit:
                    break
                if (total := square(i, j) + previous[j]) <= squares[i]:
                    squares[i], chosen[i] = total, j
        ends.append(chosen)
    boundaries, i = list[int](), 0
    for chosen in reversed(ends):
        i = chosen[i]
        boundaries.append(i - 1)
    return tuple(boundaries)


# ---------------------------------------------------------------- the stages of a schedule


def stages_of(schedule: Any, written: Any = None) -> Any:
    """Return the `stages` that a loop is to be cut at; None if every mark is a boundary.

    Args:
        schedule: the schedule of the loop.
        written: the schedule that the user's code gives to the loop, if another one takes its place. Its
            `stages` count if `schedule` has none.
    """
    for each in (schedule, written):
        if not isinstance(each, type) and (stages := getattr(each, "stages", None)) is not None:
            return stages
    return None


def num_stages_asked(schedule: Any) -> int | None:
    """Return the number of stages of a schedule; None if it has no valid number, which `resolve` reports."""
    if not isinstance(schedule, list | tuple):
        return as_int(getattr(schedule, "num_stages", None))
    try:
        return num_stages_of(schedule)
    except (AttributeError, TypeError):  # not lists of tasks
        return None


def check_stages(
    stages: Any, marks: Sequence[Mark], *, num_stages: int, schedule: Any, where: str
) -> tuple[int, ...] | None:
    """Check the `stages` of a schedule, and return the numbers of the marks that they name.

    Args:
        stages: a list of marks by number or name, or `"balanced"`.
        marks: the marks of the loop's body.
        num_stages: the number of stages of the schedule.
        schedule: the schedule, for error messages.
        where: the user's source line, such as `"train.py:41"`, which begins each error message.

    Returns:
        The numbers of the marks, ascending; None for `"balanced"`.

    Raises:
        ScheduleError: `stages` is no list of marks of the loop's body, in ascending order and one less than
            the schedule has stages; or the loop's body has too few marks for a balanced cut.
        PlanError: the schedule was planned for a loop with other marks.
    """
    if isinstance(schedule, PlannedSchedule):
        schedule.check_marks([mark.name for mark in marks], where)
    check = _Check(marks, f"{where}: {describe_schedule(schedule)}")
    most = len(marks) + 1
    if num_stages > most:
        check.fail(
            f"it has {plural(num_stages, 'stage')}, and the {plural(len(marks), 'pipeline_yield')} of the "
            f"loop body make {most} at most",
            f"make a schedule of at most {plural(most, 'stage')}, or call pipeline_yield at least "
            f"{plural(num_stages - 1, 'time')}",
        )
    frozen = freeze_stages(stages, check.prefix)
    if frozen == BALANCED:
        return None
    numbers = [check.find(entry, position) for position, entry in enumerate(frozen or ())]
    for first, second in pairwise(numbers):
        if first >= second:
            wrong = f"stages names mark {second} " + ("twice" if first == second else f"behind mark {first}")
            check.fail(wrong, f"write each mark once, in ascending order: stages={sorted(set(numbers))}")
    if (count := len(numbers)) != num_stages - 1:
        made = plural(count + 1, "stage")
        check.fail(
            f"stages names {plural(count, 'mark')} for {made}, and the schedule has {num_stages}",
            f"name {plural(num_stages - 1, 'mark')}, or make a schedule of {made}",
        )
    return tuple(numbers)


class _Check(NamedTuple):
    """The context of one check of `stages`: the marks of the loop's body, and the beginning of messages."""

    marks: Sequence[Mark]
    prefix: str

    def fail(self, what: str, then: str) -> NoReturn:
        """Raise a `ScheduleError` that lists the marks of the loop's body.

        Args:
            what: the part of the message that says what is wrong.
            then: the part of the message that says what to do next.
        """
        raise ScheduleError(f"{self.prefix}: {what}; {then}{self._listed()}")

    def find(self, entry: Any, position: int) -> int:
        """Return the number of the mark that an entry of `stages` names.

        Args:
            entry: the number or the name of a mark.
            position: the position of the entry in `stages`.
        """
        count = len(self.marks)
        if isinstance(entry, str):
            found = [k for k, mark in enumerate(self.marks) if mark.name == entry]
            if len(found) == 1:
                return found[0]
            what = "no mark has" if not found else f"marks {', '.join(map(str, found))} have"
            self.fail(f"stages[{position}] is {entry!r}, and {what} this name", "write the number of a mark")
        number = as_int(entry)
        if number is None:
            self.fail(
                f"stages[{position}] is {describe_value(entry)}", "write the number or the name of a mark"
            )
        if not 0 <= number < count:
            have = (
                f"its {count} marks are 0 to {count - 1}" if count > 1 else f"it has {plural(count, 'mark')}"
            )
            self.fail(
                f"stages[{position}] names mark {number} and the loop body has none of this number",
                f"{have}, counted in the order of its calls of pipeline_yield",
            )
        return number

    def _listed(self) -> str:
        """Return a line for each mark, or for each run of marks of the same source line and name."""
        lines, first = list[str](), 0
        for mark, run in groupby(self.marks):
            last = first + len(list(run)) - 1
            lines.append(f"\n  {first}{f' to {last}' if last > first else ''}: {mark}")
            first = last + 1
        return "\nthe marks of the loop body are:" + "".join(lines) if lines else ""
