"""Divisions of pieces among actors: the least step of all of them, and never above it."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from small_pipelines import placements

from jaxpp_async.planning import packing
from jaxpp_async.planning.packing import PRECISION, packed_s


def least_s(works, leads, num_actors, count):
    """The least step of every division."""
    found = []
    for actors in placements(len(works), num_actors):
        mine = [[k for k, actor in enumerate(actors) if actor == each] for each in range(num_actors)]
        found.append(max(leads[own[0]] + count * sum(works[k] for k in own) for own in mine if own))
    return min(found)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_step_of_all_divisions(seed):
    rng = random.Random(seed)
    draw = rng.choice((lambda: rng.uniform(1, 3), lambda: rng.choice((1.0, 2.0, 3.0)), lambda: 1.0))
    works = [draw() for _ in range(rng.randint(1, 8))]
    leads = list(accumulate((rng.choice((0.0, 0.5, 3.0)) for _ in works), initial=0.0))[:-1]
    num_actors, count = rng.randint(1, 4), rng.randint(1, 6)
    least, packed = least_s(works, leads, num_actors, count), packed_s(works, leads, num_actors, count)
    assert packed <= least
    assert packed == pytest.approx(least, rel=2 * PRECISION)


def test_pieces_that_fill_no_actor_evenly():
    """Two actors, three pieces: one has two of them, and the other cannot take a part of one."""
    assert packed_s([4, 4, 4], [0, 0, 0], 2, 10) == pytest.approx(80, rel=2 * PRECISION)


def test_an_actor_without_the_first_piece_waits():
    assert packed_s([5, 5], [0, 3], 2, 10) == pytest.approx(53, rel=2 * PRECISION)


def test_digits_that_rounding_loses_rule_out_no_division():
    works = [5.518505528028172, 11.086327029313132, 5.217957515900326, 12.09676869475964]
    leads = [0.0, 2.6018689460797075, 5.22024134267208, 7.333571138546265]
    assert packed_s(works, leads, 2, 8) <= 8 * (works[0] + works[3])


def test_a_division_that_takes_too_long_to_rule_out_leaves_a_lower_bound(monkeypatch):
    works = [random.Random(0).uniform(1, 3) for _ in range(16)]
    leads = [0.0] * 16
    least = packed_s(works, leads, 5, 10)
    monkeypatch.setattr(packing, "MAX_NODES", 20)
    assert 10 * sum(works) / 5 * (1 - 1e-8) <= packed_s(works, leads, 5, 10) < least
