"""Try every named schedule on a problem, each on the cut that suits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul

from jaxpp_async.planning.cut import KeptCounts, best_cut, equal_cut, peak_counts
from jaxpp_async.planning.evaluation import TaskTable, fits, task_number
from jaxpp_async.planning.problem import Assignment, Boundaries, PipelineProblem, StageCosts
from jaxpp_async.program.instructions import ActorId, Task
from jaxpp_async.schedules import NAMED, ControllableMemory, Schedule, stage_actors

QUICK_STATES = 3_000
"""The states of `best_cut` for one schedule; boundaries then move while that helps."""

PROMISING = 1.1
"""Boundaries move only if the step is at most this much longer than the shortest one so far."""


@dataclass(frozen=True)
class NamedOrder:
    """The task lists of a named schedule, which are the same for every cut.

    Attributes:
        name: the schedule as one would write it, such as `"Std1F1B(4)"`.
        num_stages: the number of stages.
        rows: one tuple of tasks per actor.
        actors: the actor of each stage.
        moments: see `peak_counts`.
        numbers: the rows with the numbers that a `TaskTable` gives to tasks, whatever the cut is.
    """

    name: str
    num_stages: int
    rows: tuple[tuple[Task, ...], ...]
    actors: tuple[ActorId, ...]
    moments: tuple[KeptCounts, ...]
    numbers: list[list[int]] = field(compare=False, repr=False)

    def peak_bytes(self, stages: StageCosts) -> tuple[float, ...]:
        """Return the memory of each actor, exactly as a replay of the lists counts it."""
        static = stages.static_bytes_of_actors(self.actors, len(self.rows))
        peaks = list(static)
        for moment in self.moments:
            held = sum(map(mul, moment.kept, stages.kept_bytes))
            held += sum(map(mul, moment.weight_kept, stages.weight_kept_bytes))
            peaks[moment.actor] = max(peaks[moment.actor], static[moment.actor] + held)
        return tuple(peaks)


@lru_cache(maxsize=64)
def named_order(schedule: Schedule, num_microbatches: int, num_actors: int) -> NamedOrder:
    """Return the task lists of a named schedule."""
    num_stages = schedule.num_stages
    rows = tuple(map(tuple, schedule.tasks(num_microbatches, num_actors)))
    name = f"{type(schedule).__name__}({num_stages})"
    if isinstance(schedule, ControllableMemory):
        name = f"ControllableMemory({num_stages}, activations={schedule.activations:g})"
    numbers = [[task_number(task, num_stages, num_microbatches) for task in row] for row in rows]
    return NamedOrder(name, num_stages, rows, stage_actors(rows), peak_counts(rows, num_stages), numbers)


def named_schedules(num_layers: int, num_actors: int, num_stages: int | None = None) -> Iterator[Schedule]:
    """Yield all named schedules that have at most as many stages as there are layers.

    Args:
        num_layers: the number of layers.
        num_actors: the number of actors.
        num_stages: the number of stages that they must have; None for any.
    """
    for schedule in NAMED:
        folds = schedule.stages_per_actor
        counts = [fold * num_actors for fold in folds]
        if num_stages is not None:
            above, left = divmod(num_stages, num_actors)
            suits = num_stages < num_actors if folds == (1,) else len(folds) > 1 and above > 1 and not left
            counts = [num_stages] if suits or num_stages in counts else []
        yield from (schedule(count) for count in counts if count <= num_layers)
    if 2 * num_actors <= num_layers and num_stages in (None, 2 * num_actors):
        half = (num_actors + 2) // 2  # of `VHalf`; with as many as actors the order is that of `ZeroBubbleV`
        for activations in sorted({(half + num_actors) // 2, num_actors - 1}):
            if half < activations < num_actors:
                yield ControllableMemory(2 * num_actors, activations=activations)


def named_orders(problem: PipelineProblem) -> Iterator[NamedOrder]:
    """Yield the task lists of all named schedules for a problem."""
    for schedule in named_schedules(len(problem.layers), problem.num_actors, problem.num_stages):
        yield named_order(schedule, problem.num_microbatches, problem.num_actors)


@dataclass(frozen=True, slots=True)
class Timed:
    """An assignment with its figures.

    Attributes:
        assignment: the cut and the task lists.
        step_s: the time of a step, in seconds.
        peak_bytes: the memory of each actor.
        fits: whether that is within the caps.
    """

    assignment: Assignment
    step_s: float
    peak_bytes: tuple[float, ...]
    fits: bool


def on_equal_cut(problem: PipelineProblem) -> list[Timed]:
    """Return every named schedule on stages of equally many layers, the fastest first."""
    found = []
    for order in named_orders(problem):
        cut = equal_cut(len(problem.layers), order.num_stages)
        found.append(_timed(problem, order, cut))
    return sorted(found, key=lambda timed: timed.step_s)


def on_best_cut(problem: PipelineProblem, *, rounds: int = 8, name: str | None = None) -> list[Timed]:
    """Return every named schedule that fits into the memory on some cut, the fastest first.

    Each starts on a cut with little work on the busiest actor, or on the equal one if that is faster. For the
    promising ones, one boundary at a time then moves by a layer while that makes the step shorter.

    Args:
        problem: the layers and the machine.
        rounds: how often all boundaries are tried.
        name: the name of the only schedule that is tried; None for all.
    """
    found: list[tuple[NamedOrder, Timed]] = []
    for order in named_orders(problem):
        if name not in (None, order.name):
            continue
        cuts = [
            best_cut(problem, order.actors, order.moments, max_states=QUICK_STATES),
            equal_cut(len(problem.layers), order.num_stages),
        ]
        timed = [_timed(problem, order, cut) for cut in cuts if cut is not None]
        fitting = [one for one in timed if one.fits]
        if fitting:
            found.append((order, min(fitting, key=lambda one: one.step_s)))
    found.sort(key=lambda pair: pair[1].step_s)
    climbed, best_s = [], found[0][1].step_s if found else 0.0
    for order, timed in found:
        if timed.step_s <= PROMISING * best_s:
            climbed.append(_climb(problem, order, timed, rounds))
            best_s = min(best_s, climbed[-1].step_s)
        else:
            climbed.append(timed)
    return sorted(climbed, key=lambda timed: timed.step_s)


def _climb(problem: PipelineProblem, order: NamedOrder, best: Timed, rounds: int) -> Timed:
    for _ in range(rounds):
        before = best
        for boundary in range(len(best.assignment.cut)):
            for step in (-1, 1):
                tried = moved(best.assignment.cut, boundary, step, len(problem.layers))
                if tried is not None:
                    timed = _timed(problem, order, tried)
                    if timed.fits and timed.step_s < best.step_s:
                        best = timed
        if best is before:
            break
    return best


def moved(cut: Sequence[int], boundary: int, step: int, num_layers: int) -> Boundaries | None:
    """Return a cut with one boundary moved, or None where a stage would become empty.

    Args:
        cut: the boundaries.
        boundary: the position in `cut` of the one that moves.
        step: by how many layers.
        num_layers: the number of layers.
    """
    bounds = (0, *cut, num_layers)
    if not bounds[boundary] < cut[boundary] + step < bounds[boundary + 2]:
        return None
    return (*cut[:boundary], cut[boundary] + step, *cut[boundary + 1 :])


def _timed(problem: PipelineProblem, order: NamedOrder, cut: Boundaries) -> Timed:
    stages = problem.stages(cut)
    table = TaskTable(stages, order.actors, problem.num_microbatches, problem.num_actors)
    peaks = order.peak_bytes(stages)
    step_s = table.step_s(order.numbers)
    assignment = Assignment(cut, order.rows, order.name)
    return Timed(assignment, step_s, peaks, fits(peaks, problem.caps))
