"""Search for a cut, a placement and an order with a short step, within the actors' memory.

A candidate is a cut, an actor for each stage, and the keys by which `list_schedule` orders the tasks; keys
belong to layers, so that they stay when a boundary moves. Simulated annealing changes all of them. With many
microbatches most candidates are judged by the first few, since a pipeline repeats itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from jaxpp_async.planning.cut import KeptCounts, best_cut, equal_cut
from jaxpp_async.planning.evaluation import TaskTable, fits
from jaxpp_async.planning.list_scheduling import Priorities, list_schedule
from jaxpp_async.planning.named import QUICK_STATES, Timed, named_orders, on_best_cut
from jaxpp_async.planning.order_search import improve_order, merge_backwards
from jaxpp_async.planning.problem import Assignment, Boundaries, Layer, PipelineProblem, StageCosts
from jaxpp_async.planning.search_moves import SearchMoves, SearchPoint
from jaxpp_async.program.instructions import ActorId

MAX_ITERATIONS, MAX_TASKS = 6_000, 2_900_000
"""The number of candidates that a search looks at unless it is told otherwise, and the number of tasks that
it orders for that: less than ten seconds of one core."""

POLISH_BLOCK = 50
"""The number of changes to single tasks between two calls of `on_progress`."""

SEARCHED = "searched"
"""The name of the assignments that a search makes."""

WORTHWHILE = 0.01
"""The least share of the best named schedule's step by which a searched one must be shorter."""


class NothingFits(ValueError):
    """A search found no order that fits into the memory."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        best: the fastest assignment found; it fits into the memory.
        named: the best named schedule on its best cut, from which the search started; None if no named
            schedule fits.
        points: where the chains of annealing ended, the best first. Another search of nearly the same problem
            can start from them.
    """

    best: Timed
    named: Timed | None
    points: tuple[SearchPoint, ...] = ()

    @property
    def gain(self) -> float:
        """The share of the best named schedule's step that the search saves; 1 if no named one fits."""
        return 1.0 if self.named is None else 1 - self.best.step_s / self.named.step_s

    def __str__(self) -> str:
        if self.named is None:
            return f"no named schedule fits; the searched order takes {self.best.step_s:.4g} s"
        name = self.named.assignment.name
        if self.gain < WORTHWHILE:
            return f"a search has nothing to win over {name}, which takes {self.named.step_s:.4g} s"
        return (
            f"the searched order takes {self.best.step_s:.4g} s, {self.gain:z.1%} less than {name} on its "
            f"best cut ({self.named.step_s:.4g} s)"
        )


def usual_iterations(problem: PipelineProblem) -> int:
    """Return how many candidates a search looks at unless it is told otherwise: fewer for large problems."""
    few = min(problem.num_microbatches, 3 * problem.num_actors)
    return min(MAX_ITERATIONS, max(300, MAX_TASKS // (3 * _usual_stages(problem) * few)))


def _usual_stages(problem: PipelineProblem) -> int:
    """Return the number of stages of a candidate that counts as one; others count by their stages."""
    return min(len(problem.layers), 2 * problem.num_actors)


def search(
    problem: PipelineProblem,
    *,
    iterations: int | None = None,
    seed: int = 0,
    named: Sequence[Timed] | None = None,
    points: Sequence[SearchPoint] = (),
    on_progress: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Search for the assignment with the shortest step that fits into the memory.

    The result is never slower than the best named schedule on its best cut. The same arguments give the same
    result.

    Args:
        problem: the layers and the machine.
        iterations: how many candidates to look at; `usual_iterations` unless given.
        seed: of the random numbers.
        named: what `on_best_cut` returns for the problem, if it is known already.
        points: where a search of nearly the same problem ended, such as one with another cap; this one starts
            from there.
        on_progress: a function that is told now and then how far the search is. An exception that it raises
            ends the search.

    Raises:
        NothingFits: nothing was found that fits into the memory.
    """
    iterations = usual_iterations(problem) if iterations is None else iterations
    named = on_best_cut(problem) if named is None else named
    annealing = _Annealing(problem, random.Random(seed), iterations, on_progress)
    starts = list(points) or _starts(problem, named)
    if not starts:
        raise NothingFits(_nothing_fits(problem))
    found, ends = annealing.run(starts)
    found += [annealing.polished(timed) for timed in named[:1]]
    best = min([*named[:1], *found], key=lambda timed: timed.step_s, default=None)
    if best is None:
        raise NothingFits(_nothing_fits(problem))
    return SearchResult(best, named[0] if named else None, ends)


def _nothing_fits(problem: PipelineProblem) -> str:
    """Return the message that no cut fits, with the least memory that one stage an actor would need."""
    sizes = tuple(Layer(layer.static_bytes + layer.kept_bytes, 0, 0) for layer in problem.layers)
    num_stages = min(problem.num_actors, len(sizes))
    cut = best_cut(PipelineProblem(sizes, num_stages, 1), range(num_stages)) or ()
    bounds = (0, *cut, len(sizes))
    needs = [sum(layer.forward_s for layer in sizes[first:end]) for first, end in pairwise(bounds)]
    stage = needs.index(max(needs))
    static = sum(layer.static_bytes for layer in problem.layers[bounds[stage] : bounds[stage + 1]])
    if max(needs) <= min(problem.caps):
        return "no cut and placement was found that fits into the memory; try more iterations"
    return (
        f"no cut into stages fits: layers {bounds[stage]} to {bounds[stage + 1] - 1} of the most even cut "
        f"need {needs[stage]:.4g} bytes for one microbatch, {static:.4g} of them static; the largest cap is "
        f"{max(problem.caps):.4g} bytes"
    )


# ---------------------------------------------------------------- candidates


def _natural_offsets(stages: StageCosts, period_s: float) -> list[float]:
    """Return when the tasks of one microbatch alone would start, weight gradients one period later."""
    offsets: list[float] = []
    now = 0.0
    for time_s in stages.forward_s:
        offsets.append(now)
        now += time_s
    backwards = []
    for time_s in reversed(stages.input_gradient_s):
        backwards.append(now)
        now += time_s
    backwards.reverse()
    return offsets + backwards + [start + period_s for start in backwards]


def _busiest_s(stages: StageCosts, actors: Sequence[ActorId]) -> float:
    """Return the work of the busiest actor for one microbatch, with whole backwards."""
    loads: dict[ActorId, float] = {}
    for stage, actor in enumerate(actors):
        loads[actor] = loads.get(actor, 0.0) + stages.forward_s[stage] + stages.backward_s(stage)
    return max(loads.values())


def _starts(problem: PipelineProblem, named: Sequence[Timed]) -> list[SearchPoint]:
    """Return the candidates that the search starts from.

    Args:
        problem: the layers and the machine.
        named: named schedules that fit, the fastest first; the orders of the first few are among the starts.
    """
    found = [_as_candidate(problem, timed.assignment) for timed in named[:3]]
    for actors in sorted({order.actors for order in named_orders(problem)}, key=lambda it: (len(it), it)):
        if len(actors) <= 2 * problem.num_actors:
            # One microbatch has to fit.
            moments = [
                KeptCounts(actor, tuple(int(other == actor) for other in actors), (0,) * len(actors))
                for actor in range(problem.num_actors)
            ]
            cut = best_cut(problem, actors, moments, max_states=QUICK_STATES)
            if cut is not None:
                found.append(_plain(problem, cut, actors))
    if not found and (problem.num_stages is not None or len(problem.layers) < problem.num_actors):
        num_stages = problem.num_stages or len(problem.layers)
        actors = tuple(stage % problem.num_actors for stage in range(num_stages))
        found.append(_plain(problem, equal_cut(len(problem.layers), num_stages), actors))
    return found


def _plain(problem: PipelineProblem, cut: Boundaries, actors: tuple[ActorId, ...]) -> SearchPoint:
    num_layers = len(problem.layers)
    limits = (problem.num_microbatches,) * num_layers
    return SearchPoint(cut, actors, (0.0,) * (3 * num_layers), limits, 0.0, (False,) * num_layers)


def _as_candidate(problem: PipelineProblem, assignment: Assignment) -> SearchPoint:
    """Return a candidate whose keys resemble the times of an assignment's tasks."""
    cut, actors = assignment.cut, assignment.actors
    stages, count = problem.stages(cut), problem.num_microbatches
    table = TaskTable(stages, actors, count, problem.num_actors)
    ends = table.end_times(table.rows_of(assignment.rows))
    period = _busiest_s(stages, actors)
    offsets = _natural_offsets(stages, period)
    num, num_layers = len(stages), len(problem.layers)
    shifts = [0.0] * (3 * num_layers)
    for place in range(3 * num):
        kind, stage = divmod(place, num)
        first = place * count
        if ends[first] < 0:
            continue
        lateness = (
            sum(ends[first + i] - table.durations[first + i] - i * period for i in range(count)) / count
            - offsets[place]
        )
        shifts[kind * num_layers + (0, *cut)[stage]] = lateness / (period or 1.0)
    whole = [False] * num_layers
    for row in assignment.rows:
        for task in row:
            if task.ty == "bwd":
                whole[(0, *cut)[task.stage]] = True
    return replace(_plain(problem, cut, actors), shifts=tuple(shifts), whole=tuple(whole))


# ---------------------------------------------------------------- annealing


@dataclass(slots=True)
class _Walk:
    """One chain of annealing: where it is, and the best that it has seen."""

    at: SearchPoint
    cost: float
    best: SearchPoint
    best_cost: float


class _Annealing:
    """The search itself.

    Args:
        problem: the layers and the machine.
        rng: the source of random numbers.
        iterations: how many candidates to look at.
        on_progress: see `search`.
    """

    def __init__(
        self,
        problem: PipelineProblem,
        rng: random.Random,
        iterations: int,
        on_progress: Callable[[str], None],
    ) -> None:
        self.problem, self.rng, self.iterations = problem, rng, iterations
        self.on_progress, self.looked_at = on_progress, 0.0
        self.few = min(problem.num_microbatches, 3 * problem.num_actors)
        self.tables: dict[tuple[Boundaries, tuple[ActorId, ...], int], TaskTable] = {}
        tasks = len(problem.layers) * problem.num_microbatches
        self.polish = min(iterations, 200_000 // tasks)
        self.moves = SearchMoves(problem, rng)

    def run(self, starts: Sequence[SearchPoint]) -> tuple[list[Timed], tuple[SearchPoint, ...]]:
        """Anneal from all starts, then go on with the best; return what was found, and where they ended."""
        few = self.few
        walks = [_Walk(start, math.inf, start, math.inf) for start in starts]
        for walk in walks:
            walk.cost = walk.best_cost = self._cost(walk.at, few)
        # Half of the walks go on after each round, with twice the steps each.
        num_rounds = max(1, math.ceil(math.log2(len(walks))) + 1)
        full = few < self.problem.num_microbatches
        share = self.iterations * (0.8 if full else 1.0) / num_rounds
        heat = 0.005
        for _ in range(num_rounds):
            for walk in walks:
                self._walk(walk, int(share / len(walks)), few, heat, heat / 10)
            # More of them if the few microbatches by which they are judged say less.
            num_walks = max(1, (len(walks) + full) // 2)
            walks = sorted(walks, key=lambda walk: walk.best_cost)[:num_walks]
            heat *= 0.8
        if full:
            for walk in walks:
                walk.at = walk.best
                walk.cost = walk.best_cost = self._cost(walk.at, self.problem.num_microbatches)
                steps = int(self.iterations * 0.2 * few / self.problem.num_microbatches)
                self._walk(walk, steps, self.problem.num_microbatches, 0.001, 0.0001)
        found = [timed for walk in walks if (timed := self._timed(walk.best)) is not None]
        return found, tuple(walk.best for walk in walks)

    def polished(self, timed: Timed) -> Timed:
        """Return an assignment whose order is improved task by task."""
        assignment = timed.assignment
        table = self._table(assignment.cut, assignment.actors, self.problem.num_microbatches)
        return self._polished(table, assignment.cut, table.rows_of(assignment.rows))

    def _walk(self, walk: _Walk, steps: int, count: int, heat: float, end_heat: float) -> None:
        """Take steps of simulated annealing.

        Args:
            walk: the chain, which is changed.
            steps: how many candidates of the usual number of stages to look at. Others take as much more or
                less time as they have stages, and count so much.
            count: the number of microbatches by which they are judged.
            heat, end_heat: the share of a step by which a candidate may well be worse, at the start and at
                the end.
        """
        walk.at, walk.cost = walk.best, walk.best_cost
        done, usual = 0.0, _usual_stages(self.problem)
        while done < steps:
            part = (len(walk.at.cut) + 1) / usual
            self.looked_at += part
            if self.looked_at // 16 > (self.looked_at - part) // 16:
                self.on_progress(f"searching, {self.looked_at:.0f} of {self.iterations}")
            bar = -math.log(1 - self.rng.random()) * heat * (end_heat / heat) ** (done / steps)
            done += part
            most = walk.cost * (1 + bar) if walk.cost < math.inf else math.inf
            candidate = self._promising(walk.at, most)
            if candidate is None:
                continue
            cost = self._cost(candidate, count)
            if cost <= most:
                walk.at, walk.cost = candidate, cost
                if cost < walk.best_cost:
                    walk.best, walk.best_cost = candidate, cost

    def _table(self, cut: Boundaries, actors: tuple[ActorId, ...], count: int) -> TaskTable:
        key = (cut, actors, count)
        if key not in self.tables:
            if len(self.tables) > 200:
                self.tables.clear()
            self.tables[key] = TaskTable(self.problem.stages(cut), actors, count, self.problem.num_actors)
        return self.tables[key]

    def _priorities(self, candidate: SearchPoint, stages: StageCosts) -> Priorities:
        period = _busiest_s(stages, candidate.actors)
        firsts = (0, *candidate.cut)
        num_layers = len(self.problem.layers)
        shifts = [
            candidate.shifts[kind * num_layers + first] * period for kind in range(3) for first in firsts
        ]
        offsets = map(float.__add__, _natural_offsets(stages, period), shifts)
        limits = tuple(candidate.limits[first] for first in firsts)
        whole = tuple(candidate.whole[first] for first in firsts)
        return Priorities(period, tuple(offsets), limits, candidate.patience, whole)

    def _promising(self, candidate: SearchPoint, most: float) -> SearchPoint | None:
        """Return a neighbour whose busiest actor can be done before `most`; None if several have no such."""
        for _ in range(8):
            neighbour = self.moves.neighbour(candidate)
            if neighbour is None:
                continue
            if neighbour.cut == candidate.cut and neighbour.actors == candidate.actors:
                return neighbour
            if self.moves.busiest_s(neighbour) * self.problem.num_microbatches <= most:
                return neighbour
        return None

    def _cost(self, candidate: SearchPoint, count: int) -> float:
        """Return the time of a step, and a little for the ends of all actors; infinite if it does not fit.

        Args:
            candidate: what to judge.
            count: by how many microbatches; the others are taken to go on at the rate of the last ones.
        """
        problem = self.problem
        table = self._table(candidate.cut, candidate.actors, count)
        busiest = _busiest_s(table.stages, candidate.actors)
        found = list_schedule(table, self._priorities(candidate, table.stages), problem.caps)
        if found is None:
            return math.inf
        ends, sum_of_ends, rows = found
        step_s = max(ends[row[-1]] for row in rows if row)
        if count < problem.num_microbatches:
            half = problem.num_actors
            first = len(table.stages) * count  # the input gradients of stage 0
            rate = (ends[first + 2 * half] - ends[first + half]) / half
            step_s += (problem.num_microbatches - count) * max(rate, busiest)
        return step_s + 0.01 * sum_of_ends / problem.num_actors

    def _timed(self, candidate: SearchPoint) -> Timed | None:
        problem = self.problem
        table = self._table(candidate.cut, candidate.actors, problem.num_microbatches)
        found = list_schedule(table, self._priorities(candidate, table.stages), problem.caps)
        if found is None:
            return None
        return self._polished(table, candidate.cut, self._merged(table, found[2]))

    def _merged(self, table: TaskTable, rows: list[list[int]]) -> list[list[int]]:
        return merge_backwards(table, rows, evaluations=min(200, self.polish))

    def _polished(self, table: TaskTable, cut: Boundaries, rows: list[list[int]]) -> Timed:
        for done in range(0, self.polish, POLISH_BLOCK):
            self.on_progress("searching, the order of single tasks")
            steps = min(POLISH_BLOCK, self.polish - done)
            rows = improve_order(table, rows, self.problem.caps, self.rng, steps)
        rows = self._merged(table, rows)
        assignment = Assignment(cut, table.tasks_of(rows), SEARCHED)
        peaks = table.peak_bytes(rows)
        return Timed(assignment, table.step_s(rows), peaks, fits(peaks, self.problem.caps))
