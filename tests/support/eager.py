"""Plain JAX without compiling programs: a jaxpr is evaluated operation by operation, loops and branches in
Python.

A compiled operation of one shape serves every program that has it, so a new program costs milliseconds. In: a
function and its arguments, or `with control_flow():` around anything that runs operations eagerly. Out: what
`jax.jit` gives, in the order of the program as it is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.ad_checkpoint import remat_p
from jax._src.lax.control_flow.conditionals import cond_p
from jax._src.lax.control_flow.loops import scan_p, while_p

from jaxpp_async.jax_bridge import private_api
from jaxpp_async.markers import markers
from jaxpp_async.markers.reductions import Concat, Max, Mean, Min, Stack


def run_eagerly(fn: Callable, *args: Any) -> Any:
    """`fn(*args)`. `accumulate_grads` is a Python loop, its reductions numpy's."""
    return Once(fn, *args).run(*args)


class Once:
    """A function, traced once: half of what a new program costs is tracing it. Calling it repeats its
    operations."""

    def __init__(self, fn: Callable, *args: Any):
        self._closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        self._tree = jax.tree.structure(shapes)

    def __call__(self, *args: Any) -> Any:
        return jax.tree.unflatten(self._tree, private_api.closed_call(self._closed, jax.tree.leaves(args)))

    def run(self, *args: Any) -> Any:
        """The same, eagerly."""
        leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in jax.tree.leaves(args)]
        with control_flow():
            results = _closed(self._closed, leaves)
        return jax.tree.unflatten(self._tree, [jnp.asarray(x) for x in results])


@contextlib.contextmanager
def control_flow() -> Iterator[None]:
    """Within it, scans, loops and branches that run eagerly are not compiled as a whole."""
    ours = {scan_p: _scan, while_p: _while, cond_p: _cond, remat_p: _remat, markers.loop_p: _loop}
    before = {primitive: primitive.impl for primitive in ours}
    for primitive, impl in ours.items():
        primitive.impl = impl
    try:
        yield
    finally:
        for primitive, impl in before.items():
            primitive.impl = impl


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, private_api.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        inner = private_api.inner_jaxpr(eqn) if eqn.primitive.name in _CALLS else None
        results = (
            _evaluate(inner.jaxpr, inner.consts, operands)
            if inner is not None
            else private_api.bind_eqn(eqn, operands)
        )
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "eval_jaxpr",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "checkpoint",
)


def _closed(closed: Any, args: Sequence[Any]) -> list[Any]:
    return _evaluate(closed.jaxpr, closed.consts, args)


def _remat(*args, jaxpr, **_):
    return _evaluate(jaxpr, (), args)


def _cond(index, *args, branches, **_):
    return _closed(branches[min(max(int(index), 0), len(branches) - 1)], args)


def _while(*args, cond_nconsts, cond_jaxpr, body_nconsts, body_jaxpr, **_):
    conditions, consts = args[:cond_nconsts], args[cond_nconsts : cond_nconsts + body_nconsts]
    carry = list(args[cond_nconsts + body_nconsts :])
    while np.any(going := np.asarray(_closed(cond_jaxpr, [*conditions, *carry])[0])):
        new = _closed(body_jaxpr, [*consts, *carry])
        # Under vmap every row ends on its own.
        rows = [going.reshape(going.shape + (1,) * (np.ndim(x) - going.ndim)) for x in carry]
        carry = [jnp.where(r, n, c) for r, n, c in zip(rows, new, carry, strict=True)] if going.ndim else new
    return carry


def _scan(*args, **params):
    parts = private_api.scan_parts(SimpleNamespace(params=params, invars=args))
    num_consts, num_carry, length = parts.num_consts, parts.num_carry, parts.length
    consts, carry = args[:num_consts], list(args[num_consts : parts.first_x])
    rows: list[list[Any]] = [[]] * length
    for i in reversed(range(length)) if parts.reverse else range(length):
        xs = [_at(x, i) for x in args[parts.first_x :]]
        carry, rows[i] = _split(_closed(parts.body, [*consts, *carry, *xs]), num_carry)
    empty = [jnp.zeros((0, *a.shape), a.dtype) for a in parts.body.out_avals[num_carry:]]
    return [*carry, *([jnp.stack(column) for column in zip(*rows, strict=True)] or empty)]


def _split(values: list[Any], at: int) -> tuple[list[Any], list[Any]]:
    return values[:at], values[at:]


def _at(x: Any, i: int) -> Any:
    if private_api.is_key_dtype(x.dtype):
        return x[i]
    return jnp.asarray(np.asarray(x)[i])  # an index that is part of the program would be compiled once each


def _loop(*operands, spec):
    consts, batch = operands[: spec.num_consts], operands[spec.num_consts :]
    rows = [
        _closed(spec.body, [*consts, *[_at(x, i) for x in batch], jnp.int32(i)])
        for i in range(spec.num_microbatches)
    ]
    return [
        _reduced(r, [jnp.asarray(x) for x in column])
        for r, column in zip(spec.reductions, zip(*rows, strict=True), strict=True)
    ]


def _reduced(reduction: Any, column: Sequence[Any]) -> Any:
    """All microbatches' values of one result, joined in order, in their own dtype."""
    if isinstance(reduction, Stack):
        return jnp.stack(column)
    if isinstance(reduction, Concat):
        return jnp.concatenate(column, reduction.axis)
    arrays = [np.asarray(x) for x in column]
    joins = {Max: np.maximum, Min: np.minimum}
    total = arrays[0]
    for x in arrays[1:]:
        total = joins.get(type(reduction), np.add)(total, x)
    if isinstance(reduction, Mean):
        total = total / np.asarray(len(arrays), total.dtype)
    return jnp.asarray(total)
