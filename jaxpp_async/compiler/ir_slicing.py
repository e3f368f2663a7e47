"""From a list of operations, select the ones that given values depend on.

`split_needed` separates the operations that some values need from all others. `LightOps` finds cheap
operations, which cost less to run again than their results cost to keep. `eliminate_dead` drops the
operations that nothing needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from jaxpp_async.compiler.ir import Flat, Loop, Op, used_ids
from jaxpp_async.compiler.primitives import LIGHT, MARKER


def split_needed(ops: Sequence[Op], wanted: Collection[int]) -> tuple[list[Op], list[Op]]:
    """Separate the operations that `wanted` depends on from the others.

    If only some results of an operation are needed, the operation is expanded (a checkpoint) or split in two
    (a scan). If neither is possible, the whole operation counts as needed.

    Args:
        ops: the operations, in program order.
        wanted: the value ids that are needed.

    Returns:
        The needed operations and the others, each in program order.
    """
    needed, pending = set(wanted), list(ops)
    first: list[Op] = []
    second: list[Op] = []
    while pending:
        op = pending.pop()
        hit = frozenset(k for k, o in enumerate(op.outputs) if o in needed)
        if not hit:
            second.append(op)
            continue
        partly = len(hit) < sum(o >= 0 for o in op.outputs)
        if partly and op.expand is not None:
            pending += _expand(op)
            continue
        if partly and op.split is not None and (halves := op.split(op, hit)) is not None:
            op, rest = halves
            second.append(rest)
        first.append(op)
        needed.update(op.reads)
    return first[::-1], second[::-1]


def select_needed(ops: Sequence[Op], wanted: Collection[int]) -> tuple[Op, ...]:
    """Return the operations that `wanted` depends on, all unchanged; `split_needed` may split some of
    them."""
    needed, found = set(wanted), list[Op]()
    for op in reversed(ops):
        if not needed.isdisjoint(op.outputs):
            found.append(op)
            needed.update(op.reads)
    return tuple(reversed(found))


def _expand(op: Op) -> list[Op]:
    """Return operations that replace an operation such as a checkpoint by the operations inside it.

    At the end are `copy` operations, which give the results the ids that the replaced operation's results
    have.
    """
    assert op.expand is not None
    inner, results = op.expand()
    renamed = [(ref, o) for ref, o in zip(results, op.outputs, strict=True) if o >= 0]
    return [*inner, *(Op("copy", (ref,), (o,), list, op.line, op.transposed) for ref, o in renamed)]


class LightOps:
    """The cheap operations of a program: running one again costs less than keeping its results.

    Args:
        ops: a dictionary. Its keys are positions in the program; its values are the cheap operations there.
    """

    def __init__(self, ops: Mapping[int, Op]) -> None:
        self._made_by = {o: (i, op) for i, op in ops.items() for o in op.outputs}

    @classmethod
    def among(cls, ops: Sequence[Op], free: Iterable[int]) -> LightOps:
        """Find the cheap operations that can be computed from `free` values with cheap operations alone.

        Args:
            ops: the operations to choose from, in program order.
            free: the value ids that are available without computing anything.
        """
        known = set(free)
        found: dict[int, Op] = {}
        for i, op in enumerate(ops):
            if op.name in LIGHT and known.issuperset(op.reads):
                known.update(op.outputs)
                found[i] = op
        return cls(found)

    def needed(self, values: Iterable[int]) -> dict[int, Op]:
        """Return the cheap operations that have to run again to compute `values`.

        Returns:
            A dictionary in program order. Its keys are positions in the program; its values are the
            operations. Values that no cheap operation makes are ignored.
        """
        found: dict[int, Op] = {}
        stack = list(values)
        while stack:
            position, op = self._made_by.get(stack.pop(), (-1, None))
            if op is not None and position not in found:
                found[position] = op
                stack += op.reads
        return dict(sorted(found.items()))


def eliminate_dead(flat: Flat) -> Flat:
    """Drop operations, loop results and loop inputs that nothing needs.

    Stage markers are kept, since they determine the number of stages.
    """
    needed = {r for r in flat.outputs if isinstance(r, int)}
    kept: list[Op | Loop] = []
    for op in reversed(flat.ops):
        if needed.isdisjoint(op.outputs) and not (isinstance(op, Op) and op.name == MARKER):
            continue
        kept.append(_prune_loop(op, needed) if isinstance(op, Loop) else op)
        needed.update(kept[-1].reads)
    return Flat(flat.inputs, tuple(reversed(kept)), flat.outputs)


def _prune_loop(loop: Loop, needed: set[int]) -> Loop:
    keep = [i for i, o in enumerate(loop.outputs) if o in needed]
    body = eliminate_dead(Flat(loop.body.inputs, loop.body.ops, tuple(loop.body.outputs[i] for i in keep)))
    used = used_ids(body.ops, body.outputs)
    invariants, batch, index = loop.body_inputs()
    kept_invariants = [i for i, v in enumerate(invariants) if v in used]
    kept_batch = [i for i, v in enumerate(batch) if v in used]
    inputs = [invariants[i] for i in kept_invariants] + [batch[i] for i in kept_batch] + [index]
    return replace(
        loop,
        body=Flat(tuple(inputs), body.ops, body.outputs),
        invariants=tuple(loop.invariants[i] for i in kept_invariants),
        batch=tuple(loop.batch[i] for i in kept_batch),
        outputs=tuple(loop.outputs[i] for i in keep),
        reductions=tuple(loop.reductions[i] for i in keep),
    )
