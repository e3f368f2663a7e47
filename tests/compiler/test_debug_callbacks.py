"""Prints: which equations they are, what a step brings home for them, and the calls that are made of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler_inputs import Body
from jax import lax

from jaxpp_async.compiler.debug_callbacks import (
    hidden_results,
    is_checkpoint_with_prints,
    lift_prints,
    make_print,
    move_prints_out,
    print_calls,
    refuse_host_code,
)
from jaxpp_async.compiler.ir import Lit, LoopPrints, Print, PrintOperand
from jaxpp_async.errors import UnsupportedError
from jaxpp_async.jax_bridge import private_api

X = jnp.arange(3.0)


def last_equation(fn, *args):
    return private_api.open_jaxpr(jax.make_jaxpr(fn)(*(args or (X,))))[0].eqns[-1]


def show(text, *values):
    jax.debug.print(text, *values)


# ---------------------------------------------------------------- equations


def test_a_print_is_called_with_its_operands_as_jax_calls_it(capsys):
    eqn = last_equation(lambda x: show("x is {} and {}", x, x * 2) or x)
    found = make_print(eqn, [4, Lit(7)], "model.py:3")
    assert found.line == "model.py:3"
    assert found.operands[0] == PrintOperand(4) and found.operands[1].ref.value == 7
    found.call([np.float32(1), np.float32(2)])
    jax.effects_barrier()
    assert capsys.readouterr().out == "x is 1.0 and 2.0\n"


def test_a_callback_is_called_in_this_process():
    seen = []
    eqn = last_equation(lambda x: jax.debug.callback(lambda v: seen.append(float(v)), x[0]) or x)
    make_print(eqn, [0], "l").call([np.float32(5)])
    jax.effects_barrier()
    assert seen == [5.0]


def printing(x):
    show("{}", x)
    return x * 2


@pytest.mark.parametrize(
    ("fn", "is_checkpoint", "taken_out", "stays"),
    [
        (jax.checkpoint(printing), True, 1, True),
        (jax.jit(printing), False, 1, False),
        (jax.checkpoint(jnp.sin), False, 0, True),
        (jax.jit(lambda x: x * 2), False, 0, True),
        (lambda x: lax.scan(lambda c, y: (printing(c), None), x, None, length=2)[0], False, 0, True),
    ],
)
def test_prints_are_taken_out_of_checkpoints_and_calls(fn, is_checkpoint, taken_out, stays):
    eqn = last_equation(fn)
    assert is_checkpoint_with_prints(eqn) == is_checkpoint
    around = last_equation(jax.checkpoint(lambda x: show("around {}", x) or fn(x)))
    lifted, _, prints = lift_prints(around)
    assert len(prints) == 1 + taken_out
    inside = private_api.open_jaxpr(private_api.inner_jaxpr(lifted))[0].eqns
    assert any(e.primitive is eqn.primitive for e in inside) == stays


def test_a_lifted_checkpoint_returns_what_its_prints_show():
    @jax.checkpoint
    def fn(x):
        y = jnp.sin(x)
        show("{} {}", y, 7)
        return y * 2

    lifted, constants, prints = lift_prints(last_equation(fn))
    assert (
        constants == [] and not lifted.effects and lifted.primitive.name in ("checkpoint", "remat2", "remat")
    )
    ((eqn, operands),) = prints
    assert eqn.primitive.name in ("debug_print", "debug_callback")
    results = private_api.bind_eqn(lifted, [X])
    assert len(results) == 2
    np.testing.assert_allclose(results[0], jnp.sin(X) * 2, rtol=1e-6)
    assert operands[0] == 1
    np.testing.assert_allclose(results[operands[0]], jnp.sin(X), rtol=1e-6)
    assert isinstance(operands[1], private_api.Literal) and operands[1].val == 7


def test_prints_of_checkpoints_and_calls_inside_are_lifted_in_program_order():
    @jax.checkpoint
    def fn(x):
        show("first {}", x)
        x = jax.jit(lambda v: show("second {}", v * 3) or v * 5)(x)
        return jax.checkpoint(lambda v: show("third {}", v + 1) or v * 7)(x)

    lifted, _, prints = lift_prints(last_equation(fn))
    results = private_api.bind_eqn(lifted, [X])
    np.testing.assert_array_equal(results[0], X * 35)
    shown = [results[operands[0]] for _, operands in prints]
    for got, want in zip(shown, (X, X * 3, X * 5 + 1), strict=True):
        np.testing.assert_array_equal(got, want)


# ---------------------------------------------------------------- what is refused


def test_plain_equations_are_not_refused():
    refuse_host_code(last_equation(jnp.sin), "l", None)
    refuse_host_code(last_equation(jax.jit(lambda x: x * 2)), "l", None)


def test_a_print_inside_a_scan_is_refused_with_the_line_of_the_print():
    eqn = last_equation(lambda x: lax.scan(lambda c, y: (printing(c), None), x, None, length=2)[0])
    with pytest.raises(UnsupportedError) as caught:
        refuse_host_code(eqn, "model.py:1", None)
    line, _, rest = str(caught.value).partition(": ")
    assert line.split("/")[-1].split(":")[0] == "test_debug_callbacks.py"
    assert rest.partition(" inside ")[0] in ("`debug_print`", "`debug_callback`")  # by the version of JAX
    assert rest.partition("`scan`: ")[2] == (
        "prints are made by the controller from results of the step, and values inside a `scan` are none; "
        "print before or after it, return the values from its body and print them there, or write it as "
        "Python code"
    )


def test_other_host_code_is_refused_with_its_stage():
    def fn(x):
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((3,), "float32"), x)

    with pytest.raises(UnsupportedError) as caught:
        refuse_host_code(last_equation(fn), "model.py:1", lambda: 2)
    assert str(caught.value).partition(": ")[2] == (
        "`pure_callback` in stage 2 runs Python on the host, or has side effects there, which a task on an "
        "actor cannot; return the value and use it in your process when the step is over, or show it with "
        "`jax.debug.print` or `jax.debug.callback`"
    )


def test_calls_are_no_place_that_an_error_names():
    def fn(x):
        inner = jax.jit(lambda v: jax.pure_callback(lambda u: u, jax.ShapeDtypeStruct((3,), "float32"), v))
        return lax.cond(x[0] > 0, inner, lambda v: v, x)

    with pytest.raises(UnsupportedError, match=r": `pure_callback` inside `cond` runs Python"):
        refuse_host_code(last_equation(fn), "model.py:1", None)


# ---------------------------------------------------------------- home, and the calls


def loop_prints():
    """A loop's body: its operand `w`, its microbatch `x` and index are known outside; `h` is made inside."""
    body = Body(w=(2,), x=(4,), i=())
    body.add("h[5] = mul x w")
    outside = {
        body.ref("w"): PrintOperand(70),
        body.ref("x"): PrintOperand(71, per_microbatch=True),
        body.ref("i"): PrintOperand(None),
    }
    return body, outside


def test_what_a_print_shows_of_a_loop_is_known_outside_or_stacked():
    body, outside = loop_prints()
    h, w, x, i = body.refs("h w x i")
    inside = [
        Print(print, (PrintOperand(h), PrintOperand(w), PrintOperand(Lit(3))), "a"),
        Print(repr, (PrintOperand(i), PrintOperand(x), PrintOperand(h)), "b"),
    ]
    found, stacked = move_prints_out(inside, outside, body.types, 6)
    (stack,) = stacked.values()
    assert stacked == {h: stack} and body.types[stack].aval.shape == (6, 5)
    first, second = found.prints
    assert found.num_microbatches == 6
    assert (first.call, first.line, second.call, second.line) == (print, "a", repr, "b")
    assert first.operands[:2] == (PrintOperand(stack, per_microbatch=True), PrintOperand(70))
    assert first.operands[2] is inside[0].operands[2]
    assert second.operands == (
        PrintOperand(None),
        PrintOperand(71, per_microbatch=True),
        PrintOperand(stack, per_microbatch=True),
    )


def test_values_that_prints_show_are_hidden_results_once_each():
    loop = LoopPrints((Print(print, (PrintOperand(5, True), PrintOperand(None), PrintOperand(3)), "a"),), 2)
    assert hidden_results([Print(print, (PrintOperand(3), PrintOperand(Lit(1))), "b"), loop]) == (3, 5)


def test_calls_come_in_program_order_a_loops_microbatch_by_microbatch():
    alone, one, two = (
        Print(print, operands, "l")
        for operands in (
            (PrintOperand(0), PrintOperand(Lit(9))),
            (PrintOperand(1, per_microbatch=True), PrintOperand(None)),
            (PrintOperand(0),),
        )
    )
    values = {0: np.float32(4), 1: np.asarray([10, 20])}
    found = list(print_calls([alone, LoopPrints((one, two), 2), alone], values))
    assert [p for p, _ in found] == [alone, one, two, one, two, alone]
    assert [[x.item() for x in operands] for _, operands in found] == [
        [4, 9],
        [10, 0],
        [4],
        [20, 1],
        [4],
        [4, 9],
    ]
    assert found[1][1][1].dtype == np.int32
