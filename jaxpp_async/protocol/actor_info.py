"""Number the processes of a mesh, describe its actors, and share how far each one has come in its program.

Processes have consecutive numbers, those of an actor one after the other; `process_of` and `actor_and_rank`
alone compute with these numbers. With one process an actor, process and actor have the same number. Whatever
runs, listens, sends heartbeats, dies or sends data is a process; whatever has a program is an actor.

An actor writes its progress to a page of memory that its launcher shares with it. It writes at every
instruction (under a microsecond, no message). Its own heartbeat thread reads the page, and so does the
process that started it when the actor has died and cannot be asked. The page has no file and no name, so that
nothing is left behind.
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
    """Describes an actor, or one of its processes, to users.

    Args:
        id: the actor's number.
        host, pid: where it runs; of an actor of several processes: those of the first one.
        devices: one text a device, such as `"cpu:0"`.
        state: `"starting"`, `"ready"`, `"failed"` or `"closed"`. While lost actors are replaced these are
            `"restarting"` and the others `"waiting"`.
        rank, size: of one of several processes: its number in its actor, and how many processes that has.
        processes: of an actor: each of its processes, in order of rank; of a process: none.
        gpus: the UUIDs of its GPUs, or of parts of one (MIG), as `nvidia-smi -L` lists them; empty without
            GPUs.
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
    """Describe an actor by its processes, given in order of rank. Its state is the worst of theirs."""
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
    """The type of a function that records how far an actor has come; see `Position`."""

    def __call__(
        self, step: int, program_id: int, instruction: int, waiting: bool, computing: bool = False, /
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a loaded program, in a step.

    Args:
        step: the id of the run.
        program_id: of the program.
        instruction: index of the instruction. The number of instructions stands for the end, where transfers
            may still be open.
        waiting: the data of the instruction had not come yet.
        computing: the devices execute the instruction. With neither, the instruction is done and the next has
            not begun.
    """

    step: int
    program_id: int
    instruction: int
    waiting: bool
    computing: bool = False


def furthest_behind(positions: Sequence[Position | None]) -> Position | None:
    """Find how far an actor has come: as far as the process that is furthest behind. The others may wait for
    that one, in a task that they compute together.

    Returns:
        The position; None if a process has reported none.
    """
    known = [position for position in positions if position is not None]
    if len(known) < len(positions) or not known:
        return None
    return min(known, key=lambda at: (at.step, at.instruction, at.computing))


def make_page() -> int:
    """Make a page of memory and return its descriptor, which a spawned process can inherit."""
    descriptor = os.memfd_create("jaxpp-progress", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor


class ProgressPage:
    """One end of a progress page.

    Args:
        descriptor: of the page; this object takes it over. None: a page of this process alone.
    """

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
        """Read where the actor was last; None before its first instruction and after `close`."""
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
    """Record no progress, for inline actors: they cannot die alone, so that nobody reads it."""


# ---------------------------------------------------------------- seats


def process_of(actor: ActorId, rank: int, size: int) -> ProcessId:
    """Give the process of this rank of an actor, where each actor has `size` of them."""
    return actor * size + rank


def actor_and_rank(process: ProcessId, size: int) -> tuple[ActorId, int]:
    """Give the actor of a process, and the process's number in it, counted from 0. The inverse of
    `process_of`.
    """
    return divmod(process, size)


@dataclass(frozen=True, slots=True)
class Topology:
    """Numbers the processes of one mesh.

    Args:
        num_actors: number of actors, at least 1.
        per_actor: number of processes of each actor, at least 1.
    """

    num_actors: int
    per_actor: int = 1

    @property
    def count(self) -> int:
        """The number of processes."""
        return self.num_actors * self.per_actor

    @property
    def everyone(self) -> range:
        """All processes, in order."""
        return range(self.count)

    def actor_of(self, process: ProcessId) -> ActorId:
        """Give the actor that a process belongs to."""
        return actor_and_rank(process, self.per_actor)[0]

    def rank_of(self, process: ProcessId) -> int:
        """Give a process's number in its actor, counted from 0."""
        return actor_and_rank(process, self.per_actor)[1]

    def process(self, actor: ActorId, rank: int) -> ProcessId:
        """Give the process of this rank of an actor."""
        return process_of(actor, rank, self.per_actor)

    def processes_of(self, actor: ActorId) -> range:
        """Give an actor's processes, in order of rank."""
        return range(self.process(actor, 0), self.process(actor + 1, 0))

    def group_of(self, process: ProcessId) -> range:
        """Give all processes of the actor that a process belongs to, the process itself among them."""
        return self.processes_of(self.actor_of(process))

    def peers_of(self, process: ProcessId) -> set[ProcessId]:
        """Give the processes with which a process exchanges data: those of its own actor, and those of its
        rank in the other actors.
        """
        return {*self.group_of(process), *range(self.rank_of(process), self.count, self.per_actor)} - {
            process
        }

    def processes_of_all(self, actors: Iterable[ActorId]) -> list[ProcessId]:
        """Give the processes of several actors, in order."""
        return [process for actor in sorted(actors) for process in self.processes_of(actor)]


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """The place of one process in its actor.

    Args:
        process: its number in the mesh.
        size: number of processes of its actor, the same for all actors of a mesh.
    """

    process: ProcessId
    size: int = 1

    @property
    def actor(self) -> ActorId:
        """The actor that the process belongs to."""
        return actor_and_rank(self.process, self.size)[0]

    @property
    def rank(self) -> int:
        """The process's number in its actor, counted from 0."""
        return actor_and_rank(self.process, self.size)[1]

    def __str__(self) -> str:
        """Name the process, such as `"actor 1"`, or `"actor 1 (process 1 of 2)"`, counted from 0."""
        return (
            f"actor {self.actor}"
            if self.size == 1
            else f"actor {self.actor} (process {self.rank} of {self.size})"
        )

    def process_of_rank(self, rank: int) -> ProcessId:
        """Give another process of the same actor."""
        return process_of(self.actor, rank, self.size)

    def counterpart_in(self, actor: ActorId) -> ProcessId:
        """Give the process of another actor with which this one exchanges what the two actors exchange: that
        of its own rank.
        """
        return process_of(actor, self.rank, self.size)
