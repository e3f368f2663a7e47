"""The UCX transport: the conformance suite within one process, then what only it has, then two processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import itertools
import os
import random
import socket
import stat
import sys
import time

import numpy as np
import psutil
import pytest
import uvloop
from peer_process import peer_of
from transport_conformance import LARGE, TransportConformance, data, join, tag, transfer, within
from waiting import until

from jaxpp_async.errors import InstallError, ProtocolError, TransferError
from jaxpp_async.transport import shared_memory
from jaxpp_async.transport.base import memory_of, seal, unseal
from jaxpp_async.transport.network import Network
from jaxpp_async.transport.shared_memory import SharedBlock
from jaxpp_async.transport.ucx import one_copy
from jaxpp_async.transport.ucx import transport as ucx_transport
from jaxpp_async.transport.ucx.context import shares_memory
from jaxpp_async.transport.ucx.links import SENDING, UcxTransfer
from jaxpp_async.transport.ucx.one_copy import MIN_ONE_COPY_BYTES
from jaxpp_async.transport.ucx.transport import UCXTransport

if importlib.util.find_spec("ucxx") is None:
    # importing it here would be before the transport sets UCX's environment
    pytest.skip("UCX tests need the package ucxx", allow_module_level=True)


@pytest.fixture
async def make_transport():
    made = []

    async def make(peer_id: int) -> UCXTransport:
        made.append(UCXTransport(peer_id))
        return made[-1]

    yield make
    for transport in made:
        await transport.aclose()


class TestUCXConformance(TransportConformance):
    """All of it, as between hosts. Within one: `TestDirectConformance`."""

    @pytest.fixture(autouse=True)
    def apart(self, monkeypatch):
        monkeypatch.setattr(shared_memory.LocalPeer, "from_ticket", lambda ticket: None)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


# ---------------------------------------------------------------- one process


async def open_use_close() -> None:
    a, b = UCXTransport(0), UCXTransport(1)
    await join(a, b)
    await transfer(a, b, LARGE, 1)
    open_transfers = [a.send(data(LARGE, 1), 1, tag(2)), b.recv(np.zeros(8), 0, tag(3))]
    await asyncio.sleep(0)
    await within(a.aclose(), b.aclose())
    assert all(f.done() for f in open_transfers)


async def test_close_gives_back_every_descriptor():
    await open_use_close()  # libraries open some of their own at first use
    before = num_descriptors()
    for _ in range(4):
        await open_use_close()
        gc.collect()
        assert num_descriptors() == before


def test_works_on_uvloop_and_on_asyncio_in_turn():
    async def rounds():
        await open_use_close()
        a, b = UCXTransport(0), UCXTransport(1)
        await join(a, b)
        for epoch in (1, 2):
            for size in (0, 8, 65537, LARGE):
                await transfer(a, b, size, size, epoch)
            await within(a.abort(), b.abort())
            await join(a, b)
        await within(a.aclose(), b.aclose())

    for run in (uvloop.run, asyncio.run, uvloop.run):
        run(rounds())


@pytest.mark.parametrize("in_a_hurry", [False, True])
async def test_waiting_costs_no_cpu(make_transport, in_a_hurry):
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    await transfer(a, b, LARGE, 1)
    b.hurry(in_a_hurry), a.hurry(in_a_hurry)
    waiting = [b.recv(np.zeros(8), 0, tag(2)), a.send(data(LARGE, 1), 1, tag(3))]
    await asyncio.sleep(0.05)
    before = cpu_seconds()
    await asyncio.sleep(0.5)
    assert cpu_seconds() - before < 0.1
    assert not any(f.done() for f in waiting)


async def test_many_messages_without_receives_do_not_starve_the_loop(make_transport):
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    await transfer(a, b, 8, 0)
    sends = [a.send(data(8000, i), 1, tag(i)) for i in range(1, 2000)]
    loop = asyncio.get_running_loop()
    slowest_s = 0.0
    while not all(f.done() for f in sends):
        start_s = loop.time()
        await asyncio.sleep(0)
        slowest_s = max(slowest_s, loop.time() - start_s)
    assert slowest_s < 0.5


async def test_an_error_in_progress_fails_the_futures_and_not_the_loop(make_transport, monkeypatch):
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    await transfer(a, b, LARGE, 1)
    held = [a.recv(np.zeros(8), 1, tag(2)), a.send(data(LARGE, 1), 1, tag(3))]
    await asyncio.sleep(0.01)

    class BrokenWorker:
        def progress_once(self):
            raise a._ucxx.UCXIOError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(a._progress, "_worker", BrokenWorker())
        a._progress.run()
    for future in (*held, a.send(data(8, 1), 1, tag(4))):
        with pytest.raises(TransferError, match="no progress any more: injected"):
            await within(future)
    await within(a.aclose())


def own_abstract_sockets() -> set[str]:
    """Names of this process's sockets that every user of this machine can send to."""
    found = psutil.Process().net_connections("unix")
    return {one.laddr for one in found if isinstance(one.laddr, str) and one.laddr.startswith("@")}


@pytest.mark.skipif(not shares_memory(), reason="needs shared memory")
async def test_strangers_datagrams_to_the_socket_that_wakes_a_worker_end_nothing():
    """An empty one, from any user of the machine, ended the mesh: UCX takes it for an end of file."""
    before = own_abstract_sockets()
    a, b = UCXTransport(0, network=Network(())), UCXTransport(1, network=Network(()))
    await join(a, b)
    names = own_abstract_sockets() - before
    assert len(names) == 2
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        for i in range(20):
            for name, words in itertools.product(names, (b"", b"x", bytes(5000))):
                with contextlib.suppress(BlockingIOError):
                    stranger.sendto(words, name.replace("@", "\0"))
            await asyncio.sleep(0)
            await transfer(a, b, LARGE if i % 5 == 0 else 8, i)
    await within(a.aclose(), b.aclose())


WORKER_ADDRESS = bytes(range(217))
GOOD = seal("ucx", WORKER_ADDRESS, 1, 3)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (b"", "0 bytes are no address of peer 1"),
        (b"memory:1:1", "no address of peer 1; do both sides use transport 'ucx'"),
        (GOOD[:30], "no address"),
        (GOOD[:-1], "damaged"),
        (GOOD + b"\0", "damaged"),
        (GOOD[:-1] + b"\1", "damaged"),
        (GOOD[:3] + b"\1" + GOOD[4:], "has layout 1, here 2"),
        (GOOD[:15] + b"\2" + GOOD[16:], "damaged"),  # the peer's number, without the checksum
        (WORKER_ADDRESS, "no address"),
        (seal("memory", WORKER_ADDRESS, 1, 3), "is of transport b'memory', expected 'ucx'"),
        (seal("ucx", WORKER_ADDRESS, 2, 3), "expected the ucx address of peer 1, got that of peer 2"),
        (seal("ucx", WORKER_ADDRESS, -1, 3), "got that of peer -1"),
        (seal("ucx", WORKER_ADDRESS, 1, 2), "is of epoch 2, but this is epoch 3: out of date"),
        (seal("ucx", WORKER_ADDRESS, 1, 4), "is of epoch 4"),
        (seal("ucx", b"", 1, 3), "has 0 bytes, which is not plausible"),
        (seal("ucx", bytes(1 << 17), 1, 3), "not plausible"),
    ],
)
async def test_wrong_addresses_never_reach_ucx(make_transport, monkeypatch, address, why):
    """Case 24: forged, corrupt or stale."""
    transport = await make_transport(0)
    transport.epoch = 3
    seen: list[object] = []
    monkeypatch.setattr(transport, "_worker", SeesAddresses(transport._worker, seen))
    began = time.monotonic()
    with pytest.raises(ProtocolError, match=why):
        await transport.connect(1, address)
    assert time.monotonic() - began < 1 and not seen


class SeesAddresses:
    """A worker that takes down what it is asked to connect to."""

    def __init__(self, worker, seen):
        self._worker, self._seen = worker, seen

    def __getattr__(self, name):
        if name.startswith("create_endpoint"):
            self._seen.append(name)
        return getattr(self._worker, name)


def test_mutated_addresses_are_refused():
    rng = random.Random(0)
    for _ in range(2000):
        data = bytearray(GOOD)
        match rng.randrange(4):
            case 0:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                del data[rng.randrange(len(data)) :]
            case 2:
                data[(at := rng.randrange(len(data))) : at] = rng.randbytes(rng.randint(1, 300))
            case _:
                at = rng.randrange(len(data) - 8)
                data[at : at + 8] = rng.randbytes(8)
        with pytest.raises(ProtocolError):
            unseal("ucx", bytes(data), 1, 3)


def test_addresses_round_trip():
    for peer, epoch in ((-1, 0), (0, 65535), (65534, 1)):
        assert (
            unseal("ucx", memoryview(seal("ucx", WORKER_ADDRESS, peer, epoch)), peer, epoch) == WORKER_ADDRESS
        )


@pytest.mark.skipif("UCX_TLS" in os.environ and os.environ["UCX_TLS"] != "^sysv", reason="UCX_TLS is set")
async def test_shared_memory_is_the_users_own(make_transport):
    await make_transport(0)
    assert not any("/SYSV" in mapping.path for mapping in psutil.Process().memory_maps(grouped=True))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            descriptor = os.path.join("/proc/self/fd", name)
            assert (
                "ucx_shm" not in os.readlink(descriptor) or stat.S_IMODE(os.stat(descriptor).st_mode) == 0o600
            )


@pytest.mark.parametrize("peer_id", [-2, 65535])
async def test_peer_ids_that_do_not_fit_a_tag_are_refused(peer_id):
    with pytest.raises(ValueError, match="not between -1 and 65534"):
        UCXTransport(peer_id)


async def test_without_ucxx_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    with pytest.raises(InstallError, match=r"pip install .*\[cpu\]'"):
        UCXTransport(0)


# ---------------------------------------------------------------- two processes


@pytest.mark.parametrize("loop_name", ["uvloop", "asyncio"])
async def test_two_processes(make_transport, loop_name):
    transport = await make_transport(0)
    async with peer_of(transport, loop_name) as peer:
        sizes = [0, 1, 8, 4095, 65537, 5 << 20]
        peer.write(f"echo 4 {' '.join(map(str, sizes))}")
        for size in sizes:
            sent, got = data(size, size), np.zeros(size, np.uint8)
            await within(transport.recv(got, 1, tag(4)), transport.send(sent, 1, tag(4)))
            assert np.array_equal(sent, got)
        assert await peer.read() == "done"
        peer.write("")
        assert await asyncio.to_thread(peer.process.wait, 10) == 0


async def test_wrong_size_from_another_process(make_transport):
    transport = await make_transport(0)
    async with peer_of(transport) as peer:
        for number, (size, expected) in enumerate(
            [(8, 16), (16, 8), (LARGE, 8), (8, LARGE), (LARGE, LARGE // 2)]
        ):
            receive = transport.recv(np.zeros(expected, np.uint8), 1, tag(number))
            peer.write(f"send {number} {size}")
            with pytest.raises(ProtocolError, match=f"expected {expected} bytes, got {size}"):
                await within(receive)


async def test_abort_ends_everything_after_the_peer_was_killed(make_transport):
    descriptors = []
    for _ in range(3):
        transport = await make_transport(0)  # a new one after each death, as the contract asks
        async with peer_of(transport) as peer:
            peer.write("echo 1 8")
            got = np.zeros(8, np.uint8)
            await within(transport.send(data(8, 1), 1, tag(1)), transport.recv(got, 1, tag(1)))
            held = [
                transport.recv(np.zeros(8), 1, tag(2)),  # what UCX alone would keep for ever
                transport.recv(np.zeros(LARGE), 1, tag(3)),
                transport.send(data(LARGE, 1), 1, tag(4)),
            ]
            await asyncio.sleep(0.01)
            assert not any(f.done() for f in held)
            peer.kill()
            async with asyncio.timeout(3):
                await transport.abort(1)
            assert all(isinstance(f.exception(), TransferError) for f in held)
        await within(transport.aclose())
        descriptors.append(num_descriptors())
    assert descriptors[0] == descriptors[-1]


async def test_a_peer_killed_in_the_middle_of_a_large_transfer(make_transport):
    transport = await make_transport(0)
    size = 64 << 20
    async with peer_of(transport) as peer:
        peer.write(f"send 1 {size}")
        assert await peer.read() == "done"
        receive = transport.recv(np.zeros(size, np.uint8), 1, tag(1))
        await asyncio.sleep(0)
        peer.kill()
        await asyncio.sleep(0.2)  # what is under way may still be copied
        before = cpu_seconds()
        await asyncio.sleep(0.3)
        assert cpu_seconds() - before < 0.2, "spins on a queue that the dead peer left behind"
        async with asyncio.timeout(3):
            await transport.aclose()
        assert receive.done()
    fresh = await make_transport(0)
    async with peer_of(fresh) as peer:
        peer.write(f"echo 2 {LARGE}")
        sent, got = data(LARGE, 1), np.zeros(LARGE, np.uint8)
        await within(fresh.send(sent, 1, tag(2)), fresh.recv(got, 1, tag(2)))
        assert np.array_equal(sent, got)


# ---------------------------------------------------------------- one copy


class BlockReceives(UCXTransport):
    """Receives into shared blocks, as actors do, and copies to where the test wants it."""

    def post_recv(self, memory, peer, tag, done):
        block = SharedBlock.make(memory.size_bytes) if memory.size_bytes >= MIN_ONE_COPY_BYTES else None
        if block is None:
            return super().post_recv(memory, peer, tag, done)

        def copied(error):
            if error is None:
                ctypes.memmove(memory.address, block.address, memory.size_bytes)
            done(error)

        if super().post_recv(memory_of(block, writable=True), peer, tag, copied):
            copied(None)
        return False


class TestDirectConformance(TransportConformance):
    """All of it, where large messages are written by their senders."""

    @pytest.fixture
    async def make_transport(self):
        made = []

        async def make(peer_id: int) -> UCXTransport:
            made.append(BlockReceives(peer_id))
            return made[-1]

        yield make
        for transport in made:
            await transport.aclose()


def write_count(monkeypatch) -> list[int]:
    """Sizes of the pieces that are written from now on."""
    pieces, move = [], ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda to, of, size: (pieces.append(size), move(to, of, size)))
    return pieces


@pytest.mark.parametrize("size", [MIN_ONE_COPY_BYTES - 1, MIN_ONE_COPY_BYTES, MIN_ONE_COPY_BYTES + 4097])
async def test_large_messages_are_written_by_their_sender(make_transport, monkeypatch, size):
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    pieces, block = write_count(monkeypatch), SharedBlock(size)
    for seed in range(2):
        sent = data(size, seed)
        await within(b.recv(block, 0, tag(1)), a.send(sent, 1, tag(1)))
        assert np.array_equal(block.array, sent)
    assert sum(pieces) == (2 * size if size >= MIN_ONE_COPY_BYTES else 0)
    assert max(pieces, default=0) <= one_copy.PIECE_BYTES


async def test_other_buffers_other_hosts_and_kept_apart_processes_get_messages(make_transport, monkeypatch):
    pieces = write_count(monkeypatch)
    for case in ("buffer", "boot", "key", "UCX_TLS", "unreachable block", "full mailbox"):
        a, b = await make_transport(0), await make_transport(1)
        got = SharedBlock(LARGE)
        with monkeypatch.context() as patch:
            if case == "boot":
                patch.setattr(
                    shared_memory, "_host_identity", iter([(bytes(16), 1), (bytes(16), 2)]).__next__
                )
            elif case == "key":
                patch.setattr(b._one_copy._mailbox, "ticket", b._one_copy._mailbox.ticket[:-1] + b"?")
            elif case == "UCX_TLS":
                patch.setenv("UCX_TLS", "tcp,self")
            elif case == "full mailbox":
                patch.setattr(a._one_copy._mailbox, "_free", [])
            elif case == "unreachable block":
                assert got.ticket is not None
                got.ticket = got.ticket._replace(key=bytes(16))
            await join(a, b)
            if case == "full mailbox":  # an offer needs no row of the mailbox
                patch.setattr(b._one_copy.receiver, "_ring", None)
            await within(
                b.recv(got.array if case == "buffer" else got, 0, tag(1)), a.send(data(LARGE, 1), 1, tag(1))
            )
            assert np.array_equal(got.array, data(LARGE, 1)), case
            assert not pieces, case


async def test_what_is_written_after_an_abort_reaches_nobody(make_transport, monkeypatch):
    """The receiver gives up in the middle; the sender, who has not heard of it, writes on."""
    monkeypatch.setattr(one_copy, "PIECE_BYTES", LARGE // 4)
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    block, sent = SharedBlock(LARGE), data(LARGE, 1)
    receive, send = b.recv(block, 0, tag(1)), a.send(sent, 1, tag(1))
    await until(lambda: a._one_copy.sender._written_bytes, every_s=0)
    assert a._one_copy.busy
    assert not a._one_copy.sender.holds_back, "what is sent meanwhile need not go behind it"
    local_peer, ticket = a._links[1].local_peer, block.ticket
    assert local_peer is not None and ticket is not None
    old = local_peer._blocks[ticket.key]
    await within(b.abort(0))
    assert isinstance(receive.exception(), TransferError)
    block.array[:] = 7
    old._whole[:] = 9
    await until(lambda: not a._one_copy.busy, every_s=0)
    assert np.all(block.array == 7)
    await within(a.abort(1), asyncio.gather(send, return_exceptions=True))
    await join(a, b)
    await within(b.recv(block, 0, tag(1, 2)), a.send(sent, 1, tag(1, 2)))
    assert np.array_equal(block.array, sent)


async def test_a_block_stays_mapped_while_it_is_written(make_transport, monkeypatch):
    """Its owner lets go of it in the middle, and the sender, who has not heard of that, looks what was let go
    of."""
    monkeypatch.setattr(one_copy, "PIECE_BYTES", LARGE // 4)
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    block = SharedBlock(LARGE)
    receive, send = b.recv(block, 0, tag(1)), a.send(data(LARGE, 1), 1, tag(1))
    await until(lambda: a._one_copy.sender._written_bytes, every_s=0)
    local_peer = a._links[1].local_peer
    assert local_peer is not None
    block.retire()  # as by an abort in another process
    local_peer.unmap_freed_blocks()
    assert not local_peer.has_blocks
    assert a._one_copy.busy
    await within(send)  # a segmentation fault otherwise
    assert not block.array.all()
    await within(a.abort(1), b.abort(0), asyncio.gather(receive, return_exceptions=True))


@pytest.mark.parametrize("blind", [0, 1])
async def test_one_side_alone_sees_the_other(make_transport, monkeypatch, blind):
    """As where only one of two users, or only the side with descriptors left, may open the other's memory."""
    a, b = await make_transport(0), await make_transport(1)
    of = shared_memory.LocalPeer.from_ticket
    with monkeypatch.context() as patch:
        unseen = (a, b)[1 - blind]._one_copy.ticket
        patch.setattr(
            shared_memory.LocalPeer, "from_ticket", lambda ticket: None if ticket == unseen else of(ticket)
        )
        await join(a, b)
    pieces = write_count(monkeypatch)
    for sender, receiver in ((a, b), (b, a)):
        block = SharedBlock(LARGE)
        receive = receiver.recv(block, sender.peer_id, tag(1))
        await within(receive, sender.send(data(LARGE, 1), receiver.peer_id, tag(1)))
        assert np.array_equal(block.array, data(LARGE, 1))
    assert not pieces


async def test_short_receives_let_every_sender_go(make_transport):
    """The RTS lies nowhere then; each sender counts from one, and one tag goes to several peers."""
    a, b, c = await make_transport(0), await make_transport(1), await make_transport(2)
    for other in (b, c):
        await join(a, other)
    for other in (b, c):
        receive = a.recv(np.zeros(16, np.uint8), other.peer_id, tag(1))
        send = other.send(data(LARGE, 1), 0, tag(1))
        with pytest.raises(ProtocolError, match=f"expected 16 bytes, got {LARGE}"):
            await within(receive)
        await within(send)
    sends = [a.send(data(LARGE, 1), 1, tag(2)), a.send(data(2 * LARGE, 1), 2, tag(2))]
    receive = c.recv(np.zeros(16, np.uint8), 0, tag(2))
    with pytest.raises(ProtocolError, match=f"got {2 * LARGE}"):
        await within(receive)
    await within(sends[1])
    await within(b.recv(SharedBlock(LARGE), 0, tag(2)), sends[0])


async def test_blocks_of_another_size_are_not_written(make_transport, monkeypatch):
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    small = SharedBlock(4096)
    assert small.ticket is not None
    a._links[1].local_peer.map_block(small.ticket)  # from then on it is known by its key
    for number, (size, error) in enumerate([(LARGE, None), (4096, ProtocolError)]):
        block = SharedBlock(LARGE)
        block.ticket = small.ticket._replace(size_bytes=size)
        pieces = write_count(monkeypatch)
        receive, send = b.recv(block, 0, tag(number)), a.send(data(LARGE, 1), 1, tag(number))
        if error is None:
            await within(receive, send)
            assert np.array_equal(block.array, data(LARGE, 1))
        else:
            with pytest.raises(error, match="no valid answer"):
                await within(send)
            with pytest.raises(TransferError, match="link lost"):  # the receive would wait for ever
                await within(a.send(data(8, 1), 1, tag(number)))
        assert not pieces
    await within(b.abort(0), a.abort(1))


@pytest.mark.parametrize("cts", [b"", b"\0", bytes([3]) + bytes(28), bytes([255]) + bytes(28)])
async def test_a_cts_that_makes_no_sense_fails_the_send(make_transport, monkeypatch, cts):
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    monkeypatch.setattr(b._one_copy.receiver, "_ring", None)  # nothing is offered ahead
    post = b.post_own_send

    def post_own_send(link, memory, own_tag, transfer):
        is_cts = memory.size_bytes == one_copy.CTS.size
        sent = one_copy.memory_with(len(cts), cts) if is_cts else memory
        return post(link, sent, own_tag, transfer)

    monkeypatch.setattr(b, "post_own_send", post_own_send)
    receive, send = b.recv(SharedBlock(LARGE), 0, tag(1)), a.send(data(LARGE, 1), 1, tag(1))
    with pytest.raises(ProtocolError, match="no valid answer"):
        await within(send)
    await within(b.abort(0), asyncio.gather(receive, return_exceptions=True))


@pytest.mark.parametrize("fin", [b"", b"\0", b"\3", b"\1\1", bytes(61)])
async def test_a_fin_that_makes_no_sense_fails_the_receive(make_transport, monkeypatch, fin):
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    monkeypatch.setattr(b._one_copy.receiver, "_ring", None)  # nothing is offered ahead
    post = a._one_copy.sender._carrier.post_own_send

    def post_own_send(link, memory, own_tag, transfer):
        sent = memory if memory.size_bytes != 1 else memory_of(np.frombuffer(fin, np.uint8), writable=False)
        return post(link, sent, own_tag, transfer)

    monkeypatch.setattr(a, "post_own_send", post_own_send)
    block = SharedBlock(LARGE)
    old = block.ticket
    receive, send = b.recv(block, 0, tag(1)), a.send(data(LARGE, 1), 1, tag(1))
    with pytest.raises(ProtocolError, match="expected"):
        await within(receive)
    await within(send)
    assert block.ticket != old  # it may still be written to


async def test_memory_that_cannot_be_replaced_ends_the_process(make_transport, monkeypatch):
    a, b = await make_transport(0), await make_transport(1)
    monkeypatch.setattr(one_copy, "PIECE_BYTES", LARGE // 4)
    await join(a, b)
    block = SharedBlock(LARGE)
    receive, send = b.recv(block, 0, tag(1)), a.send(data(LARGE, 1), 1, tag(1))
    await until(lambda: a._one_copy.sender._written_bytes, every_s=0)

    def no_memory(block):
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(SharedBlock, "retire", no_memory)
        with pytest.raises(TransferError, match="it is never used again"):
            await within(b.abort(0))
    with pytest.raises(TransferError):
        await within(receive)
    assert [t.memory.owner for t in b._one_copy.receiver.exposed] == [block]
    with pytest.raises(TransferError, match="it is never used again"):
        await within(b.abort())
    b._one_copy.receiver.exposed.clear()
    await within(a.abort(1), asyncio.gather(send, return_exceptions=True))


@pytest.mark.parametrize("how", ["called again", "by itself"])
async def test_a_close_that_failed_is_made_up_for_when_ucx_lets_go(make_transport, monkeypatch, how):
    monkeypatch.setattr(ucx_transport, "RELEASE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(ucx_transport, "_RETRY_S", 60.0 if how == "called again" else 0.001)
    a, b = await make_transport(0), await make_transport(1)
    before = num_descriptors()
    await join(a, b)
    a._open[-1] = UcxTransfer(a._links[1], memory_of(np.zeros(8), writable=False), SENDING, tag(1), None)
    for _ in range(2):
        with pytest.raises(TransferError, match="UCX still holds 1 buffers"):
            await within(a.aclose())
    assert a._context is not None
    del a._open[-1]
    if how == "called again":
        await within(a.aclose(), a.aclose())
    await until(lambda: a._context is None)
    await within(a.aclose())
    assert num_descriptors() < before


async def test_a_sender_keeps_no_memory_that_its_peer_let_go_of(make_transport):
    a, b = await make_transport(0), await make_transport(1)
    await join(a, b)
    kept, freed = SharedBlock(LARGE), SharedBlock(LARGE)
    for block in (kept, freed):
        await within(b.recv(block, 0, tag(1)), a.send(data(LARGE, 1), 1, tag(1)))
    local_peer = a._links[1].local_peer
    assert local_peer is not None and len(local_peer._blocks) == 2
    del freed, block
    gc.collect()
    await within(b.recv(kept, 0, tag(1)), a.send(data(LARGE, 1), 1, tag(1)))
    assert len(local_peer._blocks) == 1
    await within(a.abort(1), b.abort(0))
    assert not local_peer._blocks


def test_half_of_the_descriptors_are_left_to_others(monkeypatch):
    lowest = os.dup(0)
    os.close(lowest)
    monkeypatch.setattr(shared_memory.resource, "getrlimit", lambda _: (2 * (lowest + 10), -1))
    blocks = [SharedBlock.make(1) for _ in range(100)]
    made = [block for block in blocks if block is not None]
    assert 0 < len(made) <= 10 and made == blocks[: len(made)]
    before = num_descriptors()
    made[-1].retire()
    assert num_descriptors() <= before
    monkeypatch.setattr(shared_memory.resource, "getrlimit", lambda _: (-1, -1))
    assert SharedBlock.make(1) is not None


async def test_a_sender_that_dies_while_it_writes(make_transport):
    transport = await make_transport(0)
    size = 128 << 20
    async with peer_of(transport) as peer:
        peer.write(f"send 1 {size}")
        assert await peer.read() == "done"
        block = SharedBlock(size)
        receive = transport.recv(block, 1, tag(1))
        await until(block.array[1 << 20 : 2 << 20].any, every_s=0)
        peer.kill()
        assert not receive.done()
        async with asyncio.timeout(3):
            await transport.abort(1)
        assert isinstance(receive.exception(), TransferError)
        assert not block.array.any()


def test_blocks_that_are_gone_are_forgotten():
    gc.collect()
    before = num_descriptors()
    mailbox = shared_memory.Mailbox()
    local_peer = shared_memory.LocalPeer.from_ticket(mailbox.ticket)
    assert local_peer is not None
    for _ in range(3):
        block = SharedBlock(10_000)
        assert block.ticket is not None
        local_peer.map_block(block.ticket)
        assert len(local_peer._blocks) == 1
        kept = block.array
        del block
        gc.collect()
        kept[:] = 1  # lives as long as somebody shows it
    mailbox.close()
    mailbox.close()
    assert num_descriptors() == before
    assert shared_memory.LocalPeer.from_ticket(mailbox.ticket) is None


@pytest.mark.parametrize(
    ("tls", "shares"),
    [
        ("^sysv", True),
        ("^sm", False),
        ("tcp,self", False),
        ("all", True),
        ("sm,self", True),
        ("^sysv,posix", False),
    ],
)
def test_ucx_tls_decides_about_sharing_memory(monkeypatch, tls, shares):
    monkeypatch.setenv("UCX_TLS", tls)
    assert shares_memory() is shares
