"""Tests of `planning/drawing.py`: the picture of a plan."""

from __future__ import annotations

from msgspec import structs
from small_plan import PLAN

from jaxpp_async.planning.drawing import draw_plan
from jaxpp_async.view import Cell


def test_tasks_are_as_long_as_the_costs_say():
    first, second = draw_plan(PLAN).rows
    assert first.cells == (
        Cell(0, 1, "forward", "0", "fwd(stage 0, mb 0)"),
        Cell(3.5, 6.5, "backward", "0", "bwd(stage 0, mb 0)"),
    )
    assert [(cell.start, cell.end, cell.kind) for cell in second.cells] == [
        (1, 3, "forward"),
        (3, 3.5, "input gradient"),
        (3.5, 3.75, "weight gradient"),
    ]


def test_memory_and_advice_are_those_of_the_plan():
    drawing = PLAN.to_drawing()
    assert drawing.cap == 120
    assert [max(size for _, size in row.memory) for row in drawing.rows] == [100, 80]
    assert drawing.title == "plan of 'train': GPipe(2), 7.5 s a step predicted"
    assert drawing.advice[0] == (
        "the tasks of the loop, which are drawn, take 6.5 s; with transfers 6.5 s, and with what is outside "
        "the loop, the step takes 7.5 s"
    )
    assert drawing.advice[2] == "what would help: transfers that take no time: 3.0% less"


def test_the_schedule_of_a_plan_is_drawn_for_its_own_numbers():
    drawing = PLAN.schedule.to_drawing()
    assert len(drawing.rows) == 2 and "1 microbatch on 2 actors" in drawing.title


def test_a_plan_has_pictures():
    assert PLAN._repr_html_().startswith("<svg") and PLAN.to_html().startswith("<!doctype html>")


def test_memory_rises_with_what_forwards_keep_and_falls_with_backwards():
    first, second = draw_plan(PLAN).rows
    assert first.memory == ((0, 70), (0, 100), (6.5, 70))
    assert second.memory == ((0, 40), (1, 80), (3.5, 55), (3.75, 40))


def test_a_plan_that_does_not_know_what_is_kept_has_flat_memory():
    old = structs.replace(PLAN, kept_bytes=(), weight_kept_bytes=())
    assert [row.memory for row in draw_plan(old).rows] == [((0, 100),), ((0, 80),)]


def test_no_gap_is_printed_as_a_negative_zero():
    exact = structs.replace(PLAN, bound=PLAN.loop_s * (1 + 1e-9))
    assert exact.gap < 0 and "this one takes 6.5 s, 0.0% more" in str(exact)
