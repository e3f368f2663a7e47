"""host_values: host values in and out of an actor's store.

Small ones ride in messages, larger ones on the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpp_async.actors.array_store import ArrayStore, StoredArray
from jaxpp_async.actors.shards import (
    Layout,
    Layouts,
    aligned_bytes,
    fetch_pieces,
    hold_pieces,
    host_bytes,
    join_pieces,
    join_privately,
    place,
)
from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.program.instructions import CONTROLLER, ProcessId
from jaxpp_async.protocol.actor_info import ProcessRank
from jaxpp_async.protocol.messages import INLINE_BYTES, ArrayId, Fetch, Fetched, Put
from jaxpp_async.transport.base import HOST_CHANNEL, Transport, make_tag

Spawn = Callable[[str, Coroutine[Any, Any, None]], object]
"""Starts an owned asyncio task under a name."""


class HostValues:
    """Puts and fetches of one actor.

    Args:
        store: where arrays go and come from.
        workers: threads for copies between host and devices.
        spawn: starts and owns asyncio tasks.
        seat: this process's place in its actor.

    Attributes:
        transport: replaced after a restart.
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

    def take(self, puts: Iterable[Put], epoch: int) -> list[StoredArray]:
        """Enter the values into the store. Those in the message are there at once; failures land in the entries."""
        return [self._take(put, epoch) for put in puts]

    def _take(self, put: Put, epoch: int) -> StoredArray:
        entry = self._store.expect(put.array_id, put.aval)
        try:
            layout = self._layouts.of(put.aval)
            if put.data is not None:
                entry.resolve(place(_shaped(np.frombuffer(put.data, np.uint8), layout), layout))
                return entry
            if not layout.is_here:
                self._spawn(
                    f"put {put.array_id}",
                    self._place_parts(entry, layout, self._receive_parts(put, layout, epoch)),
                )
                return entry
            memory = aligned_bytes(int(np.prod(put.aval.shape)) * layout.dtype.itemsize)
            arrival = self.transport.recv(memory, CONTROLLER, make_tag(epoch, HOST_CHANNEL, put.sequence))
        except Exception as error:
            # a value that cannot be placed fails whoever uses it, not the message it came in
            entry.fail(error)
            return entry
        self._spawn(f"put {put.array_id}", self._place_received(entry, layout, memory, arrival))
        return entry

    async def _place_received(
        self, entry: StoredArray, layout: Layout, memory: np.ndarray, arrival: Awaitable[None]
    ) -> None:
        try:
            await arrival
            loop = asyncio.get_running_loop()
            entry.resolve(await loop.run_in_executor(self._workers, place, _shaped(memory, layout), layout))
        except asyncio.CancelledError:
            entry.fail(RuntimeError("the actor closed before the value came"))
            raise
        except Exception as error:  # as in `_take`
            entry.fail(error)

    def _receive_parts(self, put: Put, layout: Layout, epoch: int) -> list[_Arriving]:
        """Post receives of what this process holds of a value: from the controller or the process that owns it."""
        found: list[_Arriving] = []
        for shard in layout.shards:
            memory = aligned_bytes(math.prod(shard.shape) * layout.dtype.itemsize)
            owner, tag = (
                shard.part.owner(put.array_id),
                make_tag(epoch, HOST_CHANNEL, put.sequence + shard.part.number),
            )
            is_ours = owner == self._process_rank.rank
            source = CONTROLLER if is_ours else self._process_rank.process_of_rank(owner)
            others = (
                [self._process_rank.process_of_rank(rank) for rank in shard.part.ranks if rank != owner]
                if is_ours
                else []
            )
            found.append(_Arriving(memory, self.transport.recv(memory, source, tag), others, tag))
        return found

    async def _place_parts(self, entry: StoredArray, layout: Layout, arriving: Sequence[_Arriving]) -> None:
        try:
            await asyncio.gather(*(self._pass_on(part) for part in arriving))
            pieces = [
                part.memory.view(layout.dtype).reshape(shard.shape)
                for part, shard in zip(arriving, layout.shards, strict=True)
            ]
            loop = asyncio.get_running_loop()
            entry.resolve(await loop.run_in_executor(self._workers, join_privately, pieces, layout))
        except asyncio.CancelledError:
            entry.fail(RuntimeError("the actor closed before the value came"))
            raise
        except Exception as error:  # as in `_take`
            entry.fail(error)

    async def _pass_on(self, part: _Arriving) -> None:
        await part.arrival
        if part.others:
            await asyncio.gather(
                *(self.transport.send(part.memory, other, part.tag) for other in part.others)
            )

    def look_at(self, message: Fetch) -> list[HostCopy]:
        """Take hold of the arrays to fetch, so that no later step can reuse their memory.

        Raises:
            ArrayError: an array is not here.
        """
        looks: list[HostCopy] = []
        read = hold_pieces(self._layouts.devices)
        for entry in [self._store.get(array_id) for array_id in message.array_ids]:
            look = HostCopy(self._layouts.of(entry.aval), asyncio.get_running_loop().create_future(), read)
            looks.append(look)
            entry.when_done(look.take)
        return looks

    async def fetch(self, message: Fetch, looks: list[HostCopy], epoch: int) -> Fetched:
        """Make the arrays whole and send the large ones on their way.

        Args:
            looks: from `look_at`.

        Returns:
            The reply. Transfers go on behind it, since the controller may post its receives only then; should one fail,
            so does the controller's receive.
        """
        found = await asyncio.gather(*(look.pieces for look in looks))
        replies: list[tuple[tuple[int, ...], str, bytes | None]] = []
        arrays = zip(message.array_ids, looks, found, message.sequences, strict=True)
        for array_id, look, pieces, sequence in arrays:
            layout = look.layout
            if layout.is_here:
                data = host_bytes(await self._join(pieces, layout))
                shape, dtype = layout.aval.shape, layout.aval.dtype
            else:
                # A thread's work, as `_join`'s.
                loop = asyncio.get_running_loop()
                data = await loop.run_in_executor(self._workers, self._owned, array_id, pieces, layout)
                shape, dtype = (data.nbytes,), "uint8"
            small = data.nbytes <= INLINE_BYTES
            replies.append((shape, dtype, data.tobytes() if small else None))
            if not small:
                sending = self.transport.send(data, CONTROLLER, make_tag(epoch, HOST_CHANNEL, sequence))
                self._spawn(f"fetch {sequence}", _until_sent(sending, data))
        return Fetched(message.request, tuple(replies))

    def _owned(self, array_id: ArrayId, pieces: Sequence[np.ndarray], layout: Layout) -> np.ndarray:
        """The bytes of the parts that this process owns, one after the other. May wait for a device."""
        parts = [
            host_bytes(piece)
            for piece, shard in zip(pieces, layout.shards, strict=True)
            if shard.part.owner(array_id) == self._process_rank.rank
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])

    async def _join(self, pieces: list[Any], layout: Layout) -> np.ndarray:
        if len(pieces) == 1 and isinstance(pieces[0], np.ndarray):
            return pieces[0]
        # A thread's work: to put parts together, or to wait for what is on its way from a device.
        return await asyncio.get_running_loop().run_in_executor(self._workers, join_pieces, pieces, layout)


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    """A part of a value on its way here: its memory, its receive, and who gets it from here."""

    memory: np.ndarray
    arrival: asyncio.Future[None]
    others: Sequence[ProcessId]
    tag: int


class HostCopy:
    """An array's distinct shards on the host, once it is there.

    Args:
        read: takes hold of an array's distinct shards.

    Attributes:
        layout: how the array lies.
        pieces: done when the array is.
    """

    __slots__ = ("_read", "layout", "pieces")

    def __init__(
        self,
        layout: Layout,
        pieces: asyncio.Future[list[Any]],
        read: Callable[[jax.Array, Layout], Sequence[Any]] = fetch_pieces,
    ):
        self.layout, self.pieces, self._read = layout, pieces, read

    def take(self, entry: StoredArray) -> None:
        """The entry is done: hold its memory. Called by whoever finished it, so it raises nothing."""
        if self.pieces.done():  # the fetch was cancelled
            return
        if entry.array is None:
            self.pieces.set_exception(entry.error or RuntimeError("the array was never made"))
            return
        try:
            self.pieces.set_result(list(self._read(entry.array, self.layout)))
        except Exception as error:  # it is the fetch that fails, not the step that made the array
            self.pieces.set_exception(error)


async def _until_sent(sending: asyncio.Future[None], data: np.ndarray) -> None:
    """Hold the memory until the transport is done with it."""
    with contextlib.suppress(JaxppAsyncError):  # the controller's receive fails too, and says so
        await sending
    del data


def _shaped(flat: np.ndarray, layout: Layout) -> np.ndarray:
    return flat.view(layout.dtype).reshape(layout.aval.shape)
