"""Compute how an array is divided among the processes of an actor, and which messages move its parts.

An actor may have several processes; consecutive devices of the actor's mesh belong to one process. The terms
are:

- A *part* is one distinct slice of an array. An array that is split over an actor's devices has as many parts
  as its spec implies; devices that store the same part are replicas.
- A *piece* is the bytes of one part in the memory of one process; a message carries one piece.
- The *owner* of a part is one of the processes of an actor that store the part. Only the owner exchanges the
  part with other actors and with the controller. After a receive from another actor, the owner forwards the
  part to the other processes of the actor that store it.

All of this is computed from the array's aval and the actor's mesh, so that every process and the controller
compute the same result.
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
    """One distinct slice of an array, with the devices and the processes of an actor that store it.

    Args:
        number: the index of the part in the list of the array's parts, which `parts_of` returns.
        index: the index range of the part, as one slice per axis of the whole array.
        shape: the shape of the part.
        positions: the devices that store the part, as indices into the actor's mesh in flat order.
        ranks: the ranks, in ascending order, of the processes that store the part.
    """

    number: int
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    positions: tuple[int, ...]
    ranks: tuple[int, ...]

    def owner(self, salt: int) -> int:
        """Return the rank of the process that exchanges this part with other actors and the controller.

        Args:
            salt: the tag of a transfer, or the id of an array. Different salts choose different processes,
                which spreads the work.
        """
        return self.ranks[(self.number + salt) % len(self.ranks)]


@lru_cache(maxsize=4096)
def parts_of(aval: Aval, axes: tuple[tuple[str, int], ...], num_processes: int = 1) -> tuple[Part, ...]:
    """List the parts (distinct slices) into which the mesh of an actor divides an array.

    Devices along an unreduced mesh axis store different summands of the same slice, so each of these devices
    has a part of its own.

    Args:
        aval: the shape, the dtype and the spec of the array.
        axes: the actor's mesh, as pairs of axis name and size, outermost first.
        num_processes: the number of processes of the actor, which divides the number of devices.

    Returns:
        The parts. Their order is that of the first device that stores each part.

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
    # Along an unreduced axis each device stores its own summand of the same slice of the array.
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
    """Return which block of one axis of an array is stored by the device at the given mesh coordinates.

    Args:
        names: the mesh axes that split the array's axis, outermost first.
        at: the coordinate of the device along each mesh axis.
        sizes: the size of each mesh axis.

    Returns:
        The index of the block; 0 if no mesh axis splits the array's axis.
    """
    block = 0
    for axis in names:
        block = block * sizes[axis] + at[axis]
    return block


def _slice(block: int, length: int, count: int) -> slice:
    return slice(None) if count == 1 else slice(block * length, (block + 1) * length)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for the dtype name of an `Aval`, such as bfloat16 of `ml_dtypes`."""
    return np.dtype(getattr(ml_dtypes, name, name))


# ---------------------------------------------------------------- transfers between actors
#
# Data between two actors is sent between their processes of equal rank. The owner of a part sends it to the
# process of the same rank in the other actor, which forwards it to the other processes of that actor that
# need it. Each part is thus sent between actors only once.


class PieceTransfer(NamedTuple):
    """One message between two processes, which carries one part (distinct slice) of an array.

    Args:
        part_index: the index of the part in the list of the parts of the array that this process stores.
        peer: the other process, to which the message is sent or from which it is received.
        sequence: the sequence number in the message's wire tag. The transport uses this tag to match a send
            with its receive.
    """

    part_index: int
    peer: ProcessId
    sequence: int


def plan_sends(
    process_rank: ProcessRank, stored_parts: Sequence[Part], tag: Tag, to_actor: ActorId, num_devices: int
) -> tuple[PieceTransfer, ...]:
    """List the messages that one process sends for a `Send` instruction: one per part that it owns.

    Each part has one owner among the processes of an actor that store the part. Only the owner sends the part
    to other actors.

    Args:
        process_rank: the process, with its actor and its rank in that actor.
        stored_parts: the parts (distinct slices) of the array that the process stores.
        tag: the tag of the transfer in the program.
        to_actor: the actor that receives the array.
        num_devices: the number of devices of one actor.
    """
    peer = process_rank.counterpart_in(to_actor)
    return tuple(
        PieceTransfer(part_index, peer, sequence_number(tag, part, num_devices))
        for part_index, part in enumerate(stored_parts)
        if part.owner(tag) == process_rank.rank
    )


def plan_receives(
    process_rank: ProcessRank, stored_parts: Sequence[Part], tag: Tag, from_actor: ActorId, num_devices: int
) -> tuple[PieceTransfer, ...]:
    """List the messages that one process receives for a `Recv` instruction: one per part that it stores.

    Each part has one owner among the processes of an actor that store the part. If this process is the owner,
    it receives the part from the process of the same rank in the sending actor. Otherwise it receives the
    part from the owner, which is another process of the same actor.

    Args:
        process_rank: the process, with its actor and its rank in that actor.
        stored_parts: the parts (distinct slices) of the array that the process stores.
        tag: the tag of the transfer in the program.
        from_actor: the actor that sends the array.
        num_devices: the number of devices of one actor.
    """
    return tuple(
        PieceTransfer(
            part_index,
            process_rank.counterpart_in(from_actor)
            if owner == process_rank.rank
            else process_rank.process_of_rank(owner),
            sequence_number(tag, part, num_devices),
        )
        for part_index, part in enumerate(stored_parts)
        for owner in [part.owner(tag)]
    )


def plan_relays(
    process_rank: ProcessRank, stored_parts: Sequence[Part], tag: Tag, num_devices: int
) -> dict[int, tuple[PieceTransfer, ...]]:
    """List the messages with which one process forwards received parts to other processes of its actor.

    A process forwards the parts that it owns to all other processes that store them, since only a part's
    owner receives the part from another actor.

    Args:
        process_rank: the process, with its actor and its rank in that actor.
        stored_parts: the parts (distinct slices) of the array that the process stores.
        tag: the tag of the transfer in the program.
        num_devices: the number of devices of one actor.

    Returns:
        A dictionary. Its keys are indices in `stored_parts` of the parts to forward; its values are the
        messages that carry each part.
    """
    return {
        part_index: tuple(
            PieceTransfer(
                part_index, process_rank.process_of_rank(rank), sequence_number(tag, part, num_devices)
            )
            for rank in part.ranks
            if rank != process_rank.rank
        )
        for part_index, part in enumerate(stored_parts)
        if part.owner(tag) == process_rank.rank and len(part.ranks) > 1
    }


def sequence_number(tag: Tag, part: Part, num_devices: int) -> int:
    """Return the sequence number for the wire tag of the message that carries one part of a transfer.

    Different parts and transfers of a program get different numbers, because an array has at most as many
    parts as an actor has devices.

    Args:
        tag: the tag of the transfer in the program.
        part: the part that the message carries.
        num_devices: the number of devices of one actor.
    """
    return tag * num_devices + part.number


# ---------------------------------------------------------------- the order of transfers
#
# Transports without tags need to know beforehand which message is the n-th on a link. Messages between two
# processes of different actors are in the order of the program's transfers. Messages within an actor are in
# the order in which the actor receives. This order cannot deadlock: a program posts its receives in an order
# (`compiler.lowering`) in which every value that precedes another one was made before anything that reads the
# other one.


def order_sends(
    process_rank: ProcessRank, stored_parts: Sequence[Part], tag: Tag, to_actor: ActorId, num_devices: int
) -> Iterator[OrderedMessage]:
    """Yield the messages of a `Send` instruction in order, each with the NCCL link that carries it.

    NCCL has no tags, so both ends of a link must know beforehand which message is the n-th.

    Args:
        process_rank: the sending process, with its actor and its rank in that actor.
        stored_parts: the parts (distinct slices) of the array that the process stores.
        tag: the tag of the transfer in the program.
        to_actor: the actor that receives the array.
        num_devices: the number of devices of one actor.
    """
    transfers = plan_sends(process_rank, stored_parts, tag, to_actor, num_devices)
    return _on_links(process_rank, stored_parts, transfers, num_devices, sends=True)


def order_receives(
    process_rank: ProcessRank, stored_parts: Sequence[Part], tag: Tag, from_actor: ActorId, num_devices: int
) -> Iterator[OrderedMessage]:
    """Yield the messages of a `Recv` instruction in order, each with the NCCL link that carries it.

    NCCL has no tags, so both ends of a link must know beforehand which message is the n-th. The messages that
    the process receives come first. The messages with which it forwards parts to other processes of its actor
    follow.

    Args:
        process_rank: the receiving process, with its actor and its rank in that actor.
        stored_parts: the parts (distinct slices) of the array that the process stores.
        tag: the tag of the transfer in the program.
        from_actor: the actor that sends the array.
        num_devices: the number of devices of one actor.
    """
    transfers = plan_receives(process_rank, stored_parts, tag, from_actor, num_devices)
    yield from _on_links(process_rank, stored_parts, transfers, num_devices, sends=False)
    for relays in plan_relays(process_rank, stored_parts, tag, num_devices).values():
        yield from _on_links(process_rank, stored_parts, relays, num_devices, sends=True)


def _on_links(
    process_rank: ProcessRank,
    stored_parts: Sequence[Part],
    transfers: Iterable[PieceTransfer],
    num_devices: int,
    *,
    sends: bool,
) -> Iterator[OrderedMessage]:
    devices_each = num_devices // process_rank.size
    for part_index, peer, sequence in transfers:
        here = _first_device(stored_parts[part_index], process_rank.rank, devices_each)
        there = _first_device(
            stored_parts[part_index], actor_and_rank(peer, process_rank.size)[1], devices_each
        )
        process = process_rank.process
        ends = (process, peer, here, there) if sends else (peer, process, there, here)
        yield OrderedMessage(sequence, NcclLink(*ends))


def _first_device(part: Part, rank: int, devices_each: int) -> int:
    """Among the devices of one process, return the first one that stores a part. Transports send the part
    from this device, or receive it there.

    Args:
        part: the part, which the process must store.
        rank: the rank of the process in its actor.
        devices_each: the number of devices of each process.

    Returns:
        The device's index among the devices of the process.
    """
    return next(k for k in part.positions if k // devices_each == rank) - rank * devices_each


# ---------------------------------------------------------------- transfers with the controller


@dataclass(frozen=True, slots=True)
class Scattering:
    """A description of how each actor of a mesh splits host values among its processes.

    Args:
        axes: the mesh of one actor, as pairs of axis name and size, outermost first.
        per_actor: the number of processes of each actor.
    """

    axes: tuple[tuple[str, int], ...]
    per_actor: int

    @property
    def splits(self) -> bool:
        """True if each actor has several processes; False if each actor has one process, which stores the
        whole of every array."""
        return self.per_actor > 1

    def process(self, actor: ActorId, rank: int) -> ProcessId:
        """Return the id of an actor's process that has the given rank."""
        return process_of(actor, rank, self.per_actor)

    def first_of(self, process: ProcessId) -> ProcessId:
        """Return the id of the first process (rank 0) of the actor to which a process belongs."""
        return self.process(actor_and_rank(process, self.per_actor)[0], 0)

    def parts(self, aval: Aval) -> tuple[Part, ...]:
        """List the parts (distinct slices) into which the mesh of an actor divides an array of this aval."""
        return parts_of(aval, self.axes, self.per_actor)

    def owned(self, array_id: ArrayId, aval: Aval) -> dict[int, list[Part]]:
        """Group the parts of an array by owner. The owner of a part is the process that exchanges the part
        with the controller.

        Returns:
            A dictionary. Its keys are the ranks of the processes that own parts; its values are the parts of
            each process.
        """
        found: dict[int, list[Part]] = {}
        for part in self.parts(aval):
            found.setdefault(part.owner(array_id), []).append(part)
        return found

    def pieces(self, array_id: ArrayId, aval: Aval, value: Array) -> list[tuple[int, int, Array]]:
        """Split a host value into the parts that the controller sends to the processes of an actor.

        Args:
            array_id: the id of the array, which determines the process to which each part is sent.
            aval: the aval of the array.
            value: the whole value.

        Returns:
            One tuple per part: the rank of the process that receives the part, the number of the part, and a
            copy of the part's bytes as a flat uint8 array.
        """
        return [
            (
                part.owner(array_id),
                part.number,
                np.array(value[part.index], order="C").reshape(-1).view(np.uint8),
            )
            for part in self.parts(aval)
        ]


class Gathering:
    """One fetch of arrays to the controller. `requests` lists the requests to send to the processes, and
    `arrays` joins their replies.

    Args:
        wanted: for each array to fetch: the actor that stores it, its id and its aval.
        scattering: how arrays are split among the processes of an actor.

    Attributes:
        requests: a dictionary. Its keys are ids of processes; its values are lists of the arrays to request
            from the process, each as the id of the array and the aval of the reply. If an actor has several
            processes, a reply is a flat uint8 array with the bytes of the array's parts (distinct slices)
            that the process sends.
    """

    def __init__(self, wanted: Sequence[tuple[ActorId, ArrayId, Aval]], scattering: Scattering):
        self._wanted = wanted
        self.requests: dict[ProcessId, list[tuple[ArrayId, Aval]]] = {}
        # For each process and each array requested from it: the array's position in `wanted`, and the parts
        # that the reply contains. None instead of parts means that the reply is the array itself.
        self._contents: dict[ProcessId, list[tuple[int, Sequence[Part] | None]]] = {}
        for position, (actor, array_id, aval) in enumerate(wanted):
            owned = scattering.owned(array_id, aval) if scattering.splits else {0: None}
            for rank, parts in owned.items():
                process = scattering.process(actor, rank)
                asked = aval if parts is None else Aval((total_bytes(parts, aval),), "uint8", (None,))
                self.requests.setdefault(process, []).append((array_id, asked))
                self._contents.setdefault(process, []).append((position, parts))

    def arrays(self, answers: Mapping[ProcessId, Sequence[Array]]) -> list[Array]:
        """Join the replies of all processes, and return the arrays in the order of `wanted`.

        Args:
            answers: for each process in `requests`, the replies of that process, in the order of the
                requests.
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
    """Return the total size in bytes of the given parts of an array.

    Args:
        parts: the parts (distinct slices) of the array.
        aval: the aval of the whole array.
    """
    return sum(math.prod(part.shape) for part in parts) * numpy_dtype(aval.dtype).itemsize


def join_parts(aval: Aval, pieces: Sequence[tuple[Sequence[Part], Array]]) -> Array:
    """Join the parts of an array, which several processes have sent as bytes, into one host array.

    Args:
        aval: the aval of the whole array.
        pieces: for each process: the parts (distinct slices) that it sent, and the bytes of these parts one
            after the other as a flat uint8 array. Together the processes must have sent all parts.
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
