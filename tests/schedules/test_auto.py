"""`Auto` as a value: its options, and the schedule of the first steps."""

import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import ScheduleError
from jaxpp_async.schedules.auto import WarmUp, schedule_in_use


def test_equal_options_are_one_schedule():
    assert jpp.Auto(2, "1GB") == jpp.Auto(num_stages=2, memory="1GB") and hash(jpp.Auto()) == hash(jpp.Auto())
    assert repr(jpp.Auto(memory="2GB")) == "Auto(num_stages=None, memory='2GB')"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 0}, r"Auto\(num_stages=\.\.\.\): expected a positive int, got 0"),
        ({"num_stages": "4"}, "expected a positive int, got '4'"),
        ({"num_stages": True}, "expected a positive int, got True"),
        ({"memory": "lots"}, r"Auto\(memory=\.\.\.\): memory is 'lots'; write bytes, or text such as '70GB'"),
        ({"memory": 0}, "memory is 0; write bytes"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ScheduleError, match=message):
        jpp.Auto(**options)


@pytest.mark.parametrize(
    ("auto", "num_marks", "num_actors", "stages"),
    [
        (jpp.Auto(), 16, 4, 4),
        (jpp.Auto(8), 16, 4, 8),
        (jpp.Auto(), 2, 4, 3),  # too few marks: all of them
        (jpp.Auto(8), 3, 4, 4),
        (jpp.Auto(), 0, 2, 1),
    ],
)
def test_the_first_steps_run_under_a_balanced_1f1b(auto, num_marks, num_actors, stages):
    used = schedule_in_use(auto, num_marks, num_actors)
    assert isinstance(used, WarmUp) and used.auto == auto
    assert used.plain == jpp.Std1F1B(stages, stages="balanced")
    assert used.tasks(6, num_actors) == jpp.Std1F1B(stages).tasks(6, num_actors)
    assert repr(used) == f"Std1F1B(num_stages={stages}, stages='balanced') for jpp.Auto"


def test_any_other_schedule_is_used_as_it_is():
    for schedule in (jpp.GPipe(2), [[], []]):
        assert schedule_in_use(schedule, 1, 2) is schedule


def test_an_auto_has_the_lists_of_its_first_steps():
    assert jpp.Auto().tasks(3, 2) == jpp.Std1F1B(2).tasks(3, 2)
    assert jpp.Auto(4).tasks(3, 2) == jpp.Std1F1B(4).tasks(3, 2)
