"""Operations that some values need, that nothing needs, and that cost less to run twice than to keep."""

from __future__ import annotations

import dataclasses

import pytest
from compiler_inputs import Body

from jaxpp_async.compiler.ir import Flat
from jaxpp_async.compiler.ir_slicing import LightOps, eliminate_dead, select_needed, split_needed
from jaxpp_async.markers.reductions import Max, Stack, Sum


def halves(body: Body, wanted: str) -> tuple[list[str], list[str]]:
    first, second = split_needed(body.ops, body.refs(wanted))
    return body.show(first), body.show(second)


def test_operations_are_cut_into_those_that_are_needed_and_the_others_in_program_order():
    body = Body(x=(2,))
    body.add("a = neg x", "b = neg x", "c = mul a x", "d = mul b c", "e = neg c")
    assert halves(body, "c") == (["a = neg x", "c = mul a x"], ["b = neg x", "d = mul b c", "e = neg c"])
    assert halves(body, "x") == ([], body.show(body.ops))
    assert halves(body, "d e") == (body.show(body.ops), [])


def test_needed_operations_are_selected_whole_and_in_program_order():
    body = Body(x=(2,))
    body.add("a = neg x", "b = neg x")
    body.add("u v = checkpoint a", expand=lambda: pytest.fail("a selected operation is never expanded"))
    body.add("c = mul u b", "d = neg c")
    assert body.show(select_needed(body.ops, body.refs("u"))) == ["a = neg x", "u v = checkpoint a"]
    assert body.show(select_needed(body.ops, body.refs("c x"))) == body.show(body.ops[:4])
    assert select_needed(body.ops, body.refs("x")) == ()


def checkpoint() -> Body:
    body = Body(x=(2,))
    inner = body.inside()
    inner.add("p = tanh x", "q = mul p p", "r = mul p x")
    body.add("u v _ = checkpoint x", expand=lambda: (tuple(inner.ops), inner.refs("q r x")))
    return body


def test_a_checkpoint_of_which_some_results_are_wanted_is_expanded():
    assert halves(checkpoint(), "u") == (
        ["p = tanh x", "q = mul p p", "u = copy q"],
        ["r = mul p x", "v = copy r"],
    )


def test_a_checkpoint_all_of_whose_results_are_wanted_stays():
    assert halves(checkpoint(), "u v") == (["u v _ = checkpoint x"], [])
    assert halves(checkpoint(), "x") == ([], ["u v _ = checkpoint x"])


@pytest.mark.parametrize(
    ("can", "expected"),
    [(True, (["u s = half x"], ["v = half y s"])), (False, (["u v = scan x y"], []))],
)
def test_an_operation_that_can_be_split_gives_each_half_its_own(can, expected):
    body, asked = Body(x=(2,), y=(2,)), []

    def split(op, wanted):
        asked.append(wanted)
        return tuple(parts) if can else None

    body.add("u v = scan x y", split=split)
    u, v = body.ops[0].outputs
    more = body.inside()
    parts = [more.add("p s = half x"), more.add("q = half y s")]
    parts = [
        dataclasses.replace(parts[0], outputs=(u, body.ref("s"))),
        dataclasses.replace(parts[1], outputs=(v,)),
    ]
    assert halves(body, "u") == expected
    assert asked == [frozenset((0,))]


# ---------------------------------------------------------------- what is cheaper to compute twice


def light() -> tuple[Body, LightOps]:
    body = Body(x=(2,), y=(2,))
    body.add("a = neg x", "b = dot_general x x", "c = mul b x", "d = mul a a", "e = mul d y", "f = neg d")
    return body, LightOps.among(body.ops, {body.ref("x")})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("f", ["a = neg x", "d = mul a a", "f = neg d"]),
        ("d a", ["a = neg x", "d = mul a a"]),
        ("c", []),  # of what a product made
        ("e", []),  # of what is not there
        ("x", []),
    ],
)
def test_light_operations_over_what_is_there_are_repeated_with_all_they_need(values, expected):
    body, found = light()
    assert body.show(found.needed(body.refs(values)).values()) == expected


def test_light_operations_are_known_by_their_positions():
    body, found = light()
    assert list(found.needed(body.refs("f"))) == [0, 3, 5]


# ---------------------------------------------------------------- what nothing needs


def test_operations_that_nothing_needs_are_dropped_and_markers_stay():
    body = Body(x=(2,), y=(2,))
    body.add("a = neg x", "b = neg y", "m t[0] = pipeline_yield b", "c = mul a a", "d = mul b c")
    found = eliminate_dead(body.flat("c"))
    assert body.show(found.ops) == ["a = neg x", "b = neg y", "m t = pipeline_yield b", "c = mul a a"]
    assert (found.inputs, found.outputs) == (body.inputs, body.refs("c"))


def test_a_loop_is_reduced_to_the_results_and_operands_that_are_needed():
    outer = Body(w=(2,))
    body = Body(outer.types, u=(2,), v=(2,), x=(2,), y=(2,), i=())
    body.add("a = mul u x", "b = mul v y", "c = neg b")
    loop = body.loop("a b c", batch=2, reductions=[Sum(), Max(), Stack()])
    found = eliminate_dead(Flat((), (loop,), (loop.outputs[1], outer.ref("w"))))
    (kept,) = found.ops
    assert body.show(kept.body.ops) == ["b = mul v y"]
    assert body.names(kept.body.inputs) == "v y i"
    assert (kept.outputs, kept.reductions) == (loop.outputs[1:2], (Max(),))
    assert (kept.invariants, kept.batch) == (loop.invariants[1:], loop.batch[1:])
    assert eliminate_dead(Flat((), (loop,), outer.refs("w"))).ops == ()


def test_what_only_a_dropped_result_of_a_loop_needs_is_dropped_before_it():
    outer = Body(w=(2,))
    outer.add("p = neg w", "q = tanh w")
    body = Body(outer.types, u=(2,), v=(2,), x=(2,), i=())
    body.add("a = mul u x", "b = mul v x")
    loop = dataclasses.replace(body.loop("a b"), invariants=outer.refs("p q"))
    found = eliminate_dead(Flat(outer.inputs, (*outer.ops, loop), loop.outputs[:1]))
    assert outer.show(found.ops[:-1]) == ["p = neg w"]
