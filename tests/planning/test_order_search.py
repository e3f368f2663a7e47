"""The polish of task lists: valid, never slower, within the memory."""

from __future__ import annotations

import random

import pytest
from small_pipelines import drawn_problem

from jaxpp_async.planning.evaluation import TaskTable, fits
from jaxpp_async.planning.named import named_order
from jaxpp_async.planning.order_search import improve_order, merge_backwards
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.schedules import Std1F1B, ZeroBubbleH1, ZeroBubbleV, resolve


@pytest.mark.parametrize("schedule", [Std1F1B, ZeroBubbleH1, ZeroBubbleV])
@pytest.mark.parametrize("seed", range(3))
def test_changed_lists_are_valid_and_not_slower(schedule, seed):
    rng = random.Random(seed)
    num_stages = 6 if schedule is ZeroBubbleV else 3
    problem = drawn_problem(rng, num_layers=num_stages, num_actors=3, num_microbatches=4)
    order = named_order(schedule(num_stages), 4, 3)
    table = TaskTable(problem.stages(tuple(range(1, num_stages))), order.actors, 4, 3)
    before = table.rows_of(order.rows)
    caps = [peak * 1.1 for peak in table.peak_bytes(before)]
    better = improve_order(table, before, caps, rng, 150)
    merged = merge_backwards(table, better)
    for rows in (better, merged):
        lists = [list(row) for row in table.tasks_of(rows)]
        resolve(lists, num_stages=num_stages, num_microbatches=4, num_actors=3)
        assert fits(table.peak_bytes(rows), caps)
        assert table.step_s(rows) <= table.step_s(before)
    assert table.rows_of(order.rows) == before


def test_halves_join_where_nobody_waits_for_the_first():
    """With one actor nobody does; each whole backward saves a dispatch."""
    problem = PipelineProblem((Layer(1, 1, 1),) * 2, 1, 3, dispatch_s=0.5)
    order = named_order(ZeroBubbleH1(2), 3, 1)
    table = TaskTable(problem.stages((1,)), order.actors, 3, 1)
    merged = merge_backwards(table, table.rows_of(order.rows))
    assert {task.ty for task in table.tasks_of(merged)[0]} == {"fwd", "bwd"}
    assert table.step_s(merged) == pytest.approx(6 * (1.5 + 2.5))


def test_a_list_without_tasks_stays():
    table = TaskTable(PipelineProblem((Layer(1, 1, 1),), 2, 1).stages(()), (1,), 1, 2)
    rows = [[], [0, 1, 2]]
    assert improve_order(table, rows, [9, 9], random.Random(0), 10)[0] == []
