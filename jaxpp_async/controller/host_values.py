"""Move numpy arrays between the controller and its actors.

Small arrays are sent inside control messages. Larger arrays are sent over the data plane (the transport for
arrays), to which the controller is connected like an actor. `HostTransfers` is the controller's end of the
data plane. `PendingFetch` is a request for arrays of an actor, together with the transfers of the large
arrays.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs

from jaxpp_async.controller.error_messages import location
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.recovery import Recovery
from jaxpp_async.controller.requests import ActorLink, PendingRequest
from jaxpp_async.controller.stall_detector import SLOW_BYTES_PER_S
from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.layout.array_parts import Scattering, numpy_dtype
from jaxpp_async.program.instructions import ActorId, Aval, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.clocks import TICK_S, SuspendAwareClock
from jaxpp_async.protocol.messages import INLINE_BYTES, ArrayId, Fetch, Fetched, Put
from jaxpp_async.transport.base import HOST_CHANNEL, SEQUENCE_BITS, Transport, make_tag

Sending: TypeAlias = tuple[int, np.ndarray[Any, Any]]
"""The sequence number and the bytes of one host value that is sent over the data plane."""

Transfer: TypeAlias = "asyncio.Future[None]"
"""The future of a transfer, which ends when all data has been sent, or has been received."""


@dataclass(frozen=True, slots=True, eq=False)
class HostValue:
    """A numpy array of the controller that an actor is to store under the id `array_id`.

    If the array is sent with a step, it must not change until `SubmittedStep.wait_sent` of that step has
    returned.
    """

    array_id: ArrayId
    aval: Aval
    value: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _ExpectedTransfers:
    """A group of transfers between the controller and one process. If they do not end in time, the link
    between the two counts as broken.

    Both ends have begun these transfers or will do so immediately, so only a broken or slow link can delay
    them.

    Args:
        process: the process at the other end.
        transfers: the futures of the transfers.
        size_bytes: the number of bytes of all of them.
        since: the time at which the controller began to wait for the transfers, in seconds of its
            `SuspendAwareClock`.
        epoch: the epoch in the tags of the transfers.
    """

    process: ProcessId
    transfers: tuple[Transfer, ...]
    size_bytes: int
    since: float
    epoch: int

    @property
    def done(self) -> bool:
        """Whether all of these transfers have ended."""
        return all(transfer.done() for transfer in self.transfers)


class HostTransfers:
    """The controller's end of the data plane (the transport for arrays), which sends and receives numpy
    arrays.

    With `max_restarts`, large values are copied before they are sent, since they may have to be sent again.
    The time limit of a transfer is `progress_s` seconds, and a second more for each 50 MB.

    Args:
        transport: the controller's own transport, which this object owns.
        recovery: tells the present epoch, which tags contain.
        info: returns the host and pid of a process, for errors.
        on_error: called with an error if a transfer fails or exceeds its time limit; the actor may be dead.
        scattering: how values are split over the processes of one actor.
        options: the deadline of transfers, and whether lost actors are replaced (`max_restarts`).
    """

    def __init__(
        self,
        transport: Transport,
        recovery: Recovery,
        info: Callable[[ProcessId], ActorInfo],
        on_error: Callable[[TransferError], None],
        scattering: Scattering,
        options: ControllerOptions,
    ):
        self._patience_s, self._copies, self._scattering = options.progress_s, options.restarts, scattering
        self._expected: list[_ExpectedTransfers] = []
        self._clock = SuspendAwareClock(time.monotonic())
        self._timer: asyncio.TimerHandle | None = None
        self.transport, self._recovery = transport, recovery
        self._info, self._on_error = info, on_error
        self._sequences: dict[ProcessId, int] = defaultdict(int)

    def prepare(
        self, actor: ActorId, values: Iterable[HostValue]
    ) -> tuple[tuple[Put, ...], dict[ProcessId, list[Sending]]]:
        """Prepare host values (numpy arrays) for sending them to all processes of an actor.

        Args:
            actor: the actor.
            values: the values that the actor is to store.

        Returns:
            A pair. First, the `Put` of each value, to be sent in a control message. Second, a dictionary. Its
            keys are the processes that get large values; its values are the sequence number and bytes of each
            large value, to be given to `send` once the control message has been sent.

        Raises:
            ProtocolError: the size of a value is not that of its aval.
        """
        if self._scattering.splits:
            return self._scatter(actor, values)
        puts, sendings = [], []
        for value in values:
            sequence = self._next_sequence(actor) if value.value.nbytes > INLINE_BYTES else 0
            put, data = _prepare_put(value, sequence)
            puts.append(put)
            if data is not None:
                sendings.append((sequence, data.copy() if self._copies else data))
        return tuple(puts), {actor: sendings} if sendings else {}

    def _scatter(
        self, actor: ActorId, values: Iterable[HostValue]
    ) -> tuple[tuple[Put, ...], dict[ProcessId, list[Sending]]]:
        """Prepare host values (numpy arrays) for an actor of several processes, and split each large value
        into parts.

        Each part is a separate message to one process, with a separate sequence number. The arguments and the
        result are those of `prepare`.
        """
        how, puts = self._scattering, list[Put]()
        sendings: dict[ProcessId, list[Sending]] = {}
        for value in values:
            put, data = _prepare_put(value, 0)
            if data is not None:
                pieces = how.pieces(value.array_id, value.aval, value.value)
                sequence = self._next_sequence(how.process(actor, 0), len(pieces))
                put = structs.replace(put, sequence=sequence)
                for rank, number, piece in pieces:
                    sendings.setdefault(how.process(actor, rank), []).append((sequence + number, piece))
            puts.append(put)
        return tuple(puts), sendings

    def send(self, process: ProcessId, sendings: Sequence[Sending]) -> list[Transfer]:
        """Start to send large values to a process over the data plane, and return one future per value.

        The arrays must not change until the futures are done.

        Args:
            process: the process to send to.
            sendings: the sequence number and bytes of each value, as `prepare` returned them for this
                process.
        """
        sends = [
            self._watched(process, self.transport.send(data, process, self._tag(sequence)))
            for sequence, data in sendings
        ]
        self.expect(process, sends, sum(data.nbytes for _, data in sendings))
        return sends

    def fetch(
        self, process: ProcessId, wanted: Sequence[tuple[ArrayId, Aval]], *, awaited: bool = True
    ) -> tuple[Fetch, PendingFetch]:
        """Make a request for arrays of a process, and a handler that waits for the reply and for the arrays.

        Args:
            process: the process that has the arrays.
            wanted: the id and aval of each array.
            awaited: whether a caller gets the error if the mesh fails; see `PendingRequest`.

        Returns:
            The request, to be sent by the caller, and its handler. The handler's `start` must be called each
            time that the request has been sent.
        """
        sequences = tuple(self._next_sequence(process) for _ in wanted)
        message = Fetch(tuple(array_id for array_id, _ in wanted), sequences)
        return message, PendingFetch(self, process, [aval for _, aval in wanted], sequences, awaited=awaited)

    def receive(
        self, process: ProcessId, size_bytes: int, sequence: int
    ) -> tuple[np.ndarray[Any, Any], Transfer]:
        """Start to receive a large value, which a process sends under the given sequence number.

        Returns:
            The memory that is being filled, as bytes, and a future that is done once it has been filled.
        """
        buffer = np.empty(size_bytes, np.uint8)
        return buffer, self._watched(process, self.transport.recv(buffer, process, self._tag(sequence)))

    def expect(self, process: ProcessId, transfers: Iterable[Transfer], size_bytes: int) -> None:
        """Start to watch transfers with a process. If they do not end in time, report the link to the process
        as broken.

        Args:
            process: the process at the other end.
            transfers: the futures of the transfers.
            size_bytes: the number of bytes of all of them; each 50 MB add a second to the time allowed.
        """
        pending = tuple(transfer for transfer in transfers if not transfer.done())
        if pending:
            now = self._clock.read(time.monotonic())
            self._expected.append(_ExpectedTransfers(process, pending, size_bytes, now, self._recovery.epoch))
            if self._timer is None:
                self._tick()

    def close(self) -> None:
        """Stop watching whether transfers end in time."""
        self._expected.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now = self._clock.tick(time.monotonic())
        self._expected = [e for e in self._expected if not e.done and e.epoch == self._recovery.epoch]
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self._expected else None
        for late in self._expected:
            # The transfers with one process share the link, so each may take as long as all together.
            total = sum(e.size_bytes for e in self._expected if e.process == late.process)
            if now - late.since > self._patience_s + total / SLOW_BYTES_PER_S:
                self._report_late(late, now - late.since)
                return

    def _report_late(self, late: _ExpectedTransfers, waited_s: float) -> None:
        self._expected = [e for e in self._expected if e.process != late.process]
        info = self._info(late.process)
        text = (
            f"{late.size_bytes:,} bytes between the controller and {info} are on their way since "
            f"{waited_s:.0f} s: the link between them is broken, or slower than 50 MB/s (progress_timeout_s)"
        )
        self._on_error(TransferError(text, **location(info)))

    def _next_sequence(self, process: ProcessId, count: int = 1) -> int:
        """Reserve `count` consecutive sequence numbers for transfers with a process, and return the first
        one.
        """
        # All processes of an actor share one sequence, since they also pass parts on to each other under it.
        process = self._scattering.first_of(process)
        first = self._sequences[process] + 1
        if first + count >= 1 << SEQUENCE_BITS:
            first = 0
        self._sequences[process] = first + count - 1
        return first

    def _tag(self, sequence: int) -> int:
        return make_tag(self._recovery.epoch, HOST_CHANNEL, sequence)

    def _watched(self, process: ProcessId, transfer: Transfer) -> Transfer:
        epoch = self._recovery.epoch

        def on_done(done: Transfer) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None and self._recovery.epoch == epoch:
                info = self._info(process)
                text = f"a transfer between the controller and {info} failed: {error}"
                self._on_error(TransferError(text, **location(info)))

        transfer.add_done_callback(on_done)
        return transfer


class PendingFetch(PendingRequest):
    """A request for arrays of one process, which ends when the reply and all large arrays have arrived.

    If a transfer fails, the request stays open until the mesh has found the reason, and then ends with the
    error about that reason. If the future is cancelled, the transfers continue, because the transport uses
    their memory until they end.

    Args:
        transfers: the controller's end of the data plane.
        process: the process that has the arrays.
        avals: the aval of each array.
        sequences: one sequence number per array. A large array is sent under its number; for a small array,
            the number is not used.
        awaited: whether a caller gets the error if the mesh fails.
    """

    def __init__(
        self,
        transfers: HostTransfers,
        process: ProcessId,
        avals: Sequence[Aval],
        sequences: Sequence[int],
        *,
        awaited: bool = True,
    ):
        super().__init__(awaited=awaited)
        self._transfers, self._process, self._avals, self._sequences = transfers, process, avals, sequences
        self._arriving: dict[int, tuple[np.ndarray[Any, Any], Transfer]] = {}
        self._reply: Fetched | None = None

    def start(self) -> None:
        """Begin to receive the large arrays. The caller must call this each time that it has sent the
        request.
        """
        for position, aval in enumerate(self._avals):
            if aval.size_bytes > INLINE_BYTES:
                arriving = self._transfers.receive(self._process, aval.size_bytes, self._sequences[position])
                self._arriving[position] = arriving
                arriving[1].add_done_callback(lambda _: self._finish_if_complete())

    def reset(self) -> None:
        """Forget the reply and the receives, since a restart is about to send the request again."""
        self._arriving, self._reply = {}, None

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        """Record the reply, which contains the small arrays. Large arrays arrive in separate transfers."""
        if len(reply.arrays) != len(self._avals):
            text = f"{link.info} answered a fetch of {len(self._avals)} arrays with {len(reply.arrays)}"
            self.fail(ProtocolError(text))
            return
        self._reply = reply
        size_bytes = sum(memory.nbytes for memory, _ in self._arriving.values())
        self._transfers.expect(self._process, self._receives, size_bytes)
        self._finish_if_complete()

    def fail(self, error: Exception) -> None:
        """End the request with an error, and cancel the receives of its arrays."""
        super().fail(error)
        for receive in self._receives:
            receive.cancel()  # the process will not send the data

    @property
    def _receives(self) -> list[Transfer]:
        return [receive for _, receive in self._arriving.values()]

    def _finish_if_complete(self) -> None:
        if self._reply is None or self.future.done() or not all(map(_has_come, self._receives)):
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


def _has_come(receive: Transfer) -> bool:
    return receive.done() and not receive.cancelled() and receive.exception() is None


def _read(
    process: ProcessId,
    entry: tuple[tuple[int, ...], str, bytes | None],
    arrived: tuple[np.ndarray[Any, Any], Transfer] | None,
) -> np.ndarray[Any, Any]:
    shape, dtype, data = entry
    found = data if arrived is None else arrived[0]
    if found is None or (arrived is not None and data is not None):
        what = f"process {process} sent {dtype}{list(shape)}"
        raise ProtocolError(f"{what} by another way than its size calls for")
    return _from_bytes(found, shape, dtype)


def _prepare_put(host: HostValue, sequence: int) -> tuple[Put, np.ndarray[Any, Any] | None]:
    """Make the `Put` that tells an actor to store a host value (a numpy array of the controller).

    Args:
        host: the value.
        sequence: the sequence number under which the value is sent over the data plane, if it is large.

    Returns:
        A pair: the `Put`, and the bytes to send over the data plane. If the value is small, the `Put`
        contains the bytes, and the second item is None.

    Raises:
        ProtocolError: the size of the value is not that of its aval.
    """
    array = np.ascontiguousarray(host.value)
    if array.nbytes != host.aval.size_bytes:
        raise ProtocolError(
            f"array {host.array_id} has {array.nbytes} bytes; {host.aval} has {host.aval.size_bytes}"
        )
    if array.nbytes <= INLINE_BYTES:
        return Put(host.array_id, host.aval, array.tobytes()), None
    return Put(host.array_id, host.aval, None, sequence), array.reshape(-1).view(np.uint8)


def _from_bytes(
    data: bytes | np.ndarray[Any, Any], shape: tuple[int, ...], dtype: str
) -> np.ndarray[Any, Any]:
    """Return fetched bytes as a writable numpy array of this shape and dtype.

    Raises:
        ProtocolError: the number of bytes is not that of the shape and dtype.
    """
    kind = numpy_dtype(dtype)
    expected = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if len(data) != expected:
        raise ProtocolError(f"fetched {len(data)} bytes, expected {expected} for {dtype}{list(shape)}")
    if isinstance(data, bytes):
        return np.frombuffer(bytearray(data), dtype=kind).reshape(shape)  # writable
    return data.view(kind).reshape(shape)
