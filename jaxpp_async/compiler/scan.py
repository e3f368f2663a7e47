"""compiler.scans: `scan` equations with markers in, flat operations out, an iteration after the other.

A value stacked over layers is known by its elements: what one layer keeps for its own backward pass goes
straight there, and a stack that nobody reads whole is never made. Runs nothing by itself.

compiler.scan_halves: a `scan` in a stage's backward in; out: one for the results that are wanted first, and one for
the others. Runs nothing by itself.

What the second needs of the first is stacked over iterations; nothing is computed in both but light operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from jaxpp_async.compiler.evaluate import read, run_ops, value_type
from jaxpp_async.compiler.ir import Flat, Op, Ref, Types, ValueType, stacked_type
from jaxpp_async.compiler.ir_slicing import LightOps, cut
from jaxpp_async.compiler.primitives import INDEX, STACK
from jaxpp_async.compiler.recipes import outside_reads
from jaxpp_async.jax_bridge import private_api


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
    """The part of the tracer that flattens the jaxprs inside an equation."""

    types: Types
    stacks: dict[int, list[Ref]]
    """Values stacked over layers, by their elements."""

    def body(self, closed: Any, where: Where) -> Flat: ...

    def inline(
        self, jaxpr: Any, consts: Sequence[Any], env: dict[Any, Ref], ops: list, where: Where
    ) -> list[Ref]: ...


def reads_stacks(flattener: Flattener, eqn: Any, inputs: Sequence[Ref]) -> bool:
    """Whether a scan goes over values that are known by their elements."""
    return any(
        r in flattener.stacks for r in inputs[private_api.scan_parts(eqn).first_x :] if isinstance(r, int)
    )


def unrolled(flattener: Flattener, eqn: Any, inputs: Sequence[Ref], ops: list, where: Where) -> list[Ref]:
    """Append a scan's iterations to `ops`, one after the other. Returns its results."""
    loop = private_api.scan_parts(eqn)
    jaxpr, consts = private_api.open_jaxpr(loop.body)
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


# ---------------------------------------------------------------- scan halves


@dataclass(frozen=True, eq=False)
class _Half:
    """A scan over some of the values of another one's body. Ids are of the body."""

    consts: tuple[int, ...]
    carry: tuple[tuple[int, Ref], ...]  # id at the start of an iteration, and at its end
    xs: tuple[int, ...]
    ops: tuple[Op, ...]
    ys: tuple[Ref, ...]
    length: int
    reverse: bool

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Constants, initial carries and stacked operands to final carries and stacked results."""
        first_carry, first_x = len(self.consts), len(self.consts) + len(self.carry)

        def iteration(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            env = dict(zip(self.consts, arrays[:first_carry], strict=True))
            env.update(zip((start for start, _ in self.carry), carry, strict=True))
            env.update(zip(self.xs, xs, strict=True))
            run_ops(self.ops, env)
            ends = [_as(read(env, end), old.dtype) for (_, end), old in zip(self.carry, carry, strict=True)]
            return ends, [_array(read(env, y)) for y in self.ys]

        init = list(arrays[first_carry:first_x])
        carry, ys = lax.scan(
            iteration, init, list(arrays[first_x:]), length=self.length, reverse=self.reverse
        )
        return [*carry, *ys]


def _array(x: Any) -> Any:
    return x if hasattr(x, "aval") else jnp.asarray(x)


def _as(x: Any, dtype: Any) -> Any:
    return x if private_api.is_key_dtype(dtype) else jnp.asarray(x, dtype)


def splitter(flattener: Flattener, eqn: Any) -> Callable[[Op, frozenset[int]], tuple[Op, Op] | None]:
    """What `Op.split` is for a scan: positions of wanted results to the scan that makes them and the scan of the rest.

    What the second needs of the first is stacked over iterations; nothing is computed in both but light operations.
    """
    return partial(_split, flattener, private_api.scan_parts(eqn))


def _split(flattener: Flattener, loop: Any, op: Op, wanted: frozenset[int]) -> tuple[Op, Op] | None:
    body = flattener.body(loop.body, Where(op.line, op.transposed, in_loop=True))
    starts = body.inputs[loop.num_consts : loop.first_x]
    ends = body.outputs[: loop.num_carry]
    first, second, early_carry = _cut_body(body, starts, ends, wanted)
    if not second:
        return None
    early = [
        k for k in range(len(body.outputs)) if _is_early(k, body, first, early_carry, wanted, loop.num_carry)
    ]
    late = [k for k in range(len(body.outputs)) if k not in early]
    returned = [body.outputs[k] for k in late]
    light = LightOps.among(first, {*body.inputs[: loop.num_consts], *body.inputs[loop.first_x :]})
    second = [*light.needed(outside_reads(second, returned)).values(), *second]
    held = {*body.inputs[: loop.num_consts], *body.inputs[loop.first_x :]}
    held |= {starts[k] for k in late if k < loop.num_carry}
    crossing = [r for r in outside_reads(second, returned) if r not in held]
    types = flattener.types
    stacked = [types.new(stacked_type(types[v], loop.length)) for v in crossing]
    halves = _Maker(loop, body, op)
    return (
        halves.make(first, early, (), (), tuple(crossing), tuple(stacked)),
        halves.make(second, late, tuple(crossing), tuple(stacked), (), ()),
    )


def _cut_body(
    body: Flat, starts: Sequence[int], ends: Sequence[Ref], wanted: frozenset[int]
) -> tuple[list[Op], list[Op], set[int]]:
    """Cut the body; a carry that the first half reads is the first half's in every iteration."""
    ops = [x for x in body.ops if isinstance(x, Op)]
    early = {k for k in wanted if k < len(ends)}
    while True:
        needed = {r for k in (*early, *wanted) if isinstance(r := body.outputs[k], int)}
        first, second = cut(ops, needed)
        read = needed | {r for x in first for r in x.reads}
        more = {k for k, v in enumerate(starts) if v in read} - early
        if not more:
            return first, second, early
        early |= more


def _is_early(
    k: int, body: Flat, first: Sequence[Op], early_carry: set[int], wanted: frozenset[int], num_carry: int
) -> bool:
    if k < num_carry:
        return k in early_carry
    return k in wanted or body.outputs[k] in {o for x in first for o in x.outputs}


@dataclass(frozen=True, eq=False)
class _Maker:
    """Makes the operations of the two halves of the scan `op`."""

    loop: Any
    body: Flat
    op: Op

    def make(
        self,
        ops: Sequence[Op],
        outputs: Sequence[int],
        taken: tuple[int, ...],
        taken_stacks: tuple[int, ...],
        given: tuple[int, ...],
        given_stacks: tuple[int, ...],
    ) -> Op:
        """The scan that makes the results `outputs` (positions), takes some stacked values and gives others."""
        loop, body, op = self.loop, self.body, self.op
        carried = [k for k in outputs if k < loop.num_carry]
        ys = [k for k in outputs if k >= loop.num_carry]
        reads = {r for x in ops for r in x.reads} | {
            r for k in outputs if isinstance(r := body.outputs[k], int)
        }
        reads |= set(given)
        consts = [k for k in range(loop.num_consts) if body.inputs[k] in reads]
        xs = [k for k in range(loop.first_x, len(body.inputs)) if body.inputs[k] in reads]
        half = _Half(
            consts=tuple(body.inputs[k] for k in consts),
            carry=tuple((body.inputs[loop.num_consts + k], body.outputs[k]) for k in carried),
            xs=(*(body.inputs[k] for k in xs), *taken),
            ops=tuple(ops),
            ys=(*(body.outputs[k] for k in ys), *given),
            length=loop.length,
            reverse=loop.reverse,
        )
        positions = [*consts, *(loop.num_consts + k for k in carried), *xs]
        return replace(
            op,
            inputs=(*(op.inputs[k] for k in positions), *taken_stacks),
            outputs=(*(op.outputs[k] for k in (*carried, *ys)), *given_stacks),
            run=half.run,
            split=None,
        )
