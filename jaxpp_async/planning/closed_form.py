"""Estimate a named schedule's step from the times of its stages, in microseconds of computing.

Each formula is a maximum of path lengths through the schedule: the way to an actor, its work, the way back,
and round trips between actors that take turns. So an estimate is seldom above the step of a replay, and it
ranks candidates; `evaluate` gives the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from jaxpp_async.planning.named import named_order
from jaxpp_async.planning.problem import StageCosts
from jaxpp_async.program.instructions import Task, TaskType
from jaxpp_async.schedules import (
    Eager1F1B,
    GPipe,
    LoopedBFS,
    Schedule,
    Std1F1B,
    ZeroBubbleH1,
    ZeroBubbleH2,
    dependencies,
    split_backwards,
    stage_actors,
)


def estimate_step_s(schedule: Schedule, stages: StageCosts, num_microbatches: int, num_actors: int) -> float:
    """Return about how long a step of a named schedule takes, in seconds.

    Args:
        schedule: the schedule.
        stages: the costs of its stages.
        num_microbatches: the number of microbatches.
        num_actors: the number of actors.
    """
    if type(schedule) is LoopedBFS:
        return _looped(_Costs.of(stages), num_microbatches, num_actors)
    formula = _FORMULAS.get(type(schedule))
    if formula is not None and len(stages) == num_actors:
        return formula(_Costs.of(stages), num_microbatches, num_actors)
    return _estimate_of(schedule, num_microbatches, num_actors).step_s(stages)


@dataclass(slots=True)
class _Costs:
    """The times of the stages in the order of a formula's letters.

    Attributes:
        f, i, w, b: the times of forwards, input gradients, weight gradients and whole backwards.
        t: the time of the transfer behind each stage but the last.
        lead: the way from the start of the step to each stage's first forward.
    """

    f: Sequence[float]
    i: Sequence[float]
    w: Sequence[float]
    b: Sequence[float]
    t: Sequence[float]
    lead: Sequence[float]

    @classmethod
    def of(cls, stages: StageCosts) -> _Costs:
        f, t = stages.forward_s, stages.transfer_s
        b = list(map(stages.backward_s, range(len(stages))))
        lead = list(accumulate(map(float.__add__, f[:-1], t), initial=0.0))
        return cls(f, stages.input_gradient_s, stages.weight_gradient_s, b, t, lead)


def _gpipe(c: _Costs, m: int, a: int) -> float:
    return sum(c.f) + sum(c.b) + 2 * sum(c.t) + (m - 1) * (max(c.f) + max(c.b))


def _turns(per_hop: int, is_split: bool) -> Callable[[_Costs, int, int], float]:
    """Return the formula of schedules that alternate between a forward and a backward on each actor.

    The longest way through such a schedule goes up to some actor `low`, makes trips from there to later
    actors and back, each of which takes the microbatch on by as many as are under way between the two, and
    ends with the last backward, which goes down. An actor's first forwards run without backwards between
    them, and so do its last backwards without forwards.

    Args:
        per_hop: the warm-up forwards for each later actor, and the weight gradients that are late for each
            earlier one.
        is_split: whether backwards are split.
    """

    def formula(c: _Costs, m: int, a: int) -> float:
        backs = c.i if is_split else c.b
        weights = c.w if is_split else [0.0] * a
        hops = [0.0, *c.t]
        down = list(accumulate(map(float.__add__, backs[:-1], c.t), initial=0.0))
        # The way down from an actor's last input gradient, and what is left to do where it ends.
        ends = [0.0] * a
        for low in range(a):
            late = [(min(m - 1, per_hop * to) + 1) * weights[to] - down[to] for to in range(low + 1)]
            ends[low] = down[low] + max(late)
        trips: dict[int, float] = {}
        found = 0.0
        for low in reversed(range(a)):
            f, i, w = c.f[low], backs[low], weights[low]
            ahead, late = min(m - 1, per_hop * (a - 1 - low)), per_hop * low if is_split else 0
            late = min(late, m - 1 - ahead)
            trip = 0.0
            for high in range(low, a):
                trip += c.f[high] + backs[high] + (2 * hops[high] if high > low else 0.0)
                together = per_hop * (high - low) + 1
                trips[together] = max(trips.get(together, 0.0), trip + w)
            start = max(ahead * f + late * (f + i), trip + (late - 1) * (f + i) if late else 0.0)
            middle = _most(trips, m - 1 - ahead - late)
            if not late and m - 2 - ahead >= 0:
                middle = max(ahead * f + middle, trip + _most(trips, m - 2 - ahead))
                start = 0.0
            among = min(ahead, max(0, m - 1 - per_hop * low))  # weight gradients between the last inputs'
            finish = max(trip, f + (ahead + 1) * i + among * w)
            found = max(found, c.lead[low] + start + middle + finish + ends[low])
        return found

    return formula


def _most(trips: dict[int, float], count: int) -> float:
    """Return about the largest time of trips that take `count` microbatches on together."""
    total = 0.0
    for together in sorted(trips, key=lambda n: trips[n] / n, reverse=True):
        times, count = divmod(count, together)
        total += times * trips[together]
    return total


def _looped(c: _Costs, m: int, a: int) -> float:
    """Follow the first and the last microbatch through the stages, one stage after another."""
    num = len(c.f)
    free = [0.0] * a
    first = last = 0.0
    hops = [0.0, *(t if a > 1 else 0.0 for t in c.t)]
    ways = [(s, c.f[s], hops[s]) for s in range(num)]
    ways += [(s, c.b[s], hops[s + 1] if s + 1 < num else 0.0) for s in reversed(range(num))]
    for s, each, hop in ways:
        start = max(first + hop, free[s % a])
        last = free[s % a] = max(start + m * each, last + hop + each)
        first = start + each
    return max(free)


_FORMULAS: dict[type[Any], Callable[[_Costs, int, int], float]] = {
    GPipe: _gpipe,
    Std1F1B: _turns(1, is_split=False),
    Eager1F1B: _turns(2, is_split=False),
    ZeroBubbleH1: _turns(1, is_split=True),
    ZeroBubbleH2: _turns(2, is_split=True),
}
"""The formulas of the schedules with neighbouring stages on an actor, for one stage an actor."""


# ---------------------------------------------------------------- any order


NUM_CHANGES = 2
"""The number of times that the ways of an `OrderEstimate` may change from one actor to another."""


class OrderEstimate:
    """An estimate for any task lists, made once for all cuts.

    The estimate is the longest of the ways through the lists that go from the step's start directly to some
    task, work through its actor's list up to another one, change to another actor, work through that actor's
    list, and so on, and at last go directly to the step's end. A replay looks at ways with any number of
    changes, an estimate at those with `NUM_CHANGES`.

    Args:
        rows: one list of tasks per actor.
        num_stages: the number of stages.
    """

    def __init__(self, rows: Sequence[Sequence[Task]], num_stages: int) -> None:
        tasks = [task for row in rows for task in row]
        places = {task: place for place, task in enumerate(tasks)}
        actors = stage_actors(rows)
        split = split_backwards(rows)
        self.num_stages = num_stages
        self.columns = np.array([_KINDS[task.ty] * num_stages + task.stage for task in tasks])
        self.crosses = np.array([here != there for here, there in pairwise(actors)] or [False])
        starts = np.cumsum([0, *map(len, rows)])
        self.firsts = starts[:-1][np.diff(starts) > 0]
        self.actor_of = np.repeat(np.arange(len(self.firsts)), [len(row) for row in rows if row])
        edges = [
            (places[need], place, min(need.stage, task.stage))
            for place, task in enumerate(tasks)
            for need in dependencies(task, num_stages, split)
            if actors[need.stage] != actors[task.stage]
        ]
        self.sources, self.targets, self.hops = np.array(edges or [(0, 0, -1)]).T

    def step_s(self, stages: StageCosts) -> float:
        """Return about how long a step takes, in seconds, for the costs of the stages."""
        num = self.num_stages
        f, i, b = (np.array(times) for times in (stages.forward_s, stages.input_gradient_s, _whole(stages)))
        w = np.array(stages.weight_gradient_s)
        hops = np.where(self.crosses[: max(num - 1, 1)], np.array([*stages.transfer_s] or [0.0]), 0.0)
        back = i if (self.columns // num == _KINDS["bwd_input"]).any() else b
        lead = np.concatenate(([0.0], np.cumsum(f[:-1] + hops[: num - 1])))
        down = np.concatenate(([0.0], np.cumsum(back[:-1] + hops[: num - 1])))  # from a stage's backward on
        turn = lead[-1] + f[-1]
        inputs = turn + (down[-1] + back[-1]) - (down + back)
        heads = np.concatenate((lead, inputs, inputs + i, inputs))
        end = down + (w[0] if back is i else 0.0)
        tails = np.concatenate(
            (inputs[0] + back[0] + (w[0] if back is i else 0.0) - lead - f, end, 0 * w, end)
        )
        times = np.concatenate((f, i, w, b))[self.columns]
        work = np.cumsum(times)
        before = work - times
        offsets = before[self.firsts][self.actor_of]
        # A number for each actor that is larger than any time, so that a running maximum, forward or
        # backward, does not pass from one actor to the next.
        apart = self.actor_of * (2 * work[-1] + turn + end[-1] + 1)
        done = before - offsets
        shift = apart - done
        after = done + times
        ends = np.maximum.accumulate((tails[self.columns] + after - apart)[::-1])[::-1] + apart - after
        starts = heads[self.columns]
        if self.hops[0] < 0:
            return float(np.max(np.maximum.accumulate(starts + shift) - shift + times + ends))
        ways = times[self.sources] + hops[self.hops]
        for _ in range(NUM_CHANGES):
            starts = np.maximum.accumulate(starts + shift) - shift
            crossing = starts[self.sources] + ways
            starts[self.targets] = np.maximum(starts[self.targets], crossing)
        return float(np.max(starts + times + ends))


_KINDS: dict[TaskType, int] = {"fwd": 0, "bwd_input": 1, "bwd_weight": 2, "bwd": 3}


def _whole(stages: StageCosts) -> list[float]:
    return [stages.backward_s(stage) for stage in range(len(stages))]


@lru_cache(maxsize=64)
def _estimate_of(schedule: Schedule, num_microbatches: int, num_actors: int) -> OrderEstimate:
    return OrderEstimate(named_order(schedule, num_microbatches, num_actors).rows, schedule.num_stages)
