"""Direct tests of the programs that divide an array into parts, join its parts, or divide it anew."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpret import run_programs

from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.program.instructions import Aval, Run, Send
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session.part_moves import Held, Redivision, build_redivision

SHAPE, NUM_ACTORS = (4, 3), 3
TYPE = ValueType(Aval(SHAPE, "float32"))
WHOLE = np.arange(12, dtype=np.float32).reshape(SHAPE)
HERE = Target(None, "cpu", {})


def held(parts: Parts | None, *actors: tuple[int, ...]) -> Held:
    return Held(parts, actors, ((),) * len(actors))


@cache
def _call(blob: bytes):
    return jax.export.deserialize(bytearray(blob)).call


def check(change: Redivision) -> list:
    """Run a redivision, compare what it makes with what numpy cuts, and return its programs."""
    programs, executables = build_redivision(change, NUM_ACTORS, HERE)
    arrays = [jnp.asarray(WHOLE[_index(box)]) for box in change.source.boxes(SHAPE)]
    made = run_programs(programs, arrays, lambda k: _call(executables[k].blob))
    expected = {
        k: dict.fromkeys(change.wanted.actors[k], WHOLE[_index(box)].tolist())
        for k, box in enumerate(change.wanted.boxes(SHAPE))
        if k not in change.kept()
    }
    assert {k: {a: np.asarray(x).tolist() for a, x in each.items()} for k, each in made.items()} == expected
    return list(programs)


def _index(box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


def bytes_sent(programs) -> int:
    return sum(p.avals[i.buffer].size_bytes for p in programs for i in p.instructions if isinstance(i, Send))


def missing(change: Redivision) -> int:
    """The bytes that some actor needs for a new part and does not hold."""
    total = 0
    for k, box in enumerate(change.wanted.boxes(SHAPE)):
        for actor in change.wanted.actors[k] if k not in change.kept() else ():
            lacks = np.zeros(SHAPE, bool)
            lacks[_index(box)] = True
            for other, actors in zip(change.source.boxes(SHAPE), change.source.actors, strict=True):
                if actor in actors:
                    lacks[_index(other)] = False
            total += 4 * lacks.sum()
    return int(total)


@st.composite
def layouts(draw) -> Held:
    axis = draw(st.sampled_from((0, 1)))
    length = SHAPE[axis]
    between = draw(st.sets(st.integers(1, length - 1)))
    bounds = (0, *sorted(between), length)
    places = [tuple(sorted(draw(st.sets(st.integers(0, 2), min_size=1)))) for _ in pairwise(bounds)]
    return held(Parts(axis, bounds) if between else None, *places)


@given(source=layouts(), wanted=layouts())
@example(held(None, (0,)), held(Parts(0, (0, 2, 4)), (0,), (1,)))
@example(held(Parts(0, (0, 2, 4)), (0,), (1,)), held(None, (2,)))
@example(held(Parts(0, (0, 2, 4)), (0,), (1, 2)), held(Parts(1, (0, 1, 3)), (0, 1), (2,)))
@settings(max_examples=40, deadline=None)
def test_every_actor_gets_its_parts_and_each_row_that_it_lacks_once(source, wanted):
    change = Redivision(TYPE, source, wanted)
    assert bytes_sent(check(change)) == missing(change)


def test_parts_that_stay_the_same_are_not_made():
    source, wanted = held(Parts(0, (0, 2, 4)), (0,), (1,)), held(Parts(0, (0, 2, 3, 4)), (2,), (0,), (1,))
    change = Redivision(TYPE, source, wanted)
    assert change.kept() == {0: 0}
    programs = check(change)
    assert programs[2].instructions == ()
    assert change.senders(1) == {(1, (0,)): 12}
    assert change.senders(2) == {(1, (1,)): 12}


def test_rows_are_counted_by_who_has_them_and_who_gets_them():
    source = held(Parts(0, (0, 1, 2, 3, 4)), (0,), (1,), (0,), (0, 1))
    change = Redivision(TYPE, source, held(None, (1, 2)))
    assert change.senders(0) == {(0, (1, 2)): 24, (1, (2,)): 24}
    assert bytes_sent(check(change)) == 2 * 24 + 24


def test_a_division_in_place_is_one_task_a_part_and_sends_nothing():
    programs = check(Redivision(TYPE, held(None, (0,)), held(Parts(1, (0, 2, 3)), (0,), (0,))))
    assert bytes_sent(programs) == 0
    assert sum(isinstance(i, Run) for i in programs[0].instructions) == 2


@pytest.mark.parametrize("shape", [(4, 0), (2, 2, 0)])
def test_an_array_without_elements_can_be_divided(shape):
    kind = ValueType(Aval(shape, "float32"))
    parts = Parts(0, (0, 1, shape[0]))
    programs, executables = build_redivision(
        Redivision(kind, held(None, (0,)), held(parts, (0,), (1,))), 2, HERE
    )
    made = run_programs(programs, [jnp.zeros(shape)], lambda k: _call(executables[k].blob))
    assert [made[k][k].shape for k in (0, 1)] == list(parts.shapes(shape))


@pytest.mark.parametrize("axis_type", list(jax.sharding.AxisType)[:2])
@pytest.mark.parametrize(
    ("source", "wanted", "sent"),
    [
        (
            Held(None, ((0,),), ((None, "x"),)),
            Held(Parts(0, (0, 6, 8)), ((0,), (1,)), (("x",), (None, "x"))),
            {(None, "x")},
        ),
        (
            Held(None, ((0,),), (("x",),)),
            Held(Parts(0, (0, 5, 8)), ((0,), (1,)), ((), (None, "x"))),
            {(None, "x")},
        ),
        (
            Held(Parts(0, (0, 5, 8)), ((0,), (1,)), ((), (None, "x"))),
            Held(None, ((0,),), (("x",),)),
            {(None, "x")},
        ),
        (
            Held(Parts(0, (0, 4, 8)), ((0,), (1,)), (("x",), ("x",))),
            Held(Parts(0, (0, 5, 8)), ((0,), (1,)), ((), ())),
            {(None,)},
        ),
    ],
)
def test_shardings_may_change_and_need_not_divide_what_is_sent(axis_type, source, wanted, sent):
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(axis_type,))
    kind = ValueType(Aval((8, 4), "float32", source.specs[0]))
    programs, _ = build_redivision(Redivision(kind, source, wanted), 2, Target(mesh, "cpu", {}))
    found = {p.avals[i.buffer].spec for p in programs for i in p.instructions if isinstance(i, Send)}
    assert found == sent
