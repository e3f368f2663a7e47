"""transport: moving bytes between two processes of one host, beside a copy in memory and beside ucxx's own
asyncio API. Starts the processes, measures, prints; touches no device and no jax.

    python benchmarks/transport.py            # both, as JSON; also in results/transport.json
    python benchmarks/transport.py ours       # one of the two only, as JSON; or: ucxx

Both ends run uvloop. Ours is the package's `UCXTransport`; ucxx's runs with the same settings of UCX.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import uvloop

SIZES = (1 << 16, 1 << 20, 1 << 24)
"""Of the messages whose bandwidth is measured, in bytes."""

WINDOW = 4
"""Messages in flight, each from and to a buffer of its own."""

BURST_BYTES, MOST_IN_BURST, BURSTS = 64 << 20, 400, 9
"""A burst of messages gives one figure of bandwidth; the median of the bursts counts."""

PINGS, WARM_PINGS = 3000, 300
COPY_BYTES, COPIES = 128 << 20, 7
SIDE_TIMEOUT_S = 100


class Link(Protocol):
    """One of two peers, joined to the other; the benchmark's view of a transport."""

    address: bytes

    async def connect(self, address: bytes) -> None: ...
    def send(self, buffer: np.ndarray, tag: int) -> Awaitable[Any]: ...
    def recv(self, buffer: Any, tag: int) -> Awaitable[Any]: ...

    def buffer_to_receive(self, size: int) -> Any:
        """As whoever uses it would allocate one."""
        ...


Move = Callable[[Any, bool, list[Any], int], Awaitable[None]]
"""Moves messages: a link, whether it receives, a buffer for each message in flight, how many in all."""


class OurLink:
    """The package's transport."""

    def __init__(self, side: int):
        from jaxpp_async.transport.ucx.transport import UCXTransport

        self.transport, self.other = UCXTransport(side), 1 - side
        self.address = self.transport.address

    async def connect(self, address: bytes) -> None:
        await self.transport.connect(self.other, address)

    def send(self, buffer: np.ndarray, tag: int) -> Awaitable[Any]:
        return self.transport.send(buffer, self.other, tag)

    def recv(self, buffer: Any, tag: int) -> Awaitable[Any]:
        return self.transport.recv(buffer, self.other, tag)

    def buffer_to_receive(self, size: int) -> Any:
        from jaxpp_async.transport.shared_memory import SharedBlock
        from jaxpp_async.transport.ucx.one_copy import MIN_ONE_COPY_BYTES

        block = (
            SharedBlock.make(size) if size >= MIN_ONE_COPY_BYTES else None
        )  # as actors/receive_buffers.py does
        return np.ones(size, np.uint8) if block is None else block


class UcxxLink:
    """ucxx's asyncio API, in its default progress mode."""

    def __init__(self, side: int):
        from jaxpp_async.transport.ucx import context as ucx_context

        ucx_context.set_environment()
        import ucxx  # noqa: TID251  the contender

        self.ucxx = ucxx
        self.address = bytes(ucxx.get_worker_address())

    async def connect(self, address: bytes) -> None:
        self.endpoint = await self.ucxx.create_endpoint_from_worker_address(
            self.ucxx.get_ucx_address_from_buffer(address)
        )

    def send(self, buffer: np.ndarray, tag: int) -> Awaitable[Any]:
        return self.endpoint.send(buffer, tag=tag, force_tag=True)

    def recv(self, buffer: Any, tag: int) -> Awaitable[Any]:
        return self.endpoint.recv(buffer, tag=tag, force_tag=True)

    def buffer_to_receive(self, size: int) -> Any:
        return np.ones(size, np.uint8)


LINKS: dict[str, Callable[[int], Link]] = {"ours": OurLink, "ucxx": UcxxLink}


# ---------------------------------------------------------------- one side


async def ping(link: Link, serves: bool, times: int) -> list[float]:
    """Round trips of 8 bytes, in seconds."""
    out, back = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        if serves:
            await link.recv(back, 1)
            await link.send(out, 1)
        else:
            await link.send(out, 1)
            await link.recv(back, 1)
        seconds.append(time.perf_counter() - start)
    return seconds


async def awaited(link: Link, serves: bool, buffers: list[Any], count: int) -> None:
    """So many messages through `send` and `recv`, a coroutine for each buffer."""

    async def lane(buffer: Any, tag: int) -> None:
        for _ in range(count // WINDOW):
            await (link.recv if serves else link.send)(buffer, tag)

    await asyncio.gather(*[lane(buffer, 10 + k) for k, buffer in enumerate(buffers)])


async def posted(link: OurLink, serves: bool, buffers: list[Any], count: int) -> None:
    """So many messages through `post_send` and `post_recv`, each posted where the one before it in its buffer
    ended."""
    from jaxpp_async.transport.base import memory_of

    post = link.transport.post_recv if serves else link.transport.post_send
    finished, open_lanes = asyncio.get_running_loop().create_future(), len(buffers)

    def lane(buffer: Any, tag: int) -> Callable[[], None]:
        memory, left = memory_of(buffer, writable=serves), count // WINDOW

        def ended(error: Exception | None) -> None:
            if error is not None:
                finished.set_exception(error)
            else:
                go_on()

        def go_on() -> None:
            nonlocal left, open_lanes
            while left:
                left -= 1
                if not post(memory, link.other, tag, ended):
                    return
            open_lanes -= 1
            if not open_lanes:
                finished.set_result(None)

        return go_on

    for k, buffer in enumerate(buffers):
        lane(buffer, 10 + k)()
    await finished


async def burst(move: Move, link: Any, serves: bool, buffers: list[Any], count: int) -> float:
    """Seconds of so many messages, `WINDOW` in flight, and one back."""
    sign = np.zeros(8, np.uint8)
    await (link.send if serves else link.recv)(sign, 1)  # the receiver is ready
    start = time.perf_counter()
    await move(link, serves, buffers, count)
    await (link.send if serves else link.recv)(sign, 1)
    return time.perf_counter() - start


async def bandwidth(move: Move, link: Link, serves: bool, size: int) -> float:
    """GB/s of messages of one size."""
    buffers = [link.buffer_to_receive(size) if serves else np.ones(size, np.uint8) for _ in range(WINDOW)]
    count = max(min(BURST_BYTES // size, MOST_IN_BURST), WINDOW) // WINDOW * WINDOW
    seconds = [await burst(move, link, serves, buffers, count) for _ in range(BURSTS)]
    return round(count * size / statistics.median(seconds) / 1e9, 2)


def copy_rate() -> float:
    """GB/s of numpy copying 128 MiB, with memory that has been touched before."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    rates = []
    for _ in range(COPIES):
        start = time.perf_counter()
        np.copyto(target, source)
        rates.append(COPY_BYTES / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates)


async def ping_posted(link: OurLink, serves: bool, times: int) -> list[float]:
    """Round trips of 8 bytes through `post_send` and `post_recv`, each posted where the one before ended."""
    from jaxpp_async.transport.base import memory_of

    transport, other = link.transport, link.other
    out, back = (memory_of(np.zeros(8, np.uint8), writable=True) for _ in range(2))
    seconds: list[float] = []
    finished, last = asyncio.get_running_loop().create_future(), time.perf_counter()

    def sent(error: Exception | None) -> None: ...

    def received(error: Exception | None) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
        if error is not None:
            finished.set_exception(error)
        elif len(seconds) == times:
            if serves:
                transport.post_send(out, other, 1, sent)
            finished.set_result(None)
        else:
            post()

    def post() -> None:
        ended = transport.post_recv(back, other, 1, received)
        if seconds or not serves:
            transport.post_send(out, other, 1, sent)
        if ended:
            asyncio.get_running_loop().call_soon(received, None)

    post()
    await finished
    return seconds


def half_us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) / 2 * 1e6, 1)


async def side(kind: str, number: int) -> dict[str, Any]:
    """Everything that one of the two processes does. Side 0 has the figures."""
    link, serves = LINKS[kind](number), number == 1
    print(link.address.hex(), flush=True)
    await link.connect(bytes.fromhex(await asyncio.to_thread(sys.stdin.readline)))
    figures: dict[str, Any] = {}
    if isinstance(link, OurLink):
        await ping(link, serves, WARM_PINGS)
        figures["asleep_half_rtt_us"] = half_us(await ping(link, serves, PINGS))
        link.transport.hurry(True)
        await ping_posted(link, serves, WARM_PINGS)
        figures["posted_half_rtt_us"] = half_us(await ping_posted(link, serves, PINGS))
    await ping(link, serves, WARM_PINGS)
    cpu_s = time.process_time()
    figures["half_rtt_us"] = half_us(await ping(link, serves, PINGS))
    figures["cpu_us"] = round((time.process_time() - cpu_s) / PINGS * 1e6, 1)
    copies: list[float] = []
    moves: dict[str, Move] = (
        {"gb_s": posted, "awaited_gb_s": awaited} if kind == "ours" else {"gb_s": awaited}
    )
    rates: dict[str, dict[str, float]] = {name: {} for name in moves}
    for size in SIZES:
        if not serves:
            copies.append(copy_rate())  # meanwhile the other side waits for the first message
        for name, move in moves.items():
            rates[name][str(size)] = await bandwidth(move, link, serves, size)
    return {**figures, **rates, "memcpy_gb_s": copies and round(statistics.median(copies), 2)}


def be_side(kind: str, number: int) -> None:
    """A process's life: figures on its standard output, then out, for ucxx's own threads may hold it for
    ever."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[number]})  # as actors of one host get one each
    print(json.dumps(uvloop.run(side(kind, number))), flush=True)
    os._exit(0)


# ---------------------------------------------------------------- both


def pair(kind: str) -> dict[str, Any]:
    """The figures of `"ours"` or `"ucxx"`, from two processes of their own."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from jaxpp_async.launch.hosts import DEFAULTS

    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    sides = [
        subprocess.Popen(
            [sys.executable, __file__, kind, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**DEFAULTS, **os.environ, "PYTHONPATH": path},  # as actors get it
        )
        for number in (0, 1)
    ]
    try:
        addresses = [s.stdout.readline() for s in sides if s.stdout]
        for one, address in zip(sides, reversed(addresses), strict=True):
            assert one.stdin is not None
            one.stdin.write(address)
            one.stdin.flush()
        said, _ = sides[0].communicate(timeout=SIDE_TIMEOUT_S)
        return json.loads(said.splitlines()[-1])
    finally:
        for one in sides:
            one.kill()
            one.wait()


def run() -> dict[str, Any]:
    """Measure both, one after the other.

    Returns:
        `memcpy_gb_s`, `half_rtt_us`, `gb_s`, `awaited_gb_s` and `ucxx_asyncio_gb_s` by size in bytes, and
        more of `README.md`'s.
    """
    ours, theirs = pair("ours"), pair("ucxx")
    return {
        "memcpy_gb_s": ours["memcpy_gb_s"],
        **{name: ours[name] for name in ("half_rtt_us", "asleep_half_rtt_us", "posted_half_rtt_us")},
        "ucxx_asyncio_half_rtt_us": theirs["half_rtt_us"],
        "gb_s": ours["gb_s"],
        "awaited_gb_s": ours["awaited_gb_s"],
        "ucxx_asyncio_gb_s": theirs["gb_s"],
    }


def main() -> None:
    match sys.argv[1:]:
        case [kind, number]:
            be_side(kind, int(number))
        case ["ours" | "ucxx" as kind]:
            print(json.dumps(pair(kind), indent=1))
        case [_, *_]:
            sys.exit("transport.py: give 'ours', 'ucxx', or nothing for both")
        case _:
            import harness

            figures = run()
            print(json.dumps(figures, indent=1))
            harness.write("transport", figures)


if __name__ == "__main__":
    main()
