"""nccl_peer: one of two processes, with a GPU each, that send each other its memory over NCCL; measures, and
prints JSON. `gpu.py` starts side 0, which starts side 1.

    python benchmarks/ours/nccl_peer.py cuda --other 1      # this process's GPU, and the one of the other
    python benchmarks/ours/nccl_peer.py cpu --small         # the same, with the tests' stand-in for NCCL

Bandwidth: messages one way, four under way, as `device_peer` has it over UCX; the transport is that of the
    actors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from device_peer import BURST_BYTES, MOST_IN_BURST, TIMEOUT_S, WINDOW, Side

from jaxpp_async.base.gpu_inventory import VISIBLE
from jaxpp_async.transport.nccl.order import NcclLink, OrderedMessage, order_of
from jaxpp_async.transport.nccl.transport import NcclTransport

TESTS = Path(__file__).parents[2] / "tests" / "support"

THERE, BACK = NcclLink(0, 1), NcclLink(1, 0)


class NcclSide(Side):
    """As `Side`, over NCCL."""

    def make_transport(self) -> NcclTransport:
        if self.platform == "cpu":
            sys.path.append(str(TESTS))
            from nccl_over_sockets import VIOLATIONS, SocketNccl

            os.environ.setdefault(VIOLATIONS, os.devnull)
            return NcclTransport(self.number, SocketNccl("stand-in"))
        from jaxpp_async.transport.nccl.library import load_library

        return NcclTransport(self.number, load_library())

    async def burst(self, size: int, count: int) -> float:
        """GB/s of messages from side 0 to side 1, until the last one is acknowledged."""
        turns = [OrderedMessage(i, THERE) for i in range(count)] + [OrderedMessage(count, BACK)]
        self.transport.begin(order_of(self.number, turns))
        return await super().burst(size, count)


async def connect(side: NcclSide, child: subprocess.Popen[str] | None) -> None:
    """Exchange addresses and NCCL's ids over the pipes between the two, and make a link each way."""
    own = side.transport.address.hex()
    if child is not None:
        assert child.stdin is not None and child.stdout is not None
        ids = [await asyncio.to_thread(side.transport.make_id) for _ in (THERE, BACK)]
        child.stdin.write(" ".join([own, *(unique.hex() for unique in ids)]) + "\n")
        child.stdin.flush()
        theirs = (await asyncio.to_thread(child.stdout.readline)).strip()
    else:
        theirs, *texts = (await asyncio.to_thread(sys.stdin.readline)).split()
        ids = [bytes.fromhex(text) for text in texts]
        print(own, flush=True)
    await side.transport.connect(1 - side.number, bytes.fromhex(theirs))
    await asyncio.gather(
        *(side.transport.join(link, unique) for link, unique in zip((THERE, BACK), ids, strict=True))
    )


async def run(options: argparse.Namespace) -> None:
    sizes = [int(s) for s in options.sizes.split(",")]
    side = NcclSide(options.platform, options.side, max(sizes))
    child = None
    if options.side == 0:
        command = [sys.executable, __file__, *sys.argv[1:], "--side", "1"]
        env = os.environ | ({VISIBLE: options.other} if options.other else {})
        child = subprocess.Popen(  # noqa: ASYNC220  # once, before anything is measured
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
    await connect(side, child)
    most, gb_s = BURST_BYTES >> 6 if options.small else BURST_BYTES, {}
    for size in sizes:
        count = max(WINDOW, min(MOST_IN_BURST, most // size))
        rates = [await side.burst(size, count) for _ in range(3 if options.small else 5)]
        gb_s[size] = statistics.median(rates[1:])
    found: dict[str, Any] = {"gb_s": gb_s, "nccl": side.transport.version}
    if child is not None:
        print(json.dumps(found), flush=True)
    await side.transport.aclose()
    if child is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(TIMEOUT_S)
        child.kill()
        child.wait()


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", choices=("cuda", "cpu"))
    parser.add_argument("--side", type=int, default=0)
    parser.add_argument("--other", default="", help="the GPU of side 1, as CUDA_VISIBLE_DEVICES has it")
    parser.add_argument("--sizes", default="1048576,67108864")
    parser.add_argument("--small", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    uvloop.run(run(read_options()))


if __name__ == "__main__":
    main()
