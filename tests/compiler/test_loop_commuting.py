"""What each stage accumulates of a summed result, and what is left to do behind the loop."""

from __future__ import annotations

import numpy as np
import pytest
from compiler_inputs import Body, two_stages

from jaxpp_async.compiler.ir import Types
from jaxpp_async.compiler.loop_commuting import LoopResults, commute_results
from jaxpp_async.compiler.stage_assignment import StageAssignment
from jaxpp_async.markers.reductions import Max, Sum
from jaxpp_async.program.instructions import Aval


def found_for(body: Body, outputs: str, *reductions) -> LoopResults:
    return commute_results(StageAssignment(body.loop(outputs, reductions=reductions), body.types), body.types)


def texts(
    body: Body, found: LoopResults, result: int = 0
) -> tuple[list[str], list[str] | None, dict[str, list[str]]]:
    """Of one result: its parts, its epilogue, and what tasks do more."""
    added = {f"{ty}{stage}": body.show(ops) for (ty, stage), ops in found.added.items()}
    parts = [f"{body.name(p.value)} of {p.task[0]}{p.task[1]}" for p in found.parts[result]]
    epilogue = found.epilogues[result]
    return parts, None if epilogue is None else body.show(epilogue.ops), added


APART = ["a of bwd1", "b of bwd0"]
HALVED = {"bwd1": ["v1 = mul a #0.5"], "bwd0": ["v2 = mul b #0.5"]}


@pytest.mark.parametrize(
    ("lines", "parts", "epilogue", "added"),
    [
        pytest.param(["g = add_any a b '"], APART, ["v1 = add_partial a b"], {}, id="a sum"),
        pytest.param(
            ["g[6,3] = concatenate a b '"], APART, ["v1 = concatenate a b"], {}, id="a concatenation"
        ),
        pytest.param(
            ["s = add_any a b '", "g = transpose s '"],
            APART,
            ["v1 = add_partial a b", "v2 = transpose v1"],
            {},
            id="a layout of a sum",
        ),
        pytest.param(
            ["s = add_any a b '", "g = add_any s a2 '"],
            ["v1 of bwd1", "b of bwd0"],
            ["v2 = add_partial v1 b"],
            {"bwd1": ["v1 = add_any a a2"]},
            id="terms of one stage are added there",
        ),
        pytest.param(
            ["s = add_any a b '", "g = mul s #0.5"],
            ["v1 of bwd1", "v2 of bwd0"],
            ["v3 = add_partial v1 v2"],
            HALVED,
            id="a scaling is done in each stage",
        ),
        pytest.param(
            ["s[6,3] = concatenate a b '", "g = mul s #0.5"],
            ["v1 of bwd1", "v2 of bwd0"],
            ["v3 = concatenate v1 v2"],
            HALVED,
            id="a scaling by a constant goes through a concatenation",
        ),
        pytest.param(
            ["s = add_any a b '", "g:float64 = convert_element_type s '"],
            ["v1 of bwd1", "v2 of bwd0"],
            ["v3 = add_partial v1 v2"],
            {"bwd1": ["v1 = convert_element_type a '"], "bwd0": ["v2 = convert_element_type b '"]},
            id="a widening cast is done in each stage",
        ),
        pytest.param(
            ["g = sub a b '"],
            ["a of bwd1", "v1 of bwd0"],
            ["v2 = add_partial a v1"],
            {"bwd0": ["v1 = neg b '"]},
            id="a difference is a sum with a negative",
        ),
        pytest.param(
            ["f[] = reduce_max z", "s = sub a b '", "g = mul s f '"],
            ["v3 of bwd1", "v2 of bwd0"],
            ["v4 = add_partial v3 v2"],
            {"bwd1": ["v3 = mul a f '"], "bwd0": ["v1 = neg b '", "v2 = mul v1 f '"]},
            id="a scalar of an earlier task is sent",
        ),
        pytest.param(
            ["s = add_any a b '", "m:bool[] = gt loss #1.0", "g:float32[3,3] = select_n m zeros s '"],
            ["v1 of bwd1", "v2 of bwd0"],
            ["v3 = add_partial v1 v2"],
            {"bwd1": ["v1 = select_n m a '"], "bwd0": ["v2 = select_n m b '"]},
            id="a choice between a sum and zeros is made in each stage",
        ),
        pytest.param(
            ["m:bool[] = gt loss #1.0", "g:float32[3,3] = select_n m a b '"],
            ["v1 of bwd1", "v2 of bwd0"],
            ["v3 = add_partial v1 v2"],
            {"bwd1": ["v1 = select_n m a '"], "bwd0": ["v2 = select_n m b '"]},
            id="a choice between gradients of two stages",
        ),
    ],
)
def test_a_gradient_of_two_stages_is_accumulated_in_each_and_joined_behind_the_loop(
    lines, parts, epilogue, added
):
    body = two_stages()
    body.add("a2[3,3] = dot_general dy y '", "zeros[3,3] = broadcast_in_dim #0.0", *lines)
    assert texts(body, found_for(body, "g")) == (parts, epilogue, added)


def test_nothing_is_added_to_a_task_for_an_operation_that_stays_in_the_loop():
    body = two_stages()
    body.add("s = add_any a b '", "m = mul s #0.5", "g:bfloat16 = convert_element_type m '")
    assert texts(body, found_for(body, "g")) == (["g of bwd0"], None, {"bwd1": [], "bwd0": []})


def test_a_choice_of_zero_or_a_part_has_zeros_elsewhere():
    body = two_stages()
    body.add("m[3,3] = broadcast_in_dim #1.0")
    body.add("g = select_n m a b '", run=lambda xs: [np.where(xs[0], xs[2], xs[1])])
    found = found_for(body, "g")
    mask = np.array([True, False])
    parts = [op.run([mask, np.array([1.0, 2.0])])[0] for ops in found.added.values() for op in ops]
    assert [part.tolist() for part in parts] == [[0.0, 2.0], [1.0, 0.0]]


def test_what_the_epilogue_replaces_is_dropped_from_the_loop():
    body = two_stages()
    body.add("s = add_any a b '", "g = mul s #0.5")
    found = found_for(body, "g loss")
    assert sorted(found.dropped) == [8, 9]  # both new operations
    assert texts(body, found, 1)[:2] == (["loss of fwd1"], None)


@pytest.mark.parametrize(
    ("lines", "task"),
    [
        pytest.param(["g = add_any h z"], "fwd1", id="a metric"),
        pytest.param(
            ["s = add_any a b '", "g:bfloat16 = convert_element_type s '"], "bwd0", id="a narrowing cast"
        ),
        pytest.param(
            ["r[1,3] = dot_general x dh '", "g[3,3] = add a r '"], "bwd0", id="a sum that stretches"
        ),
        pytest.param(["s = add_any a b '", "g = add_any s #1.0 '"], "bwd0", id="a constant added"),
        pytest.param(["s = add_any a b '", "g = div #1.0 s '"], "bwd0", id="a division by a sum"),
        pytest.param(["s = add_any a b '", "g = mul s s '"], "bwd0", id="a square"),
        pytest.param(["s = add_any a b '", "k = mul z z", "g = mul s k '"], "bwd0", id="a large factor"),
        pytest.param(
            ["f[] = reduce_sum b '", "s = add_any a b '", "g = mul s f '"], "bwd0", id="a later scalar"
        ),
        pytest.param(
            ["m:bool[] = gt loss #1.0", "g:float32[3,3] = select_n m b w '"],
            "bwd0",
            id="a choice of a weight",
        ),
        pytest.param(
            ["s = add_any a b '", "k = mul s s '", "g = add_any s k '"], "bwd0", id="a sum used twice"
        ),
        pytest.param(["s[6,3] = concatenate a b '", "g = pad s #1.0 '"], "bwd0", id="a pad with ones"),
        pytest.param(["s = add_any a b '", "g = tanh s '"], "bwd0", id="something that is not linear"),
    ],
)
def test_what_a_sum_does_not_commute_with_stays_whole_in_its_task(lines, task):
    body = two_stages()
    body.add(*lines)
    found = found_for(body, "g")
    assert texts(body, found) == ([f"g of {task}"], None, {})
    assert not found.dropped


def test_integers_are_not_scaled_in_each_stage():
    body = Body(Types(), w=Aval((3, 3), "int32"), x=Aval((2, 3), "int32"), i=Aval((), "int32"))
    body.add("h = dot_general x w", "y t[0] = pipeline_yield h", "z = dot_general y w")
    body.add("a[3,3] = dot_general y z '", "dy = dot_general z w '")
    body.add("dh = pipeline_yield_side t dy '", side="cotangent")
    body.add("b[3,3] = dot_general x dh '", "s = add_any a b '", "g = div s #2 '")
    assert texts(body, found_for(body, "g")) == (["g of bwd0"], None, {})


def test_a_maximum_over_microbatches_is_never_taken_apart():
    body = two_stages()
    body.add("g = add_any a b '")
    assert texts(body, found_for(body, "g", Max())) == (["g of bwd0"], None, {})


def test_results_that_were_split_from_one_sum_share_its_parts():
    body = two_stages()
    body.add("s = add_any a b '", "p[1,3] q[2,3] = split s '")
    found = found_for(body, "p q", Sum(), Sum())
    assert found.parts[0] == found.parts[1]
    assert texts(body, found, 0) == (APART, ["v1 = add_partial a b", "v2 _ = split v1"], {})
    assert texts(body, found, 1) == (APART, ["v3 = add_partial a b", "_ v4 = split v3"], {})
    assert sorted(found.dropped) == [8, 9]


@pytest.mark.parametrize("outputs", ["p r", "p q r"])
def test_a_split_of_which_one_part_is_read_in_the_loop_stays_there(outputs):
    body = two_stages()
    body.add("s = add_any a b '", "p[1,3] q[2,3] = split s '", "r = tanh q '")
    assert texts(body, found_for(body, outputs)) == (["p of bwd0"], None, {})


SUM_AND_MORE = ["s = add_any a b '", "n = neg s '", "d = sub a s '", "h = mul s #0.5 '"]


def test_results_that_are_made_of_one_sum_share_it_behind_the_loop():
    body = two_stages()
    body.add(*SUM_AND_MORE)
    found = found_for(body, "s s n d h", *[Sum()] * 5)
    made = [texts(body, found, k)[:2] for k in range(5)]
    assert made == [
        (APART, ["v1 = add_partial a b"]),
        (APART, ["v2 = copy v1"]),
        (APART, ["v3 = neg v1"]),
        (APART, ["v4 = neg v1", "v5 = add_partial a v4"]),
        (APART, ["v6 = mul v1 #0.5"]),
    ]
    assert not any(found.added.values()) and sorted(found.dropped) == [8, 9, 10, 11]


def test_a_multiple_of_what_another_result_accumulates_is_made_behind_the_loop():
    body = two_stages()
    body.add("d = sub a b '", "s = add_any a b '", "k = mul b #5000.0 '", "t = add_any a k '")
    found = found_for(body, "d s t", *[Sum()] * 3)
    assert texts(body, found, 0)[:2] == (["a of bwd1", "v1 of bwd0"], ["v2 = add_partial a v1"])
    assert found.parts[1] == found.parts[0]
    assert texts(body, found, 1)[1] == ["v3 = neg v1", "v4 = add_partial a v3"]
    parts = [body.name(p.value) for p in found.parts[2]]
    assert parts[0] == "a" and parts[1] not in ("b", "v1"), "the sum of one says too little about the other's"


def test_each_stage_makes_its_part_of_a_shared_sum_that_a_microbatch_scales():
    body = two_stages()
    body.add("f[] = reduce_max z", "s = add_any a b '", "n = neg s '", "g = mul n f '")
    found = found_for(body, "s g", Sum(), Sum())
    parts, epilogue, added = texts(body, found, 1)
    assert epilogue == [f"v5 = add_partial {parts[0].split()[0]} {parts[1].split()[0]}"]
    assert {task: [line.split(" = ")[1].split()[0] for line in ops] for task, ops in added.items()} == {
        "bwd1": ["neg", "mul"],
        "bwd0": ["neg", "mul"],
    }


@pytest.mark.parametrize(
    ("more", "outputs", "reductions"),
    [
        pytest.param(["k = tanh s '"], "s k", (Sum(), Sum()), id="by something that is not linear"),
        pytest.param(
            ["k:float16 = convert_element_type n '"], "s k", (Sum(), Sum()), id="by a narrower cast"
        ),
        pytest.param(["k = copy s '"], "s k", (Sum(), Max()), id="for a maximum"),
    ],
)
def test_a_sum_that_is_also_needed_in_the_loop_stays_there(more, outputs, reductions):
    body = two_stages()
    body.add("s = add_any a b '", *["n = neg s '"] * ("n" in more[0].split()), *more)
    found = found_for(body, outputs, *reductions)
    assert [texts(body, found, k)[:2] for k in range(2)] == [(["s of bwd0"], None), (["k of bwd0"], None)]
    assert not found.dropped


def test_a_sum_of_many_copies_of_itself_is_taken_apart_only_so_far():
    body = two_stages()
    body.add("s0 = add_any a b '", *(f"s{k + 1} = add_any s{k} s{k} '" for k in range(40)))
    found = found_for(body, "s40")
    assert [len(p) for p in found.parts] == [1] and not found.dropped


def test_a_result_that_no_operation_makes_is_accumulated_where_its_value_lies():
    body = Body(u=(3,), w=(3, 3), x=(2, 3), i=Aval((), "int32"))
    body.add("h[2,3] = dot_general x w", "y t[0] = pipeline_yield h", "z = dot_general y u", "k = mul u #2.0")
    found = found_for(body, "k #1.0 z")
    assert [texts(body, found, k)[0] for k in range(3)] == [["k of fwd1"], ["#1.0 of fwd0"], ["z of fwd1"]]


def test_parts_summed_apart_and_joined_are_the_sum_of_the_whole():
    body = two_stages()
    body.add("a2[3,3] = dot_general dy y '", "s = add_any a b '", "u = add_any s a2 '", "g = mul u #0.5")
    found = found_for(body, "g")
    rng = np.random.default_rng(0)
    whole, totals = np.zeros((3, 3)), {}
    for _ in range(2):  # microbatches
        env = {body.ref(n): rng.integers(0, 9, (3, 3)).astype("float32") for n in ("a", "b", "a2")}
        whole = whole + (env[body.ref("a")] + env[body.ref("b")] + env[body.ref("a2")]) * 0.5
        for ops in found.added.values():
            for op in ops:
                env[op.outputs[0]] = op.run([env[r] if isinstance(r, int) else r.value for r in op.inputs])[0]
        for p in found.parts[0]:
            totals[p.value] = totals.get(p.value, 0) + env[p.value]
    (epilogue,) = found.epilogues
    for op in epilogue.ops:
        totals[op.outputs[0]] = op.run([totals[r] for r in op.inputs])[0]
    assert (totals[epilogue.value] == whole).all()
