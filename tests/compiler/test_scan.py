"""Scans written out iteration by iteration, and a backward's scan in two halves."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler_inputs import Inliner
from jax import lax

from jaxpp_async.compiler.evaluate import run_ops
from jaxpp_async.compiler.ir import Op
from jaxpp_async.compiler.scan import Where, reads_stacks, split, unroll
from jaxpp_async.jax_bridge import private_api

HERE = Where("model.py:7", in_loop=True)


def scan_of(fn, *args):
    """The one scan equation of a function, a flattener, and ids for its operands."""
    closed = jax.make_jaxpr(fn)(*args)
    jaxpr, _ = private_api.open_jaxpr(closed)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    flattener = Inliner()
    ids = dict(zip(jaxpr.invars, flattener.flatten_body(closed, HERE).inputs, strict=True))
    return eqn, flattener, [ids[v] for v in eqn.invars]


def lines(ops):
    return [f"{' '.join(map(str, op.outputs))} = {op.name} {' '.join(map(str, op.inputs))}" for op in ops]


def names(ops):
    return [op.name for op in ops]


def affine(w, x, bs, *, reverse=False):
    def body(carry, b):
        carry = carry * w + b
        return carry, jnp.sin(carry)

    return lax.scan(body, x, bs, reverse=reverse)


W, X, BS = jnp.float32(2), jnp.ones(3), jnp.arange(6.0).reshape(2, 3)


# ---------------------------------------------------------------- one iteration after the other


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_is_written_out_in_its_order_and_computes_the_same(reverse):
    def fn(w, x, bs):
        return affine(w, x, bs, reverse=reverse)

    eqn, flattener, inputs = scan_of(fn, W, X, BS)
    ops: list[Op] = []
    carry, stacked = unroll(flattener, eqn, inputs, ops, HERE)
    assert names(ops) == ["index_layer", "mul", "add", "sin"] * 2 + ["stack_layers"]
    assert {op.line for op in ops} == {"model.py:7"}
    env = dict(zip(inputs, (W, X, BS), strict=True))
    run_ops(ops, env)
    for got, want in zip((env[carry], env[stacked]), fn(W, X, BS), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    # The stack's elements are in the order of layers, whichever way the scan went.
    made = [op.outputs[0] for op in ops if op.name == "sin"]
    assert flattener.stacks[stacked] == (made[::-1] if reverse else made)


def test_a_stack_that_is_known_by_its_elements_is_never_indexed():
    eqn, flattener, inputs = scan_of(affine, W, X, BS)
    assert not reads_stacks(flattener, eqn, inputs)
    elements = [flattener.types.new(flattener.types[inputs[1]]) for _ in range(2)]
    flattener.stacks[inputs[2]] = elements
    assert reads_stacks(flattener, eqn, inputs)
    ops: list[Op] = []
    unroll(flattener, eqn, inputs, ops, HERE)
    assert "index_layer" not in names(ops)
    assert [op.inputs[1] for op in ops if op.name == "add"] == elements


def test_a_stack_among_the_carries_is_none_that_the_scan_goes_over():
    eqn, flattener, inputs = scan_of(affine, W, X, BS)
    flattener.stacks[inputs[1]] = [inputs[1]] * 3
    assert not reads_stacks(flattener, eqn, inputs)


def test_a_stacked_result_is_marked_as_its_scan_was():
    eqn, flattener, inputs = scan_of(affine, W, X, BS)
    ops: list[Op] = []
    (_, stacked) = unroll(flattener, eqn, inputs, ops, Where("model.py:7", transposed=True))
    assert ops[-1].transposed and ops[-1].outputs == (stacked,)
    assert flattener.types[stacked].aval.shape == (2, 3)


# ---------------------------------------------------------------- two halves


def halves_of(fn, args, wanted):
    eqn, flattener, inputs = scan_of(fn, *args)
    outputs = tuple(flattener.types.new(flattener.types[inputs[0]]) for _ in eqn.outvars)
    args = dict(zip(dict.fromkeys(inputs), args, strict=True))
    op = Op("scan", tuple(inputs), outputs, lambda xs: private_api.bind_eqn(eqn, xs), "model.py:7", True)
    op = dataclasses.replace(op, split=partial(split, flattener, private_api.scan_parts(eqn)))
    found = op.split(op, frozenset(wanted))
    if found is None:
        return None
    env = dict(args)
    expected = dict(zip(outputs, op.run([args[v] for v in inputs]), strict=True))
    run_ops(found, env)
    for v in outputs:
        np.testing.assert_allclose(env[v], expected[v], rtol=1e-6)
    return op, *found


def backward(dy, dws, ws, xs):
    """Carries a cotangent, stacks a gradient and sums another, as the gradient of a stack of layers does."""

    def body(carry, layer):
        dy, total = carry
        w, x = layer
        return (jnp.sin(dy * w), total + dy * x), dy * x

    return lax.scan(body, (dy, dws), (ws, xs), reverse=True)


BACKWARD = (jnp.ones(3), jnp.zeros(3), BS + 1, BS + 2)


def test_the_first_half_makes_what_is_wanted_and_stacks_what_the_second_needs():
    op, first, second = halves_of(backward, BACKWARD, {0})
    assert first.outputs[0] == op.outputs[0]
    assert set(second.outputs) == {op.outputs[1], op.outputs[2]}
    # The first carries the cotangent over the weights alone, and hands its value in each iteration on.
    assert first.inputs == (op.inputs[0], op.inputs[2])
    (stacked,) = first.outputs[1:]
    assert second.inputs == (op.inputs[1], op.inputs[3], stacked)
    assert (first.name, second.name, first.split, second.split) == ("scan", "scan", None, None)
    assert first.transposed and first.line == "model.py:7"


def test_a_scan_whose_results_need_all_of_its_body_is_not_split():
    def body(carry, x):
        return carry + jnp.sin(x), carry

    assert halves_of(lambda c, xs: lax.scan(body, c, xs), (X, BS), {0, 1}) is None
    assert halves_of(lambda c, xs: lax.scan(body, c, xs), (X, BS), {0}) is None


def test_a_carry_that_the_first_half_reads_is_made_by_the_first_half():
    def body(carry, x):
        a, b, c = carry
        return (a * b, jnp.sin(b), c + x), None

    op, first, second = halves_of(lambda a, xs: lax.scan(body, (a, a, a), xs)[0], (X, BS), {0})
    assert first.outputs == op.outputs[:2] and second.outputs == op.outputs[2:]


def test_light_operations_are_computed_in_both_halves_rather_than_stacked():
    def body(carry, x):
        a, b = carry
        scale = x * 2
        return (jnp.sin(a @ a) * scale[0] + a, b + jnp.exp(scale) @ scale), None

    def fn(a, b, xs):
        return lax.scan(body, (a, b), xs)[0]

    _, first, second = halves_of(fn, (X, jnp.float32(0), BS), {0})
    assert len(first.outputs) == 1  # nothing is handed on
    assert len(second.inputs) == 2
