"""Prove that no schedule takes less than some time: for one placement, for one cut, or for all cuts.

Each function is the largest of several bounds, and each of these has its proof in its docstring. All of them
allow more than any schedule can do: backwards may be split, the dispatch of a weight gradient costs nothing
(a whole backward is dispatched once), and an order on one actor ignores the orders on the others.

Notation: stage s has the times f of its forward, i of its input gradient and w of its weight gradient without
dispatch; M microbatches. The *lead* of a stage is the least time before its first forward can start: the
forwards of all earlier stages and the transfers between them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate

from jaxpp_async.planning.problem import Boundaries, PipelineProblem, StageCosts
from jaxpp_async.program.instructions import ActorId

MAX_SUMS = 50_000
"""The number of different sums of works up to which loads are taken to be such sums."""


def bound_of_placement(problem: PipelineProblem, cut: Boundaries, actors: Sequence[ActorId]) -> float:
    """Return a time below which no order of the tasks ends, in seconds, for one cut and one placement.

    The bound is the largest of `bound_of_cut`, the path of one microbatch (its tasks follow one another, and
    its transfers between actors are given), and for each actor its work between other actors' work
    (`_one_actor_s`) and its memory (`_rounds_s`, `_area_s`).

    Args:
        problem: the layers and the machine.
        cut: the boundaries between the stages.
        actors: the actor of each stage.
    """
    stages = problem.stages(cut)
    paths = _Paths(stages, actors)
    found = [bound_of_cut(problem, cut), paths.whole]
    for actor in set(actors):
        mine = [stage for stage, other in enumerate(actors) if other == actor]
        space = problem.caps[actor] * (1 + 1e-9) - sum(stages.static_bytes[stage] for stage in mine)
        found.append(_one_actor_s(paths, mine, problem.num_microbatches))
        found.append(_area_s(paths, mine, problem.num_microbatches, space))
        found += [_rounds_s(paths, stage, problem.num_microbatches, space) for stage in mine]
    return max(found) * (1 - 1e-9)


def bound_of_cut(problem: PipelineProblem, cut: Boundaries) -> float:
    """Return a time below which no placement and no order of the tasks ends, in seconds, for one cut.

    The bound is the largest of `bound_of_all`, the path of one microbatch without transfers, each stage's
    lead and work, and the loads of the actors (`_loads_s`) for the stages as pieces. A transfer is counted
    only where another actor must be involved, which a cut alone never says.

    Args:
        problem: the layers and the machine.
        cut: the boundaries between the stages.
    """
    stages = problem.stages(cut)
    works = [f + i + w for f, i, w in zip(*_times(stages), strict=True)]
    leads = list(accumulate(stages.forward_s, initial=0.0))[:-1]
    path = sum(stages.forward_s) + sum(stages.input_gradient_s) + _times(stages)[2][0]
    count = problem.num_microbatches
    alone = max(lead + count * work for lead, work in zip(leads, works, strict=True))
    # Every actor but the one of stage 0 waits for a transfer at least.
    hop = min(stages.transfer_s, default=0.0)
    leads = [lead + hop * (k > 0) for k, lead in enumerate(leads)]
    loads = _loads_s(works, leads, problem.num_actors, count)
    return max(bound_of_all(problem), path * (1 - 1e-9), alone * (1 - 1e-9), loads)


def bound_of_all(problem: PipelineProblem) -> float:
    """Return a time below which no cut, placement and order ends, in seconds.

    The bound is the largest of the path of one microbatch, which runs all layers forward and backward in one
    stage or more; each layer's lead and work; the loads of the actors (`_loads_s`) for the layers as pieces;
    and the memory of all actors together. For the last, a microbatch keeps a layer's bytes at least until all
    later layers have run forward and backward, so that the sum over layers of bytes times this time, times M,
    is at most the step times the memory of all actors. Only the first task of a stage is dispatched for sure,
    and all layers may be one stage, so dispatch counts once a direction and microbatch.

    Args:
        problem: the layers and the machine.
    """
    layers, count = problem.layers, problem.num_microbatches
    leads = list(accumulate((layer.forward_s for layer in layers), initial=0.0))[:-1]
    works = [layer.work_s for layer in layers]
    dispatch = problem.dispatch_s
    path = sum(layer.forward_s + layer.input_gradient_s for layer in layers) + layers[0].weight_gradient_s
    alone = max(lead + count * (work + 2 * dispatch) for lead, work in zip(leads, works, strict=True))
    # Every actor but the one of layer 0 waits for a forward and a transfer at least.
    leads = [lead + (problem.latency_s + dispatch) * (k > 0) for k, lead in enumerate(leads)]
    loads = _loads_s(works, leads, problem.num_actors, count)
    area = still = 0.0
    for layer in reversed(layers):
        still += layer.forward_s + layer.input_gradient_s
        area += layer.kept_bytes * still + layer.weight_kept_bytes * layer.weight_gradient_s
    memory = count * area / sum(problem.caps) if sum(problem.caps) > 0 else 0.0
    return max(path + 2 * dispatch, alone, memory, loads / (1 - 1e-9)) * (1 - 1e-9)


# ---------------------------------------------------------------- any placement


def _loads_s(works: Sequence[float], leads: Sequence[float], num_actors: int, count: int) -> float:
    """Return the least step for which the actors together could do all pieces of work.

    Proof. Number the actors by the first piece that each has, from 0. These pieces differ, so the first piece
    of actor k is piece k or a later one, and actor k is idle during the lead of piece k. In a step of T
    seconds its pieces therefore have at most (T - lead k) / M seconds of work a microbatch; and their works
    sum up to a sum of some of `works`. The largest such sums of all actors must together reach the sum of all
    works. The result is the least T for which they do. With more than `MAX_SUMS` different sums any number
    counts as a sum, which only makes the result smaller.

    Args:
        works: the work of each piece for one microbatch, in order of the pieces.
        leads: the lead of each piece, ascending.
        num_actors: the number of actors.
        count: the number of microbatches.
    """
    total = sum(works)
    leads = leads[:num_actors]
    sums = _sums(works)

    def enough(step_s: float) -> bool:
        reached = 0.0
        for lead in leads:
            most = (step_s - lead) / count
            if most < 0:
                break
            if sums is not None:
                most = sums[bisect_right(sums, most * (1 + 1e-9)) - 1]
            reached += min(most, total)
        return reached >= total * (1 - 1e-9)

    low, high = 0.0, leads[-1] + count * total
    if sums is not None:
        # The least step is that at which some actor just reaches one of the sums.
        steps = sorted({lead + count * value for lead in leads for value in sums})
        return steps[bisect_left(steps, True, key=enough)] * (1 - 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low * (1 - 1e-9)


def _sums(works: Sequence[float]) -> list[float] | None:
    """Return all sums of some of the works, ascending; None if there are more than `MAX_SUMS`."""
    unit = 1e-9 * max(sum(works), 1e-300)
    found = {0: 0.0}
    for work in works:
        for value in list(found.values()):
            found.setdefault(round((value + work) / unit), value + work)
        if len(found) > MAX_SUMS:
            return None
    return sorted(found.values())


# ---------------------------------------------------------------- one actor


def _times(stages: StageCosts) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return the times of the tasks of each stage, those of weight gradients without dispatch."""
    weights = [time_s - stages.dispatch_s for time_s in stages.weight_gradient_s]
    return stages.forward_s, stages.input_gradient_s, weights


class _Paths:
    """The least times before and after a task of one microbatch, under a placement.

    Attributes:
        forward, input_gradient, weight_gradient: the times of the tasks of each stage.
        leads: the lead of each stage.
        returns: the time from the end of a stage's forward to the start of its input gradient.
        ways_down: the time from the end of a stage's input gradient through those of all earlier stages and
            the weight gradient of stage 0.
        tails: the time from the end of a stage's input gradient to the end of the step, at least.
        whole: the path of one microbatch.
    """

    def __init__(self, stages: StageCosts, actors: Sequence[ActorId]) -> None:
        self.stages = stages
        forward, inputs, weights = self.forward, self.input_gradient, self.weight_gradient = _times(stages)
        num, hops = len(forward), stages.hops(actors)
        self.hops = hops
        self.leads, self.tails, self.ways_down = [0.0] * num, [weights[0]] * num, [weights[0]] * num
        self.returns = [0.0] * num
        for s in range(1, num):
            self.leads[s] = self.leads[s - 1] + forward[s - 1] + hops[s - 1]
            self.ways_down[s] = hops[s - 1] + inputs[s - 1] + self.ways_down[s - 1]
            self.tails[s] = max(weights[s], hops[s - 1] + inputs[s - 1] + self.tails[s - 1])
        for s in reversed(range(num - 1)):
            self.returns[s] = 2 * hops[s] + forward[s + 1] + self.returns[s + 1] + inputs[s + 1]
        self.whole = forward[0] + self.returns[0] + inputs[0] + weights[0]

    def starts(self, stage: int, count: int) -> list[float]:
        """Return times before which a stage's forwards do not start: entry k holds for the (k+1)-th of them.

        Proof. The (k+1)-th forward that ends on an earlier stage ends k + 1 forwards after that stage's lead
        at least, since one actor runs them one after the other; from there the way to `stage` has to follow.
        Of any k + 1 microbatches one is so late. The same holds for the forwards on the stage itself.
        """
        found = [self.leads[stage]] * count
        way = self.leads[stage]
        for earlier in range(stage + 1):
            each = self.forward[earlier]
            for k in range(count):
                if way + k * each > found[k]:
                    found[k] = way + k * each
        return found

    def ends(self, stage: int, count: int) -> list[float]:
        """Return the least times from the ends of a stage's input gradients to the end of the step.

        Entry k holds for the (k+1)-th last of them: so many microbatches have yet to pass each earlier stage
        one after the other, and then go on down. The proof is that of `starts`, backward in time.
        """
        tail = self.tails[stage]
        found = [tail] * count
        way = self.ways_down[stage]
        for earlier in range(stage + 1):
            each = self.input_gradient[earlier]
            for k in range(count):
                if way + k * each > found[k]:
                    found[k] = way + k * each
        return found


def _one_actor_s(paths: _Paths, mine: Sequence[int], count: int) -> float:
    """Return the least end of the step if only one actor's tasks could not run at the same time.

    Proof. Each task of the actor has a time before which it cannot start and a time that must pass after its
    end (`_Paths`); the (k+1)-th forward and the (k+1)-th last input gradient of a stage have later ones. A
    task may even be interrupted: then running, at any time, the task with the longest time to pass after it
    makes the end as early as it can be (Jackson's preemptive schedule; Carlier, The one-machine sequencing
    problem, 1982).

    Args:
        paths: the times before and after the tasks.
        mine: the actor's stages.
        count: the number of microbatches.
    """
    jobs: list[tuple[float, float, float]] = []
    for s in mine:
        f, i, w = paths.forward[s], paths.input_gradient[s], paths.weight_gradient[s]
        first = paths.leads[s] + f + paths.returns[s]
        after = paths.returns[s] + i + paths.tails[s]
        starts, ends = paths.starts(s, count), paths.ends(s, count)
        jobs += [(start, f, after) for start in starts]
        # One input gradient follows another on this actor, too.
        jobs += [(first, i, end) for end in ends]
        jobs += [(first + i + k * i, w, 0.0) for k in range(count)]
    jobs.sort()
    now, latest, position = 0.0, 0.0, 0
    ready: list[tuple[float, float]] = []
    while position < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[position][0])
        while position < len(jobs) and jobs[position][0] <= now:
            heappush(ready, (-jobs[position][2], jobs[position][1]))
            position += 1
        tail, left = heappop(ready)
        until = jobs[position][0] if position < len(jobs) else float("inf")
        if now + left > until:
            heappush(ready, (tail, left - (until - now)))
            now = until
        else:
            now += left
            latest = max(latest, now - tail)
    return latest


# ---------------------------------------------------------------- memory


def _rounds_s(paths: _Paths, stage: int, count: int, space: float) -> float:
    """Return the least end of the step if a stage may keep only so many microbatches as fit.

    Proof. Let k be the number of microbatches whose kept bytes fit, and S_j and E_j the starts of the stage's
    forwards and the ends of its input gradients, each in order of time. When forward j + k starts, at least
    j + 1 microbatches have been freed, so S_(j+k) >= E_j. Each microbatch stays for f + return + i seconds at
    least, so E_j >= S_j + that. Hence S_j is at least S_(j mod k) + (j // k) times that; the first k of them
    are late by `_Paths.starts`. The last forward is followed by its way back.

    Args:
        paths: the times before and after the tasks.
        stage: the stage.
        count: the number of microbatches.
        space: the bytes that the actor has besides its static ones.
    """
    kept = paths.stages.kept_bytes[stage]
    if kept <= 0 or space >= kept * count:
        return 0.0
    fitting = max(1, int(space / kept * (1 + 1e-9)))
    f, i = paths.forward[stage], paths.input_gradient[stage]
    stay = f + paths.returns[stage] + i
    rounds, rest = divmod(count - 1, fitting)
    last = paths.starts(stage, count)[rest] + rounds * stay
    return last + stay + paths.tails[stage]


def _area_s(paths: _Paths, mine: Sequence[int], count: int, space: float) -> float:
    """Return the least end of the step if an actor's bytes times their time must fit into its memory.

    Proof. A microbatch keeps the bytes of a stage for f + return + i seconds at least, and those for the
    weight gradient for w seconds more. The sum over stages and microbatches is at most the actor's free
    memory times the time from the lead of its first stage to the end of the step.

    Args:
        paths: the times before and after the tasks.
        mine: the actor's stages.
        count: the number of microbatches.
        space: the bytes that the actor has besides its static ones.
    """
    area = sum(
        paths.stages.kept_bytes[s] * (paths.forward[s] + paths.returns[s] + paths.input_gradient[s])
        + paths.stages.weight_kept_bytes[s] * paths.weight_gradient[s]
        for s in mine
    )
    return paths.leads[mine[0]] + count * area / space if space > 0 else 0.0
