"""trace: timelines in, one trace in Chrome's event format out, for https://ui.perfetto.dev or chrome://tracing.

A process a track for the controller and for each actor, with a thread each for tasks, sends and receives, and an arrow
from each send to its receive. Times are microseconds since the first step's start.

Source: "Trace Event Format", the JSON that Chrome's tracing writes: `X` a slice, `s` and `f` the ends of an arrow, `M`
names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from jaxpp_async.program import ActorId
from jaxpp_async.timeline.events import ActorTimeline, Event, Transfer

_LEAST_US = 0.001
"""Perfetto counts nanoseconds; a slice of none would hold no arrow."""

_KINDS = ("steps", "tasks", "sends", "receives")
"""Threads of a process, from top to bottom. Slices of one kind that overlap go to several threads."""

_CONTROLLER = 1
"""Its process in the trace; those of the actors follow. Not 0, which viewers take for an idle processor."""

_Key: TypeAlias = tuple[ActorId, int]
"""An instruction of an actor."""


class Drawn(Protocol):
    """What is drawn of a step: a `Timeline`, as far as it matters here."""

    @property
    def step(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def origin_s(self) -> float: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def actors(self) -> tuple[ActorTimeline, ...]: ...
    @property
    def transfers(self) -> tuple[Transfer, ...]: ...
    @property
    def clock_error_s(self) -> float: ...


def chrome_trace(timelines: Iterable[Drawn]) -> dict[str, Any]:
    """Several steps of one mesh as one trace.

    Returns:
        What `json.dump` writes: `{"traceEvents": [...], "displayTimeUnit": "ms"}`.
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


def write_trace(path: str | os.PathLike[str], timelines: Iterable[Drawn]) -> None:
    """Write steps as one trace, which https://ui.perfetto.dev and chrome://tracing open.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(timelines), file, separators=(",", ":"))


def _names(timelines: Sequence[Drawn]) -> dict[int, str]:
    """Processes of actors, and what each is called: after a restart an actor is another process, in the same track."""
    places: dict[ActorId, dict[str, None]] = {}
    for actor in (actor for timeline in timelines for actor in timeline.actors):
        known = places.setdefault(actor.actor, {})
        if actor.host:
            known[f"{actor.host}, pid {actor.pid}"] = None
    return {
        _process(actor): f"actor {actor}" + (f" ({', then '.join(places[actor])})" if places[actor] else "")
        for actor in sorted(places)
    }


def _add_actors(tracks: _Tracks, timeline: Drawn) -> dict[_Key, _Slice]:
    """Add what actors did; gives the slices of transfers."""
    sent_s = {(t.receive.actor, t.receive.instruction): t.send.start_s for t in timeline.transfers}
    slices: dict[_Key, _Slice] = {}

    def shown_from(event: Event) -> float:
        """A receive is posted early; what is seen of it begins with the send."""
        sent = sent_s.get((event.actor, event.instruction), event.start_s)
        return min(max(event.start_s, sent), event.end_s)

    for actor in timeline.actors:
        # In order of time: a thread is taken again as soon as it is free.
        for event in sorted(actor.events, key=lambda e: (shown_from(e), e.instruction)):
            kind = {"run": "tasks", "send": "sends", "recv": "receives"}.get(event.kind)
            if kind is not None:
                details = _details(event, timeline.step)
                drawn = tracks.add(_process(event.actor), kind, event.label, shown_from(event), event.end_s, details)
                slices[event.actor, event.instruction] = drawn
    return slices


def _add_transfers(tracks: _Tracks, timeline: Drawn, slices: Mapping[_Key, _Slice]) -> None:
    for transfer in timeline.transfers:
        send, receive = transfer.send, transfer.receive
        if transfer.duration_s >= 0:  # else clocks are off, and an arrow into the past says less than none
            tracks.arrow(send.label, slices[send.actor, send.instruction], slices[receive.actor, receive.instruction])


def _process(actor: ActorId) -> int:
    return _CONTROLLER + 1 + actor


def _details(event: Event, step: int) -> dict[str, Any]:
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
    """Collects events; slices of one thread never overlap.

    Args:
        first_s: the trace's zero.
        first_tid: threads are numbered from it: by number none is a process, which viewers take for its main thread.

    Attributes:
        origin_s: what times that are added are since.
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
        """Name a process, once."""
        self.names.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        self.names.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})

    def add(self, pid: int, kind: str, name: str, start_s: float, end_s: float, details: dict[str, Any]) -> _Slice:
        """Add a slice, on the first thread of its kind that is free then."""
        start_us, end_us = (round((self.origin_s - self.first_s + t) * 1e6, 3) for t in (start_s, end_s))
        end_us = max(end_us, round(start_us + _LEAST_US, 3))
        tid = self._free_thread(pid, kind, start_us)
        self._free_from_us[tid] = end_us
        times = {"ts": start_us, "dur": round(end_us - start_us, 3)}
        self.events.append({"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, **times, "args": details})
        return _Slice(pid, tid, start_us, end_us)

    def arrow(self, name: str, start: _Slice, end: _Slice) -> None:
        """From the start of a slice to the end of another, each inside of its slice: viewers bind it to that."""
        self._num_arrows += 1
        common = {"cat": "transfers", "name": name, "id": self._num_arrows}
        arrives_us = round(max(end.start_us, end.end_us - 2 * _LEAST_US), 3)  # still inside when viewers cut it off
        self.events.append({"ph": "s", "pid": start.pid, "tid": start.tid, "ts": start.start_us, **common})
        self.events.append({"ph": "f", "bp": "e", "pid": end.pid, "tid": end.tid, "ts": arrives_us, **common})

    def _free_thread(self, pid: int, kind: str, at_us: float) -> int:
        threads = self._threads.setdefault((pid, kind), [])
        for tid in threads:
            if self._free_from_us[tid] <= at_us:
                return tid
        tid = self.first_tid + len(self._free_from_us)  # of the whole trace: some viewers go by it alone
        name, order = kind + (f" {len(threads) + 1}" if threads else ""), _KINDS.index(kind) * 1000 + len(threads)
        common = {"ph": "M", "pid": pid, "tid": tid}
        self.names.append({**common, "name": "thread_name", "args": {"name": name}})
        self.names.append({**common, "name": "thread_sort_index", "args": {"sort_index": order}})
        threads.append(tid)
        self._free_from_us[tid] = at_us
        return tid
