"""Cut layers into stages so that no actor has more work than it must, under the actors' memory.

`schedules.cut.balanced_cut` minimises the largest stage, for the compiler. The functions here also know which
stages share an actor, and how much memory an order of tasks takes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from operator import itemgetter

from jaxpp_async.planning.problem import Boundaries, PipelineProblem
from jaxpp_async.program.instructions import ActorId, Task
from jaxpp_async.schedules.cut import balanced_cut

MAX_STATES, MAX_UNANSWERED = 20_000, 2
"""The number of states after which the question whether a cut with so much work exists is left unanswered,
and the number of unanswered questions after which the best cut found so far has to do."""


@dataclass(frozen=True, slots=True)
class KeptCounts:
    """How many microbatches' activations an actor holds at a moment when it may need the most memory.

    Attributes:
        actor: the actor.
        kept: how many microbatches of each stage have run the forward and not yet the input gradient.
        weight_kept: how many have run the input gradient and not yet the weight gradient.
    """

    actor: ActorId
    kept: tuple[int, ...]
    weight_kept: tuple[int, ...]


def peak_counts(rows: Sequence[Sequence[Task]], num_stages: int) -> tuple[KeptCounts, ...]:
    """Return the moments at which task lists may need the most memory, whatever a stage's bytes are.

    An actor's peak of any cut is its largest need at one of these moments. No moment is returned at which
    another one of the same actor has at least as many activations of every stage.

    Args:
        rows: one list of tasks per actor.
        num_stages: the number of stages.
    """
    found = []
    for actor, row in enumerate(rows):
        counts = [0] * (2 * num_stages)
        moments: set[tuple[int, ...]] = set()
        for task in row:
            if task.ty == "fwd":
                counts[task.stage] += 1
                moments.add(tuple(counts))
            elif task.ty == "bwd_weight":
                counts[num_stages + task.stage] -= 1
            else:
                counts[task.stage] -= 1
                if task.ty == "bwd_input":
                    counts[num_stages + task.stage] += 1
                    moments.add(tuple(counts))
        largest: list[tuple[int, ...]] = []
        for moment in sorted(moments, key=sum, reverse=True):
            if not any(all(map(int.__le__, moment, other)) for other in largest):
                largest.append(moment)
        found += [KeptCounts(actor, m[:num_stages], m[num_stages:]) for m in largest]
    return tuple(found)


def equal_cut(num_layers: int, num_stages: int) -> Boundaries:
    """Return the cut into stages of equally many layers, as nearly as that can be.

    Raises:
        ValueError: there are more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"num_stages: expected 1 to {num_layers} for {num_layers} layers, got {num_stages}")
    return tuple(stage * num_layers // num_stages for stage in range(1, num_stages))


def best_cut(
    problem: PipelineProblem,
    actors: Sequence[ActorId],
    moments: Sequence[KeptCounts] = (),
    *,
    max_states: int = MAX_STATES,
) -> Boundaries | None:
    """Return a cut with the least work on the busiest actor.

    The work that is asked for is bisected; whether a cut with so much work exists says a dynamic program
    over (stage, first layer, what each actor has already), which forgets actors without a stage to come. So
    a cut into one stage an actor takes polynomial time. The cut is the best one unless questions stay
    unanswered: those that take more than `max_states` states, which small problems never do. Then one or two
    boundaries at a time move by a layer while that helps.

    Args:
        problem: the layers and the machine.
        actors: the actor of each stage: `range(S)` for the least largest stage, `[0, 1, 1, 0]` for a V of
            two actors.
        moments: the moments at which an actor must not need more than its cap.
        max_states: the number of states after which a question is left unanswered.

    Returns:
        The boundaries; None if no cut was found that fits into the memory.
    """
    if not moments and len(set(actors)) == len(actors) <= len(problem.layers):
        marks = balanced_cut([layer.work_s for layer in problem.layers], len(actors))
        return tuple(mark + 1 for mark in marks)
    fold = _Fold(problem, actors, moments, max_states)
    most, least = fold.total, max(fold.total / len(set(actors)), fold.largest_layer)
    best = fold.cut_within(most)
    while best is not None:
        most = fold.busiest(best)
        if most - least <= 1e-6 * most:
            return best
        if fold.num_unanswered >= MAX_UNANSWERED:
            return fold.improved(best)
        middle = (least + most) / 2
        better = fold.cut_within(middle)
        if better is None:
            least = middle
        else:
            best = better
    return None


class _Fold:
    """The dynamic program of `best_cut`; its arguments are those of `best_cut`."""

    def __init__(
        self,
        problem: PipelineProblem,
        actors: Sequence[ActorId],
        moments: Sequence[KeptCounts],
        max_states: int,
    ) -> None:
        layers = problem.layers
        self.actors, self.num_layers, self.num_stages = tuple(actors), len(layers), len(actors)
        per_stage = 3 * problem.dispatch_s
        self.work = list(accumulate((layer.work_s for layer in layers), initial=0.0))
        self.per_stage = per_stage
        self.total = self.work[-1] + per_stage * self.num_stages
        self.scale = 1e12 / (self.total or 1.0)  # works that differ in the last digits count as the same
        self.largest_layer = max(layer.work_s for layer in layers) + per_stage
        self.caps = [cap * (1 + 1e-9) for cap in problem.caps]
        kept = list(accumulate((layer.kept_bytes for layer in layers), initial=0.0))
        weight_kept = list(accumulate((layer.weight_kept_bytes for layer in layers), initial=0.0))
        static = list(accumulate((layer.static_bytes for layer in layers), initial=0.0))
        # Sums of bytes up to each layer for each stage's moments, so that a stage's need is a difference.
        by_actor = [[m for m in moments if m.actor == actor] for actor in range(problem.num_actors)]
        self.needs = [
            [
                [
                    s + m.kept[stage] * k + m.weight_kept[stage] * w
                    for s, k, w in zip(static, kept, weight_kept, strict=True)
                ]
                for m in by_actor[actor]
            ]
            or [static]
            for stage, actor in enumerate(actors)
        ]
        self.num_moments = [max(1, len(m)) for m in by_actor]
        # The actors that have a stage to come: what others hold does not matter any more.
        self.open = [sorted(set(actors[stage:])) for stage in range(self.num_stages + 1)]
        # With one actor twice, since `itemgetter` of one position returns no tuple.
        self.of_open = [itemgetter(*open_, open_[-1]) for open_ in self.open[:-1]]
        self.max_states, self.num_unanswered = max_states, 0

    def busiest(self, cut: Boundaries) -> float:
        """Return the work of the busiest actor."""
        loads = [0.0] * (max(self.actors) + 1)
        for actor, first, end in zip(self.actors, (0, *cut), (*cut, self.num_layers), strict=True):
            loads[actor] += self.work[end] - self.work[first] + self.per_stage
        return max(loads)

    def improved(self, cut: Boundaries) -> Boundaries:
        """Return a cut from which no move of one or two boundaries by a layer gives less busy actors.

        The search minimises the sum of high powers of the actors' works, so that moves that leave the busiest
        actor as it is count, too.
        """
        bounds = [0, *cut, self.num_layers]
        work, actors = self.work, self.actors
        loads = [0.0] * (max(actors) + 1)
        for stage, actor in enumerate(actors):
            loads[actor] += work[bounds[stage + 1]] - work[bounds[stage]]
        unit = max(loads) or 1.0
        singles = [((k, step),) for k in range(1, self.num_stages) for step in (-1, 1)]
        pairs = [(*one, *two) for one, two in combinations(singles, 2) if one[0][0] != two[0][0]]
        is_better = True
        while is_better:
            is_better = False
            for moves in (*singles, *pairs):
                changes: dict[ActorId, float] = {}
                for k, step in moves:
                    here = bounds[k]
                    moved = work[here + step] - work[here]
                    for actor, change in ((actors[k - 1], moved), (actors[k], -moved)):
                        changes[actor] = changes.get(actor, 0.0) + change
                gain = sum(
                    (loads[actor] / unit) ** 16 - ((loads[actor] + change) / unit) ** 16
                    for actor, change in changes.items()
                )
                if gain <= 1e-9:
                    continue
                tried = list(bounds)
                for k, step in moves:
                    tried[k] += step
                if all(first < end for first, end in pairwise(tried)) and self.fits(tried):
                    is_better, bounds = True, tried
                    for actor, change in changes.items():
                        loads[actor] += change
        return tuple(bounds[1:-1])

    def fits(self, bounds: Sequence[int]) -> bool:
        """Return whether no actor needs more than its cap at one of its moments.

        Args:
            bounds: the first layer of each stage, and the number of layers.
        """
        needs = [[0.0] * count for count in self.num_moments]
        for stage, actor in enumerate(self.actors):
            for k, sums in enumerate(self.needs[stage]):
                needs[actor][k] += sums[bounds[stage + 1]] - sums[bounds[stage]]
        return all(max(mine) <= cap for mine, cap in zip(needs, self.caps, strict=True))

    def cut_within(self, limit: float) -> Boundaries | None:
        """Return a cut that gives no actor more work than `limit`, or None."""
        self.limit, self.failed, self.num_states = limit * (1 + 1e-12), set(), 0
        loads = [0.0] * (max(self.actors) + 1)
        self.rounded = [0] * len(loads)  # what a state has of the loads
        bytes_ = [(0.0,) * count for count in self.num_moments]
        bounds: list[int] = []
        found = self._extend(0, 0, loads, bytes_, bounds)
        self.num_unanswered += self.num_states > self.max_states
        return tuple(bounds[:-1]) if found else None

    def _extend(
        self, stage: int, first: int, loads: list[float], bytes_: list[tuple[float, ...]], bounds: list[int]
    ) -> bool:
        """Try to cut the layers from `first` on into the stages from `stage` on; `bounds` gets their ends.

        Args:
            stage: the stage that begins with layer `first`.
            first: that layer.
            loads: the work of each actor so far.
            bytes_: what each actor needs so far at each of its moments.
            bounds: the ends of the stages so far.
        """
        if stage == self.num_stages:
            return True
        self.num_states += 1
        if self.num_states > self.max_states:
            return False
        actor, left, of_open = self.actors[stage], self.num_stages - stage - 1, self.of_open[stage]
        rounded, work, limit = self.rounded, self.work, self.limit
        state = stage, first, of_open(rounded), of_open(bytes_)
        if state in self.failed:
            return False
        had, had_rounded, had_bytes, cap = loads[actor], rounded[actor], bytes_[actor], self.caps[actor]
        # The first layer behind the stage: not so late that this actor has too much work, and not so early
        # that the actors of the later stages have.
        slack = 1e-9 * self.total
        latest = bisect_right(work, work[first] + limit - had - self.per_stage + slack) - 1
        latest = min(latest, self.num_layers - left)
        later = self.open[stage + 1]
        space = len(later) * limit - sum([loads[a] for a in later]) - left * self.per_stage
        if actor in later:  # the sum then counts this stage's work as space
            space -= work[-1] - work[first] + self.per_stage
            earliest = first + 1 if space >= -slack else self.num_layers + 1
        else:
            earliest = max(first + 1, bisect_left(work, work[-1] - space - slack))
        if not left:
            earliest = max(earliest, self.num_layers)
        # Stages with work near the average first, since such cuts fit more often.
        share = work[first] + (work[-1] - work[first]) / (left + 1)
        ends: Sequence[int] = range(earliest, latest + 1)
        if len(ends) > 1:
            ends = sorted(ends, key=lambda end: abs(work[end] - share))
        before = [(b, sums, sums[first]) for b, sums in zip(had_bytes, self.needs[stage], strict=True)]
        for end in ends:
            held = tuple([b + sums[end] - start for b, sums, start in before])
            if max(held) > cap:
                continue
            loads[actor] = had + work[end] - work[first] + self.per_stage
            rounded[actor] = round(loads[actor] * self.scale)
            bytes_[actor] = held
            bounds.append(end)
            if self._extend(stage + 1, end, loads, bytes_, bounds):
                return True
            bounds.pop()
            loads[actor], rounded[actor], bytes_[actor] = had, had_rounded, had_bytes
        self.failed.add(state)
        return False
