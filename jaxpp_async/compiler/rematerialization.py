"""compiler.residuals: a cut loop in; out: the same, with fewer bytes kept of each forward for its backward. No jax, no
schedule.

A backward needs values of its forward, residuals. Within one program XLA makes cheap ones again where they are read;
between two executables nobody would, and each is written, held while its microbatch is under way, and read. So a
backward takes the fewest bytes from which light operations make the rest: a minimum cut through the forward's light
operations, in which a value costs its bytes and making it again a part of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxpp_async.compiler.ir import Op, Ref, Types, renamed
from jaxpp_async.compiler.ir_slicing import select_needed
from jaxpp_async.compiler.partition import StagedLoop
from jaxpp_async.compiler.primitives import REPEATED, TRANSCENDENTAL

AGAIN, AGAIN_TRANSCENDENTAL = 1 / 16, 1 / 4
"""What making a byte again costs, where keeping one costs 1: writing, holding and reading it. Light operations are
fused into what reads them and move no bytes of their own; a tanh or an exp is some twenty instructions."""

_UNIT = 16  # of costs: the largest denominator above
_ANY = 2**30  # above every sum of costs


@dataclass(frozen=True)
class RecomputePlan:
    """What is made a second time.

    Args:
        ops: in program order; their results have ids of their own.
        names: the new id of each value that is made again.
    """

    ops: tuple[Op, ...]
    names: dict[int, int]

    def read_by(self, ops: Iterable[Op]) -> tuple[Op, ...]:
        """The repeated operations, and `ops`, which read their results."""
        return (*self.ops, *(renamed(op, self.names.keys(), self.name) for op in ops))

    def name(self, ref: Ref) -> Ref:
        """The new id of a value that is made again; any other as it is."""
        return self.names.get(ref, ref) if isinstance(ref, int) else ref


def minimize_residuals(staged: StagedLoop, types: Types) -> StagedLoop:
    """Have every stage's backward keep the fewest bytes of its forward.

    Args:
        staged: the loop.
        types: of its values; new values enter it.
    """
    tasks, changed = dict(staged.tasks), list[int]()
    for stage in range(staged.num_stages):
        forward, backward = tasks.get(("fwd", stage)), tasks.get(("bwd", stage))
        if forward is None or backward is None:
            continue
        again = made_again(forward.ops, staged.takes(backward), staged.loop.body.inputs, types)
        if again.ops:
            tasks["bwd", stage] = replace(backward, ops=again.read_by(backward.ops))
            changed.append(stage)
    less = replace(staged, tasks=tasks)
    taken = {key: less.takes(task) for key, task in tasks.items()}
    for stage in changed:
        forward = tasks["fwd", stage]
        read = {v for key, values in taken.items() if key != forward.key for v in values}
        tasks[forward.key] = replace(forward, ops=select_needed(forward.ops, read.union(less.added(forward))))
    return replace(less, tasks=tasks)


def made_again(
    ops: Sequence[Op], taken: Collection[int], free: Collection[int], types: Types
) -> RecomputePlan:
    """What a later executable makes again of an earlier one's values, so that the fewest bytes are kept for it.

    Args:
        ops: the earlier one's, in program order.
        taken: values that the later one needs.
        free: values that are there for the later one anyway.
        types: of the values; new values enter it.
    """
    source = {o: op for op in ops if op.name in REPEATED for o in op.outputs if o >= 0}
    there = {*free, *(v for v in taken if v not in source)}
    nodes = {v: k for k, v in enumerate(dict.fromkeys(v for v in taken if v in source))}
    num_taken, edges, keep, again = len(nodes), list[tuple[int, int]](), list[int](), list[int]()
    pending = list(nodes)
    for v in pending:  # grows while it is walked
        size, op = types.sizes[v], source.get(v)
        keep.append(size * _UNIT)
        again.append(
            -1
            if op is None
            else int(size * _UNIT * (AGAIN_TRANSCENDENTAL if op.name in TRANSCENDENTAL else AGAIN))
        )
        for u in () if op is None else dict.fromkeys(op.reads):
            if u not in there:
                if u not in nodes:
                    nodes[u] = len(nodes)
                    pending.append(u)
                edges.append((nodes[u], nodes[v]))
    chosen = _repeated(tuple(keep), tuple(again), tuple(edges), num_taken)
    names = {v: types.new(types[v]) for k, v in enumerate(pending) if k in chosen}
    repeated = [op for op in ops if not names.keys().isdisjoint(op.outputs)]
    found = RecomputePlan((), names)
    return RecomputePlan(
        tuple(
            replace(
                renamed(op, names.keys(), found.name), outputs=tuple(names.get(o, -1) for o in op.outputs)
            )
            for op in repeated
        ),
        names,
    )


@lru_cache(maxsize=256)
def _repeated(
    keep: tuple[int, ...], again: tuple[int, ...], edges: tuple[tuple[int, int], ...], num_taken: int
) -> frozenset[int]:
    """The values that are made again; equal stages ask the same.

    Args:
        keep: what keeping each value costs.
        again: what making it again costs; -1 where that cannot be.
        edges: (operand, value) of the operations that can be made again.
        num_taken: so many of the values, the first ones, are needed.
    """
    if not num_taken:
        return frozenset()
    scale = 1 + (sum(keep) + sum(again)) // (_ANY // 2)
    start, end, count = 0, 1, len(keep)
    # A value is two nodes, and cutting between them is keeping it; a cut from the start is making it again.
    enters, leaves = 2 + 2 * np.arange(count), 3 + 2 * np.arange(count)
    operands, values = np.array(edges, int).reshape(-1, 2).T
    heads = np.concatenate([enters, np.full(count, start), leaves[operands], leaves[:num_taken]])
    tails = np.concatenate([leaves, enters, enters[values], np.full(num_taken, end)])
    making = [_ANY if cost < 0 else -(-cost // scale) for cost in again]
    costs = [*(-(-cost // scale) for cost in keep), *making, *[_ANY] * (len(edges) + num_taken)]
    size = 2 + 2 * count
    graph = csr_array((np.array(costs, np.int32), (heads, tails)), shape=(size, size))
    left = graph - maximum_flow(graph, start, end).flow
    left.eliminate_zeros()
    # Of several minimum cuts the one next to the end: the fewest operations are run again.
    reaching = set(breadth_first_order(csr_array(left.T), end, return_predecessors=False).tolist())
    return frozenset(k for k in range(count) if int(enters[k]) in reaching)
