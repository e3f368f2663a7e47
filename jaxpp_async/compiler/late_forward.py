"""Choose the forward operations that run in the later stage that uses their results, to send fewer bytes.

An operation that no stage marker needs runs in the latest stage among its operands. If only a later stage
reads its results, it may run there as well: then its operands are sent instead. So the keys and values that a
decoder's layers make of an encoder's output live in the decoder's stages, with their weights, and the output
is sent once. The choice is a minimum cut for each stage, where sending a value costs its size in bytes. If
sending the operands does not cost less than sending the results, an operation stays in the earlier stage.

An operation is never moved past the stage in which the user wrote it, that is behind more markers than come
before it in the program, nor away from a stage that also uses its weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxpp_async.compiler.minimum_cut import END, INFINITE, START, cost_scale, end_side


@dataclass(frozen=True, eq=False)
class ForwardOps:
    """The forward operations of a loop's body, by their position in it.

    Args:
        stage: the stage of each operation.
        written_in: for each operation that no marker needs, the number of markers before it in the program.
        reads: for each operation, the values that it reads and that other forward operations make, markers
            ignored.
        makes: the values that each operation makes.
        users: a function from a value's id to the positions of all operations that read it.
        weights: for each operation, the weights that it reads, and whatever else is the same for all
            microbatches and not small.
        sizes: the size of each value in bytes.
    """

    stage: Mapping[int, int]
    written_in: Mapping[int, int]
    reads: Mapping[int, Sequence[int]]
    makes: Mapping[int, Sequence[int]]
    users: Callable[[int], Iterable[int]]
    weights: Mapping[int, Iterable[int]]
    sizes: Mapping[int, int]


def choose_late_forwards(ops: ForwardOps) -> dict[int, int]:
    """Return the operations that run in a later stage than their operands ask for, with that stage."""
    targets = _latest_stages(ops)
    if not targets:
        return {}
    moved: dict[int, int] = {}
    stage = dict(ops.stage)
    for target in sorted(set(targets.values())):
        held = {w for i, s in stage.items() if s < target and i not in targets for w in ops.weights[i]}
        group = [i for i, t in targets.items() if t == target and held.isdisjoint(ops.weights[i])]
        for i in _cheaper_there(ops, stage, targets, group, target):
            moved[i] = stage[i] = target
    return moved


def _latest_stages(ops: ForwardOps) -> dict[int, int]:
    """Return the last stage in which each operation may run, for those that may run later than they do."""
    limits: dict[int, int] = {}
    found: dict[int, int] = {}
    for i in sorted(ops.stage, reverse=True):
        limits[i] = own = ops.stage[i]
        if ops.written_in.get(i, own) <= own:
            continue
        readers = [limits[u] for v in ops.makes[i] for u in ops.users(v) if u in limits]
        limits[i] = min([ops.written_in[i], *readers])  # without readers, it follows its operands
        if limits[i] > own:
            found[i] = limits[i]
    return dict(sorted(found.items()))


def _cheaper_there(
    ops: ForwardOps, stage: Mapping[int, int], targets: Mapping[int, int], group: Sequence[int], target: int
) -> list[int]:
    """Return the operations of a group that are better run in a later stage.

    Args:
        ops: the forward operations.
        stage: the stage of each operation so far.
        targets: the last stage of each operation that may run later.
        group: the operations to choose from.
        target: the later stage.
    """
    node = {i: 2 + k for k, i in enumerate(group)}
    maker = {v: i for i, values in ops.makes.items() for v in values}
    crossing: dict[int, int] = {}  # the node of each value that may have to be sent
    edges: dict[tuple[int, int], int] = defaultdict(int)
    for i in group:
        for v in dict.fromkeys((*ops.reads[i], *ops.makes[i])):
            if v in crossing:
                continue
            source = maker[v]
            readers = [u for u in ops.users(v) if u in ops.stage]
            # Readers that may run still later say nothing about this stage.
            needed = any(stage[u] == target and u not in node for u in readers if targets.get(u, 0) <= target)
            if source not in node and (needed or stage[source] >= target):
                continue  # it is sent there anyway
            crossing[v] = here = 2 + len(group) + len(crossing)
            edges[node.get(source, START), here] = ops.sizes[v]
            if needed:
                edges[here, END] = INFINITE
            for u in readers:
                if u in node:
                    edges[here, node[u]] = INFINITE
                    if source in node:
                        edges[node[u], node[source]] = INFINITE
                elif source in node and stage[u] < target and targets.get(u, 0) < target:
                    edges[START, node[source]] = INFINITE  # an earlier stage reads it
    scale = cost_scale(sum(cost for cost in edges.values() if cost < INFINITE))
    heads, tails = zip(*edges, strict=True) if edges else ((), ())
    costs = [cost if cost == INFINITE else -(-cost // scale) for cost in edges.values()]
    later = end_side(2 + len(group) + len(crossing), heads, tails, costs)
    return [i for i in group if node[i] in later]
