"""page: what the live page costs a run whose steps last 100 ms, and whether a run's record grows.

    python benchmarks/page.py [--seconds 4] [--rounds 10]

Two actors, whose tasks last as long as a device model says, train without end. Turn by turn, a browser-like
program of its own looks at the page, as page.js does, or nobody looks. The CPU time of the processes is read
before and after each turn. The actors live in this process (`inline`), where nobody spins, so that the CPU
time of a turn varies little; the figures with processes of their own (`--processes`) are those of a real run,
but vary by more than the page costs.

`of_a_core_percent` is the CPU time that looking adds, as a share of one core's time. Since device models
sleep, processes use little CPU time themselves. `computing_cores` is the number of cores that would be busy
if tasks computed while they last, and `of_computing_percent` the share of what looking adds in that. Each is
the mean over pairs of neighbouring turns, with the standard error of that mean.

Then 10,000 short steps are run in this process while the program looks, and the resident memory after 2,000
of them is held against that at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp_async as jpp

MICROBATCHES, STAGES = 4, 2
TASK_S = 0.12 / (3 * MICROBATCHES + 3)
"""The seconds of a forward, with which a step of 1F1B on two actors lasts 100 ms; a backward takes twice."""

POLLER = """
import json, sys, time, urllib.request
url, version = sys.argv[1:]
base, _, query = url.partition("?")
urllib.request.urlopen(url).read()
seen, polls = 0, 0
while True:
    state = json.load(urllib.request.urlopen(f"{base}state?{query}&seen={seen}&version={version}"))
    seen = state["seen"]
    time.sleep(0.2)  # as the page's script waits between its requests
"""
"""A program that asks for a page as often as page.js does."""

TICKS = os.sysconf("SC_CLK_TCK")


class Device(dict):
    """A device on which a forward takes `TASK_S`, and a backward twice as long."""

    def task_s(self, work: Any) -> float:
        if work.flops < 1000:
            return 0.0
        self.setdefault("least", work.flops)
        self["least"] = min(self["least"], work.flops)
        return TASK_S if work.flops < 1.5 * self["least"] else 2 * TASK_S


def train_step(params: Any, batch: Any) -> Any:
    """A step of two stages."""

    def loss_fn(params: Any, mb: Any) -> Any:
        x = jpp.pipeline_yield(jnp.tanh(mb @ params[0]))
        return jnp.mean((x @ params[1]) ** 2)

    def microbatch_grads(mb: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, mb)
        return grads, loss

    grads, losses = jpp.accumulate_grads(microbatch_grads, jpp.Std1F1B(STAGES))(batch)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), losses


def arguments() -> Any:
    random = np.random.default_rng(0)
    params = [random.standard_normal((32, 32)).astype("float32") / 8 for _ in range(2)]
    return params, random.standard_normal((MICROBATCHES, 32, 32)).astype("float32")


def cpu_s(pids: list[int]) -> float:
    """Return the CPU seconds that processes have used; of this process alone, exactly."""
    if pids == [os.getpid()]:
        return time.process_time()
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def look(url: str) -> subprocess.Popen[bytes]:
    """Start a program that looks at a page."""
    return subprocess.Popen(
        [sys.executable, "-S", "-c", POLLER, url, jpp.__version__], stderr=subprocess.DEVNULL
    )


async def turns(rounds: int, seconds: float, has_processes: bool) -> dict[str, Any]:
    """Train in turns with and without somebody who looks, and return what looking costs."""
    launcher = "local" if has_processes else "inline"
    added: list[float] = []
    alone: list[float] = []
    step_s: list[float] = []
    async with jpp.RemoteMesh(STAGES, device_model=Device(), page=True, launcher=launcher) as mesh:
        step, (state, batch) = mesh.distributed(train_step, donate_argnums=0), arguments()
        pids = sorted({os.getpid(), *(actor.pid for actor in mesh.actors)})
        assert mesh.page_url is not None

        async def cores(is_seen: bool) -> float:
            nonlocal state
            poller = look(mesh.page_url) if is_seen else None
            for _ in range(10):  # the program starts, and the page is written for the first time
                state, _ = await mesh.run(step, state, batch)
            before_s, begun_s = cpu_s(pids), time.monotonic()
            while time.monotonic() < begun_s + seconds:
                start_s = time.perf_counter()
                state, _ = await mesh.run(step, state, batch)
                step_s.append(time.perf_counter() - start_s)
            used = (cpu_s(pids) - before_s) / (time.monotonic() - begun_s)
            if poller is not None:
                poller.kill()
                poller.wait()
            return used

        await cores(is_seen=True)
        for turn in range(rounds):
            pair = {is_seen: await cores(is_seen) for is_seen in ((False, True), (True, False))[turn % 2]}
            added.append(pair[True] - pair[False])
            alone.append(pair[False])
    computing = STAGES * 3 * MICROBATCHES * TASK_S / mean(step_s)
    error = stdev(added) / len(added) ** 0.5
    return {
        "step_ms": 1e3 * median(step_s),
        "steps": len(step_s),
        "cores_alone": mean(alone),
        "of_a_core_percent": 100 * mean(added),
        "error_percent": 100 * error,
        "computing_cores": computing,
        "of_computing_percent": 100 * mean(added) / computing,
    }


async def growth(num_steps: int = 10_000, warm_up: int = 2_000) -> dict[str, Any]:
    """Run short steps while somebody looks, and return how much this process grows."""
    async with jpp.RemoteMesh(STAGES, launcher="inline", page=True) as mesh:
        step, (state, batch) = mesh.distributed(train_step, donate_argnums=0), arguments()
        poller = look(mesh.page_url)
        before = 0
        begun_s = time.monotonic()
        for number in range(warm_up + num_steps):
            if number == warm_up:
                gc.collect()
                before = resident_bytes()
            state, _ = await mesh.run(step, state, batch)
            mesh.log(number, {"loss": float(number)})
        gc.collect()
        after = resident_bytes()
        poller.kill()
        poller.wait()
        return {
            "steps": num_steps,
            "step_ms": 1e3 * (time.monotonic() - begun_s) / (warm_up + num_steps),
            "resident_before": before,
            "resident_after": after,
            "grown_bytes": after - before,
        }


def run(rounds: int = 10, seconds: float = 4.0, has_processes: bool = False) -> dict[str, Any]:
    """Return all figures."""
    return {"cost": asyncio.run(turns(rounds, seconds, has_processes)), "growth": asyncio.run(growth())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="pairs of turns, with and without a look")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--processes", action="store_true", help="actors in processes of their own")
    args = parser.parse_args()
    print(json.dumps(run(args.rounds, args.seconds, args.processes), indent=1))


if __name__ == "__main__":
    main()
