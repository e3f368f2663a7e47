"""The transport's conformance suite on NCCL itself: two ranks and more in this process, on one GPU.

    make test-gpu                              # JAXPP_TEST_GPU=cuda

`transport/nccl/test_transport.py` has what needs no GPU: the same suite on a library that stands in for NCCL.
"""

from __future__ import annotations

import asyncio
import ctypes
import os

import numpy as np
import pytest
from one_gpu import skipped_where_nccl_wants_a_gpu_each
from transport_conformance import EAGER, LARGE, TransportConformance, join, transfer, within

from jaxpp_async.errors import TransferError
from jaxpp_async.transport.base import Memory
from jaxpp_async.transport.nccl import library as nccl_library
from tests.transport.nccl.test_transport import InOrderOfPosts

if os.environ.get("JAXPP_TEST_GPU") != "cuda":
    pytest.skip("needs a GPU: make test-gpu (JAXPP_TEST_GPU=cuda)", allow_module_level=True)
os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # read once, when NCCL starts
os.environ.setdefault("NCCL_MAX_CTAS", "4")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
LIBRARY = nccl_library.load_library()  # without it nothing here is proven, and that is no reason to skip


class OnDevice(InOrderOfPosts):
    """NCCL between device arrays: what the suite sends is copied there, what arrives back to it."""

    async def connect(self, peer, address):
        with skipped_where_nccl_wants_a_gpu_each():
            await super().connect(peer, address)

    def post_send(self, memory, peer, tag, done):
        return super().post_send(
            _on_device(ctypes.string_at(memory.address, memory.size_bytes)), peer, tag, done
        )

    def post_recv(self, memory, peer, tag, done):
        here = _on_device(bytes(memory.size_bytes))

        def ended(error):
            if error is None and memory.size_bytes:
                ctypes.memmove(memory.address, here.owner.get().ctypes.data, memory.size_bytes)
            done(error)

        return super().post_recv(here, peer, tag, ended)


def _on_device(data: bytes) -> Memory:
    import cupy

    array = cupy.asarray(np.frombuffer(data, np.uint8))
    cupy.cuda.get_current_stream().synchronize()
    return Memory(array.data.ptr, len(data), array)


@pytest.fixture
async def make_transport():
    made: dict[int, InOrderOfPosts] = {}

    async def make(peer_id: int) -> OnDevice:
        transport = made[peer_id] = OnDevice(peer_id, LIBRARY)
        transport.known = made
        return transport

    yield make
    for transport in made.values():
        await transport.aclose()


class TestNcclOnDevice(TransportConformance):
    """All that NCCL can do."""

    matches_by_tag = is_eager = False


async def test_receives_that_pend_end_with_an_abort_and_the_next_epoch_works(make_transport):
    a, b = await make_transport(0), await make_transport(1)
    for epoch in range(1, 4):
        a.epoch = b.epoch = epoch
        await join(a, b)
        await transfer(a, b, LARGE, 1, epoch)
        pending = [t.recv(np.zeros(EAGER, np.uint8), peer, 0) for t, peer in ((a, 1), (b, 0))]
        await asyncio.sleep(0.2)
        assert not any(future.done() for future in pending)
        await within(a.abort(), b.abort())
        assert all(isinstance(future.exception(), TransferError) for future in pending)
