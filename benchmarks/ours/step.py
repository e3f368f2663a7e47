"""step: a contender: a training step on this package's actors, from the call of `mesh.run` to its return.

    python benchmarks/ours/step.py big --schedule ZeroBubbleV --blocks 2
    python benchmarks/ours/step.py tiny --in-flight 2

Two actors, each a process on a core of its own. The state stays on them and is donated; the batch comes from
the controller's host memory with every step, as in a training loop. The controller runs uvloop, as
`examples/` do. Between measurements everybody waits for messages; nothing spins. A step has ended when
`mesh.run` returns: every actor has finished it. `--fetch` also brings the losses here.

`--in-flight 2` submits each step before the one before it has ended; a step's duration is then the whole
run's, divided by its steps. Otherwise the answers also hold, of the steps that were measured, `bounds_ms`
(each one's critical path, made of what each of its own tasks took), `usual_bound_ms` (the same of the median
time of each kind of task), `busiest_ms` (what the busiest actor then computes), `task_ms`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import bound
import jax
import numpy as np
import shapes
import steps
import uvloop
from contender import Answer, Channel

import jaxpp_async as jpp
from jaxpp_async.program.instructions import Run

WARM_UP = 5


class Trainer:
    """A mesh's step, its state and what was measured of it."""

    def __init__(self, mesh: jpp.RemoteMesh, training: steps.Training, *, fetches: bool = False):
        self.fetches = fetches
        self.mesh, self.state, self.batch = mesh, training.state, training.batch
        self.step = mesh.distributed(training.step, donate_argnums=0)
        self.losses: Any = None

    async def prepare(self) -> dict[str, Any]:
        """Compile and warm up; returns what the results should say of this contender."""
        compiled = await self.step.compile(self.state, self.batch)
        self.programs = compiled.compiled.programs
        await self._run()
        loss = float(np.mean(await self.losses))
        for _ in range(WARM_UP):
            await self._run()
        num_tasks = sum(isinstance(i, Run) for p in self.programs for i in p.instructions)
        return {"jax": jax.__version__, "loss": loss, "tasks": num_tasks, "actors": self._actors()}

    async def one_by_one(self, num_steps: int) -> Answer:
        """Each step's own duration, and where the actors' time went."""
        ms: list[float] = []
        seconds: list[list[list[float]]] = []
        for _ in range(num_steps):
            start = time.perf_counter()
            await self._run()
            ms.append((time.perf_counter() - start) * 1e3)
            stats = self.mesh.last_step_stats()
            seconds.append(
                [bound.run_seconds(p, s.stamps) for p, s in zip(self.programs, stats, strict=True)]
            )
        times = bound.task_times(self.programs, seconds)
        usual = bound.usual_seconds(self.programs, times)
        return {
            "ms": ms,
            "bounds_ms": [bound.critical_path_s(self.programs, of_step) * 1e3 for of_step in seconds],
            "usual_bound_ms": bound.critical_path_s(self.programs, usual) * 1e3,
            "busiest_ms": bound.busiest_s(self.programs, times) * 1e3,
            **self.more_bounds(times),
            "task_ms": {name: t * 1e3 for name, t in _named(self.programs, times).items()},
        }

    async def in_flight(self, num_steps: int, at_once: int) -> Answer:
        """Steps that follow each other without waiting; each one's share of the whole time."""
        under_way: list[jpp.StepFuture] = []
        start = time.perf_counter()
        for _ in range(num_steps):
            if len(under_way) == at_once:
                await under_way.pop(0)
            future = await self.mesh.submit(self.step, self.state, self.batch)
            self.state, self.losses = future.outputs
            under_way.append(future)
        for future in under_way:
            await future
        return [(time.perf_counter() - start) * 1e3 / num_steps] * num_steps

    async def _run(self) -> None:
        self.state, self.losses = await self.mesh.run(self.step, self.state, self.batch)
        if self.fetches:
            await self.losses

    def more_bounds(self, times: dict[bound.Kind, float]) -> dict[str, float]:
        """Further figures made of the times of tasks."""
        return {}

    def _actors(self) -> list[dict[str, Any]]:
        """CPUs and threads of each actor's process: two that share a core would hold each other up."""
        return [
            {
                "cpus": sorted(os.sched_getaffinity(a.pid)),
                "threads": len(list(Path(f"/proc/{a.pid}/task").iterdir())),
            }
            for a in self.mesh.actors
        ]


def _named(programs: Any, times: dict[bound.Kind, float]) -> dict[str, float]:
    """By what a reader knows a task as, such as `fwd(stage 0) on actor 0`."""
    names: dict[str, float] = {}
    for program in programs:
        for run in (i for i in program.instructions if isinstance(i, Run)):
            label = run.label.partition(", mb ")[0]
            name = (
                f"{label}{')' if '(' in label and not label.endswith(')') else ''} on actor {program.actor}"
            )
            names.setdefault(name, times[program.actor, run.executable])
    return names


async def main(args: argparse.Namespace, channel: Channel) -> None:
    shape = shapes.SHAPES[args.model]
    num_stages = shapes.NUM_STAGES * (shape.num_blocks // args.blocks if args.blocks else 1)
    schedule = getattr(jpp, args.schedule)(num_stages)
    training = steps.training(shape, schedule, blocks_per_stage=args.blocks)
    async with jpp.RemoteMesh(2) as mesh:
        trainer = Trainer(mesh, training, fetches=args.fetch)
        facts = await trainer.prepare()
        if args.in_flight > 1:
            await channel.serve_async(lambda n: trainer.in_flight(n, args.in_flight), **facts)
        else:
            await channel.serve_async(trainer.one_by_one, schedule=args.schedule, stages=num_stages, **facts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=shapes.SHAPES)
    parser.add_argument("--schedule", default="Std1F1B", help="a class of jaxpp_async (default: %(default)s)")
    parser.add_argument("--blocks", type=int, help="blocks a stage, of the big model (default: its four)")
    parser.add_argument("--in-flight", type=int, default=1, metavar="N", help="steps under way at once")
    parser.add_argument("--fetch", action="store_true", help="a step has ended when its losses are here")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    uvloop.run(main(arguments, Channel()))
