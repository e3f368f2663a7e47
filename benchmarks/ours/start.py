"""start: from entering a mesh to the end of the first step, once, with the compilation cache in a given
folder. Prints one line of JSON: seconds of the parts. Run it twice on one folder: what is compiled then lies
there.

    python benchmarks/ours/start.py /tmp/cache

The step is `transformer.py`'s: a transformer block a stage, four stages on two actors under Interleaved1F1B,
eight microbatches, clipping by the global norm, adam.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import jax
import numpy as np
import transformer
from contender import Channel

import jaxpp_async as jpp

SHAPE = transformer.Shape(num_stages=4, dim=64, num_heads=4, seq_len=32, vocab=128)
NUM_MICROBATCHES = 8


async def start(cache: str) -> dict[str, float]:
    """Seconds: `launch_s` until the mesh is entered, `compile_s` until every actor has the step loaded (the
    compiler here and XLA there), `step_s` of the first step (host values of the state on their way included).
    """
    step_fn, types = transformer.train_step(SHAPE, jpp.Interleaved1F1B(SHAPE.num_stages))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda t: 0.02 * rng.standard_normal(t.shape).astype(t.dtype), types)
    wanted = transformer.batch(SHAPE, NUM_MICROBATCHES)
    batch = rng.integers(0, SHAPE.vocab, wanted.shape, dtype=np.int32)
    began = time.perf_counter()
    async with jpp.RemoteMesh(2, compilation_cache=cache) as mesh:
        entered = time.perf_counter()
        step = mesh.distributed(step_fn, donate_argnums=0)
        compiled = await step.compile(state, batch)
        loaded = time.perf_counter()
        await mesh.run(step, state, batch)
        ended = time.perf_counter()
    return {
        "total_s": ended - began,
        "launch_s": entered - began,
        "compile_s": loaded - entered,
        "step_s": ended - loaded,
        "actors_compile_s": max(compiled.compile_s.values()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", help="folder of the compilation cache")
    arguments = parser.parse_args()
    channel = Channel()
    channel.ready(**asyncio.run(start(arguments.cache)))
