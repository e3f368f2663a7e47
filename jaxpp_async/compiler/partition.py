"""Cut a loop's flat body into the forward and backward tasks of its stages.

Every operation goes to exactly one task, which `compiler.stage_assignment` chooses, except light operations,
which are repeated wherever they are used.

Source: the JaxPP paper, sections "Stage Marking", "Placement Inference" and "Weight Sharing".
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from jaxpp_async.base.frozen import cached_value
from jaxpp_async.compiler.ir import Loop, Op, Types, renamed
from jaxpp_async.compiler.ir_slicing import LightOps
from jaxpp_async.compiler.loop_commuting import Epilogue, LoopResults, OutputPart, commute_results
from jaxpp_async.compiler.primitives import MARKER, MARKER_SIDE
from jaxpp_async.compiler.stage_assignment import LIGHTWEIGHT, StageAssignment, TaskKey

__all__ = ["OutputPart", "StageTask", "StagedLoop", "TaskKey", "partition"]


@dataclass(frozen=True, eq=False)
class StageTask:
    """The computation of one task of the schedule, the same for every microbatch.

    Args:
        key: kind and stage.
        ops: in program order.
        adds: (result, part) of the loop's results that the task accumulates.
    """

    key: TaskKey
    ops: tuple[Op, ...]
    adds: tuple[tuple[int, int], ...] = ()

    @cached_value
    def made(self) -> frozenset[int]:
        """Return the ids of the values that the task makes."""
        return frozenset([o for op in self.ops for o in op.outputs if o >= 0])


@dataclass(frozen=True, eq=False)
class StagedLoop:
    """A loop, cut into tasks.

    Args:
        num_stages: markers + 1.
        tasks: the non-empty ones, forward stages upward, then backward stages downward.
        outputs: for each result of the loop, the partial values that are accumulated apart.
        epilogues: for each result, the operations that join its parts behind the loop; None where there is
            one part.
        loop: the loop that was cut.
        stage_names: the user's names for the markers, one a stage boundary (None: unnamed).
    """

    num_stages: int
    tasks: dict[TaskKey, StageTask]
    outputs: tuple[tuple[OutputPart, ...], ...]
    epilogues: tuple[Epilogue | None, ...]
    loop: Loop
    stage_names: tuple[str | None, ...]

    @property
    def boundaries(self) -> list[str]:
        """Describe the marker that ends each stage but the last: its line, and its name where the user
        gave one."""
        lines = [op.line for op in self.loop.body.ops if isinstance(op, Op) and op.name == MARKER]
        named = zip(lines, self.stage_names, strict=True)
        return [line if name is None else f"{line} {name!r}" for line, name in named]

    def added(self, task: StageTask) -> list[int]:
        """List the ids of the values that a task accumulates, without constants."""
        values = (self.outputs[k][j].value for k, j in task.adds)
        return [v for v in values if isinstance(v, int)]

    def reads(self, task: StageTask) -> list[int]:
        """List the values that a task reads and does not make, in order of first use."""
        if (known := self._reads.get(task)) is None:
            made = task.made
            wanted = [r for op in task.ops for r in op.reads] + self.added(task)
            known = self._reads[task] = [r for r in dict.fromkeys(wanted) if r not in made]
        return known

    def takes(self, task: StageTask) -> list[int]:
        """List the values that a task needs of other tasks, in order of first use."""
        return [r for r in self.reads(task) if r not in self._roots]

    @cached_value
    def _reads(self) -> dict[StageTask, list[int]]:
        """Cache the reads of each task that was asked about."""
        return {}

    @cached_value
    def _roots(self) -> frozenset[int]:
        return frozenset(self.loop.body.inputs)


def partition(loop: Loop, types: Types) -> StagedLoop:
    """Cut a loop's body at its markers.

    Args:
        loop: the loop.
        types: of its values; new values enter it.

    Raises:
        StageError: a stage needs a value of a later stage of the same microbatch.
        UnsupportedError: the forward side of a cotangent marker cannot be found.
    """
    stages = StageAssignment(loop, types)
    results = commute_results(stages, types)
    tasks = _tasks(stages, results)
    return StagedLoop(stages.num_stages, tasks, results.parts, results.epilogues, loop, stages.stage_names)


def _tasks(stages: StageAssignment, results: LoopResults) -> dict[TaskKey, StageTask]:
    """Collect the operations of each task, with the light operations that it repeats."""
    members: dict[TaskKey, list[int]] = defaultdict(list)
    light: dict[int, Op] = {}
    for i, op in enumerate(stages.ops):
        if stages.kind[i] == LIGHTWEIGHT:
            light[i] = _behind_markers(stages, i)
        elif not (i in results.dropped or i in stages.reused or op.name in (MARKER, MARKER_SIDE)):
            key = stages.task_of(next(o for o in op.outputs if o >= 0))
            assert key is not None
            members[key].append(i)
    adds: dict[TaskKey, list[tuple[int, int]]] = defaultdict(list)
    shared: set[OutputPart] = set()
    for k, parts in enumerate(results.parts):
        for j, part in enumerate(parts):
            members[part.task]  # a task may do nothing but return a constant
            if results.epilogues[k] is not None:
                if part in shared:  # several results are made of it: it is accumulated once
                    continue
                shared.add(part)
            adds[part.task].append((k, j))
    light_ops, tasks = LightOps(light), {}
    for key in sorted(members, key=task_order):
        own = {i: _behind_markers(stages, i) for i in members[key]}
        added = results.added.get(key, [])
        reads = [r for op in (*own.values(), *added) for r in op.reads]
        reads += [v for k, j in adds[key] if isinstance(v := results.parts[k][j].value, int)]
        ops = own | light_ops.needed(map(stages.root, reads))
        tasks[key] = StageTask(key, (*(ops[i] for i in sorted(ops)), *added), tuple(adds[key]))
    return tasks


def _behind_markers(stages: StageAssignment, position: int) -> Op:
    """Return the operation, reading the values behind markers."""
    op = stages.ops[position]
    return renamed(op, stages.alias.keys(), stages.resolve)


def task_order(key: TaskKey) -> tuple[int, int]:
    """Order tasks: forward stages upward, then backward stages downward."""
    ty, stage = key
    return (0, stage) if ty == "fwd" else (1, -stage)
