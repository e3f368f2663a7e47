"""The ids of parts, and the operations that join and cut them."""

from __future__ import annotations

import numpy as np

from jaxpp_async.compiler.divided_values import BodyValues, PartIds
from jaxpp_async.compiler.evaluate import run_ops
from jaxpp_async.compiler.ir import Captured, Lit, Op, Types, ValueType
from jaxpp_async.program.instructions import Aval
from jaxpp_async.program.leaf_parts import Parts

X = np.arange(12, dtype=np.float32).reshape(6, 2)
PARTS = Parts(0, (0, 2, 6))


def body_of(parts: Parts) -> tuple[BodyValues, int]:
    types = Types()
    value = types.new(ValueType(Aval(X.shape, "float32")))
    return BodyValues(PartIds(types, {value: parts})), value


def run(body: BodyValues, env: dict) -> dict:
    run_ops([op for op in body.ops if isinstance(op, Op)], env)
    return env


def test_a_value_is_joined_once_from_its_parts():
    body, value = body_of(PARTS)
    assert body.is_divided(value) and not body.is_divided(Lit(1))
    assert [body.whole(value), body.whole(value)] == [value, value] and len(body.ops) == 1
    env = run(body, dict(zip(body.divider.ids(value), (X[:2], X[2:]), strict=True)))
    np.testing.assert_array_equal(env[value], X)


def test_rows_come_from_the_parts_that_have_them():
    body, value = body_of(PARTS)
    first, second = body.divider.ids(value)
    assert list(body.rows(value, 0, 0, 2, "")) == [first] and body.ops == []
    cut = body.rows(value, 0, 1, 4, "")
    env = run(body, {first: X[:2], second: X[2:]})
    np.testing.assert_array_equal(np.concatenate([env[r] for r in cut]), X[1:4])


def test_a_result_is_given_in_other_parts():
    body, value = body_of(PARTS)
    made = body.result(value, Parts(0, (0, 3, 6)))
    env = run(body, dict(zip(body.divider.ids(value), (X[:2], X[2:]), strict=True)))
    for ref, wanted in zip(made, (X[:3], X[3:]), strict=True):
        np.testing.assert_array_equal(env[ref], wanted)
    assert list(body.result(value, PARTS)) == list(body.divider.ids(value))


def test_a_captured_array_is_captured_in_parts():
    body, value = body_of(PARTS)
    first, second = body.divider.captured_parts(Captured(X, value))
    np.testing.assert_array_equal(np.concatenate([first.value, second.value]), X)
    assert (first.value_id, second.value_id) == body.divider.ids(value)
