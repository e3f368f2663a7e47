"""The program `python -m jaxpp_async.doctor.host`, run on a host by the launcher's own way there (ssh, srun, or here).

Orders on stdin, records on stdout (`talk`). It looks at its host, answers, and ends at the end of its stdin, or when
that is silent for longer than the lease. It needs no JAX and no UCX to say that they are missing.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
import time
from typing import TYPE_CHECKING

import jaxpp_async
from jaxpp_async.actors.processes.exit_codes import LEASE_S
from jaxpp_async.doctor import talk
from jaxpp_async.doctor.gather import gather
from jaxpp_async.errors import JaxppAsyncError

if TYPE_CHECKING:
    from jaxpp_async.doctor.probe import Prober

CALL_S = 5.0
"""What connecting back may take."""

_READ_BYTES = 1 << 16


class Host:
    """What answers, one order after the other."""

    def __init__(self) -> None:
        self._end: Prober | None = None

    async def answer(self, order: talk.Order) -> talk.Record:
        """Carry out one order; what fails is an answer too."""
        try:
            return await self._carry_out(order)
        except (JaxppAsyncError, OSError, ValueError) as error:  # TimeoutError is an OSError
            return talk.Failed(str(error) or "it took too long")

    async def aclose(self) -> None:
        """Give the data plane back."""
        end, self._end = self._end, None
        if end is not None:
            await end.aclose()

    async def _carry_out(self, order: talk.Order) -> talk.Record:
        if isinstance(order, talk.Prepare):
            os.environ.update(order.env)
            return talk.Done()
        if isinstance(order, talk.AskFacts):
            return talk.Facts(await gather(order.platform))
        if isinstance(order, talk.AskClock):
            return talk.ClockIs(time.time())
        if isinstance(order, talk.CallBack):
            return await _call(order)
        if isinstance(order, talk.OpenEnd):
            return await self._open(order)
        return await self._measure(order)

    async def _open(self, order: talk.OpenEnd) -> talk.Record:
        from jaxpp_async.doctor.probe import Prober  # here: a host without UCX answers everything else

        await self.aclose()
        self._end = Prober(order.peer)
        return talk.End(base64.b64encode(self._end.address).decode())

    async def _measure(self, order: talk.Measure) -> talk.Record:
        if self._end is None:
            return talk.Failed("there is no open end of the data plane")
        try:
            found = await self._end.measure(order.peer, base64.b64decode(order.address), leads=order.leads)
        finally:
            await self.aclose()
        return talk.Measured(*found)


async def _call(order: talk.CallBack) -> talk.Record:
    async with asyncio.timeout(CALL_S):
        _, writer = await asyncio.open_connection(order.host, order.port)
        try:
            writer.write(order.token.encode() + b"\n")
            await writer.drain()
        finally:
            writer.close()
    return talk.Done()


def say(record: talk.Record) -> None:
    """Send a record."""
    sys.stdout.buffer.write(talk.write_record(record))
    sys.stdout.buffer.flush()


async def serve() -> None:
    """Answer orders until nobody asks any more."""
    orders: asyncio.Queue[talk.Order] = asyncio.Queue()
    work = asyncio.get_running_loop().create_task(_work(orders), name="answer the doctor")
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say(talk.Up(jaxpp_async.__version__))
    try:
        await _read(reader, orders)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, orders: asyncio.Queue[talk.Order]) -> None:
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
            order = talk.read_order(line)
            if order is not None:
                orders.put_nowait(order)


async def _work(orders: asyncio.Queue[talk.Order]) -> None:
    host = Host()
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


if __name__ == "__main__":
    main()
