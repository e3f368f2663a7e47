"""Bring host values from the controller into an actor's store, and arrays of the store to the controller.

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
    """The puts and fetches of one actor.

    Args:
        store: the store that puts fill and fetches read.
        layouts: layouts on this process's devices.
        transport: carries large values.
        workers: threads for copies between host and devices.
        spawn: starts asyncio tasks that the actor owns.
        process_rank: this process's place in its actor.

    Attributes:
        transport: a restart of other actors replaces it.
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
        """Enter values into the store.

        Returns:
            The entries. Values in the message itself are there at once; a failure is the failure of its
            entry.
        """
        return [self._store_put(put, epoch) for put in puts]

    def _store_put(self, put: Put, epoch: int) -> StoredArray:
        entry = self._store.expect(put.array_id, put.aval)
        try:
            layout = self._layouts.of(put.aval)
            if put.data is not None:
                entry.resolve(place(_shaped(np.frombuffer(put.data, np.uint8), layout), layout))
                return entry
            if layout.is_here:
                memory = aligned_bytes(layout.size_bytes)
                arrival = self.transport.recv(memory, CONTROLLER, make_tag(epoch, HOST_CHANNEL, put.sequence))
                placing = partial(self._place_whole, layout, memory, arrival)
            else:
                placing = partial(self._place_pieces, layout, self._receive_pieces(put, layout, epoch))
        except Exception as error:
            # a value that cannot be placed fails the requests that use it, not the message that brought it
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
        """Post receives of the pieces of a value that this process holds.

        A piece that this process owns comes from the controller, any other piece from the process that owns
        it.
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
        """Wait for a piece, and send it to the other processes that hold it."""
        await piece.arrival
        await asyncio.gather(*(self.transport.send(piece.memory, peer, piece.tag) for peer in piece.others))

    def hold_arrays(self, message: Fetch) -> list[HostCopy]:
        """Take hold of the arrays to fetch, so that no later step can reuse their memory.

        Raises:
            ArrayError: an array is not here.
        """
        entries = [self._store.get(array_id) for array_id in message.array_ids]
        return [hold_array(entry, self._layouts) for entry in entries]

    async def fetch(self, message: Fetch, copies: list[HostCopy], epoch: int) -> Fetched:
        """Join arrays on the host, and start to send the large ones.

        Args:
            message: the request.
            copies: its arrays, from `hold_arrays`.

        Returns:
            The reply. Transfers go on behind it, since the controller may post its receives only then; should
            a transfer fail, so does the controller's receive.
        """
        found = await asyncio.gather(*(copy.shards for copy in copies))
        replies: list[tuple[tuple[int, ...], str, bytes | None]] = []
        arrays = zip(message.array_ids, copies, found, message.sequences, strict=True)
        for array_id, copy, shards, sequence in arrays:
            layout = copy.layout
            if layout.is_here:
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
        return Fetched(message.request, tuple(replies))

    def _join_owned(self, array_id: ArrayId, shards: Sequence[np.ndarray], layout: Layout) -> np.ndarray:
        """Return the bytes of the parts that this process owns, one after the other. May wait for a
        device."""
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
    """A piece of a value that this process receives.

    Args:
        memory: a flat uint8 array for the piece.
        arrival: done when the piece is there.
        others: the processes that this process sends the piece to.
        tag: the wire tag of all these messages.
    """

    memory: np.ndarray
    arrival: asyncio.Future[None]
    others: Sequence[ProcessId]
    tag: int


class HostCopy:
    """An array's distinct shards on the host, from the moment on at which the array is there.

    Args:
        layout: how the array lies on the devices.
        shards: a future; `hold` sets its result.
        read: returns an array's distinct shards such that a later step may be given the array.
    """

    __slots__ = ("_read", "layout", "shards")

    def __init__(
        self,
        layout: Layout,
        shards: asyncio.Future[list[Any]],
        read: Callable[[jax.Array, Layout], Sequence[Any]] = fetch_shards,
    ):
        self.layout, self.shards, self._read = layout, shards, read

    def hold(self, entry: StoredArray) -> None:
        """Read the array of an entry that is done. Raises nothing, since the code that finished the entry
        calls it."""
        if self.shards.done():  # the fetch was cancelled
            return
        if entry.array is None:
            self.shards.set_exception(entry.error or RuntimeError("the array was never made"))
            return
        try:
            self.shards.set_result(list(self._read(entry.array, self.layout)))
        except Exception as error:  # the fetch fails, and not the step that made the array
            self.shards.set_exception(in_words(error))


def hold_array(entry: StoredArray, layouts: Layouts) -> HostCopy:
    """Take hold of an array as soon as it is there, so that a later step may be given the array itself."""
    read = fetch_shards if layouts.devices.is_cpu else start_host_copies
    copy = HostCopy(layouts.of(entry.aval), asyncio.get_running_loop().create_future(), read)
    entry.when_done(copy.hold)
    return copy


async def _resolve(entry: StoredArray, placing: Callable[[], Awaitable[jax.Array]]) -> None:
    """Give an entry the array that `placing` makes, or its failure."""
    try:
        entry.resolve(await placing())
    except asyncio.CancelledError:
        entry.fail(RuntimeError("the actor closed before the value came"))
        raise
    except Exception as error:
        # as in `_store_put`: the requests that use the value fail
        entry.fail(error)
        traceback.clear_frames(error.__traceback__)  # they hold the memory that the value was to come into
    finally:
        del placing  # as its frames do


async def _until_sent(sending: asyncio.Future[None], data: np.ndarray) -> None:
    """Keep the memory alive until the transport is done with it."""
    with contextlib.suppress(JaxppAsyncError):  # the controller's receive fails too, and reports it
        await sending
    del data


def _shaped(flat: np.ndarray, layout: Layout) -> np.ndarray:
    return flat.view(layout.dtype).reshape(layout.aval.shape)
