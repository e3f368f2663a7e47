"""Make task lists by priorities: of the tasks that could run now, an actor runs the one with the least key.

A stage's backwards are all split or all whole while lists are made, except that one is whole where its two
halves would need more memory than there is. `merge_backwards` in `order_search` then makes single ones whole
where that costs no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from jaxpp_async.planning.evaluation import TaskTable

_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Priorities:
    """Which tasks go first.

    Args:
        period_s: the time by which the key of a task grows from one microbatch to the next.
        offsets: the key of microbatch 0, for each kind of task (forward, input gradient, weight gradient) and
            stage: entry kind * S + stage, for S stages. A task's key says when it ought to start.
        limits: for each stage, how many forwards may be ahead of the input gradients.
        patience: an actor waits for a task with a smaller key that arrives within this fraction of the time
            of the task that it would run instead.
        whole: for each stage, whether all its backwards are whole; the keys of whole backwards are those of
            the input gradients.
    """

    period_s: float
    offsets: tuple[float, ...]
    limits: tuple[int, ...]
    patience: float = 0.0
    whole: tuple[bool, ...] = ()


def list_schedule(
    table: TaskTable, priorities: Priorities, caps: Sequence[float]
) -> tuple[list[float], float, list[list[int]]] | None:
    """Make the lists of all actors in the order of time.

    The microbatches pass each stage in order. A forward runs only if its bytes fit below the actor's cap, and
    if all microbatches under way can then still finish, the oldest first: so no order of other actors' tasks
    leads to a deadlock. A backward is split only if the bytes that stay for its weight gradient fit, and is
    whole otherwise, which only frees memory.

    Args:
        table: the tasks of a cut and a placement.
        priorities: the keys.
        caps: the memory of each actor.

    Returns:
        The end of each task by number; the sum of the actors' last ends in seconds, which tells orders with
        equal steps apart; and one list of task numbers per actor. None if a single microbatch needs more than
        a cap.
    """
    num, count = len(table.stages), table.num_microbatches
    whole = priorities.whole or (False,) * num
    kept, weight_kept = table.stages.kept_bytes, table.stages.weight_kept_bytes
    durations, delays, actors = table.durations, table.delays, table.actors
    period, offsets, limits, patience = (
        priorities.period_s,
        priorities.offsets,
        priorities.limits,
        priorities.patience,
    )
    mine: list[list[int]] = [[] for _ in range(table.num_actors)]
    for stage, actor in enumerate(actors):
        mine[actor].append(stage)
    free = [cap * (1 + 1e-9) - static for cap, static in zip(caps, table.static_bytes, strict=True)]
    totals = [sum(kept[stage] for stage in stages) for stages in mine]
    if any(total > space for total, space in zip(totals, free, strict=True)):
        return None
    pending = [0.0] * table.num_actors  # bytes that weight gradients would free at once
    forwards, inputs, weights = [0] * num, [0] * num, [0] * num  # how many of each have begun, by stage
    split: list[list[int]] = [[] for _ in range(num)]  # the microbatches whose input gradient has begun alone
    # When the result that a task waits for arrives, by number of the forward or input gradient.
    arrivals = [0.0] * count + [_NEVER] * ((2 * num - 1) * count)
    last = 2 * num - 1
    for i in range(last * count, (last + 1) * count):
        arrivals[i] = 0.0
    rows: list[list[int]] = [[] for _ in mine]
    lasts = [0.0] * table.num_actors
    ends = [-1.0] * (4 * num * count)
    wake = [0.0 if stages else _NEVER for stages in mine]
    events = [(0.0, actor) for actor, stages in enumerate(mine) if stages]
    while events:
        now, actor = heappop(events)
        if wake[actor] != now:
            continue
        best = coming = _NEVER
        place = -1
        next_arrival = coming_at = _NEVER
        space = free[actor]
        for stage in mine[actor]:
            done = inputs[stage]
            i = forwards[stage]
            if i < count and i - done < limits[stage]:
                arrival = arrivals[stage * count + i]
                if arrival < _NEVER and kept[stage] <= space:
                    key = offsets[stage] + i * period
                    if arrival > now:
                        if arrival < next_arrival:
                            next_arrival = arrival
                        if key < coming:
                            coming, coming_at = key, arrival
                    elif key < best and (
                        space + pending[actor] - kept[stage] >= totals[actor]
                        or _can_finish(mine[actor], stage, kept, forwards, inputs, space + pending[actor])
                    ):
                        best, place = key, stage
            if done < i:
                arrival = arrivals[(num + stage) * count + done]
                if arrival < _NEVER:
                    key = offsets[num + stage] + done * period
                    if arrival > now:
                        if arrival < next_arrival:
                            next_arrival = arrival
                        if key < coming:
                            coming, coming_at = key, arrival
                    elif key < best:
                        best, place = key, num + stage
            if weights[stage] < len(split[stage]):
                key = offsets[2 * num + stage] + split[stage][weights[stage]] * period
                if key < best:
                    best, place = key, 2 * num + stage
        if place < 0:
            wake[actor] = next_arrival
            if next_arrival < _NEVER:
                heappush(events, (next_arrival, actor))
            continue
        kind, stage = divmod(place, num)
        i = split[stage][weights[stage]] if kind == 2 else (forwards, inputs)[kind][stage]
        number = place * count + i
        is_whole = kind == 1 and (whole[stage] or space + kept[stage] < weight_kept[stage])
        if is_whole:
            number += 2 * num * count
        if patience and coming < best and coming_at - now < patience * durations[number]:
            wake[actor] = coming_at
            heappush(events, (coming_at, actor))
            continue
        end = now + durations[number]
        rows[actor].append(number)
        successor = -1
        if kind == 0:
            forwards[stage] = i + 1
            free[actor] = space - kept[stage]
            successor = stage + 1 if stage + 1 < num else -1
        elif kind == 1:
            inputs[stage] = i + 1
            if is_whole:
                free[actor] = space + kept[stage]
            else:
                split[stage].append(i)
                free[actor] = space + kept[stage] - weight_kept[stage]
                pending[actor] += weight_kept[stage]
            successor = num + stage - 1 if stage else -1
        else:
            weights[stage] += 1
            free[actor] = space + weight_kept[stage]
            pending[actor] -= weight_kept[stage]
        lasts[actor] = wake[actor] = ends[number] = ends[place * count + i] = end
        heappush(events, (end, actor))
        if successor >= 0:
            target = successor * count + i
            arrival = arrivals[target] = end + delays[target]
            other = actors[successor % num]
            if arrival < wake[other] and lasts[other] <= now:  # an actor that idles wakes early
                wake[other] = arrival
                heappush(events, (arrival, other))
    return ends, sum(lasts), rows


def _can_finish(
    stages: list[int],
    admitted: int,
    kept: Sequence[float],
    forwards: list[int],
    inputs: list[int],
    space: float,
) -> bool:
    """Return whether all microbatches of an actor can finish, the oldest first, once a forward has run.

    Args:
        stages: the actor's stages, ascending.
        admitted: the stage of that forward.
        kept: the bytes that a forward of each stage keeps.
        forwards, inputs: how many forwards and input gradients of each stage have begun.
        space: the actor's free bytes, if all its weight gradients that can run have run.
    """
    space -= kept[admitted]
    for i in range(inputs[stages[0]], forwards[stages[0]] + (admitted == stages[0])):
        needed = held = 0.0
        for stage in stages:
            if forwards[stage] + (stage == admitted) <= i:
                needed += kept[stage]
            elif inputs[stage] <= i:
                held += kept[stage]
        if needed > space:
            return False
        space += held
    return True
