"""jax_jit: the training steps of `shapes.py` under plain `jax.jit`, on one device.

`jax_jit.py tiny|big --cores 1|2` is a contender (`contender.py`).
"""

from __future__ import annotations

import argparse
import os

from contender import Channel
from shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--cores", type=int, default=1, help="how many this process may use")
    parser.add_argument(
        "--whole", action="store_true", help="all rows at once, not one microbatch after the other"
    )
    args = parser.parse_args()
    channel = Channel()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)

    # After the affinity: XLA sizes its thread pool by it.
    import jax
    import jax_contender
    import jax_steps

    shape = SHAPES[args.model]
    step = (jax_steps.whole_step if args.whole else jax_steps.microbatched_step)(shape)
    jax_contender.serve(channel, shape, step, jax.device_put, cores=len(cores))


if __name__ == "__main__":
    main()
