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
from jaxpp_async.session.move_programs import Copied, Move, Moved, build, build_copies
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
        self._programs: dict[Move | Copied, int] = {}

    async def bring(self, leaves: Sequence[Any], slots: Sequence[Slot], name: str) -> tuple[Moved, ...]:
        """Move the arrays of a call to the actors that need them, and reshard arrays if the step requires it.

        Arrays are resharded one after another, since each needs memory for its old and new buffers. The moves
        of all others are started before the first one has ended.

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
                with self._noting(leaf, slot, source, name):
                    await self._reshard(leaf, slot, to)
                moved.append(Moved(slot.name, leaf.nbytes, source, to, resharded=True))
        started = []
        for leaf, slot in on_actors:
            missing = tuple(actor for actor in slot.actors if actor not in leaf.actors)
            if missing:
                source = leaf.actors[0]
                with self._noting(leaf, slot, source, name):
                    try:
                        step = await self._start_move(leaf, missing, slot)
                    except ActorError:
                        if any(earlier.error for *_, earlier in started):
                            break  # its error is raised below, with the argument that was being moved
                        raise
                moved.append(Moved(slot.name, leaf.nbytes, source, missing))
                started.append((leaf, slot, source, step))
        for leaf, slot, source, step in started:
            with self._noting(leaf, slot, source, name):
                await step
        return tuple(moved)

    @contextlib.contextmanager
    def _noting(self, leaf: RemoteArray, slot: Slot, source: ActorId, name: str) -> Iterator[None]:
        """Add a note to an error that says which argument was being moved.

        Args:
            leaf: the array.
            slot: the step's slot for it.
            source: the actor that sends it.
            name: name of the step's function.
        """
        to, number = list(slot.actors or leaf.actors), self._controller().num_steps
        try:
            yield
        except ActorError as error:
            error.add_note(
                f"{slot.name} ({leaf.nbytes:,} bytes) was being moved from actor {source} to actors {to} for "
                f"step {number} ({name!r}), which had not begun"
            )
            raise

    async def _start_move(self, leaf: RemoteArray, to: tuple[ActorId, ...], slot: Slot) -> SubmittedStep:
        """Start to send an array to actors, and return the step that does it."""
        source = leaf.actors[0]
        move = Move(replace(leaf.value_type, weak=False), source, to, leaf.spec)
        _LOG.info("moving %s (%d bytes) from actor %d to %s", slot.name, leaf.nbytes, source, list(to))
        step = await self._start(move, leaf, leaf.array_id, slot)
        # Before anything is awaited: the handle must know its copies if it is deleted or its move cancelled.
        leaf.relocate(tuple(sorted({*leaf.actors, *to})))
        return step

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
        new_id = self._controller().new_array_id()
        step = await self._start(move, leaf, new_id, slot)
        self._values.release(leaf)
        resharded = replace(
            leaf.value_type, aval=structs.replace(leaf.value_type.aval, spec=slot.type.aval.spec)
        )
        leaf.relocate(to, array_id=new_id, value_type=resharded)
        await step

    async def _start(self, move: Move, leaf: RemoteArray, result_id: int, slot: Slot) -> SubmittedStep:
        if move not in self._programs:
            programs, executables = build(move, self._num_actors, self._target)
            loadable = LoadableProgram.of(programs, executables)
            self._programs[move], _ = await self._controller().load(loadable)
        leaf.check_usable(slot.name, self._values)  # the user may have deleted it meanwhile
        inputs = {move.source: {0: leaf.array_id}}
        outputs = {a: {0: result_id} for a in move.to}
        step = SubmittedStep(self._programs[move], kind="move")
        return self._controller().start_step(step, inputs, outputs)
