"""rollback: an actor's part in going back: `TakeReplica` takes a copy of its arrays, `Rollback` makes arrays of one again.

In: requests, in order with the steps. Out: a `ReplicaStore`'s copies, the store's entries. Transfers are the shelf's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpp_async.actors.array_store import ArrayStore, StoredArray, fill
from jaxpp_async.actors.host_values import HostCopy
from jaxpp_async.actors.shards import Layout, Layouts, hold_pieces, host_bytes, join_privately
from jaxpp_async.layout.state_replicas import ReplicaStore, StateReplica
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.messages import ArrayId, Done, ReplicaArray, ReplicaTaken, Rollback, TakeReplica


class Rollbacks:
    """Copies of one actor's arrays, and the way back to them.

    Args:
        process_id: whose.
        store: where arrays come from and go.
        shelf: where copies are.
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

    def keep(self, message: TakeReplica, leaving: Container[ArrayId]) -> Coroutine[Any, Any, ReplicaTaken]:
        """Take hold of every array, now; what is returned waits until they are there, and copies them.

        Args:
            leaving: arrays that are only here until a step before this is done.
        """
        loop, read = asyncio.get_running_loop(), hold_pieces(self._layouts.devices)
        entries = {i: entry for i, entry in self._store.entries().items() if i not in leaving}
        looks: dict[ArrayId, HostCopy] = {}
        for array_id, entry in entries.items():
            look = looks[array_id] = HostCopy(self._layouts.of(entry.aval), loop.create_future(), read)
            entry.when_done(look.take)
        return self._kept(message, entries, looks)

    async def _kept(
        self, message: TakeReplica, entries: Mapping[ArrayId, StoredArray], looks: Mapping[ArrayId, HostCopy]
    ) -> ReplicaTaken:
        if looks:
            await asyncio.wait([look.pieces for look in looks.values()])
        # One that failed is no array: whoever names it learns why, before a restart and after it.
        found = {array_id: look for array_id, look in looks.items() if entries[array_id].error is None}
        for look in looks.values():
            look.pieces.exception()  # seen
        for look in found.values():
            look.pieces.result()  # one that is there and could not be held makes the whole copy worthless
        loop = asyncio.get_running_loop()
        copy = await loop.run_in_executor(self._workers, _copied, found)
        self._replica_store.put(message.generation, self._process_id, copy)
        return ReplicaTaken(message.request, copy.arrays)

    def roll_back(self, message: Rollback) -> Coroutine[Any, Any, Done]:
        """Forget every array and make places for the copy's, now; what is returned fills them.

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
        return self._filled(message, copy, entries)

    async def _filled(self, message: Rollback, copy: StateReplica, entries: Sequence[StoredArray]) -> Done:
        async def making() -> list[jax.Array]:
            layouts = [self._layouts.of(kept.aval) for kept in copy.arrays]
            return await asyncio.get_running_loop().run_in_executor(self._workers, _placed, copy, layouts)

        await fill(entries, making())
        return Done(message.request)


def _copied(looks: Mapping[ArrayId, HostCopy]) -> StateReplica:
    """Runs in a thread: what is still on its way from a device is waited for here."""
    shards = [
        tuple(host_bytes(np.asarray(piece)) for piece in look.pieces.result()) for look in looks.values()
    ]
    arrays = tuple(
        ReplicaArray(array_id, look.layout.aval, tuple(part.nbytes for part in parts))
        for (array_id, look), parts in zip(looks.items(), shards, strict=True)
    )
    return StateReplica(arrays, tuple(shards))


def _placed(copy: StateReplica, layouts: Sequence[Layout]) -> list[jax.Array]:
    """Runs in a thread."""
    arrays = []
    for shards, layout in zip(copy.shards, layouts, strict=True):
        parts = [
            data.view(layout.dtype).reshape(shard.shape)
            for data, shard in zip(shards, layout.shards, strict=True)
        ]
        arrays.append(join_privately(parts, layout))
    return arrays
