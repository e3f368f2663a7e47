"""What leaves a loop because it is the same for all microbatches, and what its gradient does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler_inputs import Body
from planning import f32

import jaxpp_async as jpp
from jaxpp_async.compiler.ir import Flat, Loop, Op, Traced
from jaxpp_async.compiler.loop_invariants import HOISTED, hoist_invariants
from jaxpp_async.compiler.trace import trace
from jaxpp_async.markers.reductions import Max, Mean, Stack, Sum
from jaxpp_async.program.instructions import Aval


def hoisted(body: Body, outputs: str, *reductions) -> tuple[list[str], list[str], str, list[str]]:
    """A step that is one loop: what runs before it, in it, what it returns, and what runs after it."""
    loop = body.loop(outputs, reductions=reductions)
    flat = Flat((*loop.invariants, *loop.batch), (loop,), loop.outputs)
    step = Traced(flat, body.types, (), (), (), ("",) * len(loop.outputs), None, None)
    items = hoist_invariants(step).flat.ops
    at = next(i for i, item in enumerate(items) if isinstance(item, Loop))
    left = items[at]
    assert isinstance(left, Loop)
    return (
        body.show(items[:at]),
        body.show(left.body.ops),
        body.names(left.body.outputs),
        body.show(items[at + 1 :]),
    )


def model() -> Body:
    """y = x (w w'), with a gradient of the product."""
    body = Body(w=(5, 5), b=(5, 5), x=(2, 5), i=Aval((), "int32"))
    body.add("p = dot_general w w", "y[2,5] = dot_general x p", "loss[] = reduce_sum y")
    body.add("dp[5,5] = dot_general x y '", "dw = dot_general dp w '")
    return body


def test_a_product_of_weights_and_its_gradient_run_once_a_step():
    before, inside, returned, after = hoisted(model(), "dw loss", Sum(), Stack())
    assert [line.split(" = ")[1].split()[0] for line in before] == ["dot_general"]
    assert inside == ["y = dot_general x p", "loss = reduce_sum y", "dp = dot_general x y '"]
    assert returned == "loss dp"
    assert [line.split(" = ")[1].split()[0] for line in after] == ["dot_general"]


@pytest.mark.parametrize(
    ("reduction", "names"), [(Sum(), ["mul", "mul", "add_any"]), (Mean(), ["mul", "add_any"])]
)
def test_a_term_of_weights_alone_is_added_once(reduction, names):
    body = model()
    body.add("dx[5,5] = dot_general x y '", "t = mul b #2.0 '", "g = add_any dx t '")
    _, inside, returned, after = hoisted(body, "g", reduction)
    assert returned == "dx" and not any("add_any" in line for line in inside)
    assert [line.split(" = ")[1].split()[0] for line in after] == names


@pytest.mark.parametrize(
    ("lines", "outputs", "reduction"),
    [
        pytest.param(["g = tanh dw '"], "g", Sum(), id="something that is not linear"),
        pytest.param(["g = mul dw dw '"], "g", Sum(), id="a square"),
        pytest.param([], "dw", Max(), id="a maximum"),
        pytest.param([], "dw", Stack(), id="one value a microbatch"),
        pytest.param(["g:bfloat16[5,5] = convert_element_type dw '"], "g", Sum(), id="a narrowing cast"),
        pytest.param(["n[] = reduce_sum dw '", "m = tanh n '"], "dw m", Sum(), id="also read in the loop"),
    ],
)
def test_a_gradient_that_has_to_be_whole_in_every_microbatch_stays(lines, outputs, reduction):
    body = model()
    if lines:
        body.add(*lines)
    _, inside, returned, after = hoisted(body, outputs, *[reduction] * len(outputs.split()))
    assert "dw = dot_general dp w '" in inside and returned == outputs and not after


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["k = mul w #2.0", "z[2,5] = dot_general x k"], id="cheap operations"),
        pytest.param(["k:uint32[5,5] = random_bits w", "z:uint32[5,5] = mul k k"], id="random bits"),
        pytest.param(["k = dot_general w w '", "z[2,5] = dot_general x k '"], id="parts of a backward"),
    ],
)
def test_what_is_cheap_to_repeat_stays_in_the_loop(lines):
    body = Body(w=(5, 5), x=(2, 5), i=Aval((), "int32"))
    body.add(*lines)
    before, inside, *_ = hoisted(body, "z")
    assert not before and inside == body.show(body.ops)


def test_a_value_behind_a_marker_is_the_value_before_it():
    body = Body(w=(5, 5), x=(2, 5), i=Aval((), "int32"))
    body.add("p = dot_general w w", "h[2,5] = dot_general x p", "y q t[0] = pipeline_yield h p")
    body.add("s = dot_general q q", "z[2,5] = dot_general y s")
    before, inside, *_ = hoisted(body, "z")
    assert len(before) == 2 and inside[1:] == ["y q t = pipeline_yield h p", "z = dot_general y s"]


def test_a_narrow_gradient_is_summed_as_wide_as_the_result():
    def step(w, batch):
        def of_one(x):
            def loss(w):
                half = w.astype(jnp.bfloat16)
                return jnp.sum((x @ (half @ half)).astype(jnp.float32) ** 2)

            return jax.grad(loss)(w)

        return jpp.accumulate_grads(of_one, jpp.GPipe(1))(batch)

    args = f32(5, 5), jax.ShapeDtypeStruct((4, 2, 5), "bfloat16")
    traced = trace(step, args)
    flat = hoist_invariants(traced).flat
    (loop,) = [item for item in flat.ops if isinstance(item, Loop)]
    (total,) = loop.outputs
    assert traced.types[total].aval.dtype == "float32"
    behind = flat.ops[flat.ops.index(loop) + 1]
    assert isinstance(behind, Op) and traced.types[behind.outputs[0]].aval.dtype == "bfloat16"


def test_it_says_from_how_many_bytes_a_value_is_computed():
    body = model()
    loop = body.loop("loss", reductions=[Stack()])
    step = Traced(
        Flat((*loop.invariants, *loop.batch), (loop,), loop.outputs),
        body.types,
        (),
        (),
        (),
        ("",),
        None,
        None,
    )
    first = hoist_invariants(step).flat.ops[0]
    assert isinstance(first, Op) and first.params[HOISTED] == 4 * 25


def test_a_value_that_the_loop_does_not_read_is_computed_again_after_it():
    body = Body(w=(5, 5), x=(2, 5), i=Aval((), "int32"))
    body.add("p = dot_general w w", "n[] = reduce_sum p", "y[2,5] = dot_general x w", "m[] = reduce_sum y")
    body.add(
        "total = add m n", "dx[5,5] = dot_general x y '", "dq = dot_general p w '", "g = add_any dx dq '"
    )
    before, _, _, after = hoisted(body, "g total", Sum(), Stack())
    products = [["dot_general" in line for line in lines].count(True) for lines in (before, after)]
    assert products == [1, 2]


def test_a_whole_number_of_terms_is_exact():
    body = model()
    body.add("dx[5,5] = dot_general x y '", "g = add_any dx b '")
    loop = body.loop("g", microbatches=5)
    step = Traced(
        Flat((*loop.invariants, *loop.batch), (loop,), loop.outputs),
        body.types,
        (),
        (),
        (),
        ("",),
        None,
        None,
    )
    scale = next(op for op in hoist_invariants(step).flat.ops if isinstance(op, Op) and op.name == "mul")
    assert np.array_equal(scale.run([np.arange(3, dtype=np.float32)])[0], [0.0, 5.0, 10.0])
