"""scattering: host values taken apart for the processes of an actor, and what they send put together. No jax, no I/O.

Each process owns some of an array's `parts`: it gets them from the controller, and sends them to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from jaxpp_async.actors.messages import ArrayId
from jaxpp_async.actors.processes.seats import place_of, process_of
from jaxpp_async.actors.values.numpy_types import numpy_dtype
from jaxpp_async.actors.values.parts import Part, parts_of
from jaxpp_async.program import ActorId, Aval, ProcessId

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Scattering:
    """How arrays lie on the processes of the actors of one mesh.

    Args:
        axes: the mesh of an actor: (axis name, size).
        per_actor: how many processes an actor has.
    """

    axes: tuple[tuple[str, int], ...]
    per_actor: int

    @property
    def splits(self) -> bool:
        """Whether actors are of several processes; else the one has all of every array."""
        return self.per_actor > 1

    def process(self, actor: ActorId, rank: int) -> ProcessId:
        """The process of this rank of an actor."""
        return process_of(actor, rank, self.per_actor)

    def first_of(self, process: ProcessId) -> ProcessId:
        """The first process of the actor that a process belongs to."""
        return self.process(place_of(process, self.per_actor)[0], 0)

    def parts(self, aval: Aval) -> tuple[Part, ...]:
        """The distinct parts of an array."""
        return _parts(aval, self.axes, self.per_actor)

    def owned(self, array_id: ArrayId, aval: Aval) -> dict[int, list[Part]]:
        """The parts that each process owns, by rank; who owns none is left out."""
        found: dict[int, list[Part]] = {}
        for part in self.parts(aval):
            found.setdefault(part.owner(array_id), []).append(part)
        return found

    def pieces(self, array_id: ArrayId, aval: Aval, value: Array) -> list[tuple[int, int, Array]]:
        """A value taken apart: each part's owner, its number, and its bytes, which are a copy."""
        return [
            (part.owner(array_id), part.number, np.array(value[part.index], order="C").reshape(-1).view(np.uint8))
            for part in self.parts(aval)
        ]


class Gathering:
    """One fetch: what each process is asked for, and the arrays made of what they answer.

    Args:
        wanted: actor, array and its aval, one an array.
        scattering: how arrays lie.

    Attributes:
        asked: for each process, arrays and the avals of what it sends of them.
    """

    def __init__(self, wanted: Sequence[tuple[ActorId, ArrayId, Aval]], scattering: Scattering):
        self._wanted = wanted
        self.asked: dict[ProcessId, list[tuple[ArrayId, Aval]]] = {}
        self._what: dict[ProcessId, list[tuple[int, tuple[Part, ...]]]] = {}
        for position, (actor, array_id, aval) in enumerate(wanted):
            if not scattering.splits:
                self._ask(actor, array_id, aval, position, ())
                continue
            for rank, parts in scattering.owned(array_id, aval).items():
                flat = Aval((size_of(parts, aval),), "uint8", (None,))
                self._ask(scattering.process(actor, rank), array_id, flat, position, tuple(parts))

    def _ask(self, process: ProcessId, array_id: ArrayId, aval: Aval, position: int, parts: tuple[Part, ...]) -> None:
        self.asked.setdefault(process, []).append((array_id, aval))
        self._what.setdefault(process, []).append((position, parts))

    def arrays(self, answers: Mapping[ProcessId, Sequence[Array]]) -> list[Array]:
        """The arrays, in the order in which they were wanted."""
        found: list[list[tuple[tuple[Part, ...], Array]]] = [[] for _ in self._wanted]
        for process, arrays in answers.items():
            for (position, parts), array in zip(self._what[process], arrays, strict=True):
                found[position].append((parts, array))
        return [
            pieces[0][1] if not pieces[0][0] else joined(aval, pieces)
            for (_, _, aval), pieces in zip(self._wanted, found, strict=True)
        ]


def size_of(parts: Sequence[Part], aval: Aval) -> int:
    """The bytes of some parts of an array."""
    return sum(int(np.prod(part.shape, dtype=np.int64)) for part in parts) * numpy_dtype(aval.dtype).itemsize


def joined(aval: Aval, pieces: Sequence[tuple[tuple[Part, ...], Array]]) -> Array:
    """An array from the bytes that its processes have sent, each with the parts that they are the bytes of."""
    dtype = numpy_dtype(aval.dtype)
    whole = np.empty(aval.shape, dtype)
    for parts, data in pieces:
        start = 0
        for part in parts:
            end = start + int(np.prod(part.shape, dtype=np.int64)) * dtype.itemsize
            whole[part.index] = np.ascontiguousarray(data[start:end]).view(dtype).reshape(part.shape)
            start = end
    return whole


@lru_cache(maxsize=4096)
def _parts(aval: Aval, axes: tuple[tuple[str, int], ...], per_actor: int) -> tuple[Part, ...]:
    return parts_of(aval, axes, per_actor)
