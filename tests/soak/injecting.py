"""injecting: faults from outside: signals, connections that are cut, strangers at the control port. Knows processes and
sockets only; nothing in the mesh is asked to play along."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
from collections.abc import Callable
from typing import Any

import psutil

_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)
SLOW_HZ = 10


class Process:
    """One process, never another that has got its number since."""

    def __init__(self, pid: int):
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def signal(self, number: signal.Signals) -> bool:
        """Whether it was still there to get the signal."""
        if self._descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process; whether it was there."""
    with Process(pid) as process:
        return process.signal(number)


async def stop_for(pid: int, seconds: float) -> bool:
    """Stop a process, and let it go on."""
    with Process(pid) as process:
        try:
            was_there = process.signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            process.signal(signal.SIGCONT)
    return was_there


async def slow_down(pid: int, seconds: float) -> bool:
    """Let a process run a fifth of the time, in slices."""
    with Process(pid) as process:
        try:
            was_there = True
            for _ in range(max(1, round(seconds * SLOW_HZ))):
                was_there &= process.signal(signal.SIGSTOP)
                await asyncio.sleep(0.8 / SLOW_HZ)
                process.signal(signal.SIGCONT)
                await asyncio.sleep(0.2 / SLOW_HZ)
        finally:
            process.signal(signal.SIGCONT)
    return was_there


def connections(pid: int) -> list[Any]:
    """The established TCP connections of a process (`psutil`'s; `raddr.port` is the other end's)."""
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(pid).net_connections("tcp")
        return [connection for connection in found if connection.status == psutil.CONN_ESTABLISHED]
    return []


def control_port(pid: int) -> int | None:
    """The port of this process that an actor is connected to."""
    mine = {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return next((c.raddr.port for c in connections(pid) if c.raddr.port in mine), None)


def cut_connections(pid: int, which: Callable[[Any], bool]) -> int | None:
    """Shut down TCP connections of another process, as if the network had.

    Returns:
        How many; None if the system does not allow it.
    """
    count = 0
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    try:
        for connection in filter(which, connections(pid)):
            taken = _LIBC.syscall(_PIDFD_GETFD, process, connection.fd, 0)
            if taken < 0:
                return None
            with socket.socket(fileno=taken) as sock, contextlib.suppress(OSError):  # closed meanwhile
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    finally:
        os.close(process)
    return count


async def garbage(port: int, number: int) -> None:
    """Strangers at a port: some say random bytes, some nothing, some hang up."""
    rng = random.Random(number)
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(20):
            with contextlib.suppress(OSError):
                async with asyncio.timeout(2):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writers.append(writer)
                    writer.write(rng.randbytes(rng.choice([0, 1, 100, 100_000])))
                    if rng.random() < 0.3:
                        writer.transport.abort()
        await asyncio.sleep(rng.uniform(0, 2))
    finally:
        for writer in writers:
            writer.transport.abort()
