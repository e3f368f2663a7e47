"""Take `scan` equations apart: unroll one over stages, or split one between the two halves of a backward.

A scan with markers is unrolled into flat operations, one iteration after the other. A value stacked over
layers is then known by its elements: the value that one layer keeps for its own backward goes straight there,
and a stack that no operation reads whole is never made.

A scan in a stage's backward is split into one scan for the results that are wanted first and one for the
others. The values that the second scan needs of the first are stacked over iterations. Only light operations
are computed in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from jaxpp_async.compiler.evaluate import read_operand, run_ops, value_type
from jaxpp_async.compiler.ir import Flat, Op, Ref, Types, ValueType, outside_reads, stacked_type
from jaxpp_async.compiler.ir_slicing import LightOps, split_needed
from jaxpp_async.compiler.primitives import INDEX, STACK
from jaxpp_async.jax_bridge import private_api


@dataclass(frozen=True, slots=True)
class Where:
    """The place where an equation stands.

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
    """The elements of values that unrolled scans stack over layers."""

    def flatten_body(self, closed: Any, where: Where) -> Flat: ...

    def inline(self, closed: Any, inputs: Sequence[Ref], ops: list, where: Where) -> list[Ref]: ...


# ---------------------------------------------------------------- unrolling


def reads_stacks(flattener: Flattener, eqn: Any, inputs: Sequence[Ref]) -> bool:
    """Say whether a scan runs over values that are known by their elements."""
    stacked = inputs[private_api.scan_parts(eqn).first_x :]
    return any(r in flattener.stacks for r in stacked if isinstance(r, int))


def unroll(flattener: Flattener, eqn: Any, inputs: Sequence[Ref], ops: list, where: Where) -> list[Ref]:
    """Append a scan's iterations to `ops`, one after the other. Returns its results."""
    scan = private_api.scan_parts(eqn)
    shared, carry = inputs[: scan.num_consts], list(inputs[scan.num_consts : scan.first_x])
    rows: list[list[Ref]] = [[] for _ in range(scan.length)]
    variables = private_api.open_jaxpr(scan.body)[0].invars[scan.first_x :]
    stacks = [(x, value_type(v.aval)) for x, v in zip(inputs[scan.first_x :], variables, strict=True)]
    for i in reversed(range(scan.length)) if scan.reverse else range(scan.length):
        xs = [_element(flattener, x, i, t, ops, where.line) for x, t in stacks]
        results = flattener.inline(scan.body, [*shared, *carry, *xs], ops, where)
        carry, rows[i] = results[: scan.num_carry], results[scan.num_carry :]
    stacked = []
    for k, var in enumerate(eqn.outvars[scan.num_carry :]):
        made = flattener.types.new(value_type(var.aval))
        flattener.stacks[made] = [row[k] for row in rows]
        ops.append(Op(STACK, tuple(flattener.stacks[made]), (made,), _stack, where.line, where.transposed))
        stacked.append(made)
    return [*carry, *stacked]


def _element(flattener: Flattener, stack: Ref, i: int, element: ValueType, ops: list, line: str) -> Ref:
    """Return the i-th element of a value stacked over layers, indexing it where its elements are not
    known."""
    if isinstance(stack, int) and stack in flattener.stacks:
        return flattener.stacks[stack][i]
    made = flattener.types.new(element)
    ops.append(Op(INDEX, (stack,), (made,), partial(_index, i), line))
    return made


def _stack(xs: Sequence[Any]) -> list[Any]:
    return [jnp.stack(xs)]


def _index(i: int, xs: Sequence[Any]) -> list[Any]:
    return [lax.index_in_dim(xs[0], i, 0, keepdims=False)]


# ---------------------------------------------------------------- splitting


def split(flattener: Flattener, scan: Any, op: Op, wanted: frozenset[int]) -> tuple[Op, Op] | None:
    """Split a scan into two, as `Op.split` asks.

    The values that the second scan needs of the first are stacked over iterations. Only light operations are
    computed in both.

    Args:
        scan: the `ScanParts` of the equation.
        op: the scan.
        wanted: positions of the results that are wanted first.

    Returns:
        The scan that makes the wanted results and the scan that makes the others; None if there are no
        others.
    """
    body = flattener.flatten_body(scan.body, Where(op.line, op.transposed, in_loop=True))
    starts = body.inputs[scan.num_consts : scan.first_x]
    first, second, early_carry = _split_body(body, starts, wanted)
    if not second:
        return None
    made_first = {o for x in first for o in x.outputs}
    early = [
        k
        for k, result in enumerate(body.outputs)
        if (k in early_carry if k < scan.num_carry else k in wanted or result in made_first)
    ]
    late = [k for k in range(len(body.outputs)) if k not in early]
    returned = [body.outputs[k] for k in late]
    held = {*body.inputs[: scan.num_consts], *body.inputs[scan.first_x :]}
    light = LightOps.among(first, held)
    second = [*light.needed(outside_reads(second, returned)).values(), *second]
    held |= {starts[k] for k in late if k < scan.num_carry}
    types = flattener.types
    stacks = {
        v: types.new(stacked_type(types[v], scan.length))
        for v in outside_reads(second, returned)
        if v not in held
    }
    return (
        _half_scan(scan, body, op, first, early, gives=stacks),
        _half_scan(scan, body, op, second, late, takes=stacks),
    )


def _split_body(
    body: Flat, starts: Sequence[int], wanted: frozenset[int]
) -> tuple[list[Op], list[Op], set[int]]:
    """Split a scan's body. A carry that the first half reads is computed by the first half in every
    iteration.

    Args:
        starts: the body's ids of the carries at the start of an iteration.
        wanted: positions of results.

    Returns:
        The operations of the first and of the second half, and the positions of the first half's carries.
    """
    ops = [x for x in body.ops if isinstance(x, Op)]
    early = {k for k in wanted if k < len(starts)}
    while True:
        needed = {r for k in (*early, *wanted) if isinstance(r := body.outputs[k], int)}
        first, second = split_needed(ops, needed)
        read = needed | {r for x in first for r in x.reads}
        more = {k for k, v in enumerate(starts) if v in read} - early
        if not more:
            return first, second, early
        early |= more


def _half_scan(
    scan: Any,
    body: Flat,
    op: Op,
    ops: Sequence[Op],
    results: Sequence[int],
    *,
    takes: Mapping[int, int] = MappingProxyType({}),
    gives: Mapping[int, int] = MappingProxyType({}),
) -> Op:
    """Make the scan over some operations of another scan's body.

    Args:
        op: the other scan.
        ops: operations of its body.
        results: positions of the results to make.
        takes, gives: values of the body (by id) that travel from the first half to the second, with the id of
            their stack.
    """
    carried = [k for k in results if k < scan.num_carry]
    ys = [k for k in results if k >= scan.num_carry]
    reads = {r for x in ops for r in x.reads}.union(gives, (body.outputs[k] for k in results))
    consts = [k for k in range(scan.num_consts) if body.inputs[k] in reads]
    xs = [k for k in range(scan.first_x, len(body.inputs)) if body.inputs[k] in reads]
    half = _HalfScan(
        consts=tuple(body.inputs[k] for k in consts),
        carry=tuple((body.inputs[scan.num_consts + k], body.outputs[k]) for k in carried),
        xs=(*(body.inputs[k] for k in xs), *takes),
        ops=tuple(ops),
        ys=(*(body.outputs[k] for k in ys), *gives),
        length=scan.length,
        reverse=scan.reverse,
    )
    positions = [*consts, *(scan.num_consts + k for k in carried), *xs]
    return replace(
        op,
        inputs=(*(op.inputs[k] for k in positions), *takes.values()),
        outputs=(*(op.outputs[k] for k in (*carried, *ys)), *gives.values()),
        run=half.run,
        split=None,
    )


@dataclass(frozen=True, eq=False)
class _HalfScan:
    """A scan over some of the operations of another scan's body. Ids are those of the body.

    Args:
        consts: values shared by all iterations.
        carry: pairs of a carry's id at the start of an iteration, and its value at the end.
        xs: elements of stacked operands.
        ops: in program order.
        ys: elements of stacked results.
        length: number of iterations.
        reverse: the iterations run backward.
    """

    consts: tuple[int, ...]
    carry: tuple[tuple[int, Ref], ...]
    xs: tuple[int, ...]
    ops: tuple[Op, ...]
    ys: tuple[Ref, ...]
    length: int
    reverse: bool

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Run the scan on constants, initial carries and stacked operands. Returns final carries and
        stacked results."""
        first_carry, first_x = len(self.consts), len(self.consts) + len(self.carry)

        def iteration(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            starts = (start for start, _ in self.carry)
            env = dict(
                zip((*self.consts, *starts, *self.xs), (*arrays[:first_carry], *carry, *xs), strict=True)
            )
            run_ops(self.ops, env)
            ends = [
                _as_dtype(read_operand(env, end), old.dtype)
                for (_, end), old in zip(self.carry, carry, strict=True)
            ]
            return ends, [_as_array(read_operand(env, y)) for y in self.ys]

        init, xs = list(arrays[first_carry:first_x]), list(arrays[first_x:])
        carry, ys = lax.scan(iteration, init, xs, length=self.length, reverse=self.reverse)
        return [*carry, *ys]


def _as_array(x: Any) -> Any:
    return x if hasattr(x, "aval") else jnp.asarray(x)


def _as_dtype(x: Any, dtype: Any) -> Any:
    return x if private_api.is_key_dtype(dtype) else jnp.asarray(x, dtype)
