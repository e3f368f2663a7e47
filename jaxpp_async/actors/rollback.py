"""Carry out two requests: `TakeReplica` copies an actor's arrays for restarts, and `Rollback` restores them
from such a copy.

Both requests take effect in the order in which they and the steps are requested. `ReplicaStore` keeps the
copies and moves them between actors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpp_async.actors.array_store import ArrayStore, StoredArray, fill
from jaxpp_async.actors.host_values import HostCopy, copy_when_available
from jaxpp_async.actors.server import handles
from jaxpp_async.actors.shards import Layouts, host_bytes, join_privately
from jaxpp_async.layout.state_replicas import ReplicaStore, StateReplica
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.messages import ArrayId, Done, ReplicaArray, ReplicaTaken, Rollback, TakeReplica


class ReplicaRequests:
    """The component of an actor process that copies its arrays for restarts and restores them from a copy.

    Args:
        process_id: the number of the process in the mesh.
        store: the arrays of the process.
        layouts: the distributions of arrays over the process's devices.
        replica_store: keeps the copies (replicas).
        workers: threads for copying.
    """

    def __init__(
        self,
        process_id: ProcessId,
        store: ArrayStore,
        layouts: Layouts,
        replica_store: ReplicaStore,
        workers: ThreadPoolExecutor,
    ):
        self._process_id, self._store, self._layouts = process_id, store, layouts
        self._replica_store, self._workers = replica_store, workers

    def take_replica(
        self, message: TakeReplica, leaving: Container[ArrayId]
    ) -> Coroutine[Any, Any, ReplicaTaken]:
        """Copy every array to host memory, as it is after the steps requested so far and before any later
        step.

        Args:
            message: the controller's request.
            leaving: the ids of arrays that an earlier step will free when it ends; they are not copied.

        Returns:
            A coroutine that waits until the arrays are available, copies them, and returns the reply.
        """
        entries = {i: entry for i, entry in self._store.entries().items() if i not in leaving}
        copies = {array_id: copy_when_available(entry, self._layouts) for array_id, entry in entries.items()}
        return self._replica_taken(message, entries, copies)

    async def _replica_taken(
        self, message: TakeReplica, entries: Mapping[ArrayId, StoredArray], copies: Mapping[ArrayId, HostCopy]
    ) -> ReplicaTaken:
        if copies:
            await asyncio.wait([copy.shards for copy in copies.values()])
        # An entry that failed has no array to copy. A request that names it gets the failure, both before and
        # after a restart.
        found = {array_id: copy for array_id, copy in copies.items() if entries[array_id].error is None}
        for copy in copies.values():
            copy.shards.exception()  # marks it as retrieved
        for copy in found.values():
            copy.shards.result()  # raises if an array could not be read, since the replica would be useless
        loop = asyncio.get_running_loop()
        replica = await loop.run_in_executor(self._workers, _make_replica, found)
        self._replica_store.put(message.generation, self._process_id, replica)
        return ReplicaTaken(replica.arrays)

    @handles(Rollback)
    def roll_back(self, message: Rollback) -> Coroutine[Any, Any, Done]:
        """Replace all arrays of this process by those of a replica (a copy of the arrays, kept for restarts).

        Entries for the arrays are in the array store before this method returns, so that later requests may
        name the arrays. If the request names no replica, the store is empty afterwards.

        Returns:
            A coroutine that copies the arrays to the devices, makes them available in the store, and returns
            the reply.

        Raises:
            ProtocolError: this process does not have the replica.
        """
        self._store.forget_all()
        copy = (
            StateReplica((), ())
            if message.generation is None
            else self._replica_store.get(message.generation, self._process_id)
        )
        entries = [self._store.expect(kept.array_id, kept.aval) for kept in copy.arrays]

        def place_arrays() -> list[jax.Array]:
            layouts = [self._layouts.of(kept.aval) for kept in copy.arrays]
            return [
                join_privately(layout.views(shards), layout)
                for shards, layout in zip(copy.shards, layouts, strict=True)
            ]

        return fill(entries, place_arrays, self._workers)


def _make_replica(copies: Mapping[ArrayId, HostCopy]) -> StateReplica:
    """Make one replica (a copy of the process's state for restarts) from host copies of its arrays.

    This waits for arrays that are still being copied from a device, so it is called in a worker thread.
    """
    shards = [
        tuple(host_bytes(np.asarray(data)) for data in copy.shards.result()) for copy in copies.values()
    ]
    arrays = tuple(
        ReplicaArray(array_id, copy.layout.aval, tuple(data.nbytes for data in shards_of_array))
        for (array_id, copy), shards_of_array in zip(copies.items(), shards, strict=True)
    )
    return StateReplica(arrays, tuple(shards))
