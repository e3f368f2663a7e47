"""bound: actors' instruction streams and their measured task times in, the length of the critical path out.
Pure.

The critical path is what the step would take if transfers and dispatch took nothing: each actor runs its
`Run`s in order, each as soon as its inputs are there, wherever they are made.
"""

from __future__ import annotations

import statistics
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import ActorId, ExecutableId, Recv, Run
from jaxpp_async.timeline import breakdown
from jaxpp_async.timeline.events import ActorTimeline, pair_transfers, read_events

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


def task_times(
    programs: Sequence[ActorProgram], steps: Iterable[Sequence[Sequence[float]]]
) -> dict[Kind, float]:
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


def usual_seconds(programs: Sequence[ActorProgram], times: Mapping[Kind, float]) -> list[list[float]]:
    """What `run_seconds` would be of each program in a step whose tasks all take their kind's time."""
    return [[times[p.actor, i.executable] for i in p.instructions if isinstance(i, Run)] for p in programs]


def busiest_s(programs: Sequence[ActorProgram], times: Mapping[Kind, float]) -> float:
    """The longest time that an actor computes in a step: no order of its tasks is faster."""
    return max(map(sum, usual_seconds(programs, times)))


def critical_path_s(
    programs: Sequence[ActorProgram], seconds: Sequence[Sequence[float]], transfer_s: float = 0.0
) -> float:
    """When the last task has ended, and the last transfer.

    Args:
        programs: one an actor; they do not deadlock.
        seconds: of each actor, how long each of its `Run`s takes, in its order: `run_seconds`, or
            `usual_seconds`.
        transfer_s: what each transfer takes, beside all others.
    """
    actors = [
        ActorTimeline(program.actor, read_events(program, list(_stamps(program, own, transfer_s)), 0.0, {}))
        for program, own in zip(programs, seconds, strict=True)
    ]
    return breakdown.StepReplay(actors, pair_transfers(actors)).length_s(moves=True)


def _stamps(
    program: ActorProgram, seconds: Sequence[float], transfer_s: float
) -> Iterator[tuple[float, float]]:
    """Begin and end of each instruction, of which only the distance counts."""
    runs = iter(seconds)
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            yield 0.0, next(runs)
        else:
            yield 0.0, transfer_s if isinstance(instruction, Recv) else 0.0
