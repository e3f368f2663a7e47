"""Cut the loops of a step into stages at the marks that their schedules name as boundaries.

Each call of `pipeline_yield` in a loop's body is a mark. The `stages` of a schedule say which marks are stage
boundaries. This pass removes the other marks, together with their counterparts in the backward, so that later
passes see only boundaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np

from jaxpp_async.compiler.ir import Flat, Lit, Loop, Op, Ref, Traced, Types, renamed
from jaxpp_async.compiler.primitives import MARKER, MARKER_SIDE
from jaxpp_async.compiler.stage_assignment import BACKWARD, FORWARD, StageAssignment
from jaxpp_async.compiler.work import count_flops
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.schedules.cut import Cut, Mark, balanced_cut, check_stages, num_stages_asked, stages_of

_Choice: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""The boundaries of a balanced cut, and the share of each stage in the work."""


def cut_loops(traced: Traced, schedule: Any) -> Traced:
    """Remove the marks of each loop that are not boundaries by the `stages` of the loop's schedule.

    Call this inside `export.lowering_context`, since operations may have to be traced to count their work.

    Args:
        traced: the traced step.
        schedule: the schedule that replaces the schedule of every loop; None keeps those written in the step.
            If it has no `stages`, those of the schedule that it replaces count.

    Returns:
        The step, with `Loop.cut` in each loop whose schedule has `stages`. Loops of the same marks and number
        of stages whose cut is balanced get the same cut, so that they use a weight on the same actor.

    Raises:
        ScheduleError: the `stages` of a schedule are invalid for a loop.
    """
    cuts, balanced = dict[int, tuple[int, ...]](), dict[int, tuple[int, tuple[Mark, ...]]]()
    loops = {i: item for i, item in enumerate(traced.flat.ops) if isinstance(item, Loop)}
    for i, loop in loops.items():
        used = loop.schedule if schedule is None else schedule
        stages, num_stages = stages_of(used, loop.schedule), num_stages_asked(used)
        if stages is None or num_stages is None or num_stages < 1:
            continue
        marks = marks_of(loop)
        found = check_stages(stages, marks, num_stages=num_stages, schedule=used, where=loop.line)
        if found is None:
            balanced[i] = num_stages, marks
        else:
            cuts[i] = found
    chosen = _balance({i: loops[i] for i in balanced}, balanced, traced.types)
    items = list(traced.flat.ops)
    for i, loop in loops.items():
        if i in cuts or i in chosen:
            boundaries, shares = chosen[i] if i in chosen else (cuts[i], ())
            items[i] = dataclasses.replace(
                _without_marks(loop, boundaries), cut=Cut(marks_of(loop), boundaries, shares)
            )
    return dataclasses.replace(traced, flat=dataclasses.replace(traced.flat, ops=tuple(items)))


def marks_of(loop: Loop) -> tuple[Mark, ...]:
    """Return the marks of a loop's body, in the order of the forward."""
    ops = [op for op in loop.body.ops if isinstance(op, Op) and op.name == MARKER]
    return tuple(Mark(op.line, op.params.get("name")) for op in ops)


def _balance(
    loops: Mapping[int, Loop], wanted: Mapping[int, tuple[int, tuple[Mark, ...]]], types: Types
) -> dict[int, _Choice]:
    """Choose the cut of least work in the largest stage, for each loop with a balanced cut.

    Work counts to three digits. Layers that differ by an embedding's lookup are then equal, and a loop that
    takes no gradient gets, in most cases, the cut of the loop that trains the same model.

    Args:
        loops: the loops, by their positions.
        wanted: the number of stages and the marks of each loop, by its position.
        types: the type of each value.
    """
    work: dict[Any, np.ndarray] = {}
    for i, loop in loops.items():
        work[wanted[i]] = work.get(wanted[i], 0.0) + loop.num_microbatches * work_between_marks(loop, types)
    found: dict[Any, _Choice] = {}
    for key, costs in work.items():
        boundaries = balanced_cut([int(float(f"{cost:.2e}")) for cost in costs], key[0])
        stages = np.split(costs, [k + 1 for k in boundaries])
        found[key] = boundaries, tuple(float(s.sum() / max(costs.sum(), 1.0)) for s in stages)
    return {i: found[wanted[i]] for i in loops}


def work_between_marks(loop: Loop, types: Types) -> np.ndarray:
    """Return the floating-point operations between two marks, forward and backward, of one microbatch.

    Operations that every task repeats are left out, since they are cheap.

    Args:
        loop: the microbatch loop, with all its marks.
        types: the type of each value.

    Returns:
        One number per segment between two marks: first that of the segment before mark 0.
    """
    stages = StageAssignment(loop, types)
    members: list[list[Op]] = [[] for _ in range(stages.num_stages)]
    for i, op in enumerate(stages.ops):
        stage = stages.stage[i]
        if stages.kind[i] not in (FORWARD, BACKWARD) or op.name == MARKER_SIDE or i in stages.skipped:
            continue
        assert stage is not None
        members[stage].append(op)
    return np.array([count_flops(ops, types) for ops in members])


def _without_marks(loop: Loop, kept: Collection[int]) -> Loop:
    """Return a copy of a loop in which some marks are removed, together with those of their cotangents.

    Args:
        loop: the loop.
        kept: the numbers of the marks that stay.
    """
    alias: dict[int, Ref] = {}
    tokens: set[Ref] = set()
    ops: list[Op | Loop] = []
    number = -1

    def resolve(ref: Ref) -> Ref:
        return alias.get(ref, ref) if isinstance(ref, int) else ref

    for op in loop.body.ops:
        assert isinstance(op, Op)
        number += op.name == MARKER
        if op.name == MARKER and number not in kept:
            *values, token = op.outputs
            alias.update(zip(values, map(resolve, op.inputs), strict=True))
            tokens.add(token)
            alias[token] = Lit(np.zeros(private_api.TOKEN_SHAPE, private_api.TOKEN_DTYPE))
        elif op.name == MARKER_SIDE and op.inputs[0] in tokens:
            alias.update(zip(op.outputs, [resolve(r) for r in op.inputs[1:]], strict=True))
        else:
            ops.append(renamed(op, alias.keys(), resolve))
    alias.pop(-1, None)
    outputs = tuple(map(resolve, loop.body.outputs))
    return dataclasses.replace(loop, body=Flat(loop.body.inputs, tuple(ops), outputs))
