"""Count this process's file descriptors, and prevent child processes from using its pipes, sockets and other
descriptors.

A forked worker that outlives this process would otherwise keep these pipes and sockets open, and the
processes at their other ends would not notice that this process has ended. A program that this process starts
would inherit the descriptors that a native library has opened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterator

from jaxpp_async.errors import MeshError

_identities: dict[int, tuple[int, int]] = {}
"""The device and the inode of the file behind each descriptor that is kept from children, by
descriptor, to recognize a number that belongs to another file by now.
"""


def keep_from_children(*descriptors: int) -> None:
    """Prevent child processes from using the given file descriptors of this process.

    In programs that this process starts, the descriptors are closed. In forked copies of this process, pipes
    and sockets are replaced by /dev/null. Descriptors of other kinds stay open there, since no other process
    waits for them to be closed.
    """
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
        found = os.fstat(descriptor)
        if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode):
            _identities[descriptor] = (found.st_dev, found.st_ino)


@contextlib.contextmanager
def keeping_new_from_children() -> Iterator[None]:
    """Run a `with` block, and prevent child processes from using the inheritable descriptors that were opened
    in it (see `keep_from_children`). Python itself opens no inheritable descriptor, so only a native library
    can have opened these.
    """
    before = _inheritable()
    try:
        yield
    finally:
        for descriptor in _inheritable() - before:
            with contextlib.suppress(OSError):  # it has been closed meanwhile
                keep_from_children(descriptor)


def keep_accepted_from_children() -> None:
    """Prevent child processes from using the connections that a native library's own thread has accepted.

    A connection is recognized by its local port, which is also the port of a listening socket that was given
    to `keep_from_children` before.
    """
    ports = {port for descriptor in tuple(_identities) for port in _ports(descriptor, listening=True)}
    for descriptor in _inheritable():
        if ports & _ports(descriptor, listening=False):
            with contextlib.suppress(OSError):  # it has been closed meanwhile
                keep_from_children(descriptor)


def open_descriptors() -> list[int]:
    """Return the open file descriptors of this process, or an empty list on systems without /proc. One entry
    is the descriptor that was opened to read /proc; that descriptor is closed when this function returns.
    """
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []


def num_descriptors() -> int:
    """Return how many file descriptors this process has open. If they cannot be counted, return the limit on
    open descriptors, as if none were free.
    """
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the one that the listing used
    except OSError:  # there is no /proc, or no descriptor is free to read it
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def free_descriptors() -> int:
    """Return how many more file descriptors this process may open; `sys.maxsize` if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - num_descriptors())


def check_descriptors(needed: int, what: str) -> None:
    """Check that this process may open enough file descriptors, before a library fails without saying why.

    Args:
        needed: how many more descriptors will be opened.
        what: a name for the part of the program that needs the descriptors; the error message begins with it.

    Raises:
        MeshError: this process may open fewer than `needed` more descriptors.
    """
    free = free_descriptors()
    if free < needed:
        used = num_descriptors()
        raise MeshError(
            f"{what} takes about {needed} file descriptors, and this process on host {socket.gethostname()} "
            f"has {free} left: it uses {used} of {used + free}; raise the limit where it is started "
            f"(`ulimit -n {max(1024, 1 << (used + needed).bit_length())}`, LimitNOFILE= of a service, "
            "--ulimit nofile= of a container)"
        )


@contextlib.contextmanager
def borrowed_socket(descriptor: int) -> Iterator[socket.socket]:
    """Wrap a descriptor that other code owns in a Python socket for the length of a `with` block. The
    descriptor stays open afterwards.

    Raises:
        OSError: the descriptor is not a socket, or has been closed.
    """
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    sock = socket.socket(fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


def is_tcp(sock: socket.socket) -> bool:
    """Return whether a socket is a TCP socket."""
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def _ports(descriptor: int, *, listening: bool) -> set[int]:
    """Return a set with the local port of a TCP socket; the set is empty for a descriptor of another kind.

    Args:
        descriptor: the file descriptor.
        listening: True to accept only sockets that listen for connections; False to accept only the others.
    """
    with (
        contextlib.suppress(OSError),
        borrowed_socket(descriptor) as sock,
    ):  # it has been closed meanwhile, or is not a socket
        if is_tcp(sock) and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) is listening:
            return {sock.getsockname()[1]}
    return set()


def _inheritable() -> set[int]:
    found: set[int] = set()
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            if not fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                found.add(descriptor)
    return found


def _replace_in_child() -> None:
    """Replace the descriptors that were given to `keep_from_children` by `/dev/null`; this runs in each
    forked process. The descriptors are not just closed, since code in that process may go on to use them and
    to close them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, identity in _identities.items():
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) == identity:
                os.dup2(null, descriptor, inheritable=False)
    _identities.clear()
    os.close(null)


os.register_at_fork(after_in_child=_replace_in_child)
