"""rpc: an empty step to two actor processes and back: one request and one reply each, and nothing to execute.

python benchmarks/rpc.py [--calls 1000] [--uvloop] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from jaxpp_async.actors.controller import Controller
from jaxpp_async.actors.launch import LocalLauncher
from jaxpp_async.program import ActorProgram

CALLS, WARM_UP = 1000, 200


async def ours(calls: int = CALLS, *, profile: bool = False) -> list[float]:
    """Seconds of each call: a step of a program without instructions is sent to both actors and awaited.

    This is `Controller.start_step`, which `mesh.run` ends in: the actors are ordinary ones, with JAX and UCX up.
    """
    controller = await Controller.start(2, LocalLauncher())
    try:
        program_id = controller.new_program_id()
        programs = {actor: ActorProgram(actor, (), ()) for actor in (0, 1)}
        await controller.load(program_id, programs, {}, {})
        for _ in range(WARM_UP):
            await controller.start_step(program_id, {}, {})
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        taken = []
        for _ in range(calls):
            start_s = time.perf_counter()
            await controller.start_step(program_id, {}, {})
            taken.append(time.perf_counter() - start_s)
        if profile:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
        return taken
    finally:
        await controller.aclose()


def bare_sockets(calls: int = CALLS, size_bytes: int = 150) -> list[float]:
    """Seconds of each call of the least there can be: the same bytes to two processes that send them back, over bare
    sockets, with neither asyncio nor messages nor signatures. It is what waking three processes takes."""
    ends, children = [], []
    for core in range(2):
        here, there = _tcp_pair()
        child = os.fork()
        if child == 0:
            for end in (here, *ends):
                end.close()
            _echo(there, core)
        there.close()
        ends.append(here)
        children.append(child)
    poll, by_descriptor = select.epoll(), {end.fileno(): end for end in ends}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    taken, data = [], b"x" * size_bytes
    for _ in range(WARM_UP + calls):
        start_s = time.perf_counter()
        for end in ends:
            end.send(data)
        left = len(ends)
        while left:
            for descriptor, _ in poll.poll():
                by_descriptor[descriptor].recv(4096)
                left -= 1
        taken.append(time.perf_counter() - start_s)
    poll.close()
    for end, child in zip(ends, children, strict=True):
        end.close()
        os.waitpid(child, 0)
    return taken[WARM_UP:]


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def _echo(end: socket.socket, core: int) -> None:
    """What the other process does, to its end."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
    poll = select.epoll()
    poll.register(end.fileno(), select.EPOLLIN)
    while poll.poll() and (data := end.recv(4096)):
        end.send(data)
    os._exit(0)


def run(calls: int = CALLS) -> dict[str, Any]:
    """The figures of `make bench`, in us: medians, and the spread between the first and the last tenth of ours."""
    floor, taken = bare_sockets(calls), asyncio.run(ours(calls))
    tenths = statistics.quantiles(taken, n=10)
    return {
        "ours_two_actors": _us(statistics.median(taken)),
        "ours_tenths": [_us(tenths[0]), _us(tenths[-1])],
        "bare_sockets": _us(statistics.median(floor)),
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=CALLS, help="calls measured, behind 200 that warm up")
    parser.add_argument("--uvloop", action="store_true", help="the controller on uvloop (actors always are)")
    parser.add_argument("--profile", action="store_true", help="print where the controller's time goes, by function")
    given = parser.parse_args()
    runner: Callable[..., Any] = asyncio.run
    if given.uvloop:
        import uvloop

        runner = uvloop.run
    if given.profile or given.uvloop:
        taken = runner(ours(given.calls, profile=given.profile))
        print(json.dumps({"rpc_us": {"ours_two_actors": _us(statistics.median(taken))}}))
    else:
        print(json.dumps({"rpc_us": run(given.calls)}))


if __name__ == "__main__":
    main()
