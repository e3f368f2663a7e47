"""The receiver of one copy (`OneCopyReceiver`): which receives it offers, and how it answers an RTS."""

from __future__ import annotations

import asyncio
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpp_async.transport.base import make_tag, memory_of
from jaxpp_async.transport.shared_memory import RING_BYTES, BlockTicket, SharedBlock
from jaxpp_async.transport.ucx.links import UcxLink, UcxTransfer, sender_bits_of
from jaxpp_async.transport.ucx.offers import LinkOffers, OfferRing
from jaxpp_async.transport.ucx.one_copy import (
    AS_MESSAGE,
    CTS,
    CTS_CHANNEL,
    DATA_CHANNEL,
    FIN,
    MESSAGE_FOLLOWS,
    MIN_ONE_COPY_BYTES,
    PIECE_BYTES,
    REFUSED,
    RTS,
    RTS_BYTES,
    WRITE,
    WRITTEN,
    OneCopyMessages,
    OneCopyReceiver,
    may_be_offered,
    may_be_written,
    memory_with,
    protocol_tag,
)
from jaxpp_async.transport.ucx.tag_api import STATUS_CANCELED, STATUS_OK, STATUS_TRUNCATED

KEY, TAG = b"k" * 16, make_tag(3, 1, 5)
OURS, THEIRS = sender_bits_of(0), sender_bits_of(1)


class Peer:
    """A process on this host, as far as the receiver looks at it."""

    def __init__(self, announced=()):
        self.key, self.ring = KEY, np.zeros(RING_BYTES, np.uint8)
        self._announced, self.answered = list(announced), []

    def announced(self, tag: int):
        assert tag == TAG | OURS
        return self._announced

    def note_answered(self, serial: int) -> None:
        self.answered.append(serial)


class Carrier:
    """Records what is sent, received and finished; the test ends what is received."""

    def __init__(self):
        self.sent, self.posted, self.finished = [], [], []

    def post_own_send(self, link, memory, tag, transfer) -> bool:
        self.sent.append((ctypes.string_at(memory.address, memory.size_bytes), tag))
        return True

    def post_own_recv(self, link, memory, tag, then) -> None:
        self.posted.append((memory, tag, then))

    def finish(self, transfer, status, length) -> None:
        self.finished.append((status, length))


def receive(buffer, *, peer: Peer | None = None, number: int | None = 0) -> UcxTransfer:
    peer = peer or Peer()
    link = UcxLink(1, SimpleNamespace(handle=9), peer, OURS)
    memory = memory_of(buffer, writable=True)
    return UcxTransfer(link, memory, memory.size_bytes, TAG, None, number)


def rts_buffer(size_bytes: int, serial: int = 8, key: bytes = KEY) -> np.ndarray:
    """Make a receive's memory with an RTS in it."""
    data = np.zeros(max(size_bytes, RTS_BYTES), np.uint8)
    data[:RTS_BYTES] = np.frombuffer(RTS.pack(key, serial, size_bytes), np.uint8)
    return data


# ---------------------------------------------------------------- tags and sizes


def test_the_protocols_tags_are_in_the_messages_epoch_and_on_a_channel_of_their_own():
    tag = protocol_tag(make_tag(3, 1, 5), DATA_CHANNEL, 77)
    assert tag == make_tag(3, DATA_CHANNEL, 77)
    assert protocol_tag(TAG, CTS_CHANNEL, (1 << 24) + 2) == make_tag(3, CTS_CHANNEL, 2)


@pytest.mark.parametrize(
    ("size_bytes", "number", "written", "offered"),
    [
        (MIN_ONE_COPY_BYTES - 1, 0, False, False),
        (MIN_ONE_COPY_BYTES, 0, True, True),
        (PIECE_BYTES, 0, True, True),
        (PIECE_BYTES + 1, 0, True, False),
        (MIN_ONE_COPY_BYTES, None, True, False),
    ],
)
def test_only_large_messages_are_written_and_only_numbered_ones_up_to_a_piece_are_offered(
    size_bytes, number, written, offered
):
    transfer = SimpleNamespace(memory=SimpleNamespace(size_bytes=size_bytes, on_device=False), number=number)
    assert (may_be_written(transfer), may_be_offered(transfer)) == (written, offered)


def test_memory_to_be_sent_holds_its_content():
    memory = memory_with(4, b"ab")
    assert ctypes.string_at(memory.address, 4) == b"ab\0\0"


# ---------------------------------------------------------------- offers


def test_a_receive_with_a_block_is_offered_to_its_sender_alone_and_marked_as_unused():
    ring = np.zeros(RING_BYTES, np.uint8)
    receiver, block = OneCopyReceiver(Carrier(), OfferRing(ring), OURS), SharedBlock(MIN_ONE_COPY_BYTES)
    block.mark.value = 5
    transfer = receive(block, number=2)
    receiver.offer(transfer)
    assert (transfer.offer, block.mark.value) == (1, 0)
    assert LinkOffers(ring, THEIRS).take(TAG, 2).ticket == block.ticket
    assert LinkOffers(ring, OURS).take(TAG, 2) is None  # of another sender


@pytest.mark.parametrize(
    ("make", "size_bytes"), [(np.zeros, MIN_ONE_COPY_BYTES), (SharedBlock, 64)], ids=["no block", "small"]
)
def test_a_receive_without_a_block_or_a_small_one_is_not_offered(make, size_bytes):
    receiver = OneCopyReceiver(Carrier(), OfferRing(np.zeros(RING_BYTES, np.uint8)), OURS)
    transfer = receive(make(size_bytes))
    receiver.offer(transfer)
    assert transfer.offer == 0


def test_an_empty_fin_after_a_used_offer_is_the_whole_message():
    receiver, block = OneCopyReceiver(Carrier(), None, OURS), SharedBlock(64)
    transfer = receive(block)
    transfer.offer, block.mark.value = 3, 3
    assert receiver.interpret(transfer, STATUS_OK, 0) == (STATUS_OK, 64)
    assert (transfer.offer, block.ticket is None) == (0, False)


@pytest.mark.parametrize(("status", "length"), [(STATUS_OK, 0), (STATUS_CANCELED, 0), (STATUS_OK, 8)])
def test_a_receive_that_fails_after_an_unused_offer_retires_its_block_until_it_is_shared_again(
    status, length
):
    receiver, block = OneCopyReceiver(Carrier(), None, OURS), SharedBlock(64)
    transfer = receive(block)
    transfer.offer, block.mark.value = 3, 2
    assert receiver.interpret(transfer, status, length) == (status, length)
    assert block.ticket is None
    assert not block.array.any()
    OneCopyReceiver.share_block(transfer.memory)
    assert block.ticket is not None


def test_a_message_that_came_by_ucx_in_spite_of_the_offer_leaves_the_block_shared():
    receiver, block = OneCopyReceiver(Carrier(), None, OURS), SharedBlock(64)
    transfer = receive(block)
    transfer.offer = 3
    assert receiver.interpret(transfer, STATUS_OK, 64) == (STATUS_OK, 64)
    assert block.ticket is not None


# ---------------------------------------------------------------- RTS, CTS and FIN


def test_an_rts_is_answered_with_the_block_and_the_message_is_there_with_the_fin():
    carrier, block, peer = Carrier(), SharedBlock(PIECE_BYTES), Peer()
    receiver, transfer = OneCopyReceiver(carrier, None, OURS), receive(block, peer=peer)
    block.array[:RTS_BYTES] = rts_buffer(PIECE_BYTES)[:RTS_BYTES]
    assert receiver.interpret(transfer, STATUS_OK, RTS_BYTES) is None
    ((cts, tag),) = carrier.sent
    verdict, *ticket = CTS.unpack(cts)
    assert (verdict, BlockTicket(*ticket), tag) == (WRITE, block.ticket, make_tag(3, CTS_CHANNEL, 8))
    assert (peer.answered, receiver.num_being_written) == ([8], 1)
    ((fin, tag, then),) = carrier.posted
    assert tag == make_tag(3, DATA_CHANNEL, 8)
    ctypes.memmove(fin.address, FIN.pack(WRITTEN), FIN.size)
    then(STATUS_OK, FIN.size)
    assert (carrier.finished, receiver.num_being_written) == ([(STATUS_OK, PIECE_BYTES)], 0)


def test_a_fin_may_say_that_the_message_follows():
    carrier, block = Carrier(), SharedBlock(PIECE_BYTES)
    receiver, transfer = OneCopyReceiver(carrier, None, OURS), receive(block)
    block.array[:RTS_BYTES] = rts_buffer(PIECE_BYTES)[:RTS_BYTES]
    receiver.interpret(transfer, STATUS_OK, RTS_BYTES)
    fin, tag, then = carrier.posted[0]
    ctypes.memmove(fin.address, FIN.pack(MESSAGE_FOLLOWS), FIN.size)
    then(STATUS_OK, FIN.size)
    assert carrier.posted[1] == (transfer.memory, tag, transfer)
    assert carrier.finished == []


@pytest.mark.parametrize(
    ("verdict", "status", "length", "expected"),
    [
        (9, STATUS_OK, 1, STATUS_TRUNCATED),
        (WRITTEN, STATUS_OK, 7, STATUS_TRUNCATED),
        (0, STATUS_CANCELED, 0, STATUS_CANCELED),
    ],
)
def test_a_bad_fin_fails_the_receive_and_retires_its_block(verdict, status, length, expected):
    carrier, block = Carrier(), SharedBlock(PIECE_BYTES)
    receiver, transfer = OneCopyReceiver(carrier, None, OURS), receive(block)
    block.array[:RTS_BYTES] = rts_buffer(PIECE_BYTES)[:RTS_BYTES]
    receiver.interpret(transfer, STATUS_OK, RTS_BYTES)
    fin, _, then = carrier.posted[0]
    ctypes.memmove(fin.address, FIN.pack(verdict), FIN.size)
    then(status, length)
    assert carrier.finished == [(expected, 0)]
    assert block.ticket is None


def test_without_a_block_an_rts_is_answered_as_message():
    carrier = Carrier()
    data = rts_buffer(128)
    transfer = receive(data)
    assert OneCopyReceiver(carrier, None, OURS).interpret(transfer, STATUS_OK, RTS_BYTES) is None
    assert CTS.unpack(carrier.sent[0][0])[0] == AS_MESSAGE
    assert carrier.posted == [(transfer.memory, make_tag(3, DATA_CHANNEL, 8), transfer)]


def test_an_rts_of_another_size_is_refused_and_its_size_is_reported():
    carrier, data = Carrier(), rts_buffer(128)
    data[:RTS_BYTES] = rts_buffer(4096)[:RTS_BYTES]
    assert OneCopyReceiver(carrier, None, OURS).interpret(receive(data), STATUS_OK, RTS_BYTES) == (
        STATUS_OK,
        4096,
    )
    assert CTS.unpack(carrier.sent[0][0])[0] == REFUSED


def test_a_receive_too_short_for_the_rts_finds_it_in_the_peers_mailbox():
    carrier = Carrier()
    transfer = receive(np.zeros(8, np.uint8), peer=Peer([(8, 4096), (9, 1)]))
    assert OneCopyReceiver(carrier, None, OURS).interpret(transfer, STATUS_TRUNCATED, RTS_BYTES) == (
        STATUS_TRUNCATED,
        4096,
    )
    assert CTS.unpack(carrier.sent[0][0])[0] == REFUSED


@pytest.mark.parametrize("is_on_this_host", [True, False])
def test_a_message_as_long_as_an_rts_is_none_without_the_peers_key(is_on_this_host):
    data = rts_buffer(128, key=b"x" * 16)
    transfer = receive(data, peer=Peer())
    if not is_on_this_host:
        transfer.link.local_peer = None
    carrier = Carrier()
    assert OneCopyReceiver(carrier, None, OURS).interpret(transfer, STATUS_OK, RTS_BYTES) == (
        STATUS_OK,
        RTS_BYTES,
    )
    assert carrier.sent == []


# ---------------------------------------------------------------- both sides


async def test_processes_of_one_host_find_each_other_by_their_tickets_until_the_link_is_dropped():
    loop = asyncio.get_running_loop()
    one, other = OneCopyMessages(Carrier(), loop, OURS), OneCopyMessages(Carrier(), loop, THEIRS)
    try:
        local_peer = one.find_local_peer(other.ticket)
        assert one.find_local_peer(b"garbage") is None
        assert one.find_local_peer(other.ticket[:-1] + bytes([other.ticket[-1] ^ 1])) is None
        mine = other.find_local_peer(one.ticket)
        assert mine.can_read(other._mailbox)
        assert not one.busy
        one.drop(UcxLink(1, SimpleNamespace(handle=9), local_peer, OURS))
        assert not mine.can_read(other._mailbox)
    finally:
        one.close()
        other.close()
    one.close()
    assert other.find_local_peer(one.ticket) is None
