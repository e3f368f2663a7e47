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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, product
from numbers import Real
from typing import NamedTuple

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.base import advise_on_options, neighbouring_stages
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


@advise_on_options
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
    the one is taken that is fastest if input gradients take longer than forwards, as in most models. For more
    than `_COMPARED_ACTORS`, only blocks are compared that are good for `_SMALL_ACTORS` and as much of a cap.

    Args:
        num_microbatches: the number of microbatches.
        num_actors: the number of actors.
        cap: the largest number of (part, microbatch) pairs that an actor may keep, at least 2.
    """
    sample = min(num_microbatches, 3 * num_actors)
    choices: Iterable[_Choice] = _choices(num_actors, cap, sample)
    if num_actors > _COMPARED_ACTORS:
        choices = _promising(choices, num_actors, cap)
        sample = min(sample, 2 * num_actors)
    best, found = None, _NEVER
    for choice in choices:
        plans = _repeat(_block(num_actors, *choice.shape), choice.interval, sample, num_actors)
        squeezed = _squeeze(plans, choice.cap, choice.overtake, found[0])
        if squeezed[:2] < found[:2]:
            best, found = choice, squeezed
    assert best is not None
    if sample == num_microbatches:
        return found[2]
    plans = _repeat(_block(num_actors, *best.shape), best.interval, num_microbatches, num_actors)
    return _squeeze(plans, best.cap, best.overtake)[2]


_COMPARED_ACTORS, _SMALL_ACTORS, _NUM_PROMISING = 13, 10, 3
"""The most actors for which all building blocks are compared; the number of actors for which they are
compared if there are more, and how many of them are then compared for all actors."""

_LONGER_INTERVALS = 8
"""The number of intervals that are tried beyond the shortest one that keeps a cap below V-Min's."""

_NEVER: tuple[float, float, tuple[str, ...]] = (math.inf, math.inf, ())
"""The times and the orders of a squeeze that was given up."""


class _Choice(NamedTuple):
    """A building block and how to repeat and squeeze it.

    Attributes:
        shape: the hop and the turns of the block; see `_block`.
        interval: the time from one microbatch to the next.
        cap: the largest number of (part, microbatch) pairs that an actor may keep.
        overtake: whether a task may overtake others of its actor.
    """

    shape: tuple[int, tuple[int, ...]]
    interval: int
    cap: int
    overtake: bool = True


_SHORTEST = 1, (1, 1, 1)
"""The shape of the building block that takes the least time."""


def _choices(num_actors: int, cap: int, num_microbatches: int) -> Iterator[_Choice]:
    """Yield building blocks that keep a cap.

    With hops of h units on the way to the last actor and 1 unit on the way back, about (h+1)*A/3 pairs are
    kept: V-Min's hop is 1, V-Half's 2. V-Min is sometimes faster if no task overtakes another. Below V-Min's
    cap a smaller cap is sometimes faster, and longer intervals are needed, but hardly more than the shortest
    one that keeps the cap.

    Args:
        num_actors: the number of actors.
        cap: the largest number of (part, microbatch) pairs that an actor may keep.
        num_microbatches: the number of microbatches for which the cap has to hold.
    """

    def needs(shape: tuple[int, tuple[int, ...]], interval: int) -> int:
        block = _block(num_actors, *shape)
        # Of more microbatches than a block overlaps with, the last ones need no more than those before.
        overlapping = min(num_microbatches, block[-1] // interval + 2)
        return _least_cap(_repeat(block, interval, overlapping, num_actors))

    longest = max(1, min(5, 3 * cap // num_actors - 1))
    for hop in range(max(1, longest - 1), longest + 1):
        for turns in product((1, 3), (1, 2, 3, 4), (1, 2)):
            if needs((hop, turns), 6) <= cap:
                yield _Choice((hop, turns), 6, cap)
    if needs(_SHORTEST, 6) <= cap:
        yield _Choice(_SHORTEST, 6, cap, overtake=False)
    if cap < 2 * ((num_actors + 4) // 3):
        least = {interval: needs(_SHORTEST, interval) for interval in range(6, 2 * num_actors + 3)}
        for interval in least:
            for kept in range(max(2, cap - 1), cap + 1):
                shortest = min((k for k in least if least[k] <= kept), default=interval)
                if least[interval] <= kept and interval <= shortest + _LONGER_INTERVALS:
                    yield _Choice(_SHORTEST, interval, kept)


def _promising(choices: Iterable[_Choice], num_actors: int, cap: int) -> list[_Choice]:
    """Return the choices that are best for few actors; of longer intervals, the two shortest with the cap.

    Args:
        choices: the choices for all actors.
        num_actors: the number of actors.
        cap: the largest number of (part, microbatch) pairs that an actor may keep.
    """
    few, small_cap = _SMALL_ACTORS, -(-cap * _SMALL_ACTORS // num_actors)

    def times(choice: _Choice) -> tuple[float, float]:
        plans = _repeat(_block(few, *choice.shape), 6, 3 * few, few)
        if _least_cap(plans) > small_cap:
            return _NEVER[:2]
        return _squeeze(plans, small_cap, choice.overtake)[:2]

    given = list(choices)
    usual = sorted((choice for choice in given if choice.interval == 6), key=times)
    longer = [choice for choice in given if choice.interval > 6 and choice.cap == cap]
    return usual[:_NUM_PROMISING] + longer[: _NUM_PROMISING - 1]


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


def _squeeze(
    plans: list[list[int]], cap: int, overtake: bool, limit: float = math.inf
) -> tuple[float, float, tuple[str, ...]]:
    """Run every task as early as possible in units of time, and return the times and orders that result.

    In each unit an actor runs the first task of its plan whose dependency has ended. A forward overtakes
    tasks of the plan only if the cap holds at each of them with weight gradients that run at once. So the
    rest of the plans can always run, and there is no deadlock. An actor runs a weight gradient if no other
    task can run, or if the next forward would exceed the cap.

    Args:
        plans: each actor's positions on the path of a microbatch, in an order that keeps the cap.
        cap: the largest number of (part, microbatch) pairs that an actor may keep.
        overtake: whether a task may overtake others of its plan.
        limit: the time in units beyond which the squeeze is given up.

    Returns:
        The time of the step if every task takes one unit; its time if the kinds of task take the times
        `_FORWARD`, `_INPUT` and `_WEIGHT`; and each actor's order as letters. `_NEVER` if the step takes
        longer than `limit`.
    """
    num_actors, num_microbatches = len(plans), len(plans[0]) // 4
    half = 2 * num_actors
    passed = [num_microbatches] + [0] * (2 * half)  # microbatches that have reached each position
    queues = [_Queue(plan, actor, num_actors, passed, cap, overtake) for actor, plan in enumerate(plans)]
    ends = [[0] * num_microbatches for _ in range(2 * half)]
    clocks = [0] * num_actors
    remaining = 6 * num_microbatches * num_actors
    unit = 0
    woken = set(range(num_actors))  # the actors that may run another task than in the unit before
    while remaining:
        unit += 1
        if unit + max(queue.remaining for queue in queues) - 1 > limit:
            return _NEVER
        runs = [(actor, run) for actor in woken if (run := queues[actor].next_run()) is not None]
        remaining -= len(runs)
        woken = set()
        for actor, run in runs:
            woken.add(actor)
            queue = queues[actor]
            position = queue.take(run)
            if position is None:
                clocks[actor] += _WEIGHT
                continue
            i = passed[position + 1]
            passed[position + 1] += 1
            if position + 1 < 2 * half:
                part = (position + 1) % half
                woken.add(min(part, half - 1 - part))
            start = max(clocks[actor], ends[position - 1][i] if position else 0)
            ends[position][i] = clocks[actor] = start + (_FORWARD if position < half else _INPUT)
    return unit, max(clocks), tuple("".join(queue.order) for queue in queues)


_RUN_WEIGHT = -1
"""A result of `_Queue.next_run`: the actor runs a weight gradient."""


class _Queue:
    """The tasks that an actor still has to run, in the order of its plan.

    Args:
        plan: the positions of the actor's tasks, without weight gradients.
        actor: the index of the actor.
        num_actors: the number of actors.
        passed: for each position, how many microbatches have reached it; shared by all actors.
        cap: the largest number of (part, microbatch) pairs that the actor may keep.
        overtake: whether a task may be run that is not the first of the plan.

    Attributes:
        remaining: the number of tasks that have not run, with weight gradients.
        order: the letters of the tasks that have run.
    """

    def __init__(
        self, plan: list[int], actor: int, num_actors: int, passed: list[int], cap: int, overtake: bool
    ):
        half = 2 * num_actors
        self._positions = (actor, half - 1 - actor, half + actor, 2 * half - 1 - actor)
        self._quarters = [position // num_actors for position in plan]
        places: list[list[int]] = [[], [], [], []]  # of each quarter of the path: the indices in the plan
        for index, quarter in enumerate(self._quarters):
            places[quarter].append(index)
        self._places, self._passed = places, passed
        self._has_run = bytearray(len(plan))
        self._first = 0  # the index of the first task that has not run
        self._cap, self._overtake = cap, overtake
        self._open_pairs = 0  # pairs whose forward has run and whose input gradient has not
        self._due = 0  # pairs whose input gradient has run and whose weight gradient has not
        self.remaining = 6 * len(plan) // 4
        self.order: list[str] = []

    def next_run(self) -> int | None:
        """Return the index in the plan of the task to run now, `_RUN_WEIGHT`, or None to idle."""
        passed = self._passed
        has_run, first = self._has_run, self._first
        while first < len(has_run) and has_run[first]:
            first += 1
        self._first = first
        ready = sorted(
            places[passed[position + 1]]
            for position, places in zip(self._positions, self._places, strict=True)
            if passed[position] > passed[position + 1]
        )
        for index in ready:
            if index != first and not self._overtake:
                break
            if self._quarters[index] >= 2:
                return index
            if self._may_overtake(index):
                return index if self._open_pairs + self._due < self._cap else _RUN_WEIGHT
        return _RUN_WEIGHT if self._due else None

    def _may_overtake(self, index: int) -> bool:
        """Return whether the cap holds at each task before a forward if the forward runs first."""
        planned, cap, has_run, quarters = self._open_pairs, self._cap, self._has_run, self._quarters
        if planned >= cap:
            return False
        for k in range(self._first, index):
            if not has_run[k]:
                planned += 1 if quarters[k] < 2 else -1
                if planned >= cap:
                    return False
        return True

    def take(self, run: int) -> int | None:
        """Count a task as run, and return its position on the path; None for a weight gradient.

        Args:
            run: a result of `next_run`.
        """
        self.remaining -= 1
        if run == _RUN_WEIGHT:
            self._due -= 1
            self.order.append("*")
            return None
        quarter = self._quarters[run]
        self._has_run[run] = 1
        if quarter < 2:
            self._open_pairs += 1
        else:
            self._open_pairs -= 1
            self._due += 1
        self.order.append(_LETTERS[quarter])
        return self._positions[quarter]
