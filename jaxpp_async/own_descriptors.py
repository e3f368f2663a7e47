"""own_descriptors: pipes, sockets and other descriptors that are this process's alone.

A worker that was forked and outlives this process would otherwise keep them open: nobody at their other ends would see
that this process is gone. A program that this process starts would inherit those that a native library has made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator

_identities: dict[int, tuple[int, int]] = {}
"""Device and inode of what lay behind a descriptor when it was kept: its number may be another one's by now."""


def keep_here(*descriptors: int) -> None:
    """Have descriptors close when a program is started, and lead nowhere in processes that are forked.

    The second holds for pipes and sockets alone: nobody waits for the end of anything else.
    """
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
        found = os.fstat(descriptor)
        if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode):
            _identities[descriptor] = (found.st_dev, found.st_ino)


@contextlib.contextmanager
def keeping_new_ones() -> Iterator[None]:
    """Keep what is opened meanwhile, and inheritable: Python opens nothing that is, so it is a native library's."""
    before = _inheritable()
    try:
        yield
    finally:
        for descriptor in _inheritable() - before:
            with contextlib.suppress(OSError):  # closed since
                keep_here(descriptor)


def keep_accepted() -> None:
    """Keep the connections that a native library has accepted, on a thread of its own, at listening sockets of ours."""
    ports = {port for descriptor in tuple(_identities) for port in _ports(descriptor, listening=True)}
    for descriptor in _inheritable():
        if ports & _ports(descriptor, listening=False):
            with contextlib.suppress(OSError):  # closed since
                keep_here(descriptor)


def _ports(descriptor: int, *, listening: bool) -> set[int]:
    """The local TCP port of a socket that listens, or does not; none of any other descriptor."""
    with contextlib.suppress(OSError):  # closed since
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            sock = socket.socket(fileno=descriptor)
            try:
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                if is_tcp and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) is listening:
                    return {sock.getsockname()[1]}
            finally:
                sock.detach()
    return set()


def _inheritable() -> set[int]:
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if not fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                found.add(int(name))
    return found


def _let_go() -> None:
    """In a forked process: whoever has such a descriptor here may go on to use it, and to close it."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, identity in _identities.items():
        with contextlib.suppress(OSError):  # closed long ago
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) == identity:
                os.dup2(null, descriptor, inheritable=False)
    _identities.clear()
    os.close(null)


os.register_at_fork(after_in_child=_let_go)
