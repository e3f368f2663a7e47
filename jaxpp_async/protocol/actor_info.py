"""Assign numbers to the processes of a mesh, describe the mesh's actors and how their processes end, and
share how far each actor has come in its program.

An actor is one process or a group of several processes. The processes of a mesh have consecutive numbers, and
the numbers of one actor's processes follow each other; only `process_of` and `actor_and_rank` compute with
these numbers. If every actor has one process, a process has the same number as its actor. Programs are
compiled for actors; connections, heartbeats and failures concern processes.

Each actor process shares a page of memory with the process that started it, and writes its progress to the
page at every instruction (this takes under a microsecond and sends no message). The actor process's heartbeat
thread reads the page. The process that started the actor process also reads the page, if the actor process
has died and cannot be asked. The page is anonymous memory without a file or a name, so nothing has to be
removed afterwards.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

from jaxpp_async.program.instructions import ActorId, ProcessId

ActorState: TypeAlias = Literal["failed", "restarting", "starting", "waiting", "closed", "ready"]
"""The states of an actor, the worst first."""

ACTOR_STATES: tuple[ActorState, ...] = get_args(ActorState)


class Activity(NamedTuple):
    """The present work of an actor.

    Args:
        text: a description, for people.
        is_waiting: whether it waits for data of other actors.
    """

    text: str
    is_waiting: bool = False


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """A description, for users, of an actor or of one of its processes.

    Args:
        id: the actor's number.
        host, pid: the host and the process id; for an actor of several processes, the host and the process id
            of the first process.
        devices: one text per device, such as `"cpu:0"`.
        state: `"starting"`, `"ready"`, `"failed"` or `"closed"`. While lost actors are being replaced, the
            lost ones are `"restarting"` and all others `"waiting"`.
        rank, size: in the description of a process whose actor has several processes: the process's number in
            the actor, and the number of the actor's processes. Otherwise 0 and 1.
        processes: for an actor, the descriptions of its processes in order of rank; empty for a process.
        gpus: the UUIDs of the GPUs, or of parts of one (MIG), as `nvidia-smi -L` lists them; empty without
            GPUs.
    """

    id: int
    host: str
    pid: int
    devices: tuple[str, ...]
    state: ActorState
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
        if len(self.processes) < 2:  # an actor's only process is described by the actor itself
            return f"<{self}: {self.state}{devices}>"
        processes = ", ".join(f"host {p.host} pid {p.pid} {p.state}" for p in self.processes)
        return f"<actor {self.id}: {self.state}{devices}; {len(self.processes)} processes: {processes}>"


def merge_processes(processes: Sequence[ActorInfo]) -> ActorInfo:
    """Combine the descriptions of an actor's processes into one description of the actor. The actor's state
    is the worst of the processes' states, and its devices are those of all processes.

    Args:
        processes: the descriptions of the actor's processes, in order of rank.
    """
    first = processes[0]
    if len(processes) == 1:
        return replace(first, processes=(first,))
    states: list[ActorState] = [process.state for process in processes]
    state = min(states, key=ACTOR_STATES.index)
    devices = tuple(device for p in processes for device in p.devices)
    gpus = tuple(gpu for p in processes for gpu in p.gpus)
    return ActorInfo(first.id, first.host, first.pid, devices, state, processes=tuple(processes), gpus=gpus)


class ExitCode(enum.IntEnum):
    """The exit codes with which an actor process ends itself. `ActorDiedError` tells the user the
    meaning of each code that stands for a failure.

    `HOST_LOST` stands for an exit code that is not known, because the connection to the actor's host ended.
    """

    OK = 0
    CRASH = 1
    CONFIG = 80
    CONTROLLER_GONE = 81
    LEASE_EXPIRED = 82
    REFUSED = 83
    CONNECTION_LOST = 84
    HOST_LOST = 85


# ---------------------------------------------------------------- progress

_LAYOUT = struct.Struct("<?qqq??")


class NoteProgress(Protocol):
    """The type of a function that records how far an actor has come in its program. The function's arguments
    are the fields of `Position`.
    """

    def __call__(
        self, step: int, program_id: int, instruction: int, waiting: bool, computing: bool = False, /
    ) -> None: ...


class Position(NamedTuple):
    """An actor's position in a loaded program, during one run of it, which travels as an array.

    Args:
        step: the id of the run (a `messages.StepId`).
        program_id: the id of the program.
        instruction: the index of the current instruction. After the last instruction this is the number of
            instructions; transfers may still be open then.
        waiting: whether data that the instruction needs has not arrived yet.
        computing: whether the devices execute the instruction. If neither `waiting` nor `computing` is true,
            the instruction has ended and the next one has not begun.
    """

    step: int
    program_id: int
    instruction: int
    waiting: bool
    computing: bool = False


def furthest_behind(positions: Sequence[Position | None]) -> Position | None:
    """Compare the positions of an actor's processes, and return the position that is furthest behind, which
    is used as the position of the whole actor. The other processes may be waiting for the slowest process, in
    a task that all of them compute together.

    Args:
        positions: the position of each process of the actor; None for a process that has reported none.

    Returns:
        The position; None if any process has reported none.
    """
    known = [position for position in positions if position is not None]
    if len(known) < len(positions) or not known:
        return None
    return min(known, key=lambda at: (at.step, at.instruction, at.computing))


def make_page() -> int:
    """Create a page of shared memory for the progress of an actor process, and return the page's file
    descriptor, which a process that is started with it can inherit.
    """
    descriptor = os.memfd_create("jaxpp-progress", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor


class ProgressPage:
    """A page of shared memory to which an actor process writes its position, and which the process that
    started it reads. Each of the two processes makes its own `ProgressPage` object.

    Args:
        descriptor: the page's file descriptor, which this object closes; None for a page that only this
            process uses.
    """

    def __init__(self, descriptor: int | None):
        self._page = mmap.mmap(-1 if descriptor is None else descriptor, mmap.PAGESIZE)
        if descriptor is not None:
            os.close(descriptor)

    def note(
        self, step: int, program_id: int, instruction: int, waiting: bool, computing: bool = False, /
    ) -> None:
        """Write the actor's position to the page; the arguments are the fields of `Position`."""
        _LAYOUT.pack_into(self._page, 0, True, step, program_id, instruction, waiting, computing)

    def read(self) -> Position | None:
        """Return the position that the actor wrote last; None before the actor's first instruction, and after
        `close`.
        """
        if self._page.closed:
            return None
        written, *position = _LAYOUT.unpack_from(self._page)
        return Position(*position) if written else None

    def close(self) -> None:
        """Release the page's memory. A second call does nothing."""
        self._page.close()


def ignore_progress(
    step: int, program_id: int, instruction: int, waiting: bool, computing: bool = False, /
) -> None:
    """Ignore an actor's position. This is the `NoteProgress` of inline actors, which run inside the
    controller's process: such an actor cannot die while the controller lives on, so no other process has to
    read its position.
    """


# ---------------------------------------------------------------- process numbers


def process_of(actor: ActorId, rank: int, size: int) -> ProcessId:
    """Return the number, in the mesh, of an actor's process with the given rank. Each actor of the mesh has
    `size` processes.
    """
    return actor * size + rank


def actor_and_rank(process: ProcessId, size: int) -> tuple[ActorId, int]:
    """Return the actor that a process belongs to, and the process's rank in that actor, counted from 0. Each
    actor of the mesh has `size` processes. This is the inverse of `process_of`.
    """
    return divmod(process, size)


@dataclass(frozen=True, slots=True)
class Topology:
    """The numbering of the processes of one mesh, which converts between processes, actors and ranks.

    Args:
        num_actors: the number of actors, at least 1.
        per_actor: the number of processes of each actor, at least 1.
    """

    num_actors: int
    per_actor: int = 1

    @property
    def count(self) -> int:
        """The number of processes of the mesh."""
        return self.num_actors * self.per_actor

    @property
    def everyone(self) -> range:
        """The numbers of all processes of the mesh, in order."""
        return range(self.count)

    def actor_of(self, process: ProcessId) -> ActorId:
        """Return the actor that a process belongs to."""
        return actor_and_rank(process, self.per_actor)[0]

    def rank_of(self, process: ProcessId) -> int:
        """Return a process's rank, which is its number in its actor, counted from 0."""
        return actor_and_rank(process, self.per_actor)[1]

    def process(self, actor: ActorId, rank: int) -> ProcessId:
        """Return the number of the process that has the given rank in an actor."""
        return process_of(actor, rank, self.per_actor)

    def processes_of(self, actor: ActorId) -> range:
        """Return the numbers of an actor's processes, in order of rank."""
        return range(self.process(actor, 0), self.process(actor + 1, 0))

    def peers_of(self, process: ProcessId) -> set[ProcessId]:
        """Return the processes with which a process exchanges data: the others of its own actor, and those of
        the same rank in the other actors.
        """
        own = self.processes_of(self.actor_of(process))
        return {*own, *range(self.rank_of(process), self.count, self.per_actor)} - {process}

    def processes_of_all(self, actors: Iterable[ActorId]) -> list[ProcessId]:
        """Return the processes of several actors, in ascending order."""
        return [process for actor in sorted(actors) for process in self.processes_of(actor)]


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """A process's place in its actor, computed from the process's number in the mesh.

    Args:
        process: the process's number in the mesh.
        size: the number of processes of each actor, the same for all actors of a mesh.
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
        """Return a name of the process for messages to users: `"actor 1"` if each actor has one process,
        otherwise for example `"actor 1 (process 1 of 2)"`. Both numbers are counted from 0.
        """
        return (
            f"actor {self.actor}"
            if self.size == 1
            else f"actor {self.actor} (process {self.rank} of {self.size})"
        )

    def process_of_rank(self, rank: int) -> ProcessId:
        """Return the number of the process of the same actor that has the given rank."""
        return process_of(self.actor, rank, self.size)

    def counterpart_in(self, actor: ActorId) -> ProcessId:
        """Return the process of another actor that has the same rank as this process. When the two actors
        exchange arrays, these two processes exchange data.
        """
        return process_of(actor, self.rank, self.size)
