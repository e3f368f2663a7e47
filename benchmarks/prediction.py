"""prediction: how close a simulation comes to measured steps, on a device of known speed.

    python benchmarks/prediction.py [--task-ms 20] [--rounds 5]

Four actors, real processes and transfers; a task lasts as long as its FLOPs say
(`RemoteMesh(device_model=)`), so that how fast the machine's cores compute is not what is measured. All
schedules take turns. The cost model learns from the steps of 1F1B alone, and each other schedule's step is
simulated with it. Errors are of the simulated median against the measured median. A schedule whose steps vary
more than the errors that are looked for (`quartiles_percent`) says nothing: the machine does other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from typing import Any

from layers import Layers
from turns import durations, in_turns

import jaxpp_async as jpp
from jaxpp_async.program.work import TaskWork

NUM_ACTORS, STEPS_A_TURN = 4, 3
MODEL = Layers(num_layers=8, width=32, rows=32, num_microbatches=12)

SCHEDULES = {
    type(s).__name__: s
    for s in (
        jpp.Std1F1B(4),
        jpp.GPipe(4),
        jpp.Eager1F1B(4),
        jpp.Interleaved1F1B(8),
        jpp.LoopedBFS(8),
        jpp.ZeroBubbleH1(4),
        jpp.ZeroBubbleH2(4),
        jpp.ZeroBubbleV(8),
        jpp.DualPipeV(8),
    )
}


class Device:
    """A device that does as many FLOPs a second as make the forward of a layer last so long.

    Args:
        model: the model.
        layer_s: the seconds of that forward.
    """

    def __init__(self, model: Layers, layer_s: float):
        self.flops_per_s = model.layer_flops / layer_s

    def task_s(self, work: TaskWork) -> float:
        """Return how long a task lasts."""
        return work.flops / self.flops_per_s


def training(schedule: Any) -> Any:
    """Return the training step of the model, cut into as many equal stages as a schedule has."""
    return MODEL.training([MODEL.num_layers // schedule.num_stages] * schedule.num_stages, schedule)


async def measure(task_s: float, num_rounds: int) -> dict[str, tuple[list[jpp.Timeline], jpp.CompiledStep]]:
    """Return the timelines of each schedule's steps, and its compiled step."""
    params, batch = MODEL.values()
    device = Device(MODEL, task_s * NUM_ACTORS / MODEL.num_layers)
    async with jpp.RemoteMesh(NUM_ACTORS, device_model=device) as mesh:
        steps = {name: mesh.distributed(training(s), donate_argnums=0) for name, s in SCHEDULES.items()}
        compiled = {name: await step.compile(params, batch) for name, step in steps.items()}
        timelines = await in_turns(
            mesh, steps, params, batch, num_rounds=num_rounds, steps_a_turn=STEPS_A_TURN
        )
        assert all(t.works for found in timelines.values() for t in found)
    return {name: (timelines[name], compiled[name]) for name in steps}


def figures_of(measured: dict[str, tuple[list[jpp.Timeline], jpp.CompiledStep]]) -> dict[str, Any]:
    """The errors, from what was measured."""
    costs = jpp.CostModel.from_timelines(measured["Std1F1B"][0])
    schedules: dict[str, Any] = {}
    for name, (timelines, compiled) in measured.items():
        times, simulated_ms = durations(timelines), 1e3 * jpp.simulate(compiled, costs).step_s.p50
        schedules[name] = {
            **times,
            "simulated_ms": simulated_ms,
            "error_percent": 100 * (simulated_ms / times["measured_ms"] - 1),
        }
    errors = [abs(s["error_percent"]) for name, s in schedules.items() if name != "Std1F1B"]
    return {"schedules": schedules, "most_percent": max(errors), "mean_percent": statistics.fmean(errors)}


def run(task_s: float = 20e-3, num_rounds: int = 5) -> dict[str, Any]:
    """The figures of `make bench`."""
    return figures_of(asyncio.run(measure(task_s, num_rounds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task-ms", type=float, default=20.0, help="the forward of a stage, of four")
    parser.add_argument("--rounds", type=int, default=5, help="two counted steps of each schedule a round")
    args = parser.parse_args()
    print(json.dumps({"prediction": run(args.task_ms / 1e3, args.rounds)}, indent=1))


if __name__ == "__main__":
    main()
