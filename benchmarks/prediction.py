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

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp_async as jpp
from jaxpp_async.program.work import TaskWork

NUM_ACTORS, NUM_LAYERS, NUM_MICROBATCHES, WIDTH, ROWS = 4, 8, 12, 32, 32
STEPS = 3
"""Steps of one schedule in a row; the first of them is not counted."""

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
    """A device that does as many FLOPs a second as make the forward of a stage, of four, last so long.

    Args:
        task_s: of that forward.
    """

    def __init__(self, task_s: float):
        layer = 2 * 2 * ROWS * WIDTH * WIDTH
        self.flops_per_s = layer * NUM_LAYERS / 4 / task_s

    def task_s(self, work: TaskWork) -> float:
        """How long a task lasts."""
        return work.flops / self.flops_per_s


def training(schedule: Any) -> Any:
    """The training step of eight layers, cut for a schedule."""

    def loss(params: Any, mb: Any) -> jax.Array:
        x = mb["x"]
        for k in range(NUM_LAYERS):
            x = jnp.tanh(x @ params[k]["up"]) @ params[k]["down"]
            if k < NUM_LAYERS - 1 and (k + 1) % (NUM_LAYERS // schedule.num_stages) == 0:
                x = jpp.pipeline_yield(x)
        return jnp.mean((x - mb["y"]) ** 2)

    def step(params: Any, batch: Any) -> Any:
        def grads(mb: Any) -> Any:
            value, found = jax.value_and_grad(loss)(params, mb)
            return found, value

        found, losses = jpp.accumulate_grads(grads, schedule)(batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, found), losses

    return step


async def measure(task_s: float, num_rounds: int) -> dict[str, tuple[list[jpp.Timeline], jpp.CompiledStep]]:
    """The timelines of each schedule's steps, and its compiled step."""
    random = np.random.default_rng(0)
    params = [
        {k: random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 6 for k in ("up", "down")}
        for _ in range(NUM_LAYERS)
    ]
    batch = {k: random.normal(size=(NUM_MICROBATCHES, ROWS, WIDTH)).astype(np.float32) for k in ("x", "y")}
    timelines: dict[str, list[jpp.Timeline]] = {name: [] for name in SCHEDULES}
    async with jpp.RemoteMesh(NUM_ACTORS, device_model=Device(task_s)) as mesh:
        steps = {name: mesh.distributed(training(s), donate_argnums=0) for name, s in SCHEDULES.items()}
        compiled = {name: await step.compile(params, batch) for name, step in steps.items()}
        states: dict[str, Any] = dict.fromkeys(steps, params)
        for number in range(num_rounds + 1):
            for name, step in steps.items():
                for k in range(STEPS):
                    states[name], _ = await mesh.run(step, states[name], batch)
                    if number and k:
                        timelines[name].append(mesh.last_step_timeline())
        for found in timelines.values():
            assert all(t.works for t in found)
    return {name: (timelines[name], compiled[name]) for name in steps}


def figures_of(measured: dict[str, tuple[list[jpp.Timeline], jpp.CompiledStep]]) -> dict[str, Any]:
    """The errors, from what was measured."""
    costs = jpp.CostModel.from_timelines(measured["Std1F1B"][0])
    schedules: dict[str, Any] = {}
    for name, (timelines, compiled) in measured.items():
        times = [t.duration_s for t in timelines]
        simulated = jpp.simulate(compiled, costs)
        low, middle, high = statistics.quantiles(times, n=4)
        schedules[name] = {
            "measured_ms": 1e3 * middle,
            "quartiles_percent": 100 * (high - low) / middle,
            "simulated_ms": 1e3 * simulated.step_s.p50,
            "error_percent": 100 * (simulated.step_s.p50 / middle - 1),
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
