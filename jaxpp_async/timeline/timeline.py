"""Combine the actors' parts of one step into a `Timeline`, which can be queried, drawn, printed as tables or
saved as a trace.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from rich.table import Table

from jaxpp_async.base.printable import visible
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.program.task_label import task_kind
from jaxpp_async.program.work import CutChoice, LoopCut, TaskWork
from jaxpp_async.timeline.advice import advise
from jaxpp_async.timeline.breakdown import StepBreakdown, TimeShares, break_down_step, divide_time
from jaxpp_async.timeline.clock_alignment import align_step
from jaxpp_async.timeline.drawing import draw_timeline
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
from jaxpp_async.timeline.trace import chrome_trace, read_steps, write_trace
from jaxpp_async.view import Drawable, Drawing
from jaxpp_async.view.table import table_as_text


def no_cut() -> None:
    """Return None, as the cut of a step whose cut is not known."""


@dataclass(frozen=True)
class Timeline(Drawable):
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
        find_cut: a function that returns `cut`.
        cut_choice: how that cut was chosen.
    """

    step: int
    name: str
    origin_s: float
    duration_s: float
    actors: tuple[ActorTimeline, ...]
    transfers: tuple[TimelineTransfer, ...]
    clock_error_s: float = 0.0
    count_works: Callable[[], Sequence[TaskWork]] = field(default=tuple, repr=False, compare=False)
    find_cut: Callable[[], LoopCut | None] = field(default=no_cut, repr=False, compare=False)
    cut_choice: CutChoice = ""

    @cached_property
    def works(self) -> tuple[TaskWork, ...]:
        """The work of each executable of the step, by its index, from which a cost model learns; empty if
        nobody knows. The work is counted when this is first read, which may take a second for a large step.
        """
        return tuple(self.count_works())

    @cached_property
    def cut(self) -> LoopCut | None:
        """The cut of the step's one loop into stages, by which a cost model knows which layers a task has.

        None if nobody knows, or if the step has no loop or several.
        """
        return self.find_cut()

    def __getstate__(self) -> dict[str, Any]:  # a function cannot be pickled
        known = {"works": self.works, "count_works": tuple, "cut": self.cut, "find_cut": no_cut}
        return {**self.__dict__, **known}

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
        return f"<Timeline: {self.title}; print() it, .events, .transfers, .shares, .bill, .write(path)>"

    @property
    def title(self) -> str:
        """A line of text that names the step, with its time and the number of actors."""
        clocks = f", clocks within {_time(self.clock_error_s)}" if self.clock_error_s else ""
        actors = f"{len(self.actors)} actor{'s' if len(self.actors) != 1 else ''}"
        return f"step {self.step} of {self.name!r}: {_time(self.duration_s)} on {actors}{clocks}"

    def __str__(self) -> str:
        tasks = [(kind, len(t), median(t), sum(t)) for kind, t in self.task_times.items()]
        tables = _shares_table(self.shares), _tasks_table(tasks), _breakdown_table(self.bill)
        return visible(
            "\n\n".join((self.title, *tables, "\n".join(("what to do:", *map(str, advise(self))))))
        )

    def to_drawing(self, **options: Any) -> Drawing:
        """Return the step as a drawing; see `drawing.draw_timeline`."""
        return draw_timeline(self, **options)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return this step as a dictionary of Chrome's trace events; see `chrome_trace`."""
        return chrome_trace([self])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write this step to a file, for Perfetto and for `load_timelines`; see `write_trace`."""
        write_trace(path, [self])


def load_timelines(path: str | os.PathLike[str]) -> list[Timeline]:
    """Return the steps of a file that `Timeline.write` or `write_trace` has written, without works.

    Args:
        path: the file.

    Raises:
        TimelineError: the file has no steps, or those of another version, or it is damaged.
        OSError: the file cannot be read.
    """
    return [
        Timeline(
            step=saved.step,
            name=saved.name,
            origin_s=saved.origin_s,
            duration_s=saved.duration_s,
            actors=saved.actors,
            transfers=pair_transfers(saved.actors),
            clock_error_s=saved.clock_error_s,
            cut_choice=saved.cut_choice,
        )
        for saved in read_steps(path)
    ]


def make_timeline(
    step: int,
    name: str,
    origin_s: float,
    recorded: Mapping[ActorId, Recorded],
    count_works: Callable[[], Sequence[TaskWork]] = tuple,
    find_cut: Callable[[], LoopCut | None] = no_cut,
    cut_choice: CutChoice = "",
) -> Timeline:
    """Return the timeline of a finished step.

    Args:
        step: the number of the step.
        name: the name of the step function.
        origin_s: when the controller sent the step, in seconds of the controller's clock.
        recorded: what the controller recorded of each actor's part.
        count_works: a function that returns the work of each executable of the step, by its index.
        find_cut: a function that returns the cut of the step's loop into stages, or None.
        cut_choice: how that cut was chosen.

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
        find_cut=find_cut,
        cut_choice=cut_choice,
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
    ratio = f"{bill.efficiency:z.0%} of what the schedule allows: {allowed}, {took}"
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
    return table_as_text(table, 200)
