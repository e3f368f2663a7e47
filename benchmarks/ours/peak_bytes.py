"""peak_bytes: the most bytes that an actor's buffer table holds in a step of the big model, as the actors
count them while they run it. Prints one line of JSON: schedule, number of microbatches, bytes of the actor
that holds most.

What counts is what the schedule decides: activations, gradients, received values. Left out are the step's
    arguments and
what must grow with the number of microbatches (the batch, the stacked losses); `docs/memory.md`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import shapes
import steps
from contender import Channel

import jaxpp_async as jpp

SCHEDULES = {"gpipe": jpp.GPipe(2), "std1f1b": jpp.Std1F1B(2)}
NUM_MICROBATCHES = (8, 32)


async def peaks() -> dict[str, dict[str, int]]:
    """Run a step of each schedule and number."""
    found: dict[str, dict[str, int]] = {}
    async with jpp.RemoteMesh(2) as mesh:
        for name, schedule in SCHEDULES.items():
            for number in NUM_MICROBATCHES:
                training = steps.training(replace(shapes.BIG, num_microbatches=number), schedule)
                step = mesh.distributed(training.step)
                await mesh.run(step, training.state, training.batch)
                most = max(stats.peak_bytes for stats in mesh.last_step_stats())
                found.setdefault(name, {})[str(number)] = most
    return found


if __name__ == "__main__":
    channel = Channel()
    channel.ready(**asyncio.run(peaks()))
