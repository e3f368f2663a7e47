"""Change a candidate of the search a little: its stages, its placement, or the keys of its tasks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import accumulate

from jaxpp_async.planning.named import moved
from jaxpp_async.planning.problem import Boundaries, PipelineProblem
from jaxpp_async.program.instructions import ActorId

HEAT_OF_LOADS = 0.003
"""By how much a change may well increase the sum of the squares of the actors' works, each relative to their
mean, at the start of their annealing."""


@dataclass(frozen=True, slots=True)
class SearchPoint:
    """A cut, a placement, and what the keys of tasks are made of.

    Attributes:
        cut: the boundaries.
        actors: the actor of each stage.
        shifts: by how much the keys of a kind of task of the stage that begins with a layer differ from
            those of a single microbatch, in periods: entry kind * L + layer, for L layers.
        limits: for each layer, the limit of the stage that begins with it.
        patience: see `Priorities`.
        whole: for each layer, whether the backwards of the stage that begins with it are whole.
    """

    cut: Boundaries
    actors: tuple[ActorId, ...]
    shifts: tuple[float, ...]
    limits: tuple[int, ...]
    patience: float
    whole: tuple[bool, ...]


class SearchMoves:
    """The changes that a search makes.

    Args:
        problem: the layers and the machine.
        rng: the source of random numbers.
    """

    def __init__(self, problem: PipelineProblem, rng: random.Random) -> None:
        self.problem, self.rng = problem, rng
        self.max_stages = min(len(problem.layers), 3 * problem.num_actors)
        # With more actors it is harder to make their work even, and keys are less often what takes time.
        self.share_of_stages = min(0.6, 0.075 * problem.num_actors)
        self.work = list(accumulate((layer.work_s for layer in problem.layers), initial=0.0))

    def busiest_s(self, point: SearchPoint) -> float:
        """Return the work of the busiest actor for one microbatch, with whole backwards."""
        loads = [0.0] * self.problem.num_actors
        bounds = (0, *point.cut, len(self.problem.layers))
        for stage, actor in enumerate(point.actors):
            loads[actor] += self.work[bounds[stage + 1]] - self.work[bounds[stage]]
            loads[actor] += 2 * self.problem.dispatch_s
        return max(loads)

    def neighbour(self, point: SearchPoint) -> SearchPoint | None:
        """Return a point that differs from `point` a little, or None if this try made none."""
        draw = self.rng.random()
        if draw < self.share_of_stages:
            return self._other_stages(point)
        if draw < 0.85:
            return self._other_keys(point)
        if draw < 0.9 and (self.problem.dispatch_s > 0 or min(self.problem.caps) < math.inf):
            layer = self.rng.choice((0, *point.cut))
            whole = list(point.whole)
            whole[layer] = not whole[layer]
            return replace(point, whole=tuple(whole))
        if draw < 0.95:
            layer = self.rng.choice((0, *point.cut))
            limits = list(point.limits)
            now = min(limits[layer], 2 * self.problem.num_actors)
            limits[layer] = max(1, now + self.rng.choice((-1, 1)))
            return replace(point, limits=tuple(limits))
        return replace(point, patience=self.rng.choice((0.0, 0.0, 0.2, 0.5, 0.8, 1.0)))

    def _other_keys(self, point: SearchPoint) -> SearchPoint:
        rng, num_layers = self.rng, len(self.problem.layers)
        firsts = (0, *point.cut)
        shifts = list(point.shifts)
        for _ in range(rng.choice((1, 1, 2, 3))):
            layer, kind = rng.choice(firsts), rng.randrange(3)
            shifts[kind * num_layers + layer] += rng.gauss(0, rng.choice((0.1, 0.5, 2.0)))
        return replace(point, shifts=tuple(shifts))

    def _other_stages(self, point: SearchPoint) -> SearchPoint | None:
        rng, cut, actors = self.rng, point.cut, list(point.actors)
        num_layers, num = len(self.problem.layers), len(actors)
        # With many actors a single change seldom leaves all of them with even work.
        if rng.random() < min(0.4, 0.05 * self.problem.num_actors):
            return self._evened(point)
        draw = rng.random()
        if draw < 0.45:
            if not cut:
                return None
            boundary = rng.randrange(len(cut))
            new = moved(cut, boundary, rng.choice((-1, 1)), num_layers)
            if new is None:
                return None
            return self._with_stages(point, new, point.actors)
        if draw < 0.68:
            here, there = rng.randrange(num), rng.randrange(num)
            if actors[here] == actors[there]:
                return None
            actors[here], actors[there] = actors[there], actors[here]
            return replace(point, actors=tuple(actors))
        if draw < 0.8:
            stage, actor = rng.randrange(num), rng.randrange(self.problem.num_actors)
            if actors[stage] == actor:
                return None
            actors[stage] = actor
            return replace(point, actors=tuple(actors))
        if self.problem.num_stages is not None:
            return None
        if draw < 0.9:
            layer = rng.randrange(1, num_layers) if num_layers > 1 else 0
            if num >= self.max_stages or layer in cut or layer == 0:
                return None
            new = tuple(sorted((*cut, layer)))
            actors.insert(new.index(layer) + rng.randrange(2), rng.randrange(self.problem.num_actors))
            return replace(point, cut=new, actors=tuple(actors))
        if not cut:
            return None
        boundary = rng.randrange(len(cut))
        del actors[boundary + rng.randrange(2)]
        return replace(point, cut=cut[:boundary] + cut[boundary + 1 :], actors=tuple(actors))

    def _with_stages(self, point: SearchPoint, cut: Boundaries, actors: tuple[ActorId, ...]) -> SearchPoint:
        """Return a point with as many stages as `point`, each of which keeps its keys where it begins now."""
        num_layers = len(self.problem.layers)
        shifts, limits, whole = list(point.shifts), list(point.limits), list(point.whole)
        for old, new in zip(point.cut, cut, strict=True):
            for kind in range(3):
                shifts[kind * num_layers + new] = point.shifts[kind * num_layers + old]
            limits[new], whole[new] = point.limits[old], point.whole[old]
        return SearchPoint(cut, actors, tuple(shifts), tuple(limits), point.patience, tuple(whole))

    def _evened(self, point: SearchPoint) -> SearchPoint | None:
        """Return a point with as many stages, which are cut and placed so that the actors' work is more even.

        A single change of one boundary or one placement seldom keeps the work of all actors even; several
        together do. The changes are found by simulated annealing of the sum of the squares of the actors'
        works, in which a change costs much less time than a list schedule.
        """
        rng, num, num_actors = self.rng, len(point.actors), self.problem.num_actors
        if num < 2 or num_actors < 2:
            return None
        bounds, actors = [0, *point.cut, len(self.problem.layers)], list(point.actors)
        unit = self.work[-1] / num_actors or 1.0
        work = [each / unit for each in self.work]
        loads = [0.0] * num_actors
        for stage, actor in enumerate(actors):
            loads[actor] += work[bounds[stage + 1]] - work[bounds[stage]]
        steps, num_free = rng.choice((100, 400, 400)), rng.choice((0, 0, 1, 2))
        heat, cooling = HEAT_OF_LOADS, 0.03 ** (1 / steps)
        for step in range(steps):
            heat *= cooling
            draw = rng.random()
            if draw < 0.6:  # a stage gives its first layer to the one before it, or takes that one's last
                k = rng.randrange(1, num)
                here = bounds[k] + rng.choice((-1, 1))
                if not bounds[k - 1] < here < bounds[k + 1]:
                    continue
                giving, taking = actors[k], actors[k - 1]
                change = work[here] - work[bounds[k]]
                changes = [(bounds, k, here)]
            else:  # a stage goes to another actor, mostly in exchange for another one
                one, two = rng.randrange(num), rng.randrange(num)
                giving, taking = actors[one], actors[two]
                change = work[bounds[one + 1]] - work[bounds[one]]
                changes = [(actors, one, taking)]
                if draw < 0.92:
                    change -= work[bounds[two + 1]] - work[bounds[two]]
                    changes.append((actors, two, giving))
            if giving == taking:
                continue
            more = 2 * change * (loads[taking] - loads[giving] + change)
            if more > 0 and step >= num_free and rng.random() > math.exp(-more / heat):
                continue
            loads[giving] -= change
            loads[taking] += change
            for values, position, value in changes:
                values[position] = value
        return self._with_stages(point, tuple(bounds[1:-1]), tuple(actors))
