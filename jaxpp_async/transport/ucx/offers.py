"""Offer the memory of a receive to a sender on this host before the sender sends (CTS_AHEAD in
`one_copy.py`). An offer lets the sender write one message directly into the receiver's memory.

The receiver writes each offer into a ring buffer in its own mailbox, which is memory that its peers read
(`shared_memory.Mailbox`). A peer reads the ring buffer when it sends a message, and repeatedly while it holds
a message back to wait for an offer. An offer wakes no process, so an offer that is made too late or is
overwritten is simply never used.

Each offer is for one message. Messages with the same tag match receives in order, whatever their sizes. Both
sides number these messages, so that an offer and its message have the same number. The sender ignores an
offer for a message that was sent already, and a row of the ring buffer that changed while it was being read.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np

from jaxpp_async.transport.base import (
    CHANNEL_BITS,
    COPY_CHANNEL,
    HOST_CHANNEL,
    SENDER_BITS,
    SENDER_SHIFT,
    SEQUENCE_BITS,
)
from jaxpp_async.transport.shared_memory import RING_BYTES, BlockTicket

MOST_HELD = 1024
"""The greatest number of offers that a link keeps for messages which were not sent yet. If there are more,
the oldest are forgotten."""

_COUNT = struct.Struct("<Q")
_ROW = struct.Struct("<QQQQi16s")  # serial, wire tag, number, then a `BlockTicket` with its size first
_CHECK = struct.Struct("<I")
_FIRST_ROW, _ROW_BYTES = 64, 64
_ROWS = (RING_BYTES - _FIRST_ROW) // _ROW_BYTES
_SENDER_MASK = ((1 << SENDER_BITS) - 1) << SENDER_SHIFT
_CHANNEL_MASK = ((1 << CHANNEL_BITS) - 1) << SEQUENCE_BITS
_UNNUMBERED = frozenset(channel << SEQUENCE_BITS for channel in (HOST_CHANNEL, COPY_CHANNEL))


class Offer(NamedTuple):
    """An offer of a receive's memory: the receive was posted, and the sender may write the message into that
    memory.

    Args:
        serial: a number that no other offer of this receiver has.
        ticket: the data by which the sender finds the shared block to write to.
    """

    serial: int
    ticket: BlockTicket


class OfferRing:
    """A ring buffer of the latest `_ROWS` offers that one transport makes to peers on this host, in memory
    that the peers read. An offer lets a peer write a message directly into the memory of a receive.

    Args:
        ring: `RING_BYTES` of memory that peers can read.
    """

    def __init__(self, ring: np.ndarray):
        self._memory = ring.data
        self._count = 0

    def put(self, wire_tag: int, number: int, ticket: BlockTicket) -> int:
        """Offer the shared block of a receive to the sender whose id is in the tag, so that the sender can
        write its message directly into the block.

        Args:
            wire_tag: the tag of the receive as UCX sees it, with the sender's id.
            number: the number of the message under its tag (see `MessageNumbers`).
            ticket: the data by which the sender finds the block.

        Returns:
            The offer's serial number, from 1.
        """
        serial = self._count + 1
        row = _ROW.pack(serial, wire_tag, number, ticket.size_bytes, ticket.descriptor, ticket.key)
        start = _row_at(serial)
        self._memory[start : start + _ROW.size + _CHECK.size] = row + _CHECK.pack(zlib.crc32(row))
        self._count = serial
        _COUNT.pack_into(self._memory, 0, serial)
        return serial


class MessageNumbers:
    """Counters that number the messages of each tag, from 0, in one direction of a link.

    Sender and receiver count alike, so that the receiver's offer of memory for a message has the same number
    as the message.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def next(self, tag: int) -> int | None:
        """Count one more message of a tag, and return its number. A sender uses the number to find the
        receiver's offer of memory for the message.

        Memory is never offered for messages of the host channel or for replicas (copies of the state kept for
        restarts), so these messages get no number. Counting the host channel's messages would also need one
        counter per message, because each tag of that channel is used only once.

        Returns:
            The number; None for a message of the host channel or of replicas.
        """
        if tag & _CHANNEL_MASK in _UNNUMBERED:
            return None
        number = self._next.get(tag, 0)
        self._next[tag] = number + 1
        return number

    def undo_last(self, tag: int) -> None:
        """Undo the last `next` of a tag, because UCX has refused to send or receive that message. The next
        message of the tag then gets the same number."""
        self._next[tag] -= 1


class LinkOffers:
    """The offers that one connected peer has made to this process, and the numbers of the messages exchanged
    with the peer.

    An offer lets this process write a message directly into the memory of one of the peer's receives. A new
    connection to the peer starts with a new object.

    Args:
        ring: the peer's ring buffer of offers, mapped into this process.
        own_bits: the transport's own id as it is stored in the tags of messages.

    Attributes:
        sent, received: counters of the messages posted so far, including sends that are held back and
            receives that have not ended.
        num_in_vain: the number of messages in a row that were sent without an offer, although one was
            possible. `OneCopySender` uses the number to decide whether to hold messages back to wait for
            offers.
    """

    __slots__ = (
        "_cursor",
        "_held",
        "_latest_number",
        "_own_bits",
        "_ring",
        "num_in_vain",
        "received",
        "sent",
    )

    def __init__(self, ring: np.ndarray, own_bits: int):
        self._ring, self._own_bits = ring.data, own_bits
        self._cursor = 0
        self._held: dict[tuple[int, int], Offer] = {}
        self._latest_number: dict[int, int] = {}  # latest number by tag: earlier offers are dropped
        self.sent, self.received = MessageNumbers(), MessageNumbers()
        self.num_in_vain = 0

    def take(self, tag: int, number: int) -> Offer | None:
        """Remove and return the peer's offer of memory for the message with a given tag and number. Return
        None if the peer has not made that offer yet."""
        key = (tag, number)
        self._latest_number[tag] = number
        if key not in self._held:
            self._read()
        return self._held.pop(key, None)

    def _read(self) -> None:
        """Read the offers of memory that the peer has written to its ring buffer since the last call, and
        keep those that are meant for this process."""
        ring = self._ring
        (count,) = _COUNT.unpack_from(ring, 0)
        for serial in range(max(self._cursor, count - _ROWS) + 1, count + 1):
            start = _row_at(serial)
            row = bytes(ring[start : start + _ROW.size + _CHECK.size])
            found, tag, number, size_bytes, descriptor, key = _ROW.unpack_from(row)
            if found != serial or _CHECK.unpack_from(row, _ROW.size)[0] != zlib.crc32(row[: _ROW.size]):
                continue
            sender_bits, tag = tag & _SENDER_MASK, tag & ~_SENDER_MASK
            if sender_bits != self._own_bits or number < self._latest_number.get(tag, 0):
                continue
            self._held[tag, number] = Offer(serial, BlockTicket(descriptor, key, size_bytes))
            if len(self._held) > MOST_HELD:
                del self._held[next(iter(self._held))]
        self._cursor = count


def _row_at(serial: int) -> int:
    return _FIRST_ROW + serial % _ROWS * _ROW_BYTES
