"""Read and write schedules as the compute-only CSV of torch.distributed.pipelining.

Each line is an actor and each cell a task, written as stage, kind and microbatch, such as `2F0`. The kinds
are F for a forward, B for a whole backward, I for the half of a backward that computes the input's gradient,
and W for the half that computes the weights' gradient. Empty cells are idle times and are ignored.
`(0F8;7B4)OVERLAP_F_B`, a pair of DualPipeV, stands for its two tasks one after the other. The letters of
older PyTorch (BW for a whole backward, B for the input's half) are read too: a file that contains W or BW but
no I uses these letters. An error names file, row, column and cell.

Source: torch/distributed/pipelining/schedules.py, `_Action` and `_PipelineScheduleRuntime._load_csv`.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task, TaskType
from jaxpp_async.schedules.base import Schedule, freeze_stages, repr_without
from jaxpp_async.schedules.drawing import DrawableSchedule
from jaxpp_async.schedules.timing import Rows, num_stages_of, time_schedule
from jaxpp_async.schedules.validate import LETTERS, plural, resolve, short_task

KINDS: dict[str, TaskType] = {letter: ty for ty, letter in LETTERS.items()}
OLD_KINDS: dict[str, TaskType] = {"F": "fwd", "BW": "bwd", "B": "bwd_input", "W": "bwd_weight"}
TASK = re.compile(r"(\d{1,9})(BW|[FBIW])(\d{1,9})", re.ASCII)
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*", re.ASCII)


@dataclass(frozen=True)
class CsvSchedule(DrawableSchedule):
    """A schedule read from a file by `schedule_from_csv`, valid for one number of microbatches and of actors.

    Args:
        rows: the tasks of each actor.
        path: the file from which the tasks were read, for error messages.
        stages: the marks that are stage boundaries, as for a built-in schedule; None: every mark.
    """

    rows: tuple[tuple[Task, ...], ...] = field(repr=False)
    path: str = field(compare=False)
    stages: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", freeze_stages(self.stages, self.path))

    def __repr__(self) -> str:
        return repr_without(self, stages=None)

    @property
    def num_stages(self) -> int:
        """The number of stages of the loop body that the file is for."""
        return num_stages_of(self.rows)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of the step that the file is for."""
        return 1 + max(task.i for row in self.rows for task in row)

    @property
    def num_actors(self) -> int:
        """The number of actors of the mesh that the file is for, which is its number of lines."""
        return len(self.rows)

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        """Return the file's tasks: one list per actor, in order of execution.

        Args:
            num_microbatches: the number of microbatches of the step.
            num_actors: the number of actors of the mesh.

        Raises:
            ScheduleError: the file is for another number of microbatches or actors.
        """
        for noun, ending, own, wanted in (
            ("microbatch", "es", self.num_microbatches, num_microbatches),
            ("actor", "s (lines)", self.num_actors, num_actors),
        ):
            if own != wanted:
                raise ScheduleError(
                    f"{self.path}: it is a schedule of {plural(own, noun, ending)} and the step has "
                    f"{wanted}; write a file for {wanted}, or change the step"
                )
        return [list(row) for row in self.rows]


def schedule_from_csv(path: str | os.PathLike[str], *, stages: Any = None) -> CsvSchedule:
    """Read a schedule from a file in torch.distributed.pipelining's compute-only CSV format.

    The module's first lines describe the format. Whether the order of tasks is valid is checked only where
    the schedule is used, as for any other schedule.

    Args:
        path: a UTF-8 file. Empty lines at its end are ignored; other empty lines are actors without a task.
        stages: the marks that are stage boundaries, a list or `"balanced"`, as for a built-in schedule; None:
            every mark. The file does not have them.

    Raises:
        ScheduleError: a cell is not a task, or a task occurs twice; the message names file, row and column
            (from 1) and cell. Or `stages` is no list, `"balanced"` or None.
        OSError: the file cannot be read.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{name}: it is not UTF-8 text ({error}); save it as UTF-8") from None
    return CsvSchedule(parse_csv(text, name), name, stages=stages)


def schedule_to_csv(
    schedule: Schedule | Rows, path: str | os.PathLike[str], num_microbatches: int, num_actors: int
) -> None:
    """Write a schedule to a file in torch.distributed.pipelining's compute-only CSV format.

    Each line is an actor. Each column is a unit of time in a simulation where every task takes one unit and a
    transfer takes none; a cell is empty where the actor idles.

    Args:
        schedule: a schedule in any form that `accumulate_grads` accepts.
        path: the file to write; an existing file is replaced.
        num_microbatches: the number of microbatches of the step.
        num_actors: the number of actors of the mesh.

    Raises:
        ScheduleError: the schedule is not valid.
        OSError: the file cannot be written.
    """
    rows = resolve(
        schedule,
        num_stages=_num_stages(schedule),
        num_microbatches=num_microbatches,
        num_actors=num_actors,
        forward_only=True,
    )
    Path(path).write_text(format_csv(rows), encoding="utf-8", newline="")


def _num_stages(schedule: Any) -> int:
    """Return the number of stages that `schedule` declares, or that its tasks have if it is a list.

    The number is not checked; `resolve` does that later.
    """
    if not isinstance(schedule, list | tuple):
        return getattr(schedule, "num_stages", 1)
    tasks = (
        task for row in schedule if isinstance(row, list | tuple) for task in row if isinstance(task, Task)
    )
    return max([1, *(task.stage + 1 for task in tasks if isinstance(task.stage, int))])


# ---------------------------------------------------------------- text


def format_csv(rows: Rows) -> str:
    """Return the text of a schedule in torch.distributed.pipelining's compute-only CSV format.

    Args:
        rows: one sequence of tasks per actor, which must be a valid schedule.
    """
    starts = time_schedule(rows).starts
    num_slots = 1 + max(int(row[-1]) for row in starts if row)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row, times in zip(rows, starts, strict=True):
        cells = [""] * num_slots
        for task, start in zip(row, times, strict=True):
            cells[int(start)] = short_task(task)
        writer.writerow(cells)
    return text.getvalue()


@dataclass(frozen=True, slots=True)
class _Cell:
    """The position and text of a CSV cell, for error messages; row and column count from 1."""

    file: str
    row: int
    column: int
    text: str

    def fail(self, what: str, then: str) -> NoReturn:
        raise ScheduleError(
            f"{self.file}, row {self.row}, column {self.column}, cell {self.text!r}: {what}; {then}"
        )


def parse_csv(text: str, name: str) -> tuple[tuple[Task, ...], ...]:
    """Return the tasks of each actor from the CSV text of a schedule.

    Args:
        text: the content of the file.
        name: the file's name, for error messages.

    Raises:
        ScheduleError: a cell is not a task, a task occurs twice, or there is no task.
    """
    lines = _lines(text, name)
    symbols = [list(_symbols(line, name, row)) for row, line in enumerate(lines, 1)]
    letters = {letter for line in symbols for _, _, letter, _ in line}
    kinds = OLD_KINDS if "I" not in letters and letters & {"W", "BW"} else KINDS
    first: dict[Task, _Cell] = {}
    rows: list[tuple[Task, ...]] = []
    for line in symbols:
        tasks: list[Task] = []
        for cell, stage, letter, i in line:
            if letter not in kinds:
                cell.fail("BW and I are of different versions of PyTorch", "write B, I and W, or BW, B and W")
            task = Task(i, kinds[letter], stage)
            if task in first:
                cell.fail(
                    f"{task} is in row {first[task].row}, column {first[task].column} too",
                    "run every task once",
                )
            first[task] = cell
            tasks.append(task)
        rows.append(tuple(tasks))
    if not first:
        raise ScheduleError(f"{name}: there is no task in it; write a line an actor, with cells such as 0F0")
    return tuple(rows)


def _lines(text: str, name: str) -> list[list[str]]:
    try:
        lines = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ScheduleError(f"{name}: it is not a CSV file ({error}); write a line an actor") from None
    while lines and not lines[-1]:  # `format_csv` writes "" for an actor without a task, which is not empty
        lines.pop()
    return lines


def _symbols(line: list[str], name: str, row: int) -> Iterator[tuple[_Cell, int, str, int]]:
    """Parse one line of a CSV file, and yield (cell, stage, letter, microbatch) for each task in it.

    The letter is the task's type as PyTorch writes it, such as `F` for a forward.

    Args:
        line: the text of each cell.
        name: the file's name, for error messages.
        row: the line's number, from 1.

    Raises:
        ScheduleError: a cell is not a task.
    """
    for column, entry in enumerate(line, 1):
        text = entry.strip()
        pair = PAIR.fullmatch(text)
        for part in pair[1].split(";") if pair else [text] if text else []:
            cell = _Cell(name, row, column, entry)
            match = TASK.fullmatch(part.strip())
            if match is None:
                if COMMUNICATION.fullmatch(part.strip()):
                    then = 'write the file with format="compute_only"; transfers are found here'
                    cell.fail("this is not computation", then)
                cell.fail(
                    "this is not a task",
                    "write stage, kind and microbatch, such as 0F0, with kind F (forward), B (backward), "
                    "I (its input's half) or W (its weights' half), and commas between cells",
                )
            yield cell, int(match[1]), match[2], int(match[3])
