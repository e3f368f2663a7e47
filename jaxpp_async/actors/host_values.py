"""Move host values from the controller into an actor's store, and arrays from the store to the controller.

Small values travel in the messages themselves, larger ones over the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpp_async.actors.array_store import ArrayStore, StoredArray
from jaxpp_async.actors.shards import (
    Layout,
    Layouts,
    aligned_bytes,
    fetch_shards,
    host_bytes,
    join_on_host,
    join_privately,
    place,
    start_host_copies,
)
from jaxpp_async.base.printable import in_words
from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.program.instructions import CONTROLLER, ProcessId
from jaxpp_async.protocol.actor_info import ProcessRank
from jaxpp_async.protocol.messages import INLINE_BYTES, ArrayId, Fetch, Fetched, Put
from jaxpp_async.transport.base import HOST_CHANNEL, Transport, make_tag

Spawn = Callable[[str, Coroutine[Any, Any, None]], object]
"""A function that starts an asyncio task, which the actor owns, under a name."""


class HostValues:
    """The component of an actor that stores values from the controller (puts) and sends arrays back to it
    (fetches).

    Args:
        store: the array store. Puts add arrays to it, and fetches read arrays from it.
        layouts: the distributions of arrays over this process's devices.
        transport: carries large values.
        workers: threads for copying between host memory and devices.
        spawn: takes a name and a coroutine; starts an asyncio task that the actor owns.
        process_rank: the number of this process, and its rank in its actor.

    Attributes:
        transport: the transport in use; a new transport replaces it when other actors are restarted.
    """

    def __init__(
        self,
        store: ArrayStore,
        layouts: Layouts,
        transport: Transport,
        workers: ThreadPoolExecutor,
        spawn: Spawn,
        process_rank: ProcessRank,
    ):
        self._store, self._layouts, self.transport = store, layouts, transport
        self._workers, self._spawn, self._process_rank = workers, spawn, process_rank

    def store_puts(self, puts: Iterable[Put], epoch: int) -> list[StoredArray]:
        """Add values from the controller to the array store.

        Args:
            puts: the values. A small one is part of its `Put` message; a large one arrives over the
                transport.
            epoch: the mesh's epoch (it counts aborts), which is part of the tags of large values.

        Returns:
            The store's entries for the values. Values that are part of the message are available immediately.
            If a value cannot be stored, its entry fails, and no exception is raised.
        """
        return [self._store_put(put, epoch) for put in puts]

    def _store_put(self, put: Put, epoch: int) -> StoredArray:
        entry = self._store.expect(put.array_id, put.aval)
        try:
            layout = self._layouts.of(put.aval)
            if put.data is not None:
                entry.resolve(place(_shaped(np.frombuffer(put.data, np.uint8), layout), layout))
                return entry
            if layout.is_on_one_process:
                memory = aligned_bytes(layout.size_bytes)
                arrival = self.transport.recv(memory, CONTROLLER, make_tag(epoch, HOST_CHANNEL, put.sequence))
                placing = partial(self._place_whole, layout, memory, arrival)
            else:
                placing = partial(self._place_pieces, layout, self._receive_pieces(put, layout, epoch))
        except Exception as error:
            # only the requests that use the value fail, not the message that contained it
            entry.fail(error)
            return entry
        self._spawn(f"put {put.array_id}", _resolve(entry, placing))
        return entry

    async def _place_whole(
        self, layout: Layout, memory: np.ndarray, arrival: asyncio.Future[None]
    ) -> jax.Array:
        await arrival
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, place, _shaped(memory, layout), layout)

    def _receive_pieces(self, put: Put, layout: Layout, epoch: int) -> list[_ArrivingPiece]:
        """Post receives for the parts (distinct shards) of a value that this process stores.

        Each part has an owner among the actor's processes that store the part. The controller sends the part
        to the owner, and the owner forwards the part to the other processes that store it.

        Args:
            put: the message that announces the value.
            layout: the distribution of the value over the devices.
            epoch: the mesh's epoch (it counts aborts), which is part of the tags.

        Returns:
            The parts that are being received, in the order of `layout.shards`.
        """
        found: list[_ArrivingPiece] = []
        for shard in layout.shards:
            memory = aligned_bytes(layout.shard_bytes(shard))
            owner = shard.part.owner(put.array_id)
            tag = make_tag(epoch, HOST_CHANNEL, put.sequence + shard.part.number)
            source, others = self._process_rank.process_of_rank(owner), list[ProcessId]()
            if owner == self._process_rank.rank:
                source = CONTROLLER
                others = [
                    self._process_rank.process_of_rank(rank) for rank in shard.part.ranks if rank != owner
                ]
            found.append(_ArrivingPiece(memory, self.transport.recv(memory, source, tag), others, tag))
        return found

    async def _place_pieces(self, layout: Layout, arriving: Sequence[_ArrivingPiece]) -> jax.Array:
        await asyncio.gather(*(self._relay(piece) for piece in arriving))
        shards = layout.views([piece.memory for piece in arriving])
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, join_privately, shards, layout)

    async def _relay(self, piece: _ArrivingPiece) -> None:
        """Wait until a part of a value has arrived, and send it to the other processes of the actor that need
        it."""
        await piece.arrival
        await asyncio.gather(*(self.transport.send(piece.memory, peer, piece.tag) for peer in piece.others))

    def fetch(self, message: Fetch, epoch: int) -> Coroutine[Any, Any, Fetched]:
        """Look up the arrays of a fetch, and have them copied to the host before a later step can reuse their
        memory.

        Args:
            message: the controller's request.
            epoch: the mesh's epoch (it counts aborts), which is part of the tags of large values.

        Returns:
            A coroutine that waits for the copies, starts to send large arrays to the controller, and returns
            the reply, which contains the small arrays. The transfers of large arrays continue after the
            reply, since the controller may post its receives only when it has the reply. If a transfer fails,
            the controller's receive fails too.

        Raises:
            ArrayError: an array is not on this actor.
        """
        entries = [self._store.get(array_id) for array_id in message.array_ids]
        copies = [copy_when_available(entry, self._layouts) for entry in entries]
        return self._fetched(message, copies, epoch)

    async def _fetched(self, message: Fetch, copies: list[HostCopy], epoch: int) -> Fetched:
        found = await asyncio.gather(*(copy.shards for copy in copies))
        replies: list[tuple[tuple[int, ...], str, bytes | None]] = []
        arrays = zip(message.array_ids, copies, found, message.sequences, strict=True)
        for array_id, copy, shards, sequence in arrays:
            layout = copy.layout
            if layout.is_on_one_process:
                data = host_bytes(await self._join(shards, layout))
                shape, dtype = layout.aval.shape, layout.aval.dtype
            else:
                # On a worker thread, for the same reason as in `_join`.
                loop = asyncio.get_running_loop()
                data = await loop.run_in_executor(self._workers, self._join_owned, array_id, shards, layout)
                shape, dtype = (data.nbytes,), "uint8"
            small = data.nbytes <= INLINE_BYTES
            replies.append((shape, dtype, data.tobytes() if small else None))
            if not small:
                sending = self.transport.send(data, CONTROLLER, make_tag(epoch, HOST_CHANNEL, sequence))
                self._spawn(f"fetch {sequence}", _until_sent(sending, data))
        return Fetched(tuple(replies))

    def _join_owned(self, array_id: ArrayId, shards: Sequence[np.ndarray], layout: Layout) -> np.ndarray:
        """Join the parts of an array that this process sends to the controller into one flat uint8 array.

        Each part has an owner among the actor's processes that store the part, and is sent by its owner.

        This may wait for a device, so it is called in a worker thread.

        Args:
            array_id: the id of the array, which determines the owner of each part.
            shards: the distinct shards that this process stores, on the host.
            layout: the distribution of the array over the devices.
        """
        owned = [
            host_bytes(data)
            for data, shard in zip(shards, layout.shards, strict=True)
            if shard.part.owner(array_id) == self._process_rank.rank
        ]
        return owned[0] if len(owned) == 1 else np.concatenate([np.empty(0, np.uint8), *owned])

    async def _join(self, shards: list[Any], layout: Layout) -> np.ndarray:
        if len(shards) == 1 and isinstance(shards[0], np.ndarray):
            return shards[0]
        # On a worker thread: it copies shards, or waits for copies that are on their way from a device.
        return await asyncio.get_running_loop().run_in_executor(self._workers, join_on_host, shards, layout)


@dataclass(frozen=True, slots=True, eq=False)
class _ArrivingPiece:
    """One part of a value that this process is receiving.

    Args:
        memory: the flat uint8 array that receives the bytes.
        arrival: a future that is done once the bytes have arrived.
        others: the processes of the same actor to which this process forwards the part.
        tag: the number by which the transport matches sends with receives, for the received message and for
            the forwarded ones.
    """

    memory: np.ndarray
    arrival: asyncio.Future[None]
    others: Sequence[ProcessId]
    tag: int


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """The distinct shards of one array on the host, which are copied as soon as the array is available.

    Args:
        layout: the distribution of the array over the devices.
        shards: a future of the shards. If the array fails or cannot be copied, the future has the error.
    """

    layout: Layout
    shards: asyncio.Future[list[Any]]


def copy_when_available(entry: StoredArray, layouts: Layouts) -> HostCopy:
    """Copy an array to the host as soon as it is available, so that a later step may consume the array
    itself.

    Args:
        entry: the array's entry in the store.
        layouts: the distributions of arrays over this process's devices.

    Returns:
        The copy. Its future `shards` is done once the array has been copied or has failed.
    """
    # Both allow a later step to consume the array.
    read = fetch_shards if layouts.devices.is_cpu else start_host_copies
    copy = HostCopy(layouts.of(entry.aval), asyncio.get_running_loop().create_future())

    def copy_array(entry: StoredArray) -> None:
        if copy.shards.done():  # the fetch was cancelled
            return
        if entry.array is None:
            copy.shards.set_exception(entry.error or RuntimeError("the array was never made"))
            return
        try:
            copy.shards.set_result(list(read(entry.array, copy.layout)))
        except Exception as error:  # only the copy fails, not the step that made the array
            copy.shards.set_exception(in_words(error))

    entry.when_done(copy_array)
    return copy


async def _resolve(entry: StoredArray, placing: Callable[[], Awaitable[jax.Array]]) -> None:
    """Wait until an array has been made, and make it available in the array store; if the array cannot be
    made, fail its entry.

    Args:
        entry: the store's entry for the array.
        placing: called once to receive the value and put it on the devices.
    """
    try:
        entry.resolve(await placing())
    except asyncio.CancelledError:
        entry.fail(RuntimeError("the actor closed before the value came"))
        raise
    except Exception as error:
        # as in `_store_put`, only the requests that use the value fail
        entry.fail(error)
        traceback.clear_frames(error.__traceback__)  # the frames refer to the receive's memory
    finally:
        del placing  # its frames refer to that memory too


async def _until_sent(sending: asyncio.Future[None], data: np.ndarray) -> None:
    """Keep an array's memory alive until the transport has sent it. An error of the transfer is ignored,
    since the controller reports that error."""
    with contextlib.suppress(JaxppAsyncError):  # the controller's receive fails too, and reports it
        await sending
    del data


def _shaped(flat: np.ndarray, layout: Layout) -> np.ndarray:
    return flat.view(layout.dtype).reshape(layout.aval.shape)
