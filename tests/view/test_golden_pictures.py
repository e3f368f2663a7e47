"""Pictures of small cases are as in `golden/`; `make golden` draws them again, and you look at them.

Open a file of `golden/` in a browser. It follows the browser's light or dark colours.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from small_plan import PLAN
from small_timeline import STEP

from jaxpp_async.schedules import Std1F1B, ZeroBubbleV
from jaxpp_async.view.aggregate import MOST_CELLS
from jaxpp_async.view.curves import Curve, curves_to_svg
from jaxpp_async.view.drawing import Cell, Drawing, Row
from jaxpp_async.view.svg import to_svg

GOLDEN = Path(__file__).parent / "golden"


def failed() -> Drawing:
    """A drawing with every kind of row: planned alone, measured alone, too much memory, a failure."""
    planned = (Cell(0, 1, "forward", "0"), Cell(1, 3, "backward", "0"))
    late = (Cell(0, 0.5, "waiting"), Cell(0.5, 1.5, "forward", "0"), Cell(1.5, 2, "failure", "", "it died"))
    memory = ((0.0, 3e9), (0.5, 9e9), (1.5, 5e9))
    rows = (Row("planned", (), planned), Row("failed", late, planned, memory), Row("idle", ()))
    return Drawing("a step that failed", rows, cap=8e9, advice=("restart it <here>",))


def crowded() -> Drawing:
    """A drawing of more cells than are drawn one by one."""
    count = MOST_CELLS // 2 + 1
    kinds = ("forward", "backward", "waiting")
    rows = [
        Row(f"actor {a}", tuple(Cell(k, k + 1 - k / count, kinds[(k * (a + 2)) % 3]) for k in range(count)))
        for a in range(2)
    ]
    return Drawing("many cells", tuple(rows))


def charts() -> str:
    """Charts of values over steps: few, many, none, with gaps, with a restart."""
    few = Curve.of("loss", "", range(6), [4, 3, float("nan"), 2.5, 2, 2.1])
    many = Curve.of("step time", "s", range(1000), [9.0, *(0.1 + 0.01 * (k * k % 7) for k in range(999))])
    none = Curve.of("held by the fullest actor", "bytes", [], [])
    return curves_to_svg([few, many, none], title="values over steps", restarts=[3])


PICTURES = {
    "schedule_1f1b": lambda: Std1F1B(3).to_svg(num_microbatches=4),
    "schedule_zero_bubble_v": lambda: ZeroBubbleV(4).to_svg(num_microbatches=4),
    "timeline": lambda: STEP.to_svg(cap=32),
    "plan": PLAN.to_svg,
    "failed": lambda: to_svg(failed()),
    "crowded": lambda: to_svg(crowded()),
    "curves": charts,
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_before(name, request):
    path, svg = GOLDEN / f"{name}.svg", PICTURES[name]()
    if request.config.getoption("--golden", default=False):
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg, encoding="utf-8")
    assert svg == path.read_text(encoding="utf-8"), f"{path} differs; `make golden` draws it again"


def test_every_golden_picture_is_of_a_case():
    assert {path.stem for path in GOLDEN.glob("*.svg")} == set(PICTURES)
