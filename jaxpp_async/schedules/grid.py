"""schedules.grid: lists of tasks in, text out: a row an actor, a column a time slot or step. Never larger than a screen
where it goes into an error. Never checks a schedule: it also draws wrong ones.

A cell is stage, letter and microbatch, as torch.distributed.pipelining writes them: `2F0` is fwd(stage 2, mb 0), `B` a
bwd, `I` a bwd_input, `W` a bwd_weight, `?` an unknown type. A marked cell stands in brackets.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from jaxpp_async.program import Task, TaskType
from jaxpp_async.schedules.timing import Rows, simulate

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


def format_steps(rows: Sequence[Sequence[Any]], marks: Collection[Place], near: Collection[Place] = ()) -> str:
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
    body = [[row[column] if column < len(row) else "" for column in columns] for row in (cells[r] for r in rows)]
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
