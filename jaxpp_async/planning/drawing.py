"""Draw a plan: each task as long as the mean costs say, and the memory that each actor's devices need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpp_async.program.instructions import Task
from jaxpp_async.program.task_label import TASK_TRAITS
from jaxpp_async.schedules import time_schedule
from jaxpp_async.view import Cell, Drawing, Row, format_time

if TYPE_CHECKING:
    from jaxpp_async.planning.plan import Plan


def draw_plan(plan: Plan) -> Drawing:
    """Return a plan as a drawing, with what would help next.

    The drawing has the tasks of the loop alone, since a plan knows the times of no others; its first sentence
    says how long the loop and the step take with transfers and all the rest. Each actor's memory reaches what
    its devices need, and falls from there by the bytes that its tasks have not kept yet or no longer keep.

    Args:
        plan: the plan.
    """
    tasks = plan.schedule.rows
    timing = time_schedule(tasks, lambda task: plan.task_s[task.ty][task.stage])
    rows = []
    for actor, row in enumerate(tasks):
        times = zip(row, timing.starts[actor], timing.ends[actor], strict=True)
        cells = [
            Cell(start, end, TASK_TRAITS[task.ty].kind, str(task.i), str(task)) for task, start, end in times
        ]
        memory = _memory(plan, row, cells, float(plan.memory[actor]))
        rows.append(Row(f"actor {actor}", tuple(cells), memory=memory))
    title = f"plan of {plan.step!r}: {plan.name}, {format_time(plan.step_s.p50, 's')} a step predicted"
    end_s = max((float(end) for ends in timing.ends for end in ends), default=0.0)
    alone, loop, step, bound = (
        format_time(seconds, "s") for seconds in (end_s, plan.loop_s, plan.step_s.p50, plan.bound)
    )
    advice = [
        f"the tasks of the loop, which are drawn, take {alone}; with transfers {loop}, and with what is "
        f"outside the loop, the step takes {step}",
        f"no schedule of this cut runs the loop in less than {bound}",
    ]
    advice += [f"what would help: {text}" for text in plan.advice]
    return Drawing(title, tuple(rows), cap=plan.cap_bytes, advice=tuple(advice))


def _memory(
    plan: Plan, tasks: Sequence[Task], cells: Sequence[Cell], most: float
) -> tuple[tuple[float, float], ...]:
    """Return the bytes that an actor's devices need from each time on.

    Args:
        plan: the plan.
        tasks: the actor's tasks.
        cells: the cell of each task.
        most: the bytes that the actor needs at the time at which its tasks keep most.
    """
    if not plan.kept_bytes or not plan.weight_kept_bytes:
        return ((0.0, most),)
    kept, held = [(0.0, 0.0)], 0.0
    for task, cell in zip(tasks, cells, strict=True):
        whole, rest = plan.kept_bytes[task.stage], plan.weight_kept_bytes[task.stage]
        change = {"fwd": whole, "bwd": -whole, "bwd_input": rest - whole, "bwd_weight": -rest}[task.ty]
        held += change
        kept.append((cell.start if task.ty == "fwd" else cell.end, held))
    highest = max(size for _, size in kept)
    return tuple((at, max(0.0, most - highest + size)) for at, size in kept)
