"""Unroll `scan` equations that contain stage markers, and split scans of a backward task into two scans.

A scan with markers is unrolled into flat operations, one iteration after the other. The compiler then knows
each element of the values that the scan stacks over layers. So the backward of a layer reads the elements of
its layer directly, and a stack that no operation reads as a whole is never made.

A scan in a stage's backward is split when the backward is split into its input-gradient and weight-gradient
halves: one scan makes the results that are wanted first, and another makes the rest. The values that the
second scan needs from the first are stacked over iterations. Only cheap operations are computed in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpp_async.compiler.evaluate import read_operand, run_ops, value_type
from jaxpp_async.compiler.ir import Flat, Lit, Op, Ref, Types, ValueType, outside_reads, stacked_type
from jaxpp_async.compiler.ir_slicing import LightOps, split_needed
from jaxpp_async.compiler.primitives import INDEX, STACK
from jaxpp_async.jax_bridge import private_api


@dataclass(frozen=True, slots=True)
class Where:
    """The origin of an equation: the user's source line, and the kinds of code that contain it.

    Args:
        line: the `file:line` in the user's code.
        transposed: whether reverse-mode differentiation made the equation.
        in_loop: whether the equation is in the body of an `accumulate_grads`.
    """

    line: str
    transposed: bool = False
    in_loop: bool = False


class Flattener(Protocol):
    """An interface to the tracer (`trace._Flattener`), which translates jaxprs to flat operations.

    This module calls the tracer on the jaxprs inside `scan` equations.
    """

    types: Types
    stacks: dict[int, list[Ref]]
    """The values that unrolled scans stacked over layers. Keys are ids; values list the layers' values."""

    def flatten_body(self, closed: Any, where: Where) -> Flat: ...

    def inline(self, closed: Any, inputs: Sequence[Ref], ops: list, where: Where) -> list[Ref]: ...

    def known_integers(self, ref: Ref) -> np.ndarray | None: ...


# ---------------------------------------------------------------- unrolling


def reads_stacks(flattener: Flattener, eqn: Any, inputs: Sequence[Ref]) -> bool:
    """Return whether a scan iterates over a stack that an unrolled scan made.

    The elements of such a stack are known as separate values, and need not be read from the stack.
    """
    stacked = inputs[private_api.scan_parts(eqn).first_x :]
    return any(r in flattener.stacks for r in stacked if isinstance(r, int))


def unroll(flattener: Flattener, eqn: Any, inputs: Sequence[Ref], ops: list, where: Where) -> list[Ref]:
    """Unroll a scan: append the operations of its iterations to `ops`, one iteration after the other.

    Args:
        flattener: the tracer.
        eqn: the `scan` equation.
        inputs: the operands of the equation.
        ops: the list of operations to append to.
        where: the origin of the equation.

    Returns:
        The results of the scan: the final carries, then the stacked results.
    """
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
        ops.append(
            Op(STACK, tuple(flattener.stacks[made]), (made,), stack_rows, where.line, where.transposed)
        )
        stacked.append(made)
    return [*carry, *stacked]


def _element(flattener: Flattener, stack: Ref, i: int, element: ValueType, ops: list, line: str) -> Ref:
    """Return the i-th element of a value that is stacked over the iterations of a scan.

    If an unrolled scan made the stack, the element is known. Otherwise, append an operation to `ops` that
    reads the element from the stack.

    Args:
        flattener: the tracer, which knows the elements of some stacks.
        stack: the stacked value.
        i: the index of the element.
        element: the type of the element.
        ops: the list of operations to append to.
        line: the `file:line` in the user's code.
    """
    if isinstance(stack, int) and stack in flattener.stacks:
        return flattener.stacks[stack][i]
    known = flattener.known_integers(stack)
    if known is not None and known.ndim == 1:
        return Lit(known[i])
    made = flattener.types.new(element)
    ops.append(Op(INDEX, (stack,), (made,), partial(pick_row, i), line))
    return made


def stack_rows(xs: Sequence[Any]) -> list[Any]:
    """Stack values along a new leading axis; this is the `Op.run` of the operation `STACK`."""
    return [jnp.stack(xs)]


def pick_row(i: int, xs: Sequence[Any]) -> list[Any]:
    """Return row `i` of the leading axis; a `functools.partial` of it is the `Op.run` of `INDEX`."""
    return [lax.index_in_dim(xs[0], i, 0, keepdims=False)]


# ---------------------------------------------------------------- splitting


def split(flattener: Flattener, scan: Any, op: Op, wanted: frozenset[int]) -> tuple[Op, Op] | None:
    """Split a scan into one that makes the wanted results and one that makes the others.

    This implements `Op.split` for scans. The values that the second scan needs from the first are stacked
    over iterations. Only cheap operations are computed in both.

    Args:
        flattener: the tracer.
        scan: the `ScanParts` of the equation.
        op: the scan as one operation.
        wanted: the positions of the results that are wanted first.

    Returns:
        The scan that makes the wanted results, and the scan that makes all others. None if there are no
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
    """Split a scan's body into the operations that the wanted results need and the others.

    If the first half reads a carry, it also makes the carry's next value, which it reads in the next
    iteration.

    Args:
        body: the scan's body.
        starts: the ids of the carries in the body, as they are at the start of an iteration.
        wanted: the positions of the results that the first half has to make.

    Returns:
        The operations of the first half, those of the second half, and the positions of the carries that the
        first half makes.
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
    """Return one of the two scans that a scan is split into, as one operation.

    Args:
        scan: the `ScanParts` of the scan that is split.
        body: the body of the scan that is split.
        op: the scan that is split.
        ops: the operations of `body` that this half runs.
        results: the positions of the scan's results that this half makes.
        takes: a dictionary for the values that the other half makes and this half reads. Its keys are the ids
            of these values in the body; its values are the ids of their stacks over all iterations.
        gives: a dictionary of the same form, for the values that this half makes and the other half reads.
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
    """A scan that runs some of the operations of another scan's body, with the value ids of this body.

    Args:
        consts: the ids of the values that all iterations share.
        carry: for each carry, a pair: the carry's id at the start of an iteration, and its value at the end.
        xs: the ids of one iteration's elements of the stacked operands.
        ops: the operations of one iteration, in program order.
        ys: the values that become one iteration's elements of the stacked results.
        length: the number of iterations.
        reverse: whether the iterations run from the last element to the first.
    """

    consts: tuple[int, ...]
    carry: tuple[tuple[int, Ref], ...]
    xs: tuple[int, ...]
    ops: tuple[Op, ...]
    ys: tuple[Ref, ...]
    length: int
    reverse: bool

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Run the scan under a JAX trace, and return the final carries followed by the stacked results.

        Args:
            arrays: the constants, then the initial carries, then the stacked operands.
        """
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
