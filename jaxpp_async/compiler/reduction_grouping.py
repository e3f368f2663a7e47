"""Regroup reductions over values of several actors, so that each actor reduces its own values and sends one
partial result.

The pass works on the operations outside the microbatch loops, after they are placed. Trees of one associative
operation (sums, products, maxima and others) over small values, or over what was computed from the parts of
an array, are rewritten, and so are reductions of values that were stacked for this purpose, as in
`jnp.all(jnp.array([...]))`. Where small values of several actors are concatenated for something else, each
actor first concatenates its own neighbours.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from jaxpp_async.compiler.cond_split import SMALL_BYTES
from jaxpp_async.compiler.ir import Op, OuterStep, Types, replaced
from jaxpp_async.compiler.primitives import ASSOCIATIVE, JOINS_PARTS, REDUCTIONS
from jaxpp_async.program.instructions import ActorId


@dataclass(frozen=True, eq=False)
class GroupingInputs:
    """The input of `regroup_reductions`: the part of a step outside its loops, and the actors of its values.

    Args:
        step: the step, in which each loop is a single item.
        types: the type of each value; types of newly created values are added to it.
        one_actor_ops: the positions of the operations that run on exactly one actor.
        producer: a dictionary from the id of a value to the position of the operation that makes it.
        users: a dictionary from the id of a value to the positions of the operations that read it.
        where: a function that takes a value's id and returns the actors that have the value.
    """

    step: OuterStep
    types: Types
    one_actor_ops: set[int]
    producer: dict[int, int]
    users: dict[int, list[int]]
    where: Callable[[int], Set[ActorId]]

    def op(self, position: int) -> Op:
        op = self.step.items[position]
        assert isinstance(op, Op)
        return op

    def home(self, value: int) -> ActorId:
        return min(self.where(value), default=0)


def regroup_reductions(inputs: GroupingInputs) -> OuterStep | None:
    """Regroup reductions over values of several actors, so that each actor first reduces its own values.

    Returns:
        The step with regrouped reductions; None if there is nothing to regroup.
    """
    kept = {r for r in inputs.step.outputs if isinstance(r, int)}
    kept.update(v for needs in inputs.step.loop_needs.values() for v in needs)
    replacements: dict[int, list[Op]] = {}
    removed: set[int] = set()
    for root, (members, leaves) in _find_trees(inputs, kept).items():
        removed |= members
        replacements[root] = _join_by_actor(inputs, root, leaves)
    for root, stack in _find_stacked(inputs, kept).items():
        removed |= {root, stack}
        replacements[root] = _reduce_by_actor(inputs, inputs.op(root), inputs.op(stack))
    for i in sorted(inputs.one_actor_ops - removed - replacements.keys()):
        if (runs := _neighbours(inputs, inputs.op(i))) is not None:
            replacements[i] = _concatenate_by_actor(inputs, inputs.op(i), runs)
    return replaced(inputs.step, replacements, removed) if replacements else None


def _find_trees(inputs: GroupingInputs, kept: set[int]) -> dict[int, tuple[set[int], list[int]]]:
    """Find trees of operations, such as `a + b + c`, that reduce values of several actors.

    The values are small, or come from the parts of one array.

    All operations of a tree are the same associative primitive, and each tree is as large as possible.

    Args:
        inputs: the placed step.
        kept: the ids of values that loops need or that are results of the step. These values must still be
            made, so they cannot be inside a tree.

    Returns:
        A dictionary with one entry per tree. The key is the position of the operation at the root. The value
        is a pair: the positions of all operations of the tree, and the ids of the values at its leaves.
    """
    inside: set[int] = set()
    found = {}
    for i in sorted(inputs.one_actor_ops, reverse=True):
        op = inputs.op(i)
        if i in inside or not _is_sum(inputs, op):
            continue
        members, leaves, stack = {i}, [], list(reversed(op.reads))
        while stack:
            v = stack.pop()
            p = inputs.producer.get(v)
            inner = p in inputs.one_actor_ops and len(inputs.users[v]) == 1 and v not in kept
            if p is not None and inner and inputs.op(p).name == op.name and _is_sum(inputs, inputs.op(p)):
                members.add(p)
                stack += reversed(inputs.op(p).reads)
            else:
                leaves.append(v)
        inside |= members
        if len(leaves) > 2 and len({inputs.home(v) for v in leaves}) > 1:
            found[i] = (members, leaves)
    return found


def _is_sum(inputs: GroupingInputs, op: Op) -> bool:
    if op.name not in ASSOCIATIVE or len(op.inputs) != 2 or len(op.reads) != 2:
        return False
    avals = [inputs.types[v].aval for v in (*op.outputs, *op.reads)]
    is_small = inputs.types.sizes[op.outputs[0]] <= SMALL_BYTES
    return len({(a.shape, a.dtype) for a in avals}) == 1 and (is_small or JOINS_PARTS in op.params)


def _by_actor(inputs: GroupingInputs, values: Sequence[int]) -> list[list[int]]:
    groups: dict[ActorId, list[int]] = defaultdict(list)
    for v in values:
        groups[inputs.home(v)].append(v)
    return [groups[a] for a in sorted(groups)]


def _join_by_actor(inputs: GroupingInputs, root: int, leaves: list[int]) -> list[Op]:
    op = inputs.op(root)
    made: list[Op] = []

    def join(values: list[int], last: int | None) -> int:
        total = values[0]
        for k, v in enumerate(values[1:], 2):
            out = (
                last
                if last is not None and k == len(values)
                else inputs.types.new(inputs.types[op.outputs[0]], like=op.outputs[0])
            )
            made.append(Op(op.name, (total, v), (out,), op.run, op.line, op.transposed))
            total = out
        return total

    join([join(values, None) for values in _by_actor(inputs, leaves)], op.outputs[0])
    return made


# ---------------------------------------------------------------- reductions of stacked values


def _find_stacked(inputs: GroupingInputs, kept: set[int]) -> dict[int, int]:
    """Find reductions of arrays that are concatenated from small values of several actors for the reduction.

    Args:
        inputs: the placed step.
        kept: the ids of values that loops need or that are results of the step. These values must still be
            made.

    Returns:
        A dictionary. Its keys are positions of reductions; its values are the positions of the concatenations
        that they read.
    """
    found = {}
    for i in sorted(inputs.one_actor_ops):
        op = inputs.op(i)
        p = inputs.producer.get(op.reads[0]) if op.name in REDUCTIONS and len(op.reads) == 1 else None
        if p is None or inputs.op(p).name != "concatenate" or inputs.types[op.outputs[0]].aval.shape != ():
            continue
        stack = inputs.op(p)
        parts, alone = stack.reads, len(inputs.users[stack.outputs[0]]) == 1 and stack.outputs[0] not in kept
        flat = len(parts) == len(stack.inputs) > 2 and all(
            len(inputs.types[v].aval.shape) == 1 and inputs.types.sizes[v] <= SMALL_BYTES for v in parts
        )
        if alone and flat and len({inputs.home(v) for v in parts}) > 1:
            found[i] = p
    return found


def _reduce_by_actor(inputs: GroupingInputs, op: Op, stack: Op) -> list[Op]:
    made: list[Op] = []
    part_type = inputs.types[stack.reads[0]]

    def row(length: int) -> int:
        aval = structs.replace(part_type.aval, shape=(length,))
        return inputs.types.new(dataclasses.replace(part_type, aval=aval))

    def concatenated(values: Sequence[int]) -> int:
        out = row(sum(inputs.types[v].aval.shape[0] for v in values))
        made.append(Op(stack.name, tuple(values), (out,), stack.run, stack.line, stack.transposed))
        return out

    parts = []
    for values in _by_actor(inputs, stack.reads):
        total, part = inputs.types.new(inputs.types[op.outputs[0]]), row(1)
        made.append(Op(op.name, (concatenated(values),), (total,), op.run, op.line, op.transposed))
        made.append(Op("reshape", (total,), (part,), _as_row, op.line))
        parts.append(part)
    made.append(Op(op.name, (concatenated(parts),), op.outputs, op.run, op.line, op.transposed))
    return made


def _as_row(xs: Sequence[Any]) -> list[Any]:
    return [xs[0].reshape((1,))]


# ---------------------------------------------------------------- other concatenations

_SMALL_OPERAND_BYTES = 1 << 14
"""The size in bytes up to which operands are concatenated before they are sent. The copy of larger ones would
cost more than their messages."""


def _neighbours(inputs: GroupingInputs, op: Op) -> list[list[int]] | None:
    """Return the operands of a concatenation in runs that are on one actor each.

    None if the operation is no concatenation, if an operand is large, if all operands are on one actor, or if
    no two neighbours are.
    """
    if op.name != "concatenate" or len(op.reads) != len(op.inputs):
        return None
    if any(inputs.types.sizes[v] > _SMALL_OPERAND_BYTES for v in op.reads):
        return None
    runs = [list(run) for _, run in itertools.groupby(op.reads, inputs.home)]
    return runs if 1 < len(runs) < len(op.reads) else None


def _concatenate_by_actor(inputs: GroupingInputs, op: Op, runs: Sequence[list[int]]) -> list[Op]:
    types, (result,) = inputs.types, op.outputs
    whole = types[result].aval.shape
    made: list[Op] = []
    operands = []
    for run in runs:
        if len(run) == 1:
            operands += run
            continue
        shapes = [types[v].aval.shape for v in run]
        shape = tuple(
            sum(sizes) if any(size != length for size in sizes) else length
            for length, sizes in zip(whole, zip(*shapes, strict=True), strict=True)
        )
        kind = types[run[0]]
        out = types.new(dataclasses.replace(kind, aval=structs.replace(kind.aval, shape=shape)), like=run[0])
        made.append(dataclasses.replace(op, inputs=tuple(run), outputs=(out,)))
        operands.append(out)
    return [*made, dataclasses.replace(op, inputs=tuple(operands))]
