"""process_memory: how much actors' processes grow in training, against the memory that was planned for them.

    python benchmarks/process_memory.py [--steps 3] [--width 4096]

Two actors train some layers with 1F1B. When the step is compiled and loaded, and before its arguments come,
an actor's resident memory is read and the operating system's record of the highest one is reset. Then the
arguments are sent and some steps are run. An actor's growth is the record at the end less the first reading;
it is held against the sum of `memory_needs`. Readings are of `/proc/PID/status`: `resident` is `VmRSS`, the
record is `VmHWM`, and `anonymous`, `shared` and `file` are the parts of `VmRSS`. Linux only.

This is done twice. `kept` is a mesh as it is by default: its actors keep the memory of freed arrays below
32 MiB (`launch/hosts.py`), and the growth includes the holes in malloc's heap into which no array fitted.
`returned` is a mesh whose actors give the memory of freed arrays back to the system, so that the growth is
that of arrays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layers import Layers
from plan_tables import process_memory_table
from rich.console import Console

import jaxpp_async as jpp
from jaxpp_async.planning.memory import ActorMemory, memory_needs

NUM_ACTORS, NUM_LAYERS, NUM_MICROBATCHES, ROWS = 2, 4, 4, 256

ENVIRONMENTS = {
    "kept": {},
    "returned": {
        "MALLOC_MMAP_MAX_": "65536",
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        "MALLOC_TRIM_THRESHOLD_": "1048576",
    },
}
"""The variables of actors' processes. With the second set malloc maps each array of 1 MiB and more."""

FIELDS = {
    "resident": "VmRSS",
    "anonymous": "RssAnon",
    "shared": "RssShmem",
    "file": "RssFile",
    "most": "VmHWM",
}
"""The names of our readings, and those of `/proc/PID/status`."""
RESET_MOST = "5"
"""The text that resets `VmHWM` when it is written to `/proc/PID/clear_refs`."""

Reading = dict[str, int]


def reading(status: str) -> Reading:
    """Return the bytes of each field from the text of `/proc/PID/status`."""
    rows = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {name: 1024 * int(rows[key].split()[0]) for name, key in FIELDS.items()}


def read(pids: Sequence[int]) -> list[Reading]:
    """Return the readings of some processes."""
    return [reading(Path(f"/proc/{pid}/status").read_text()) for pid in pids]


def reset_most(pids: Sequence[int]) -> None:
    """Let the record of the highest resident memory of some processes begin anew."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text(RESET_MOST)


def growth(before: Reading, after: Reading) -> Reading:
    """Return the bytes by which each field has grown; of `most`, above what was resident before."""
    return {name: value - before["resident" if name == "most" else name] for name, value in after.items()}


async def measure(num_steps: int, width: int, env: Mapping[str, str]) -> dict[str, Any]:
    """Train, and return the figures.

    Args:
        env: the variables of actors' processes.
        num_steps: the number of steps.
        width: the size of the layers' matrices.
    """
    model = Layers(NUM_LAYERS, width=width, rows=ROWS, num_microbatches=NUM_MICROBATCHES)
    params, batch = model.values()
    train_step = model.training([NUM_LAYERS // NUM_ACTORS] * NUM_ACTORS, jpp.Std1F1B(NUM_ACTORS))
    async with jpp.RemoteMesh(NUM_ACTORS, env=env) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        compiled = await step.compile(params, batch)
        pids = [actor.pid for actor in mesh.actors]
        before = read(pids)
        reset_most(pids)
        state = await mesh.put(params, like=(step, 0))
        batch = await mesh.put(batch, like=(step, 1))
        with_arguments = read(pids)
        for _ in range(num_steps):
            state, _ = await mesh.run(step, state, batch)
        after = read(pids)
    return figures_of(memory_needs(compiled), before, with_arguments, after)


def figures_of(
    needs: Sequence[ActorMemory],
    before: Sequence[Reading],
    with_arguments: Sequence[Reading],
    after: Sequence[Reading],
) -> dict[str, Any]:
    """Return each actor's growth beside its planned memory, and the largest error in %."""
    actors = []
    for need, first, then, last in zip(needs, before, with_arguments, after, strict=True):
        grown = growth(first, last)
        actors.append(
            {
                "planned_bytes": need.total_bytes,
                "planned_rows": {row.what: row.size_bytes for row in need.rows},
                "most_bytes": grown["most"],
                "error_percent": 100 * (grown["most"] / need.total_bytes - 1),
                "after_arguments": growth(first, then),
                "after_steps": grown,
            }
        )
    return {"actors": actors, "most_percent": max(abs(actor["error_percent"]) for actor in actors)}


def run(num_steps: int = 3, width: int = 4096) -> dict[str, Any]:
    """Return the figures of `make bench`."""
    found = {name: asyncio.run(measure(num_steps, width, env)) for name, env in ENVIRONMENTS.items()}
    return {"process_memory": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3, help="steps that are run")
    parser.add_argument("--width", type=int, default=4096, help="the size of the layers' matrices")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    figures = run(args.steps, args.width)
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        Console(highlight=False).print(process_memory_table(figures["process_memory"]))


if __name__ == "__main__":
    main()
