"""NCCL between actors of several processes: who sends what to whom over which link, in an order that nobody
has to wait for ever for; and a mesh of them, over the library that stands in for NCCL.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import checkpoint_faults
import jax
import nccl_over_sockets
import numpy as np
import pytest
from planning import f32, plan_step

import jaxpp_async as jpp
from jaxpp_async.controller.deploy import links_of
from jaxpp_async.errors import MeshError, RestartBudgetExceeded
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.layout import array_parts
from jaxpp_async.layout.array_parts import Scattering
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Input, Recv, Run, Send
from jaxpp_async.protocol.actor_info import ProcessRank
from jaxpp_async.transport.nccl.order import NcclLink, OrderedMessage, order_of
from tests.integration.test_multi_process_actors import BOTH, close, problem, train_step
from tests.integration.test_random_schedules import draw_schedule
from tests.integration.test_random_schedules import train_step as random_step

# ---------------------------------------------------------------- links and turns


def transfers(*avals: Aval, actors: int = 2) -> dict[int, ActorProgram]:
    """Programs in which each actor sends each array to the next."""
    made: dict[int, list[Any]] = {actor: [] for actor in range(actors)}
    for tag, (actor, buffer) in enumerate(itertools.product(range(actors), range(len(avals)))):
        receiver = (actor + 1) % actors
        made[actor].append(Send(buffer, receiver, tag))
        made[receiver].append(Recv(len(avals) + buffer, actor, tag))
    return {actor: ActorProgram(actor, tuple(found), avals + avals) for actor, found in made.items()}


WHOLE, ROWS, COLUMNS = (Aval((6, 6), "float32", spec) for spec in ((), ("a", None), (None, "b")))


def test_links_are_between_the_processes_that_have_a_part_in_a_transfer():
    axes = (("a", 2), ("b", 2))
    there, back = [NcclLink(0, 2), NcclLink(1, 3)], [NcclLink(2, 0), NcclLink(3, 1)]
    mates = [NcclLink(0, 1), NcclLink(1, 0), NcclLink(2, 3), NcclLink(3, 2)]
    assert links_of(transfers(ROWS), Scattering(axes, 2)) == sorted(there + back), "each has rows of its own"
    two = links_of(transfers(WHOLE, WHOLE), Scattering(axes, 2))
    assert two == sorted(there + back + mates), "in turns, and passed on"
    columns = links_of(transfers(COLUMNS), Scattering(axes, 2))
    assert {link[2:] for link in columns} == {(0, 0), (1, 1)}, "a column lies on one device of each process"


def test_what_is_passed_on_goes_from_where_it_lies_to_where_it_lies_there():
    """Of six devices in two processes the columns of `b` are on 0, 2, 4 and on 1, 3, 5: on devices of other
    positions here and there."""
    links = links_of(transfers(COLUMNS, COLUMNS), Scattering((("a", 3), ("b", 2)), 2))
    assert {link[2:] for link in links if {link.sender, link.receiver} in ({0, 1}, {2, 3})} == {
        (0, 1),
        (1, 0),
    }
    assert {link[2:] for link in links if link.sender + 2 == link.receiver} == {(0, 0), (1, 1)}


@pytest.mark.parametrize("seed", range(6))
def test_both_ends_of_every_link_have_the_same_messages_in_the_same_order(seed):
    """`links_of` refuses anything else; here the orders that actors work out are compared as well."""
    rng = random.Random(seed)
    sizes = [("a", rng.choice((2, 4))), ("b", rng.choice((1, 3))), ("c", 2)]
    rng.shuffle(sizes)
    scattering = Scattering(tuple(sizes), rng.choice((1, 2)))
    specs = [(), ("a",), ("b", "c"), (("c", "a"), None), ("c",)]
    avals = [Aval((24, 24), "float32", rng.choice(specs)) for _ in range(5)]
    parts = transfers(*avals, actors=3)
    ends: dict[NcclLink, list[tuple[int, ...]]] = defaultdict(list)
    for actor, rank in itertools.product(range(3), range(scattering.per_actor)):
        process_rank = ProcessRank(scattering.process(actor, rank), scattering.per_actor)
        for link, line in order_of(
            process_rank.process, turns_of(parts[actor], process_rank, scattering)
        ).orders.items():
            ends[link].append(line.sequences)
    assert sorted(ends) == links_of(parts, scattering)
    assert all(len(lines) == 2 and lines[0] == lines[1] for lines in ends.values())


class InTurn:
    """Programs of actors of two processes of one device, every array whole on both: one of them receives it
    and passes it on. All goes as strictly as may be: a message waits for all before it on its link and for
    its receive, a run for the other process. What ends so ends whatever takes how long."""

    def __init__(self, programs: Sequence[ActorProgram]):
        self.streams = {2 * p.actor + rank: p.instructions for p in programs for rank in (0, 1)}
        self.at = dict.fromkeys(self.streams, 0)
        self.here: dict[int, set[int]] = {process: set() for process in self.streams}
        self.posted: dict[tuple[NcclLink, int], set[int]] = defaultdict(set)
        self.left: dict[NcclLink, deque[int]] = defaultdict(deque)
        # a message's receive, by receiver and sequence
        self.ends: dict[tuple[int, int], tuple[int, int]] = {}
        for process, stream in self.streams.items():
            for turn in itertools.chain.from_iterable(self.turns(process, i) for i in stream):
                if turn.link.sender == process:
                    self.left[turn.link].append(turn.sequence)

    def turns(self, process: int, i: Any) -> list[OrderedMessage]:
        process_rank, held = (
            ProcessRank(process, 2),
            [piece for piece in Scattering((("a", 2),), 2).parts(Aval((2,), "float32"))],
        )
        if isinstance(i, Send):
            return list(array_parts.order_sends(process_rank, held, i.tag, i.to_actor, 2))
        return (
            list(array_parts.order_receives(process_rank, held, i.tag, i.from_actor, 2))
            if isinstance(i, Recv)
            else []
        )

    def post(self, process: int, found: list[OrderedMessage], *, sends: bool) -> None:
        for sequence, link in found:
            if (link.sender == process) == sends:
                self.posted[link, process].add(sequence)

    def step(self, process: int) -> bool:
        """One instruction of a process, if it can be."""
        stream, at, mate = self.streams[process], self.at[process], process ^ 1
        if at == len(stream):
            return False
        match i := stream[at]:
            case Run():
                if not self.here[process].issuperset(i.inputs):
                    return False
                if self.at[mate] < at or (self.at[mate] == at and not self.here[mate].issuperset(i.inputs)):
                    return False
                self.here[process].update(i.outputs)
            case Input():
                self.here[process].add(i.buffer)
            case Send() if i.buffer not in self.here[process]:
                return False  # an actor goes on here; nothing is sent of what was received
            case Send():
                self.post(process, self.turns(process, i), sends=True)
            case Recv():
                self.post(process, found := self.turns(process, i), sends=False)
                for sequence, _ in found:
                    self.ends[process, sequence] = at, i.buffer
        self.at[process] += 1
        return True

    def move(self) -> bool:
        """The oldest message of a link, if both its ends have it."""
        moved = False
        for link, left in self.left.items():
            while left and all(left[0] in self.posted[link, end] for end in link[:2]):
                at, buffer = self.ends[link.receiver, left.popleft()]
                self.here[link.receiver].add(buffer)
                onwards = self.turns(link.receiver, self.streams[link.receiver][at])
                self.post(link.receiver, onwards, sends=True)
                moved = True
        return moved

    def run(self) -> None:
        while any([self.step(process) for process in self.streams]) | self.move():
            pass
        assert all(self.at[process] == len(stream) for process, stream in self.streams.items())
        assert not any(self.left.values())


@pytest.mark.parametrize("seed", range(8))
def test_nobody_waits_for_what_needs_him_whatever_the_schedule(seed):
    rng = random.Random(seed)
    num_stages, num_microbatches = rng.randrange(2, 6), rng.randrange(1, 5)
    rows = draw_schedule(num_stages, num_microbatches, 3, rng)
    weights = [f32(4, 4)] * num_stages
    batch = {name: f32(num_microbatches, 2, 4) for name in "xy"}
    InTurn(plan_step(random_step, weights, batch, actors=3, schedule=rows).programs).run()


def turns_of(part: ActorProgram, process_rank: ProcessRank, scattering: Scattering) -> Any:
    num_devices = int(np.prod([size for _, size in scattering.axes]))
    for i in part.instructions:
        if isinstance(i, Send | Recv):
            held = [
                piece for piece in scattering.parts(part.avals[i.buffer]) if process_rank.rank in piece.ranks
            ]
            if isinstance(i, Send):
                yield from array_parts.order_sends(process_rank, held, i.tag, i.to_actor, num_devices)
            else:
                yield from array_parts.order_receives(process_rank, held, i.tag, i.from_actor, num_devices)


# ---------------------------------------------------------------- a mesh

WHOLE_ON_ALL = ({name: jax.P() for name in ("w1", "b", "w2")}, jax.P())
"""What crosses once has to be passed on."""


@pytest.fixture
def options(monkeypatch, tmp_path):
    """Of a mesh of actors of two processes of two devices, on the library that stands in for NCCL."""
    # which would ask for GPUs
    monkeypatch.setattr("jaxpp_async.session.mesh_options.choose_transport", lambda *_, **__: "nccl")
    violations = tmp_path / "violations"
    yield {
        "spmd_mesh": {"data": 2, "model": 2},
        "processes_per_actor": 2,
        "launcher": LocalLauncher(actor="nccl_over_sockets:NcclActor"),
        "env": {**checkpoint_faults.ENV, nccl_over_sockets.VIOLATIONS: str(violations)},
    }
    assert not violations.exists(), violations.read_text()


async def test_actors_of_several_processes_transfer_in_order_and_survive_the_death_of_one(options):
    params, batch = problem()
    plain = jax.jit(train_step(jpp.Std1F1B(2)))
    async with jpp.RemoteMesh(2, max_restarts=1, backup_every=2, **options) as mesh:
        linking = mesh._running()._linking
        for shardings in (BOTH, WHOLE_ON_ALL):
            step = mesh.distributed(train_step(jpp.Std1F1B(2)), in_shardings=shardings, donate_argnums=0)
            state, expected = params, params
            for _ in range(2):
                state, losses = await mesh.run(step, state, batch)
                expected, wanted = plain(expected, batch)
            close(await mesh.fetch((state, losses)), (expected, wanted))
        ways = {link[:2] for link in linking._made}
        assert ways == {(0, 2), (1, 3), (2, 0), (3, 1), (2, 3), (3, 2), (0, 1), (1, 0)}
        before = set(linking._made)
        os.kill(mesh.actors[1].processes[1].pid, signal.SIGKILL)
        for _ in range(4):
            state, losses = await mesh.run(step, state, batch)
            expected, wanted = plain(expected, batch)
        close(await mesh.fetch((state, losses)), (expected, wanted))
        assert linking._made == before and linking._epoch == 1, "the same links, made anew"
        victim = mesh.actors[0].processes[0]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(
            RestartBudgetExceeded, match=rf"actor 0 \(process 0 of 2: host .*, pid {victim.pid}\)"
        ):
            while True:
                state, _ = await mesh.run(step, state, batch)


async def test_different_versions_are_refused_before_anything_is_compiled(options):
    options["env"][nccl_over_sockets.VERSIONS] = "2.32.3 2.30.1"
    with pytest.raises(
        MeshError, match=r"NCCL 2.32.3: actor 0.*; NCCL 2.30.1: actor 0.*install the same version"
    ):
        async with jpp.RemoteMesh(1, **options):
            raise AssertionError("it has started")
