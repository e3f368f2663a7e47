"""Tests of `view/drawing.py`: what a drawing knows of itself, and its words."""

from dataclasses import replace

import pytest

from jaxpp_async.view import to_html, to_svg
from jaxpp_async.view.drawing import Cell, Drawing, Row, format_held, format_time

DRAWING = Drawing(
    "a step",
    (
        Row("actor 0", (Cell(0, 2, "forward"), Cell(2, 5, "transfer")), memory=((0, 10.0), (2, 40.0))),
        Row("actor 1", (), planned=(Cell(1, 7, "backward"),)),
    ),
)


def test_a_drawing_ends_with_its_last_cell_and_knows_its_kinds_in_their_order():
    assert DRAWING.end == 7
    assert DRAWING.num_cells == 3
    assert DRAWING.kinds == ("forward", "backward", "transfer")
    assert DRAWING.most_held == 40


def test_a_drawing_says_what_is_pale_and_what_lies_below():
    row = Row("actor 0", (Cell(0, 1, "forward", "3"),))
    assert Drawing("numbered", (row,)).notes == ("number: microbatch",)
    assert DRAWING.notes == ("pale: as planned", "below: memory, at most 40 B")
    assert replace(DRAWING, cap=50, planned_text="at best").notes == (
        "pale: at best",
        "below: memory, at most 40 B of 50 B",
    )
    assert replace(DRAWING, cap=30).notes[1] == "below: memory, at most 40 B of 30 B, which is too much"
    assert Drawing("nothing", ()).notes == ()


@pytest.mark.parametrize(("cap", "top"), [(None, 40), (30, 40), (50, 50), (160, 160), (161, 40)], ids=str)
def test_a_cap_far_above_what_is_held_does_not_flatten_the_memory(cap, top):
    drawing = replace(DRAWING, cap=cap)
    assert drawing.memory_top == top
    assert ('class="jx-cap"' in to_svg(drawing)) == (cap is not None and cap <= top)
    assert f'"top":{top:.1f},' in to_html(drawing) or f'"top":{top},' in to_html(drawing)


def test_an_empty_drawing_has_no_length():
    empty = Drawing("nothing", ())
    assert (empty.end, empty.num_cells, empty.kinds, empty.most_held) == (0, 0, (), 0)


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (0, "s", "0"),
        (2.5e-6, "s", "2.5 us"),
        (0.0125, "s", "12.5 ms"),
        (3, "s", "3 s"),
        (2.5, "forwards", "2.5"),
    ],
)
def test_times_as_text(value, unit, text):
    assert format_time(value, unit) == text


@pytest.mark.parametrize(
    "amount, held, text",
    [
        (12, "bytes", "12 B"),
        (1500, "bytes", "1.5 kB"),
        (2e9, "bytes", "2 GB"),
        (1, "activations", "1 activation"),
        (4.0, "activations", "4 activations"),
    ],
)
def test_memory_as_text(amount, held, text):
    assert format_held(amount, held) == text
