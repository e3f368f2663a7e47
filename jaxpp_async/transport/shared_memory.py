"""Make memory into which another process of this host may write, and map such memory of other processes.

The memory is a memfd (a file in memory that has no path), so that nothing is left behind when its owner ends.
Only processes of the same user can open the memfd, by `/proc/PID/fd`. A peer that claims to run on this host
has to prove it: its address contains a random key, and this process must find the same key in the peer's
memfd (see `Mailbox.ticket`). If a peer might still write into some memory, that memory is never used again:
`SharedBlock.retire` puts other memory at its addresses.
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
"""The size in bytes of the trailer that follows the data of a block. The trailer contains the block's key,
whether its owner has freed it, and the serial number of the offer that a sender has used."""

_MARK_AT = 32
"""The offset in the trailer at which a sender writes the serial number of the offer that it has used."""

RING_BYTES = 64 * 513
"""The size in bytes of the part of a mailbox that `ucx/offers.py` uses for its ring of offers."""

_MAILBOX_ROWS, _MAILBOX_NAMES = 256, 256
_NAME_BYTES, _ROW_BYTES = 16, 24
_MAILBOX_BYTES = _MAILBOX_ROWS * _ROW_BYTES + _MAILBOX_NAMES * _NAME_BYTES + RING_BYTES + _KEY_BYTES
_TICKET = struct.Struct("<16sQII16s")  # boot id, process id namespace, process id, descriptor, key

COPIES_PAST_CACHES = MappingProxyType({"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"})
"""Environment variables for processes that send, with which glibc bypasses the caches when it copies 1 MiB or
more. Without them it does so only from three quarters of the size of the last cache on, which is 100 MB on
machines with a large shared cache. With them copies of 16 MiB are twice as fast. Other C libraries ignore
these variables."""

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10


class BlockTicket(NamedTuple):
    """The data with which a peer finds a shared block and checks that it is the right one: a descriptor in
    the owner's process, the key that the block must contain, and the block's size."""

    descriptor: int
    key: bytes
    size_bytes: int


class SharedBlock:
    """Memory to receive into, which peers on this host can map and write to themselves.

    Args:
        size_bytes: the size of the data.

    Attributes:
        address, size_bytes: the address and the size of the data. The data starts at a page boundary, and its
            address stays the same as long as `array` lives.
        array: the data as a flat uint8 array.
        ticket: the data by which peers find the block; None while the memory is not shared.
        mark: a 64-bit number in the block. A sender that writes a message into the block because of an offer
            (`ucx/offers.py`) then stores the offer's serial number in `mark`.
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
        self._descriptor, key, whole_at = _make_file(_whole_bytes(size_bytes))
        self._whole = _array_at(whole_at, _whole_bytes(size_bytes))
        self.array = self._whole[:size_bytes]
        self.address, self.size_bytes = self.array.ctypes.data, size_bytes
        self.mark = ctypes.c_uint64.from_address(self.address + self._whole.size - _TRAILER_BYTES + _MARK_AT)
        self._share(key)

    @classmethod
    def make(cls, size_bytes: int) -> SharedBlock | None:
        """Make a block.

        Returns:
            The block; None if the system cannot provide one (it is not Linux, has no memory left, or has too
            many descriptors in use).
        """
        if not hasattr(os, "memfd_create"):
            return None
        try:
            return cls(size_bytes)
        except OSError:
            return None

    def retire(self) -> None:
        """Stop sharing the block, and put private memory, all zeros, at the same addresses, so that a peer's
        late writes go into the old memory.

        An abort retires many blocks together, so the new memory is allocated later: when it is first written
        to, or when the block is shared again.

        Raises:
            OSError: there is no memory left. The process must exit.
        """
        self._stop_sharing()
        _map_at(self.address, -1, _whole_bytes(self.size_bytes))
        self._is_retired = True

    def share_again(self) -> None:
        """If the block was retired and the system has enough memory, share the block again; otherwise do
        nothing. The content of a retired block is lost."""
        if not self._is_retired:
            return
        self._is_retired = False  # tried once, because making large memory takes long, even if it fails
        with contextlib.suppress(OSError):
            self._descriptor, key, _ = _make_file(_whole_bytes(self.size_bytes), self.address)
            self._share(key)

    def _share(self, key: bytes) -> None:
        start = _whole_bytes(self.size_bytes) - _TRAILER_BYTES
        self._whole[start : start + _KEY_BYTES] = np.frombuffer(key, np.uint8)
        self.ticket: BlockTicket | None = BlockTicket(self._descriptor, key, self.size_bytes)
        self._end = weakref.finalize(self, _free_block, self._whole[start + _KEY_BYTES :], self._descriptor)
        self._end.atexit = False

    def _stop_sharing(self) -> None:
        self.ticket = None
        self._end()


class Mailbox:
    """A part of this process's memory that other processes of this host can read, to exchange large messages
    with it.

    A mailbox contains three things: rows of (serial, tag, size in bytes) that announce large messages which
    this process wants to send; the names of the mailboxes that this process can read; and a ring buffer of
    offers, which tell senders where they may write a message directly into this process's memory.

    Of two processes A and B, A may be able to read B's mailbox while B cannot read A's, because they belong
    to different users or because B has no descriptors left. The names in B's mailbox therefore tell A whether
    B can read the announcements of A.

    Attributes:
        ticket: the bytes by which a peer finds the mailbox and proves that it runs on this host.
        key: a random key; a process that knows the key has read the mailbox.
        name: a digest of the key, by which the mailboxes of other processes refer to this one.
        ring: the ring buffer of offers (`ucx/offers.py`), `RING_BYTES` long.
    """

    def __init__(self) -> None:
        self._descriptor, self.key, whole_at = _make_file(_MAILBOX_BYTES)
        self.name = _name_of(self.key)
        whole = _array_at(whole_at, _MAILBOX_BYTES)
        whole[-_KEY_BYTES:] = np.frombuffer(self.key, np.uint8)
        self._rows, self._readable, self.ring = _mailbox_parts(whole)
        self._free = list(range(_MAILBOX_ROWS))
        self.ticket = _TICKET.pack(*_host_identity(), os.getpid(), self._descriptor, self.key)

    def announce(self, serial: int, tag: int, size_bytes: int) -> int | None:
        """Announce a large message to the peers that read this mailbox.

        Args:
            serial: the message's serial number.
            tag: the message's tag.
            size_bytes: the message's size in bytes.

        Returns:
            The row of the announcement, for `withdraw`; None if no row is free.
        """
        if not self._free:
            return None
        row = self._free.pop()
        self._rows[row] = (serial, tag, size_bytes)
        return row

    def withdraw(self, row: int) -> None:
        """Remove the announcement in a row that `announce` returned, and free the row."""
        self._rows[row] = 0
        self._free.append(row)

    def add_readable(self, local_peer: LocalPeer) -> None:
        """Publish that this process can read a peer's mailbox. If there is no space for another name, nothing
        happens."""
        free = np.flatnonzero(~self._readable.any(axis=1))
        if len(free):
            self._readable[free[0]] = np.frombuffer(_name_of(local_peer.key), np.uint8)

    def remove_readable(self, local_peer: LocalPeer) -> None:
        """Stop publishing that this process can read a peer's mailbox."""
        self._readable[(self._readable == np.frombuffer(_name_of(local_peer.key), np.uint8)).all(axis=1)] = 0

    def close(self) -> None:
        """Close the mailbox's descriptor. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MappedBlock:
    """A peer's shared block that is mapped into this process.

    Attributes:
        address: the address of the block's first byte in this process.
        size_bytes: the size of the whole block, including the page after the data, which contains `freed` and
            `mark`.
        freed: a flag in the block that is set once its owner has freed it.
        mark: a 64-bit number in the block, by which the block's owner sees that a message has been written.
            The owner offers this process the block as the place of a message (`ucx/offers.py`). After this
            process has written the message, it stores the offer's serial number here.
    """

    __slots__ = ("_whole", "address", "freed", "mark", "size_bytes")

    def __init__(self, whole: np.ndarray):
        self._whole, self.address, self.size_bytes = whole, whole.ctypes.data, whole.size
        trailer = self.address + self.size_bytes - _TRAILER_BYTES
        self.freed = ctypes.c_uint8.from_address(trailer + _KEY_BYTES)
        self.mark = ctypes.c_uint64.from_address(trailer + _MARK_AT)


class LocalPeer:
    """Another process on this host, with its mailbox (a part of its memory that this process can read) and
    the shared blocks of that process that are mapped into this one.

    Args:
        pid: the peer's process id.
        key: the key of the peer's mailbox.
        mailbox: the peer's mailbox, mapped into this process.

    Attributes:
        key: the key of the peer's mailbox.
        ring: the ring buffer in the peer's mailbox that contains the peer's offers. An offer tells a sender
            where to write a message directly into the peer's memory (`ucx/offers.py`).
    """

    def __init__(self, pid: int, key: bytes, mailbox: np.ndarray):
        self._pid, self.key = pid, key
        self._rows, self._readable, self.ring = _mailbox_parts(mailbox)
        self._blocks: dict[bytes, MappedBlock] = {}
        self._answered: set[int] = set()

    @classmethod
    def from_ticket(cls, ticket: bytes) -> LocalPeer | None:
        """Find the process on this host that owns the mailbox with a given ticket, and map that mailbox.

        Returns:
            The process. None if the process is not on this host (the boot id or the process id namespace
            differs), if its mailbox cannot be read or does not contain the ticket's key, or if the ticket is
            malformed.
        """
        if len(ticket) != _TICKET.size:
            return None
        *place, pid, descriptor, key = _TICKET.unpack(ticket)
        try:
            if place != [*_host_identity()]:
                return None
            mailbox = _open(pid, descriptor, _MAILBOX_BYTES, writable=False)
        except (OSError, ValueError):
            return None
        return cls(pid, key, mailbox) if mailbox[-_KEY_BYTES:].tobytes() == key else None

    def announced(self, tag: int) -> list[tuple[int, int]]:
        """Return one tuple (serial number, size in bytes) for each message with a given tag that the peer
        announces in its mailbox, oldest first. Messages for which `note_answered` was called are left out."""
        rows = self._rows.tolist()
        return sorted((n, size) for n, at, size in rows if n and at == tag and n not in self._answered)

    def note_answered(self, serial: int) -> None:
        """Leave an announced message out of `announced` from now on, because this process is answering the
        announcement with a CTS ("clear to send"). The peer removes the announcement from its mailbox when it
        receives the CTS."""
        self._answered.add(serial)
        if len(self._answered) > _MAILBOX_ROWS:
            self._answered &= {serial, *self._rows[:, 0].tolist()}

    def can_read(self, mailbox: Mailbox) -> bool:
        """Return whether the peer has published that it can read a mailbox of this process."""
        return mailbox.name in self._readable.tobytes()

    def map_block(self, ticket: BlockTicket) -> MappedBlock:
        """Map a block of the peer into this process, unless it is mapped already, and return it.

        Raises:
            OSError: the block cannot be mapped.
            ValueError: the block is not the one that the ticket describes, or was freed by its owner.
        """
        block = self._blocks.get(ticket.key)
        if block is None:
            self.unmap_freed_blocks()
            whole = _open(self._pid, ticket.descriptor, _whole_bytes(ticket.size_bytes), writable=True)
            if whole[-_TRAILER_BYTES:][:_KEY_BYTES].tobytes() != ticket.key:
                raise ValueError("another block is there")
            block = self._blocks[ticket.key] = MappedBlock(whole)
        if block.size_bytes != _whole_bytes(ticket.size_bytes):
            raise ValueError("the block is of another size")
        if block.freed.value:
            raise ValueError("its owner has let go of it")
        return block

    @property
    def has_blocks(self) -> bool:
        """This is True while any shared block of the peer is mapped into this process."""
        return bool(self._blocks)

    def unmap_blocks(self) -> None:
        """Unmap every shared block of the peer from this process."""
        self._blocks.clear()

    def unmap_freed_blocks(self) -> None:
        """Unmap every shared block that the peer has freed. The memory of a freed block stays allocated until
        no process maps it."""
        for key in [key for key, block in self._blocks.items() if block.freed.value]:
            del self._blocks[key]


class _Mapping:
    """Mapped memory that is unmapped once no array refers to it any more. (`mmap.mmap` would keep a
    descriptor open for each mapping.)"""

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


def _mailbox_parts(mailbox: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split the memory of a process's mailbox into three arrays: the messages that the process announces, the
    names of the mailboxes that the process can read, and the ring buffer of the process's offers."""
    names_at, ring_at = _MAILBOX_ROWS * _ROW_BYTES, _MAILBOX_ROWS * _ROW_BYTES + _MAILBOX_NAMES * _NAME_BYTES
    rows, names, ring = np.split(mailbox[:-_KEY_BYTES], [names_at, ring_at])
    return rows.view(np.uint64).reshape(_MAILBOX_ROWS, 3), names.reshape(_MAILBOX_NAMES, _NAME_BYTES), ring


def _name_of(key: bytes) -> bytes:
    """Return a mailbox's public name, a digest from which its secret key cannot be recovered."""
    return hashlib.sha256(key).digest()[:_NAME_BYTES]


def _make_file(size_bytes: int, address: int | None = None) -> tuple[int, bytes, int]:
    """Make a memfd of a fixed size, and map it into this process.

    Args:
        size_bytes: the size.
        address: the address at which to replace the present mapping; None: any free address.

    Returns:
        The descriptor, a random key, and the address of the mapping.

    Raises:
        OSError: the memory cannot be allocated or mapped, or half of the descriptors that this process may
            have are in use; the other half is left for other purposes.
    """
    descriptor = os.memfd_create("jaxpp-async", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and descriptor >= limit // 2:
            # The kernel gives the lowest free descriptor, so that it shows how many are in use.
            raise OSError(errno.EMFILE, "half of the descriptors are in use")
        # Allocated now, so that a peer that writes is not killed by SIGBUS because no memory is left ...
        os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # ... or the file has shrunk.
        return descriptor, os.urandom(_KEY_BYTES), _map_at(address, descriptor, size_bytes)
    except BaseException:  # including cancellations: nobody else would close it
        os.close(descriptor)
        raise


def _free_block(mark: np.ndarray, descriptor: int) -> None:
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
        return _array_at(_map_at(None, here, size_bytes, writable=writable), size_bytes, writable=writable)
    finally:
        os.close(here)


def _array_at(address: int, size_bytes: int, *, writable: bool = True) -> np.ndarray:
    """Return mapped memory as a flat uint8 array; the memory is unmapped when no array refers to it."""
    return np.asarray(_Mapping(address, size_bytes, writable))


def _map_at(address: int | None, descriptor: int, size_bytes: int, *, writable: bool = True) -> int:
    """Map a file or fresh memory into this process, and return the address of the mapping.

    Args:
        address: the address at which to replace the present mapping; None: any free address.
        descriptor: the file's descriptor; -1 for fresh private memory.
        size_bytes: the number of bytes to map.
        writable: whether the memory may be written to.
    """
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


def _host_identity() -> tuple[bytes, int]:
    """Return the two values that identify this host: the kernel's boot id and the inode of this process's
    process id namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = bytes.fromhex(file.read().strip().replace("-", ""))
    return boot, os.stat("/proc/self/ns/pid").st_ino
