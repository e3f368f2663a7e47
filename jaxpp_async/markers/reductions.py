"""Define the operators that join the microbatches' results of `accumulate_grads`.

The operators are `Sum`, `Max`, `Min`, `Mean`, `Stack` and `Concat`. Each one defines the start, the step and
the end of an accumulation. Plain JAX and the pipeline's tasks call the same methods, so both compute the same
values. The accumulator is an array that is passed to these methods; an operator itself has no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpp_async.jax_bridge import private_api


@dataclass(frozen=True)
class Reduction:
    """An operator that joins one result of the loop's function over microbatches.

    The subclasses are `Sum`, `Max`, `Min`, `Mean`, `Stack` and `Concat`. Their methods are functions of the
    accumulator, the array into which the microbatches' values are joined one by one.
    """

    grows = False
    """Whether the joined result has an entry for every microbatch, as with `Stack` and `Concat`."""
    commutes_with_add = False
    """Whether the terms of a microbatch's value that is a sum may be accumulated separately, and the
    accumulated terms added after the loop."""
    has_end = False
    """Whether the result differs from the final accumulator, from which the method `end` then computes it."""
    starts_from_first = False
    """Whether the accumulator after the first microbatch equals the first microbatch's value."""

    def shape(self, shape: tuple[int, ...], num_microbatches: int) -> tuple[int, ...]:
        """Return the shape of the accumulator for values of the given shape per microbatch."""
        return shape

    def spec(self, spec: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the sharding spec of the accumulator, given the sharding spec of one microbatch's value.

        Both specs are tuples with one entry per dimension, as in `PartitionSpec`.
        """
        return spec

    def start(self, shape: tuple[int, ...], dtype: Any, num_microbatches: int) -> jax.Array:
        """Return the initial accumulator, the array into which the microbatches' values are then joined.

        Args:
            shape: the shape of one microbatch's value.
            dtype: the dtype of one microbatch's value.
            num_microbatches: the number of microbatches.
        """
        raise NotImplementedError

    def step(self, accumulator: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        """Return the accumulator after the value of one microbatch has been joined to it.

        Args:
            accumulator: the accumulator after the previous microbatch.
            value: the value of this microbatch.
            index: the index of this microbatch, an int32 scalar.
        """
        raise NotImplementedError

    def end(self, accumulator: jax.Array, num_microbatches: int) -> jax.Array:
        """Return the final result, given the accumulator after the last microbatch."""
        return accumulator

    def total_weight(self, num_microbatches: int) -> int:
        """Return how often a value counts in the final result that all microbatches have in common.

        Only operators with `commutes_with_add` are asked.
        """
        return num_microbatches

    def check(self, dtype: Any, ndim: int) -> str | None:
        """Return the text of an error if values of this dtype and rank cannot be joined; None if they can."""
        if private_api.is_key_dtype(dtype):
            return f"{type(self).__name__} cannot reduce PRNG keys; use Stack()"
        return None


@dataclass(frozen=True)
class Sum(Reduction):
    """A reduction that adds the microbatches' values, in their own dtype."""

    commutes_with_add = True

    def start(self, shape, dtype, num_microbatches):
        return jnp.zeros(shape, dtype)

    def step(self, accumulator, value, index):
        return accumulator + value

    def check(self, dtype, ndim):
        if dtype == jnp.bool_:
            return "Sum() cannot add booleans; cast to int32 first, or use Max() (any) or Min() (all)"
        return super().check(dtype, ndim)


@dataclass(frozen=True)
class Mean(Sum):
    """A reduction that averages floating values over microbatches."""

    has_end = True

    def end(self, accumulator, num_microbatches):
        return accumulator / jnp.asarray(num_microbatches, accumulator.dtype)

    def total_weight(self, num_microbatches):
        return 1

    def check(self, dtype, ndim):
        if not jnp.issubdtype(dtype, jnp.inexact):
            return f"Mean() takes floating values, not {jnp.dtype(dtype).name}; cast first, or use Sum()"
        return super().check(dtype, ndim)


@dataclass(frozen=True)
class Max(Reduction):
    """A reduction that takes the elementwise maximum over microbatches."""

    starts_from_first = True

    def start(self, shape, dtype, num_microbatches):
        return jnp.full(shape, _extreme(dtype, -1), dtype)

    def step(self, accumulator, value, index):
        return jnp.maximum(accumulator, value)


@dataclass(frozen=True)
class Min(Reduction):
    """A reduction that takes the elementwise minimum over microbatches."""

    starts_from_first = True

    def start(self, shape, dtype, num_microbatches):
        return jnp.full(shape, _extreme(dtype, 1), dtype)

    def step(self, accumulator, value, index):
        return jnp.minimum(accumulator, value)


def _extreme(dtype: Any, sign: int) -> Any:
    """Return the largest value of a dtype (infinity for floats) if `sign` is 1, the smallest if it is -1."""
    if dtype == jnp.bool_:
        return sign > 0
    if jnp.issubdtype(dtype, jnp.inexact):
        return sign * jnp.inf
    info = jnp.iinfo(dtype)
    return info.max if sign > 0 else info.min


@dataclass(frozen=True)
class Stack(Reduction):
    """A reduction that stacks the values of all microbatches along a new leading axis."""

    grows = True

    def shape(self, shape, num_microbatches):
        return (num_microbatches, *shape)

    def spec(self, spec):
        return (None, *spec)

    def start(self, shape, dtype, num_microbatches):
        return jnp.zeros((num_microbatches, *shape), dtype)

    def step(self, accumulator, value, index):
        return lax.dynamic_update_index_in_dim(accumulator, value, index, 0)

    def check(self, dtype, ndim):
        return None


@dataclass(frozen=True)
class Concat(Reduction):
    """A reduction that joins the values of all microbatches along the existing axis `axis`."""

    axis: int = 0
    grows = True

    def shape(self, shape, num_microbatches):
        axis = self.axis % len(shape)
        return tuple(n * num_microbatches if d == axis else n for d, n in enumerate(shape))

    def start(self, shape, dtype, num_microbatches):
        return jnp.zeros(self.shape(shape, num_microbatches), dtype)

    def step(self, accumulator, value, index):
        axis = self.axis % value.ndim
        return lax.dynamic_update_slice_in_dim(accumulator, value, index * value.shape[axis], axis)

    def check(self, dtype, ndim):
        if not -ndim <= self.axis < ndim:
            return (
                f"Concat(axis={self.axis}) needs that axis, but the value has {ndim} dimensions; use Stack()"
            )
        return super().check(dtype, ndim)
