"""Direct tests of the grids that errors show, and of what is wrong with a schedule."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.builtin import GPipe
from jaxpp_async.schedules.validate import (
    MAX_CELL,
    WHAT_TO_PASS,
    format_grid,
    format_steps,
    format_task,
    resolve,
)

F, B = Task(0, "fwd", 0), Task(0, "bwd", 0)

# ---------------------------------------------------------------- grids


def test_a_grid_shows_when_each_task_runs_and_where_an_actor_idles():
    tasks = [[F, B], [Task(0, "fwd", 1), Task(0, "bwd", 1)]]
    assert format_grid(tasks) == "\n".join(
        [
            "time     0    1    2    3",
            "actor 0  0F0  .    .    0B0",
            "actor 1  .    1F0  1B0  .",
        ]
    )
    assert format_task(F) == "fwd(stage 0, mb 0)"


def test_marked_entries_stand_in_brackets_whatever_they_are():
    rows = [[F, "something quite long"], [Task(2, "huh", 1)], []]
    assert format_steps(rows, {(0, 1)}) == "\n".join(
        [
            "step     0    1",
            "actor 0  0F0  ['something ~]",
            "actor 1  1?2",
            "actor 2",
        ]
    )
    assert len("'something ~") == MAX_CELL


def test_of_a_large_schedule_the_part_nearest_to_the_marks_is_shown():
    rows = [[Task(i, "fwd", actor) for i in range(40)] for actor in range(20)]
    lines = format_steps(rows, {(0, 0), (19, 39)}).split("\n")
    assert lines[0].split() == ["step", *"0123456", "..", *map(str, range(33, 40))]
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "actor 0", "actor 1", "actor 2", "actor 3", "..", "actor 16", "actor 17", "actor 18", "actor 19",
        "(part of 20 actors x 40 steps)",
    ]  # fmt: skip
    assert "[0F0]" in lines[1]
    assert "[19F39]" in lines[9]


# ---------------------------------------------------------------- checks


def check(schedule, **options):
    return resolve(schedule, **{"num_stages": 1, "num_microbatches": 1, "num_actors": 1, **options})


def test_a_valid_schedule_comes_back_as_frozen_lists_of_plain_tasks():
    numpy_task = Task(np.int64(0), "fwd", np.int32(0))
    assert check([[numpy_task, B]]) == ((F, B),)
    assert [type(task.i) for task in check([[numpy_task, B]])[0]] == [int, int]
    assert check(GPipe(1)) == ((F, B),)
    assert check([[F]], forward_only=True) == ((F,),)


class Own:
    """A schedule of one's own whose parts the test chooses."""

    def __init__(self, num_stages=1, tasks=lambda m, a: [[F, B]]):
        self.num_stages, self.tasks = num_stages, tasks


def fails(*_):
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (GPipe, "GPipe: this is a class, not a schedule; write GPipe(num_stages=1)"),
        (7, f"7: this is not a schedule (type int); {WHAT_TO_PASS}"),
        (Own(num_stages="1"), "Own: its num_stages is '1' (type str); make it an int"),
        (
            Own(num_stages=2),
            "Own: it has 2 stages and the loop body 1 stage (0 pipeline_yields); make a schedule of 1 stage "
            "or a loop body with 1 pipeline_yield",
        ),
        (Own(tasks=fails), "Own: tasks(num_microbatches=1, num_actors=1) raised KeyError: 'lost'"),
        (
            Own(tasks=lambda m, a: None),
            "Own: tasks(num_microbatches=1, num_actors=1) returned None (type NoneType); return a list "
            "with one list of Tasks an actor",
        ),
        (
            [F, B],
            "the schedule: entry 0 is Task(i=0, ty='fwd', stage=0) (type Task), not a list of Tasks; give ",
        ),
        (
            [[F, B], []],
            "the schedule: 2 lists of tasks for 1 actor; give every actor of the mesh one list, in order ",
        ),
        (
            [[F, (0, "bwd", 0)]],
            "the schedule: actor 0, step 1: (0, 'bwd', 0) (type tuple) is not a Task; make every ",
        ),
        (
            [[F, Task(0, "back", 0)]],
            "the schedule: actor 0, step 1: 'back' (type str) is not a type of task; ty is ",
        ),
        (
            [[F, Task(True, "bwd", 0)]],
            "the schedule: actor 0, step 1: the microbatch of a bwd is True (type bool); ",
        ),
        ([[F, Task(1, "bwd", 0)]], "the schedule: actor 0, step 1: bwd(stage 0, mb 1) is out of range; the "),
        (
            [[F, B, F]],
            "the schedule: actor 0, step 2: fwd(stage 0, mb 0) is there twice (first at actor 0, step 0); ",
        ),
        (
            [[F]],
            "the schedule: bwd(stage 0, mb 0) is missing; a step of 1 stage and 1 microbatch runs every ",
        ),
        (
            [[B, F]],
            "the schedule: actor 0, step 0: bwd(stage 0, mb 0) runs before fwd(stage 0, mb 0) (step 1), ",
        ),
        (
            [[F, B, Task(0, "bwd_weight", 0)]],
            "the schedule: bwd(stage 0, mb 0) and bwd_weight(stage 0, mb 0) are both there; run a ",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value)[:40],
)
def test_a_wrong_schedule_is_refused_with_what_is_wrong_and_what_to_do(schedule, says):
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert str(caught.value).startswith(says)


def test_an_error_begins_with_the_users_line():
    with pytest.raises(ScheduleError, match=r"^train.py:41: GPipe\(num_stages=2\): it has 2 stages and "):
        check(GPipe(2), where="train.py:41")


def test_a_wrong_number_of_stages_lists_the_boundaries_of_one_line_together():
    with pytest.raises(ScheduleError) as caught:
        check(GPipe(1), num_stages=4, markers=["m.py:3", "m.py:3", "m.py:9"])
    assert str(caught.value).split("\n")[1:] == [
        "every call in the loop body ends a stage; it has:",
        "  m.py:3 (2 calls)",
        "  m.py:9",
    ]


def test_a_stage_on_two_actors_is_refused_with_both_places():
    with pytest.raises(ScheduleError, match=r"stage 0 is on two actors: fwd\(stage 0, mb 0\) on actor 0, "):
        check([[F], [B]], num_actors=2)
