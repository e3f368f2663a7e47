"""Improve task lists one task at a time: the last polish of a search, and all of it for small problems."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from jaxpp_async.planning.evaluation import (
    BACKWARD,
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
    """Return a list with one task elsewhere, a backward split or two halves joined; None if that is not valid."""
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
