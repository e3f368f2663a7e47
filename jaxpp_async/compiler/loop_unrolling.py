"""Unroll one scheduled loop into a task graph with one node per scheduled task, in the schedule's order.

For all microbatches a task runs the same recipe (the computation of one executable). The node of each
microbatch passes the accumulators on to the node of the next microbatch.
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
from jaxpp_async.program.task_label import write_label


def unroll_loop(graph: TaskGraphBuilder, scheduled: ScheduledLoop, finals: list[list[int]]) -> None:
    """Add the nodes and recipes (computations of executables) of one loop to `graph`.

    Args:
        graph: the graph so far, which contains the values that the loop reads.
        scheduled: the loop under its schedule.
        finals: for each result of the loop, the value ids of its final accumulators. There is one accumulator
            for each task that accumulates a part of the result.
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
        recipes: the recipes, each with the operations of one executable.
        nodes: the nodes, in a topological order.
        value_ids: for each value of the graph, the id of the corresponding value of the traced step.
        avals, kinds: the type and the kind of each value of the graph.
        task_labels: for each value of the graph, the label of the task that makes the value; "" if `names`
            has the value's label instead.
        names: a dictionary from value id to the label of that id's graph values.
        value_by_actor: a dictionary. Its keys are (value id, actor); its values are the graph values that
            represent this id on this actor.
        index_ids: the value id of each microbatch's index.
        same_sharding: a dictionary. Its keys are ids of accumulators inside recipes; its values are the ids
            of the final accumulators, which have the same sharding.
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
        """Add the recipe (list of operations) of a new executable, and return the executable's index."""
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
        """Add the values that one task makes to the graph, and return their positions in the graph.

        Args:
            ir_ids, avals, kinds: the value id, type and kind of each value.
            task_label: the task's label.
            num_labelled: the number of leading values that get the task's label. The labels of the others are
                in `names`.
        """
        first = len(self.avals)
        self.avals += avals
        self.kinds += kinds
        self.value_ids += ir_ids
        self.task_labels += [task_label] * num_labelled
        self.task_labels += [""] * (len(avals) - num_labelled)
        return range(first, len(self.avals))

    def value_on(self, ir_id: int, actor: ActorId) -> ValueId:
        """Return the graph value that represents a value of the traced step on an actor.

        If the actor does not have the value, return the graph value on the actor that sends it.

        Args:
            ir_id: the id of the value in the traced step.
            actor: the actor that needs the value.
        """
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
    """The data of one task variant that is the same for the nodes of all microbatches.

    A variant is the version of a task that the schedule asked for, such as `bwd_input`, half of a backward.

    Args:
        recipe: the index of the executable.
        inputs: one pair (value id in the loop's body, graph value that all microbatches read) per input,
            without the accumulators. The graph value is None if each microbatch reads a different one.
        index: the position of the microbatch's index among `inputs`; None if the task does not read the
            index.
        finals: the accumulators that the task adds to, as ids of final accumulators.
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
    """The state of `unroll_loop`: the values made so far and each accumulator's current value."""

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
        label = write_label(key[0], task.stage, task.i)
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
        """Make the data of a task variant that all microbatches share, and add its recipe to the graph.

        A variant is the version of a task that the schedule asked for; its recipe has its operations. If no
        earlier node creates the variant's accumulators, a node that creates them is added too.

        Args:
            actor: the actor that runs the variant.
            key: the kind and stage of the variant.
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
        """Return the graph value that all microbatches read as an input of a task variant, or None or -1.

        A variant is the version of a task that the schedule asked for.

        Args:
            value: the id of the input in the loop's body.
            variant: the variant.
            actor: the actor that runs the variant.

        Returns:
            The graph value. None if each microbatch reads a value that its own tasks make. -1 if the input is
            the microbatch's index; `add_node` replaces this by the index's graph value.
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
        """Add a node that creates the accumulators of a forward or backward, just before their first use.

        Args:
            actor: the actor of the task's stage.
            whole: the kind and stage of the forward or backward. Both halves of a split backward share its
                accumulators.
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
