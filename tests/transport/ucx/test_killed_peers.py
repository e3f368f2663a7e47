"""A peer is killed between its offer and the copy, or in the middle of the copy, at the very byte that is
asked for."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import logging
import signal

import numpy as np
import pytest
from peer_process import peer_of
from resources import num_blocks_mapped
from transport_conformance import data, tag
from waiting import until

from jaxpp_async.errors import TransferError
from jaxpp_async.transport.shared_memory import SharedBlock
from jaxpp_async.transport.ucx import one_copy
from jaxpp_async.transport.ucx.one_copy import MIN_ONE_COPY_BYTES, PIECE_BYTES
from jaxpp_async.transport.ucx.transport import UCXTransport

if importlib.util.find_spec("ucxx") is None:
    # importing it here would be before the transport sets UCX's environment
    pytest.skip("UCX tests need the package ucxx", allow_module_level=True)

ANNOUNCED = 2 * PIECE_BYTES + MIN_ONE_COPY_BYTES
"""Written in three pieces after a CTS; a message of `MIN_ONE_COPY_BYTES` is written in one, where it was
offered."""


@pytest.fixture
async def transport():
    made = UCXTransport(0)
    yield made
    await made.aclose()


@pytest.mark.parametrize(
    ("size", "written"),
    [
        (MIN_ONE_COPY_BYTES, MIN_ONE_COPY_BYTES // 2),
        (MIN_ONE_COPY_BYTES, MIN_ONE_COPY_BYTES),  # all of it, and nobody is told
        (ANNOUNCED, PIECE_BYTES + MIN_ONE_COPY_BYTES),
    ],
)
async def test_the_sender_is_killed(transport, size, written):
    before = num_blocks_mapped()
    async with peer_of(transport) as peer:
        block, content = SharedBlock(size), data(size, 1)
        receive = transport.recv(block, 1, tag(1))
        peer.write(f"die {written}")
        peer.write(f"send 1 {size}")
        assert await asyncio.to_thread(peer.process.wait, 10) == -signal.SIGKILL
        assert np.array_equal(block.array[:written], content[:written])
        assert not block.array[written:].any()
        assert not receive.done()
        async with asyncio.timeout(3):
            await transport.abort(1)
        assert isinstance(receive.exception(), TransferError)
        assert not block.array.any()
        assert num_blocks_mapped() <= before, "other memory is there, which nobody else has"


@pytest.mark.parametrize(
    ("size", "written"),
    [
        (MIN_ONE_COPY_BYTES, 0),
        (MIN_ONE_COPY_BYTES, MIN_ONE_COPY_BYTES // 2),
        (ANNOUNCED, MIN_ONE_COPY_BYTES // 2),
    ],
)
async def test_the_receiver_is_killed(transport, monkeypatch, size, written):
    before = num_blocks_mapped()
    async with peer_of(transport) as peer:
        peer.write(f"block 1 {size}")
        assert await peer.read() == "done"
        monkeypatch.setattr(one_copy, "_SWEEP_S", 0.001)
        copied, move = [], ctypes.memmove

        def move_and_kill(to, of, size_bytes):
            move(to, of, written)
            peer.kill()
            move(to + written, of + written, size_bytes - written)
            copied.append(size_bytes)

        if written:
            monkeypatch.setattr(ctypes, "memmove", move_and_kill)
        else:
            peer.kill()
        send = transport.send(data(size, 1), 1, tag(1))
        await until(lambda: not written or sum(copied) == size)
        assert sum(copied) == (size if written else 0), "a block stays mapped while it is written"
        async with asyncio.timeout(3):
            await transport.abort(1)
        assert send.done()
        assert send.exception() is None or isinstance(send.exception(), TransferError)
        assert not written or send.exception() is None, "all was written before anybody could know"
        await until(lambda: num_blocks_mapped() <= before)  # the sender sweeps now and then


async def test_both_send_much_when_the_peer_is_killed(caplog):
    """Nobody empties the dead peer's queue, so that UCX ends nothing, and never would."""
    caplog.set_level(logging.INFO, "jaxpp_async")
    count, size = 20, MIN_ONE_COPY_BYTES // 2
    for delay_s in (0.0, 0.005, 0.01, 0.02, 0.002, 0.008, 0.015, 0.03):
        transport = UCXTransport(0)
        async with peer_of(transport) as peer:
            received = [np.zeros(size, np.uint8) for _ in range(count)]
            transfers = [transport.recv(memory, 1, tag(k)) for k, memory in enumerate(received)]
            transfers += [transport.send(data(size, k), 1, tag(k)) for k in range(count)]
            peer.write(f"swap {count} {size}")
            assert await peer.read() == "done"
            await asyncio.sleep(delay_s)
            peer.kill()
            await asyncio.sleep(delay_s)
            async with asyncio.timeout(4):
                await transport.abort()
            assert all(transfer.done() for transfer in transfers)
            ended = [isinstance(transfer.exception(), TransferError) for transfer in transfers]
            for failed, memory, k in zip(ended, received, range(count), strict=False):
                assert failed or np.array_equal(memory, data(size, k))
        async with asyncio.timeout(4):
            await transport.aclose()
        given_up = [record.getMessage() for record in caplog.records if "gives up its end" in record.msg]
        assert all("; 0 bytes" in message for message in given_up)
        if given_up and delay_s >= 0.015:  # after a few rounds at least
            break
