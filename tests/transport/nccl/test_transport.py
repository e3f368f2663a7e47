"""NCCL as a transport: the conformance suite on a library that stands in for NCCL and, with a GPU, on the
real one; then what only it has: turns, communicators that fail, aborts.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading

import numpy as np
import pytest
from fake_nccl import FakeNccl
from transport_conformance import EAGER, TransportConformance, data, join, tag, transfer, within

from jaxpp_async.errors import InstallError, ProtocolError, TransferError
from jaxpp_async.transport.base import check_tag, memory_of
from jaxpp_async.transport.nccl import link_end as nccl_end
from jaxpp_async.transport.nccl.library import NcclFailure, load_library
from jaxpp_async.transport.nccl.order import (
    LinkOrder,
    NcclLink,
    OrderedMessage,
    TurnQueue,
    links_by_maker,
    order_of,
    rounds,
)
from jaxpp_async.transport.nccl.transport import _SEQUENCE_MASK, NcclTransport


class SelfJoining(NcclTransport):
    """A transport that joins its links once both ends have connected, which the controller does otherwise."""

    known: dict[int, SelfJoining]

    async def connect(self, peer: int, address: bytes) -> None:
        await super().connect(peer, address)
        other = self.known.get(peer)
        if other is None or self.peer_id not in other._peers:
            return
        for link in sorted((NcclLink(self.peer_id, peer), NcclLink(peer, self.peer_id))):
            maker = self if link.maker == self.peer_id else other
            unique_id = maker.make_id()
            await asyncio.gather(self.join(link, unique_id), other.join(link, unique_id))


class InOrderOfPosts(SelfJoining):
    """Has an order of its own for each post. The suite knows no orders and has tags more than once, but posts
    what belongs together in the same order at both ends of each link."""

    def _post(self, way, memory, tag, done):
        check_tag(tag)
        link = NcclLink(self.peer_id, way.peer) if way.sends else NcclLink(way.peer, self.peer_id)
        end = self._joined.get(link)
        if end is not None and end.failure is None:
            self.begin(order_of(self.peer_id, [OrderedMessage(tag & _SEQUENCE_MASK, link)]))
        return super()._post(way, memory, tag, done)


@pytest.fixture
async def library():
    network = FakeNccl()
    yield network
    assert network.violations == []


@pytest.fixture
def kind():
    """Which transport the tests are about."""
    return SelfJoining


@pytest.fixture
async def make_transport(library, kind):
    made: dict[int, SelfJoining] = {}

    async def make(peer_id: int) -> SelfJoining:
        transport = made[peer_id] = kind(peer_id, library)
        transport.known = made
        return transport

    yield make
    for transport in made.values():
        await transport.aclose()
    assert not reply_handlers(), "threads that wait for a device are left"


@pytest.fixture
async def pair(make_transport):
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    return a, b


def reply_handlers() -> list[str]:
    """Threads of transports that do not end, a moment granted: the loop hears of an end a little before."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("jaxpp NCCL")]
    for thread in threads:
        thread.join(2.0)
    return [thread.name for thread in threads if thread.is_alive()]


class TestNcclConformance(TransportConformance):
    """All that NCCL can do, on the library that stands in for it."""

    matches_by_tag = is_eager = False

    @pytest.fixture
    def kind(self):
        return InOrderOfPosts


class TestBusyNcclConformance(TestNcclConformance):
    """The same while NCCL takes its time to take up calls."""

    @pytest.fixture
    async def library(self):
        network = FakeNccl(busy_polls=2)
        yield network
        assert network.violations == []


# ---------------------------------------------------------------- turns


def line(*sequences: int) -> LinkOrder:
    return order_of(0, [OrderedMessage(s, NcclLink(0, 1)) for s in sequences]).orders[NcclLink(0, 1)]


@pytest.mark.parametrize(
    ("offered", "gone"),
    [
        ([4, 2, 9], [[4], [2], [9]]),
        ([2, 4, 9], [[], [4, 2], [9]]),
        ([9, 2, 4], [[], [], [4, 2, 9]]),
        ([4, 9, 2], [[4], [], [2, 9]]),
    ],
)
def test_what_is_posted_out_of_turn_waits_for_it(offered, gone):
    queue: TurnQueue[int] = TurnQueue()
    for _ in range(2):  # the next step begins anew
        queue.begin(line(4, 2, 9))
        assert [queue.offer(s, s) for s in offered] == gone
    assert queue.clear() == []


def test_before_a_step_has_begun_nothing_has_a_turn():
    with pytest.raises(ProtocolError, match="sequence 7 is not one of the program's"):
        TurnQueue[str]().offer(7, "a")


def test_what_has_no_turn_is_refused():
    queue: TurnQueue[int] = TurnQueue()
    queue.begin(line(4, 2, 9))
    assert queue.offer(9, 9) == []
    assert queue.offer(4, 4) == [4]
    for sequence, why in ((5, "not one of the program's"), (4, "posted twice"), (9, "posted twice")):
        with pytest.raises(ProtocolError, match=f"sequence {sequence} is {why}"):
            queue.offer(sequence, 0)
    with pytest.raises(ProtocolError, match="2 transfers of the one before are still to be posted"):
        queue.begin(line(1))
    assert queue.clear() == [9]


def test_an_order_has_each_sequence_once():
    with pytest.raises(ValueError, match="sequence 3 stands twice"):
        order_of(0, [OrderedMessage(3, NcclLink(0, 1)), OrderedMessage(3, NcclLink(0, 1, 1, 1))])


def test_ids_are_made_by_the_lower_number_and_links_in_one_order_by_all():
    links = [
        NcclLink(2, 0),
        NcclLink(1, 2),
        NcclLink(0, 2, 1, 1),
        NcclLink(0, 2),
        NcclLink(2, 1),
        NcclLink(0, 2),
    ]
    assert links_by_maker(links) == {
        0: [NcclLink(0, 2), NcclLink(0, 2, 1, 1), NcclLink(2, 0)],
        1: [NcclLink(1, 2), NcclLink(2, 1)],
    }


@pytest.mark.parametrize(
    ("links", "most"),
    [
        ([NcclLink(a, b, d, d) for k in range(63) for a, b in ((k, k + 1), (k + 1, k)) for d in range(2)], 8),
        ([NcclLink(a, b) for a in range(8) for b in range(8) if a != b], 16),
        ([NcclLink(a, b) for k in range(0, 8, 2) for a, b in ((k, k + 1), (k + 1, k))], 2),
        ([], 0),
    ],
    ids=["a pipeline of 64, two devices each", "everyone with everyone", "pairs", "none"],
)
def test_links_are_made_in_few_rounds_in_which_nobody_waits_for_others(links, most):
    found = rounds([*links, *links])
    assert sorted(link for at_once in found for link in at_once) == sorted(links)
    assert len(found) <= most
    for at_once in found:
        ends = [end for link in at_once for end in link[:2]]
        assert len(ends) == len(set(ends))


def begin(pair, there=(), back=()) -> None:
    """A step begins for peers 0 and 1, with these sequences from 0 to 1, and from 1 to 0."""
    turns = [OrderedMessage(s, NcclLink(0, 1)) for s in there] + [
        OrderedMessage(s, NcclLink(1, 0)) for s in back
    ]
    for transport in pair:
        transport.begin(order_of(transport.peer_id, turns))


async def test_messages_posted_in_any_order_meet_their_own(pair):
    """The two ends post in different orders; each link goes in the program's."""
    a, b = pair
    for epoch in range(3):
        begin(pair, there=range(6))
        sent = [data(EAGER + i, i + epoch) for i in range(6)]
        got = [np.zeros(EAGER + i, np.uint8) for i in range(6)]
        sends = [a.send(sent[i], 1, tag(i)) for i in (5, 0, 2, 1, 4, 3)]
        await within(*[b.recv(got[i], 0, tag(i)) for i in (1, 0, 3, 5, 4, 2)], *sends)
        assert all(np.array_equal(s, g) for s, g in zip(sent, got, strict=True))
    with pytest.raises(ProtocolError, match="not one of the program's"):
        a.post_send(memory_of(data(4, 1), writable=False), 1, tag(17), print)
    with pytest.raises(ProtocolError, match="not one of the program's"):
        b.post_send(memory_of(data(4, 1), writable=False), 0, tag(0), print)  # it sends nothing in this step


@pytest.mark.parametrize("seed", range(4))
async def test_four_peers_post_at_random_and_every_message_meets_its_own(make_transport, library, seed):
    rng = random.Random(seed)
    library.busy_polls = seed % 3
    peers = [await make_transport(k) for k in range(4)]
    await join(*peers)
    ways = [(a, b) for a in range(4) for b in range(4) if a != b]
    for step in range(3):
        sizes = {way: [rng.choice((0, 1, 64, 5000)) for _ in range(rng.randrange(9))] for way in ways}
        turns = [
            OrderedMessage(100 * step + k, NcclLink(*way)) for way in ways for k in range(len(sizes[way]))
        ]
        for me, peer in enumerate(peers):
            peer.begin(order_of(me, [turn for turn in turns if me in turn.link[:2]]))
        messages = [(way, k, data(size, step + k)) for way in ways for k, size in enumerate(sizes[way])]
        received = [(way, k, np.zeros(sent.size, np.uint8)) for way, k, sent in messages]
        posts = [(peers[a].send, sent, b, k) for (a, b), k, sent in messages]
        posts += [(peers[b].recv, got, a, k) for (a, b), k, got in received]
        rng.shuffle(posts)
        futures = []
        for post, buffer, peer, k in posts:
            futures.append(post(buffer, peer, tag(100 * step + k)))
            if rng.random() < 0.2:
                await asyncio.sleep(0)
        await within(*futures)
        assert all(np.array_equal(s[2], g[2]) for s, g in zip(messages, received, strict=True))


async def test_nothing_is_posted_on_a_link_that_no_order_has_it_on(pair, library):
    """Neither before the first step nor after an abort, nor on a link that the step does not use."""
    a, b = pair
    post = memory_of(data(4, 1), writable=True)
    for refused in (a.post_send, a.post_recv):
        with pytest.raises(ProtocolError, match="sequence 3 is not one of the program's"):
            refused(post, 1, tag(3), print)
    begin(pair, there=[3])
    await transfer(a, b, EAGER, 3)
    await within(a.abort(), b.abort())
    await join(a, b)
    sent = library.num_messages
    with pytest.raises(ProtocolError, match="sequence 3 is not one of the program's"):
        a.post_send(post, 1, tag(3), print)
    assert library.num_messages == sent and library.num_pending == 0


async def test_a_step_that_needs_links_which_were_never_made_does_not_begin(pair):
    a, _ = pair
    for link in (NcclLink(0, 1, 1, 1), NcclLink(2, 0)):
        with pytest.raises(TransferError, match=r"link to peer \d"):
            a.begin(order_of(0, [OrderedMessage(0, link)]))


async def test_a_directions_receive_that_waits_does_not_hold_up_the_other(pair):
    """One communicator for both would: its kernels run one after the other."""
    a, b = pair
    begin(pair, there=[0], back=[0])
    got = [np.zeros(EAGER, np.uint8) for _ in range(2)]
    early = [a.recv(got[0], 1, tag(0)), b.recv(got[1], 0, tag(0))]
    await asyncio.sleep(0.005)
    await within(a.send(data(EAGER, 1), 1, tag(0)), b.send(data(EAGER, 2), 0, tag(0)), *early)
    assert np.array_equal(got[0], data(EAGER, 2)) and np.array_equal(got[1], data(EAGER, 1))


async def test_one_communicator_for_both_directions_deadlocks_the_stand_in_as_it_does_nccl():
    library = FakeNccl()
    unique_id = library.make_id()
    ends = [library.join(unique_id, rank, 0) for rank in (0, 1)]
    words = [library.word(0, k) for k in range(4)]
    for end in ends:
        end.recv(words.pop())
    for end in ends:
        end.send(words.pop())
    assert library.num_messages == 0 and library.num_pending == 4


# ---------------------------------------------------------------- making links


async def two(library, versions=None) -> tuple[NcclTransport, NcclTransport]:
    a, b = NcclTransport(0, library), NcclTransport(1, library if versions is None else versions)
    await a.connect(1, b.address), await b.connect(0, a.address)
    return a, b


async def test_links_need_one_version_of_nccl(library):
    with pytest.raises(ProtocolError, match=r"peer 1 has NCCL 2.31.2, peer 0 has 2.32.3; install the same"):
        await two(library, FakeNccl(version="2.31.2"))


async def test_a_link_is_ones_own_and_made_once(library):
    a, b = await two(library)
    unique_id = a.make_id()
    with pytest.raises(ValueError, match="does not end at peer 0"):
        await a.join(NcclLink(1, 2), unique_id)
    with pytest.raises(TransferError, match=r"peer 2.*not connected"):
        await a.join(NcclLink(0, 2), unique_id)
    with pytest.raises(TransferError, match="peer 1: it has no communicator"):
        await within(a.send(data(8, 1), 1, tag(0)))
    await asyncio.gather(a.join(NcclLink(0, 1), unique_id), b.join(NcclLink(0, 1), unique_id))
    with pytest.raises(ValueError, match="there is a communicator from peer 0 to peer 1, device 0 already"):
        await a.join(NcclLink(0, 1), a.make_id())
    await a.aclose(), await b.aclose()


async def test_a_peer_that_does_not_come_is_given_up(library):
    a, b = await two(library)
    with pytest.raises(
        TransferError, match=r"peer 1, device 0 could not be made: peer 1 did not come within 0.02 s"
    ):
        await a.join(NcclLink(0, 1), a.make_id(), timeout_s=0.02)
    assert library.num_aborted == 1
    await asyncio.gather(*(t.join(NcclLink(0, 1), i) for i in [a.make_id()] for t in (a, b)))
    begin((a, b), there=[1])
    await transfer(a, b, EAGER, 1)
    await a.aclose(), await b.aclose()


async def test_a_link_is_named_after_whose_processes_it_joins(library):
    a, b = await two(library)
    a.name = lambda process: f"actor {process + 6} (process 1 of 2)"
    said = r"^communicator from actor 6 \(process 1 of 2\) to actor 7 .*, device 0 could not be made: "
    said += "actor 7 .* did not"
    with pytest.raises(TransferError, match=said):
        await a.join(NcclLink(0, 1), a.make_id(), timeout_s=0.01)
    await a.aclose(), await b.aclose()


async def test_an_abort_ends_links_that_are_being_made(library):
    a, b = await two(library)
    joining = asyncio.gather(a.join(NcclLink(0, 1), a.make_id()), return_exceptions=True)
    await asyncio.sleep(0.01)
    await within(a.abort())
    (error,) = await within(joining)
    assert isinstance(error[0] if isinstance(error, list) else error, TransferError)
    cancelled = asyncio.ensure_future(b.join(NcclLink(0, 1), b.make_id()))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert library.num_aborted == library.num_joined == 2
    await a.aclose(), await b.aclose()


async def test_communicators_that_were_mixed_up_are_found_out(library):
    """Both links are made with the ids of each other: a word that passes says from whom it is."""
    a, b = await two(library)
    there, back = a.make_id(), a.make_id()
    mixed = [
        (a, NcclLink(0, 1), there),
        (b, NcclLink(0, 1, 1, 1), there),
        (a, NcclLink(0, 1, 1, 1), back),
        (b, NcclLink(0, 1), back),
    ]
    ends = await asyncio.gather(
        *(t.join(link, i, timeout_s=5) for t, link, i in mixed), return_exceptions=True
    )
    assert [type(end) for end in ends] == [type(None), TransferError, type(None), TransferError]
    assert "mixed up" in str(ends[1])
    await a.aclose(), await b.aclose()


async def test_a_refusal_of_nccl_is_a_transfer_error(library, monkeypatch):
    def refuse(*_):
        raise NcclFailure("SystemError (injected)")

    monkeypatch.setattr(library, "join", refuse)
    a, b = await two(library)
    with pytest.raises(TransferError, match="could not be made: SystemError"):
        await a.join(NcclLink(0, 1), a.make_id())
    await a.aclose(), await b.aclose()


# ---------------------------------------------------------------- failing


def channels(library):
    return [channel for made in library.made.values() for channel in made.channels.values()]


async def test_what_nccl_reports_ends_the_transfers_of_that_link_only(make_transport, library, monkeypatch):
    monkeypatch.setattr(nccl_end, "_CHECK_S", 0.01)
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    begin((a, b), there=[1], back=[1])
    lost, kept = a.recv(np.zeros(8, np.uint8), 1, tag(1)), b.recv(np.zeros(8, np.uint8), 0, tag(1))
    async with asyncio.timeout(5):
        while library.num_pending < 2:  # noqa: ASYNC110  the threads that call NCCL know no event loop
            await asyncio.sleep(0.001)
    failing = next(c for c in channels(library) if any(not o.sends for o in c.operations) and c.rank == 1)
    failing.error = "RemoteError: peer lost (injected)"
    first, second = await asyncio.wait([lost, kept], return_when=asyncio.FIRST_COMPLETED, timeout=5)
    assert len(first) == 1 and len(second) == 1
    with pytest.raises(TransferError, match=r"link lost \(RemoteError"):
        await first.pop()
    assert failing.is_aborted and library.num_aborted == 1


async def test_a_device_that_is_lost_is_told_by_the_mark(pair, library):
    a, b = pair
    begin(pair, back=[1])
    got = a.recv(np.zeros(8, np.uint8), 1, tag(1))
    await asyncio.sleep(0.01)
    for channel in channels(library):
        channel.device_lost = True
    sent = b.send(data(8, 1), 0, tag(1))
    for future in (got, sent):
        with pytest.raises(TransferError, match="the device is lost"):
            await within(future)
    for channel in channels(library):
        channel.device_lost = False


async def test_transfers_that_wait_for_their_turn_end_with_an_abort(pair, library):
    a, b = pair
    begin(pair, there=range(3))
    futures = [a.send(data(8, 1), 1, tag(2)), a.send(data(8, 1), 1, tag(0)), b.recv(np.zeros(8), 0, tag(1))]
    await within(a.abort(), b.abort())
    for future in futures:
        assert isinstance(future.exception(), TransferError)
    assert library.num_pending == 0


async def test_buffers_that_nccl_does_not_give_back_are_not_told_of(pair, library, monkeypatch):
    monkeypatch.setattr(nccl_end, "RELEASE_TIMEOUT_S", 0.05)
    a, _ = pair
    begin(pair, back=[1])
    open_receive = a.recv(np.zeros(8, np.uint8), 1, tag(1))
    library.abort_may_go_on.clear()
    try:
        with pytest.raises(TransferError, match=r"NCCL still holds 1 buffers .* this process has to end"):
            await within(a.abort())
        assert not open_receive.done()
    finally:
        library.abort_may_go_on.set()
    await within(pair[1].abort())


def test_a_missing_package_names_the_extra(monkeypatch):
    for missing in ("cupy", "nccl"):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(
            InstallError, match=r"needs the packages nccl4py and cupy.*pip install .*\[cuda13\]"
        ):
            load_library()
