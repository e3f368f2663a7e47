"""host_data: the controller's end of the data plane: numpy arrays to actors, and back. No jax.

Small values ride in control frames; larger ones take the data plane, where the controller is a peer like any actor.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from jaxpp_async.controller.requests import ActorLink
from jaxpp_async.controller.stall_detector import PROGRESS_S, SLOW_BYTES_PER_S
from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.layout.array_parts import Scattering, numpy_dtype
from jaxpp_async.program.instructions import ActorId, Aval, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.clocks import TICK_S, SuspendAwareClock
from jaxpp_async.protocol.messages import INLINE_BYTES, ArrayId, Fetch, Fetched, Put
from jaxpp_async.transport.base import HOST_CHANNEL, SEQUENCE_BITS, Transport, make_tag

Sending: TypeAlias = tuple[int, np.ndarray[Any, Any]]
"""Sequence number and bytes of one value for the data plane."""

Transferred: TypeAlias = "asyncio.Future[None]"
"""Done when a transfer is."""


@dataclass(frozen=True, slots=True, eq=False)
class HostValue:
    """A value to be kept on an actor as `array_id`. Must not change before its step's `wait_sent`."""

    array_id: ArrayId
    aval: Aval
    value: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Expected:
    """Transfers that nothing keeps from ending: both ends have begun them, or will as soon as they hear of them."""

    process: ProcessId
    transfers: tuple[Transferred, ...]
    size_bytes: int
    since: float
    epoch: int

    @property
    def done(self) -> bool:
        return all(transfer.done() for transfer in self.transfers)


class HostTransfers:
    """Moves host values between the controller and its actors.

    Args:
        transport: the controller's own end; belongs to this from here on.
        info: where an actor is, for errors.
        on_error: called with what went wrong in a transfer: a hint that its actor may be dead.
        copies: whether large values are copied before they are sent: they may then have to be sent again.
        patience_s: how long transfers may take; more by a second for each 50 MB.
        scattering: how values lie on actors' processes.

    Attributes:
        epoch: of the tags.
    """

    def __init__(
        self,
        transport: Transport,
        epoch: int,
        info: Callable[[ProcessId], ActorInfo],
        on_error: Callable[[TransferError], None],
        *,
        scattering: Scattering,
        copies: bool = False,
        patience_s: float = PROGRESS_S,
    ):
        self._patience_s, self._scattering = patience_s, scattering
        self._expected: list[_Expected] = []
        self._clock = SuspendAwareClock(time.monotonic())
        self._timer: asyncio.TimerHandle | None = None
        self.transport, self.epoch = transport, epoch
        self._info, self._on_error, self._copies = info, on_error, copies
        self._sequences: dict[ProcessId, int] = defaultdict(int)

    def renew(self, transport: Transport, epoch: int) -> None:
        """Go on with another transport, the old one being closed by the caller."""
        self.transport, self.epoch = transport, epoch

    def prepare(
        self, actor: ActorId, values: Iterable[HostValue]
    ) -> tuple[tuple[Put, ...], dict[ProcessId, list[Sending]]]:
        """The `Put`s for some values, for all processes of an actor, and what `send` must send to each of them once
        they are on their way.

        Raises:
            ProtocolError: a value has another size than its aval says.
        """
        if self._scattering.splits:
            return self._scatter(actor, values)
        puts, sendings = [], []
        for value in values:
            sequence = self._next_sequence(actor) if value.value.nbytes > INLINE_BYTES else 0
            put, data = prepare_put(value, sequence)
            puts.append(put)
            if data is not None:
                sendings.append((sequence, data.copy() if self._copies else data))
        return tuple(puts), {actor: sendings} if sendings else {}

    def _scatter(
        self, actor: ActorId, values: Iterable[HostValue]
    ) -> tuple[tuple[Put, ...], dict[ProcessId, list[Sending]]]:
        """Each part goes to the process that owns it, under a number of its own."""
        how, puts = self._scattering, list[Put]()
        sendings: dict[ProcessId, list[Sending]] = {}
        for value in values:
            put, data = prepare_put(value, 0)
            if data is not None:
                pieces = how.pieces(value.array_id, value.aval, value.value)
                sequence = self._next_sequence(how.process(actor, 0), len(pieces))
                put = replace(put, sequence=sequence)
                for rank, number, piece in pieces:
                    sendings.setdefault(how.process(actor, rank), []).append((sequence + number, piece))
            puts.append(put)
        return tuple(puts), sendings

    def send(self, process: ProcessId, sendings: Iterable[Sending]) -> list[asyncio.Future[None]]:
        """Start sending; the arrays must not change until the futures are done."""
        sendings = tuple(sendings)
        sends = [
            self._watched(process, self.transport.send(data, process, self._tag(sequence)))
            for sequence, data in sendings
        ]
        self.expect(process, sends, sum(data.nbytes for _, data in sendings))
        return sends

    def fetch(
        self, request: int, process: ProcessId, wanted: Sequence[tuple[ArrayId, Aval]]
    ) -> tuple[Fetch, Fetching]:
        """The request for some arrays, and who waits for them; its `start` goes behind the request.

        Args:
            request: number of the request. wanted: array and its aval.
        """
        sequences = tuple(self._next_sequence(process) for _ in wanted)
        message = Fetch(request, tuple(array_id for array_id, _ in wanted), sequences)
        return message, Fetching(self, process, [aval for _, aval in wanted], sequences)

    def receive(
        self, process: ProcessId, size_bytes: int, sequence: int
    ) -> tuple[np.ndarray[Any, Any], Transferred]:
        """Memory for a value of an actor, and its receive."""
        buffer = np.empty(size_bytes, np.uint8)
        return buffer, self._watched(process, self.transport.recv(buffer, process, self._tag(sequence)))

    def expect(self, process: ProcessId, transfers: Iterable[Transferred], size_bytes: int) -> None:
        """From now on nothing keeps these from ending: if they do not, the link is broken, whatever the medium says."""
        pending = tuple(transfer for transfer in transfers if not transfer.done())
        if pending:
            now = self._clock.read(time.monotonic())
            self._expected.append(_Expected(process, pending, size_bytes, now, self.epoch))
            if self._timer is None:
                self._tick()

    def close(self) -> None:
        """Wait for nothing any more."""
        self._expected.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now = self._clock.tick(time.monotonic())
        self._expected = [e for e in self._expected if not e.done and e.epoch == self.epoch]
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self._expected else None
        for late in self._expected:
            # They share the link, so each may take as long as all of them.
            total = sum(e.size_bytes for e in self._expected if e.process == late.process)
            if now - late.since > self._patience_s + total / SLOW_BYTES_PER_S:
                self._give_up(late, now - late.since)
                return

    def _give_up(self, late: _Expected, waited_s: float) -> None:
        self._expected = [e for e in self._expected if e.process != late.process]
        info = self._info(late.process)
        text = (
            f"{late.size_bytes:,} bytes between the controller and {info} are on their way since {waited_s:.0f} s: the "
            "link between them is broken, or slower than 50 MB/s (progress_timeout_s)"
        )
        self._on_error(TransferError(text, actor=info.id, host=info.host, pid=info.pid))

    def _next_sequence(self, process: ProcessId, count: int = 1) -> int:
        """The first of so many numbers that are free with this process."""
        process = self._scattering.first_of(process)  # an actor's processes use them among themselves, too
        first = self._sequences[process] + 1
        if first + count >= 1 << SEQUENCE_BITS:
            first = 0
        self._sequences[process] = first + count - 1
        return first

    def _tag(self, sequence: int) -> int:
        return make_tag(self.epoch, HOST_CHANNEL, sequence)

    def _watched(self, process: ProcessId, transfer: Transferred) -> Transferred:
        epoch = self.epoch

        def on_done(done: Transferred) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None and self.epoch == epoch:
                info = self._info(process)
                text = f"a transfer between the controller and {info} failed: {error}"
                self._on_error(TransferError(text, actor=info.id, host=info.host, pid=info.pid))

        transfer.add_done_callback(on_done)
        return transfer


class Fetching:
    """Waits for the arrays that were asked of one actor.

    Attributes:
        future: the arrays. A cancelled one leaves the transfers going on: their memory is the transport's until then.
            A transfer that fails leaves it open: why it failed is known to the mesh, now or a moment later.
    """

    takes_failures = True

    def __init__(
        self, plane: HostTransfers, process: ProcessId, avals: Sequence[Aval], sequences: Sequence[int]
    ):
        self.future: asyncio.Future[list[np.ndarray[Any, Any]]] = asyncio.get_running_loop().create_future()
        # nobody has to await it
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._plane, self._process, self._avals, self._sequences = plane, process, avals, sequences
        self._arriving: dict[int, tuple[np.ndarray[Any, Any], Transferred]] = {}
        self._reply: Fetched | None = None

    def start(self) -> None:
        """Post the receives; behind the request, each time that it is made."""
        for position, aval in enumerate(self._avals):
            if aval.size_bytes > INLINE_BYTES:
                arriving = self._plane.receive(self._process, aval.size_bytes, self._sequences[position])
                self._arriving[position] = arriving
                arriving[1].add_done_callback(lambda _: self._look())

    @property
    def is_awaited(self) -> bool:
        return not self.future.done()

    @property
    def done(self) -> bool:
        return self.future.done()

    def when_done(self, callback: Callable[[], object]) -> None:
        self.future.add_done_callback(lambda _: callback())

    def again(self) -> None:
        self._arriving, self._reply = {}, None

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        if not isinstance(reply, Fetched) or len(reply.arrays) != len(self._avals):
            self.fail(
                ProtocolError(f"{link.info} answered a fetch of {len(self._avals)} arrays with another reply")
            )
            return
        self._reply = reply
        receives = [receive for _, receive in self._arriving.values()]
        self._plane.expect(
            self._process, receives, sum(memory.nbytes for memory, _ in self._arriving.values())
        )
        self._look()

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
        for _, receive in self._arriving.values():
            receive.cancel()  # nothing will be sent

    def _look(self) -> None:
        receives = [receive for _, receive in self._arriving.values()]
        if self._reply is None or self.future.done() or not all(map(_has_come, receives)):
            return
        try:
            arrays = [
                _read(self._process, entry, self._arriving.get(k))
                for k, entry in enumerate(self._reply.arrays)
            ]
        except ProtocolError as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(arrays)


def _has_come(receive: Transferred) -> bool:
    return receive.done() and not receive.cancelled() and receive.exception() is None


def _read(
    process: ProcessId,
    entry: tuple[tuple[int, ...], str, bytes | None],
    arrived: tuple[np.ndarray[Any, Any], Transferred] | None,
) -> np.ndarray[Any, Any]:
    shape, dtype, data = entry
    if arrived is not None and data is None:
        return from_bytes(arrived[0], shape, dtype)
    if arrived is None and data is not None:
        return from_bytes(data, shape, dtype)
    raise ProtocolError(f"process {process} sent {dtype}{list(shape)} by another way than its size calls for")


def prepare_put(host: HostValue, sequence: int) -> tuple[Put, np.ndarray[Any, Any] | None]:
    """The `Put` for a value, and the bytes to send over the data plane with `sequence`, or None.

    Raises:
        ProtocolError: the value has another size than its aval says.
    """
    array = np.ascontiguousarray(host.value)
    if array.nbytes != host.aval.size_bytes:
        raise ProtocolError(
            f"array {host.array_id} has {array.nbytes} bytes; {host.aval} has {host.aval.size_bytes}"
        )
    if array.nbytes <= INLINE_BYTES:
        return Put(host.array_id, host.aval, array.tobytes()), None
    return Put(host.array_id, host.aval, None, sequence), array.reshape(-1).view(np.uint8)


def from_bytes(
    data: bytes | np.ndarray[Any, Any], shape: tuple[int, ...], dtype: str
) -> np.ndarray[Any, Any]:
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
