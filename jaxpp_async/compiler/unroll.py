"""compiler.unroll: one scheduled loop into nodes, a node a task, in the schedule's order. No jax.

Every microbatch of a task runs the same recipe; accumulators go from one to the next.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from jaxpp_async.compiler.columns import ValueTable
from jaxpp_async.compiler.ir import Lit, Ref, Types
from jaxpp_async.compiler.outer import giver
from jaxpp_async.compiler.partition import OutputPart, StagedLoop, StageTask, TaskKey
from jaxpp_async.compiler.recipes import Accumulate, Recipe, Start, literal_type
from jaxpp_async.compiler.variants import ScheduledLoop, Variant
from jaxpp_async.program import ActorId, Aval, Node, Task, ValueId, ValueKind


@dataclass(eq=False)
class Draft:
    """A task graph while it grows.

    Args:
        types: of every value id; new ids come from here.
        num_actors: of the mesh.
        value_ids: for each of the graph's values, the value id in the traced step that it stands for.
        avals, kinds, places: the graph's values, by column. A place is what a task calls itself, for what it makes.
        names: value id to label, for values that have no place.
        where: (value id, actor) to the graph value that this actor holds.
        index_ids: value ids of the microbatch indices.
        same_sharding: accumulator ids inside recipes to the ids of their final values.
    """

    types: Types
    num_actors: int
    recipes: list[Recipe] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    value_ids: list[int] = field(default_factory=list)
    avals: list[Aval] = field(default_factory=list)
    kinds: list[ValueKind] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    where: dict[tuple[int, ActorId], ValueId] = field(default_factory=dict)
    index_ids: list[int] = field(default_factory=list)
    same_sharding: dict[int, int] = field(default_factory=dict)

    def named(self, ir_id: int, name: str, kind: ValueKind) -> ValueId:
        """A new graph value that stands for `ir_id`, for which all such values have one name."""
        self.names[ir_id] = name
        return self._one(ir_id, kind, "")

    def made(self, ir_id: int, place: str) -> ValueId:
        """A new graph value that a task makes."""
        return self._one(ir_id, "temp", place)

    def _one(self, ir_id: int, kind: ValueKind, place: str) -> ValueId:
        self.avals.append(self.types[ir_id].aval)
        self.kinds.append(kind)
        self.value_ids.append(ir_id)
        self.places.append(place)
        return len(self.avals) - 1

    def add(self, batch: Batch, place: str) -> range:
        """New graph values."""
        first = len(self.avals)
        self.avals += batch.avals
        self.kinds += batch.kinds
        self.value_ids += batch.ir_ids
        self.places += [place] * batch.num_placed
        self.places += [""] * (len(batch.avals) - batch.num_placed)
        return range(first, len(self.avals))

    def values(self) -> ValueTable:
        """The graph's values."""
        ids, places, names = tuple(self.value_ids), tuple(self.places), self.names

        def label(value: ValueId) -> str:
            return f"%{ids[value]}@{places[value]}" if places[value] else names[ids[value]]

        return ValueTable(tuple(self.avals), tuple(self.kinds), label)

    def read(self, ir_id: int, actor: ActorId) -> ValueId:
        """The value of an id on `actor`, or else the one to be sent there."""
        if (ir_id, actor) in self.where:
            return self.where[ir_id, actor]
        holders = [a for a in range(self.num_actors) if (ir_id, a) in self.where]
        return self.where[ir_id, giver(holders, actor)]


@dataclass(frozen=True, eq=False)
class Batch:
    """Graph values that one task makes, the same for each microbatch.

    Args:
        ir_ids, avals, kinds: of each value.
        num_placed: how many of the first ones are labelled by the task; the others have names.
    """

    ir_ids: tuple[int, ...]
    avals: tuple[Aval, ...]
    kinds: tuple[ValueKind, ...]
    num_placed: int


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


@dataclass(frozen=True, eq=False)
class _Form:
    """A form of a task on its actor.

    Args:
        recipe: its executable.
        inputs: for each input but accumulators its value id in the body, and the graph value that is it for every
            microbatch; None for what the microbatch's tasks make.
        index: position of the microbatch's index among `inputs`.
        finals: the accumulators that it adds to, by their final ids.
        makes: value ids of what it makes for other tasks.
        outputs: all that it makes: those, then the accumulators.
        donatable: positions of the accumulators among its inputs.
    """

    recipe: int
    inputs: list[tuple[int, ValueId | None]]
    index: int | None
    finals: list[int]
    makes: tuple[int, ...]
    outputs: Batch
    donatable: tuple[int, ...]


class _Unroller:
    def __init__(self, draft: Draft, scheduled: ScheduledLoop, finals: list[list[int]]) -> None:
        self.draft, self.scheduled, self.staged = draft, scheduled, scheduled.staged
        self.loop = self.staged.loop
        invariants, batch, self.index = self.loop.body_inputs()
        self.outer = dict(zip((*invariants, *batch), self.loop.inputs, strict=True))
        self.batch = set(batch)
        self.made: dict[int, dict[int, ValueId]] = defaultdict(dict)  # microbatch to body id to value
        self.forms: dict[TaskKey, _Form] = {}
        self.accumulators: dict[int, ValueId] = {}  # final IR id to its current value
        self.started: set[TaskKey] = set()
        self.finals = finals

    def add(self, actor: ActorId, task: Task, key: TaskKey) -> None:
        form = self.forms.get(key) or self._form(actor, key)
        made, draft = self.made[task.i], self.draft
        inputs = [made[v] if held is None else held for v, held in form.inputs]
        if form.index is not None:
            inputs[form.index] = draft.read(draft.index_ids[task.i], actor)
        inputs += [self.accumulators[final] for final in form.finals]
        label = f"{key[0]}(stage {task.stage}, mb {task.i})"
        outputs = draft.add(form.outputs, label)
        made.update(zip(form.makes, outputs, strict=False))
        self.accumulators.update(zip(form.finals, outputs[len(form.makes) :], strict=True))
        draft.nodes.append(Node(label, actor, form.recipe, tuple(inputs), tuple(outputs), form.donatable, task))

    def _form(self, actor: ActorId, key: TaskKey) -> _Form:
        """What all microbatches of a form have in common, found when the first one is added."""
        variant = self.scheduled.variants[key]
        adds = variant.task.adds
        for whole in dict.fromkeys(self._part(add).task for add in adds):
            if whole not in self.started:
                self._start(actor, whole)
        number = self._recipe(key)
        finals = [self._final(add) for add in adds]
        recipe, draft = self.draft.recipes[number], self.draft
        own = recipe.inputs[: len(recipe.inputs) - len(adds)]
        olds = [self.accumulators[final] for final in finals]
        temps: list[ValueKind] = ["temp"] * len(variant.makes)
        batch = Batch(
            ir_ids=(*variant.makes, *(draft.value_ids[old] for old in olds)),
            avals=(*(draft.types[v].aval for v in variant.makes), *(draft.avals[old] for old in olds)),
            kinds=(*temps, *(draft.kinds[old] for old in olds)),
            num_placed=len(variant.makes),
        )
        form = self.forms[key] = _Form(
            recipe=number,
            inputs=[(v, self._held(v, variant, actor)) for v in own],
            index=own.index(self.index) if self.index in own else None,
            finals=finals,
            makes=variant.makes,
            outputs=batch,
            donatable=tuple(range(len(own), len(recipe.inputs))),
        )
        return form

    def _held(self, value: int, variant: Variant, actor: ActorId) -> ValueId | None:
        """The graph value of an input that all microbatches share; None: a task of the microbatch makes it."""
        if value in variant.takes:
            return None
        if value == self.index:
            return -1  # another value for each microbatch
        ref = self.outer.get(value, value)  # a whole batch leaf goes by its outer id
        assert isinstance(ref, int)
        return self.draft.read(ref, actor)

    def _part(self, add: tuple[int, int]) -> OutputPart:
        return self.staged.outputs[add[0]][add[1]]

    def _final(self, add: tuple[int, int]) -> int:
        return self.finals[add[0]][add[1]]

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
            outputs.append(self.draft.named(final, f"accumulator of %{final}", kind))
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
