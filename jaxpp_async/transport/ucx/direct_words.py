"""direct_words: what the two sides of `direct.py` say to each other, and which messages may be direct. No state."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Protocol

from jaxpp_async.transport.base import EPOCH_SHIFT, SEQUENCE_BITS
from jaxpp_async.transport.buffers import Memory
from jaxpp_async.transport.ucx.links import Link, Transfer

DIRECT_BYTES = 1 << 20
"""Messages from this size on, where the receive was offered. With four in flight 1 MiB is a tenth faster than by UCX, 4
MiB 1.3 times, and twice where other work has the cores now and then: one copy needs one of the two sides awake."""

ANSWER_BYTES = 4 << 20
"""And from this size on where it was not; what is larger than a piece is never offered. Below it UCX's second copy, by
another core, takes less time than three things said to a process that may be asleep. At 16 MiB 1.6 times as fast as
UCX, at 4 MiB even with it."""

HEADER_BYTES = 61
"""Unlike the size of any likely array, though it would be told from one by its key."""

PIECE_BYTES = 4 << 20
"""Copied at a time, in 0.3 to 0.4 ms. With 1 MiB the loop's passes between took a tenth as long as the copying."""

HEADER = struct.Struct("<16sQQ29x")  # the board's key, serial, size
ANSWER = struct.Struct("<Bi16sQ")  # verdict, then a `BlockTicket`
END = struct.Struct("<B")
REFUSED, AS_MESSAGE, WRITE = 0, 1, 2
WRITTEN, MESSAGE_FOLLOWS = 1, 2

ANSWER_CHANNEL, DATA_CHANNEL = 254, 255
EMPTY = Memory(0, 0, None)
_SEQUENCES = 1 << SEQUENCE_BITS


class Carrier(Protocol):
    """The transport that says what is said, and tells how transfers end."""

    def post_own_send(self, link: Link, memory: Memory, tag: int, transfer: Transfer | None) -> bool:
        """Send; tells `transfer` when it has ended, or nobody. False: it was refused, which is told too."""
        ...

    def post_own_recv(self, link: Link, memory: Memory, tag: int, then: Callable[[int, int], None] | Transfer) -> None:
        """Receive; calls `then` with status and length, or tells the transfer."""
        ...

    def finish(self, transfer: Transfer, status: int, length: int) -> None:
        """Tell how a transfer has ended; nothing if that was told before."""
        ...


def may_be_written(transfer: Transfer) -> bool:
    """Whether a message may be direct at all."""
    return transfer.memory.size_bytes >= DIRECT_BYTES and not transfer.memory.on_device


def may_be_offered(transfer: Transfer) -> bool:
    """Whether a receive of this size may be offered."""
    return transfer.number is not None and DIRECT_BYTES <= transfer.memory.size_bytes <= PIECE_BYTES


def own_tag(tag: int, channel: int, serial: int) -> int:
    """For what is said about an announced message, in the epoch of its tag."""
    return tag >> EPOCH_SHIFT << EPOCH_SHIFT | channel << SEQUENCE_BITS | serial % _SEQUENCES


def memory_with(size_bytes: int, content: bytes = b"") -> Memory:
    """Memory that holds `content`, to be sent, or has room for what comes."""
    owner = ctypes.create_string_buffer(content, size_bytes)
    return Memory(ctypes.addressof(owner), size_bytes, owner)
