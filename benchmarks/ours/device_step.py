"""device_step: the step of examples/train_gpt.py in bfloat16, by a pipeline of actors or by plain `jax.jit`;
measures, and prints JSON. `gpu.py` starts it.

    python benchmarks/ours/device_step.py ours cuda --actors 2 --dim 2048      # or: jit; or: cpu

The process that drives the pipeline has no GPU itself: it compiles for its actors'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import uvloop

import jaxpp_async as jpp
from gpt import steps
from gpt.model import VOCAB_SIZE, ModelConfig
from jaxpp_async.timeline import Timeline


def work(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The step, what makes its state, and a batch."""
    config = ModelConfig(
        num_layers=options.layers,
        dim=options.dim,
        num_heads=options.dim // options.head_dim,
        seq_len=options.seq_len,
    )
    optimizer = steps.make_optimizer(1000)
    init = steps.make_init(config, optimizer)

    def init_bf16(key: jax.Array) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, init(key))

    schedule = getattr(jpp, options.schedule)(num_stages=options.stages, stages="balanced")
    shape = (options.microbatches, options.microbatch_size, options.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, shape, dtype=np.int32)
    batch = {"tokens": tokens[..., :-1], "labels": tokens[..., 1:]}
    return steps.make_train_step(config, optimizer, schedule), init_bf16, batch


def stand_in() -> dict[str, Any]:
    """Options of a mesh whose actors compute late on CPUs, from the tests."""
    from jaxpp_async.launch import LocalLauncher

    tests = str(Path(__file__).parents[2] / "tests" / "support")
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {"launcher": LocalLauncher(actor="fake_device:DeviceActor"), "env": {"PYTHONPATH": path}}


async def ours(options: argparse.Namespace, **mesh_options: Any) -> dict[str, Any]:
    """The step by actors; `mesh_options` of a mesh on something else than GPUs."""
    jax.config.update("jax_platforms", "cpu")
    train_step, init, batch = work(options)
    mesh_options = {"platform": options.platform, "compilation_cache": None} | mesh_options
    times, timelines, losses = [], [], []
    async with jpp.RemoteMesh(options.actors, **mesh_options) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        key = jax.random.key(0)
        begin = time.perf_counter()
        await step.compile(jax.eval_shape(init, key), batch)
        compile_s = time.perf_counter() - begin
        state = await step.init(0, init, key)
        for i in range(options.warm + options.steps):
            begin = time.perf_counter()
            state, loss = await mesh.run(step, state, batch)
            if i >= options.warm:
                times.append((time.perf_counter() - begin) * 1e3)
                timelines.append(mesh.last_step_timeline())
                losses.append(float(await loss))
        staged = [event.text async for event in _so_far(mesh) if event.kind == "staged"]
    return {
        "ms": times,
        "losses": losses,
        "compile_s": compile_s,
        "staged": staged,
        "gaps": gaps(timelines),
    }


async def _so_far(mesh: jpp.RemoteMesh) -> Any:
    """What has been told until now."""
    events = mesh.events()
    while True:
        try:
            yield await asyncio.wait_for(anext(events), 0.05)
        except (TimeoutError, StopAsyncIteration):
            return


def gaps(timelines: list[Timeline]) -> dict[str, Any]:
    """What the timelines say of time between tasks; medians over the steps."""
    between = [
        max(0.0, run.start_s - before.end_s) * 1e6
        for timeline in timelines
        for actor in timeline.actors
        for before, run in zip(actor.runs, actor.runs[1:], strict=False)
    ]
    bills = [timeline.bill for timeline in timelines]
    parts = ("compute_s", "imbalance_s", "schedule_s", "transfer_s", "dispatch_s", "queue_s", "reply_s")
    return {
        "tasks": sum(len(actor.runs) for actor in timelines[-1].actors),
        "between_us": {"median": statistics.median(between), "p90": sorted(between)[int(0.9 * len(between))]},
        "bill_ms": {
            p.removesuffix("_s"): statistics.median(getattr(b, p) for b in bills) * 1e3 for p in parts
        },
        "efficiency": statistics.median(b.efficiency for b in bills),
    }


def plain(options: argparse.Namespace) -> dict[str, Any]:
    jax.config.update("jax_platforms", "cuda,cpu" if options.platform == "cuda" else "cpu")
    device = jax.devices(options.platform)[0]  # fails without one; JAX would take the CPU
    train_step, init, batch = work(options)
    state = jax.jit(init)(jax.random.key(0))
    batch = jax.device_put(batch)
    begin = time.perf_counter()
    step = jax.jit(train_step, donate_argnums=0).lower(state, batch).compile()
    compile_s = time.perf_counter() - begin
    times, losses = [], []
    for i in range(options.warm + options.steps):
        begin = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch))
        if i >= options.warm:
            times.append((time.perf_counter() - begin) * 1e3)
            losses.append(float(loss))
    return {"ms": times, "losses": losses, "compile_s": compile_s, "device": device.device_kind}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=("ours", "jit"))
    parser.add_argument("platform", choices=("cuda", "cpu"))
    parser.add_argument(
        "--stand-in", action="store_true", help="actors whose CPU devices compute late, as a GPU does"
    )
    parser.add_argument("--schedule", default="Std1F1B")
    for name, default in (
        ("actors", 2),
        ("stages", 2),
        ("layers", 4),
        ("dim", 64),
        ("head-dim", 16),
        ("seq-len", 64),
        ("microbatches", 8),
        ("microbatch-size", 2),
        ("steps", 20),
        ("warm", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(arguments)


def main() -> None:
    options = read_options()
    mesh_options = stand_in() if options.stand_in else {}
    found = uvloop.run(ours(options, **mesh_options)) if options.contender == "ours" else plain(options)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
