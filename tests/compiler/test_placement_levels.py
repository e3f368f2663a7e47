"""Levels of the operations outside the loops: how many times data has to cross actors before each can run."""

from __future__ import annotations

from collections import defaultdict

import pytest
from compiler_inputs import Body

from jaxpp_async.compiler.ir import Loop, OuterStep
from jaxpp_async.compiler.placement import _find_levels


def leveled(body: Body, where: dict[str, set[int]], needs=(), makes=()) -> tuple[dict, dict, int]:
    """Levels by (first result, actor), loops' levels by position, and the number of levels.

    Args:
        where: first result of each operation to its actors.
        needs, makes: of each loop, in order: value name to actors, and value name to actor.
    """
    loops = [i for i, item in enumerate(body.ops) if isinstance(item, Loop)]
    step = OuterStep(
        inputs=body.inputs,
        items=tuple(body.ops),
        outputs=(),
        loop_needs={
            i: {body.ref(v): frozenset(a) for v, a in n.items()} for i, n in zip(loops, needs, strict=True)
        },
        loop_makes={i: {body.ref(v): a for v, a in m.items()} for i, m in zip(loops, makes, strict=True)},
        continues={},
        num_actors=3,
    )
    ops = {i: op for i, op in enumerate(body.ops) if i not in loops}
    names = {i: body.name(op.outputs[0]) for i, op in ops.items()}
    users = defaultdict(list)
    for i, op in ops.items():
        for r in op.reads:
            users[r].append(i)
    producer = {o: i for i, op in ops.items() for o in op.outputs}
    actors = {i: frozenset(where[n]) for i, n in names.items()}
    of_ops, of_loops, num_levels = _find_levels(step, actors, producer, users)
    return {(names[i], a): level for (i, a), level in of_ops.items()}, of_loops, num_levels


def test_what_runs_on_one_actor_is_one_task():
    body = Body(x=(2,))
    body.add("a = neg x", "b = neg a", "c = add a b")
    at, _, depth = leveled(body, {"a": {1}, "b": {1}, "c": {1}})
    assert (at, depth) == ({("a", 1): 0, ("b", 1): 0, ("c", 1): 0}, 1)


def test_a_level_ends_where_a_value_crosses():
    body = Body(x=(2,))
    body.add("a = neg x", "b = neg a", "c = neg b")
    at, _, depth = leveled(body, {"a": {0}, "b": {1}, "c": {0}})
    assert (at, depth) == ({("a", 0): 0, ("b", 1): 1, ("c", 0): 2}, 3)


def test_an_operation_runs_as_late_as_its_readers_let_it():
    body = Body(x=(2,))
    body.add("late = neg x", "for1 = neg x", "a = neg x", "b = add a for1", "c = add b late")
    at, _, depth = leveled(body, {"late": {1}, "for1": {0}, "a": {0}, "b": {1}, "c": {1}})
    assert depth == 2
    assert at == {("late", 1): 1, ("for1", 0): 0, ("a", 0): 0, ("b", 1): 1, ("c", 1): 1}


def test_what_several_actors_compute_is_read_at_home_and_else_of_the_lowest():
    body = Body(x=(2,))
    body.add("a = neg x", "b = neg a")
    at, _, depth = leveled(body, {"a": {0, 1}, "b": {1, 2}})
    # Actor 1 reads its own copy and has time until the last level; actor 2 waits for actor 0's.
    assert (at, depth) == ({("a", 0): 0, ("a", 1): 1, ("b", 1): 1, ("b", 2): 1}, 2)


def around_a_loop() -> Body:
    body = Body(w=(2,), i=())
    inner = Body(body.types, v=(2,), x=(2,), j=())
    inner.add("g = mul v x")
    body.add("cast = neg w")
    body.ops.append(inner.loop("g"))
    body.value("g", (2,))
    body.add("new = add w g")
    return body


@pytest.mark.parametrize(
    ("cast_on", "loop_on", "expected"),
    [
        pytest.param({0}, {0}, ({("cast", 0): 0, ("new", 0): 2}, 1, 3), id="made where the loop reads it"),
        pytest.param({1}, {0}, ({("cast", 1): 1, ("new", 0): 3}, 2, 4), id="sent to the loop"),
    ],
)
def test_a_loop_has_a_level_of_its_own_between_what_it_needs_and_what_needs_it(cast_on, loop_on, expected):
    found, loops, depth = leveled(
        around_a_loop(), {"cast": cast_on, "new": {0}}, needs=[{"cast": loop_on}], makes=[{"g": 0}]
    )
    assert (found, loops[1], depth) == expected


def test_loops_follow_each_other_and_what_is_between_them_comes_before_the_second():
    body = around_a_loop()
    inner = Body(body.types, v=(2,), x=(2,), j=())
    body.ops.append(inner.loop("v"))
    body.value("h", (2,))
    body.add("end = neg h")
    at, loops, depth = leveled(
        body,
        {"cast": {0}, "new": {0}, "end": {0}},
        needs=[{"cast": {0}}, {"new": {0}}],
        makes=[{"g": 0}, {"h": 0}],
    )
    assert loops == {1: 1, 3: 3}
    assert (at, depth) == ({("cast", 0): 0, ("new", 0): 2, ("end", 0): 4}, 5)


def test_loops_that_read_arguments_alone_run_one_after_the_other_from_the_start():
    body = Body(w=(2,), i=())
    body.ops += [Body(body.types, v=(2,), x=(2,), j=()).loop("x") for _ in range(2)]
    _, loops, depth = leveled(body, {}, needs=[{"w": {0}}, {"w": {0}}], makes=[{}, {}])
    assert (loops, depth) == ({0: 0, 1: 1}, 3)


def test_what_a_loop_and_an_earlier_operation_read_is_there_for_the_earlier_one():
    body = around_a_loop()
    body.ops.insert(1, body.ops.pop())  # `new` moves before the loop and reads `cast`
    body.ops[1] = body.inside().add("new = add w cast")
    inner = Body(body.types, v=(2,), x=(2,), j=())
    body.ops.append(inner.loop("v"))
    needs = [{"new": {1}}, {"cast": {0}}]
    at, loops, _ = leveled(body, {"cast": {0}, "new": {1}}, needs=needs, makes=[{}, {}])
    # The second loop alone would let `cast` wait for the first one's end.
    assert (at, loops) == ({("cast", 0): 0, ("new", 1): 1}, {2: 2, 3: 3})


def test_a_loop_without_needs_comes_first_and_an_idle_operation_last():
    body = Body(w=(2,), i=())
    body.ops.append(Body(body.types, x=(2,), j=()).loop("x"))
    body.add("idle = neg w")
    at, loops, depth = leveled(body, {"idle": {2}}, needs=[{}], makes=[{}])
    assert (at, loops, depth) == ({("idle", 2): 1}, {0: 0}, 2)
