"""compiler.scans: `scan` equations with markers in, flat operations out, an iteration after the other.

A value stacked over layers is known by its elements: what one layer keeps for its own backward pass goes
straight there, and a stack that nobody reads whole is never made. Runs nothing by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from jaxpp_async import jax_compat
from jaxpp_async.compiler.avals import value_type
from jaxpp_async.compiler.ir import Op, Ref, Types, ValueType
from jaxpp_async.compiler.primitives import INDEX, STACK


@dataclass(frozen=True, slots=True)
class Where:
    """Where an equation stands.

    Args:
        line: `file:line` of the user.
        transposed: made by reverse-mode differentiation.
        in_loop: in the body of an `accumulate_grads`.
    """

    line: str
    transposed: bool = False
    in_loop: bool = False


class Flattener(Protocol):
    """What flattens the jaxprs inside an equation (`tracing`)."""

    types: Types
    stacks: dict[int, list[Ref]]
    """Values stacked over layers, by their elements."""

    def inline(self, jaxpr: Any, consts: Sequence[Any], env: dict[Any, Ref], ops: list, where: Where) -> list[Ref]: ...


def reads_stacks(flattener: Flattener, eqn: Any, inputs: Sequence[Ref]) -> bool:
    """Whether a scan goes over values that are known by their elements."""
    return any(r in flattener.stacks for r in inputs[jax_compat.scan_parts(eqn).first_x :] if isinstance(r, int))


def unrolled(flattener: Flattener, eqn: Any, inputs: Sequence[Ref], ops: list, where: Where) -> list[Ref]:
    """Append a scan's iterations to `ops`, one after the other. Returns its results."""
    loop = jax_compat.scan_parts(eqn)
    jaxpr, consts = jax_compat.open_jaxpr(loop.body)
    shared, carry = list(inputs[: loop.num_consts]), list(inputs[loop.num_consts : loop.first_x])
    rows: list[list[Ref]] = [[] for _ in range(loop.length)]
    element_types = [value_type(v.aval) for v in jaxpr.invars[loop.first_x :]]
    for i in reversed(range(loop.length)) if loop.reverse else range(loop.length):
        xs = [
            _element(flattener, x, i, t, ops, where.line)
            for x, t in zip(inputs[loop.first_x :], element_types, strict=True)
        ]
        env = dict(zip(jaxpr.invars, [*shared, *carry, *xs], strict=True))
        results = flattener.inline(jaxpr, consts, env, ops, where)
        carry, rows[i] = results[: loop.num_carry], results[loop.num_carry :]
    stacked = []
    for k, var in enumerate(eqn.outvars[loop.num_carry :]):
        made = flattener.types.new(value_type(var.aval))
        flattener.stacks[made] = [row[k] for row in rows]
        ops.append(Op(STACK, tuple(flattener.stacks[made]), (made,), _stack, where.line, where.transposed))
        stacked.append(made)
    return [*carry, *stacked]


def _element(flattener: Flattener, stack: Ref, i: int, element: ValueType, ops: list, line: str) -> Ref:
    if isinstance(stack, int) and stack in flattener.stacks:
        return flattener.stacks[stack][i]
    made = flattener.types.new(element)
    ops.append(Op(INDEX, (stack,), (made,), partial(_index, i), line))
    return made


def _stack(xs: Sequence[Any]) -> list[Any]:
    return [jnp.stack(xs)]


def _index(i: int, xs: Sequence[Any]) -> list[Any]:
    return [lax.index_in_dim(xs[0], i, 0, keepdims=False)]
