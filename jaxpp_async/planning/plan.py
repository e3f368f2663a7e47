"""Define a plan: the cut, the schedule and the order that were chosen for a step, and all that lost to it.

A `Plan` is plain data. It can be printed, saved and loaded, and it says for which step, shapes and actors it
was made. `planner.plan` makes one.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import msgspec
from rich.console import Console
from rich.table import Table

from jaxpp_async.errors import PlanError, ScheduleError
from jaxpp_async.planning.simulation import StepTimes
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules import schedule_to_csv, stage_actors
from jaxpp_async.schedules.timing import time_schedule
from jaxpp_async.schedules.torch_csv import KINDS, TASK
from jaxpp_async.schedules.validate import LETTERS, plural

KIND, VERSION = "jaxpp_async plan", 1
"""The kind and the version of the files that `Plan.save` writes."""

SHOWN_CANDIDATES, SHOWN_ASSUMED, WIDTH = 12, 6, 110
"""The numbers of candidates and of assumptions that a printed plan shows, and the width of its lines."""


@dataclass(frozen=True)
class PlannedSchedule:
    """A schedule whose order of tasks was planned for one step, valid for its microbatches and actors alone.

    Args:
        rows: the tasks of each actor, in order of execution.
        stages: the marks that are stage boundaries, counted from 0.
        name: the schedule's name in messages, such as `"Std1F1B(4)"` or `"searched"`.
    """

    rows: tuple[tuple[Task, ...], ...] = field(repr=False)
    stages: tuple[int, ...]
    name: str = "planned"

    @property
    def num_stages(self) -> int:
        """The number of stages, one more than there are boundaries."""
        return len(self.stages) + 1

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of the step that the schedule was made for."""
        return 1 + max(task.i for row in self.rows for task in row)

    @property
    def num_actors(self) -> int:
        """The number of actors that the schedule was made for."""
        return len(self.rows)

    @property
    def stage_actors(self) -> tuple[int, ...]:
        """The actor of each stage."""
        return stage_actors(self.rows)

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        """Return the planned tasks: one list per actor, in order of execution.

        Args:
            num_microbatches: the number of microbatches of the step.
            num_actors: the number of actors of the mesh.

        Raises:
            ScheduleError: the plan was made for another number of microbatches or actors.
        """
        asked = (num_microbatches, num_actors)
        if asked != (self.num_microbatches, self.num_actors):
            made = _counts(self.num_microbatches, self.num_actors)
            raise ScheduleError(
                f"this schedule was planned for {made}, and the step has {_counts(*asked)}; plan again for "
                "this step, or run the step that was planned"
            )
        return [list(row) for row in self.rows]


def _counts(num_microbatches: int, num_actors: int) -> str:
    return f"{plural(num_microbatches, 'microbatch', 'es')} on {plural(num_actors, 'actor')}"


def format_row(row: Sequence[Task]) -> str:
    """Return an actor's tasks as text, such as `"0F0 0F1 0B0"`: stage, kind and microbatch of each."""
    return " ".join(f"{task.stage}{LETTERS[task.ty]}{task.i}" for task in row)


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


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
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


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The cut, the schedule and the order of tasks that were chosen for a step; `print` shows all of it.

    Run it with `mesh.distributed(fn, plan=plan)`, or give `plan.schedule` to `accumulate_grads`.

    Attributes:
        step: the name of the step function.
        arguments: the type of each leaf of the arguments, by its name.
        num_actors: the number of actors.
        spmd_mesh: the shape of each actor's device mesh.
        num_microbatches: the number of microbatches.
        marks: the marks of the step, as text.
        cut: the marks that are stage boundaries, counted from 0.
        name: the name of the schedule.
        orders: the tasks of each actor as text.
        step_s: the simulated time of the compiled step in seconds, at quantiles of the draws.
        loop_s: the time of the lists of tasks in seconds, by the mean costs.
        bound: a time in seconds below which no schedule can run the lists of tasks with this cut on these
            actors, by the mean costs.
        memory: by actor, the bytes that each device needs.
        cap_bytes: the memory of each device; None if nothing limits it.
        candidates: what was considered, the best first.
        advice: sentences that say what would make the step shorter.
        assumed: sentences, one for each number that was estimated or assumed and not measured.
    """

    step: str
    arguments: dict[str, str]
    num_actors: int
    spmd_mesh: dict[str, int]
    num_microbatches: int
    marks: tuple[str, ...]
    cut: tuple[int, ...]
    name: str
    orders: tuple[str, ...]
    step_s: StepTimes
    loop_s: float
    bound: float
    memory: tuple[int, ...]
    cap_bytes: float | None
    candidates: tuple[Candidate, ...]
    advice: tuple[str, ...]
    assumed: tuple[str, ...]

    @cached_property
    def schedule(self) -> PlannedSchedule:
        """The schedule, with its `stages`, for the microbatches and actors of the plan."""
        return PlannedSchedule(tuple(map(parse_row, self.orders)), self.cut, self.name)

    @property
    def gap(self) -> float:
        """The share of the bound by which the planned lists of tasks may still be too long."""
        return self.loop_s / self.bound - 1 if self.bound else 0.0

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
        text = msgspec.json.format(msgspec.json.encode(_File(KIND, VERSION, self)), indent=1)
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            unfinished.write_bytes(text)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Args:
            path: the file to read.

        Raises:
            PlanError: the file is no plan, or one of another version, or it is damaged.
            OSError: the file cannot be read.
        """
        data = Path(path).read_bytes()
        try:
            header = msgspec.json.decode(data, type=_Header)
            if header.kind != KIND:
                raise PlanError(f"{path}: this file is no plan")
            if header.version != VERSION:
                raise PlanError(
                    f"{path}: this plan has version {header.version}, and this version of jaxpp_async reads "
                    f"{VERSION}; plan again"
                )
            plan = msgspec.json.decode(data, type=_File).plan
        except msgspec.DecodeError as error:
            raise PlanError(f"{path}: this file is no plan, or it is damaged: {error}") from None
        plan.schedule  # noqa: B018 # raises PlanError if an order is damaged
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
            f"<Plan of {self.step!r}: {self.name}, cut {list(self.cut)}, {1e3 * self.step_s.p50:.4g} ms on "
            f"{plural(self.num_actors, 'actor')}; print() it, .schedule, .candidates, .gap, .save(path)>"
        )

    def __str__(self) -> str:
        p10, p50, p90 = (f"{1e3 * x:.4g}" for x in self.step_s)
        count, boundaries = len(self.marks), ", ".join(map(str, self.cut)) or "none"
        lines = [
            f"plan of step {self.step!r}: {self.name}, {plural(self.num_microbatches, 'microbatch', 'es')} "
            f"on {plural(self.num_actors, 'actor')}{_mesh_text(self.spmd_mesh)}",
            f"stages end at the marks {boundaries} of {count}",
            f"predicted: {p50} ms a step (p10 {p10}, p90 {p90})",
            f"memory: {_bytes(max(self.memory))} of {_bytes(self.cap_bytes)} on the fullest device",
            f"bound: no schedule of this cut runs the loop in less than {1e3 * self.bound:.4g} ms; this one "
            f"takes {1e3 * self.loop_s:.4g} ms, {self.gap:.1%} more",
            "",
            _table(self.candidates),
            "mbs: microbatches; ~: estimated, not compiled",
            "",
            _grid(self.schedule),
        ]
        if self.advice:
            lines += ["", "what would help next:", *(f"  {text}" for text in self.advice)]
        if self.assumed:
            lines += ["", "estimated or assumed, not measured:"]
            lines += [f"  {text}" for text in self.assumed[:SHOWN_ASSUMED]]
            if (more := len(self.assumed) - SHOWN_ASSUMED) > 0:
                lines.append(f"  and {more} more; `.assumed` has all")
        return "\n".join(lines)


class _Header(msgspec.Struct):
    kind: str
    version: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    version: int
    plan: Plan


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
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} B"


def _table(candidates: Sequence[Candidate]) -> str:
    meshes = {(c.num_actors, tuple(c.spmd_mesh.items())) for c in candidates}
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    if len(meshes) > 1:
        table.add_column("actors", no_wrap=True)
    for name in ("mbs", "ms", "memory", "bubble"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why")
    for c in candidates[:SHOWN_CANDIDATES]:
        where = [f"{c.num_actors}{_mesh_text(c.spmd_mesh)}"] if len(meshes) > 1 else []
        about = "" if c.is_compiled else "~"
        memory = f"{about}{_bytes(c.peak_bytes)}"
        time = f"{about}{1e3 * c.step_s:.4g}"
        table.add_row(c.name, *where, str(c.num_microbatches), time, memory, f"{c.bubble:.1%}", c.verdict)
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, highlight=False, markup=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().rstrip().split("\n")]
    if (more := len(candidates) - SHOWN_CANDIDATES) > 0:
        lines.append(f"and {more} more; `.candidates` has all")
    return "\n".join(lines)


def _grid(schedule: PlannedSchedule) -> str:
    """Return a drawing of the schedule's start: one line per actor, stage and microbatch in each cell.

    In the drawing every task takes one unit of time.
    """
    starts = time_schedule(schedule.rows).starts
    cells: dict[tuple[int, int], str] = {}
    for actor, row in enumerate(starts):
        for task, start in zip(schedule.rows[actor], row, strict=True):
            cells[actor, int(start)] = f"{task.stage}{LETTERS[task.ty]}{task.i}"
    wide = max(map(len, cells.values())) + 1
    count = 1 + max(slot for _, slot in cells)
    shown = min(count, (WIDTH - 12) // wide)
    lines = [
        f"actor {actor:<3}"
        + "".join(cells.get((actor, k), ".").rjust(wide) for k in range(shown)).rstrip()
        + (" ..." if shown < count else "")
        for actor in range(len(starts))
    ]
    return "\n".join(
        ["the order: stage, kind (F forward, B backward, I and W its halves), microbatch", *lines]
    )
