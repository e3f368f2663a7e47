"""Which stage and direction each operation of a loop's body gets, and what is refused."""

from __future__ import annotations

import pytest
from compiler_inputs import Body, two_stages

from jaxpp_async.compiler.stage_assignment import StageAssignment
from jaxpp_async.errors import StageError, UnsupportedError
from jaxpp_async.program.instructions import Aval

SHORT = {"forward": "fwd", "backward": "bwd", "light": "light", "mark": "mark"}


def assigned(body: Body, outputs: str) -> dict[str, str]:
    """First result of each operation to its kind, with its stage unless it is light."""
    stages = StageAssignment(body.loop(outputs), body.types)
    found = {}
    for op, kind, stage in zip(stages.ops, stages.kind, stages.stage, strict=True):
        found[body.name(op.outputs[0])] = SHORT[kind] + ("" if kind == "light" else str(stage))
    return found


def test_a_chain_is_cut_at_its_marker_and_its_backward_at_the_markers_other_side():
    assert assigned(two_stages(), "a b loss") == {
        **{"h": "fwd0", "y": "mark1", "z": "fwd1", "loss": "fwd1"},
        **{"a": "bwd1", "dy": "bwd1", "dh": "bwd0", "b": "bwd0"},
    }


@pytest.mark.parametrize(
    ("lines", "name", "expected"),
    [
        pytest.param(["k[2,3] = broadcast_in_dim #1.0"], "k", "light", id="a constant laid out"),
        pytest.param(["k = mul w #2.0"], "k", "light", id="arithmetic on a weight"),
        pytest.param(["k = mul h #2.0"], "k", "fwd0", id="arithmetic on a computed value"),
        pytest.param(["k = mul z h"], "k", "fwd1", id="operands of two stages: the later one"),
        pytest.param(["k = mul dh #2.0"], "k", "bwd0", id="of a cotangent"),
        pytest.param(["k = dot_general y w '"], "k", "bwd1", id="transposed, of values that stage 1 holds"),
        pytest.param(["k = dot_general x h '"], "k", "bwd0", id="transposed, of values of stage 0 alone"),
        pytest.param(["k = mul z dh '"], "k", "bwd0", id="never later than its cotangent"),
        pytest.param(["k = mul dh dy '"], "k", "bwd0", id="of cotangents of two stages"),
        pytest.param(
            ["k = dot_general x h '", "dk = pipeline_yield_side t k '"], "k", "bwd1", id="handed on"
        ),
        pytest.param(["k[3,3] = dot_general x x"], "k", "fwd0", id="of operands of the loop, for nobody"),
        pytest.param(["k = dot_general x x", "m = mul k h", "n = mul k z"], "k", "fwd0", id="the first user"),
        pytest.param(["k[2,3] = dot_general x u", "m = mul k z"], "k", "fwd1", id="where its first user is"),
        pytest.param(
            ["m = reduce_sum w", "k = mul m m", "n = mul k loss"], "k", "fwd1", id="behind an unplaced one"
        ),
        pytest.param(
            ["c = broadcast_in_dim #1.0 '", "k = dot_general c w '", "m = mul k dh '"], "k", "bwd0", id="user"
        ),
    ],
)
def test_an_operation_runs_where_its_operands_and_users_say(lines, name, expected):
    body = two_stages(u=(3, 3))
    body.add(*lines, side="cotangent")
    last = body.name(body.ops[-1].outputs[0])
    assert assigned(body, f"a b {last}")[name] == expected


@pytest.mark.parametrize(("weight", "stage"), [("w0", 0), ("w1", 1)])
def test_a_penalty_is_summed_in_the_stage_that_holds_its_weight(weight, stage):
    body = Body(w0=(3, 3), w1=(3, 3), x=(2, 3), i=Aval((), "int32"))
    body.add("h[2,3] = dot_general x w0", "y t[0] = pipeline_yield h", "z = dot_general y w1")
    body.add("loss[] = reduce_sum z")
    body.add(f"p[] = reduce_sum {weight}", "total = add loss p")
    assert assigned(body, "total")["p"] == f"fwd{stage}"


def test_an_operation_whose_result_is_larger_than_its_weight_runs_with_its_user():
    body = Body(w0=(3, 3), w1=(3, 3), x=(2, 3), i=Aval((), "int32"))
    body.add("h[2,3] = dot_general x w0", "y t[0] = pipeline_yield h", "z = dot_general y w1")
    body.add("p[4,4] = dot_general w0 w0", "n = dot_general z p")
    assert assigned(body, "n")["p"] == "fwd1"


def test_a_backward_of_operands_that_no_stage_has_in_common_goes_to_the_first_stage():
    body = Body(w0=(3, 3), w1=(3, 3), x=(2, 3), i=Aval((), "int32"))
    body.add("h[2,3] = dot_general x w0", "y t[0] = pipeline_yield h", "z = dot_general y w1")
    body.add("k = dot_general w0 w1 '", "m = dot_general w1 w1 '")
    found = assigned(body, "k m z")
    assert (found["k"], found["m"]) == ("bwd0", "bwd1")


def test_what_a_marker_needs_is_of_the_first_stage_whose_marker_needs_it():
    body = Body(x=(2, 3), i=Aval((), "int32"))
    body.add("e = tanh x", "e2 = dot_general x x", "e3 = dot_general x e", "y t[0] = pipeline_yield e3")
    body.add("f = dot_general y e2", "g = dot_general f e3", "y2 t2[0] = pipeline_yield g")
    body.add("z = dot_general y2 e2")
    assert assigned(body, "z") == {
        **{"e": "light", "e2": "fwd1", "e3": "fwd0", "y": "mark1"},
        **{"f": "fwd1", "g": "fwd1", "y2": "mark2", "z": "fwd2"},
    }


def test_values_behind_markers_go_by_the_value_that_is_marked():
    body = two_stages()
    stages = StageAssignment(body.loop("a b"), body.types)
    resolved = {name: body.name(stages.resolve(body.ref(name))) for name in ("y", "dh", "z")}
    assert resolved == {"y": "h", "dh": "dy", "z": "z"}
    assert stages.num_uses[body.ref("h")] == 2  # by z and a, both through the marker
    # x is read by h alone before the backward, w by h and z; h is handed to stage 1.
    homes = {name: stages.forward_stages[body.ref(name)] for name in ("x", "w", "h", "z")}
    assert homes == {"x": {0}, "w": {0, 1}, "h": {0, 1}, "z": {1}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("h", ("fwd", 0)), ("y", ("fwd", 1)), ("b", ("bwd", 0)), ("x", None), ("#1.0", None)],
)
def test_a_value_has_the_task_that_makes_it(name, expected):
    body = two_stages()
    assert StageAssignment(body.loop("a b"), body.types).task_of(body.ref(name)) == expected


def test_stages_are_counted_and_named_by_their_markers():
    body = Body(x=(2, 3), i=Aval((), "int32"))
    body.add("h = dot_general x x")
    body.add("y t[0] = pipeline_yield h", name="encoder")
    body.add("y2 t2[0] = pipeline_yield y")
    stages = StageAssignment(body.loop("y2"), body.types)
    assert (stages.num_stages, stages.stage_names) == (3, ("encoder", None))


# ---------------------------------------------------------------- what a checkpoint computes again


@pytest.mark.parametrize(
    ("line", "same", "skipped"),
    [
        pytest.param("r = dot_general x w '", True, ["r"], id="the same operation on the same operands"),
        pytest.param("r = dot_general x w '", False, [], id="with other parameters"),
        pytest.param("r = dot_general x z '", True, [], id="on other operands"),
        pytest.param("r = dot_general y w '", True, [], id="of the stage itself"),
    ],
)
def test_a_repetition_of_an_earlier_stages_operation_takes_that_stages_value(line, same, skipped):
    body = Body(w=(3, 3), x=(2, 3), i=Aval((), "int32"))
    body.add("h[2,3] = dot_general x w", "y t[0] = pipeline_yield h", "z = dot_general y w")
    op = body.add(line, repeats=lambda twin: same)
    body.add("k = mul r z '", "n = mul k y '")
    stages = StageAssignment(body.loop("n"), body.types)
    assert [body.name(stages.ops[i].outputs[0]) for i in stages.skipped] == skipped
    assert body.name(stages.resolve(op.outputs[0])) == ("h" if skipped else "r")


# ---------------------------------------------------------------- what is refused


def _second_marker(body: Body, needs: str) -> None:
    body.add(f"y2 t2[0] = pipeline_yield {needs}")


def test_a_stage_that_needs_a_later_stages_backward_is_refused():
    body = two_stages()
    body.add("h2 = mul b #2.0")
    _second_marker(body, "h2")
    with pytest.raises(StageError) as caught:
        StageAssignment(body.loop("y2"), body.types)
    assert str(caught.value) == (
        "model.py:7: stage 1 needs the gradient of pipeline_yield, which depends on the backward pass of a "
        "later stage in the same microbatch; a stage may use only what earlier stages made: take this "
        "gradient without a pipeline_yield inside, use it behind the last one, or make it in an "
        "accumulate_grads loop of its own first, reduced by Stack(), and give the result to this loop in its "
        "batch"
    )


def test_a_gradient_of_a_gradient_through_a_marker_is_refused():
    body = two_stages()
    body.add("s = pipeline_yield_side t dh", side="tangent")
    with pytest.raises(
        StageError, match=r"^model\.py:9: the gradient of a gradient .* without a pipeline_yield inside$"
    ):
        StageAssignment(body.loop("s"), body.types)


@pytest.mark.parametrize("token", ["x", "#1.0", "k"])
def test_a_marker_side_whose_token_comes_from_no_marker_is_refused(token):
    body = Body(x=(0,), i=Aval((), "int32"))
    body.add("k = copy x")
    body.add(f"g = pipeline_yield_side {token} x '", side="cotangent")
    with pytest.raises(UnsupportedError) as caught:
        StageAssignment(body.loop("g"), body.types)
    assert str(caught.value) == (
        "model.py:2: the gradient of pipeline_yield was separated from its forward side (by a scan or a "
        "custom rule); move the pipeline_yield out of it"
    )
