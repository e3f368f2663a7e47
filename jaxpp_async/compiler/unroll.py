"""compiler.unroll: one scheduled loop into nodes, a node a task, in the schedule's order. No jax.

Every microbatch of a task runs the same recipe; accumulators go from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxpp_async import schedules
from jaxpp_async.compiler.ir import Lit, Ref, Types
from jaxpp_async.compiler.partition import StagedLoop, TaskKey, cross_task_values
from jaxpp_async.compiler.recipes import Accumulate, Recipe, Start, literal_type, outside_reads
from jaxpp_async.program import ActorId, Node, Task, Value, ValueId, ValueKind


@dataclass(frozen=True, eq=False)
class ScheduledLoop:
    """A cut loop with its resolved schedule: tasks in order, an actor a row, and each stage's actor."""

    staged: StagedLoop
    tasks: tuple[tuple[Task, ...], ...]
    stage_actors: tuple[ActorId, ...]


@dataclass(eq=False)
class Draft:
    """A task graph while it grows.

    Args:
        types: of every value id; new ids come from here.
        num_actors: of the mesh.
        values, value_ids: the graph's values, and the value id in the traced step that each stands for.
        where: (value id, actor) to the graph value that this actor holds.
        index_ids: value ids of the microbatch indices.
        same_sharding: accumulator ids inside recipes to the ids of their final values.
    """

    types: Types
    num_actors: int
    recipes: list[Recipe] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    value_ids: list[int] = field(default_factory=list)
    where: dict[tuple[int, ActorId], ValueId] = field(default_factory=dict)
    index_ids: list[int] = field(default_factory=list)
    same_sharding: dict[int, int] = field(default_factory=dict)

    def value(self, ir_id: int, label: str, kind: ValueKind = "temp") -> ValueId:
        """A new graph value that stands for `ir_id`."""
        self.values.append(Value(self.types[ir_id].aval, label, kind))
        self.value_ids.append(ir_id)
        return len(self.values) - 1

    def read(self, ir_id: int, actor: ActorId) -> ValueId:
        """The value of an id on `actor`, or else the one to be sent there (from the lowest actor that has it)."""
        if (ir_id, actor) in self.where:
            return self.where[ir_id, actor]
        return next(self.where[ir_id, a] for a in range(self.num_actors) if (ir_id, a) in self.where)


def needs_index(staged: StagedLoop, key: TaskKey) -> bool:
    """Whether a task takes its microbatch's index: to cut a batch leaf, to write a row, or because the user asked."""
    _, batch, index = staged.loop.body_inputs()
    accumulated = [
        (p.value, r)
        for parts, r in zip(staged.outputs, staged.loop.reductions, strict=True)
        for p in parts
        if p.task == key
    ]
    reads = set(outside_reads(staged.tasks[key].ops, [v for v, _ in accumulated]))
    return index in reads or bool(reads & set(batch)) or any(r.grows for _, r in accumulated)


def unroll(draft: Draft, scheduled: ScheduledLoop, finals: list[list[int]]) -> None:
    """Add a loop's nodes to `draft`.

    Args:
        draft: has the loop's inputs.
        scheduled: the loop.
        finals: for each result of the loop, the ids of its parts' last accumulators.
    """
    unroller = _Unroller(draft, scheduled, finals)
    for actor, task in schedules.global_order(scheduled.tasks):
        unroller.add(actor, task)
    unroller.finish()


class _Unroller:
    def __init__(self, draft: Draft, scheduled: ScheduledLoop, finals: list[list[int]]) -> None:
        self.draft, self.scheduled, self.staged = draft, scheduled, scheduled.staged
        self.loop = self.staged.loop
        self.cross = cross_task_values(self.staged)
        invariants, batch, self.index = self.loop.body_inputs()
        self.outer = dict(zip((*invariants, *batch), self.loop.inputs, strict=True))
        self.batch = set(batch)
        self.made: dict[tuple[int, int], ValueId] = {}  # (body id, microbatch) to value
        self.recipes: dict[TaskKey, int] = {}
        self.accumulators: dict[TaskKey, list[tuple[int, ValueId]]] = {}  # (final IR id, current value)
        self.finals = finals

    def add(self, actor: ActorId, task: Task) -> None:
        key = (task.ty, task.stage)
        if key not in self.staged.tasks:
            return
        if key not in self.recipes:
            self._start(actor, key)
            self.recipes[key] = self._recipe(key)
        recipe = self.draft.recipes[self.recipes[key]]
        accumulators = self.accumulators[key]
        num_acc = len(accumulators)
        inputs = [self._input(v, actor, task.i) for v in recipe.inputs[: len(recipe.inputs) - num_acc]]
        donatable = tuple(range(len(inputs), len(inputs) + num_acc))
        inputs += [value for _, value in accumulators]
        outputs = []
        for ref in recipe.outputs[: len(recipe.outputs) - num_acc]:
            assert isinstance(ref, int)
            self.made[ref, task.i] = self.draft.value(ref, f"%{ref}@{task.ty}(stage {task.stage}, mb {task.i})")
            outputs.append(self.made[ref, task.i])
        updated = []
        for final, old in accumulators:
            value = self.draft.value(final, self.draft.values[old].label, self.draft.values[old].kind)
            updated.append((final, value))
        self.accumulators[key] = updated
        outputs += [value for _, value in updated]
        label = f"{task.ty}(stage {task.stage}, mb {task.i})"
        self.draft.nodes.append(Node(label, actor, self.recipes[key], tuple(inputs), tuple(outputs), donatable, task))

    def _input(self, ir_id: int, actor: ActorId, microbatch: int) -> ValueId:
        if ir_id == self.index:
            return self.draft.read(self.draft.index_ids[microbatch], actor)
        if (ir_id, microbatch) in self.made:
            return self.made[ir_id, microbatch]
        ref = self.outer.get(ir_id, ir_id)  # a whole batch leaf goes by its outer id
        assert isinstance(ref, int)
        return self.draft.read(ref, actor)

    def _accumulated(self, key: TaskKey) -> list[tuple[int, Ref, Any]]:
        """(final IR id, value, reduction) of the results that a task adds to."""
        return [
            (final, part.value, reduction)
            for ids, parts, reduction in zip(self.finals, self.staged.outputs, self.loop.reductions, strict=True)
            for final, part in zip(ids, parts, strict=True)
            if part.task == key
        ]

    def _start(self, actor: ActorId, key: TaskKey) -> None:
        """The accumulators of one task, made on its actor just before they are first needed."""
        found = self._accumulated(key)
        self.accumulators[key] = []
        if not found:
            return
        starts = []
        types = self.draft.types
        outputs = []
        for final, value, reduction in found:
            aval = types[value].aval if isinstance(value, int) else literal_type(value).aval
            starts.append(Start(aval, reduction, self.loop.num_microbatches, final))
            kind: ValueKind = "result" if reduction.grows else "accumulator"
            outputs.append(self.draft.value(final, f"accumulator of %{final}", kind))
            self.accumulators[key].append((final, outputs[-1]))
        recipe = len(self.draft.recipes)
        self.draft.recipes.append(
            Recipe(f"start_{key[0]}{key[1]}", (), tuple(s.result for s in starts), starts=tuple(starts))
        )
        self.draft.nodes.append(Node(f"start({key[0]}, stage {key[1]})", actor, recipe, (), tuple(outputs)))

    def _recipe(self, key: TaskKey) -> int:
        task = self.staged.tasks[key]
        accumulated = self._accumulated(key)
        reads = outside_reads(task.ops, [v for _, v, _ in accumulated])
        literals: dict[int, Lit] = {}
        slices: list[tuple[Ref, int]] = []
        inputs: list[int] = []
        for r in reads:
            ref = self.outer.get(r)
            if r in self.batch:
                assert ref is not None
                slices.append((ref, r))
                if isinstance(ref, int) and ref not in inputs:
                    inputs.append(ref)
            elif isinstance(ref, Lit):
                literals[r] = ref
            else:
                inputs.append(r)
        indexed = needs_index(self.staged, key)
        if indexed and self.index not in inputs:
            inputs.append(self.index)
        types = self.draft.types
        accumulates = []
        for final, value, reduction in accumulated:
            old, new = types.new(types[final]), types.new(types[final])
            self.draft.same_sharding |= {old: final, new: final}
            accumulates.append(Accumulate(old, value, reduction, new))
        self.draft.recipes.append(
            Recipe(
                name=f"{key[0]}{key[1]}",
                inputs=(*inputs, *(a.accumulator for a in accumulates)),
                outputs=(*self.cross[key][1], *(a.result for a in accumulates)),
                ops=task.ops,
                slices=tuple(slices),
                index=self.index if indexed else None,
                literals=literals,
                accumulates=tuple(accumulates),
            )
        )
        return len(self.draft.recipes) - 1

    def finish(self) -> None:
        """Final accumulators become the loop's results on their actors."""
        for key, accumulators in self.accumulators.items():
            for final, value in accumulators:
                self.draft.where[final, self.scheduled.stage_actors[key[1]]] = value
