"""Draw values over steps as small charts: step time, idle time, bytes, and whatever a user logs.

Each chart shows the mean of the values as a line, and the smallest and the largest of each place as a band,
so that a spike of a single step stays visible among 100,000. A chart has the same size however many points
it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from jaxpp_async.view.drawing import format_held, format_time
from jaxpp_async.view.history import Buckets
from jaxpp_async.view.svg import MARGIN, STYLE, px

CHART_WIDTH, CHART_HEIGHT = 310, 140
"""The size of a chart, in pixels."""

CHARTS_PER_LINE = 3
LEFT, RIGHT, TOP, BOTTOM = 54, 18, 42, 20
"""The margins around the area of a chart in which values lie, in pixels."""

MOST_BUCKETS = 240
"""The number of places at which a chart shows values, about one a pixel."""

SPIKE = 5.0
"""How many times the range of all others a few values have to exceed, so that the axis leaves them out."""


@dataclass(frozen=True)
class Curve:
    """Values over steps, which become one chart.

    Args:
        name: the line above the chart, such as `"step time"`.
        unit: the unit of the values: `"s"`, `"bytes"`, `"share"` (of 1, shown as per cent), or any text that
            stands behind a number; `""` for numbers without a unit.
        buckets: the values, in any order; `Curve.of` makes them of steps and values, and a `History` has
            those of a long run.
    """

    name: str
    unit: str
    buckets: Buckets

    @classmethod
    def of(
        cls, name: str, unit: str, steps: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray
    ) -> Curve:
        """Return a curve of single values.

        Args:
            name, unit: as above.
            steps: the step of each value, in any order; a step may occur twice.
            values: the values, as many as steps; they may be NaN or infinite.

        Raises:
            ValueError: there are not as many values as steps.
        """
        if len(steps) != len(values):
            raise ValueError(
                f"curve {name!r} has {len(values)} values for {len(steps)} steps; "
                "give one value for each step"
            )
        return cls(name, unit, Buckets.of(steps, values))


def curves_to_svg(curves: Sequence[Curve], *, title: str = "", restarts: Sequence[float] = ()) -> str:
    """Return curves as the text of one SVG file, with up to `CHARTS_PER_LINE` charts beside each other.

    Args:
        curves: the curves, each of which becomes a chart.
        title: the line above the charts.
        restarts: the steps at which the mesh has restarted, which are marked in each chart.
    """
    columns = min(CHARTS_PER_LINE, max(1, len(curves)))
    top = 34 if title else MARGIN
    width = 2 * MARGIN + columns * CHART_WIDTH
    height = top + math.ceil(len(curves) / columns) * CHART_HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" style="max-width:100%;height:auto" role="img" class="jx" '
        'font-family="system-ui,sans-serif" font-size="12">',
        f"<title>{escape(title or 'values over steps')}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="jx-paper" width="{width}" height="{height}" rx="6"/>',
    ]
    if title:
        parts.append(
            f'<text class="jx-text" x="{MARGIN}" y="22" font-size="14" font-weight="600">'
            f"{escape(title)}</text>"
        )
    for number, curve in enumerate(curves):
        x, y = MARGIN + number % columns * CHART_WIDTH, top + number // columns * CHART_HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_chart(curve, restarts), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def curves_to_html(curves: Sequence[Curve], *, restarts: Sequence[float] = ()) -> str:
    """Return curves as a fragment of HTML, whose charts stand beside each other as far as there is space.

    Args:
        curves: the curves, each of which becomes a chart, an element with the attribute `data-curve`.
        restarts: the steps at which the mesh has restarted, which are marked in each chart.
    """
    charts = [
        f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" width="{CHART_WIDTH}" height="{CHART_HEIGHT}" '
        f'role="img" class="jx" data-curve="{escape(curve.name)}" font-family="system-ui,sans-serif" '
        f'font-size="12">{"".join(_chart(curve, restarts))}</svg>'
        for curve in curves
    ]
    return (
        f'<div class="jx-curves" style="display:flex;flex-wrap:wrap;gap:6px 14px"><style>{STYLE}</style>'
        + "\n".join(charts)
        + "</div>\n"
    )


def format_value(value: float, unit: str) -> str:
    """Return a value of a curve as text, such as `"12.5 ms"`.

    Args:
        value: the value; it may be NaN or infinite.
        unit: the unit of the value; see `Curve`.
    """
    if not math.isfinite(value):
        return str(value)
    value, sign = value + 0.0, "-" if value < 0 else ""  # zero has no sign
    if unit == "s":
        return format_time(value, "s")
    if unit == "bytes":
        return sign + format_held(abs(value), "bytes")
    if unit == "share":
        return f"{100 * value:.3g} %"
    return f"{_plain(value)} {unit}".rstrip()


def _plain(value: float) -> str:
    """Return a number as text, such as `"12.5k"`."""
    for letter, size, least in (("T", 1e12, 1e12), ("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if least <= abs(value) < 1e16:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


# ---------------------------------------------------------------- one chart


def _chart(curve: Curve, restarts: Sequence[float]) -> Iterator[str]:
    """Yield the elements of a chart, whose upper left corner is at 0, 0."""
    name = curve.name if len(curve.name) <= 30 else f"{curve.name[:29]}…"
    yield (
        f'<text class="jx-text" x="0" y="14" font-weight="600">{escape(name)}'
        f"<title>{escape(curve.name)}</title></text>"
    )
    all_buckets = curve.buckets.ordered()
    if not len(all_buckets):
        yield f'<text class="jx-faint" x="0" y="{CHART_HEIGHT / 2:g}">no values yet</text>'
        return
    last = float(all_buckets.mean[-1])
    shown = format_value(last, curve.unit) if math.isfinite(last) else "not finite"
    yield (
        f'<text class="jx-text" x="{CHART_WIDTH - RIGHT}" y="14" text-anchor="end">'
        f"{escape(shown)}<title>the last value</title></text>"
    )
    summary = escape(_summary(all_buckets, curve.unit))
    yield f'<text class="jx-faint" x="0" y="30" font-size="11">{summary}</text>'
    yield from _Plot(all_buckets.at_most(MOST_BUCKETS), curve.unit).elements(restarts)


def _summary(buckets: Buckets, unit: str) -> str:
    """Return the line below a chart's name: its smallest and largest value and where these are."""
    parts = []
    if np.any(buckets.num_good):
        at_least, at_most = np.nanargmin(buckets.least), np.nanargmax(buckets.most)
        least, most = float(buckets.least[at_least]), float(buckets.most[at_most])
        parts = [f"min {_number_alone(least, unit)}", f"max {_number_alone(most, unit)}"]
        if buckets.least_step[at_least] != buckets.most_step[at_most]:
            parts[1] += f" at step {buckets.most_step[at_most]:.0f}"
    if num_bad := int(buckets.num_bad.sum()):
        parts.append(f"{num_bad} not finite")
    return ", ".join(parts)


def _number_alone(value: float, unit: str) -> str:
    """Return a value as text, without a unit of the user's, which may be long and stands in the title."""
    return format_value(value, unit if unit in ("s", "bytes", "share") else "")


class _Plot:
    """The area of a chart in which values lie.

    Args:
        buckets: the values, at most `MOST_BUCKETS` groups in the order of their steps, and at least one.
        unit: the unit of the values.
    """

    def __init__(self, buckets: Buckets, unit: str) -> None:
        self.buckets, self.unit = buckets, unit
        self.first, self.last = float(buckets.first.min()), float(buckets.last.max())
        self.low, self.high = _limits(buckets)
        self.bottom, self.right = CHART_HEIGHT - BOTTOM, CHART_WIDTH - RIGHT

    def x(self, step: float) -> float:
        """Return the position of a step in pixels.

        Args:
            step: the step.
        """
        if self.last == self.first:
            return (LEFT + self.right) / 2
        return LEFT + (step - self.first) / (self.last - self.first) * (self.right - LEFT)

    def y(self, value: float) -> float:
        """Return the position of a value in pixels, at the edge of the area if it lies outside.

        Args:
            value: the value, in the unit of the curve.
        """
        # Halves, since the difference of two large numbers may be too large for a number.
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return self.bottom - min(max(share, 0.0), 1.0) * (self.bottom - TOP)

    def elements(self, restarts: Sequence[float]) -> Iterator[str]:
        """Yield the axes, the marks of restarts, the band and the line.

        Args:
            restarts: the steps at which the mesh has restarted.
        """
        has_values = bool(np.any(self.buckets.num_good))  # an axis of no values would be invented
        for value in _ticks_between(self.low, self.high) if has_values else ():
            y = px(self.y(value))
            yield (
                f'<path class="jx-line" d="M{LEFT} {y}H{self.right}"/><text class="jx-faint" x="{LEFT - 5}" '
                f'y="{float(y) + 4:g}" text-anchor="end" font-size="10">'
                f"{escape(_number_alone(value, self.unit))}</text>"
            )
        ends = [(LEFT, "start", self.first), (self.right, "end", self.last)]
        if self.first == self.last:
            ends = [((LEFT + self.right) / 2, "middle", self.first)]
        for x, anchor, step in ends:
            yield (
                f'<text class="jx-faint" x="{x:g}" y="{self.bottom + 14}" text-anchor="{anchor}" '
                f'font-size="10">step {step:.0f}</text>'
            )
        for step in restarts:
            if self.first <= step <= self.last:
                yield (
                    f'<path class="jx-cap" d="M{px(self.x(step))} {TOP}V{self.bottom}">'
                    f"<title>restart at step {step:.0f}</title></path>"
                )
        yield from self._values()

    def _values(self) -> Iterator[str]:
        buckets = self.buckets
        at = [px(self.x(step)) for step in buckets.steps]
        is_known = np.isfinite(buckets.mean)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], is_known.astype(int), [0]))))
        line, band = [], []
        for first, behind in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            run = range(first, behind)
            means = [f"{at[k]} {px(self.y(buckets.mean[k]))}" for k in run]
            line.append(f"M{'L'.join(means)}" + ("h0" if len(means) == 1 else ""))
            if np.any(buckets.least[first:behind] != buckets.most[first:behind]):
                upper = [f"{at[k]} {px(self.y(buckets.most[k]) - 0.5)}" for k in run]
                lower = [f"{at[k]} {px(self.y(buckets.least[k]) + 0.5)}" for k in reversed(run)]
                band.append(f"M{'L'.join([*upper, *lower])}z")
        if band:
            yield f'<path class="jx-band" d="{"".join(band)}"><title>from min to max</title></path>'
        if line:
            lone = 'stroke-linecap="round" stroke-width="4"'
            dots = "".join(part for part in line if part.endswith("h0"))
            yield f'<path class="jx-curve" stroke-width="1.4" stroke-linejoin="round" d="{"".join(line)}"/>'
            if dots:
                yield f'<path class="jx-curve" {lone} d="{dots}"/>'
        yield from self._outside(at)

    def _outside(self, at: list[str]) -> Iterator[str]:
        """Yield a triangle for each value beyond the axis, and a square where values are not finite."""
        for k, x in enumerate(at):
            buckets = self.buckets
            for is_out, value, step, y, tip in (
                (buckets.most[k] > self.high, buckets.most[k], buckets.most_step[k], TOP - 4, 4),
                (buckets.least[k] < self.low, buckets.least[k], buckets.least_step[k], self.bottom + 4, -4),
            ):
                if is_out:
                    yield (
                        f'<path class="jx-spike" d="M{x} {y}l-3 {tip}h6z"><title>'
                        f"{escape(format_value(float(value), self.unit))} at step {step:.0f}</title></path>"
                    )
            if buckets.num_bad[k]:
                title = f"{buckets.num_bad[k]:.0f} not finite about step {buckets.steps[k]:.0f}"
                yield (
                    f'<rect class="jx-bad" x="{float(x) - 1.5:g}" y="{self.bottom - 3}" width="3" height="3">'
                    f"<title>{title}</title></rect>"
                )


def _limits(buckets: Buckets) -> tuple[float, float]:
    """Return the lower and the upper end of the axis of values.

    A few values that tower above all others, such as the time of a first step that compiles, are left out:
    the others would be one flat line.
    """
    least = np.sort(buckets.least[np.isfinite(buckets.least)])
    most = np.sort(buckets.most[np.isfinite(buckets.most)])
    if not len(most):
        return 0.0, 1.0
    low, high = float(least[0]), float(most[-1])
    few = max(1, len(most) // 50)
    if len(most) >= 10:
        inner_low, inner_high = float(least[few]), float(most[-1 - few])
        inner = inner_high / 2 - inner_low / 2 or abs(inner_high) * 0.1
        if inner and high / 2 - inner_high / 2 > SPIKE * inner:
            high = inner_high
        if inner and inner_low / 2 - low / 2 > SPIKE * inner:
            low = inner_low
    if high == low:
        room = abs(high) * 0.1 or 1.0
        return max(low - room, -1e308), min(high + room, 1e308)
    return low, high


def _ticks_between(low: float, high: float, most: int = 3) -> list[float]:
    """Return up to `most` round numbers between two numbers."""
    rough = (high / 2 - low / 2) / most * 2
    if not 1e-300 < rough < 1e300:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [factor * power for factor in (1, 2, 2.5, 5, 10)]
    for step in steps:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [k * step for k in range(first, last + 1)]
    return [low, high]
