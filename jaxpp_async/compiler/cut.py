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

from jaxpp_async import schedules
from jaxpp_async.compiler.export import Target, lowering_context
from jaxpp_async.compiler.ir import Flat, Lit, Loop, Op, Ref, Traced, Types, renamed
from jaxpp_async.compiler.primitives import MARKER, MARKER_SIDE
from jaxpp_async.compiler.stage_assignment import BACKWARD, FINISH, FORWARD, StageAssignment
from jaxpp_async.compiler.work import count_flops
from jaxpp_async.errors import StageError
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.program.work import CutChoice, LoopCut
from jaxpp_async.schedules.auto import schedule_in_use
from jaxpp_async.schedules.cut import Cut, Mark, balanced_cut_on, check_stages, num_stages_asked, stages_of
from jaxpp_async.schedules.planned import PlannedSchedule, check_one_loop

_Wanted: TypeAlias = tuple[tuple[Mark, ...], tuple[ActorId, ...]]
"""The marks of a loop whose cut is balanced, and the actor of each of its stages."""

_Choice: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""The boundaries of a balanced cut, and the share of each stage in the work."""


def cut_loops(traced: Traced, schedule: Any, num_actors: int) -> Traced:
    """Remove the marks of each loop that are not boundaries by the `stages` of the loop's schedule.

    Call this inside `export.lowering_context`, since operations may have to be traced to count their work.

    Args:
        traced: the traced step.
        schedule: the schedule that replaces the schedule of every loop; None keeps those written in the step.
            If it has no `stages`, those of the schedule that it replaces count.
        num_actors: the number of actors, over which a balanced cut distributes the work.

    Returns:
        The step, with the schedule that is used in `Loop.schedule`, and with `Loop.cut` in each loop whose
        schedule has `stages`. Loops of the same marks whose cut is balanced get the same cut if their stages
        are on the same actors, so that they use a weight on the same actor.

    Raises:
        ScheduleError: a schedule whose cut is balanced, or the `stages` of a schedule, do not fit a loop.
        PlanError: a schedule was planned for another step: its loop has other marks, or there are more loops.
    """
    cuts, balanced = dict[int, tuple[int, ...]](), dict[int, _Wanted]()
    loops = {i: item for i, item in enumerate(traced.flat.ops) if isinstance(item, Loop)}
    check_one_loop([(loop.schedule if schedule is None else schedule, loop.line) for loop in loops.values()])
    for i, loop in loops.items():
        marks = marks_of(loop)
        used = schedule_in_use(loop.schedule if schedule is None else schedule, len(marks), num_actors)
        if used is not loop.schedule:
            loops[i] = dataclasses.replace(loop, schedule=used)
        stages, num_stages = stages_of(used, loop.schedule), num_stages_asked(used)
        if stages is None or num_stages is None or num_stages < 1:
            continue
        found = check_stages(stages, marks, num_stages=num_stages, schedule=used, where=loop.line)
        if found is None:
            tasks = schedules.resolve(
                used,
                num_stages=num_stages,
                num_microbatches=loop.num_microbatches,
                num_actors=num_actors,
                where=loop.line,
                forward_only=True,  # whether the loop has a backward is known, and checked, later
            )
            balanced[i] = marks, schedules.stage_actors(tasks)
        else:
            cuts[i] = found
    chosen = _balance({i: loops[i] for i in balanced}, balanced, traced.types)
    items = list(traced.flat.ops)
    for i, loop in loops.items():
        items[i] = loop
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


def _balance(loops: Mapping[int, Loop], wanted: Mapping[int, _Wanted], types: Types) -> dict[int, _Choice]:
    """Choose the cut of least work on the busiest actor, for each loop with a balanced cut.

    Work counts to three digits. Layers that differ by an embedding's lookup are then equal, and a loop that
    takes no gradient gets, in most cases, the cut of the loop that trains the same model.

    Args:
        loops: the loops, by their positions.
        wanted: the marks and the actors of the stages of each loop, by its position.
        types: the type of each value.
    """
    work: dict[Any, np.ndarray] = {}
    for i, loop in loops.items():
        work[wanted[i]] = work.get(wanted[i], 0.0) + loop.num_microbatches * work_between_marks(loop, types)
    found: dict[Any, _Choice] = {}
    for key, costs in work.items():
        boundaries = balanced_cut_on([int(float(f"{cost:.2e}")) for cost in costs], key[1])
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
        if stages.kind[i] not in (FORWARD, BACKWARD, FINISH) or op.name == MARKER_SIDE or i in stages.skipped:
            continue
        assert stage is not None
        members[stage].append(op)
    return np.array([count_flops(ops, types) for ops in members])


def cut_of(flat: Flat) -> LoopCut | None:
    """Return the cut of the one loop of a step, without the work of its layers.

    Args:
        flat: the operations of the step, after `cut_loops`.

    Returns:
        The cut; None if the step has no loop, or several.
    """
    loops = [item for item in flat.ops if isinstance(item, Loop)]
    if len(loops) != 1:
        return None
    marks = marks_of(loops[0])
    cut = loops[0].cut or Cut(marks, tuple(range(len(marks))))
    return LoopCut(tuple(map(str, cut.marks)), cut.boundaries)


def cut_choice_of(flat: Flat) -> CutChoice:
    """Return how the cuts of a step's loops were chosen; `""` if not all of them were chosen in one way.

    Args:
        flat: the operations of the step, after `cut_loops`.
    """
    found: set[CutChoice] = {_choice(item) for item in flat.ops if isinstance(item, Loop)}
    return next(iter(found)) if len(found) == 1 else ""


def _choice(loop: Loop) -> CutChoice:
    if isinstance(loop.schedule, PlannedSchedule):
        return "plan"
    return "work" if loop.cut is not None and loop.cut.shares else ""


def count_layers(cut: LoopCut | None, whole: Flat, types: Types, target: Target) -> LoopCut | None:
    """Return a cut with the work of each layer.

    Args:
        cut: the cut that `cut_of` returned.
        whole: the operations of the step before `cut_loops`.
        types: the type of each value.
        target: the mesh and platform that the step was compiled for.
    """
    if cut is None:
        return None
    (loop,) = (item for item in whole.ops if isinstance(item, Loop))
    try:
        with lowering_context(target):
            flops = work_between_marks(loop, types)
    except StageError:  # the step cannot be cut at every mark
        return cut
    return LoopCut(cut.marks, cut.boundaries, tuple(map(float, flops)))


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
