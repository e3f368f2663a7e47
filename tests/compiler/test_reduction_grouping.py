"""Sums of small values of several actors: each actor joins its own, and only the parts meet."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from compiler_inputs import Body

from jaxpp_async.compiler.evaluate import run_ops
from jaxpp_async.compiler.ir import OuterStep
from jaxpp_async.compiler.reduction_grouping import GroupingInputs, regroup_reductions


def seen(body: Body, outputs: str, home: dict[str, int], needs: str = "") -> GroupingInputs:
    """A step of these operations alone, all on one actor each; `needs`: values that a loop reads."""
    loop_needs = {99: dict.fromkeys(body.refs(needs), frozenset((0,)))} if needs else {}
    step = OuterStep(body.inputs, tuple(body.ops), body.refs(outputs), loop_needs, {}, {}, 2)
    producer = {o: i for i, op in enumerate(body.ops) for o in op.outputs}
    users = defaultdict(list)
    for i, op in enumerate(body.ops):
        for r in op.reads:
            users[r].append(i)
    where = {v: {home[body.name(v)]} for v in body.inputs}
    return GroupingInputs(
        step, body.types, set(producer.values()), producer, users, lambda v: where.get(v, set())
    )


def regrouped(body: Body, outputs: str, home: dict[str, int]) -> list[str] | None:
    found = regroup_reductions(seen(body, outputs, home))
    return None if found is None else body.show(found.items)


def scalars(*names: str) -> Body:
    return Body(**dict.fromkeys(names, ()))


ALTERNATING = {"a": 0, "b": 1, "c": 0, "d": 1}


@pytest.mark.parametrize("name", ["add", "add_any", "mul", "max", "min"])
def test_a_chain_over_two_actors_becomes_one_of_each_actor_and_one_that_joins_them(name):
    body = scalars("a", "b", "c", "d")
    body.add(f"s = {name} a b", f"t = {name} s c", f"u = {name} t d", "v = tanh u")
    assert regrouped(body, "v", ALTERNATING) == [
        f"v1 = {name} a c",
        f"v2 = {name} b d",
        f"u = {name} v1 v2",
        "v = tanh u",
    ]


def test_a_balanced_tree_is_regrouped_in_the_order_of_its_leaves():
    body = scalars("a", "b", "c", "d", "e")
    body.add("s = add b a", "t = add d c", "u = add s t", "v = add e u")
    found = regrouped(body, "v", {**ALTERNATING, "e": 0})
    assert found == ["v1 = add e a", "v2 = add v1 c", "v3 = add b d", "v = add v2 v3"]


@pytest.mark.parametrize(
    ("lines", "outputs", "home"),
    [
        pytest.param(["s = sub a b", "t = sub s c"], "t", ALTERNATING, id="not associative"),
        pytest.param(["s = add a b", "t = max s c"], "t", ALTERNATING, id="two operations"),
        pytest.param(["s = add a b"], "s", ALTERNATING, id="two values"),
        pytest.param(["s = add a b", "t = add s c"], "t", dict.fromkeys("abcd", 1), id="one actor"),
        pytest.param(["s = add a b", "t = add s c"], "s t", ALTERNATING, id="a partial sum is a result"),
        pytest.param(
            ["s = add a b", "t = add s c", "u = neg s"], "t u", ALTERNATING, id="it is read elsewhere"
        ),
        pytest.param(["s = add a b", "t = add s #1.0"], "t", ALTERNATING, id="a constant"),
        pytest.param(["s:int32 = add a b", "t:int32 = add s c"], "t", ALTERNATING, id="another type"),
    ],
)
def test_nothing_is_regrouped_where_order_or_home_says_nothing(lines, outputs, home):
    body = scalars("a", "b", "c", "d")
    body.add(*lines)
    assert regrouped(body, outputs, home) is None


@pytest.mark.parametrize(("size", "small"), [(16, True), (17, False)])
def test_only_values_of_up_to_64_bytes_are_regrouped(size, small):
    body = Body(**dict.fromkeys("abc", (size,)))
    body.add("s = add a b", "t = add s c")
    assert (regrouped(body, "t", ALTERNATING) is not None) is small


def test_what_comes_from_parts_of_an_array_may_be_large():
    body = Body(**dict.fromkeys("abcd", (1000,)))
    body.add("s = add a b", "t = add s c", "u = add t d", joins_parts=True)
    assert regrouped(body, "u", {"a": 0, "b": 0, "c": 1, "d": 1}) == [
        "v1 = add a b",
        "v2 = add c d",
        "u = add v1 v2",
    ]


def test_a_partial_sum_that_a_loop_reads_stays():
    body = scalars("a", "b", "c")
    body.add("s = add a b", "t = add s c")
    assert regroup_reductions(seen(body, "t", ALTERNATING)) is not None
    assert regroup_reductions(seen(body, "t", ALTERNATING, needs="s")) is None


def stack() -> Body:
    body = Body(a=(1,), b=(1,), c=(1,))
    body.add("s[3] = concatenate a b c", "m[] = reduce_max s")
    return body


def test_a_reduction_of_what_was_stacked_is_done_by_each_actor_first():
    assert regrouped(stack(), "m", ALTERNATING) == [
        "v1 = concatenate a c",
        "v2 = reduce_max v1",
        "v3 = reshape v2",
        "v4 = concatenate b",
        "v5 = reduce_max v4",
        "v6 = reshape v5",
        "v7 = concatenate v3 v6",
        "m = reduce_max v7",
    ]


def test_rows_of_several_elements_are_counted_in_the_new_shapes():
    body = Body(a=(2,), b=(1,), c=(3,))
    body.add("s[6] = concatenate a b c", "m[] = reduce_max s")
    found = regroup_reductions(seen(body, "m", ALTERNATING))
    shapes = [body.types[op.outputs[0]].aval.shape for op in found.items]
    assert shapes == [(5,), (), (1,), (1,), (), (1,), (2,), ()]


@pytest.mark.parametrize(
    ("more", "outputs"),
    [
        pytest.param([], "m s", id="the stack is a result"),
        pytest.param(["n[] = reduce_sum s"], "m n", id="the stack is reduced twice"),
    ],
)
def test_a_stack_that_is_read_elsewhere_stays(more, outputs):
    body = stack()
    for line in more:
        body.add(line)
    assert regrouped(body, outputs, ALTERNATING) is None


def test_a_stack_of_one_actor_stays():
    assert regrouped(stack(), "m", {"a": 1, "b": 1, "c": 1}) is None


# ---------------------------------------------------------------- concatenations


def test_neighbours_of_one_actor_are_concatenated_there():
    """The order of the rows stays, so values of one actor that are no neighbours are sent one by one."""
    body = Body(a=(1, 2), b=(3, 2), c=(1, 2), d=(2, 2), e=(1, 2))
    body.add("s[8,2] = concatenate a b c d e", "t[8,2] = sort s")
    inputs = seen(body, "t", {"a": 0, "b": 0, "c": 1, "d": 1, "e": 0})
    found = regroup_reductions(inputs)
    assert body.show(found.items) == [
        "v1 = concatenate a b",
        "v2 = concatenate c d",
        "s = concatenate v1 v2 e",
        "t = sort s",
    ]
    assert [body.types[op.outputs[0]].aval.shape for op in found.items[:2]] == [(4, 2), (3, 2)]


@pytest.mark.parametrize(
    ("home", "columns"),
    [
        pytest.param({"a": 0, "b": 1, "c": 0}, 2, id="no neighbours on one actor"),
        pytest.param({"a": 1, "b": 1, "c": 1}, 2, id="one actor"),
        pytest.param({"a": 0, "b": 0, "c": 1}, 1 << 13, id="large"),
    ],
)
def test_a_concatenation_stays_where_nothing_is_won(home, columns):
    body = Body(**dict.fromkeys("abc", (1, columns)))
    body.add(f"s[3,{columns}] = concatenate a b c", f"t[3,{columns}] = sort s")
    assert regrouped(body, "t", home) is None


def test_regrouping_changes_no_number():
    body = Body(a=(1,), b=(1,), c=(1,), d=(), e=(), f=())
    body.add("s[3] = concatenate a b c", "m[] = reduce_max s", "p = add d e", "q = add p f", "r = mul q m")
    home = {**ALTERNATING, "e": 1, "d": 0, "f": 0}
    found = regroup_reductions(seen(body, "r", home))
    values = [np.float32([3]), np.float32([7]), np.float32([5]), *np.float32([2, 4, 6])]
    for ops in (body.ops, found.items):
        env = dict(zip(body.inputs, values, strict=True))
        run_ops(ops, env)
        assert env[body.ref("r")] == 84
