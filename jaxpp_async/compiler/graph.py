"""compiler.graph: a traced step and its cut loops in, a `TaskGraph` and the recipe of each executable out. No jax.

A recipe says which operations one executable runs, on which values; `compiler.emit` turns it into StableHLO. Node
inputs and recipe inputs agree position by position.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpp_async import schedules
from jaxpp_async.compiler.ir import Lit, Loop, Op, Ref, Traced, Types, ValueType
from jaxpp_async.compiler.partition import StagedLoop, TaskKey, cross_task_values
from jaxpp_async.compiler.placement import Actors, OuterStep, Placement, place
from jaxpp_async.program import (
    ActorId,
    Aval,
    GraphInput,
    GraphOutput,
    Node,
    Task,
    TaskGraph,
    Value,
    ValueId,
    ValueKind,
)


@dataclass(frozen=True, eq=False)
class Accumulate:
    """`result = reduction.step(accumulator, value, index)`."""

    accumulator: int
    value: Ref
    reduction: Any
    result: int


@dataclass(frozen=True, eq=False)
class Start:
    """`result` is the accumulator of `reduction` over values of `aval` before the first microbatch."""

    aval: Aval
    reduction: Any
    num_microbatches: int
    result: int


@dataclass(frozen=True, eq=False)
class Recipe:
    """What one executable computes.

    Args:
        name: such as `"fwd0"`, for profiles and dumps.
        inputs: value ids, one an argument.
        outputs: value ids (or constants), one a result.
        ops: in order.
        slices: (whole batch leaf, one microbatch of it) pairs, cut by `index` before `ops` run.
        index: id of the microbatch index among `inputs`, if needed.
        literals: ids that stand for constants.
        starts: accumulators to make.
        accumulates: accumulators to update, after `ops`.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[Ref, ...]
    ops: tuple[Op, ...] = ()
    slices: tuple[tuple[Ref, int], ...] = ()
    index: int | None = None
    literals: dict[int, Lit] = field(default_factory=dict)
    starts: tuple[Start, ...] = ()
    accumulates: tuple[Accumulate, ...] = ()


@dataclass(frozen=True, eq=False)
class ScheduledLoop:
    """A cut loop with its resolved schedule: tasks in order, an actor a row, and each stage's actor."""

    staged: StagedLoop
    tasks: tuple[tuple[Task, ...], ...]
    stage_actors: tuple[ActorId, ...]


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """The compiler's result before shardings: the graph, its recipes, and what reports want to know.

    Args:
        graph: `GraphInput.arg` counts argument leaves, then captured arrays, then microbatch indices 0, 1, ...
        items: the step outside its loops, sums regrouped.
        parts: for each loop (by position in the traced operations), each result's final accumulators.
        value_ids: the IR id of every graph value, for its sharding.
        same_sharding: accumulator ids inside recipes to the ids of their final values.
        output_ids: the IR id of every result leaf.
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


def _task_inputs(task_ops: Sequence[Op], accumulated: Sequence[Ref]) -> list[int]:
    """Values a task reads and does not make, in order of first use."""
    made = {o for op in task_ops for o in op.outputs if o >= 0}
    reads = [r for op in task_ops for r in op.reads] + [r for r in accumulated if isinstance(r, int)]
    return [r for r in dict.fromkeys(reads) if r not in made]


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
        self.recipes: list[Recipe] = []
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.value_ids: list[int] = []
        self.where: dict[tuple[int, ActorId], ValueId] = {}  # value of an IR id as seen from an actor
        self.loops = loops
        self.names = dict(zip(traced.flat.inputs, traced.arg_names, strict=False))
        # Final accumulators: (loop position, result, part) to IR id.
        self.parts: dict[int, list[list[int]]] = {}
        self.index_ids: list[int] = []
        self.same_sharding: dict[int, int] = {}

    def build(self) -> PlacedStep:
        step = self._outer_step()
        placement = place(step, self.types)
        self.exported = self._exported(placement)
        inputs = self._inputs(placement)
        positions = {id(item): i for i, item in enumerate(self.traced.flat.ops) if isinstance(item, Loop)}
        for level in range(placement.num_levels):
            self._outer_nodes(placement, level)
            for i, at in placement.loop_levels.items():
                if at == level:
                    self._loop_nodes(positions[id(placement.items[i])])
        outputs = self._outputs(placement)
        graph = TaskGraph(self.num_actors, tuple(self.values), tuple(self.nodes), inputs, outputs)
        return PlacedStep(
            graph,
            tuple(self.recipes),
            placement,
            self.loops,
            self.parts,
            tuple(self.value_ids),
            self.same_sharding,
            tuple(o for o in self.outer.outputs if isinstance(o, int)),
            len(self.index_ids),
            self.types,
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
            outputs.append(self.types.new(_literal_type(ref, self.types)))
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
        )
        self.outer = step
        return step

    def _loop_needs(self, scheduled: ScheduledLoop) -> dict[int, Actors]:
        """The outer values a loop reads, and on which actors."""
        staged = scheduled.staged
        loop = staged.loop
        invariants, batch, _ = loop.body_inputs()
        outer = dict(zip((*invariants, *batch), loop.inputs, strict=True))
        needs: dict[int, set[ActorId]] = defaultdict(set)
        for key, task in staged.tasks.items():
            accumulated = [p.value for parts in staged.outputs for p in parts if p.task == key]
            for r in _task_inputs(task.ops, accumulated):
                if isinstance(ref := outer.get(r), int):
                    needs[ref].add(scheduled.stage_actors[key[1]])
        return {v: frozenset(a) for v, a in needs.items()}

    def _loop_results(self, position: int) -> tuple[dict[int, ActorId], list[Op]]:
        """The accumulators a loop leaves behind, and the operations that turn them into its results."""
        scheduled = self.loops[position]
        loop = scheduled.staged.loop
        made: dict[int, ActorId] = {}
        after: list[Op] = []
        self.parts[position] = []
        for parts, reduction, result in zip(scheduled.staged.outputs, loop.reductions, loop.outputs, strict=True):
            ends = type(reduction).__name__ == "Mean"
            result_type = self.types[result]
            ids = [result if len(parts) == 1 and not ends else self.types.new(result_type) for _ in parts]
            for part_id, part in zip(ids, parts, strict=True):
                made[part_id] = scheduled.stage_actors[part.task[1]]
            total = ids[0]
            for k, part_id in enumerate(ids[1:], 2):
                out = result if k == len(ids) and not ends else self.types.new(result_type)
                after.append(Op("add_partial", (total, part_id), (out,), _add, loop.line))
                total = out
            if ends:
                after.append(
                    Op("reduction_end", (total,), (result,), _Ender(reduction, loop.num_microbatches), loop.line)
                )
            self.parts[position].append(ids)
        return made, after

    # ---- inputs and outputs

    def _inputs(self, placement: Placement) -> tuple[GraphInput, ...]:
        graph_inputs = []
        num_args = len(self.traced.arg_names)
        for arg, v in enumerate(self.traced.flat.inputs):
            donated = arg < num_args and bool(self.donated[arg])
            name = self.names.get(v, f"captured[{arg - num_args}]")
            value = self._value(v, name, "input")
            actors = tuple(sorted(placement.input_homes[v]))
            for a in actors:
                self.where[v, a] = value
            graph_inputs.append(GraphInput(value, arg, actors, donated))
        graph_inputs += self._index_inputs(len(graph_inputs))
        return tuple(graph_inputs)

    def _index_inputs(self, first_arg: int) -> list[GraphInput]:
        """Microbatch indices, which never change: arguments that the step keeps on the actors."""
        users: set[ActorId] = set()
        count = 0
        for scheduled in self.loops.values():
            for key in scheduled.staged.tasks:
                if self._needs_index(scheduled.staged, key):
                    users.add(scheduled.stage_actors[key[1]])
                    count = max(count, scheduled.staged.loop.num_microbatches)
        found = []
        for i in range(count):
            v = self.types.new(ValueType(Aval((), "int32")))
            self.index_ids.append(v)
            value = self._value(v, f"microbatch index {i}", "input")
            for a in users:
                self.where[v, a] = value
            found.append(GraphInput(value, first_arg + i, tuple(sorted(users))))
        return found

    def _outputs(self, placement: Placement) -> tuple[GraphOutput, ...]:
        outputs = []
        for k, ref in enumerate(self.outer.outputs):
            assert isinstance(ref, int)
            by_value: dict[ValueId, list[ActorId]] = defaultdict(list)
            for a in sorted(placement.output_homes[k]):
                by_value[self._read(ref, a)].append(a)
            outputs += [GraphOutput(value, k, tuple(actors)) for value, actors in by_value.items()]
        return tuple(outputs)

    # ---- values

    def _value(self, ir_id: int, label: str, kind: ValueKind = "temp") -> ValueId:
        self.values.append(Value(self.types[ir_id].aval, label, kind))
        self.value_ids.append(ir_id)
        return len(self.values) - 1

    def _read(self, ir_id: int, actor: ActorId) -> ValueId:
        """The value of an id on `actor`, or else the one to be sent there (from the lowest actor that has it)."""
        if (ir_id, actor) in self.where:
            return self.where[ir_id, actor]
        return next(self.where[ir_id, a] for a in range(self.num_actors) if (ir_id, a) in self.where)

    # ---- nodes outside loops

    def _outer_nodes(self, placement: Placement, level: int) -> None:
        groups: dict[ActorId, list[Op]] = defaultdict(list)
        for i, item in enumerate(placement.items):
            if isinstance(item, Op):
                for a in sorted(placement.op_actors[i]):
                    if placement.levels[i, a] == level:
                        groups[a].append(item)
        for a in sorted(groups):
            outputs = [o for op in groups[a] for o in op.outputs if (o, a) in self.exported]
            self._outer_node(level, a, groups[a], outputs)

    def _exported(self, placement: Placement) -> set[tuple[int, ActorId]]:
        """(value, actor that makes it) of what is read outside the task that makes it."""
        maker = {o: i for i, item in enumerate(placement.items) if isinstance(item, Op) for o in item.outputs}
        found: set[tuple[int, ActorId]] = set()

        def use(value: int, actor: ActorId, level: int | None) -> None:
            if (i := maker.get(value)) is None:
                return
            source = actor if actor in placement.op_actors[i] else min(placement.op_actors[i])
            if source != actor or placement.levels[i, source] != level:
                found.add((value, source))

        for i, item in enumerate(placement.items):
            if isinstance(item, Op):
                for a in placement.op_actors[i]:
                    for r in item.reads:
                        use(r, a, placement.levels[i, a])
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
        inputs = _task_inputs(ops, ())
        recipe = len(self.recipes)
        name = f"outer{level}_actor{actor}"
        self.recipes.append(Recipe(name, tuple(inputs), tuple(outputs), tuple(ops)))
        sources = tuple(self._read(v, actor) for v in inputs)
        results = []
        for o in outputs:
            value = self._value(o, f"%{o}@outer({level})")
            self.where[o, actor] = value
            results.append(value)
        donatable = self._outer_donations(inputs, outputs)
        self.nodes.append(Node(f"outer({level}, actor {actor})", actor, recipe, sources, tuple(results), donatable))

    def _outer_donations(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[int, ...]:
        """Argument positions worth donating: those that a result of equal type can take the place of."""
        kept = {v for v, d in zip(self.traced.flat.inputs, self.donated, strict=False) if not d} | set(
            self.traced.flat.inputs[len(self.donated) :]
        )
        free = [p for p, v in enumerate(inputs) if v not in kept and v not in self.index_ids]
        chosen: list[int] = []
        continued = {
            ref: self.traced.flat.inputs[arg]
            for k, arg in self.continues.items()
            if isinstance(ref := self.outer.outputs[k], int)
        }
        waiting = []
        for o in outputs:
            p = next((p for p in free if inputs[p] == continued.get(o)), None)
            if p is None:
                waiting.append(o)
            else:
                chosen.append(p)
                free.remove(p)
        for o in waiting:
            p = next((p for p in free if self.types[inputs[p]] == self.types[o]), None)
            if p is not None:
                chosen.append(p)
                free.remove(p)
        return tuple(sorted(chosen))

    # ---- nodes of a loop

    def _needs_index(self, staged: StagedLoop, key: TaskKey) -> bool:
        _, batch, index = staged.loop.body_inputs()
        accumulated = [(p.value, r) for parts, r in self._parts_with_reduction(staged) for p in parts if p.task == key]
        reads = set(_task_inputs(staged.tasks[key].ops, [v for v, _ in accumulated]))
        return index in reads or bool(reads & set(batch)) or any(r.grows for _, r in accumulated)

    def _parts_with_reduction(self, staged: StagedLoop) -> list[tuple[tuple, Any]]:
        return list(zip(staged.outputs, staged.loop.reductions, strict=True))

    def _loop_nodes(self, position: int) -> None:
        scheduled = self.loops[position]
        builder = _LoopNodes(self, scheduled, self.parts[position])
        for actor, task in schedules.global_order(scheduled.tasks):
            builder.add(actor, task)
        builder.finish()


class _LoopNodes:
    """Unrolls one loop into nodes, in the schedule's order."""

    def __init__(self, owner: _Builder, scheduled: ScheduledLoop, parts: list[list[int]]) -> None:
        self.owner, self.scheduled, self.staged = owner, scheduled, scheduled.staged
        self.loop = self.staged.loop
        self.cross = cross_task_values(self.staged)
        invariants, batch, self.index = self.loop.body_inputs()
        self.outer = dict(zip((*invariants, *batch), self.loop.inputs, strict=True))
        self.batch = set(batch)
        self.made: dict[tuple[int, int], ValueId] = {}  # (body id, microbatch) to value
        self.recipes: dict[TaskKey, int] = {}
        self.accumulators: dict[TaskKey, list[tuple[int, ValueId]]] = {}  # (final IR id, current value)
        self.finals = parts

    def add(self, actor: ActorId, task: Task) -> None:
        key = (task.ty, task.stage)
        if key not in self.staged.tasks:
            return
        if key not in self.recipes:
            self._start(actor, key)
            self.recipes[key] = self._recipe(key)
        recipe = self.owner.recipes[self.recipes[key]]
        accumulators = self.accumulators[key]
        num_acc = len(accumulators)
        inputs = [self._input(v, actor, task.i) for v in recipe.inputs[: len(recipe.inputs) - num_acc]]
        donatable = tuple(range(len(inputs), len(inputs) + num_acc))
        inputs += [value for _, value in accumulators]
        outputs = []
        for ref in recipe.outputs[: len(recipe.outputs) - num_acc]:
            assert isinstance(ref, int)
            self.made[ref, task.i] = self.owner._value(ref, f"%{ref}@{task.ty}(stage {task.stage}, mb {task.i})")
            outputs.append(self.made[ref, task.i])
        updated = []
        for final, old in accumulators:
            value = self.owner._value(final, self.owner.values[old].label, self.owner.values[old].kind)
            updated.append((final, value))
        self.accumulators[key] = updated
        outputs += [value for _, value in updated]
        label = f"{task.ty}(stage {task.stage}, mb {task.i})"
        self.owner.nodes.append(Node(label, actor, self.recipes[key], tuple(inputs), tuple(outputs), donatable, task))

    def _input(self, ir_id: int, actor: ActorId, microbatch: int) -> ValueId:
        if ir_id == self.index:
            return self.owner._read(self.owner.index_ids[microbatch], actor)
        if (ir_id, microbatch) in self.made:
            return self.made[ir_id, microbatch]
        ref = self.outer.get(ir_id, ir_id)  # a whole batch leaf goes by its outer id
        assert isinstance(ref, int)
        return self.owner._read(ref, actor)

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
        types = self.owner.types
        outputs = []
        for final, value, reduction in found:
            aval = types[value].aval if isinstance(value, int) else _literal_type(value, types).aval
            starts.append(Start(aval, reduction, self.loop.num_microbatches, final))
            kind: ValueKind = "result" if reduction.grows else "accumulator"
            outputs.append(self.owner._value(final, f"accumulator of %{final}", kind))
            self.accumulators[key].append((final, outputs[-1]))
        recipe = len(self.owner.recipes)
        self.owner.recipes.append(
            Recipe(f"start_{key[0]}{key[1]}", (), tuple(s.result for s in starts), starts=tuple(starts))
        )
        self.owner.nodes.append(Node(f"start({key[0]}, stage {key[1]})", actor, recipe, (), tuple(outputs)))

    def _recipe(self, key: TaskKey) -> int:
        task = self.staged.tasks[key]
        accumulated = self._accumulated(key)
        reads = _task_inputs(task.ops, [v for _, v, _ in accumulated])
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
        needs_index = self.owner._needs_index(self.staged, key)
        if needs_index and self.index not in inputs:
            inputs.append(self.index)
        types = self.owner.types
        accumulates = []
        for final, value, reduction in accumulated:
            old, new = types.new(types[final]), types.new(types[final])
            self.owner.same_sharding |= {old: final, new: final}
            accumulates.append(Accumulate(old, value, reduction, new))
        self.owner.recipes.append(
            Recipe(
                name=f"{key[0]}{key[1]}",
                inputs=(*inputs, *(a.accumulator for a in accumulates)),
                outputs=(*self.cross[key][1], *(a.result for a in accumulates)),
                ops=task.ops,
                slices=tuple(slices),
                index=self.index if needs_index else None,
                literals=literals,
                accumulates=tuple(accumulates),
            )
        )
        return len(self.owner.recipes) - 1

    def finish(self) -> None:
        """Final accumulators become the loop's results on their actors."""
        for key, accumulators in self.accumulators.items():
            for final, value in accumulators:
                self.owner.where[final, self.scheduled.stage_actors[key[1]]] = value


class _Ender:
    """The last step of a reduction, as an operation's payload."""

    def __init__(self, reduction: Any, num_microbatches: int) -> None:
        self.reduction, self.num_microbatches = reduction, num_microbatches

    def __call__(self, xs: Sequence[Any]) -> list[Any]:
        return [self.reduction.end(xs[0], self.num_microbatches)]


def _add(xs: Sequence[Any]) -> list[Any]:
    return [operator.add(*xs)]


def _literal_type(lit: Lit, types: Types) -> ValueType:
    value = lit.value
    return ValueType(Aval(tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", type(value).__name__))))
