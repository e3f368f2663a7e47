import pytest

from jaxpp_async import Std1F1B
from jaxpp_async.errors import PlanError, ScheduleError
from jaxpp_async.planning.plan import PlannedSchedule, format_row, parse_row
from jaxpp_async.program.instructions import Task


def test_rows_are_text_and_come_back():
    row = (Task(0, "fwd", 1), Task(12, "bwd_input", 0), Task(3, "bwd_weight", 2), Task(0, "bwd", 1))
    assert format_row(row) == "1F0 0I12 2W3 1B0" and parse_row(format_row(row)) == row
    assert parse_row("") == ()
    with pytest.raises(PlanError, match="'1X0' is no task of a plan"):
        parse_row("1F0 1X0")


def test_a_planned_schedule_is_for_its_microbatches_and_actors():
    rows = tuple(map(tuple, Std1F1B(2).tasks(3, 2)))
    schedule = PlannedSchedule(rows, (4,), "Std1F1B(2)")
    assert schedule.num_stages == 2 and schedule.stage_actors == (0, 1)
    assert [tuple(row) for row in schedule.tasks(3, 2)] == list(rows)
    with pytest.raises(
        ScheduleError, match="for 3 microbatches on 2 actors, and the step has 4 microbatches on 1"
    ):
        schedule.tasks(4, 1)
