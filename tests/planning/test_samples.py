"""Direct tests of measured distributions."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from jaxpp_async.planning.samples import MAX_SAMPLES, LinkCost, Samples, fit_line


def test_samples_are_sorted_and_have_mean_and_quantiles():
    found = Samples.of([3.0, 1.0, 2.0, 6.0])
    assert found.seconds == (1, 2, 3, 6) and found.mean == 3
    assert [found.quantile(u) for u in (0, 0.24, 0.25, 0.5, 0.99)] == [1, 1, 2, 3, 6]
    assert found.draw(np.array([[0.0, 0.3], [0.6, 0.9]])).tolist() == [[1, 2], [3, 6]]


def test_negative_times_of_clocks_that_differ_count_as_none():
    assert Samples.of([-1e-6, 1.0]).seconds == (0, 1)


def test_many_samples_are_thinned_to_quantiles():
    values = np.random.default_rng(0).gamma(2.0, size=10_000)
    found = Samples.of(values)
    assert len(found.seconds) == MAX_SAMPLES
    assert found.mean == pytest.approx(values.mean(), rel=5e-3)
    assert found.quantile(0.9) == pytest.approx(np.quantile(values, 0.9), rel=1e-2)


@pytest.mark.parametrize("bad", [(), (-1.0,), (float("nan"),), (float("inf"),), (2.0, 1.0)])
def test_what_is_no_distribution_is_refused(bad):
    with pytest.raises(ValueError, match="distribution"):
        Samples(bad)
    text = msgspec.json.encode({"seconds": bad})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Samples)


def test_a_link_is_occupied_by_its_bytes_alone():
    link = LinkCost(Samples((1.0,)), 100.0)
    assert link.occupied_s(200) == 2
    assert LinkCost(Samples((1.0,))).occupied_s(1e9) == 0
    for rate in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="bytes_per_s of a link"):
            LinkCost(Samples((1.0,)), rate)


@pytest.mark.parametrize(
    ("sizes", "times", "expected"),
    [
        ([1, 2, 3], [3, 5, 7], (1, 2)),
        ([10, 20, 40], [1, 2, 4], (0, 0.1)),
        ([5], [10], (0, 2)),  # one size: all of the time is its bytes', unless there are none
        ([0], [4], (4, 0)),
        ([1, 2, 3], [3, 3, 3], (3, 0)),
        ([0, 10], [0, 100], (0, 10)),
    ],
)
def test_a_line_is_fitted_with_nothing_negative(sizes, times, expected):
    overhead, slope, error = fit_line(sizes, times)
    assert (overhead, slope) == pytest.approx(expected, abs=1e-9) and error < 1e-6


def test_times_that_fall_with_size_are_no_negative_slope():
    overhead, slope, _ = fit_line([1, 2], [2, 1])
    assert slope == 0 and 1 < overhead < 2


def test_what_weighs_more_is_fitted_better():
    sizes, times = [1, 2, 3], [1.0, 2.0, 4.0]
    _, slope, _ = fit_line(sizes, times, [1.0, 1.0, 1e-9])
    assert slope == pytest.approx(1, rel=1e-6)
    assert fit_line(sizes, times) == fit_line(sizes, times, [1.0, 1.0, 1.0])
