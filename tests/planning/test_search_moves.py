"""Changes of a search's candidates: always a valid cut and placement, and keys for each layer."""

from __future__ import annotations

import random
from itertools import pairwise

from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.planning.search_moves import SearchMoves, SearchPoint


def start(num_layers: int, num_microbatches: int) -> SearchPoint:
    shifts = tuple(float(k) for k in range(3 * num_layers))
    return SearchPoint(
        (2, 4), (0, 1, 0), shifts, (num_microbatches,) * num_layers, 0.0, (False,) * num_layers
    )


def test_neighbours_of_neighbours_stay_valid():
    rng = random.Random(0)
    problem = PipelineProblem(tuple(Layer(1 + k % 3, 1, 1) for k in range(8)), 2, 5, dispatch_s=0.1)
    moves, point = SearchMoves(problem, rng), start(8, 5)
    seen = set()
    for _ in range(2000):
        found = moves.neighbour(point)
        if found is None:
            continue
        point = found
        bounds = (0, *point.cut, 8)
        assert all(first < end for first, end in pairwise(bounds))
        assert len(point.actors) == len(point.cut) + 1 <= moves.max_stages
        assert set(point.actors) <= {0, 1}
        assert (len(point.shifts), len(point.limits), len(point.whole)) == (24, 8, 8)
        assert min(point.limits) >= 1
        problem.stages(point.cut)
        seen.add((point.cut, point.actors))
    assert len(seen) > 100


def test_one_layer_on_one_actor_has_only_other_keys():
    moves = SearchMoves(PipelineProblem((Layer(1, 1, 1),), 1, 2), random.Random(0))
    point = SearchPoint((), (0,), (0.0,) * 3, (2,), 0.0, (False,))
    for _ in range(200):
        found = moves.neighbour(point)
        assert found is None or (found.cut, found.actors) == ((), (0,))


def test_a_heavy_layer_is_left_alone_by_evening_the_work():
    layers = (Layer(9, 9, 9), *[Layer(1, 1, 1)] * 9)
    moves = SearchMoves(PipelineProblem(layers, 2, 4), random.Random(1))
    point = SearchPoint((5,), (0, 1), (0.0,) * 30, (4,) * 10, 0.0, (False,) * 10)
    for _ in range(400):
        found = moves.neighbour(point)
        if found is not None and found.cut == (1,) and len(set(found.actors)) == 2:
            return
        if found is not None and len(found.actors) == 2:
            point = found
    raise AssertionError("the head was never alone")


def test_many_actors_of_uneven_layers_get_nearly_even_work():
    rng = random.Random(0)
    works = [rng.uniform(1, 3) for _ in range(32)]
    problem = PipelineProblem(tuple(Layer(work, work, work) for work in works), 8, 16)
    moves = SearchMoves(problem, rng)
    fold = (*range(8), *reversed(range(8)))
    point = SearchPoint(tuple(range(2, 32, 2)), fold, (0.0,) * 96, (16,) * 32, 0.0, (False,) * 32)
    mean_s = 3 * sum(works) / 8
    assert moves.busiest_s(point) > 1.1 * mean_s
    found = [moves.neighbour(point) for _ in range(200)]
    assert min(moves.busiest_s(each) for each in found if each is not None) < 1.04 * mean_s


def test_work_of_the_busiest_actor_counts_the_dispatch_of_whole_backwards():
    problem = PipelineProblem((Layer(1, 2, 3), Layer(1, 1, 1), Layer(1, 1, 1)), 2, 4, dispatch_s=0.5)
    point = SearchPoint((1, 2), (0, 1, 0), (0.0,) * 9, (4,) * 3, 0.0, (False,) * 3)
    assert SearchMoves(problem, random.Random(0)).busiest_s(point) == 6 + 3 + 2 * 2 * 0.5
