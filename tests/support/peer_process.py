"""peer_process: a process with a UCX transport of its own, peer 1, that does what it reads, for tests of two
processes.

Run as a program it is that process. It says its transport's address, reads the other's, and then a line a
command:

    echo NUMBER SIZE ...    receive messages of these sizes and send them back
    send NUMBER SIZE        send `data(SIZE, NUMBER)`
    swap COUNT SIZE         send so many messages of this size at once, and receive as many, with tags from 0
    block NUMBER SIZE       receive into shared memory, where the sender may write itself
    die SIZE                be killed as soon as so many bytes were written into others' memory

NUMBER is the sequence of the tag. Each is answered "done" once it is under way, `echo` once it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import uvloop
from transport_conformance import data, tag

from jaxpp_async.transport.shared_memory import SharedBlock
from jaxpp_async.transport.ucx.transport import UCXTransport


class PeerProcess:
    """Peer 1, seen from the test."""

    def __init__(self, loop_name: str):
        here = Path(__file__).parent
        path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, __file__, loop_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    async def read(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.asynccontextmanager
async def peer_of(transport: UCXTransport, loop_name: str = "uvloop") -> AsyncIterator[PeerProcess]:
    """A process connected to `transport` as peer 1."""
    peer = PeerProcess(loop_name)
    try:
        address = bytes.fromhex(await peer.read())
        await transport.connect(1, address)
        peer.write(transport.address.hex())
        yield peer
    finally:
        peer.kill()
        assert peer.process.stdin is not None and peer.process.stdout is not None
        peer.process.stdin.close()
        peer.process.stdout.close()


# ---------------------------------------------------------------- the process itself


async def serve() -> None:
    """Do what is asked, until nothing is."""
    transport, pending = UCXTransport(1), []
    print(transport.address.hex(), flush=True)
    await transport.connect(0, bytes.fromhex(await _ask()))
    while words := (await _ask()).split():
        command, numbers = words[0], [int(word) for word in words[1:]]
        if command == "echo":
            await _echo(transport, tag(numbers[0]), numbers[1:])
        elif command == "send":
            pending.append(transport.send(data(numbers[1], numbers[0]), 0, tag(numbers[0])))
        elif command == "swap":
            for k in range(numbers[0]):
                pending.append(transport.send(data(numbers[1], k), 0, tag(k)))
                pending.append(transport.recv(np.zeros(numbers[1], np.uint8), 0, tag(k)))
        elif command == "block":
            pending.append(transport.recv(SharedBlock(numbers[1]), 0, tag(numbers[0])))
        elif command == "die":
            _die_after(numbers[0])
        print("done", flush=True)
    await transport.aclose()


async def _ask() -> str:
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def _echo(transport: UCXTransport, at: int, sizes: list[int]) -> None:
    for size in sizes:
        got = np.zeros(size, np.uint8)
        await transport.recv(got, 0, at)
        await transport.send(got, 0, at)


def _die_after(left_bytes: int) -> None:
    move = ctypes.memmove

    def move_and_die(to: int, of: int, size_bytes: int) -> int:
        nonlocal left_bytes
        move(to, of, min(size_bytes, left_bytes))
        left_bytes -= size_bytes
        if left_bytes <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return to

    ctypes.memmove = move_and_die


if __name__ == "__main__":
    (uvloop.run if sys.argv[1] == "uvloop" else asyncio.run)(serve())
