"""direct: large messages between processes of one host, as one copy: the sender writes where the receiver waits.

UCX copies such a message twice, into a queue in shared memory and out of it. Here UCX only carries what is said:

    receiver  OFFER     when it posts a receive: the block to write to, in a ring that the sender reads (`offers.py`)
    sender    (writes)  where it holds the offer for its message
    sender    EMPTY     in place of the message, under its tag; the block says that it is written

A sender may hold no offer, for the receive is not posted yet or has no such block. Where the message is so large that
it is written in pieces, and waiting for an answer costs little beside, it asks:

    sender    HEADER    in place of the message, under its tag: how large it is, and a serial number
    receiver  ANSWER    the block to write to, or "as a message, please", or "that is not the size"
    sender    (writes)  a piece at a time, so that the event loop is never held up for long
    sender    END       it is written, or: the block cannot be reached, a message follows

It holds a smaller one back if it is in a hurry (`Transport.hurry`): for 1 ms at most it looks for the offer in each
pass of its loop, and what is sent under the tag meanwhile waits behind. Where that was in vain a few times, it is done
now and then only. After that, or at once, such a message goes like any other.

Messages whose offers are there are written where they are posted, up to a piece's size in one pass of the loop; any
more wait for the next passes in the same way, and what is sent under their tags behind them.

So messages match in the order of all others, and each side has one operation of UCX's open at any time, which fails as
all do when the peer dies or is aborted. The sender writes only between two passes of its own loop or where it posts,
and `drop` ends it at once; a receiver whose transfer fails puts other memory in the place of what the sender might
still write to, and so does one that was offered in vain.

So that no HEADER comes to who cannot tell it, a sender announces a message by one only to peers whose boards say that
they see its own; the announcement stands on its board too, for a receive that was too short for the HEADER.

The two sides are `direct_send.py` and `direct_receive.py`, with no state in common; what they say stands in
`direct_words.py`. Here is what belongs to both: the board, and neighbours. It never sends, copies or receives itself.

direct_words: what the two sides of `direct.py` say to each other, and which messages may be direct. No state.

direct_receive: receives offered to senders of this host, or told to them when they ask; the receiver's side of
`direct.py`. Never waits.

It never lets a peer write to memory that its receive has given back: other memory is put in its place first.

direct_send: large messages in, written where their receives wait; the sender's side of `direct.py`. On one loop.

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

from jaxpp_async.transport.base import EPOCH_SHIFT, SEQUENCE_BITS, Memory
from jaxpp_async.transport.shared_memory import BlockTicket, LocalPeer, Mailbox, MappedBlock, SharedBlock
from jaxpp_async.transport.ucx.links import UcxLink, UcxTransfer
from jaxpp_async.transport.ucx.offers import Offer, OfferRing
from jaxpp_async.transport.ucx.tag_api import STATUS_CANCELED, STATUS_OK, STATUS_TRUNCATED


class OneCopyMessages:
    """One transport's direct messages.

    Args:
        carrier: the transport. loop: on which copies are made. own_bits: this side's id, as peers' `sender_bits`.

    Attributes:
        sender, receiver: its two sides.
    """

    def __init__(self, carrier: Carrier, loop: asyncio.AbstractEventLoop, own_bits: int):
        try:
            self._mailbox: Mailbox | None = Mailbox()
        except (OSError, AttributeError):  # not Linux, or nothing to be had: every message goes through UCX
            self._mailbox = None
        self.sender = Sender(carrier, loop, self._mailbox)
        self.receiver = Receiver(
            carrier, OfferRing(self._mailbox.ring) if self._mailbox is not None else None, own_bits
        )

    @property
    def ticket(self) -> bytes:
        """For peers, to find out whether they are on this host; empty if that does not help them."""
        return self._mailbox.ticket if self._mailbox is not None else b""

    @property
    def busy(self) -> bool:
        """Whether offers are looked for, or something is being copied, by this side or by a peer. That takes far longer
        than looking for messages may, and looking takes memory bandwidth from whoever copies."""
        return self.sender.busy or self.receiver.num_written > 0

    def meet(self, ticket: bytes) -> LocalPeer | None:
        """The process of a peer's ticket, if it is on this host. It is told that it may announce messages."""
        local_peer = LocalPeer.of(ticket) if self._mailbox is not None else None
        if self._mailbox is not None and local_peer is not None:
            self._mailbox.see(local_peer)
        return local_peer

    def drop(self, link: UcxLink) -> None:
        """Copy nothing more for a link: its buffers are their owners' again when this returns, and no block of the
        peer's is kept."""
        self.sender.drop(link)
        if self._mailbox is not None and link.local_peer is not None:
            self._mailbox.unsee(link.local_peer)
            link.local_peer.forget()

    def close(self) -> None:
        """Give back what peers could read. Every link has been dropped."""
        if self._mailbox is not None:
            self._mailbox.close()


# ---------------------------------------------------------------- direct words

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

    def post_own_send(self, link: UcxLink, memory: Memory, tag: int, transfer: UcxTransfer | None) -> bool:
        """Send; tells `transfer` when it has ended, or nobody. False: it was refused, which is told too."""
        ...

    def post_own_recv(
        self, link: UcxLink, memory: Memory, tag: int, then: Callable[[int, int], None] | UcxTransfer
    ) -> None:
        """Receive; calls `then` with status and length, or tells the transfer."""
        ...

    def finish(self, transfer: UcxTransfer, status: int, length: int) -> None:
        """Tell how a transfer has ended; nothing if that was told before."""
        ...


def may_be_written(transfer: UcxTransfer) -> bool:
    """Whether a message may be direct at all."""
    return transfer.memory.size_bytes >= DIRECT_BYTES and not transfer.memory.on_device


def may_be_offered(transfer: UcxTransfer) -> bool:
    """Whether a receive of this size may be offered."""
    return transfer.number is not None and DIRECT_BYTES <= transfer.memory.size_bytes <= PIECE_BYTES


def own_tag(tag: int, channel: int, serial: int) -> int:
    """For what is said about an announced message, in the epoch of its tag."""
    return tag >> EPOCH_SHIFT << EPOCH_SHIFT | channel << SEQUENCE_BITS | serial % _SEQUENCES


def memory_with(size_bytes: int, content: bytes = b"") -> Memory:
    """Memory that holds `content`, to be sent, or has room for what comes."""
    owner = ctypes.create_string_buffer(content, size_bytes)
    return Memory(ctypes.addressof(owner), size_bytes, owner)


# ---------------------------------------------------------------- direct receive


class Receiver:
    """One transport's direct messages from others.

    Args:
        carrier: the transport. ring: where receives are offered, if there is one. own_bits: this side's id, as peers'
            `sender_bits`.

    Attributes:
        num_written: receives that peers write to at present.
        exposed: receives into whose memory a peer might still write, for want of memory to put there. While there are
            any, this process may not go on.
    """

    def __init__(self, carrier: Carrier, ring: OfferRing | None, own_bits: int):
        self._carrier, self._ring, self._own_bits = carrier, ring, own_bits
        self.num_written = 0
        self.exposed: list[UcxTransfer] = []

    @staticmethod
    def prepare(memory: Memory) -> None:
        """See to it that a receive's block can be shared, before UCX knows its memory: what a peer might still write
        to was replaced when a receive failed, and an abort has no time to make more of it."""
        if isinstance(memory.owner, SharedBlock):
            memory.owner.share_again()

    def invite(self, transfer: UcxTransfer) -> None:
        """Offer a receive that was posted, if it has a number and a block."""
        number, block = transfer.number, transfer.memory.owner
        if self._ring is None or not isinstance(block, SharedBlock) or block.ticket is None:
            return
        if number is None or not may_be_offered(transfer):
            return
        block.mark.value = 0
        transfer.offer = self._ring.put(transfer.tag | transfer.link.sender_bits, number, block.ticket)

    def record_heartbeat(self, transfer: UcxTransfer, status: int, length: int) -> tuple[int, int] | None:
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

    def _header(self, transfer: UcxTransfer, status: int) -> tuple[int, int] | None:
        """Serial number and size of the message that it announces, if what a receive got is a header.

        Args:
            transfer: the receive, which got as much as a header has. status: truncated, it does not lie in its memory.
        """
        local_peer, memory = transfer.link.local_peer, transfer.memory
        if local_peer is None or status not in (STATUS_OK, STATUS_TRUNCATED):
            return None
        if status == STATUS_OK and not memory.on_device:
            key, serial, size_bytes = HEADER.unpack(ctypes.string_at(memory.address, HEADER_BYTES))
            return (serial, size_bytes) if key == local_peer.key else None
        return next(iter(local_peer.announced(transfer.tag | self._own_bits)), None)

    def _accept(self, transfer: UcxTransfer, serial: int) -> None:
        """Say where to write the message that a header announced; it has the right size."""
        memory, data_tag = transfer.memory, own_tag(transfer.tag, DATA_CHANNEL, serial)
        block = memory.owner
        ticket = block.ticket if isinstance(block, SharedBlock) else None
        if ticket is None:
            self._carrier.post_own_recv(transfer.link, memory, data_tag, transfer)
            self._answer(transfer, serial, ANSWER.pack(AS_MESSAGE, 0, bytes(16), 0))
            return
        end = memory_with(END.size)
        self.num_written += 1
        self._carrier.post_own_recv(
            transfer.link, end, data_tag, partial(self._hear_end, transfer, data_tag, end)
        )
        self._answer(transfer, serial, ANSWER.pack(WRITE, *ticket))

    def _refuse(self, transfer: UcxTransfer, serial: int) -> None:
        """Let the sender of a message of another size go."""
        self._answer(transfer, serial, ANSWER.pack(REFUSED, 0, bytes(16), 0))

    def _answer(self, transfer: UcxTransfer, serial: int, answer: bytes) -> None:
        assert transfer.link.local_peer is not None
        transfer.link.local_peer.note_answered(serial)
        tag = own_tag(transfer.tag, ANSWER_CHANNEL, serial)
        self._carrier.post_own_send(transfer.link, memory_with(len(answer), answer), tag, None)

    def _hear_end(self, transfer: UcxTransfer, data_tag: int, end: Memory, status: int, length: int) -> None:
        memory = transfer.memory
        self.num_written -= 1
        (verdict,) = END.unpack(end.owner)
        if status == STATUS_OK and (length != END.size or verdict not in (WRITTEN, MESSAGE_FOLLOWS)):
            status = STATUS_TRUNCATED
        if status != STATUS_OK:
            self._retire(transfer)
            self._carrier.finish(transfer, status, 0)
        elif verdict == WRITTEN:
            self._carrier.finish(transfer, STATUS_OK, memory.size_bytes)
        else:
            self._carrier.post_own_recv(transfer.link, memory, data_tag, transfer)

    def _retire(self, transfer: UcxTransfer) -> None:
        """Let a peer's late writes go to memory that nobody reads."""
        try:
            transfer.memory.owner.retire()
        except OSError:
            self.exposed.append(transfer)


# ---------------------------------------------------------------- direct send

_PATIENCE_S, _MOST_IN_VAIN, _TRY_AGAIN = 1e-3, 3, 32
"""How long a sender in a hurry waits for an offer, how often in a row in vain, and which message after that waits all
the same. A receiver who posts again where a message came is a moment later than a sender who sends again where one
went: then each message would come too early. With 0.2 ms up to every fifth of 1 MiB did."""


_SWEEP_S = 1.0
"""How often a sender, however idle, looks whether blocks that it has mapped are still their owners'."""


class _Wait(NamedTuple):
    """Of a message that is held back: until when for its offer, or for its turn to be written where that has come."""

    until_s: float
    offer: Offer | None = None


class _Copy(NamedTuple):
    transfer: UcxTransfer
    target: MappedBlock  # held: it stays mapped, also when its owner has let go of it meanwhile
    data_tag: int


class Sender:
    """One transport's direct messages to others.

    Args:
        carrier: the transport. loop: on which copies are made. board: where messages are announced, if there is one.
    """

    def __init__(self, carrier: Carrier, loop: asyncio.AbstractEventLoop, mailbox: Mailbox | None):
        self._carrier, self._loop, self._mailbox = carrier, loop, mailbox
        self._serials = itertools.count(1)
        self._copies: deque[_Copy] = deque()
        self._written_bytes = 0  # of the first of them
        self._scheduled = False
        self._ended: deque[UcxTransfer] = deque()
        self._waiting: dict[UcxTransfer, _Wait] = {}
        self._filled_bytes = 0  # in this pass of the loop
        self._looking = False
        self._mapped: set[LocalPeer] = set()  # whose blocks are mapped here

    @property
    def busy(self) -> bool:
        """Whether offers are looked for, or something is being copied."""
        return bool(self._copies) or bool(self._waiting)

    @property
    def holds_back(self) -> bool:
        """Whether messages wait: what is sent under their tags, however small, has to go behind them."""
        return bool(self._waiting)

    def send(self, transfer: UcxTransfer, hurried: bool) -> bool:
        """Send a large message this way, or any that waiting ones of its tag are ahead of.

        Args:
            hurried: there is nothing to do but wait, so that it may be waited for an offer for a moment.

        Returns:
            False: not possible now; nothing has been sent.
        """
        if self._waiting and any(w.tag == transfer.tag and w.link is transfer.link for w in self._waiting):
            self._hold_back(transfer)
            return True
        if not may_be_written(transfer):
            return False
        offer = self._offer_for(transfer)
        if offer is not None and (
            self._is_full(transfer) or any(wait.offer for wait in self._waiting.values())
        ):
            self._hold_back(transfer, offer)
            return True
        if (offer is not None and self._fill(transfer, offer)) or self._announce(transfer):
            return True
        offers = transfer.link.offers
        if offers is None or not may_be_offered(transfer):
            return False
        if not hurried or (offers.in_vain > _MOST_IN_VAIN and offers.in_vain % _TRY_AGAIN):
            offers.in_vain += 1
            return False
        self._hold_back(transfer)
        return True

    def _hold_back(self, transfer: UcxTransfer, offer: Offer | None = None) -> None:
        self._waiting[transfer] = _Wait(monotonic() + _PATIENCE_S, offer)
        self._look_soon()

    def _offer_for(self, transfer: UcxTransfer) -> Offer | None:
        number, offers = transfer.number, transfer.link.offers
        if number is None or offers is None or not may_be_offered(transfer):
            return None
        offer = offers.take(transfer.tag, number)
        return offer if offer is not None and offer.ticket.size_bytes == transfer.memory.size_bytes else None

    def _is_full(self, transfer: UcxTransfer) -> bool:
        """Whether a message is written in a later pass of the loop, for enough was in this one."""
        return 0 < self._filled_bytes > PIECE_BYTES - transfer.memory.size_bytes

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Look for offers, write what has them, and send what has waited for long enough."""
        self._looking, now_s = False, monotonic()
        ahead: set[tuple[int, int]] = set()  # link and tag of what goes on waiting
        for transfer, wait in list(self._waiting.items()):
            key = (id(transfer.link), transfer.tag)
            # What is told to one may drop others.
            if transfer in self._waiting and (key in ahead or not self._leaves(transfer, wait, now_s)):
                ahead.add(key)
        if self._waiting:
            if not self._filled_bytes:
                os.sched_yield()  # to the receiver, which may be on this core
            self._look_soon()

    def _leaves(self, transfer: UcxTransfer, wait: _Wait, now_s: float) -> bool:
        """Send what waits, if it is time. Returns: whether it was."""
        if transfer.link.failure is not None:
            del self._waiting[transfer]
            self._carrier.finish(transfer, STATUS_CANCELED, 0)
            return True
        is_large = may_be_written(transfer)
        offer = wait.offer or (self._offer_for(transfer) if is_large else None)
        if offer is not None and self._is_full(transfer):
            self._waiting[transfer] = wait._replace(offer=offer)
            return False
        if offer is None and now_s < wait.until_s and is_large and may_be_offered(transfer):
            return False
        del self._waiting[transfer]
        if offer is not None and self._fill(transfer, offer):
            return True
        if not (is_large and self._announce(transfer)):
            if transfer.link.offers is not None:
                transfer.link.offers.in_vain += is_large and may_be_offered(transfer)
            self._carrier.post_own_send(transfer.link, transfer.memory, transfer.tag, transfer)
        return True

    def _fill(self, transfer: UcxTransfer, offer: Offer) -> bool:
        """Write to where a receive waits. False: it cannot be reached, or the link has failed; nothing was sent."""
        memory, link, (serial, ticket) = transfer.memory, transfer.link, offer
        assert link.local_peer is not None
        assert link.offers is not None
        link.offers.in_vain = 0
        try:
            placed = link.local_peer.place(ticket)
        except (OSError, ValueError):
            return False
        ctypes.memmove(placed.address, memory.address, memory.size_bytes)
        placed.mark.value = serial
        if not self._carrier.post_own_send(link, EMPTY, transfer.tag, None):
            return False
        self._filled_bytes += memory.size_bytes
        # Told in the loop's next pass: whoever awaits one send after another would wait for no offer otherwise.
        self._ended.append(transfer)
        if len(self._ended) == 1:
            self._loop.call_soon(self._tell_ended)
        return True

    def _tell_ended(self) -> None:
        ended, self._ended, self._filled_bytes = self._ended, deque(), 0
        for transfer in ended:
            self._carrier.finish(transfer, STATUS_OK, 0)
            self._forget_freed(transfer.link)

    def _forget_freed(self, link: UcxLink) -> None:
        if link.local_peer is not None:
            link.local_peer.forget_freed()
            if not self._mapped:
                self._loop.call_later(_SWEEP_S, self._sweep)
            self._mapped.add(link.local_peer)

    def _sweep(self) -> None:
        for local_peer in self._mapped:
            local_peer.forget_freed()
        self._mapped = {local_peer for local_peer in self._mapped if local_peer.has_blocks}
        if self._mapped:
            self._loop.call_later(_SWEEP_S, self._sweep)

    def _announce(self, transfer: UcxTransfer) -> bool:
        """Send a header, if the message is large enough. False: not possible now; nothing has been sent."""
        memory, link = transfer.memory, transfer.link
        if self._mailbox is None or link.local_peer is None or memory.size_bytes < ANSWER_BYTES:
            return False
        if not link.local_peer.sees(self._mailbox):
            return False
        serial = next(self._serials)
        row = self._mailbox.announce(serial, transfer.tag | link.sender_bits, memory.size_bytes)
        if row is None:
            return False
        answer = memory_with(ANSWER.size)
        header = memory_with(HEADER_BYTES, HEADER.pack(self._mailbox.key, serial, memory.size_bytes))
        if not self._carrier.post_own_send(link, header, transfer.tag, None):
            self._mailbox.withdraw(row)
            return False
        tag = own_tag(transfer.tag, ANSWER_CHANNEL, serial)
        self._carrier.post_own_recv(
            link, answer, tag, partial(self._hear_answer, transfer, row, serial, answer)
        )
        return True

    def _hear_answer(
        self, transfer: UcxTransfer, row: int, serial: int, answer: Memory, status: int, length: int
    ) -> None:
        assert self._mailbox is not None
        self._mailbox.withdraw(row)
        if status != STATUS_OK or transfer.link.failure is not None:
            self._carrier.finish(transfer, status or STATUS_CANCELED, 0)
            return
        verdict, descriptor, key, size_bytes = ANSWER.unpack(answer.owner)
        is_sound = length == ANSWER.size and (verdict != WRITE or size_bytes == transfer.memory.size_bytes)
        data_tag = own_tag(transfer.tag, DATA_CHANNEL, serial)
        if not is_sound or verdict not in (REFUSED, AS_MESSAGE, WRITE):
            self._carrier.finish(transfer, STATUS_TRUNCATED, 0)
        elif verdict == REFUSED:
            self._carrier.finish(transfer, STATUS_OK, 0)  # UCX does not tell a sender of wrong sizes either
        elif verdict == AS_MESSAGE:
            self._carrier.post_own_send(transfer.link, transfer.memory, data_tag, transfer)
        else:
            self._begin(transfer, data_tag, BlockTicket(descriptor, key, size_bytes))

    def _begin(self, transfer: UcxTransfer, data_tag: int, ticket: BlockTicket) -> None:
        assert transfer.link.local_peer is not None
        try:
            target = transfer.link.local_peer.place(ticket)
        except (OSError, ValueError):
            end = memory_with(END.size, END.pack(MESSAGE_FOLLOWS))
            self._carrier.post_own_send(transfer.link, end, data_tag, None)
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
            size_bytes = min(PIECE_BYTES, memory.size_bytes - start)
            ctypes.memmove(target.address + start, memory.address + start, size_bytes)
            self._written_bytes = start + size_bytes
            if self._written_bytes == memory.size_bytes:
                # Told first: whoever waits posts his next send before the transport looks for messages.
                self._end_first(STATUS_OK)
                end = memory_with(END.size, END.pack(WRITTEN))
                self._carrier.post_own_send(transfer.link, end, data_tag, None)
        if self._copies and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._copy_piece)

    def _end_first(self, status: int) -> None:
        transfer = self._copies.popleft().transfer
        self._written_bytes = 0
        self._carrier.finish(transfer, status, 0)
        self._forget_freed(transfer.link)

    def drop(self, link: UcxLink) -> None:
        """Copy nothing more for a link: its buffers are their owners' again when this returns."""
        first = self._copies[0] if self._copies else None
        dropped = [copy for copy in self._copies if copy.transfer.link is link]
        waiting = [transfer for transfer in self._waiting if transfer.link is link]
        self._waiting = {
            transfer: until for transfer, until in self._waiting.items() if transfer.link is not link
        }
        self._copies = deque(copy for copy in self._copies if copy.transfer.link is not link)
        if first in dropped:
            self._written_bytes = 0
        for transfer in [copy.transfer for copy in dropped] + waiting:
            self._carrier.finish(transfer, STATUS_CANCELED, 0)
        self._tell_ended()
