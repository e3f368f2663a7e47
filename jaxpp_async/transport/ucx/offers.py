"""Offer receives to senders of this host before they send: the CTS_AHEAD of `one_copy.py`.

A receiver writes an offer for each receive that a peer may write itself into a ring in its own mailbox; the
peer reads the ring when it sends, and again for as long as it holds a message back for its offer. Nobody is
woken: an offer that comes too late or is overwritten is never used. An offer is for one message only: both
    sides number the messages of a
tag, which match in order whatever their sizes, so an offer and its message have the same number, and an offer
for a message that is past is dropped. So is a row that is torn (written and read at once).
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
"""How many offers a link remembers until their messages are sent. With more, the oldest are forgotten."""

_COUNT = struct.Struct("<Q")
_ROW = struct.Struct("<QQQQi16s")  # serial, tag on the wire, number, then a `BlockTicket` with its size first
_CHECK = struct.Struct("<I")
_FIRST_ROW, _ROW_BYTES = 64, 64
_ROWS = (RING_BYTES - _FIRST_ROW) // _ROW_BYTES
_SENDER_MASK = ((1 << SENDER_BITS) - 1) << SENDER_SHIFT
_CHANNEL_MASK = ((1 << CHANNEL_BITS) - 1) << SEQUENCE_BITS
_UNNUMBERED = frozenset(channel << SEQUENCE_BITS for channel in (HOST_CHANNEL, COPY_CHANNEL))


class Offer(NamedTuple):
    """A receive that waits for its message.

    Args:
        serial: unlike that of any other offer of the receiver.
        ticket: of the block to write to.
    """

    serial: int
    ticket: BlockTicket


class OfferRing:
    """The offers of one transport to all peers on this host, the latest `_ROWS` of them.

    Args:
        ring: `RING_BYTES` of memory that peers can read.
    """

    def __init__(self, ring: np.ndarray):
        self._memory = ring.data
        self._count = 0

    def put(self, wire_tag: int, number: int, ticket: BlockTicket) -> int:
        """Offer a block to the sender whose id is in the tag.

        Args:
            wire_tag: of the receive, with the sender's id.
            number: of the message under its tag (`MessageNumbers`).
            ticket: of the block.

        Returns:
            The offer's serial, from 1.
        """
        serial = self._count + 1
        row = _ROW.pack(serial, wire_tag, number, ticket.size_bytes, ticket.descriptor, ticket.key)
        start = _row_at(serial)
        self._memory[start : start + _ROW.size + _CHECK.size] = row + _CHECK.pack(zlib.crc32(row))
        self._count = serial
        _COUNT.pack_into(self._memory, 0, serial)
        return serial


class MessageNumbers:
    """Counts the messages of each tag in one direction, from 0. Both sides count alike: see above."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def next(self, tag: int) -> int | None:
        """Count a message. Returns: its number; None for a message of the host channel or of replicas.

        Receives of these two are never offered, so no sender waits for an offer of theirs. And each tag of
        the host channel is used once, and would be remembered for ever.
        """
        if tag & _CHANNEL_MASK in _UNNUMBERED:
            return None
        number = self._next.get(tag, 0)
        self._next[tag] = number + 1
        return number

    def give_back(self, tag: int) -> None:
        """Count the last message of a tag no longer: UCX has refused it."""
        self._next[tag] -= 1


class LinkOffers:
    """The offers that one link has got, and the messages that it has counted; a new connection starts anew.

    Args:
        ring: the peer's, as it can be read here.
        sender_bits: this side's, as in tags on the wire.

    Attributes:
        sent, received: the messages so far, also held ones and receives that wait.
        num_in_vain: how many messages in a row were held back in vain or not at all; see `OneCopySender`.
    """

    __slots__ = ("_asked", "_cursor", "_held", "_ring", "_sender_bits", "num_in_vain", "received", "sent")

    def __init__(self, ring: np.ndarray, sender_bits: int):
        self._ring, self._sender_bits = ring.data, sender_bits
        self._cursor = 0
        self._held: dict[tuple[int, int], Offer] = {}
        self._asked: dict[int, int] = {}  # the latest number by tag: offers for earlier messages are past
        self.sent, self.received = MessageNumbers(), MessageNumbers()
        self.num_in_vain = 0

    def take(self, tag: int, number: int) -> Offer | None:
        """Take the offer for the `number`-th message of a tag, if it is here; it is never returned again."""
        key = (tag, number)
        self._asked[tag] = number
        if key not in self._held:
            self._read()
        return self._held.pop(key, None)

    def _read(self) -> None:
        """Remember the offers for this side that were written since the last time."""
        ring = self._ring
        (count,) = _COUNT.unpack_from(ring, 0)
        for serial in range(max(self._cursor, count - _ROWS) + 1, count + 1):
            start = _row_at(serial)
            row = bytes(ring[start : start + _ROW.size + _CHECK.size])
            found, tag, number, size_bytes, descriptor, key = _ROW.unpack_from(row)
            if found != serial or _CHECK.unpack_from(row, _ROW.size)[0] != zlib.crc32(row[: _ROW.size]):
                continue
            sender_bits, tag = tag & _SENDER_MASK, tag & ~_SENDER_MASK
            if sender_bits != self._sender_bits or number < self._asked.get(tag, 0):
                continue
            self._held[tag, number] = Offer(serial, BlockTicket(descriptor, key, size_bytes))
            if len(self._held) > MOST_HELD:
                del self._held[next(iter(self._held))]
        self._cursor = count


def _row_at(serial: int) -> int:
    return _FIRST_ROW + serial % _ROWS * _ROW_BYTES
