"""timeline: what every actor did in one step, and when. In: programs and time stamps. Out: `Timeline`.

No jax, and no I/O but `write_trace`. Actors stamp every instruction of every step (`StepStats.stamps`); all that is
here is done for whoever asks, afterwards. `docs/timeline.md` says how to read it.

    aligning   what is known of clocks -> offsets
    events   programs and stamps -> events, transfers
    shares   an actor's events -> where its time went
    bill     all events -> what the step was spent on
    text, trace   for people, for Perfetto
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from jaxpp_async.frozen import kept
from jaxpp_async.program import ActorId, ActorProgram
from jaxpp_async.timeline import text
from jaxpp_async.timeline.aligning import Aligned, Bounds, align, leads
from jaxpp_async.timeline.bill import Bill, make_bill
from jaxpp_async.timeline.events import (
    ActorTimeline,
    Event,
    Transfer,
    pair,
    read_events,
    read_stamps,
    span,
    task_kind,
    transfer_labels,
)
from jaxpp_async.timeline.shares import Shares, shares
from jaxpp_async.timeline.trace import chrome_trace

__all__ = (
    "ActorTimeline",
    "Bill",
    "Event",
    "Recorded",
    "Shares",
    "Timeline",
    "Transfer",
    "chrome_trace",
    "make_timeline",
    "write_trace",
)


@dataclass(frozen=True)
class Timeline:
    """One step, instruction by instruction. `print` shows where its time went.

    All times are seconds since the step's start on the controller's clock: when it sent the step to the actors.

    Args:
        step: its number, counted from 0 over the mesh's life.
        name: the step function's.
        origin_s: the step's start, in `time.monotonic()` of the controller's process.
        duration_s: until the controller had heard of the last actor.
        actors: those that have a part in the step.
        transfers: each send with its receive, in the order in which the sends were started.
        clock_error_s: by how much times of two actors may be off against each other, at most; 0: all are on this host.
    """

    step: int
    name: str
    origin_s: float
    duration_s: float
    actors: tuple[ActorTimeline, ...]
    transfers: tuple[Transfer, ...]
    clock_error_s: float = 0.0

    @property
    def events(self) -> tuple[Event, ...]:
        """Of all actors, in order of start."""
        return tuple(sorted((e for a in self.actors for e in a.events), key=lambda e: (e.start_s, e.actor)))

    @property
    def begin_s(self) -> float:
        """When the first actor took the step up: with several steps under way, not before it was done with another."""
        return min((a.begin_s for a in self.actors if a.events), default=0.0)

    @property
    def end_s(self) -> float:
        """When the last actor was done."""
        return max((a.end_s for a in self.actors if a.events), default=0.0)

    @kept
    def shares(self) -> tuple[Shares, ...]:
        """Where each actor's time went, between `begin_s` and `end_s`."""
        received: dict[ActorId, dict[int, Transfer]] = defaultdict(dict)
        for t in self.transfers:
            received[t.receive.actor][t.receive.instruction] = t
        return tuple(shares(a, received[a.actor], self.end_s - self.begin_s) for a in self.actors)

    @kept
    def bill(self) -> Bill:
        """What the step's time was spent on, and why it took longer than its tasks."""
        return make_bill(self.actors, self.transfers, self.duration_s)

    @kept
    def task_times(self) -> dict[str, tuple[float, ...]]:
        """Seconds of each run by kind of task, such as `"fwd(stage 0)"`, in order of first use."""
        times: dict[str, list[float]] = defaultdict(list)
        for actor in self.actors:
            for run in actor.runs:
                times[task_kind(run.label)].append(run.duration_s)
        return {kind: tuple(all_s) for kind, all_s in times.items()}

    def median_s(self, kind: str) -> float:
        """The median time of one kind of task.

        Raises:
            KeyError: the step has none of that kind; `task_times` has them all.
        """
        return median(self.task_times[kind])

    def __str__(self) -> str:
        tasks = [(kind, len(t), median(t), sum(t)) for kind, t in self.task_times.items()]
        parts = (
            text.title(self.step, self.name, self.duration_s, len(self.actors), self.clock_error_s),
            text.shares_table(self.shares),
            text.tasks_table(tasks),
            text.bill_table(self.bill),
        )
        return "\n\n".join(parts)

    def to_chrome_trace(self) -> dict[str, Any]:
        """This step as Chrome's trace events; see `chrome_trace`."""
        return chrome_trace([self])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write this step as a trace; see `write_trace`."""
        write_trace(path, [self])


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of one actor's part in a step.

    Args:
        program: what it ran.
        stamps: `StepStats.stamps`, in seconds of the actor's own clock.
        heard_s: when the controller had its reply, by the controller's clock.
        offset_s: what the actor's clock was ahead of the controller's.
        error_s: by how much that may be wrong; None: nothing is known of its clock.
    """

    program: ActorProgram
    stamps: bytes
    heard_s: float
    offset_s: float = 0.0
    error_s: float | None = 0.0
    host: str = ""
    pid: int = 0


def make_timeline(step: int, name: str, origin_s: float, recorded: Mapping[ActorId, Recorded]) -> Timeline:
    """The timeline of a finished step.

    Args:
        step: its number. name: its function's.
        origin_s: when the controller sent it, by its clock.
        recorded: each actor's part.

    Raises:
        ValueError: stamps that are not of these programs.
    """
    programs = [recorded[a].program for a in sorted(recorded)]
    stamps = {a: read_stamps(r.stamps) for a, r in recorded.items()}
    labels = transfer_labels(programs)
    aligned = _aligned(recorded, programs, stamps, origin_s)
    actors = []
    for program in programs:
        actor, r = program.actor, recorded[program.actor]
        events = read_events(program, stamps[actor], origin_s + aligned.offset_s[actor], labels)
        actors.append(ActorTimeline(actor, events, aligned.error_s[actor], r.host, r.pid))
    end_s = max((r.heard_s for r in recorded.values()), default=origin_s)
    return Timeline(step, name, origin_s, end_s - origin_s, tuple(actors), pair(actors), aligned.pair_error_s)


def write_trace(path: str | os.PathLike[str], timelines: Iterable[Timeline]) -> None:
    """Write steps as one trace, which https://ui.perfetto.dev and chrome://tracing open.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(timelines), file, separators=(",", ":"))


def _aligned(
    recorded: Mapping[ActorId, Recorded],
    programs: Sequence[ActorProgram],
    stamps: Mapping[ActorId, Sequence[tuple[float, float]]],
    origin_s: float,
) -> Aligned:
    """The actors' clocks against the controller's. Of what contradicts itself, the step's own bounds are believed."""
    if all(r.error_s == 0.0 for r in recorded.values()):
        return Aligned({a: r.offset_s for a, r in recorded.items()}, dict.fromkeys(recorded, 0.0), 0.0)
    steps = {a: _step_bounds(r, stamps[a], origin_s) for a, r in recorded.items()}
    told = {a: _told_bounds(r, steps[a]) for a, r in recorded.items()}
    found = leads(programs, stamps)
    for bounds, transfers in ((told, found), (steps, found), (told, {})):
        aligned = align(bounds, transfers)
        if aligned is not None:
            return aligned
    raise AssertionError("bounds that have been made to agree with each step do")


def _step_bounds(r: Recorded, stamps: Sequence[tuple[float, float]], origin_s: float) -> Bounds:
    """An actor took the step up after it was sent, and was done before it was heard of."""
    between = span(stamps)
    if r.error_s == 0.0 or between is None:
        return r.offset_s, r.offset_s
    low_s, high_s = between[1] - r.heard_s, between[0] - origin_s
    return min(low_s, high_s), max(low_s, high_s)  # in order, unless a clock ran away within the step


def _told_bounds(r: Recorded, step: Bounds) -> Bounds:
    """With what was estimated, unless that contradicts the step: then it is wrong, whatever it claims."""
    if r.error_s is None:
        return step
    low_s, high_s = max(step[0], r.offset_s - r.error_s), min(step[1], r.offset_s + r.error_s)
    return (low_s, high_s) if low_s <= high_s else step
