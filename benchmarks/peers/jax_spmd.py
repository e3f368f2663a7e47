"""jax_spmd: the training steps of `shapes.py` under JAX SPMD pipelining: GPipe as shard_map and ppermute, on
two CPU devices of one process.

`jax_spmd.py tiny|big` is a contender (`contender.py`).
"""

from __future__ import annotations

import argparse
import os

from contender import Channel
from shapes import NUM_STAGES, SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(SHAPES))
    args = parser.parse_args()
    channel = Channel()
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={NUM_STAGES}"

    # After the flags: JAX reads them once.
    import jax
    import jax_contender
    import jax_steps

    shape = SHAPES[args.model]
    mesh = jax.make_mesh((NUM_STAGES,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(values: jax_contender.Start) -> jax_contender.Start:
        by_stage, everywhere = (jax.NamedSharding(mesh, spec) for spec in (jax.P("stage"), jax.P()))
        weights, x, target = values
        return jax.device_put((jax_steps.stacked(weights), x, target), (by_stage, everywhere, everywhere))

    jax_contender.serve(channel, shape, jax_steps.spmd_step(shape, mesh), place, devices=NUM_STAGES)


if __name__ == "__main__":
    main()
