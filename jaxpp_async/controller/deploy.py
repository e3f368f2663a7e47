"""Load compiled programs onto actors, and connect the NCCL links that their transfers need.

`Deployment` loads one program's parts. `LinkSetup` makes the NCCL communicators before a program's first
step, and anew in every epoch; with other transports it has nothing to make. `LoadedPrograms` remembers which
part of which program each actor has, and makes the `Load` messages.
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
from jaxpp_async.controller.options import ControllerOptions
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
from jaxpp_async.transport.nccl.order import NcclLink, links_by_maker, rounds
from jaxpp_async.transport.registry import kind_of


class Deployment:
    """The loading of programs onto the actors of one mesh.

    Args:
        paused: makes a context in which no step counts as stuck, because actors compile.
        on_progress: called with a line of text when a program is being compiled.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        request_log: RequestLog,
        programs: LoadedPrograms,
        linking: LinkSetup,
        *,
        paused: Callable[[], AbstractContextManager[None]],
        on_progress: Callable[[str], None],
    ):
        self._actor_group, self._request_log = actor_group, request_log
        self._programs, self._linking = programs, linking
        self._paused, self._on_progress = paused, on_progress

    async def deploy(
        self,
        program_id: int,
        parts: Mapping[ActorId, ActorProgram],
        executables: Mapping[ActorId, Mapping[int, str]],
        blobs: Mapping[str, bytes],
        names: Mapping[int, str],
    ) -> dict[ActorId, Loaded]:
        """Load a program; see `Controller.load`. A program that fails or is cancelled is forgotten."""
        self._programs.add(program_id, parts, executables, blobs, names)
        self._on_progress(f"compiling on {len(parts)} actor{'s' if len(parts) != 1 else ''}")
        processes = self._actor_group.processes
        try:
            with self._paused():
                loading = {
                    process: self._load(program_id, process) for process in processes.processes_of_all(parts)
                }
                loaded = await all_of(loading, "load")
                await self._linking.link(program_id)
        except BaseException:  # also a cancellation: nobody will run it
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
            return await call
        except (ActorError, MeshError):
            # Nobody knows which executables the actor has: send them again.
            known -= set(message.blobs)
            raise


# ---------------------------------------------------------------- linking


class MessageEnd(NamedTuple):
    """A message as one end of its link sees it; both ends have to see the same.

    Args:
        sequence: the sequence number of its wire tag.
        tag: the tag of the transfer that it is a part of.
        aval: the aval of the transfer's array.
    """

    sequence: int
    tag: Tag
    aval: Aval

    def __str__(self) -> str:
        return f"tag {self.tag}, {self.aval}"


def links_of(parts: Mapping[ActorId, ActorProgram], scattering: Scattering) -> list[NcclLink]:
    """List the links that a program transfers on, in ascending order.

    Args:
        parts: the parts of all its actors.
        scattering: how their arrays lie.

    Raises:
        ProtocolError: two processes do not agree what they transfer, or in which order. NCCL would not
            notice: it has no tags, and does not check sizes.
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
    """Generate the messages that one process sends, receives and passes on, in the program's order."""
    num_devices = math.prod(size for _, size in scattering.axes)
    for instruction in part.instructions:
        if not isinstance(instruction, Send | Recv):
            continue
        tag = instruction.tag
        aval = part.avals[instruction.buffer] if isinstance(instruction, Send) else instruction.aval
        held = [piece for piece in scattering.parts(aval) if process_rank.rank in piece.ranks]
        if isinstance(instruction, Send):
            found = array_parts.order_sends(process_rank, held, tag, instruction.to_actor, num_devices)
        else:
            found = array_parts.order_receives(process_rank, held, tag, instruction.from_actor, num_devices)
        for sequence, link in found:
            yield link, MessageEnd(sequence, tag, aval)


def _check(link: NcclLink, sent: Sequence[MessageEnd], received: Sequence[MessageEnd], size: int) -> None:
    sender, receiver = ProcessRank(link.sender, size), ProcessRank(link.receiver, size)
    for index, (ours, theirs) in enumerate(zip_longest(sent, received)):
        if ours != theirs:
            raise ProtocolError(
                f"transfer {index} from {sender} to {receiver}: the one sends {ours or 'nothing'}, "
                f"the other receives {theirs or 'nothing'}; this is a bug in jaxpp_async.compiler.lowering"
            )


class LinkSetup:
    """The NCCL links of one mesh."""

    def __init__(self, actor_group: ActorGroup, request_log: RequestLog, programs: LoadedPrograms):
        self._actor_group, self._request_log, self._programs = actor_group, request_log, programs
        self._made: set[NcclLink] = set()
        self._epoch = 0
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None

    async def link(self, program_id: int) -> None:
        """Make the links that a program needs and that are missing, or wait for a restart that makes them.

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
                self._task.add_done_callback(self._on_ended)
            task = self._task
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    async def link_again(self) -> None:
        """Make all links that programs need anew: in a restart, before any request is sent again.

        Raises:
            As `link`.
        """
        if kind_of(self._actor_group.transport_kind).ordered:
            how = self._actor_group.scattering
            wanted = {link for parts in self._programs.all_parts() for link in links_of(parts, how)}
            await self._make(sorted(wanted))

    def cancel(self) -> None:
        """Make no further request for the links that are being made."""
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Cancel the links that are being made, and wait for that. `link` may be called again afterwards."""
        await self._tasks.aclose()

    def _on_ended(self, _: asyncio.Task[None]) -> None:
        self._task = None

    def _has(self, links: Sequence[NcclLink]) -> bool:
        if self._epoch != self._actor_group.epoch:
            self._epoch = self._actor_group.epoch
            self._made.clear()  # an abort has ended them
        return self._made.issuperset(links)

    async def _make(self, links: Sequence[NcclLink]) -> None:
        """Exchange ids once, then make links in rounds, in each of which a process makes one of its links.

        A round begins once the one before is through. Otherwise a process that waits for a peer with many
        links would take their time for that of its own link, and give up.
        """
        if self._has(links):
            return
        epoch, new = self._epoch, sorted(set(links) - self._made)
        ends = sorted({end for link in new for end in (link.sender, link.receiver)})
        makers = links_by_maker(new)
        offers: dict[ProcessId, LinksOffered] = await self._actor_group.ask_each(
            {end: OfferLinks(self._request_log.number(), len(makers.get(end, ()))) for end in ends},
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
"""The actors of a program with their processes, both in order."""


@dataclass(frozen=True, slots=True)
class _Program:
    """One program of a mesh.

    Args:
        places: each actor with a part, and its processes.
        texts: each part as text for the `Load` message.
        keys: the content keys of each part's executables, by index.
        blobs: executables, by content key.
        names: names of the step's arguments, where errors name them.
    """

    places: Places
    parts: dict[ActorId, ActorProgram]
    texts: dict[ActorId, str]
    keys: dict[ActorId, dict[int, str]]
    blobs: dict[str, bytes]
    names: dict[int, str]


class LoadedPrograms:
    """The programs that actors have loaded, or are loading, by id.

    Args:
        processes: the processes of the mesh.
        options: says whether actors that are replaced will have to load them again.
    """

    def __init__(self, processes: Topology, options: ControllerOptions) -> None:
        self._processes, self._for_successors = processes, options.restarts
        self._ids = itertools.count()
        self._programs: dict[int, _Program] = {}

    def new_id(self) -> int:
        """Give an id that no program has had."""
        return next(self._ids)

    def add(
        self,
        program_id: int,
        parts: Mapping[ActorId, ActorProgram],
        keys: Mapping[ActorId, Mapping[int, str]],
        blobs: Mapping[str, bytes],
        names: Mapping[int, str],
    ) -> None:
        """Add a program whose actors are about to load their parts.

        Args:
            parts: each actor's part.
            keys: for each actor, the content key of each executable index that its part uses.
            blobs: serialized executables by content key.
            names: names of the step's arguments, by number, where errors on actors may have to name them.
        """
        order = sorted(parts)
        texts = {actor: str(parts[actor]) for actor in order}
        used = {actor: dict(keys.get(actor, {})) for actor in order}
        places = tuple((actor, tuple(self._processes.processes_of(actor))) for actor in order)
        # Tests of the control plane load plain text instead of programs.
        in_order = {a: part for a in order if isinstance(part := parts[a], ActorProgram)}
        self._programs[program_id] = _Program(places, in_order, texts, used, dict(blobs), dict(names))

    def note_loaded(self, program_id: int) -> None:
        """Note that all actors have a program; drop its executables unless a successor may need them."""
        if not self._for_successors:
            program = self._programs[program_id]
            program.texts.clear()
            program.blobs.clear()

    def remove(self, program_id: int) -> None:
        """Remove a program that could not be loaded."""
        self._programs.pop(program_id, None)

    def programs_of(self, actor: ActorId) -> tuple[int, ...]:
        """List the programs that an actor has a part in, in order of id."""
        return tuple(i for i, program in sorted(self._programs.items()) if actor in program.keys)

    def load_message(self, request: int, program_id: int, actor: ActorId, known: set[str]) -> Load:
        """Make the message that has an actor load its part.

        Args:
            request: number of the request.
            known: content keys that the actor has been sent before; the keys of this message are added.
        """
        program = self._programs[program_id]
        keys = program.keys[actor]
        new = set(keys.values()) - known
        known |= new
        blobs = {key: program.blobs[key] for key in sorted(new)}
        return Load(request, program_id, program.texts[actor], keys, blobs, program.names)

    def places_of(self, program_id: int) -> Places:
        """List the actors that have a part in a program."""
        return self._programs[program_id].places

    def parts(self, program_id: int) -> dict[ActorId, ActorProgram]:
        """Give each actor's part of a program."""
        program = self._programs.get(program_id)
        return program.parts if program is not None else {}

    def all_parts(self) -> list[dict[ActorId, ActorProgram]]:
        """Give the `parts` of every program."""
        return [self.parts(program_id) for program_id in sorted(self._programs)]

    def part(self, program_id: int, actor: ActorId) -> ActorProgram | None:
        """Give an actor's part of a program; None if it has no part in it, or there is no such program."""
        return self.parts(program_id).get(actor)

    def instruction_at(self, actor: ActorId, at: Position) -> str | None:
        """Give the text of the instruction that an actor was at; None if its program is not known."""
        part = self.part(at.program_id, actor)
        if part is None or not 0 <= at.instruction < len(part.instructions):
            return None
        text = format_instruction(part.instructions[at.instruction])
        return f"{text} (waiting for data)" if at.waiting else text
