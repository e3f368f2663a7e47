"""step: each actor's part in one step in; its `Timeline` out, which answers, prints and writes what was asked of it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from jaxpp_async.frozen import kept
from jaxpp_async.program import ActorId
from jaxpp_async.timeline.aligning import align_step
from jaxpp_async.timeline.bill import Bill, make_bill
from jaxpp_async.timeline.events import (
    ActorTimeline,
    Event,
    Transfer,
    pair,
    read_events,
    read_stamps,
    task_kind,
    transfer_labels,
)
from jaxpp_async.timeline.recorded import Recorded
from jaxpp_async.timeline.shares import Shares, shares
from jaxpp_async.timeline.text import bill_table, shares_table, tasks_table, title
from jaxpp_async.timeline.trace import chrome_trace, write_trace


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
            KeyError: the step has none of that kind; says which it has.
        """
        if kind not in self.task_times:
            raise KeyError(f"the step has no task {kind!r}, but {', '.join(self.task_times) or 'none at all'}")
        return median(self.task_times[kind])

    def __repr__(self) -> str:
        return f"<Timeline: {self._title()}; print() it, .events, .transfers, .shares, .bill, .write(path)>"

    def _title(self) -> str:
        return title(self.step, self.name, self.duration_s, len(self.actors), self.clock_error_s)

    def __str__(self) -> str:
        tasks = [(kind, len(t), median(t), sum(t)) for kind, t in self.task_times.items()]
        parts = (
            self._title(),
            shares_table(self.shares),
            tasks_table(tasks),
            bill_table(self.bill),
        )
        return "\n\n".join(parts)

    def to_chrome_trace(self) -> dict[str, Any]:
        """This step as Chrome's trace events; see `chrome_trace`."""
        return chrome_trace([self])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write this step as a trace; see `write_trace`."""
        write_trace(path, [self])


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
    aligned = align_step(recorded, programs, stamps, origin_s)
    actors = []
    for program in programs:
        actor, r = program.actor, recorded[program.actor]
        events = read_events(program, stamps[actor], origin_s + aligned.offset_s[actor], labels)
        actors.append(ActorTimeline(actor, events, aligned.error_s[actor], r.host, r.pid))
    end_s = max((r.heard_s for r in recorded.values()), default=origin_s)
    return Timeline(step, name, origin_s, end_s - origin_s, tuple(actors), pair(actors), aligned.pair_error_s)
