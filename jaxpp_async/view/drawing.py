"""Define a drawing: rows of cells over time, which schedules, steps, plans and timelines all turn into.

A drawing is data. `svg.py`, `html.py` and `terminal.py` show it; the packages of the drawn objects make it.
Each row stands for an actor. Cells that were planned lie behind those that were measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from jaxpp_async.base.quantities import format_bytes, format_seconds

CellKind: TypeAlias = Literal[
    "forward", "backward", "input gradient", "weight gradient", "update", "transfer", "waiting", "failure"
]
"""The kinds of cells. Each kind has one colour in every drawing; see `palette.py`."""

CELL_KINDS: tuple[CellKind, ...] = get_args(CellKind)

Unit: TypeAlias = Literal["s", "forwards"]
"""The unit of times in a drawing: seconds, or the time of one forward where no times are known."""

Held: TypeAlias = Literal["bytes", "activations"]
"""The unit of what an actor holds: bytes, or activations of one microbatch and stage."""

NEAR = 4.0
"""How many times what the actors hold a cap may be to be drawn; beyond it the memory would be a flat line."""


NUMBERS = "number: microbatch"
"""The words that say what the text of cells is."""


@dataclass(frozen=True, slots=True)
class Cell:
    """An interval of an actor's time.

    Args:
        start, end: the interval, in the drawing's unit.
        kind: the kind of the cell, which is its colour.
        text: the number of the cell's microbatch, which is shown if there is space for it; or `""`.
        title: the text that is shown when somebody points at the cell.
    """

    start: float
    end: float
    kind: CellKind
    text: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """An actor's line in a drawing.

    Args:
        name: the text before the line, such as `"actor 0"`.
        cells: the cells that were measured, or those of a schedule; ascending, and none overlaps another.
        planned: the cells as they were planned, behind the others; in the same order.
        memory: each time at which the actor holds more or less than before, and how much it holds then,
            ascending in time; empty if unknown.
    """

    name: str
    cells: tuple[Cell, ...]
    planned: tuple[Cell, ...] = ()
    memory: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Drawing:
    """A picture of tasks over time, as data.

    Args:
        title: the line above the drawing.
        rows: the actors, from top to bottom.
        unit: the unit of all times.
        held: the unit of what the rows' actors hold.
        cap: how much each actor may hold; None if there is no limit or it is unknown.
        advice: sentences that stand beside the drawing, the most important first.
        planned_text: words that say what the planned cells are.
    """

    title: str
    rows: tuple[Row, ...]
    unit: Unit = "s"
    held: Held = "bytes"
    cap: float | None = None
    advice: tuple[str, ...] = ()
    planned_text: str = "as planned"

    @cached_property
    def end(self) -> float:
        """The time at which the last cell ends, in the drawing's unit."""
        return max((cell.end for cell in self.all_cells()), default=0.0)

    @cached_property
    def num_cells(self) -> int:
        """The number of cells."""
        return sum(len(row.cells) + len(row.planned) for row in self.rows)

    @cached_property
    def kinds(self) -> tuple[CellKind, ...]:
        """The kinds of the drawing's cells, in the order of `CELL_KINDS`."""
        found = {cell.kind for cell in self.all_cells()}
        return tuple(kind for kind in CELL_KINDS if kind in found)

    @cached_property
    def most_held(self) -> float:
        """The most that any actor holds at any time."""
        return max((size for row in self.rows for _, size in row.memory), default=0.0)

    @property
    def memory_top(self) -> float:
        """How much the memory below a row shows at its full height: the cap, unless actors stay far below it.

        Then it is the most that any actor holds, and the cap is not drawn but only told.
        """
        is_near = self.cap is not None and self.cap <= NEAR * self.most_held
        return max(self.most_held, self.cap or 0.0) if is_near else self.most_held

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say what numbers are, what is pale, and what lies below the rows."""
        found = [NUMBERS] if any(cell.text for cell in self.all_cells()) else []
        if any(row.planned for row in self.rows):
            found.append(f"pale: {self.planned_text}")
        if any(row.memory for row in self.rows):
            cap = "" if self.cap is None else f" of {format_held(self.cap, self.held)}"
            over = ", which is too much" if self.cap is not None and self.most_held > self.cap else ""
            found.append(f"below: memory, at most {format_held(self.most_held, self.held)}{cap}{over}")
        return tuple(found)

    def all_cells(self) -> Iterable[Cell]:
        """Return the cells of all rows."""
        for row in self.rows:
            yield from row.planned
            yield from row.cells


def format_time(value: float, unit: Unit) -> str:
    """Return a time as text, such as `"12.5 ms"`.

    Args:
        value: the time.
        unit: the unit of the time.
    """
    if unit == "forwards":
        return f"{value:.4g}"
    if abs(value) >= 60:  # in seconds, since the numbers of an axis are round in them
        return f"{value:.4g} s"
    return format_seconds(value, digits=4) if value else "0"


def format_held(amount: float, held: Held) -> str:
    """Return how much an actor holds as text, such as `"1.5 GB"`.

    Args:
        amount: how much it holds.
        held: the unit of the amount.
    """
    if held == "activations":
        return f"{amount:.4g} {held if amount != 1 else 'activation'}"
    return format_bytes(amount)
