"""Tests of `view/terminal.py`: a drawing as lines of text."""

import io

from rich.console import Console

from jaxpp_async.view.drawing import Cell, Drawing, Row
from jaxpp_async.view.terminal import to_terminal

DRAWING = Drawing(
    "two actors",
    (
        Row("actor 0", (Cell(0, 1, "forward", "0"), Cell(3, 5, "backward", "0")), memory=((0.0, 2.0),)),
        Row("actor 1", (Cell(1, 3, "backward", "0"),)),
    ),
    "forwards",
    "activations",
    advice=("use more microbatches",),
)


def printed(width: int, **options) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=options.pop("color_system", None)).print(
        to_terminal(DRAWING, width, **options)
    )
    return out.getvalue().splitlines()


def test_lines_without_colours_have_the_letters_of_the_kinds():
    lines = printed(56, has_colours=False)
    assert lines[0] == "two actors"
    assert lines[1].startswith("actor 0  F0FFF") and lines[1].endswith("2 activations")
    assert lines[2].startswith("actor 1        B0BBBBBB") and lines[2].endswith("0 activations")
    assert lines[3].split() == ["0", "5"]
    assert lines[4].split() == ["F", "forward", "B", "backward", "number:", "microbatch"]
    assert lines[5] == "use more microbatches"


def test_no_line_is_longer_than_the_terminal():
    for width in (40, 60, 80, 200):
        assert max(map(len, printed(width, has_colours=False))) <= width


def test_colours_are_those_of_the_palette():
    lines = printed(60, color_system="truecolor")
    assert "48;2;86;180;233m" not in lines[0]
    out = io.StringIO()
    Console(file=out, width=60, force_terminal=True, color_system="truecolor").print(to_terminal(DRAWING, 60))
    assert "48;2;86;180;233m" in out.getvalue()


def test_a_drawing_without_rows_is_its_title():
    out = io.StringIO()
    Console(file=out, width=60, color_system=None).print(to_terminal(Drawing("nothing ran", ()), 60))
    assert out.getvalue().splitlines()[0] == "nothing ran"


def test_texts_of_a_file_cannot_command_the_terminal():
    evil = "\x1b]0;pwned\x07\x1b[2J"
    row = Row(f"actor {evil}", (Cell(0, 9, "forward", evil, evil),))
    out = io.StringIO()
    drawing = Drawing(f"step {evil}", (row,), advice=(evil,))
    Console(file=out, width=100, color_system=None).print(to_terminal(drawing, 100, has_colours=False))
    assert "\x1b" not in out.getvalue() and "\x07" not in out.getvalue()
    assert out.getvalue().count("\\x1b]0;pwned\\x07") == 3
