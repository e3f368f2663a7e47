"""direct: large messages between processes of one host, as one copy: the sender writes where the receiver waits.

UCX copies such a message twice, into a queue in shared memory and out of it. Here UCX only carries what is said:

    receiver  OFFER     when it posts a receive: the block to write to, in a ring that the sender reads (`offers.py`)
    sender    (writes)  where it holds the offer for its message
    sender    EMPTY     in place of the message, under its tag; the block says that it is written

A sender who holds no offer, for the receive is not posted yet or has no such block, holds the message back if it is in
a hurry (`Transport.hurry`): for 1 ms at most it looks for the offer in each pass of its loop, and what is sent under
the tag meanwhile waits behind. Where that was in vain a few times it is tried now and then only. After that, or at
once, the message goes like any other; and where it is so large that it is written in pieces, and waiting for an answer
costs little beside:

    sender    HEADER    in place of the message, under its tag: how large it is, and a serial number
    receiver  ANSWER    the block to write to, or "as a message, please", or "that is not the size"
    sender    (writes)  a piece at a time, so that the event loop is never held up for long
    sender    END       it is written, or: the block cannot be reached, a message follows

So messages match in the order of all others, and each side has one operation of UCX's open at any time, which fails as
all do when the peer dies or is aborted. The sender writes only between two passes of its own loop or where it posts,
and `drop` ends it at once; a receiver whose transfer fails puts other memory in the place of what the sender might
still write to, and so does one that was offered in vain.

So that no HEADER comes to who cannot tell it, a sender announces a message by one only to peers whose boards say that
they see its own; the announcement stands on its board too, for a receive that was too short for the HEADER.

It never writes without an OFFER or an ANSWER, never uses a block whose key it has not read, and never writes past a
block's end.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import NamedTuple, Protocol

from jaxpp_async.transport.base import EPOCH_SHIFT, SEQUENCE_BITS
from jaxpp_async.transport.buffers import Memory
from jaxpp_async.transport.links import Link, Transfer
from jaxpp_async.transport.offers import Offer, OfferRing
from jaxpp_async.transport.shared import BlockTicket, Board, Neighbour, SharedBlock
from jaxpp_async.transport.ucp import STATUS_CANCELED, STATUS_OK, STATUS_TRUNCATED

DIRECT_BYTES = 1 << 20
"""Messages from this size on, where the receive was offered. With four in flight 1 MiB is a tenth faster than by UCX, 4
MiB 1.3 times, and twice where other work has the cores now and then: one copy needs one of the two sides awake."""

ANSWER_BYTES = 4 << 20
"""And from this size on where it was not; what is larger than a piece is never offered. Below it UCX's second copy, by
another core, takes less time than three things said to a process that may be asleep. At 16 MiB 1.6 times as fast as
UCX, at 4 MiB even with it."""

_PATIENCE_S, _MOST_IN_VAIN, _TRY_AGAIN = 1e-3, 3, 32
"""How long a sender in a hurry waits for an offer, how often in a row in vain, and which message after that waits all
the same. A receiver who posts again where a message came is a moment later than a sender who sends again where one
went: then each message would come too early. With 0.2 ms up to every fifth of 1 MiB did."""

HEADER_BYTES = 61
"""Unlike the size of any likely array, though it would be told from one by its key."""

_PIECE_BYTES = 4 << 20
"""Copied at a time, in 0.3 to 0.4 ms. With 1 MiB the loop's passes between took a tenth as long as the copying."""

_HEADER = struct.Struct("<16sQQ29x")  # the board's key, serial, size
_ANSWER = struct.Struct("<Bi16sQ")  # verdict, then a `BlockTicket`
_END = struct.Struct("<B")
_REFUSED, _AS_MESSAGE, _WRITE = 0, 1, 2
_WRITTEN, _MESSAGE_FOLLOWS = 1, 2

_ANSWER_CHANNEL, _DATA_CHANNEL = 254, 255
_EMPTY = Memory(0, 0, None)
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


class _Copy(NamedTuple):
    transfer: Transfer
    target: int
    data_tag: int


class Direct:
    """One transport's direct messages.

    Args:
        carrier: the transport. loop: on which copies are made. own_bits: this side's id, as peers' `sender_bits`.

    Attributes:
        exposed: receives into whose memory a peer might still write, for want of memory to put there. While there are
            any, this process may not go on.
    """

    def __init__(self, carrier: Carrier, loop: asyncio.AbstractEventLoop, own_bits: int):
        self._carrier, self._loop, self._own_bits = carrier, loop, own_bits
        self.exposed: list[Transfer] = []
        self._serials = itertools.count(1)
        self._copies: deque[_Copy] = deque()
        self._written_bytes = 0  # of the first of them
        self._num_written = 0  # by peers, at present
        self._scheduled = False
        self._ended: deque[Transfer] = deque()
        self._waiting: dict[Transfer, float] = {}  # for offers, until when
        self._in_vain = 0  # waits, and messages that did not wait, in a row
        self._looking = False
        self._ring: OfferRing | None = None
        try:
            self._board: Board | None = Board()
            self._ring = OfferRing(self._board.ring)
        except (OSError, AttributeError):  # not Linux, or nothing to be had: every message goes through UCX
            self._board = None

    @property
    def ticket(self) -> bytes:
        """For peers, to find out whether they are on this host; empty if that does not help them."""
        return self._board.ticket if self._board is not None else b""

    @property
    def busy(self) -> bool:
        """Whether offers are looked for, or something is being copied, by this side or by a peer. That takes far longer
        than looking for messages may, and looking takes memory bandwidth from whoever copies."""
        return bool(self._copies) or self.holds_back or self._num_written > 0

    @property
    def holds_back(self) -> bool:
        """Whether messages wait for offers: what is sent under their tags, however small, has to go behind them."""
        return bool(self._waiting)

    def close(self) -> None:
        """Give back what peers could read. Every link has been dropped."""
        if self._board is not None:
            self._board.close()

    def meet(self, ticket: bytes) -> Neighbour | None:
        """The process of a peer's ticket, if it is on this host. It is told that it may announce messages."""
        neighbour = Neighbour.of(ticket) if self._board is not None else None
        if self._board is not None and neighbour is not None:
            self._board.see(neighbour)
        return neighbour

    # ------------------------------------------------------------ sending

    def send(self, transfer: Transfer, hurried: bool) -> bool:
        """Send a large message this way, or any that waiting ones of its tag are ahead of.

        Args:
            hurried: there is nothing to do but wait, so that it may be waited for an offer for a moment.

        Returns:
            False: not possible now; nothing has been sent.
        """
        if self._waiting and any(w.tag == transfer.tag and w.link is transfer.link for w in self._waiting):
            self._waiting[transfer] = monotonic() + _PATIENCE_S
            return True
        if not _may_be_written(transfer):
            return False
        if self._send_offered(transfer) or self._announce(transfer):
            return True
        if not _may_be_offered(transfer):
            return False
        if not hurried or (self._in_vain > _MOST_IN_VAIN and self._in_vain % _TRY_AGAIN):
            self._in_vain += 1
            return False
        self._waiting[transfer] = monotonic() + _PATIENCE_S
        self._look_soon()
        return True

    def _send_offered(self, transfer: Transfer) -> bool:
        number, offers = transfer.number, transfer.link.offers
        if number is None or offers is None or not _may_be_offered(transfer):
            return False
        offer = offers.take(transfer.tag, number)
        if offer is None or offer.ticket.size_bytes != transfer.memory.size_bytes or not self._fill(transfer, offer):
            return False
        self._in_vain = 0
        return True

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Look for offers, and send what has waited for long enough."""
        self._looking, now_s = False, monotonic()
        ahead: set[tuple[int, int]] = set()  # link and tag of what goes on waiting
        for transfer, until_s in list(self._waiting.items()):
            key = (id(transfer.link), transfer.tag)
            # What is told to one may drop others.
            if transfer in self._waiting and (key in ahead or not self._leaves(transfer, now_s < until_s)):
                ahead.add(key)
        if self._waiting:
            os.sched_yield()  # to the receiver, which may be on this core
            self._look_soon()

    def _leaves(self, transfer: Transfer, may_wait: bool) -> bool:
        """Send what waits, if it is time. Returns: whether it was."""
        if transfer.link.failure is not None:
            del self._waiting[transfer]
            self._carrier.finish(transfer, STATUS_CANCELED, 0)
            return True
        is_large = _may_be_written(transfer)
        sent = is_large and self._send_offered(transfer)
        if not sent and may_wait and is_large and _may_be_offered(transfer):
            return False
        del self._waiting[transfer]
        if not sent and not (is_large and self._announce(transfer)):
            self._in_vain += is_large
            self._carrier.post_own_send(transfer.link, transfer.memory, transfer.tag, transfer)
        return True

    def _fill(self, transfer: Transfer, offer: Offer) -> bool:
        """Write to where a receive waits. False: it cannot be reached, or the link has failed; nothing was sent."""
        memory, link, (serial, ticket) = transfer.memory, transfer.link, offer
        assert link.neighbour is not None
        try:
            placed = link.neighbour.place(ticket)
        except (OSError, ValueError):
            return False
        ctypes.memmove(placed.address, memory.address, memory.size_bytes)
        placed.mark.value = serial
        if not self._carrier.post_own_send(link, _EMPTY, transfer.tag, None):
            return False
        # Told in the loop's next pass: whoever awaits one send after another would wait for no offer otherwise.
        self._ended.append(transfer)
        if len(self._ended) == 1:
            self._loop.call_soon(self._tell_ended)
        return True

    def _tell_ended(self) -> None:
        ended, self._ended = self._ended, deque()
        for transfer in ended:
            self._carrier.finish(transfer, STATUS_OK, 0)
            if transfer.link.neighbour is not None:
                transfer.link.neighbour.forget_freed()

    def _announce(self, transfer: Transfer) -> bool:
        """Send a header, if the message is large enough. False: not possible now; nothing has been sent."""
        memory, link = transfer.memory, transfer.link
        if self._board is None or link.neighbour is None or memory.size_bytes < ANSWER_BYTES:
            return False
        if not link.neighbour.sees(self._board):
            return False
        serial = next(self._serials)
        row = self._board.announce(serial, transfer.tag | link.sender_bits, memory.size_bytes)
        if row is None:
            return False
        answer = _bytes(_ANSWER.size)
        header = _bytes(HEADER_BYTES, _HEADER.pack(self._board.key, serial, memory.size_bytes))
        if not self._carrier.post_own_send(link, header, transfer.tag, None):
            self._board.withdraw(row)
            return False
        tag = _own_tag(transfer.tag, _ANSWER_CHANNEL, serial)
        self._carrier.post_own_recv(link, answer, tag, partial(self._hear_answer, transfer, row, serial, answer))
        return True

    def _hear_answer(self, transfer: Transfer, row: int, serial: int, answer: Memory, status: int, length: int) -> None:
        assert self._board is not None
        self._board.withdraw(row)
        if status != STATUS_OK or transfer.link.failure is not None:
            self._carrier.finish(transfer, status or STATUS_CANCELED, 0)
            return
        verdict, descriptor, key, size_bytes = _ANSWER.unpack(answer.owner)
        is_sound = length == _ANSWER.size and (verdict != _WRITE or size_bytes == transfer.memory.size_bytes)
        data_tag = _own_tag(transfer.tag, _DATA_CHANNEL, serial)
        if not is_sound or verdict not in (_REFUSED, _AS_MESSAGE, _WRITE):
            self._carrier.finish(transfer, STATUS_TRUNCATED, 0)
        elif verdict == _REFUSED:
            self._carrier.finish(transfer, STATUS_OK, 0)  # UCX does not tell a sender of wrong sizes either
        elif verdict == _AS_MESSAGE:
            self._carrier.post_own_send(transfer.link, transfer.memory, data_tag, transfer)
        else:
            self._begin(transfer, data_tag, BlockTicket(descriptor, key, size_bytes))

    def _begin(self, transfer: Transfer, data_tag: int, ticket: BlockTicket) -> None:
        assert transfer.link.neighbour is not None
        try:
            target = transfer.link.neighbour.place(ticket).address
        except (OSError, ValueError):
            self._carrier.post_own_send(transfer.link, _bytes(_END.size, _END.pack(_MESSAGE_FOLLOWS)), data_tag, None)
            self._carrier.post_own_send(transfer.link, transfer.memory, data_tag, transfer)
            return
        self._copies.append(_Copy(transfer, target, data_tag))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._copy_piece)

    def _copy_piece(self) -> None:
        self._scheduled = False
        if not self._copies:
            return
        transfer, target, data_tag = self._copies[0]
        if transfer.link.failure is not None:
            self._end_first(STATUS_CANCELED)
        else:
            memory, start = transfer.memory, self._written_bytes
            size_bytes = min(_PIECE_BYTES, memory.size_bytes - start)
            ctypes.memmove(target + start, memory.address + start, size_bytes)
            self._written_bytes = start + size_bytes
            if self._written_bytes == memory.size_bytes:
                # Told first: whoever waits posts his next send before the transport looks for messages.
                self._end_first(STATUS_OK)
                end = _bytes(_END.size, _END.pack(_WRITTEN))
                self._carrier.post_own_send(transfer.link, end, data_tag, None)
        if self._copies and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._copy_piece)

    def _end_first(self, status: int) -> None:
        transfer = self._copies.popleft().transfer
        self._written_bytes = 0
        self._carrier.finish(transfer, status, 0)
        if transfer.link.neighbour is not None:
            transfer.link.neighbour.forget_freed()

    def drop(self, link: Link) -> None:
        """Copy nothing more for a link: its buffers are their owners' again when this returns, and no block of the
        peer's is kept."""
        first = self._copies[0] if self._copies else None
        dropped = [copy for copy in self._copies if copy.transfer.link is link]
        waiting = [transfer for transfer in self._waiting if transfer.link is link]
        self._waiting = {transfer: until for transfer, until in self._waiting.items() if transfer.link is not link}
        self._copies = deque(copy for copy in self._copies if copy.transfer.link is not link)
        if first in dropped:
            self._written_bytes = 0
        for transfer in [copy.transfer for copy in dropped] + waiting:
            self._carrier.finish(transfer, STATUS_CANCELED, 0)
        self._tell_ended()
        if self._board is not None and link.neighbour is not None:
            self._board.unsee(link.neighbour)
            link.neighbour.forget()

    # ------------------------------------------------------------ receiving

    def invite(self, transfer: Transfer) -> None:
        """Offer a receive that was posted, if it has a number and a block."""
        number, block = transfer.number, transfer.memory.owner
        if self._ring is None or not isinstance(block, SharedBlock) or block.ticket is None:
            return
        if number is None or not _may_be_offered(transfer):
            return
        block.mark.value = 0
        transfer.offer = self._ring.put(transfer.tag | transfer.link.sender_bits, number, block.ticket)

    def heard(self, transfer: Transfer, status: int, length: int) -> tuple[int, int] | None:
        """What a receive has got that is not what it expected, or looks like a header.

        Returns:
            Status and length as they are to be taken, or None: the receive goes on.
        """
        serial, transfer.offer = transfer.offer, 0
        header = self._header(transfer, status) if length == HEADER_BYTES else None
        if header is not None:
            announced, length = header
            if length == transfer.size_bytes:
                self._accept(transfer, announced)
                return None
            self._refuse(transfer, announced)
        elif serial and (status, length) == (STATUS_OK, 0) and transfer.memory.owner.mark.value == serial:
            return STATUS_OK, transfer.size_bytes
        if serial and (status, length) != (STATUS_OK, transfer.size_bytes):
            self._retire(transfer)
        return status, length

    def _header(self, transfer: Transfer, status: int) -> tuple[int, int] | None:
        """Serial number and size of the message that it announces, if what a receive got is a header.

        Args:
            transfer: the receive, which got `HEADER_BYTES`. status: how; truncated, they do not lie in its memory.
        """
        neighbour, memory = transfer.link.neighbour, transfer.memory
        if neighbour is None or status not in (STATUS_OK, STATUS_TRUNCATED):
            return None
        if status == STATUS_OK and not memory.on_device:
            key, serial, size_bytes = _HEADER.unpack(ctypes.string_at(memory.address, HEADER_BYTES))
            return (serial, size_bytes) if key == neighbour.key else None
        return next(iter(neighbour.announced(transfer.tag | self._own_bits)), None)

    def _accept(self, transfer: Transfer, serial: int) -> None:
        """Say where to write the message that a header announced; it has the right size."""
        memory, data_tag = transfer.memory, _own_tag(transfer.tag, _DATA_CHANNEL, serial)
        block = memory.owner
        ticket = block.ticket if isinstance(block, SharedBlock) else None
        if ticket is None:
            self._carrier.post_own_recv(transfer.link, memory, data_tag, transfer)
            self._answer(transfer, serial, _ANSWER.pack(_AS_MESSAGE, 0, bytes(16), 0))
            return
        end = _bytes(_END.size)
        self._num_written += 1
        self._carrier.post_own_recv(transfer.link, end, data_tag, partial(self._hear_end, transfer, data_tag, end))
        self._answer(transfer, serial, _ANSWER.pack(_WRITE, *ticket))

    def _refuse(self, transfer: Transfer, serial: int) -> None:
        """Let the sender of a message of another size go."""
        self._answer(transfer, serial, _ANSWER.pack(_REFUSED, 0, bytes(16), 0))

    def _answer(self, transfer: Transfer, serial: int, answer: bytes) -> None:
        assert transfer.link.neighbour is not None
        transfer.link.neighbour.note_answered(serial)
        tag = _own_tag(transfer.tag, _ANSWER_CHANNEL, serial)
        self._carrier.post_own_send(transfer.link, _bytes(len(answer), answer), tag, None)

    def _hear_end(self, transfer: Transfer, data_tag: int, end: Memory, status: int, length: int) -> None:
        memory = transfer.memory
        self._num_written -= 1
        (verdict,) = _END.unpack(end.owner)
        if status == STATUS_OK and (length != _END.size or verdict not in (_WRITTEN, _MESSAGE_FOLLOWS)):
            status = STATUS_TRUNCATED
        if status != STATUS_OK:
            self._retire(transfer)
            self._carrier.finish(transfer, status, 0)
        elif verdict == _WRITTEN:
            self._carrier.finish(transfer, STATUS_OK, memory.size_bytes)
        else:
            self._carrier.post_own_recv(transfer.link, memory, data_tag, transfer)

    def _retire(self, transfer: Transfer) -> None:
        """Let a peer's late writes go to memory that nobody reads."""
        try:
            transfer.memory.owner.retire()
        except OSError:
            self.exposed.append(transfer)


def _may_be_written(transfer: Transfer) -> bool:
    return transfer.memory.size_bytes >= DIRECT_BYTES and not transfer.memory.on_device


def _may_be_offered(transfer: Transfer) -> bool:
    return transfer.number is not None and DIRECT_BYTES <= transfer.memory.size_bytes <= _PIECE_BYTES


def _own_tag(tag: int, channel: int, serial: int) -> int:
    return tag >> EPOCH_SHIFT << EPOCH_SHIFT | channel << SEQUENCE_BITS | serial % _SEQUENCES


def _bytes(size_bytes: int, content: bytes = b"") -> Memory:
    owner = ctypes.create_string_buffer(content, size_bytes)
    return Memory(ctypes.addressof(owner), size_bytes, owner)
