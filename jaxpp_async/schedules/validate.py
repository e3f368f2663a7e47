"""schedules.check: what the user passed as a schedule in; valid, frozen lists of tasks out, or a `ScheduleError` that
says where, what is wrong and what to do next, and shows the entry. Never repairs a schedule.

schedules.grid: lists of tasks in, text out: a row an actor, a column a time slot or step. Never larger than a screen
where it goes into an error. Never checks a schedule: it also draws wrong ones.

A cell is stage, letter and microbatch, as torch.distributed.pipelining writes them: `2F0` is fwd(stage 2, mb 0), `B` a
bwd, `I` a bwd_input, `W` a bwd_weight, `?` an unknown type. A marked cell stands in brackets.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, NoReturn, TypeAlias

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import TASK_TYPES, Task, TaskType
from jaxpp_async.schedules.simulate import (
    Rows,
    ScheduleTiming,
    dependencies,
    find_deadlock,
    run_ahead,
    simulate,
    split_backwards,
)

MAX_CYCLE = 12
"""The most lines that an error gives to a deadlock."""

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
    """The tasks of each actor, in order of execution, all checked.

    Args:
        schedule: an object with `num_stages` and `tasks`, or one list (or tuple) of tasks an actor.
        num_stages: stages of the loop body.
        num_microbatches: microbatches of the step.
        num_actors: actors of the mesh.
        where: the user's source line, such as `"train.py:41"`; errors begin with it.
        forward_only: the loop takes no gradient: a schedule without any backward is complete.
        markers: where each stage ends, as text, for the error of a wrong number of stages.

    Returns:
        One tuple of tasks an actor. In it every task stands once, a stage's tasks are on one actor, and running the
        lists in order never deadlocks.

    Raises:
        ScheduleError: anything else.
    """
    sizes = _Sizes(num_stages, num_microbatches, num_actors)
    check = _Check(where, _name_of(schedule), sizes, tuple(markers))
    entries = _entries(check, schedule)
    if len(entries) != num_actors:
        check.fail(
            f"{_count(len(entries), 'list')} of tasks for {_count(num_actors, 'actor')}",
            "give every actor of the mesh one list, in order of actors (empty for an actor without a stage)",
        )
    rows = _tasks(check, entries)
    if isinstance(schedule, list | tuple):
        _check_num_stages(check, rows)
    _check_entries(check, rows)
    places = _check_once(check, rows)
    _check_stage_actors(check, rows)
    _check_complete(check, rows, places, forward_only)
    _check_order(check, rows, places)
    return rows


# ---------------------------------------------------------------- how errors read


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_stages: int
    num_microbatches: int
    num_actors: int

    @property
    def pairs(self) -> Iterable[tuple[int, int]]:
        """Every (stage, microbatch)."""
        return product(range(self.num_stages), range(self.num_microbatches))


@dataclass(frozen=True, slots=True)
class _Check:
    """Where and what is checked; `fail` and `stages` raise."""

    where: str
    name: str
    sizes: _Sizes
    markers: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """What an error begins with: the user's line, where it is known."""
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
        """Raise: `what` is wrong, `then` is what to do, and lines of `details`. The grid of `rows` follows, with
        `marks` in brackets, or what is `near`."""
        grid = "" if rows is None else "\n" + format_steps(rows, marks, near)
        raise ScheduleError(f"{self.prefix}{self.name}: {what}; {then}{details}{grid}")

    def stages(
        self, count: int, rows: Sequence[Sequence[Any]] | None = None, marks: Collection[Place] = ()
    ) -> None:
        """Fail unless the schedule's number of stages is the loop body's. `rows` and `marks` as `fail`."""
        expected = self.sizes.num_stages
        if count != expected:
            self.fail(
                f"it has {_count(count, 'stage')} and the loop body {_count(expected, 'stage')} "
                f"({_count(expected - 1, 'pipeline_yield')})",
                f"make a schedule of {_count(expected, 'stage')}"
                + (f" or a loop body with {_count(count - 1, 'pipeline_yield')}" if count > 0 else ""),
                rows,
                marks,
                details=_counted(self.markers),
            )


def _counted(markers: Sequence[str]) -> str:
    """The stage boundaries, those of one line together; every call in the body is one, whichever forward it is of."""
    if not markers:
        return ""
    lines = [f"  {m}" + (f" ({n} calls)" if n > 1 else "") for m, n in Counter(markers).items()]
    return "\n" + "\n".join(["every call in the loop body ends a stage; it has:", *lines])


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _name_of(schedule: Any) -> str:
    if isinstance(schedule, list | tuple):
        return "the schedule"
    if isinstance(schedule, type):
        return schedule.__name__
    text = repr(schedule)
    # The default repr is an address: the class says more. So does it of an object with pages of fields.
    return text if len(text) <= 60 and not text.startswith("<") else type(schedule).__name__


# ---------------------------------------------------------------- from anything to lists of tasks


def _entries(check: _Check, schedule: Any) -> Sequence[Sequence[Any]]:
    """The schedule's lists, of which only the nesting has been checked."""
    if not isinstance(schedule, list | tuple):
        schedule = _call(check, schedule)
    for actor, row in enumerate(schedule):
        if not isinstance(row, list | tuple):
            check.fail(
                f"entry {actor} is {_text(row)}, not a list of Tasks", "give one list of Tasks an actor"
            )
    return schedule


def _call(check: _Check, schedule: Any) -> Sequence[Any]:
    """What `schedule.tasks` returns."""
    if isinstance(schedule, type):
        check.fail(
            "this is a class, not a schedule",
            f"write {schedule.__name__}(num_stages={check.sizes.num_stages})",
        )
    if not callable(getattr(schedule, "tasks", None)) or not hasattr(schedule, "num_stages"):
        check.fail(f"this is not a schedule (type {type(schedule).__name__})", WHAT_TO_PASS)
    if _index(schedule.num_stages) is None:
        check.fail(f"its num_stages is {_text(schedule.num_stages)}", "make it an int")
    check.stages(schedule.num_stages)
    sizes = check.sizes
    call = f"tasks(num_microbatches={sizes.num_microbatches}, num_actors={sizes.num_actors})"
    try:
        tasks = schedule.tasks(sizes.num_microbatches, sizes.num_actors)
    except ScheduleError as error:  # from a schedule of ours, which says what it is
        raise ScheduleError(f"{check.prefix}{error}") from error
    except Exception as error:
        # the user's code: whatever it raises becomes the cause of an error that says where
        raise ScheduleError(
            f"{check.prefix}{check.name}: {call} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(tasks, list | tuple):
        check.fail(f"{call} returned {_text(tasks)}", "return a list with one list of Tasks an actor")
    return tasks


def _tasks(check: _Check, entries: Sequence[Sequence[Any]]) -> tuple[tuple[Task, ...], ...]:
    """The same, of plain tasks with plain ints. Microbatch and stage may still be out of range."""
    for actor, row in enumerate(entries):
        for step, entry in enumerate(row):
            problem = None if _is_plain(entry) else _problem(entry)
            if problem:
                check.fail(f"actor {actor}, step {step}: {problem[0]}", problem[1], entries, {(actor, step)})
    return tuple(tuple(entry if _is_plain(entry) else _plain(entry) for entry in row) for row in entries)


def _is_plain(entry: Any) -> bool:
    """Whether `entry` is a task of plain ints: nearly always, and quickly told."""
    if type(entry) is not Task or type(entry.ty) is not str:
        return False
    return type(entry.i) is type(entry.stage) is int and entry.ty in TASK_TYPES


def _plain(task: Task) -> Task:
    return Task(task.i.__index__(), task.ty, task.stage.__index__())


def _problem(entry: Any) -> tuple[str, str] | None:
    """What is wrong with one entry by itself, and what to do."""
    if not isinstance(entry, Task):
        return f"{_text(entry)} is not a Task", "make every entry Task(i, ty, stage)"
    if not isinstance(entry.ty, str) or entry.ty not in TASK_TYPES:
        return f"{_text(entry.ty)} is not a type of task", f"ty is one of {', '.join(map(repr, TASK_TYPES))}"
    for name, value in (("microbatch", entry.i), ("stage", entry.stage)):
        if _index(value) is None:
            return (
                f"the {name} of a {entry.ty} is {_text(value)}",
                "write Task(i, ty, stage) with ints i and stage",
            )
    return None


def _index(value: Any) -> int | None:
    """`value` as a plain int (numpy ints count), or None."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return value.__index__()
    except TypeError:  # numpy arrays have the method and refuse
        return None


def _text(value: Any) -> str:
    return f"{reprlib.repr(value)} (type {type(value).__name__})"


# ---------------------------------------------------------------- the rules, one function each


def _check_num_stages(check: _Check, rows: Sequence[Sequence[Task]]) -> None:
    """A list's stages are those of its tasks. Too many: its first task of a stage that is not there is marked."""
    count = 1 + max((task.stage for row in rows for task in row), default=-1)
    beyond = (
        (a, s)
        for a, row in enumerate(rows)
        for s, task in enumerate(row)
        if task.stage >= check.sizes.num_stages
    )
    marks = set(islice(beyond, 1))
    check.stages(count, rows if marks else None, marks)


def _check_entries(check: _Check, rows: Sequence[Sequence[Task]]) -> None:
    num_stages, num_microbatches = check.sizes.num_stages, check.sizes.num_microbatches
    for actor, row in enumerate(rows):
        for step, task in enumerate(row):
            for name, value, count in (("stage", task.stage, num_stages), ("mb", task.i, num_microbatches)):
                if not 0 <= value < count:
                    noun = "stages of the loop body" if name == "stage" else "microbatches of the batch"
                    check.fail(
                        f"actor {actor}, step {step}: {task} is out of range",
                        f"the {noun} are 0 to {count - 1}",
                        rows,
                        {(actor, step)},
                    )


def _check_once(check: _Check, rows: Sequence[Sequence[Task]]) -> dict[Task, Place]:
    """No task twice. Returns where each is."""
    places: dict[Task, Place] = {}
    for actor, row in enumerate(rows):
        for step, task in enumerate(row):
            first = places.setdefault(task, (actor, step))
            if first != (actor, step):
                check.fail(
                    f"actor {actor}, step {step}: {task} is there twice (first at actor {first[0]}, step {first[1]})",
                    "run every task once",
                    rows,
                    {first, (actor, step)},
                )
    return places


def _check_stage_actors(check: _Check, rows: Sequence[Sequence[Task]]) -> None:
    first: dict[int, tuple[Place, Task]] = {}
    for actor, row in enumerate(rows):
        for step, task in enumerate(row):
            place, other = first.setdefault(task.stage, ((actor, step), task))
            if place[0] != actor:
                check.fail(
                    f"stage {task.stage} is on two actors: {other} on actor {place[0]}, step {place[1]}, "
                    f"and {task} on actor {actor}, step {step}",
                    "give all tasks of a stage to one actor: its weights are there",
                    rows,
                    {place, (actor, step)},
                )


def _check_complete(
    check: _Check, rows: Sequence[Sequence[Task]], places: dict[Task, Place], forward_only: bool
) -> None:
    """Every stage and microbatch has its forward and a whole or a split backward, not both."""
    no_backward = forward_only and all(task.ty == "fwd" for task in places)
    complete = [{"fwd"}] if no_backward else [{"fwd", "bwd"}, {"fwd", "bwd_input", "bwd_weight"}]
    there: dict[tuple[int, int], set[str]] = {pair: set() for pair in check.sizes.pairs}
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
                "run a stage's backward of a microbatch either whole (bwd) or split (bwd_input and bwd_weight)",
                rows,
                {places[whole], places[split[0]]},
            )
        wanted = [forward] + ([] if no_backward else halves if split else [whole])
        missing += [task for task in wanted if task not in places]
    if missing:
        shown = ", ".join(map(str, missing[:3])) + (
            f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        )
        lost = missing[0]
        near = [
            place
            for task, place in places.items()
            if task.stage == lost.stage and task.i in (lost.i, lost.i - 1)
        ]
        sizes = f"{_count(check.sizes.num_stages, 'stage')} and {check.sizes.num_microbatches} microbatches"
        check.fail(
            f"{shown} {'is' if len(missing) == 1 else 'are'} missing",
            f"a step of {sizes} runs every stage's fwd and bwd (or bwd_input and bwd_weight) of every microbatch; a "
            "gradient that a stage takes for itself alone is a bwd too",
            rows,
            near=near,
        )


def _check_order(check: _Check, rows: Sequence[Sequence[Task]], places: dict[Task, Place]) -> None:
    """Running the lists in order comes to an end."""
    timeline = run_ahead(rows)
    if any(len(ends) < len(row) for ends, row in zip(timeline.ends, rows, strict=True)):
        _check_lists(check, rows, places)
        _fail_deadlock(check, rows, timeline)


def _check_lists(check: _Check, rows: Sequence[Sequence[Task]], places: dict[Task, Place]) -> None:
    """Nothing stands before what it depends on in the same list."""
    split = split_backwards(rows)
    for task, (actor, step) in places.items():
        for need in dependencies(task, check.sizes.num_stages, split):
            need_actor, need_step = places[need]
            if need_actor == actor and need_step > step:
                check.fail(
                    f"actor {actor}, step {step}: {task} runs before {need} (step {need_step}), which it depends on",
                    f"move {need} ahead of it",
                    rows,
                    {(actor, step), (actor, need_step)},
                )


def _fail_deadlock(check: _Check, rows: Sequence[Sequence[Task]], timeline: ScheduleTiming) -> NoReturn:
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
"""(actor, position in its list)."""

LETTERS: dict[TaskType, str] = {"fwd": "F", "bwd": "B", "bwd_input": "I", "bwd_weight": "W"}
MAX_ROWS, MAX_COLUMNS, MAX_CELL = 8, 14, 12
"""The most an error shows: actors, steps, characters of a cell."""


def format_task(task: Task) -> str:
    """`"fwd(stage 1, mb 3)"`."""
    return str(task)


def format_grid(tasks: Rows) -> str:
    """The whole schedule as it runs when every task takes one unit of time and a transfer none.

    Args:
        tasks: one sequence of tasks an actor.

    Returns:
        A line of times, then a line an actor; `.` where it idles.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    starts = simulate(tasks).starts
    num_slots = 1 + max((int(row[-1]) for row in starts if row), default=-1)
    cells = [["."] * num_slots for _ in tasks]
    for actor, row in enumerate(starts):
        for step, start in enumerate(row):
            cells[actor][int(start)] = _cell(tasks[actor][step])
    return _table("time", cells, range(len(cells)), range(num_slots))


def format_steps(
    rows: Sequence[Sequence[Any]], marks: Collection[Place], near: Collection[Place] = ()
) -> str:
    """The lists as they stand, a column a step, with some entries marked: what an error shows.

    Where there is more than fits, the actors and steps nearest to the marks are shown.

    Args:
        rows: one sequence an actor; entries may be anything.
        marks: places of the bad entries.
        near: other places to show.
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
        letter = LETTERS.get(entry.ty, "?") if isinstance(entry.ty, str) else "?"
        text = f"{entry.stage}{letter}{entry.i}"
    else:
        text = reprlib.repr(entry)
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "~"


def _nearest(count: int, centres: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of range(count), the nearest to any of `centres` (the first ones without any), in order."""
    if count <= limit:
        return list(range(count))
    return sorted(sorted(range(count), key=lambda x: min((abs(x - c) for c in centres), default=x))[:limit])


def _table(corner: str, cells: Sequence[Sequence[str]], rows: Sequence[int], columns: Sequence[int]) -> str:
    """Aligned text; `..` stands for rows and columns left out between two shown."""
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
