"""seats: how many actors a mesh has and of how many processes each in; which process is whose out. Plain numbers.

Processes are numbered flat, an actor's one after the other: `process_of` and `place_of` count, nobody else does. With
one process an actor the two numbers are the same. Whatever runs, listens, beats, dies or sends is a process; whatever
has a program is an actor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpp_async.program import ActorId, ProcessId


def process_of(actor: ActorId, rank: int, size: int) -> ProcessId:
    """The process of this rank of an actor, where each actor has `size` of them."""
    return actor * size + rank


def place_of(process: ProcessId, size: int) -> tuple[ActorId, int]:
    """The other way round: which actor's, and which of its processes, counted from 0."""
    return divmod(process, size)


@dataclass(frozen=True, slots=True)
class Processes:
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
        return place_of(process, self.per_actor)[0]

    def rank_of(self, process: ProcessId) -> int:
        """Which of its actor's processes it is, counted from 0."""
        return place_of(process, self.per_actor)[1]

    def process(self, actor: ActorId, rank: int) -> ProcessId:
        """The process of this rank of an actor."""
        return process_of(actor, rank, self.per_actor)

    def of(self, actor: ActorId) -> range:
        """An actor's processes, in order of rank."""
        return range(self.process(actor, 0), self.process(actor + 1, 0))

    def mates_of(self, process: ProcessId) -> range:
        """All processes of the actor that a process belongs to, itself among them."""
        return self.of(self.actor_of(process))

    def peers_of(self, process: ProcessId) -> set[ProcessId]:
        """The processes with which it exchanges data: its mates, and those of its rank in other actors."""
        return {*self.mates_of(process), *range(self.rank_of(process), self.count, self.per_actor)} - {process}

    def of_all(self, actors: Iterable[ActorId]) -> list[ProcessId]:
        """The processes of several actors, in order."""
        return [process for actor in sorted(actors) for process in self.of(actor)]


@dataclass(frozen=True, slots=True)
class Seat:
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
        return place_of(self.process, self.size)[0]

    @property
    def rank(self) -> int:
        """Which of its actor's processes it is, counted from 0."""
        return place_of(self.process, self.size)[1]

    def __str__(self) -> str:
        """Such as `"actor 1"`, or `"actor 1 (process 1 of 2)"`, counted from 0."""
        return f"actor {self.actor}" if self.size == 1 else f"actor {self.actor} (process {self.rank} of {self.size})"

    def mate(self, rank: int) -> ProcessId:
        """Another process of its actor."""
        return process_of(self.actor, rank, self.size)

    def partner(self, actor: ActorId) -> ProcessId:
        """The process of another actor with which it exchanges what the two actors exchange: that of its own rank."""
        return process_of(actor, self.rank, self.size)
