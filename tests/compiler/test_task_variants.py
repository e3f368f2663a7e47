"""The variants in which a stage's tasks run under a schedule, and what each takes and makes."""

from __future__ import annotations

import dataclasses

import pytest
from compiler_inputs import Body, scheduled, two_stages

import jaxpp_async as jpp
from jaxpp_async.compiler.ir_slicing import eliminate_dead
from jaxpp_async.compiler.partition import partition
from jaxpp_async.compiler.task_variants import schedule_loop
from jaxpp_async.program.instructions import Aval, Task


def rows(text: str, stage_of_row=(0, 1)) -> list[list[Task]]:
    """`f0` is a forward of microbatch 0, `b0` a backward, `i0` and `w0` its halves; a line an actor."""
    kinds = {"f": "fwd", "b": "bwd", "i": "bwd_input", "w": "bwd_weight"}
    return [
        [Task(int(word[1:]), kinds[word[0]], stage) for word in line.split()]
        for stage, line in zip(stage_of_row, text.split("|"), strict=True)
    ]


def variants(body: Body, outputs: str, schedule: str) -> tuple[dict[str, str], list[str]]:
    """Return each variant with what it takes and makes, and the order of what runs."""
    loop = body.loop(outputs)
    staged = partition(dataclasses.replace(loop, body=eliminate_dead(loop.body)), body.types)
    found = schedule_loop(staged, rows(schedule), body.types)
    shown = {
        f"{ty}{stage}": f"{body.names(v.takes)} -> {body.names(v.makes)}"
        for (ty, stage), v in found.variants.items()
    }
    return shown, [f"{actor}:{ty}{stage}@{task.i}" for actor, task, (ty, stage) in found.order]


def test_a_backward_right_behind_its_forward_runs_with_it_in_the_last_stage():
    shown, order = variants(two_stages(), "a b", "f0 b0|f0 b0")
    assert shown == {"fwd0": " -> h", "fwd_bwd1": "h -> dy", "bwd0": "dy -> "}
    assert order == ["0:fwd0@0", "1:fwd_bwd1@0", "0:bwd0@0"]


def test_forward_and_backward_apart_hand_over_what_the_backward_needs():
    shown, order = variants(two_stages(), "a b", "f0 f1 b0 b1|f0 f1 b0 b1")
    assert shown == {"fwd0": " -> h", "fwd1": "h -> z", "bwd1": "h z -> dy", "bwd0": "dy -> "}
    assert sorted(order) == sorted(
        f"{s}:{ty}{s}@{i}" for s in (0, 1) for ty in ("fwd", "bwd") for i in (0, 1)
    )


def test_a_backward_in_halves_makes_first_what_other_stages_wait_for():
    shown, _ = variants(two_stages(), "a b", "f0 f1 b0 b1|f0 f1 i0 i1 w0 w1")
    assert shown["bwd_input1"] == "z -> dy"
    assert shown["bwd_weight1"] == "h z -> "


def test_the_first_stages_backward_is_all_weights_and_goes_by_its_whole_name():
    shown, order = variants(two_stages(), "a b", "f0 f1 i0 i1 w0 w1|f0 b0 f1 b1")
    assert "bwd_input0" not in shown and "bwd_weight0" not in shown
    assert [o for o in order if o.startswith("0:bwd")] == ["0:bwd0@0", "0:bwd0@1"]


def test_an_input_half_may_run_with_its_forward():
    shown, _ = variants(two_stages(), "a b", "f0 b0|f0 i0 w0")
    assert shown == {
        "fwd0": " -> h",
        "fwd_bwd_input1": "h -> dy z",
        "bwd_weight1": "h z -> ",
        "bwd0": "dy -> ",
    }


def test_a_fused_variant_whose_weight_half_has_nothing_to_do_is_the_whole():
    shown, order = variants(two_stages(), "b", "f0 b0|f0 i0 w0")
    assert shown == {"fwd0": " -> h", "fwd_bwd1": "h -> dy", "bwd0": "dy -> "}
    assert order == ["0:fwd0@0", "1:fwd_bwd1@0", "0:bwd0@0"]


def test_a_task_with_nothing_to_compute_is_left_out():
    shown, order = variants(two_stages(), "a", "f0 b0|f0 b0")  # no gradient of stage 0
    assert shown == {"fwd0": " -> h", "fwd_bwd1": "h -> "}
    assert order == ["0:fwd0@0", "1:fwd_bwd1@0"]


def test_a_fused_variant_runs_what_both_repeat_once():
    body = Body(w=(3, 3), x=(2, 3), i=Aval((), "int32"))
    body.add("h[2,3] = dot_general x w", "y t[0] = pipeline_yield h", "w2 = mul w #2.0")
    body.add("z = dot_general y w2", "loss[] = reduce_sum z", "dy[2,3] = dot_general z w2 '")
    body.add("dh = pipeline_yield_side t dy '", side="cotangent")
    body.add("b[3,3] = dot_general x dh '")
    staged = partition(body.loop("b loss"), body.types)
    assert [op.name for op in staged.tasks["bwd", 1].ops] == ["mul", "dot_general"]
    found = schedule_loop(staged, rows("f0 b0|f0 b0"), body.types)
    names = [op.name for op in found.variants["fwd_bwd", 1].task.ops]
    assert names == ["mul", "dot_general", "reduce_sum", "dot_general"]


@pytest.mark.parametrize(("order", "fused"), [("f0 b0 f1 b1", True), ("f0 f1 b1 b0", False)])
def test_only_a_forward_whose_own_backward_is_next_is_fused(order, fused):
    shown, names = variants(two_stages(), "a b", f"f0 f1 b0 b1|{order}")
    if fused:
        assert "fwd1" not in shown and "bwd1" not in shown
    else:
        assert [n for n in names if n[0] == "1"] == ["1:fwd1@0", "1:fwd_bwd1@1", "1:bwd1@0"]


def test_stages_know_their_actor_whatever_the_order_of_rows():
    body = two_stages()
    staged = partition(body.loop("a b"), body.types)
    found = schedule_loop(staged, rows("f0 b0|f0 b0", (1, 0)), body.types)
    assert found.stage_actors == (1, 0)
    by_stage = {v.task.key: actor for v, actor in found.variants_on_actors()}
    assert by_stage == {("fwd", 0): 1, ("fwd_bwd", 1): 0, ("bwd", 0): 1}
    assert list(found.variants) == [("fwd", 0), ("fwd_bwd", 1), ("bwd", 0)]
    assert found.tasks == (tuple(rows("f0 b0", (1,))[0]), tuple(rows("f0 b0", (0,))[0]))


def test_schedules_that_ask_for_the_same_variants_have_the_same_ones():
    body = two_stages()
    loop = body.loop("a b", microbatches=4)
    first, second = (scheduled(loop, body.types, s, 2) for s in (jpp.GPipe(2), jpp.LoopedBFS(2)))
    assert list(first.variants) == list(second.variants)
