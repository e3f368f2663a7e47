"""bound: actors' instruction streams and their measured task times in, the length of the critical path out. Pure.

The critical path is what the step would take if transfers and dispatch took nothing: each actor runs its `Run`s in
order, each as soon as its inputs are there, wherever they are made.
"""

from __future__ import annotations

import statistics
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from jaxpp_async.program import ActorId, ActorProgram, BufferId, Delete, ExecutableId, Instruction, Recv, Run, Send, Tag

Kind = tuple[ActorId, ExecutableId]
"""A task by where it runs and what it runs: the forward of a stage is one kind, whatever the microbatch."""


def run_seconds(program: ActorProgram, stamps: bytes) -> list[float]:
    """How long each `Run` of a program took in one step, in its order.

    Args:
        stamps: the actor's `StepStats.stamps`.
    """
    spans = struct.iter_unpack("<dd", stamps)
    pairs = zip(program.instructions, spans, strict=True)
    return [end - start for instruction, (start, end) in pairs if isinstance(instruction, Run)]


def task_times(programs: Sequence[ActorProgram], steps: Iterable[Sequence[Sequence[float]]]) -> dict[Kind, float]:
    """How long a task of each kind takes: its median over all microbatches and steps, in seconds.

    Args:
        programs: one an actor.
        steps: of each step and actor, the `run_seconds`.
    """
    kinds = [[(p.actor, i.executable) for i in p.instructions if isinstance(i, Run)] for p in programs]
    found: dict[Kind, list[float]] = defaultdict(list)
    for step in steps:
        for own, seconds in zip(kinds, step, strict=True):
            for kind, duration in zip(own, seconds, strict=True):
                found[kind].append(duration)
    return {kind: statistics.median(durations) for kind, durations in found.items()}


def busiest_s(programs: Sequence[ActorProgram], times: Mapping[Kind, float]) -> float:
    """The longest time that an actor computes in a step: no order of its tasks is faster."""
    return max(sum(times[p.actor, i.executable] for i in p.instructions if isinstance(i, Run)) for p in programs)


def critical_path_s(programs: Sequence[ActorProgram], times: Mapping[Kind, float], transfer_s: float = 0.0) -> float:
    """The end of the last task.

    Args:
        programs: one an actor; they do not deadlock.
        times: seconds by kind.
        transfer_s: what each transfer takes, beside all others.
    """
    walk = _Walk(times, transfer_s)
    heads = {p.actor: 0 for p in programs}
    moved = True
    while moved:
        moved = False
        for program in programs:
            start = heads[program.actor]
            heads[program.actor] = walk.advance(program, start)
            moved |= heads[program.actor] > start
    if any(heads[p.actor] < len(p.instructions) for p in programs):
        raise ValueError("these programs wait for each other for ever")
    return max(walk.now.values())


class _Walk:
    """All programs, run in thought: each actor's time, when its buffers were made and when each tag came."""

    def __init__(self, times: Mapping[Kind, float], transfer_s: float):
        self.times, self.transfer_s = times, transfer_s
        self.now: dict[ActorId, float] = defaultdict(float)
        self.made: dict[tuple[ActorId, BufferId], float] = {}
        self.coming: dict[tuple[ActorId, BufferId], Tag] = {}
        self.came: dict[Tag, float] = {}

    def advance(self, program: ActorProgram, start: int) -> int:
        """Run a program on from `start`; returns the first instruction that needs what nobody has made yet."""
        for index in range(start, len(program.instructions)):
            if not self._take(program.actor, program.instructions[index]):
                return index
        return len(program.instructions)

    def _take(self, actor: ActorId, instruction: Instruction) -> bool:
        if isinstance(instruction, Run):
            needs = [self._there(actor, b) for b in instruction.inputs]
            arrivals = [a for a in needs if a is not None]
            if len(arrivals) < len(needs):
                return False
            end = max([self.now[actor], *arrivals]) + self.times[actor, instruction.executable]
            self.now[actor] = end
            for buffer in instruction.outputs:
                self.made[actor, buffer] = end
                self.coming.pop((actor, buffer), None)  # a slot that a message filled before
        elif isinstance(instruction, Send):
            there = self._there(actor, instruction.buffer)
            if there is None:
                return False
            self.came[instruction.tag] = there + self.transfer_s
        elif isinstance(instruction, Recv):
            self.coming[actor, instruction.buffer] = instruction.tag
        elif isinstance(instruction, Delete):
            self.made.pop((actor, instruction.buffer), None)
            self.coming.pop((actor, instruction.buffer), None)
        return True

    def _there(self, actor: ActorId, buffer: BufferId) -> float | None:
        """When a buffer's value is there; None: not yet known. Arguments of the step always were."""
        if (actor, buffer) in self.coming:
            return self.came.get(self.coming[actor, buffer])
        return self.made.get((actor, buffer), 0.0)
