"""Unroll one scheduled loop into a task graph with one node per scheduled task, in the schedule's order.

All microbatches of a task run the same recipe (the computation of one executable), and each passes its
accumulators on to the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpp_async.compiler.ir import (
    Accumulate,
    AccumulatorStart,
    Lit,
    Recipe,
    Ref,
    Types,
    literal_type,
    source_actor,
)
from jaxpp_async.compiler.partition import OutputPart, StagedLoop, StageTask, TaskKey
from jaxpp_async.compiler.task_variants import ScheduledLoop, Variant
from jaxpp_async.program.instructions import ActorId, Aval, Node, Task, ValueId, ValueKind, ValueTable


def unroll_loop(graph: TaskGraphBuilder, scheduled: ScheduledLoop, finals: list[list[int]]) -> None:
    """Add the nodes and recipes (computations of executables) of one loop to `graph`.

    Args:
        graph: the graph so far, which contains the values that the loop reads.
        scheduled: the loop under its schedule.
        finals: for each result of the loop, the value ids of its parts after the last microbatch. A part is
            the sum that one task accumulates.
    """
    unroller = _LoopUnroller(graph, scheduled, finals)
    for actor, task, key in scheduled.order:
        unroller.add_node(actor, task, key)
    unroller.record_results()


def needs_index(staged: StagedLoop, task: StageTask) -> bool:
    """Return whether a task reads its microbatch's index.

    A task reads the index to slice a batch leaf, to write a row of a result, or because the user's function
    asked for it.
    """
    _, batch, index = staged.loop.body_inputs()
    reads = set(staged.reads(task))
    return (
        index in reads
        or bool(reads & set(batch))
        or any(staged.loop.reductions[k].grows for k, _ in task.adds)
    )


@dataclass(eq=False)
class TaskGraphBuilder:
    """A task graph that is under construction.

    Args:
        types: the type of every value id; types of newly created values are added to it.
        num_actors: the number of actors of the mesh.
        recipes: the computations of the executables, one per executable.
        nodes: the nodes, in a topological order.
        value_ids: for each value of the graph, the id of the value in the traced step that it stands for.
        avals, kinds: the type and the kind of each value of the graph.
        task_labels: for each value of the graph, the label of the task that makes the value, or "" for a
            value that is labelled by `names`.
        names: a map from a value id to the label of its graph values.
        value_by_actor: a map from (value id, actor) to the graph value that represents this value on this
            actor.
        index_ids: the value id of each microbatch's index.
        same_sharding: ids of accumulators inside recipes to the ids of their final values, whose sharding
            they share.
    """

    types: Types
    num_actors: int
    recipes: list[Recipe] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    value_ids: list[int] = field(default_factory=list)
    avals: list[Aval] = field(default_factory=list)
    kinds: list[ValueKind] = field(default_factory=list)
    task_labels: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    value_by_actor: dict[tuple[int, ActorId], ValueId] = field(default_factory=dict)
    index_ids: list[int] = field(default_factory=list)
    same_sharding: dict[int, int] = field(default_factory=dict)

    def add_recipe(self, recipe: Recipe) -> int:
        """Add the recipe of a new executable and return its index."""
        self.recipes.append(recipe)
        return len(self.recipes) - 1

    def add_named(self, ir_id: int, name: str, kind: ValueKind) -> ValueId:
        """Add a value to the graph, labelled with a name instead of the task that makes it.

        Args:
            ir_id: the id of the value in the traced step; all graph values of that id get the same label.
            name: the label.
            kind: the kind of value.
        """
        self.names[ir_id] = name
        return self.add_values((ir_id,), (self.types[ir_id].aval,), (kind,), "", 0)[0]

    def add_values(
        self,
        ir_ids: Sequence[int],
        avals: Sequence[Aval],
        kinds: Sequence[ValueKind],
        task_label: str,
        num_labelled: int,
    ) -> range:
        """Add the values that one task makes, and return their graph values.

        Args:
            ir_ids, avals, kinds: the value id, type and kind of each value.
            task_label: the task's label.
            num_labelled: how many of the values, from the first, are labelled by the task; the others by
                `names`.
        """
        first = len(self.avals)
        self.avals += avals
        self.kinds += kinds
        self.value_ids += ir_ids
        self.task_labels += [task_label] * num_labelled
        self.task_labels += [""] * (len(avals) - num_labelled)
        return range(first, len(self.avals))

    def value_on(self, ir_id: int, actor: ActorId) -> ValueId:
        """Return the graph value of a value id on `actor`, or the one to send to it if it has none."""
        if (ir_id, actor) in self.value_by_actor:
            return self.value_by_actor[ir_id, actor]
        actors = [a for a in range(self.num_actors) if (ir_id, a) in self.value_by_actor]
        return self.value_by_actor[ir_id, source_actor(actors, actor)]

    def values(self) -> ValueTable:
        """Return a table of the graph's values."""
        ids, task_labels, names = tuple(self.value_ids), tuple(self.task_labels), self.names

        def label(value: ValueId) -> str:
            return f"%{ids[value]}@{task_labels[value]}" if task_labels[value] else names[ids[value]]

        return ValueTable(tuple(self.avals), tuple(self.kinds), label)


@dataclass(frozen=True, eq=False)
class _VariantData:
    """The data that the nodes of all microbatches of one task variant share.

    A variant is a form of a task that the schedule asked for, such as `bwd_input`.

    Args:
        recipe: the index of the executable.
        inputs: for each input except the accumulators, its value id in the loop body and the graph value that
            is this input for every microbatch; None in place of the latter for a value that the microbatch's
            own tasks make.
        index: the position of the microbatch's index among `inputs`; None if it is not read.
        finals: the accumulators that the task adds to, each by the value id that it has after the loop.
        makes: the value ids that the task makes for other tasks.
        ir_ids, avals, kinds: the value id, type and kind of each value that the task makes: first those of
            `makes`, then the accumulators.
        donatable: the positions of the accumulators among the task's inputs.
    """

    recipe: int
    inputs: list[tuple[int, ValueId | None]]
    index: int | None
    finals: list[int]
    makes: tuple[int, ...]
    ir_ids: tuple[int, ...]
    avals: tuple[Aval, ...]
    kinds: tuple[ValueKind, ...]
    donatable: tuple[int, ...]


class _LoopUnroller:
    """The state of `unroll_loop`: the values made so far and the current value of each accumulator."""

    def __init__(self, graph: TaskGraphBuilder, scheduled: ScheduledLoop, finals: list[list[int]]) -> None:
        self.graph, self.scheduled, self.staged, self.finals = graph, scheduled, scheduled.staged, finals
        self.loop = self.staged.loop
        invariants, batch, self.index = self.loop.body_inputs()
        self.outer = dict(zip((*invariants, *batch), self.loop.inputs, strict=True))
        self.batch = set(batch)
        self.made: dict[int, dict[int, ValueId]] = defaultdict(
            dict
        )  # microbatch to value id in the body to graph value
        self.variant_data: dict[TaskKey, _VariantData] = {}
        self.accumulators: dict[int, ValueId] = {}  # value id after the loop to current graph value
        self.started: set[TaskKey] = set()

    def add_node(self, actor: ActorId, task: Task, key: TaskKey) -> None:
        data = self.variant_data.get(key)
        if data is None:
            data = self.variant_data[key] = self._make_variant_data(actor, key)
        made, graph = self.made[task.i], self.graph
        inputs = [made[v] if shared is None else shared for v, shared in data.inputs]
        if data.index is not None:
            inputs[data.index] = graph.value_on(graph.index_ids[task.i], actor)
        inputs += [self.accumulators[final] for final in data.finals]
        label = f"{key[0]}(stage {task.stage}, mb {task.i})"
        num_made = len(data.makes)
        outputs = graph.add_values(data.ir_ids, data.avals, data.kinds, label, num_made)
        made.update(zip(data.makes, outputs, strict=False))
        self.accumulators.update(zip(data.finals, outputs[num_made:], strict=True))
        graph.nodes.append(
            Node(label, actor, data.recipe, tuple(inputs), tuple(outputs), data.donatable, task)
        )

    def record_results(self) -> None:
        """Record the last value of each accumulator as a loop result on the accumulator's actor."""
        for whole in self.started:
            for add in self.staged.tasks[whole].adds:
                final = self._final(add)
                actor = self.scheduled.stage_actors[whole[1]]
                self.graph.value_by_actor[final, actor] = self.accumulators[final]

    def _make_variant_data(self, actor: ActorId, key: TaskKey) -> _VariantData:
        """Make the data that all microbatches of a task variant share, including its recipe.

        Accumulators of the variant that no earlier node created are created too.

        Args:
            actor: the actor that runs the variant.
            key: the kind and stage of the variant, which is a form of a task that the schedule asked for.
        """
        variant, graph = self.scheduled.variants[key], self.graph
        adds = variant.task.adds
        for whole in dict.fromkeys(self._part(add).task for add in adds):
            if whole not in self.started:
                self._start_accumulators(actor, whole)
        number = graph.add_recipe(self._recipe(key))
        inputs = graph.recipes[number].inputs
        own = inputs[: len(inputs) - len(adds)]
        finals = [self._final(add) for add in adds]
        ir_ids = (*variant.makes, *finals)
        temps: list[ValueKind] = ["temp"] * len(variant.makes)
        return _VariantData(
            recipe=number,
            inputs=[(v, self._shared_input(v, variant, actor)) for v in own],
            index=own.index(self.index) if self.index in own else None,
            finals=finals,
            makes=variant.makes,
            ir_ids=ir_ids,
            avals=tuple(graph.types[v].aval for v in ir_ids),
            kinds=(*temps, *(graph.kinds[self.accumulators[final]] for final in finals)),
            donatable=tuple(range(len(own), len(inputs))),
        )

    def _shared_input(self, value: int, variant: Variant, actor: ActorId) -> ValueId | None:
        """Return the graph value of an input of a task variant, if all microbatches share it.

        Returns:
            The graph value; None for a value that the microbatch's own tasks make; -1 for the microbatch's
            index.
        """
        if value in variant.takes:
            return None
        if value == self.index:
            return -1  # the index has another graph value for each microbatch
        ref = self.outer.get(value, value)  # a whole batch leaf is found by its id outside the loop
        assert isinstance(ref, int)
        return self.graph.value_on(ref, actor)

    def _part(self, add: tuple[int, int]) -> OutputPart:
        return self.staged.outputs[add[0]][add[1]]

    def _final(self, add: tuple[int, int]) -> int:
        return self.finals[add[0]][add[1]]

    def _start_accumulators(self, actor: ActorId, whole: TaskKey) -> None:
        """Add the node that creates the accumulators of one forward or backward, just before their first use.

        Args:
            actor: the actor of the task's stage.
            whole: kind and stage of the whole forward or backward, of which the task that runs may be a part.
        """
        self.started.add(whole)
        starts = []
        outputs = []
        for add in self.staged.tasks[whole].adds:
            value, final, reduction = self._part(add).value, self._final(add), self.loop.reductions[add[0]]
            aval = self.graph.types[value].aval if isinstance(value, int) else literal_type(value).aval
            starts.append(AccumulatorStart(aval, reduction, self.loop.num_microbatches, final))
            kind: ValueKind = "result" if reduction.grows else "accumulator"
            outputs.append(self.graph.add_named(final, f"accumulator of %{final}", kind))
            self.accumulators[final] = outputs[-1]
        ty, stage = whole
        results = tuple(s.result for s in starts)
        recipe = self.graph.add_recipe(Recipe(f"start_{ty}{stage}", (), results, starts=tuple(starts)))
        self.graph.nodes.append(Node(f"start({ty}, stage {stage})", actor, recipe, (), tuple(outputs)))

    def _recipe(self, key: TaskKey) -> Recipe:
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
        return Recipe(
            name=f"{key[0]}{key[1]}",
            inputs=(*inputs, *(a.accumulator for a in accumulates)),
            outputs=(*variant.makes, *(a.result for a in accumulates)),
            ops=variant.task.ops,
            slices=tuple(slices),
            index=self.index if indexed else None,
            literals=literals,
            accumulates=tuple(accumulates),
        )

    def _accumulate(self, add: tuple[int, int]) -> Accumulate:
        final, types = self._final(add), self.graph.types
        old, new = types.new(types[final]), types.new(types[final])
        self.graph.same_sharding |= {old: final, new: final}
        return Accumulate(old, self._part(add).value, self.loop.reductions[add[0]], new)
