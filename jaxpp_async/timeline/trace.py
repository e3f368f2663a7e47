"""trace: timelines in, one trace in Chrome's event format out, for https://ui.perfetto.dev or chrome://tracing.

A process a track for the controller and for each actor, with a thread each for tasks, sends and receives, and an arrow
from each send to its receive. Times are microseconds since the first step's start.

Source: "Trace Event Format", the JSON that Chrome's tracing writes: `X` a slice, `s` and `f` the ends of an arrow, `M`
names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxpp_async.timeline.events import ActorTimeline, Event, Transfer

if TYPE_CHECKING:
    from jaxpp_async.timeline import Timeline

_LEAST_US = 0.001
"""Perfetto counts nanoseconds; a slice of none would hold no arrow."""

_STEPS, _TASKS, _SENDS, _RECEIVES = 0, 0, 100, 200
"""The first thread of each kind. Slices of one kind that overlap go to different threads."""


def chrome_trace(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """Several steps of one mesh as one trace.

    Returns:
        What `json.dump` writes: `{"traceEvents": [...], "displayTimeUnit": "ms"}`.
    """
    timelines = sorted(timelines, key=lambda t: t.origin_s)
    first_s = timelines[0].origin_s if timelines else 0.0
    tracks = _Tracks()
    for timeline in timelines:
        shift_s = timeline.origin_s - first_s
        tracks.name(0, "controller", _STEPS, "steps")
        tracks.add(0, _STEPS, f"step {timeline.step}", "step", shift_s, shift_s + timeline.duration_s, _of(timeline))
        transfers = {(t.receive.actor, t.receive.instruction): t for t in timeline.transfers}
        sends: dict[tuple[int, int], _Slice] = {}
        receives: dict[tuple[int, int], _Slice] = {}
        for actor in timeline.actors:
            _add_actor(tracks, actor, timeline.step, shift_s, transfers, sends, receives)
        for key, transfer in transfers.items():
            if transfer.duration_s >= 0:  # else clocks are off, and an arrow into the past says less than none
                tracks.arrow(transfer.send.label, sends[transfer.send.actor, transfer.send.instruction], receives[key])
    return {"traceEvents": [*tracks.names.values(), *tracks.events], "displayTimeUnit": "ms"}


def _add_actor(
    tracks: _Tracks,
    actor: ActorTimeline,
    step: int,
    shift_s: float,
    transfers: dict[tuple[int, int], Transfer],
    sends: dict[tuple[int, int], _Slice],
    receives: dict[tuple[int, int], _Slice],
) -> None:
    pid = actor.actor + 1
    name = f"actor {actor.actor}" + (f" ({actor.host}, pid {actor.pid})" if actor.host else "")
    tracks.name(pid, name, _TASKS, "tasks")
    # In order of time: a thread is taken again as soon as it is free.
    for event in sorted(actor.events, key=lambda e: (_shown_from(e, transfers), e.instruction)):
        start_s, end_s = shift_s + _shown_from(event, transfers), shift_s + event.end_s
        key = (event.actor, event.instruction)
        if event.kind == "run":
            tracks.add(pid, _TASKS, event.label, "task", start_s, end_s, _details(event, step))
        elif event.kind == "send":
            sends[key] = tracks.add(pid, _SENDS, event.label, "send", start_s, end_s, _details(event, step))
        elif event.kind == "recv":
            receives[key] = tracks.add(pid, _RECEIVES, event.label, "recv", start_s, end_s, _details(event, step))


def _shown_from(event: Event, transfers: dict[tuple[int, int], Transfer]) -> float:
    """A receive is posted early; what is seen of it begins with the send."""
    transfer = transfers.get((event.actor, event.instruction)) if event.kind == "recv" else None
    return event.start_s if transfer is None else min(max(event.start_s, transfer.send.start_s), event.end_s)


def _of(timeline: Timeline) -> dict[str, Any]:
    return {"step": timeline.step, "name": timeline.name, "clock_error_us": timeline.clock_error_s * 1e6}


def _details(event: Event, step: int) -> dict[str, Any]:
    details: dict[str, Any] = {"step": step, "instruction": event.instruction}
    if event.peer is not None:
        details |= {"bytes": event.size_bytes, "tag": event.tag}
        details |= {"to_actor": event.peer} if event.kind == "send" else {"from_actor": event.peer}
    if event.kind == "recv":
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
    """Collects events; slices of one thread never overlap."""

    names: dict[tuple[int, int | None, str], dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    _free_from: dict[tuple[int, int], float] = field(default_factory=dict)
    _threads: dict[int, str] = field(default_factory=lambda: {_SENDS: "sends", _RECEIVES: "receives"})
    _arrows: int = 0

    def name(self, pid: int, process: str, tid: int, thread: str) -> None:
        self._meta(pid, None, "process_name", {"name": process})
        self._meta(pid, None, "process_sort_index", {"sort_index": pid})
        self._meta(pid, tid, "thread_name", {"name": thread})
        self._meta(pid, tid, "thread_sort_index", {"sort_index": tid})

    def add(
        self, pid: int, first_tid: int, name: str, category: str, start_s: float, end_s: float, args: dict[str, Any]
    ) -> _Slice:
        """Add a slice, on the first thread of its kind that is free then."""
        start_us = round(start_s * 1e6, 3)
        end_us = max(round(end_s * 1e6, 3), start_us + _LEAST_US)
        tid = first_tid
        while self._free_from.get((pid, tid), float("-inf")) > start_us:
            tid += 1
        if tid != first_tid or first_tid in self._threads:
            kind = self._threads.get(first_tid) or {"step": "steps", "task": "tasks"}[category]
            extra = f" {tid - first_tid + 1}" if tid != first_tid else ""
            self._meta(pid, tid, "thread_name", {"name": kind + extra})
            self._meta(pid, tid, "thread_sort_index", {"sort_index": tid})
        self._free_from[pid, tid] = end_us
        duration_us = round(end_us - start_us, 3)
        self.events.append(
            {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category}
            | {"ts": start_us, "dur": duration_us, "args": args}
        )
        return _Slice(pid, tid, start_us, end_us)

    def arrow(self, name: str, start: _Slice, end: _Slice) -> None:
        """From the start of a slice to the end of another, each inside of its slice: Perfetto binds it to that."""
        self._arrows += 1
        common = {"cat": "transfer", "name": name, "id": self._arrows}
        arrives_us = round(max(end.start_us, end.end_us - _LEAST_US), 3)
        self.events.append({"ph": "s", "pid": start.pid, "tid": start.tid, "ts": start.start_us} | common)
        self.events.append({"ph": "f", "bp": "e", "pid": end.pid, "tid": end.tid, "ts": arrives_us} | common)

    def _meta(self, pid: int, tid: int | None, what: str, args: dict[str, Any]) -> None:
        event = {"ph": "M", "pid": pid, "name": what, "args": args}
        self.names[pid, tid, what] = event if tid is None else event | {"tid": tid}
