"""Improve task lists one task at a time: the last polish of a search, and all of it for small problems."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

from jaxpp_async.planning.evaluation import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    TaskTable,
    fits,
)


def improve_order(
    table: TaskTable, rows: Sequence[Sequence[int]], caps: Sequence[float], rng: random.Random, steps: int
) -> list[list[int]]:
    """Move, split and join single tasks while that makes the step no longer and fits into the memory.

    Args:
        table: the tasks.
        rows: one list of task numbers per actor.
        caps: the memory of each actor.
        rng: the source of random numbers.
        steps: how many changes to try.

    Returns:
        The lists with the changes that were kept.
    """
    best = [list(row) for row in rows]
    best_s, best_cost = _cost(table, best)
    busy = [actor for actor, row in enumerate(best) if len(row) > 1]
    for _ in range(steps if busy else 0):
        actor = rng.choice(busy)
        row = _changed(table, best[actor], rng)
        if row is None:
            continue
        rows = [*best[:actor], row, *best[actor + 1 :]]
        if not fits(table.peak_bytes(rows), caps):
            continue
        step_s, cost = _cost(table, rows)
        if step_s <= best_s and cost <= best_cost:
            best, best_s, best_cost = rows, step_s, cost
    return best


def _cost(table: TaskTable, rows: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the step, and the step with a little of all tasks' ends, which tells equal steps apart."""
    ends = table.end_times(rows)
    lasts = [ends[row[-1]] for row in rows if row]
    if min(lasts) < 0:
        return math.inf, math.inf
    step_s = max(lasts)
    return step_s, step_s + 0.01 * sum(lasts) / len(lasts)


def _changed(table: TaskTable, row: list[int], rng: random.Random) -> list[int] | None:
    """Return a list with one task elsewhere, or a backward split or whole; None if that is not valid."""
    size = len(table.stages) * table.num_microbatches
    at = rng.randrange(len(row))
    number = row[at]
    kind, place = divmod(number, size)
    if kind == BACKWARD and rng.random() < 0.5:
        halves = [INPUT_GRADIENT * size + place, WEIGHT_GRADIENT * size + place]
        return row[:at] + halves + row[at + 1 :]
    if kind == INPUT_GRADIENT and rng.random() < 0.3:
        joined = [*row[:at], BACKWARD * size + place, *row[at + 1 :]]
        joined.remove(WEIGHT_GRADIENT * size + place)
        return joined
    distance = rng.choice((1, 1, 2, 3, 5, 8)) * rng.choice((-1, 1))
    to = min(max(at + distance, 0), len(row) - 1)
    passed = row[to:at] if to < at else row[at + 1 : to + 1]
    if to == at or any(other % size == place for other in passed):
        return None  # the tasks of one stage and microbatch keep their order
    rest = row[:at] + row[at + 1 :]
    return [*rest[:to], number, *rest[to:]]


def merge_backwards(table: TaskTable, rows: list[list[int]], *, evaluations: int = 200) -> list[list[int]]:
    """Make split backwards whole, as long as the step does not become longer.

    Pairs of halves that follow each other are tried all together, then the first and the second half of the
    pairs if that makes the step longer, and so on; then other pairs likewise, at the place of the input
    gradient. A whole backward frees memory no later than the two halves.

    Args:
        table: the tasks.
        rows: lists of task numbers.
        evaluations: how many steps to time at most.

    Returns:
        Lists with fewer split backwards.
    """
    size = len(table.stages) * table.num_microbatches
    found = {number for row in rows for number in row}
    near = {
        first - size
        for row in rows
        for first, second in pairwise(row)
        if second - first == size and size <= first < 2 * size
    }
    far = {number - size for number in found if size <= number < 2 * size} - near
    chosen: set[int] = set()
    best, best_s = rows, table.step_s(rows)
    pending = [sorted(far), sorted(near)]
    while pending and evaluations > 0:
        group = pending.pop()
        if not group:
            continue
        evaluations -= 1
        merged = [_merged(row, size, chosen.union(group)) for row in rows]
        merged_s = table.step_s(merged)
        if merged_s <= best_s:
            chosen.update(group)
            best, best_s = merged, merged_s
        elif len(group) > 1:
            middle = len(group) // 2
            pending += [group[:middle], group[middle:]]
    return best


def _merged(row: list[int], size: int, places: set[int]) -> list[int]:
    """Return a list with whole backwards of some pairs of a stage and a microbatch.

    Args:
        row: task numbers.
        size: the number of such pairs.
        places: stage * M + microbatch of each, for M microbatches.
    """
    found: list[int] = []
    for number in row:
        kind, place = divmod(number, size)
        if kind in (FORWARD, BACKWARD) or place not in places:
            found.append(number)
        elif kind == INPUT_GRADIENT:
            found.append(BACKWARD * size + place)
    return found
