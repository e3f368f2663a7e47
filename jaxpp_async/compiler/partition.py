"""Split the flat body of a microbatch loop into one forward and one backward task per pipeline stage.

`compiler.stage_assignment` chooses the task of each operation. Cheap operations that read only inputs of the
loop's body and results of other such operations are an exception. Every task that needs the result of such an
operation repeats the operation.

Source: the JaxPP paper, sections "Stage Marking", "Placement Inference" and "Weight Sharing".
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from jaxpp_async.compiler.ir import Loop, Op, Types, renamed
from jaxpp_async.compiler.ir_slicing import LightOps
from jaxpp_async.compiler.loop_commuting import Epilogue, LoopResults, OutputPart, commute_results
from jaxpp_async.compiler.primitives import MARKER, MARKER_SIDE
from jaxpp_async.compiler.stage_assignment import LIGHTWEIGHT, StageAssignment, TaskKey

__all__ = ["OutputPart", "StageTask", "StagedLoop", "TaskKey", "partition"]


@dataclass(frozen=True, eq=False)
class StageTask:
    """The computation of one task, such as the forward of stage 0, which is the same for all microbatches.

    Args:
        key: the task's kind and stage.
        ops: the operations of the task, in program order.
        adds: for each accumulator that the task adds to, a pair of positions (k, j). In every microbatch the
            task adds the value of `StagedLoop.outputs[k][j]`, part j of result k of the loop, to the
            accumulator.
    """

    key: TaskKey
    ops: tuple[Op, ...]
    adds: tuple[tuple[int, int], ...] = ()

    @cached_property
    def made(self) -> frozenset[int]:
        """The ids of the values that the task's operations compute."""
        return frozenset([o for op in self.ops for o in op.outputs if o >= 0])


@dataclass(frozen=True, eq=False)
class StagedLoop:
    """A microbatch loop whose body is split into the tasks of its pipeline stages.

    Args:
        num_stages: the number of stages, one more than the number of stage markers in the loop's body.
        tasks: the tasks that have something to compute, by kind and stage: first the forward tasks from the
            first stage to the last, then the backward tasks from the last stage to the first, then the
            finish tasks, which wait for values of earlier stages' backwards.
        outputs: for each result of the loop, its parts, that is the values that stages accumulate separately.
        epilogues: for each result of the loop, the operations that combine the result's accumulated parts
            after the loop; None for a result with a single part.
        loop: the loop that was split.
        stage_names: for each stage marker, the name that the user gave to it; None for a marker without a
            name.
    """

    num_stages: int
    tasks: dict[TaskKey, StageTask]
    outputs: tuple[tuple[OutputPart, ...], ...]
    epilogues: tuple[Epilogue | None, ...]
    loop: Loop
    stage_names: tuple[str | None, ...]

    @property
    def boundaries(self) -> list[str]:
        """The `file:line` of each stage marker, followed by the marker's name if it has one, for dumps."""
        lines = [op.line for op in self.loop.body.ops if isinstance(op, Op) and op.name == MARKER]
        named = zip(lines, self.stage_names, strict=True)
        return [line if name is None else f"{line} {name!r}" for line, name in named]

    def added(self, task: StageTask) -> list[int]:
        """Return the ids of the values that a task adds to accumulators.

        Constants that are added are left out, since they have no id.
        """
        values = (self.outputs[k][j].value for k, j in task.adds)
        return [v for v in values if isinstance(v, int)]

    def reads(self, task: StageTask) -> list[int]:
        """Return the ids of the values that a task reads but does not compute, in order of first use.

        These are values of other tasks and inputs of the loop's body.
        """
        if (known := self._reads.get(task)) is None:
            made = task.made
            wanted = [r for op in task.ops for r in op.reads] + self.added(task)
            known = self._reads[task] = [r for r in dict.fromkeys(wanted) if r not in made]
        return known

    def takes(self, task: StageTask) -> list[int]:
        """Return the ids of the values that a task needs from other tasks, in order of first use."""
        return [r for r in self.reads(task) if r not in self._roots]

    @cached_property
    def _reads(self) -> dict[StageTask, list[int]]:
        """A cache of the return values of `reads`, by task."""
        return {}

    @cached_property
    def _roots(self) -> frozenset[int]:
        return frozenset(self.loop.body.inputs)


def partition(loop: Loop, types: Types) -> StagedLoop:
    """Split a loop's body into the tasks of its stages, at the stage markers (`pipeline_yield`) that the user
    placed.

    Args:
        loop: the microbatch loop to split.
        types: the type of each value; types of newly created values are added to it.

    Raises:
        StageError: a stage needs a value of a later stage of the same microbatch.
        UnsupportedError: the marker of a gradient cannot be matched with its `pipeline_yield` in the forward.
    """
    stages = StageAssignment(loop, types)
    results = commute_results(stages, types)
    tasks = _tasks(stages, results)
    return StagedLoop(stages.num_stages, tasks, results.parts, results.epilogues, loop, stages.stage_names)


def _tasks(stages: StageAssignment, results: LoopResults) -> dict[TaskKey, StageTask]:
    """Return every task of a loop, by kind and stage.

    Stage assignment gives each operation to one task. Cheap operations are an exception: they are repeated in
    each task that needs their results.

    Args:
        stages: the loop's body with a stage for each operation.
        results: for each result of the loop, the values that tasks accumulate.
    """
    members: dict[TaskKey, list[int]] = defaultdict(list)
    light: dict[int, Op] = {}
    for i, op in enumerate(stages.ops):
        if stages.kind[i] == LIGHTWEIGHT:
            light[i] = _without_markers(stages, i)
        elif not (i in results.dropped or i in stages.skipped or op.name in (MARKER, MARKER_SIDE)):
            key = stages.task_of(next(o for o in op.outputs if o >= 0))
            assert key is not None
            members[key].append(i)
    adds: dict[TaskKey, list[tuple[int, int]]] = defaultdict(list)
    shared: set[OutputPart] = set()
    for k, parts in enumerate(results.parts):
        for j, part in enumerate(parts):
            members[part.task]  # makes an entry even for a task that only returns a constant
            if results.epilogues[k] is not None:
                if part in shared:  # several results are made of it: it is accumulated once
                    continue
                shared.add(part)
            adds[part.task].append((k, j))
    light_ops, tasks = LightOps(light), {}
    fills = LightOps(light | {i: _without_markers(stages, i) for i in stages.fills_for_finish()})
    for key in sorted(members, key=task_order):
        own = {i: _without_markers(stages, i) for i in members[key]}
        added = results.added.get(key, [])
        reads = [r for op in (*own.values(), *added) for r in op.reads]
        reads += [v for k, j in adds[key] if isinstance(v := results.parts[k][j].value, int)]
        ops = own | (fills if key[0] == "finish" else light_ops).needed(map(stages.root, reads))
        tasks[key] = StageTask(key, (*(ops[i] for i in sorted(ops)), *added), tuple(adds[key]))
    return tasks


def _without_markers(stages: StageAssignment, position: int) -> Op:
    """Return a copy of an operation in which operands that are results of stage markers are replaced.

    A marker returns the values that it is given. Each such operand is replaced by the value that was given to
    the marker.

    Args:
        stages: the loop's body with a stage for each operation.
        position: the position of the operation in the body.
    """
    op = stages.ops[position]
    return renamed(op, stages.alias.keys(), stages.resolve)


def task_order(key: TaskKey) -> tuple[int, int]:
    """Return a sort key that puts forward tasks first, by ascending stage, then backward tasks by descending
    stage, then finish tasks."""
    ty, stage = key
    return (0, stage) if ty == "fwd" else (2 if ty == "finish" else 1, -stage)
