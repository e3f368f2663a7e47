"""controller: what a step costs the controller's process, by number of actors: `mesh.run` with actors that
execute nothing.

python benchmarks/controller.py [--actors 2 8 32 64] [--steps 200] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from light import LightLauncher

import jaxpp_async as jpp

ACTORS = (2, 8, 32, 64)
WIDTH = 8


def make_step(num_stages: int):
    """A step of one small layer a stage: each actor holds one weight, which the step donates; SGD."""

    def loss_fn(params, mb):
        x = mb["x"]
        for k, w in enumerate(params):
            x = jnp.tanh(x @ w)
            if k < num_stages - 1:
                x = jpp.pipeline_yield(x)
        return jnp.mean((x - mb["y"]) ** 2)

    def step(params, batch):
        def grads_of(mb):
            loss, grads = jax.value_and_grad(loss_fn)(params, mb)
            return grads, loss

        grads, losses = jpp.accumulate_grads(grads_of, jpp.Std1F1B(num_stages))(batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses

    return step


async def measure(num_actors: int, steps: int, profile: bool = False) -> dict[str, float]:
    """CPU of this process, in us a step and actor: the median of ten windows, each of `steps` / 10 steps."""
    params = [np.eye(WIDTH, dtype=np.float32) for _ in range(num_actors)]
    batch = {name: np.ones((2, 2, WIDTH), np.float32) for name in ("x", "y")}
    windows = []
    async with jpp.RemoteMesh(num_actors, launcher=LightLauncher()) as mesh:
        step = mesh.distributed(make_step(num_actors), donate_argnums=0)
        state: Any = await mesh.put(params)
        for _ in range(20):
            state, _ = await mesh.run(step, state, batch)
        gc.collect()
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        for _ in range(10):
            start_s = time.process_time()
            for _ in range(steps // 10):
                state, _ = await mesh.run(step, state, batch)
            windows.append((time.process_time() - start_s) / (steps // 10) / num_actors * 1e6)
        if profile:
            profiler.disable()
            for key in ("tottime", "cumtime"):
                pstats.Stats(profiler).sort_stats(key).print_stats(50)
    return {"us": statistics.median(windows), "least": min(windows)}


def run(actors: tuple[int, ...] = ACTORS, steps: int = 200) -> dict[str, Any]:
    """The figures of `make bench`: CPU us of the controller a step and actor, by number of actors."""
    return {"actors": {str(n): round(asyncio.run(measure(n, steps))["us"], 1) for n in actors}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, nargs="+", default=ACTORS)
    parser.add_argument("--steps", type=int, default=200, help="steps measured, at least 10")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, by function")
    given = parser.parse_args()
    if given.profile:
        for n in given.actors:
            print(n, asyncio.run(measure(n, given.steps, profile=True)))
    else:
        print(json.dumps({"controller": run(tuple(given.actors), given.steps)}))


if __name__ == "__main__":
    main()
