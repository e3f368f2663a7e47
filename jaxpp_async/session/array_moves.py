"""Move arrays between actors, or give them another sharding, before the step that needs them there runs.

`Mover` finds the arrays of a call that lie elsewhere or in another sharding than the step takes them, runs
the programs that `move_programs` builds, and keeps the users' handles up to date. The modules `array_moves`
and `redivider` differ in what they change: where an array lives, and in which parts.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from jaxpp_async.compiler.export import Target
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorError
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.move_programs import (
    Copied,
    Move,
    Moved,
    build_copies,
    build_moves,
    build_resharding,
)
from jaxpp_async.session.remote_array import RemoteArray, is_remote, retire_failed

_LOG = logging.getLogger("jaxpp_async")


class Mover:
    """The part of a mesh that moves arrays between actors, changes their shardings, and copies them.

    The program for each kind of move is loaded once. A mover has no lock of its own: a `StepRunner` calls it
    under its start lock, so that no two calls move one array at a time.

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
        self._programs: dict[Move | tuple[Move, ...] | Copied, int] = {}

    async def bring(self, leaves: Sequence[Any], slots: Sequence[Slot], name: str) -> tuple[Moved, ...]:
        """Move the arrays of a call to the actors that need them, and reshard arrays if the step requires it.

        Arrays are resharded one after another, since each needs memory for its old and new buffers. All
        others are then sent by one program.

        Args:
            leaves: the leaves of the call; leaves that are not on actors are ignored.
            slots: for each leaf, the step's slot, which has the required actors and sharding.
            name: name of the step's function.

        Returns:
            One entry per argument that was moved or resharded.

        Raises:
            ActorError: an actor or the mesh failed; a note says which argument was being moved.
        """
        pairs = list(zip(leaves, slots, strict=False))
        on_actors = [(leaf, slot) for leaf, slot in pairs if is_remote(leaf) and leaf.host is None]
        moved = []
        for leaf, slot in on_actors:
            if leaf.spec != slot.type.aval.spec and not slot.any_sharding:
                to, source = slot.actors or leaf.actors, leaf.actors[0]
                with self._noting(leaf, slot, 1, name):
                    await self._reshard(leaf, slot, to)
                moved.append(Moved(slot.name, leaf.nbytes, source, to, resharded=True))
        going: list[tuple[RemoteArray, Slot, tuple[ActorId, ...]]] = []
        coming: defaultdict[int, set[ActorId]] = defaultdict(set)  # by array: the actors that will have it
        for leaf, slot in on_actors:
            missing = tuple(a for a in slot.actors if a not in leaf.actors and a not in coming[leaf.array_id])
            if missing:
                going.append((leaf, slot, missing))
                coming[leaf.array_id].update(missing)
        if going:
            moved += [Moved(slot.name, leaf.nbytes, leaf.actors[0], to) for leaf, slot, to in going]
            with self._noting(*going[0][:2], len(going), name):
                await self._move(going)
        return tuple(moved)

    @contextlib.contextmanager
    def _noting(self, leaf: RemoteArray, slot: Slot, count: int, name: str) -> Iterator[None]:
        """Add a note to an error that says which arguments were being moved.

        Args:
            leaf: the first of the arrays.
            slot: the step's slot for it.
            count: the number of arrays.
            name: name of the step's function.
        """
        were = "was" if count == 1 else f"and {count - 1} more were"
        to, number = list(slot.actors or leaf.actors), self._controller().num_steps
        note = (
            f"{slot.name} ({leaf.nbytes:,} bytes) {were} being moved from actor {leaf.actors[0]} to actors "
            f"{to} for step {number} ({name!r}), which had not begun"
        )
        try:
            yield
        except ActorError as error:
            error.add_note(note)
            raise

    async def _move(self, going: Sequence[tuple[RemoteArray, Slot, tuple[ActorId, ...]]]) -> None:
        """Send arrays to actors.

        Args:
            going: for each array, the step's slot for it, and the actors that get it.
        """
        moves = []
        for leaf, slot, to in going:
            source = leaf.actors[0]
            _LOG.info("moving %s (%d bytes) from actor %d to %s", slot.name, leaf.nbytes, source, list(to))
            moves.append(Move(replace(leaf.value_type, weak=False), source, to, leaf.spec))
        key = tuple(moves)
        if key not in self._programs:
            programs = build_moves(moves, self._num_actors)
            self._programs[key], _ = await self._controller().load(LoadableProgram.of(programs, ()))
        for leaf, slot, _ in going:
            leaf.check_usable(slot.name, self._values)  # the user may have deleted it meanwhile
        taken: defaultdict[ActorId, dict[int, int]] = defaultdict(dict)
        made: defaultdict[ActorId, dict[int, int]] = defaultdict(dict)
        for k, (leaf, _, to) in enumerate(going):
            taken[leaf.actors[0]][k] = leaf.array_id
            for actor in to:
                made[actor][k] = leaf.array_id
        step = SubmittedStep(self._programs[key], kind="move")
        self._controller().start_step(step, taken, made)
        # Before anything is awaited: a handle must know its copies if it is deleted or its move cancelled.
        for leaf, _, to in going:
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
            self._programs[what], _ = await self._controller().load(LoadableProgram.of(programs, ()))
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
        step.when_done(lambda: retire_failed(copies, "copied", step.error))
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
        if move not in self._programs:
            programs, executables = build_resharding(move, self._num_actors, self._target)
            loadable = LoadableProgram.of(programs, executables)
            self._programs[move], _ = await self._controller().load(loadable)
        leaf.check_usable(slot.name, self._values)  # the user may have deleted it meanwhile
        new_id = self._controller().new_array_id()
        step = SubmittedStep(self._programs[move], kind="move")
        inputs, outputs = {move.source: {0: leaf.array_id}}, {a: {0: new_id} for a in move.to}
        self._controller().start_step(step, inputs, outputs)
        self._values.release(leaf)
        resharded = replace(
            leaf.value_type, aval=structs.replace(leaf.value_type.aval, spec=slot.type.aval.spec)
        )
        leaf.relocate(to, array_id=new_id, value_type=resharded)
        await step
