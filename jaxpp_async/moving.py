"""moving: arrays, and the places where a step needs them in; small programs of `moves`, run before the step, out.

Loads programs, those of steps too. Touches no device: the actors send to each other.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpp_async import moves
from jaxpp_async.actors.controller import Controller
from jaxpp_async.actors.crew.step_handle import StepHandle
from jaxpp_async.actors.messages import Loaded
from jaxpp_async.arrays import FAILED, RemoteArray, is_remote
from jaxpp_async.binding import Slot
from jaxpp_async.compiler.emit import Emitted, Target
from jaxpp_async.errors import ActorError
from jaxpp_async.program import ActorId, ActorProgram, runs
from jaxpp_async.recording import first_line
from jaxpp_async.values import RemoteValues

_LOG = logging.getLogger("jaxpp_async")


class Mover:
    """Carries the arrays of one mesh between its actors; loads each kind of move once.

    Args:
        controller: gives the mesh's controller, or raises `MeshError` if the mesh has not started.
        values: the mesh's arrays.
        num_actors: how many there are.
        target: the devices of one actor.
    """

    def __init__(self, controller: Callable[[], Controller], values: RemoteValues, num_actors: int, target: Target):
        self._controller, self._values = controller, values
        self._num_actors, self._target = num_actors, target
        self._programs: dict[moves.Move | moves.Copied, int] = {}

    async def bring(self, leaves: Sequence[Any], slots: Sequence[Slot], name: str) -> tuple[moves.Moved, ...]:
        """Bring arrays that lie elsewhere to where a step needs them, actor to actor.

        Args:
            name: of the step's function.

        Raises:
            ActorError: an actor or the mesh failed; a note says which argument was on its way.
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
                    moved.append(moves.Moved(slot.name, leaf.nbytes, source, to, resharded=True))
                elif missing:
                    await self._move(leaf, missing, slot)
                    moved.append(moves.Moved(slot.name, leaf.nbytes, source, missing))
            except ActorError as error:
                error.add_note(
                    f"{slot.name} ({leaf.nbytes:,} bytes) was being moved from actor {source} to actors "
                    f"{list(slot.actors or leaf.actors)} for step {number} ({name!r}), which had not begun"
                )
                raise
        return tuple(moved)

    async def _move(self, leaf: RemoteArray, to: tuple[ActorId, ...], slot: Slot) -> None:
        move = moves.Move(replace(leaf.value_type, weak=False), leaf.actors[0], to, leaf.spec)
        _LOG.info("moving %s (%d bytes) from actor %d to %s", slot.name, leaf.nbytes, leaf.actors[0], list(to))
        handle = await self._start_move(move, leaf, leaf.array_id, slot)
        # Before anything is awaited: a cancelled or deleted one must know its copies.
        leaf.relocate(tuple(sorted({*leaf.actors, *to})))
        await handle

    async def copy(self, arrays: Sequence[tuple[str, RemoteArray]]) -> list[RemoteArray]:
        """Copy arrays, each where it lies. The copies may be used at once.

        Args:
            arrays: with their names.
        """
        what = tuple((replace(leaf.value_type, weak=False), leaf.actors) for _, leaf in arrays)
        if what not in self._programs:
            programs = moves.build_copies(what, self._num_actors)
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
        handle = self._controller().start_step(self._programs[what], taken, made, kind="move")
        handle.when_done(lambda: _note_failure(copies, handle))
        return copies

    async def _reshard(self, leaf: RemoteArray, slot: Slot, to: tuple[ActorId, ...]) -> None:
        """Give an array another sharding. The handle then stands for the new copies; the old ones are freed."""
        move = moves.Move(replace(leaf.value_type, weak=False), leaf.actors[0], to, slot.type.aval.spec)
        _LOG.info("resharding %s from %s to %s", slot.name, leaf.spec, slot.type.aval.spec)
        new_id = self._controller().new_array_id()
        handle = await self._start_move(move, leaf, new_id, slot)
        self._values.release(leaf)
        resharded = replace(leaf.value_type, aval=replace(leaf.value_type.aval, spec=slot.type.aval.spec))
        leaf.relocate(to, array_id=new_id, value_type=resharded)
        await handle

    async def _start_move(self, move: moves.Move, leaf: RemoteArray, result_id: int, slot: Slot) -> StepHandle:
        if move not in self._programs:
            program = moves.build(move, self._num_actors, self._target)
            self._programs[move], _ = await load_programs(self._controller(), program.programs, program.executables)
        leaf.check_usable(slot.name, self._values)  # the user may have deleted it meanwhile
        inputs = {move.source: {0: leaf.array_id}}
        outputs = {a: {0: result_id} for a in move.to}
        return self._controller().start_step(self._programs[move], inputs, outputs, kind="move")


def _note_failure(copies: Sequence[RemoteArray], handle: StepHandle) -> None:
    if handle.error is None:
        return
    for array in copies:
        if not array.is_deleted():
            array.retire(FAILED, f"it could not be copied: {first_line(handle.error)}")


async def load_programs(
    controller: Controller,
    programs: Sequence[ActorProgram],
    executables: Sequence[Emitted],
    names: Mapping[int, str] = {},
) -> tuple[int, dict[ActorId, Loaded]]:
    """Load programs on the actors that have a part in them.

    Args:
        names: of a step's arguments, by number, where errors on actors may have to name them.

    Returns:
        The id to run them by, and what each of these actors answered.
    """
    program_id = controller.new_program_id()
    parts = {p.actor: p for p in programs if p.instructions}
    keys = {a: {r.executable: executables[r.executable].key for r in runs(p.instructions)} for a, p in parts.items()}
    blobs = {e.key: e.blob for e in executables}
    return program_id, await controller.load(program_id, parts, keys, blobs, names)
