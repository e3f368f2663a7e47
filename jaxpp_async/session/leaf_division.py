"""Convert between the leaves that a user passes and gets, and the parts in which a step takes and makes them.

A leaf that stacks layers may live in parts (see `program.leaf_parts`). The programs of a step know the parts
alone; everything that the user sees knows the leaf alone. `LeafDivision` is the only place that converts one
to the other for the calls of a compiled step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from msgspec import structs

from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ArrayError
from jaxpp_async.program.instructions import ActorId, SpecEntry
from jaxpp_async.program.leaf_parts import Parts, leaf_names, part_positions
from jaxpp_async.session.argument_binding import Slot, host_array
from jaxpp_async.session.move_programs import Moved
from jaxpp_async.session.remote_array import Owner, PartArrays, RemoteArray


def part_types(whole: ValueType, parts: Parts) -> tuple[ValueType, ...]:
    """Return the type of each part of an array of type `whole`, with the sharding of `whole`."""
    shapes = parts.shapes(whole.aval.shape)
    return tuple(replace(whole, aval=structs.replace(whole.aval, shape=shape)) for shape in shapes)


def part_values(host: np.ndarray, parts: Parts) -> list[np.ndarray]:
    """Return a view of each part of a host array."""
    return [host[index] for index in parts.slices]


@dataclass(frozen=True, slots=True)
class DividedPlace:
    """Where an array is to live in parts.

    Args:
        parts: the parts.
        specs: the sharding of each part.
        actors: the actors of each part.
    """

    parts: Parts
    specs: tuple[tuple[SpecEntry, ...], ...]
    actors: tuple[tuple[ActorId, ...], ...]

    def types(self, whole: ValueType) -> tuple[ValueType, ...]:
        """Return the type of each part of an array of type `whole`, with the sharding that it is to have."""
        made = zip(part_types(whole, self.parts), self.specs, strict=True)
        return tuple(replace(kind, aval=structs.replace(kind.aval, spec=spec)) for kind, spec in made)

    @staticmethod
    def of(leaf: Slot | RemoteArray) -> DividedPlace | None:
        """Return where a step keeps a leaf in parts, or where an array lies in parts.

        None for a whole leaf or array, and for one that has no place on an actor.
        """
        if isinstance(leaf, Slot):
            parts, homes = leaf.parts, [(slot.type.aval.spec, slot.home) for slot in leaf.part_slots]
        else:
            parts = None if leaf.division is None else leaf.division.parts
            homes = [(piece.spec, piece.actors) for piece in leaf.pieces]
        if parts is None or not any(actors for _, actors in homes):
            return None
        near, places = next(actors for _, actors in homes if actors), []
        for _, actors in homes:  # a part without a place lies where the one before it lies
            places.append(near := actors or near)
        return DividedPlace(parts, tuple(spec for spec, _ in homes), tuple(places))


def leaf_slots(slots: Sequence[Slot], leaves: Sequence[Parts | None]) -> tuple[Slot, ...]:
    """Return one slot per leaf of the user, from the slots that a step's programs know.

    Args:
        slots: one slot per part of a divided leaf, and one per other leaf.
        leaves: the parts of each leaf; None for a leaf that is not divided.
    """
    names = leaf_names([slot.name for slot in slots], leaves)
    return tuple(
        slots[positions[0]] if parts is None else _joined(name, [slots[k] for k in positions], parts)
        for name, parts, positions in zip(names, leaves, part_positions(leaves), strict=True)
    )


def _joined(name: str, slots: list[Slot], parts: Parts) -> Slot:
    """Return the slot of a divided leaf.

    Args:
        name: the name of the leaf.
        slots: the slot of each part.
        parts: the parts.
    """
    first = slots[0]
    whole = parts.whole_shape(first.type.aval.shape)
    return Slot(
        name,
        replace(first.type, aval=structs.replace(first.type.aval, shape=whole)),
        tuple(sorted({actor for slot in slots for actor in slot.actors})),
        any_sharding=all(slot.any_sharding for slot in slots),
        replaced_on=tuple(sorted({actor for slot in slots for actor in slot.replaced_on})),
        parts=parts,
        part_slots=tuple(slots),
    )


def join_moves(moved: Iterable[Moved], leaves: Sequence[Slot]) -> dict[Moved, str]:
    """Return the records of moves with one record for neighbouring parts of a leaf that took the same way.

    Args:
        moved: the records, by parts.
        leaves: the slot of each leaf.

    Returns:
        A dictionary. Its keys are the records, in their order; its values are the names of the first parts
        that they are about.
    """
    found = {part.name: (leaf, k) for leaf in leaves for k, part in enumerate(leaf.part_slots)}

    def way(numbered: tuple[int, Moved]) -> tuple:
        number, one = numbered
        if one.redivided or one.name not in found:
            return (number,)
        leaf, k = found[one.name]
        return leaf.name, k - number, one.from_actor, one.to, one.resharded

    made: dict[Moved, str] = {}
    for _, numbered in itertools.groupby(enumerate(moved), way):
        run = [one for _, one in numbered]
        name = run[0].name
        if len(run) > 1:
            leaf, first = found[name]
            assert leaf.parts is not None
            rows = leaf.parts.bounds[first], leaf.parts.bounds[first + len(run)]
            (name,) = Parts(leaf.parts.axis, rows).names(leaf.name)
        made[replace(run[0], name=name, size_bytes=sum(one.size_bytes for one in run))] = run[0].name
    return made


@dataclass(frozen=True)
class LeafDivision:
    """How a compiled step divides leaves of its arguments and its results.

    Args:
        arguments: one slot per argument leaf of the user.
        results: one slot per result leaf of the user.
    """

    arguments: tuple[Slot, ...]
    results: tuple[Slot, ...]

    def divide(self, leaves: Sequence[Any]) -> list[Any] | None:
        """Return a call's argument leaves as the step's programs take them: each divided leaf as its parts.

        Args:
            leaves: the argument leaves of the user.

        Returns:
            One entry per part of a divided leaf, and one per other leaf. A part of a host value is a view of
            it. None if an array has to be divided, or divided anew, before the step can take it.

        Raises:
            ArrayError: a host value has another shape than the one for which the step was compiled.
        """
        found: list[Any] = []
        for leaf, slot in zip(leaves, self.arguments, strict=True):
            if slot.parts is None:
                found.append(leaf)
            elif isinstance(leaf, jax.ShapeDtypeStruct):
                return None  # the check of the leaves says what is wrong
            elif isinstance(leaf, RemoteArray):
                division = leaf.division
                if division is None or division.parts != slot.parts:
                    return None
                found.extend(division.arrays)
            else:
                found.extend(part_values(_checked(host_array(leaf), slot), slot.parts))
        return found

    def join(self, owner: Owner, arrays: Sequence[RemoteArray]) -> Iterator[RemoteArray]:
        """Yield the handle of each result leaf of the user, from the handles of the step's results.

        Args:
            owner: the part of the mesh that fetches and frees arrays.
            arrays: the handles of all results of the step; those behind the result leaves are not yielded.
        """
        given = iter(arrays)
        for slot in self.results:
            if slot.parts is None:
                yield next(given)
            else:
                division = PartArrays(slot.parts, tuple(next(given) for _ in slot.part_slots))
                yield RemoteArray.in_parts(owner, slot.type, division)


def _checked(host: np.ndarray, slot: Slot) -> np.ndarray:
    if host.shape != slot.type.aval.shape:
        raise ArrayError(
            f"{slot.name} is {host.dtype}{list(host.shape)} now, but was {slot.type.aval.dtype}"
            f"{list(slot.type.aval.shape)} when the step was called; leave arguments alone until the step "
            "has them"
        )
    return host
