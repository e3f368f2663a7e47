"""compiler.partition: a loop's flat body in, its stages' forward and backward tasks out. No jax, no schedule.

Every operation goes to exactly one task (`compiler.stages` says which), except light ones, which are repeated wherever
they are used.

Source: the JaxPP paper, sections "Stage Marking", "Placement Inference" and "Weight Sharing".
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from jaxpp_async.base.frozen import cached_value
from jaxpp_async.compiler.ir import Loop, Op, Types, renamed
from jaxpp_async.compiler.ir_slicing import LightOps
from jaxpp_async.compiler.loop_commuting import Epilogue, OutputPart, Results, results
from jaxpp_async.compiler.primitives import MARKER, MARKER_SIDE
from jaxpp_async.compiler.stage_assignment import LIGHTWEIGHT, Stages, TaskKey

__all__ = ["OutputPart", "StageTask", "StagedLoop", "TaskKey", "partition"]


@dataclass(frozen=True, eq=False)
class StageTask:
    """What one task of the schedule computes, the same for every microbatch.

    Args:
        key: kind and stage.
        ops: in program order.
        adds: (result, part) of the loop's results that it accumulates.
    """

    key: TaskKey
    ops: tuple[Op, ...]
    adds: tuple[tuple[int, int], ...] = ()

    @cached_value
    def made(self) -> frozenset[int]:
        """Ids of the values it makes."""
        return frozenset([o for op in self.ops for o in op.outputs if o >= 0])


@dataclass(frozen=True, eq=False)
class StagedLoop:
    """A loop, cut.

    Args:
        num_stages: markers + 1.
        tasks: the non-empty ones, forward stages upward, then backward stages downward.
        outputs: for each result of the loop, the partial values that are accumulated apart.
        tails: for each result, the operations that join its parts behind the loop; None where there is one part.
        loop: where it came from.
        stage_names: the user's names for the markers, one a stage boundary (None: unnamed).
    """

    num_stages: int
    tasks: dict[TaskKey, StageTask]
    outputs: tuple[tuple[OutputPart, ...], ...]
    tails: tuple[Epilogue | None, ...]
    loop: Loop
    stage_names: tuple[str | None, ...]

    @property
    def boundaries(self) -> list[str]:
        """What ends each stage but the last: the marker's line, and its name where the user gave one."""
        lines = [op.line for op in self.loop.body.ops if isinstance(op, Op) and op.name == MARKER]
        named = zip(lines, self.stage_names, strict=True)
        return [line if name is None else f"{line} {name!r}" for line, name in named]

    def added(self, task: StageTask) -> list[int]:
        """Ids of the values that a task accumulates; constants left out."""
        values = (self.outputs[k][j].value for k, j in task.adds)
        return [v for v in values if isinstance(v, int)]

    def reads(self, task: StageTask) -> list[int]:
        """What a task reads and does not make, in order of first use."""
        if (known := self._reads.get(task)) is None:
            made = task.made
            wanted = [r for op in task.ops for r in op.reads] + self.added(task)
            known = self._reads[task] = [r for r in dict.fromkeys(wanted) if r not in made]
        return known

    def takes(self, task: StageTask) -> list[int]:
        """What a task needs of other tasks, in order of first use."""
        return [r for r in self.reads(task) if r not in self._roots]

    @cached_value
    def _reads(self) -> dict[StageTask, list[int]]:
        """What tasks read, of those that were asked about."""
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
        UnsupportedError: a cotangent marker's forward side cannot be found.
    """
    stages = Stages(loop, types)
    found = results(stages, types)
    return StagedLoop(
        stages.num_stages, _tasks(stages, found), found.parts, found.tails, loop, stages.stage_names
    )


def _tasks(stages: Stages, found: Results) -> dict[TaskKey, StageTask]:
    members: dict[TaskKey, list[int]] = defaultdict(list)
    for i, op in enumerate(stages.ops):
        if (
            i in found.dropped
            or i in stages.reused
            or op.name in (MARKER, MARKER_SIDE)
            or stages.kind[i] == LIGHTWEIGHT
        ):
            continue
        key = stages.task_of(op.outputs[0] if op.outputs[0] >= 0 else next(o for o in op.outputs if o >= 0))
        assert key is not None
        members[key].append(i)
    adds: dict[TaskKey, list[tuple[int, int]]] = defaultdict(list)
    shared: set[OutputPart] = set()
    for k, parts in enumerate(found.parts):
        for j, part in enumerate(parts):
            members[part.task]  # a task may do nothing but return a constant
            if found.tails[k] is not None:
                if part in shared:  # several results are made of it: it is accumulated once
                    continue
                shared.add(part)
            adds[part.task].append((k, j))
    light = LightOps({i: _rewritten(stages, i) for i, kind in enumerate(stages.kind) if kind == LIGHTWEIGHT})
    return {
        key: _task(stages, found, key, members[key], adds[key], light) for key in sorted(members, key=_order)
    }


def _task(
    stages: Stages,
    found: Results,
    key: TaskKey,
    positions: list[int],
    adds: list[tuple[int, int]],
    light: LightOps,
) -> StageTask:
    added = found.added.get(key, [])
    own = {i: _rewritten(stages, i) for i in positions}
    reads = [r for op in (*own.values(), *added) for r in op.reads]
    reads += [v for k, j in adds if isinstance(v := found.parts[k][j].value, int)]
    ops = own | light.needed(map(stages.root, reads))
    return StageTask(key, (*(ops[i] for i in sorted(ops)), *added), tuple(adds))


def _rewritten(stages: Stages, position: int) -> Op:
    """The operation, reading what lies behind markers."""
    op = stages.ops[position]
    return renamed(op, stages.alias.keys(), stages.resolve)


def _order(key: TaskKey) -> tuple[int, int]:
    """Forward stages upward, then backward stages downward."""
    ty, stage = key
    return (0, stage) if ty == "fwd" else (1, -stage)
