"""stamps: what the time stamps of every instruction cost, as a share of the tiny step.

    python benchmarks/stamps.py

Counts the stamps of one step, times one (a reading of the clock, kept in an array) and their way to the
driver (packed, encoded, signed, checked, decoded), and sets both against the median step. It adds what actors
do one after the other, though they stamp side by side: the share is too high, if anything.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
from array import array
from statistics import median
from timeit import repeat

from msgspec import structs
from ours.steps import training
from shapes import TINY

import jaxpp_async as jpp
from jaxpp_async.protocol import codec
from jaxpp_async.protocol import messages as m
from jaxpp_async.timeline.events import read_stamps

STEPS, CALLS = 200, 20_000


async def tiny_steps() -> tuple[list[m.StepStats], float]:
    """What the actors say of a tiny step, and the median time of one."""
    task = training(TINY, jpp.Std1F1B(2))
    async with jpp.RemoteMesh(2) as mesh:
        step = mesh.distributed(task.step, donate_argnums=0)
        state, times = task.state, []
        for _ in range(STEPS):
            start_s = time.perf_counter()
            state, _ = await mesh.run(step, state, task.batch)
            times.append(time.perf_counter() - start_s)
        return mesh.last_step_stats(), median(times)


def stamp_s() -> float:
    """One stamp, as an actor makes it."""
    stamps = array("d", [0.0]) * 64

    def twenty() -> None:
        for k in range(20):
            stamps[2 * k] = time.monotonic()

    return min(repeat(twenty, number=CALLS // 20, repeat=5)) / CALLS


def travel_s(stats: m.StepStats) -> float:
    """What a reply with stamps takes longer than one without, at both ends."""

    encoder = codec.Encoder(1 << 20)
    decoder = codec.decoder_of(m.accepted_messages("controller"))

    def there(done: m.StepDone) -> None:
        data = encoder.encode(done, 1)
        hmac.digest(b"k" * 32, data, "sha256")
        hmac.digest(b"k" * 32, data, "sha256")
        decoder.decode(data)

    def one(stats: m.StepStats) -> float:
        done = m.StepDone(2, stats)
        return min(repeat(lambda: there(done), number=500, repeat=7)) / 500

    return one(stats) - one(structs.replace(stats, stamps=b""))


def run() -> dict[str, float]:
    """The figures of `make bench`."""
    stats, step_s = asyncio.run(tiny_steps())
    count = sum(not math.isnan(t) for s in stats for moments in read_stamps(s.stamps) for t in moments)
    each_s, travels_s = stamp_s(), sum(travel_s(s) for s in stats)
    cost_s = count * each_s + travels_s
    return {
        "percent_of_tiny_step": 100 * cost_s / step_s,
        "count": count,
        "stamp_ns": each_s * 1e9,
        "travel_us": travels_s * 1e6,
        "cost_us": cost_s * 1e6,
        "tiny_step_ms": step_s * 1e3,
    }


def main() -> None:
    print(json.dumps({"stamps": run()}))


if __name__ == "__main__":
    main()
