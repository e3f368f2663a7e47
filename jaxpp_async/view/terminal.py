"""Show a drawing in a terminal: a line for each actor, in colour where the terminal has colours.

Each column stands for an equal interval of time. Its colour is that of the kind that takes most of it.
"""

from __future__ import annotations

import numpy as np
from rich.console import Group
from rich.text import Text

from jaxpp_async.base.printable import visible
from jaxpp_async.view.aggregate import bin_cells
from jaxpp_async.view.drawing import NUMBERS, Cell, Drawing, Row, format_held, format_time
from jaxpp_async.view.palette import CELL_TEXT, INKS


def to_terminal(drawing: Drawing, width: int, *, has_colours: bool = True) -> Group:
    """Return a drawing as lines of text for `rich.console.Console.print`.

    Texts of the drawing may come from a file of somebody else; they cannot command the terminal.

    Args:
        drawing: the drawing.
        width: the width of the terminal, in characters.
        has_colours: whether the terminal shows colours. Without them each column is the letter of its kind.
    """
    names = [visible(row.name, keep="") for row in drawing.rows]
    left = max(map(len, names), default=0) + 2
    memory = {row.name: max((size for _, size in row.memory), default=0.0) for row in drawing.rows}
    shown = {name: format_held(most, drawing.held) for name, most in memory.items()}
    right = 2 + max(map(len, shown.values())) if any(memory.values()) else 0
    columns = max(10, width - left - right)
    if (
        drawing.unit == "forwards" and drawing.end
    ):  # as many columns for each task, so that equal tasks look equal
        columns = max(round(drawing.end), columns // round(drawing.end) * round(drawing.end))
        columns = min(columns, max(10, width - left - right))
    lines = [Text(visible(drawing.title), style="bold")]
    for row, name in zip(drawing.rows, names, strict=True):
        line = Text(name.ljust(left)) + _line(row, drawing.end, columns, has_colours)
        if right:
            line.append("  " + shown[row.name].rjust(right - 2))
        lines.append(line)
    end = format_time(drawing.end, drawing.unit)
    lines.append(Text(" " * left + "0" + end.rjust(columns - 1), style="dim"))
    keys = Text(" " * left)
    for kind in drawing.kinds:
        ink = INKS[kind]
        keys.append(ink.letter, style=f"{CELL_TEXT} on {ink.light}" if has_colours else "")
        keys.append(f" {kind}  ")
    keys.append(NUMBERS if NUMBERS in drawing.notes else "")
    return Group(*lines, keys, *(Text(visible(text)) for text in drawing.advice))


def _line(row: Row, end: float, columns: int, has_colours: bool) -> Text:
    cells = row.cells or row.planned
    line = Text()
    if not cells:
        return line
    bins = bin_cells(cells, end, columns)
    largest, taken = bins.shares.argmax(axis=0), bins.shares.sum(axis=0)
    texts = _texts(cells, end, columns)
    for column in range(columns):
        if taken[column] < 0.5:
            line.append(" ")
            continue
        ink = INKS[bins.kinds[largest[column]]]
        if has_colours:
            line.append(texts.get(column, " "), style=f"{CELL_TEXT} on {ink.light}")
        else:
            line.append(texts.get(column, ink.letter))
    return line


def _texts(cells: tuple[Cell, ...], end: float, columns: int) -> dict[int, str]:
    """Return the character in each column that is part of a cell's text.

    A text begins in the second column of its cell, so that neighbours of one colour can be told apart.
    """
    found: dict[int, str] = {}
    for cell in cells:
        first, last = (int(np.ceil(at / end * columns - 0.5)) for at in (cell.start, cell.end))
        if cell.text and len(cell.text) < last - first and cell.text.isprintable():
            found |= {first + 1 + k: letter for k, letter in enumerate(cell.text)}
    return found
