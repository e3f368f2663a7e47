"""Put host values on actors, fetch arrays from them, and free arrays.

Users have handles, and actors have the buffers; `RemoteValues` connects the two.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from msgspec import structs

from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.host_values import HostValue
from jaxpp_async.errors import ArrayError
from jaxpp_async.program.instructions import ActorId, Aval, SpecEntry
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session import argument_binding
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.leaf_division import DividedPlace, part_values
from jaxpp_async.session.remote_array import PartArrays, RemoteArray, is_remote
from jaxpp_async.session.step import DistributedStep


@dataclass(frozen=True, slots=True)
class _Place:
    """The actors and the sharding that `mesh.put` is to give to an array, with a name for error messages.

    For an array that is to live in parts, `divided` has those of each part.
    """

    name: str
    spec: tuple[SpecEntry, ...]
    actors: tuple[ActorId, ...]
    divided: DividedPlace | None = None


class RemoteValues:
    """The part of a mesh that creates, fills, fetches and frees arrays; implements `remote_array.Owner`.

    Args:
        controller: a function that returns the mesh's controller, or raises `MeshError` if the mesh has not
            started.
        target: the devices of one actor.
    """

    def __init__(self, controller: Callable[[], Controller], target: Target):
        self._controller, self._target = controller, target

    def new_array(self, value_type: ValueType, actors: Iterable[ActorId]) -> RemoteArray:
        """Return the handle of a new array, whose buffers do not exist until a program or `fill` makes them.

        Args:
            value_type: the array's type and sharding.
            actors: the actors on which the buffers will be.
        """
        return RemoteArray(self, self._controller().new_array_id(), value_type, tuple(actors))

    def new_array_in_parts(self, value_type: ValueType, place: DividedPlace) -> RemoteArray:
        """Return the handle of a new array that lives in parts, whose buffers do not exist yet.

        Args:
            value_type: the type of the whole array.
            place: the parts, with their shardings and actors.
        """
        made = zip(place.types(value_type), place.actors, strict=True)
        arrays = tuple(self.new_array(kind, actors) for kind, actors in made)
        return RemoteArray.in_parts(self, value_type, PartArrays(place.parts, arrays))

    def new_arrays(self, slots: Sequence[Slot]) -> list[RemoteArray]:
        """Return new handles for the results of a step, one per slot (result leaf)."""
        new_id = self._controller().new_array_id
        return [RemoteArray(self, new_id(), slot.type, slot.actors) for slot in slots]

    def new_host_array(self, value_type: ValueType, host: np.ndarray) -> RemoteArray:
        """Return the handle of a new array whose value, `host`, stays in this process until its first use."""
        return RemoteArray(self, self._controller().new_array_id(), value_type, (), host=host)

    async def fill(self, pairs: Sequence[tuple[RemoteArray, np.ndarray]]) -> None:
        """Send host values to the actors of new arrays.

        Args:
            pairs: pairs of a new array and the value to send to its actors; nothing is sent for an array
                without actors.

        Raises:
            ActorError: an actor or the mesh failed.
        """
        by_actor: dict[ActorId, list[HostValue]] = {}
        for array, value in pairs:
            values = [value] if array.division is None else part_values(value, array.division.parts)
            for piece, part in zip(array.pieces, values, strict=True):
                for a in piece.actors:
                    by_actor.setdefault(a, []).append(HostValue(piece.array_id, piece.value_type.aval, part))
        await self._controller().put(by_actor)

    async def put(self, tree: Any, like: Any = None) -> Any:
        """Put the host values of a tree on actors, and return the tree of arrays; see `RemoteMesh.put`."""
        self._controller().check_usable()
        values, treedef = jax.tree.flatten(tree)
        types = [argument_binding.sent_type(x) for x in values]
        hosts = [_own_copy(x) for x in values]
        self.check_like(like, "mesh.put")
        if like is None:
            arrays = [self.new_host_array(t, h) for t, h in zip(types, hosts, strict=True)]
            return jax.tree.unflatten(treedef, arrays)
        arrays = []
        for leaf_type, host, place in zip(types, hosts, _places(like, len(values)), strict=True):
            if not place.actors:
                arrays.append(self.new_host_array(leaf_type, host))
                continue
            there = replace(leaf_type, aval=structs.replace(leaf_type.aval, spec=place.spec))
            if place.divided is None:
                arrays.append(self.new_array(there, place.actors))
            else:
                _check_rows(leaf_type, place.name, place.divided.parts)
                arrays.append(self.new_array_in_parts(there, place.divided))
            for piece in arrays[-1].pieces:
                self._check_divides(piece.value_type.aval, place.name)
        await self.fill(list(zip(arrays, hosts, strict=True)))
        return jax.tree.unflatten(treedef, arrays)

    def check_like(self, like: Any, call: str) -> None:
        """Check that the arrays and steps in a user's tree `like` are of this mesh.

        Args:
            like: the tree.
            call: the user's call that got it, for the error message.

        Raises:
            ArrayError: an array or a step is of another mesh.
        """
        for leaf in jax.tree.leaves(like):
            own = leaf.runner.values if isinstance(leaf, DistributedStep) else self
            if own is not self or (is_remote(leaf) and not leaf.is_of(self)):
                raise ArrayError(
                    f"{call}: `like` has {leaf!r} of another mesh, whose actors this mesh does not have; "
                    "give arrays of this mesh, or (step, argnum) with a step of this mesh"
                )

    async def fetch(self, tree: Any) -> Any:
        """Fetch the values of the `RemoteArray`s in a tree, and return the tree with these values in it.

        See `RemoteMesh.fetch`.
        """
        values, treedef = jax.tree.flatten(tree)
        # Now, since a step that is called meanwhile may change where an array lives. A value that is here is
        # copied, since users may write to what they get.
        remote: dict[int, tuple[ValueType, PartArrays | None, list[np.ndarray | None]]] = {}
        wanted: list[tuple[ActorId, int, Aval]] = []
        for k, leaf in enumerate(values):
            if not is_remote(leaf):
                continue
            leaf.check_usable(f"array {k} of the tree" if len(values) > 1 else "the array", self)
            here = [piece.host for piece in leaf.pieces]
            remote[k] = leaf.value_type, leaf.division, [None if x is None else x.copy() for x in here]
            wanted += [
                (piece.actors[0], piece.array_id, piece.value_type.aval)
                for piece, value in zip(leaf.pieces, here, strict=True)
                if value is None
            ]
        fetched = iter(await self._controller().fetch(wanted) if wanted else ())
        for k, (value_type, division, here) in remote.items():
            arrays = [next(fetched) if value is None else value for value in here]
            whole = arrays[0] if division is None else division.join(arrays)
            values[k] = argument_binding.as_user_sees(whole, value_type)
        return jax.tree.unflatten(treedef, values)

    def start_fetch(
        self, arrays: Sequence[RemoteArray], name: str
    ) -> Coroutine[Any, Any, list[np.ndarray[Any, Any]]]:
        """Ask the actors for arrays before this method returns, and return a coroutine that returns them.

        Nobody has to await the result: if the mesh fails meanwhile, its next call still raises the failure.

        Args:
            arrays: arrays whose buffers are on actors.
            name: a name for the arrays, for error messages.

        Raises:
            ArrayError: an array was donated, deleted, lost to a failure, or belongs to another mesh.
            ActorError: the mesh failed.
        """
        for array in arrays:
            array.check_usable(name, self)
        wanted = [(array.actors[0], array.array_id, array.value_type.aval) for array in arrays]
        return self._controller().start_fetch(wanted, awaited=False)

    def release(self, array: RemoteArray) -> None:
        """Free an array on its actors with the next message to them; any thread may call this."""
        for piece in array.pieces:
            for actor in piece.actors:
                self._controller().free(actor, piece.array_id)

    def sharding_of(self, aval: Aval) -> NamedSharding:
        """Return the sharding of an array of this aval over one actor's devices."""
        mesh = self._target.mesh or AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,))
        return NamedSharding(mesh, PartitionSpec(*aval.spec))

    def _check_divides(self, aval: Aval, name: str) -> None:
        for n, entry in zip(aval.shape, aval.spec, strict=False):
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                if n % self._target.axes[axis]:
                    raise ArrayError(f"{name}: shape {aval.shape} is not divisible by axis {axis!r}")


def _places(like: Any, count: int) -> list[_Place]:
    """Return the actors and the sharding that `mesh.put` is to give to each leaf of the tree to put.

    Args:
        like: the argument of `mesh.put`: `(step, argnum)` or a tree of `RemoteArray`s.
        count: number of leaves of the tree to put.

    Raises:
        ArrayError: `like` is neither of these, or the number of its leaves is not `count`.
    """
    if isinstance(like, tuple) and len(like) == 2 and isinstance(like[0], DistributedStep):
        slots = jax.tree.leaves(like[0].argument(like[1], "mesh.put(like=(step, argnum))"))
        places = [_Place(s.name, s.type.aval.spec, s.home, DividedPlace.of(s)) for s in slots]
    else:
        arrays = jax.tree.leaves(like)
        if not all(is_remote(a) for a in arrays):
            raise ArrayError("mesh.put: like is neither (step, argnum) nor a tree of RemoteArrays")
        places = [_Place(repr(a), a.spec, a.actors, DividedPlace.of(a)) for a in arrays]
    if len(places) != count:
        raise ArrayError(f"mesh.put: the values have {count} leaves, like has {len(places)}")
    return places


def _check_rows(leaf_type: ValueType, name: str, parts: Parts) -> None:
    """Check that an array has as many rows as the parts in which `mesh.put` is to place it.

    Args:
        leaf_type: the type of the array.
        name: the argument of a step, or the array, that lives in these parts.
        parts: the parts.

    Raises:
        ArrayError: the array has another length along the axis of the parts.
    """
    shape = leaf_type.aval.shape
    if shape[parts.axis : parts.axis + 1] != (parts.bounds[-1],):
        raise ArrayError(
            f"mesh.put: {name} lives in parts of {parts.bounds[-1]} rows together, along axis {parts.axis}, "
            f"and the value to put there has shape {shape}; give a value of the same shape"
        )


def _own_copy(leaf: Any) -> np.ndarray:
    """Return a copy of a host value, because the user may change the original afterwards.

    Raises:
        ArrayError: the leaf is an array whose value is on actors.
    """
    if not is_remote(leaf):
        return argument_binding.host_array(leaf).copy()
    if leaf.host is None:
        raise ArrayError(f"mesh.put takes host values, not {leaf!r}; `await mesh.fetch` it first")
    return leaf.host.copy()
