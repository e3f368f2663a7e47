"""Draw a timeline: what each actor did in a step, and behind it when its tasks could have run at best.

Time is counted from when the first actor took the step up. Pale cells show the tasks of the same durations,
each as early as the order of its actor and the tasks that it needs allow, if no transfer took time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from jaxpp_async.program.instructions import ActorId
from jaxpp_async.program.task_label import TaskLabel
from jaxpp_async.timeline.advice import advise
from jaxpp_async.timeline.breakdown import Cause, StepReplay, intervals
from jaxpp_async.timeline.events import ActorTimeline, TimelineTransfer
from jaxpp_async.view import Cell, CellKind, Drawing, Row

if TYPE_CHECKING:
    from jaxpp_async.timeline.timeline import Timeline

_SHOWN: Mapping[Cause, CellKind] = MappingProxyType({"wait": "waiting", "transfer": "transfer"})

_PLANNED = "without transfers and pauses"


def draw_timeline(timeline: Timeline, *, cap: float | None = None) -> Drawing:
    """Return a timeline as a drawing, with the bytes of each actor's buffer table and the bill as advice.

    Args:
        timeline: a step that was measured or simulated.
        cap: the bytes that each actor may hold, to be drawn as a line; None if there is no limit.
    """
    received: dict[ActorId, dict[int, TimelineTransfer]] = defaultdict(dict)
    for t in timeline.transfers:
        received[t.receive.actor][t.receive.instruction] = t
    working = [actor for actor in timeline.actors if actor.events]
    ends = StepReplay(working, timeline.transfers).run_ends()
    rows = [_row(actor, received[actor.actor], timeline.begin_s, ends) for actor in timeline.actors]
    return Drawing(
        timeline.title, tuple(rows), cap=cap, advice=tuple(map(str, advise(timeline))), planned_text=_PLANNED
    )


def _row(
    actor: ActorTimeline,
    received: dict[int, TimelineTransfer],
    zero_s: float,
    ends: dict[tuple[ActorId, int], float],
) -> Row:
    gaps = [
        Cell(start - zero_s, end - zero_s, kind, title=kind)
        for cause, start, end in intervals(actor, received)
        if (kind := _SHOWN.get(cause)) is not None and end > start
    ]
    tasks, planned = [], []
    for run in actor.runs:
        label, end = TaskLabel.parse(run.label), ends[actor.actor, run.instruction]
        shown = label.traits.kind, label.number, label.text
        tasks.append(Cell(run.start_s - zero_s, run.end_s - zero_s, *shown))
        planned.append(Cell(end - run.duration_s, end, *shown))
    memory = [(event.start_s - zero_s, float(event.held_bytes)) for event in actor.events]
    cells = sorted([*gaps, *tasks], key=lambda cell: (cell.start, cell.end))
    return Row(f"actor {actor.actor}", tuple(cells), tuple(planned), tuple(sorted(memory)))
