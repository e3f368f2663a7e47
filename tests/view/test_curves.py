"""Tests of `view/curves.py`: charts of values over steps show every spike, and stay small."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from jaxpp_async.view.curves import (
    CHART_HEIGHT,
    CHART_WIDTH,
    Curve,
    curves_to_html,
    curves_to_svg,
    format_value,
)

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text")]


def points(path: str) -> list[tuple[float, float]]:
    """Return the points of a path of absolute moves and lines."""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


def path_of(svg: str, kind: str) -> str:
    found = re.search(rf'<path class="{kind}"[^>]* d="([^"]*)"', svg)
    return found[1] if found else ""


def test_a_chart_says_its_name_the_last_the_smallest_and_the_largest_value_and_its_axes():
    found = texts(curves_to_svg([Curve.of("step <time>", "s", [5, 6, 7], [0.25, 0.5, 0.125])], title="a run"))
    assert found[0] == "a run"
    assert "step <time>step <time>" in found  # and as a tooltip, since a long name is cut
    assert "125 msthe last value" in found
    assert "min 125 ms, max 500 ms at step 6" in found
    assert {"step 5", "step 7", "200 ms", "400 ms"} <= set(found)


def test_a_chart_of_many_points_is_small_and_keeps_a_spike_of_one_step():
    values = np.tile([1.0, 1.5], 50_000)
    values[77_777] = 3.0
    svg = curves_to_svg([Curve.of("x", "", np.arange(100_000), values)])
    assert len(svg) < 20_000
    tops = [y for _, y in points(path_of(svg, "jx-band"))]
    assert sum(y < min(tops) + 5 for y in tops) == 1  # one place is higher than all others
    assert any("max 3 at step 77777" in text for text in texts(svg))


def test_a_first_step_that_compiles_does_not_flatten_the_others():
    values = [30.0, *(0.1 + 0.001 * (k % 10) for k in range(99))]
    svg = curves_to_svg([Curve.of("step time", "s", range(100), values)])
    heights = [y for _, y in points(path_of(svg, "jx-curve"))]
    assert max(heights[1:]) - min(heights[1:]) > 50  # the others use the height of the chart
    assert '<path class="jx-spike"' in svg and "30 s at step 0" in svg
    assert any("max 30 s at step 0" in text for text in texts(svg))


@pytest.mark.parametrize(
    "values",
    [
        [],
        [3.5],
        [5.0] * 12,
        [-3.0, -1.0, -2.0],
        [float("nan")] * 3,
        [1.0, float("nan"), float("inf"), -float("inf"), 2.0],
        [-1.7e308, 1.7e308, 0.0],
        [1e-320, 2e-320, 0.0],
    ],
)
@pytest.mark.parametrize("unit", ["s", "bytes", "share", "tokens/s", ""])
def test_any_values_make_a_chart_within_its_borders(values, unit):
    curve = Curve.of("x", unit, range(len(values)), values)
    svg = curves_to_svg([curve], restarts=[1])
    assert "nan " not in path_of(svg, "jx-curve") and "inf" not in path_of(svg, "jx-curve")
    for kind in ("jx-curve", "jx-band"):
        for x, y in points(path_of(svg, kind)):
            assert 0 <= x <= CHART_WIDTH and 0 <= y <= CHART_HEIGHT
    assert ET.fromstring(curves_to_html([curve])).tag == "div"


def test_values_that_are_not_finite_leave_a_gap_and_are_counted():
    svg = curves_to_svg([Curve.of("loss", "", range(6), [1, 2, np.nan, np.inf, 3, 4])])
    assert path_of(svg, "jx-curve").count("M") == 2
    assert svg.count('<rect class="jx-bad"') == 2
    assert any("2 not finite" in text for text in texts(svg))


def test_a_restart_is_a_mark_at_its_step():
    curve = Curve.of("x", "", [0, 100], [1, 2])
    found = ET.fromstring(curves_to_svg([curve], restarts=[50, 500]))
    (mark,) = (path for path in found.iter(f"{SVG}path") if path.get("class") == "jx-cap")
    assert mark.findtext(f"{SVG}title") == "restart at step 50"


def test_steps_in_any_order_are_drawn_in_their_order():
    ordered = curves_to_svg([Curve.of("x", "", [1, 2, 3], [1, 5, 3])])
    assert path_of(curves_to_svg([Curve.of("x", "", [3, 1, 2], [3, 1, 5])]), "jx-curve") == path_of(
        ordered, "jx-curve"
    )


def test_the_fragment_has_a_chart_for_each_curve_and_loads_nothing():
    html = curves_to_html([Curve.of("a & b", "", [1], [2]), Curve.of("c", "s", [], [])])
    assert re.findall(r'data-curve="([^"]*)"', html) == ["a &amp; b", "c"]
    assert "no values yet" in html and "http" not in html


def test_as_many_values_as_steps_are_needed():
    with pytest.raises(ValueError, match=r"curve 'loss' has 1 values for 2 steps; give one value for each"):
        Curve.of("loss", "", [0, 1], [2.0])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0125, "s", "12.5 ms"),
        (-0.5, "s", "-500 ms"),
        (1.5e9, "bytes", "1.5 GB"),
        (-1500, "bytes", "-1.5 kB"),
        (0.125, "share", "12.5 %"),
        (-0.0, "share", "0 %"),
        (-0.0, "", "0"),
        (1234.5, "tokens/s", "1234 tokens/s"),
        (102_900, "tokens/s", "102.9k tokens/s"),
        (7_000_000, "", "7M"),
        (1.7e308, "", "1.7e+308"),
        (float("nan"), "s", "nan"),
    ],
)
def test_values_as_text(value, unit, text):
    assert format_value(value, unit) == text


def test_a_chart_without_a_finite_value_has_no_axis_of_values():
    found = texts(curves_to_svg([Curve.of("loss", "", range(3), [np.nan] * 3)]))
    assert "3 not finite" in found and {"step 0", "step 2"} <= set(found)
    assert not {"0", "0.5", "1"} & set(found)
