"""Direct tests of the receiver's side of large messages that the sender writes where the receiver waits."""

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
    ANSWER,
    ANSWER_CHANNEL,
    AS_MESSAGE,
    DATA_CHANNEL,
    DIRECT_BYTES,
    END,
    HEADER,
    HEADER_BYTES,
    MESSAGE_FOLLOWS,
    PIECE_BYTES,
    REFUSED,
    WRITE,
    WRITTEN,
    OneCopyMessages,
    Receiver,
    may_be_offered,
    may_be_written,
    memory_with,
    own_tag,
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
    """Notes what is said; the test ends what is received."""

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


def header(size_bytes: int, serial: int = 8, key: bytes = KEY) -> np.ndarray:
    """A receive's memory, with a header in it."""
    data = np.zeros(max(size_bytes, HEADER_BYTES), np.uint8)
    data[:HEADER_BYTES] = np.frombuffer(HEADER.pack(key, serial, size_bytes), np.uint8)
    return data


# ---------------------------------------------------------------- what is said


def test_what_is_said_about_a_message_is_in_its_epoch_and_on_a_channel_of_its_own():
    tag = own_tag(make_tag(3, 1, 5), DATA_CHANNEL, 77)
    assert tag == make_tag(3, DATA_CHANNEL, 77)
    assert own_tag(TAG, ANSWER_CHANNEL, (1 << 24) + 2) == make_tag(3, ANSWER_CHANNEL, 2)


@pytest.mark.parametrize(
    ("size_bytes", "number", "written", "offered"),
    [
        (DIRECT_BYTES - 1, 0, False, False),
        (DIRECT_BYTES, 0, True, True),
        (PIECE_BYTES, 0, True, True),
        (PIECE_BYTES + 1, 0, True, False),
        (DIRECT_BYTES, None, True, False),
    ],
)
def test_only_messages_worth_it_are_written_and_only_numbered_ones_of_a_piece_offered(
    size_bytes, number, written, offered
):
    transfer = SimpleNamespace(memory=SimpleNamespace(size_bytes=size_bytes, on_device=False), number=number)
    assert (may_be_written(transfer), may_be_offered(transfer)) == (written, offered)


def test_memory_to_be_sent_holds_its_content():
    memory = memory_with(4, b"ab")
    assert ctypes.string_at(memory.address, 4) == b"ab\0\0"


# ---------------------------------------------------------------- offers


def test_a_receive_with_a_block_is_offered_to_its_sender_and_marked_as_unused():
    ring = np.zeros(RING_BYTES, np.uint8)
    receiver, block = Receiver(Carrier(), OfferRing(ring), OURS), SharedBlock(DIRECT_BYTES)
    block.mark.value = 5
    transfer = receive(block, number=2)
    receiver.invite(transfer)
    assert (transfer.offer, block.mark.value) == (1, 0)
    assert LinkOffers(ring, THEIRS).take(TAG, 2).ticket == block.ticket
    assert LinkOffers(ring, OURS).take(TAG, 2) is None  # of another sender


@pytest.mark.parametrize(
    ("make", "size_bytes"), [(np.zeros, DIRECT_BYTES), (SharedBlock, 64)], ids=["no block", "small"]
)
def test_another_receive_is_not_offered(make, size_bytes):
    receiver = Receiver(Carrier(), OfferRing(np.zeros(RING_BYTES, np.uint8)), OURS)
    transfer = receive(make(size_bytes))
    receiver.invite(transfer)
    assert transfer.offer == 0


def test_an_offer_that_was_used_is_the_whole_message():
    receiver, block = Receiver(Carrier(), None, OURS), SharedBlock(64)
    transfer = receive(block)
    transfer.offer, block.mark.value = 3, 3
    assert receiver.record_heartbeat(transfer, STATUS_OK, 0) == (STATUS_OK, 64)
    assert (transfer.offer, block.ticket is None) == (0, False)


@pytest.mark.parametrize(("status", "length"), [(STATUS_OK, 0), (STATUS_CANCELED, 0), (STATUS_OK, 8)])
def test_after_an_offer_in_vain_the_sender_can_write_to_memory_of_nobody_only(status, length):
    receiver, block = Receiver(Carrier(), None, OURS), SharedBlock(64)
    transfer = receive(block)
    transfer.offer, block.mark.value = 3, 2
    assert receiver.record_heartbeat(transfer, status, length) == (status, length)
    assert block.ticket is None
    assert not block.array.any()
    Receiver.prepare(transfer.memory)
    assert block.ticket is not None


def test_a_message_that_came_in_place_of_the_offer_leaves_the_block_alone():
    receiver, block = Receiver(Carrier(), None, OURS), SharedBlock(64)
    transfer = receive(block)
    transfer.offer = 3
    assert receiver.record_heartbeat(transfer, STATUS_OK, 64) == (STATUS_OK, 64)
    assert block.ticket is not None


# ---------------------------------------------------------------- announcements


def test_an_announced_message_is_told_where_to_be_written_and_is_there_at_its_end():
    carrier, block, peer = Carrier(), SharedBlock(PIECE_BYTES), Peer()
    receiver, transfer = Receiver(carrier, None, OURS), receive(block, peer=peer)
    block.array[:HEADER_BYTES] = header(PIECE_BYTES)[:HEADER_BYTES]
    assert receiver.record_heartbeat(transfer, STATUS_OK, HEADER_BYTES) is None
    ((answer, tag),) = carrier.sent
    verdict, *ticket = ANSWER.unpack(answer)
    assert (verdict, BlockTicket(*ticket), tag) == (WRITE, block.ticket, make_tag(3, ANSWER_CHANNEL, 8))
    assert (peer.answered, receiver.num_written) == ([8], 1)
    ((end, tag, then),) = carrier.posted
    assert tag == make_tag(3, DATA_CHANNEL, 8)
    ctypes.memmove(end.address, END.pack(WRITTEN), END.size)
    then(STATUS_OK, END.size)
    assert (carrier.finished, receiver.num_written) == ([(STATUS_OK, PIECE_BYTES)], 0)


def test_a_message_that_cannot_be_written_follows_as_a_message():
    carrier, block = Carrier(), SharedBlock(PIECE_BYTES)
    receiver, transfer = Receiver(carrier, None, OURS), receive(block)
    block.array[:HEADER_BYTES] = header(PIECE_BYTES)[:HEADER_BYTES]
    receiver.record_heartbeat(transfer, STATUS_OK, HEADER_BYTES)
    end, tag, then = carrier.posted[0]
    ctypes.memmove(end.address, END.pack(MESSAGE_FOLLOWS), END.size)
    then(STATUS_OK, END.size)
    assert carrier.posted[1] == (transfer.memory, tag, transfer)
    assert carrier.finished == []


@pytest.mark.parametrize(
    ("verdict", "status", "length", "told"),
    [
        (9, STATUS_OK, 1, STATUS_TRUNCATED),
        (WRITTEN, STATUS_OK, 7, STATUS_TRUNCATED),
        (0, STATUS_CANCELED, 0, STATUS_CANCELED),
    ],
)
def test_a_bad_end_fails_the_receive_and_takes_its_memory_from_the_sender(verdict, status, length, told):
    carrier, block = Carrier(), SharedBlock(PIECE_BYTES)
    receiver, transfer = Receiver(carrier, None, OURS), receive(block)
    block.array[:HEADER_BYTES] = header(PIECE_BYTES)[:HEADER_BYTES]
    receiver.record_heartbeat(transfer, STATUS_OK, HEADER_BYTES)
    end, _, then = carrier.posted[0]
    ctypes.memmove(end.address, END.pack(verdict), END.size)
    then(status, length)
    assert carrier.finished == [(told, 0)]
    assert block.ticket is None


def test_without_a_block_the_message_is_asked_for_as_such():
    carrier = Carrier()
    data = header(128)
    transfer = receive(data)
    assert Receiver(carrier, None, OURS).record_heartbeat(transfer, STATUS_OK, HEADER_BYTES) is None
    assert ANSWER.unpack(carrier.sent[0][0])[0] == AS_MESSAGE
    assert carrier.posted == [(transfer.memory, make_tag(3, DATA_CHANNEL, 8), transfer)]


def test_a_message_of_another_size_is_refused_and_its_size_is_told():
    carrier, data = Carrier(), header(128)
    data[:HEADER_BYTES] = header(4096)[:HEADER_BYTES]
    assert Receiver(carrier, None, OURS).record_heartbeat(receive(data), STATUS_OK, HEADER_BYTES) == (
        STATUS_OK,
        4096,
    )
    assert ANSWER.unpack(carrier.sent[0][0])[0] == REFUSED


def test_a_receive_too_short_for_the_header_finds_it_on_the_peers_board():
    carrier = Carrier()
    transfer = receive(np.zeros(8, np.uint8), peer=Peer([(8, 4096), (9, 1)]))
    assert Receiver(carrier, None, OURS).record_heartbeat(transfer, STATUS_TRUNCATED, HEADER_BYTES) == (
        STATUS_TRUNCATED,
        4096,
    )
    assert ANSWER.unpack(carrier.sent[0][0])[0] == REFUSED


@pytest.mark.parametrize("forged", [True, False])
def test_a_message_as_long_as_a_header_is_none_without_the_peers_key(forged):
    data = header(128, key=b"x" * 16)
    transfer = receive(data, peer=Peer())
    if not forged:
        transfer.link.local_peer = None  # no process of this host
    carrier = Carrier()
    assert Receiver(carrier, None, OURS).record_heartbeat(transfer, STATUS_OK, HEADER_BYTES) == (
        STATUS_OK,
        HEADER_BYTES,
    )
    assert carrier.sent == []


# ---------------------------------------------------------------- both sides


async def test_processes_of_one_host_know_each_other_by_their_tickets_until_they_part():
    loop = asyncio.get_running_loop()
    one, other = OneCopyMessages(Carrier(), loop, OURS), OneCopyMessages(Carrier(), loop, THEIRS)
    try:
        local_peer = one.meet(other.ticket)
        assert one.meet(b"garbage") is None
        assert one.meet(other.ticket[:-1] + bytes([other.ticket[-1] ^ 1])) is None
        mine = other.meet(one.ticket)
        assert mine.sees(other._mailbox)
        assert not one.busy
        one.drop(UcxLink(1, SimpleNamespace(handle=9), local_peer, OURS))
        assert not mine.sees(other._mailbox)
    finally:
        one.close()
        other.close()
    one.close()
    assert other.meet(one.ticket) is None
