"""Work out which part of an array lies on which process of an actor, and which process sends it to which.

A *part* is one distinct box of an array: an array that is split over an actor's devices has as many parts as
its spec says, and devices that hold the same part are replicas. The devices of an actor belong to its
processes, consecutive devices to one process. A *piece* is the bytes of one part in the memory of one
process; transfers move pieces. Of the processes that hold a part one is its *owner*. The owner alone sends
the part to other actors and to the controller, and passes it on to the other processes of its actor after it
has received it. All of this follows from the array's aval and the actor's mesh, so that every process and the
controller work out the same.
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

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One distinct box of an array.

    Args:
        number: its place among all parts, which are in the order in which the actor's devices first hold
            them.
        index: the box, as one slice for each axis of the whole array.
        shape: the box's shape.
        positions: the devices that hold it, by their place in the mesh's flat order.
        ranks: the processes that hold it, ascending.
    """

    number: int
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    positions: tuple[int, ...]
    ranks: tuple[int, ...]

    def owner(self, salt: int) -> int:
        """Return the rank of the process that sends this part.

        Args:
            salt: a transfer's tag or an array's id, so that different transfers fall to different processes.
        """
        return self.ranks[(self.number + salt) % len(self.ranks)]


@lru_cache(maxsize=4096)
def parts_of(aval: Aval, axes: tuple[tuple[str, int], ...], num_processes: int = 1) -> tuple[Part, ...]:
    """List the distinct parts of an array.

    Args:
        axes: the actor's mesh: (axis name, size), outermost first.
        num_processes: how many processes the devices belong to; divides the number of devices.

    Raises:
        ValueError: the spec names an axis that the mesh does not have, or does not divide the shape.
    """
    sizes = dict(axes)
    splits = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in aval.spec]
    splits += [()] * (len(aval.shape) - len(splits))
    if unknown := [axis for names in splits for axis in names if axis not in sizes]:
        raise ValueError(f"{aval} names the axis {unknown[0]!r}, the mesh has {sorted(sizes)}")
    counts = [math.prod(sizes[axis] for axis in names) for names in splits]
    if any(n % count for n, count in zip(aval.shape, counts, strict=True)):
        raise ValueError(f"{aval} cannot be split over a mesh of {sizes}")
    shape = tuple(n // count for n, count in zip(aval.shape, counts, strict=True))
    devices_each = math.prod(sizes.values()) // num_processes
    holders: dict[tuple[int, ...], list[int]] = {}
    # Along an unreduced axis each device holds a summand of its own, though it stands for one box of the
    # array.
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
            tuple(dict.fromkeys(position // devices_each for position in positions)),
        )
        for number, (key, positions) in enumerate(holders.items())
    )


def _block(names: tuple[str, ...], at: dict[str, int], sizes: dict[str, int]) -> int:
    """Return which block along an array's axis, split by these mesh axes, lies at these mesh coordinates."""
    block = 0
    for axis in names:
        block = block * sizes[axis] + at[axis]
    return block


def _slice(block: int, length: int, count: int) -> slice:
    return slice(None) if count == 1 else slice(block * length, (block + 1) * length)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype for the name that `Aval` carries, also for those of `ml_dtypes`."""
    return np.dtype(getattr(ml_dtypes, name, name))


# ---------------------------------------------------------------- transfers between actors
#
# Processes of equal rank exchange what their actors exchange. The owner of a part sends it to the process of
# its own rank in the other actor, which passes it on to the other holders there: so a part crosses between
# actors once.


class PieceTransfer(NamedTuple):
    """One message of a program's transfer.

    Args:
        piece: which of the parts that this process holds, by index.
        peer: the process that the piece goes to, or comes from.
        sequence: the sequence part of the message's wire tag.
    """

    piece: int
    peer: ProcessId
    sequence: int


def plan_sends(
    process_rank: ProcessRank, held: Sequence[Part], tag: Tag, to_actor: ActorId, num_devices: int
) -> tuple[PieceTransfer, ...]:
    """List the messages that a process sends of a `Send`: one for each part that it owns.

    Args:
        process_rank: the process.
        held: the parts of the array that the process holds.
        num_devices: the number of devices of an actor.
    """
    peer = process_rank.counterpart_in(to_actor)
    return tuple(
        PieceTransfer(piece, peer, sequence_number(tag, part, num_devices))
        for piece, part in enumerate(held)
        if part.owner(tag) == process_rank.rank
    )


def plan_receives(
    process_rank: ProcessRank, held: Sequence[Part], tag: Tag, from_actor: ActorId, num_devices: int
) -> tuple[PieceTransfer, ...]:
    """List the messages that a process receives of a `Recv`: one for each part that it holds.

    A part that the process owns comes from the other actor, any other part from its owner in the process's
    own actor. Arguments are those of `plan_sends`.
    """
    return tuple(
        PieceTransfer(
            piece,
            process_rank.counterpart_in(from_actor)
            if owner == process_rank.rank
            else process_rank.process_of_rank(owner),
            sequence_number(tag, part, num_devices),
        )
        for piece, part in enumerate(held)
        for owner in [part.owner(tag)]
    )


def plan_relays(
    process_rank: ProcessRank, held: Sequence[Part], tag: Tag, num_devices: int
) -> dict[int, tuple[PieceTransfer, ...]]:
    """Map each received piece that a process passes on within its actor to the messages that carry it.

    Arguments are those of `plan_sends`. Pieces that it does not pass on are left out.
    """
    return {
        piece: tuple(
            PieceTransfer(piece, process_rank.process_of_rank(rank), sequence_number(tag, part, num_devices))
            for rank in part.ranks
            if rank != process_rank.rank
        )
        for piece, part in enumerate(held)
        if part.owner(tag) == process_rank.rank and len(part.ranks) > 1
    }


def sequence_number(tag: Tag, part: Part, num_devices: int) -> int:
    """Return the sequence part of the wire tag of one part of a program's transfer.

    An array has at most as many parts as the actor has devices, so no two messages of a program share a
    number.
    """
    return tag * num_devices + part.number


# ---------------------------------------------------------------- the order of transfers
#
# Transports without tags need to know beforehand which message is the n-th on a link. Between two processes
# messages go in the order of the program's transfers. Messages within an actor go in the order in which the
# actor receives. With that order no process waits for a message that needs the process itself: a program
# posts its receives in an order (`compiler.lowering`) in which whatever comes before a value was made before
# anything that reads the value.


def order_sends(
    process_rank: ProcessRank, held: Sequence[Part], tag: Tag, to_actor: ActorId, num_devices: int
) -> Iterator[OrderedMessage]:
    """Yield the messages of a `Send` with the link that each takes. Arguments are those of `plan_sends`."""
    transfers = plan_sends(process_rank, held, tag, to_actor, num_devices)
    return _on_links(process_rank, held, transfers, num_devices, sends=True)


def order_receives(
    process_rank: ProcessRank, held: Sequence[Part], tag: Tag, from_actor: ActorId, num_devices: int
) -> Iterator[OrderedMessage]:
    """Yield the messages of a `Recv`, then the relays behind it. Arguments are those of `plan_receives`."""
    transfers = plan_receives(process_rank, held, tag, from_actor, num_devices)
    yield from _on_links(process_rank, held, transfers, num_devices, sends=False)
    for relays in plan_relays(process_rank, held, tag, num_devices).values():
        yield from _on_links(process_rank, held, relays, num_devices, sends=True)


def _on_links(
    process_rank: ProcessRank,
    held: Sequence[Part],
    transfers: Iterable[PieceTransfer],
    num_devices: int,
    *,
    sends: bool,
) -> Iterator[OrderedMessage]:
    devices_each = num_devices // process_rank.size
    for piece, peer, sequence in transfers:
        here = _first_device(held[piece], process_rank.rank, devices_each)
        there = _first_device(held[piece], actor_and_rank(peer, process_rank.size)[1], devices_each)
        process = process_rank.process
        ends = (process, peer, here, there) if sends else (peer, process, there, here)
        yield OrderedMessage(sequence, NcclLink(*ends))


def _first_device(part: Part, rank: int, devices_each: int) -> int:
    """Return the first device of a process that holds a part, counted within the process: transports move
    that one."""
    return next(k for k in part.positions if k // devices_each == rank) - rank * devices_each


# ---------------------------------------------------------------- transfers with the controller


@dataclass(frozen=True, slots=True)
class Scattering:
    """Splits host values among the processes of an actor, for all actors of one mesh.

    Args:
        axes: the mesh of an actor: (axis name, size).
        per_actor: the number of processes of an actor.
    """

    axes: tuple[tuple[str, int], ...]
    per_actor: int

    @property
    def splits(self) -> bool:
        """Whether actors have several processes; else the one process has all of every array."""
        return self.per_actor > 1

    def process(self, actor: ActorId, rank: int) -> ProcessId:
        """Return the process of this rank of an actor."""
        return process_of(actor, rank, self.per_actor)

    def first_of(self, process: ProcessId) -> ProcessId:
        """Return the first process of the actor that a process belongs to."""
        return self.process(actor_and_rank(process, self.per_actor)[0], 0)

    def parts(self, aval: Aval) -> tuple[Part, ...]:
        """List the distinct parts of an array."""
        return parts_of(aval, self.axes, self.per_actor)

    def owned(self, array_id: ArrayId, aval: Aval) -> dict[int, list[Part]]:
        """Map the rank of each process that owns parts of an array to these parts."""
        found: dict[int, list[Part]] = {}
        for part in self.parts(aval):
            found.setdefault(part.owner(array_id), []).append(part)
        return found

    def pieces(self, array_id: ArrayId, aval: Aval, value: Array) -> list[tuple[int, int, Array]]:
        """Split a value: (rank of the owner, the part's number, a copy of the part's bytes) for each part."""
        return [
            (
                part.owner(array_id),
                part.number,
                np.array(value[part.index], order="C").reshape(-1).view(np.uint8),
            )
            for part in self.parts(aval)
        ]


class Gathering:
    """One fetch of arrays to the controller, which asks processes for pieces and joins their answers.

    Args:
        wanted: actor, array and its aval, one an array.
        scattering: how the arrays are split.

    Attributes:
        asked: for each process, the arrays to ask it for, each with the aval of what it answers.
    """

    def __init__(self, wanted: Sequence[tuple[ActorId, ArrayId, Aval]], scattering: Scattering):
        self._wanted = wanted
        self.asked: dict[ProcessId, list[tuple[ArrayId, Aval]]] = {}
        # For each process and array asked for: its position in `wanted`, and the parts; None: the array as it
        # is.
        self._contents: dict[ProcessId, list[tuple[int, Sequence[Part] | None]]] = {}
        for position, (actor, array_id, aval) in enumerate(wanted):
            owned = scattering.owned(array_id, aval) if scattering.splits else {0: None}
            for rank, parts in owned.items():
                process = scattering.process(actor, rank)
                asked = aval if parts is None else Aval((total_bytes(parts, aval),), "uint8", (None,))
                self.asked.setdefault(process, []).append((array_id, asked))
                self._contents.setdefault(process, []).append((position, parts))

    def arrays(self, answers: Mapping[ProcessId, Sequence[Array]]) -> list[Array]:
        """Return the arrays, in the order in which they were wanted.

        Args:
            answers: for each process of `asked`, the arrays that it was asked for, in order.
        """
        found: list[list[tuple[Sequence[Part] | None, Array]]] = [[] for _ in self._wanted]
        for process, arrays in answers.items():
            for (position, parts), array in zip(self._contents[process], arrays, strict=True):
                found[position].append((parts, array))
        return [
            join_parts(aval, [(parts, data) for parts, data in answered if parts is not None])
            if answered[0][0] is not None
            else answered[0][1]
            for (_, _, aval), answered in zip(self._wanted, found, strict=True)
        ]


def total_bytes(parts: Sequence[Part], aval: Aval) -> int:
    """Return the bytes of some parts of an array together."""
    return sum(math.prod(part.shape) for part in parts) * numpy_dtype(aval.dtype).itemsize


def join_parts(aval: Aval, pieces: Sequence[tuple[Sequence[Part], Array]]) -> Array:
    """Join an array from the bytes that processes have sent.

    Args:
        pieces: parts, and their bytes one part after the other as a flat uint8 array; together all parts.
    """
    dtype = numpy_dtype(aval.dtype)
    whole = np.empty(aval.shape, dtype)
    for parts, data in pieces:
        start = 0
        for part in parts:
            end = start + math.prod(part.shape) * dtype.itemsize
            whole[part.index] = np.ascontiguousarray(data[start:end]).view(dtype).reshape(part.shape)
            start = end
    return whole
