"""numbers: what an actor holds and has done, counted, for whoever asks (`Inspect`). Reads only."""

from __future__ import annotations

import os

import jax

from jaxpp_async.actors.configuring import Equipment
from jaxpp_async.actors.executor import Executor
from jaxpp_async.actors.restarts.copies import Shelf
from jaxpp_async.actors.store import Store
from jaxpp_async.actors.values.shards import memory_held


def numbers(
    equipment: Equipment, store: Store, shelf: Shelf, executor: Executor | None, *, num_tasks: int
) -> dict[str, int]:
    """Counts, and sizes in bytes, by name.

    Args:
        equipment, store, shelf: what the actor has. executor: of the step under way.
        num_tasks: how many asyncio tasks the actor owns.
    """
    live_arrays, live_bytes = memory_held(jax.live_arrays())
    return {
        "live_arrays": live_arrays,
        "live_bytes": live_bytes,
        "store_arrays": len(store),
        "store_bytes": store.size_bytes,
        "table_bytes": executor.table_bytes if executor else 0,
        "pending_bytes": executor.pending_bytes if executor else 0,
        "copied_bytes": shelf.size_bytes,
        "free_receive_buffers": equipment.machine.pool.free_buffers,
        "free_receive_bytes": equipment.machine.pool.free_bytes,
        "file_descriptors": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "compilations": equipment.executables.compilations,
        "tasks": num_tasks,
    }
