"""Read and write schedules as the compute-only CSV of torch.distributed.pipelining.

A line is an actor, a cell a task: stage, kind, microbatch, as in `2F0`. Kinds are F forward, B whole
backward, I its input's half, W its weights' half. Empty cells are idle slots and mean nothing.
`(0F8;7B4)OVERLAP_F_B`, a pair of DualPipeV, stands for its tasks one after the other. The letters of older
PyTorch (BW a whole backward, B its input's half) are understood too: a file with W or BW and without I can
only have those. An error names file, row, column and cell.

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
from jaxpp_async.schedules.simulate import Rows, num_stages_of, simulate
from jaxpp_async.schedules.validate import LETTERS, resolve

KINDS: dict[str, TaskType] = {letter: ty for ty, letter in LETTERS.items()}
OLD_KINDS: dict[str, TaskType] = {"F": "fwd", "BW": "bwd", "B": "bwd_input", "W": "bwd_weight"}
TASK = re.compile(r"(\d{1,9})(BW|[FBIW])(\d{1,9})", re.ASCII)
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*", re.ASCII)


@dataclass(frozen=True)
class CsvSchedule:
    """A schedule of a file, for one number of microbatches and of actors, as `schedule_from_csv` returns it.

    Args:
        rows: the tasks of each actor.
        path: the file they come from, for errors.
    """

    rows: tuple[tuple[Task, ...], ...] = field(repr=False)
    path: str = field(compare=False)

    @property
    def num_stages(self) -> int:
        """Stages of the loop body that the file is for."""
        return num_stages_of(self.rows)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the step that the file is for."""
        return 1 + max(task.i for row in self.rows for task in row)

    @property
    def num_actors(self) -> int:
        """Actors of the mesh that the file is for: its lines."""
        return len(self.rows)

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        """Return the file's tasks.

        Args:
            num_microbatches: microbatches of the step.
            num_actors: actors of the mesh.

        Raises:
            ScheduleError: the file is for another number of microbatches or actors.
        """
        for noun, own, wanted in (
            ("microbatches", self.num_microbatches, num_microbatches),
            ("actors (lines)", self.num_actors, num_actors),
        ):
            if own != wanted:
                raise ScheduleError(
                    f"{self.path}: it is a schedule of {own} {noun} and the step has {wanted}; "
                    f"write a file for {wanted}, or change the step"
                )
        return [list(row) for row in self.rows]


def schedule_from_csv(path: str | os.PathLike[str]) -> CsvSchedule:
    """Read a schedule from torch.distributed.pipelining's compute-only CSV (see the module's first lines).

    The order itself is checked where the schedule is used, as any other's.

    Args:
        path: a UTF-8 file; empty lines at its end do not count, others are actors without a task.

    Raises:
        ScheduleError: a cell is not a task, or a task stands twice; the message names file, row and column
            (from 1) and cell.
        OSError: the file cannot be read.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{name}: it is not UTF-8 text ({error}); save it as UTF-8") from None
    return CsvSchedule(parse_csv(text, name), name)


def schedule_to_csv(
    schedule: Any, path: str | os.PathLike[str], num_microbatches: int, num_actors: int
) -> None:
    """Write a schedule as torch.distributed.pipelining's compute-only CSV.

    A line is an actor, a column a time slot when every task takes one unit of time and a transfer none; a
    cell is empty where the actor idles.

    Args:
        schedule: as `accumulate_grads` takes it.
        path: the file to write; what was there is replaced.
        num_microbatches: microbatches of the step.
        num_actors: actors of the mesh.

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
    """Return the number of stages that `schedule` itself gives; `resolve` says whether that makes sense."""
    if not isinstance(schedule, list | tuple):
        return getattr(schedule, "num_stages", 1)
    tasks = (
        task for row in schedule if isinstance(row, list | tuple) for task in row if isinstance(task, Task)
    )
    return max([1, *(task.stage + 1 for task in tasks if isinstance(task.stage, int))])


# ---------------------------------------------------------------- text


def format_csv(rows: Rows) -> str:
    """Format `rows`, which must be valid, as the text of a file."""
    starts = simulate(rows).starts
    num_slots = 1 + max(int(row[-1]) for row in starts if row)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row, times in zip(rows, starts, strict=True):
        cells = [""] * num_slots
        for task, start in zip(row, times, strict=True):
            cells[int(start)] = f"{task.stage}{LETTERS[task.ty]}{task.i}"
        writer.writerow(cells)
    return text.getvalue()


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell that has a task; row and column count from 1, as spreadsheets do."""

    file: str
    row: int
    column: int
    text: str

    def fail(self, what: str, then: str) -> NoReturn:
        raise ScheduleError(
            f"{self.file}, row {self.row}, column {self.column}, cell {self.text!r}: {what}; {then}"
        )


def parse_csv(text: str, name: str) -> tuple[tuple[Task, ...], ...]:
    """Read the tasks of each actor from the text of a file.

    Args:
        text: the text.
        name: the file's name, for errors.

    Raises:
        ScheduleError: as `schedule_from_csv`.
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
    while lines and not lines[-1]:  # an actor without a task that we wrote has cells, if only ""
        lines.pop()
    return lines


def _symbols(line: list[str], name: str, row: int) -> Iterator[tuple[_Cell, int, str, int]]:
    """Yield (cell, stage, letter, microbatch) of each task in a line."""
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
