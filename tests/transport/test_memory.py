"""The memory transport: the conformance suite, then what only it has: delays, faults, drops."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from faulty_network import FaultyNetwork
from transport_conformance import EAGER, LARGE, TransportConformance, data, join, tag, transfer, within

from jaxpp_async.errors import TransferError
from jaxpp_async.transport.memory import MemoryNetwork, MemoryTransport


@pytest.fixture
async def make_transport():
    network, made = MemoryNetwork(), []

    async def make(peer_id: int) -> MemoryTransport:
        made.append(MemoryTransport(network, peer_id))
        return made[-1]

    yield make
    for transport in made:
        await transport.aclose()


class TestMemoryConformance(TransportConformance):
    """All of it, on Memory."""


async def pair_on(network: FaultyNetwork) -> tuple[MemoryTransport, MemoryTransport]:
    a, b = MemoryTransport(network, 0), MemoryTransport(network, 1)
    await join(a, b)
    return a, b


async def test_random_delays_keep_the_order_within_a_tag():
    rng = random.Random(3)
    network = FaultyNetwork(delay=lambda *_: rng.choice((0, 0.001, 0.003)))
    a, b = await pair_on(network)
    sent = [data(EAGER, i) for i in range(30)]
    got = [np.zeros(EAGER, np.uint8) for _ in range(30)]
    receives = [b.recv(g, 0, tag(i % 3)) for i, g in enumerate(got)]
    await within(*[a.send(s, 1, tag(i % 3)) for i, s in enumerate(sent)], *receives)
    assert all(np.array_equal(s, g) for s, g in zip(sent, got, strict=True))


async def test_a_delay_sees_where_from_where_to_tag_and_size():
    seen = []
    network = FaultyNetwork(delay=lambda *where: seen.append(where) or 0.0)
    a, b = await pair_on(network)
    await transfer(a, b, 100, 4)
    assert seen == [(0, 1, tag(4), 100)]


async def test_a_message_sent_before_an_abort_may_arrive_after_it():
    network = FaultyNetwork(delay=lambda *_: 0.005)
    a, b = await pair_on(network)
    large = a.send(data(LARGE, 1), 1, tag(1))
    small = a.send(data(EAGER, 1), 1, tag(2))
    await within(a.abort(), b.abort(), small)
    assert isinstance(large.exception(), TransferError)
    await join(a, b)
    await transfer(a, b, LARGE, 1, epoch=2)


@pytest.mark.parametrize(("size", "send_completes"), [(EAGER, True), (LARGE, False)])
async def test_a_dropped_message_never_arrives(size, send_completes):
    network = FaultyNetwork(drop=lambda *_: True)
    a, b = await pair_on(network)
    send, receive = a.send(data(size, 1), 1, tag(1)), b.recv(np.zeros(size, np.uint8), 0, tag(1))
    await asyncio.sleep(0)
    assert send.done() is send_completes and not receive.done()
    await within(a.abort(), b.abort())
    assert isinstance(receive.exception(), TransferError)


async def test_a_failed_link_fails_transfers_until_both_connect_anew():
    network = FaultyNetwork()
    a, b = await pair_on(network)
    receive, send = b.recv(np.zeros(8), 0, tag(1)), a.send(data(LARGE, 1), 1, tag(2))
    network.fail_link(0, 1)
    for future in (receive, send, a.send(data(8, 1), 1, tag(3)), b.recv(np.zeros(8), 0, tag(3))):
        with pytest.raises(TransferError, match=r"peer 0 to peer 1.*link lost"):
            await future
    await within(a.abort(), b.abort())
    await join(a, b)
    await transfer(a, b, LARGE, 1, epoch=2)


async def test_eager_bytes_none_completes_every_send():
    a, b = await pair_on(FaultyNetwork(eager_bytes=None))
    sent, got = data(LARGE, 1), np.zeros(LARGE, np.uint8)
    await within(a.send(sent, 1, tag(1)))
    sent[:] = 0
    await within(b.recv(got, 0, tag(1)))
    assert np.array_equal(got, data(LARGE, 1))
