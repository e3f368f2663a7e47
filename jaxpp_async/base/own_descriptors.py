"""Keep pipes, sockets and other descriptors of this process from its child processes.

A forked worker that outlives this process would otherwise hold them open, and the processes at their other
ends would not notice that this process is gone. A program that this process starts would inherit the
descriptors that a native library has opened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator

_identities: dict[int, tuple[int, int]] = {}
"""Device and inode behind each descriptor that is kept from children, since its number may be another
descriptor's by now.
"""


def keep_from_children(*descriptors: int) -> None:
    """Have descriptors close in programs that this process starts, and lead to /dev/null in processes that it
    forks.

    The second holds for pipes and sockets alone: nobody waits for the end of anything else.
    """
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
        found = os.fstat(descriptor)
        if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode):
            _identities[descriptor] = (found.st_dev, found.st_ino)


@contextlib.contextmanager
def keeping_new_from_children() -> Iterator[None]:
    """Keep from children what the block opens and children would inherit. Python opens nothing that can be
    inherited, so such a descriptor is a native library's.
    """
    before = _inheritable()
    try:
        yield
    finally:
        for descriptor in _inheritable() - before:
            with contextlib.suppress(OSError):  # it is closed since
                keep_from_children(descriptor)


def keep_accepted_from_children() -> None:
    """Keep from children the connections that a native library, on a thread of its own, has accepted at
    listening sockets that are kept from children.
    """
    ports = {port for descriptor in tuple(_identities) for port in _ports(descriptor, listening=True)}
    for descriptor in _inheritable():
        if ports & _ports(descriptor, listening=False):
            with contextlib.suppress(OSError):  # it is closed since
                keep_from_children(descriptor)


def open_descriptors() -> list[int]:
    """List the open descriptors of this process, empty on systems without /proc. One of them, which the
    listing itself used, is closed by the time that this returns.
    """
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []


@contextlib.contextmanager
def borrowed_socket(descriptor: int) -> Iterator[socket.socket]:
    """Use a socket that other code owns and will close.

    Raises:
        OSError: the descriptor is no socket, or is closed by now.
    """
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    sock = socket.socket(fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


def is_tcp(sock: socket.socket) -> bool:
    """Whether this is a TCP socket."""
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def _ports(descriptor: int, *, listening: bool) -> set[int]:
    """Give the local TCP port of a socket that listens, or that does not; an empty set for any other
    descriptor.
    """
    with (
        contextlib.suppress(OSError),
        borrowed_socket(descriptor) as sock,
    ):  # it is closed since, or no socket
        if is_tcp(sock) and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) is listening:
            return {sock.getsockname()[1]}
    return set()


def _inheritable() -> set[int]:
    found: set[int] = set()
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError):  # it is closed since
            if not fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                found.add(descriptor)
    return found


def _replace_in_child() -> None:
    """Put `/dev/null` in the place of the kept descriptors, since the code that has one in a forked process
    may go on to use it and to close it.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, identity in _identities.items():
        with contextlib.suppress(OSError):  # it is closed since
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) == identity:
                os.dup2(null, descriptor, inheritable=False)
    _identities.clear()
    os.close(null)


os.register_at_fork(after_in_child=_replace_in_child)
