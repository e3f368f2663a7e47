"""Simulate a compiled step: when each task and transfer happens, and how many bytes each actor needs.

No process is started and nothing is computed: the compiled programs are replayed in virtual time with the
times of a cost model.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxpp_async.base.printable import listed
from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.errors import CostError
from jaxpp_async.planning.calibration import TaskTimes
from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.replay import Replay, ReplayDelays, ReplayTimes
from jaxpp_async.planning.samples import Samples
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.buffer_table import peak_plan
from jaxpp_async.program.instructions import Run
from jaxpp_async.program.task_label import TaskLabel, task_kind
from jaxpp_async.program.work import TaskWork
from jaxpp_async.schedules.validate import plural
from jaxpp_async.timeline import Recorded, Timeline, make_timeline
from jaxpp_async.view import format_time

SHORT_TASK_S = 50e-6
"""The time of a task in seconds below which the time until a task begins is most of a step."""


class SimulatedStep(Protocol):
    """A compiled step that can be simulated: a `CompiledStep`, or the result of `compile_for`."""

    @property
    def compiled(self) -> CompilePlan: ...

    @property
    def works(self) -> Sequence[TaskWork]: ...


class StepTimes(NamedTuple):
    """The length of a step in seconds at three quantiles of the draws.

    The length is the time from when the controller sends the step until it has all replies.
    """

    p10: float
    p50: float
    p90: float

    def as_text(self) -> str:
        """Return the lengths as text, such as `"20 ms a step (p10 19 ms, p90 22 ms)"`."""
        p10, p50, p90 = (format_time(seconds, "s") for seconds in self)
        return f"{p50} a step (p10 {p10}, p90 {p90})"


@dataclass(frozen=True)
class Simulation:
    """The result of `simulate`; `print` shows a short report.

    Attributes:
        timeline: the timeline of the draw whose length is the median, which has the same tables, bill and
            trace as a measured one.
        step_s: the length of the step, at quantiles of the draws.
        peak_bytes: by actor, the most bytes of buffers that the actor holds at one time. This is exact: the
            actors measure the same number (`StepStats.peak_bytes`).
        assumed: sentences, one for each number that was assumed and not measured.
        loop_s: the time of the microbatch loops by the mean costs, in seconds: from the dispatch of the first
            of their tasks to the end of the last one.
    """

    timeline: Timeline
    step_s: StepTimes
    peak_bytes: tuple[int, ...]
    assumed: tuple[str, ...]
    loop_s: float = 0.0

    def __repr__(self) -> str:
        return (
            f"<Simulation: {self._title()}; print() it, .timeline, .step_s, .peak_bytes, .assumed "
            f"({len(self.assumed)})>"
        )

    def _title(self) -> str:
        return f"{self.step_s.as_text()} on {plural(len(self.peak_bytes), 'actor')}"

    def __str__(self) -> str:
        return "\n".join([self.summary("`.timeline.bill` has the causes"), *self.assumed_lines()])

    def summary(self, causes_shown_by: str) -> str:
        """Return the length of the step, and how busy each actor is, as text.

        Args:
            causes_shown_by: words that say how to see what the rest of the time goes to.
        """
        lines = [f"simulated: {self._title()}", ""]
        for shares, peak in zip(self.timeline.shares, self.peak_bytes, strict=True):
            busy = shares.compute_s / shares.duration_s if shares.duration_s else 0.0
            lines.append(f"actor {shares.actor}: {busy:z4.0%} computing, peak {peak:,} bytes of buffers")
        bill = self.timeline.bill
        num_actors = len(self.timeline.actors)
        at_work = {
            run.actor
            for actor in self.timeline.actors
            for run in actor.runs
            if TaskLabel.parse(run.label).stage is not None
        }
        if 0 < len(at_work) < num_actors:
            lines.append(
                f"{num_actors - len(at_work)} of {plural(num_actors, 'actor')} without a stage; ask for "
                f"{plural(len(at_work), 'actor')}, or cut the step into more stages"
            )
        lines += ["", f"{bill.efficiency:z.0%} of what the schedule allows; {causes_shown_by}"]
        return "\n".join(lines)

    def assumed_lines(self) -> list[str]:
        """Return the lines that list what was assumed, after an empty line; none if all was measured."""
        if not self.assumed:
            return []
        return ["", "assumed, not measured:", *(f"  {text}" for text in self.assumed)]


def simulate(compiled: SimulatedStep, costs: CostModel, *, seed: int = 0, draws: int = 15) -> Simulation:
    """Simulate a compiled step without running it.

    The compiled programs are replayed once for each draw. In each draw every task, transfer and delay takes a
    time drawn from its distribution. The same arguments give the same result.

    Args:
        compiled: the compiled step: what `await step.compile(...)` or `compile_for` returned.
        costs: the costs of tasks and transfers.
        seed: the seed of the draws.
        draws: the number of draws, at least 1; one is enough where no cost varies.

    Returns:
        The lengths of the step, a timeline of it, and the bytes that each actor needs.

    Raises:
        MissingCost: the cost model has no cost for a task or a transfer, which the message names.
        CostError: the step takes no finite time.
        TypeError: `compiled` is no compiled step.
        ValueError: the number of draws is less than 1.
    """
    if operator.index(draws) < 1:
        raise ValueError(f"draws={draws}: a simulation needs at least one draw")
    if not hasattr(compiled, "works") or not hasattr(compiled, "compiled"):
        raise TypeError(
            f"simulate takes a compiled step, as `await step.compile(...)` and `compile_for` return it, and "
            f"not {compiled!r:.80}"
        )
    draws = 1 if costs.is_constant else draws
    programs, works = compiled.compiled.programs, tuple(compiled.works)
    replay = Replay(programs, costs.arguments)
    times = TaskTimes(costs, compiled.compiled.cut)
    drawn = _Draws(replay, programs, works, costs, times, np.random.default_rng(seed), draws)
    replayed = replay.run(drawn.delays())
    lengths = replayed.last_s + drawn.draw(costs.reply, 1)[0]
    if not np.isfinite(lengths).all():
        raise CostError("the simulated step takes no finite time; correct the costs of its tasks and links")
    order = np.argsort(lengths, kind="stable")
    median = int(order[(draws - 1) // 2])
    recorded = {
        actor: Recorded(program, replayed.stamps(k, median), heard_s=float(lengths[median]))
        for k, (actor, program) in enumerate(zip(replay.actors, programs, strict=True))
    }
    means = replayed
    if not costs.is_constant:
        mean = _Draws(replay, programs, works, costs, times, np.random.default_rng(seed), 0)
        means = replay.run(mean.delays())
    p10, p50, p90 = np.quantile(lengths, (0.1, 0.5, 0.9), method="inverted_cdf").tolist()
    return Simulation(
        timeline=make_timeline(
            0,
            "simulated",
            0.0,
            recorded,
            lambda: works,
            compiled.compiled.find_cut,
            compiled.compiled.cut_choice,
        ),
        step_s=StepTimes(p10, p50, p90),
        peak_bytes=tuple(peak_plan(program).peak_bytes for program in programs),
        assumed=(*costs.assumed, *drawn.assumed),
        loop_s=_loop_s(means, programs, costs),
    )


def _is_of_microbatch(run: Run) -> bool:
    return TaskLabel.parse(run.label).microbatch is not None


def _loop_s(times: ReplayTimes, programs: Sequence[ActorProgram], costs: CostModel) -> float:
    """Return the time from the dispatch of the first task of a loop to the end of the last one."""
    instructions = (i for program in programs for i in program.instructions)
    rows = [k for k, i in enumerate(instructions) if isinstance(i, Run) and _is_of_microbatch(i)]
    if not rows:
        return 0.0
    return float(times.end_s[rows, 0].max() - times.begin_s[rows, 0].min() + costs.dispatch.mean)


class _Draws:
    """The draws of all delays of a step.

    Args:
        replay: the step's programs, prepared.
        programs: the programs.
        works: the work of each executable.
        costs: the distributions to draw from.
        times: the times of tasks.
        random: the source of the draws.
        count: the number of draws; 0 for one replay with the mean of every delay.

    Attributes:
        assumed: sentences, one for each number that was assumed and not measured.
    """

    def __init__(
        self,
        replay: Replay,
        programs: Sequence[ActorProgram],
        works: Sequence[TaskWork],
        costs: CostModel,
        times: TaskTimes,
        random: np.random.Generator,
        count: int,
    ):
        self._replay, self._programs, self._works, self._costs = replay, programs, works, costs
        self._times, self._random = times, random
        self._count, self._is_mean = max(count, 1), not count
        self.assumed: list[str] = []

    def draw(self, samples: Samples, count: int) -> np.ndarray:
        """Return drawn values of shape (count, draws)."""
        if self._is_mean or len(samples.seconds) == 1:
            return np.full((count, self._count), samples.mean)
        return samples.draw(self._random.random((count, self._count)))

    def delays(self) -> ReplayDelays:
        costs, num_actors = self._costs, len(self._programs)
        num_runs, num_sends = len(self._replay.run_labels), len(self._replay.sends)
        occupied, latency = self._transfers()
        late = [self.draw(costs.arguments[arg], 1) for arg in self._replay.late_inputs]
        return ReplayDelays(
            begin_s=self.draw(costs.queue, 1) + self.draw(costs.skew, num_actors),
            arguments_s=np.concatenate([np.zeros((0, self._count)), *late]),
            dispatch_s=self.draw(costs.dispatch, num_runs),
            run_s=self._runs(),
            wake_s=self.draw(costs.wake, num_runs),
            post_s=self.draw(costs.post, num_sends),
            occupied_s=occupied,
            latency_s=latency,
        )

    def _runs(self) -> np.ndarray:
        executables, labels = self._replay.run_executables, self._replay.run_labels
        times = np.zeros((len(labels), self._count))
        computed: dict[
            bool, dict[str, int]
        ] = {}  # runs of kinds not measured, by whether stages calibrate them
        for executable in np.unique(executables).tolist():
            rows, work = np.flatnonzero(executables == executable), self._works[executable]
            is_measured = self._costs.is_measured(work)
            by_kind = {task_kind(labels[rows[0]]): rows.tolist()}
            if self._times.is_calibrated and not is_measured:  # stages that compute the same share it
                by_kind = _by_kind(labels, rows.tolist())
            for kind, of_kind in by_kind.items():
                times[of_kind] = self.draw(self._times.samples(work, kind), len(of_kind))
                if not is_measured:
                    runs = computed.setdefault(self._times.is_known(work, kind), {})
                    runs[kind] = runs.get(kind, 0) + len(of_kind)
        self.assumed += [
            f"{plural(sum(runs.values()), 'run')} of {plural(len(runs), 'task')}, by FLOPs and bytes"
            f"{', and the measured stages that had their layers' * known}: {listed(list(runs), 4)}"
            for known, runs in computed.items()
        ]
        is_short = times.size and times.mean(axis=1).max() < SHORT_TASK_S
        if is_short and not self._costs.tasks and self._costs.dispatch.mean == 0:
            self.assumed.append(
                f"every task is shorter than {1e6 * SHORT_TASK_S:.0f} us, and the time until a task begins, "
                "which was assumed to be 0, will be most of the step"
            )
        return times

    def _transfers(self) -> tuple[np.ndarray, np.ndarray]:
        sends = self._replay.sends
        occupied, latency = np.zeros((2, len(sends), self._count))
        kinds: dict[tuple[int, int], tuple[str, str]] = {}
        rows: dict[str, list[int]] = {}
        for row, (a, b, _) in enumerate(sends):
            if (a, b) not in kinds:
                kinds[a, b] = self._costs.link_between(a, b)
            rows.setdefault(kinds[a, b][1], []).append(row)
        for kind, of_kind in rows.items():
            link = self._costs.links[kind]
            occupied[of_kind] = [[link.occupied_s(sends[row][2])] for row in of_kind]
            latency[of_kind] = self.draw(link.latency, len(of_kind))
        self.assumed += [
            f"a transfer of the kind {wanted!r} takes as long as one of the kind {kind!r}"
            for wanted, kind in dict.fromkeys(kinds.values())
            if wanted != kind
        ]
        return occupied, latency


def _by_kind(labels: Sequence[str], rows: Sequence[int]) -> dict[str, list[int]]:
    """Return some rows by the kind of task that their labels name."""
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(task_kind(labels[row]), []).append(row)
    return found
