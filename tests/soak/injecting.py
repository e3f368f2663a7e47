"""injecting: faults from outside: signals, connections that are cut, strangers at the control port. Knows
processes and sockets only; nothing in the mesh is asked to play along."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Connection:
    """An established TCP connection of a process: its descriptor there, and the port of the other end."""

    descriptor: int
    remote_port: int


def connections(pid: int) -> list[Connection]:
    """Those of a process, in whatever network namespace it is (`psutil` looks only into this one's)."""
    found: list[Connection] = []
    with contextlib.suppress(OSError):  # it has ended
        remote_ports = dict((*_established(pid, "tcp"), *_established(pid, "tcp6")))
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if (name := os.readlink(entry)) in remote_ports:
                    found.append(Connection(int(entry.name), remote_ports[name]))
    return found


def _established(pid: int, table: str) -> Iterator[tuple[str, int]]:
    """(`socket:[inode]`, remote port) of each; see proc(5), `/proc/net/tcp`."""
    path = Path(f"/proc/{pid}/net/{table}")
    for line in path.read_text().splitlines()[1:] if path.exists() else ():
        words = line.split()
        if words[3] == "01":
            yield f"socket:[{words[9]}]", int(words[2].rpartition(":")[2], 16)


def cut_connections(pid: int, which: Callable[[Connection], bool]) -> int | None:
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
            taken = _LIBC.syscall(_PIDFD_GETFD, process, connection.descriptor, 0)
            if taken < 0:
                if ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):
                    return None
                continue  # closed meanwhile: whoever has lost one connection may be ending
            with socket.socket(fileno=taken) as sock, contextlib.suppress(OSError):  # closed meanwhile
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    finally:
        os.close(process)
    return count


async def garbage(address: tuple[str, int], number: int) -> None:
    """Strangers at a listening socket: some say random bytes, some nothing, some hang up."""
    rng = random.Random(number)
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(20):
            with contextlib.suppress(OSError):
                async with asyncio.timeout(2):
                    _, writer = await asyncio.open_connection(*address)
                    writers.append(writer)
                    writer.write(rng.randbytes(rng.choice([0, 1, 100, 100_000])))
                    if rng.random() < 0.3:
                        writer.transport.abort()
        await asyncio.sleep(rng.uniform(0, 2))
    finally:
        for writer in writers:
            writer.transport.abort()
