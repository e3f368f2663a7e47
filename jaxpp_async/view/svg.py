"""Show a drawing as SVG: one picture that loads nothing and suits light and dark pages.

A picture stays below `MOST_BYTES`: it is made with less and less detail until it does. At first each cell is
a rectangle with its text and a tooltip; then cells have neither. A drawing of more than `MOST_CELLS` cells is
shown as areas: the height of a colour is its share of the time (`aggregate.py`). Many actors share rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from textwrap import wrap

import numpy as np

from jaxpp_async.view.aggregate import (
    MOST_CELLS,
    BinnedRow,
    Bins,
    bin_row,
    join_rows,
    largest_of_bins,
)
from jaxpp_async.view.drawing import (
    CELL_KINDS,
    NUMBERS,
    Cell,
    CellKind,
    Drawing,
    Row,
    format_held,
    format_time,
)
from jaxpp_async.view.palette import CELL_TEXT, DARK, INKS, LIGHT, Paper

WIDTH = 960
"""The width of a picture, in pixels."""

MARGIN, TOP, AXIS = 14, 58, 26
ROW, GAP, MEMORY = 22, 6, 14
"""The heights of a row, of the space between rows, and of the bytes below a row, in pixels."""

NUM_BINS = 480
"""The number of intervals in which a picture shows shares, at most."""

MOST_BYTES = 190_000
"""The most bytes of a picture."""

MOST_ROWS = 64
"""The most rows of areas; several actors share a row if there are more of them."""

STEPS = 4
"""The number of heights of an area in one pixel."""

ADVICE_WIDTH = 140
"""The most characters of a line of advice, which fit into the width of a picture."""


def to_svg(drawing: Drawing) -> str:
    """Return a drawing as the text of an SVG file.

    Args:
        drawing: the drawing.
    """
    text = ""
    for picture in _pictures(drawing):
        text = picture.text()
        if len(text.encode()) <= MOST_BYTES:
            break
    return text


def _pictures(drawing: Drawing) -> Iterator[_Picture]:
    """Return pictures of a drawing, each with less detail than the one before."""
    if drawing.num_cells <= MOST_CELLS:
        yield _Picture(drawing, drawing.rows)
        yield _Picture(drawing, drawing.rows, has_texts=False)
    binned = [bin_row(row, drawing.end, NUM_BINS) for row in drawing.rows]
    factor, together = 1, -(-len(binned) // MOST_ROWS)
    while True:
        groups = [binned[first : first + together] for first in range(0, len(binned), together)]
        yield _Picture(drawing, [join_rows(group).coarser(factor) for group in groups], together=together)
        if factor < 8:
            factor *= 2
        elif len(groups) > 1:
            together *= 2
        else:
            return


class _Picture:
    """The layout of one picture.

    Args:
        drawing: the drawing.
        rows: its rows, or shares that stand for them.
        has_texts: whether cells have their text and a tooltip.
        together: the number of actors that share a row.
    """

    def __init__(
        self,
        drawing: Drawing,
        rows: Sequence[Row] | Sequence[BinnedRow],
        *,
        has_texts: bool = True,
        together: int = 1,
    ) -> None:
        self.drawing, self.rows, self.has_texts = drawing, rows, has_texts
        self.left = MARGIN + 8 + round(6.6 * max((len(row.name) for row in rows), default=0))
        self.right = WIDTH - MARGIN
        self.scale = (self.right - self.left) / drawing.end if drawing.end > 0 else 0.0
        self.has_memory = any(row.memory for row in drawing.rows)
        is_crowded = any(isinstance(row, BinnedRow) for row in rows)
        self.row_height = 10 if is_crowded and len(rows) > 24 else ROW
        self.pitch = self.row_height + (MEMORY if self.has_memory else 0) + (3 if is_crowded else GAP)
        has_numbers = has_texts and not is_crowded
        notes = [note for note in drawing.notes if has_numbers or note != NUMBERS]
        shared = [f"a row is the mean of {together} actors"] if together > 1 else []
        self.notes = "; ".join([*shared, *notes])
        legend = sum(34 + round(6.4 * len(kind)) for kind in drawing.kinds)
        self.notes_fit = MARGIN + legend + 6.4 * len(self.notes) <= self.right
        self.top = TOP if self.notes_fit else TOP + 18
        self.bottom = self.top + len(rows) * self.pitch
        self.advice = [
            line for text in drawing.advice for line in wrap(text, ADVICE_WIDTH, subsequent_indent=" ")
        ]

    def text(self) -> str:
        """Return the text of the SVG file."""
        drawing = self.drawing
        height = self.bottom + AXIS + 18 * len(self.advice) + (8 if self.advice else 0)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" style="max-width:100%;height:auto" role="img" class="jx" '
            'font-family="system-ui,sans-serif" font-size="12">',
            f"<title>{escape(drawing.title)}</title>",
            f"<style>{STYLE}</style>{_PATTERN}",
            f'<rect class="jx-paper" width="{WIDTH}" height="{height}" rx="6"/>',
            f'<text class="jx-text" x="{MARGIN}" y="22" font-size="14" font-weight="600">'
            f"{escape(drawing.title)}</text>",
            *self._legend(),
            *self._axis(),
        ]
        for number, row in enumerate(self.rows):
            parts += self._row(row, self.top + number * self.pitch)
        parts += self._advice()
        return "\n".join([*parts, "</svg>\n"])

    def _legend(self) -> Iterator[str]:
        x = MARGIN
        for kind in self.drawing.kinds:
            yield (
                f'<rect class="{_class(kind)}" x="{x}" y="34" width="12" height="12" rx="2"/>'
                f'{_striped(kind, x, 34, 12, 12)}<text class="jx-faint" x="{x + 17}" y="44">{kind}</text>'
            )
            x += 34 + round(6.4 * len(kind))
        if self.notes:
            place = f'x="{self.right}" y="{44 if self.notes_fit else 62}"'
            yield f'<text class="jx-faint" {place} text-anchor="end">{escape(self.notes)}</text>'

    def _axis(self) -> Iterator[str]:
        end, unit = self.drawing.end, self.drawing.unit
        for at in _ticks(end):
            x, anchor = px(self.left + at * self.scale), "middle"
            if self.right - float(x) < 16:
                anchor = "end"  # the text would leave the picture
            yield (
                f'<path class="jx-line" d="M{x} {self.top - 4}V{self.bottom}"/>'
                f'<text class="jx-faint" x="{x}" y="{self.bottom + 15}" text-anchor="{anchor}" '
                f'font-size="11">{format_time(at, unit) if at else 0}</text>'
            )

    def _row(self, row: Row | BinnedRow, top: float) -> Iterator[str]:
        height = self.row_height
        yield (
            f'<text class="jx-text" x="{self.left - 8}" y="{top + height / 2 + 4:g}" text-anchor="end">'
            f"{escape(row.name)}</text>"
        )
        if isinstance(row, BinnedRow):
            above = height // 4 if row.planned is not None else 0
            if row.planned is not None:
                yield f'<g opacity=".38">{"".join(self._areas(row.planned, top, above))}</g>'
            yield from self._areas(row.cells, top + above, height - above)
            memory = row.memory
        else:
            draw = self._cells if self.has_texts else self._plain_cells
            if row.planned:
                yield f'<g opacity=".38">{draw(row.planned, top, height, planned=True)}</g>'
            inset = 5 if row.planned and row.cells else 0
            yield draw(row.cells, top + inset, height - inset)
            memory = largest_of_bins(row.memory, self.drawing.end, NUM_BINS) if row.memory else None
        if memory is not None:
            yield from self._memory(memory, top + height + 1)

    def _cells(self, cells: Sequence[Cell], top: float, height: float, *, planned: bool = False) -> str:
        return "".join(self._cell(cell, top, height, planned=planned) for cell in cells)

    def _plain_cells(self, cells: Sequence[Cell], top: float, height: float, *, planned: bool = False) -> str:
        """Return cells without texts and tooltips, all of a kind as one path."""
        drawn = ""
        kinds: set[CellKind] = {cell.kind for cell in cells}
        for kind in sorted(kinds, key=CELL_KINDS.index):
            path = "".join(
                f"M{px(x)} {top:g}v{height:g}h{px(width)}v-{height:g}z"
                for x, width in map(self._place, (cell for cell in cells if cell.kind == kind))
            )
            drawn += f'<path class="{_class(kind)}" d="{path}"/>'
            if INKS[kind].pattern and not planned:
                drawn += f'<path fill="url(#jx-stripes)" d="{path}"/>'
        return drawn

    def _place(self, cell: Cell) -> tuple[float, float]:
        """Return where a cell begins and how wide it is; neighbours of the same kind can be told apart."""
        width = (cell.end - cell.start) * self.scale
        return self.left + cell.start * self.scale, max(width - 0.6 if width > 3 else width, 0.4)

    def _cell(self, cell: Cell, top: float, height: float, *, planned: bool = False) -> str:
        x, drawn_width = self._place(cell)
        width = (cell.end - cell.start) * self.scale
        place = f'x="{px(x)}" y="{top:g}" width="{px(drawn_width)}" height="{height:g}"'
        title = f"<title>{escape(cell.title)}</title>" if cell.title and not planned else ""
        drawn = f'<rect class="{_class(cell.kind)}" {place} rx="{1.5 if width > 6 else 0:g}"'
        drawn += f">{title}</rect>" if title else "/>"
        if not planned:
            drawn += _striped(cell.kind, x, top, width, height)
            if cell.text and width >= 6.6 * len(cell.text) + 3:
                drawn += (
                    f'<text class="jx-in" x="{px(x + width / 2)}" y="{top + height / 2 + 4:g}">'
                    f"{escape(cell.text)}</text>"
                )
        return drawn

    def _areas(self, bins: Bins, top: float, height: float) -> Iterator[str]:
        upper = np.rint(STEPS * height * np.cumsum(bins.shares, axis=0)).astype(int)
        lower = np.vstack([np.zeros_like(upper[:1]), upper[:-1]])
        for kind, high, low in zip(bins.kinds, upper, lower, strict=True):
            yield self._area(_class(kind), kind, top + height, high, low)

    def _memory(self, most: np.ndarray, top: float) -> Iterator[str]:
        drawing, base = self.drawing, top + MEMORY - 2
        scale = (MEMORY - 2) / drawing.memory_top if drawing.memory_top else 0.0
        heights = np.rint(STEPS * most * scale).astype(int)
        title = f"at most {format_held(float(most.max()), drawing.held)}"
        yield self._area("jx-memory", title, base, heights, np.zeros_like(heights))
        if drawing.cap is not None and drawing.cap <= drawing.memory_top:
            y = base - drawing.cap * scale
            yield f'<path class="jx-cap" d="M{px(self.left)} {px(y)}H{px(self.right)}"/>'

    def _area(self, name: str, title: str, base: float, high: np.ndarray, low: np.ndarray) -> str:
        """Return an area over the width of the rows: the interval between two heights in each bin.

        Args:
            name: the class of the area.
            title: the text that is shown when somebody points at it.
            base: the position from which heights are measured upward.
            high, low: the upper and the lower height of each bin, in parts of a pixel (`STEPS`).
        """
        width = (self.right - self.left) / len(high)
        place = f"translate({px(self.left)} {base:g}) scale({width:.4f} {1 / STEPS:g})"
        path = _steps(high, low)
        return f'<path class="{name}" transform="{place}" d="{path}"><title>{escape(title)}</title></path>'

    def _advice(self) -> Iterator[str]:
        for number, text in enumerate(self.advice):
            x, y = MARGIN + (12 if text.startswith(" ") else 0), self.bottom + AXIS + 18 * (number + 1)
            yield f'<text class="jx-text" x="{x}" y="{y}">{escape(text.strip())}</text>'


def _steps(high: np.ndarray, low: np.ndarray) -> str:
    """Return the path of an area of steps, with one rectangle for each run of equal heights.

    Args:
        high, low: the upper and the lower height of each step, as whole numbers.
    """
    steps = np.flatnonzero(np.diff(high, prepend=high[0] - 1) | np.diff(low, prepend=low[0] - 1))
    ends = np.append(steps[1:], len(high))
    return "".join(
        f"M{first} {-below}v{below - above}H{last}v{above - below}z"
        for first, last, above, below in zip(
            steps.tolist(), ends.tolist(), high[steps].tolist(), low[steps].tolist(), strict=True
        )
        if above > below
    )


def _ticks(end: float, most: int = 8) -> list[float]:
    """Return round numbers from 0 to `end`."""
    if end <= 0:
        return []
    rough = end / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * k for k in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def px(value: float) -> str:
    """Return a position in a picture as text, such as `"12.5"`."""
    return f"{value:.1f}".removesuffix(".0")


def _class(kind: CellKind) -> str:
    return f"jx-{kind.replace(' ', '-')}"


def _striped(kind: CellKind, x: float, y: float, width: float, height: float) -> str:
    if not INKS[kind].pattern:
        return ""
    place = f'x="{px(x)}" y="{y:g}" width="{px(width)}" height="{height:g}"'
    return f'<rect fill="url(#jx-stripes)" {place} pointer-events="none"/>'


def _paper_style(paper: Paper) -> str:
    return (
        f".jx-paper{{fill:{paper.background}}}.jx-text{{fill:{paper.text}}}.jx-faint{{fill:{paper.faint}}}"
        f".jx-line{{stroke:{paper.lines};fill:none}}.jx-memory{{fill:{paper.memory}}}"
        f".jx-cap{{stroke:{paper.cap};stroke-dasharray:3 3;fill:none}}.jx-stripe{{stroke:{paper.faint}}}"
        f".jx-curve{{stroke:{paper.curve};fill:none}}.jx-band{{fill:{paper.curve};opacity:.25}}"
        f".jx-spike{{fill:{paper.curve}}}.jx-bad{{fill:{paper.cap}}}"
    )


STYLE = (
    _paper_style(LIGHT)
    + "".join(f".{_class(kind)}{{fill:{ink.light}}}" for kind, ink in INKS.items())
    + f".jx-in{{fill:{CELL_TEXT};text-anchor:middle;font-size:11px;pointer-events:none}}"
    + "@media(prefers-color-scheme:dark){"
    + _paper_style(DARK)
    + "".join(f".{_class(kind)}{{fill:{ink.dark}}}" for kind, ink in INKS.items() if ink.dark != ink.light)
    + "}"
)
"""The style of every picture: the classes of kinds, text and lines, on light and on dark pages."""

_PATTERN = (
    '<defs><pattern id="jx-stripes" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="jx-stripe" d="M0 0V6" stroke-width="1.2" opacity=".55"/>'
    "</pattern></defs>"
)
