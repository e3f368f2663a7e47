"""Draw the predictions: interleaving, microbatches and weak scaling, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from paper.choices import MEMORY_BYTES, PAPERS_CHOICE, Choice
from paper.predictions import GPT3, Prediction
from paper.rows import FSDP, JAXPP

Series = Sequence[tuple[float, float, bool]]
"""Points of a line: x, y, and whether the point fits into memory."""

BLUES = {1: "#a9c9ea", 2: "#6ba3d6", 4: "#2a6fbb", 8: "#123f73"}
"""The colour of each microbatch size."""

UNEQUAL = (8,)
"""The repeats whose stages cannot have equally many layers; no line goes through them."""

ORANGE, GREY = "#d97b29", "#6b7077"


def draw_all(
    predictions: Sequence[Prediction], choices: Sequence[Choice], accumulation: Sequence[Any], folder: Path
) -> list[Path]:
    """Draw all pictures.

    Args:
        predictions: the predictions of all rows.
        choices: the grid of interleavings and microbatch sizes.
        accumulation: tuples of microbatches, microbatch size and TFLOPS, at the paper's repeat.
        folder: where the files go.

    Returns:
        The files.
    """
    import plots

    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Callable[[], Any]] = {
        "paper_interleaving": lambda: interleaving(choices),
        "paper_microbatches": lambda: microbatches(accumulation),
        "paper_weak_scaling": lambda: weak_scaling(predictions),
    }
    paths = []
    with plots.plt.rc_context({**plots.STYLE, "axes.spines.left": True}):
        for name, draw in figures.items():
            figure, path = draw(), folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            plots.plt.close(figure)
            paths.append(path)
    return paths


def interleaving(choices: Sequence[Choice]) -> Any:
    """Draw TFLOPS by repeat, a line for each microbatch size; hollow points do not fit into memory."""
    lines = {
        size: [(c.repeat, c.tflops(), c.fits) for c in sorted(choices, key=_repeat) if c.microbatch == size]
        for size in sorted({c.microbatch for c in choices})
    }
    figure, axes = _lines(
        "GPT-3 175B on 64 GPUs, predicted: interleaving", "stages of each actor (repeat)", lines
    )
    (best,) = [c for c in choices if (c.repeat, c.microbatch) == PAPERS_CHOICE]
    _note(axes, "the paper's choice", best.repeat, best.tflops(), 24)
    lowest = min(c.tflops() for c in choices if c.repeat in UNEQUAL)
    _note(axes, "stages of 1 and 2 layers", UNEQUAL[0], lowest, -30)
    axes.set_ylim(300, 490)
    axes.set_xticks(sorted({c.repeat for c in choices}))
    axes.annotate(
        f"hollow: more than {MEMORY_BYTES / 1e9:.0f} GB", (1, 0), xycoords="axes fraction",
        xytext=(-4, 6), textcoords="offset points", ha="right", fontsize=9, color=GREY,
    )  # fmt: skip
    return figure


def microbatches(accumulation: Sequence[Any]) -> Any:
    """Draw TFLOPS by the number of microbatches, a line for each microbatch size."""
    lines = {
        size: [(n, tflops, True) for n, s, tflops in sorted(accumulation) if s == size]
        for size in sorted({size for _, size, _ in accumulation})
    }
    title = f"GPT-3 175B on 64 GPUs, repeat {PAPERS_CHOICE[0]}, predicted: number and size of microbatches"
    figure, axes = _lines(title, "microbatches in a step", lines, unequal=())
    axes.set_xscale("log", base=2)
    ticks = sorted({n for n, _, _ in accumulation})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_ylim(300, 490)
    return figure


def weak_scaling(predictions: Sequence[Prediction]) -> Any:
    """Draw TFLOPS by GPUs of JaxPP and FSDP: the paper's as points, the predictions as lines."""
    import plots

    figure, axes = plots.plt.subplots(figsize=(plots.WIDTH_INCHES, 3.6), layout="constrained")
    for system, color in ((JAXPP, plots.OURS), (FSDP, ORANGE)):
        rows = [p for p in predictions if p.row.system == system and p.row.model == GPT3]
        gpus = [p.row.gpus for p in rows]
        axes.plot(gpus, [_tflops(p, p.predicted_s) for p in rows], color=color, label=f"{system}, predicted")
        for calibrated in (False, True):
            some = [p for p in rows if p.calibrated is calibrated]
            axes.plot(
                [p.row.gpus for p in some], [_tflops(p, p.row.step_s) for p in some], "os"[calibrated],
                color=color, mfc=color if not calibrated else "white",
                label=f"{system}, paper" + (" (calibrated on it)" if calibrated else ""),
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [str(n) for n in gpus])
    _finish(axes, "GPT-3 175B: weak scaling", "GPUs")
    axes.set_ylim(330, 480)
    return figure


def _tflops(p: Prediction, seconds: float) -> float:
    return p.row.model_flops / p.row.gpus / seconds / 1e12


def _repeat(choice: Choice) -> int:
    return choice.repeat


def _lines(
    title: str, label: str, lines: dict[int, Series], unequal: Sequence[int] = UNEQUAL
) -> tuple[Any, Any]:
    import plots

    figure, axes = plots.plt.subplots(figsize=(plots.WIDTH_INCHES, 3.6), layout="constrained")
    for size, points in lines.items():
        color = BLUES[size]
        equal = [(x, y) for x, y, _ in points if x not in unequal]
        axes.plot(*_columns(equal), color=color, label=f"microbatch of {size}")
        for fits in (True, False):
            some = [(x, y) for x, y, fit in points if fit is fits]
            axes.plot(*_columns(some), "o", color=color, mfc=color if fits else "white")
    _finish(axes, title, label)
    return figure, axes


def _columns(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    found = list(points)
    return [x for x, _ in found], [y for _, y in found]


def _finish(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(label)
    axes.set_ylabel("model TFLOPS a GPU")
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower left")


def _note(axes: Any, text: str, x: float, y: float, points: int) -> None:
    axes.annotate(
        text, (x, y), xytext=(0, points), textcoords="offset points", ha="center", fontsize=9,
        arrowprops={"arrowstyle": "->", "color": GREY, "shrinkB": 5},
    )  # fmt: skip
