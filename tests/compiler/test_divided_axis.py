"""Each rule of `divided_axis`: parts of an operation's results are computed from parts of its operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dividing import check_parts, division_of, in_parts, values
from jax import lax

from jaxpp_async.compiler import stack_division
from jaxpp_async.compiler.divide import divide
from jaxpp_async.compiler.divided_axis import RULES, relate
from jaxpp_async.compiler.ir import Op
from jaxpp_async.compiler.trace import trace
from jaxpp_async.program.leaf_parts import Parts

ROWS = 6
X, Y, V = (ROWS, 4, 3), (ROWS, 3, 2), (ROWS,)


KEPT = {
    "elementwise": (lambda x: jnp.tanh(x) * 2 + x, 0),
    "select": (lambda x: jnp.where(x > 0, x, -x), 0),
    "cast": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), 0),
    "single row": (lambda x: x / lax.slice_in_dim(jnp.ones(X), 0, 1), 0),
    "transpose": (lambda x: x.transpose(1, 0, 2), 1),
    "expand": (lambda x: x[None, :, None], 1),
    "squeeze": (lambda x: lax.squeeze(lax.broadcast_in_dim(x, (1, *X), (1, 2, 3)), (0,)), 0),
    "merge behind": (lambda x: x.reshape(ROWS, 12), 0),
    "split behind": (lambda x: x.reshape(ROWS, 2, 2, 3), 0),
    "sum of others": (lambda x: x.sum((1, 2)), 0),
    "largest of others": (lambda x: x.max(1), 0),
    "argmax of others": (lambda x: jnp.argmax(x, 2), 0),
    "cumulated others": (lambda x: jnp.cumsum(x, 1), 0),
    "sorted others": (lambda x: jnp.sort(x, 2), 0),
    "batched product": (lambda x: jnp.einsum("lij,lkj->lik", x, x), 0),
    "product with a whole": (lambda x: jnp.einsum("lij,jk->lik", x, jnp.ones((3, 5))), 0),
    "free on the right": (lambda x: jnp.einsum("kj,lij->kli", jnp.ones((5, 3)), x), 1),
    "slice of others": (lambda x: x[:, 1:3], 0),
    "dynamic slice of others": (lambda x: lax.dynamic_slice_in_dim(x, jnp.argmax(jnp.ones(3)), 2, 1), 0),
    "pad of others": (lambda x: jnp.pad(x, [(0, 0), (1, 1), (0, 0)]), 0),
    "joined others": (lambda x: jnp.concatenate([x, x], 2), 0),
    "split others": (lambda x: jnp.split(x, 2, 1)[1], 0),
    "factor": (lambda x: jnp.linalg.cholesky(jnp.einsum("lij,lik->ljk", x, x) + jnp.eye(3)), 0),
    "map": (lambda x: lax.map(lambda row: row / jnp.linalg.norm(row), x), 0),
    "scan": (lambda x: lax.scan(lambda c, row: (c + row.sum(), row * c), 1.0, x)[1], 0),
    "scan back": (lambda x: lax.scan(lambda c, row: (c + row.sum(), row * c), 1.0, x, reverse=True)[1], 0),
    "cond": (lambda x: lax.cond(jnp.max(x) > 9, lambda a: a, lambda a: 2 * a, x), 0),
    "counted": (lambda x: x + lax.broadcasted_iota(jnp.float32, X, 1), 0),
    "counted layers": (lambda x: x + lax.broadcasted_iota(jnp.float32, X, 0), 0),
    "constant": (lambda x: x * np.arange(ROWS * 12, dtype=np.float32).reshape(X), 0),
    "random": (
        lambda x: (
            x + jax.vmap(lambda k: jax.random.normal(k, (4, 3)))(jax.random.split(jax.random.key(0), ROWS))
        ),
        0,
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_axis_is_kept(name):
    fn, axis = KEPT[name]
    (parts,) = in_parts(fn, values(X))
    assert parts == Parts(axis, (0, 1, 4, ROWS))


REDUCED = {
    "sum": lambda x: x.sum(),
    "sum over layers": lambda x: x.sum(0),
    "largest": lambda x: x.max((0, 1)),
    "least": lambda x: x.min(),
    "product": lambda x: x.prod(0),
    "all": lambda x: (x > -9).all(),
    "any": lambda x: (x > 1).any(0),
    "dot": lambda x: jnp.vdot(x, x),
    "contracted": lambda x: jnp.einsum("lij,lij->ij", x, x),
    "contracted with a whole": lambda x: jnp.einsum("lij,l->ij", x, jnp.arange(ROWS, dtype=jnp.float32)),
    "carry": lambda x: lax.scan(lambda c, row: (c * 0.5 + row, None), jnp.zeros((4, 3)), x)[0],
}


@pytest.mark.parametrize("name", REDUCED)
def test_results_of_all_layers_are_combined(name):
    assert in_parts(REDUCED[name], values(X)) == [None]


def test_rows_that_are_merged_with_others():
    (parts,) = in_parts(lambda x: x.reshape(-1), values(X))
    assert parts == Parts(0, (0, 12, 48, 72))
    (parts,) = in_parts(lambda x: x.reshape(ROWS, 12), values((72,)), cuts=(12, 48))
    assert parts == Parts(0, (0, 1, 4, ROWS))


MOVED = {
    "first rows": (lambda x: x[:3], (0, 1, 3)),
    "last rows": (lambda x: x[3:], (0, 1, 3)),
    "rows of one part": (lambda x: x[1:4], None),
    "rows within a part": (lambda x: x[2:3], None),
    "rows at a fixed place": (lambda x: lax.dynamic_slice_in_dim(x, 3, 3), (0, 1, 3)),
    "pad": (lambda x: jnp.pad(x, [(2, 1), (0, 0), (0, 0)]), (0, 3, 6, 9)),
    "pad with a value": (lambda x: jnp.pad(x, [(1, 0), (0, 0), (0, 0)], constant_values=2.0), (0, 2, 5, 7)),
    "concatenate": (lambda x: jnp.concatenate([jnp.ones((2, 4, 3)), x]), (0, 3, 6, 8)),
    "split": (lambda x: jnp.split(x, [3])[1], (0, 1, 3)),
    "a slice of two axes": (lambda x: x[3:, 1:3], (0, 1, 3)),
    "a slice of one part and of another axis": (lambda x: x[1:4, :, 1:], None),
    "strides of another axis": (lambda x: x[1:, ::2], (0, 3, 5)),
    "a pad of two axes": (lambda x: jnp.pad(x[:3], [(0, 1), (1, 0), (0, 0)]), (0, 1, 4)),
    "a row of a row": (lambda x: x[2, 1], None),
    "reversed": (lambda x: x[::-1], (0, 2, 5, ROWS)),
    "all axes reversed": (jnp.flip, (0, 2, 5, ROWS)),
    "set": (lambda x: x.at[1:3].set(2.0), (0, 4, ROWS)),
    "added to": (lambda x: x.at[2].add(1.0), (0, 1, 4, ROWS)),
    "multiplied": (lambda x: x.at[jnp.array([4, 5])].multiply(3.0), (0, 1, ROWS)),
    "updated": (lambda x: lax.dynamic_update_slice(x, x[4:] * 2, (0, 0, 0)), (0, 4, ROWS)),
    "unstacked and stacked": (lambda x: jnp.stack([row * 2 for row in x]), None),
    "taken": (lambda x: jnp.take(x, jnp.array([4, 5, 0]), axis=0), None),
}


@pytest.mark.parametrize("name", MOVED)
def test_rows_are_moved(name):
    fn, bounds = MOVED[name]
    (parts,) = in_parts(fn, values(X))
    assert parts == (None if bounds is None else Parts(0, bounds))


def test_every_other_row():
    cuts = (1, 2, 3, 4)  # more would not help: which stage takes a row is said for each
    assert in_parts(lambda x: x[::2] * 2, values(X), cuts=cuts) == [Parts(0, (0, 1, 2, 3))]


def test_sums_of_padded_rows_add_no_zeros():
    """The gradient of slices: each part is one stage's, so nothing is added to it."""

    def fn(x: jax.Array) -> jax.Array:
        others = [(0, 0, 0), (0, 0, 0)]
        sums = lax.pad(x[:3], 0.0, [(0, 3, 0), *others]) + lax.pad(x[3:], 0.0, [(3, 0, 0), *others])
        return x - sums

    traced = trace(fn, values(X))
    done = divide(traced, division_of(traced, 0, (3,)), {})
    assert [op.name for op in done.flat.ops if op.name.startswith("add")] == []
    assert in_parts(fn, values(X), cuts=(3,)) == [Parts(0, (0, 3, ROWS))]


def test_layers_along_another_axis():
    assert in_parts(lambda x: jnp.sin(x).sum(0), values((2, ROWS)), axis=1) == [Parts(0, (0, 1, 4, ROWS))]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.cumsum(x, 0),
        lambda x: jnp.sort(x, 0),
        lambda x: x.reshape(2, 3, 12),
        lambda x: jnp.argmax(x, 0),
        lambda x: lax.dynamic_slice_in_dim(x, jnp.argmax(x[:, 0, 0]) // 9, 2),
    ],
)
def test_what_has_no_parts_joins_small_values(fn, monkeypatch):
    assert in_parts(fn, values(X)) == [None]
    monkeypatch.setattr(stack_division, "JOINED_BYTES", 0)
    (kept,) = division_of(traced := trace(fn, values(X)), 0, (1, 4)).kept_whole
    assert kept.leaf == 0 and kept.why.partition(" at ")[0] in {op.name for op in traced.flat.ops}


def test_a_small_value_whose_cuts_do_not_fit_is_joined():
    """One operand is cut where rows of three begin, the other elsewhere."""

    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x.reshape(3, 2) * y[:, None]).reshape(6) + x

    check_parts(fn, values((6,), (3,)), 0, (3,), others={1: (1,)})


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: lax.scan(lambda c, row: (c * 0.5 + row, None), jnp.zeros((4, 3)), x)[0] + y,
        lambda x, y: x.sum(0) * y,
        lambda x, y: lax.scan(lambda c, row: (c + row, None), y, x)[0] - y,
        lambda x, y: jnp.einsum("lij,l->ij", x, jnp.arange(ROWS, dtype=jnp.float32)) + y,
    ],
)
def test_a_result_of_all_rows_may_be_divided_otherwise(fn):
    done = check_parts(fn, values(X, (4, 3)), 0, (1, 4), others={1: (2,)})
    assert done.result_parts == (Parts(0, (0, 2, 4)),)


def test_rows_of_groups_that_are_cut_within_a_group():
    """The layers of the second group belong to two stages, and small values are joined for it."""

    def fn(x: jax.Array) -> jax.Array:
        groups = x.reshape(3, 2, 12)
        return groups[1, 0] + groups[1, 1] * 2 + groups[0].sum()

    check_parts(fn, values(X), 0, (3,))


@pytest.mark.parametrize("impl, divided", [("threefry2x32", True), ("rbg", False), ("unsafe_rbg", False)])
def test_only_keys_that_draw_alone_are_divided(impl, divided):
    def fn(data: jax.Array) -> jax.Array:
        keys = jax.random.wrap_key_data(data, impl=impl)
        return jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)

    words = jax.random.key_data(jax.random.split(jax.random.key(0, impl=impl), ROWS))
    (parts,) = in_parts(fn, [np.asarray(words)])
    assert (parts is not None) == divided


def test_an_operation_without_a_rule_has_no_relation():
    traced = trace(lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 1, 1), "VALID"), values(X))
    (op,) = (op for op in traced.flat.ops if isinstance(op, Op))
    assert relate(op, traced.types, is_result=False, position=0, axis=0) is None
    assert op.name not in RULES and op.name == "reduce_window_sum"
