"""Direct tests of the copies that a process takes of its arrays, and of the arrays made again from a copy."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpp_async.actors.array_store import ArrayStore
from jaxpp_async.actors.jax_runtime import Devices
from jaxpp_async.actors.rollback import ReplicaRequests
from jaxpp_async.actors.shards import Layouts
from jaxpp_async.errors import ProtocolError
from jaxpp_async.layout.state_replicas import ReplicaStore
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.messages import Done, ReplicaArray, Rollback, TakeReplica

AVAL = Aval((3,), "float32")
PROCESS = 4


class Process:
    """The parts of a process that hold its arrays and their copies."""

    def __init__(self, workers: ThreadPoolExecutor):
        self.store, self.copies = ArrayStore(), ReplicaStore()
        layouts = Layouts(Devices(Mesh(np.array(jax.devices()[:1]), ("device",))))
        self.replica_requests = ReplicaRequests(PROCESS, self.store, layouts, self.copies, workers)

    def put(self, array_id: int, value: float) -> None:
        self.store.expect(array_id, AVAL).resolve(jax.numpy.full(3, value, "float32"))

    @property
    def values(self) -> dict[int, list[float]]:
        return {i: np.asarray(entry.array).tolist() for i, entry in self.store.entries().items()}


@pytest.fixture
def process():
    with ThreadPoolExecutor(1) as workers:
        yield Process(workers)


async def test_arrays_come_back_as_they_were_when_the_copy_was_taken(process):
    process.put(1, 1.0)
    process.put(2, 2.0)
    taking = process.replica_requests.take_replica(TakeReplica(0), leaving={2})
    process.store.remove(1)  # a later step consumes it, before the copy is made
    process.put(3, 3.0)
    taken = await taking
    assert taken.arrays == (ReplicaArray(1, AVAL, (12,)),)  # neither the one that leaves nor the later one
    assert process.copies.get(0, PROCESS).size_bytes == 12
    assert await process.replica_requests.roll_back(Rollback(0)) == Done()
    assert process.values == {1: [1.0, 1.0, 1.0]}


async def test_an_array_that_comes_back_shares_no_memory_with_the_copy(process):
    """A step may be given the array, and write to it; the copy has to serve another restart."""
    value = np.ones(1 << 20, np.float32)
    process.store.expect(1, Aval(value.shape, "float32")).resolve(jax.device_put(value))
    await process.replica_requests.take_replica(TakeReplica(0), leaving=())
    ((data,),) = process.copies.get(0, PROCESS).shards
    begin = data.__array_interface__["data"][0]
    addresses = []
    for _ in range(2):
        await process.replica_requests.roll_back(Rollback(0))
        addresses.append(process.store.get(1).array.unsafe_buffer_pointer())
    assert not any(begin <= address < begin + data.nbytes for address in addresses)


async def test_an_array_in_the_making_is_waited_for_and_one_that_fails_is_left_out(process):
    process.put(1, 1.0)
    coming, failing = process.store.expect(2, AVAL), process.store.expect(3, AVAL)
    taking = asyncio.ensure_future(process.replica_requests.take_replica(TakeReplica(0), leaving=()))
    await asyncio.sleep(0)
    assert not taking.done()
    failing.fail(RuntimeError("the step failed"))
    coming.resolve(jax.numpy.full(3, 2.0, "float32"))
    assert [array.array_id for array in (await taking).arrays] == [1, 2]


async def test_without_a_copy_to_return_to_every_array_is_forgotten(process):
    process.put(1, 1.0)
    assert await process.replica_requests.roll_back(Rollback(None)) == Done()
    assert process.values == {}


async def test_a_copy_that_is_not_here_is_refused(process):
    process.put(1, 1.0)
    with pytest.raises(ProtocolError, match=f"^copy 3 of process {PROCESS}'s arrays is not here"):
        process.replica_requests.roll_back(Rollback(3))


async def test_entries_of_a_rollback_are_there_at_once_for_the_requests_behind_it(process):
    process.put(1, 1.0)
    await process.replica_requests.take_replica(TakeReplica(0), leaving=())
    rolling = process.replica_requests.roll_back(Rollback(0))
    entry = process.store.get(1)
    assert not entry.done
    await rolling
    assert np.asarray(entry.array).tolist() == [1.0, 1.0, 1.0]
