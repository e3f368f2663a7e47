"""transport_conformance: what every transport has to do, as one suite.

A test module for a transport subclasses `TransportConformance` and has a fixture `make_transport`: an async
callable from a peer id to an open transport (with an attribute `peer_id`) on the running loop, which it
closes after the test.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport.base import PROGRAM_CHANNEL, make_tag, memory_of

ODD_SIZES = (0, 1, 3, 8, 4095, 4096, 65537, 5 << 20)
EAGER, LARGE = 64, 4 << 20
"""Sizes below and above every transport's switch from eager to matched sends."""

TIMEOUT_S = 10


def tag(sequence: int, epoch: int = 1) -> int:
    return make_tag(epoch, PROGRAM_CHANNEL, sequence)


def data(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


async def within(*futures):
    """The results of all futures, or an error after `TIMEOUT_S`."""
    async with asyncio.timeout(TIMEOUT_S):
        return await asyncio.gather(*futures)


async def join(*transports) -> None:
    """Connect all to all."""
    for a in transports:
        for b in transports:
            if a is not b:
                await a.connect(b.peer_id, b.address)


async def transfer(sender, receiver, size: int, sequence: int, epoch: int = 1) -> None:
    """One message there, checked."""
    sent, got = data(size, sequence), np.zeros(size, np.uint8)
    await within(
        receiver.recv(got, sender.peer_id, tag(sequence, epoch)),
        sender.send(sent, receiver.peer_id, tag(sequence, epoch)),
    )
    assert np.array_equal(sent, got)


class Posted:
    """Posts transfers on one transport and takes down how each ended."""

    def __init__(self, transport):
        self.transport = transport
        self.ends: dict[int, list] = {}
        self._posting = False
        self._changed = asyncio.Event()

    def send(self, buffer, peer: int, sequence: int, epoch: int = 1) -> bool:
        return self._post(self.transport.post_send, buffer, False, peer, sequence, epoch)

    def recv(self, buffer, peer: int, sequence: int, epoch: int = 1) -> bool:
        return self._post(self.transport.post_recv, buffer, True, peer, sequence, epoch)

    def _post(self, post, buffer, writable: bool, peer: int, sequence: int, epoch: int) -> bool:
        ends = self.ends[len(self.ends)] = []
        self._posting = True
        try:
            at_once = post(
                memory_of(buffer, writable=writable),
                peer,
                tag(sequence, epoch),
                lambda e: self._done(ends, e),
            )
        finally:
            self._posting = False
        if at_once:
            ends.append("at once")
        return at_once

    def _done(self, ends: list, error: Exception | None) -> None:
        ends.append("inside a post call" if self._posting else error)
        self._changed.set()

    async def wait(self) -> list:
        """How each ended, in the order they were posted, once all have; "at once" is None here."""
        async with asyncio.timeout(TIMEOUT_S):
            while not all(self.ends.values()):
                self._changed.clear()
                await self._changed.wait()
        await asyncio.sleep(0.002)  # for one that is told twice
        assert all(len(ends) == 1 for ends in self.ends.values()), self.ends
        return [None if ends[0] == "at once" else ends[0] for ends in self.ends.values()]


class TransportConformance:
    """Subclass as `Test...` in a module that has the fixture `make_transport`.

    Attributes:
        matches_by_tag: messages find their receives by tag, in any order, and a wrong size is found out. What
            does not (NCCL) has to be told the order, which here is that of the posts.
        is_eager: a small send completes though nobody receives it.
    """

    matches_by_tag = is_eager = True

    # ------------------------------------------------------------ moving bytes

    @pytest.mark.parametrize("size", ODD_SIZES)
    @pytest.mark.parametrize("receive_first", [True, False])
    async def test_bytes_arrive(self, pair, size, receive_first):
        a, b = pair
        sent, got = data(size, 1), np.zeros(size, np.uint8)
        if receive_first:
            futures = [b.recv(got, 0, tag(1)), a.send(sent, 1, tag(1))]
        else:
            first = a.send(sent, 1, tag(1))
            await asyncio.sleep(0)
            futures = [first, b.recv(got, 0, tag(1))]
        await within(*futures)
        assert np.array_equal(sent, got)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
    async def test_dtypes_travel_as_bytes(self, pair, dtype):
        import ml_dtypes  # noqa: F401  registers the names

        a, b = pair
        sent = np.arange(12).reshape(3, 4).astype(dtype)
        got = np.zeros_like(sent)
        sent.flags.writeable = False  # as a view of a JAX array is
        await within(b.recv(got, 0, tag(1)), a.send(sent, 1, tag(1)))
        assert np.array_equal(sent.view(np.uint8), got.view(np.uint8))

    @pytest.mark.parametrize("size", [EAGER, 65537])
    async def test_order_within_a_tag(self, pair, size):
        a, b = pair
        got = [np.zeros(size, np.uint8) for _ in range(10)]
        sent = [data(size, i) for i in range(10)]
        receives = [b.recv(g, 0, tag(1)) for g in got[:5]]
        sends = [a.send(s, 1, tag(1)) for s in sent]
        receives += [b.recv(g, 0, tag(1)) for g in got[5:]]
        await within(*receives, *sends)
        assert all(np.array_equal(s, g) for s, g in zip(sent, got, strict=True))

    async def test_tags_match_out_of_order(self, pair):
        self._needs("matches_by_tag")
        a, b = pair
        sent = [data(EAGER + i, i) for i in range(8)]
        got = [np.zeros(EAGER + i, np.uint8) for i in range(8)]
        sends = [a.send(s, 1, tag(i)) for i, s in enumerate(sent)]
        await asyncio.sleep(0.005)
        await within(*[b.recv(got[i], 0, tag(i)) for i in reversed(range(8))], *sends)
        assert all(np.array_equal(s, g) for s, g in zip(sent, got, strict=True))

    async def test_many_in_flight_both_ways(self, pair):
        self._needs("matches_by_tag")
        rng = random.Random(7)
        sizes = [rng.choice((0, 1, 100, 8192, 20_000, 300_000)) for _ in range(200)]
        work, checks = [], []
        for here, there in ((0, 1), (1, 0)):
            order = list(range(200))
            rng.shuffle(order)
            sent = [data(size, here * 1000 + i) for i, size in enumerate(sizes)]
            got = [np.zeros(size, np.uint8) for size in sizes]
            checks += zip(sent, got, strict=True)
            work += [pair[there].recv(got[i], here, tag(i)) for i in order[:120]]
            work += [pair[here].send(sent[i], there, tag(i)) for i in range(200)]
            work += [pair[there].recv(got[i], here, tag(i)) for i in order[120:]]
        await within(*work)
        assert all(np.array_equal(s, g) for s, g in checks)

    async def test_three_peers_with_equal_tags(self, make_transport):
        peers = [await make_transport(i) for i in (-1, 0, 7)]
        await join(*peers)
        work, checks = [], []
        for a in peers:
            for b in peers:
                if a is not b:
                    sent, got = data(5000, a.peer_id * 10 + b.peer_id + 100), np.zeros(5000, np.uint8)
                    checks.append((sent, got))
                    work += [a.send(sent, b.peer_id, tag(3)), b.recv(got, a.peer_id, tag(3))]
        await within(*work)
        assert all(np.array_equal(s, g) for s, g in checks)

    async def test_a_small_send_completes_without_a_receive_and_a_large_one_does_not(self, pair):
        self._needs("is_eager")
        a, b = pair
        small, large = data(EAGER, 1), data(LARGE, 2)
        await within(a.send(small, 1, tag(1)))
        open_send = a.send(large, 1, tag(2))
        await asyncio.sleep(0.02)
        assert not open_send.done()
        small[:] = 0  # the buffer of a completed send may be reused
        got_small, got_large = np.ones(EAGER, np.uint8), np.zeros(LARGE, np.uint8)
        await within(b.recv(got_large, 0, tag(2)), b.recv(got_small, 0, tag(1)), open_send)
        assert np.array_equal(got_small, data(EAGER, 1)) and np.array_equal(got_large, large)

    # ------------------------------------------------------------ wrong use

    @pytest.mark.parametrize(
        ("sent", "expected"), [(8, 100), (100, 8), (0, 8), (8, 0), (1000, LARGE), (LARGE, 1000)]
    )
    @pytest.mark.parametrize("receive_first", [True, False])
    async def test_wrong_size_is_a_protocol_error(self, pair, sent, expected, receive_first):
        self._needs("matches_by_tag")
        a, b = pair
        got = np.zeros(expected, np.uint8)
        receive = b.recv(got, 0, tag(1)) if receive_first else None
        send = a.send(data(sent, 1), 1, tag(1))
        await asyncio.sleep(0.005)
        receive = receive or b.recv(got, 0, tag(1))
        with pytest.raises(ProtocolError, match=rf"peer 0 to peer 1.*expected {expected} bytes, got {sent}"):
            await within(receive)
        await within(send)
        await transfer(a, b, LARGE, 2)

    @pytest.mark.parametrize(
        ("buffer", "why"),
        [
            (np.zeros((4, 4), np.uint8)[:, ::2], "not C-contiguous"),
            (np.zeros((4, 4), np.float32).T, "not C-contiguous"),
            (np.frombuffer(b"abcd", np.uint8), "read-only"),
            (bytearray(4), "not bytearray"),
            (np.array([object()]), "references"),
        ],
    )
    async def test_unfit_receive_buffers_are_refused(self, pair, buffer, why):
        with pytest.raises(ValueError, match=why):
            pair[1].recv(buffer, 0, tag(1))
        await transfer(*pair, EAGER, 1)

    async def test_unfit_send_buffers_and_tags_are_refused(self, pair):
        a, _ = pair
        with pytest.raises(ValueError, match="not C-contiguous"):
            a.send(np.zeros((4, 4))[:, 1], 1, tag(1))
        for bad in (-1, 1 << 64, 1 << 40):
            with pytest.raises(ValueError, match="make_tag"):
                a.send(data(4, 1), 1, bad)

    async def test_connect_refuses_itself_twice_and_nonsense(self, pair, make_transport):
        a, b = pair
        with pytest.raises(ValueError, match="itself"):
            await a.connect(0, a.address)
        with pytest.raises(ValueError, match="abort it"):
            await a.connect(1, b.address)
        for nonsense in (b"", b"\0" * 100, b"x" * 1000, b.address[:-1] + bytes([b.address[-1] ^ 1])):
            with pytest.raises((ProtocolError, TransferError)):
                await a.connect(5, nonsense)

    async def test_addresses_of_other_peers_and_other_epochs_are_refused(self, make_transport):
        a, b, c = await make_transport(0), await make_transport(1), await make_transport(2)
        stale = b.address
        for transport in (a, b, c):
            transport.epoch = 7  # as after a restart
        for wrong in (stale, c.address):
            with pytest.raises(ProtocolError):
                await a.connect(1, wrong)
        await join(a, b)
        await transfer(a, b, LARGE, 1, epoch=7)

    async def test_unconnected_peer_fails_on_the_future(self, pair):
        a, _ = pair
        for future in (a.send(data(4, 1), 9, tag(1)), a.recv(np.zeros(4), 9, tag(1))):
            with pytest.raises(TransferError, match=r"peer 9.*not connected"):
                await within(future)

    # ------------------------------------------------------------ posting without futures

    @pytest.mark.parametrize("size", ODD_SIZES)
    @pytest.mark.parametrize("receive_first", [True, False])
    async def test_posted_transfers_end_once(self, pair, size, receive_first):
        a, b = (Posted(t) for t in pair)
        sent, got = data(size, 1), np.zeros(size, np.uint8)
        if receive_first:
            assert not b.recv(got, 0, 1)
        a.send(sent, 1, 1)
        if not receive_first:
            await asyncio.sleep(0.002)
            b.recv(got, 0, 1)
        assert [await a.wait(), await b.wait()] == [[None], [None]]
        assert np.array_equal(sent, got)

    async def test_many_are_posted_both_ways_and_none_is_told_inside_a_post(self, pair):
        sizes = [random.Random(i).choice((0, 1, 100, 8192, 20_000, 300_000)) for i in range(100)]
        posters, checks = [Posted(t) for t in pair], []
        for i, size in enumerate(sizes):
            for here, there in ((0, 1), (1, 0)):
                sent, got = data(size, here * 1000 + i), np.zeros(size, np.uint8)
                checks.append((sent, got))
                first, last = posters[there].recv, posters[here].send
                for post, buffer, peer in ((first, got, here), (last, sent, there))[:: 1 if i % 3 else -1]:
                    post(buffer, peer, i)
        for poster in posters:
            assert set(await poster.wait()) == {None}
        assert all(np.array_equal(s, g) for s, g in checks)

    async def test_what_is_told_may_post(self, pair):
        """A ping-pong of which every message is posted where the one before is told."""
        ball, rounds, finished = [np.zeros(1, np.int64) for _ in pair], 300, asyncio.Event()
        memories = [memory_of(b, writable=True) for b in ball]

        def caught(here: int):
            def done(error):
                assert error is None
                ball[here][0] += 1
                count[here] += 1
                if count[here] == rounds:
                    finished.set()
                    return
                receive(here)
                pair[here].post_send(memories[here], 1 - here, tag(1), lambda error: None)

            return done

        def receive(here: int):
            ended = pair[here].post_recv(memories[here], 1 - here, tag(1), told := caught(here))
            if ended:
                told(None)

        count = [0, 0]
        receive(0), receive(1)
        pair[0].post_send(memories[0], 1, tag(1), lambda error: None)
        await within(finished.wait())
        assert max(count) == rounds and min(count) >= rounds - 1

    @pytest.mark.parametrize(("sent", "expected"), [(8, 100), (100, 8), (8, 0), (1000, LARGE), (LARGE, 1000)])
    @pytest.mark.parametrize("receive_first", [True, False])
    async def test_a_wrong_size_is_told(self, pair, sent, expected, receive_first):
        self._needs("matches_by_tag")
        a, b = (Posted(t) for t in pair)
        got = np.zeros(expected, np.uint8)
        if receive_first:
            b.recv(got, 0, 1)
        a.send(data(sent, 1), 1, 1)
        await asyncio.sleep(0.005)
        if not receive_first:
            assert not b.recv(got, 0, 1)
        assert await a.wait() == [None]
        (error,) = await b.wait()
        assert isinstance(error, ProtocolError) and f"expected {expected} bytes, got {sent}" in str(error)

    async def test_what_cannot_be_posted_is_raised_at_once_and_never_told(self, pair):
        a = Posted(pair[0])
        for post in (a.send, a.recv):
            with pytest.raises(TransferError, match=r"peer 9.*not connected"):
                post(np.zeros(4), 9, 1)
        for post in (pair[0].post_send, pair[0].post_recv):
            for bad in (-1, 1 << 64, 1 << 40):
                with pytest.raises(ValueError, match="make_tag"):
                    post(memory_of(np.zeros(4), writable=True), 1, bad, a.ends[0].append)
        await within(pair[0].aclose())
        with pytest.raises(TransferError, match="closed"):
            a.send(np.zeros(4), 1, 1)
        assert not any(a.ends.values())

    async def test_an_abort_tells_everything_open_before_it_returns(self, pair):
        a, b = (Posted(t) for t in pair)
        a.recv(np.zeros(8), 1, 1), a.recv(np.zeros(LARGE), 1, 2), a.send(data(LARGE, 1), 1, 3)
        await asyncio.sleep(0.002)
        await within(a.transport.abort(1))
        assert [len(ends) for ends in a.ends.values()] == [1, 1, 1]
        assert all(isinstance(error, TransferError) for error in await a.wait())
        await within(b.transport.abort(0))
        await join(*pair)
        await transfer(*pair, LARGE, 1, epoch=2)

    async def test_only_the_transport_holds_posted_memory(self, pair):
        a, b = (Posted(t) for t in pair)
        a.send(data(LARGE, 1), 1, 1)
        rubbish = [np.full(LARGE, 255, np.uint8) for _ in range(4)]
        got = np.zeros(LARGE, np.uint8)
        b.recv(got, 0, 1)
        assert [await a.wait(), await b.wait()] == [[None], [None]]
        assert np.array_equal(got, data(LARGE, 1)) and rubbish

    async def test_a_caller_that_raises_harms_no_other_transfer(self, pair):
        def broken(error):
            raise RuntimeError("injected")

        a, b = pair
        loop, noise = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: noise.append(context["exception"]))
        try:
            got = np.zeros(8, np.uint8)
            b.post_recv(memory_of(np.zeros(8, np.uint8), writable=True), 0, tag(1), broken)
            fine = b.recv(got, 0, tag(2))
            await within(a.send(data(8, 1), 1, tag(1)), a.send(data(8, 2), 1, tag(2)), fine)
            await transfer(a, b, LARGE, 3)
        finally:
            loop.set_exception_handler(None)
        assert np.array_equal(got, data(8, 2)) and [str(e) for e in noise] == ["injected"]

    @pytest.mark.parametrize("size", [EAGER, LARGE])
    async def test_in_a_hurry(self, pair, size):
        a, b = pair
        for transport in (a, b, a):
            transport.hurry(True)
            for i in range(5):
                await transfer(a, b, size, i)
                await transfer(b, a, size, i)
            await asyncio.sleep(0.01)  # nothing comes
            transport.hurry(False)
        b.hurry(True)
        late = b.recv(np.zeros(size, np.uint8), 0, tag(9))
        await asyncio.sleep(0.01)
        await within(a.send(data(size, 1), 1, tag(9)), late)

    # ------------------------------------------------------------ cancel

    @pytest.mark.parametrize("size", [EAGER, LARGE])
    async def test_cancelled_receive_takes_its_message(self, pair, size):
        a, b = pair
        first, second = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        receive = b.recv(first, 0, tag(1))
        await asyncio.sleep(0)
        receive.cancel()
        after = b.recv(second, 0, tag(1))
        sent = [data(size, 1), data(size, 2)]
        await within(*[a.send(s, 1, tag(1)) for s in sent], after)
        assert receive.cancelled()
        assert np.array_equal(first, sent[0]) and np.array_equal(second, sent[1])

    async def test_cancelled_large_send_still_sends_its_own_bytes(self, pair):
        a, b = pair
        send = a.send(data(LARGE, 1), 1, tag(1))  # only the transport holds this buffer
        await asyncio.sleep(0)
        send.cancel()
        await asyncio.sleep(0)
        rubbish = [np.full(LARGE, 255, np.uint8) for _ in range(4)]
        got = np.zeros(LARGE, np.uint8)
        await within(b.recv(got, 0, tag(1)))
        assert np.array_equal(got, data(LARGE, 1)) and rubbish

    # ------------------------------------------------------------ abort and close

    async def test_abort_and_go_on_in_a_new_epoch(self, pair):
        self._needs("matches_by_tag")
        a, b = pair
        for epoch in range(1, 6):
            await transfer(a, b, LARGE, 1, epoch)
            await transfer(b, a, EAGER, 2, epoch)
            open_transfers = [
                a.send(data(LARGE, 3), 1, tag(3, epoch)),  # never received
                a.recv(np.zeros(LARGE, np.uint8), 1, tag(4, epoch)),  # never sent
                b.recv(np.zeros(EAGER, np.uint8), 0, tag(5, epoch)),
                b.send(data(LARGE, 6), 0, tag(6, epoch)),
            ]
            await within(a.send(data(EAGER, 7), 1, tag(7, epoch)))  # sent, and never received
            await asyncio.sleep(0.002)
            assert not any(f.done() for f in open_transfers)
            await within(a.abort(), b.abort())
            for future in open_transfers:
                assert isinstance(future.exception(), TransferError), future
            await join(a, b)
        await transfer(a, b, LARGE, 1, 6)

    async def test_abort_in_the_middle_of_large_transfers(self, pair):
        a, b = pair
        for epoch in range(1, 5):
            got = [np.zeros(LARGE, np.uint8) for _ in range(4)]
            receives = [b.recv(g, 0, tag(i, epoch)) for i, g in enumerate(got)]
            sends = [a.send(data(LARGE, i), 1, tag(i, epoch)) for i in range(4)]
            await asyncio.sleep(0)
            await within(a.abort(1), b.abort(0))
            for future in receives + sends:
                assert future.done()
                assert future.exception() is None or isinstance(future.exception(), TransferError)
            frozen = [g.copy() for g in got]
            await join(a, b)
            await transfer(a, b, LARGE, 1, epoch + 10)
            assert all(np.array_equal(f, g) for f, g in zip(frozen, got, strict=True)), (
                "written after the abort"
            )

    async def test_abort_of_one_peer_leaves_the_others(self, make_transport):
        a, b, c = [await make_transport(i) for i in range(3)]
        await join(a, b, c)
        got = np.zeros(LARGE, np.uint8)
        kept, lost = a.recv(got, 2, tag(1)), a.recv(np.zeros(8), 1, tag(1))
        await within(a.abort(1), b.abort(0))
        assert isinstance(lost.exception(), TransferError) and not kept.done()
        await within(c.send(data(LARGE, 1), 0, tag(1)), kept)
        assert np.array_equal(got, data(LARGE, 1))
        with pytest.raises(TransferError):
            await within(a.send(data(8, 1), 1, tag(2)))

    async def test_abort_of_one_peer_while_another_is_sent_the_same_memory(self, make_transport):
        """UCX lets go of what several use at the end of the last of them."""
        self._needs("matches_by_tag")
        a, b, c = [await make_transport(i) for i in range(3)]
        await join(a, b, c)
        same, got = data(LARGE, 1), np.zeros(LARGE, np.uint8)
        lost, kept = a.send(same, 1, tag(1)), a.send(same, 2, tag(1))
        await asyncio.sleep(0.002)
        assert not lost.done()
        ending = asyncio.ensure_future(a.abort(1))
        await asyncio.sleep(0.01)
        await within(ending, c.recv(got, 0, tag(1)), kept)
        assert isinstance(lost.exception(), TransferError)
        assert np.array_equal(got, same)
        await within(b.abort(0))

    async def test_old_messages_do_not_match_a_new_epoch(self, pair):
        self._needs("is_eager")
        a, b = pair
        await within(a.send(data(EAGER, 1), 1, tag(1, epoch=1)))
        await asyncio.sleep(0.002)
        await within(a.abort(), b.abort())
        await join(a, b)
        await transfer(a, b, EAGER, 1, epoch=2)

    async def test_close_ends_open_transfers_and_twice_is_fine(self, pair):
        a, b = pair
        open_transfers = [a.send(data(LARGE, 1), 1, tag(1)), a.recv(np.zeros(8), 1, tag(2))]
        await asyncio.sleep(0)
        await within(a.aclose())
        for future in open_transfers:
            with pytest.raises(TransferError):
                await future
        await within(a.aclose(), a.aclose())
        with pytest.raises(TransferError, match="closed"):
            await a.send(data(8, 1), 1, tag(1))
        with pytest.raises(TransferError, match="closed"):
            await a.connect(1, b.address)

    async def test_failures_that_nobody_awaits_make_no_noise(self, pair):
        self._needs("matches_by_tag")
        import gc

        a, b = pair
        loop, noise = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: noise.append(context["message"]))
        try:
            for other, transport in ((1, a), (0, b)):
                transport.send(data(LARGE, 1), other, tag(1))
                transport.recv(np.zeros(8), other, tag(2))
                transport.recv(np.zeros(8), other, tag(3)).cancel()
            await within(a.aclose(), b.aclose())
            a.send(data(8, 1), 1, tag(1))
            gc.collect()
            await asyncio.sleep(0)
        finally:
            loop.set_exception_handler(None)
        assert not noise

    # ------------------------------------------------------------ fixtures

    def _needs(self, ability: str) -> None:
        if not getattr(self, ability):
            pytest.skip(f"this transport does not have it: {ability}")

    @pytest.fixture
    async def pair(self, make_transport):
        a, b = await make_transport(0), await make_transport(1)
        await join(a, b)
        return a, b
