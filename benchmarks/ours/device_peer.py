"""device_peer: one of two processes that send each other device memory; measures, and prints JSON. `gpu.py`
starts side 0, which starts side 1.

    python benchmarks/ours/device_peer.py cuda          # or cpu: the same, with host memory

Latency: half a round trip of 8 bytes. Bandwidth: messages one way, four under way, each from and to memory of
    JAX's own
allocator. Then what becomes of transfers that are aborted under way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import uvloop

from jaxpp_async.actors.cuda import CudaDevices, DeviceCopy
from jaxpp_async.transport.base import PROGRAM_CHANNEL, Memory, make_tag, memory_of
from jaxpp_async.transport.registry import make_process_transport
from jaxpp_async.transport.ucx.transport import ERROR_HANDLING

WINDOW = 4
BURST_BYTES, MOST_IN_BURST = 1 << 30, 200
TIMEOUT_S = 20


class Side:
    """One process's memory and transport.

    Args:
        platform: whose memory travels.
        number: 0 or 1.
        largest: bytes of the largest message.
    """

    def __init__(self, platform: str, number: int, largest: int):
        self.number, self.platform = number, platform
        jax.config.update("jax_platforms", "cuda,cpu" if platform == "cuda" else "cpu")
        self.device = jax.local_devices(backend=platform)[0]
        self.cuda = CudaDevices([self.device]) if platform == "cuda" else None
        if self.cuda is not None:
            self.cuda.enter()
        self.memories = [self._memory(largest) for _ in range(WINDOW)]
        self.transport: Any = self.make_transport()

    def make_transport(self) -> Any:
        """What moves it."""
        return make_process_transport("ucx", self.number)

    def _memory(self, size_bytes: int) -> Memory:
        if self.platform == "cpu":
            return memory_of(np.ones(size_bytes, np.uint8), writable=True)
        array: Any = jax.device_put(np.ones(size_bytes, np.uint8), self.device)
        array.block_until_ready()
        return Memory(array.unsafe_buffer_pointer(), size_bytes, array, on_device=True)

    async def move(self, sending: bool, size: int, slot: int, tag: int) -> None:
        """One message, there or here."""
        done = asyncio.get_running_loop().create_future()

        def ended(error: Exception | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        memory = self.memories[slot]._replace(size_bytes=size)
        post = self.transport.post_send if sending else self.transport.post_recv
        if not post(memory, 1 - self.number, make_tag(0, PROGRAM_CHANNEL, tag), ended):
            await done

    async def ping(self, times: int) -> float:
        """Microseconds of half a round trip of 8 bytes; the median."""
        laps = []
        for i in range(times + times // 10 + 3):
            start = time.perf_counter()
            for sending in (True, False) if self.number == 0 else (False, True):
                await self.move(sending, 8, 0, i)
            laps.append((time.perf_counter() - start) / 2 * 1e6)
        return statistics.median(laps[-times:])

    async def burst(self, size: int, count: int) -> float:
        """GB/s of messages from side 0 to side 1, until the last one is acknowledged."""
        start = time.perf_counter()
        under_way: deque[asyncio.Task[None]] = deque()
        for i in range(count):
            if len(under_way) == WINDOW:
                await under_way.popleft()
            under_way.append(asyncio.ensure_future(self.move(self.number == 0, size, i % WINDOW, i)))
        await asyncio.gather(*under_way)
        await self.move(self.number == 1, 8, 0, count)
        return size * count / (time.perf_counter() - start) / 1e9

    def copy_rate(self, size: int, count: int) -> float:
        """GB/s of copies within the device's memory (one read and one write count once)."""
        a, b = self.memories[:2]
        start = time.perf_counter()
        if self.cuda is None:
            for _ in range(count):
                ctypes.memmove(a.address, b.address, size)
        else:
            copies = [DeviceCopy(a.address, self.device, b.address, self.device, size)] * count
            self.cuda.make_stream().copy(copies).wait()
        return size * count / (time.perf_counter() - start) / 1e9


async def measure(side: Side, sizes: list[int], pings: int, small: bool) -> dict[str, Any]:
    most = BURST_BYTES >> 6 if small else BURST_BYTES
    counts = {size: max(WINDOW, min(MOST_IN_BURST, most // size)) for size in sizes}
    found: dict[str, Any] = {
        "routes": side.transport.routes(1 - side.number),
        "half_rtt_us": await side.ping(pings),
    }
    gb_s, copies = {}, {}
    for size, count in counts.items():
        rates = [await side.burst(size, count) for _ in range(3 if small else 5)]
        gb_s[size] = statistics.median(rates[1:])
    if side.number == 0:
        for size, count in counts.items():
            copies[size] = max(side.copy_rate(size, count) for _ in range(3))
    return found | {"gb_s": gb_s, "copy_gb_s": copies, "abort": await abort(side, max(sizes))}


async def abort(side: Side, size: int) -> dict[str, Any]:
    """Four of the largest are under way, matched on the other side, when both abort."""
    if os.environ.get(ERROR_HANDLING) == "n":
        return {"not_tried": "without error handling nothing ends a large message that has begun"}
    moving = [asyncio.ensure_future(side.move(side.number == 0, size, i, 10_000 + i)) for i in range(WINDOW)]
    await asyncio.sleep(0)
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await side.transport.abort(1 - side.number)
        found["ms"] = (time.perf_counter() - start) * 1e3
    except Exception as error:  # what it is like is the figure
        found["failed"] = f"{type(error).__name__}: {error}"
    ends = await asyncio.gather(*moving, return_exceptions=True)
    found["ended"] = [type(e).__name__ if e is not None else "done" for e in ends]
    return found


async def run(options: argparse.Namespace) -> None:
    sizes = [int(s) for s in options.sizes.split(",")]
    side = Side(options.platform, options.side, max(sizes))
    child = None
    if options.side == 0:
        command = [sys.executable, __file__, *sys.argv[1:], "--side", "1"]
        child = subprocess.Popen(  # noqa: ASYNC220  # once, before anything is measured
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(side.transport.address.hex() + "\n")
        child.stdin.flush()
        theirs = await asyncio.to_thread(child.stdout.readline)
    else:
        print(side.transport.address.hex(), flush=True)
        theirs = await asyncio.to_thread(sys.stdin.readline)
    await side.transport.connect(1 - options.side, bytes.fromhex(theirs.strip()))
    found = await measure(side, sizes, options.pings, options.small)
    if child is not None:
        hardware = side.cuda.hardware() if side.cuda is not None else None
        found["device"] = side.device.device_kind if hardware is None else hardware.kind
        found["cuda"] = hardware.cuda if hardware is not None else ""
        print(json.dumps(found), flush=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(TIMEOUT_S)
        child.kill()
        child.wait()
    os._exit(0)  # without error handling UCX may hold memory for ever


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", choices=("cuda", "cpu"))
    parser.add_argument("--side", type=int, default=0)
    parser.add_argument("--sizes", default="65536,1048576,16777216,268435456")
    parser.add_argument("--pings", type=int, default=2000)
    parser.add_argument("--small", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    uvloop.run(run(read_options()))


if __name__ == "__main__":
    main()
