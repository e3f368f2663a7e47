"""Combine the actors' parts of one step into a `Timeline`, which can be queried, printed as tables or saved
as a trace.

A trace is in Chrome's event format, for https://ui.perfetto.dev or chrome://tracing. The trace shows the
controller and each actor as a process, with one thread each for tasks, sends and receives, and with an arrow
from each send to its receive. Its times are microseconds since the start of the first step.

Source: "Trace Event Format", the JSON that Chrome's tracing writes: `X` is a slice, `s` and `f` are the ends
of an arrow, `M` gives names.
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from jaxpp_async.program.instructions import ActorId, task_kind
from jaxpp_async.program.work import TaskWork
from jaxpp_async.timeline.breakdown import StepBreakdown, TimeShares, break_down_step, divide_time
from jaxpp_async.timeline.clock_alignment import align_step
from jaxpp_async.timeline.events import (
    ActorTimeline,
    Recorded,
    TimelineEvent,
    TimelineTransfer,
    pair_transfers,
    read_events,
    read_stamps,
    transfer_labels,
)


@dataclass(frozen=True)
class Timeline:
    """The record of one step, instruction by instruction. `print` shows what the step's time was spent on.

    All times are seconds since the step's start, which is when the controller sent the step to the actors, on
    the controller's clock.

    Args:
        step: the number of the step, counted from 0 over the mesh's life.
        name: the name of the step function.
        origin_s: the step's start, in `time.monotonic()` of the controller's process.
        duration_s: the time until the controller had the last actor's reply.
        actors: the events of each actor that takes part in the step.
        transfers: each send with its receive, in the order in which the sends were started.
        clock_error_s: the largest possible error between times of two different actors; 0: all actors are on
            the controller's host.
        count_works: a function that returns `works`.
    """

    step: int
    name: str
    origin_s: float
    duration_s: float
    actors: tuple[ActorTimeline, ...]
    transfers: tuple[TimelineTransfer, ...]
    clock_error_s: float = 0.0
    count_works: Callable[[], Sequence[TaskWork]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def works(self) -> tuple[TaskWork, ...]:
        """The work of each executable of the step, by its index, from which a cost model learns; empty if
        nobody knows. The work is counted when this is first read, which may take a second for a large step.
        """
        return tuple(self.count_works())

    def __getstate__(self) -> dict[str, Any]:  # a function cannot be pickled
        return {**self.__dict__, "works": self.works, "count_works": tuple}

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        """The events of all actors, sorted by start."""
        return tuple(sorted((e for a in self.actors for e in a.events), key=lambda e: (e.start_s, e.actor)))

    @property
    def begin_s(self) -> float:
        """The time at which the first actor began the step, in seconds since the step's start.

        This is later than the start if the actors were still running an earlier step.
        """
        return min((a.begin_s for a in self.actors if a.events), default=0.0)

    @property
    def end_s(self) -> float:
        """The time at which the last actor's last instruction ended, in seconds since the step's start."""
        return max((a.end_s for a in self.actors if a.events), default=0.0)

    @cached_property
    def shares(self) -> tuple[TimeShares, ...]:
        """For each actor, the shares of computing, waiting and so on in the time between `begin_s` and
        `end_s` of the step.
        """
        received: dict[ActorId, dict[int, TimelineTransfer]] = defaultdict(dict)
        for t in self.transfers:
            received[t.receive.actor][t.receive.instruction] = t
        return tuple(divide_time(a, received[a.actor], self.end_s - self.begin_s) for a in self.actors)

    @cached_property
    def bill(self) -> StepBreakdown:
        """The bill of the step: a breakdown of its time into causes, such as computing and transfers."""
        return break_down_step(self.actors, self.transfers, self.duration_s)

    @cached_property
    def task_times(self) -> dict[str, tuple[float, ...]]:
        """The durations of all tasks in seconds, as a dictionary. Its keys are the kinds of task, such as
        `"fwd(stage 0)"`, in order of first use; its values are the durations of all tasks of that kind.
        """
        times: dict[str, list[float]] = defaultdict(list)
        for actor in self.actors:
            for run in actor.runs:
                times[task_kind(run.label)].append(run.duration_s)
        return {kind: tuple(all_s) for kind, all_s in times.items()}

    def works_of(self, event: TimelineEvent) -> TaskWork | None:
        """Return the work of the task that an event shows.

        Args:
            event: an event of this step.

        Returns:
            The work. None if the event is not a run, or if this timeline has no works.
        """
        return None if event.executable is None or not self.works else self.works[event.executable]

    def median_s(self, kind: str) -> float:
        """Return the median time of one kind of task in seconds.

        Args:
            kind: the kind of task, such as `"fwd(stage 0)"`.

        Raises:
            KeyError: the step has no task of that kind; the message lists the kinds that it has.
        """
        if kind not in self.task_times:
            raise KeyError(
                f"the step has no task {kind!r}, but {', '.join(self.task_times) or 'none at all'}"
            )
        return median(self.task_times[kind])

    def __repr__(self) -> str:
        return f"<Timeline: {self._title()}; print() it, .events, .transfers, .shares, .bill, .write(path)>"

    def _title(self) -> str:
        clocks = f", clocks within {_time(self.clock_error_s)}" if self.clock_error_s else ""
        actors = f"{len(self.actors)} actor{'s' if len(self.actors) != 1 else ''}"
        return f"step {self.step} of {self.name!r}: {_time(self.duration_s)} on {actors}{clocks}"

    def __str__(self) -> str:
        tasks = [(kind, len(t), median(t), sum(t)) for kind, t in self.task_times.items()]
        tables = _shares_table(self.shares), _tasks_table(tasks), _breakdown_table(self.bill)
        return "\n\n".join((self._title(), *tables))

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return this step as a dictionary of Chrome's trace events; see `chrome_trace`."""
        return chrome_trace([self])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write this step to a file as a trace for Perfetto; see `write_trace`."""
        write_trace(path, [self])


def make_timeline(
    step: int,
    name: str,
    origin_s: float,
    recorded: Mapping[ActorId, Recorded],
    count_works: Callable[[], Sequence[TaskWork]] = tuple,
) -> Timeline:
    """Return the timeline of a finished step.

    Args:
        step: the number of the step.
        name: the name of the step function.
        origin_s: when the controller sent the step, in seconds of the controller's clock.
        recorded: what the controller recorded of each actor's part.
        count_works: a function that returns the work of each executable of the step, by its index.

    Raises:
        ValueError: the number of an actor's time stamps does not fit its program.
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
    return Timeline(
        step=step,
        name=name,
        origin_s=origin_s,
        duration_s=end_s - origin_s,
        actors=tuple(actors),
        transfers=pair_transfers(actors),
        clock_error_s=aligned.pair_error_s,
        count_works=count_works,
    )


# ---------------------------------------------------------------- text

_ITEMS = (
    ("queue", "until the first actor took it up"),
    ("compute", "all tasks, shared evenly by the actors"),
    ("imbalance", "the busiest actor computes more than that"),
    ("schedule", "tasks wait for others: the bubble"),
    ("transfer", "data was on its way"),
    ("start", "an actor began, or had its arguments, later than the first"),
    ("dispatch", "everything was there, and the next thing had not begun"),
    ("reply", "from the last instruction until the controller knew"),
)


def _shares_table(rows: Sequence[TimeShares]) -> str:
    """Return a table of each actor's shares of time, in percent of the time from the first start to the last
    end.
    """
    span_s = rows[0].duration_s if rows else 0.0
    header = (f"of {_time(span_s)}", "computing", "waiting", "transfers", "dispatch", "idle")
    return _table(
        header,
        ((f"actor {s.actor}", *(_share(x, s.duration_s) for x in astuple(s)[1:])) for s in rows),
    )


def _tasks_table(rows: Iterable[tuple[str, int, float, float]]) -> str:
    """Return a table of the kinds of task.

    Args:
        rows: for each kind its name, how often it ran, and the median and the sum of its times in seconds.
    """
    header = ("task", "runs", "median", "together")
    return _table(header, ((kind, str(n), _time(median), _time(total)) for kind, n, median, total in rows))


def _breakdown_table(bill: StepBreakdown) -> str:
    """Return a table of the causes that a step's time was spent on, with one line per cause."""
    rows = []
    for item, why in _ITEMS:
        seconds = getattr(bill, f"{item}_s")
        rows.append((item, _time(seconds), _share(seconds, bill.total_s), why))
    allowed = f"{_time(bill.bound_s)} (compute, imbalance, schedule) at best"
    took = f"{_time(bill.span_s)} taken (all but queue and reply)"
    ratio = f"{bill.efficiency:.0%} of what the schedule allows: {allowed}, {took}"
    rows.append(("", _time(bill.total_s), "100%", ratio))
    return _table(("bill", "time", "share", ""), rows, left=(0, 3))


def _share(part_s: float, whole_s: float) -> str:
    return f"{round(100 * part_s / whole_s) + 0 if whole_s > 0 else 0}%"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * scale >= 0.9995:
            return f"{seconds * scale:.2f} {unit}"
    return f"{seconds * 1e6:.0f} us" if abs(seconds) >= 0.5e-6 else "0"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], left: tuple[int, ...] = (0,)) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for k, name in enumerate(header):
        table.add_column(name, justify="left" if k in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=200, color_system=None, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n"))


# ---------------------------------------------------------------- trace

_LEAST_US = 0.001
"""The shortest length of a slice in microseconds, which is one nanosecond. Perfetto counts nanoseconds, and
an arrow cannot begin or end in a slice of zero length.
"""

_KINDS = ("steps", "tasks", "sends", "receives")
"""The kinds of threads of a process in the trace, from top to bottom. Slices of one kind that overlap are
drawn on several threads.
"""

_CONTROLLER = 1
"""The number of the controller's process in the trace; the actors' processes follow. The number is not 0,
because viewers take process 0 for an idle processor.
"""

_Key: TypeAlias = tuple[ActorId, int]
"""The key of one instruction: the actor and the index of the instruction in its program."""


def chrome_trace(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """Return several steps of one mesh as one trace in Chrome's event format.

    Args:
        timelines: the steps, in any order.

    Returns:
        The trace, ready for `json.dump`: `{"traceEvents": [...], "displayTimeUnit": "ms"}`.
    """
    timelines = sorted(timelines, key=lambda t: t.origin_s)
    names = {_CONTROLLER: "controller", **_names(timelines)} if timelines else {}
    tracks = _Tracks(timelines[0].origin_s if timelines else 0.0, first_tid=max(names, default=0) + 1)
    for pid, name in names.items():
        tracks.process(pid, name)
    for timeline in timelines:
        tracks.origin_s = timeline.origin_s
        details = {"name": timeline.name, "clock_error_us": round(timeline.clock_error_s * 1e6, 3)}
        tracks.add(_CONTROLLER, "steps", f"step {timeline.step}", 0.0, timeline.duration_s, details)
        _add_transfers(tracks, timeline, _add_actors(tracks, timeline))
    return {"traceEvents": [*tracks.names, *tracks.events], "displayTimeUnit": "ms"}


def write_trace(path: str | os.PathLike[str], timelines: Iterable[Timeline]) -> None:
    """Write several steps of one mesh to a file as one trace for https://ui.perfetto.dev or chrome://tracing.

    Args:
        path: the file to write.
        timelines: the steps, in any order.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(timelines), file, separators=(",", ":"))


def _names(timelines: Sequence[Timeline]) -> dict[int, str]:
    """Return a name for each actor's process in the trace, by the number of that process.

    The name lists the hosts and pids of the actor. An actor that was replaced in a restart had several, but
    it is one process in the trace.
    """
    places: dict[ActorId, dict[str, None]] = {}
    for actor in (actor for timeline in timelines for actor in timeline.actors):
        known = places.setdefault(actor.actor, {})
        if actor.host:
            known[f"{actor.host}, pid {actor.pid}"] = None
    return {
        _process(actor): f"actor {actor}" + (f" ({', then '.join(places[actor])})" if places[actor] else "")
        for actor in sorted(places)
    }


def _add_actors(tracks: _Tracks, timeline: Timeline) -> dict[_Key, _Slice]:
    """Add a slice to the trace for each task, send and receive of a step.

    Returns:
        The slices by actor and instruction index.
    """
    sent_s = {(t.receive.actor, t.receive.instruction): t.send.start_s for t in timeline.transfers}
    slices: dict[_Key, _Slice] = {}

    def shown_from(event: TimelineEvent) -> float:
        """Return when the slice of an event starts.

        The slice of a receive starts with its send, because a receive is posted long before its data is sent.
        """
        sent = sent_s.get((event.actor, event.instruction), event.start_s)
        return min(max(event.start_s, sent), event.end_s)

    for actor in timeline.actors:
        # In order of time, because `_Tracks.add` reuses a thread as soon as it is free.
        for event in sorted(actor.events, key=lambda e: (shown_from(e), e.instruction)):
            kind = {"run": "tasks", "send": "sends", "recv": "receives"}.get(event.kind)
            if kind is not None:
                details = _details(event, timeline.step)
                drawn = tracks.add(
                    _process(event.actor), kind, event.label, shown_from(event), event.end_s, details
                )
                slices[event.actor, event.instruction] = drawn
    return slices


def _add_transfers(tracks: _Tracks, timeline: Timeline, slices: Mapping[_Key, _Slice]) -> None:
    for transfer in timeline.transfers:
        send, receive = transfer.send, transfer.receive
        if transfer.duration_s >= 0:  # otherwise the clocks are wrong: draw no arrow into the past
            tracks.arrow(
                send.label, slices[send.actor, send.instruction], slices[receive.actor, receive.instruction]
            )


def _process(actor: ActorId) -> int:
    return _CONTROLLER + 1 + actor


def _details(event: TimelineEvent, step: int) -> dict[str, Any]:
    details: dict[str, Any] = {"step": step, "instruction": event.instruction, "text": event.text}
    if event.kind == "send":
        details |= {"bytes": event.size_bytes, "tag": event.tag, "to_actor": event.peer}
    elif event.kind == "recv":
        details |= {"bytes": event.size_bytes, "tag": event.tag, "from_actor": event.peer}
        details["posted_us_before_data"] = round(event.duration_s * 1e6, 3)
    return details


@dataclass(frozen=True, slots=True)
class _Slice:
    pid: int
    tid: int
    start_us: float
    end_us: float


@dataclass(slots=True)
class _Tracks:
    """A collector of a trace's events, which puts overlapping slices on different threads.

    Args:
        first_s: the time that is zero in the trace, in seconds of the controller's clock.
        first_tid: the first thread number. All thread numbers differ from all process numbers, since viewers
            take a thread with its process's number for the main thread.

    Attributes:
        origin_s: the start of the current step, from which the times given to `add` are counted.
        names: the trace events that name processes and threads.
        events: the trace events of slices and arrows.
    """

    first_s: float
    first_tid: int
    origin_s: float = 0.0
    names: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    _threads: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    _free_from_us: dict[int, float] = field(default_factory=dict)
    _num_arrows: int = 0

    def process(self, pid: int, name: str) -> None:
        """Add a process to the trace and give it a name. This must be called once per process."""
        self.names.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        self.names.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})

    def add(
        self, pid: int, kind: str, name: str, start_s: float, end_s: float, details: dict[str, Any]
    ) -> _Slice:
        """Add a slice to the trace and return it.

        The slice is put on the first thread of its process and kind that is free at its start.

        Args:
            pid: the number of the process.
            kind: the kind of thread, one of `_KINDS`.
            name: the text on the slice.
            start_s, end_s: the start and end of the slice, in seconds since `origin_s`.
            details: what viewers show when the slice is selected.
        """
        start_us, end_us = (round((self.origin_s - self.first_s + t) * 1e6, 3) for t in (start_s, end_s))
        end_us = max(end_us, round(start_us + _LEAST_US, 3))
        tid = self._free_thread(pid, kind, start_us)
        self._free_from_us[tid] = end_us
        times = {"ts": start_us, "dur": round(end_us - start_us, 3)}
        self.events.append(
            {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, **times, "args": details}
        )
        return _Slice(pid, tid, start_us, end_us)

    def arrow(self, name: str, start: _Slice, end: _Slice) -> None:
        """Add an arrow from the start of one slice to the end of another.

        Both ends of the arrow are placed within their slices in time, because viewers attach an end to the
        slice in which it lies.
        """
        self._num_arrows += 1
        common = {"cat": "transfers", "name": name, "id": self._num_arrows}
        # still within the slice if viewers truncate it
        arrives_us = round(max(end.start_us, end.end_us - 2 * _LEAST_US), 3)
        self.events.append({"ph": "s", "pid": start.pid, "tid": start.tid, "ts": start.start_us, **common})
        self.events.append({"ph": "f", "bp": "e", "pid": end.pid, "tid": end.tid, "ts": arrives_us, **common})

    def _free_thread(self, pid: int, kind: str, at_us: float) -> int:
        threads = self._threads.setdefault((pid, kind), [])
        for tid in threads:
            if self._free_from_us[tid] <= at_us:
                return tid
        tid = self.first_tid + len(self._free_from_us)  # unique in the trace, as some viewers require
        name, order = (
            kind + (f" {len(threads) + 1}" if threads else ""),
            _KINDS.index(kind) * 1000 + len(threads),
        )
        common = {"ph": "M", "pid": pid, "tid": tid}
        self.names.append({**common, "name": "thread_name", "args": {"name": name}})
        self.names.append({**common, "name": "thread_sort_index", "args": {"sort_index": order}})
        threads.append(tid)
        self._free_from_us[tid] = at_us
        return tid
