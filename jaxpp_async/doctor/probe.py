"""probe: two ends of the data plane in, latency and bandwidth between them out. The package's own transport, in host
memory; starts no JAX.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from jaxpp_async.transport.base import PROGRAM_CHANNEL, Transport, make_tag
from jaxpp_async.transport.joining import make_process_transport

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


class Prober:
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
