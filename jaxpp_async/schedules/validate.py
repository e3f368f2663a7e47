"""Check the schedule that a user passed, and draw schedules as text.

`resolve` returns valid, frozen lists of tasks, or raises a `ScheduleError` that shows the wrong entry and
says where it is, what is wrong and what to do next. A schedule is never repaired.

Schedules are drawn as a grid with a row per actor and a column per unit of time or position in the lists; a
grid in an error is never larger than a screen. A cell is stage, letter and microbatch, as
torch.distributed.pipelining writes them: `2F0` is fwd(stage 2, mb 0), `B` is a bwd, `I` a bwd_input, `W` a
bwd_weight, `?` an unknown type. A marked cell is in brackets. Wrong schedules can be drawn too.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn, TypeAlias, TypeVar

from jaxpp_async.base.printable import listed
from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import TASK_TYPES, Task, TaskType
from jaxpp_async.schedules.timing import (
    Rows,
    ScheduleTiming,
    dependencies,
    find_deadlock,
    num_stages_of,
    split_backwards,
    time_schedule,
    time_until_deadlock,
)

_T = TypeVar("_T")

MAX_CYCLE = 12
"""The largest number of lines with which an error lists the tasks of a deadlock."""

WHAT_TO_PASS = (
    "pass an object with num_stages and tasks(num_microbatches, num_actors), such as Std1F1B(num_stages=2), "
    "or a list with one list of Tasks an actor"
)


def resolve(
    schedule: Any,
    *,
    num_stages: int,
    num_microbatches: int,
    num_actors: int,
    where: str = "",
    forward_only: bool = False,
    markers: Sequence[str] = (),
) -> tuple[tuple[Task, ...], ...]:
    """Check a schedule and return the tasks of each actor, in order of execution.

    Args:
        schedule: an object with `num_stages` and `tasks`, or a list (or tuple) with one list of tasks per
            actor.
        num_stages: the number of stages of the loop body.
        num_microbatches: the number of microbatches of the step.
        num_actors: the number of actors of the mesh.
        where: the user's source line, such as `"train.py:41"`, which begins each error message.
        forward_only: whether the loop computes no gradient, so that a schedule without any backward is
            complete.
        markers: for each stage but the last, the source line where it ends. The error about a wrong number of
            stages lists them.

    Returns:
        One tuple of tasks per actor. Every task occurs once, all tasks of a stage are on one actor, and
        running the lists in order never deadlocks.

    Raises:
        ScheduleError: a rule is broken.
    """
    name = describe_schedule(schedule)
    check = _Check(where, name, num_stages, num_microbatches, num_actors, markers)
    entries = _read_entries(check, schedule)
    if len(entries) != num_actors:
        check.fail(
            f"{plural(len(entries), 'list')} of tasks for {plural(num_actors, 'actor')}",
            "give every actor of the mesh one list, in order of actors (empty for an actor without a stage)",
        )
    rows = _read_tasks(check, entries)
    if isinstance(schedule, list | tuple):
        _check_num_stages(check, rows)
    _check_entries(check, rows)
    places = _check_unique(check, rows)
    _check_stage_actors(check, rows)
    _check_complete(check, rows, places, forward_only)
    _check_order(check, rows, places)
    return rows


# ---------------------------------------------------------------- errors


@dataclass(frozen=True, slots=True)
class _Check:
    """The context of one check of a schedule: its name for errors, the required sizes, and how to raise
    errors.

    Attributes:
        where: the user's source line, which begins each error message; may be empty.
        name: the text by which error messages refer to the schedule.
        num_stages: the number of stages of the loop body.
        num_microbatches: the number of microbatches of the step.
        num_actors: the number of actors of the mesh.
        markers: for each stage but the last, the source line where it ends.
    """

    where: str
    name: str
    num_stages: int
    num_microbatches: int
    num_actors: int
    markers: Sequence[str]

    @property
    def prefix(self) -> str:
        """The beginning of every error message: the user's source line, or nothing if it is not known."""
        return f"{self.where}: " if self.where else ""

    def fail(
        self,
        what: str,
        then: str,
        rows: Sequence[Sequence[Any]] | None = None,
        marks: Collection[Place] = (),
        near: Collection[Place] = (),
        details: str = "",
    ) -> NoReturn:
        """Raise a `ScheduleError` about the schedule, with a drawing of the lists if `rows` is given.

        Args:
            what: the part of the message that says what is wrong.
            then: the part of the message that says what to do next.
            rows: the lists to draw after the message, or None.
            marks: (actor, position) of the entries of `rows` to show in brackets.
            near: (actor, position) of other entries that must be visible.
            details: further lines of the message.
        """
        grid = "" if rows is None else "\n" + format_steps(rows, marks, near)
        raise ScheduleError(f"{self.prefix}{self.name}: {what}; {then}{details}{grid}")

    def require_num_stages(
        self, count: int, rows: Sequence[Sequence[Any]] | None = None, marks: Collection[Place] = ()
    ) -> None:
        """Raise a `ScheduleError` unless the schedule has as many stages as the loop body.

        Args:
            count: the schedule's number of stages.
            rows, marks: the lists to draw and the entries to mark, as for `fail`.
        """
        expected = self.num_stages
        if count != expected:
            self.fail(
                f"it has {plural(count, 'stage')} and the loop body {plural(expected, 'stage')} "
                f"({plural(expected - 1, 'pipeline_yield')})",
                f"make a schedule of {plural(expected, 'stage')}"
                + (f" or a loop body with {plural(count - 1, 'pipeline_yield')}" if count > 0 else "")
                + (
                    ", or give it stages='balanced', or stages=[...] with the calls that end a stage"
                    if 0 < count < expected
                    else ""
                ),
                rows,
                marks,
                details=_list_markers(self.markers),
            )


def _list_markers(markers: Sequence[str]) -> str:
    """Return lines for an error that list where the stages end, each source line once.

    Every call of `pipeline_yield` ends a stage. If the loop's body runs a model twice, the calls of both runs
    count, so one source line may end several stages.

    Args:
        markers: for each stage but the last, the source line where it ends.
    """
    if not markers:
        return ""
    lines = [f"  {m}" + (f" ({n} calls)" if n > 1 else "") for m, n in Counter(markers).items()]
    return "\n" + "\n".join(["every call in the loop body ends a stage; it has:", *lines])


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Return a count and its noun as text; the ending is added to the noun unless the count is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def describe_schedule(schedule: Any) -> str:
    """Return the text by which error messages refer to a schedule."""
    if isinstance(schedule, list | tuple):
        return "the schedule"
    if isinstance(schedule, type):
        return schedule.__name__
    text = repr(schedule)
    # A default repr shows only an address, and an object with many fields has a repr of pages: the class's
    # name says more in both cases.
    return text if len(text) <= 60 and not text.startswith("<") else type(schedule).__name__


# ---------------------------------------------------------------- from anything to lists of tasks


def _read_entries(check: _Check, schedule: Any) -> Sequence[Sequence[Any]]:
    """Return the lists of a schedule, one per actor, without checking the entries of the lists.

    Args:
        schedule: the lists, or an object whose method `tasks` returns them.

    Raises:
        ScheduleError: `schedule` is neither a sequence of lists nor such an object, or one of the lists is
            not a list or tuple.
    """
    if not isinstance(schedule, list | tuple):
        schedule = _call_schedule(check, schedule)
    for actor, row in enumerate(schedule):
        if not isinstance(row, list | tuple):
            check.fail(
                f"entry {actor} is {describe_value(row)}, not a list of Tasks",
                "give one list of Tasks an actor",
            )
    return schedule


def _call_schedule(check: _Check, schedule: Any) -> Sequence[Any]:
    """Return the result of `schedule.tasks` for the step's numbers of microbatches and actors.

    Raises:
        ScheduleError: `schedule` is no schedule object, has another number of stages than the loop body, or
            its `tasks` fails or does not return a list.
    """
    if isinstance(schedule, type):
        check.fail(
            "this is a class, not a schedule",
            f"write {schedule.__name__}(num_stages={check.num_stages})",
        )
    if not callable(getattr(schedule, "tasks", None)) or not hasattr(schedule, "num_stages"):
        check.fail(f"this is not a schedule (type {type(schedule).__name__})", WHAT_TO_PASS)
    if as_int(schedule.num_stages) is None:
        check.fail(f"its num_stages is {describe_value(schedule.num_stages)}", "make it an int")
    check.require_num_stages(schedule.num_stages)
    call = f"tasks(num_microbatches={check.num_microbatches}, num_actors={check.num_actors})"
    try:
        tasks = schedule.tasks(check.num_microbatches, check.num_actors)
    except ScheduleError as error:  # raised by a built-in schedule, whose message names the schedule
        raise ScheduleError(f"{check.prefix}{error}") from error
    except Exception as error:
        # The user's code may raise anything, which becomes the cause of an error that names the source line.
        raise ScheduleError(
            f"{check.prefix}{check.name}: {call} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(tasks, list | tuple):
        check.fail(
            f"{call} returned {describe_value(tasks)}", "return a list with one list of Tasks an actor"
        )
    return tasks


def _read_tasks(check: _Check, entries: Sequence[Sequence[Any]]) -> tuple[tuple[Task, ...], ...]:
    """Check that all entries are tasks, and return the lists as tuples of plain tasks with plain ints.

    Microbatches and stages are not checked to be in range.

    Raises:
        ScheduleError: an entry is not a task of a known type with integers.
    """
    for actor, step, entry in _with_places(entries):
        problem = None if _is_plain(entry) else _find_problem(entry)
        if problem:
            check.fail(f"actor {actor}, step {step}: {problem[0]}", problem[1], entries, {(actor, step)})
    return tuple(tuple(entry if _is_plain(entry) else _as_plain(entry) for entry in row) for row in entries)


def _is_plain(entry: Any) -> bool:
    """Return whether `entry` is a `Task` of a known type with plain ints.

    This check is fast. Only entries that fail it need the slower check, which also accepts other integers.
    """
    if type(entry) is not Task or type(entry.ty) is not str:
        return False
    return type(entry.i) is type(entry.stage) is int and entry.ty in TASK_TYPES


def _as_plain(task: Task) -> Task:
    return Task(task.i.__index__(), task.ty, task.stage.__index__())


def _find_problem(entry: Any) -> tuple[str, str] | None:
    """Return what is wrong with one entry and what to do about it, as two texts; None if nothing is wrong."""
    if not isinstance(entry, Task):
        return f"{describe_value(entry)} is not a Task", "make every entry Task(i, ty, stage)"
    if not isinstance(entry.ty, str) or entry.ty not in TASK_TYPES:
        return (
            f"{describe_value(entry.ty)} is not a type of task",
            f"ty is one of {', '.join(map(repr, TASK_TYPES))}",
        )
    for name, value in (("microbatch", entry.i), ("stage", entry.stage)):
        if as_int(value) is None:
            return (
                f"the {name} of a {entry.ty} is {describe_value(value)}",
                "write Task(i, ty, stage) with ints i and stage",
            )
    return None


def as_int(value: Any) -> int | None:
    """Return `value` as a plain int (numpy ints are accepted); None if it is not an integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return value.__index__()
    except TypeError:  # numpy arrays have `__index__`, but raise unless they are integer scalars
        return None


def describe_value(value: Any) -> str:
    """Return a short text of a value and its type, for error messages."""
    return f"{reprlib.repr(value)} (type {type(value).__name__})"


# ---------------------------------------------------------------- the rules, one function each


def _with_places(rows: Sequence[Sequence[_T]]) -> Iterator[tuple[int, int, _T]]:
    """Yield (actor, position in the actor's list, entry) for every entry of a schedule's lists."""
    return ((actor, step, entry) for actor, row in enumerate(rows) for step, entry in enumerate(row))


def _check_num_stages(check: _Check, rows: Rows) -> None:
    """Raise a `ScheduleError` unless a schedule given as lists has as many stages as the loop body.

    The error marks the first task of a stage that the loop body does not have.
    """
    beyond = next(
        ((actor, step) for actor, step, task in _with_places(rows) if task.stage >= check.num_stages), None
    )
    check.require_num_stages(num_stages_of(rows), rows if beyond else None, {beyond} if beyond else ())


def _check_entries(check: _Check, rows: Rows) -> None:
    """Raise a `ScheduleError` if the stage or the microbatch of a task is out of range."""
    for actor, step, task in _with_places(rows):
        for value, count, noun in (
            (task.stage, check.num_stages, "stages of the loop body"),
            (task.i, check.num_microbatches, "microbatches of the batch"),
        ):
            if not 0 <= value < count:
                check.fail(
                    f"actor {actor}, step {step}: {task} is out of range",
                    f"the {noun} are 0 to {count - 1}",
                    rows,
                    {(actor, step)},
                )


def _check_unique(check: _Check, rows: Rows) -> dict[Task, Place]:
    """Raise a `ScheduleError` if a task occurs twice; otherwise return the (actor, position) of each task."""
    places: dict[Task, Place] = {}
    for actor, step, task in _with_places(rows):
        first = places.setdefault(task, (actor, step))
        if first != (actor, step):
            check.fail(
                f"actor {actor}, step {step}: {task} is there twice (first at actor {first[0]}, step "
                f"{first[1]})",
                "run every task once",
                rows,
                {first, (actor, step)},
            )
    return places


def _check_stage_actors(check: _Check, rows: Rows) -> None:
    """Raise a `ScheduleError` if the tasks of one stage are on several actors."""
    first: dict[int, tuple[Place, Task]] = {}
    for actor, step, task in _with_places(rows):
        place, other = first.setdefault(task.stage, ((actor, step), task))
        if place[0] != actor:
            check.fail(
                f"stage {task.stage} is on two actors: {other} on actor {place[0]}, step {place[1]}, "
                f"and {task} on actor {actor}, step {step}",
                "give all tasks of a stage to one actor: its weights are there",
                rows,
                {place, (actor, step)},
            )


def _check_complete(check: _Check, rows: Rows, places: dict[Task, Place], forward_only: bool) -> None:
    """Raise a `ScheduleError` unless every stage has all its tasks for every microbatch.

    The tasks are a forward, and a backward that is either whole or split, but not both. A schedule without
    any backward is complete too if `forward_only` is true.
    """
    no_backward = forward_only and all(task.ty == "fwd" for task in places)
    complete = [{"fwd"}] if no_backward else [{"fwd", "bwd"}, {"fwd", "bwd_input", "bwd_weight"}]
    there: dict[tuple[int, int], set[str]] = {
        pair: set() for pair in product(range(check.num_stages), range(check.num_microbatches))
    }
    for task in places:
        there[task.stage, task.i].add(task.ty)
    missing: list[Task] = []
    for (stage, i), types in there.items():
        if types in complete:
            continue
        forward, whole, *halves = (Task(i, ty, stage) for ty in TASK_TYPES)
        split = [half for half in halves if half in places]
        if whole in places and split:
            check.fail(
                f"{whole} and {split[0]} are both there",
                "run a stage's backward of a microbatch either whole (bwd) or split (bwd_input and "
                "bwd_weight)",
                rows,
                {places[whole], places[split[0]]},
            )
        wanted = [forward] + ([] if no_backward else halves if split else [whole])
        missing += [task for task in wanted if task not in places]
    if missing:
        shown, lost = listed([*map(str, missing)], 3), missing[0]
        near = [
            place
            for task, place in places.items()
            if task.stage == lost.stage and task.i in (lost.i, lost.i - 1)
        ]
        sizes = (
            f"{plural(check.num_stages, 'stage')} and {plural(check.num_microbatches, 'microbatch', 'es')}"
        )
        check.fail(
            f"{shown} {'is' if len(missing) == 1 else 'are'} missing",
            f"a step of {sizes} runs every stage's fwd and bwd (or bwd_input and bwd_weight) of every "
            "microbatch; a gradient that a stage takes for itself alone is a bwd too",
            rows,
            near=near,
        )


def _check_order(check: _Check, rows: Rows, places: dict[Task, Place]) -> None:
    """Raise a `ScheduleError` if the schedule deadlocks when each actor runs its list in order."""
    timeline = time_until_deadlock(rows)
    if any(len(ends) < len(row) for ends, row in zip(timeline.ends, rows, strict=True)):
        _check_lists(check, rows, places)
        _fail_deadlock(check, rows, timeline)


def _check_lists(check: _Check, rows: Rows, places: dict[Task, Place]) -> None:
    """Raise a `ScheduleError` if a task comes before a task of the same list that it depends on."""
    split = split_backwards(rows)
    for task, (actor, step) in places.items():
        for need in dependencies(task, check.num_stages, split):
            need_actor, need_step = places[need]
            if need_actor == actor and need_step > step:
                check.fail(
                    f"actor {actor}, step {step}: {task} runs before {need} (step {need_step}), which it "
                    "depends on",
                    f"move {need} ahead of it",
                    rows,
                    {(actor, step), (actor, need_step)},
                )


def _fail_deadlock(check: _Check, rows: Rows, timeline: ScheduleTiming) -> NoReturn:
    waits = find_deadlock(rows, timeline)
    lines = [f"\n  {wait}" for wait in waits]
    if len(lines) > MAX_CYCLE:
        lines[MAX_CYCLE - 1 : -1] = [f"\n  ... and so on over {len(lines) - MAX_CYCLE} more actors"]
    check.fail(
        f"it deadlocks: {len(waits)} actors wait for one another",
        "change the order on one of them:",
        rows,
        {(wait.actor, wait.step) for wait in waits},
        details="".join(lines),
    )


# ---------------------------------------------------------------- grid

Place: TypeAlias = tuple[int, int]
"""The place of an entry of a schedule: (actor, position in the actor's list)."""

LETTERS: dict[TaskType, str] = {"fwd": "F", "bwd": "B", "bwd_input": "I", "bwd_weight": "W"}
MAX_ROWS, MAX_COLUMNS, MAX_CELL = 8, 14, 12
"""The largest numbers of actors, of list positions, and of characters per cell that the drawing in an error
has."""


def format_task(task: Task) -> str:
    """Return a task as text, such as `"fwd(stage 1, mb 3)"`."""
    return str(task)


def short_task(task: Task) -> str:
    """Return a task as stage, letter and microbatch, such as `"1F3"`."""
    return f"{task.stage}{LETTERS[task.ty]}{task.i}"


def format_grid(tasks: Rows) -> str:
    """Return a text drawing of the whole schedule over time.

    In the drawing every task takes one unit of time and a transfer takes none.

    Args:
        tasks: one sequence of tasks per actor.

    Returns:
        A line of times, then a line per actor with `.` where the actor idles.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    starts = time_schedule(tasks).starts
    num_slots = 1 + max((int(row[-1]) for row in starts if row), default=-1)
    cells = [["."] * num_slots for _ in tasks]
    for actor, row in enumerate(starts):
        for step, start in enumerate(row):
            cells[actor][int(start)] = _cell(tasks[actor][step])
    return _table("time", cells, range(len(cells)), range(num_slots))


def format_steps(
    rows: Sequence[Sequence[Any]], marks: Collection[Place], near: Collection[Place] = ()
) -> str:
    """Return a text drawing of lists of tasks for an error, with some entries marked.

    There is a row per actor and a column per position in its list. If the lists are too large, only the
    actors and positions nearest to the marks are drawn.

    Args:
        rows: one sequence per actor; entries may be of any type.
        marks: (actor, position) of the wrong entries.
        near: (actor, position) of other entries that must be visible.
    """
    num_steps = max((len(row) for row in rows), default=0)
    shown_rows = _nearest(len(rows), [actor for actor, _ in [*marks, *near]], MAX_ROWS)
    columns = _nearest(num_steps, [step for _, step in [*marks, *near]], MAX_COLUMNS)
    cells = [
        [_marked(row[step], (actor, step) in marks) if step in columns else "" for step in range(len(row))]
        for actor, row in enumerate(rows)
    ]
    text = _table("step", cells, shown_rows, columns)
    if len(shown_rows) < len(rows) or len(columns) < num_steps:
        text += f"\n(part of {len(rows)} actors x {num_steps} steps)"
    return text


def _marked(entry: Any, mark: bool) -> str:
    return f"[{_cell(entry)}]" if mark else _cell(entry)


def _cell(entry: Any) -> str:
    if isinstance(entry, Task):
        is_known = isinstance(entry.ty, str) and entry.ty in LETTERS
        text = short_task(entry) if is_known else f"{entry.stage}?{entry.i}"
    else:
        text = reprlib.repr(entry)
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "~"


def _nearest(count: int, centres: Sequence[int], limit: int) -> list[int]:
    """Choose which of `count` rows or columns of a drawing to show, and return their indices in order.

    At most `limit` are chosen: those nearest to `centres`, or the first ones if there are no centres.
    """
    if count <= limit:
        return list(range(count))
    return sorted(sorted(range(count), key=lambda x: min((abs(x - c) for c in centres), default=x))[:limit])


def _table(corner: str, cells: Sequence[Sequence[str]], rows: Sequence[int], columns: Sequence[int]) -> str:
    """Return some rows and columns of a table as aligned text; `..` stands for those left out in between.

    Args:
        corner: the heading of the first column.
        cells: the text of every cell.
        rows: the rows to show.
        columns: the columns to show.
    """
    body = [
        [row[column] if column < len(row) else "" for column in columns] for row in (cells[r] for r in rows)
    ]
    widths = [max(map(len, cells)) for cells in zip([str(column) for column in columns], *body, strict=True)]
    names = [f"actor {row}" for row in rows]
    name_width = max(map(len, [corner, *names]))

    def line(name: str, entries: Sequence[str], gap: str) -> str:
        text = name.ljust(name_width)
        for position, (entry, width) in enumerate(zip(entries, widths, strict=True)):
            if position and columns[position] != columns[position - 1] + 1:
                text += f"  {gap}"
            text += "  " + entry.ljust(width)
        return text.rstrip()

    lines = [line(corner, [str(column) for column in columns], "..")]
    for position, (row, name, entries) in enumerate(zip(rows, names, body, strict=True)):
        if position and row != rows[position - 1] + 1:
            lines.append("..")
        lines.append(line(name, entries, "  "))
    return "\n".join(lines)
