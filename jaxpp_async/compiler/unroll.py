"""compiler.unroll: one scheduled loop into nodes, a node a task, in the schedule's order. No jax.

Every microbatch of a task runs the same recipe; accumulators go from one to the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpp_async.compiler.ir import Lit, Ref, Types
from jaxpp_async.compiler.outer import giver
from jaxpp_async.compiler.partition import OutputPart, StagedLoop, StageTask, TaskKey
from jaxpp_async.compiler.recipes import Accumulate, Recipe, Start, literal_type
from jaxpp_async.compiler.variants import ScheduledLoop
from jaxpp_async.program import ActorId, Node, Task, Value, ValueId, ValueKind


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

    def again(self, value: ValueId) -> ValueId:
        """A new graph value like another: an accumulator after one more microbatch."""
        self.values.append(self.values[value])
        self.value_ids.append(self.value_ids[value])
        return len(self.values) - 1

    def temporaries(self, ir_ids: Sequence[int], where: str) -> list[ValueId]:
        """New graph values that a node makes, one an id."""
        first, types = len(self.values), self.types
        self.values += [Value(types[v].aval, f"%{v}@{where}") for v in ir_ids]
        self.value_ids += ir_ids
        return list(range(first, len(self.values)))

    def read(self, ir_id: int, actor: ActorId) -> ValueId:
        """The value of an id on `actor`, or else the one to be sent there."""
        if (ir_id, actor) in self.where:
            return self.where[ir_id, actor]
        holders = [a for a in range(self.num_actors) if (ir_id, a) in self.where]
        return self.where[ir_id, giver(holders, actor)]


def needs_index(staged: StagedLoop, task: StageTask) -> bool:
    """Whether a task takes its microbatch's index: to cut a batch leaf, to write a row, or because the user asked."""
    _, batch, index = staged.loop.body_inputs()
    reads = set(staged.reads(task))
    return index in reads or bool(reads & set(batch)) or any(staged.loop.reductions[k].grows for k, _ in task.adds)


def unroll(draft: Draft, scheduled: ScheduledLoop, finals: list[list[int]]) -> None:
    """Add a loop's nodes to `draft`.

    Args:
        draft: has the loop's inputs.
        scheduled: the loop.
        finals: for each result of the loop, the ids of its parts' last accumulators.
    """
    unroller = _Unroller(draft, scheduled, finals)
    for actor, task, key in scheduled.order:
        unroller.add(actor, task, key)
    unroller.finish()


class _Unroller:
    def __init__(self, draft: Draft, scheduled: ScheduledLoop, finals: list[list[int]]) -> None:
        self.draft, self.scheduled, self.staged = draft, scheduled, scheduled.staged
        self.loop = self.staged.loop
        invariants, batch, self.index = self.loop.body_inputs()
        self.outer = dict(zip((*invariants, *batch), self.loop.inputs, strict=True))
        self.batch = set(batch)
        self.made: dict[int, dict[int, ValueId]] = defaultdict(dict)  # microbatch to body id to value
        self.held: dict[TaskKey, dict[int, ValueId]] = {}  # inputs that are the same for every microbatch
        self.recipes: dict[TaskKey, int] = {}
        self.accumulators: dict[int, ValueId] = {}  # final IR id to its current value
        self.added: dict[TaskKey, list[int]] = {}  # the accumulators that a task adds to
        self.started: set[TaskKey] = set()
        self.finals = finals

    def add(self, actor: ActorId, task: Task, key: TaskKey) -> None:
        variant = self.scheduled.variants[key]
        adds = variant.task.adds
        if key not in self.recipes:
            for whole in dict.fromkeys(self._part(add).task for add in adds):
                if whole not in self.started:
                    self._start(actor, whole)
            self.recipes[key] = self._recipe(key)
            self.added[key] = [self._final(add) for add in adds]
        finals = self.added[key]
        recipe = self.draft.recipes[self.recipes[key]]
        inputs = self._inputs(key, recipe.inputs[: len(recipe.inputs) - len(adds)], actor, task.i)
        donatable = tuple(range(len(inputs), len(inputs) + len(adds)))
        inputs += [self.accumulators[final] for final in finals]
        label = f"{key[0]}(stage {task.stage}, mb {task.i})"
        outputs = self.draft.temporaries(variant.makes, label)
        self.made[task.i].update(zip(variant.makes, outputs, strict=True))
        updated = [self.draft.again(old) for old in inputs[len(inputs) - len(adds) :]]
        self.accumulators.update(zip(finals, updated, strict=True))
        outputs += updated
        self.draft.nodes.append(Node(label, actor, self.recipes[key], tuple(inputs), tuple(outputs), donatable, task))

    def _part(self, add: tuple[int, int]) -> OutputPart:
        return self.staged.outputs[add[0]][add[1]]

    def _final(self, add: tuple[int, int]) -> int:
        return self.finals[add[0]][add[1]]

    def _inputs(self, key: TaskKey, ir_ids: Sequence[int], actor: ActorId, microbatch: int) -> list[ValueId]:
        made, held = self.made[microbatch], self.held.setdefault(key, {})
        found = []
        for v in ir_ids:
            if (value := made.get(v)) is None and (value := held.get(v)) is None:
                if v == self.index:
                    value = self.draft.read(self.draft.index_ids[microbatch], actor)
                else:
                    ref = self.outer.get(v, v)  # a whole batch leaf goes by its outer id
                    assert isinstance(ref, int)
                    value = held[v] = self.draft.read(ref, actor)
            found.append(value)
        return found

    def _start(self, actor: ActorId, whole: TaskKey) -> None:
        """The accumulators of one whole task, made on its actor just before they are first needed."""
        self.started.add(whole)
        starts = []
        outputs = []
        for add in self.staged.tasks[whole].adds:
            value, final, reduction = self._part(add).value, self._final(add), self.loop.reductions[add[0]]
            aval = self.draft.types[value].aval if isinstance(value, int) else literal_type(value).aval
            starts.append(Start(aval, reduction, self.loop.num_microbatches, final))
            kind: ValueKind = "result" if reduction.grows else "accumulator"
            outputs.append(self.draft.value(final, f"accumulator of %{final}", kind))
            self.accumulators[final] = outputs[-1]
        name, results = f"start_{whole[0]}{whole[1]}", tuple(s.result for s in starts)
        self.draft.recipes.append(Recipe(name, (), results, starts=tuple(starts)))
        label = f"start({whole[0]}, stage {whole[1]})"
        self.draft.nodes.append(Node(label, actor, len(self.draft.recipes) - 1, (), tuple(outputs)))

    def _recipe(self, key: TaskKey) -> int:
        variant = self.scheduled.variants[key]
        literals: dict[int, Lit] = {}
        slices: list[tuple[Ref, int]] = []
        inputs: list[int] = []
        for r in self.staged.reads(variant.task):
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
        indexed = needs_index(self.staged, variant.task)
        if indexed and self.index not in inputs:
            inputs.append(self.index)
        accumulates = [self._accumulate(add) for add in variant.task.adds]
        self.draft.recipes.append(
            Recipe(
                name=f"{key[0]}{key[1]}",
                inputs=(*inputs, *(a.accumulator for a in accumulates)),
                outputs=(*variant.makes, *(a.result for a in accumulates)),
                ops=variant.task.ops,
                slices=tuple(slices),
                index=self.index if indexed else None,
                literals=literals,
                accumulates=tuple(accumulates),
            )
        )
        return len(self.draft.recipes) - 1

    def _accumulate(self, add: tuple[int, int]) -> Accumulate:
        final, types = self._final(add), self.draft.types
        old, new = types.new(types[final]), types.new(types[final])
        self.draft.same_sharding |= {old: final, new: final}
        return Accumulate(old, self._part(add).value, self.loop.reductions[add[0]], new)

    def finish(self) -> None:
        """Final accumulators become the loop's results on their actors."""
        for whole in self.started:
            for add in self.staged.tasks[whole].adds:
                final = self._final(add)
                self.draft.where[final, self.scheduled.stage_actors[whole[1]]] = self.accumulators[final]
