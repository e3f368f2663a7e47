"""Choose the variants of a cut loop's tasks that its schedule asks for, and the order in which they run.

A stage's tasks come in several variants: the backward whole or split in two, the last stage's forward and
backward apart or fused. The schedule says which are used. The computation of a variant does not depend on the
order of the schedule, so schedules that use the same variants share their executables.

`split_backward` splits a backward in an input-gradient and a weight-gradient part. The input part makes the
values that other stages wait for and nothing else. The weight part, the rest, can run later. Only light
operations are computed in both, and the fewest bytes are kept between the two. An operation that belongs to
both parts is taken apart first: a checkpoint is replaced by the operations that it computes again and
differentiates, a scan over layers becomes two scans.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxpp_async import schedules
from jaxpp_async.compiler.ir import Types
from jaxpp_async.compiler.ir_slicing import LightOps, split_needed
from jaxpp_async.compiler.partition import StagedLoop, StageTask, task_order
from jaxpp_async.compiler.rematerialization import choose_recomputation
from jaxpp_async.compiler.stage_assignment import TaskKey
from jaxpp_async.program.instructions import ActorId, Task

_WHOLE_TASKS: Mapping[str, tuple[str, ...]] = {
    "fwd": ("fwd",),
    "bwd": ("bwd",),
    "bwd_input": ("bwd",),
    "bwd_weight": ("bwd",),
    "fwd_bwd": ("fwd", "bwd"),
    "fwd_bwd_input": ("fwd", "bwd"),
}
"""The kinds of whole tasks that each variant is (a part of)."""


@dataclass(frozen=True, eq=False)
class Variant:
    """A variant of a stage's task.

    Args:
        task: its computation; its kind is one of `fwd`, `bwd`, `bwd_input`, `bwd_weight`, `fwd_bwd`,
            `fwd_bwd_input`.
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
        variants: the variants that are used.
        order: the tasks that run, in an order in which they could run one after the other: actor, task,
            variant.
    """

    staged: StagedLoop
    tasks: tuple[tuple[Task, ...], ...]
    stage_actors: tuple[ActorId, ...]
    variants: Mapping[TaskKey, Variant]
    order: tuple[tuple[ActorId, Task, TaskKey], ...]

    def variants_on_actors(self) -> Iterable[tuple[Variant, ActorId]]:
        """Pair each variant with the actor that runs it."""
        for (_, stage), variant in self.variants.items():
            yield variant, self.stage_actors[stage]


def schedule_loop(staged: StagedLoop, tasks: Sequence[Sequence[Task]], types: Types) -> ScheduledLoop:
    """Choose the variant of every scheduled task. A task for which the program has no computation is left
    out.

    Args:
        staged: the loop.
        tasks: a resolved schedule.
        types: of the loop's values; new values enter it.
    """
    variants = _Variants(staged, types)
    fused = _fuse_last_stage(staged, tasks, variants)
    order: list[tuple[ActorId, Task, TaskKey]] = []
    names: dict[TaskKey, TaskKey | None] = {}  # None: nothing to compute
    for actor, task in schedules.global_order(tasks):
        key = fused.get(task, (task.ty, task.stage))
        if key is None:
            continue
        if key not in names:
            names[key] = None if variants.find(key) is None else variants.name(key)
        if (name := names[key]) is not None:
            order.append((actor, task, name))
    used = dict.fromkeys(key for _, _, key in order)
    used_variants = {key: variants.variant(key) for key in sorted(used, key=lambda k: (task_order(k), k))}
    rows = tuple(tuple(row) for row in tasks)
    return ScheduledLoop(staged, rows, schedules.stage_actors(rows), used_variants, tuple(order))


def _fuse_last_stage(
    staged: StagedLoop, tasks: Sequence[Sequence[Task]], variants: _Variants
) -> dict[Task, TaskKey | None]:
    """Map the last stage's forwards that their backward follows to None, and those backwards to the fused
    variant."""
    last = staged.num_stages - 1
    found: dict[Task, TaskKey | None] = {}
    for row in tasks:
        if not any(t.stage == last for t in row):
            continue
        real = [t for t in row if variants.find((t.ty, t.stage)) is not None]
        for first, second in itertools.pairwise(real):
            follows = second.ty in ("bwd", "bwd_input") and (second.stage, second.i) == (last, first.i)
            if first.ty == "fwd" and first.stage == last and follows:
                found[first] = None
                found[second] = (f"fwd_{second.ty}", last)
    return found


class _Variants:
    """A table of the variants of one loop's tasks, each made when first asked for."""

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
        """Return the computation of a variant; None if there is nothing to compute."""
        if key not in self._made:
            self._make(*key)
        return self._made[key]

    def name(self, key: TaskKey) -> TaskKey:
        """Return the name under which a variant is known: half a backward that is all of it is named
        `bwd`."""
        ty, stage = key
        if ty in ("bwd_input", "bwd_weight"):
            other = "bwd_weight" if ty == "bwd_input" else "bwd_input"
            if self.find((other, stage)) is None:
                return ("bwd", stage)
        if ty == "fwd_bwd_input" and self.find(("bwd_weight", stage)) is None:
            return ("fwd_bwd", stage)
        return key

    def variant(self, key: TaskKey) -> Variant:
        """Return a variant with the values it takes and makes."""
        task = self.find(key)
        assert task is not None
        return Variant(task, tuple(self.staged.takes(task)), tuple(self._makes(task)))

    def _make(self, ty: str, stage: int) -> None:
        whole = self.staged.tasks.get(("bwd", stage))
        if ty in ("bwd_input", "bwd_weight"):
            parts = whole and split_backward(self.staged, whole, self._makes(whole), self.types)
            self._made["bwd_input", stage], self._made["bwd_weight", stage] = parts or (None, None)
        elif ty in ("fwd_bwd", "fwd_bwd_input"):
            first, second = self.find(("fwd", stage)), self.find((ty.removeprefix("fwd_"), stage))
            assert first is not None and second is not None
            self._made[ty, stage] = _join((ty, stage), first, second)
        else:
            self._made[ty, stage] = None

    def _makes(self, task: StageTask) -> list[int]:
        """List the values that a variant makes for other tasks, in the order in which the whole tasks read
        them."""
        ty, stage = task.key
        own = {(kind, stage) for kind in _WHOLE_TASKS[ty]}
        made = task.made
        crossing = [v for v in made & self._readers.keys() if any(k not in own for k in self._readers[v])]
        found = dict.fromkeys(sorted(crossing, key=self._rank.__getitem__))
        if ty.endswith("bwd_input") and (rest := self.find(("bwd_weight", stage))) is not None:
            found |= {v: None for v in self.staged.takes(rest) if v in made}
        return list(found)


def _join(key: TaskKey, first: StageTask, second: StageTask) -> StageTask:
    """Join two tasks into one. Light operations that both have run once."""
    made = first.made
    ops = (*first.ops, *(op for op in second.ops if not made.intersection(op.outputs)))
    return replace(first, key=key, ops=ops, adds=(*first.adds, *second.adds))


# ---------------------------------------------------------------- split


def split_backward(
    staged: StagedLoop, task: StageTask, wanted: Collection[int], types: Types
) -> tuple[StageTask | None, StageTask | None]:
    """Split a backward task in two. Where one part has nothing to do it is None, and the other is the whole
    task.

    Args:
        staged: the loop.
        task: of kind `"bwd"`.
        wanted: ids of the values that other stages need.
        types: of the loop's values; new values enter it.

    Returns:
        The input-gradient part and the weight-gradient part.
    """
    stage = task.key[1]
    if not wanted:
        return None, replace(task, key=("bwd_weight", stage))
    first, second = split_needed(task.ops, wanted)
    early = {o for op in first for o in op.outputs}
    adds_first = tuple((k, j) for k, j in task.adds if staged.outputs[k][j].value in early)
    adds_second = tuple(a for a in task.adds if a not in adds_first)
    if not second and not adds_second:
        return replace(task, key=("bwd_input", stage)), None
    later = StageTask(("bwd_weight", stage), tuple(second), adds_second)
    repeated = LightOps.among(first, staged.loop.body.inputs).needed(staged.reads(later))
    later = replace(later, ops=(*repeated.values(), *second))
    plan = choose_recomputation(first, staged.takes(later), staged.loop.body.inputs, types)
    return (
        StageTask(("bwd_input", stage), tuple(first), adds_first),
        replace(later, ops=plan.prepend_to(later.ops)),
    )
