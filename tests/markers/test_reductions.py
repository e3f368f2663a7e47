"""Direct tests of how the microbatches' results are joined."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_async.markers.reductions import Concat, Max, Mean, Min, Stack, Sum


def joined(reduction, values) -> np.ndarray:
    """As a loop would join them, an accumulator from start to end."""
    accumulator = reduction.start(values[0].shape, values[0].dtype, len(values))
    assert accumulator.shape == reduction.shape(values[0].shape, len(values))
    for index, value in enumerate(values):
        accumulator = reduction.step(accumulator, value, jnp.int32(index))
        if index == 0 and reduction.starts_from_first:
            np.testing.assert_array_equal(accumulator, value)
    assert accumulator.dtype == values[0].dtype
    return np.asarray(reduction.end(accumulator, len(values)))


VALUES = [jnp.array([1.0, -5.0]), jnp.array([3.0, -7.0])]


@pytest.mark.parametrize(
    ("reduction", "found"),
    [
        (Sum(), [4, -12]),
        (Mean(), [2, -6]),
        (Max(), [3, -5]),
        (Min(), [1, -7]),
        (Stack(), [[1, -5], [3, -7]]),
        (Concat(), [1, -5, 3, -7]),
        (Concat(-1), [1, -5, 3, -7]),
    ],
    ids=repr,
)
def test_values_are_joined_from_the_start_over_each_step_to_the_end(reduction, found):
    np.testing.assert_array_equal(joined(reduction, VALUES), found)


def test_values_are_joined_along_the_axis_that_is_named():
    values = [jnp.zeros((2, 1)), jnp.ones((2, 1))]
    np.testing.assert_array_equal(joined(Concat(1), values), [[0, 1], [0, 1]])
    assert Concat(-2).shape((2, 1), 3) == (6, 1)


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("int8", -128, 127), ("bool", False, True), ("float32", -np.inf, np.inf)]
)
def test_extremes_start_from_the_values_that_lose(dtype, least, most):
    assert Max().start((), np.dtype(dtype), 1) == least
    assert Min().start((), np.dtype(dtype), 1) == most


def test_only_results_that_grow_have_a_new_axis_that_no_mesh_axis_splits():
    assert Stack().spec(("x",)) == (None, "x")
    assert Concat().spec(("x",)) == Sum().spec(("x",)) == ("x",)
    assert [r.grows for r in (Sum(), Mean(), Max(), Min(), Stack(), Concat())] == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("reduction", "dtype", "ndim", "says"),
    [
        (Sum(), jnp.float32, 1, None),
        (
            Sum(),
            jnp.bool_,
            0,
            "Sum() cannot add booleans; cast to int32 first, or use Max() (any) or Min() (all)",
        ),
        (Mean(), jnp.int32, 0, "Mean() takes floating values, not int32; cast first, or use Sum()"),
        (Max(), jax.random.key(0).dtype, 0, "Max cannot reduce PRNG keys; use Stack()"),
        (Stack(), jax.random.key(0).dtype, 0, None),
        (
            Concat(1),
            jnp.float32,
            1,
            "Concat(axis=1) needs that axis, but the value has 1 dimensions; use Stack()",
        ),
        (Concat(-1), jnp.float32, 1, None),
    ],
)
def test_what_cannot_be_reduced_is_told_with_what_can(reduction, dtype, ndim, says):
    assert reduction.check(dtype, ndim) == says
