"""Count this process's file descriptors, and keep pipes, sockets and others from the processes that it
starts.

A forked worker that outlives this process would otherwise hold them open, and the processes at their other
ends would not notice that this process is gone. A program that this process starts would inherit the
descriptors that a native library has opened.
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


def num_descriptors() -> int:
    """Count the descriptors that this process has open; where it cannot, return the limit, which leaves none
    free."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # the listing's own
    except OSError:  # no /proc, or not even one more descriptor
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def free_descriptors() -> int:
    """Count how many more descriptors this process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - num_descriptors())


def check_descriptors(needed: int, what: str) -> None:
    """Check that this process may open enough descriptors, before a library fails without saying why.

    Args:
        needed: how many more descriptors will be opened.
        what: the subject of the error's sentence, which needs them.

    Raises:
        MeshError: the limit leaves fewer.
    """
    free = free_descriptors()
    if free < needed:
        used = num_descriptors()
        raise MeshError(
            f"{what} takes about {needed} file descriptors, and this process on host {socket.gethostname()} has "
            f"{free} left: it uses {used} of {used + free}; raise the limit where it is started "
            f"(`ulimit -n {max(1024, 1 << (used + needed).bit_length())}`, LimitNOFILE= of a service, --ulimit nofile= "
            "of a container)"
        )


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
