"""Find orders of a step that need little memory, whatever time they take: one microbatch at a time.

No order needs less: at the end of the forwards of a microbatch each actor holds that microbatch's kept bytes
of all its stages, besides its static bytes, and an order that begins the next microbatch only after the
backwards of this one never holds more. So only the layers have to be divided among the actors. More stages
than actors make tasks, and with them temporaries, smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

from jaxpp_async.planning.evaluation import evaluate
from jaxpp_async.planning.named import Timed
from jaxpp_async.planning.problem import Assignment, PipelineProblem
from jaxpp_async.program.instructions import ActorId, Task

WORTHWHILE = 0.01
"""The share of the bytes that another division of the layers must save to be looked at."""

NAME = "one microbatch at a time"
"""The name of the schedules that are found here."""

STAGES_OF_A_RUN = (1, 2, 4, 1_000_000)
"""The numbers of stages into which neighbouring layers of an actor are divided, as far as there are marks."""

MAX_DIVISIONS = 3
"""The number of times that layers are divided by what an earlier division has turned out to need."""


def least_order(
    problem: PipelineProblem, needs: Callable[[Assignment], Sequence[float]]
) -> tuple[Timed, float]:
    """Return an order of one microbatch at a time that needs little memory, and its fullest actor's bytes.

    The bytes that an order needs besides those of its layers say how the layers are divided next.

    Args:
        problem: the layers and the machine. Its memory caps do not count.
        needs: a function that returns the bytes that each actor needs for an assignment.
    """
    found: dict[Assignment, tuple[Timed, float]] = {}
    for stages_of_a_run in STAGES_OF_A_RUN:
        more: Sequence[float] = ()
        least = math.inf
        for _ in range(MAX_DIVISIONS):
            fresh = [o for o in lean_orders(problem, stages_of_a_run, more) if o.assignment not in found]
            before = least
            for timed in fresh:
                bytes_ = needs(timed.assignment)
                found[timed.assignment] = timed, max(bytes_)
                if max(bytes_) < least:
                    least, held = max(bytes_), held_bytes(problem, timed.assignment)
                    more = [need - size for need, size in zip(bytes_, held, strict=True)]
            if least == before:
                break
    return min(found.values(), key=lambda pair: (pair[1], pair[0].step_s))


def held_bytes(problem: PipelineProblem, assignment: Assignment) -> list[float]:
    """Return the bytes that the layers of each actor need if one microbatch runs at a time.

    Args:
        problem: the layers and the machine.
        assignment: the cut, and the actor of each stage.
    """
    stages = problem.stages(assignment.cut)
    found = stages.static_bytes_of_actors(assignment.actors, problem.num_actors)
    for stage, actor in enumerate(assignment.actors):
        found[actor] += stages.kept_bytes[stage]
    return found


def least_estimate(problem: PipelineProblem) -> float:
    """Return about the least bytes that the layers of the fullest actor need in any order."""
    return min(max(held_bytes(problem, timed.assignment)) for timed in lean_orders(problem, 1))


def lean_orders(
    problem: PipelineProblem, stages_of_a_run: int, more_bytes: Sequence[float] = ()
) -> list[Timed]:
    """Return orders of one microbatch at a time whose fullest actor needs little memory.

    The first gives each actor neighbouring layers, as evenly as that can be done. The other, which is left
    out if it has too many stages or wins nothing, gives each actor any layers.

    Args:
        problem: the layers and the machine. Its memory caps do not count.
        stages_of_a_run: into how many stages the neighbouring layers of an actor are divided, if there are
            as many, and if the problem does not say how many stages there must be.
        more_bytes: the bytes that each actor needs besides those of its layers, such as compiled orders have
            shown; empty for none.
    """
    more = list(more_bytes) or [0.0] * problem.num_actors
    sizes = [layer.static_bytes + layer.kept_bytes for layer in problem.layers]
    most = problem.num_stages or len(sizes)
    found: dict[Assignment, None] = {}
    neighbours, packed = _neighbours(sizes, more, most), _packed(sizes, more)
    evenly, any_ = (_fullest(sizes, more, actors) for actors in (neighbours, packed))
    for actors in (neighbours, packed) if any_ < (1 - WORTHWHILE) * evenly else (neighbours,):
        runs = [(actor, len(list(run))) for actor, run in groupby(actors)]
        if len(runs) <= most:
            wanted = [min(stages_of_a_run, length) for _, length in runs]
            if problem.num_stages is not None:
                wanted = _divided([length for _, length in runs], problem.num_stages)
            found.setdefault(_assignment(problem, runs, wanted))
    timed = []
    for assignment in found:
        figures = evaluate(problem, assignment)
        timed.append(Timed(assignment, figures.step_s, figures.peak_bytes, figures.fits))
    return timed


def _neighbours(sizes: Sequence[float], more: Sequence[float], max_stages: int) -> list[ActorId]:
    """Return the actor of each layer if each has neighbouring layers and the fullest one needs least.

    Args:
        sizes: the bytes of each layer.
        more: the bytes that each actor needs besides.
        max_stages: the largest number of stages.
    """
    count, num_groups = len(sizes), min(len(sizes), len(more), max_stages)
    before = list(accumulate(sizes, initial=0.0))
    # By the number of layers: the bytes of the fullest actor, the sum of squares, and the layers of the last.
    best: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] + [(float("inf"), 0.0, 0)] * count
    ways = []
    for actor in range(num_groups):
        longer: list[tuple[float, float, int]] = [(float("inf"), 0.0, 0)] * (count + 1)
        for end in range(actor + 1, count + 1):
            longer[end] = min(
                (max(best[first][0], held), best[first][1] + held * held, end - first)
                for first in range(actor, end)
                for held in (before[end] - before[first] + more[actor],)
            )
        best = longer
        ways.append(best)
    actors: list[ActorId] = []
    for actor in reversed(range(num_groups)):
        actors += [actor] * ways[actor][count - len(actors)][2]
    return actors[::-1]


def _packed(sizes: Sequence[float], more: Sequence[float]) -> list[ActorId]:
    """Return the actor of each layer, the largest layers first to the emptiest actor, then improved.

    Two layers are exchanged, or one is moved, while the fuller one of two actors gets less.

    Args:
        sizes: the bytes of each layer.
        more: the bytes that each actor needs besides.
    """
    held, actors = list(more), [0] * len(sizes)
    for layer in sorted(range(len(sizes)), key=lambda layer: -sizes[layer]):
        actors[layer] = held.index(min(held))
        held[actors[layer]] += sizes[layer]
    is_better = True
    while is_better:
        is_better = False
        for one, mine in enumerate(sizes):
            if held[actors[one]] < max(held):
                continue
            for other in [*range(len(sizes)), *(~actor for actor in range(len(held)))]:
                source = actors[one]
                target, back = (actors[other], sizes[other]) if other >= 0 else (~other, 0.0)
                change = mine - back
                if source != target and change > 0 and held[target] + change < held[source] * (1 - 1e-9):
                    held[source] -= change
                    held[target] += change
                    actors[one] = target
                    if other >= 0:
                        actors[other] = source
                    is_better = True
                    break
    return actors


def _fullest(sizes: Sequence[float], more: Sequence[float], actors: Sequence[ActorId]) -> float:
    """Return the bytes of the fullest actor, for the actor of each layer."""
    held = list(more)
    for size, actor in zip(sizes, actors, strict=True):
        held[actor] += size
    return max(held)


def _divided(lengths: Sequence[int], num_stages: int) -> list[int]:
    """Return into how many stages each run of layers is divided, so that the longest stage is short."""
    wanted = [1] * len(lengths)
    for _ in range(num_stages - len(lengths)):
        longest = max(range(len(lengths)), key=lambda k: lengths[k] / wanted[k])
        wanted[longest] += 1
    return wanted


def _assignment(
    problem: PipelineProblem, runs: Sequence[tuple[ActorId, int]], wanted: Sequence[int]
) -> Assignment:
    """Return the assignment of runs of layers, each divided into some stages.

    Args:
        problem: the layers and the machine.
        runs: the actor and the number of layers of each run.
        wanted: the number of stages of each run.
    """
    actors: list[ActorId] = []
    bounds = [0]
    for (actor, length), count in zip(runs, wanted, strict=True):
        actors += [actor] * count
        bounds += [bounds[-1] + (k + 1) * length // count for k in range(count)]
    rows: list[list[Task]] = [[] for _ in range(problem.num_actors)]
    for i in range(problem.num_microbatches):
        for stage, actor in enumerate(actors):
            rows[actor].append(Task(i, "fwd", stage))
        for stage, actor in reversed(list(enumerate(actors))):
            rows[actor].append(Task(i, "bwd", stage))
    return Assignment(tuple(bounds[1:-1]), tuple(map(tuple, rows)), NAME)
