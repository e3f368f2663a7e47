"""Pages and pictures in a real browser: a page of 64 actors opens, zooms and says what is pointed at.

The browser's pictures are kept in the folder that the environment variable `JAXPP_SCREENSHOTS` names, to be
looked at: JAXPP_SCREENSHOTS=/tmp pytest tests/view/test_pages_in_browser.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from browser import CHROMIUM, NO_CHROMIUM, Browser, Page
from small_timeline import STEP

from jaxpp_async.schedules import Std1F1B
from jaxpp_async.view import Cell, Curve, Drawing, Row, curves_to_html, to_html, to_svg
from jaxpp_async.view.drawing import CELL_KINDS
from jaxpp_async.view.palette import DARK, INKS, LIGHT

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

BOTH = pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])


@pytest.fixture(scope="module")
async def browser():
    async with Browser() as started:
        yield started


@pytest.fixture
def large(tmp_path):
    """The page of a step of 64 actors and 256 microbatches, which has 32,768 tasks."""
    Std1F1B(64).to_html(tmp_path / "large.html", num_microbatches=256, num_actors=64)
    return tmp_path / "large.html"


async def looked_at(page: Page, name: str) -> None:
    """Keep a picture of the page if somebody wants to look at it, and check that no script has failed."""
    data = await page.picture()
    assert data.startswith(b"\x89PNG") and len(data) > 5_000  # an empty page has less
    if folder := os.environ.get("JAXPP_SCREENSHOTS"):
        (Path(folder) / f"{name}.png").write_bytes(data)


async def shares(page: Page, image: str, *colours: str) -> list[float]:
    """Return the share of the points of a canvas or an image that have each colour, such as `"#56b4e9"`.

    Args:
        page: the page.
        image: JavaScript for a canvas, or for a promise of one.
        colours: the colours.
    """
    counted = await page.evaluate(f"""(async () => {{
      const canvas = await {image}, wanted = {json.dumps(colours)}.map((text) => parseInt(text.slice(1), 16));
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const counts = wanted.map(() => 0);
      for (let i = 0; i < data.length; i += 4) {{
        const k = wanted.indexOf((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
        if (k >= 0 && data[i + 3] === 255) counts[k]++;
      }}
      return counts.map((count) => (4 * count) / data.length);
    }})()""")
    return counted


CANVAS = 'document.getElementById("drawing")'


async def shown(page: Page, condition: str) -> tuple[float, float]:
    """Wait until a condition on the times `from` and `to`, which the page shows, is true; return them."""
    times = f"[+{CANVAS}.dataset.from, +{CANVAS}.dataset.to]"
    await page.wait_for(f"(([from, to]) => {condition})({times})")
    first, last = await page.evaluate(times)
    return first, last


async def test_a_page_of_64_actors_and_256_microbatches_opens(browser, large):
    page = await browser.open(large, size=(1400, 900))
    await looked_at(page, "large")
    forward, backward = await shares(page, CANVAS, INKS["forward"].light, INKS["backward"].light)
    assert 0.1 < forward < backward < 0.8


async def test_pointing_at_a_cell_says_what_it_is(browser, large):
    page = await browser.open(large, size=(1400, 900))
    box = await page.evaluate(f"{CANVAS}.getBoundingClientRect().toJSON()")
    await page.point(box["x"] + 75, box["y"] + 30)
    await page.wait_for("!document.getElementById('tip').hidden")
    tip = await page.text("#tip") or ""
    assert tip.startswith("actor 0\nfwd(stage 0, mb ") and "holds " in tip and "activation" in tip
    await page.point(box["x"] + 5, box["y"] + 30)  # at the name
    await page.wait_for("document.getElementById('tip').hidden")


async def test_wheel_keys_buttons_and_dragging_zoom_and_move(browser, large):
    page = await browser.open(large, size=(1400, 900))
    _, end = await shown(page, "from === 0 && to > 900")
    box = await page.evaluate(f"{CANVAS}.getBoundingClientRect().toJSON()")
    x, y = box["x"] + 75, box["y"] + 30
    for _ in range(5):
        await page.wheel(x, y, -400)
    _, near = await shown(page, "to < 20")
    await page.point(x + 40, y)
    await page.wait_for("document.getElementById('tip').textContent.includes('fwd(stage 0, mb ')")
    await looked_at(page, "large_zoomed")
    await page.drag((x + 600, y), (x + 100, y))
    first, last = await shown(page, f"to > {near}")
    assert 0 < first < last < 40
    await page.evaluate(f"{CANVAS}.focus()")
    await page.press("0")
    await shown(page, f"from === 0 && to === {end}")
    await page.evaluate("document.querySelector('[data-key=\"+\"]').click()")
    first, last = await shown(page, "from > 0")
    assert last - first == pytest.approx(0.6 * end) and first == pytest.approx(0.2 * end)
    await page.press("ArrowRight")
    await shown(page, f"to > {last}")


@BOTH
async def test_a_page_has_its_colours_advice_and_memory(browser, tmp_path, is_dark):
    STEP.to_html(tmp_path / "step.html", cap=32)
    page = await browser.open(tmp_path / "step.html", size=(1000, 400), is_dark=is_dark)
    await looked_at(page, f"step_{'dark' if is_dark else 'light'}")
    paper = DARK if is_dark else LIGHT
    found = await shares(page, CANVAS, INKS["forward"].light, INKS["backward"].light, paper.memory)
    assert min(found) > 0.01
    assert await page.evaluate("document.querySelectorAll('.advice li').length") == len(
        STEP.to_drawing().advice
    )
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == f"rgb({', '.join(str(int(paper.background[k : k + 2], 16)) for k in (1, 3, 5))})"


async def test_waiting_has_stripes(browser, tmp_path):
    rows = tuple(Row(f"actor {a}", (Cell(0, 9, "waiting"), Cell(9, 10, "forward"))) for a in range(2))
    (tmp_path / "w.html").write_text(to_html(Drawing("waiting", rows)))
    page = await browser.open(tmp_path / "w.html", size=(1000, 300))
    await looked_at(page, "waiting")
    (plain,) = await shares(page, CANVAS, INKS["waiting"].light)
    assert 0.1 < plain < 0.5  # and the rest of the row is stripes
    assert await page.evaluate("document.querySelectorAll('.swatch.striped').length") == 1


@BOTH
async def test_a_picture_follows_the_colours_of_the_page(browser, tmp_path, is_dark):
    STEP.to_svg(tmp_path / "step.svg")
    page = await browser.open(tmp_path / "step.svg", size=(960, 300), is_dark=is_dark)
    await looked_at(page, f"picture_{'dark' if is_dark else 'light'}")
    filled = await page.evaluate("getComputedStyle(document.querySelector('.jx-paper')).fill")
    paper = DARK if is_dark else LIGHT
    assert filled == f"rgb({', '.join(str(int(paper.background[k : k + 2], 16)) for k in (1, 3, 5))})"


async def test_a_picture_is_as_narrow_as_the_place_that_it_is_in(browser, tmp_path):
    (tmp_path / "notebook.html").write_text(f"<body style='margin:0;width:400px'>{STEP._repr_html_()}")
    page = await browser.open(tmp_path / "notebook.html", size=(1200, 400))
    box = await page.evaluate("document.querySelector('svg').getBoundingClientRect().toJSON()")
    assert box["width"] == 400 and box["height"] < 200  # of 960 pixels and more than 200


async def test_texts_of_a_picture_lie_within_it(browser, tmp_path):
    Std1F1B(8).to_svg(tmp_path / "s.svg", num_microbatches=100, num_actors=8)
    STEP.to_svg(tmp_path / "t.svg", cap=32)
    every_kind = tuple(Cell(k, k + 1, kind) for k, kind in enumerate(CELL_KINDS))
    crowd = Drawing("all", (Row("actor 0", every_kind, every_kind, memory=((0, 1e9),)),), cap=5e8)
    (tmp_path / "k.svg").write_text(to_svg(crowd))
    for name in ("s.svg", "t.svg", "k.svg"):
        page = await browser.open(tmp_path / name, size=(1000, 800))
        outside = await page.evaluate("""[...document.querySelectorAll("text")].filter((text) => {
          const box = text.getBBox(), paper = document.querySelector(".jx-paper").getBBox();
          return box.x < 0 || box.x + box.width > paper.width || box.y + box.height > paper.height;
        }).map((text) => text.textContent)""")
        assert outside == []
        over = await page.evaluate("""[...document.querySelectorAll("text.jx-faint")].filter((one, k, all) =>
          all.slice(k + 1).some((two) => {
            const a = one.getBBox(), b = two.getBBox();
            return a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
          })).map((text) => text.textContent)""")
        assert over == []


async def test_charts_stand_beside_each_other_as_far_as_there_is_space(browser, tmp_path):
    curves = [Curve.of(f"curve {k}", "s", range(500), [k + n % 7 for n in range(500)]) for k in range(4)]
    (tmp_path / "c.html").write_text(f"<!doctype html><meta charset=utf-8>{curves_to_html(curves)}")
    for width, lines in ((1400, 1), (700, 2), (400, 4)):
        page = await browser.open(tmp_path / "c.html", size=(width, 700))
        tops = "[...document.querySelectorAll('[data-curve]')].map((e) => e.getBoundingClientRect().top)"
        assert len(set(await page.evaluate(tops))) == lines
    await looked_at(page, "curves")
