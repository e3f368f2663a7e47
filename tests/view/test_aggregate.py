"""Tests of `view/aggregate.py`: cells as shares of time in bins."""

import numpy as np
import pytest

from jaxpp_async.view.aggregate import bin_cells, bin_row, join_rows, largest_of_bins
from jaxpp_async.view.drawing import Cell, Row


def test_cells_are_divided_among_the_bins_that_they_touch():
    bins = bin_cells((Cell(0, 1.5, "forward"), Cell(1.5, 2, "backward"), Cell(3, 4, "forward")), 4.0, 4)
    assert bins.kinds == ("forward", "backward")
    np.testing.assert_allclose(bins.shares, [[1, 0.5, 0, 1], [0, 0.5, 0, 0]])


def test_coarser_bins_have_the_mean_of_the_finer_ones():
    bins = bin_cells((Cell(0, 1, "forward"), Cell(3, 4, "forward")), 4.0, 4).coarser(2)
    np.testing.assert_allclose(bins.shares, [[0.5, 0.5]])


@pytest.mark.parametrize("seed", range(5))
def test_bins_have_all_of_the_time_of_the_cells_and_never_more_than_a_bin_has(seed):
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.uniform(0, 10, 41))
    kinds = ("forward", "backward", "waiting")
    cells = [Cell(a, b, kinds[rng.integers(3)]) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    bins = bin_cells(cells, 10.0, 24)
    assert bins.shares.sum() * 10 / 24 == pytest.approx(sum(cell.end - cell.start for cell in cells))
    assert bins.shares.sum(axis=0).max() <= 1 + 1e-9


def test_a_row_without_cells_has_no_kinds():
    assert bin_cells((), 1.0, 3).shares.shape == (0, 3)


def test_the_memory_of_a_bin_is_the_most_held_in_it():
    memory = ((0.0, 5.0), (1.2, 9.0), (1.4, 2.0), (3.0, 4.0))
    np.testing.assert_allclose(largest_of_bins(memory, 4.0, 4), [5, 9, 2, 4])


def test_nothing_is_held_before_the_first_time():
    np.testing.assert_allclose(largest_of_bins(((2.0, 3.0),), 4.0, 4), [0, 0, 3, 3])


def test_joined_rows_have_the_mean_of_the_shares_and_the_most_memory():
    rows = (
        Row("actor 0", (Cell(0, 1, "forward"),), memory=((0.0, 5.0),)),
        Row("actor 1", (Cell(0, 2, "backward"),), (Cell(0, 1, "forward"),)),
    )
    joined = join_rows([bin_row(row, 2.0, 2) for row in rows])
    assert joined.name == "actor 0-1" and joined.cells.kinds == ("forward", "backward")
    np.testing.assert_allclose(joined.cells.shares, [[0.5, 0], [0.5, 0.5]])
    assert joined.planned is not None and joined.memory is not None
    np.testing.assert_allclose(joined.planned.shares, [[0.5, 0]])
    np.testing.assert_allclose(joined.coarser(2).memory, [5.0])
