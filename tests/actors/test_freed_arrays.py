"""An actor frees what a failed or aborted request held at once: tracebacks keep no arrays and no memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxpp_async.actors import host_values, step_run
from jaxpp_async.actors.array_store import StoredArray
from jaxpp_async.actors.host_values import HostValues, _ArrivingPiece, _resolve
from jaxpp_async.errors import TransferError
from jaxpp_async.layout.state_replicas import ReplicaStore
from jaxpp_async.program.instructions import CONTROLLER, Aval, Input, Output, Recv, Run, Send
from jaxpp_async.protocol import messages as m
from jaxpp_async.transport.memory import MemoryTransport
from tests.actors.test_actor import V, blob, double, harness

ODD = Aval((3, 17), "float32")
"""Arrays of this shape are of these tests alone."""


@pytest.fixture
def no_collector():
    """Without the garbage collector, Python frees only what nothing refers to. An actor makes so few objects
    that a full collection hardly ever comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def a_send_is_refused(h):
    program = [Input(0, 0), Run("f", 0, (0,), (1,)), Send(1, 1, 0), Output(1, 0)]
    await h.load(0, program, [ODD, ODD], [blob(double, ODD)])
    h.network.fail_link(0, 1)
    await h.step(0, 0, {0: 1}, {0: 2}, fails=True)


async def a_receive_is_refused(h):
    await h.load(0, [Input(0, 0), Recv(1, 1, 0), Output(0, 0), Output(1, 1)], [ODD, V], [])
    h.network.fail_link(0, 1)
    await h.step(0, 0, {0: 1}, {0: 2, 1: 3}, fails=True)


async def an_executable_raises(h):
    def broken(*_):
        raise FloatingPointError("injected")

    program = [Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)]
    await h.load(0, program, [ODD, ODD], [blob(double, ODD)])
    h.actors[0]._programs[0].tasks[1]._call = broken
    await h.step(0, 0, {0: 1}, {0: 2}, fails=True)


async def a_copy_of_a_result_fails(h):
    def broken(*_):
        raise MemoryError("injected")

    await h.load(0, [Input(0, 0), Output(0, 0)], [ODD], [])
    with pytest.MonkeyPatch.context() as patch:
        copy = partial(SimpleNamespace, block_until_ready=broken)
        patch.setattr(step_run, "duplicate", lambda array: copy(of=array))
        await h.step(0, 0, {0: 1}, {0: 2}, fails=True)


async def a_value_of_a_step_is_damaged(h):
    await h.load(0, [Input(0, 0), Input(1, 1), Output(0, 0)], [ODD, V], [])
    await h.step(0, 0, {0: 1, 1: 5}, {0: 2}, fails=True, puts=(m.Put(5, V, b"123"),))


async def an_array_cannot_be_read(h):
    def broken(*_):
        raise MemoryError("injected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_values, "fetch_shards", broken)
        await h.ask(0, m.Fetch, fails=True, array_ids=(1,), sequences=(1,))


async def a_step_waits(h):
    """Array 2 is to come from a step that waits for a peer."""
    await h.load(0, [Input(0, 0), Recv(1, 1, 0), Output(1, 0)], [ODD, V], [])
    await h.start(0, m.Step, epoch=1, step=0, program_id=0, inputs={0: 1}, outputs={0: 2})


async def a_fetch_waits(h):
    await a_step_waits(h)
    await h.start(0, m.Fetch, array_ids=(1, 2), sequences=(1, 2))


async def a_save_waits(h):
    await a_step_waits(h)
    await h.start(0, m.BeginSnapshot, folder=b"/nowhere", array_ids=(1, 2))


async def a_value_is_on_its_way(h):
    whole = m.Put(5, ODD, np.ones(ODD.shape, np.float32).tobytes())
    await h.start(0, m.Store, puts=(whole, m.Put(6, V, None, 7)), frees=())


async def abort(h):
    await h.transport.abort()
    h.epoch = 2
    for k in range(len(h.actors)):
        await h.ask(k, m.Abort, epoch=2, cause="injected")
        await h.ask(k, m.Rollback, generation=None)
        idle = asyncio.get_running_loop().create_future()  # done when the compute thread holds no other job
        h.actors[k]._resources.step_resources.compute.submit(partial(partial, idle.set_result, None))
        await idle


@pytest.mark.parametrize(
    "happens",
    [
        a_send_is_refused,
        a_receive_is_refused,
        an_executable_raises,
        a_copy_of_a_result_fails,
        a_value_of_a_step_is_damaged,
        an_array_cannot_be_read,
        a_fetch_waits,
        a_save_waits,
        a_value_is_on_its_way,
    ],
)
async def test_an_aborted_actor_frees_its_arrays_at_once(happens, no_collector):
    async with harness(2) as h:
        await h.put(0, 1, np.ones(ODD.shape, np.float32))
        await happens(h)
        await abort(h)
        left = [array.shape for array in jax.live_arrays() if array.shape == ODD.shape]
        assert not left


@pytest.fixture
def received_into(monkeypatch):
    """Weak references to the memory of all that any actor or the controller was to receive."""
    memory, recv = [], MemoryTransport.recv

    def noting(self, buffer, peer, tag):
        memory.append(weakref.ref(buffer))
        return recv(self, buffer, peer, tag)

    monkeypatch.setattr(MemoryTransport, "recv", noting)
    return memory


async def test_memory_for_a_value_that_never_arrives_is_freed_at_once(no_collector, received_into):
    async with harness() as h:
        await h.start(0, m.Store, puts=(m.Put(6, V, None, 7),), frees=())
        await abort(h)
        assert [ref() for ref in received_into] == [None]


@pytest.mark.parametrize("is_refused", [True, False])
async def test_memory_for_a_copy_that_never_arrives_is_freed_at_once(no_collector, received_into, is_refused):
    async with harness() as h:
        if is_refused:
            h.network.fail_link(CONTROLLER, 0)
        kept = (m.ReplicaArray(1, V, (32,)), m.ReplicaArray(2, V, (32,)))
        holding = asyncio.create_task(ReplicaStore().receive(h.transport, m.ReceiveReplica(1, 0, 0, 0, kept)))
        await asyncio.sleep(0)
        await h.transport.abort()
        await asyncio.wait([holding])
        assert isinstance(holding.exception(), TransferError)
        del holding
        assert [ref() for ref in received_into] == [None, None]


async def test_memory_for_pieces_that_never_arrive_is_freed_at_once(no_collector):
    lost = asyncio.get_running_loop().create_future()
    piece = _ArrivingPiece(np.empty(8, np.uint8), lost, (), 0)
    memory, entry = weakref.ref(piece.memory), StoredArray(V)
    values = SimpleNamespace(_relay=partial(HostValues._relay, None))
    placing = _resolve(entry, partial(HostValues._place_pieces, values, None, [piece]))
    lost.set_exception(TransferError("injected"))
    del piece, lost
    await placing
    assert str(entry.error) == "injected" and memory() is None
