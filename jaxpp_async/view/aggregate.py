"""Reduce a row of more cells than a picture has points to bins: the shares of the kinds of cells in time.

Values over steps are reduced by `history.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpp_async.view.drawing import CELL_KINDS, Cell, CellKind, Row

MOST_CELLS = 5_000
"""The number of cells up to which a picture shows each of them."""


@dataclass(frozen=True)
class Bins:
    """The shares of kinds in equal intervals of a row.

    Args:
        kinds: the kinds that occur.
        shares: the share of each kind in the time of each interval, of shape (kinds, bins), from 0 to 1.
    """

    kinds: tuple[CellKind, ...]
    shares: np.ndarray

    def coarser(self, factor: int) -> Bins:
        """Return bins of which each is as long as `factor` of these; `factor` divides their number."""
        return Bins(self.kinds, self.shares.reshape(len(self.kinds), -1, factor).mean(axis=2))


def bin_cells(cells: Sequence[Cell], end: float, num_bins: int) -> Bins:
    """Return the shares of kinds in equal intervals from 0 to `end`.

    Args:
        cells: the cells of a row, ascending, none overlapping another.
        end: the end of the last interval, in the drawing's unit.
        num_bins: the number of intervals.
    """
    times: dict[CellKind, list[tuple[float, float]]] = {}
    for cell in cells:
        times.setdefault(cell.kind, []).append((cell.start, cell.end))
    kinds: tuple[CellKind, ...] = tuple(kind for kind in CELL_KINDS if kind in times)
    width = end / num_bins if end > 0 else 1.0
    edges = width * np.arange(num_bins + 1)
    shares = np.zeros((len(kinds), num_bins))
    for place, kind in enumerate(kinds):
        starts, ends = np.array(times[kind]).T
        # The time that cells took until each edge; the difference of two edges is that of a bin.
        before = np.concatenate(([0.0], np.cumsum(ends - starts)))
        begun = np.searchsorted(starts, edges, side="right")
        unfinished = np.where(begun > 0, np.maximum(0.0, ends[np.maximum(begun - 1, 0)] - edges), 0.0)
        until = before[begun] - unfinished
        shares[place] = np.clip(np.diff(until) / width, 0.0, 1.0)
    return Bins(kinds, shares)


def largest_of_bins(memory: Sequence[tuple[float, float]], end: float, num_bins: int) -> np.ndarray:
    """Return the most bytes that are held in each of equal intervals from 0 to `end`.

    Args:
        memory: the bytes held from each time on, ascending in time.
        end: the end of the last interval.
        num_bins: the number of intervals.
    """
    times, sizes = np.array(memory).T
    width = end / num_bins if end > 0 else 1.0
    edges = width * np.arange(num_bins)
    held = np.searchsorted(times, edges, side="right") - 1
    most = np.where(held >= 0, sizes[np.maximum(held, 0)], 0.0)  # held when the interval begins
    np.maximum.at(most, np.minimum((times / width).astype(int), num_bins - 1), sizes)
    return most


@dataclass(frozen=True)
class BinnedRow:
    """One or several rows of a drawing as shares in equal intervals.

    Args:
        name: the text before the line.
        cells: the shares of the measured cells, or of those of a schedule.
        planned: the shares of the cells as they were planned behind measured ones; None without them.
        memory: the most that is held in each interval; None if it is not known.
    """

    name: str
    cells: Bins
    planned: Bins | None
    memory: np.ndarray | None

    def coarser(self, factor: int) -> BinnedRow:
        """Return a row of which each bin is as long as `factor` of these; `factor` divides their number."""
        return BinnedRow(
            self.name,
            self.cells.coarser(factor),
            None if self.planned is None else self.planned.coarser(factor),
            None if self.memory is None else self.memory.reshape(-1, factor).max(axis=1),
        )


def bin_row(row: Row, end: float, num_bins: int) -> BinnedRow:
    """Return a row as shares in equal intervals from 0 to `end`.

    Args:
        row: the row.
        end: the end of the last interval, in the drawing's unit.
        num_bins: the number of intervals.
    """
    return BinnedRow(
        row.name,
        bin_cells(row.cells or row.planned, end, num_bins),
        bin_cells(row.planned, end, num_bins) if row.planned and row.cells else None,
        largest_of_bins(row.memory, end, num_bins) if row.memory else None,
    )


def join_rows(rows: Sequence[BinnedRow]) -> BinnedRow:
    """Return several rows as one: the mean of their shares, and the most that any of them holds."""
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return first
    planned = [row.planned for row in rows if row.planned is not None]
    memory = [row.memory for row in rows if row.memory is not None]
    return BinnedRow(
        f"{first.name}-{last.name.rpartition(' ')[2]}",
        _mean([row.cells for row in rows], len(rows)),
        _mean(planned, len(rows)) if planned else None,
        np.max(memory, axis=0) if memory else None,
    )


def _mean(all_bins: Sequence[Bins], count: int) -> Bins:
    kinds: tuple[CellKind, ...] = tuple(k for k in CELL_KINDS if any(k in bins.kinds for bins in all_bins))
    shares = np.zeros((len(kinds), all_bins[0].shares.shape[1]))
    for bins in all_bins:
        shares[[kinds.index(kind) for kind in bins.kinds]] += bins.shares / count
    return Bins(kinds, shares)
