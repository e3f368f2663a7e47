"""parts: an array's type and the shape of an actor in, its distinct parts out: where each lies, and who sends it.

An array that is split over an actor's devices has as many distinct parts as its spec says; devices that hold the same
one are replicas. The devices belong to the actor's processes, neighbouring ones to one. Of the processes that hold a
part one is its owner: it alone sends it elsewhere, and passes it on to the others after it was received. Pure: every
process and the controller work out the same. No jax.

numpy_types: a dtype's name, as `Aval` carries it, in; numpy's dtype out. No jax.

crossings: a transfer of a program and how its array lies in, which of this process's pieces go where out. Pure.

What two actors exchange, their processes of equal rank do. A piece that several processes of an actor hold is sent by
the owner alone, to the owner on the other side, which passes it on to its mates there: so it crosses once.

turns: a transfer of a program in, the messages of one process that it is made of out, with the link that each takes.
For transports that have no tags and need to know beforehand which message is the n-th. Pure.

Between two processes messages go in the order of the program's transfers. What the processes of one actor pass on to
each other goes in the order in which the actor receives it, from whomever. That makes nobody wait for what needs him:
a program posts its receives in an order (`compiler.lowering`) in which whatever comes before a value was made before
anything that reads the value.

scattering: host values taken apart for the processes of an actor, and what they send put together. No jax, no I/O.

Each process owns some of an array's `parts`: it gets them from the controller, and sends them to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxpp_async.program.instructions import ActorId, Aval, ProcessId, Tag
from jaxpp_async.protocol.actor_info import ProcessRank, actor_and_rank, process_of
from jaxpp_async.protocol.messages import ArrayId
from jaxpp_async.transport.nccl.order import NcclLink, OrderedMessage


@dataclass(frozen=True, slots=True)
class Part:
    """One distinct part of an array.

    Args:
        number: its place among all parts, which are in the order in which the actor's devices first hold them.
        index: which part of the whole array.
        shape: its shape.
        positions: the devices that hold it, in the mesh's flat order.
        ranks: the processes that hold it, in order.
    """

    number: int
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    positions: tuple[int, ...]
    ranks: tuple[int, ...]

    def owner(self, salt: int) -> int:
        """The rank of the process that sends it.

        Args:
            salt: what is sent, so that not all of it falls to one process: a transfer's tag, or an array's id.
        """
        return self.ranks[(self.number + salt) % len(self.ranks)]


def parts_of(aval: Aval, axes: Sequence[tuple[str, int]], num_processes: int = 1) -> tuple[Part, ...]:
    """The distinct parts of an array.

    Args:
        axes: the actor's mesh: (axis name, size), outermost first.
        num_processes: how many the devices belong to; it divides their number.

    Raises:
        ValueError: the spec names an axis that the mesh does not have, or does not divide the shape.
    """
    sizes = dict(axes)
    splits = [_axes_of(entry) for entry in aval.spec]
    splits += [()] * (len(aval.shape) - len(splits))
    counts = [math.prod(_size(sizes, axis, aval) for axis in names) for names in splits]
    if any(n % count for n, count in zip(aval.shape, counts, strict=True)):
        raise ValueError(f"{aval} cannot be split over a mesh of {sizes}")
    shape = tuple(n // count for n, count in zip(aval.shape, counts, strict=True))
    each = math.prod(sizes.values()) // num_processes
    holders: dict[tuple[int, ...], list[int]] = {}
    # What is still to be added up differs along those axes, though it stands for one part of the array.
    keys = [*splits, *((axis,) for axis in aval.unreduced)]
    for position, coordinates in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        at = dict(zip(sizes, coordinates, strict=True))
        holders.setdefault(tuple(_block(names, at, sizes) for names in keys), []).append(position)
    return tuple(
        Part(
            number,
            tuple(_slice(b, n, c) for b, n, c in zip(key, shape, counts, strict=False)),
            shape,
            tuple(positions),
            tuple(dict.fromkeys(position // each for position in positions)),
        )
        for number, (key, positions) in enumerate(holders.items())
    )


def _axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _size(sizes: dict[str, int], axis: str, aval: Aval) -> int:
    if axis not in sizes:
        raise ValueError(f"{aval} names the axis {axis!r}, the mesh has {sorted(sizes)}")
    return sizes[axis]


def _block(names: tuple[str, ...], at: dict[str, int], sizes: dict[str, int]) -> int:
    block = 0
    for axis in names:
        block = block * sizes[axis] + at[axis]
    return block


def _slice(block: int, length: int, count: int) -> slice:
    return slice(None) if count == 1 else slice(block * length, (block + 1) * length)


# ---------------------------------------------------------------- numpy types


def numpy_dtype(name: str) -> np.dtype[Any]:
    """A dtype by the name that `Aval` carries."""
    return np.dtype(getattr(ml_dtypes, name, name))


# ---------------------------------------------------------------- crossings


class PieceTransfer(NamedTuple):
    """One message.

    Args:
        piece: which of the parts that this process holds.
        peer: where it goes, or comes from.
        sequence: the sequence part of its wire tag.
    """

    piece: int
    peer: ProcessId
    sequence: int


def sends(
    process_rank: ProcessRank, held: Sequence[Part], tag: Tag, to_actor: ActorId, num_devices: int
) -> tuple[PieceTransfer, ...]:
    """What this process sends of a transfer.

    Args:
        seat: this process's.
        held: the parts of the array that it holds.
        num_devices: of the actor.
    """
    peer = process_rank.counterpart_in(to_actor)
    return tuple(
        PieceTransfer(piece, peer, sequence(tag, part, num_devices))
        for piece, part in enumerate(held)
        if part.owner(tag) == process_rank.rank
    )


def receives(
    process_rank: ProcessRank, held: Sequence[Part], tag: Tag, from_actor: ActorId, num_devices: int
) -> tuple[PieceTransfer, ...]:
    """What it receives: every part that it holds, from the other actor or from the mate that has it from there."""
    partner = process_rank.counterpart_in(from_actor)
    return tuple(
        PieceTransfer(
            piece,
            partner
            if part.owner(tag) == process_rank.rank
            else process_rank.process_of_rank(part.owner(tag)),
            sequence(tag, part, num_devices),
        )
        for piece, part in enumerate(held)
    )


def relays(
    process_rank: ProcessRank, held: Sequence[Part], tag: Tag, num_devices: int
) -> dict[int, tuple[PieceTransfer, ...]]:
    """What it passes on to its mates, by the piece that has to be there for it."""
    found: dict[int, tuple[PieceTransfer, ...]] = {}
    for piece, part in enumerate(held):
        if part.owner(tag) == process_rank.rank and len(part.ranks) > 1:
            others = [rank for rank in part.ranks if rank != process_rank.rank]
            found[piece] = tuple(
                PieceTransfer(piece, process_rank.process_of_rank(rank), sequence(tag, part, num_devices))
                for rank in others
            )
    return found


def sequence(tag: Tag, part: Part, num_devices: int) -> int:
    """The sequence part of a wire tag: one part of a program's transfer `tag`. An array has at most as many parts as
    the actor has devices, so no two messages of a program share a number."""
    return tag * num_devices + part.number


# ---------------------------------------------------------------- turns


def sent(
    process_rank: ProcessRank, held: Sequence[Part], tag: Tag, to_actor: ActorId, num_devices: int
) -> Iterator[OrderedMessage]:
    """What a process sends of a `Send`. Arguments as of `crossings.sends`."""
    return _turns(
        process_rank, held, sends(process_rank, held, tag, to_actor, num_devices), num_devices, sends=True
    )


def received(
    process_rank: ProcessRank, held: Sequence[Part], tag: Tag, from_actor: ActorId, num_devices: int
) -> Iterator[OrderedMessage]:
    """What it receives of a `Recv`, and then what it passes on. Arguments as of `crossings.receives`."""
    legs = receives(process_rank, held, tag, from_actor, num_devices)
    yield from _turns(process_rank, held, legs, num_devices, sends=False)
    for onwards in relays(process_rank, held, tag, num_devices).values():
        yield from _turns(process_rank, held, onwards, num_devices, sends=True)


def _turns(
    process_rank: ProcessRank,
    held: Sequence[Part],
    legs: Iterable[PieceTransfer],
    num_devices: int,
    *,
    sends: bool,
) -> Iterator[OrderedMessage]:
    for piece, peer, sequence in legs:
        here = _first_device(held[piece], process_rank.rank, num_devices // process_rank.size)
        there = _first_device(
            held[piece], actor_and_rank(peer, process_rank.size)[1], num_devices // process_rank.size
        )
        ends = (
            (process_rank.process, peer, here, there) if sends else (peer, process_rank.process, there, here)
        )
        yield OrderedMessage(sequence, NcclLink(*ends))


def _first_device(part: Part, rank: int, each: int) -> int:
    """Of the devices of a process those that hold a part: the first, counted among the process's own. A transport reads
    and writes there."""
    return next(position for position in part.positions if position // each == rank) - rank * each


# ---------------------------------------------------------------- scattering

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
        return self.process(actor_and_rank(process, self.per_actor)[0], 0)

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
            (
                part.owner(array_id),
                part.number,
                np.array(value[part.index], order="C").reshape(-1).view(np.uint8),
            )
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

    def _ask(
        self, process: ProcessId, array_id: ArrayId, aval: Aval, position: int, parts: tuple[Part, ...]
    ) -> None:
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
