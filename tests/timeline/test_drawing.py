"""Tests of `timeline/drawing.py`: what a step's picture shows."""

from __future__ import annotations

from small_timeline import STEP

from jaxpp_async.timeline.drawing import draw_timeline
from jaxpp_async.timeline.events import ActorTimeline
from jaxpp_async.timeline.timeline import Timeline
from jaxpp_async.view import Cell


def test_time_begins_when_the_first_actor_takes_the_step_up():
    first, second = draw_timeline(STEP).rows
    assert first.cells[0] == Cell(0, 2, "forward", "3", "fwd(stage 0, mb 3)")
    assert second.cells == (
        Cell(0, 2, "waiting", title="waiting"),
        Cell(2, 5, "transfer", title="transfer"),
        Cell(6, 10, "backward", "3", "bwd(stage 1, mb 3)"),
    )


def test_planned_cells_show_the_tasks_without_transfers_and_pauses():
    first, second = draw_timeline(STEP).rows
    assert [(cell.start, cell.end) for cell in (*first.planned, *second.planned)] == [(0, 2), (2, 6)]
    assert "pale: without transfers and pauses" in STEP.to_svg()
    assert "pale: without transfers and pauses" in STEP.to_html()


def test_memory_is_that_of_the_buffer_table_at_each_event():
    first, second = draw_timeline(STEP).rows
    assert first.memory == ((0, 16.0), (2, 0.0))
    assert second.memory == ((0, 8.0), (6, 24.0))


def test_the_bytes_that_an_actor_may_hold_are_a_line_in_the_picture():
    assert draw_timeline(STEP, cap=32).cap == 32
    assert 'class="jx-cap"' in STEP.to_svg(cap=32) and 'class="jx-cap"' not in STEP.to_svg()
    assert "at most 24 B of 32 B" in STEP.to_svg(cap=32)


def test_the_bill_is_beside_it():
    drawing = draw_timeline(STEP)
    assert drawing.title == "step 4 of 'train': 21.00 s on 2 actors"
    assert any(text.startswith("transfer") for text in drawing.advice)


def test_a_timeline_has_pictures():
    assert "<svg" in STEP.to_svg() and STEP._repr_html_() == STEP.to_svg()
    assert "fwd(stage 0, mb 3)" in STEP.to_html()


def test_an_actor_without_a_part_in_the_step_has_an_empty_row():
    idle = Timeline(0, "train", 0.0, 1.0, (ActorTimeline(0, ()),), ())
    assert draw_timeline(idle).rows[0].cells == ()
