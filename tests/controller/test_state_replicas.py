"""Direct tests of when replicas of actors' arrays are made, who gets them, and the way back to them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import PendingRequest
from jaxpp_async.controller.state_replicas import MAX_REMEMBERED_BYTES, StateReplication
from jaxpp_async.errors import RemoteError, StateLostError, TransferError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.actor_info import Topology
from jaxpp_async.protocol.messages import (
    Done,
    DropReplicas,
    ReceiveReplica,
    ReplicaArray,
    ReplicaTaken,
    Rollback,
    SendReplica,
    TakeReplica,
)

OPTIONS = ControllerOptions(max_restarts=1, backup_every=3, progress_s=60.0)
ARRAY = ReplicaArray(5, Aval((2,), "float32"), (8,))


class Mesh:
    """Actors that answer each request at once, and the requests that are remembered.

    Args:
        num_actors: each on a host of its own.
    """

    def __init__(self, num_actors: int = 3):
        self.processes, self.actors, self.epoch = Topology(num_actors), range(num_actors), 4
        self.links = {}
        for p in self.actors:
            self.links[p] = SimpleNamespace(ask=self._answer(p), info=SimpleNamespace(host=f"n{p}"))
        self.asked, self.errors, self.fails = [], [], {}
        self.size_bytes, self.is_open, self.has_snapshot = 0, True, False
        self.forgotten, self.needs_files = [], False
        self.replication = StateReplication(self, self, OPTIONS, self.errors.append)

    def new_mark(self) -> int:
        return 77

    def _answer(self, process: int):
        def ask(message) -> PendingRequest:
            call = PendingRequest(message.rules.reply, awaited=False)
            self.asked.append((process, message))
            if type(message) in self.fails:
                call.fail(self.fails[type(message)])
            elif isinstance(message, TakeReplica):
                call.on_reply(None, ReplicaTaken((ARRAY,)))
            else:
                call.on_reply(None, Done())
            return call

        return ask

    def unanswered(self, mark: int):
        return []

    def forget_before(self, mark: int) -> None:
        self.forgotten.append(mark)
        self.needs_files = False

    async def wait_open(self) -> None: ...

    def told(self, kind: type) -> list:
        return [(process, message) for process, message in self.asked if isinstance(message, kind)]


async def taken(mesh: Mesh) -> None:
    """Make a replica, and forget what was asked for it."""
    await mesh.replication.take()
    mesh.asked.clear()


async def test_a_replica_is_due_with_the_first_step_and_then_after_so_many():
    mesh, steps = Mesh(), []
    for step in range(7):
        mesh.replication.note_step()
        if mesh.replication._task is not None:
            await asyncio.wait([mesh.replication._task])
        steps += [step] * len(mesh.told(TakeReplica)[::3])
        mesh.asked.clear()
    assert steps == [0, 3, 6]


@pytest.mark.parametrize(("name", "value"), [("is_open", False), ("has_snapshot", True)])
async def test_during_a_restart_or_a_save_no_replica_is_made(name, value):
    mesh = Mesh()
    setattr(mesh, name, value)
    mesh.replication.note_step()
    assert mesh.asked == []


async def test_much_that_is_remembered_makes_a_replica_due():
    mesh = Mesh()
    await taken(mesh)
    mesh.replication.take_if_due()
    assert mesh.asked == []
    mesh.size_bytes = MAX_REMEMBERED_BYTES + 1
    mesh.replication.take_if_due()
    assert len(mesh.told(TakeReplica)) == 3
    await mesh.replication._task


async def test_a_replica_is_complete_when_everyones_holder_has_it_and_then_the_others_are_forgotten():
    mesh = Mesh()
    await mesh.replication.take()
    assert [(process, message.generation) for process, message in mesh.told(TakeReplica)] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    assert [(message.owner, message.source, to) for to, message in mesh.told(ReceiveReplica)] == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 2, 0),
    ]
    assert [
        (source, message.owner, message.to, message.epoch) for source, message in mesh.told(SendReplica)
    ] == [
        (0, 0, 1, 4),
        (1, 1, 2, 4),
        (2, 2, 0, 4),
    ]
    assert [message.generation for _, message in mesh.told(DropReplicas)] == [0, 0, 0]
    assert mesh.forgotten == [77]


@pytest.mark.parametrize(
    "error", [RemoteError("no memory"), TransferError("link lost")], ids=lambda e: type(e).__name__
)
async def test_a_replica_that_fails_leaves_the_one_before_it(error):
    mesh = Mesh()
    mesh.fails = {ReceiveReplica: error}
    await mesh.replication.take()
    assert (mesh.forgotten, mesh.told(DropReplicas)) == ([], [])
    assert mesh.errors == ([error] if isinstance(error, TransferError) else [])


async def test_a_successor_gets_the_replica_of_the_lost_one_and_what_that_held_for_another():
    mesh = Mesh()
    await taken(mesh)
    await mesh.replication.roll_back([1])
    assert [(message.owner, message.source, to) for to, message in mesh.told(ReceiveReplica)] == [
        (1, 2, 1),  # its own, from its holder
        (0, 0, 1),  # what it held
    ]
    assert [(process, message.generation) for process, message in mesh.told(Rollback)] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]


async def test_before_the_first_replica_everyone_goes_back_to_nothing():
    mesh = Mesh()
    await mesh.replication.roll_back([1])
    assert [message.generation for _, message in mesh.asked] == [None] * 3


async def test_an_actor_and_the_holder_of_its_replica_lost_together_are_the_end():
    mesh = Mesh()
    await taken(mesh)
    with pytest.raises(StateLostError) as caught:
        await mesh.replication.roll_back([1, 2])
    assert str(caught.value) == (
        "actors 1 and 2 were lost together, and with them both copies of actor 1's arrays; start again from "
        "a checkpoint (mesh.restore)"
    )
    assert (caught.value.actor, caught.value.host) == (1, "n1")
    assert mesh.told(Rollback) == []


async def test_what_was_read_from_files_is_secured_by_a_replica():
    mesh = Mesh()
    await mesh.replication.secure()
    assert mesh.asked == []
    mesh.needs_files = True
    await mesh.replication.secure()
    assert mesh.forgotten == [77]
