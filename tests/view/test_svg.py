"""Tests of `view/svg.py`: the pictures are valid SVG, small, and show what the drawing has."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from jaxpp_async.view.drawing import Cell, Drawing, Row
from jaxpp_async.view.svg import ADVICE_WIDTH, MOST_BYTES, to_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawing(num_actors: int, num_cells: int, **more) -> Drawing:
    kinds = ("forward", "backward")
    rows = [
        Row(
            f"actor {a}",
            tuple(
                Cell(k + a, k + a + 0.9, kinds[k % 2], str(k), f"task {k} <of> {a}") for k in range(num_cells)
            ),
            memory=tuple((float(k), 1e6 * (k % 7)) for k in range(num_cells)),
        )
        for a in range(num_actors)
    ]
    return Drawing("a <small> step", tuple(rows), **more)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_picture_has_every_cell_with_its_text_and_tooltip():
    svg = to_svg(drawing(2, 3, cap=2e7, advice=("move a layer & see",)))
    found = ET.fromstring(svg)
    cells = [r for r in found.iter(f"{SVG}rect") if r.get("class") in ("jx-forward", "jx-backward")]
    assert len(cells) == 6 + 2  # and two in the legend
    assert {"actor 0", "actor 1", "0", "1", "2", "move a layer & see", "a <small> step"} <= set(texts(svg))
    assert "task 1 <of> 0" in [t.text for t in found.iter(f"{SVG}title")]
    assert any("at most 2 MB of 20 MB" in text for text in texts(svg))


def test_planned_cells_are_behind_the_measured_ones_and_the_legend_says_so():
    row = Row("actor 0", (Cell(1, 2, "forward"),), planned=(Cell(0, 1, "forward"),))
    svg = to_svg(Drawing("t", (row,)))
    assert svg.index("opacity=") < svg.rindex("jx-forward")
    assert any("pale: as planned" in text for text in texts(svg))


def test_cells_lie_within_the_picture():
    found = ET.fromstring(to_svg(drawing(3, 20)))
    width = float(found.get("width", 0))
    for rect in found.iter(f"{SVG}rect"):
        assert (
            0 <= float(rect.get("x", 0)) <= float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width + 1
        )


def test_many_cells_become_areas_and_the_picture_stays_small():
    svg = to_svg(drawing(64, 1000))
    assert len(svg.encode()) < 200_000
    ET.fromstring(svg)
    assert svg.count("<rect") < 10 and svg.count('<path class="jx-forward"') == 64


def test_many_irregular_cells_stay_small_too():
    rows = []
    for a in range(64):
        at, cells = 0.0, []
        for k in range(800):
            long = 0.1 + (k * k * 31 + a * 17) % 13
            cells.append(Cell(at, at + long, ("forward", "backward", "waiting", "transfer")[(k * 7 + a) % 4]))
            at += long
        rows.append(Row(f"actor {a}", tuple(cells)))
    assert len(to_svg(Drawing("irregular", tuple(rows))).encode()) < 200_000


def test_a_drawing_without_cells_is_a_picture_too():
    assert texts(to_svg(Drawing("nothing ran", ()))) == ["nothing ran"]


def test_the_axis_has_a_few_round_numbers():
    shown = [text for text in texts(to_svg(drawing(1, 37))) if re.fullmatch(r"\d+( s)?", text)]
    assert "10 s" in shown and "30 s" in shown


def with_memory_and_plan(num_actors: int, num_cells: int) -> Drawing:
    rng = np.random.default_rng(0)
    kinds = ("forward", "backward", "transfer", "waiting", "update")
    rows = []
    for a in range(num_actors):
        at = np.sort(rng.random(2 * num_cells)).tolist()
        cells = tuple(
            Cell(at[2 * k], at[2 * k + 1], kinds[k % 5], str(k), f"fwd(stage {a}, mb {k})")
            for k in range(num_cells)
        )
        memory = tuple((float(x), float(rng.random() * 1e9)) for x in np.sort(rng.random(num_cells)))
        rows.append(Row(f"actor {a}", cells, cells, memory))
    return Drawing("t", tuple(rows))


@pytest.mark.parametrize(
    ("num_actors", "num_cells"), [(4, 600), (1, 2499), (64, 39), (64, 100), (300, 8), (300, 60), (1200, 5)]
)
def test_a_picture_stays_below_its_limit_whatever_the_drawing_has(num_actors, num_cells):
    drawn = with_memory_and_plan(num_actors, num_cells)
    svg = to_svg(drawn)
    assert len(svg.encode()) <= MOST_BYTES < 200_000
    ET.fromstring(svg)
    assert "pale: as planned" in svg and 'opacity=".38"' in svg
    names = [name for name in texts(svg) if name.startswith("actor")]
    assert (len(names) < num_actors) == ("a row is the mean of" in svg)
    assert names[0].startswith("actor 0") and names[-1].endswith(str(num_actors - 1))


def test_cells_without_texts_are_all_there():
    svg = to_svg(with_memory_and_plan(4, 600))
    places = re.findall(r'<path class="jx-(?:forward|backward|transfer|waiting|update)" d="([^"]*)"', svg)
    assert sum(path.count("M") for path in places) == 4 * 600 * 2


def test_a_small_share_of_every_bin_is_drawn():
    rows = []
    for a in range(40):
        cells = []
        for k in range(480):
            cells += [Cell(k, k + 0.95, "forward"), Cell(k + 0.96, k + 1, "transfer")]
        rows.append(Row(f"actor {a}", tuple(cells)))
    found = ET.fromstring(to_svg(Drawing("t", tuple(rows))))
    drawn = [path.get("d") for path in found.iter(f"{SVG}path") if path.get("class") == "jx-transfer"]
    assert len(drawn) == 40 and all(drawn)


def test_long_advice_is_broken_into_lines_that_fit():
    advice = " ".join(f"word{k}" for k in range(60))
    drawing = Drawing("a step", (Row("actor 0", (Cell(0, 1, "forward"),)),), advice=(advice, "short"))
    found = re.findall(r'<text class="jx-text" x="(\d+)" y="(\d+)">([^<]*)</text>', to_svg(drawing))
    lines = [text for *_, text in found]
    assert max(map(len, lines)) <= ADVICE_WIDTH and " ".join(lines).endswith(f"{advice} short")
    places = [int(y) for _, y, _ in found]
    height = re.search(r'viewBox="0 0 960 (\d+)"', to_svg(drawing))
    assert len(set(places)) == len(places) and height and places[-1] < int(height[1])
