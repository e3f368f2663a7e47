"""Carry large messages within a host with one copy: the sender writes into the receiver's memory.

UCX copies such a message twice, into a queue in shared memory and out of it. In this module UCX carries only
the messages of a protocol between the sender S and the receiver R. RTS means "ready to send", CTS "clear to
send", FIN "finished", and a block is memory that the receiver shares (`shared_memory.SharedBlock`):

    where the receive was posted first, 1 to 4 MiB     otherwise, from 4 MiB on
    R -- CTS_AHEAD --> S   a block                     S -- RTS --> R   size, serial; under the message's tag
    S    writes                                        S <-- CTS -- R   a block, "as a message", or "refused"
    S -- empty FIN --> R   under the message's tag     S    writes a piece in each pass of its event loop
                                                       S -- FIN --> R   written, or "a message follows"

A CTS_AHEAD, called an offer (`offers.py`), names a block before any RTS is sent. The receiver writes the
offer into a ring buffer that the sender reads, and wakes nobody. The RTS and the empty FIN are sent under the
message's tag in place of the message, so that they match receives in the same order as all other messages.
While one side waits for the other, the waiting side has one UCX operation open, which fails like any other
operation if the peer dies or the transfer is aborted. If a receive fails, the receiver puts other memory in
place of the memory into which a peer may still write.

A sender may have no offer for a message that is too small for an RTS. If its caller only waits for transfers
(`Transport.hurry`), the sender then holds the message back for up to 1 ms to wait for an offer. After that,
or immediately if the caller has other work, the message is sent through UCX.

Messages with an offer are written within the call that posts them, up to the size of one piece in each pass
of the event loop. Further messages with an offer are written in the next passes. All later messages with the
same tags are sent after them. The sender writes only between two passes of its event loop or within a post
call, only into a block whose key it has read, and never past the block's end; `drop` stops the writing
immediately.

A peer that cannot read this process's mailbox could mistake an RTS for data. A sender therefore sends an RTS
only to a peer whose mailbox says that the peer can read the sender's mailbox. The message is also announced
in the sender's mailbox, because the memory of a receive may be too short for the RTS.
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

MIN_ONE_COPY_BYTES = 1 << 20
"""The size in bytes from which a message is written into the receiver's memory if the receive was offered.
Compared with UCX, with four messages in flight, one copy is a tenth faster at 1 MiB and 1.3 times as fast at
4 MiB. Where other work uses the cores from time to time, one copy is twice as fast, because only one of the
two processes has to be awake for it."""

MIN_RTS_BYTES = 4 << 20
"""The size in bytes from which a message is announced by an RTS if the receive was not offered. Below this
size, UCX's second copy, which another core makes, takes less time than three messages to a process that may
be asleep. Compared with UCX, one copy after an RTS is 1.6 times as fast at 16 MiB and as fast at 4 MiB."""

PIECE_BYTES = 4 << 20
"""The greatest number of bytes written at a time, which takes 0.3 to 0.4 ms; a larger receive is never
offered. With pieces of 1 MiB, the event loop's passes between two pieces took a tenth of the time that
copying took."""

RTS_BYTES = 61
"""The size of an RTS in bytes. Arrays of this size are unlikely, and the key in the RTS would still tell the
two apart."""

RTS = struct.Struct("<16sQQ29x")  # the key of the sender's mailbox, serial, size in bytes
CTS = struct.Struct("<Bi16sQ")  # a verdict, then a `BlockTicket`
FIN = struct.Struct("<B")  # a verdict
EMPTY_FIN = Memory(0, 0, None)
REFUSED, AS_MESSAGE, WRITE = 0, 1, 2
"""The verdicts of a CTS."""

WRITTEN, MESSAGE_FOLLOWS = 1, 2
"""The verdicts of a FIN."""

CTS_CHANNEL, DATA_CHANNEL = 254, 255
"""The channels in the tags of a CTS, and in the tags of a FIN and of a message that follows an RTS."""

_NO_BLOCK = (0, bytes(16), 0)
_SEQUENCES = 1 << SEQUENCE_BITS

_HOLD_S, _MAX_VAIN_HOLDS, _HOLD_AGAIN_AFTER = 1e-3, 3, 32
"""The time in seconds for which a sender in a hurry holds a message back until the receiver offers memory for
it; the number of messages in a row that may be held back in vain; and the interval, in messages, at which one
is held back even so. Without holding back, each message would be too early for its offer if both sides post
the next transfer as soon as the last one has ended, because the receiver is then a moment later than the
sender. With 0.2 ms instead of 1 ms up to a fifth of the messages of 1 MiB were too early."""

_SWEEP_S = 1.0
"""The interval in seconds at which a sender, even an idle one, checks whether the owners of the blocks that
it has mapped have freed them."""


class Carrier(Protocol):
    """The interface of the transport for the one-copy protocol. Its methods send and receive the protocol's
    messages, and report how transfers have ended."""

    def post_own_send(self, link: UcxLink, memory: Memory, tag: int, transfer: UcxTransfer | None) -> bool:
        """Send a message of the one-copy protocol.

        Args:
            link: the link to the receiver.
            memory: the message.
            tag: the message's tag, without the sender's id.
            transfer: the transfer to finish when the send has ended; None: no transfer depends on this send.

        Returns:
            True if the send was posted or has completed. False if UCX refused the send; if a transfer was
            given, it has then been finished with that error.
        """
        ...

    def post_own_recv(
        self, link: UcxLink, memory: Memory, tag: int, then: Callable[[int, int], None] | UcxTransfer
    ) -> None:
        """Receive a message of the one-copy protocol.

        Args:
            link: the link to the sender.
            memory: the memory to receive into.
            tag: the message's tag, without the sender's id.
            then: a callback that gets the status and the length of the received message, or the transfer to
                finish with that status and length.
        """
        ...

    def finish(self, transfer: UcxTransfer, status: int, length: int) -> None:
        """Tell the caller of a transfer how the transfer has ended. If the caller was told before, do
        nothing.

        Args:
            transfer: the transfer.
            status: UCX's status.
            length: the number of bytes received; 0 for a send.
        """
        ...


class OneCopyMessages:
    """The one-copy protocol in one transport: its sender, its receiver, and the mailbox that both use (memory
    that peers on this host read). In this protocol the sender of a large message writes directly into the
    receiver's memory.

    Args:
        carrier: the transport.
        loop: the event loop on which messages are written.
        own_bits: the transport's own id as it is stored in tags; see `links.sender_bits_of`.

    Attributes:
        sender: writes messages into the memory of peers.
        receiver: lets peers write into the memory of receives. Sender and receiver share no state.
    """

    def __init__(self, carrier: Carrier, loop: asyncio.AbstractEventLoop, own_bits: int):
        try:
            self._mailbox: Mailbox | None = Mailbox()
        except (OSError, AttributeError):  # not Linux, or no memory or descriptor left
            self._mailbox = None  # UCX then carries every message
        ring = OfferRing(self._mailbox.ring) if self._mailbox is not None else None
        self.sender = OneCopySender(carrier, loop, self._mailbox)
        self.receiver = OneCopyReceiver(carrier, ring, own_bits)

    @property
    def ticket(self) -> bytes:
        """The mailbox's ticket, by which peers find out whether they are on this host; empty if there is no
        mailbox."""
        return self._mailbox.ticket if self._mailbox is not None else b""

    @property
    def busy(self) -> bool:
        """This is True while messages are held back or are being written, so that the transport should not
        poll for messages.

        Messages may be held back by this process until they may be written, and may be written by this
        process or by a peer. Writing takes far longer than polling should, and polling takes memory bandwidth
        from the process that writes.
        """
        return self.sender.busy or self.receiver.num_being_written > 0

    def find_local_peer(self, ticket: bytes) -> LocalPeer | None:
        """Find the process that made a mailbox's ticket, and publish that this process can read that
        process's mailbox.

        After this, the peer may announce large messages to this process (RTS).

        Returns:
            The process; None if it is not on this host.
        """
        local_peer = LocalPeer.from_ticket(ticket) if self._mailbox is not None else None
        if self._mailbox is not None and local_peer is not None:
            self._mailbox.add_readable(local_peer)
        return local_peer

    def drop(self, link: UcxLink) -> None:
        """Stop writing messages to the peer of a link. When this returns, the memory of these messages
        belongs to the callers of `post_send` again, and no memory of the peer is mapped."""
        self.sender.drop(link)
        if self._mailbox is not None and link.local_peer is not None:
            self._mailbox.remove_readable(link.local_peer)
            link.local_peer.unmap_blocks()

    def close(self) -> None:
        """Close the mailbox; call this after every link was dropped."""
        if self._mailbox is not None:
            self._mailbox.close()


def may_be_written(transfer: UcxTransfer) -> bool:
    """Return whether a message is large enough, and in host memory, so that it may be written directly into
    the receiver's memory (the one-copy protocol)."""
    return transfer.memory.size_bytes >= MIN_ONE_COPY_BYTES and not transfer.memory.on_device


def may_be_offered(transfer: UcxTransfer) -> bool:
    """Return whether a receiver may offer its memory for a message before the message is sent. This requires
    that the message has a number under its tag and a suitable size."""
    return transfer.number is not None and MIN_ONE_COPY_BYTES <= transfer.memory.size_bytes <= PIECE_BYTES


def protocol_tag(tag: int, channel: int, serial: int) -> int:
    """Return the tag of a message of the one-copy protocol: a CTS (clear to send), a FIN, or the data if it
    is sent as an ordinary message after all.

    Args:
        tag: the tag of the large message that was announced; the result has the same epoch.
        channel: `CTS_CHANNEL`, or `DATA_CHANNEL` for FIN and data.
        serial: the serial number of the announcement.
    """
    return tag >> EPOCH_SHIFT << EPOCH_SHIFT | channel << SEQUENCE_BITS | serial % _SEQUENCES


def memory_with(size_bytes: int, content: bytes = b"") -> Memory:
    """Allocate host memory of `size_bytes` that begins with `content`, to be sent or received into."""
    owner = ctypes.create_string_buffer(content, size_bytes)
    return Memory(ctypes.addressof(owner), size_bytes, owner)


# ---------------------------------------------------------------- the receiver's side


class OneCopyReceiver:
    """The receiving side of the one-copy protocol, which offers the memory of receives to senders, answers
    each announcement of a message (RTS) with a CTS (clear to send), and never blocks.

    If a receive fails, its shared block is retired, which puts other memory at the block's address. Late
    writes of a peer then do not change the memory that the receive's owner sees.

    Args:
        carrier: the transport.
        ring: the ring buffer, in this process's mailbox, for offers of memory to senders; None if there is no
            mailbox.
        own_bits: the transport's own id as it is stored in tags; see `links.sender_bits_of`.

    Attributes:
        num_being_written: the number of receives into which peers are writing now, after a CTS.
        exposed: the receives into whose memory a peer might still write, because no other memory could be put
            at the same address. If the list is not empty, this process must exit.
    """

    def __init__(self, carrier: Carrier, ring: OfferRing | None, own_bits: int):
        self._carrier, self._ring, self._own_bits = carrier, ring, own_bits
        self.num_being_written = 0
        self.exposed: list[UcxTransfer] = []

    @staticmethod
    def share_block(memory: Memory) -> None:
        """If the memory of a receive was retired, share it with senders again. Call this before the receive
        is posted to UCX.

        A receive that fails retires its shared block (replaces it by memory that no peer can write to). The
        block is shared again only now, because sharing takes long and an abort must be fast.
        """
        if isinstance(memory.owner, SharedBlock):
            memory.owner.share_again()

    def offer(self, transfer: UcxTransfer) -> None:
        """Offer the memory of a posted receive to the sender, which may then write into it directly
        (CTS_AHEAD). Do nothing if the receive's message has no number, if its memory is not a shared block,
        or if its size does not suit."""
        number, block = transfer.number, transfer.memory.owner
        if self._ring is None or not isinstance(block, SharedBlock) or block.ticket is None:
            return
        if number is None or not may_be_offered(transfer):
            return
        block.mark.value = 0
        transfer.offer = self._ring.put(transfer.tag | transfer.link.sender_bits, number, block.ticket)

    def interpret(self, transfer: UcxTransfer, status: int, length: int) -> tuple[int, int] | None:
        """Interpret a received message that does not have the expected size, or that has the size of an RTS
        (the announcement of a large message). If the message is an RTS, answer it.

        Args:
            transfer: the receive.
            status: UCX's status.
            length: the number of bytes that arrived.

        Returns:
            The status and the length with which the receive has ended; None if it has not ended yet.
        """
        serial, transfer.offer = transfer.offer, 0
        rts = self._read_rts(transfer, status) if length == RTS_BYTES else None
        if rts is not None:
            announced, length = rts
            if length == transfer.size_bytes:
                self._accept(transfer, announced)
                return None
            self._send_cts(transfer, announced, REFUSED)
        elif serial and (status, length) == (STATUS_OK, 0) and transfer.memory.owner.mark.value == serial:
            return STATUS_OK, transfer.size_bytes  # an empty FIN
        if serial and (status, length) != (STATUS_OK, transfer.size_bytes):
            self._retire_block(transfer)
        return status, length

    def _read_rts(self, transfer: UcxTransfer, status: int) -> tuple[int, int] | None:
        """Read the announcement of a large message (RTS) that a receive may have got.

        Args:
            transfer: the receive, which got a message as long as an RTS.
            status: UCX's status. If the status says that the message was truncated, the RTS is not in the
                receive's memory and is looked up in the sender's mailbox.

        Returns:
            The serial number and the size of the large message; None if the received message is not an RTS.
        """
        local_peer, memory = transfer.link.local_peer, transfer.memory
        if local_peer is None or status not in (STATUS_OK, STATUS_TRUNCATED):
            return None
        if status == STATUS_OK and not memory.on_device:
            key, serial, size_bytes = RTS.unpack(ctypes.string_at(memory.address, RTS_BYTES))
            return (serial, size_bytes) if key == local_peer.key else None
        return next(iter(local_peer.announced(transfer.tag | self._own_bits)), None)

    def _accept(self, transfer: UcxTransfer, serial: int) -> None:
        """Answer the announcement (RTS) of a message of the right size.

        If the receive has a shared block, the answer names the block, and the sender then writes into the
        block. If not, the answer is "as a message", and the sender then sends the data through UCX.

        Args:
            transfer: the receive.
            serial: the serial number in the RTS.
        """
        memory, data_tag = transfer.memory, protocol_tag(transfer.tag, DATA_CHANNEL, serial)
        ticket = memory.owner.ticket if isinstance(memory.owner, SharedBlock) else None
        if ticket is None:
            self._carrier.post_own_recv(transfer.link, memory, data_tag, transfer)
            self._send_cts(transfer, serial, AS_MESSAGE)
            return
        fin = memory_with(FIN.size)
        self.num_being_written += 1
        self._carrier.post_own_recv(
            transfer.link, fin, data_tag, partial(self._on_fin, transfer, data_tag, fin)
        )
        self._send_cts(transfer, serial, WRITE, ticket)

    def _send_cts(
        self,
        transfer: UcxTransfer,
        serial: int,
        verdict: int,
        ticket: BlockTicket | tuple[int, bytes, int] = _NO_BLOCK,
    ) -> None:
        assert transfer.link.local_peer is not None
        transfer.link.local_peer.note_answered(serial)
        cts = memory_with(CTS.size, CTS.pack(verdict, *ticket))
        tag = protocol_tag(transfer.tag, CTS_CHANNEL, serial)
        self._carrier.post_own_send(transfer.link, cts, tag, None)

    def _on_fin(self, transfer: UcxTransfer, data_tag: int, fin: Memory, status: int, length: int) -> None:
        memory = transfer.memory
        self.num_being_written -= 1
        (verdict,) = FIN.unpack(fin.owner)
        if status == STATUS_OK and (length != FIN.size or verdict not in (WRITTEN, MESSAGE_FOLLOWS)):
            status = STATUS_TRUNCATED
        if status != STATUS_OK:
            self._retire_block(transfer)
            self._carrier.finish(transfer, status, 0)
        elif verdict == WRITTEN:
            self._carrier.finish(transfer, STATUS_OK, memory.size_bytes)
        else:
            self._carrier.post_own_recv(transfer.link, memory, data_tag, transfer)

    def _retire_block(self, transfer: UcxTransfer) -> None:
        """Replace the memory of a failed receive, so that a peer's late writes go into memory that nobody
        reads."""
        try:
            transfer.memory.owner.retire()
        except OSError:
            self.exposed.append(transfer)


# ---------------------------------------------------------------- the sender's side


class _HeldBack(NamedTuple):
    """The state of a message that is held back until its receiver offers memory to write it into.

    Attributes:
        until_s: the time until which the message waits for an offer, in seconds of `time.monotonic`.
        offer: the receiver's offer if there is one already, in which case the message is written in a later
            pass of the event loop; otherwise None.
    """

    until_s: float
    offer: Offer | None = None


class _PieceCopy(NamedTuple):
    """A message that is being written into the receiver's memory in pieces, after the receiver's CTS (clear
    to send)."""

    transfer: UcxTransfer
    target: MappedBlock  # this reference keeps it mapped even if its owner frees it meanwhile
    data_tag: int


class OneCopySender:
    """The sending side of the one-copy protocol, which writes messages into memory that receivers name in an
    offer or in a CTS (clear to send).

    Args:
        carrier: the transport.
        loop: the event loop on which messages are written.
        mailbox: the mailbox in which messages are announced; None if there is none.
    """

    def __init__(self, carrier: Carrier, loop: asyncio.AbstractEventLoop, mailbox: Mailbox | None):
        self._carrier, self._loop, self._mailbox = carrier, loop, mailbox
        self._serials = itertools.count(1)
        self._copies: deque[_PieceCopy] = deque()
        self._written_bytes = 0  # how much of the first of them is written
        self._copy_scheduled = False
        self._written: deque[UcxTransfer] = deque()  # to be finished in the loop's next pass
        self._pass_bytes = 0  # written to offered blocks in this pass of the loop
        self._held_back: dict[UcxTransfer, _HeldBack] = {}
        self._retry_scheduled = False
        self._mapped: set[LocalPeer] = set()  # peers of whom this process maps blocks

    @property
    def busy(self) -> bool:
        """This is True while any message is held back until its receiver offers memory for it, or is being
        written in pieces."""
        return bool(self._copies) or bool(self._held_back)

    @property
    def holds_back(self) -> bool:
        """This is True while any message is held back until its receiver offers memory for it. Later messages
        under its tag, however small, have to be sent after it."""
        return bool(self._held_back)

    def send(self, transfer: UcxTransfer, hurried: bool) -> bool:
        """Send a large message with one copy, or hold the message back until its receiver offers memory for
        it.

        A message of any size is held back while an earlier message to the same peer with the same tag is held
        back.

        Args:
            transfer: the send.
            hurried: whether the caller only waits for transfers, so that the message may be held back until
                its receiver offers memory for it.

        Returns:
            True if the message was sent or is held back; False if nothing was sent and the caller has to send
            the message through UCX.
        """
        if self._held_back and any(
            t.tag == transfer.tag and t.link is transfer.link for t in self._held_back
        ):
            self._hold_back(transfer)
            return True
        if not may_be_written(transfer):
            return False
        offer = self._take_offer(transfer)
        if offer is not None and (
            self._must_wait_for_next_pass(transfer) or any(held.offer for held in self._held_back.values())
        ):
            self._hold_back(transfer, offer)
            return True
        if (offer is not None and self._write_offered(transfer, offer)) or self._send_rts(transfer):
            return True
        offers = transfer.link.offers
        if offers is None or not may_be_offered(transfer):
            return False
        if not hurried or (offers.num_in_vain > _MAX_VAIN_HOLDS and offers.num_in_vain % _HOLD_AGAIN_AFTER):
            offers.num_in_vain += 1
            return False
        self._hold_back(transfer)
        return True

    def drop(self, link: UcxLink) -> None:
        """End every message to the peer of a link with an error. When this returns, the memory of these
        messages belongs to the callers of `post_send` again."""
        if self._copies and self._copies[0].transfer.link is link:
            self._written_bytes = 0
        dropped = [copy.transfer for copy in self._copies if copy.transfer.link is link]
        dropped += [transfer for transfer in self._held_back if transfer.link is link]
        self._copies = deque(copy for copy in self._copies if copy.transfer.link is not link)
        self._held_back = {
            transfer: held for transfer, held in self._held_back.items() if transfer.link is not link
        }
        for transfer in dropped:
            self._carrier.finish(transfer, STATUS_CANCELED, 0)
        self._finish_written()

    # ------------------------------------------------------------ into the block of an offer

    def _take_offer(self, transfer: UcxTransfer) -> Offer | None:
        number, offers = transfer.number, transfer.link.offers
        if number is None or offers is None or not may_be_offered(transfer):
            return None
        offer = offers.take(transfer.tag, number)
        return offer if offer is not None and offer.ticket.size_bytes == transfer.memory.size_bytes else None

    def _write_offered(self, transfer: UcxTransfer, offer: Offer) -> bool:
        """Write a message into the memory that its receiver has offered, and send the empty FIN, which tells
        the receiver that the message is complete.

        Returns:
            True if the message was written; False if the memory cannot be mapped or the link has failed.
        """
        memory, link, (serial, ticket) = transfer.memory, transfer.link, offer
        assert link.local_peer is not None
        assert link.offers is not None
        link.offers.num_in_vain = 0
        try:
            target = link.local_peer.map_block(ticket)
        except (OSError, ValueError):
            return False
        ctypes.memmove(target.address, memory.address, memory.size_bytes)
        target.mark.value = serial
        if not self._carrier.post_own_send(link, EMPTY_FIN, transfer.tag, None):
            return False
        self._pass_bytes += memory.size_bytes
        # Finished in the loop's next pass: a caller that awaits one send after another would otherwise send
        # before the receiver has offered its next receive.
        self._written.append(transfer)
        if len(self._written) == 1:
            self._loop.call_soon(self._finish_written)
        return True

    def _finish_written(self) -> None:
        written, self._written, self._pass_bytes = self._written, deque(), 0
        for transfer in written:
            self._carrier.finish(transfer, STATUS_OK, 0)
            self._unmap_freed(transfer.link)

    def _must_wait_for_next_pass(self, transfer: UcxTransfer) -> bool:
        """Return whether so many bytes were written in this pass of the event loop that this message has to
        be written in a later pass."""
        return 0 < self._pass_bytes > PIECE_BYTES - transfer.memory.size_bytes

    # ------------------------------------------------------------ holding back

    def _hold_back(self, transfer: UcxTransfer, offer: Offer | None = None) -> None:
        self._held_back[transfer] = _HeldBack(monotonic() + _HOLD_S, offer)
        self._schedule_retry()

    def _schedule_retry(self) -> None:
        if not self._retry_scheduled:
            self._retry_scheduled = True
            self._loop.call_soon(self._retry_held)

    def _retry_held(self) -> None:
        """Go through the messages that are held back until their receivers offer memory for them: write each
        message that now has an offer, and send each message that was held back for too long."""
        self._retry_scheduled, now_s = False, monotonic()
        ahead: set[tuple[int, int]] = set()  # link and tag of messages that are still held back
        for transfer, held in list(self._held_back.items()):
            key = (id(transfer.link), transfer.tag)
            # Finishing one transfer may drop others.
            if transfer in self._held_back and (key in ahead or not self._send_held(transfer, held, now_s)):
                ahead.add(key)
        if self._held_back:
            if not self._pass_bytes:
                os.sched_yield()  # to the receiver, which may be on this core
            self._schedule_retry()

    def _send_held(self, transfer: UcxTransfer, held: _HeldBack, now_s: float) -> bool:
        """Write a held-back message if its receiver has offered memory for it, or send the message if the
        time to wait for an offer is over.

        Args:
            transfer: the send.
            held: the time until which the message may be held back, and the receiver's offer if there is one
                already.
            now_s: the present time, in seconds of `time.monotonic`.

        Returns:
            True if the message was written, sent or failed; False if it is still held back.
        """
        if transfer.link.failure is not None:
            del self._held_back[transfer]
            self._carrier.finish(transfer, STATUS_CANCELED, 0)
            return True
        is_large = may_be_written(transfer)
        offer = held.offer or (self._take_offer(transfer) if is_large else None)
        if offer is not None and self._must_wait_for_next_pass(transfer):
            self._held_back[transfer] = held._replace(offer=offer)
            return False
        if offer is None and now_s < held.until_s and is_large and may_be_offered(transfer):
            return False
        del self._held_back[transfer]
        if offer is not None and self._write_offered(transfer, offer):
            return True
        if not (is_large and self._send_rts(transfer)):
            if transfer.link.offers is not None:
                transfer.link.offers.num_in_vain += is_large and may_be_offered(transfer)
            self._carrier.post_own_send(transfer.link, transfer.memory, transfer.tag, transfer)
        return True

    # ------------------------------------------------------------ into the block of a CTS

    def _send_rts(self, transfer: UcxTransfer) -> bool:
        """Announce a message to its receiver by an RTS (ready to send), if the message is large enough and
        the receiver can read this process's mailbox.

        Returns:
            True if the message was announced; False if nothing was sent.
        """
        memory, link = transfer.memory, transfer.link
        if self._mailbox is None or link.local_peer is None or memory.size_bytes < MIN_RTS_BYTES:
            return False
        if not link.local_peer.can_read(self._mailbox):
            return False
        serial = next(self._serials)
        row = self._mailbox.announce(serial, transfer.tag | link.sender_bits, memory.size_bytes)
        if row is None:
            return False
        cts = memory_with(CTS.size)
        rts = memory_with(RTS_BYTES, RTS.pack(self._mailbox.key, serial, memory.size_bytes))
        if not self._carrier.post_own_send(link, rts, transfer.tag, None):
            self._mailbox.withdraw(row)
            return False
        tag = protocol_tag(transfer.tag, CTS_CHANNEL, serial)
        self._carrier.post_own_recv(link, cts, tag, partial(self._on_cts, transfer, row, serial, cts))
        return True

    def _on_cts(
        self, transfer: UcxTransfer, row: int, serial: int, cts: Memory, status: int, length: int
    ) -> None:
        assert self._mailbox is not None
        self._mailbox.withdraw(row)
        if status != STATUS_OK or transfer.link.failure is not None:
            self._carrier.finish(transfer, status or STATUS_CANCELED, 0)
            return
        verdict, descriptor, key, size_bytes = CTS.unpack(cts.owner)
        is_sound = length == CTS.size and (verdict != WRITE or size_bytes == transfer.memory.size_bytes)
        data_tag = protocol_tag(transfer.tag, DATA_CHANNEL, serial)
        if not is_sound or verdict not in (REFUSED, AS_MESSAGE, WRITE):
            self._carrier.finish(transfer, STATUS_TRUNCATED, 0)
        elif verdict == REFUSED:
            self._carrier.finish(transfer, STATUS_OK, 0)  # UCX does not tell senders about wrong sizes either
        elif verdict == AS_MESSAGE:
            self._carrier.post_own_send(transfer.link, transfer.memory, data_tag, transfer)
        else:
            self._begin_copy(transfer, data_tag, BlockTicket(descriptor, key, size_bytes))

    def _begin_copy(self, transfer: UcxTransfer, data_tag: int, ticket: BlockTicket) -> None:
        assert transfer.link.local_peer is not None
        try:
            target = transfer.link.local_peer.map_block(ticket)
        except (OSError, ValueError):
            self._send_fin(transfer.link, data_tag, MESSAGE_FOLLOWS)
            self._carrier.post_own_send(transfer.link, transfer.memory, data_tag, transfer)
            return
        self._copies.append(_PieceCopy(transfer, target, data_tag))
        self._schedule_copy()

    def _schedule_copy(self) -> None:
        if self._copies and not self._copy_scheduled:
            self._copy_scheduled = True
            self._loop.call_soon(self._copy_piece)

    def _copy_piece(self) -> None:
        """Write the next piece of the first message in the queue into the receiver's memory. After the last
        piece, report that the message was sent."""
        self._copy_scheduled = False
        if not self._copies:
            return
        transfer, target, data_tag = self._copies[0]
        if transfer.link.failure is not None:
            self._finish_first_copy(STATUS_CANCELED)
        else:
            memory, start = transfer.memory, self._written_bytes
            size_bytes = min(PIECE_BYTES, memory.size_bytes - start)
            ctypes.memmove(target.address + start, memory.address + start, size_bytes)
            self._written_bytes = start + size_bytes
            if self._written_bytes == memory.size_bytes:
                # Finished first, so that a waiting caller posts its next send before the transport polls.
                self._finish_first_copy(STATUS_OK)
                self._send_fin(transfer.link, data_tag, WRITTEN)
        self._schedule_copy()

    def _finish_first_copy(self, status: int) -> None:
        transfer = self._copies.popleft().transfer
        self._written_bytes = 0
        self._carrier.finish(transfer, status, 0)
        self._unmap_freed(transfer.link)

    def _send_fin(self, link: UcxLink, data_tag: int, verdict: int) -> None:
        self._carrier.post_own_send(link, memory_with(FIN.size, FIN.pack(verdict)), data_tag, None)

    # ------------------------------------------------------------ mapped blocks

    def _unmap_freed(self, link: UcxLink) -> None:
        if link.local_peer is not None:
            link.local_peer.unmap_freed_blocks()
            if not self._mapped:
                self._loop.call_later(_SWEEP_S, self._sweep)
            self._mapped.add(link.local_peer)

    def _sweep(self) -> None:
        for local_peer in self._mapped:
            local_peer.unmap_freed_blocks()
        self._mapped = {local_peer for local_peer in self._mapped if local_peer.has_blocks}
        if self._mapped:
            self._loop.call_later(_SWEEP_S, self._sweep)
