"""Draw a compiled step before it runs: each task as early as it can be, as long as its FLOPs say.

Which device runs the step and how fast its links are is not known here; `jaxpp_async.simulate` knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.program.buffer_table import held_bytes
from jaxpp_async.program.instructions import ActorId, Run, ValueId
from jaxpp_async.program.task_label import TaskLabel
from jaxpp_async.program.work import TaskWork
from jaxpp_async.view import Cell, Drawing, Row


def draw_step(
    compiled: CompilePlan, works: Sequence[TaskWork], title: str, *, cap: float | None = None
) -> Drawing:
    """Return a compiled step as a drawing, with the bytes of each actor's buffer table.

    Args:
        compiled: the compiler's result.
        works: the work of each executable.
        title: the line above the drawing.
        cap: the bytes that each actor may hold, to be drawn as a line; None if there is no limit.
    """
    graph, flops = compiled.placed.graph, [work.flops for work in works]
    forwards = [flops[node.executable] for node in graph.nodes if node.label.startswith("fwd(")]
    unit = max(forwards, default=0.0) or max(flops, default=0.0) or 1.0
    ready: dict[ValueId, float] = {}
    free: dict[ActorId, float] = dict.fromkeys(range(graph.num_actors), 0.0)
    cells: dict[ActorId, list[Cell]] = {actor: [] for actor in free}
    for node in graph.nodes:
        start = max([free[node.actor], *(ready.get(v, 0.0) for v in node.inputs)])
        end = free[node.actor] = start + flops[node.executable] / unit
        ready.update(dict.fromkeys(node.outputs, end))
        label = TaskLabel.parse(node.label)
        cells[node.actor].append(Cell(start, end, label.traits.kind, label.number, label.text))
    rows = []
    for program in compiled.programs:
        mine, starts = cells[program.actor], iter(cells[program.actor])
        now, memory = 0.0, []
        for instruction, size in zip(program.instructions, held_bytes(program), strict=True):
            if isinstance(instruction, Run):
                now = next(starts).start
            memory.append((now, float(size)))
        rows.append(Row(f"actor {program.actor}", tuple(mine), memory=tuple(memory)))
    busy = sum(cell.end - cell.start for row in rows for cell in row.cells)
    end = max(free.values(), default=0.0)
    idle = 1 - busy / (end * len(rows)) if end else 0.0
    note = f"tasks as long as their FLOPs say, transfers in no time: actors idle {idle:z.0%} of the step"
    return Drawing(title, tuple(rows), "forwards", cap=cap, advice=(note,))
