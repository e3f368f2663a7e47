"""Prove that no schedule takes less than some time: for one cut, or for all cuts.

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
from itertools import accumulate

from jaxpp_async.planning.packing import packed_s
from jaxpp_async.planning.problem import Boundaries, PipelineProblem, StageCosts

MAX_SUMS = 50_000
"""The number of different sums of works up to which loads are taken to be such sums."""


def bound_of_cut(problem: PipelineProblem, cut: Boundaries) -> float:
    """Return a time below which no placement and no order of the tasks ends, in seconds, for one cut.

    The bound is the largest of `bound_of_all`, the path of one microbatch without transfers, each stage's
    lead and work, and the work of the actors however the stages are divided among them (`packed_s`). A
    transfer is counted only where another actor must be involved, which a cut alone never says.

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
    packed = packed_s(works, leads, problem.num_actors, count)
    return max(bound_of_all(problem), path * (1 - 1e-9), alone * (1 - 1e-9), packed)


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


def _times(stages: StageCosts) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return the times of the tasks of each stage, those of weight gradients without dispatch."""
    weights = [time_s - stages.dispatch_s for time_s in stages.weight_gradient_s]
    return stages.forward_s, stages.input_gradient_s, weights
