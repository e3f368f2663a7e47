"""The transport's conformance suite on device memory, and the numeric suite with actors that share one GPU.

    make test-gpu                                                # JAXPP_TEST_GPU=cuda: on a GPU
    JAXPP_TEST_GPU=cpu python -m pytest tests/gpu/test_on_gpu.py     # the same tests with a stand-in for it

Without that variable they are skipped; `integration/test_device_buffers.py` has what needs no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

import checkpoint_faults
import jax
import numpy as np
import pytest
from one_gpu import skipped_where_nccl_wants_a_gpu_each
from transport_conformance import TransportConformance

import jaxpp_async as jpp
from jaxpp_async.actors.cuda import open_cuda
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.transport.base import Memory
from jaxpp_async.transport.ucx.transport import UCXTransport
from tests.integration.test_numerics import check_five_steps

PLATFORM = os.environ.get("JAXPP_TEST_GPU", "")
if PLATFORM not in ("cuda", "cpu"):
    pytest.skip("needs a GPU: make test-gpu (JAXPP_TEST_GPU=cuda)", allow_module_level=True)


class OnDevice(UCXTransport):
    """UCX between arrays of JAX's own allocator: what the suite sends is copied there, what arrives back to
    it."""

    def post_send(self, memory, peer, tag, done):
        return super().post_send(
            _on_device(ctypes.string_at(memory.address, memory.size_bytes)), peer, tag, done
        )

    def post_recv(self, memory, peer, tag, done):
        here = _on_device(bytes(memory.size_bytes))

        def ended(error):
            _bring_back(here, memory)
            done(error)

        at_once = super().post_recv(here, peer, tag, ended)
        if at_once:
            _bring_back(here, memory)
        return at_once


def _on_device(data: bytes) -> Memory:
    array = jax.device_put(
        np.frombuffer(data, np.uint8), jax.local_devices(backend=PLATFORM)[0], may_alias=False
    )
    array.block_until_ready()
    return Memory(array.unsafe_buffer_pointer() if data else 0, len(data), array, on_device=True)


def _bring_back(here: Memory, memory: Memory) -> None:
    if memory.size_bytes:
        ctypes.memmove(memory.address, np.asarray(here.owner).ctypes.data, memory.size_bytes)


@pytest.fixture
async def make_transport():
    cuda = open_cuda(jax.local_devices(backend=PLATFORM)[:1], "ucx")
    assert (cuda is None) == (PLATFORM == "cpu")
    if cuda is not None:
        cuda.enter()
    made = []

    async def make(peer_id: int) -> OnDevice:
        made.append(OnDevice(peer_id))
        return made[-1]

    yield make
    for transport in made:
        await transport.aclose()


class TestUCXOnDevice(TransportConformance):
    """All of it, with device memory at both ends."""


@pytest.mark.parametrize("transport", ["ucx", "nccl"])
@pytest.mark.parametrize("num_actors", [2, 4])
async def test_actors_that_share_a_gpu_compute_what_jit_does(num_actors, transport):
    options: dict = {"platform": "cuda", "transport": transport}
    if transport == "nccl":
        if PLATFORM == "cpu":
            pytest.skip("NCCL needs a GPU")
        options["env"] = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # several ranks on one GPU, from NCCL 2.30 on
    if PLATFORM == "cpu":
        options = {"launcher": LocalLauncher(actor="fake_device:DeviceActor"), "env": checkpoint_faults.ENV}
    # Around the steps too: links are made when a program is loaded.
    with skipped_where_nccl_wants_a_gpu_each() if transport == "nccl" else contextlib.nullcontext():
        await _check_steps(num_actors, options)


async def _check_steps(num_actors, options):
    async with jpp.RemoteMesh(num_actors, **options) as mesh:
        names = (
            ("mlp", jpp.Std1F1B),
            ("mlp", jpp.Interleaved1F1B),
            ("gpt", jpp.GPipe),
            ("uneven", jpp.Std1F1B),
        )
        for name, kind in names if num_actors == 2 else names[:2]:
            await check_five_steps(mesh, name, kind)
        assert len({info.pid for info in mesh.actors}) == num_actors
        (gpus,) = {info.gpus for info in mesh.actors}
        assert len(gpus) == (PLATFORM == "cuda"), "they share one"
