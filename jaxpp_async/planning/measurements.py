"""Read from timelines of measured steps how long tasks, transfers and everything between them took.

The rules by which a time is assigned to a cause are those of `replay`: each number that is read here is the
delay of one of its events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import msgspec

from jaxpp_async.errors import CostError
from jaxpp_async.planning.devices import BETWEEN_HOSTS, MEMORY, SAME_HOST
from jaxpp_async.planning.samples import LinkCost, Samples, fit_line
from jaxpp_async.program.task_label import task_kind
from jaxpp_async.program.work import LoopCut, TaskWork
from jaxpp_async.timeline import ActorTimeline, Timeline, TimelineTransfer

LARGE_BYTES = 256 << 10
"""The size in bytes below which the bytes of a message are taken to add nothing to its latency, if no other
size was measured."""


class MeasuredCut(msgspec.Struct, frozen=True):
    """The tasks that were measured under one cut of a step into stages.

    Args:
        cut: the cut, with the work of its layers.
        works: the work of each kind of task, such as `"fwd(stage 0)"`.
    """

    cut: LoopCut
    works: dict[str, TaskWork]


@dataclass
class Measurements:
    """The delays that were found in measured steps, in seconds.

    Attributes:
        tasks: the times of every task, by the key of its work.
        works: the work of each task, by its key.
        cuts: the cuts that were measured, the latest one at the end.
        transfers: by kind of link: for each transfer its size in bytes, and how long it took once its send
            had started, its receive was posted and the link was free.
        dispatch: the delays from the end of a run until the next one begins, if it waits for nothing else.
        wake: the delays from the arrival of the last buffer that a run waits for until the run begins.
        post: the delays from when a send could start until it starts.
        queue: the delays from when the controller sends a step until the first actor begins it.
        skew: the delays from then until each actor begins the step.
        arguments: by number of a step argument: the delays from when an actor begins until it has the
            argument.
        reply: the delays from a step's last instruction until the controller has all replies.
        actors_per_host: the number of actors on one host; 0 if all are on one host.
    """

    tasks: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    works: dict[str, TaskWork] = field(default_factory=dict)
    cuts: list[MeasuredCut] = field(default_factory=list)
    transfers: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    dispatch: list[float] = field(default_factory=list)
    wake: list[float] = field(default_factory=list)
    post: list[float] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)
    skew: list[float] = field(default_factory=list)
    arguments: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    reply: list[float] = field(default_factory=list)
    actors_per_host: int = 0


def read_timelines(timelines: Iterable[Timeline]) -> Measurements:
    """Return the delays of all events of some measured steps.

    Args:
        timelines: timelines with works, as `RemoteMesh.last_step_timeline` returns them.

    Raises:
        CostError: there is no timeline, or one without the works of its tasks or without a task.
    """
    how = "collect `mesh.last_step_timeline()` after some steps"
    if isinstance(timelines, Timeline) or not isinstance(timelines, Iterable):
        raise CostError(f"timelines is {timelines!r:.60}; write a list of timelines, and {how}")
    timelines = tuple(timelines)
    if not timelines:
        raise CostError(f"costs are measured in steps, and there is no timeline of one; {how}")
    found = Measurements()
    cuts: dict[LoopCut, dict[str, TaskWork]] = {}
    for timeline in timelines:
        if not isinstance(timeline, Timeline):
            raise CostError(f"{timeline!r:.60} is no timeline of a step; {how}")
        runs = [run for a in timeline.actors for run in a.runs]
        if not runs:
            raise CostError(f"the timeline of step {timeline.step} of {timeline.name!r} has no task; {how}")
        works: dict[str, TaskWork] = {}
        for run in runs:
            work = timeline.works_of(run)
            if work is None:
                raise CostError(
                    f"the timeline of step {timeline.step} of {timeline.name!r} does not say which work its "
                    f"tasks are; {how}, whose timelines do"
                )
            found.tasks[work.key].append(run.duration_s)
            found.works[work.key] = work
            works[task_kind(run.label)] = work
        if timeline.cut is not None:
            cuts[timeline.cut] = {**cuts.pop(timeline.cut, {}), **works}
        found.queue.append(timeline.begin_s)
        found.reply.append(timeline.duration_s - timeline.end_s)
        for actor in timeline.actors:
            if actor.events:
                _read_actor(found, actor, timeline.begin_s)
        _read_transfers(found, timeline)
        found.actors_per_host = found.actors_per_host or _actors_per_host(timeline.actors)
    found.cuts = [MeasuredCut(cut, works) for cut, works in cuts.items()]
    return found


def _read_actor(found: Measurements, actor: ActorTimeline, first_s: float) -> None:
    found.skew.append(actor.begin_s - first_s)
    ends = {e.instruction: e.end_s for e in actor.events if e.kind in ("recv", "input")}
    passed_s = posted_s = actor.begin_s  # when the last run ended; when a send could start after it
    waited: set[int] = set()
    for e in actor.events:
        if e.kind == "input":
            found.arguments[_argument(e.label)].append(e.end_s - actor.begin_s)
        elif e.kind == "run":
            there_s = max((ends[i] for i in e.needs if i in ends and i not in waited), default=passed_s)
            waited.update(e.needs)
            if there_s > passed_s:
                found.wake.append(e.start_s - there_s)
            else:
                found.dispatch.append(e.start_s - passed_s)
            passed_s = posted_s = e.end_s
        elif e.kind == "send":
            could_s = max(posted_s, *(ends.get(i, 0.0) for i in e.needs), passed_s)
            found.post.append(e.start_s - could_s)
            posted_s = max(posted_s, e.start_s)


def _argument(label: str) -> int:
    return int(label.removeprefix("arg "))


def _read_transfers(found: Measurements, timeline: Timeline) -> None:
    """Add the transfers of a step that had their link for themselves; all of them if none had."""
    places = {a.actor: (a.host, a.pid) for a in timeline.actors}
    links: dict[tuple[int, int], list[TimelineTransfer]] = defaultdict(list)
    for t in timeline.transfers:
        links[t.send.actor, t.receive.actor].append(t)
    for (a, b), transfers in links.items():
        kind = _kind_of_link(places[a], places[b])
        alone, behind = [], []
        free_s = float("-inf")
        for t in transfers:
            begin_s = max(t.send.start_s, t.receive.start_s)
            took = t.send.size_bytes, max(0.0, t.receive.end_s - max(begin_s, free_s))
            (alone if begin_s >= free_s else behind).append(took)
            free_s = max(free_s, t.receive.end_s)
        found.transfers[kind] += alone or behind


def _kind_of_link(a: tuple[str, int], b: tuple[str, int]) -> str:
    if a[0] != b[0]:
        return BETWEEN_HOSTS
    return MEMORY if a[1] == b[1] and a[1] else SAME_HOST


def _actors_per_host(actors: Sequence[ActorTimeline]) -> int:
    hosts = [a.host for a in actors]
    return 0 if len(set(hosts)) < 2 else max(hosts.count(host) for host in hosts)


def fit_link(transfers: Sequence[tuple[int, float]]) -> LinkCost:
    """Return the costs of a link: its rate, and the distribution of its latency.

    Messages are put into bins of similar sizes, each four times as large as the one before, so that each size
    counts equally. The rate is fitted to the quick transfers of each bin. Latency is what each transfer took
    in addition to its bytes at that rate, so that it has all delays that do not come from bytes.

    Args:
        transfers: for each transfer its size in bytes and how long it took in seconds; at least one.
    """
    bins: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for size, took_s in transfers:
        bins[max(size, 1).bit_length() // 2].append((size, took_s))
    sizes = [fmean(size for size, _ in of_size) for of_size in bins.values()]
    quick_s = [Samples.of(took_s for _, took_s in of_size).quantile(0.1) for of_size in bins.values()]
    if len(bins) > 1:
        _, s_per_byte, _ = fit_line(sizes, quick_s)
    else:
        s_per_byte = quick_s[0] / sizes[0] if sizes[0] >= LARGE_BYTES else 0.0
    latency = Samples.of(took_s - size * s_per_byte for size, took_s in transfers)
    return LinkCost(latency, 1 / s_per_byte if s_per_byte > 0 else None)
