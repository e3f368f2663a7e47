"""direct_receive: receives offered to senders of this host, or told to them when they ask; the receiver's side of
`direct.py`. Never waits.

It never lets a peer write to memory that its receive has given back: other memory is put in its place first.
"""

from __future__ import annotations

import ctypes
from functools import partial

from jaxpp_async.transport.buffers import Memory
from jaxpp_async.transport.shared import SharedBlock
from jaxpp_async.transport.ucx import direct_words as words
from jaxpp_async.transport.ucx.links import Transfer
from jaxpp_async.transport.ucx.offers import OfferRing
from jaxpp_async.transport.ucx.ucp import STATUS_OK, STATUS_TRUNCATED


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

    def __init__(self, carrier: words.Carrier, ring: OfferRing | None, own_bits: int):
        self._carrier, self._ring, self._own_bits = carrier, ring, own_bits
        self.num_written = 0
        self.exposed: list[Transfer] = []

    @staticmethod
    def prepare(memory: Memory) -> None:
        """See to it that a receive's block can be shared, before UCX knows its memory: what a peer might still write
        to was replaced when a receive failed, and an abort has no time to make more of it."""
        if isinstance(memory.owner, SharedBlock):
            memory.owner.share_again()

    def invite(self, transfer: Transfer) -> None:
        """Offer a receive that was posted, if it has a number and a block."""
        number, block = transfer.number, transfer.memory.owner
        if self._ring is None or not isinstance(block, SharedBlock) or block.ticket is None:
            return
        if number is None or not words.may_be_offered(transfer):
            return
        block.mark.value = 0
        transfer.offer = self._ring.put(transfer.tag | transfer.link.sender_bits, number, block.ticket)

    def heard(self, transfer: Transfer, status: int, length: int) -> tuple[int, int] | None:
        """What a receive has got that is not what it expected, or looks like a header.

        Returns:
            Status and length as they are to be taken, or None: the receive goes on.
        """
        serial, transfer.offer = transfer.offer, 0
        header = self._header(transfer, status) if length == words.HEADER_BYTES else None
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
            transfer: the receive, which got as much as a header has. status: truncated, it does not lie in its memory.
        """
        neighbour, memory = transfer.link.neighbour, transfer.memory
        if neighbour is None or status not in (STATUS_OK, STATUS_TRUNCATED):
            return None
        if status == STATUS_OK and not memory.on_device:
            key, serial, size_bytes = words.HEADER.unpack(ctypes.string_at(memory.address, words.HEADER_BYTES))
            return (serial, size_bytes) if key == neighbour.key else None
        return next(iter(neighbour.announced(transfer.tag | self._own_bits)), None)

    def _accept(self, transfer: Transfer, serial: int) -> None:
        """Say where to write the message that a header announced; it has the right size."""
        memory, data_tag = transfer.memory, words.own_tag(transfer.tag, words.DATA_CHANNEL, serial)
        block = memory.owner
        ticket = block.ticket if isinstance(block, SharedBlock) else None
        if ticket is None:
            self._carrier.post_own_recv(transfer.link, memory, data_tag, transfer)
            self._answer(transfer, serial, words.ANSWER.pack(words.AS_MESSAGE, 0, bytes(16), 0))
            return
        end = words.memory_with(words.END.size)
        self.num_written += 1
        self._carrier.post_own_recv(transfer.link, end, data_tag, partial(self._hear_end, transfer, data_tag, end))
        self._answer(transfer, serial, words.ANSWER.pack(words.WRITE, *ticket))

    def _refuse(self, transfer: Transfer, serial: int) -> None:
        """Let the sender of a message of another size go."""
        self._answer(transfer, serial, words.ANSWER.pack(words.REFUSED, 0, bytes(16), 0))

    def _answer(self, transfer: Transfer, serial: int, answer: bytes) -> None:
        assert transfer.link.neighbour is not None
        transfer.link.neighbour.note_answered(serial)
        tag = words.own_tag(transfer.tag, words.ANSWER_CHANNEL, serial)
        self._carrier.post_own_send(transfer.link, words.memory_with(len(answer), answer), tag, None)

    def _hear_end(self, transfer: Transfer, data_tag: int, end: Memory, status: int, length: int) -> None:
        memory = transfer.memory
        self.num_written -= 1
        (verdict,) = words.END.unpack(end.owner)
        if status == STATUS_OK and (length != words.END.size or verdict not in (words.WRITTEN, words.MESSAGE_FOLLOWS)):
            status = STATUS_TRUNCATED
        if status != STATUS_OK:
            self._retire(transfer)
            self._carrier.finish(transfer, status, 0)
        elif verdict == words.WRITTEN:
            self._carrier.finish(transfer, STATUS_OK, memory.size_bytes)
        else:
            self._carrier.post_own_recv(transfer.link, memory, data_tag, transfer)

    def _retire(self, transfer: Transfer) -> None:
        """Let a peer's late writes go to memory that nobody reads."""
        try:
            transfer.memory.owner.retire()
        except OSError:
            self.exposed.append(transfer)
