"""crossings: a transfer of a program and how its array lies in, which of this process's pieces go where out. Pure.

What two actors exchange, their processes of equal rank do. A piece that several processes of an actor hold is sent by
the owner alone, to the owner on the other side, which passes it on to its mates there: so it crosses once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxpp_async.actors.processes.seats import Seat
from jaxpp_async.actors.values.parts import Part
from jaxpp_async.program import ActorId, ProcessId, Tag


class Leg(NamedTuple):
    """One message.

    Args:
        piece: which of the parts that this process holds.
        peer: where it goes, or comes from.
        sequence: the sequence part of its wire tag.
    """

    piece: int
    peer: ProcessId
    sequence: int


def sends(seat: Seat, held: Sequence[Part], tag: Tag, to_actor: ActorId, num_devices: int) -> tuple[Leg, ...]:
    """What this process sends of a transfer.

    Args:
        seat: this process's.
        held: the parts of the array that it holds.
        num_devices: of the actor.
    """
    peer = seat.partner(to_actor)
    return tuple(
        Leg(piece, peer, sequence(tag, part, num_devices))
        for piece, part in enumerate(held)
        if part.owner(tag) == seat.rank
    )


def receives(seat: Seat, held: Sequence[Part], tag: Tag, from_actor: ActorId, num_devices: int) -> tuple[Leg, ...]:
    """What it receives: every part that it holds, from the other actor or from the mate that has it from there."""
    partner = seat.partner(from_actor)
    return tuple(
        Leg(
            piece,
            partner if part.owner(tag) == seat.rank else seat.mate(part.owner(tag)),
            sequence(tag, part, num_devices),
        )
        for piece, part in enumerate(held)
    )


def relays(seat: Seat, held: Sequence[Part], tag: Tag, num_devices: int) -> dict[int, tuple[Leg, ...]]:
    """What it passes on to its mates, by the piece that has to be there for it."""
    found: dict[int, tuple[Leg, ...]] = {}
    for piece, part in enumerate(held):
        if part.owner(tag) == seat.rank and len(part.ranks) > 1:
            others = [rank for rank in part.ranks if rank != seat.rank]
            found[piece] = tuple(Leg(piece, seat.mate(rank), sequence(tag, part, num_devices)) for rank in others)
    return found


def sequence(tag: Tag, part: Part, num_devices: int) -> int:
    """The sequence part of a wire tag: one part of a program's transfer `tag`. An array has at most as many parts as
    the actor has devices, so no two messages of a program share a number."""
    return tag * num_devices + part.number
