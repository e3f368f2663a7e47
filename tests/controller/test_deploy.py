"""Direct tests of what the controller remembers of programs, of the links they need, and of loading them."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from jaxpp_async.compiler.export import Emitted
from jaxpp_async.controller.deploy import Deployment, LoadableProgram, LoadedPrograms, MessageEnd, links_of
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.errors import ActorDiedError, ProtocolError
from jaxpp_async.layout.array_parts import Scattering
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Input, Recv, Run, Send
from jaxpp_async.protocol.actor_info import Position, Topology
from jaxpp_async.protocol.messages import Load, Loaded
from jaxpp_async.transport.nccl.order import NcclLink

F4 = Aval((4,), "float32")
FIRST = ActorProgram(0, (Input(0, 0), Run("fwd(stage 0, mb 0)", 2, (0,), (1,)), Send(1, 1, 0)), (F4, F4))
SECOND = ActorProgram(1, (Recv(0, 0, 0),), (F4,))
PARTS = {1: SECOND, 0: FIRST}


def loaded_programs(processes: Topology, *, for_successors: bool = False) -> LoadedPrograms:
    return LoadedPrograms(processes, ControllerOptions(max_restarts=int(for_successors)))


def programs(*, for_successors: bool = False, per_actor: int = 1) -> LoadedPrograms:
    made = loaded_programs(Topology(2, per_actor), for_successors=for_successors)
    blobs = {"k0": b"zero", "k1": b"one"}
    made.add(LoadableProgram(PARTS, {0: {2: "k0", 3: "k1"}}, blobs, {0: "x"}))
    return made


# ---------------------------------------------------------------- what is loaded


def test_of_what_the_compiler_made_each_actor_loads_what_its_own_instructions_run():
    idle, executables = ActorProgram(2, (), ()), [Emitted(f"k{k}", b"%d" % k, "fwd") for k in range(3)]
    made = LoadableProgram.of([FIRST, SECOND, idle], executables, {0: "x"}, {2: 0.5})
    assert made.parts == {0: FIRST, 1: SECOND}
    assert made.keys == {0: {2: "k2"}, 1: {}}
    assert made.blobs == {"k0": b"0", "k1": b"1", "k2": b"2"}
    assert (made.names, made.modelled_s) == ({0: "x"}, {2: 0.5})


# ---------------------------------------------------------------- what is remembered


def test_an_actor_is_sent_only_executables_that_it_has_not_had():
    known = {"k1"}
    message = programs().load_message(0, 0, known)
    assert message == Load(0, FIRST, {2: "k0", 3: "k1"}, {"k0": b"zero"}, {0: "x"})
    assert known == {"k0", "k1"}


def test_an_actor_without_executables_is_sent_its_program_alone():
    message = programs().load_message(0, 1, set())
    assert (message.executables, message.blobs, message.program) == ({}, {}, SECOND)


def test_an_actor_is_told_how_long_its_own_executables_are_to_last_and_so_is_its_successor():
    made = loaded_programs(Topology(2), for_successors=True)
    keys, blobs = {0: {2: "k0"}, 1: {3: "k1"}}, {"k0": b"zero", "k1": b"one"}
    made.add(LoadableProgram(PARTS, keys, blobs, modelled_s={2: 0.25, 3: 0.5}))
    assert [made.load_message(0, actor, set()).modelled_s for actor in (0, 1)] == [{2: 0.25}, {3: 0.5}]
    made.note_loaded(0)
    assert made.load_message(0, 1, set()).modelled_s == {3: 0.5}, "a successor"
    assert programs().load_message(0, 0, set()).modelled_s == {}


def test_a_program_knows_its_actors_and_their_processes_in_order():
    made = programs(per_actor=2)
    assert made.processes_by_actor(0) == ((0, (0, 1)), (1, (2, 3)))
    assert made.parts(0) == PARTS


def test_executables_are_dropped_once_loaded_unless_a_successor_needs_them():
    forgets, keeps = programs(), programs(for_successors=True)
    for made in (forgets, keeps):
        made.note_loaded(0)
        assert made.part(0, 0) == FIRST
    with pytest.raises(KeyError):
        forgets.load_message(0, 0, set())
    assert keeps.load_message(0, 0, set()).blobs == {"k0": b"zero", "k1": b"one"}


def test_a_program_that_could_not_be_loaded_is_gone_and_its_id_is_never_given_again():
    made = programs()
    made.remove(0)
    made.remove(0)
    assert (made.programs_of(0), made.parts(0), made.part(0, 0), made.all_parts()) == ((), {}, None, [])
    assert made.add(LoadableProgram(PARTS)) == 1


def test_programs_of_an_actor_are_listed_in_order_of_their_ids():
    made = programs()
    for _ in range(2):
        made.add(LoadableProgram({0: FIRST}))
    assert (made.programs_of(0), made.programs_of(1)) == ((0, 1, 2), (0,))
    assert made.all_parts() == [{0: FIRST, 1: SECOND}, {0: FIRST}, {0: FIRST}]


@pytest.mark.parametrize(
    ("actor", "at", "text"),
    [
        (0, Position(0, 0, 2, waiting=False), "send   b1 to 1 tag 0"),
        (0, Position(0, 0, 2, waiting=True), "send   b1 to 1 tag 0 (waiting for data)"),
        (0, Position(0, 0, 3, waiting=True), None),  # the end
        (0, Position(0, 0, -1, waiting=True), None),
        (0, Position(0, 5, 0, waiting=True), None),
        (7, Position(0, 0, 0, waiting=True), None),
    ],
)
def test_the_instruction_at_a_position_reads_as_in_the_program_if_there_is_one(actor, at, text):
    assert programs().instruction_at(actor, at) == text


# ---------------------------------------------------------------- links


def test_a_program_needs_one_link_for_each_direction_between_two_processes():
    back = ActorProgram(1, (*SECOND.instructions, Send(0, 0, 1)), SECOND.avals)
    forth = ActorProgram(0, (*FIRST.instructions, Recv(2, 1, 1)), (F4, F4, F4))
    assert links_of(PARTS, Scattering((), 1)) == [NcclLink(0, 1)]
    assert links_of({0: forth, 1: back}, Scattering((), 1)) == [NcclLink(0, 1), NcclLink(1, 0)]


def test_of_actors_of_two_processes_a_replicated_array_takes_a_link_across_and_one_within_the_actor():
    assert links_of(PARTS, Scattering((("x", 2),), 2)) == [NcclLink(0, 2), NcclLink(2, 3)]


@pytest.mark.parametrize(
    ("received", "says"),
    [
        ((), f"the one sends tag 0, {F4}, the other receives nothing"),
        ((Recv(0, 0, 1),), f"the one sends tag 0, {F4}, the other receives tag 1, {F4}"),
    ],
)
def test_ends_that_do_not_agree_on_a_transfer_are_a_protocol_error_that_names_both(received, says):
    with pytest.raises(ProtocolError) as caught:
        links_of({0: FIRST, 1: ActorProgram(1, received, (F4,))}, Scattering((), 1))
    assert str(caught.value) == (
        f"transfer 0 from actor 0 to actor 1: {says}; this is a bug in jaxpp_async.compiler.lowering"
    )


def test_a_message_reads_as_its_tag_and_its_array():
    assert str(MessageEnd(12, 3, F4)) == f"tag 3, {F4}"


# ---------------------------------------------------------------- loading


class Actors:
    """Stands in for the controller's actors, requests and links: each process answers at once."""

    def __init__(self, error: Exception | None = None):
        self.processes, self.error = Topology(2), error
        self.links = {process: SimpleNamespace(known_blobs=set()) for process in self.processes.everyone}
        self.posted, self.linked, self.said, self.log = [], [], [], []

    async def call(self, process: int, message: Load) -> Loaded:
        self.posted.append((process, message))
        await asyncio.sleep(0)
        if self.error is not None and process == 1:
            raise self.error
        return Loaded(0.5, {process: 8})

    async def link(self, program_id: int) -> None:
        self.linked.append(program_id)

    @contextlib.contextmanager
    def paused(self):
        self.log.append("paused")
        yield
        self.log.append("goes on")


async def deploy(actors: Actors, made: LoadedPrograms) -> dict[int, Loaded]:
    deploying = Deployment(actors, actors, made, actors, paused=actors.paused, on_progress=actors.said.append)
    program_id, loaded = await deploying.deploy(LoadableProgram(PARTS, {0: {2: "k0"}}, {"k0": b"zero"}))
    assert program_id == 0
    return loaded


async def test_a_program_is_loaded_on_all_of_its_actors_and_then_linked():
    actors, made = Actors(), loaded_programs(Topology(2))
    loaded = await deploy(actors, made)
    assert {actor: reply.temp_bytes for actor, reply in loaded.items()} == {0: {0: 8}, 1: {1: 8}}
    assert [(process, message.blobs) for process, message in actors.posted] == [(0, {"k0": b"zero"}), (1, {})]
    assert (actors.linked, actors.said) == ([0], ["compiling on 2 actors"])
    assert actors.log == ["paused", "goes on"]
    assert actors.links[0].known_blobs == {"k0"}
    assert made.programs_of(0) == (0,)


async def test_a_program_that_one_actor_cannot_load_is_forgotten_and_not_linked():
    actors, made = Actors(ActorDiedError("gone", actor=1)), loaded_programs(Topology(2))
    with pytest.raises(ActorDiedError, match="gone"):
        await deploy(actors, made)
    assert (made.programs_of(0), actors.linked) == ((), [])


async def test_what_a_failed_request_carried_is_sent_again_with_the_next_one():
    actors, made = Actors(ActorDiedError("gone", actor=1)), loaded_programs(Topology(2))
    deploying = Deployment(actors, actors, made, actors, paused=actors.paused, on_progress=actors.said.append)
    with pytest.raises(ActorDiedError):
        await deploying.deploy(LoadableProgram(PARTS, {1: {2: "k0"}}, {"k0": b"zero"}))
    assert actors.links[1].known_blobs == set()
