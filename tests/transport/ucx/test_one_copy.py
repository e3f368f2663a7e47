"""One copy with offers (CTS_AHEAD): receives that are announced to senders of the same host, which write into
their memory."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from transport_conformance import data, join, tag, within
from waiting import until

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport import shared_memory
from jaxpp_async.transport.base import COPY_CHANNEL, HOST_CHANNEL, SENDER_SHIFT, make_tag, memory_of
from jaxpp_async.transport.shared_memory import RING_BYTES, BlockTicket, SharedBlock
from jaxpp_async.transport.ucx import offers, one_copy
from jaxpp_async.transport.ucx.offers import LinkOffers, OfferRing
from jaxpp_async.transport.ucx.one_copy import MIN_ONE_COPY_BYTES, MIN_RTS_BYTES, PIECE_BYTES, RTS_BYTES
from jaxpp_async.transport.ucx.tag_api import STATUS_TRUNCATED
from jaxpp_async.transport.ucx.transport import UCXTransport

ME, OTHER = 1 << SENDER_SHIFT, 2 << SENDER_SHIFT
STATUS_NO_MEMORY = -4
TICKET = BlockTicket(3, bytes(range(16)), 100)


def ring_and_link() -> tuple[np.ndarray, OfferRing, LinkOffers]:
    memory = np.zeros(RING_BYTES, np.uint8)
    return memory, OfferRing(memory), LinkOffers(memory, ME)


def test_offers_are_for_one_message_each():
    _, ring, link = ring_and_link()
    assert link.take(7, 0) is None
    assert ring.put(7 | ME, 1, TICKET) == 1
    ring.put(7 | OTHER, 0, TICKET)
    ring.put(8 | ME, 0, TICKET)
    assert link.take(7, 0) is None, (
        "the offer is for the second message, and the first one's is another sender's"
    )
    assert link.take(7, 1) == (1, TICKET)
    assert link.take(7, 1) is None
    ring.put(7 | ME, 3, TICKET)
    assert link.take(7, 4) is None, "the message before it has gone another way"
    assert link.take(8, 0) == (3, TICKET)
    assert not link._held


def test_messages_are_numbered_by_tag_and_way():
    _, _, link = ring_and_link()
    assert [link.sent.next(tag) for tag in (7, 7, 8, 7)] == [0, 1, 0, 2]
    assert link.received.next(7) == 0
    link.sent.undo_last(7)
    assert link.sent.next(7) == 2
    assert link.sent.next(make_tag(1, HOST_CHANNEL, 5)) is None
    assert len(link.sent._next) == 2


def test_torn_and_overwritten_offers_are_dropped(monkeypatch):
    memory, ring, link = ring_and_link()
    for number in range(3):
        ring.put(7 | ME, number, TICKET)
    memory[offers._row_at(1) + 24] ^= 1
    assert link.take(7, 0) is None
    assert link.take(7, 1) == (2, TICKET)
    monkeypatch.setattr(offers, "MOST_HELD", 5)
    for number in range(2, 2 + 3 * offers._ROWS):
        ring.put(9 | ME, number, TICKET)
    assert link.take(9, 0) is None
    assert [number for _, number in link._held] == list(range(3 * offers._ROWS - 3, 3 * offers._ROWS + 2))


# ---------------------------------------------------------------- between transports


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
async def pair():
    made = [UCXTransport(0), UCXTransport(1)]
    await join(*made)
    yield made
    for transport in made:
        await transport.aclose()


@pytest.fixture
def pieces(monkeypatch) -> list[int]:
    """Sizes of what is written."""
    sizes, move = [], ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda to, of, size: (sizes.append(size), move(to, of, size)))
    return sizes


@pytest.mark.parametrize("size", [MIN_ONE_COPY_BYTES, MIN_ONE_COPY_BYTES + 1, PIECE_BYTES])
async def test_offered_messages_need_no_cts(pair, pieces, monkeypatch, size):
    a, b = pair
    monkeypatch.setattr(a._one_copy.sender, "_send_rts", None)
    blocks, sent = [SharedBlock(size) for _ in range(3)], [data(size, seed) for seed in range(3)]
    last = np.zeros(8, np.uint8)
    receives = [b.recv(block, 0, tag(1)) for block in [*blocks, last]]
    await within(*receives, *[a.send(content, 1, tag(1)) for content in [*sent, data(8, 9)]])
    assert all(np.array_equal(block.array, content) for block, content in zip(blocks, sent, strict=True))
    assert np.array_equal(last, data(8, 9)), "what follows under the tag comes after them"
    assert sum(pieces) == 3 * size
    assert not a._open
    assert not b._open


async def test_an_offer_that_comes_late_is_never_used(pair, pieces):
    a, b = pair
    blocks, sent = (
        [SharedBlock(MIN_ONE_COPY_BYTES) for _ in range(2)],
        [data(MIN_ONE_COPY_BYTES, seed) for seed in range(2)],
    )
    send = a.send(sent[0], 1, tag(1))
    await within(b.recv(blocks[0], 0, tag(1)), send)
    assert np.array_equal(blocks[0].array, sent[0])
    assert not pieces
    blocks[0].array[:] = 7
    await within(b.recv(blocks[1], 0, tag(1)), a.send(sent[1], 1, tag(1)))
    assert np.array_equal(blocks[1].array, sent[1])
    assert np.all(blocks[0].array == 7)
    assert pieces == [MIN_ONE_COPY_BYTES]


@pytest.mark.parametrize(
    "size", [0, 8, RTS_BYTES, MIN_ONE_COPY_BYTES - 1, MIN_ONE_COPY_BYTES + 1, 2 * MIN_RTS_BYTES]
)
async def test_wrong_sizes_are_errors_and_what_follows_is_right(pair, size):
    a, b = pair
    wrong, block, sent = (
        SharedBlock(MIN_ONE_COPY_BYTES),
        SharedBlock(MIN_ONE_COPY_BYTES),
        data(MIN_ONE_COPY_BYTES, 1),
    )
    receive, following = b.recv(wrong, 0, tag(1)), b.recv(block, 0, tag(1))
    old = wrong.ticket
    await within(a.send(data(size, 0), 1, tag(1)))
    with pytest.raises(ProtocolError, match=f"expected {MIN_ONE_COPY_BYTES} bytes, got {size}"):
        await within(receive)
    assert wrong.ticket != old, "nobody writes there any more"
    await within(following, a.send(sent, 1, tag(1)))
    assert np.array_equal(block.array, sent)


@pytest.mark.parametrize("size", [MIN_ONE_COPY_BYTES, 3 * MIN_ONE_COPY_BYTES])
async def test_what_was_offered_before_an_abort_reaches_nobody(pair, size):
    a, b = pair
    block, sent = SharedBlock(size), data(size, 1)
    receive = b.recv(block, 0, tag(1))
    await within(b.abort(0))
    assert isinstance(receive.exception(), TransferError)
    block.array[:] = 7
    send = a.send(sent, 1, tag(1))
    await asyncio.sleep(0.01)
    assert np.all(block.array == 7)
    await within(a.abort(1), asyncio.gather(send, return_exceptions=True))
    await join(a, b)
    await within(b.recv(block, 0, tag(1, 2)), a.send(sent, 1, tag(1, 2)))
    assert np.array_equal(block.array, sent)


async def test_an_abort_allocates_nothing_and_blocks_are_shared_again_when_they_are_posted(
    pair, pieces, monkeypatch
):
    a, b = pair
    blocks, sent = [SharedBlock(size) for size in (MIN_ONE_COPY_BYTES, 3 * PIECE_BYTES)], []
    receives = [b.recv(block, 0, tag(n)) for n, block in enumerate(blocks)]
    made, make_file = [], shared_memory._make_file
    monkeypatch.setattr(shared_memory, "_make_file", lambda *args: made.append(args) or make_file(*args))
    before = resident_bytes()
    await within(b.abort(0), asyncio.gather(*receives, return_exceptions=True))
    assert not made
    assert resident_bytes() - before < MIN_ONE_COPY_BYTES // 2
    await within(a.abort(1))
    await join(a, b)
    for epoch in (2, 3):
        for n, block in enumerate(blocks):
            sent = data(block.size_bytes, n + epoch)
            await within(b.recv(block, 0, tag(n, epoch)), a.send(sent, 1, tag(n, epoch)))
            assert np.array_equal(block.array, sent)
    assert len(made) == 1, "the small one's; the large one was never offered, so nobody could write there"
    assert sum(pieces) == 2 * (MIN_ONE_COPY_BYTES + 3 * PIECE_BYTES)


async def test_a_retired_block_that_cannot_be_shared_receives_messages(pair, pieces, monkeypatch):
    a, b = pair
    block, sent, asked = SharedBlock(MIN_ONE_COPY_BYTES), data(MIN_ONE_COPY_BYTES, 1), []
    block.retire()

    def no_memory(size, address):
        asked.append(size)
        raise OSError("no memory")

    monkeypatch.setattr(shared_memory, "_make_file", no_memory)
    for _ in range(2):
        await within(b.recv(block, 0, tag(1)), a.send(sent, 1, tag(1)))
        assert np.array_equal(block.array, sent)
    assert not pieces
    assert len(asked) == 1


@pytest.mark.parametrize("side", ["send", "recv"])
async def test_what_ucx_refuses_has_no_number(pair, pieces, monkeypatch, side):
    a, b = pair
    with monkeypatch.context() as patch:
        patch.setattr((a if side == "send" else b)._port, side, lambda *_: STATUS_TRUNCATED)
        refused = (
            a.send(data(8, 0), 1, tag(1)) if side == "send" else b.recv(np.zeros(8, np.uint8), 0, tag(1))
        )
        with pytest.raises(TransferError, match="failed"):
            await within(refused)
    block, sent = SharedBlock(MIN_ONE_COPY_BYTES), data(MIN_ONE_COPY_BYTES, 1)
    await within(b.recv(block, 0, tag(1)), a.send(sent, 1, tag(1)))
    assert np.array_equal(block.array, sent)
    assert pieces == [MIN_ONE_COPY_BYTES], "both sides still count alike"


@pytest.mark.parametrize(
    ("refusing", "side", "size", "refused", "receive"),
    [
        ("a", "send", MIN_ONE_COPY_BYTES, MIN_ONE_COPY_BYTES, "none"),  # held back in vain
        ("a", "send", MIN_ONE_COPY_BYTES, 0, "block"),  # that it is written
        ("a", "send", 2 * PIECE_BYTES, RTS_BYTES, "block"),
        ("a", "recv", 2 * PIECE_BYTES, one_copy.CTS.size, "block"),
        ("b", "send", 2 * PIECE_BYTES, one_copy.CTS.size, "block"),
        ("b", "recv", 2 * PIECE_BYTES, one_copy.FIN.size, "block"),
        ("a", "send", 2 * PIECE_BYTES, one_copy.FIN.size, "block"),
        ("a", "send", 2 * PIECE_BYTES, 2 * PIECE_BYTES, "array"),
    ],
)
async def test_what_ucx_refuses_after_it_was_counted_fails_its_link(
    pair, monkeypatch, refusing, side, size, refused, receive
):
    """Nobody waits for ever, or takes one message for another."""
    a, b = pair
    a.hurry(True)
    monkeypatch.setattr(one_copy, "_HOLD_S", 0)
    one = a if refusing == "a" else b
    post = getattr(one._port, side)
    position = 2 if side == "send" else 1
    refuse = lambda *to: STATUS_NO_MEMORY if to[position] == refused else post(*to)  # noqa: E731
    monkeypatch.setattr(one._port, side, refuse)
    futures = []
    if receive != "none":
        futures.append(
            b.recv(SharedBlock(size) if receive == "block" else np.zeros(size, np.uint8), 0, tag(1))
        )
    futures.append(a.send(data(size, 1), 1, tag(1)))
    link = one._links[1 if one is a else 0]
    await until(lambda: link.failure is not None and any(future.done() for future in futures), every_s=0)
    with pytest.raises(TransferError, match="link lost"):
        await within(one.send(data(8, 1), link.peer, tag(2)))
    await within(a.abort(), b.abort())
    assert all(future.done() for future in futures)
    assert any(isinstance(future.exception(), TransferError) for future in futures), (
        "whoever has failed says so"
    )
    monkeypatch.undo()
    await join(a, b)
    block, sent = SharedBlock(size), data(size, 2)
    await within(b.recv(block, 0, tag(1, 2)), a.send(sent, 1, tag(1, 2)))
    assert np.array_equal(block.array, sent)


@pytest.mark.parametrize("channel", [HOST_CHANNEL, COPY_CHANNEL])
async def test_values_of_the_host_and_copies_are_not_held_back_for_they_are_never_offered(pair, channel):
    a, b = pair
    a.hurry(True)
    at, got = make_tag(1, channel, 5), np.zeros(MIN_ONE_COPY_BYTES, np.uint8)
    send = a.send(data(MIN_ONE_COPY_BYTES, 1), 1, at)
    assert not a._one_copy.sender.holds_back
    await within(b.recv(got, 0, at), send)
    assert np.array_equal(got, data(MIN_ONE_COPY_BYTES, 1))


async def test_who_never_offers_is_not_waited_for_because_another_does(pair):
    a, b = pair
    c = UCXTransport(2)
    try:
        await a.connect(2, c.address)
        await c.connect(0, a.address)
        a.hurry(True)
        block, plain, sent = (
            SharedBlock(MIN_ONE_COPY_BYTES),
            np.zeros(MIN_ONE_COPY_BYTES, np.uint8),
            data(MIN_ONE_COPY_BYTES, 1),
        )
        held_back = 0
        for _ in range(one_copy._MAX_VAIN_HOLDS + 3):
            receives = b.recv(block, 0, tag(1)), c.recv(plain, 0, tag(1))
            await within(a.send(sent, 1, tag(1)), receives[0])
            send = a.send(sent, 2, tag(1))
            held_back += a._one_copy.sender.holds_back
            await within(send, receives[1])
        assert held_back == one_copy._MAX_VAIN_HOLDS + 1
        assert np.array_equal(block.array, sent)
        assert np.array_equal(plain, sent)
    finally:
        await c.aclose()


async def test_a_message_that_was_here_first_is_counted(pair, pieces):
    a, b = pair
    await within(a.send(data(8, 0), 1, tag(1)))
    for _ in range(100):
        b._worker.progress_once()
    assert b.post_recv(memory_of(np.zeros(8, np.uint8), writable=True), 0, tag(1), print), (
        "the message is here"
    )
    block, sent = SharedBlock(MIN_ONE_COPY_BYTES), data(MIN_ONE_COPY_BYTES, 1)
    await within(b.recv(block, 0, tag(1)), a.send(sent, 1, tag(1)))
    assert pieces == [MIN_ONE_COPY_BYTES]
    assert np.array_equal(block.array, sent)


async def test_after_many_waits_in_vain_one_message_waits_again(pair):
    a, b = pair
    a.hurry(True)
    offers_of_link = a._links[1].offers
    held_back = []
    for count in (one_copy._HOLD_AGAIN_AFTER - 1, one_copy._HOLD_AGAIN_AFTER):
        offers_of_link.num_in_vain = count
        send = a.send(data(MIN_ONE_COPY_BYTES, 1), 1, tag(1))
        held_back.append(a._one_copy.sender.holds_back)
        await within(send, b.recv(np.zeros(MIN_ONE_COPY_BYTES, np.uint8), 0, tag(1)))
    assert held_back == [False, True]


async def test_what_waits_ends_when_its_link_fails(pair, monkeypatch):
    a, _ = pair
    a.hurry(True)
    monkeypatch.setattr(one_copy, "_HOLD_S", 60)
    send = a.send(data(MIN_ONE_COPY_BYTES, 1), 1, tag(1))
    assert a._one_copy.sender.holds_back
    a._fail_link(a._links[1], "lost")
    with pytest.raises(TransferError, match="link lost"):
        await within(send)
    assert not a._one_copy.sender.holds_back


async def test_an_offered_message_that_cannot_be_told_of_fails(pair, monkeypatch):
    a, b = pair
    receive = b.recv(SharedBlock(MIN_ONE_COPY_BYTES), 0, tag(1))
    monkeypatch.setattr(a._port, "send", lambda *_: STATUS_TRUNCATED)
    send = a.send(data(MIN_ONE_COPY_BYTES, 1), 1, tag(1))
    with pytest.raises((TransferError, ProtocolError)):
        await within(send)
    monkeypatch.undo()
    await within(b.abort(0), asyncio.gather(receive, return_exceptions=True))


async def test_an_idle_sender_forgets_blocks_that_their_owners_let_go_of(pair, monkeypatch):
    monkeypatch.setattr(one_copy, "_SWEEP_S", 0.001)
    a, b = pair
    block, local_peer = SharedBlock(MIN_ONE_COPY_BYTES), a._links[1].local_peer
    await within(b.recv(block, 0, tag(1)), a.send(data(MIN_ONE_COPY_BYTES, 1), 1, tag(1)))
    assert local_peer.has_blocks
    block.retire()
    for _ in range(1000):
        if local_peer.has_blocks:
            await asyncio.sleep(0.001)
    assert not local_peer.has_blocks


async def test_a_block_that_its_owner_let_go_of_is_not_placed(pair):
    a, _ = pair
    block = SharedBlock(MIN_ONE_COPY_BYTES)
    ticket, local_peer = block.ticket, a._links[1].local_peer
    local_peer.map_block(ticket)
    block.retire()
    with pytest.raises(ValueError, match="let go"):
        local_peer.map_block(ticket)


@pytest.mark.parametrize("hurried", [False, True])
async def test_one_pass_of_the_loop_writes_no_more_than_a_piece(pair, pieces, hurried):
    a, b = pair
    a.hurry(hurried)
    sizes = [MIN_ONE_COPY_BYTES] * 5 + [PIECE_BYTES] * 3 + [8, MIN_ONE_COPY_BYTES, MIN_ONE_COPY_BYTES]
    blocks, sent = (
        [SharedBlock(size) for size in sizes],
        [data(size, seed) for seed, size in enumerate(sizes)],
    )
    receives = [b.recv(block, 0, tag(1 + n % 2)) for n, block in enumerate(blocks)]
    sends = [a.send(content, 1, tag(1 + n % 2)) for n, content in enumerate(sent)]
    assert sum(pieces) == 4 * MIN_ONE_COPY_BYTES, "the first of them are written at once"
    passes = []
    while sum(pieces) < sum(sizes) - 8:
        before = sum(pieces)
        await asyncio.sleep(0)
        passes.append(sum(pieces) - before)
    assert max(passes) <= PIECE_BYTES
    await within(*sends, *receives)
    assert all(np.array_equal(block.array, content) for block, content in zip(blocks, sent, strict=True))
    assert not a._one_copy.sender.holds_back


async def test_a_sender_in_a_hurry_waits_for_an_offer_and_not_for_long(pair, pieces, monkeypatch):
    a, b = pair
    a.hurry(True)
    blocks, sent = (
        [SharedBlock(MIN_ONE_COPY_BYTES) for _ in range(3)],
        [data(MIN_ONE_COPY_BYTES, seed) for seed in range(3)],
    )
    got, small = np.zeros(8, np.uint8), data(8, 9)
    monkeypatch.setattr(one_copy, "_HOLD_S", 60)
    sends = [a.send(content, 1, tag(1)) for content in (sent[0], small, sent[1])]
    await asyncio.sleep(0.002)
    await within(*[b.recv(buffer, 0, tag(1)) for buffer in (blocks[0], got, blocks[1])], *sends)
    assert len(pieces) == 2
    monkeypatch.setattr(one_copy, "_HOLD_S", 0)
    for number in range(one_copy._MAX_VAIN_HOLDS + 3):  # the last of them do not wait any more
        send = a.send(sent[2], 1, tag(1))
        assert a._one_copy.sender.holds_back == (number <= one_copy._MAX_VAIN_HOLDS)
        await asyncio.sleep(0.002)
        await within(b.recv(blocks[2], 0, tag(1)), send)
    assert len(pieces) == 2
    await within(b.recv(blocks[2], 0, tag(1)), a.send(sent[2], 1, tag(1)))
    assert len(pieces) == 3
    assert np.array_equal(got, small)
    assert all(np.array_equal(block.array, content) for block, content in zip(blocks, sent, strict=True))
    monkeypatch.setattr(one_copy, "_HOLD_S", 60)
    send = a.send(sent[0], 1, tag(1))
    assert a._one_copy.sender.holds_back
    await within(a.abort())
    assert isinstance(send.exception(), TransferError)
    assert not a._one_copy.sender.holds_back
