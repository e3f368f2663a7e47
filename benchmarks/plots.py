"""plots: `results/latest.json` in, pictures of it beside it out: `make bench-plots`. Measures nothing; what a
run did not measure is left out, and a picture without any figures is not drawn.

One look: horizontal bars, what is ours in colour, the median written beside each bar, and the distance of the
quartiles as a line through its end.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import matplotlib

matplotlib.use("svg")  # before pyplot: machines that measure have no screen
import matplotlib.pyplot as plt

Figures = Mapping[str, Any]

OURS, THEIRS, LINE, TEXT = "#2a6fbb", "#b8bcc2", "#3c4046", "#24272b"
STYLE: Any = {
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "svg.fonttype": "none",
    # Ids of elements and no date: the same figures make the same file.
    "svg.hashsalt": "jaxpp-async",
}
BAR_INCHES, WIDTH_INCHES = 0.36, 7.5


@dataclass(frozen=True)
class Bar:
    """One bar.

    Args:
        label: what a reader calls it.
        value: the median.
        spread: distance of the quartiles; 0 where it is not known.
        is_ours: whether it is this project's.
    """

    label: str
    value: float
    spread: float = 0.0
    is_ours: bool = False


LABELS = {
    "ours": "jaxpp-async, 1F1B",
    "submit": "jaxpp-async, two steps in flight",
    "ours_interleaved": "jaxpp-async, interleaved",
    "ours_zero_bubble": "jaxpp-async, zero bubble",
    "ours_two_actors": "jaxpp-async",
    "torch": "torch.distributed.pipelining, 1F1B",
    "torch_default_threads": "torch.distributed.pipelining, default threads",
    "ray": "Ray",
    "monarch": "Monarch",
    "jax_spmd": "JAX SPMD pipeline, GPipe",
    "jit": "jax.jit, one core",
    "jit_one_core": "jax.jit, one core",
    "jit_two_cores": "jax.jit, two cores",
    "jit_two_cores_whole": "jax.jit, two cores, no microbatches",
}
"""Contenders that are drawn, by their keys in the results. Others, which exist to explain these, are not."""


def bars(part: Figures) -> list[Bar]:
    """The contenders of a part, quickest first."""
    spreads = part.get("spread", {})
    found = [
        Bar(label, part[key], spreads.get(key, 0.0), label.startswith("jaxpp-async"))
        for key, label in LABELS.items()
        if isinstance(part.get(key), int | float)
    ]
    return sorted(found, key=lambda bar: bar.value)


def draw(title: str, unit: str, rows: Sequence[Bar], mark: tuple[str, float] | None = None) -> Any:
    """A picture of bars.

    Args:
        title: what was measured.
        unit: of the values.
        rows: from the top.
        mark: what a dashed line says, and where it stands.
    """
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, BAR_INCHES * len(rows) + 1.3), layout="constrained")
    places = range(len(rows))
    axes.barh(
        places, [r.value for r in rows], color=[OURS if r.is_ours else THEIRS for r in rows], height=0.68
    )
    for place, row in zip(places, rows, strict=True):
        half = row.spread / 2
        if half:
            axes.errorbar(row.value, place, xerr=half, ecolor=LINE, elinewidth=1.2, capsize=2.5)
        where: Any = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        beside = {"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"}
        axes.annotate(_figure(row.value), (row.value + half, place), **where, fontsize=9, bbox=beside)
    axes.set_yticks(places, [r.label for r in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max([r.value + r.spread / 2 for r in rows] + ([mark[1]] if mark else [])))
    axes.set_xlabel(unit)
    # Above what the dashed line says.
    axes.set_title(title, loc="left", fontsize=11, pad=20 if mark else 6)
    if mark:
        axes.axvline(mark[1], color=LINE, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            mark[0], (mark[1], 1.0), xycoords=("data", "axes fraction"),
            xytext=(-4, 3), textcoords="offset points",
            ha="right", fontsize=9,
        )  # fmt: skip
    return figure


def tiny_step(figures: Figures) -> Any:
    """What a step costs beside its computation."""
    rows = bars(figures.get("tiny_step", {}))
    return draw("Tiny training step: two stages of 8x8, 8 microbatches", "ms a step", rows) if rows else None


def big_step(figures: Figures) -> Any:
    """How well two cores are used."""
    part = figures.get("big_step", {})
    bound = part.get("schedule_bound")
    rows = bars(part)
    mark = ("bound of 1F1B", bound) if bound else None
    return (
        draw("Big training step: two stages of 512-2048-512, 8 microbatches", "ms a step", rows, mark)
        if rows
        else None
    )


def rpc(figures: Figures) -> Any:
    """An empty call."""
    rows = bars(figures.get("rpc_us", {}))
    return draw("Empty call to two actors", "µs a call", rows) if rows else None


def transport(figures: Figures) -> Any:
    """Bytes a second, by size of the message."""
    part = figures.get("transport", {})
    rows = []
    for size, rate in part.get("gb_s", {}).items():
        rows.append(Bar(f"{_size(int(size))}, jaxpp-async", rate, is_ours=True))
        if (other := part.get("ucxx_asyncio_gb_s", {}).get(size)) is not None:
            rows.append(Bar(f"{_size(int(size))}, ucxx asyncio", other))
    copied = part.get("memcpy_gb_s")
    mark = ("memcpy of 128 MiB", copied) if copied else None
    return draw("Transfers between two processes", "GB/s", rows, mark) if rows else None


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


PICTURES: tuple[Callable[[Figures], Any], ...] = (tiny_step, big_step, rpc, transport)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, default=harness.RESULTS / "latest.json")
    args = parser.parse_args()
    if not args.results.exists():
        parser.error(f"there is no {args.results}; measure first: make bench, make bench-peers")
    figures = json.loads(args.results.read_text())
    with plt.rc_context(STYLE):
        for picture in PICTURES:
            drawn = picture(figures)
            path = args.results.with_name(f"{picture.__name__}.svg")
            if drawn is None:
                print(f"{path.name}: not drawn, nothing was measured")
                continue
            drawn.savefig(path, metadata={"Date": None})
            plt.close(drawn)
            print(path)


if __name__ == "__main__":
    main()
