"""The time of a run is divided completely, each piece once."""

from __future__ import annotations

from typing import get_args

import pytest

from jaxpp_async.page.goodput import _DIVISIONS, GoodputMeter, Item, Occurrence


def test_each_second_belongs_to_one_item():
    meter = GoodputMeter(100.0)
    meter.divide("start", 103.0)
    meter.divide("compilation", 110.0, 5.0)  # two seconds of the user's own before it
    assert meter.divide("step", 112.0, 1.0) == 1.0
    assert meter.divide("step", 114.0, 3.0) == 2.0  # it was sent while the one before ran
    spent = meter.goodput(120.0, is_step_under_way=False)
    assert spent.spent_s == {"start": 3, "compile": 5, "steps": 3, "restarts": 0, "between": 9}
    assert spent.total_s == 20 and spent.ratio == pytest.approx(0.15)


def test_a_restart_loses_the_step_under_way_and_the_steps_that_are_run_again():
    meter = GoodputMeter(0.0)
    meter.divide("start", 0.0)
    meter.divide("step", 10.0, 10.0)
    meter.divide("failure", 14.0, 4.0)
    meter.divide("restart", 20.0, 6.0)
    meter.divide("repetition", 20.0)
    meter.divide("step", 25.0, 1.0)  # four seconds of steps that had counted before
    assert meter.goodput(25.0, is_step_under_way=True).spent_s == {
        "start": 0, "compile": 0, "steps": 11, "restarts": 14, "between": 0,
    }  # fmt: skip


def test_a_step_under_way_does_not_lower_the_ratio():
    meter = GoodputMeter(0.0)
    meter.divide("start", 0.0)
    meter.divide("step", 10.0, 10.0)
    assert meter.goodput(19.0, is_step_under_way=True).ratio == 1.0
    assert meter.goodput(20.0, is_step_under_way=False).ratio == 0.5


def test_a_failure_that_ends_the_run_counts_until_its_end():
    meter = GoodputMeter(0.0)
    meter.divide("start", 2.0)
    meter.divide("failure", 5.0, 3.0)
    meter.divide("end", 6.0)
    assert meter.goodput(6.0, is_step_under_way=False).spent_s["restarts"] == 4.0


def test_times_that_go_back_take_nothing_away():
    meter = GoodputMeter(10.0)
    meter.divide("start", 9.0)
    meter.divide("step", 8.0, 1.0)
    assert meter.goodput(10.0, is_step_under_way=False).total_s == 0.0
    assert meter.goodput(10.0, is_step_under_way=False).ratio == 0.0


def test_each_occurrence_has_its_row():
    assert set(_DIVISIONS) == set(get_args(Occurrence))
    assert {row.item for row in _DIVISIONS.values()} | {row.then for row in _DIVISIONS.values()} == {
        None, *get_args(Item),
    } - {"start"}  # fmt: skip
