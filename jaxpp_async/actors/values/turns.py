"""turns: a transfer of a program in, the messages of one process that it is made of out, with the link that each takes.
For transports that have no tags and need to know beforehand which message is the n-th. Pure.

Between two processes messages go in the order of the program's transfers. What the processes of one actor pass on to
each other goes in the order in which the actor receives it, from whomever. That makes nobody wait for what needs him:
a program posts its receives in an order (`compiler.lowering`) in which whatever comes before a value was made before
anything that reads the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxpp_async.actors.processes.seats import Seat, place_of
from jaxpp_async.actors.values import crossings
from jaxpp_async.actors.values.crossings import Leg
from jaxpp_async.actors.values.parts import Part
from jaxpp_async.program import ActorId, Tag
from jaxpp_async.transport.nccl.plan import Link, Turn


def sent(seat: Seat, held: Sequence[Part], tag: Tag, to_actor: ActorId, num_devices: int) -> Iterator[Turn]:
    """What a process sends of a `Send`. Arguments as of `crossings.sends`."""
    return _turns(seat, held, crossings.sends(seat, held, tag, to_actor, num_devices), num_devices, sends=True)


def received(seat: Seat, held: Sequence[Part], tag: Tag, from_actor: ActorId, num_devices: int) -> Iterator[Turn]:
    """What it receives of a `Recv`, and then what it passes on. Arguments as of `crossings.receives`."""
    legs = crossings.receives(seat, held, tag, from_actor, num_devices)
    yield from _turns(seat, held, legs, num_devices, sends=False)
    for onwards in crossings.relays(seat, held, tag, num_devices).values():
        yield from _turns(seat, held, onwards, num_devices, sends=True)


def _turns(seat: Seat, held: Sequence[Part], legs: Iterable[Leg], num_devices: int, *, sends: bool) -> Iterator[Turn]:
    for piece, peer, sequence in legs:
        here = _first_device(held[piece], seat.rank, num_devices // seat.size)
        there = _first_device(held[piece], place_of(peer, seat.size)[1], num_devices // seat.size)
        ends = (seat.process, peer, here, there) if sends else (peer, seat.process, there, here)
        yield Turn(sequence, Link(*ends))


def _first_device(part: Part, rank: int, each: int) -> int:
    """Of the devices of a process those that hold a part: the first, counted among the process's own. A transport reads
    and writes there."""
    return next(position for position in part.positions if position // each == rank) - rank * each
