"""Rows at known positions are slices, whichever way a program takes them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpp_async.compiler.evaluate import run_ops
from jaxpp_async.compiler.ir import Op
from jaxpp_async.compiler.row_access import REWRITES
from jaxpp_async.compiler.trace import trace

ROWS = 5
X = np.random.default_rng(0).normal(size=(ROWS, 4, 3)).astype(np.float32)
SLICES = {"slice", "squeeze", "concatenate", "pad", "broadcast_in_dim", "reshape", "add", "mul", "tanh"}


def one_by_one(x: jax.Array) -> list[jax.Array]:
    return [jnp.tanh(row) for row in x]


TAKEN: dict[str, Callable] = {
    "iterated": one_by_one,
    "unstacked along another axis": lambda x: jnp.unstack(x, axis=1),
    "split": lambda x: jnp.split(x, [1, 3]),
    "all axes reversed": lambda x: jnp.flip(x)[1:],
    "a slice of two axes": lambda x: x[1:3, 2:],
    "a number that is computed": lambda x: x[jnp.int32(2) * 2 - 1],
    "from the end": lambda x: lax.dynamic_index_in_dim(x, jnp.int32(-1)),
    "beyond the end": lambda x: lax.dynamic_slice(x, (jnp.int32(4), 0, 0), (3, 4, 3)),
    "take": lambda x: jnp.take(x, 3, axis=0),
    "a list": lambda x: x[jnp.array([3, 4, 0])],
    "set": lambda x: x.at[2].set(0.0),
    "set by a slice": lambda x: x.at[1:3].set(x[3:]),
    "added": lambda x: x.at[jnp.array([1, 4])].add(x[:2]),
    "the same row twice": lambda x: x.at[jnp.array([1, 1])].add(x[:2]),
    "multiplied": lambda x: x.at[0].multiply(x[1]),
    "updated zeros": lambda x: lax.dynamic_update_slice(jnp.zeros(x.shape), x[:2] + 1, (jnp.int32(1), 0, 0)),
    "a gradient": jax.grad(lambda x: sum(jnp.sum(row**2) * k for k, row in enumerate(x))),
    "a gradient of take": jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.take(x, 3, axis=0)))),
    "a gradient of a computed row": jax.grad(lambda x: jnp.sum(jnp.tanh(x[jnp.int32(1) + 1]))),
    "stacked": lambda x: jnp.stack([x[1], x[0]], axis=1),
}


@pytest.mark.parametrize("name", TAKEN)
def test_rows_are_slices(name):
    fn = TAKEN[name]
    traced = trace(fn, [X])
    ops = [op for op in traced.flat.ops if isinstance(op, Op)]
    assert not {op.name for op in ops} & REWRITES.keys() - {"slice", "pad", "rev"}
    for op in ops:
        if op.name == "slice":  # of one axis each
            whole, part = (traced.types[v].aval.shape for v in (op.reads[0], op.outputs[0]))
            assert sum(a != b for a, b in zip(whole, part, strict=True)) == 1
    env = dict(zip(traced.flat.inputs, [X], strict=True))
    run_ops(ops, env)
    made = [env[r] if isinstance(r, int) else r.value for r in traced.flat.outputs]
    for got, wanted in zip(made, jax.tree.leaves(fn(jnp.asarray(X))), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.dynamic_index_in_dim(x, jnp.argmax(x[:, 0, 0])),
        lambda x: x[jnp.argsort(x[:, 0, 0])],
        lambda x: x.at[jnp.array([1, 1, 3])].set(x[:3]),
        lambda x: x.at[:, 1].set(0.0),
        lambda x: jnp.take(x, jnp.array([9]), axis=0),  # there is no such row: NaNs
    ],
)
def test_other_positions_stay_as_they_are(fn):
    traced = trace(fn, [X])
    ops = [op for op in traced.flat.ops if isinstance(op, Op)]
    assert {op.name for op in ops} & REWRITES.keys() - {"slice", "pad", "rev"}
    env = dict(zip(traced.flat.inputs, [X], strict=True))
    run_ops(ops, env)
    np.testing.assert_array_equal(env[traced.flat.outputs[0]], fn(jnp.asarray(X)))


def test_the_lines_of_the_user_stay():
    traced = trace(lambda x: jnp.split(x, [2])[1] * 2, [X])
    assert {op.line.rpartition(":")[0] for op in traced.flat.ops} == {__file__}
