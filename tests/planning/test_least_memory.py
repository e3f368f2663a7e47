"""Orders of little memory: never more than any other order of tiny problems, and what they are, by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from small_pipelines import drawn_problem

from jaxpp_async.planning.least_memory import NAME, held_bytes, lean_orders, least_estimate, least_order
from jaxpp_async.planning.named import on_equal_cut
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.planning.search import search


def sized(*sizes, **options) -> PipelineProblem:
    """Return a problem of layers that need so many bytes."""
    layers = tuple(Layer(1, 1, 1, kept_bytes=size / 2, static_bytes=size / 2) for size in sizes)
    return PipelineProblem(layers, **{"num_actors": 2, "num_microbatches": 3, **options})


def least_of_all(problem):
    """Return the least bytes of the fullest actor over all placements of single layers."""
    sizes = [layer.static_bytes + layer.kept_bytes for layer in problem.layers]
    return min(
        max(sum(size for size, a in zip(sizes, actors, strict=True) if a == k) for k in set(actors))
        for actors in itertools.product(range(problem.num_actors), repeat=len(sizes))
    )


@pytest.mark.parametrize("seed", range(8))
def test_no_other_order_needs_less(seed):
    rng = random.Random(seed)
    problem = drawn_problem(rng, num_layers=rng.randint(3, 6), num_actors=2, num_microbatches=3)
    orders = lean_orders(problem, 10**6)
    least = least_of_all(problem)
    assert least <= min(max(timed.peak_bytes) for timed in orders) * (1 + 1e-9) <= 1.02 * least
    for timed in orders:
        assert max(held_bytes(problem, timed.assignment)) == pytest.approx(max(timed.peak_bytes))
    for other in [*on_equal_cut(problem), search(problem, iterations=30).best]:
        assert least <= max(other.peak_bytes) * (1 + 1e-9)


def test_the_estimate_is_that_of_the_leaner_order():
    assert least_estimate(sized(2, 3, 2, 1)) == 4 and least_estimate(sized(1, 1, 1, 5)) == 5


def test_neighbouring_layers_are_divided_as_evenly_as_can_be():
    (timed,) = lean_orders(sized(1, 1, 1, 5), 1)
    assert timed.assignment.name == NAME and timed.assignment.cut == (3,)
    assert timed.peak_bytes == (3, 5)
    assert [task.i for task in timed.assignment.rows[0]] == [0, 0, 1, 1, 2, 2]


def test_any_layers_where_neighbours_do_not_divide_evenly():
    evenly, any_ = lean_orders(sized(2, 3, 2, 1), 1)
    assert evenly.peak_bytes == (5, 3) and any_.peak_bytes == (4, 4)


def test_a_number_of_stages_is_kept():
    for num_stages in range(1, 7):
        for timed in lean_orders(sized(1, 2, 3, 1, 2, 3, num_stages=num_stages), 4):
            assert timed.assignment.num_stages == num_stages


def test_more_actors_than_layers():
    (timed,) = lean_orders(sized(1, 2, num_actors=4), 1)
    assert timed.peak_bytes == (1, 2, 0, 0) and len(timed.assignment.rows) == 4


def test_bytes_besides_those_of_layers_move_layers_to_other_actors():
    """Actor 0 needs 4 bytes besides: it gets one layer of 2, and actor 1 three."""
    problem = sized(2, 2, 2, 2)

    def needs(assignment):
        held = held_bytes(problem, assignment)
        return [held[0] + 4, held[1]]

    timed, bytes_ = least_order(problem, needs)
    assert bytes_ == 6 and held_bytes(problem, timed.assignment) == [2, 6]


def test_more_stages_are_taken_where_they_need_less():
    problem = sized(1, 1, 1, 1)
    timed, bytes_ = least_order(
        problem, lambda a: [held + 8 / a.num_stages for held in held_bytes(problem, a)]
    )
    assert timed.assignment.num_stages == 4 and bytes_ == 4
