"""Tests of `view/drawable.py`: which objects have pictures, and writing them to files."""

from jaxpp_async.view.drawable import Drawable
from jaxpp_async.view.drawing import Cell, Drawing, Row


class Clock(Drawable):
    def to_drawing(self, **options) -> Drawing:
        return Drawing("a clock", (Row("hand", (Cell(0, options.get("hours", 1), "forward"),)),))


def test_pictures_are_returned_and_written(tmp_path):
    assert Clock().to_svg(tmp_path / "clock.svg", hours=3) == (tmp_path / "clock.svg").read_text()
    page = Clock().to_html(tmp_path / "clock.html")
    assert page == (tmp_path / "clock.html").read_text() and page.startswith("<!doctype html>")
    assert Clock()._repr_html_().startswith("<svg")


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Clock().to_svg()
    assert list(tmp_path.iterdir()) == []
