"""The evaluator: by hand, and against the simulation of schedules."""

from __future__ import annotations

import random

import pytest
from small_pipelines import drawn_problem

from jaxpp_async.errors import ScheduleError
from jaxpp_async.planning.evaluation import TaskTable, evaluate, table_of
from jaxpp_async.planning.problem import Assignment, Layer, PipelineProblem
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules import NAMED, bubble_fraction

TWO = PipelineProblem((Layer(1, 1, 1, 8, 3, 4), Layer(2, 2, 2, 10, 5, 0, 7)), 2, 2, 100, 0.5, 8)


def task(text: str) -> Task:
    """`"0F1"` is the forward of stage 0 and microbatch 1, as in drawings of schedules."""
    types = {"F": "fwd", "B": "bwd", "I": "bwd_input", "W": "bwd_weight"}
    return Task(int(text[2:]), types[text[1]], int(text[0]))


def rows(*texts: str) -> tuple[tuple[Task, ...], ...]:
    return tuple(tuple(map(task, text.split())) for text in texts)


def test_two_stages_with_a_transfer_of_one_second_by_hand():
    whole = Assignment((1,), rows("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    # Stage 1 begins at 2 and works for 12 seconds; 1 s later stage 0 runs its last backward of 2 s.
    found = evaluate(TWO, whole)
    assert found.step_s == 2 + 12 + 1 + 2
    assert found.busy_s == (6, 12)
    assert found.peak_bytes == (16, 17)
    assert found.fits


def test_split_backwards_send_their_input_gradient_first_and_keep_bytes_for_the_weights():
    split = Assignment((1,), rows("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"))
    found = evaluate(TWO, split)
    assert found.step_s == 2 + 12  # actor 0 ends at 2 + 8 + 1 + 2 = 13
    # Actor 1 keeps 10, after the input gradient 5, with the next forward 15, and 10 after its input gradient.
    assert found.peak_bytes == (16, 7 + 15)


def test_stages_of_one_actor_hand_over_at_once():
    one = PipelineProblem((Layer(1, 1, 1), Layer(2, 2, 2)), 1, 1, latency_s=100)
    assert evaluate(one, Assignment((1,), rows("0F0 1F0 1B0 0B0"))).step_s == 9


def test_lists_that_wait_for_each_other_are_an_error():
    stuck = Assignment((1,), rows("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), "stuck lists")
    with pytest.raises(ScheduleError, match="the task lists of stuck lists deadlock"):
        evaluate(TWO, stuck)
    assert table_of(TWO, stuck).step_s(table_of(TWO, stuck).rows_of(stuck.rows)) == float("inf")


@pytest.mark.parametrize("schedule", NAMED)
def test_without_transfers_it_agrees_with_the_simulation_of_schedules(schedule):
    rng = random.Random(schedule.__name__)
    for num_actors, num_microbatches in ((2, 5), (3, 3), (4, 7)):
        num_stages = schedule.stages_per_actor[0] * num_actors
        problem = drawn_problem(
            rng, num_layers=num_stages, num_actors=num_actors, num_microbatches=num_microbatches
        )
        stages = PipelineProblem(problem.layers, num_actors, num_microbatches).stages(
            tuple(range(1, num_stages))
        )
        lists = schedule(num_stages).tasks(num_microbatches, num_actors)
        assignment = Assignment((), tuple(map(tuple, lists)))
        table = TaskTable(stages, assignment.actors, num_microbatches, num_actors)

        def seconds(task, table=table):
            return table.durations[table.number(task)]

        numbers = table.rows_of(lists)
        assert table.tasks_of(numbers) == assignment.rows
        busy = sum(seconds(task) for row in lists for task in row)
        makespan = busy / (1 - bubble_fraction(lists, seconds)) / num_actors
        assert table.step_s(numbers) == pytest.approx(makespan)
