"""Reproduce the paper's table: predict all rows, print them, and write `results/paper.json` and pictures.

JaxPP's rows are compiled by this project for machines of up to 1,024 GPUs and simulated; no GPU is needed.
`make paper`; docs/paper.md says how the prediction works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from paper.choices import (
    ACCUMULATION,
    DISPATCH_RANGE_S,
    MEMORY_BYTES,
    MICROBATCH_SIZES,
    PAPERS_CHOICE,
    REPEATS,
    Choice,
    Workers,
    accumulation_configurations,
    best_choice,
    grid_configurations,
)
from paper.compiled import configuration_of
from paper.costs import Constants
from paper.predictions import CALIBRATED, Prediction, calibrate, predict
from paper.rows import JAXPP, read_rows
from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

RESULTS = Path(__file__).with_name("results")
PICTURES = Path(__file__).parents[1] / "docs" / "images"

T = TypeVar("T")


def results(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return the rows of `results/paper.json`."""
    return [
        {
            "system": p.row.system,
            "model": p.row.model,
            "gpus": p.row.gpus,
            "paper_s": p.row.step_s,
            "predicted_s": round(p.predicted_s, 3),
            "calibrated": p.calibrated,
        }
        for p in predictions
    ]


def mean_error(predictions: Sequence[Prediction]) -> tuple[float, float]:
    """Return the mean and the largest error of the rows on which nothing was calibrated."""
    errors = [abs(p.error) for p in predictions if not p.calibrated]
    return sum(errors) / len(errors), max(errors)


# ---------------------------------------------------------------- tables


def table_of(predictions: Sequence[Prediction]) -> Table:
    table = Table(title="Seconds of a step", title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.caption, table.caption_justify = "* a constant is calibrated on this row", "left"
    for name in ("system", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("GPUs", "paper", "predicted", "error", "constant\nTFLOPS"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for p in predictions:
        table.add_row(
            p.row.system,
            p.row.model,
            f"{p.row.gpus:,}",
            f"{p.row.step_s:.2f}",
            f"{p.predicted_s:.2f}",
            f"{p.error:+.1%}",
            f"{p.constant_error:+.1%}",
            "*" if p.calibrated else "",
        )
    return table


def table_of_constants(constants: Constants) -> Table:
    table = Table(
        "constant", "value", "from", title="Constants of all rows", title_justify="left", box=box.SIMPLE
    )
    rows = dict(zip(("matmul", "exposed", "straggling"), CALIBRATED, strict=True))
    for name, value in asdict(constants).items():
        shown = f"{value * 1e3:.2f} ms" if name == "dispatch_s" else f"{value:.1%}"
        source = f"{rows[name][0]} on {rows[name][2]} GPUs" if name in rows else "stated"
        table.add_row(name, shown, source)
    return table


def table_of_choices(choices: Sequence[Choice], index: int) -> Table:
    found = {(c.repeat, c.microbatch): c for c in choices}
    best = best_choice(choices, index)
    title = (
        f"GPT-3 175B on 64 GPUs: seconds of a step, by repeat and microbatch ({MEMORY_BYTES / 1e9:.0f} GB)"
    )
    table = Table("repeat", title=title, title_justify="left", box=box.SIMPLE)
    for size in MICROBATCH_SIZES:
        table.add_column(f"{size}", justify="right")
    for repeat in REPEATS:
        cells = []
        for size in MICROBATCH_SIZES:
            c = found[repeat, size]
            text = f"{c.step_s[index]:.2f}" if c.fits else f"[dim]{c.memory_bytes / 1e9:.0f} GB[/dim]"
            cells.append(f"[bold]{text}[/bold]" if c is best else text)
        table.add_row(str(repeat), *cells)
    return table


# ---------------------------------------------------------------- the run


def tracked(progress: Progress, name: str, found: Iterable[T], total: int) -> list[T]:
    """Return all of `found`, with a line that shows how many are there."""
    task, made = progress.add_task(name, total=total), []
    for each in found:
        made.append(each)
        progress.advance(task)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows-only", action="store_true", help="only the table: no grid and no pictures")
    args = parser.parse_args()
    console, begun = Console(), time.monotonic()
    rows = read_rows()
    ours = {configuration_of(row): row for row in rows if row.system == JAXPP}
    console.print(
        "Compiling GPT-3 175B and Llama2 70B for up to 1,024 GPUs, each configuration for itself: minutes."
    )
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, Workers() as workers:
        steps = tracked(progress, "the paper's rows", workers.compile_all(list(ours)), len(ours))
        compiled = {ours[step.configuration].key: step for step in steps}
        constants = calibrate(rows, compiled)
        predictions = predict(rows, compiled, constants)
        show(console, predictions, constants)
        write("paper.json", results(predictions))
        if args.rows_only:
            return
        grid = grid_configurations()
        sets = [
            constants,
            *(calibrate(rows, compiled, replace(constants, dispatch_s=s)) for s in DISPATCH_RANGE_S),
        ]
        choices = tracked(progress, "interleaving", workers.evaluate_all(grid, sets), len(grid))
        more = accumulation_configurations()
        others = tracked(progress, "microbatches", workers.evaluate_all(more, sets[:1]), len(more))
    accumulation = sorted(
        (c.microbatches, c.microbatch, c.tflops())
        for c in (*choices, *others)
        if c.repeat == PAPERS_CHOICE[0]
        and c.microbatches in ACCUMULATION
        and c.microbatch <= PAPERS_CHOICE[1]
    )
    show_choices(console, choices, constants)
    details = {
        "constants": asdict(constants),
        "memory_bytes": MEMORY_BYTES,
        "dispatch_s": [constants.dispatch_s, *DISPATCH_RANGE_S],
        "choices": [asdict(c) for c in sorted(choices, key=lambda c: (c.repeat, c.microbatch))],
        "accumulation": accumulation,
        "took_s": round(time.monotonic() - begun),
    }
    write("paper_details.json", details)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("No pictures: matplotlib is not installed (make paper installs it).")
    else:
        from paper.pictures import draw_all

        for path in draw_all(predictions, choices, accumulation, PICTURES):
            console.print(f"written: {path}")
    console.print(f"This took {time.monotonic() - begun:.0f} s.")


def show(console: Console, predictions: Sequence[Prediction], constants: Constants) -> None:
    console.print(table_of_constants(constants), table_of(predictions))
    mean, largest = mean_error(predictions)
    console.print(
        f"The {len(predictions) - len(CALIBRATED)} other rows: mean {mean:.2%}, largest {largest:.2%}."
    )


def show_choices(console: Console, choices: Sequence[Choice], constants: Constants) -> None:
    console.print(table_of_choices(choices, 0))
    console.print(
        "Where a GPU has not enough memory, the table shows how much it would need. The best that fits:"
    )
    for index, dispatch_s in enumerate((constants.dispatch_s, *DISPATCH_RANGE_S)):
        best = best_choice(choices, index)
        same = " (the paper's own)" if (best.repeat, best.microbatch) == PAPERS_CHOICE else ""
        console.print(
            f"  at {dispatch_s * 1e3:.2f} ms a task: repeat {best.repeat}, microbatch {best.microbatch}{same}"
        )


def write(name: str, content: Any) -> None:
    text = json.dumps(content, indent=1)
    (RESULTS / name).write_text(text + "\n")


if __name__ == "__main__":
    main()
