"""The program `python -m jaxpp_async.doctor.host`. The doctor (the command that checks whether a run would
work) runs the program on every host.

The doctor starts the program over ssh or srun, or as a child process on its own machine. The program reads
orders (requests of the doctor) from stdin and writes records (the answers) to stdout; `doctor.protocol`
defines both. The program exits when its stdin ends, or is silent for longer than `LEASE_S` seconds. The
program starts even if JAX and UCX are missing, so that it can report this.

Two such programs measure the latency and bandwidth between their hosts. Each of them has a `ProbeEnd` for
this, which uses the transport of actors, sends from host memory, and does not start JAX.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import numpy as np

import jaxpp_async
from jaxpp_async.doctor import protocol
from jaxpp_async.doctor.gather import gather
from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.protocol.parent_watch import LEASE_S
from jaxpp_async.transport.base import PROGRAM_CHANNEL, Transport, make_tag
from jaxpp_async.transport.registry import make_process_transport

CALL_S = 5.0
"""The longest time in seconds that connecting back to the doctor may take."""

_READ_BYTES = 1 << 16


class ProbeServer:
    """The part of the doctor's program on a host that carries out orders (requests of the doctor), one after
    the other.
    """

    def __init__(self) -> None:
        self._end: ProbeEnd | None = None

    async def answer(self, order: protocol.Order) -> protocol.Record:
        """Carry out one order (a request of the doctor) and return the answer. If the order could not be
        carried out, the answer is `ProbeFailed`.
        """
        try:
            return await self._carry_out(order)
        except (JaxppAsyncError, OSError, ValueError) as error:  # TimeoutError is an OSError
            return protocol.ProbeFailed(str(error) or "it took too long")

    async def aclose(self) -> None:
        """Close the transport that an earlier order opened for a measurement; do nothing if none is open."""
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
            return await _connect_back(order)
        if isinstance(order, protocol.OpenEnd):
            return await self._open(order)
        return await self._measure(order)

    async def _open(self, order: protocol.OpenEnd) -> protocol.Record:
        await self.aclose()
        self._end = ProbeEnd(order.peer)
        return protocol.EndOpened(self._end.address)

    async def _measure(self, order: protocol.Measure) -> protocol.Record:
        if self._end is None:
            return protocol.ProbeFailed("there is no open end of the data plane")
        try:
            found = await self._end.measure(order.peer, order.address, leads=order.leads)
        finally:
            await self.aclose()
        return protocol.Measured(*found)


async def _connect_back(order: protocol.CallBack) -> protocol.Record:
    async with asyncio.timeout(CALL_S):
        _, writer = await asyncio.open_connection(order.host, order.port)
        try:
            writer.write(order.token.encode() + b"\n")
            await writer.drain()
        finally:
            writer.close()
    return protocol.Completed()


def send_record(record: protocol.Record) -> None:
    """Write a record (an answer to the doctor) to stdout, from where the doctor reads it."""
    sys.stdout.buffer.write(protocol.write_record(record))
    sys.stdout.buffer.flush()


async def serve() -> None:
    """Read the doctor's orders from stdin, carry them out, and write the answers to stdout. Return when stdin
    ends or is silent for longer than `LEASE_S` seconds.
    """
    orders: asyncio.Queue[protocol.Order] = asyncio.Queue()
    work = asyncio.get_running_loop().create_task(_answer_orders(orders), name="answer the doctor")
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    send_record(protocol.Started(jaxpp_async.__version__))
    try:
        await _read_orders(reader, orders)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _read_orders(reader: asyncio.StreamReader, orders: asyncio.Queue[protocol.Order]) -> None:
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


async def _answer_orders(orders: asyncio.Queue[protocol.Order]) -> None:
    server = ProbeServer()
    try:
        while True:
            send_record(await server.answer(await orders.get()))
    finally:
        await server.aclose()


def main() -> None:
    """Run the doctor's program on a host, on uvloop, the event loop that actors use."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


# ---------------------------------------------------------------- measuring a link

PINGS, WARM_PINGS = 300, 30
LARGE_BYTES, WINDOW = 8 << 20, 4
"""The size in bytes of a large message, and the number of large messages under way at the same time, each
with its own buffers.
"""

SECONDS = 0.5
"""The approximate time in seconds for which large messages are sent."""

MOST_ROUNDS = 256
MEASURE_S = 20.0
"""The longest time in seconds that both measurements may take together; a link of 100 Mbit/s needs several
seconds.
"""

_PING, _READY, _LARGE, _COUNT = (make_tag(0, PROGRAM_CHANNEL, sequence) for sequence in range(4))
_LARGE_TAGS = tuple(make_tag(0, PROGRAM_CHANNEL, 16 + lane) for lane in range(WINDOW))


class ProbeEnd:
    """One end of a link whose latency and bandwidth are measured. Each object opens a transport of its own,
    and serves for one measurement.

    Args:
        peer_id: the number by which the other end refers to this one.
    """

    def __init__(self, peer_id: int):
        self._transport: Transport = make_process_transport("ucx", peer_id)

    @property
    def address(self) -> bytes:
        """The address of this end's transport. The other end needs it as the argument `address` of
        `measure`.
        """
        return self._transport.address

    async def measure(self, peer: int, address: bytes, *, leads: bool) -> tuple[float, float]:
        """Connect to the other end and measure the link. Both ends must call this at about the same time.

        Args:
            peer: the other end's number.
            address: the other end's address.
            leads: whether this end sends and measures; otherwise this end replies. Exactly one end leads.

        Returns:
            Half the duration of a round trip of 8 bytes, in seconds, and the rate of large messages in bytes
            per second. Both are 0 on the end that does not lead.

        Raises:
            TransferError: the ends cannot connect to each other, or a transfer fails.
            ProtocolError: the other end's address is not valid, or a message has an unexpected size.
            TimeoutError: an end is too slow, or does not answer.
        """
        async with asyncio.timeout(MEASURE_S):
            await self._transport.connect(peer, address)
            latency_s = await self._measure_latency(peer, leads)
            bytes_per_s = await (self._send_large(peer) if leads else self._receive_large(peer))
        return (latency_s, bytes_per_s) if leads else (0.0, 0.0)

    async def aclose(self) -> None:
        """Close this end's transport."""
        await self._transport.aclose()

    async def _measure_latency(self, peer: int, leads: bool) -> float:
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

    async def _send_large(self, peer: int) -> float:
        """Send rounds of large messages for about `SECONDS` seconds, and return the rate in bytes per second.
        The first round only warms up the link, and does not count.
        """
        buffers = [np.ones(LARGE_BYTES, np.uint8) for _ in range(WINDOW)]
        ready = np.zeros(8, np.uint8)
        num_rounds, began_s, passed_s = 0, 0.0, 0.0
        while num_rounds < MOST_ROUNDS and passed_s < SECONDS:
            await self._transport.send(np.ones(1, np.uint8), peer, _COUNT)  # 1: another round follows
            sends = zip(buffers, _LARGE_TAGS, strict=True)
            await asyncio.gather(*(self._transport.send(buffer, peer, tag) for buffer, tag in sends))
            await self._transport.recv(ready, peer, _READY)  # the whole round has arrived
            if num_rounds == 0:
                began_s = time.perf_counter()
            num_rounds, passed_s = num_rounds + 1, time.perf_counter() - began_s
        await self._transport.send(np.zeros(1, np.uint8), peer, _COUNT)
        await self._transport.recv(ready, peer, _READY)
        return (num_rounds - 1) * WINDOW * LARGE_BYTES / passed_s

    async def _receive_large(self, peer: int) -> float:
        buffers = [np.zeros(LARGE_BYTES, np.uint8) for _ in range(WINDOW)]
        more, ready = np.zeros(1, np.uint8), np.zeros(8, np.uint8)
        while True:
            await self._transport.recv(more, peer, _COUNT)
            if more[0]:
                receives = zip(buffers, _LARGE_TAGS, strict=True)
                await asyncio.gather(*(self._transport.recv(buffer, peer, tag) for buffer, tag in receives))
            await self._transport.send(ready, peer, _READY)
            if not more[0]:
                return 0.0


if __name__ == "__main__":
    main()
