"""Write steps of a mesh to a file, as a trace for people's viewers that can be read back as timelines.

A trace is in Chrome's event format, for https://ui.perfetto.dev or chrome://tracing. The trace shows the
controller and each actor as a process, with one thread each for tasks, sends and receives, and with an arrow
from each send to its receive. Its times are microseconds since the start of the first step. Viewers skip the
entry `jaxpp_async`, which has the steps as this package reads them.

Source: "Trace Event Format", the JSON that Chrome's tracing writes: `X` is a slice, `s` and `f` are the ends
of an arrow, `M` gives names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from jaxpp_async.errors import TimelineError
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.program.task_label import TaskLabel
from jaxpp_async.program.work import CutChoice
from jaxpp_async.timeline.breakdown import StepReplay
from jaxpp_async.timeline.events import ActorTimeline, TimelineEvent, pair_transfers

if TYPE_CHECKING:
    from jaxpp_async.timeline.timeline import Timeline

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
    timelines = list(timelines)
    trace = {**chrome_trace(timelines), "jaxpp_async": _saved(timelines)}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"))


# ---------------------------------------------------------------- reading

VERSION = 1
"""The version of the steps in a file."""


class SavedStep(msgspec.Struct, frozen=True):
    """A step as a file has it; the fields are those of `Timeline`."""

    step: int
    name: str
    origin_s: float
    duration_s: float
    clock_error_s: float
    actors: tuple[ActorTimeline, ...]
    cut_choice: CutChoice = ""


class _Saved(msgspec.Struct):
    version: int
    steps: msgspec.Raw


class _File(msgspec.Struct):
    jaxpp_async: _Saved


def _saved(timelines: Sequence[Timeline]) -> dict[str, Any]:
    steps = [
        SavedStep(t.step, t.name, t.origin_s, t.duration_s, t.clock_error_s, t.actors, t.cut_choice)
        for t in timelines
    ]
    return {"version": VERSION, "steps": msgspec.to_builtins(steps)}


def read_steps(path: str | os.PathLike[str]) -> tuple[SavedStep, ...]:
    """Return the steps of a file that `write_trace` has written.

    Args:
        path: the file.

    Raises:
        TimelineError: the file has no steps, or those of another version, or it is damaged.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        saved = msgspec.json.decode(data, type=_File).jaxpp_async
        if saved.version != VERSION:
            raise TimelineError(
                f"{path}: these steps have version {saved.version}, and this version of jaxpp_async reads "
                f"{VERSION}"
            )
        steps = msgspec.json.decode(saved.steps, type=tuple[SavedStep, ...])
        for step in steps:
            _check_step(step)
        return steps
    except TimelineError:
        raise
    except ValueError as error:  # a DecodeError is one
        raise TimelineError(
            f"{path}: this is no timeline that `Timeline.write` has written, or it is damaged: {error}"
        ) from None


_MOST_S = 1e9
"""The largest time in a file, in seconds, which is thirty years."""


def _check_step(step: SavedStep) -> None:
    """Check that a step of a file is one that could have been measured.

    Raises:
        ValueError: it could not; the message says why.
    """
    times = [step.origin_s, step.duration_s, step.clock_error_s]
    if len({actor.actor for actor in step.actors}) < len(step.actors):
        raise ValueError(f"step {step.step} has an actor twice")
    for actor in step.actors:
        whose = f"actor {actor.actor} of step {step.step}"
        if len({event.instruction for event in actor.events}) < len(actor.events):
            raise ValueError(f"{whose} has an instruction twice")
        for event in actor.events:
            times += (event.start_s, event.end_s)
            if event.actor != actor.actor:
                raise ValueError(f"{whose} has an instruction of actor {event.actor}")
            if event.kind == "run":
                TaskLabel.parse(event.label)
            if event.end_s < event.start_s:
                raise ValueError(f"instruction {event.instruction} of {whose} ends before it starts")
    if not all(abs(at) <= _MOST_S for at in times):
        raise ValueError(f"step {step.step} has a time that is no number, or beyond {_MOST_S:g} s")
    StepReplay(step.actors, pair_transfers(step.actors))  # tasks that wait for each other are an error


# ---------------------------------------------------------------- slices and arrows


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
