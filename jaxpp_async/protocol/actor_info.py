"""actor_info: where an actor, or one of its processes, is and how it does. Plain data.

progress: where an actor is in its program, in a page of memory that its launcher shares with it.

The actor writes at every instruction (under a microsecond, no message). Its own heartbeat thread reads, and so does
whoever started it when it has died and nobody is left to ask. No file, no name: nothing stays behind.

seats: how many actors a mesh has and of how many processes each in; which process is whose out. Plain numbers.

Processes are numbered flat, an actor's one after the other: `process_of` and `actor_and_rank` count, nobody else does. With
one process an actor the two numbers are the same. Whatever runs, listens, beats, dies or sends is a process; whatever
has a program is an actor.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jaxpp_async.program.instructions import ActorId, ProcessId

_WORST_FIRST = ("failed", "restarting", "starting", "waiting", "closed", "ready")


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Where an actor, or one of its processes, is.

    Args:
        host, pid: of an actor of several processes: those of the first.
        state: `"starting"`, `"ready"`, `"failed"` or `"closed"`; while lost actors are replaced these are
            `"restarting"` and the others `"waiting"`.
        devices: one text a device, such as `"cpu:0"`.
        rank, size: of one of several processes: which, and of how many.
        processes: of an actor: each of its processes, in order of rank; of a process: none.
        gpus: the UUIDs of its GPUs, or of parts of one (MIG), as `nvidia-smi -L` lists them; empty without GPUs.
    """

    id: int
    host: str
    pid: int
    devices: tuple[str, ...]
    state: str
    rank: int = 0
    size: int = 1
    processes: tuple[ActorInfo, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def process(self) -> ProcessId:
        """The process's number in the mesh."""
        return process_of(self.id, self.rank, self.size)

    def __str__(self) -> str:
        if self.size == 1:
            return f"actor {self.id} (host {self.host}, pid {self.pid})"
        return f"actor {self.id} (process {self.rank} of {self.size}: host {self.host}, pid {self.pid})"

    def __repr__(self) -> str:
        devices = "".join(f" {device}" for device in self.devices)
        if len(self.processes) < 2:  # an actor of one process has itself as that
            return f"<{self}: {self.state}{devices}>"
        processes = ", ".join(f"host {p.host} pid {p.pid} {p.state}" for p in self.processes)
        return f"<actor {self.id}: {self.state}{devices}; {len(self.processes)} processes: {processes}>"


def merge_processes(processes: Sequence[ActorInfo]) -> ActorInfo:
    """What is known of an actor, from what is known of its processes, in order of rank."""
    first = processes[0]
    if len(processes) == 1:
        return replace(first, processes=(first,))
    state = min((p.state for p in processes), key=_WORST_FIRST.index)
    devices = tuple(device for p in processes for device in p.devices)
    gpus = tuple(gpu for p in processes for gpu in p.gpus)
    return ActorInfo(first.id, first.host, first.pid, devices, state, processes=tuple(processes), gpus=gpus)


# ---------------------------------------------------------------- progress

_LAYOUT = struct.Struct("<?qqq??")


class NoteProgress(Protocol):
    """Told where an actor is; see `Position`."""

    def __call__(
        self, step: int, program_id: int, instruction: int, waiting: bool, computing: bool = False, /
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Position:
    """An instruction of a loaded program, in a step.

    Args:
        instruction: its index; the number of instructions stands for the end, where transfers may still be open.
        waiting: its data had not come yet.
        computing: the devices are at it. Neither: it is done, and the next thing has not begun.
    """

    step: int
    program_id: int
    instruction: int
    waiting: bool
    computing: bool = False


def furthest_behind(positions: Sequence[Position | None]) -> Position | None:
    """Where an actor is, by where its processes are: the one that is furthest behind. Those before it may only wait for
    it, in a task that they compute together. None if one has told nothing."""
    known = [position for position in positions if position is not None]
    if len(known) < len(positions) or not known:
        return None
    return min(known, key=lambda at: (at.step, at.instruction, at.computing))


def make_page() -> int:
    """A descriptor of a new page, inheritable by a spawned process that is handed it."""
    descriptor = os.memfd_create("jaxpp-progress", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor


class ProgressPage:
    """One end of the page. Takes over `descriptor`; None: a page that nobody else sees."""

    def __init__(self, descriptor: int | None):
        self._page = mmap.mmap(-1 if descriptor is None else descriptor, mmap.PAGESIZE)
        if descriptor is not None:
            os.close(descriptor)

    def note(
        self, step: int, program_id: int, instruction: int, waiting: bool, computing: bool = False, /
    ) -> None:
        """Write down where the actor is."""
        _LAYOUT.pack_into(self._page, 0, True, step, program_id, instruction, waiting, computing)

    def read(self) -> Position | None:
        """Where it was last; None before its first instruction, and once closed."""
        if self._page.closed:
            return None
        written, *position = _LAYOUT.unpack_from(self._page)
        return Position(*position) if written else None

    def close(self) -> None:
        """Give the page back. A second call does nothing."""
        self._page.close()


def no_progress(
    step: int, program_id: int, instruction: int, waiting: bool, computing: bool = False, /
) -> None:
    """For actors that nobody reads: inline ones cannot die alone."""


# ---------------------------------------------------------------- seats


def process_of(actor: ActorId, rank: int, size: int) -> ProcessId:
    """The process of this rank of an actor, where each actor has `size` of them."""
    return actor * size + rank


def actor_and_rank(process: ProcessId, size: int) -> tuple[ActorId, int]:
    """The other way round: which actor's, and which of its processes, counted from 0."""
    return divmod(process, size)


@dataclass(frozen=True, slots=True)
class Topology:
    """The processes of one mesh.

    Args:
        num_actors: how many actors, at least 1.
        per_actor: of how many processes each, at least 1.
    """

    num_actors: int
    per_actor: int = 1

    @property
    def count(self) -> int:
        """How many there are in all."""
        return self.num_actors * self.per_actor

    @property
    def everyone(self) -> range:
        """All of them, in order."""
        return range(self.count)

    def actor_of(self, process: ProcessId) -> ActorId:
        """The actor that a process belongs to."""
        return actor_and_rank(process, self.per_actor)[0]

    def rank_of(self, process: ProcessId) -> int:
        """Which of its actor's processes it is, counted from 0."""
        return actor_and_rank(process, self.per_actor)[1]

    def process(self, actor: ActorId, rank: int) -> ProcessId:
        """The process of this rank of an actor."""
        return process_of(actor, rank, self.per_actor)

    def processes_of(self, actor: ActorId) -> range:
        """An actor's processes, in order of rank."""
        return range(self.process(actor, 0), self.process(actor + 1, 0))

    def group_of(self, process: ProcessId) -> range:
        """All processes of the actor that a process belongs to, itself among them."""
        return self.processes_of(self.actor_of(process))

    def peers_of(self, process: ProcessId) -> set[ProcessId]:
        """The processes with which it exchanges data: its mates, and those of its rank in other actors."""
        return {*self.group_of(process), *range(self.rank_of(process), self.count, self.per_actor)} - {
            process
        }

    def processes_of_all(self, actors: Iterable[ActorId]) -> list[ProcessId]:
        """The processes of several actors, in order."""
        return [process for actor in sorted(actors) for process in self.processes_of(actor)]


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """One process's place in its actor.

    Args:
        process: its number in the mesh.
        size: how many processes its actor has, as all of the mesh do.
    """

    process: ProcessId
    size: int = 1

    @property
    def actor(self) -> ActorId:
        """The actor that it belongs to."""
        return actor_and_rank(self.process, self.size)[0]

    @property
    def rank(self) -> int:
        """Which of its actor's processes it is, counted from 0."""
        return actor_and_rank(self.process, self.size)[1]

    def __str__(self) -> str:
        """Such as `"actor 1"`, or `"actor 1 (process 1 of 2)"`, counted from 0."""
        return (
            f"actor {self.actor}"
            if self.size == 1
            else f"actor {self.actor} (process {self.rank} of {self.size})"
        )

    def process_of_rank(self, rank: int) -> ProcessId:
        """Another process of its actor."""
        return process_of(self.actor, rank, self.size)

    def counterpart_in(self, actor: ActorId) -> ProcessId:
        """The process of another actor with which it exchanges what the two actors exchange: that of its own rank."""
        return process_of(actor, self.rank, self.size)
