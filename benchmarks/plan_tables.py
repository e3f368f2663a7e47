"""plan_tables: what the programs of the part `plan` measured, as tables. Pure; measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.table import Table

Figures = Mapping[str, Any]


def planned_step_table(figures: Figures) -> Table:
    """Return the planned step and the named schedules, the quickest first."""
    planned, error = figures["planned"], f"{figures['error_percent']:+.1f} %"
    found = _table(
        ["schedule", "cut"],
        ["bytes", "ms", "quartiles", "the plan is"],
        f"steps of an uneven model within {figures['cap_bytes']:,} bytes, as many as 1F1B needs on the "
        f"equal cut; the planned one was predicted as {planned['predicted_ms']:.0f} ms, {error}",
    )
    for form in sorted([planned, *figures["named"]], key=lambda form: form["measured_ms"]):
        shorter = 100 * (1 - planned["measured_ms"] / form["measured_ms"])
        found.add_row(
            form["schedule"],
            f"{form.get('which', 'planned')}: {' '.join(map(str, form['cut']))}",
            f"{form['bytes']:,}",
            *_times(form),
            "" if form is planned else f"{shorter:.1f} % shorter",
        )
    return found


def real_prediction_table(figures: Figures) -> Table:
    """Return the schedules with the measured and the simulated mean of a step."""
    found = _table(
        ["schedule"],
        ["task ms", "ms", "quartiles", "mean ms", "simulated", "error"],
        "mean steps of real computation" + _caveat(figures),
    )
    for name, row in figures["schedules"].items():
        found.add_row(
            name,
            f"{row['task_ms']:.1f}",
            *_times(row),
            f"{row['mean_ms']:.1f}",
            f"{row['simulated_ms']:.1f}",
            f"{row['error_percent']:+.1f} %",
        )
    return found


def _caveat(figures: Figures) -> str:
    reason = figures["not_measurable"]
    return f": not measurable, {reason}" if reason else ""


def process_memory_table(figures: Figures) -> Table:
    """Return by how many MB each actor's process grew."""
    found = _table(
        ["freed memory is", "actor", "resident MB"],
        ["planned", "most", "after the arguments", "after the steps"],
        "growth of actors' processes, in MB",
    )
    for which, mesh in figures.items():
        for number, actor in enumerate(mesh["actors"]):
            most = f"{actor['most_bytes'] / 1e6:.1f} ({actor['error_percent']:+.1f} %)"
            first = [which, str(number)], [f"{actor['planned_bytes'] / 1e6:.1f}", most]
            for part in ("resident", "anonymous", "shared", "file"):
                names, values = first if part == "resident" else (["", ""], ["", ""])
                parts = [f"{actor[when][part] / 1e6:.1f}" for when in ("after_arguments", "after_steps")]
                found.add_row(*names, "all" if part == "resident" else part, *values, *parts)
    return found


TABLES: Mapping[str, Callable[[Figures], Table]] = {
    "planned_step": planned_step_table,
    "real_prediction": real_prediction_table,
    "process_memory": process_memory_table,
}
"""By the key in the figures of the part `plan`."""


def tables(figures: Figures) -> Iterator[Table]:
    """Yield the tables of those programs whose figures are there.

    Args:
        figures: of the part `plan`.
    """
    for name, table in TABLES.items():
        if name in figures:
            yield table(figures[name])


def _table(texts: list[str], numbers: list[str], title: str) -> Table:
    found = Table(*texts, title=title)
    for name in numbers:
        found.add_column(name, justify="right")
    return found


def _times(figures: Figures) -> tuple[str, str]:
    return f"{figures['measured_ms']:.1f}", f"{figures['quartiles_percent']:.1f} %"
