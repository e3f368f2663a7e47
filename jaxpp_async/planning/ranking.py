"""Rank named schedules on cuts that suit them, for several problems at once.

Memory decides first: a schedule without a cut that fits is out. A closed form then ranks what is left, and
the best are replayed. Where a replay is promising, boundaries move by a layer while that makes the step
shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxpp_async.planning.bound import bound_of_all
from jaxpp_async.planning.closed_form import estimate_step_s
from jaxpp_async.planning.cut import best_cut, equal_cut
from jaxpp_async.planning.evaluation import TaskTable, fits
from jaxpp_async.planning.named import (
    PROMISING,
    QUICK_STATES,
    NamedOrder,
    Timed,
    moved,
    named_order,
    named_schedules,
)
from jaxpp_async.planning.problem import Assignment, Boundaries, PipelineProblem
from jaxpp_async.schedules import Schedule
from jaxpp_async.schedules.validate import plural

NUM_REPLAYED = 60
"""The number of schedules, over all problems, that are replayed. By the closed form alone, whose error is
about 1 %, the best one was always among the first ten."""

ROUNDS = 8
"""How often all boundaries of a promising cut are tried."""

FORM_ERROR = 1.03
"""The factor by which the closed form's estimate of the fastest schedule may be too low."""

DOUBT = 1.005
"""A moved boundary is replayed unless the closed form says that the step is longer by more than this."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A named schedule on a cut.

    Attributes:
        number: the number of the problem.
        problem: the problem.
        schedule: the schedule.
        order: its task lists.
        cut: the boundaries.
        estimate_s: the step by the closed form.
    """

    number: int
    problem: PipelineProblem
    schedule: Schedule
    order: NamedOrder
    cut: Boundaries
    estimate_s: float


def rank_named(
    problems: Sequence[PipelineProblem],
    *,
    rounds: int = ROUNDS,
    num_replayed: int = NUM_REPLAYED,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[tuple[int, Timed]]:
    """Return the named schedules that fit, each with the number of its problem, the fastest first.

    A problem of which no schedule can be as fast as the fastest one is left out.

    Args:
        problems: the problems.
        rounds: how often the boundaries of a promising cut are moved by one layer; 0 for quick cuts.
        num_replayed: the number of schedules that are replayed. The schedules that the closed form ranks
            behind them are left out.
        on_progress: a function that is told what is being done.
    """
    entries: list[_Entry] = []
    bounds = [bound_of_all(problem) for problem in problems]
    for number in sorted(range(len(problems)), key=bounds.__getitem__):
        problem = problems[number]
        if entries and bounds[number] > FORM_ERROR * min(entry.estimate_s for entry in entries):
            break  # no schedule of this problem, or of a later one, can be the fastest
        for schedule in _schedules(problem, entries):
            on_progress(f"fitting named schedules to {plural(problem.num_actors, 'actor')}")
            order = named_order(schedule, problem.num_microbatches, problem.num_actors)
            cuts = _cuts(problem, order, QUICK_STATES if rounds else QUICK_STATES // 10)
            found = [_entry(number, problem, schedule, order, cut) for cut in cuts]
            entries += sorted(found, key=lambda entry: entry.estimate_s)[:1]
    entries.sort(key=lambda entry: entry.estimate_s)
    replayed: list[tuple[_Entry, Timed]] = []
    for entry in entries[:num_replayed]:
        on_progress(f"timing named schedules, {len(replayed) + 1} of {min(num_replayed, len(entries))}")
        replayed.append((entry, _timed(entry.problem, entry.order, entry.cut)))
    replayed.sort(key=lambda pair: pair[1].step_s)
    ranked: list[tuple[int, Timed]] = []
    best_s = replayed[0][1].step_s if replayed else 0.0
    for entry, timed in replayed:
        if rounds and timed.step_s <= PROMISING * best_s:
            on_progress(f"moving the boundaries of {entry.order.name}")
            ranked.append((entry.number, _climbed(entry, timed, rounds, on_progress)))
            best_s = min(best_s, ranked[-1][1].step_s)
        else:
            ranked.append((entry.number, timed))
    return sorted(ranked, key=lambda pair: pair[1].step_s)


def _schedules(problem: PipelineProblem, entries: Sequence[_Entry]) -> Iterator[Schedule]:
    """Yield the named schedules of a problem, and behind them those with fewer stages than actors.

    These are left out where a bound says that they are slower than the fastest of `entries`, to which the
    caller adds each schedule before the next one.
    """
    num_layers, num_actors = len(problem.layers), problem.num_actors
    yield from named_schedules(num_layers, num_actors, problem.num_stages)
    if problem.num_stages is not None:
        return
    for count in range(min(num_layers, num_actors - 1), 0, -1):
        fewer = replace(problem, num_actors=count, cap_bytes=problem.caps[:count])
        best_s = min((entry.estimate_s for entry in entries), default=math.inf)
        if bound_of_all(fewer) >= best_s:
            return
        yield from named_schedules(num_layers, num_actors, count)


def _cuts(problem: PipelineProblem, order: NamedOrder, max_states: int) -> list[Boundaries]:
    """Return the cuts that fit among one with little work on the busiest actor and the equal one."""
    cuts = [
        best_cut(problem, order.actors, order.moments, max_states=max_states),
        equal_cut(len(problem.layers), order.num_stages),
    ]
    distinct = dict.fromkeys(cut for cut in cuts if cut is not None)
    return [cut for cut in distinct if fits(order.peak_bytes(problem.stages(cut)), problem.caps)]


def _entry(
    number: int, problem: PipelineProblem, schedule: Schedule, order: NamedOrder, cut: Boundaries
) -> _Entry:
    return _Entry(number, problem, schedule, order, cut, _estimate_s(problem, schedule, cut))


def _estimate_s(problem: PipelineProblem, schedule: Schedule, cut: Boundaries) -> float:
    return estimate_step_s(schedule, problem.stages(cut), problem.num_microbatches, problem.num_actors)


def _timed(problem: PipelineProblem, order: NamedOrder, cut: Boundaries) -> Timed:
    stages = problem.stages(cut)
    table = TaskTable(stages, order.actors, problem.num_microbatches, problem.num_actors)
    peaks = order.peak_bytes(stages)
    assignment = Assignment(cut, order.rows, order.name)
    return Timed(assignment, table.step_s(order.numbers), peaks, fits(peaks, problem.caps))


def _climbed(entry: _Entry, best: Timed, rounds: int, on_progress: Callable[[str], None]) -> Timed:
    """Return the schedule on a cut from which no move of a boundary by one layer makes the step shorter."""
    problem, estimate_s = entry.problem, entry.estimate_s
    for _ in range(rounds):
        before = best
        for boundary in range(len(best.assignment.cut)):
            on_progress(f"moving boundary {boundary} of {entry.order.name}")
            for step in (-1, 1):
                tried = moved(best.assignment.cut, boundary, step, len(problem.layers))
                if tried is None:
                    continue
                tried_s = _estimate_s(problem, entry.schedule, tried)
                if tried_s <= DOUBT * estimate_s:
                    timed = _timed(problem, entry.order, tried)
                    if timed.fits and timed.step_s < best.step_s:
                        best, estimate_s = timed, tried_s
        if best is before:
            break
    return best
