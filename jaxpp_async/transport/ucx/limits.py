"""limits: checks that this process may have what UCX needs, descriptors and room for shared memory, before UCX is
asked, which only says "Input/output error".
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import tempfile
from typing import Final

from jaxpp_async.errors import MeshError

SHARED_MEMORY: Final = "/dev/shm"
FOLDER: Final = "UCX_POSIX_DIR"
LEAST_ROOM: Final = "UCX_POSIX_SHM_MIN_SIZE"
LEAST_ROOM_BYTES: Final = 16 << 20
"""With less room than that UCX does without shared memory."""

START_DESCRIPTORS: Final = 24
"""Descriptors that a UCX context and its worker take at once: 16 with shared memory alone, 2 more for each network
device."""


def check_descriptors(needed: int, what: str) -> None:
    """See whether this process may open so many more descriptors.

    Args:
        what: what they are for.

    Raises:
        MeshError: it may not.
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


def free_descriptors() -> int:
    """How many more descriptors this process may open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else max(0, most - num_descriptors())


def num_descriptors() -> int:
    """How many descriptors this process has open."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # the listing's own
    except OSError:  # no /proc, or not even one more
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def shared_memory_folder() -> tuple[str | None, str]:
    """Where UCX is to keep the memory that processes of this host share.

    Returns:
        The folder, if any is fit: /dev/shm, else one where this user may have files that are deleted already. And why
        it is not /dev/shm; empty if it is.
    """
    why = _unfit(SHARED_MEMORY)
    if not why:
        return SHARED_MEMORY, ""
    others = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()]
    return next((folder for folder in others if folder and not _unfit(folder)), None), why


def _unfit(folder: str) -> str:
    """Why a folder cannot hold shared memory; empty if it can."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if room.f_flag & os.ST_RDONLY:
        return f"{folder} is read-only"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} may not be written"
    if room.f_bsize * room.f_bavail < LEAST_ROOM_BYTES:
        return f"{folder} has {room.f_bsize * room.f_bavail >> 10:,} KiB left, and UCX wants {LEAST_ROOM_BYTES >> 20} MiB"
    return ""
