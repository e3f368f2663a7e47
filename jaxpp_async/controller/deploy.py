"""deploying: one program's parts onto their actors: loaded, compiled, and linked where NCCL carries its transfers.

In: programs and serialized executables. Out: what the actors say of them. Decides nothing about failures: whoever asks
gets them.

linking: the NCCL communicators that programs need, made before their first step and anew in every epoch.

In: programs. Out: every process has joined its links. With a transport that needs none it does nothing. Runs no step,
and does not decide what a failure means.

programs: which part of which program each actor has, as the controller remembers it. In: programs and executables;
out: `Load` messages. Plain data; no jax, no I/O.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.requests import PendingRequest, RequestLog, SentRequest
from jaxpp_async.controller.startup import all_of
from jaxpp_async.errors import ActorError, MeshError, ProtocolError
from jaxpp_async.layout import array_parts
from jaxpp_async.layout.array_parts import Scattering
from jaxpp_async.program.actor_program import ActorProgram, format_instruction
from jaxpp_async.program.instructions import ActorId, Aval, ProcessId, Recv, Send, Tag
from jaxpp_async.protocol.actor_info import Position, ProcessRank, Topology
from jaxpp_async.protocol.messages import Done, JoinLink, JoinLinks, LinksOffered, Load, Loaded, OfferLinks
from jaxpp_async.protocol.task_group import OwnedTasks
from jaxpp_async.transport.nccl.order import NcclLink, batches, rounds
from jaxpp_async.transport.registry import kind_of


class Deployment:
    """Of the programs of one mesh.

    Args:
        crew, outbox, programs, linking: the mesh's.
        paused: while this is entered no step is stuck, for actors compile.
        tell: told what goes on, a line at a time.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        request_log: RequestLog,
        programs: LoadedPrograms,
        linking: LinkSetup,
        *,
        paused: Callable[[], AbstractContextManager[None]],
        tell: Callable[[str], None],
    ):
        self._actor_group, self._request_log, self._programs, self._linking = (
            actor_group,
            request_log,
            programs,
            linking,
        )
        self._paused, self._tell = paused, tell

    async def deploy(
        self,
        program_id: int,
        parts: Mapping[ActorId, ActorProgram],
        executables: Mapping[ActorId, Mapping[int, str]],
        blobs: Mapping[str, bytes],
        names: Mapping[int, str],
    ) -> dict[ActorId, Loaded]:
        """See `Controller.load`. A program that fails, or that nobody waits for any more, is forgotten."""
        self._programs.add(program_id, parts, executables, blobs, names)
        self._tell(f"compiling on {len(parts)} actor{'s' if len(parts) != 1 else ''}")
        processes = self._actor_group.processes
        try:
            with self._paused():
                loading = {process: self._load(program_id, process) for process in processes.of_all(parts)}
                loaded = await all_of(loading, "load")
                await self._linking.link(program_id)
        except BaseException:  # also a cancellation: nobody will ask for it
            self._programs.remove(program_id)
            raise
        self._programs.note_loaded(program_id)
        return {actor: loaded[processes.process(actor, 0)] for actor in sorted(parts)}

    async def _load(self, program_id: int, process: ProcessId) -> Loaded:
        known = self._actor_group.links[process].known_blobs
        actor = self._actor_group.processes.actor_of(process)
        message = self._programs.load_message(self._request_log.number(), program_id, actor, known)
        call = PendingRequest(Loaded)
        try:
            self._request_log.post(SentRequest(process, message, call))
            await self._request_log.drain(process)
            return await call.future
        except (ActorError, MeshError):
            # what the actor has of them, if anything, is unknown: send them again
            known -= set(message.blobs)
            raise


# ---------------------------------------------------------------- linking


class MessageEnd(NamedTuple):
    """One end of a message, as its link's other end has to have it.

    Args:
        sequence: of its wire tag. tag: of the transfer that it is a part of. aval: of that one's array.
    """

    sequence: int
    tag: Tag
    aval: Aval

    def __str__(self) -> str:
        return f"tag {self.tag}, {self.aval}"


def links_of(parts: Mapping[ActorId, ActorProgram], scattering: Scattering) -> list[NcclLink]:
    """The links that a program transfers on, in ascending order.

    Args:
        parts: of all its actors. scattering: how their arrays lie.

    Raises:
        ProtocolError: two processes do not agree what they transfer, or in which order. NCCL would not notice: it has
            no tags, and does not check sizes.
    """
    ends: dict[NcclLink, tuple[list[MessageEnd], list[MessageEnd]]] = {}
    for actor, part in parts.items():
        for rank in range(scattering.per_actor):
            process_rank = ProcessRank(scattering.process(actor, rank), scattering.per_actor)
            for link, message in _messages(part, process_rank, scattering):
                sent_and_received = ends.setdefault(link, ([], []))
                sent_and_received[link.rank_of(process_rank.process)].append(message)
    for link in sorted(ends):
        _check(link, *ends[link], scattering.per_actor)
    return sorted(ends)


def _messages(
    part: ActorProgram, process_rank: ProcessRank, scattering: Scattering
) -> Iterator[tuple[NcclLink, MessageEnd]]:
    """What one process of an actor sends, receives and passes on, in the program's order."""
    num_devices = math.prod(size for _, size in scattering.axes)
    for instruction in part.instructions:
        if not isinstance(instruction, Send | Recv):
            continue
        tag = instruction.tag
        aval = part.avals[instruction.buffer] if isinstance(instruction, Send) else instruction.aval
        held = [piece for piece in scattering.parts(aval) if process_rank.rank in piece.ranks]
        if isinstance(instruction, Send):
            found = array_parts.sent(process_rank, held, tag, instruction.to_actor, num_devices)
        else:
            found = array_parts.received(process_rank, held, tag, instruction.from_actor, num_devices)
        for sequence, link in found:
            yield link, MessageEnd(sequence, tag, aval)


def _check(link: NcclLink, sent: Sequence[MessageEnd], received: Sequence[MessageEnd], size: int) -> None:
    for place, (ours, theirs) in enumerate(zip_longest(sent, received)):
        if ours != theirs:
            raise ProtocolError(
                f"transfer {place} from {ProcessRank(link.sender, size)} to {ProcessRank(link.receiver, size)}: the one sends "
                f"{ours or 'nothing'}, the other receives {theirs or 'nothing'}; this is a bug in "
                "jaxpp_async.compiler.lowering"
            )


class LinkSetup:
    """The links of one mesh.

    Args:
        crew: the actors. outbox: says when a restart is under way. programs: what they have loaded.
    """

    def __init__(self, actor_group: ActorGroup, request_log: RequestLog, programs: LoadedPrograms):
        self._actor_group, self._request_log, self._programs = actor_group, request_log, programs
        self._made: set[NcclLink] = set()
        self._epoch = 0
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None

    async def link(self, program_id: int) -> None:
        """Make what a program needs and there is not yet. A restart meanwhile makes it as well, and this waits for it.

        Raises:
            ProtocolError: see `links_of`. ActorError: a link could not be made, or the mesh failed.
        """
        if not kind_of(self._actor_group.transport_kind).ordered:
            return
        wanted = links_of(self._programs.parts(program_id), self._actor_group.scattering)
        while not self._has(wanted):
            await self._request_log.wait_open()
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
        if kind_of(self._actor_group.transport_kind).ordered:
            how = self._actor_group.scattering
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

    def _has(self, links: Sequence[NcclLink]) -> bool:
        if self._epoch != self._actor_group.epoch:
            self._epoch = self._actor_group.epoch
            self._made.clear()  # an abort has ended them
        return self._made.issuperset(links)

    async def _make(self, links: Sequence[NcclLink]) -> None:
        """One exchange of ids, then round after round of links, everyone one of his at a time.

        A round is asked for once the one before is through: else who waits for a peer with many links would take the
        time that these take for the time that his own takes, and give up.
        """
        if self._has(links):
            return
        epoch, new = self._epoch, sorted(set(links) - self._made)
        ends = sorted({end for link in new for end in (link.sender, link.receiver)})
        makers = batches(new)
        offers: dict[ProcessId, LinksOffered] = await self._actor_group.ask_each(
            {
                process: OfferLinks(self._request_log.number(), len(makers.get(process, ())))
                for process in ends
            },
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
            await self._actor_group.ask_each(joins, Done, "join links")
            if self._actor_group.epoch != epoch:
                return
            self._made.update(made_at_once)

    def _join(self, process: ProcessId, link: NcclLink, unique_id: bytes, offer: LinksOffered) -> JoinLinks:
        addresses = {link.peer_of(process): offer.address}
        return JoinLinks(self._request_log.number(), addresses, (JoinLink(*link, unique_id),))


# ---------------------------------------------------------------- programs

Places: TypeAlias = tuple[tuple[ActorId, tuple[ProcessId, ...]], ...]
"""Actors with their processes, both in order."""


@dataclass(frozen=True, slots=True)
class _Program:
    """Args: places: each actor with a part, and its processes. texts: each part as it travels. keys: each part's
    executables, by index. blobs: executables, by key. names: of the step's arguments, where errors name them."""

    places: Places
    parts: dict[ActorId, ActorProgram]
    texts: dict[ActorId, str]
    keys: dict[ActorId, dict[int, str]]
    blobs: dict[str, bytes]
    names: dict[int, str]


class LoadedPrograms:
    """The programs that actors have loaded, or are loading, by id.

    Args:
        processes: of the mesh.
        for_successors: whether actors that are replaced will have to load them again.
    """

    def __init__(self, processes: Topology, *, for_successors: bool = False) -> None:
        self._processes, self._for_successors = processes, for_successors
        self._ids = itertools.count()
        self._programs: dict[int, _Program] = {}

    def new_id(self) -> int:
        """An id that none has had."""
        return next(self._ids)

    def add(
        self,
        program_id: int,
        parts: Mapping[ActorId, ActorProgram],
        keys: Mapping[ActorId, Mapping[int, str]],
        blobs: Mapping[str, bytes],
        names: Mapping[int, str],
    ) -> None:
        """Its actors are about to load their parts.

        Args:
            keys: for each actor, the content key of each executable index that its part uses.
            blobs: serialized executables by content key.
            names: of the step's arguments, by number, where errors on actors may have to name them.
        """
        order = sorted(parts)
        texts = {actor: str(parts[actor]) for actor in order}
        used = {actor: dict(keys.get(actor, {})) for actor in order}
        places = tuple((actor, tuple(self._processes.of(actor))) for actor in order)
        in_order = {actor: parts[actor] for actor in order}
        self._programs[program_id] = _Program(places, in_order, texts, used, dict(blobs), dict(names))

    def note_loaded(self, program_id: int) -> None:
        """All its actors have it: unless it may be needed again, what only travels is dropped."""
        if not self._for_successors:
            program = self._programs[program_id]
            program.texts.clear()
            program.blobs.clear()

    def remove(self, program_id: int) -> None:
        """It could not be loaded."""
        self._programs.pop(program_id, None)

    def of(self, actor: ActorId) -> tuple[int, ...]:
        """The programs that an actor has a part in, in order of id."""
        return tuple(i for i, program in sorted(self._programs.items()) if actor in program.parts)

    def load_message(self, request: int, program_id: int, actor: ActorId, known: set[str]) -> Load:
        """What an actor is told to load.

        Args:
            known: content keys that it has been sent before; takes up those of this message.
        """
        program = self._programs[program_id]
        keys = program.keys[actor]
        new = set(keys.values()) - known
        known |= new
        blobs = {key: program.blobs[key] for key in sorted(new)}
        return Load(request, program_id, program.texts[actor], keys, blobs, program.names)

    def places_of(self, program_id: int) -> Places:
        """The actors that have a part in it."""
        return self._programs[program_id].places

    def parts(self, program_id: int) -> dict[ActorId, ActorProgram]:
        """What each actor has of a program."""
        program = self._programs.get(program_id)
        found = program.parts.items() if program is not None else ()
        return {actor: part for actor, part in found if isinstance(part, ActorProgram)}  # as in `part`

    def all_parts(self) -> list[dict[ActorId, ActorProgram]]:
        """`parts` of every program."""
        return [self.parts(program_id) for program_id in sorted(self._programs)]

    def part(self, program_id: int, actor: ActorId) -> ActorProgram | None:
        """What an actor has of a program; None if it has no part in it, or there is no such program."""
        program = self._programs.get(program_id)
        part = program.parts.get(actor) if program is not None else None
        return part if isinstance(part, ActorProgram) else None  # tests of the control plane load plain text

    def instruction_at(self, actor: ActorId, at: Position) -> str | None:
        """Text of the instruction that an actor was at; None if that says nothing."""
        program = self._programs.get(at.program_id)
        part = program.parts.get(actor) if program is not None else None
        if part is None or not 0 <= at.instruction < len(part.instructions):
            return None
        text = format_instruction(part.instructions[at.instruction])
        return f"{text} (waiting for data)" if at.waiting else text
