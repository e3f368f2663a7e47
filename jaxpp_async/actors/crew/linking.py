"""linking: the NCCL communicators that programs need, made before their first step and anew in every epoch.

In: programs. Out: every process has joined its links. With a transport that needs none it does nothing. Runs no step,
and does not decide what a failure means.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from jaxpp_async.actors.crew.crew import Crew
from jaxpp_async.actors.crew.outbox import Outbox
from jaxpp_async.actors.crew.programs import Programs
from jaxpp_async.actors.messages import Done, JoinLink, JoinLinks, LinksOffered, OfferLinks
from jaxpp_async.actors.owned_tasks import OwnedTasks
from jaxpp_async.actors.processes.seats import Seat
from jaxpp_async.actors.values import turns
from jaxpp_async.actors.values.scattering import Scattering
from jaxpp_async.errors import ProtocolError
from jaxpp_async.program import ActorId, ActorProgram, Aval, ProcessId, Recv, Send, Tag
from jaxpp_async.transport.nccl.plan import Link, batches, rounds
from jaxpp_async.transport.planes import is_ordered


class Message(NamedTuple):
    """One end of a message, as its link's other end has to have it.

    Args:
        sequence: of its wire tag. tag: of the transfer that it is a part of. aval: of that one's array.
    """

    sequence: int
    tag: Tag
    aval: Aval

    def __str__(self) -> str:
        return f"tag {self.tag}, {self.aval}"


def links_of(parts: Mapping[ActorId, ActorProgram], scattering: Scattering) -> list[Link]:
    """The links that a program transfers on, in ascending order.

    Args:
        parts: of all its actors. scattering: how their arrays lie.

    Raises:
        ProtocolError: two processes do not agree what they transfer, or in which order. NCCL would not notice: it has
            no tags, and does not check sizes.
    """
    ends: dict[Link, tuple[list[Message], list[Message]]] = {}
    for actor, part in parts.items():
        for rank in range(scattering.per_actor):
            seat = Seat(scattering.process(actor, rank), scattering.per_actor)
            for link, message in _messages(part, seat, scattering):
                sent_and_received = ends.setdefault(link, ([], []))
                sent_and_received[link.rank_of(seat.process)].append(message)
    for link in sorted(ends):
        _check(link, *ends[link], scattering.per_actor)
    return sorted(ends)


def _messages(part: ActorProgram, seat: Seat, scattering: Scattering) -> Iterator[tuple[Link, Message]]:
    """What one process of an actor sends, receives and passes on, in the program's order."""
    num_devices = math.prod(size for _, size in scattering.axes)
    for instruction in part.instructions:
        if not isinstance(instruction, Send | Recv):
            continue
        tag = instruction.tag
        aval = part.avals[instruction.buffer] if isinstance(instruction, Send) else instruction.aval
        held = [piece for piece in scattering.parts(aval) if seat.rank in piece.ranks]
        if isinstance(instruction, Send):
            found = turns.sent(seat, held, tag, instruction.to_actor, num_devices)
        else:
            found = turns.received(seat, held, tag, instruction.from_actor, num_devices)
        for sequence, link in found:
            yield link, Message(sequence, tag, aval)


def _check(link: Link, sent: Sequence[Message], received: Sequence[Message], size: int) -> None:
    for place, (ours, theirs) in enumerate(zip_longest(sent, received)):
        if ours != theirs:
            raise ProtocolError(
                f"transfer {place} from {Seat(link.sender, size)} to {Seat(link.receiver, size)}: the one sends "
                f"{ours or 'nothing'}, the other receives {theirs or 'nothing'}; this is a bug in "
                "jaxpp_async.compiler.lowering"
            )


class Linking:
    """The links of one mesh.

    Args:
        crew: the actors. outbox: says when a restart is under way. programs: what they have loaded.
    """

    def __init__(self, crew: Crew, outbox: Outbox, programs: Programs):
        self._crew, self._outbox, self._programs = crew, outbox, programs
        self._made: set[Link] = set()
        self._epoch = 0
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None

    async def link(self, program_id: int) -> None:
        """Make what a program needs and there is not yet. A restart meanwhile makes it as well, and this waits for it.

        Raises:
            ProtocolError: see `links_of`. ActorError: a link could not be made, or the mesh failed.
        """
        if not is_ordered(self._crew.transport_kind):
            return
        wanted = links_of(self._programs.parts(program_id), self._crew.scattering)
        while not self._has(wanted):
            await self._outbox.wait_open()
            if self._task is None:
                self._task = self._tasks.start("make links", self._make(wanted), is_awaited=True)
                self._task.add_done_callback(self._ended)
            task = self._task
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    async def link_again(self) -> None:
        """After a restart, before anything is sent: all that programs need, anew.

        Raises:
            As `link`.
        """
        if is_ordered(self._crew.transport_kind):
            how = self._crew.scattering
            wanted = {link for parts in self._programs.all_parts() for link in links_of(parts, how)}
            await self._make(sorted(wanted))

    def give_up(self) -> None:
        """Ask for nothing more of what is being made."""
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Give up what is being made, and wait until that is done: the actors have been told to drop it."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def aclose(self) -> None:
        """End whatever is under way."""
        await self._tasks.aclose()

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._task = None

    def _has(self, links: Sequence[Link]) -> bool:
        if self._epoch != self._crew.epoch:
            self._epoch = self._crew.epoch
            self._made.clear()  # an abort has ended them
        return self._made.issuperset(links)

    async def _make(self, links: Sequence[Link]) -> None:
        """One exchange of ids, then round after round of links, everyone one of his at a time.

        A round is asked for once the one before is through: else who waits for a peer with many links would take the
        time that these take for the time that his own takes, and give up.
        """
        if self._has(links):
            return
        epoch, new = self._epoch, sorted(set(links) - self._made)
        ends = sorted({end for link in new for end in (link.sender, link.receiver)})
        makers = batches(new)
        offers: dict[ProcessId, LinksOffered] = await self._crew.ask_each(
            {process: OfferLinks(self._outbox.number(), len(makers.get(process, ()))) for process in ends},
            LinksOffered,
            "offer links",
        )
        ids = {
            link: unique_id
            for maker, made in makers.items()
            for link, unique_id in zip(made, offers[maker].ids, strict=True)
        }
        for made_at_once in rounds(new):
            joins = {
                end: self._join(end, link, ids[link], offers[link.peer_of(end)])
                for link in made_at_once
                for end in (link.sender, link.receiver)
            }
            await self._crew.ask_each(joins, Done, "join links")
            if self._crew.epoch != epoch:
                return
            self._made.update(made_at_once)

    def _join(self, process: ProcessId, link: Link, unique_id: bytes, offer: LinksOffered) -> JoinLinks:
        addresses = {link.peer_of(process): offer.address}
        return JoinLinks(self._outbox.number(), addresses, (JoinLink(*link, unique_id),))
