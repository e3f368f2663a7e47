"""Compute functions of stacked arrays in parts, without a loop, and compare them with JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_async.compiler import stack_division
from jaxpp_async.compiler.divide import divide
from jaxpp_async.compiler.evaluate import run_ops, wrap_input
from jaxpp_async.compiler.ir import Op, Traced
from jaxpp_async.compiler.trace import trace
from jaxpp_async.program.leaf_parts import Parts


def values(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def division_of(
    traced: Traced, axis: int, cuts: tuple[int, ...], others: Mapping[int, tuple[int, ...]] | None = None
) -> stack_division.Division:
    """Cut the first argument, and others by their positions along axis 0."""
    spreading = stack_division._Spreading(traced, {}, {})
    spreading.cut(traced.flat.inputs[0], axis, cuts)
    for position, rows in (others or {}).items():
        spreading.cut(traced.flat.inputs[position], 0, rows)
    spreading.run()
    return spreading.division()


def in_parts(
    fn: Callable, args: list[Any], axis: int = 0, cuts: tuple[int, ...] = (1, 4)
) -> list[Parts | None]:
    """Check that `fn` divides its first argument at the cuts and computes the same in parts.

    Returns:
        The parts of its results.
    """
    done = check_parts(fn, args, axis, cuts)
    assert done.argument_parts and done.argument_parts[0] == Parts(axis, (0, *cuts, args[0].shape[axis]))
    return list(done.result_parts)


def check_parts(
    fn: Callable,
    args: list[Any],
    axis: int,
    cuts: tuple[int, ...],
    tolerance: float = 2e-5,
    others: Mapping[int, tuple[int, ...]] | None = None,
) -> Traced:
    """Check that `fn` computes the same where its arguments are cut, and return it in parts."""
    traced = trace(fn, args)
    done = divide(traced, division_of(traced, axis, cuts, others), {})
    pieces = [
        piece
        for arg, parts in zip(args, done.argument_parts or [None] * len(args), strict=True)
        for piece in ([arg] if parts is None else [arg[index] for index in parts.slices])
    ]
    pieces += [c.value for c in done.captured]
    env: dict[int, Any] = {
        v: wrap_input(done.types[v], x) for v, x in zip(done.flat.inputs, pieces, strict=True)
    }
    run_ops([op for op in done.flat.ops if isinstance(op, Op)], env)
    rest = iter([env[r] if isinstance(r, int) else r.value for r in done.flat.outputs])
    wanted = jax.tree.leaves(fn(*map(jnp.asarray, args)))  # under `jit`, XLA ends the process for some
    for parts, whole in zip(done.result_parts or [None] * len(wanted), wanted, strict=True):
        made = [next(rest) for _ in range(1 if parts is None else parts.count)]
        got = made[0] if parts is None else jnp.concatenate(made, parts.axis)
        np.testing.assert_allclose(got, whole, rtol=tolerance, atol=tolerance)
        assert got.dtype == whole.dtype
    return done
