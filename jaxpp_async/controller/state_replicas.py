"""Decide when replicas of the state are made, which one is whole, and where its parts lie.

A replica of the state is a copy of all actors' arrays in host memory, to which all actors return in a
restart, and has one part per process. The process keeps its part, and sends it to a process of another actor
(the holder), which keeps it too. A replica is whole when each part lies in both places and all requests from
before the replica have been answered. Only then are the replica before it and the requests from before the
new one forgotten. The code is pure: it sends nothing and waits for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from jaxpp_async.controller.request_history import RequestHistory
from jaxpp_async.program.instructions import CONTROLLER, ActorId, ProcessId
from jaxpp_async.protocol.actor_info import Topology
from jaxpp_async.protocol.messages import ReplicaArray

MAX_REMEMBERED_BYTES = 1 << 30
"""The bytes of host data in remembered requests above which a replica is made before it is due."""


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class CopyState:
    """A command to have a process copy its arrays to its host memory, as they are after all requests so far.

    Its result is a `StateCopy`.

    Args:
        process: the process.
        generation: the number of the replica; each replica has the next number.
    """

    process: ProcessId
    generation: int


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The result of `CopyState`: a description of the arrays that a process has copied.

    Args:
        arrays: the id, aval and shard sizes of each array, in the order in which the arrays are sent.
        host: the host of the process.
    """

    arrays: tuple[ReplicaArray, ...]
    host: str


@dataclass(frozen=True, slots=True)
class MovePart:
    """A command to send one part of a replica from process to process.

    Args:
        generation: the number of the replica.
        owner: the process whose arrays the part contains.
        source, to: the process that sends the part and the process that receives and keeps it; one of them
            may be the controller.
        arrays: the arrays of the part.
        total_bytes: the size of all parts that are moved at the same time, which share the links.
    """

    generation: int
    owner: ProcessId
    source: ProcessId
    to: ProcessId
    arrays: tuple[ReplicaArray, ...]
    total_bytes: int


@dataclass(frozen=True, slots=True)
class AwaitAnswers:
    """A command to wait until all requests from before a mark are answered.

    Args:
        mark: a number from `RequestHistory.new_mark`.
    """

    mark: int


@dataclass(frozen=True, slots=True)
class DropOthers:
    """A command to have all processes and the controller delete all parts of replicas but those of one
    generation. Nothing depends on its end.

    Args:
        generation: the number of the replica whose parts are kept.
    """

    generation: int


ReplicaCommand = CopyState | MovePart | AwaitAnswers | DropOthers


# ---------------------------------------------------------------- replicas


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica of the state: a copy of all actors' arrays, and where its parts lie.

    Args:
        generation: the number of the replica.
        parts: the arrays of each process, by process.
        holders: for each process, the other process that keeps its part.
        hosts: the host of each process, when the replica was made.
    """

    generation: int
    parts: Mapping[ProcessId, tuple[ReplicaArray, ...]]
    holders: Mapping[ProcessId, ProcessId]
    hosts: Mapping[ProcessId, str]

    @property
    def size_bytes(self) -> int:
        """The size of all parts in bytes."""
        return sum(map(size_of, self.parts.values()))

    def moves(self, routes: Mapping[ProcessId, tuple[ProcessId, ProcessId]]) -> list[MovePart]:
        """Return the commands that move parts of this replica at the same time.

        Args:
            routes: for each process whose part is to be moved, the process that sends it and the process that
                receives it.
        """
        total_bytes = sum(size_of(self.parts[owner]) for owner in routes)
        return [
            MovePart(self.generation, owner, source, to, self.parts[owner], total_bytes)
            for owner, (source, to) in routes.items()
        ]


def size_of(arrays: Collection[ReplicaArray]) -> int:
    """Return the size in bytes of one part of a replica, which consists of these arrays."""
    return sum(shard for array in arrays for shard in array.shard_bytes)


@dataclass(frozen=True, slots=True)
class LostTogether:
    """Two actors whose common loss means that one part of the whole replica is lost.

    Args:
        owner: the actor whose arrays the part contains.
        holder: the actor that kept the second copy.
        host: the host of the owner's process.
    """

    owner: ActorId
    holder: ActorId
    host: str


class Stage(Enum):
    """The stages in the making of a replica. Each value says what the replica waits for."""

    IDLE = "no replica is being made"
    COPYING = "the processes copy their arrays"
    STORING = "the parts are sent to their holders"
    SETTLING = "requests from before the replica have no answer yet"


@dataclass(slots=True)
class _Making:
    """A replica that is being made.

    Args:
        generation: the number of the replica.
        mark: the place of the replica in the order of requests.
        copies: what each process has copied so far, by process.
        open: the commands that have not been carried out.
        replica: the replica, once all processes have copied their arrays.
    """

    generation: int
    mark: int
    copies: dict[ProcessId, StateCopy] = field(default_factory=dict)
    open: set[ReplicaCommand] = field(default_factory=set)
    replica: Replica | None = None


class StateReplicas:
    """The replicas of one mesh: the whole one, and the one that is being made.

    Args:
        topology: the numbering of the mesh's processes.
        history: the requests, which are forgotten when a replica that contains their effects is whole.
        every: the number of steps from one replica to the next.

    Attributes:
        whole: the last whole replica, or None.
        stage: what the replica that is being made waits for.
    """

    def __init__(self, topology: Topology, history: RequestHistory, every: int):
        self._topology, self._history, self._every = topology, history, every
        # The first replica is made after one step, since until then all host values are remembered.
        self._steps_since = every - 1
        self._generations = itertools.count()
        self.whole: Replica | None = None
        self.stage = Stage.IDLE
        self._making: _Making | None = None

    def count_step(self) -> None:
        """Count a step that has been sent."""
        self._steps_since += 1

    @property
    def is_due(self) -> bool:
        """Whether enough steps or bytes were sent since the last replica."""
        return self._steps_since >= self._every or self._history.size_bytes > MAX_REMEMBERED_BYTES

    def begin(self) -> list[ReplicaCommand]:
        """Begin to make a replica, which contains the effects of all requests made so far.

        Returns:
            The commands; none if a replica is being made already, or if a request has an effect that no
            replica contains.
        """
        if self.stage is not Stage.IDLE or self._history.blocks_replicas:
            return []
        self._steps_since = 0
        self._making = _Making(next(self._generations), self._history.new_mark())
        return self._enter(Stage.COPYING, self._making)

    def cancel(self) -> None:
        """Give up the replica that is being made, if any. The whole one stays."""
        self.stage, self._making = Stage.IDLE, None

    def waits_for(self, command: object) -> bool:
        """Return whether the replica that is being made waits for the outcome of a command."""
        return self._making is not None and command in self._making.open

    def carried_out(self, command: ReplicaCommand, result: object) -> list[ReplicaCommand]:
        """Take note that a command for which `waits_for` is true was carried out.

        Args:
            command: the command.
            result: its result: a `StateCopy` for `CopyState`.

        Returns:
            The commands that follow.
        """
        making = self._making
        assert making is not None
        making.open.remove(command)
        if isinstance(command, CopyState) and isinstance(result, StateCopy):
            making.copies[command.process] = result
        return [] if making.open else self._enter(_COURSE[self.stage].then, making)

    def _enter(self, stage: Stage, making: _Making) -> list[ReplicaCommand]:
        self.stage = stage
        commands = list(_COURSE[stage].commands(self, making))
        making.open = {command for command in commands if not isinstance(command, DropOthers)}
        return commands

    def _store(self, making: _Making) -> list[ReplicaCommand]:
        parts = {process: making.copies[process].arrays for process in sorted(making.copies)}
        hosts = {process: making.copies[process].host for process in parts}
        holders = self._choose_holders(hosts)
        making.replica = Replica(making.generation, parts, holders, hosts)
        return [*making.replica.moves({owner: (owner, holder) for owner, holder in holders.items()})]

    def _finish(self, making: _Making) -> list[ReplicaCommand]:
        assert making.replica is not None
        self.whole, self._making = making.replica, None
        self._history.forget_before(making.mark)
        return [DropOthers(making.generation)]

    def _choose_holders(self, hosts: Mapping[ProcessId, str]) -> dict[ProcessId, ProcessId]:
        """Return, for each process, the process that keeps the second copy of its arrays.

        This is the process of the same rank in another actor, or the controller if there is only one actor.

        Args:
            hosts: the host of each process.
        """
        topology, actors = self._topology, range(self._topology.num_actors)
        if topology.num_actors == 1:
            return dict.fromkeys(sorted(hosts), CONTROLLER)
        of_actor = choose_holders([[hosts[p] for p in topology.processes_of(actor)] for actor in actors])
        return {
            process: topology.process(of_actor[topology.actor_of(process)], topology.rank_of(process))
            for process in sorted(hosts)
        }

    # ------------------------------------------------------------ going back

    def lost_together(self, lost: Collection[ActorId]) -> LostTogether | None:
        """Return an actor that was lost together with the actor that keeps its part of the whole replica;
        None if no part is lost.

        Args:
            lost: the actors that are lost.
        """
        topology, whole = self._topology, self.whole
        if whole is None:
            return None
        for process in topology.processes_of_all(lost):
            holder = whole.holders[process]
            if holder != CONTROLLER and topology.actor_of(holder) in lost:
                owner, holding = topology.actor_of(process), topology.actor_of(holder)
                return LostTogether(owner, holding, whole.hosts[process])
        return None

    def restore(self, lost: Collection[ActorId]) -> list[ReplicaCommand]:
        """Return the commands that give the successors of lost actors their own parts of the whole replica.

        Args:
            lost: the actors that have been replaced, whose processes have neither arrays nor replicas.
        """
        if self.whole is None:
            return []
        own = {p: (self.whole.holders[p], p) for p in self._topology.processes_of_all(lost)}
        return [DropOthers(self.whole.generation), *self.whole.moves(own)]

    def hand_over(self, lost: Collection[ActorId]) -> list[ReplicaCommand]:
        """Return the commands that give the successors of lost actors the parts that these kept for others.

        Until that is done, the loss of one more actor could lose its state. The commands come after
        `restore`, since no two parts may travel from one process to another at the same time: their transfers
        have equal tags.

        Args:
            lost: the actors that have been replaced.
        """
        if self.whole is None:
            return []
        gone = set(self._topology.processes_of_all(lost))
        return [*self.whole.moves({p: (p, to) for p, to in self.whole.holders.items() if to in gone})]


def choose_holders(hosts: Sequence[Sequence[str]]) -> dict[int, int]:
    """Choose for each actor another actor that keeps the copy of its arrays for restarts.

    Each copy is kept by the actor whose id is a fixed number higher, modulo the number of actors, so each
    actor keeps one copy. The number is chosen so that as few copies as possible are on the same host as the
    original, since a host may be lost as a whole.

    Args:
        hosts: for each actor, in order of id, the host of each of the actor's processes, in order of rank.
            There must be at least two actors.

    Returns:
        A dictionary. Its keys are the ids of all actors; its values are the ids of the actors that keep the
        copies.
    """
    count = len(hosts)

    def count_pairs_on_one_host(shift: int) -> int:
        shifted = zip(hosts, [*hosts[shift:], *hosts[:shift]], strict=True)
        return sum(one == other for pair in shifted for one, other in zip(*pair, strict=True))

    shift = min(range(1, count), key=count_pairs_on_one_host)
    return {k: (k + shift) % count for k in range(count)}


# ---------------------------------------------------------------- the course of a replica


@dataclass(frozen=True, slots=True)
class CourseRow:
    """A row of the course of a replica or of a restart: one state, such as a `Stage`.

    Args:
        commands: returns the commands with which the state begins. For a stage of a replica this is called
            with the `StateReplicas` and the replica that is being made, for a state of a restart with the
            `Recovery`.
        then: the state that follows when all of these commands that are awaited were carried out; None if
            the course is over.
    """

    commands: Callable[..., Sequence[Any]]
    then: Any = None


_COURSE: Final = {
    # stage, the commands at its begin, and the stage when they are carried out
    Stage.COPYING: CourseRow(
        lambda self, making: [CopyState(process, making.generation) for process in self._topology.everyone],
        Stage.STORING,
    ),
    Stage.STORING: CourseRow(StateReplicas._store, Stage.SETTLING),
    Stage.SETTLING: CourseRow(lambda self, making: [AwaitAnswers(making.mark)], Stage.IDLE),
    Stage.IDLE: CourseRow(StateReplicas._finish),
}
