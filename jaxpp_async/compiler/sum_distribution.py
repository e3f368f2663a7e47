"""Apply the linear operations behind a sum of several stages' parts to each part, if the results are smaller.

The gradient of a value that several stages use is accumulated in each of them, and the parts are added after
the loop. If an operation behind the sum makes a smaller array of it, as the transpose of a gather from a
table does, it is applied to each part where the part is, and only the small results are sent and added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxpp_async.compiler.ir import Lit, Op, OuterStep, Ref, Types, replaced
from jaxpp_async.compiler.primitives import AFFINE, ENLARGING, LINEAR_IN_ONE

PARTIAL_SUM = "add_partial"
"""The name of the operation that adds two stages' parts of a sum after a loop."""


def distribute_sums(step: OuterStep, types: Types) -> OuterStep:
    """Return a step in which linear operations that make a sum of parts smaller are applied to the parts.

    Args:
        step: the step, in which each loop is a single item.
        types: the type of each value; types of newly created values are added to it.
    """
    ops = {i: item for i, item in enumerate(step.items) if isinstance(item, Op)}
    if not any(op.name == PARTIAL_SUM for op in ops.values()):
        return step
    search = _Search(step, ops, types)
    replacements: dict[int, list[Op]] = {}
    removed: set[int] = set()
    for op in ops.values():
        if op.name == PARTIAL_SUM and (chain := search.shrinking_chain(op)):
            sums, parts = search.tree(op)
            removed |= sums | set(chain)
            replacements[chain[-1]] = _distributed([ops[k] for k in chain], op.outputs[0], parts, types)
    return replaced(step, replacements, removed - replacements.keys()) if replacements else step


class _Search:
    """The operations outside the loops, and the search for sums of parts and what is made of them."""

    def __init__(self, step: OuterStep, ops: Mapping[int, Op], types: Types) -> None:
        self.ops, self.types = ops, types
        self.producer = {o: i for i, op in ops.items() for o in op.outputs if o >= 0}
        self.users: dict[int, list[int]] = defaultdict(list)
        for i, op in ops.items():
            for r in op.reads:
                self.users[r].append(i)
        self.kept = {r for r in step.outputs if isinstance(r, int)}
        self.kept.update(v for needs in step.loop_needs.values() for v in needs)

    def only_user(self, value: int) -> int | None:
        """Return the position of the one operation that reads a value; None if others need it, too."""
        users = self.users[value]
        return users[0] if len(users) == 1 and value not in self.kept else None

    def tree(self, root: Op) -> tuple[set[int], list[int]]:
        """Return the positions of the additions that make a sum, and the ids of the parts that it adds."""
        members, parts, stack = {self.producer[root.outputs[0]]}, list[int](), list(reversed(root.reads))
        while stack:
            v = stack.pop()
            p = self.producer.get(v)
            if p is not None and self.ops[p].name == PARTIAL_SUM and self.only_user(v) is not None:
                members.add(p)
                stack += reversed(self.ops[p].reads)
            else:
                parts.append(v)
        return members, parts

    def shrinking_chain(self, root: Op) -> list[int]:
        """Return the positions of the operations behind a sum, up to the one with the smallest result.

        Returns:
            The positions, in order. Empty if no result is smaller than the sum.
        """
        (value,), chain = root.outputs, list[int]()
        least, length = self.types.sizes[value], 0
        while (user := self.only_user(value)) is not None and self._is_linear(self.ops[user], value):
            chain.append(user)
            (value,) = self.ops[user].outputs
            if self.types.sizes[value] < least:
                least, length = self.types.sizes[value], len(chain)
        return chain[:length]

    def _is_linear(self, op: Op, value: int) -> bool:
        """Return whether the result of an operation is a linear function of a value that it reads once."""
        if len(op.outputs) != 1 or op.inputs.count(value) != 1:
            return False
        position = op.inputs.index(value)
        if op.name in AFFINE:
            others = [r for k, r in enumerate(op.inputs) if k in AFFINE[op.name] and k != position]
            return position in AFFINE[op.name] and all(map(self._is_zero, others))
        return op.name == "reduction_end" or position in LINEAR_IN_ONE.get(op.name, ())

    def _is_zero(self, ref: Ref) -> bool:
        while isinstance(ref, int) and (p := self.producer.get(ref)) is not None:
            op = self.ops[p]
            if op.name not in ENLARGING or len(op.inputs) != 1:
                return False
            (ref,) = op.inputs
        return isinstance(ref, Lit) and not np.any(ref.value)


def _distributed(chain: Sequence[Op], value: int, parts: Sequence[int], types: Types) -> list[Op]:
    """Return operations that apply a chain to each part of a sum and then add the results.

    Args:
        chain: the operations, of which each reads the result of the one before.
        value: the id of the sum, which the first operation reads.
        parts: the ids of the parts that make the sum.
        types: the type of each value; types of newly created values are added to it.
    """
    made, results = list[Op](), list[int]()
    for part in parts:
        names = {value: part}
        for op in chain:
            (old,) = op.outputs
            new = names[old] = types.new(types[old], like=old)
            inputs = tuple(names.get(r, r) if isinstance(r, int) else r for r in op.inputs)
            made.append(replace(op, inputs=inputs, outputs=(new,)))
        results.append(names[chain[-1].outputs[0]])
    (out,), total = chain[-1].outputs, results[0]
    for k, result in enumerate(results[1:], 2):
        new = out if k == len(results) else types.new(types[out], like=out)
        made.append(Op(PARTIAL_SUM, (total, result), (new,), _add, chain[-1].line))
        total = new
    return made


def _add(xs):
    return [xs[0] + xs[1]]
