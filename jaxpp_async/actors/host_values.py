"""host_values: host values in and out of an actor's store.

Small ones ride in messages, larger ones on the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpp_async.actors.messages import INLINE_BYTES, Fetch, Fetched, Put
from jaxpp_async.actors.shards import (
    Layout,
    Layouts,
    aligned_bytes,
    fetch_pieces,
    hold_pieces,
    host_bytes,
    join_pieces,
    place,
)
from jaxpp_async.actors.store import Entry, Store
from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.program import CONTROLLER
from jaxpp_async.transport.base import HOST_CHANNEL, Transport, make_tag

Spawn = Callable[[str, Coroutine[Any, Any, None]], object]
"""Starts an owned asyncio task under a name."""


class HostValues:
    """Puts and fetches of one actor.

    Args:
        store: where arrays go and come from.
        workers: threads for copies between host and devices.
        spawn: starts and owns asyncio tasks.

    Attributes:
        transport: replaced after a restart.
    """

    def __init__(self, store: Store, layouts: Layouts, transport: Transport, workers: ThreadPoolExecutor, spawn: Spawn):
        self._store, self._layouts, self.transport = store, layouts, transport
        self._workers, self._spawn = workers, spawn

    def take(self, puts: Iterable[Put], epoch: int) -> list[Entry]:
        """Enter the values into the store. Those in the message are there at once; failures land in the entries."""
        return [self._take(put, epoch) for put in puts]

    def _take(self, put: Put, epoch: int) -> Entry:
        entry = self._store.expect(put.array_id, put.aval)
        try:
            layout = self._layouts.of(put.aval)
            if put.data is not None:
                entry.resolve(place(_shaped(np.frombuffer(put.data, np.uint8), layout), layout))
                return entry
            memory = aligned_bytes(int(np.prod(put.aval.shape)) * layout.dtype.itemsize)
            arrival = self.transport.recv(memory, CONTROLLER, make_tag(epoch, HOST_CHANNEL, put.sequence))
        except Exception as error:  # a value that cannot be placed fails whoever uses it, not the message it came in
            entry.fail(error)
            return entry
        self._spawn(f"put {put.array_id}", self._place_received(entry, layout, memory, arrival))
        return entry

    async def _place_received(self, entry: Entry, layout: Layout, memory: np.ndarray, arrival: Awaitable[None]) -> None:
        try:
            await arrival
            loop = asyncio.get_running_loop()
            entry.resolve(await loop.run_in_executor(self._workers, place, _shaped(memory, layout), layout))
        except asyncio.CancelledError:
            entry.fail(RuntimeError("the actor closed before the value came"))
            raise
        except Exception as error:  # as in `_take`
            entry.fail(error)

    def look_at(self, message: Fetch) -> list[Look]:
        """Take hold of the arrays to fetch, so that no later step can reuse their memory.

        Raises:
            ArrayError: an array is not here.
        """
        looks: list[Look] = []
        read = hold_pieces(self._layouts.devices)
        for entry in [self._store.get(array_id) for array_id in message.array_ids]:
            look = Look(self._layouts.of(entry.aval), asyncio.get_running_loop().create_future(), read)
            looks.append(look)
            entry.when_done(look.take)
        return looks

    async def fetch(self, message: Fetch, looks: list[Look], epoch: int) -> Fetched:
        """Make the arrays whole and send the large ones on their way.

        Args:
            looks: from `look_at`.

        Returns:
            The reply. Transfers go on behind it, since the controller may post its receives only then; should one fail,
            so does the controller's receive.
        """
        found = await asyncio.gather(*(look.pieces for look in looks))
        replies: list[tuple[tuple[int, ...], str, bytes | None]] = []
        for look, pieces, sequence in zip(looks, found, message.sequences, strict=True):
            data = host_bytes(await self._join(pieces, look.layout))
            small = data.nbytes <= INLINE_BYTES
            replies.append((look.layout.aval.shape, look.layout.aval.dtype, data.tobytes() if small else None))
            if not small:
                sending = self.transport.send(data, CONTROLLER, make_tag(epoch, HOST_CHANNEL, sequence))
                self._spawn(f"fetch {sequence}", _until_sent(sending, data))
        return Fetched(message.request, tuple(replies))

    async def _join(self, pieces: list[Any], layout: Layout) -> np.ndarray:
        if len(pieces) == 1 and isinstance(pieces[0], np.ndarray):
            return pieces[0]
        # A thread's work: to put parts together, or to wait for what is on its way from a device.
        return await asyncio.get_running_loop().run_in_executor(self._workers, join_pieces, pieces, layout)


class Look:
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

    def take(self, entry: Entry) -> None:
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
