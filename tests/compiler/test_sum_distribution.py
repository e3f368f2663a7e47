"""What is applied to each stage's part of a sum, instead of to the sum."""

from __future__ import annotations

import dataclasses

import pytest
from compiler_inputs import Body

from jaxpp_async.compiler.ir import OuterStep
from jaxpp_async.compiler.sum_distribution import distribute_sums


def after(body: Body, outputs: str) -> list[str]:
    step = OuterStep(body.inputs, tuple(body.ops), body.refs(outputs), {}, {}, {}, 3)
    return body.show(distribute_sums(step, body.types).items)


def parts() -> Body:
    body = Body(a=(6, 6), b=(6, 6), c=(6, 6), n=(6, 6))
    body.add("s = add_partial a b", "t = add_partial s c")
    return body


def test_what_makes_a_sum_smaller_is_done_to_each_part():
    body = parts()
    body.add("u = transpose t", "g[2,6] = slice u", "k = tanh g")
    assert after(body, "k") == [
        *("v1 = transpose a", "v2 = slice v1", "v3 = transpose b", "v4 = slice v3"),
        *("v5 = transpose c", "v6 = slice v5", "v7 = add_partial v2 v4", "g = add_partial v7 v6"),
        "k = tanh g",
    ]


def test_a_gather_s_transpose_starts_from_zeros():
    body = parts()
    body.add("z[2,6] = broadcast_in_dim #0.0", "g[2,6] = scatter-add z n t")
    assert sum("scatter-add" in line for line in after(body, "g")) == 3


@pytest.mark.parametrize(
    ("lines", "outputs"),
    [
        pytest.param(["g = transpose t"], "g", id="as large as the sum"),
        pytest.param(["u = tanh t", "g[2,6] = slice u"], "g", id="not linear"),
        pytest.param(["g[2,6] = slice t"], "g t", id="the sum is a result, too"),
        pytest.param(["g[2,6] = slice t", "k[6,6] = tanh t"], "g k", id="the sum is read elsewhere"),
        pytest.param(["u = mul t t", "g[2,6] = slice u"], "g", id="a square"),
        pytest.param(
            ["o[2,6] = broadcast_in_dim #1.0", "g[2,6] = scatter-add o n t"], "g", id="added to ones"
        ),
    ],
)
def test_otherwise_the_sum_is_made_first(lines, outputs):
    body = parts()
    body.add(*lines)
    assert after(body, outputs) == body.show(body.ops)


def test_a_mean_is_ended_after_each_part():
    body = parts()
    body.add("m = reduction_end t", "g[2,6] = slice m")
    found = after(body, "g")
    assert sum("reduction_end" in line for line in found) == 3 and "g = add_partial" in found[-1]


def test_a_step_without_parts_stays_as_it_is():
    body = Body(a=(6, 6))
    body.add("g[2,6] = slice a")
    step = OuterStep(body.inputs, tuple(body.ops), body.refs("g"), {}, {}, {}, 2)
    assert distribute_sums(step, body.types) is step
    assert dataclasses.replace(step).items == step.items
