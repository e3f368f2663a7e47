"""compiler.variants: a cut loop and its schedule in, the executables that run it and their order out. No jax.

A stage's tasks come in several forms, and the schedule says which are used: its backward whole or split in two, the
last stage's forward and backward apart or as one. What a form computes does not depend on the order of the schedule,
so schedules that use the same forms share their executables.

compiler.split: one backward task in, its input-gradient and weight-gradient parts out. No jax, no schedule.

The input part makes what other stages wait for and nothing else; the rest, the weight gradients, can run later. Nothing
that costs something is computed in both, and the fewest bytes are kept between them. An operation that does both at
once is opened first: a checkpoint is replaced by what it computes again and differentiates, a scan over layers becomes
two scans.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxpp_async import schedules
from jaxpp_async.compiler.ir import Types
from jaxpp_async.compiler.ir_slicing import LightOps, split_needed
from jaxpp_async.compiler.partition import StagedLoop, StageTask
from jaxpp_async.compiler.rematerialization import made_again
from jaxpp_async.compiler.stage_assignment import TaskKey
from jaxpp_async.program.instructions import ActorId, Task

_WHOLE: Mapping[str, tuple[str, ...]] = {
    "fwd": ("fwd",),
    "bwd": ("bwd",),
    "bwd_input": ("bwd",),
    "bwd_weight": ("bwd",),
    "fwd_bwd": ("fwd", "bwd"),
    "fwd_bwd_input": ("fwd", "bwd"),
}
"""For each form, the kinds of whole tasks that it is (a part of)."""


@dataclass(frozen=True, eq=False)
class Variant:
    """A form of a stage's task.

    Args:
        task: what it computes; its kind is one of `fwd`, `bwd`, `bwd_input`, `bwd_weight`, `fwd_bwd`, `fwd_bwd_input`.
        takes: ids of the values it needs of other tasks, in order of first use.
        makes: ids of the values it makes for other tasks.
    """

    task: StageTask
    takes: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ScheduledLoop:
    """A cut loop under a schedule.

    Args:
        staged: the loop.
        tasks: the schedule, an actor a row.
        stage_actors: the actor of each stage.
        variants: the forms that are used.
        order: what runs, in an order in which it could run one after the other: actor, task, form.
    """

    staged: StagedLoop
    tasks: tuple[tuple[Task, ...], ...]
    stage_actors: tuple[ActorId, ...]
    variants: Mapping[TaskKey, Variant]
    order: tuple[tuple[ActorId, Task, TaskKey], ...]

    def on_actors(self) -> Iterable[tuple[Variant, ActorId]]:
        """Each form with the actor that runs it."""
        for (_, stage), variant in self.variants.items():
            yield variant, self.stage_actors[stage]


def schedule_loop(staged: StagedLoop, tasks: Sequence[Sequence[Task]], types: Types) -> ScheduledLoop:
    """Choose the form of every scheduled task. A task for which the program has no computation is left out.

    Args:
        staged: the loop.
        tasks: a resolved schedule.
        types: of the loop's values; new values enter it.
    """
    forms = _Forms(staged, types)
    fused = _fused(staged, tasks, forms)
    last = staged.num_stages - 1
    order: list[tuple[ActorId, Task, TaskKey]] = []
    names: dict[TaskKey, TaskKey | None] = {}  # None: nothing to compute
    for actor, task in schedules.global_order(tasks):
        key = (task.ty, task.stage)
        if task.stage == last and task in fused:
            key = fused[task]
            if key is None:
                continue
        if key not in names:
            names[key] = None if forms.find(key) is None else forms.name(key)
        if (name := names[key]) is not None:
            order.append((actor, task, name))
    used = dict.fromkeys(key for _, _, key in order)
    variants = {key: forms.variant(key) for key in sorted(used, key=_order)}
    rows = tuple(tuple(row) for row in tasks)
    return ScheduledLoop(staged, rows, schedules.stage_actors(rows), variants, tuple(order))


def _order(key: TaskKey) -> tuple[int, int, str]:
    ty, stage = key
    return (0, stage, ty) if ty == "fwd" else (1, -stage, ty)


def _fused(staged: StagedLoop, tasks: Sequence[Sequence[Task]], forms: _Forms) -> dict[Task, TaskKey | None]:
    """The last stage's forwards that a backward follows: None for them, the joint form for the backward."""
    last = staged.num_stages - 1
    found: dict[Task, TaskKey | None] = {}
    for row in tasks:
        if not any(t.stage == last for t in row):
            continue
        real = [t for t in row if forms.find((t.ty, t.stage)) is not None]
        for first, second in itertools.pairwise(real):
            follows = second.ty in ("bwd", "bwd_input") and (second.stage, second.i) == (last, first.i)
            if first.ty == "fwd" and first.stage == last and follows:
                found[first] = None
                found[second] = (f"fwd_{second.ty}", last)
    return found


class _Forms:
    """The forms of one loop's tasks, each made when first asked for."""

    def __init__(self, staged: StagedLoop, types: Types) -> None:
        self.staged, self.types = staged, types
        self._made: dict[TaskKey, StageTask | None] = dict(staged.tasks)
        # For each value that crosses tasks: the whole tasks that read it, in order.
        self._readers: dict[int, list[TaskKey]] = {}
        for key, task in staged.tasks.items():
            for v in staged.takes(task):
                self._readers.setdefault(v, []).append(key)
        self._rank = {v: rank for rank, v in enumerate(self._readers)}

    def find(self, key: TaskKey) -> StageTask | None:
        """The form of a task; None if there is nothing to compute."""
        if key not in self._made:
            self._make(*key)
        return self._made[key]

    def name(self, key: TaskKey) -> TaskKey:
        """The form under the name by which it is known: half a backward that is all of it goes by `bwd`."""
        ty, stage = key
        if ty in ("bwd_input", "bwd_weight"):
            other = "bwd_weight" if ty == "bwd_input" else "bwd_input"
            if self.find((other, stage)) is None:
                return ("bwd", stage)
        if ty == "fwd_bwd_input" and self.find(("bwd_weight", stage)) is None:
            return ("fwd_bwd", stage)
        return key

    def variant(self, key: TaskKey) -> Variant:
        """A form with what it takes and makes."""
        task = self.find(key)
        assert task is not None
        return Variant(task, tuple(self.staged.takes(task)), tuple(self._makes(task)))

    def _make(self, ty: str, stage: int) -> None:
        whole = self.staged.tasks.get(("bwd", stage))
        if ty in ("bwd_input", "bwd_weight"):
            parts = (
                (None, None)
                if whole is None
                else split_backward(self.staged, whole, self._makes(whole), self.types)
            )
            self._made[("bwd_input", stage)], self._made[("bwd_weight", stage)] = parts
        elif ty in ("fwd_bwd", "fwd_bwd_input"):
            first, second = self.find(("fwd", stage)), self.find((ty.removeprefix("fwd_"), stage))
            assert first is not None and second is not None
            self._made[ty, stage] = _joined((ty, stage), first, second)
        else:
            self._made[ty, stage] = None

    def _makes(self, task: StageTask) -> list[int]:
        """What a form makes for others, in the order in which the whole tasks read it."""
        ty, stage = task.key
        own = {(kind, stage) for kind in _WHOLE[ty]}
        made = task.made
        crossing = [v for v in made & self._readers.keys() if any(k not in own for k in self._readers[v])]
        found = dict.fromkeys(sorted(crossing, key=self._rank.__getitem__))
        if ty.endswith("bwd_input") and (rest := self.find(("bwd_weight", stage))) is not None:
            found |= {v: None for v in self.staged.takes(rest) if v in made}
        return list(found)


def _joined(key: TaskKey, first: StageTask, second: StageTask) -> StageTask:
    """Two tasks as one. Light operations that both have are run once."""
    made = first.made
    ops = (*first.ops, *(op for op in second.ops if not made.intersection(op.outputs)))
    return replace(first, key=key, ops=ops, adds=(*first.adds, *second.adds))


# ---------------------------------------------------------------- split


def split_backward(
    staged: StagedLoop, task: StageTask, wanted: Collection[int], types: Types
) -> tuple[StageTask | None, StageTask | None]:
    """The two parts of a backward task. Where one has nothing to do it is None, and the other is the whole task.

    Args:
        staged: the loop.
        task: of kind `"bwd"`.
        wanted: ids of the values that other stages need.
        types: of the loop's values; new values enter it.
    """
    stage = task.key[1]
    if not wanted:
        return None, replace(task, key=("bwd_weight", stage))
    first, second = split_needed(task.ops, wanted)
    early = {o for op in first for o in op.outputs}
    adds_first = tuple(a for a in task.adds if _value(staged, a) in early)
    adds_second = tuple(a for a in task.adds if _value(staged, a) not in early)
    if not second and not adds_second:
        return replace(task, key=("bwd_input", stage)), None
    later = StageTask(("bwd_weight", stage), tuple(second), adds_second)
    repeated = LightOps.among(first, staged.loop.body.inputs).needed(staged.reads(later))
    later = replace(later, ops=(*repeated.values(), *second))
    again = made_again(first, staged.takes(later), staged.loop.body.inputs, types)
    return (
        StageTask(("bwd_input", stage), tuple(first), adds_first),
        replace(later, ops=again.read_by(later.ops)),
    )


def _value(staged: StagedLoop, add: tuple[int, int]) -> object:
    return staged.outputs[add[0]][add[1]].value
