"""overlap: a contender: a pipelined step on actors whose links are slow, with or without its computation.

    python benchmarks/ours/overlap.py                         # computes, on the links that there are
    python benchmarks/ours/overlap.py --delay-ms 6            # computes, on slow links
    python benchmarks/ours/overlap.py --delay-ms 6 --idle     # the same transfers, next to no computation

Two stages of two blocks x + w2 gelu(w1 x) each, on two actors (a process and a core each), under Eager1F1B:
so many forwards ahead that every transfer but the first and the last has tasks beside it, if it takes as long
as a forward. Slow links: `slow_link.py`. Its answers also hold what `step.py` answers, `forward_ms`, and
`bound_slow_ms`: the critical path with transfers that take the delay. Nothing spins between measurements.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import bound
import shapes
import steps
import uvloop
from contender import Channel
from step import Trainer

import jaxpp_async as jpp
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.program.instructions import Run

SHAPE = replace(shapes.BIG, name="overlap", num_blocks=2, num_microbatches=16)


class Overlapping(Trainer):
    """A trainer that knows how slow its links are."""

    delay_ms = 0.0

    def more_bounds(self, times: dict[bound.Kind, float]) -> dict[str, float]:
        forwards = [
            i for i in self.programs[0].instructions if isinstance(i, Run) and i.label.startswith("fwd")
        ]
        # Where stages compute next to nothing, the compiler leaves them none.
        forward_s = times[0, forwards[0].executable] if forwards else 0.0
        slow = bound.critical_path_s(
            self.programs, bound.usual_seconds(self.programs, times), self.delay_ms / 1e3
        )
        return {"forward_ms": forward_s * 1e3, "bound_slow_ms": slow * 1e3}


def idle_training(training: steps.Training) -> steps.Training:
    """As many transfers of the same sizes for next to no computation: each stage scales what it gets."""

    def forward(state: Any, x: Any) -> Any:
        return jpp.pipeline_yield(x * state[0]["w"]) * state[1]["w"]

    step = steps.sgd(forward, jpp.Eager1F1B(2), SHAPE)
    return replace(training, step=step, state=[{"w": 1.0}, {"w": 1.0}])


async def main(args: argparse.Namespace, channel: Channel) -> None:
    training = steps.training(SHAPE, jpp.Eager1F1B(2))
    if args.idle:
        training = idle_training(training)
    launcher = LocalLauncher(actor="slow_link:SlowActor") if args.delay_ms else None
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {"SLOW_LINK_MS": str(args.delay_ms), "PYTHONPATH": here}
    async with jpp.RemoteMesh(2, launcher=launcher, env=env) as mesh:
        trainer = Overlapping(mesh, training)
        trainer.delay_ms = args.delay_ms
        facts = await trainer.prepare()
        await channel.serve_async(trainer.one_by_one, delay_ms=args.delay_ms, **facts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--delay-ms", type=float, default=0.0, help="what a message takes on a link; 0: as it is"
    )
    parser.add_argument(
        "--idle", action="store_true", help="send the same arrays, but compute next to nothing"
    )
    uvloop.run(main(parser.parse_args(), Channel()))
