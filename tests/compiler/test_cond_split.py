"""A cond outside the loops as several, and what stands inside a cond or a call in its place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from compiler_inputs import Body

from jaxpp_async.compiler.cond_split import (
    can_expand,
    expand_op,
    has_constant_choice,
    is_repeatable,
    merge_parts,
    split_cond,
)
from jaxpp_async.compiler.evaluate import branches, run_ops
from jaxpp_async.compiler.ir import Flat, Op
from jaxpp_async.program.instructions import Aval

BIG = (3, 3)  # more than what is computed again rather than shared


def cond(true: Sequence[str], false: Sequence[str], *, terminates: bool = True) -> tuple[Body, Op]:
    """A cond of `a` and `b`; each branch is lines, the last one `return` and its results."""
    outer = Body(which=Aval((), "int32"), a=BIG, b=BIG)
    bodies = []
    for *lines, returned in (true, false):
        body = Body(outer.types, a=BIG, b=BIG)
        for line in lines:
            body.add(line)
        bodies.append(body.flat(returned.removeprefix("return ")))
    results = " ".join("rstu"[k] + "[3,3]" for k in range(len(bodies[0].outputs)))
    choice = branches(bodies, outer.types, terminates=terminates)
    op = outer.add(f"{results} = cond which a b", branches=choice, run=choice.choose(bodies))
    return outer, op


def parts_of(outer: Body, op: Op, used: str) -> list[Op]:
    return split_cond(op, set(outer.refs(used)), outer.types)


def values(outer: Body, ops: Sequence[Op], which: int, names: str) -> list[Any]:
    rng = np.random.default_rng(0)
    arrays = [jnp.int32(which), *(jnp.asarray(rng.normal(size=BIG), "float32") for _ in "ab")]
    env = dict(zip(outer.inputs, arrays, strict=True))
    run_ops(ops, env)
    return [np.asarray(env[r]) for r in outer.refs(names)]


def same_values(outer: Body, op: Op, ops: Sequence[Op], names: str) -> bool:
    pairs = [(values(outer, [op], k, names), values(outer, ops, k, names)) for k in (0, 1)]
    return all(np.array_equal(x, y) for whole, parts in pairs for x, y in zip(whole, parts, strict=True))


# ---------------------------------------------------------------- one cond into several


@pytest.mark.parametrize(
    ("true", "false", "expected"),
    [
        pytest.param(
            ["p = neg a", "q = mul b b", "return p q"],
            ["p = mul a a", "q = neg b", "return p q"],
            ["r = cond which a", "s = cond which b"],
            id="nothing in common",
        ),
        pytest.param(
            ["p = neg a", "q = mul p b", "return p q"],
            ["p = mul a a", "q = neg b", "return p q"],
            ["r s = cond which a b"],
            id="one branch computes both of one array",
        ),
        pytest.param(
            ["return a b"], ["return b b"], ["r = select_n which a b", "s = copy b"], id="passed on"
        ),
        pytest.param(
            ["p = neg a", "return p b"],
            ["return a a"],
            ["r = cond which a", "s = select_n which b a"],
            id="one computed, one passed on",
        ),
        pytest.param(
            ["k[3,3] = broadcast_in_dim #1.0", "p = mul k a", "q = mul k b", "return p q"],
            ["return a b"],
            ["r = cond which a", "s = cond which b"],
            id="a constant laid out is each part's own",
        ),
    ],
)
def test_a_cond_becomes_one_for_each_group_of_results_that_share_no_computed_array(true, false, expected):
    outer, op = cond(true, false)
    parts = parts_of(outer, op, "r s")
    assert outer.show(parts) == expected
    if "broadcast_in_dim" not in str(true):  # which numpy's payloads have not
        assert same_values(outer, op, parts, "r s")


def test_results_that_nobody_uses_are_dropped_with_what_they_alone_need():
    outer, op = cond(["p = neg a", "q = mul p b", "return p q"], ["return a b"])
    (part,) = parts_of(outer, op, "r")
    assert outer.show([part]) == ["r = cond which a"]
    assert [[o.name for o in body.ops] for body in part.branches.bodies] == [["neg"], []]
    assert parts_of(outer, op, "a") == []


def test_a_part_is_not_split_again():
    outer, op = cond(["p = neg a", "q = neg b", "return p q"], ["return a b"])
    parts = parts_of(outer, op, "r s")
    assert [split_cond(p, set(p.outputs), outer.types) for p in parts] == [[p] for p in parts]


def test_parts_merge_into_the_cond_of_their_results():
    outer, op = cond(["p = neg a", "q = neg b", "return p q a"], ["return a b b"])
    first, second, third = parts_of(outer, op, "r s t")
    assert outer.show([merge_parts([first, second])]) == ["r s = cond which a b"]
    assert third.name == "select_n"
    assert same_values(outer, op, [merge_parts([second, first])], "r s")


def test_a_cond_inside_a_branch_is_split_with_it():
    outer, inner = cond(["p = neg a", "q = neg b", "return p q"], ["return a b"])
    around = Body(outer.types, which=Aval((), "int32"), a=BIG, b=BIG)
    around.add("r[3,3] s[3,3] = cond which a b", branches=inner.branches, run=inner.run)
    plain = Body(outer.types, which=Aval((), "int32"), a=BIG, b=BIG)
    bodies = [around.flat("r s"), plain.flat("a b")]
    choice = branches(bodies, outer.types, terminates=True)
    op = outer.add("t[3,3] u[3,3] = cond which which a b", branches=choice, run=choice.choose(bodies))
    parts = parts_of(outer, op, "t u")
    assert outer.show(parts) == ["t = cond which which a", "u = cond which which b"]
    assert [[o.name for o in p.branches.bodies[0].ops] for p in parts] == [["cond"], ["cond"]]
    assert same_values(outer, op, parts, "t u")
    # Merged again, the inner parts are one operation too.
    (whole_inside,) = merge_parts(parts).branches.bodies[0].ops
    assert len(whole_inside.outputs) == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("k[3,3] = broadcast_in_dim c", True),
        ("k = mul c c", True),
        ("k[3,3] = dot_general c c", False),
        ("k[] = reduce_sum a", False),
        ("k[4] = iota", True),
        ("_ = mul c c", True),
    ],
)
def test_only_what_makes_something_small_or_lays_it_out_is_computed_again(line, expected):
    body = Body(a=BIG, c=(4,))
    assert is_repeatable(body.add(line), body.types) is expected


# ---------------------------------------------------------------- what is inside, in its place


def test_an_expanded_cond_computes_every_branch_and_selects():
    outer, op = cond(["p = neg a", "return p b"], ["q = mul a b", "return q b"])
    inside = expand_op(op, outer.types)
    assert outer.show(inside) == ["v1 = neg a", "v2 = mul a b", "r = select_n which v1 v2", "s = copy b"]
    assert same_values(outer, op, inside, "r s")


@pytest.mark.parametrize(("which", "expected"), [(0, ["v1 = neg a", "r = copy v1"]), (1, ["r = copy b"])])
def test_an_expanded_cond_whose_choice_is_known_is_that_branch(which, expected):
    outer, op = cond(["p = neg a", "return p"], ["return b"])
    decided = outer.add(f"x[3,3] = cond #{which} a b", branches=op.branches)
    assert (has_constant_choice(op), has_constant_choice(decided)) == (False, True)
    assert outer.show(expand_op(decided, outer.types)) == [line.replace("r =", "x =") for line in expected]


def test_an_expanded_call_is_its_operations_and_copies_to_its_results():
    body = Body(a=BIG)
    inner = body.inside()
    ops = (inner.add("p = neg a"), inner.add("q = mul p a"))
    op = body.add("r _ s = jit a", expand=lambda: (ops, inner.refs("q p a")))
    assert body.show(expand_op(op, body.types)) == [
        "v1 = neg a",
        "v2 = mul v1 a",
        "r = copy v2",
        "s = copy a",
    ]
    # Each expansion makes values of its own.
    assert not set(ops[0].outputs) & {
        o for o in itertools.chain(*(x.outputs for x in expand_op(op, body.types)))
    }


def test_a_call_inside_an_expanded_branch_follows_the_branches_values():
    outer, op = cond(["return a"], ["return b"])
    branch = Body(outer.types, a=BIG, b=BIG)
    branch.add("p = neg a")
    within = branch.inside().add("k = mul p b")
    branch.add("c[3,3] = jit p b", expand=lambda: ((within,), branch.refs("k")))
    bodies = [branch.flat("c"), op.branches.bodies[1]]
    choice = branches(bodies, outer.types, terminates=True)
    op = outer.add("x[3,3] = cond which a b", branches=choice)
    neg, call, _ = expand_op(op, outer.types)
    ops, results = call.expand()
    assert ops[0].inputs == (neg.outputs[0], outer.ref("b"))
    assert results == ops[0].outputs != within.outputs


def test_parts_of_one_cond_still_have_one_whole_when_a_branch_around_them_is_expanded():
    outer, inner = cond(["p = neg a", "q = neg b", "return p q"], ["return a b"])
    parts = parts_of(outer, inner, "r s")
    bodies = [
        Flat(outer.inputs, tuple(parts), outer.refs("r s")),
        Body(outer.types, which=Aval((), "int32"), a=BIG, b=BIG).flat("a b"),
    ]
    choice = branches(bodies, outer.types, terminates=True)
    op = outer.add("x[3,3] y[3,3] = cond which which a b", branches=choice)
    first, second = [o for o in expand_op(op, outer.types) if o.branches is not None]
    assert first.branches.whole is second.branches.whole is not parts[0].branches.whole
    assert merge_parts([first, second]).outputs == (*first.outputs, *second.outputs)


@pytest.mark.parametrize(("terminates", "expected"), [(True, True), (False, False)])
def test_a_cond_with_a_while_inside_is_not_expanded(terminates, expected):
    _, op = cond(["return a"], ["return b"], terminates=terminates)
    assert can_expand(op) is expected


def test_a_call_can_be_expanded_and_a_plain_operation_cannot():
    body = Body(a=BIG)
    assert can_expand(body.add("p = jit a", expand=lambda: ((), ())))
    assert not can_expand(body.add("q = neg a"))
