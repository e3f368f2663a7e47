"""stacked_layers: a model whose layers are stacked in one leaf, against the same model with a leaf a layer.

    python benchmarks/stacked_layers.py [--layers 48] [--width 256] [--actors 2] [--rounds 10]

Both models are the same transformer blocks and the same Adam. One scans over the stacked layers with a
mark in the scan, the other calls each layer. They are cut alike. Three figures: the bytes of stacked leaves
(parameters and optimizer state) that an actor holds, as a share of 1/n of the whole; the median step, in
turns; and the compilation, with that of XLA and without a cache, each time of a new function on new actors,
in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from turns import durations

import jaxpp_async as jpp

NUM_MICROBATCHES, ROWS, LENGTH, HEADS = 4, 2, 128, 4


def init(num_layers: int, width: int) -> dict[str, np.ndarray]:
    """Return the stacked parameters of the blocks."""
    random = np.random.default_rng(0)
    shapes = {
        "qkv": (width, 3 * width),
        "proj": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    stacked = {
        name: (random.normal(size=(num_layers, *shape)) / shape[0] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    return stacked | {"scale": np.ones((num_layers, 2, width), np.float32)}


def block(x: jax.Array, w: Any) -> jax.Array:
    """One transformer block of (rows, length, width)."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    q, k, v = jnp.split(norm(x, w["scale"][0]) @ w["qkv"], 3, axis=-1)
    heads = [a.reshape(*a.shape[:-1], HEADS, -1) for a in (q, k, v)]
    mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
    x = x + mixed.reshape(x.shape) @ w["proj"]
    return x + jax.nn.silu(norm(x, w["scale"][1]) @ w["up"]) @ w["down"]


def scanned(params: Any, x: jax.Array) -> jax.Array:
    """Run blocks whose layers are stacked."""
    return jax.lax.scan(lambda x, w: (jpp.pipeline_yield(block(x, w)), None), x, params)[0]


def called(params: Any, x: jax.Array) -> jax.Array:
    """Run blocks of which each layer has leaves of its own."""
    for w in params:
        x = jpp.pipeline_yield(block(x, w))
    return x


def training(model: Callable[[Any, jax.Array], jax.Array], schedule: Any) -> Callable[[Any, Any], Any]:
    """Return a new training step of a model."""
    tx = optax.adam(1e-3)

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((model(params, batch["x"]) - batch["y"]) ** 2)

    def stacked_layers_step(state: Any, batch: Any) -> Any:
        params, opt = state

        def microbatch(mb: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, mb)
            return grads, value

        grads, losses = jpp.accumulate_grads(microbatch, schedule)(batch)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), losses

    return stacked_layers_step


def largest_share(report: Any, num_actors: int) -> float:
    """Return the bytes of stacked leaves on the fullest actor, as a share of 1/n of all of them."""
    held, total = [0.0] * num_actors, 0.0
    for leaf in report.inputs:
        if leaf.name.startswith("state"):
            for part in leaf.parts or ():
                total += part.size_bytes
                for actor in part.actors:
                    held[actor] += part.size_bytes
    return max(held) / (total / num_actors)


async def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both models."""
    stacked = init(args.layers, args.width)
    states = {
        "stacked": stacked,
        "a leaf a layer": [{k: v[i] for k, v in stacked.items()} for i in range(args.layers)],
    }
    models = {"stacked": scanned, "a leaf a layer": called}
    per_stage = args.layers // args.actors
    schedule = jpp.Std1F1B(args.actors, stages=[per_stage * (k + 1) - 1 for k in range(args.actors - 1)])
    random = np.random.default_rng(1)
    shape = NUM_MICROBATCHES, ROWS, LENGTH, args.width
    batch = {name: random.normal(size=shape).astype(np.float32) for name in ("x", "y")}
    tx, found = optax.adam(1e-3), dict[str, Any]()

    async def compile_on(mesh: jpp.RemoteMesh, name: str) -> float:
        step = mesh.distributed(training(models[name], schedule), donate_argnums=0)
        begin = time.perf_counter()
        compiled = await step.compile((states[name], tx.init(states[name])), batch)
        found[name] = step, compiled
        return time.perf_counter() - begin

    compile_s: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(args.compilations):
        for name in models:
            async with jpp.RemoteMesh(args.actors, launcher=args.launcher, compilation_cache=None) as mesh:
                compile_s[name].append(await compile_on(mesh, name))
    async with jpp.RemoteMesh(args.actors, launcher=args.launcher, compilation_cache=None) as mesh:
        for name in models:
            await compile_on(mesh, name)
        timelines: dict[str, list[jpp.Timeline]] = {name: [] for name in models}
        running = {name: (params, tx.init(params)) for name, params in states.items()}
        for number in range(args.rounds + 1):
            for name in models:
                for k in range(3):
                    running[name], _ = await mesh.run(found[name][0], running[name], batch)
                    if number and k:
                        timelines[name].append(mesh.last_step_timeline())
        share = largest_share(found["stacked"][1].report(), args.actors)
    step_ms = {name: durations(each)["measured_ms"] for name, each in timelines.items()}
    compiling = {name: statistics.median(times) for name, times in compile_s.items()}
    return {
        "layers": args.layers,
        "width": args.width,
        "actors": args.actors,
        "stacked_bytes_to_1/n": round(share, 4),
        "step_ms": {name: round(value, 2) for name, value in step_ms.items()},
        "step_ratio": round(step_ms["stacked"] / step_ms["a leaf a layer"], 3),
        "compile_s": {name: round(value, 2) for name, value in compiling.items()},
        "compile_ratio": round(compiling["stacked"] / compiling["a leaf a layer"], 3),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compilations", type=int, default=3)
    parser.add_argument("--launcher", default="local")
    print(json.dumps(asyncio.run(compare(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
