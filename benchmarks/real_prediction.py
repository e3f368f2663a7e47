"""real_prediction: how close a simulation comes to the mean measured step of real computation.

    python benchmarks/real_prediction.py [--rounds 40] [--width 512]

Two actors, each on a core of its own, with matrix products that take 5 to 20 ms a task there. All schedules
take turns. The cost model learns from the steps of 1F1B alone, and the mean of simulated steps of the other
schedules is held against the mean of the measured ones. Where the quartiles of any schedule's steps are apart
by 10 % or more, the machine does other work, and the error is not measurable.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from typing import Any

from layers import Layers
from plan_tables import real_prediction_table
from rich.console import Console
from turns import durations, in_turns

import jaxpp_async as jpp

NUM_ACTORS, NUM_LAYERS, STEPS_A_TURN, DRAWS = 2, 4, 2, 40
SPREAD_LIMIT_PERCENT = 10.0
"""The distance of a step's quartiles, in % of its median, from which on nothing can be said."""
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

SCHEDULES = {
    type(s).__name__: s for s in (jpp.Std1F1B(2), jpp.GPipe(2), jpp.ZeroBubbleH1(2), jpp.Interleaved1F1B(4))
}


async def measure(num_rounds: int, width: int) -> dict[str, tuple[list[jpp.Timeline], jpp.CompiledStep]]:
    """Return the timelines of each schedule's steps, and its compiled step.

    Args:
        num_rounds: the number of steps that count of each schedule.
        width: the size of the layers' matrices.
    """
    model = Layers(NUM_LAYERS, width=width, rows=256, num_microbatches=8)
    params, batch = model.values()
    async with jpp.RemoteMesh(NUM_ACTORS, env={"XLA_FLAGS": ONE_THREAD}) as mesh:
        steps = {
            name: mesh.distributed(
                model.training([NUM_LAYERS // s.num_stages] * s.num_stages, s), donate_argnums=0
            )
            for name, s in SCHEDULES.items()
        }
        compiled = {name: await step.compile(params, batch) for name, step in steps.items()}
        timelines = await in_turns(
            mesh, steps, params, batch, num_rounds=num_rounds, steps_a_turn=STEPS_A_TURN
        )
    return {name: (timelines[name], compiled[name]) for name in steps}


def figures_of(measured: dict[str, tuple[list[jpp.Timeline], jpp.CompiledStep]]) -> dict[str, Any]:
    """Return the errors of the simulated means, from what was measured."""
    costs = jpp.CostModel.from_timelines(measured["Std1F1B"][0])
    schedules: dict[str, Any] = {}
    for name, (timelines, compiled) in measured.items():
        times = durations(timelines)
        draws = [jpp.simulate(compiled, costs, seed=seed, draws=1).step_s.p50 for seed in range(DRAWS)]
        simulated_ms = 1e3 * statistics.fmean(draws)
        tasks = [1e3 * run.duration_s for t in timelines for actor in t.actors for run in actor.runs]
        schedules[name] = {
            **times,
            "task_ms": statistics.median(tasks),
            "simulated_ms": simulated_ms,
            "error_percent": 100 * (simulated_ms / times["mean_ms"] - 1),
        }
    return {"schedules": schedules} | verdict(schedules)


def verdict(schedules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the largest error of the schedules but 1F1B, or why nothing can be said.

    Args:
        schedules: by name, the error and the quartiles' distance in %.
    """
    spread = max(row["quartiles_percent"] for row in schedules.values())
    most = max(abs(row["error_percent"]) for name, row in schedules.items() if name != "Std1F1B")
    if spread < SPREAD_LIMIT_PERCENT:
        return {"most_percent": most, "not_measurable": ""}
    reason = f"the quartiles of equal steps are {spread:.0f} % apart, and not less than "
    return {"most_percent": None, "not_measurable": f"{reason}{SPREAD_LIMIT_PERCENT:.0f} %"}


def run(num_rounds: int = 40, width: int = 512) -> dict[str, Any]:
    """Return the figures of `make bench`."""
    return {"real_prediction": figures_of(asyncio.run(measure(num_rounds, width)))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="counted steps of each schedule")
    parser.add_argument("--width", type=int, default=512, help="the size of the layers' matrices")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    figures = run(args.rounds, args.width)
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        Console(highlight=False).print(real_prediction_table(figures["real_prediction"]))


if __name__ == "__main__":
    main()
