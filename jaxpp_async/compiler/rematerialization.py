"""Choose the forward values that are kept for each backward task, and recompute the others in it.

A backward needs values of its forward, the residuals. Within one executable XLA recomputes cheap residuals
where they are read. Between two executables XLA cannot: each residual is written, kept in memory until the
backward of its microbatch has run, and read. So only some residuals are kept, and cheap operations make the
others from these again; the pass keeps the fewest bytes that are enough for this. The choice is a minimum cut
through the cheap operations of the forward. In this cut, keeping a value costs its size in bytes, and
recomputing it costs a fraction of its size.

`minimize_residuals` is the pass over a loop's stages. `task_variants` calls `choose_recomputation` for the
values that the second half of a split backward needs from the first half.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from jaxpp_async.compiler.ir import Op, Types, renamed
from jaxpp_async.compiler.ir_slicing import select_needed
from jaxpp_async.compiler.minimum_cut import END, INFINITE, START, cost_scale, end_side
from jaxpp_async.compiler.partition import StagedLoop
from jaxpp_async.compiler.primitives import REPEATED, TRANSCENDENTAL

RECOMPUTE_COST, RECOMPUTE_COST_TRANSCENDENTAL = 1 / 16, 1 / 4
"""The costs of recomputing a byte by most light (cheap) operations, and by a transcendental function, where
keeping a byte (writing, storing and reading it) costs 1. Light operations are fused into their readers and
move no bytes of their own. A tanh or an exp takes some twenty instructions."""

_UNIT = 16  # the cost of keeping a byte, so that all costs are integers: the largest denominator above


@dataclass(frozen=True)
class RecomputePlan:
    """A plan to repeat operations of one executable in a later one, so that fewer bytes are kept between.

    Args:
        ops: copies of operations of the earlier executable, in program order; their results have new ids.
        new_ids: a dictionary. Its keys are the ids of the recomputed values in the earlier executable; its
            values are the ids of their copies in the later one.
    """

    ops: tuple[Op, ...]
    new_ids: dict[int, int]

    def prepend_to(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """Return the operations to run again, followed by copies of `ops` that read the recomputed values.

        Light operations that the later executable repeats by itself (`ir_slicing.LightOps`) come first where
        the operations to run again read their results. Light operations depend on the loop's inputs alone,
        so none of them reads a recomputed value.
        """
        light = select_needed(ops, {v for op in self.ops for v in op.reads})
        first = set(light)
        return (*light, *self.ops, *self.read_recomputed(op for op in ops if op not in first))

    def read_recomputed(self, ops: Iterable[Op]) -> Iterable[Op]:
        """Return copies of `ops` that read the recomputed values in place of the originals."""
        new_ids: Mapping[Any, int] = self.new_ids
        return (renamed(op, self.new_ids.keys(), lambda ref: new_ids.get(ref, ref)) for op in ops)


def minimize_residuals(staged: StagedLoop, types: Types) -> StagedLoop:
    """Recompute residuals in the backward of every stage, so that the fewest bytes are kept from its forward.

    Args:
        staged: the microbatch loop, split into tasks.
        types: the type of each value; types of newly created values are added to it.

    Returns:
        The loop with recomputations in its backward tasks. Forward operations whose results are no longer
        read are removed.
    """
    tasks, changed = dict(staged.tasks), list[int]()
    for stage in range(staged.num_stages):
        forward, backward = tasks.get(("fwd", stage)), tasks.get(("bwd", stage))
        if forward is None or backward is None:
            continue
        free = free_values(staged, backward.ops)
        plan = choose_recomputation(forward.ops, staged.takes(backward), free, types)
        if plan.ops:
            tasks["bwd", stage] = replace(backward, ops=plan.prepend_to(backward.ops))
            changed.append(stage)
    smaller = replace(staged, tasks=tasks)
    taken = {key: smaller.takes(task) for key, task in tasks.items()}
    for stage in changed:
        forward = tasks["fwd", stage]
        read = {v for key, values in taken.items() if key != forward.key for v in values}
        tasks[forward.key] = replace(
            forward, ops=select_needed(forward.ops, read.union(smaller.added(forward)))
        )
    return replace(smaller, tasks=tasks)


def free_values(staged: StagedLoop, later: Iterable[Op]) -> set[int]:
    """Return the ids of the values that an executable has without keeping or recomputing anything.

    These are the inputs of the loop's body and the results of the executable's operations, `later`. Some of
    these operations repeat light operations of an earlier executable, whose results have the same ids there.
    """
    return {*staged.loop.body.inputs, *(o for op in later for o in op.outputs)}


def choose_recomputation(
    ops: Sequence[Op], taken: Collection[int], free: Collection[int], types: Types
) -> RecomputePlan:
    """Choose the values of one executable that a later one recomputes, to keep the fewest bytes in between.

    Args:
        ops: the operations of the earlier executable, in program order.
        taken: the ids of the values of the earlier executable that the later one needs.
        free: the ids of the values that the later executable has in any case; see `free_values`.
        types: the type of each value; types of newly created values are added to it.

    Returns:
        The operations that the later executable runs again, and the new ids of the recomputed values.
    """
    source = {o: op for op in ops if op.name in REPEATED for o in op.outputs if o >= 0}
    given = {*free, *(v for v in taken if v not in source)}
    nodes = {v: k for k, v in enumerate(dict.fromkeys(v for v in taken if v in source))}
    num_taken, edges, keep, recompute = len(nodes), list[tuple[int, int]](), list[int](), list[int]()
    pending = list(nodes)
    for v in pending:  # the loop appends to it
        cost, op = types.sizes[v] * _UNIT, source.get(v)
        keep.append(cost)
        if op is None:
            recompute.append(-1)
            continue
        costly = op.name in TRANSCENDENTAL
        recompute.append(int(cost * (RECOMPUTE_COST_TRANSCENDENTAL if costly else RECOMPUTE_COST)))
        for u in dict.fromkeys(op.reads):
            if u not in given:
                if u not in nodes:
                    nodes[u] = len(nodes)
                    pending.append(u)
                edges.append((nodes[u], nodes[v]))
    chosen = _cut(tuple(keep), tuple(recompute), tuple(edges), num_taken)
    new_ids = {v: types.new(types[v], like=v) for k, v in enumerate(pending) if k in chosen}
    repeated = [op for op in ops if not new_ids.keys().isdisjoint(op.outputs)]
    copies = RecomputePlan((), new_ids).read_recomputed(repeated)
    made = tuple(replace(op, outputs=tuple(new_ids.get(o, -1) for o in op.outputs)) for op in copies)
    return RecomputePlan(made, new_ids)


@lru_cache(maxsize=256)
def _cut(
    keep: tuple[int, ...], recompute: tuple[int, ...], edges: tuple[tuple[int, int], ...], num_taken: int
) -> frozenset[int]:
    """Find the values that a later executable, such as a backward, should recompute instead of keeping them.

    A minimum cut of the graph of values gives the least total cost of keeping and recomputing. Values are
    numbered from 0. Results are cached, since equal stages have equal graphs.

    Args:
        keep: the cost of keeping each value until the later executable runs.
        recompute: the cost of recomputing each value; -1 if the value cannot be recomputed.
        edges: pairs of values, (operand, result), of the operations that can be run again.
        num_taken: the number of values that the later executable needs. These values have the lowest numbers.

    Returns:
        The numbers of the values to recompute.
    """
    if not num_taken:
        return frozenset()
    scale, count = cost_scale(sum(keep) + sum(recompute)), len(keep)
    # Each value is two nodes. A cut between the two means that the value is kept; a cut between the start and
    # the first of them means that it is recomputed.
    enters, leaves = 2 + 2 * np.arange(count), 3 + 2 * np.arange(count)
    operands, values = np.array(edges, int).reshape(-1, 2).T
    heads = np.concatenate([enters, np.full(count, START), leaves[operands], leaves[:num_taken]])
    tails = np.concatenate([leaves, enters, enters[values], np.full(num_taken, END)])
    recompute_costs = [INFINITE if cost < 0 else -(-cost // scale) for cost in recompute]
    costs = [*(-(-cost // scale) for cost in keep), *recompute_costs, *[INFINITE] * (len(edges) + num_taken)]
    # Of several minimum cuts the one nearest to the end repeats the fewest operations.
    reaching = end_side(2 + 2 * count, heads, tails, costs)
    return frozenset(k for k in range(count) if int(enters[k]) in reaching)
