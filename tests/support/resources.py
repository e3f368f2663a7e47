"""What a process holds, for tests that nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import jax
import psutil
import pytest

import jaxpp_async as jpp
from jaxpp_async.actors.shards import count_memory
from jaxpp_async.controller.controller import Controller
from jaxpp_async.protocol.messages import Inspect


def held() -> dict[str, Any]:
    """Children, descriptors, threads of this package (those of pools come as they are needed), and asyncio
    tasks."""
    gc.collect()
    process = psutil.Process()
    return {
        "children": sorted(p.pid for p in process.children(recursive=True)),
        "descriptors": process.num_fds(),
        "threads": sorted(t.name for t in threading.enumerate() if re.fullmatch(r"jaxpp.*[^_0-9]", t.name)),
        "tasks": len(asyncio.all_tasks()),
    }


SETTLE_S = 3.0
"""The seconds in which work of threads that nobody waits for has to have ended."""


def open_files() -> dict[str, int]:
    """How many descriptors this process has of each kind: paths, and kinds such as `socket`."""
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            kinds[re.sub(r":?\[\d+\]", "", os.readlink(f"/proc/self/fd/{fd}"))] += 1
    return dict(kinds)


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What has changed: (before, after) by name."""
    return {n: (before.get(n), after.get(n)) for n in before | after if before.get(n) != after.get(n)}


async def inspect_actors(controller: Controller) -> dict[int, dict[str, int]]:
    """Counters of each process, such as `live_arrays`, once all arrays that nobody needs have been freed."""
    await controller.fetch([])  # carries the frees
    replies = {p: controller.requests.send(p, Inspect()) for p in controller.processes.everyone}
    return {process: (await reply).numbers for process, reply in replies.items()}


async def everything(mesh: jpp.RemoteMesh) -> dict[str, Any]:
    """What a mesh and this process hold: counts that may not grow, of the driver and of each actor."""
    controller = mesh._running()
    gc.collect()
    for _ in range(10):
        # it carries the frees of what was collected, which are tasks on the actors for a moment
        actors = await inspect_actors(controller)
        if not any(numbers["tasks"] for numbers in actors.values()):
            break
    return {
        **{f"actor {actor}: {name}": n for actor, numbers in actors.items() for name, n in numbers.items()},
        **held(),
        "driver's arrays": count_memory(jax.live_arrays()),
        "waiting": [len(link.open) for link in controller._actor_group.links.values()],
        "under way": len(controller._under_way),
    }


def num_blocks_mapped() -> int:
    """Mappings of memory that transports share with processes of this host: of their own and of others."""
    gc.collect()
    return sum("memfd:jaxpp-async" in area.path for area in psutil.Process().memory_maps(grouped=False))


def shared_memory() -> set[str]:
    """Entries of /dev/shm."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


async def no_new_shared_memory(before: set[str], timeout_s: float = 5.0) -> None:
    """Others on this machine may be starting: what is there for a moment is not what this process left
    behind."""
    deadline = time.monotonic() + timeout_s
    while left := shared_memory() - before:
        assert time.monotonic() < deadline, f"left in /dev/shm: {left}"
        await asyncio.sleep(0.05)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What asyncio had to complain of in this test."""
    return [r.getMessage() for r in caplog.records if r.name == "asyncio" and r.levelno > logging.INFO]


@contextlib.asynccontextmanager
async def nothing_left(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Checks that all that `held` names is as before, /dev/shm too, and that asyncio had nothing to complain
    of."""
    before, files, were_open = held(), shared_memory(), open_files()
    yield
    # A thread of a pool may still be writing what it compiled for an actor that has gone.
    deadline = time.monotonic() + SETTLE_S
    while changed := differences(before, held()):
        assert time.monotonic() < deadline, (changed, differences(were_open, open_files()))
        await asyncio.sleep(0.05)
    await no_new_shared_memory(files)
    assert not complaints(caplog), complaints(caplog)
