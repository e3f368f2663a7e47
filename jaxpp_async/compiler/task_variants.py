"""Choose the variants of a microbatch loop's tasks that its schedule asks for, and the order in which they
run.

A variant is a version of a task. The backward of a stage can be whole or split in two, and the forward and
backward of the last stage can be separate or fused. The schedule says which of these variants are used. The
computation of a variant does not depend on the order of the schedule, so schedules that use the same variants
share their executables.

`split_backward` splits a backward into an input-gradient and a weight-gradient part. The input part makes
only the values that other stages need. The weight part makes everything else and can run later. Only cheap
operations are computed in both, and the fewest bytes are kept between the two. If both parts need an
operation that contains others, this operation is divided first. A checkpoint is replaced by the operations
that it computes again and differentiates, and a scan over layers becomes two scans.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxpp_async import schedules
from jaxpp_async.compiler.ir import Types
from jaxpp_async.compiler.ir_slicing import LightOps, split_needed
from jaxpp_async.compiler.partition import StagedLoop, StageTask, task_order
from jaxpp_async.compiler.rematerialization import choose_recomputation, free_values
from jaxpp_async.compiler.stage_assignment import TaskKey
from jaxpp_async.program.instructions import ActorId, Task

_WHOLE_TASKS: Mapping[str, tuple[str, ...]] = {
    "fwd": ("fwd",),
    "bwd": ("bwd",),
    "bwd_input": ("bwd",),
    "bwd_weight": ("bwd",),
    "fwd_bwd": ("fwd", "bwd"),
    "fwd_bwd_input": ("fwd", "bwd"),
    "finish": ("finish",),
}
"""For each kind of variant (form of a task), the kinds of the whole tasks from which the variant is made."""


@dataclass(frozen=True, eq=False)
class Variant:
    """The version of a stage's task that a schedule asks for, such as half of a split backward.

    Args:
        task: the computation of the variant; its kind is one of `fwd`, `bwd`, `bwd_input`, `bwd_weight`,
            `fwd_bwd`, `fwd_bwd_input`, `finish`.
        takes: the ids of the values that the variant needs from other tasks, in order of first use.
        makes: the ids of the values that the variant makes for other tasks.
    """

    task: StageTask
    takes: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ScheduledLoop:
    """A microbatch loop with its schedule, and the variants (versions) of its tasks that the schedule uses.

    Args:
        staged: the loop, split into the tasks of its stages.
        tasks: the schedule, one row of tasks per actor.
        stage_actors: the actor of each stage.
        variants: the variants that are used, by kind and stage.
        order: the scheduled tasks as tuples (actor, task, key in `variants`), in an order in which one
            process could run them all, one after the other.
    """

    staged: StagedLoop
    tasks: tuple[tuple[Task, ...], ...]
    stage_actors: tuple[ActorId, ...]
    variants: Mapping[TaskKey, Variant]
    order: tuple[tuple[ActorId, Task, TaskKey], ...]

    def variants_on_actors(self) -> Iterable[tuple[Variant, ActorId]]:
        """Yield each variant (version of a task) that is used, with the actor that runs it."""
        for (_, stage), variant in self.variants.items():
            yield variant, self.stage_actors[stage]


def schedule_loop(staged: StagedLoop, tasks: Sequence[Sequence[Task]], types: Types) -> ScheduledLoop:
    """Make the variants of a loop's tasks that its schedule uses, and choose one for each scheduled task.

    A variant is a version of a task, such as half of a split backward. Scheduled tasks for which the program
    has nothing to compute are left out.

    Args:
        staged: the loop, split into the tasks of its stages.
        tasks: the resolved schedule, one row of tasks per actor.
        types: the type of each value; types of newly created values are added to it.
    """
    variants = _Variants(staged, types)
    fused = _fuse_last_stage(staged, tasks, variants)
    order: list[tuple[ActorId, Task, TaskKey]] = []
    stored_keys: dict[TaskKey, TaskKey | None] = {}  # None: nothing to compute
    for actor, task in schedules.global_order(tasks):
        key = fused.get(task, (task.ty, task.stage))
        if key is None:
            continue
        if key not in stored_keys:
            stored_keys[key] = None if variants.find(key) is None else variants.canonical_key(key)
        if (stored := stored_keys[key]) is not None:
            order.append((actor, task, stored))
    order = insert_finishes(order, staged, variants.finishes())
    used = dict.fromkeys(key for _, _, key in order)
    used_variants = {key: variants.variant(key) for key in sorted(used, key=lambda k: (task_order(k), k))}
    rows = tuple(tuple(row) for row in tasks)
    return ScheduledLoop(staged, rows, schedules.stage_actors(rows), used_variants, tuple(order))


def insert_finishes(
    order: Sequence[tuple[ActorId, Task, TaskKey]],
    staged: StagedLoop,
    finishes: Mapping[int, Collection[TaskKey]],
) -> list[tuple[ActorId, Task, TaskKey]]:
    """Return an order of tasks with the finish of each stage and microbatch added.

    A finish comes after the tasks whose values it reads and two more tasks of its actor: one may run at the
    same time as the last of these tasks, and the values travel during the other.

    Args:
        order: the tasks, in an order in which one process could run them all, each with its actor and the key
            of its variant.
        staged: the loop, split into the tasks of its stages.
        finishes: for each stage with a finish task, the whole tasks whose values the finish reads.
    """
    if not finishes:
        return list(order)
    actors = {task.stage: actor for actor, task, _ in order}
    waiting: dict[tuple[int, int], set[TaskKey]] = {}  # by microbatch and stage
    left = Counter[tuple[int, TaskKey]]()
    for _, task, key in order:
        left.update((task.i, (kind, task.stage)) for kind in _WHOLE_TASKS[key[0]])
    found: list[tuple[ActorId, Task, TaskKey]] = []
    ready: dict[ActorId, deque[list]] = defaultdict(deque)  # finishes, with the tasks to let pass

    def add(actor: ActorId, i: int, stage: int) -> None:
        found.append((actor, Task(i, "bwd", stage), ("finish", stage)))

    for actor, task, key in order:
        found.append((actor, task, key))
        for entry in ready[actor]:
            entry[0] -= 1
        while ready[actor] and ready[actor][0][0] <= 0:
            add(actor, *ready[actor].popleft()[1:])
        for kind in _WHOLE_TASKS[key[0]]:
            left[task.i, (kind, task.stage)] -= 1
            if left[task.i, (kind, task.stage)]:
                continue
            for stage, needs in finishes.items():
                if (kind, task.stage) in needs:
                    missing = waiting.setdefault((task.i, stage), set(needs))
                    missing.discard((kind, task.stage))
                    if not missing:
                        ready[actors[stage]].append([2, task.i, stage])
    for actor, entries in ready.items():
        for _, i, stage in entries:
            add(actor, i, stage)
    return found


def _fuse_last_stage(
    staged: StagedLoop, tasks: Sequence[Sequence[Task]], variants: _Variants
) -> dict[Task, TaskKey | None]:
    """Find the forwards of the last stage that can be fused with the backward of the same microbatch.

    A forward and a backward can be fused if the actor computes nothing between them.

    Returns:
        A dictionary with two entries for each pair of tasks to fuse. The value for the forward task is None,
        since the task does not run separately. The value for the backward task is the key of the fused
        variant (version of a task).
    """
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
    """A table of the variants (versions) of one loop's tasks. A variant is made when it is first read."""

    def __init__(self, staged: StagedLoop, types: Types) -> None:
        self.staged, self.types = staged, types
        self._made: dict[TaskKey, StageTask | None] = dict(staged.tasks)
        # The whole tasks, in order, that read each value that another task makes.
        self._readers: dict[int, list[TaskKey]] = {}
        for key, task in staged.tasks.items():
            for v in staged.takes(task):
                self._readers.setdefault(v, []).append(key)
        self._rank = {v: rank for rank, v in enumerate(self._readers)}

    def find(self, key: TaskKey) -> StageTask | None:
        """Return the computation of a variant (version of a task); None if it has nothing to compute.

        Args:
            key: the kind and stage of the variant.
        """
        if key not in self._made:
            self._make(*key)
        return self._made[key]

    def finishes(self) -> dict[int, set[TaskKey]]:
        """Return the whole tasks whose values each finish task reads, by the stage of the finish task."""
        found: dict[int, set[TaskKey]] = {stage: set() for ty, stage in self.staged.tasks if ty == "finish"}
        for v, readers in self._readers.items() if found else ():
            for stage in (stage for ty, stage in readers if ty == "finish"):
                tasks = self.staged.tasks.items()
                found[stage].add(next(key for key, task in tasks if v in task.made and key[0] != "finish"))
        return found

    def canonical_key(self, key: TaskKey) -> TaskKey:
        """Return the key under which to store a variant (version of a task); equal variants share a key.

        If one half of a split backward has nothing to compute, the other half gets the key of the whole
        backward, or if it is fused with the forward, that of the fused whole backward. All other keys are
        returned unchanged.

        Args:
            key: the kind and stage of the variant.
        """
        ty, stage = key
        if ty in ("bwd_input", "bwd_weight"):
            other = "bwd_weight" if ty == "bwd_input" else "bwd_input"
            if self.find((other, stage)) is None:
                return ("bwd", stage)
        if ty == "fwd_bwd_input" and self.find(("bwd_weight", stage)) is None:
            return ("fwd_bwd", stage)
        return key

    def variant(self, key: TaskKey) -> Variant:
        """Return a variant (version of a task), with the values that it exchanges with other tasks.

        Args:
            key: the kind and stage of the variant.
        """
        task = self.find(key)
        assert task is not None
        return Variant(task, tuple(self.staged.takes(task)), tuple(self._makes(task)))

    def _make(self, ty: str, stage: int) -> None:
        whole = self.staged.tasks.get(("bwd", stage))
        if ty in ("bwd_input", "bwd_weight"):
            wanted = (
                [v for v in self._makes(whole) if any(k[1] != stage for k in self._readers[v])]
                if whole
                else ()
            )
            parts = whole and split_backward(self.staged, whole, wanted, self.types)
            self._made["bwd_input", stage], self._made["bwd_weight", stage] = parts or (None, None)
        elif ty in ("fwd_bwd", "fwd_bwd_input"):
            first, second = self.find(("fwd", stage)), self.find((ty.removeprefix("fwd_"), stage))
            assert first is not None and second is not None
            self._made[ty, stage] = _join((ty, stage), first, second)
        else:
            self._made[ty, stage] = None

    def _makes(self, task: StageTask) -> list[int]:
        """Return the ids of the values that a variant (version of a task) makes for other tasks.

        The ids are in the order in which the other tasks, neither split nor fused, first read the values. If
        the variant is the first half of a split backward, the ids that only the second half needs come last.
        """
        ty, stage = task.key
        own = {(kind, stage) for kind in _WHOLE_TASKS[ty]}
        made = task.made
        crossing = [v for v in made & self._readers.keys() if any(k not in own for k in self._readers[v])]
        found = dict.fromkeys(sorted(crossing, key=self._rank.__getitem__))
        if ty.endswith("bwd_input") and (rest := self.find(("bwd_weight", stage))) is not None:
            found |= {v: None for v in self.staged.takes(rest) if v in made}
        return list(found)


def _join(key: TaskKey, first: StageTask, second: StageTask) -> StageTask:
    """Return a task that runs two tasks, one after the other.

    Operations that both tasks contain run only once.

    Args:
        key: the kind and stage of the new task.
        first: the task that runs first.
        second: the task that runs second.
    """
    made = first.made
    ops = (*first.ops, *(op for op in second.ops if not made.intersection(op.outputs)))
    return replace(first, key=key, ops=ops, adds=(*first.adds, *second.adds))


# ---------------------------------------------------------------- split


def split_backward(
    staged: StagedLoop, task: StageTask, wanted: Collection[int], types: Types
) -> tuple[StageTask | None, StageTask | None]:
    """Split a backward task into an input-gradient part and a weight-gradient part.

    The input-gradient part makes the values that other stages need.

    Args:
        staged: the loop, split into the tasks of its stages.
        task: a task of kind `"bwd"`.
        wanted: the ids of the values of the task that other stages need.
        types: the type of each value; types of newly created values are added to it.

    Returns:
        The input-gradient part and the weight-gradient part. If one part would have nothing to compute, it is
        None, and the other part is the whole task.
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
    plan = choose_recomputation(first, staged.takes(later), free_values(staged, later.ops), types)
    return (
        StageTask(("bwd_input", stage), tuple(first), adds_first),
        replace(later, ops=plan.prepend_to(later.ops)),
    )
