"""Outside the loops: who gives a value to whom, and how operations are replaced or dropped."""

from __future__ import annotations

import pytest
from compiler_inputs import Body

from jaxpp_async.compiler.outer_ops import OuterStep, replaced, source_actor, without_dead


@pytest.mark.parametrize(
    ("holders", "wanted", "expected"), [({2, 1, 3}, 3, 3), ({2, 1, 3}, 0, 1), ([2], 2, 2), ([5, 4], 9, 4)]
)
def test_a_value_comes_from_the_actor_itself_or_else_from_the_lowest(holders, wanted, expected):
    assert source_actor(holders, wanted) == expected


def step() -> tuple[Body, OuterStep]:
    """An operation for the loop, one for nobody, the loop, and one behind it."""
    body = Body(w=(2,))
    body.add("cast = neg w", "idle = neg cast", "idle2 = neg idle")
    body.ops.append(Body(body.types, v=(2,), x=(2,), i=()).loop("v"))
    body.value("g", (2,))
    body.add("new = add w g", "unused[] _ = tanh g")
    needs = {3: {body.ref("cast"): frozenset((0,))}}
    makes = {3: {body.ref("g"): 1}}
    return body, OuterStep(body.inputs, tuple(body.ops), body.refs("new"), needs, makes, {0: 0}, 2)


def names(body: Body, found: OuterStep) -> list[str]:
    return [body.name(i.outputs[0]) if hasattr(i, "name") else "loop" for i in found.items]


def test_replaced_operations_stand_in_their_place_and_the_loop_is_known_by_its_new_position():
    body, old = step()
    more = body.inside()
    more.add("p = neg w", "q = neg p", "cast2 = neg q")
    found = replaced(old, {0: more.ops}, {1, 2})
    assert names(body, found) == ["p", "q", "cast2", "loop", "new", "unused"]
    assert (found.loop_needs, found.loop_makes) == (old.loop_needs, old.loop_makes)
    found = replaced(old, {}, [1])
    assert found.loop_needs == {2: old.loop_needs[3]} and found.loop_makes == {2: old.loop_makes[3]}
    assert (found.outputs, found.continues, found.inputs) == (old.outputs, old.continues, old.inputs)


def test_what_no_result_and_no_loop_needs_is_dropped():
    body, old = step()
    found = without_dead(old)
    assert names(body, found) == ["cast", "loop", "new"]
    assert list(found.loop_needs) == [1]
    assert without_dead(found) is found
