"""Direct tests of what follows from lists of tasks: what waits for what, and when each task runs."""

from __future__ import annotations

import pytest

from jaxpp_async import schedules
from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.timing import (
    ScheduleTiming,
    ScheduleWait,
    bubble_fraction,
    dependencies,
    find_deadlock,
    global_order,
    idle_times,
    num_stages_of,
    peak_activations,
    split_backwards,
    stage_actors,
    time_schedule,
    time_until_deadlock,
)

F00, F01, B00, B01 = Task(0, "fwd", 0), Task(0, "fwd", 1), Task(0, "bwd", 0), Task(0, "bwd", 1)
I00, W00, I01, W01 = (Task(0, ty, stage) for stage in (0, 1) for ty in ("bwd_input", "bwd_weight"))
PIPELINE = [[F00, B00], [F01, B01]]


@pytest.mark.parametrize(
    ("task", "needs"),
    [
        (F00, ()),
        (F01, (F00,)),
        (B01, (F01,)),
        (B00, (F00, B01)),
        (W00, (I00,)),
        (I01, (F01,)),
        (I00, (F00, B01)),
    ],
    ids=str,
)
def test_a_task_waits_for_the_stage_before_it_or_behind_it(task, needs):
    assert dependencies(task, num_stages=2) == needs


def test_a_backward_waits_for_the_first_half_of_one_that_is_split():
    assert dependencies(B00, 2, split={(1, 0)}) == (F00, I01)
    assert split_backwards([[I00, W00], [B01]]) == {(0, 0)}


def test_each_task_runs_as_soon_as_its_actor_and_what_it_needs_are_done():
    timeline = time_schedule(PIPELINE, {"fwd": 1, "bwd": 2})
    assert timeline == ScheduleTiming(((0, 4), (1, 2)), ((1, 6), (2, 4)))
    assert timeline.makespan == 6
    assert time_schedule(PIPELINE, lambda task: 1 + task.stage).makespan == 6
    assert time_schedule([]).makespan == 0


def test_figures_of_a_pipeline_of_two():
    assert bubble_fraction(PIPELINE) == 0.5
    assert idle_times([*PIPELINE, []]) == (2, 0, 0)
    assert peak_activations([[F00, Task(1, "fwd", 0), I00, W00], [F01, B01]]) == (2, 1)
    assert (num_stages_of(PIPELINE), num_stages_of([[]])) == (2, 0)
    assert stage_actors([[F01], [F00]]) == (1, 0)
    assert bubble_fraction([[], []]) == 0.0


def test_all_tasks_in_one_order_go_by_time_and_then_by_actor():
    assert global_order(PIPELINE) == [(0, F00), (1, F01), (1, B01), (0, B00)]


def test_a_deadlock_is_a_circle_of_actors_each_with_what_it_waits_for():
    other = Task(1, "fwd", 0)
    lists = [[Task(1, "bwd", 0), F00, other], [F01, Task(1, "fwd", 1), Task(1, "bwd", 1)]]
    timeline = time_until_deadlock(lists)
    assert timeline.ends == ((), ())
    waits = find_deadlock(lists, timeline)
    assert waits == (ScheduleWait(0, 0, Task(1, "bwd", 0), other, 0, 2, Task(1, "bwd", 0)),)
    with pytest.raises(ScheduleError) as caught:
        time_schedule(lists)
    assert str(caught.value) == (
        "the schedule deadlocks:\n  actor 0, step 0: bwd(stage 0, mb 1) waits for fwd(stage 0, mb 1) on "
        "actor 0, step 2, which comes after bwd(stage 0, mb 1)"
    )


def test_a_task_that_nobody_runs_is_named():
    (wait,) = find_deadlock([[F01]], time_until_deadlock([[F01]]))
    said = str(wait)
    assert said == "actor 0, step 0: fwd(stage 1, mb 0) waits for fwd(stage 0, mb 0), which no actor runs"


def test_a_wait_for_the_task_that_the_other_actor_stands_at_says_no_more_than_that():
    wait = ScheduleWait(0, 1, B00, B01, need_actor=1, need_step=2, head=B01)
    assert str(wait) == "actor 0, step 1: bwd(stage 0, mb 0) waits for bwd(stage 1, mb 0) on actor 1, step 2"


def test_the_name_of_the_last_release_still_works():
    with pytest.warns(DeprecationWarning, match=r"schedules\.simulate is now called time_schedule"):
        assert schedules.simulate is time_schedule
