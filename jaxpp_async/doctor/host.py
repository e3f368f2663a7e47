"""The program `python -m jaxpp_async.doctor.host`, run on a host by the launcher's own way there (ssh, srun, or here).

Orders on stdin, records on stdout (`talk`). It looks at its host, answers, and ends at the end of its stdin, or when
that is silent for longer than the lease. It needs no JAX and no UCX to say that they are missing.

probe: two ends of the data plane in, latency and bandwidth between them out. The package's own transport, in host
memory; starts no JAX.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

import jaxpp_async
from jaxpp_async.doctor import protocol
from jaxpp_async.doctor.gather import gather
from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.protocol.parent_watch import LEASE_S
from jaxpp_async.transport.base import PROGRAM_CHANNEL, Transport, make_tag
from jaxpp_async.transport.registry import make_process_transport

if TYPE_CHECKING:
    pass

CALL_S = 5.0
"""What connecting back may take."""

_READ_BYTES = 1 << 16


class ProbeServer:
    """What answers, one order after the other."""

    def __init__(self) -> None:
        self._end: ProbeEnd | None = None

    async def answer(self, order: protocol.Order) -> protocol.Record:
        """Carry out one order; what fails is an answer too."""
        try:
            return await self._carry_out(order)
        except (JaxppAsyncError, OSError, ValueError) as error:  # TimeoutError is an OSError
            return protocol.ProbeFailed(str(error) or "it took too long")

    async def aclose(self) -> None:
        """Give the data plane back."""
        end, self._end = self._end, None
        if end is not None:
            await end.aclose()

    async def _carry_out(self, order: protocol.Order) -> protocol.Record:
        if isinstance(order, protocol.Prepare):
            os.environ.update(order.env)
            return protocol.Completed()
        if isinstance(order, protocol.AskFacts):
            return protocol.Facts(await gather(order.platform))
        if isinstance(order, protocol.AskClock):
            return protocol.ClockIs(time.time())
        if isinstance(order, protocol.CallBack):
            return await _call(order)
        if isinstance(order, protocol.OpenEnd):
            return await self._open(order)
        return await self._measure(order)

    async def _open(self, order: protocol.OpenEnd) -> protocol.Record:
        await self.aclose()
        self._end = ProbeEnd(order.peer)
        return protocol.End(base64.b64encode(self._end.address).decode())

    async def _measure(self, order: protocol.Measure) -> protocol.Record:
        if self._end is None:
            return protocol.ProbeFailed("there is no open end of the data plane")
        try:
            found = await self._end.measure(order.peer, base64.b64decode(order.address), leads=order.leads)
        finally:
            await self.aclose()
        return protocol.Measured(*found)


async def _call(order: protocol.CallBack) -> protocol.Record:
    async with asyncio.timeout(CALL_S):
        _, writer = await asyncio.open_connection(order.host, order.port)
        try:
            writer.write(order.token.encode() + b"\n")
            await writer.drain()
        finally:
            writer.close()
    return protocol.Completed()


def say(record: protocol.Record) -> None:
    """Send a record."""
    sys.stdout.buffer.write(protocol.write_record(record))
    sys.stdout.buffer.flush()


async def serve() -> None:
    """Answer orders until nobody asks any more."""
    orders: asyncio.Queue[protocol.Order] = asyncio.Queue()
    work = asyncio.get_running_loop().create_task(_work(orders), name="answer the doctor")
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    say(protocol.Up(jaxpp_async.__version__))
    try:
        await _read(reader, orders)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, orders: asyncio.Queue[protocol.Order]) -> None:
    rest = b""
    while True:
        try:
            async with asyncio.timeout(LEASE_S):
                data = await reader.read(_READ_BYTES)
        except TimeoutError:
            return
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            order = protocol.read_order(line)
            if order is not None:
                orders.put_nowait(order)


async def _work(orders: asyncio.Queue[protocol.Order]) -> None:
    host = ProbeServer()
    try:
        while True:
            say(await host.answer(await orders.get()))
    finally:
        await host.aclose()


def main() -> None:
    """Serve, on the event loop that actors use."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


# ---------------------------------------------------------------- probe

PINGS, WARM_PINGS = 300, 30
LARGE_BYTES, WINDOW = 8 << 20, 4
"""Messages of this size, so many at a time, each from and to a buffer of its own."""

SECONDS = 0.5
"""How long large messages are sent, about."""

MOST_ROUNDS = 256
MEASURE_S = 20.0
"""What both measurements may take: some of it a link of 100 Mbit/s needs."""

_PING, _READY, _LARGE, _COUNT = (make_tag(0, PROGRAM_CHANNEL, sequence) for sequence in range(4))
_LARGE_TAGS = tuple(make_tag(0, PROGRAM_CHANNEL, 16 + lane) for lane in range(WINDOW))


class ProbeEnd:
    """One end. Opened anew for each measurement.

    Args:
        peer_id: this end's number, which the other knows.
    """

    def __init__(self, peer_id: int):
        self._transport: Transport = make_process_transport("ucx", peer_id)

    @property
    def address(self) -> bytes:
        """For the other end's `measure`."""
        return self._transport.address

    async def measure(self, peer: int, address: bytes, *, leads: bool) -> tuple[float, float]:
        """Connect and measure; both ends call it.

        Returns:
            Seconds of half a round trip of 8 bytes, and bytes a second of large messages; zeros if it does not lead.

        Raises:
            TransferError, ProtocolError: the ends cannot reach each other. TimeoutError: they are too slow, or deaf.
        """
        async with asyncio.timeout(MEASURE_S):
            await self._transport.connect(peer, address)
            latency_s = await self._ping(peer, leads)
            bytes_per_s = await (self._flood(peer) if leads else self._drain(peer))
        return (latency_s, bytes_per_s) if leads else (0.0, 0.0)

    async def aclose(self) -> None:
        """Give everything back."""
        await self._transport.aclose()

    async def _ping(self, peer: int, leads: bool) -> float:
        out, back = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
        seconds: list[float] = []
        for _ in range(WARM_PINGS + PINGS):
            began_s = time.perf_counter()
            if leads:
                await self._transport.send(out, peer, _PING)
                await self._transport.recv(back, peer, _PING)
            else:
                await self._transport.recv(back, peer, _PING)
                await self._transport.send(out, peer, _PING)
            seconds.append(time.perf_counter() - began_s)
        return sorted(seconds[WARM_PINGS:])[PINGS // 2] / 2

    async def _flood(self, peer: int) -> float:
        """Send rounds of large messages until it has taken long enough; a round of one warms up first."""
        buffers = [np.ones(LARGE_BYTES, np.uint8) for _ in range(WINDOW)]
        sign = np.zeros(8, np.uint8)
        num_rounds, began_s, passed_s = 0, 0.0, 0.0
        while num_rounds < MOST_ROUNDS and passed_s < SECONDS:
            await self._transport.send(np.ones(1, np.uint8), peer, _COUNT)  # another round comes
            sends = zip(buffers, _LARGE_TAGS, strict=True)
            await asyncio.gather(*(self._transport.send(buffer, peer, tag) for buffer, tag in sends))
            await self._transport.recv(sign, peer, _READY)  # it is all there
            if num_rounds == 0:
                began_s = time.perf_counter()
            num_rounds, passed_s = num_rounds + 1, time.perf_counter() - began_s
        await self._transport.send(np.zeros(1, np.uint8), peer, _COUNT)
        await self._transport.recv(sign, peer, _READY)
        return (num_rounds - 1) * WINDOW * LARGE_BYTES / passed_s

    async def _drain(self, peer: int) -> float:
        buffers = [np.zeros(LARGE_BYTES, np.uint8) for _ in range(WINDOW)]
        more, sign = np.zeros(1, np.uint8), np.zeros(8, np.uint8)
        while True:
            await self._transport.recv(more, peer, _COUNT)
            if more[0]:
                receives = zip(buffers, _LARGE_TAGS, strict=True)
                await asyncio.gather(*(self._transport.recv(buffer, peer, tag) for buffer, tag in receives))
            await self._transport.send(sign, peer, _READY)
            if not more[0]:
                return 0.0


if __name__ == "__main__":
    main()
