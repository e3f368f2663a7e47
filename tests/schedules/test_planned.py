"""Planned schedules: the counts, the marks and the one loop that a step must have to run by one."""

import pytest

from jaxpp_async import Std1F1B
from jaxpp_async.errors import PlanError, ScheduleError
from jaxpp_async.schedules.planned import PlannedSchedule, check_one_loop

ROWS = tuple(map(tuple, Std1F1B(2).tasks(3, 2)))


def test_a_planned_schedule_is_for_its_microbatches_and_actors():
    schedule = PlannedSchedule(ROWS, (4,), "Std1F1B(2)")
    assert schedule.num_stages == 2 and schedule.stage_actors == (0, 1)
    assert [tuple(row) for row in schedule.tasks(3, 2)] == list(ROWS)
    with pytest.raises(
        ScheduleError, match="for 3 microbatches on 2 actors, and the step has 4 microbatches on 1"
    ):
        schedule.tasks(4, 1)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((None,) * 8, r"for a step with 3 marks \(.*\), and the loop at a.py:4 has 8; plan again"),
        (
            ("x", None, None),
            "mark 0 has the name 'a', and in the loop at a.py:4 mark 0 has the name 'x'",
        ),
        ((None,) * 3, r"whose mark 0 has the name 'a', .* mark 0 has no name; plan again"),
        (("a", None, None), ""),
        (("a", "new", None), ""),
    ],
)
def test_a_planned_schedule_is_for_its_marks(names, message):
    schedule = PlannedSchedule(ROWS, (1,), mark_names=("a", None, None))
    if not message:
        schedule.check_marks(names, "a.py:4")
        return
    with pytest.raises(PlanError, match=message):
        schedule.check_marks(names, "a.py:4")


def test_a_planned_schedule_without_marks_is_for_any_loop():
    schedule = PlannedSchedule(ROWS, (1,))
    schedule.check_marks((None,) * 8, "a.py:4")
    check_one_loop([(schedule, "a.py:4"), (schedule, "a.py:9")])


def test_a_planned_schedule_is_for_one_loop():
    schedule = PlannedSchedule(ROWS, (1,), mark_names=(None,))
    check_one_loop([(schedule, "a.py:4"), (Std1F1B(2), "a.py:9")])
    with pytest.raises(PlanError, match=r"the step has 2 loops, at a.py:4 and a.py:9; give"):
        check_one_loop([(schedule, "a.py:4"), (schedule, "a.py:9")])
