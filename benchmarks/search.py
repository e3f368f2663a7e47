"""search: how much shorter a step becomes by a better cut and by a searched placement and order, and how far
above a proven lower bound it still is.

    python benchmarks/search.py                     # the tables; results in results/search.json
    python benchmarks/search.py --iterations 20000  # a longer search

Needs no devices and no JAX: times are those of the planning's evaluator, with equal times of a forward, an
input gradient and a weight gradient, and no transfers. A cap is relative to the memory of 1F1B on the equal
cut. `step` columns are a step's time above perfect balance.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
from rich.console import Console
from rich.table import Table

from jaxpp_async.planning.bound import bound_of_all, bound_of_cut
from jaxpp_async.planning.closed_form import estimate_step_s
from jaxpp_async.planning.cut import equal_cut
from jaxpp_async.planning.evaluation import TaskTable
from jaxpp_async.planning.named import named_order, on_equal_cut
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.planning.search import search
from jaxpp_async.schedules import Interleaved1F1B, Std1F1B, ZeroBubbleV

CAPS = (1.0, 1.5, 2.0)
"""Memory, as multiples of what 1F1B needs on the equal cut."""


def problem(works: list[float], num_actors: int, num_microbatches: int, cap: float) -> PipelineProblem:
    """A problem whose layers keep bytes in proportion to their times.

    Args:
        works: the time of each layer's forward.
        num_actors, num_microbatches: the sizes.
        cap: the memory of an actor, as a multiple of 1F1B's largest on the equal cut.
    """
    layers = tuple(Layer(work, work, work, work, work / 2) for work in works)
    roomy = PipelineProblem(layers, num_actors, num_microbatches)
    stages = roomy.stages(equal_cut(len(layers), num_actors))
    order = named_order(Std1F1B(num_actors), num_microbatches, num_actors)
    needed = max(order.peak_bytes(stages))
    return PipelineProblem(layers, num_actors, num_microbatches, cap * needed)


def models(num_actors: int) -> Iterator[tuple[str, list[float]]]:
    """Models of four layers an actor: a name, and the time of each layer's forward."""
    count = 4 * num_actors
    yield "equal stages", [1.0] * count
    yield "first and last 1.5x as heavy", [1.5] * 4 + [1.0] * (count - 8) + [1.5] * 4
    yield "head as heavy as one stage more", [1.0] * count + [4.0]
    slow = random.Random(0).sample(range(count), count // 4)
    yield "a quarter of the layers 2x slower", [2.0 if k in slow else 1.0 for k in range(count)]
    for seed in range(2):
        rng = random.Random(seed)
        yield f"random {seed}", [rng.uniform(1.0, 3.0) for _ in range(count)]


def row(
    name: str, cap: float, given: PipelineProblem, iterations: int | None, seed: int = 0
) -> dict[str, Any]:
    """Figures of one problem: steps above perfect balance, as shares, and the gap to the bounds."""
    equal = on_equal_cut(given)
    fitting = [timed for timed in equal if timed.fits]
    started_s = time.process_time()
    result = search(given, iterations=iterations, seed=seed)
    took_s = time.process_time() - started_s
    best_s, ideal_s, cut = result.best.step_s, given.balanced_s, result.best.assignment.cut
    named = result.named
    return {
        "model": name,
        "cap": cap,
        "equal_cut": equal[0].step_s / ideal_s - 1,
        "equal_cut_by": equal[0].assignment.name,
        "equal_cut_fitting": fitting[0].step_s / ideal_s - 1 if fitting else None,
        "best_cut": None if named is None else named.step_s / ideal_s - 1,
        "best_cut_by": None if named is None else named.assignment.name,
        "searched": best_s / ideal_s - 1,
        "shorter_than_equal_cut": 1 - best_s / equal[0].step_s,
        "shorter_than_best_cut": result.gain,
        "gap_of_cut": best_s / bound_of_cut(given, cut) - 1,
        "gap_of_all": best_s / bound_of_all(given) - 1,
        "cut": list(cut),
        "actors": list(result.best.assignment.actors),
        "cpu_s": round(took_s, 2),
        "says": str(result),
    }


def study(iterations: int | None, console: Console) -> list[dict[str, Any]]:
    """The study's table: 4 actors, 12 microbatches."""
    found = []
    for name, works in models(4):
        for cap in CAPS:
            with console.status(f"{name}, {cap:g}x"):
                found.append(row(name, cap, problem(works, 4, 12, cap), iterations))
    return found


def large(iterations: int | None, console: Console) -> list[dict[str, Any]]:
    """8 actors and 64 microbatches, where the gap to the bound counts."""
    found = []
    for name, works in models(8):
        for cap in CAPS[:2]:
            with console.status(f"{name}, {cap:g}x, 8 actors, 64 microbatches"):
                found.append(row(name, cap, problem(works, 8, 64, cap), iterations))
    return found


def speeds() -> dict[str, float]:
    """Tasks a second of the evaluator, and microseconds of a closed form."""
    figures = {}
    given = problem([1.0] * 32, 8, 64, 1.0)
    for schedule in (Std1F1B, Interleaved1F1B, ZeroBubbleV):
        named = schedule(schedule.stages_per_actor[0] * 8)
        order = named_order(named, 64, 8)
        stages = given.stages(equal_cut(32, named.num_stages))
        table = TaskTable(stages, order.actors, 64, 8)
        rows = table.rows_of(order.rows)
        num_tasks = sum(map(len, rows))
        figures[f"{schedule.__name__}_tasks_per_s"] = num_tasks / _least_s(partial(table.step_s, rows))
        seconds = _least_s(partial(estimate_step_s, named, stages, 64, 8))
        figures[f"{schedule.__name__}_closed_form_us"] = 1e6 * seconds
    return figures


def _least_s(run: Callable[[], object], rounds: int = 15) -> float:
    run()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table for people."""
    shown = Table(
        "model", "cap", "equal cut", "best cut", "searched", "gap (cut)", "gap (all)", "s", title=title
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for figures in rows:
        best = figures["best_cut"]
        shown.add_row(
            figures["model"],
            f"{figures['cap']:g}x",
            f"+{figures['equal_cut']:.1%} {figures['equal_cut_by']}",
            "none fits" if best is None else f"+{best:.1%} {figures['best_cut_by']}",
            f"+{figures['searched']:.1%}",
            f"{figures['gap_of_cut']:.1%}",
            f"{figures['gap_of_all']:.1%}",
            f"{figures['cpu_s']:.1f}",
        )
    return shown


def measure(iterations: int | None, console: Console) -> dict[str, Any]:
    """All figures of this benchmark."""
    return {
        "study": study(iterations, console),
        "large": large(iterations, console),
        "speed": speeds(),
    }


def run() -> dict[str, Any]:
    """The figures that a part of `bench.py` keeps: those by which the search is judged, and both tables."""
    figures = measure(None, Console(quiet=True))
    uneven = next(f for f in figures["study"] if f["model"].startswith("head") and f["cap"] == 1)
    return {
        "shorter_than_equal_cut": uneven["shorter_than_equal_cut"],
        "shorter_than_best_cut": uneven["shorter_than_best_cut"],
        "gap": max(f["gap_of_cut"] for f in figures["large"]),
        "search_cpu_s": max(f["cpu_s"] for f in figures["large"]),
        **figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, help="candidates a search looks at")
    args = parser.parse_args()
    console = Console(highlight=False)
    figures = measure(args.iterations, console)
    console.print(table("4 actors, 12 microbatches: step above perfect balance", figures["study"]))
    console.print(table("8 actors, 64 microbatches", figures["large"]))
    for name, value in figures["speed"].items():
        console.print(f"{name}: {value:,.0f}")
    console.print(f"written to {harness.write('search', figures)}")


if __name__ == "__main__":
    main()
