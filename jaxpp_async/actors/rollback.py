"""Take copies of an actor's arrays for restarts (`TakeReplica`), and make arrays of a copy again
(`Rollback`).

Both requests take effect in order with the steps. `ReplicaStore` keeps the copies, and moves them between
actors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpp_async.actors.array_store import ArrayStore, StoredArray, fill
from jaxpp_async.actors.host_values import HostCopy, hold_array
from jaxpp_async.actors.shards import Layouts, host_bytes, join_privately
from jaxpp_async.layout.state_replicas import ReplicaStore, StateReplica
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.messages import ArrayId, Done, ReplicaArray, ReplicaTaken, Rollback, TakeReplica


class Rollbacks:
    """Takes copies of one process's arrays, and replaces the arrays by those of a copy.

    Args:
        process_id: the process.
        store: the process's arrays.
        layouts: layouts on the process's devices.
        replica_store: keeps the copies.
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
        """Take hold of every array, now; the returned coroutine waits until the arrays are there, and copies
        them.

        Args:
            message: the request.
            leaving: arrays that a step before this request frees at its end; the copy leaves them out.
        """
        entries = {i: entry for i, entry in self._store.entries().items() if i not in leaving}
        copies = {array_id: hold_array(entry, self._layouts) for array_id, entry in entries.items()}
        return self._replica_taken(message, entries, copies)

    async def _replica_taken(
        self, message: TakeReplica, entries: Mapping[ArrayId, StoredArray], copies: Mapping[ArrayId, HostCopy]
    ) -> ReplicaTaken:
        if copies:
            await asyncio.wait([copy.shards for copy in copies.values()])
        # An entry that failed is no array: a request that names it gets the failure, before a restart and
        # after it.
        found = {array_id: copy for array_id, copy in copies.items() if entries[array_id].error is None}
        for copy in copies.values():
            copy.shards.exception()  # marks it as retrieved
        for copy in found.values():
            copy.shards.result()  # raises if an array could not be read: without it the replica is useless
        loop = asyncio.get_running_loop()
        replica = await loop.run_in_executor(self._workers, _make_replica, found)
        self._replica_store.put(message.generation, self._process_id, replica)
        return ReplicaTaken(message.request, replica.arrays)

    def roll_back(self, message: Rollback) -> Coroutine[Any, Any, Done]:
        """Replace all entries of the store by those of the copy, now; the returned coroutine fills the
        entries.

        Raises:
            ProtocolError: the copy is not here.
        """
        self._store.forget_all()
        copy = (
            StateReplica((), ())
            if message.generation is None
            else self._replica_store.get(message.generation, self._process_id)
        )
        entries = [self._store.expect(kept.array_id, kept.aval) for kept in copy.arrays]
        return self._rolled_back(message, copy, entries)

    async def _rolled_back(
        self, message: Rollback, copy: StateReplica, entries: Sequence[StoredArray]
    ) -> Done:
        def place_arrays() -> list[jax.Array]:
            layouts = [self._layouts.of(kept.aval) for kept in copy.arrays]
            return [
                join_privately(layout.views(shards), layout)
                for shards, layout in zip(copy.shards, layouts, strict=True)
            ]

        await fill(entries, place_arrays, self._workers)
        return Done(message.request)


def _make_replica(copies: Mapping[ArrayId, HostCopy]) -> StateReplica:
    """Copy arrays to bytes. Runs in a thread, since it waits for copies that are on their way from a
    device."""
    shards = [
        tuple(host_bytes(np.asarray(data)) for data in copy.shards.result()) for copy in copies.values()
    ]
    arrays = tuple(
        ReplicaArray(array_id, copy.layout.aval, tuple(data.nbytes for data in shards_of_array))
        for (array_id, copy), shards_of_array in zip(copies.items(), shards, strict=True)
    )
    return StateReplica(arrays, tuple(shards))
