"""Define V-shaped schedules that keep at most a given number of activations: V-Min, V-Half and any other cap.

A schedule is made in three steps, as the paper does:

1. *Building block.* `_block` gives each task of one microbatch a time: its forwards pass the early parts of
   the model from the first actor to the last and the late parts back, then its input gradients do the same.
   The time between neighbouring actors (the hop) decides how long activations live, hence how many there are.
2. *Repeat.* Microbatch i runs the block `interval` units of time after microbatch i - 1. With an interval of
   6 units, which is the work of an actor for one microbatch, no actor has to idle once the pipeline is full.
3. *Squeeze.* `_squeeze` runs each task as early as its dependencies and the cap allow. A task may overtake
   others of its actor if the cap still holds when they run later. Weight gradients fill the remaining time,
   and run earlier where a forward needs the memory.

`_orders` tries several blocks and takes the order that ends first.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024, arXiv:2405.15362. The paper repeats a
block every 6 units, and reorders tasks only near the start and the end of a step. Longer intervals are for
caps below V-Min's.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, product
from numbers import Real
from typing import NamedTuple

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.base import neighbouring_stages
from jaxpp_async.schedules.builtin import Phases, VShaped, split_row


class _MemoryCapped(VShaped):
    """A base class of V-shaped schedules with split backwards that keep at most `_cap` activations."""

    def _cap(self, num_actors: int) -> float:
        """Return the largest number of microbatches whose activations an actor may keep, at least 1.

        Args:
            num_actors: the number of actors that have stages.
        """
        raise NotImplementedError

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        if self.num_stages > num_actors:
            return super()._rows(num_microbatches, num_actors)
        return _in_line(self.num_stages, num_microbatches, num_actors, self._cap(self.num_stages))

    def _phases(self, actor: int, num_microbatches: int, num_actors: int) -> Phases:
        # Activations of A microbatches suffice for the shortest step; see `ControllableMemory`.
        cap = min(self._cap(num_actors), num_actors, num_microbatches)
        return [(_orders(num_microbatches, num_actors, math.floor(2 * cap))[actor], 1)]


@dataclass(frozen=True)
class ControllableMemory(_MemoryCapped):
    """A V-shaped schedule with split backwards that keeps at most the given number of activations.

    Each actor has an early and a late part of the model (see the first lines of `builtin`). The more
    activations an actor may keep, the shorter the step. `VMin` and `VHalf` are two members of this family.

    Bubble fraction (S = 2A stages on A actors, M >= A microbatches, activations of c microbatches): I/(6M+I)
    for an idle time of I units. I is about max(6*(A-c), A-1) for c of at least V-Min's (A+4)//3; for smaller
    c, I grows with the number of microbatches. For c >= A, I is A-1, as with `ZeroBubbleV`; more memory does
    not shorten a step further. Peak activations, in (part of the model, microbatch) pairs, on every actor: at
    most min(2M, floor(2c), 2A).

    With S <= A nothing folds, and an actor keeps at most floor(c) (stage, microbatch) pairs. Placement is
    `ZeroBubbleH1`'s, and so is the order for c >= S. For smaller c the step is much longer.

    Source: see the first lines of this module.

    Args:
        num_stages: the number of stages of the loop body, one more than its `pipeline_yield`s.
        activations: the largest number of microbatches whose activations an actor may keep, at least 1. Half
            a microbatch counts too: 2.5 stands for 5 (part, microbatch) pairs.

    Raises:
        ScheduleError: `num_stages` is not a positive int, or `activations` is not a number of at least 1.
    """

    activations: float = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        cap = self.activations
        if not isinstance(cap, Real) or isinstance(cap, bool) or not cap >= 1:
            raise ScheduleError(
                f"ControllableMemory(activations=...): expected a number of microbatches, got {cap!r}; the "
                "least possible is 1, since a microbatch's activations are kept until its backward"
            )

    def _cap(self, num_actors: int) -> float:
        return self.activations


class VHalf(_MemoryCapped):
    """A V-shaped schedule with split backwards that keeps half as many activations as 1F1B's first actor.

    The order is that of `ControllableMemory` with activations of (A+2)//2 microbatches for A actors with
    stages.

    Bubble fraction (S = 2A stages on A >= 3 actors, M >= A microbatches): I/(6M+I), with an idle time of
    I = 6*(A-c)-1 units for c = (A+2)//2. The paper gives I as about 3A, half of 1F1B's. Peak activations, in
    (part of the model, microbatch) pairs, on every actor: min(2M, 2c).

    Source: see the first lines of this module (V-Half).
    """

    def _cap(self, num_actors: int) -> int:
        return (num_actors + 2) // 2


class VMin(_MemoryCapped):
    """A V-shaped schedule with split backwards that keeps a third as many activations as 1F1B's first actor.

    The order is that of `ControllableMemory` with activations of (A+4)//3 microbatches for A actors with
    stages. With so little memory no actor has to idle once the pipeline is full, if forwards, input gradients
    and weight gradients take the same time. Otherwise the idle time often grows with the number of
    microbatches; `VHalf` stands larger differences.

    Bubble fraction (S = 2A stages on A >= 3 actors, M >= A microbatches): I/(6M+I), with an idle time of
    I = 6*(A-c)-1 units for c = (A+4)//3. The paper gives I as about 4A, two thirds of 1F1B's. Peak
    activations, in (part of the model, microbatch) pairs, on every actor: min(2M, 2c).

    Source: see the first lines of this module (V-Min).
    """

    def _cap(self, num_actors: int) -> int:
        return (num_actors + 4) // 3


def _in_line(num_stages: int, num_microbatches: int, num_actors: int, cap: float) -> list[list[Task]]:
    """Return each actor's tasks where no actor has two stages: `ZeroBubbleH1` with fewer activations.

    Args:
        num_stages: the number of stages, at most `num_actors`.
        num_microbatches: the number of microbatches.
        num_actors: the number of actors.
        cap: the largest number of microbatches whose activations an actor may keep, at least 1.
    """
    others = math.floor(min(num_stages, cap)) - 1
    rows, num_behind = [], num_stages
    for stages in neighbouring_stages(num_stages, num_actors):
        num_behind -= len(stages)
        num_warmup = min(num_behind, others)
        rows.append(split_row(stages, num_microbatches, num_warmup, others - num_warmup))
    return rows


# ---------------------------------------------------------------- building blocks
#
# A microbatch passes 4A positions one after the other: A forwards of early parts on actors 0 to A-1, A
# forwards of late parts on actors A-1 to 0, and the input gradients in the same order. The positions below
# are indices of this path. In the order of one actor each task is a letter, as in `builtin`.

_LETTERS = "fFIi"
"""The letter of each quarter of the path."""

_FORWARD, _INPUT, _WEIGHT = 5, 6, 4
"""Times of the three kinds of task for choosing between orders that are equally fast if all take one unit."""


@functools.lru_cache(maxsize=128)
def _orders(num_microbatches: int, num_actors: int, cap: int) -> tuple[str, ...]:
    """Return each actor's order as letters, for the building block with which the step is shortest.

    Blocks are compared for at most 3A microbatches (A actors), which fill the pipeline. Of equally fast ones,
    the one is taken that is fastest if input gradients take longer than forwards, as in most models.

    Args:
        num_microbatches: the number of microbatches.
        num_actors: the number of actors.
        cap: the largest number of (part, microbatch) pairs that an actor may keep, at least 2.
    """
    sample = min(num_microbatches, 3 * num_actors)

    def times(choice: _Choice) -> tuple[float, float]:
        plans = _repeat(choice.block, choice.interval, sample, num_actors)
        if _least_cap(plans) > choice.cap:
            return math.inf, math.inf
        return _squeeze(plans, choice.cap, choice.overtake)[:2]

    best = min(_choices(num_actors, cap), key=times)
    plans = _repeat(best.block, best.interval, num_microbatches, num_actors)
    return _squeeze(plans, best.cap, best.overtake)[2]


class _Choice(NamedTuple):
    """A building block and how to repeat and squeeze it.

    Attributes:
        block: the time at which the first microbatch is at each position of its path, in ascending order.
        interval: the time from one microbatch to the next.
        cap: the largest number of (part, microbatch) pairs that an actor may keep.
        overtake: whether a task may overtake others of its actor.
    """

    block: list[int]
    interval: int
    cap: int
    overtake: bool = True


def _choices(num_actors: int, cap: int) -> Iterator[_Choice]:
    """Yield building blocks that may suit a cap; some may need more.

    With hops of h units on the way to the last actor and 1 unit on the way back, about (h+1)*A/3 pairs are
    kept: V-Min's hop is 1, V-Half's 2. V-Min is sometimes faster if no task overtakes another. Below V-Min's
    cap a smaller cap is sometimes faster.
    """
    longest = max(1, min(5, 3 * cap // num_actors - 1))
    for hop in range(max(1, longest - 1), longest + 1):
        for turns in product((1, 3), (1, 2, 3, 4), (1, 2)):
            yield _Choice(_block(num_actors, hop, turns), 6, cap)
    shortest = _block(num_actors, 1, (1, 1, 1))
    yield _Choice(shortest, 6, cap, overtake=False)
    if cap < 2 * ((num_actors + 4) // 3):
        for interval, kept in product(range(6, 2 * num_actors + 3), range(max(2, cap - 1), cap + 1)):
            yield _Choice(shortest, interval, kept)


def _block(num_actors: int, hop: int, turns: tuple[int, ...]) -> list[int]:
    """Return the time at which the first microbatch is at each position of its path.

    Args:
        num_actors: the number of actors.
        hop: the time from one actor to the next, on the way from the first actor to the last. The way back
            takes 1 unit per actor.
        turns: the time from the last task of a quarter of the path to the first of the next quarter; both are
            on the same actor.
    """
    steps = [0]
    for hops, turn in zip((hop, 1, hop, 1), (*turns, 0), strict=True):
        steps += [hops] * (num_actors - 1) + [turn]
    return list(accumulate(steps[:-1]))


def _repeat(block: list[int], interval: int, num_microbatches: int, num_actors: int) -> list[list[int]]:
    """Return for each actor the positions of its tasks in the order in which a repeated block runs them.

    Args:
        block: the time at which the first microbatch is at each position, in ascending order.
        interval: the time from one microbatch to the next.
        num_microbatches: the number of microbatches.
        num_actors: the number of actors.
    """
    plans: list[list[int]] = [[] for _ in range(num_actors)]
    times = (
        (time + interval * i, position)
        for position, time in enumerate(block)
        for i in range(num_microbatches)
    )
    for _, position in sorted(times):
        part = position % (2 * num_actors)
        plans[min(part, 2 * num_actors - 1 - part)].append(position)
    return plans


def _least_cap(plans: list[list[int]]) -> int:
    """Return how many (part, microbatch) pairs an actor keeps if each weight gradient runs at once."""
    half = 2 * len(plans)
    return max(max(accumulate(1 if position < half else -1 for position in plan)) for plan in plans)


def _squeeze(plans: list[list[int]], cap: int, overtake: bool) -> tuple[int, int, tuple[str, ...]]:
    """Run every task as early as possible in units of time, and return the times and orders that result.

    In each unit an actor runs the first task of its plan whose dependency has ended. A forward overtakes
    tasks of the plan only if the cap holds at each of them with weight gradients that run at once. So the
    rest of the plans can always run, and there is no deadlock. An actor runs a weight gradient if no other
    task can run, or if the next forward would exceed the cap.

    Args:
        plans: each actor's positions on the path of a microbatch, in an order that keeps the cap.
        cap: the largest number of (part, microbatch) pairs that an actor may keep.
        overtake: whether a task may overtake others of its plan.

    Returns:
        The time of the step if every task takes one unit; its time if the kinds of task take the times
        `_FORWARD`, `_INPUT` and `_WEIGHT`; and each actor's order as letters.
    """
    num_actors, num_microbatches = len(plans), len(plans[0]) // 4
    half = 2 * num_actors
    rest = [deque(plan) for plan in plans]
    done = [0] * (2 * half)  # microbatches that have passed each position
    ends = [[0] * num_microbatches for _ in range(2 * half)]
    open_pairs, due, clocks = [0] * num_actors, [0] * num_actors, [0] * num_actors
    orders: list[list[str]] = [[] for _ in plans]
    unit = 0
    while any(rest) or any(due):
        unit += 1
        runs = [
            _next_run(plan, done, half, cap, open_pairs[actor], due[actor], overtake)
            for actor, plan in enumerate(rest)
        ]
        for actor, run in enumerate(runs):
            if run is None:
                continue
            if run == _RUN_WEIGHT:
                due[actor] -= 1
                clocks[actor] += _WEIGHT
                orders[actor].append("*")
                continue
            position = rest[actor][run]
            del rest[actor][run]
            i = done[position]
            done[position] += 1
            start = max(clocks[actor], ends[position - 1][i] if position else 0)
            ends[position][i] = clocks[actor] = start + (_FORWARD if position < half else _INPUT)
            orders[actor].append(_LETTERS[position // num_actors])
            open_pairs[actor] += 1 if position < half else -1
            due[actor] += position >= half
    return unit, max(clocks), tuple("".join(order) for order in orders)


_RUN_WEIGHT = -1
"""A result of `_next_run`: the actor runs a weight gradient."""


def _next_run(
    plan: deque[int], done: list[int], half: int, cap: int, open_pairs: int, due: int, overtake: bool
) -> int | None:
    """Return the index in an actor's plan of the task to run now, `_RUN_WEIGHT`, or None to idle.

    Args:
        plan: the positions of the actor's tasks that have not run, without weight gradients.
        done: for each position, how many microbatches have passed it.
        half: the number of positions that are forwards; these come first.
        cap: the largest number of (part, microbatch) pairs that the actor may keep.
        open_pairs: the number of pairs whose forward has run and whose input gradient has not.
        due: the number of pairs whose input gradient has run and whose weight gradient has not.
        overtake: whether the task may be another than the first of the plan.
    """
    planned = most = open_pairs
    seen: set[int] = set()
    for index, position in enumerate(plan):
        if position not in seen:
            seen.add(position)
            if position == 0 or done[position - 1] > done[position]:
                if position >= half:
                    return index
                if most < cap:
                    return index if open_pairs + due < cap else _RUN_WEIGHT
            if len(seen) == 4 or not overtake:
                break
        planned += 1 if position < half else -1
        most = max(most, planned)
    return _RUN_WEIGHT if due else None
