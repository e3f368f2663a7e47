"""shared: a size in, memory that another process of this host may write into out; and the other end of such memory.

Memory is a memfd: it has no name that could be left behind, and only processes of the same user can open it, by
`/proc/PID/fd`. Nobody is believed to be on this host: who can read a random key out of a peer's memfd is (see
`Mailbox.ticket`). It never grows, moves or hands out memory that a peer might still write into: `SharedBlock.retire` puts
other memory in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import resource
import struct
import weakref
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

_KEY_BYTES = 16
_TRAILER_BYTES = mmap.PAGESIZE
"""Behind a block's data: its key, whether its owner has let go of it, and which offer the sender has used."""

_MARK_AT = 32
"""Of the trailer: where the sender says so."""

RING_BYTES = 64 * 513
"""Of a board: for `offers.py`."""

_BOARD_ROWS, _BOARD_SEEN = 256, 256
_SEEN_BYTES, _ROW_BYTES = 16, 24
_BOARD_BYTES = _BOARD_ROWS * _ROW_BYTES + _BOARD_SEEN * _SEEN_BYTES + RING_BYTES + _KEY_BYTES
_TICKET = struct.Struct("<16sQII16s")  # boot id, process id namespace, process id, descriptor, key

COPIES_PAST_CACHES = MappingProxyType({"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"})
"""For the environment of processes that send: glibc then copies pieces as it copies what is larger than three quarters
of the last cache, which where hosts share one are 100 MB. Twice as fast at 16 MiB. Other C libraries do not know it."""

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10


class BlockTicket(NamedTuple):
    """How a peer finds a block: a descriptor of its owner's process, and the key that is to be there."""

    descriptor: int
    key: bytes
    size_bytes: int


class SharedBlock:
    """Memory to receive into, which peers on this host can write themselves.

    Attributes:
        address, size_bytes: of the data. It starts at a page, and stays where it is for as long as `array` lives.
        array: the same as flat uint8.
        ticket: for peers; None if the memory is not shared.
        mark: which offer the sender has used, as it notes there.
    """

    __slots__ = (
        "__weakref__",
        "_descriptor",
        "_end",
        "_is_retired",
        "_whole",
        "address",
        "array",
        "mark",
        "size_bytes",
        "ticket",
    )

    def __init__(self, size_bytes: int):
        self._is_retired = False
        self._descriptor, key = _make_file(_whole_bytes(size_bytes))
        try:
            self._whole = _map(self._descriptor, _whole_bytes(size_bytes))
        except BaseException:  # also a cancellation: nobody else would close it
            os.close(self._descriptor)
            raise
        self.array = self._whole[:size_bytes]
        self.address, self.size_bytes = self.array.ctypes.data, size_bytes
        self.mark = ctypes.c_uint64.from_address(self.address + self._whole.size - _TRAILER_BYTES + _MARK_AT)
        self._share(key)

    @classmethod
    def make(cls, size_bytes: int) -> SharedBlock | None:
        """A block, or None where the system has none to give (another system, too many descriptors)."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            return cls(size_bytes)
        except OSError:
            return None

    def retire(self) -> None:
        """Put memory of this process's own, all zeros, at the same addresses: what a peer still writes goes into the
        old. An abort retires many blocks at once, so nothing is allocated before somebody writes there, or shares it.

        Raises:
            OSError: there is no memory to be had. Leave the process.
        """
        self._let_go()
        _map_at(self.address, -1, _whole_bytes(self.size_bytes))
        self._is_retired = True

    def share_again(self) -> None:
        """Share the memory of a block that was retired, if the system has any to give. What it holds is lost."""
        if not self._is_retired:
            return
        self._is_retired = False  # tried once: making and refusing large memory takes long
        with contextlib.suppress(OSError):
            self._descriptor, key = _make_file(_whole_bytes(self.size_bytes))
            try:
                _map_at(self.address, self._descriptor, _whole_bytes(self.size_bytes))
            except BaseException:  # also a cancellation: nobody else would close it
                os.close(self._descriptor)
                raise
            self._share(key)

    def _share(self, key: bytes) -> None:
        start = _whole_bytes(self.size_bytes) - _TRAILER_BYTES
        self._whole[start : start + _KEY_BYTES] = np.frombuffer(key, np.uint8)
        self.ticket: BlockTicket | None = BlockTicket(self._descriptor, key, self.size_bytes)
        self._end = weakref.finalize(self, _end_block, self._whole[start + _KEY_BYTES :], self._descriptor)
        self._end.atexit = False

    def _let_go(self) -> None:
        self.ticket = None
        self._end()


class Mailbox:
    """What this process tells neighbours, where they can read it: messages that it announces, as rows of (serial, tag,
    size), and whose boards it sees itself. One of two processes may see the other's alone: of another user, out of
    descriptors.

    Attributes:
        ticket: for peers, to find the board and to prove that they are on this host.
        key: random; whoever knows it has read the board. name: what others' boards say for it.
        ring: `RING_BYTES` of it, for the receives that wait (`offers.py`).
    """

    def __init__(self) -> None:
        self._descriptor, self.key = _make_file(_BOARD_BYTES)
        self.name = _name_of(self.key)
        whole = _map(self._descriptor, _BOARD_BYTES)
        whole[-_KEY_BYTES:] = np.frombuffer(self.key, np.uint8)
        self._rows, self._seen, self.ring = _board_parts(whole)
        self._free = list(range(_BOARD_ROWS))
        self.ticket = _TICKET.pack(*_here(), os.getpid(), self._descriptor, self.key)

    def announce(self, serial: int, tag: int, size_bytes: int) -> int | None:
        """Announce a message. Returns: the row that says it; None if there is none left."""
        if not self._free:
            return None
        row = self._free.pop()
        self._rows[row] = (serial, tag, size_bytes)
        return row

    def withdraw(self, row: int) -> None:
        """Take an announcement's row back."""
        self._rows[row] = 0
        self._free.append(row)

    def see(self, local_peer: LocalPeer) -> None:
        """Say that this process reads a neighbour's board. Where there is no room left, that is not said."""
        free = np.flatnonzero(~self._seen.any(axis=1))
        if len(free):
            self._seen[free[0]] = np.frombuffer(_name_of(local_peer.key), np.uint8)

    def unsee(self, local_peer: LocalPeer) -> None:
        """Say it no longer."""
        self._seen[(self._seen == np.frombuffer(_name_of(local_peer.key), np.uint8)).all(axis=1)] = 0

    def close(self) -> None:
        """Give the descriptor back. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MappedBlock:
    """A neighbour's block, mapped here.

    Attributes:
        address: of its first byte. size_bytes: of all of it, trailer included.
        freed: whether its owner has let go of it. mark: the offer that this side has used, for its owner.
    """

    __slots__ = ("_whole", "address", "freed", "mark", "size_bytes")

    def __init__(self, whole: np.ndarray):
        self._whole, self.address, self.size_bytes = whole, whole.ctypes.data, whole.size
        trailer = self.address + self.size_bytes - _TRAILER_BYTES
        self.freed = ctypes.c_uint8.from_address(trailer + _KEY_BYTES)
        self.mark = ctypes.c_uint64.from_address(trailer + _MARK_AT)


class LocalPeer:
    """A process on this host: its board, and its blocks as they are mapped here.

    Attributes:
        key: of its board. ring: the part of it that `offers.py` reads.
    """

    def __init__(self, pid: int, key: bytes, mailbox: np.ndarray):
        self._pid, self.key = pid, key
        self._rows, self._seen, self.ring = _board_parts(mailbox)
        self._blocks: dict[bytes, MappedBlock] = {}
        self._answered: set[int] = set()

    @classmethod
    def of(cls, ticket: bytes) -> LocalPeer | None:
        """The process that made a board's ticket, if it is here: same boot, same process ids, and its key is there."""
        if len(ticket) != _TICKET.size:
            return None
        *place, pid, descriptor, key = _TICKET.unpack(ticket)
        try:
            if place != [*_here()]:
                return None
            mailbox = _open(pid, descriptor, _BOARD_BYTES, writable=False)
        except (OSError, ValueError):
            return None
        return cls(pid, key, mailbox) if mailbox[-_KEY_BYTES:].tobytes() == key else None

    def announced(self, tag: int) -> list[tuple[int, int]]:
        """(serial, size) of the messages that it announces under a tag and that were not answered, oldest first."""
        rows = self._rows.tolist()
        return sorted((n, size) for n, at, size in rows if n and at == tag and n not in self._answered)

    def note_answered(self, serial: int) -> None:
        """Leave an announcement out from now on. The neighbour takes its row back once it has heard the answer."""
        self._answered.add(serial)
        if len(self._answered) > _BOARD_ROWS:
            self._answered &= {serial, *self._rows[:, 0].tolist()}

    def sees(self, mailbox: Mailbox) -> bool:
        """Whether the neighbour says that it reads this board."""
        return mailbox.name in self._seen.tobytes()

    def place(self, ticket: BlockTicket) -> MappedBlock:
        """Where a block of the neighbour's lies here, all of its bytes.

        Raises:
            OSError, ValueError: it cannot be mapped, or is not what the ticket says.
        """
        placed = self._blocks.get(ticket.key)
        if placed is None:
            self.forget_freed()
            whole = _open(self._pid, ticket.descriptor, _whole_bytes(ticket.size_bytes), writable=True)
            if whole[-_TRAILER_BYTES:][:_KEY_BYTES].tobytes() != ticket.key:
                raise ValueError("another block is there")
            placed = self._blocks[ticket.key] = MappedBlock(whole)
        if placed.size_bytes != _whole_bytes(ticket.size_bytes):
            raise ValueError("the block is of another size")
        if placed.freed.value:
            raise ValueError("its owner has let go of it")
        return placed

    @property
    def has_blocks(self) -> bool:
        """Whether any block of the neighbour's is mapped here."""
        return bool(self._blocks)

    def forget(self) -> None:
        """Keep no block of the neighbour's."""
        self._blocks.clear()

    def forget_freed(self) -> None:
        """Keep no block that the neighbour has let go of: its memory is in use for as long as it is mapped here."""
        for key in [key for key, placed in self._blocks.items() if placed.freed.value]:
            del self._blocks[key]


class _Mapping:
    """Mapped memory, unmapped when no array shows it any more. (`mmap.mmap` would keep a descriptor for each.)"""

    def __init__(self, address: int, size_bytes: int, writable: bool):
        self.__array_interface__ = {
            "data": (address, not writable),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
        weakref.finalize(self, _libc().munmap, address, size_bytes).atexit = False


def _whole_bytes(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + _TRAILER_BYTES


def _board_parts(mailbox: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What it announces, whose boards its owner sees, and the ring of its offers."""
    seen_at, ring_at = _BOARD_ROWS * _ROW_BYTES, _BOARD_ROWS * _ROW_BYTES + _BOARD_SEEN * _SEEN_BYTES
    rows, seen, ring = np.split(mailbox[:-_KEY_BYTES], [seen_at, ring_at])
    return rows.view(np.uint64).reshape(_BOARD_ROWS, 3), seen.reshape(_BOARD_SEEN, _SEEN_BYTES), ring


def _name_of(key: bytes) -> bytes:
    """Unlike the key itself it may be read by who must not know that."""
    return hashlib.sha256(key).digest()[:_SEEN_BYTES]


def _make_file(size_bytes: int) -> tuple[int, bytes]:
    """A descriptor, and a key for it. Half of the descriptors that the process may have are left to others."""
    descriptor = os.memfd_create("jaxpp-async", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most != resource.RLIM_INFINITY and descriptor >= most // 2:
            # the kernel gives the lowest that is free
            raise OSError(errno.EMFILE, "half of the descriptors are in use")
        # Allocated now: a peer that writes must not be the one who finds that there is no memory left, by SIGBUS ...
        os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # ... nor that the file has shrunk.
    except BaseException:  # also a cancellation: nobody else would close it
        os.close(descriptor)
        raise
    return descriptor, os.urandom(_KEY_BYTES)


def _end_block(mark: np.ndarray, descriptor: int) -> None:
    mark[0] = 1
    os.close(descriptor)


def _open(pid: int, descriptor: int, size_bytes: int, *, writable: bool) -> np.ndarray:
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith("/memfd:jaxpp-async"):
        raise ValueError(f"{path} is something else by now")
    here = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if os.fstat(here).st_size != size_bytes or fcntl.fcntl(here, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError(f"{path} is something else by now")
        return _map(here, size_bytes, writable=writable)
    finally:
        os.close(here)


def _map(descriptor: int, size_bytes: int, *, writable: bool = True) -> np.ndarray:
    address = _map_at(None, descriptor, size_bytes, writable=writable)
    return np.asarray(_Mapping(address, size_bytes, writable))


def _map_at(address: int | None, descriptor: int, size_bytes: int, *, writable: bool = True) -> int:
    """Map a file, or fresh memory (-1); where an address is given, in the place of what is there."""
    kind = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if address is not None:
        kind |= _MAP_FIXED
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    at = _libc().mmap(address, size_bytes, protection, kind, descriptor, 0)
    if at == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map {size_bytes} bytes")
    return at


def _libc() -> Any:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def _here() -> tuple[bytes, int]:
    """Which kernel, since when, and which of its process id namespaces."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = bytes.fromhex(file.read().strip().replace("-", ""))
    return boot, os.stat("/proc/self/ns/pid").st_ino
