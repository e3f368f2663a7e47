"""Load compiled programs onto actors, and connect the NCCL links that their transfers need.

A link is one NCCL communicator, for transfers from a device of one process to a device of another process.

`Deployment` loads the parts of a program onto its actors. `LinkSetup` makes the links of a program before its
first step. An abort of the whole mesh ends all links, so `LinkSetup` makes them again afterwards. With
transports other than NCCL, `LinkSetup` does nothing. `LoadedPrograms` remembers which part of which program
each actor has, and makes the `Load` messages.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import Requests
from jaxpp_async.errors import ActorError, MeshError, ProtocolError
from jaxpp_async.layout import array_parts
from jaxpp_async.layout.array_parts import Scattering
from jaxpp_async.program.actor_program import ActorProgram, format_instruction
from jaxpp_async.program.instructions import ActorId, Aval, ProcessId, Recv, Send, Tag, runs
from jaxpp_async.protocol.actor_info import Position, ProcessRank, Topology
from jaxpp_async.protocol.messages import (
    CompileProgress,
    JoinLink,
    JoinLinks,
    LinksOffered,
    Load,
    Loaded,
    OfferLinks,
)
from jaxpp_async.protocol.task_group import OwnedTasks, all_of
from jaxpp_async.transport.nccl.order import NcclLink, links_by_maker, rounds
from jaxpp_async.transport.registry import kind_of

if TYPE_CHECKING:
    from jaxpp_async.compiler.export import Emitted

OnCompiled: TypeAlias = Callable[[int, int, int], None]
"""A function that is told how many executables of all actors are compiled, how many have to be as far as the
actors have said, and how many came from JAX's compilation cache.
"""


class Deployment:
    """A loader of programs onto the actors of one mesh.

    Args:
        actor_group: the actors' processes.
        requests: sends the requests.
        programs: the record of loaded programs, to which each new program is added.
        linking: makes the NCCL links (communicators) that a program needs.
        paused: returns a context manager, which is open while actors compile; no step counts as stuck during
            that time.
        on_progress: called with a line of text when the compilation of a program begins.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        requests: Requests,
        programs: LoadedPrograms,
        linking: LinkSetup,
        *,
        paused: Callable[[], AbstractContextManager[None]],
        on_progress: Callable[[str], None],
    ):
        self._actor_group, self._requests = actor_group, requests
        self._programs, self._linking = programs, linking
        self._paused, self._on_progress = paused, on_progress

    async def deploy(
        self, program: LoadableProgram, on_compiled: OnCompiled = lambda *_: None
    ) -> tuple[int, dict[ActorId, Loaded]]:
        """Load a program onto its actors, and return its new id and the reply of each actor's first process.

        A program whose loading fails or is cancelled is removed from the record of loaded programs.

        Args:
            program: the program.
            on_compiled: called whenever a process has compiled an executable.
        """
        program_id, parts = self._programs.add(program), program.parts
        counts: dict[ProcessId, CompileProgress] = {}

        def note(process: ProcessId, message: CompileProgress) -> None:
            if message.program_id == program_id:
                counts[process] = message
                each = counts.values()
                on_compiled(
                    sum(c.done for c in each), sum(c.total for c in each), sum(c.cached for c in each)
                )

        self._on_progress(f"compiling on {len(parts)} actor{'s' if len(parts) != 1 else ''}")
        processes = self._actor_group.processes
        try:
            for process in processes.processes_of_all(parts):
                self._actor_group.links[process].on_compiled = partial(note, process)
            with self._paused():
                loading = {
                    process: self._load(program_id, process) for process in processes.processes_of_all(parts)
                }
                loaded = await all_of(loading, "load")
                await self._linking.link(program_id)
        except BaseException:  # including cancellation: nobody will run the program
            self._programs.remove(program_id)
            raise
        self._programs.note_loaded(program_id)
        return program_id, {actor: loaded[processes.process(actor, 0)] for actor in sorted(parts)}

    async def _load(self, program_id: int, process: ProcessId) -> Loaded:
        known = self._actor_group.links[process].known_blobs
        actor = self._actor_group.processes.actor_of(process)
        message = self._programs.load_message(program_id, actor, known)
        try:
            return await self._requests.call(process, message)
        except (ActorError, MeshError):
            # Nobody knows which of these executables the actor has, so they will be sent again.
            known -= set(message.blobs)
            raise


# ---------------------------------------------------------------- linking


class MessageEnd(NamedTuple):
    """A message on an NCCL link, as the sender or the receiver describes it; both descriptions must be equal.

    Args:
        sequence: the sequence number of the message. The tag with which the transport sends the message
            contains it.
        tag: the tag of the `Send` and `Recv` instructions whose data the message carries, wholly or in part.
        aval: the aval of the whole array that is transferred.
    """

    sequence: int
    tag: Tag
    aval: Aval

    def __str__(self) -> str:
        return f"tag {self.tag}, {self.aval}"


def links_of(parts: Mapping[ActorId, ActorProgram], scattering: Scattering) -> list[NcclLink]:
    """Return the NCCL links that a program's transfers use, after checking that both ends of each link agree.

    Args:
        parts: the parts of all actors in the program.
        scattering: how arrays are split over the processes of one actor.

    Returns:
        The links, in ascending order.

    Raises:
        ProtocolError: two processes would transfer different messages, or the same ones in different orders.
            NCCL would not notice, since it has no tags and does not compare sizes.
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
    """Yield each NCCL message that one process sends, receives or relays, together with the link that carries
    the message.

    The messages are in the order of the program's instructions.

    Args:
        part: the part of the program that the process's actor runs.
        process_rank: the process, with its rank among the processes of its actor.
        scattering: how arrays are split over the processes of one actor.
    """
    num_devices = math.prod(size for _, size in scattering.axes)
    for instruction in part.instructions:
        if not isinstance(instruction, Send | Recv):
            continue
        tag, aval = instruction.tag, part.avals[instruction.buffer]
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
    """The maker of one mesh's NCCL links, the communicators for transfers from process to process.

    This object makes the links that programs need and remembers which of them exist in the present epoch of
    the mesh, since the abort before an epoch ends all links.

    Args:
        actor_group: the actors' processes.
        requests: sends the requests, and tells when no restart is under way.
        programs: the loaded programs, whose transfers determine the links.
    """

    def __init__(self, actor_group: ActorGroup, requests: Requests, programs: LoadedPrograms):
        self._actor_group, self._requests, self._programs = actor_group, requests, programs
        self._made: set[NcclLink] = set()
        self._epoch = 0
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None

    async def link(self, program_id: int) -> None:
        """Make the NCCL links that a program needs and that do not exist yet.

        If a restart is in progress, this waits until the restart has made the links. With a transport other
        than NCCL, this does nothing.

        Args:
            program_id: the program, which `LoadedPrograms` already has.

        Raises:
            ProtocolError: two processes would not transfer the same messages; see `links_of`.
            ActorError: a link could not be made, or the mesh failed.
        """
        if not kind_of(self._actor_group.transport_kind).ordered:
            return
        wanted = links_of(self._programs.parts(program_id), self._actor_group.scattering)
        while not self._has(wanted):
            await self._requests.wait_open()
            if self._task is None:
                self._task = self._tasks.start("make links", self._make(wanted), is_awaited=True)
                self._task.add_done_callback(self._on_ended)
            task = self._task
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    async def link_again(self) -> None:
        """Make the NCCL links (communicators) of all loaded programs again. A restart does this before it
        sends any earlier request again.

        Raises:
            ProtocolError: two processes would not transfer the same messages; see `links_of`.
            ActorError: a link could not be made, or the mesh failed.
        """
        if kind_of(self._actor_group.transport_kind).ordered:
            how = self._actor_group.scattering
            wanted = {link for parts in self._programs.all_parts() for link in links_of(parts, how)}
            await self._make(sorted(wanted))

    def cancel(self) -> None:
        """Stop making NCCL links, if that is in progress, so that no more requests are sent."""
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Stop making NCCL links, if that is in progress, and wait until it has stopped.

        `link` may be called again afterwards.
        """
        await self._tasks.aclose()

    def _on_ended(self, _: asyncio.Task[None]) -> None:
        self._task = None

    def _has(self, links: Sequence[NcclLink]) -> bool:
        if self._epoch != self._actor_group.epoch:
            self._epoch = self._actor_group.epoch
            self._made.clear()  # the abort before this epoch ended them
        return self._made.issuperset(links)

    async def _make(self, links: Sequence[NcclLink]) -> None:
        """Make the NCCL links that do not exist yet. First exchange the ids of all of them, then connect the
        links in rounds.

        In each round a process connects at most one of its links, and a round begins when the previous round
        has ended. Without rounds, a process might wait for a peer that first connects many other links, and
        give up because its time limit passes.

        Args:
            links: the links that are needed.
        """
        if self._has(links):
            return
        epoch, new = self._epoch, sorted(set(links) - self._made)
        ends = sorted({end for link in new for end in (link.sender, link.receiver)})
        makers = links_by_maker(new)
        offers: dict[ProcessId, LinksOffered] = await self._requests.call_each(
            {end: OfferLinks(len(makers.get(end, ()))) for end in ends}, "offer links"
        )
        ids = {
            link: unique_id
            for maker, made in makers.items()
            for link, unique_id in zip(made, offers[maker].ids, strict=True)
        }
        for made_at_once in rounds(new):
            joins = {
                end: JoinLinks(
                    {link.peer_of(end): offers[link.peer_of(end)].address}, (JoinLink(*link, ids[link]),)
                )
                for link in made_at_once
                for end in (link.sender, link.receiver)
            }
            await self._requests.call_each(joins, "join links")
            if self._actor_group.epoch != epoch:
                return
            self._made.update(made_at_once)


# ---------------------------------------------------------------- programs

ProcessesByActor: TypeAlias = tuple[tuple[ActorId, tuple[ProcessId, ...]], ...]
"""The actors that run a part of a program, in ascending order, each with its processes in order of rank."""


@dataclass(frozen=True, slots=True)
class LoadableProgram:
    """A program with all that is needed to load it onto its actors, and to load it again into a replaced one.

    Args:
        parts: the part of each actor that runs one.
        keys: for each actor a dictionary. Its keys are the indices of the executables that the actor's part
            uses; its values are the content keys of these executables.
        blobs: serialized executables by content key.
        names: the names of the step's arguments by argument number, for errors that actors report.
        modelled_s: how long a call of an executable lasts at least, in seconds, by the executable's index;
            empty unless the mesh has a device model.
    """

    parts: dict[ActorId, ActorProgram]
    keys: Mapping[ActorId, dict[int, str]] = field(default_factory=dict)
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    modelled_s: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        programs: Sequence[ActorProgram],
        executables: Sequence[Emitted],
        names: Mapping[int, str] = {},
        modelled_s: Mapping[int, float] = {},
    ) -> LoadableProgram:
        """Return what the compiler made for a step or a move, ready to be loaded.

        Args:
            programs: one program per actor; those without instructions are left out.
            executables: the executables that the programs run, by the index that their instructions use.
            names, modelled_s: see the class.
        """
        parts = {p.actor: p for p in programs if p.instructions}
        keys = {
            a: {r.executable: executables[r.executable].key for r in runs(p.instructions)}
            for a, p in parts.items()
        }
        return cls(parts, keys, {e.key: e.blob for e in executables}, names, modelled_s)


class LoadedPrograms:
    """A record of the programs that actors have loaded or are loading, by program id.

    Args:
        processes: the numbering of the mesh's processes.
        options: tells whether lost actors are replaced. If so, this object keeps everything that is needed to
            load a program again.
    """

    def __init__(self, processes: Topology, options: ControllerOptions) -> None:
        self._processes, self._for_successors = processes, options.restarts
        self._ids = itertools.count()
        self._programs: dict[int, LoadableProgram] = {}
        self._processes_by_actor: dict[int, ProcessesByActor] = {}

    def add(self, program: LoadableProgram) -> int:
        """Add a program whose actors are about to load their parts, and return a new id for it."""
        program_id = next(self._ids)
        self._programs[program_id] = program
        self._processes_by_actor[program_id] = tuple(
            (actor, tuple(self._processes.processes_of(actor))) for actor in sorted(program.parts)
        )
        return program_id

    def note_loaded(self, program_id: int) -> None:
        """Note that all actors have loaded a program.

        If lost actors are not replaced, this drops the program's executables, which are no longer needed.
        """
        if not self._for_successors:
            self._programs[program_id] = replace(self._programs[program_id], blobs={})

    def remove(self, program_id: int) -> None:
        """Remove a program that could not be loaded from this record."""
        self._programs.pop(program_id, None)
        self._processes_by_actor.pop(program_id, None)

    def programs_of(self, actor: ActorId) -> tuple[int, ...]:
        """Return the ids of all programs in which an actor takes part, in ascending order."""
        return tuple(i for i, program in self._programs.items() if actor in program.parts)

    def load_message(self, program_id: int, actor: ActorId, known: set[str]) -> Load:
        """Return the message that has a process load its actor's part of a program.

        Args:
            program_id: the program.
            actor: the actor that the process belongs to.
            known: content keys of the executables that the process has been sent before, which the message
                leaves out. The keys of the executables in this message are added to the set.
        """
        program = self._programs[program_id]
        keys = program.keys.get(actor, {})
        new = set(keys.values()) - known
        known |= new
        blobs = {key: program.blobs[key] for key in sorted(new)}
        modelled_s = {index: s for index, s in program.modelled_s.items() if index in keys}
        return Load(program_id, program.parts[actor], keys, blobs, dict(program.names), modelled_s)

    def processes_by_actor(self, program_id: int) -> ProcessesByActor:
        """Return the actors that run a part of a program, in ascending order, each with its processes."""
        return self._processes_by_actor[program_id]

    def parts(self, program_id: int) -> dict[ActorId, ActorProgram]:
        """Return each actor's part of a program, by actor; empty if the program is not known."""
        program = self._programs.get(program_id)
        return program.parts if program is not None else {}

    def all_parts(self) -> list[dict[ActorId, ActorProgram]]:
        """Return one dictionary per loaded program, in order of program id, with each actor's part."""
        return [program.parts for program in self._programs.values()]

    def part(self, program_id: int, actor: ActorId) -> ActorProgram | None:
        """Return an actor's part of a program, or None if the actor has no part in it or the program is not
        known.
        """
        return self.parts(program_id).get(actor)

    def instruction_at(self, actor: ActorId, at: Position) -> str | None:
        """Return the text of the instruction at an actor's position in a program.

        Args:
            actor: the actor.
            at: the position, which consists of a program id and an instruction index.

        Returns:
            The text, or None if the program is not known, if the actor has no part in it, or if the position
            is the program's end.
        """
        part = self.part(at.program_id, actor)
        if part is None or not 0 <= at.instruction < len(part.instructions):
            return None
        text = format_instruction(part, at.instruction)
        return f"{text} (waiting for data)" if at.waiting else text
