"""compiler.choices: payloads of operations that choose between branches. In: branches as flat operations. Out:
functions of arrays, to be called under a JAX trace. Runs nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpp_async import jax_compat
from jaxpp_async.compiler.evaluate import read, run_ops
from jaxpp_async.compiler.ir import Branches, Flat, Lit, Op, Ref, Types


def branches(bodies: Sequence[Flat], types: Types, *, ends: bool) -> Branches:
    """The branches of a `cond`, for passes that split it.

    Args:
        bodies: one a branch, with the same results.
        types: of every value id, also of those that bodies get later.
        ends: no branch has a `while`.
    """
    return Branches(tuple(bodies), lambda chosen: _chooser(chosen, types), _select, ends)


def _chooser(bodies: Sequence[Flat], types: Types) -> Callable[[Sequence[Any]], Sequence[Any]]:
    def run(xs: Sequence[Any]) -> Sequence[Any]:
        return lax.switch(xs[0], [_function(body, dtypes) for body in bodies], *xs[1:])

    dtypes = [_dtype(refs, types) for refs in zip(*(body.outputs for body in bodies), strict=True)]
    return run


def _dtype(refs: Sequence[Ref], types: Types) -> Any:
    """The dtype of one result, which every branch gives; None for keys."""
    value_id = next((r for r in refs if isinstance(r, int)), None)
    if value_id is None:
        return _constant_dtype(refs[0].value) if isinstance(refs[0], Lit) else None
    return None if types[value_id].key_impl else jnp.dtype(types[value_id].aval.dtype)


def _function(body: Flat, dtypes: Sequence[Any]) -> Callable[..., list[Any]]:
    def run(*args: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(body.inputs, args, strict=True))
        run_ops([op for op in body.ops if isinstance(op, Op)], env)  # no branch has a loop: tracing refuses it
        results = [read(env, r) for r in body.outputs]
        # A constant may be a Python number, whose dtype would follow the configuration.
        return [x if dtype is None else jnp.asarray(x, dtype) for x, dtype in zip(results, dtypes, strict=True)]

    return run


def _select(xs: Sequence[Any]) -> list[Any]:
    """`cases[position]`, both computed. Constants among them become arrays of the others' type."""
    position, *cases = xs
    arrays = [x for x in cases if isinstance(x, jax.Array)]
    dtype = arrays[0].dtype if arrays else _constant_dtype(cases[0])
    return [lax.select_n(position, *(x if isinstance(x, jax.Array) else jnp.asarray(x, dtype) for x in cases))]


def _constant_dtype(value: Any) -> Any:
    return jax_compat.canonical_dtype(np.asarray(value).dtype)
