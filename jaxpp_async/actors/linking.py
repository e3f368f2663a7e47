"""linking: the NCCL communicators that programs need, made before their first step and anew in every epoch.

In: programs. Out: every actor has joined its links. With a transport that needs none it does nothing. It runs no step,
and does not decide what a failure means.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from jaxpp_async.actors.crew import Crew
from jaxpp_async.actors.messages import Done, JoinLink, JoinLinks, LinksOffered, OfferLinks
from jaxpp_async.actors.outbox import Outbox
from jaxpp_async.actors.owned_tasks import OwnedTasks
from jaxpp_async.actors.programs import Programs
from jaxpp_async.errors import ProtocolError
from jaxpp_async.program import ActorId, ActorProgram, Aval, Recv, Send, Tag
from jaxpp_async.transport.nccl_plan import Link, batches
from jaxpp_async.transport.planes import is_ordered


def links_of(parts: Mapping[ActorId, ActorProgram], num_devices: int) -> list[Link]:
    """The links that a program transfers on, in the order in which everyone makes them.

    Args:
        parts: of all its actors. num_devices: of each actor.

    Raises:
        ProtocolError: two actors do not agree what they transfer, or in which order. NCCL would not notice: it has no
            tags, and does not check sizes.
    """
    sent: dict[tuple[ActorId, ActorId], list[tuple[Tag, Aval]]] = defaultdict(list)
    received: dict[tuple[ActorId, ActorId], list[tuple[Tag, Aval]]] = defaultdict(list)
    for actor, part in parts.items():
        for instruction in part.instructions:
            if isinstance(instruction, Send):
                sent[actor, instruction.to_actor].append((instruction.tag, part.avals[instruction.buffer]))
            elif isinstance(instruction, Recv):
                received[instruction.from_actor, actor].append((instruction.tag, instruction.aval))
    links: set[Link] = set()
    for way in sorted(sent.keys() | received.keys()):
        _check(way, sent[way], received[way])
        split = any(any(aval.spec) or aval.unreduced for _, aval in sent[way])
        links |= {Link(*way, device) for device in range(num_devices if split else 1)}
    return sorted(links)


def _check(
    way: tuple[ActorId, ActorId], sent: Sequence[tuple[Tag, Aval]], received: Sequence[tuple[Tag, Aval]]
) -> None:
    for place, (ours, theirs) in enumerate(zip_longest(sent, received)):
        if ours != theirs:
            raise ProtocolError(
                f"transfer {place} from actor {way[0]} to actor {way[1]}: the one sends {_text(ours)}, the other "
                f"receives {_text(theirs)}; this is a bug in jaxpp_async.compiler.lowering"
            )


def _text(transfer: tuple[Tag, Aval] | None) -> str:
    return "nothing" if transfer is None else f"tag {transfer[0]}, {transfer[1]}"


class Linking:
    """The links of one mesh.

    Args:
        crew: the actors. outbox: says when a restart is under way. programs: what they have loaded.
        num_devices: of each actor.
    """

    def __init__(self, crew: Crew, outbox: Outbox, programs: Programs, num_devices: int):
        self._crew, self._outbox, self._programs, self._num_devices = crew, outbox, programs, num_devices
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
        wanted = links_of(self._programs.parts(program_id), self._num_devices)
        while not self._has(wanted):
            await self._outbox.wait_open()
            if self._task is None:
                self._task = self._tasks.start("make links", self._make(wanted))
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
            wanted = {link for parts in self._programs.all_parts() for link in links_of(parts, self._num_devices)}
            await self._make(sorted(wanted))

    async def stop(self) -> None:
        """Give up what is being made: the actors have been told to drop it."""
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
        """One exchange of ids, then everyone joins his links in ascending order."""
        if self._has(links):
            return
        epoch, new = self._epoch, sorted(set(links) - self._made)
        # Links are asked for by actor, and the crew is asked by process: with NCCL these are the same (`mesh_options`).
        assert self._crew.processes.per_actor == 1, "links between actors of several processes: which process joins?"
        ends = sorted({end for link in new for end in (link.sender, link.receiver)})
        makers = batches(new)
        offers: dict[ActorId, LinksOffered] = await self._crew.ask_each(
            {actor: OfferLinks(self._outbox.number(), len(makers.get(actor, ()))) for actor in ends},
            LinksOffered,
            "offer links",
        )
        ids = {
            link: unique_id
            for maker, made in makers.items()
            for link, unique_id in zip(made, offers[maker].ids, strict=True)
        }
        joins = {actor: self._join(actor, [link for link in new if actor in link[:2]], ids, offers) for actor in ends}
        await self._crew.ask_each(joins, Done, "join links")
        if self._crew.epoch == epoch:
            self._made.update(new)

    def _join(
        self,
        actor: ActorId,
        links: Sequence[Link],
        ids: Mapping[Link, bytes],
        offers: Mapping[ActorId, LinksOffered],
    ) -> JoinLinks:
        peers = {link.peer_of(actor) for link in links}
        return JoinLinks(
            self._outbox.number(),
            {peer: offers[peer].address for peer in sorted(peers)},
            tuple(JoinLink(*link, ids[link]) for link in links),
        )
