"""compiler.split: one backward task in, its input-gradient and weight-gradient parts out. No jax, no schedule.

The input part makes what other stages wait for and nothing else; the rest, the weight gradients, can run later. Nothing
that costs something is computed in both. An operation that does both at once is opened first: a checkpoint is replaced
by what it computes again and differentiates, a scan over layers becomes two scans.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from jaxpp_async.compiler.ir import Op
from jaxpp_async.compiler.partition import StagedLoop, StageTask
from jaxpp_async.compiler.primitives import LIGHT


def split_backward(
    staged: StagedLoop, task: StageTask, wanted: Collection[int]
) -> tuple[StageTask | None, StageTask | None]:
    """The two parts of a backward task. Where one has nothing to do it is None, and the other is the whole task.

    Args:
        staged: the loop.
        task: of kind `"bwd"`.
        wanted: ids of the values that other stages need.
    """
    stage = task.key[1]
    if not wanted:
        return None, replace(task, key=("bwd_weight", stage))
    first, second = cut(task.ops, wanted)
    early = {o for op in first for o in op.outputs}
    adds_first = tuple(a for a in task.adds if _value(staged, a) in early)
    adds_second = tuple(a for a in task.adds if _value(staged, a) not in early)
    if not second and not adds_second:
        return replace(task, key=("bwd_input", stage)), None
    later = StageTask(("bwd_weight", stage), tuple(second), adds_second)
    repeated = _repeated(staged, first, later)
    return (
        StageTask(("bwd_input", stage), tuple(first), adds_first),
        replace(later, ops=(*repeated, *second)),
    )


def _value(staged: StagedLoop, add: tuple[int, int]) -> object:
    return staged.outputs[add[0]][add[1]].value


def cut(ops: Sequence[Op], wanted: Collection[int]) -> tuple[list[Op], list[Op]]:
    """The operations that `wanted` depends on, and the others. Operations that do both are opened or cut themselves.

    Args:
        ops: in program order.
        wanted: ids of values.
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
            pending += _opened(op)
            continue
        if partly and op.split is not None and (halves := op.split(op, hit)) is not None:
            op, rest = halves
            second.append(rest)
        first.append(op)
        needed.update(op.reads)
    return first[::-1], second[::-1]


def _opened(op: Op) -> list[Op]:
    """What is inside an operation, and copies that give its results their old ids."""
    assert op.expand is not None
    inner, results = op.expand()
    renamed = [(ref, o) for ref, o in zip(results, op.outputs, strict=True) if o >= 0]
    return [*inner, *(Op("copy", (ref,), (o,), list, op.line, op.transposed) for ref, o in renamed)]


def _repeated(staged: StagedLoop, first: Sequence[Op], later: StageTask) -> list[Op]:
    """Light operations of the first part that the second one needs: cheaper to run again than to keep."""
    light: dict[int, Op] = {}
    free = set(staged.loop.body.inputs)
    for op in first:
        if op.name in LIGHT and all(r in free for r in op.reads):
            free.update(op.outputs)
            light.update(dict.fromkeys(op.outputs, op))
    needed: dict[int, Op] = {}
    stack = list(staged.reads(later))
    while stack:
        if (op := light.get(stack.pop())) is not None and id(op) not in needed:
            needed[id(op)] = op
            stack += op.reads
    return [op for op in first if id(op) in needed]
