"""Move arrays to the actors on which a step needs them, and load programs on the actors.

A move is a small program that runs before the step and sends an array from one actor to others. `Mover`
builds the program of each kind of move once. `Moved` records one move, and `summary` and `warning` describe
moves in the log.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs

from jaxpp_async.base.install_hints import page
from jaxpp_async.base.printable import first_line
from jaxpp_async.compiler import lowering, verify
from jaxpp_async.compiler.export import Emitted, Target, emit
from jaxpp_async.compiler.ir import Recipe, Types, ValueType
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram, OnCompiled
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
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.protocol.messages import Loaded
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.leaf_division import DividedPlace, part_types, part_values
from jaxpp_async.session.part_moves import Held, Redivision, build_redivision
from jaxpp_async.session.remote_array import DELETED, FAILED, PartArrays, RemoteArray, is_remote

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
        self._programs: dict[Move | Copied | Redivision, int] = {}

    async def divide(self, leaves: Sequence[Any], slots: Sequence[Slot], name: str) -> tuple[Moved, ...]:
        """Divide the arrays of a call into the parts in which a step takes them, or join their parts.

        The handle of such an array then refers to new buffers, and the old ones are freed, as after a change
        of sharding. Parts that stay the same keep their buffers, wherever they lie.

        Args:
            leaves: the argument leaves of the user; those that are no `RemoteArray`s are ignored.
            slots: for each leaf, the step's slot.
            name: name of the step's function.

        Returns:
            One entry for each actor that had rows of a new part, by parts.

        Raises:
            ActorError: an actor or the mesh failed; a note says which argument was being divided.
        """
        moved: list[Moved] = []
        for leaf, slot in zip(leaves, slots, strict=False):
            if not is_remote(leaf) or not _is_divided_otherwise(leaf, slot):
                continue
            if (host := leaf.host) is not None:
                self._divide_here(leaf, host, slot.parts)
                continue
            number = self._controller().num_steps
            try:
                moved += await self._redivide(leaf, slot)
            except ActorError as error:
                error.add_note(
                    f"{slot.name} ({leaf.nbytes:,} bytes) was being divided or joined for step {number} "
                    f"({name!r}), which had not begun"
                )
                raise
        return tuple(moved)

    def _divide_here(self, leaf: RemoteArray, host: np.ndarray, parts: Parts | None) -> None:
        """Divide an array whose value is in this process, or join its parts."""
        kind = leaf.value_type
        if parts is None:
            leaf.take_over(self._values.new_host_array(kind, host))
            return
        made = zip(part_types(kind, parts), part_values(host, parts), strict=True)
        arrays = tuple(self._values.new_host_array(part, value) for part, value in made)
        leaf.take_over(RemoteArray.in_parts(self._values, kind, PartArrays(parts, arrays)))

    async def _redivide(self, leaf: RemoteArray, slot: Slot) -> list[Moved]:
        """Make the parts of an array that a step needs and that do not exist; see `divide`."""
        wanted = _wanted(leaf, slot)
        await self._send_waiting_parts(leaf, slot, wanted.actors[0][:1])
        change = Redivision(replace(leaf.value_type, weak=False), _held(leaf), wanted)
        what = "joining the parts of %s (%d bytes)" if slot.parts is None else "dividing %s (%d bytes)"
        _LOG.info(what, slot.name, leaf.nbytes)
        if change not in self._programs:
            programs, executables = build_redivision(change, self._num_actors, self._target)
            self._programs[change], _ = await load_programs(self._controller(), programs, executables)
        leaf.check_usable(slot.name, self._values)  # the user may have deleted it meanwhile
        old, kept = leaf.pieces, change.kept()
        new = [
            old[kept[k]]
            if k in kept
            else self._values.new_array(_with_spec(piece.type, wanted.specs[k], leaf.weak_type), actors)
            for k, (piece, actors) in enumerate(zip(slot.pieces, wanted.actors, strict=True))
        ]
        inputs = _ids_by_actor(enumerate(old))
        outputs = _ids_by_actor((k, array) for k, array in enumerate(new) if k not in kept)
        step = SubmittedStep(self._programs[change], kind="move")
        self._controller().start_step(step, inputs, outputs)
        # Before anything is awaited: the handle must know its parts if it is deleted or its move cancelled.
        self._give_pieces(leaf, slot.parts, new)
        step.when_done(lambda: _note_failure([leaf], "divided", step.error))
        await step
        return [
            Moved(piece.name, size_bytes, source, to, redivided=True)
            for k, piece in enumerate(slot.pieces)
            if k not in kept
            for (source, to), size_bytes in change.senders(k).items()
        ]

    async def _send_waiting_parts(self, leaf: RemoteArray, slot: Slot, to: tuple[ActorId, ...]) -> None:
        """Send the parts of an array that are still in this process, of an array that is on actors else."""
        for piece in leaf.pieces:
            if (value := piece.host) is not None:
                sent = self._values.new_array(piece.value_type, to)
                await self._values.fill([(sent, value)])
                leaf.check_usable(slot.name, self._values)  # the user may have deleted it meanwhile
                piece.take_over(sent)

    def _give_pieces(self, leaf: RemoteArray, parts: Parts | None, new: Sequence[RemoteArray]) -> None:
        """Make a handle refer to other arrays, and free those that it no longer refers to.

        Args:
            leaf: the handle.
            parts: the parts in which the array lives from now on; None if it is whole.
            new: the array of each part, or the whole one. Some may be those of the handle already.
        """
        for piece in leaf.pieces:
            if all(piece is not one for one in new):
                self._values.release(piece)
                piece.retire(DELETED, "its array is divided otherwise now")
        if parts is None:
            leaf.take_over(new[0])
        else:
            leaf.take_over(RemoteArray.in_parts(self._values, leaf.value_type, PartArrays(parts, tuple(new))))

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
        self._controller().start_step(step, taken, made)
        step.when_done(lambda: _note_failure(copies, "copied", step.error))
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


def _is_divided_otherwise(leaf: RemoteArray, slot: Slot) -> bool:
    """Return whether a step takes an array in other parts than those in which it lives.

    An argument that no task uses comes in any parts, and is handed back in them.
    """
    has = None if leaf.division is None else leaf.division.parts
    if slot.parts is None and not slot.actors and slot.any_sharding:
        return False
    return has != slot.parts


def _held(leaf: RemoteArray) -> Held:
    """Return where an array on actors lies."""
    return Held(
        None if leaf.division is None else leaf.division.parts,
        tuple(piece.actors for piece in leaf.pieces),
        tuple(piece.spec for piece in leaf.pieces),
    )


def _ids_by_actor(arrays: Iterable[tuple[int, RemoteArray]]) -> dict[ActorId, dict[int, int]]:
    """Return, for each actor, the ids of the arrays that it holds, by their positions in a program."""
    found: defaultdict[ActorId, dict[int, int]] = defaultdict(dict)
    for k, array in arrays:
        for actor in array.actors:
            found[actor][k] = array.array_id
    return found


def _wanted(leaf: RemoteArray, slot: Slot) -> Held:
    """Return in which parts, where and in which sharding a step takes an array.

    If no task uses any of it, all of it is made where some of it lies.
    """
    place, here = DividedPlace.of(slot), slot.home or leaf.actors[:1]
    actors = (here,) * len(slot.pieces) if place is None else place.actors
    return Held(slot.parts, actors, tuple(piece.type.aval.spec for piece in slot.pieces))


def _with_spec(kind: ValueType, spec: tuple[SpecEntry, ...], weak: bool) -> ValueType:
    return replace(kind, aval=structs.replace(kind.aval, spec=spec), weak=weak)


def _note_failure(arrays: Sequence[RemoteArray], made: str, error: Exception | None) -> None:
    if error is None:
        return
    for array in arrays:
        if not array.is_deleted():
            array.retire(FAILED, f"it could not be {made}: {first_line(error)}")


async def load_programs(
    controller: Controller,
    programs: Sequence[ActorProgram],
    executables: Sequence[Emitted],
    names: Mapping[int, str] = {},
    modelled_s: Mapping[int, float] = {},
    on_compiled: OnCompiled = lambda *_: None,
) -> tuple[int, dict[ActorId, Loaded]]:
    """Load the programs of one step or move on the actors that have instructions to run.

    Args:
        programs: one program per actor.
        executables: the executables that the programs run, by the index that their instructions use.
        names: the names of the step's arguments by position, for error messages on actors; empty if no error
            message of an actor names an argument.
        modelled_s: how long a call of an executable lasts at least, in seconds, by the executable's index;
            empty if no call is lengthened.
        on_compiled: called whenever an actor has compiled an executable.

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
    return await controller.load(LoadableProgram(parts, keys, blobs, names, modelled_s), on_compiled)


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
        redivided: whether the argument, or the part of it that `name` says, was made of a whole array or of
            other parts. `size_bytes` is then the size of the rows that `from_actor` had.
    """

    name: str
    size_bytes: int
    from_actor: ActorId
    to: tuple[ActorId, ...]
    resharded: bool = False
    redivided: bool = False


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
