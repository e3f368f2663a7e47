"""Tests of `view/history.py`: bounded memory that keeps each spike, what is not finite, and the mean."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from jaxpp_async.view.curves import Curve, curves_to_svg
from jaxpp_async.view.history import EXACT, Buckets, History


def history_of(values, exact=EXACT) -> History:
    history = History(exact)
    for step, value in enumerate(values):
        history.add(step, value)
    return history


def test_few_values_are_a_group_each():
    found = history_of([5.0, np.nan, 7.0]).buckets()
    assert found.steps.tolist() == [0, 1, 2] and found.num_bad.tolist() == [0, 1, 0]
    assert np.array_equal(found.mean, [5, np.nan, 7], equal_nan=True)


@pytest.mark.parametrize("num", [1, 9, 10, 11, 37, 1000, 1017])
def test_no_value_is_lost_and_memory_is_bounded(num):
    rng = np.random.default_rng(num)
    values = rng.normal(size=num)
    values[rng.integers(num, size=num // 5)] = np.inf
    history = history_of(values, exact=10)
    found, good = history.buckets(), values[np.isfinite(values)]
    assert len(found) <= 30 and history.num_values == num and history.last == (num - 1, values[-1])
    assert found.num_good.sum() == len(good) and found.num_bad.sum() == num - len(good)
    assert (found.first[1:] > found.last[:-1]).all() and (found.first[0], found.last[-1]) == (0, num - 1)
    assert np.nansum(found.mean * found.num_good) == pytest.approx(good.sum())
    for extremes, steps, extreme in (
        (found.least, found.least_step, good.min()),
        (found.most, found.most_step, good.max()),
    ):
        known = np.isfinite(extremes)
        assert np.array_equal(values[steps[known].astype(int)], extremes[known])
        assert extreme in extremes
    sizes = found.num_good + found.num_bad
    assert (np.diff(sizes) <= 0).all() and (sizes[-min(num, 10) :] == 1).all()


def test_the_line_of_a_chart_is_the_mean_also_on_a_long_run():
    """Five per cent of the steps are slow; the extremes of groups would average to more than twice this."""
    rng = np.random.default_rng(0)
    values = np.where(rng.random(10_000) < 0.05, 1.0, 0.1) * rng.uniform(0.9, 1.1, 10_000)
    shown = history_of(values).buckets().at_most(240)
    mean = (shown.mean * shown.num_good).sum() / 10_000
    assert mean == pytest.approx(values.mean()) and abs(np.median(shown.mean) - values.mean()) < 0.01


def test_a_spike_and_a_nan_of_one_step_of_100_000_stay_in_the_chart():
    values = np.linspace(3.0, 2.0, 100_000)
    values[1_200], values[2_000] = 50.0, np.nan
    svg = curves_to_svg([Curve("loss", "", history_of(values).buckets())])
    assert "max 50 at step 1200, 1 not finite" in svg
    assert "50 at step 1200</title>" in svg and "1 not finite about step 1920" in svg
    assert len(re.findall('class="jx-bad"', svg)) == 1


def test_a_copy_does_not_change():
    history = history_of([1.0], exact=4)
    copy = history.copy()
    for step in range(1, 50):
        history.add(step, 2.0)
    assert copy.buckets().mean.tolist() == [1.0] and copy.num_values == 1
    assert len(History().buckets()) == 0 and History().last is None


def test_many_values_become_groups_of_equal_numbers_of_steps():
    values = np.arange(100.0)
    values[[13, 57]] = [-50, np.inf]
    found = Buckets.of(range(100), values).at_most(10)
    assert found.least.tolist() == [0, -50, *range(20, 100, 10)] and found.least_step[1] == 13
    assert found.most.tolist() == [*range(9, 100, 10)]
    assert found.num_bad.tolist() == [0] * 5 + [1] + [0] * 4
    assert found.steps[0] == 4.5 and found.mean[0] == 4.5
    assert np.isclose(found.mean[5], (sum(range(50, 60)) - 57) / 9)  # of the finite values


def test_steps_far_from_each_other_leave_groups_out():
    found = Buckets.of([0.0, 1, 2, 1000], np.arange(4.0)).at_most(3)
    assert found.steps.tolist() == [1, 1000] and found.most.tolist() == [2, 3]


def test_no_values_equal_steps_and_values_that_are_too_large_to_add():
    assert len(Buckets.of([], []).ordered().at_most(5)) == 0
    assert Buckets.of(np.zeros(9), np.arange(9.0)).at_most(5).mean.tolist() == [4]
    assert Buckets.of(range(4), [1.7e308] * 4).at_most(1).mean.tolist() == [1.7e308]


def test_a_history_knows_since_when_its_values_are_not_finite():
    history = History()
    assert history.not_finite_since is None
    for step, value in enumerate((1.0, math.nan, 2.0, math.inf, math.nan)):
        history.add(step, value)
    assert history.not_finite_since == history.copy().not_finite_since == 3
    history.add(5, 0.0)
    assert history.not_finite_since is None
