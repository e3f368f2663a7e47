"""compiler.graph: a traced step and its cut loops in, a `TaskGraph` and the recipe of each executable out. No jax.

Puts together what `placement` decides for the outside of the loops and what `unroll` makes of each loop.

compiler.unroll: one scheduled loop into nodes, a node a task, in the schedule's order. No jax.

Every microbatch of a task runs the same recipe; accumulators go from one to the next.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxpp_async.compiler.ir import Lit, Loop, Op, Ref, Traced, Types, ValueType
from jaxpp_async.compiler.loop_commuting import Epilogue
from jaxpp_async.compiler.outer_ops import giver
from jaxpp_async.compiler.partition import OutputPart, StagedLoop, StageTask, TaskKey
from jaxpp_async.compiler.placement import Actors, OuterStep, Placement, place
from jaxpp_async.compiler.recipes import Accumulate, AccumulatorStart, Recipe, literal_type, outside_reads
from jaxpp_async.compiler.task_variants import ScheduledLoop, Variant
from jaxpp_async.program.instructions import (
    ActorId,
    Aval,
    GraphInput,
    GraphOutput,
    Node,
    Task,
    TaskGraph,
    ValueId,
    ValueKind,
    ValueTable,
)


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """The compiler's result before shardings: the graph, its recipes, and what reports want to know.

    Args:
        graph: `GraphInput.arg` counts argument leaves, then captured arrays, then microbatch indices 0, 1, ...
        parts: for each loop (by position in the traced operations), each result's final accumulators.
        value_ids: the IR id of every graph value, for its sharding.
        same_sharding: accumulator ids inside recipes to the ids of their final values.
        output_ids: the IR id of every result leaf.
        outer_levels: the level of every node outside the loops, by label.
    """

    graph: TaskGraph
    recipes: tuple[Recipe, ...]
    placement: Placement
    loops: dict[int, ScheduledLoop]
    parts: dict[int, list[list[int]]]
    value_ids: tuple[int, ...]
    same_sharding: dict[int, int]
    output_ids: tuple[int, ...]
    num_indices: int
    types: Types
    outer_levels: dict[str, int] = field(default_factory=dict)


def build(
    traced: Traced,
    loops: dict[int, ScheduledLoop],
    *,
    num_actors: int,
    continues: dict[int, int],
    donated: Sequence[bool],
    result_homes: dict[int, Actors] | None = None,
) -> PlacedStep:
    """Place a traced step.

    Args:
        traced: the step.
        loops: by position in `traced.flat.ops`.
        num_actors: of the mesh.
        continues: result leaf to the argument leaf it continues.
        donated: one an argument leaf.
        result_homes: actors that must hold a result leaf in the end; others follow from the program.
    """
    return _Builder(traced, loops, num_actors, continues, donated, result_homes or {}).build()


class _Builder:
    def __init__(
        self,
        traced: Traced,
        loops: dict[int, ScheduledLoop],
        num_actors: int,
        continues: dict[int, int],
        donated: Sequence[bool],
        result_homes: dict[int, Actors],
    ) -> None:
        self.result_homes = result_homes
        self.traced, self.types, self.num_actors = traced, traced.types, num_actors
        self.continues, self.donated = continues, donated
        self.draft = TaskGraphBuilder(traced.types, num_actors)
        self.loops = loops
        self.names = dict(zip(traced.flat.inputs, traced.arg_names, strict=False))
        # Final accumulators: (loop position, result, part) to IR id.
        self.parts: dict[int, list[list[int]]] = {}
        self.outer_levels: dict[str, int] = {}

    def build(self) -> PlacedStep:
        step = self._outer_step()
        placement = place(step, self.types)
        self.exported = self._exported(placement)
        inputs = self._inputs(placement)
        positions = {id(item): i for i, item in enumerate(self.traced.flat.ops) if isinstance(item, Loop)}
        groups = self._outer_groups(placement)
        for level in range(placement.num_levels):
            for actor in range(self.num_actors):
                ops = groups.get((level, actor), [])
                self._outer_node(
                    level, actor, ops, [o for op in ops for o in op.outputs if (o, actor) in self.exported]
                )
            for i, at in placement.loop_levels.items():
                if at == level:
                    loop = positions[id(placement.items[i])]
                    unroll(self.draft, self.loops[loop], self.parts[loop])
        outputs = self._outputs(placement)
        graph = TaskGraph(self.num_actors, self.draft.values(), tuple(self.draft.nodes), inputs, outputs)
        return PlacedStep(
            graph,
            tuple(self.draft.recipes),
            placement,
            self.loops,
            self.parts,
            tuple(self.draft.value_ids),
            self.draft.same_sharding,
            tuple(o for o in self.outer.outputs if isinstance(o, int)),
            len(self.draft.index_ids),
            self.types,
            self.outer_levels,
        )

    # ---- the step outside its loops

    def _outer_step(self) -> OuterStep:
        items: list[Op | Loop] = []
        needs: dict[int, dict[int, Actors]] = {}
        makes: dict[int, dict[int, ActorId]] = {}
        for position, item in enumerate(self.traced.flat.ops):
            if isinstance(item, Op):
                items.append(item)
                continue
            at = len(items)
            items.append(item)
            needs[at] = self._loop_needs(self.loops[position])
            makes[at], after = self._loop_results(position)
            items += after
        outputs = []
        for ref in self.traced.flat.outputs:
            if isinstance(ref, int):
                outputs.append(ref)
                continue
            outputs.append(self.types.new(literal_type(ref)))
            items.append(Op("constant", (ref,), (outputs[-1],), lambda xs: xs, "constant result"))
        step = OuterStep(
            inputs=self.traced.flat.inputs,
            items=tuple(items),
            outputs=tuple(outputs),
            loop_needs=needs,
            loop_makes=makes,
            continues=self.continues,
            num_actors=self.num_actors,
            result_homes=self.result_homes,
            num_results=len(self.traced.out_names),
            untouched=self._untouched(outputs),
        )
        self.outer = step
        return step

    def _untouched(self, outputs: Sequence[int]) -> dict[int, int]:
        """Results that are an argument as it came: result to value. One that is there twice has to be copied."""
        arguments = set(self.traced.flat.inputs[: len(self.traced.arg_names)])
        return {
            k: v
            for k, v in enumerate(outputs[: len(self.traced.out_names)])
            if v in arguments and outputs.count(v) == 1
        }

    def _loop_needs(self, scheduled: ScheduledLoop) -> dict[int, Actors]:
        """The outer values a loop reads, and on which actors."""
        staged = scheduled.staged
        loop = staged.loop
        invariants, batch, _ = loop.body_inputs()
        outer = dict(zip((*invariants, *batch), loop.inputs, strict=True))
        needs: dict[int, set[ActorId]] = defaultdict(set)
        for variant, actor in scheduled.variants_on_actors():
            for r in staged.reads(variant.task):
                if isinstance(ref := outer.get(r), int):
                    needs[ref].add(actor)
        return {v: frozenset(a) for v, a in needs.items()}

    def _loop_results(self, position: int) -> tuple[dict[int, ActorId], list[Op]]:
        """The accumulators a loop leaves behind, and the operations that turn them into its results."""
        scheduled = self.loops[position]
        loop = scheduled.staged.loop
        made: dict[int, ActorId] = {}
        after: list[Op] = []
        self.parts[position] = []
        staged = scheduled.staged
        body = dict(zip(loop.body.inputs, loop.inputs, strict=False))
        totals: dict[OutputPart, int] = {}  # several results may be made of one part
        for parts, tail, reduction, result in zip(
            staged.outputs, staged.epilogues, loop.reductions, loop.outputs, strict=True
        ):
            if tail is None:
                ids = [self.types.new(self.types[result]) if reduction.has_end else result]
            else:
                ids = [
                    totals[p] if p in totals else totals.setdefault(p, self._total(p, result)) for p in parts
                ]
            made.update((i, scheduled.stage_actors[p.task[1]]) for i, p in zip(ids, parts, strict=True))
            self.parts[position].append(ids)
            whole = ids[0]
            if tail is not None:
                names: dict[Ref, Ref] = {**body, **{p.value: i for p, i in zip(parts, ids, strict=True)}}
                whole = result if not reduction.has_end else self.types.new(self.types[result])
                names[tail.value] = whole
                after += self._renamed(tail, names)
            if reduction.has_end:
                ender = _Ender(reduction, loop.num_microbatches)
                after.append(Op("reduction_end", (whole,), (result,), ender, loop.line))
        return made, after

    def _total(self, part: OutputPart, result: int) -> int:
        """A new id for a part's total."""
        value_type = self.types[part.value if isinstance(part.value, int) else result]
        return self.types.new(dataclasses.replace(value_type, weak=self.types[result].weak))

    def _renamed(self, tail: Epilogue, names: dict[Ref, Ref]) -> list[Op]:
        """A tail's operations, over ids outside the loop."""
        ops = []
        for op in tail.ops:
            for o in op.outputs:
                if o not in names:
                    names[o] = self.types.new(self.types[o]) if o >= 0 else o
            inputs = tuple(names[r] if isinstance(r, int) else r for r in op.inputs)
            ops.append(dataclasses.replace(op, inputs=inputs, outputs=tuple(names[o] for o in op.outputs)))
        return ops

    # ---- inputs and outputs

    def _inputs(self, placement: Placement) -> tuple[GraphInput, ...]:
        graph_inputs = []
        num_args = len(self.traced.arg_names)
        for arg, v in enumerate(self.traced.flat.inputs):
            donated = arg < num_args and bool(self.donated[arg])
            name = self.names.get(v, f"captured[{arg - num_args}]")
            value = self.draft.named(v, name, "input")
            actors = tuple(sorted(placement.input_homes[v]))
            for a in actors:
                self.draft.where[v, a] = value
            graph_inputs.append(GraphInput(value, arg, actors, donated))
        graph_inputs += self._index_inputs(len(graph_inputs))
        return tuple(graph_inputs)

    def _index_inputs(self, first_arg: int) -> list[GraphInput]:
        """Microbatch indices, which never change: arguments that the step keeps on the actors."""
        users: set[ActorId] = set()
        count = 0
        for scheduled in self.loops.values():
            for variant, actor in scheduled.variants_on_actors():
                if needs_index(scheduled.staged, variant.task):
                    users.add(actor)
                    count = max(count, scheduled.staged.loop.num_microbatches)
        found = []
        for i in range(count):
            v = self.types.new(ValueType(Aval((), "int32")))
            self.draft.index_ids.append(v)
            value = self.draft.named(v, f"microbatch index {i}", "input")
            for a in users:
                self.draft.where[v, a] = value
            found.append(GraphInput(value, first_arg + i, tuple(sorted(users))))
        return found

    def _outputs(self, placement: Placement) -> tuple[GraphOutput, ...]:
        outputs = []
        for k, ref in enumerate(self.outer.outputs):
            assert isinstance(ref, int)
            by_value: dict[ValueId, list[ActorId]] = defaultdict(list)
            for a in sorted(placement.output_homes[k]):
                by_value[self.draft.read(ref, a)].append(a)
            outputs += [GraphOutput(value, k, tuple(actors)) for value, actors in by_value.items()]
        return tuple(outputs)

    # ---- nodes outside loops

    def _outer_groups(self, placement: Placement) -> dict[tuple[int, ActorId], list[Op]]:
        """The operations of each level on each actor, in program order."""
        groups: dict[tuple[int, ActorId], list[Op]] = defaultdict(list)
        for i, item in enumerate(placement.items):
            if isinstance(item, Op):
                for a in placement.op_actors[i]:
                    groups[placement.levels[i, a], a].append(item)
        return groups

    def _exported(self, placement: Placement) -> set[tuple[int, ActorId]]:
        """(value, actor that makes it) of what is read outside the task that makes it."""
        maker = {o: i for i, item in enumerate(placement.items) if isinstance(item, Op) for o in item.outputs}
        run_on, levels = placement.op_actors, placement.levels
        found: set[tuple[int, ActorId]] = set()

        def use(value: int, actor: ActorId, level: int | None) -> None:
            if (i := maker.get(value)) is None:
                return
            source = giver(run_on[i], actor)
            if source != actor or levels[i, source] != level:
                found.add((value, source))

        for i, item in enumerate(placement.items):
            if isinstance(item, Op):
                made = [r for r in item.reads if r in maker]
                for a in run_on[i] if made else ():
                    level = levels[i, a]
                    for r in made:
                        if levels.get((maker[r], a)) != level:
                            use(r, a, level)
        for needs in self.outer.loop_needs.values():
            for value, actors in needs.items():
                for a in actors:
                    use(value, a, None)
        for ref, homes in zip(self.outer.outputs, placement.output_homes, strict=True):
            assert isinstance(ref, int)
            for a in homes:
                use(ref, a, None)
        return found

    def _outer_node(self, level: int, actor: ActorId, ops: Sequence[Op], outputs: Sequence[int]) -> None:
        if not outputs:
            return
        inputs = outside_reads(ops, ())
        recipe = len(self.draft.recipes)
        name = f"outer{level}_actor{actor}"
        self.draft.recipes.append(Recipe(name, tuple(inputs), tuple(outputs), tuple(ops)))
        sources = tuple(self.draft.read(v, actor) for v in inputs)
        results = []
        for o in outputs:
            value = self.draft.made(o, f"outer({level})")
            self.draft.where[o, actor] = value
            results.append(value)
        donatable = self._outer_donations(inputs, outputs)
        label = f"outer({level}, actor {actor})"
        self.outer_levels[label] = level
        self.draft.nodes.append(Node(label, actor, recipe, sources, tuple(results), donatable))

    def _outer_donations(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[int, ...]:
        """Argument positions worth donating: those that a result of equal type can take the place of."""
        indices = set(self.draft.index_ids)
        free = {v: p for p, v in enumerate(inputs) if v not in self.kept and v not in indices}
        chosen: list[int] = []
        waiting = []
        for o in outputs:
            if (argument := self.continued.get(o)) in free:
                chosen.append(free.pop(argument))
            else:
                waiting.append(o)
        by_type: dict[ValueType, list[int]] = defaultdict(list)
        for v, p in reversed(free.items()):
            by_type[self.types[v]].append(p)
        chosen += [by_type[t].pop() for o in waiting if by_type.get(t := self.types[o])]
        return tuple(sorted(chosen))

    @cached_property
    def kept(self) -> set[int]:
        """Arguments and captured arrays that the caller keeps."""
        inputs = self.traced.flat.inputs
        return {v for v, d in zip(inputs, self.donated, strict=False) if not d} | set(
            inputs[len(self.donated) :]
        )

    @cached_property
    def continued(self) -> dict[int, int]:
        """A result's id to the id of the argument it continues."""
        refs = self.outer.outputs
        return {
            r: self.traced.flat.inputs[arg]
            for k, arg in self.continues.items()
            if isinstance(r := refs[k], int)
        }


class _Ender:
    """The last step of a reduction, as an operation's payload."""

    def __init__(self, reduction: Any, num_microbatches: int) -> None:
        self.reduction, self.num_microbatches = reduction, num_microbatches

    def __call__(self, xs: Sequence[Any]) -> list[Any]:
        return [self.reduction.end(xs[0], self.num_microbatches)]


# ---------------------------------------------------------------- unroll


@dataclass(eq=False)
class TaskGraphBuilder:
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

    def add(self, batch: MicrobatchValues, place: str) -> range:
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
class MicrobatchValues:
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
    return (
        index in reads
        or bool(reads & set(batch))
        or any(staged.loop.reductions[k].grows for k, _ in task.adds)
    )


def unroll(draft: TaskGraphBuilder, scheduled: ScheduledLoop, finals: list[list[int]]) -> None:
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
    outputs: MicrobatchValues
    donatable: tuple[int, ...]


class _Unroller:
    def __init__(self, draft: TaskGraphBuilder, scheduled: ScheduledLoop, finals: list[list[int]]) -> None:
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
        draft.nodes.append(
            Node(label, actor, form.recipe, tuple(inputs), tuple(outputs), form.donatable, task)
        )

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
        batch = MicrobatchValues(
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
            starts.append(AccumulatorStart(aval, reduction, self.loop.num_microbatches, final))
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
