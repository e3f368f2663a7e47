"""Define a plan: the cut, the schedule and the order that were chosen for a step, and all that lost to it.

A `Plan` is plain data, which can be printed, saved and loaded, and says for which step, shapes and actors it
was made. `planner.plan` makes one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import msgspec
from rich.table import Table

from jaxpp_async.base.printable import first_line
from jaxpp_async.base.quantities import format_bytes
from jaxpp_async.errors import PlanError, ScheduleError
from jaxpp_async.planning.drawing import draw_plan
from jaxpp_async.planning.simulation import StepTimes
from jaxpp_async.planning.versioned_file import load_versioned, save_versioned
from jaxpp_async.program.instructions import Task, TaskType
from jaxpp_async.schedules import resolve, schedule_to_csv
from jaxpp_async.schedules.planned import PlannedSchedule
from jaxpp_async.schedules.timing import time_schedule
from jaxpp_async.schedules.torch_csv import KINDS, TASK
from jaxpp_async.schedules.validate import plural, short_task
from jaxpp_async.view import Drawable, Drawing, format_time
from jaxpp_async.view.table import table_as_text

KIND, VERSION = "jaxpp_async plan", 2
"""The kind and the version of the files that `Plan.save` writes."""

SHOWN_CANDIDATES, SHOWN_ASSUMED, WIDTH = 12, 6, 110
"""The numbers of candidates and of assumptions that a printed plan shows, and the width of its lines."""


def format_row(row: Sequence[Task]) -> str:
    """Return an actor's tasks as text, such as `"0F0 0F1 0B0"`: stage, kind and microbatch of each."""
    return " ".join(map(short_task, row))


def idle_text(rows: Sequence[Sequence[Task]]) -> str:
    """Return a sentence that says how many actors have no task; the empty text if all have some."""
    idle = sum(not row for row in rows)
    if not idle:
        return ""
    have = "has" if idle == 1 else "have"
    return f"{idle} of {plural(len(rows), 'actor')} {have} no task in this plan; ask for {len(rows) - idle}"


def parse_row(text: str) -> tuple[Task, ...]:
    """Return the tasks of a text that `format_row` has made.

    Raises:
        PlanError: a word of the text is no task.
    """
    found = []
    for word in text.split():
        match = TASK.fullmatch(word)
        if match is None or match[2] not in KINDS:
            raise PlanError(f"{word!r} is no task of a plan")
        found.append(Task(int(match[3]), KINDS[match[2]], int(match[1])))
    return tuple(found)


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to run a step, with its figures.

    Attributes:
        name: the schedule, such as `"Std1F1B(4)"`, or `"searched"`.
        num_actors: the number of actors.
        spmd_mesh: the shape of each actor's device mesh.
        num_microbatches: the number of microbatches.
        cut: the marks that are stage boundaries, counted from 0.
        step_s: the time of a step in seconds: of the simulated compiled step if `is_compiled`, else of the
            lists of tasks without what the step does outside its loop.
        peak_bytes: the largest need of a device; exact but for what `assumed` of the plan names if
            `is_compiled`, else estimated.
        cap_bytes: the memory of each device; None if nothing limits it.
        bubble: the share of the loop in which actors idle, on average.
        is_compiled: whether the figures are those of the compiled step.
        verdict: a phrase that says why the candidate was chosen or why it lost.
    """

    name: str
    num_actors: int
    spmd_mesh: dict[str, int]
    num_microbatches: int
    cut: tuple[int, ...]
    step_s: float
    peak_bytes: float
    cap_bytes: float | None
    bubble: float
    is_compiled: bool
    verdict: str

    @property
    def fits(self) -> bool:
        """Whether each device has enough memory."""
        return self.cap_bytes is None or self.peak_bytes <= self.cap_bytes


class Plan(Drawable, msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """The cut, the schedule and the order of tasks that were chosen for a step; `print` shows all of it.

    Run it with `mesh.distributed(fn, plan=plan)`, or give `plan.schedule` to `accumulate_grads`.

    Attributes:
        step: the name of the step function.
        arguments: the type of each leaf of the arguments, by its name.
        num_actors: the number of actors.
        spmd_mesh: the shape of each actor's device mesh.
        num_microbatches: the number of microbatches.
        marks: the marks of the step, as text.
        mark_names: the name of each mark; None for a mark without a name.
        cut: the marks that are stage boundaries, counted from 0.
        name: the name of the schedule.
        orders: the tasks of each actor as text.
        task_s: for each type of task, the seconds of one task of each stage, by the mean costs.
        step_s: the simulated time of the compiled step in seconds, at quantiles of the draws.
        loop_s: the time of the microbatch loop of the compiled step in seconds, by the mean costs.
        bound: a time in seconds below which no order of these stages' compiled tasks, on any of the actors,
            runs the loop, by the mean costs.
        placement_bound: the same for orders that have each stage on the actor where the plan has it.
        memory: by actor, the bytes that each device needs.
        kept_bytes: the bytes that a forward of each stage leaves for its backward, by estimate; empty if
            unknown.
        weight_kept_bytes: the bytes that stay from an input gradient until the weight gradient, likewise.
        cap_bytes: the memory of each device; None if nothing limits it.
        candidates: what was considered, the best first.
        search: a sentence that says what the search for an order has won.
        advice: sentences that say what would make the step shorter.
        assumed: sentences, one for each number that was estimated or assumed and not measured.
    """

    step: str
    arguments: dict[str, str]
    num_actors: int
    spmd_mesh: dict[str, int]
    num_microbatches: int
    marks: tuple[str, ...]
    mark_names: tuple[str | None, ...]
    cut: tuple[int, ...]
    name: str
    orders: tuple[str, ...]
    task_s: dict[TaskType, tuple[float, ...]]
    step_s: StepTimes
    loop_s: float
    bound: float
    placement_bound: float
    memory: tuple[int, ...]
    cap_bytes: float | None
    candidates: tuple[Candidate, ...]
    kept_bytes: tuple[float, ...] = ()
    weight_kept_bytes: tuple[float, ...] = ()
    search: str = ""
    advice: tuple[str, ...]
    assumed: tuple[str, ...]

    @cached_property
    def schedule(self) -> PlannedSchedule:
        """The schedule, with its `stages`, for the microbatches and actors of the plan."""
        return PlannedSchedule(tuple(map(parse_row, self.orders)), self.cut, self.name, self.mark_names)

    def to_drawing(self, **options: Any) -> Drawing:
        """Return the plan as a drawing; see `drawing.draw_plan`."""
        return draw_plan(self, **options)

    @property
    def gap(self) -> float:
        """The share of the bound by which the planned loop may still be too long."""
        return self.loop_s / self.bound - 1 if self.bound else 0.0

    @property
    def order_gap(self) -> float:
        """The share of `placement_bound` by which the planned lists of tasks may still be too long.

        The order alone can win this much at most; the rest of `gap` is for another placement.
        """
        return self.loop_s / self.placement_bound - 1 if self.placement_bound else 0.0

    # ------------------------------------------------------------ checks

    def check_mesh(self, name: str, num_actors: int, spmd_mesh: Mapping[str, int]) -> None:
        """Check that the plan was made for this step and a mesh of this shape.

        Args:
            name: the name of the step function.
            num_actors: the number of actors of the mesh.
            spmd_mesh: the shape of each actor's device mesh.

        Raises:
            PlanError: the plan was made for another step or another mesh.
        """
        if name != self.step:
            raise PlanError(f"this plan was made for the step {self.step!r}, and the step is {name!r}")
        if num_actors != self.num_actors:
            raise PlanError(
                f"this plan of step {name!r} was made for {plural(self.num_actors, 'actor')}, and the mesh "
                f"has {num_actors}; plan again for this mesh"
            )
        if dict(spmd_mesh) != self.spmd_mesh:
            raise PlanError(
                f"this plan of step {name!r} was made for spmd_mesh={self.spmd_mesh}, and the mesh has "
                f"{dict(spmd_mesh)}; plan again for this mesh"
            )

    def check_arguments(self, args: Sequence[Any]) -> None:
        """Check that the plan was made for arguments of these shapes.

        Args:
            args: the arguments, with a shape and a dtype in each leaf that is an array.

        Raises:
            PlanError: the plan was made for other arguments.
        """
        given = describe_arguments(args)
        if given == self.arguments:
            return
        wrong = [k for k in {**self.arguments, **given} if given.get(k) != self.arguments.get(k)]
        first = wrong[0]
        raise PlanError(
            f"this plan of step {self.step!r} was made for other arguments: {first} is "
            f"{given.get(first, 'not there')}, and was {self.arguments.get(first, 'not there')}"
            + (f" ({len(wrong) - 1} more differ)" if len(wrong) > 1 else "")
            + "; plan again for these arguments"
        )

    # ------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file as JSON; see `load`.

        Args:
            path: the file to write. A file that exists is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        save_versioned(path, KIND, VERSION, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Args:
            path: the file to read.

        Raises:
            PlanError: the file is no plan, or one of another version, or it is damaged.
            OSError: the file cannot be read.
        """
        plan = load_versioned(path, KIND, VERSION, Plan, PlanError, "plan again")
        try:
            _check(plan)
        except (PlanError, ScheduleError) as damage:
            raise PlanError(
                f"the plan in {os.fspath(path)!r} is damaged: {first_line(damage)}; plan again"
            ) from damage
        return plan

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the order of tasks in torch.distributed.pipelining's compute-only CSV format.

        The file does not have the cut: read it with `schedule_from_csv(path, stages=plan.cut)`.

        Args:
            path: the file to write. A file that exists is replaced.
        """
        schedule_to_csv(self.schedule, path, self.num_microbatches, self.num_actors)

    # ------------------------------------------------------------ text

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.step!r}: {self.name}, cut {list(self.cut)}, "
            f"{format_time(self.step_s.p50, 's')} on {plural(self.num_actors, 'actor')}; "
            "print() it, .schedule, .candidates, .gap, .save(path)>"
        )

    def __str__(self) -> str:
        return self.as_text()

    def _placement_lines(self) -> list[str]:
        """Return a line about the bound of the placement; none if it says no more than that of the cut."""
        if f"{self.order_gap:z.1%}" == f"{self.gap:z.1%}":
            return []
        return [
            "       with each stage on its actor none takes less than "
            f"{format_time(self.placement_bound, 's')}; this one takes {self.order_gap:z.1%} more"
        ]

    def as_text(self, width: int = WIDTH, *, shows_all: bool = False, all_shown_by: str | None = None) -> str:
        """Return the plan as text.

        Args:
            width: the number of characters of a line, at least 60. Sentences may be longer, but not the table
                and the drawing of the order.
            shows_all: whether every candidate and every assumption is shown, or the first ones.
            all_shown_by: words that say how to see all of them, such as `"--all shows all"`; None for the
                names of the plan's attributes.
        """
        most = len(self.candidates) + len(self.assumed) if shows_all else None
        count, boundaries = len(self.marks), ", ".join(map(str, self.cut)) or "none"
        lines = [
            f"plan of step {self.step!r}: {self.name}, {plural(self.num_microbatches, 'microbatch', 'es')} "
            f"on {plural(self.num_actors, 'actor')}{_mesh_text(self.spmd_mesh)}",
            f"stages end at the marks {boundaries} of {count}",
            *([idle_text(self.schedule.rows)] if not all(self.schedule.rows) else []),
            f"predicted: {self.step_s.as_text()}",
            f"memory: {_bytes(max(self.memory))} of {_bytes(self.cap_bytes)} on the fullest device",
            f"bound: no order with these stages and task times runs the loop in less than "
            f"{format_time(self.bound, 's')};",
            f"       this one takes {format_time(self.loop_s, 's')}, {self.gap:z.1%} more",
            *self._placement_lines(),
            f"search: {self.search}",
            "",
            _table(self.candidates, width, most or SHOWN_CANDIDATES, all_shown_by or "`.candidates` has all"),
            "mbs: microbatches; ~: estimated, not compiled",
            "",
            _grid(self.schedule, width),
        ]
        if self.advice:
            lines += ["", "what would help next:", *(f"  {text}" for text in self.advice)]
        if self.assumed:
            lines += ["", "estimated or assumed, not measured:"]
            shown = most or SHOWN_ASSUMED
            lines += [f"  {text}" for text in self.assumed[:shown]]
            if (more := len(self.assumed) - shown) > 0:
                lines.append(f"  and {more} more; {all_shown_by or '`.assumed` has all'}")
        return "\n".join(lines)


def _check(plan: Plan) -> None:
    """Check that a plan is complete, and that its parts agree with each other.

    Raises:
        PlanError: a number is negative or not finite, or two parts disagree.
        ScheduleError: the order of tasks is not valid.
    """
    if not (plan.num_actors == len(plan.orders) == len(plan.memory) >= 1):
        raise PlanError(
            f"it has orders of {plural(len(plan.orders), 'actor')}, and memory of {len(plan.memory)}, for "
            f"{plural(plan.num_actors, 'actor')}"
        )
    if not plan.marks or len(plan.marks) != len(plan.mark_names):
        raise PlanError(f"it has {plural(len(plan.marks), 'mark')} and {len(plan.mark_names)} names of marks")
    allowed = range(len(plan.marks))
    if list(plan.cut) != sorted(set(plan.cut)) or any(mark not in allowed for mark in plan.cut):
        raise PlanError(
            f"its cut is {_listed(plan.cut)}, and its {plural(len(plan.marks), 'mark')} can be named once "
            "each, in ascending order"
        )
    if any(len(times) != len(plan.cut) + 1 for times in plan.task_s.values()):
        raise PlanError(f"task_s does not have the times of {plural(len(plan.cut) + 1, 'stage')}")
    if any(len(sizes) not in (0, len(plan.cut) + 1) for sizes in (plan.kept_bytes, plan.weight_kept_bytes)):
        raise PlanError(f"it does not have the kept bytes of {plural(len(plan.cut) + 1, 'stage')}")
    if not plan.step_s.p10 <= plan.step_s.p50 <= plan.step_s.p90:
        raise PlanError("the quantiles of step_s are not in ascending order")
    counts = {"num_microbatches": plan.num_microbatches, **plan.spmd_mesh}
    for index, candidate in enumerate(plan.candidates):
        counts[f"num_microbatches of candidate {index}"] = candidate.num_microbatches
    for name, count in counts.items():
        if count < 1:
            raise PlanError(f"{name} is {count}")
    numbers: dict[str, float] = {"loop_s": plan.loop_s, "bound": plan.bound, "cap_bytes": plan.cap_bytes or 0}
    numbers |= {f"memory of actor {actor}": count for actor, count in enumerate(plan.memory)}
    of_stages = {f"task_s of {ty}": times for ty, times in plan.task_s.items()}
    of_stages |= {"kept_bytes": plan.kept_bytes, "weight_kept_bytes": plan.weight_kept_bytes}
    numbers |= {
        f"{name}, stage {stage}": number
        for name, all_ in of_stages.items()
        for stage, number in enumerate(all_)
    }
    numbers |= {f"step_s.{name}": seconds for name, seconds in plan.step_s._asdict().items()}
    for index, candidate in enumerate(plan.candidates):
        numbers |= {
            f"step_s of candidate {index}": candidate.step_s,
            f"peak_bytes of candidate {index}": candidate.peak_bytes,
            f"cap_bytes of candidate {index}": candidate.cap_bytes or 0,
        }
    for name, number in numbers.items():
        if not (math.isfinite(number) and number >= 0):
            raise PlanError(f"{name} is {number}")
    resolve(
        plan.schedule,
        num_stages=len(plan.cut) + 1,
        num_microbatches=plan.num_microbatches,
        num_actors=plan.num_actors,
    )


def _listed(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''}]"


def describe_arguments(args: Sequence[Any]) -> dict[str, str]:
    """Return the type of each leaf of a call's arguments, such as `"float32[64, 64]"`, by the leaf's name.

    Args:
        args: the arguments. A leaf that is no array stands for itself, as static arguments do.
    """
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tuple(args))[0]:
        name = f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])}"
        shape = getattr(leaf, "shape", None)
        found[name] = repr(leaf) if shape is None else f"{leaf.dtype}{list(shape)}"
    return found


def _mesh_text(spmd_mesh: Mapping[str, int]) -> str:
    return f" of {' x '.join(f'{size} {axis}' for axis, size in spmd_mesh.items())}" if spmd_mesh else ""


def _bytes(count: float | None) -> str:
    if count is None:
        return "any"
    return format_bytes(count)


def _table(candidates: Sequence[Candidate], width: int, most: int, all_shown_by: str) -> str:
    meshes = {(c.num_actors, tuple(c.spmd_mesh.items())) for c in candidates}
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    if len(meshes) > 1:
        table.add_column("actors", no_wrap=True)
    for name in ("mbs", "a step", "memory", "bubble"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", min_width=12)
    for c in candidates[:most]:
        where = [f"{c.num_actors}{_mesh_text(c.spmd_mesh)}"] if len(meshes) > 1 else []
        about = "" if c.is_compiled else "~"
        memory = f"{about}{_bytes(c.peak_bytes)}"
        time = f"{about}{format_time(c.step_s, 's')}"
        table.add_row(c.name, *where, str(c.num_microbatches), time, memory, f"{c.bubble:z.1%}", c.verdict)
    lines = [table_as_text(table, max(width, 60))]
    if (more := len(candidates) - most) > 0:
        lines.append(f"and {more} more; {all_shown_by}")
    return "\n".join(lines)


def _grid(schedule: PlannedSchedule, width: int) -> str:
    """Return a drawing of the schedule's start: one line per actor, stage and microbatch in each cell.

    In the drawing every task takes one unit of time.
    """
    starts = time_schedule(schedule.rows).starts
    cells: dict[tuple[int, int], str] = {}
    for actor, row in enumerate(starts):
        for task, start in zip(schedule.rows[actor], row, strict=True):
            cells[actor, int(start)] = short_task(task)
    wide = max(map(len, cells.values())) + 1
    count = 1 + max(slot for _, slot in cells)
    shown = min(count, (max(width, 60) - 13) // wide)
    lines = [
        f"actor {actor:<3}"
        + "".join(cells.get((actor, k), ".").rjust(wide) for k in range(shown)).rstrip()
        + (" ..." if shown < count else "")
        for actor in range(len(starts))
    ]
    return "\n".join(
        ["the order: stage, kind (F forward, B backward, I and W its halves), microbatch", *lines]
    )
