"""Which edges of a small graph are cut."""

from __future__ import annotations

import pytest

from jaxpp_async.compiler.minimum_cut import END, INFINITE, START, cost_scale, end_side


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        pytest.param({(START, 2): 3, (2, END): 5}, {END, 2}, id="the cheaper edge of a chain"),
        pytest.param({(START, 2): 5, (2, END): 5}, {END}, id="of equal cuts the one nearest to the end"),
        pytest.param(
            {(START, 2): 1, (START, 3): 1, (2, 3): INFINITE, (3, END): 3}, {END, 2, 3}, id="a diamond"
        ),
        pytest.param({(2, END): 3}, {END, 2}, id="what no edge enters"),
        pytest.param({}, {END}, id="no edges"),
    ],
)
def test_the_end_s_side(edges, expected):
    heads, tails = zip(*edges, strict=True) if edges else ((), ())
    assert end_side(4, heads, tails, list(edges.values())) & ({END, 2, 3} if edges else {END}) == expected


@pytest.mark.parametrize("total", [0, 1, INFINITE // 2, INFINITE, 10**15])
def test_scaled_costs_are_finite(total):
    assert total // cost_scale(total) < INFINITE // 2 + 1
