"""Move arrays to the actors on which a step needs them, and load programs on the actors.

A move is a small program that runs before the step and sends an array from one actor to others. `Mover`
builds the program of each kind of move once. `Moved` records one move, and `summary` and `warning` describe
moves in the log.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from msgspec import structs

from jaxpp_async.base.install_hints import page
from jaxpp_async.base.printable import first_line
from jaxpp_async.compiler import lowering, verify
from jaxpp_async.compiler.export import Emitted, Target, emit
from jaxpp_async.compiler.ir import Recipe, Types, ValueType
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorError
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import (
    ActorId,
    GraphInput,
    GraphOutput,
    Node,
    SpecEntry,
    TaskGraph,
    Value,
    runs,
)
from jaxpp_async.protocol.messages import Loaded
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.remote_array import FAILED, RemoteArray, is_remote

_LOG = logging.getLogger("jaxpp_async")


class Mover:
    """The part of a mesh that moves arrays between actors, changes their shardings, and copies them.

    The program for each kind of move is loaded once.

    Args:
        controller: a function that returns the mesh's controller, or raises `MeshError` if the mesh has not
            started.
        values: the part of the mesh that creates and frees arrays.
        num_actors: number of actors.
        target: the devices of one actor.
    """

    def __init__(
        self, controller: Callable[[], Controller], values: RemoteValues, num_actors: int, target: Target
    ):
        self._controller, self._values = controller, values
        self._num_actors, self._target = num_actors, target
        self._programs: dict[Move | Copied, int] = {}

    async def bring(self, leaves: Sequence[Any], slots: Sequence[Slot], name: str) -> tuple[Moved, ...]:
        """Move the arrays of a call to the actors that need them, and reshard arrays if the step requires it.

        Args:
            leaves: the leaves of the call; leaves that are not on actors are ignored.
            slots: for each leaf, the step's slot, which has the required actors and sharding.
            name: name of the step's function.

        Returns:
            One entry per argument that was moved or resharded.

        Raises:
            ActorError: an actor or the mesh failed; a note says which argument was being moved.
        """
        moved = []
        for leaf, slot in zip(leaves, slots, strict=False):
            if not is_remote(leaf) or leaf.host is not None:
                continue
            missing = tuple(a for a in slot.actors if a not in leaf.actors)
            source, number = leaf.actors[0], self._controller().num_steps
            try:
                if leaf.spec != slot.type.aval.spec and not slot.any_sharding:
                    to = slot.actors or leaf.actors
                    await self._reshard(leaf, slot, to)
                    moved.append(Moved(slot.name, leaf.nbytes, source, to, resharded=True))
                elif missing:
                    await self._move(leaf, missing, slot)
                    moved.append(Moved(slot.name, leaf.nbytes, source, missing))
            except ActorError as error:
                error.add_note(
                    f"{slot.name} ({leaf.nbytes:,} bytes) was being moved from actor {source} to actors "
                    f"{list(slot.actors or leaf.actors)} for step {number} ({name!r}), which had not begun"
                )
                raise
        return tuple(moved)

    async def _move(self, leaf: RemoteArray, to: tuple[ActorId, ...], slot: Slot) -> None:
        move = Move(replace(leaf.value_type, weak=False), leaf.actors[0], to, leaf.spec)
        _LOG.info(
            "moving %s (%d bytes) from actor %d to %s", slot.name, leaf.nbytes, leaf.actors[0], list(to)
        )
        step = await self._start_move(move, leaf, leaf.array_id, slot)
        # Before anything is awaited: the handle must know its copies if it is deleted or its move cancelled.
        leaf.relocate(tuple(sorted({*leaf.actors, *to})))
        await step

    async def copy(self, arrays: Sequence[tuple[str, RemoteArray]]) -> list[RemoteArray]:
        """Start to copy arrays on the actors that hold them, and return the handles of the copies.

        A copy is on the same actors as its original. The handles may be passed to a step immediately.

        Args:
            arrays: pairs of an array's name, for error messages, and the array.
        """
        what = tuple((replace(leaf.value_type, weak=False), leaf.actors) for _, leaf in arrays)
        if what not in self._programs:
            programs = build_copies(what, self._num_actors)
            self._programs[what], _ = await load_programs(self._controller(), programs, ())
        for name, leaf in arrays:
            leaf.check_usable(name, self._values)  # the user may have deleted it meanwhile
        copies: list[RemoteArray] = []
        taken: defaultdict[ActorId, dict[int, int]] = defaultdict(dict)
        made: defaultdict[ActorId, dict[int, int]] = defaultdict(dict)
        for k, ((_, leaf), (_, actors)) in enumerate(zip(arrays, what, strict=True)):
            copies.append(self._values.new_array(leaf.value_type, actors))
            for actor in actors:
                taken[actor][k], made[actor][k] = leaf.array_id, copies[k].array_id
        step = SubmittedStep(self._programs[what], kind="move")
        self._controller().start_step(step, taken, made).when_done(lambda: _note_failure(copies, step.error))
        return copies

    async def _reshard(self, leaf: RemoteArray, slot: Slot, to: tuple[ActorId, ...]) -> None:
        """Give an array another sharding.

        The handle `leaf` then refers to new buffers, and the old buffers are freed.

        Args:
            leaf: the array.
            slot: the step's slot for the array, which has the array's name and its new sharding.
            to: the actors that are to have the array.
        """
        move = Move(replace(leaf.value_type, weak=False), leaf.actors[0], to, slot.type.aval.spec)
        _LOG.info("resharding %s from %s to %s", slot.name, leaf.spec, slot.type.aval.spec)
        new_id = self._controller().new_array_id()
        step = await self._start_move(move, leaf, new_id, slot)
        self._values.release(leaf)
        resharded = replace(
            leaf.value_type, aval=structs.replace(leaf.value_type.aval, spec=slot.type.aval.spec)
        )
        leaf.relocate(to, array_id=new_id, value_type=resharded)
        await step

    async def _start_move(self, move: Move, leaf: RemoteArray, result_id: int, slot: Slot) -> SubmittedStep:
        if move not in self._programs:
            programs = build(move, self._num_actors, self._target)
            self._programs[move], _ = await load_programs(self._controller(), *programs)
        leaf.check_usable(slot.name, self._values)  # the user may have deleted it meanwhile
        inputs = {move.source: {0: leaf.array_id}}
        outputs = {a: {0: result_id} for a in move.to}
        step = SubmittedStep(self._programs[move], kind="move")
        return self._controller().start_step(step, inputs, outputs)


def _note_failure(copies: Sequence[RemoteArray], error: Exception | None) -> None:
    if error is None:
        return
    for array in copies:
        if not array.is_deleted():
            array.retire(FAILED, f"it could not be copied: {first_line(error)}")


async def load_programs(
    controller: Controller,
    programs: Sequence[ActorProgram],
    executables: Sequence[Emitted],
    names: Mapping[int, str] = {},
    modelled_s: Mapping[int, float] = {},
) -> tuple[int, dict[ActorId, Loaded]]:
    """Load the programs of one step or move on the actors that have instructions to run.

    Args:
        programs: one program per actor.
        executables: the executables that the programs run, by the index that their instructions use.
        names: the names of the step's arguments by position, for error messages on actors; empty if no error
            message of an actor names an argument.
        modelled_s: how long a call of an executable lasts at least, in seconds, by the executable's index;
            empty if no call is lengthened.

    Returns:
        The id by which the controller runs the programs, and the replies, by actor, of the actors that loaded
        a program.
    """
    parts = {p.actor: p for p in programs if p.instructions}
    keys = {
        a: {r.executable: executables[r.executable].key for r in runs(p.instructions)}
        for a, p in parts.items()
    }
    blobs = {e.key: e.blob for e in executables}
    return await controller.load(LoadableProgram(parts, keys, blobs, names, modelled_s))


# ---------------------------------------------------------------- moves


@dataclass(frozen=True)
class Move:
    """A kind of move: actor `source` sends an array of type `type` to the actors in `to`.

    The actors in `to` then hold the array with the sharding `spec`. Equal moves share one loaded program.
    """

    type: ValueType
    source: ActorId
    to: tuple[ActorId, ...]
    spec: tuple[SpecEntry, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """The record of an argument that was moved to other actors before a step, or given another sharding.

    Args:
        name: name of the argument, such as `"state['w']"`.
        size_bytes: size of one copy.
        from_actor: the actor that sent the argument.
        to: the actors that each received one copy.
        resharded: whether the argument was given another sharding.
    """

    name: str
    size_bytes: int
    from_actor: ActorId
    to: tuple[ActorId, ...]
    resharded: bool = False


WARN_BYTES = 1 << 20
"""The number of bytes above which the moves of arrays before a step cause a warning."""


def carried_bytes(moved: Sequence[Moved]) -> int:
    """Return how many bytes were sent between actors; an array that was sent to two actors counts twice.

    Args:
        moved: the moves whose bytes are added up.
    """
    return sum(m.size_bytes * len({*m.to} - {m.from_actor}) for m in moved)


def warning(moved: Sequence[Moved], step_name: str, why: Callable[[str], str]) -> str:
    """Return the text of a warning that arguments of a step had to be sent from one actor to others.

    Users may not expect these moves, or not want them at every call of the step.

    Args:
        moved: all arguments that were moved or resharded before the step.
        step_name: name of the step.
        why: a function that takes an argument's name, and returns the reason why the step needs that argument
            on the actors to which it was sent.
    """
    carried = [m for m in moved if carried_bytes([m])]
    largest = max(carried, key=lambda m: m.size_bytes)
    to = ", ".join(str(a) for a in largest.to)
    count = "1 array" if len(carried) == 1 else f"{len(carried)} arrays"
    return (
        f"step {step_name!r}: {count} ({carried_bytes(carried) / 1e6:.1f} MB) had to be carried to other "
        f"actors; the largest, {largest.name} ({largest.size_bytes / 1e6:.1f} MB), lies on actor "
        f"{largest.from_actor}, and the step computes with it on actor {to} ({why(largest.name)}). An array "
        "that is new at every call is carried at every call: give this step the same stages on the same "
        "actors as the step that makes the array, have the array made or put where this step takes it "
        "(step.init, mesh.put(..., like=(step, argnum))), or leave it out of the computation; see "
        f"{page('placement.md')}"
    )


def summary(moved: Sequence[Moved], step_name: str) -> str:
    """Return a log line with the number and bytes of the arguments that were moved before a step."""
    total = sum(m.size_bytes * len(m.to) for m in moved)
    count = "1 array" if len(moved) == 1 else f"{len(moved)} arrays"
    return f"moved {count}, {total} bytes, before step {step_name!r}, which keeps them elsewhere"


def build(
    move: Move, num_actors: int, target: Target
) -> tuple[tuple[ActorProgram, ...], tuple[Emitted, ...]]:
    """Build the programs of one move: an actor sends the array, and the receivers reshard it if needed.

    Returns:
        The programs, one per actor (empty for an actor that has no part in the move), and the executables
        that they run: one that reshards, or none if the sharding stays the same.
    """
    there = structs.replace(move.type.aval, spec=move.spec)
    values = [Value(move.type.aval, "moved", "temp")]
    nodes, outputs, executables = [], [], ()
    if there.spec == move.type.aval.spec:
        outputs.append(GraphOutput(0, 0, move.to))
    else:
        executables = (_reshard(move, target),)
        for actor in move.to:
            values.append(Value(there, "resharded"))
            nodes.append(Node(f"reshard(actor {actor})", actor, 0, (0,), (len(values) - 1,)))
            outputs.append(GraphOutput(len(values) - 1, 0, (actor,)))
    graph = TaskGraph(
        num_actors, tuple(values), tuple(nodes), (GraphInput(0, 0, (move.source,)),), tuple(outputs)
    )
    programs = tuple(lowering.lower(graph))
    verify.verify_programs(programs)
    return programs, executables


Copied: TypeAlias = tuple[tuple[ValueType, tuple[ActorId, ...]], ...]
"""The arrays that each of their actors copies in its own memory: the type and the actors of each array."""


def build_copies(copied: Copied, num_actors: int) -> tuple[ActorProgram, ...]:
    """Build programs, one per actor, that copy each array on every actor that holds it.

    The originals stay, because the caller goes on using them.

    Args:
        copied: for each array, its type and the actors that hold it.
        num_actors: number of actors.
    """
    values = [Value(value_type.aval, f"copied[{k}]", "input") for k, (value_type, _) in enumerate(copied)]
    inputs = [GraphInput(k, k, actors) for k, (_, actors) in enumerate(copied)]
    outputs = [GraphOutput(k, k, actors) for k, (_, actors) in enumerate(copied)]
    programs = tuple(lowering.lower(TaskGraph(num_actors, tuple(values), (), tuple(inputs), tuple(outputs))))
    verify.verify_programs(programs)
    return programs


def _reshard(move: Move, target: Target) -> Emitted:
    types = Types()
    array = types.new(ValueType(move.type.aval))
    recipe = Recipe("reshard", inputs=(array,), outputs=(array,))
    return emit(recipe, types, {array: move.type.aval.spec}, target, out_specs=(move.spec,))
