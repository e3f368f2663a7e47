"""host_data: the controller's end of the data plane: numpy arrays to actors, and back. No jax.

Small values ride in control frames; larger ones take the data plane, where the controller is a peer like any actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from jaxpp_async.actors.messages import INLINE_BYTES, ArrayId, Fetch, Fetched, Put
from jaxpp_async.actors.rpc import ActorLink, Call
from jaxpp_async.errors import ActorError, ProtocolError, TransferError
from jaxpp_async.program import Aval
from jaxpp_async.transport.base import HOST_CHANNEL, Transport, make_tag

Sending: TypeAlias = tuple[int, np.ndarray[Any, Any]]
"""Sequence number and bytes of one value for the data plane."""

FinishFetch: TypeAlias = Callable[[], Coroutine[Any, Any, list[np.ndarray[Any, Any]]]]
"""Waits for the arrays of a fetch that has been asked for."""

Arriving: TypeAlias = dict[int, tuple[np.ndarray[Any, Any], asyncio.Future[None]]]
"""By position in a fetch: memory and receive of a value that comes over the data plane."""


@dataclass(frozen=True, slots=True, eq=False)
class HostValue:
    """A value to be kept on an actor as `array_id`. Must not change before its step's `wait_sent`."""

    array_id: ArrayId
    aval: Aval
    value: np.ndarray[Any, Any]


class HostPlane:
    """Moves host values between the controller and its actors.

    Args:
        transport: the controller's own end; belongs to this from here on.
        on_error: called with what went wrong in a transfer: a hint that its actor may be dead.

    Attributes:
        epoch: of the tags.
    """

    def __init__(self, transport: Transport, epoch: int, on_error: Callable[[TransferError], None]):
        self.transport, self.epoch, self._on_error = transport, epoch, on_error

    def prepare(self, link: ActorLink, values: Iterable[HostValue]) -> tuple[tuple[Put, ...], list[Sending]]:
        """The `Put`s for some values, and what `send` must send once they are on their way.

        Raises:
            ProtocolError: a value has another size than its aval says.
        """
        puts, sendings = [], []
        for value in values:
            sequence = link.next_sequence() if value.value.nbytes > INLINE_BYTES else 0
            put, data = prepare_put(value, sequence)
            puts.append(put)
            if data is not None:
                sendings.append((sequence, data))
        return tuple(puts), sendings

    def send(self, link: ActorLink, sendings: Iterable[Sending]) -> list[asyncio.Future[None]]:
        """Start sending; the arrays must not change until the futures are done."""
        return [
            self._watched(link, self.transport.send(data, link.info.id, self._tag(sequence)))
            for sequence, data in sendings
        ]

    def fetch(
        self, link: ActorLink, request: int, wanted: Sequence[tuple[ArrayId, Aval]], broken: asyncio.Future[None]
    ) -> FinishFetch:
        """Bring arrays from one actor. The request leaves with the call, ahead of any later step that is given them.

        Args:
            request: number of the request. wanted: array and its aval. broken: done when the mesh has failed.

        Raises:
            RemoteError: the actor does not have an array. ActorError: a transfer or the mesh failed.
        """
        sequences = tuple(link.next_sequence() for _ in wanted)
        arriving: Arriving = {}
        for position, (_, aval) in enumerate(wanted):
            if aval.size_bytes > INLINE_BYTES:
                buffer = np.empty(aval.size_bytes, np.uint8)
                receive = self.transport.recv(buffer, link.info.id, self._tag(sequences[position]))
                arriving[position] = (buffer, self._watched(link, receive))
        call = Call(Fetched)
        link.request(Fetch(request, tuple(array_id for array_id, _ in wanted), sequences), call)
        return partial(self._fetched, link, len(wanted), call, arriving, broken)

    async def _fetched(
        self, link: ActorLink, count: int, call: Call, arriving: Arriving, broken: asyncio.Future[None]
    ) -> list[np.ndarray[Any, Any]]:
        try:
            await link.connection.drain()
            fetched: Fetched = await call.future
        except ActorError:
            for _, receive in arriving.values():
                receive.cancel()  # nothing will be sent
            raise
        # When cancelled here, the receives go on: the transport keeps their buffers until they are done.
        receives = [receive for _, receive in arriving.values()]
        while pending := [receive for receive in receives if not receive.done()]:
            await asyncio.wait([*pending, broken], return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                raise TransferError(f"the mesh failed while {link.info} was sending arrays", actor=link.info.id)
        for receive in receives:
            receive.result()
        if len(fetched.arrays) != count:
            raise ProtocolError(f"{link.info} sent {len(fetched.arrays)} arrays, asked for {count}")
        return [_read(link, entry, arriving.get(k)) for k, entry in enumerate(fetched.arrays)]

    def _tag(self, sequence: int) -> int:
        return make_tag(self.epoch, HOST_CHANNEL, sequence)

    def _watched(self, link: ActorLink, transfer: asyncio.Future[None]) -> asyncio.Future[None]:
        def on_done(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None:
                text = f"a transfer between the controller and {link.info} failed: {error}"
                self._on_error(TransferError(text, actor=link.info.id, host=link.info.host, pid=link.info.pid))

        transfer.add_done_callback(on_done)
        return transfer


def _read(
    link: ActorLink,
    entry: tuple[tuple[int, ...], str, bytes | None],
    arrived: tuple[np.ndarray[Any, Any], asyncio.Future[None]] | None,
) -> np.ndarray[Any, Any]:
    shape, dtype, data = entry
    if arrived is not None and data is None:
        return from_bytes(arrived[0], shape, dtype)
    if arrived is None and data is not None:
        return from_bytes(data, shape, dtype)
    raise ProtocolError(f"{link.info} sent {dtype}{list(shape)} by another way than its size calls for")


def prepare_put(host: HostValue, sequence: int) -> tuple[Put, np.ndarray[Any, Any] | None]:
    """The `Put` for a value, and the bytes to send over the data plane with `sequence`, or None.

    Raises:
        ProtocolError: the value has another size than its aval says.
    """
    array = np.ascontiguousarray(host.value)
    if array.nbytes != host.aval.size_bytes:
        raise ProtocolError(f"array {host.array_id} has {array.nbytes} bytes; {host.aval} has {host.aval.size_bytes}")
    if array.nbytes <= INLINE_BYTES:
        return Put(host.array_id, host.aval, array.tobytes()), None
    return Put(host.array_id, host.aval, None, sequence), array.reshape(-1).view(np.uint8)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """A dtype by the name that `Aval` carries."""
    return np.dtype(getattr(ml_dtypes, name, name))


def from_bytes(data: bytes | np.ndarray[Any, Any], shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """A fetched array.

    Raises:
        ProtocolError: the bytes do not fill the shape.
    """
    kind = numpy_dtype(dtype)
    expected = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if len(data) != expected:
        raise ProtocolError(f"fetched {len(data)} bytes, expected {expected} for {dtype}{list(shape)}")
    if isinstance(data, bytes):
        return np.frombuffer(bytearray(data), dtype=kind).reshape(shape)  # bytearray: users may write to it
    return data.view(kind).reshape(shape)
