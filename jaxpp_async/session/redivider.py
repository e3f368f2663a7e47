"""Divide arrays into the parts in which a step takes them, or join their parts, before the step runs.

`Redivider` finds the arrays of a call that live in other parts than the step takes, runs the programs that
`part_moves` builds, and lets the user's handles refer to the new parts.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorError
from jaxpp_async.program.instructions import ActorId, SpecEntry
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.leaf_division import DividedPlace, part_types, part_values
from jaxpp_async.session.move_programs import Moved
from jaxpp_async.session.part_moves import Held, Redivision, build_redivision
from jaxpp_async.session.remote_array import DELETED, PartArrays, RemoteArray, is_remote, retire_failed

_LOG = logging.getLogger("jaxpp_async")


class Redivider:
    """The part of a mesh that divides arrays into parts, joins parts, and divides arrays anew.

    The program for each kind of change is loaded once. A redivider has no lock of its own: a `StepRunner`
    calls `divide` under its start lock, so that no two calls change one array at a time.

    Args:
        controller: a function that returns the mesh's controller, or raises `MeshError` if the mesh has not
            started.
        values: the part of the mesh that creates, fills and frees arrays.
        num_actors: number of actors.
        target: the devices of one actor.
    """

    def __init__(
        self, controller: Callable[[], Controller], values: RemoteValues, num_actors: int, target: Target
    ):
        self._controller, self._values = controller, values
        self._num_actors, self._target = num_actors, target
        self._programs: dict[Redivision, int] = {}

    async def divide(self, leaves: Sequence[Any], slots: Sequence[Slot], name: str) -> tuple[Moved, ...]:
        """Divide the arrays of a call into the parts in which a step takes them, or join their parts.

        The handle of such an array then refers to new buffers, and the old ones are freed, as after a change
        of sharding. Parts that stay the same keep their buffers, wherever they lie.

        Leaves are divided one after another, each one's program to its end, to bound the memory of copies:
        actors hold the old and the new rows of a leaf at once, and free the old ones when the next leaf
        begins. The change of a whole training state then needs memory for the copies of one leaf alone.

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
            loadable = LoadableProgram.of(programs, executables)
            self._programs[change], _ = await self._controller().load(loadable)
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
        step.when_done(lambda: retire_failed([leaf], "divided", step.error))
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
