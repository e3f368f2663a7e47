"""Record a run as it goes on: steps, events and failures, in bounded memory and constant time a step.

`RunRecord` is told of each event and of the end of each step. `RunRecord.state` returns a `RunState`, which
does not change any more: the page, its file and Prometheus show it, and another thread may read it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from jaxpp_async.page.goodput import Goodput, GoodputMeter
from jaxpp_async.protocol.actor_info import Activity, ActorInfo
from jaxpp_async.view.history import History

if TYPE_CHECKING:
    from jaxpp_async.base.events import Event
    from jaxpp_async.session.logger_delivery import LoggerState

Status: TypeAlias = Literal["starting", "running", "restarting", "failed", "cancelled", "closed"]

STEP_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
"""The upper bounds in seconds of the classes into which steps are counted by their time."""

EVENTS_KEPT, RECENT_STEPS, MOST_NAMES = 100, 50, 8
_MOST_CAUSES = 5


class ActorStats(Protocol):
    """The statistics of one actor for one step, as `messages.StepStats` has them."""

    @property
    def compute_s(self) -> float: ...

    @property
    def total_s(self) -> float: ...

    @property
    def peak_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that has ended, as the mesh reports it.

    Args:
        number: the number of the step, counted from 0 over the mesh's life.
        name: the name of the step function.
        sent_s, ended_s: the times at which it was sent and ended, in `time.monotonic()`.
        stats: the statistics of each actor, by its id.
        sent_bytes: the bytes that the actors have sent to each other.
    """

    number: int
    name: str
    sent_s: float
    ended_s: float
    stats: Mapping[int, ActorStats]
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cause:
    """One error of the chain that ended a run.

    Args:
        kind: the class of the error.
        text: its message, of several lines.
        notes: what was added to it.
        actor, step: the actor and the step that it concerns, or None.
    """

    kind: str
    text: str
    notes: tuple[str, ...] = ()
    actor: int | None = None
    step: int | None = None


def causes_of(error: BaseException) -> tuple[Cause, ...]:
    """Return the errors that led to an error, the first cause first, and the error itself at the end.

    Args:
        error: the error that ended the run.
    """
    chain: list[Cause] = []
    found: BaseException | None = error
    while found is not None and len(chain) < _MOST_CAUSES:
        notes = tuple(str(note) for note in getattr(found, "__notes__", ()))
        actor, step = getattr(found, "actor", None), getattr(found, "step", None)
        chain.append(Cause(type(found).__name__, str(found) or type(found).__name__, notes, actor, step))
        found = found.__cause__
    return tuple(reversed(chain))


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one step function.

    Args:
        name: the name of the function.
        count: how many have ended.
        last: the number of the last one.
        last_s, median_s: the seconds of the last one, and their median over the latest `RECENT_STEPS`.
        longest_s, longest: the seconds and the number of the longest one.
        per_s: steps a second over the latest ones, with the time between them; None if there is only one.
        idle: the share of the actors' time in the last step in which they had no task.
        sent_bytes: the bytes that the actors sent to each other in the last step.
    """

    name: str
    count: int
    last: int
    last_s: float
    median_s: float
    longest_s: float
    longest: int
    per_s: float | None
    idle: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class StepCurves:
    """The history of the steps of one step function.

    Args:
        name: the name of the function.
        seconds: the seconds of each step.
        idle: the share of the actors' time in each step in which they had no task.
    """

    name: str
    seconds: History
    idle: History


@dataclass(frozen=True, slots=True)
class ActorMemoryUse:
    """The memory of one actor.

    Args:
        peak_bytes: the most bytes of buffers in the last step.
        needed_bytes: the most bytes that each device needs for the compiled step; None if not known.
        batch_bytes: the part of them that grows with the size of a microbatch; None if not known.
        limit_bytes: the bytes of memory of each device; None if not known.
    """

    peak_bytes: int = 0
    needed_bytes: int | None = None
    batch_bytes: int | None = None
    limit_bytes: int | None = None

    @property
    def most_bytes(self) -> int:
        """The bytes that each device needs, or if that is not known, the most bytes of buffers."""
        return self.needed_bytes or self.peak_bytes


@dataclass(slots=True)
class Totals:
    """The counts of a run since its start.

    Args:
        num_restarts, num_deaths, num_compiled: how often each has happened.
        compile_s: the seconds that all compilations took.
        step_s: the seconds of all steps.
        sent_bytes: the bytes that actors have sent to each other in all steps.
    """

    num_restarts: int = 0
    num_deaths: int = 0
    num_compiled: int = 0
    compile_s: float = 0.0
    step_s: float = 0.0
    sent_bytes: int = 0


@dataclass(frozen=True)
class MeshNow:
    """The present state of a mesh, to which `RunRecord.state` adds the record.

    Args:
        title: the mesh in one line.
        now_s: the time, in `time.monotonic()`.
        actors: the actors; empty before they are there.
        doing: the activity of each actor that works on a step, by its id.
        is_closed: whether the mesh has closed or failed.
        is_cancelled: whether the user's code was cancelled, or interrupted by Ctrl-C.
        error: the error that ended the run, or None.
        num_under_way: how many steps are under way.
        memory: the needed memory of each actor, by its id.
        logged: for each name that the user logs, the latest step and its value.
        not_finite: for each of these names whose latest values are NaN or infinite, the first step of those.
        loggers: how each of the user's loggers does.
    """

    title: str
    now_s: float
    actors: tuple[ActorInfo, ...] = ()
    doing: Mapping[int, Activity] = field(default_factory=dict)
    is_closed: bool = False
    is_cancelled: bool = False
    error: BaseException | None = None
    num_under_way: int = 0
    memory: Mapping[int, ActorMemoryUse] = field(default_factory=dict)
    logged: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    not_finite: Mapping[str, int] = field(default_factory=dict)
    loggers: tuple[LoggerState, ...] = ()


@dataclass(frozen=True)
class RunState:
    """A run at one moment.

    Args:
        mesh: the state of its mesh.
        status: how the run does.
        age_s: the seconds since the start; of a run that has ended, until its end.
        begun_at: the time of day at which it started, as text.
        steps: the step functions, that with the most time first.
        goodput: how the time was spent.
        totals: the counts since the start.
        memory: the memory of each actor, by its id.
        events: the latest events, the newest last.
        latest: the latest event of each kind, however long ago it was.
        causes: the errors that ended the run, the first cause first; empty if it goes on or was closed.
        step_counts: how many steps took at most the time of each of `STEP_BUCKETS`, and in all.
        restart_steps: the numbers of the steps that were last when actors were replaced, the latest ones.
        bubble: the share of a step in which tasks wait for tasks of other actors; None if not known.
    """

    mesh: MeshNow
    status: Status
    age_s: float
    begun_at: str
    steps: tuple[Steps, ...]
    goodput: Goodput
    totals: Totals
    memory: Mapping[int, ActorMemoryUse]
    events: tuple[Event, ...]
    latest: Mapping[str, Event]
    causes: tuple[Cause, ...]
    step_counts: tuple[int, ...]
    restart_steps: tuple[int, ...]
    bubble: float | None = None

    @property
    def main(self) -> Steps | None:
        """The step function with which the run spends most time; None before a step has ended."""
        return self.steps[0] if self.steps else None


class _StepsOfName:
    """The record of one step function."""

    def __init__(self, name: str):
        self.name, self.count, self.total_s, self.sent_bytes = name, 0, 0.0, 0
        self.last, self.last_s, self.idle = -1, 0.0, 0.0
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)  # seconds, and time of the end
        self.seconds, self.idle_history = History(), History()
        self.longest = (0.0, -1)  # its seconds, and its number

    def add(self, step: EndedStep, seconds: float) -> None:
        self.count, self.total_s = self.count + 1, self.total_s + seconds
        self.last, self.last_s, self.sent_bytes = step.number, seconds, step.sent_bytes
        self.recent.append((seconds, step.ended_s))
        self.seconds.add(step.number, seconds)
        self.longest = max(self.longest, (seconds, step.number))
        span_s = max((s.total_s for s in step.stats.values()), default=0.0) * len(step.stats)
        compute_s = sum(s.compute_s for s in step.stats.values())
        self.idle = min(1.0, max(0.0, 1 - compute_s / span_s)) if span_s > 0 else 0.0
        self.idle_history.add(step.number, self.idle)

    def summary(self) -> Steps:
        longest_s, longest = self.longest
        took_s = self.recent[-1][1] - self.recent[0][1]
        return Steps(
            name=self.name,
            count=self.count,
            last=self.last,
            last_s=self.last_s,
            median_s=median(seconds for seconds, _ in self.recent),
            longest_s=longest_s,
            longest=longest,
            per_s=(len(self.recent) - 1) / took_s if took_s > 0 else None,
            idle=self.idle,
            sent_bytes=self.sent_bytes,
        )

    def curves(self) -> StepCurves:
        return StepCurves(self.name, self.seconds.copy(), self.idle_history.copy())


class RunRecord:
    """The record of one run. All calls come from the mesh's event loop.

    Args:
        now_s: the time of the start, in `time.monotonic()`.
        begun_at: the time of day of the start, as text.
    """

    def __init__(self, now_s: float, begun_at: str):
        self._begun_s, self._begun_at = now_s, begun_at
        self._ended_s: float | None = None
        self._meter = GoodputMeter(now_s)
        self._names: dict[str, _StepsOfName] = {}
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._latest: dict[str, Event] = {}
        self._totals = Totals()
        self._has_started = self._is_restarting = self._is_repeating = self._has_lost = False
        self._last_end_s, self._last_step = 0.0, -1
        self._restart_steps: deque[int] = deque(maxlen=EVENTS_KEPT)
        self._step_counts = [0] * (len(STEP_BUCKETS) + 1)
        self._peak_bytes: dict[int, int] = {}

    def on_starting(self) -> None:
        """Note that the mesh begins to start, maybe once more after it could not."""
        self._ended_s = None

    def on_started(self, now_s: float) -> None:
        """Note that all actors are ready."""
        self._has_started = True
        self._meter.divide("start", now_s)

    def on_event(self, event: Event, under_way_since_s: float | None = None) -> None:
        """Note an event of the mesh.

        Args:
            event: the event.
            under_way_since_s: the time at which the oldest step under way was sent, in `time.monotonic()`;
                None if none is under way.
        """
        self._events.append(event)
        self._latest[event.kind] = event
        match event.kind:
            case "compiled":
                self._totals.num_compiled += 1
                self._totals.compile_s += event.details["seconds"]
                self._meter.divide("compilation", event.time_s, event.details["seconds"])
            case "died":
                self._totals.num_deaths += 1
                self._is_restarting = True
                lost_s = 0.0 if under_way_since_s is None else event.time_s - under_way_since_s
                self._has_lost = self._has_lost or under_way_since_s is not None
                self._meter.divide("failure", event.time_s, lost_s)
            case "restarted":
                # One restart may replace several actors, each with an event; a broken link replaces none.
                if self._is_restarting or event.actor is None:
                    self._totals.num_restarts += 1
                    self._restart_steps.append(self._last_step)
                self._is_restarting = False
                self._on_restart(event)
            case "closed":
                self._ended_s = event.time_s
                self._meter.divide("end", event.time_s)

    def _on_restart(self, event: Event) -> None:
        if self._is_repeating:  # each actor that was replaced tells of the restart
            return
        self._meter.divide("restart", event.time_s, event.details["seconds"])
        if self._has_lost:
            self._meter.divide("repetition", event.time_s)
        self._is_repeating, self._has_lost = True, False

    def on_step_end(self, step: EndedStep) -> None:
        """Note that a step has ended whose results count."""
        if self._is_repeating:
            self._meter.divide("repetition", min(step.sent_s, step.ended_s))
            self._is_repeating = False
        busy_s = max((s.total_s for s in step.stats.values()), default=0.0)
        self._meter.divide("step", step.ended_s, min(busy_s, step.ended_s - step.sent_s))
        seconds = step.ended_s - max(step.sent_s, self._last_end_s)
        self._last_end_s, self._last_step = step.ended_s, step.number
        self._is_restarting = False
        name = step.name if step.name in self._names or len(self._names) < MOST_NAMES else "others"
        self._names.setdefault(name, _StepsOfName(name)).add(step, seconds)
        self._step_counts[bisect_left(STEP_BUCKETS, seconds)] += 1
        self._totals.step_s += seconds
        self._totals.sent_bytes += step.sent_bytes
        for actor, stats in step.stats.items():
            self._peak_bytes[actor] = stats.peak_bytes

    def state(self, now: MeshNow) -> RunState:
        """Return the run as it is now.

        Args:
            now: the present state of the mesh.
        """
        end_s = now.now_s if self._ended_s is None else self._ended_s
        is_at_a_step = now.num_under_way > 0 and not now.is_closed and not self._is_restarting
        return RunState(
            mesh=now,
            status=self._status(now),
            age_s=end_s - self._begun_s,
            begun_at=self._begun_at,
            steps=tuple(name.summary() for name in self._by_time()),
            goodput=self._meter.goodput(end_s, is_step_under_way=is_at_a_step),
            totals=replace(self._totals),
            memory=dict(self._memory(now)),
            events=tuple(self._events),
            latest=dict(self._latest),
            causes=causes_of(now.error) if now.error is not None else (),
            step_counts=tuple(accumulate(self._step_counts)),
            restart_steps=tuple(self._restart_steps),
        )

    def curves(self) -> tuple[StepCurves, ...]:
        """Return the history of each step function, that with the most time first."""
        return tuple(name.curves() for name in self._by_time())

    def _by_time(self) -> list[_StepsOfName]:
        return sorted(self._names.values(), key=lambda name: -name.total_s)

    def _status(self, now: MeshNow) -> Status:
        if now.error is not None:
            return "failed"
        if now.is_closed:
            return "cancelled" if now.is_cancelled else "closed"
        if not self._has_started:
            return "starting"
        return "restarting" if self._is_restarting else "running"

    def _memory(self, now: MeshNow) -> Iterator[tuple[int, ActorMemoryUse]]:
        for actor in sorted({*self._peak_bytes, *now.memory}):
            known = now.memory.get(actor, ActorMemoryUse())
            yield actor, replace(known, peak_bytes=self._peak_bytes.get(actor, 0))
