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
from jaxpp_async.compiler.lowering import peak_plan
from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.errors import MissingCost
from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.replay import Replay, ReplayDelays
from jaxpp_async.planning.samples import Samples
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Input, task_kind
from jaxpp_async.program.work import TaskWork
from jaxpp_async.timeline import Recorded, Timeline, make_timeline


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
    """

    timeline: Timeline
    step_s: StepTimes
    peak_bytes: tuple[int, ...]
    assumed: tuple[str, ...]

    def __repr__(self) -> str:
        return (
            f"<Simulation: {self._title()}; print() it, .timeline, .step_s, .peak_bytes, .assumed "
            f"({len(self.assumed)})>"
        )

    def _title(self) -> str:
        p10, p50, p90 = (f"{1e3 * x:.2f}" for x in self.step_s)
        return f"{p50} ms a step (p10 {p10}, p90 {p90}) on {len(self.peak_bytes)} actors"

    def __str__(self) -> str:
        lines = [f"simulated: {self._title()}", ""]
        for shares, peak in zip(self.timeline.shares, self.peak_bytes, strict=True):
            busy = shares.compute_s / shares.duration_s if shares.duration_s else 0.0
            lines.append(f"actor {shares.actor}: {busy:4.0%} computing, peak {peak:,} bytes of buffers")
        bill = self.timeline.bill
        lines += ["", f"{bill.efficiency:.0%} of what the schedule allows; `.timeline.bill` has the causes"]
        if self.assumed:
            lines += ["", "assumed, not measured:", *(f"  {text}" for text in self.assumed)]
        return "\n".join(lines)


def simulate(compiled: SimulatedStep, costs: CostModel, *, seed: int = 0, draws: int = 15) -> Simulation:
    """Simulate a compiled step without running it.

    The compiled programs are replayed once for each draw. In each draw every task, transfer and delay takes a
    time drawn from its distribution. The same arguments give the same result.

    Args:
        compiled: the compiled step: what `await step.compile(...)` or `compile_for` returned.
        costs: the costs of tasks and transfers.
        seed: the seed of the draws.
        draws: the number of draws, at least 1.

    Returns:
        The lengths of the step, a timeline of it, and the bytes that each actor needs.

    Raises:
        MissingCost: the cost model has no cost for a task or a transfer, which the message names.
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
    programs, works = compiled.compiled.programs, tuple(compiled.works)
    replay = Replay(programs)
    drawn = _Draws(replay, programs, works, costs, np.random.default_rng(seed), draws)
    times = replay.run(drawn.delays())
    lengths = times.last_s + drawn.draw(costs.reply, 1)[0]
    order = np.argsort(lengths, kind="stable")
    median = int(order[(draws - 1) // 2])
    recorded = {
        actor: Recorded(program, times.stamps(k, median), heard_s=float(lengths[median]))
        for k, (actor, program) in enumerate(zip(replay.actors, programs, strict=True))
    }
    p10, p50, p90 = np.quantile(lengths, (0.1, 0.5, 0.9), method="inverted_cdf").tolist()
    return Simulation(
        timeline=make_timeline(0, "simulated", 0.0, recorded, lambda: works),
        step_s=StepTimes(p10, p50, p90),
        peak_bytes=tuple(peak_plan(program).peak_bytes for program in programs),
        assumed=(*costs.assumed, *drawn.assumed),
    )


class _Draws:
    """The draws of all delays of a step.

    Args:
        replay: the step's programs, prepared.
        programs: the programs.
        works: the work of each executable.
        costs: the distributions to draw from.
        random: the source of the draws.
        count: the number of draws.

    Attributes:
        assumed: sentences, one for each number that was assumed and not measured.
    """

    def __init__(
        self,
        replay: Replay,
        programs: Sequence[ActorProgram],
        works: Sequence[TaskWork],
        costs: CostModel,
        random: np.random.Generator,
        count: int,
    ):
        self._replay, self._programs, self._works, self._costs = replay, programs, works, costs
        self._random, self._count = random, count
        self.assumed: list[str] = []

    def draw(self, samples: Samples, count: int) -> np.ndarray:
        """Return drawn values of shape (count, draws)."""
        if len(samples.seconds) == 1:
            return np.full((count, self._count), samples.seconds[0])
        return samples.draw(self._random.random((count, self._count)))

    def delays(self) -> ReplayDelays:
        costs, num_actors = self._costs, len(self._programs)
        num_runs, num_sends = len(self._replay.run_labels), len(self._replay.sends)
        occupied, latency = self._transfers()
        return ReplayDelays(
            begin_s=self.draw(costs.queue, 1) + self.draw(costs.skew, num_actors),
            arguments_s=self._arguments(),
            dispatch_s=self.draw(costs.dispatch, num_runs),
            run_s=self._runs(),
            wake_s=self.draw(costs.wake, num_runs),
            post_s=self.draw(costs.post, num_sends),
            occupied_s=occupied,
            latency_s=latency,
        )

    def _arguments(self) -> np.ndarray:
        late = np.zeros((len(self._programs), self._count))
        known = self._costs.arguments
        for row, program in zip(late, self._programs, strict=True):
            for i in program.instructions:
                if isinstance(i, Input) and i.arg in known:
                    np.maximum(row, self.draw(known[i.arg], 1)[0], out=row)
        return late

    def _runs(self) -> np.ndarray:
        executables, labels = self._replay.run_executables, self._replay.run_labels
        times = np.zeros((len(labels), self._count))
        formula: dict[str, dict[str, int]] = {}  # by key: the runs of each kind of task that has it
        for executable in np.unique(executables).tolist():
            rows = np.flatnonzero(executables == executable)
            kind, work = task_kind(labels[rows[0]]), self._works[executable]
            try:
                samples = self._costs.samples(work)
            except MissingCost as error:
                raise MissingCost(f"task {kind!r} of the step: {error}") from None
            if not self._costs.is_measured(work):
                formula.setdefault(work.key, {})[kind] = len(rows)
            times[rows] = self.draw(samples, len(rows))
        self.assumed += [
            f"{listed(list(kinds), 3)}: time computed from FLOPs and bytes ({sum(kinds.values())} runs)"
            for kinds in formula.values()
        ]
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
