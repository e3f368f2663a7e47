"""rpc: two contenders: an empty step to two actor processes and back (one request and one reply each, and
nothing to execute), and the same bytes over bare sockets, which is what waking three processes takes.

    python benchmarks/rpc.py [--calls 1000] [--asyncio] [--profile]    # an empty step, by hand
    python benchmarks/rpc.py --serve ours                              # as a contender (`contender.py`)
    python benchmarks/rpc.py --serve bare_sockets
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import pstats
import select
import socket
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import uvloop
from contender import Channel, timed, timed_async

from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.program.actor_program import ActorProgram

CALLS, WARM_UP = 1000, 200


Call = Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def empty_step() -> AsyncIterator[Call]:
    """A step of a program without instructions, which is sent to both actors and awaited.

    This is `Controller.start_step`, which `mesh.run` ends in: the actors are ordinary ones, with JAX and UCX
    up.
    """
    controller = await Controller.start(2, LocalLauncher())
    try:
        program = LoadableProgram({actor: ActorProgram(actor, (), ()) for actor in (0, 1)})
        program_id, _ = await controller.load(program)

        async def call() -> None:
            await controller.start_step(SubmittedStep(program_id), {}, {})

        await timed_async(call, WARM_UP)
        yield call
    finally:
        await controller.aclose()


async def serve_empty_step(channel: Channel) -> None:
    """Be measured in turns with others."""
    async with empty_step() as call:
        await channel.serve_async(lambda num_calls: timed_async(call, num_calls))


async def by_hand(calls: int, profile: bool) -> list[float]:
    """Durations in ms; with `profile` also where they went, on stdout."""
    async with empty_step() as call:
        if not profile:
            return await timed_async(call, calls)
        with cProfile.Profile() as profiler:
            taken = await timed_async(call, calls)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
        return taken


@contextlib.contextmanager
def bare_sockets(size_bytes: int = 150) -> Iterator[Callable[[], None]]:
    """The least there can be: as many bytes to two processes that send them back, over bare sockets, with
    neither asyncio nor messages nor signatures. Nobody spins between calls."""
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
    data = b"x" * size_bytes

    def call() -> None:
        for end in ends:
            end.send(data)
        left = len(ends)
        while left:
            for descriptor, _ in poll.poll():
                by_descriptor[descriptor].recv(4096)
                left -= 1

    try:
        yield call
    finally:
        poll.close()
        for end, child in zip(ends, children, strict=True):
            end.close()
            os.waitpid(child, 0)


def serve_bare_sockets(channel: Channel) -> None:
    """Be measured in turns with others."""
    with bare_sockets() as call:
        timed(call, WARM_UP)
        channel.serve(lambda num_calls: timed(call, num_calls))


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=CALLS, help="calls measured, behind 200 that warm up")
    parser.add_argument(
        "--asyncio", action="store_true", help="the controller on asyncio's own loop, not on uvloop"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the controller's time goes, by function"
    )
    parser.add_argument("--serve", choices=("ours", "bare_sockets"), help="be a contender")
    given = parser.parse_args()
    if given.serve == "ours":
        uvloop.run(serve_empty_step(Channel()))
        return
    if given.serve:
        serve_bare_sockets(Channel())
        return
    runner: Callable[..., Any] = asyncio.run if given.asyncio else uvloop.run
    taken = runner(by_hand(given.calls, given.profile))
    print(json.dumps({"rpc_us": {"ours_two_actors": round(statistics.median(taken) * 1e3, 1)}}))


if __name__ == "__main__":
    main()
