"""Tests of `view/html.py`: the page has all of the drawing and loads nothing."""

import json
import re

from jaxpp_async.view.drawing import Cell, Drawing, Row
from jaxpp_async.view.html import PAGE_VERSION, TICKS, page_version, to_html

DRAWING = Drawing(
    "a </script> step",
    (
        Row(
            "actor 0",
            (Cell(0, 1, "forward", "0", "fwd(stage 0, mb 0)"), Cell(1, 4, "backward", "0", "</script><b>")),
            planned=(Cell(0, 2, "forward"),),
            memory=((0.0, 10.0), (1.0, 30.0)),
        ),
    ),
    cap=40.0,
    advice=("less is <more>",),
)


def data(page: str):
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_data_are_the_drawing_in_whole_numbers_of_ticks():
    found = data(to_html(DRAWING))
    assert (found["kinds"], found["striped"]) == (["forward", "backward"], [])
    assert (found["end"], found["cap"], found["held"], found["unit"]) == (4, 40, "bytes", "s")
    row = found["rows"][0]
    assert row["cells"]["start"] == [0, TICKS // 4] and row["cells"]["end"] == [TICKS // 4, TICKS]
    assert row["cells"]["title"][1] == "</script><b>"
    assert row["planned"]["end"] == [TICKS // 2]
    assert row["memory"] == [[0, 10], [TICKS // 4, 30]]


def test_the_page_loads_nothing_and_its_script_and_style_are_small():
    page = to_html(DRAWING)
    assert not re.search(r"(src|href|url)\s*[=(]", page.replace("--", ""))
    assert "http" not in page and "import" not in page
    assert len(page) < 30_000


def test_names_are_escaped():
    page = to_html(DRAWING)
    assert "<title>a &lt;/script&gt; step</title>" in page
    assert "<li>less is &lt;more&gt;</li>" in page
    assert page.count("</script>") == 2


def test_the_page_says_what_is_pale_and_how_much_is_held():
    page = to_html(DRAWING)
    assert ">pale: as planned<" in page and ">below: memory, at most 30 B of 40 B<" in page


def test_a_page_is_known_by_its_mark():
    assert page_version(to_html(DRAWING)) == PAGE_VERSION
    assert page_version("<html><!-- jaxpp_async page 1 --></html>") is None
