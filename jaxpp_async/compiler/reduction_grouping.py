"""compiler.regroup: sums over values of several actors, so that each actor joins its own and only the parts meet.

In: a placed outer step. Out: the same with such sums (products, maxima, ...) of small values written anew: trees of one
operation, and reductions of what was stacked from them, as in `jnp.all(jnp.array([...]))`. No jax.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jaxpp_async.compiler.cond_split import SMALL_BYTES
from jaxpp_async.compiler.ir import Op, Types
from jaxpp_async.compiler.outer_ops import OuterStep, replaced
from jaxpp_async.compiler.primitives import ASSOCIATIVE, REDUCTIONS
from jaxpp_async.program.instructions import ActorId


@dataclass(frozen=True, eq=False)
class GroupingInputs:
    """What regrouping looks at.

    Args:
        step: the outer step.
        types: of every value id.
        single: positions of the operations that run on one actor.
        producer: value id to the position of what makes it.
        users: value id to the positions of what reads it.
        where: a value's actors.
    """

    step: OuterStep
    types: Types
    single: set[int]
    producer: dict[int, int]
    users: dict[int, list[int]]
    where: Callable[[int], Set[ActorId]]

    def op(self, position: int) -> Op:
        op = self.step.items[position]
        assert isinstance(op, Op)
        return op

    def home(self, value: int) -> ActorId:
        return min(self.where(value), default=0)


def regroup(seen: GroupingInputs) -> OuterStep | None:
    """The step with its sums regrouped; None if there are none."""
    kept = {r for r in seen.step.outputs if isinstance(r, int)}
    kept.update(v for needs in seen.step.loop_needs.values() for v in needs)
    others: dict[int, list[Op]] = {}
    removed: set[int] = set()
    for root, (members, leaves) in _trees(seen, kept).items():
        removed |= members
        others[root] = _joined(seen, root, leaves)
    for root, stack in _stacked(seen, kept).items():
        removed |= {root, stack}
        others[root] = _reduced(seen, seen.op(root), seen.op(stack))
    return replaced(seen.step, others, removed) if others else None


def _trees(seen: GroupingInputs, kept: set[int]) -> dict[int, tuple[set[int], list[int]]]:
    """Maximal trees of one associative operation over small values that live on several actors."""
    inside: set[int] = set()
    found = {}
    for i in sorted(seen.single, reverse=True):
        op = seen.op(i)
        if op.name not in ASSOCIATIVE or i in inside or not _is_sum(seen, op):
            continue
        members, leaves, stack = {i}, [], list(reversed(op.reads))
        while stack:
            v = stack.pop()
            p = seen.producer.get(v)
            inner = p in seen.single and len(seen.users[v]) == 1 and v not in kept
            if p is not None and inner and seen.op(p).name == op.name and _is_sum(seen, seen.op(p)):
                members.add(p)
                stack += reversed(seen.op(p).reads)
            else:
                leaves.append(v)
        inside |= members
        if len(leaves) > 2 and len({seen.home(v) for v in leaves}) > 1:
            found[i] = (members, leaves)
    return found


def _is_sum(seen: GroupingInputs, op: Op) -> bool:
    if op.name not in ASSOCIATIVE or len(op.inputs) != 2 or len(op.reads) != 2:
        return False
    if seen.types.sizes[op.outputs[0]] > SMALL_BYTES:
        return False
    out = seen.types[op.outputs[0]].aval
    return all(
        seen.types[r].aval.shape == out.shape and seen.types[r].aval.dtype == out.dtype for r in op.reads
    )


def _by_actor(seen: GroupingInputs, values: Sequence[int]) -> list[list[int]]:
    groups: dict[ActorId, list[int]] = defaultdict(list)
    for v in values:
        groups[seen.home(v)].append(v)
    return [groups[a] for a in sorted(groups)]


def _joined(seen: GroupingInputs, root: int, leaves: list[int]) -> list[Op]:
    op = seen.op(root)
    made: list[Op] = []

    def join(values: list[int], last: int | None) -> int:
        total = values[0]
        for k, v in enumerate(values[1:], 2):
            out = last if last is not None and k == len(values) else seen.types.new(seen.types[op.outputs[0]])
            made.append(Op(op.name, (total, v), (out,), op.run, op.line, op.transposed))
            total = out
        return total

    join([join(values, None) for values in _by_actor(seen, leaves)], op.outputs[0])
    return made


# ---------------------------------------------------------------- what is stacked, then reduced


def _stacked(seen: GroupingInputs, kept: set[int]) -> dict[int, int]:
    """Reductions to a scalar of small values that were concatenated for it: position of both operations."""
    found = {}
    for i in sorted(seen.single):
        op = seen.op(i)
        if op.name not in REDUCTIONS:
            continue
        p = seen.producer.get(op.reads[0]) if len(op.reads) == 1 else None
        if p is None or seen.op(p).name != "concatenate" or seen.types[op.outputs[0]].aval.shape != ():
            continue
        stack = seen.op(p)
        parts, alone = stack.reads, len(seen.users[stack.outputs[0]]) == 1 and stack.outputs[0] not in kept
        flat = len(parts) == len(stack.inputs) > 2 and all(
            len(seen.types[v].aval.shape) == 1 and seen.types.sizes[v] <= SMALL_BYTES for v in parts
        )
        if alone and flat and len({seen.home(v) for v in parts}) > 1:
            found[i] = p
    return found


def _reduced(seen: GroupingInputs, op: Op, stack: Op) -> list[Op]:
    made: list[Op] = []
    part_type = seen.types[stack.reads[0]]

    def row(length: int) -> int:
        return seen.types.new(
            dataclasses.replace(part_type, aval=dataclasses.replace(part_type.aval, shape=(length,)))
        )

    def concatenated(values: Sequence[int]) -> int:
        out = row(sum(seen.types[v].aval.shape[0] for v in values))
        made.append(Op(stack.name, tuple(values), (out,), stack.run, stack.line, stack.transposed))
        return out

    parts = []
    for values in _by_actor(seen, stack.reads):
        total, part = seen.types.new(seen.types[op.outputs[0]]), row(1)
        made.append(Op(op.name, (concatenated(values),), (total,), op.run, op.line, op.transposed))
        made.append(Op("reshape", (total,), (part,), _as_row, op.line))
        parts.append(part)
    made.append(Op(op.name, (concatenated(parts),), op.outputs, op.run, op.line, op.transposed))
    return made


def _as_row(xs: Sequence[Any]) -> list[Any]:
    return [xs[0].reshape((1,))]
