"""Build the task graph of one traced step, and a recipe (the operations) of each executable that nodes run.

`placement` decides which actors run the operations outside the microbatch loops; `loop_unrolling` adds the
tasks of each loop.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxpp_async.compiler.ir import (
    Actors,
    Loop,
    Op,
    OuterStep,
    Recipe,
    Ref,
    Traced,
    Types,
    ValueType,
    literal_type,
    outside_reads,
    source_actor,
)
from jaxpp_async.compiler.loop_commuting import Epilogue
from jaxpp_async.compiler.loop_unrolling import TaskGraphBuilder, needs_index, unroll_loop
from jaxpp_async.compiler.partition import OutputPart
from jaxpp_async.compiler.placement import Placement, place
from jaxpp_async.compiler.sum_distribution import distribute_sums
from jaxpp_async.compiler.task_variants import ScheduledLoop
from jaxpp_async.program.instructions import (
    ActorId,
    Aval,
    GraphInput,
    GraphOutput,
    Node,
    TaskGraph,
    ValueId,
    ValueKind,
)


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A step whose tasks are placed on actors, but whose values have no shardings yet.

    An IR id is the id of a value of the traced step (`compiler.ir`), in contrast to the position of a value
    in the graph.

    Args:
        graph: the task graph. `GraphInput.arg` numbers first the argument leaves, then the captured arrays,
            then the microbatch indices.
        recipes: one recipe (list of operations) per executable.
        placement: the actors of everything outside the loops.
        loops: the scheduled loops, by position in the traced operations.
        parts: a dictionary. Its keys are the positions of the loops in the traced operations. Each value is a
            list with one entry per result of the loop: the IR ids of the final accumulators from which the
            result is computed.
        value_ids: the IR id of every value of the graph; values of the same id have the same sharding.
        same_sharding: a dictionary. Its keys are IR ids of accumulators inside recipes; its values are the IR
            ids of the final accumulators, which must have the same shardings.
        output_ids: the IR id of every result leaf.
        num_indices: the number of microbatch indices among the graph's inputs.
        types: the type of every IR id.
        outer_levels: the level (see `placement`) of every node outside the loops, by the node's label.
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
    outer_levels: dict[str, int]


@dataclass(eq=False)
class StepBuilder:
    """A builder of the task graph of a traced step, which places all tasks of the step on actors and connects
    them by their values.

    Args:
        traced: the traced step.
        loops: the scheduled loops, by position in `traced.flat.ops`.
        num_actors: the number of actors in the mesh.
        continues: a dictionary for results that are the next values of arguments, such as a training state.
            Its keys are positions of result leaves; its values are the positions of the argument leaves.
        donated: for each argument leaf, whether the step may overwrite it.
        result_homes: a dictionary. Its keys are positions of result leaves; its values are the actors that
            must hold these leaves when the step ends. Placement chooses the actors of all other leaves.
    """

    traced: Traced
    loops: dict[int, ScheduledLoop]
    num_actors: int
    continues: dict[int, int]
    donated: Sequence[bool]
    result_homes: dict[int, Actors]

    def build(self) -> PlacedStep:
        """Place the step on actors and build its task graph. This may be called once."""
        self.types = self.traced.types
        self.draft = TaskGraphBuilder(self.types, self.num_actors)
        # Final accumulators: loop position to result to part to IR id.
        self.parts: dict[int, list[list[int]]] = {}
        self.outer_levels: dict[str, int] = {}
        self.outer = distribute_sums(self._outer_step(), self.types)
        placement = place(self.outer, self.types)
        inputs = self._inputs(placement)
        self._add_nodes(placement)
        outputs = self._outputs(placement)
        draft = self.draft
        return PlacedStep(
            TaskGraph(self.num_actors, draft.values(), tuple(draft.nodes), inputs, outputs),
            tuple(draft.recipes),
            placement,
            self.loops,
            self.parts,
            tuple(draft.value_ids),
            draft.same_sharding,
            tuple(o for o in self.outer.outputs if isinstance(o, int)),
            len(draft.index_ids),
            self.types,
            self.outer_levels,
        )

    def _add_nodes(self, placement: Placement) -> None:
        """Add all nodes to the graph, level by level; data is sent to other actors only between levels.

        For each level, first the nodes outside the loops are added, one per actor, then the nodes of the
        loops.
        """
        exported = self._exported(placement)
        positions = {id(item): i for i, item in enumerate(self.traced.flat.ops) if isinstance(item, Loop)}
        groups = self._outer_groups(placement)
        for level in range(placement.num_levels):
            for actor in range(self.num_actors):
                ops = groups.get((level, actor), [])
                if outputs := [o for op in ops for o in op.outputs if (o, actor) in exported]:
                    self._add_outer_node(level, actor, ops, outputs)
            for i, at in placement.loop_levels.items():
                if at == level:
                    loop = positions[id(placement.items[i])]
                    unroll_loop(self.draft, self.loops[loop], self.parts[loop])

    # ---- the step outside its loops

    def _outer_step(self) -> OuterStep:
        """Return the input of placement: the step, in which each loop is a single item."""
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
        return OuterStep(
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

    def _untouched(self, outputs: Sequence[int]) -> dict[int, int]:
        """Find the results that are unchanged arguments.

        An argument that is returned as several results is left out, since it has to be copied.

        Returns:
            A dictionary from the position of a result to the id of the argument.
        """
        arguments = set(self.traced.flat.inputs[: len(self.traced.arg_names)])
        return {
            k: v
            for k, v in enumerate(outputs[: len(self.traced.out_names)])
            if v in arguments and outputs.count(v) == 1
        }

    def _loop_needs(self, scheduled: ScheduledLoop) -> dict[int, Actors]:
        """Find the actors that read each value that a loop needs from outside.

        Returns:
            A dictionary. Its keys are the ids of these values; its values are the actors.
        """
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
        """Make ids for a loop's final accumulators, and the operations that compute the results from these.

        Args:
            position: the position of the loop in the traced operations.

        Returns:
            A pair: a dictionary from the id of each final accumulator to the actor that stores the
            accumulator, and the operations to run after the loop.
        """
        scheduled = self.loops[position]
        loop = scheduled.staged.loop
        made: dict[int, ActorId] = {}
        after: list[Op] = []
        self.parts[position] = []
        staged = scheduled.staged
        names: dict[Ref, Ref] = dict(zip(loop.body.inputs, loop.inputs, strict=False))
        totals: dict[OutputPart, int] = {}  # cached, since several results may be made of one part
        for parts, epilogue, reduction, result in zip(
            staged.outputs, staged.epilogues, loop.reductions, loop.outputs, strict=True
        ):
            if epilogue is None:
                ids = [self.types.new(self.types[result], like=result) if reduction.has_end else result]
            else:
                ids = [
                    totals[p] if p in totals else totals.setdefault(p, self._new_total_id(p, result))
                    for p in parts
                ]
            made.update((i, scheduled.stage_actors[p.task[1]]) for i, p in zip(ids, parts, strict=True))
            self.parts[position].append(ids)
            whole = ids[0]
            if epilogue is not None:
                names.update({p.value: i for p, i in zip(parts, ids, strict=True)})
                whole = result if not reduction.has_end else self.types.new(self.types[result], like=result)
                names[epilogue.value] = whole
                after += self._renamed(epilogue, names)
            if reduction.has_end:
                ender = _ReductionEnd(reduction, loop.num_microbatches)
                after.append(Op("reduction_end", (whole,), (result,), ender, loop.line))
        return made, after

    def _new_total_id(self, part: OutputPart, result: int) -> int:
        """Make a new value id for the final accumulator of one part of a loop's result.

        Args:
            part: the value that is accumulated.
            result: the id of the loop's result.
        """
        like = part.value if isinstance(part.value, int) else result
        value_type = dataclasses.replace(self.types[like], weak=self.types[result].weak)
        return self.types.new(value_type, like=like)

    def _renamed(self, epilogue: Epilogue, names: dict[Ref, Ref]) -> list[Op]:
        """Return copies of an epilogue's operations (which run after a loop) with ids outside the loop.

        Args:
            epilogue: the operations, which use ids of the loop's body.
            names: a dictionary. Its keys are values of the loop's body; its values are the values outside the
                loop that replace them. Entries for the results of the operations are added.
        """
        ops = []
        for op in epilogue.ops:
            for o in op.outputs:
                if o not in names:
                    names[o] = self.types.new(self.types[o]) if o >= 0 else o
            inputs = tuple(names[r] if isinstance(r, int) else r for r in op.inputs)
            ops.append(dataclasses.replace(op, inputs=inputs, outputs=tuple(names[o] for o in op.outputs)))
        return ops

    # ---- inputs and outputs

    def _inputs(self, placement: Placement) -> tuple[GraphInput, ...]:
        num_args = len(self.traced.arg_names)
        inputs = []
        for arg, v in enumerate(self.traced.flat.inputs):
            name = self.traced.arg_names[arg] if arg < num_args else f"captured[{arg - num_args}]"
            donated = arg < num_args and bool(self.donated[arg])
            inputs.append(self._input(v, name, arg, placement.input_homes[v], donated))
        # Microbatch indices never change: they are arguments that the step keeps on the actors.
        users: set[ActorId] = set()
        count = 0
        for scheduled in self.loops.values():
            for variant, actor in scheduled.variants_on_actors():
                if needs_index(scheduled.staged, variant.task):
                    users.add(actor)
                    count = max(count, scheduled.staged.loop.num_microbatches)
        self.draft.index_ids += [self.types.new(ValueType(Aval((), "int32"))) for _ in range(count)]
        for i, v in enumerate(self.draft.index_ids):
            inputs.append(self._input(v, f"microbatch index {i}", len(inputs), users))
        return tuple(inputs)

    def _input(
        self, ir_id: int, name: str, arg: int, homes: Iterable[ActorId], donated: bool = False
    ) -> GraphInput:
        value = self.draft.add_named(ir_id, name, "input")
        actors = tuple(sorted(homes))
        self.draft.value_by_actor.update(((ir_id, a), value) for a in actors)
        return GraphInput(value, arg, actors, donated)

    def _outputs(self, placement: Placement) -> tuple[GraphOutput, ...]:
        outputs = []
        for k, ref in enumerate(self.outer.outputs):
            assert isinstance(ref, int)
            by_value: dict[ValueId, list[ActorId]] = defaultdict(list)
            for a in sorted(placement.output_homes[k]):
                by_value[self.draft.value_on(ref, a)].append(a)
            outputs += [GraphOutput(value, k, tuple(actors)) for value, actors in by_value.items()]
        return tuple(outputs)

    # ---- nodes outside loops

    def _outer_groups(self, placement: Placement) -> dict[tuple[int, ActorId], list[Op]]:
        """Return the operations outside the loops, grouped by (level, actor), each group in program order."""
        groups: dict[tuple[int, ActorId], list[Op]] = defaultdict(list)
        for i, item in enumerate(placement.items):
            if isinstance(item, Op):
                for a in placement.op_actors[i]:
                    groups[placement.levels[i, a], a].append(item)
        return groups

    def _exported(self, placement: Placement) -> set[tuple[int, ActorId]]:
        """Return the results of operations outside the loops that are read outside the task that makes them.

        Returns:
            Pairs of a value id and the actor that makes the value.
        """
        maker = {o: i for i, item in enumerate(placement.items) if isinstance(item, Op) for o in item.outputs}
        run_on, levels = placement.op_actors, placement.levels
        found: set[tuple[int, ActorId]] = set()

        def use(value: int, actor: ActorId, level: int | None) -> None:
            if (i := maker.get(value)) is None:
                return
            source = source_actor(run_on[i], actor)
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

    def _add_outer_node(self, level: int, actor: ActorId, ops: Sequence[Op], outputs: Sequence[int]) -> None:
        inputs = outside_reads(ops, ())
        name = f"outer{level}_actor{actor}"
        recipe = self.draft.add_recipe(Recipe(name, tuple(inputs), tuple(outputs), tuple(ops)))
        sources = tuple(self.draft.value_on(v, actor) for v in inputs)
        avals = [self.types[o].aval for o in outputs]
        temps: list[ValueKind] = ["temp"] * len(outputs)
        results = self.draft.add_values(outputs, avals, temps, f"outer({level})", len(outputs))
        self.draft.value_by_actor.update(
            ((o, actor), value) for o, value in zip(outputs, results, strict=True)
        )
        donatable = self._outer_donations(inputs, outputs)
        label = f"outer({level}, actor {actor})"
        self.outer_levels[label] = level
        self.draft.nodes.append(Node(label, actor, recipe, sources, tuple(results), donatable))

    def _outer_donations(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[int, ...]:
        """Choose the inputs of an executable outside the loops that are worth donating.

        The executable can reuse the buffer of each chosen input for a result of equal type. If a result is
        the next value of an input (such as a training state), this result reuses the input's buffer.

        Args:
            inputs: the ids of the executable's inputs.
            outputs: the ids of the executable's results.

        Returns:
            The positions of the chosen inputs.
        """
        indices = set(self.draft.index_ids)
        free = {v: p for p, v in enumerate(inputs) if v not in self.not_donated and v not in indices}
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
    def not_donated(self) -> set[int]:
        """The ids of the inputs that the step may not overwrite: captured arrays, and arguments that are not
        donated."""
        inputs = self.traced.flat.inputs
        return {v for v, d in zip(inputs, self.donated, strict=False) if not d} | set(
            inputs[len(self.donated) :]
        )

    @cached_property
    def continued(self) -> dict[int, int]:
        """The ids of the arguments of which results are the next values, as with a training state.

        Keys are the ids of the results; values are the ids of the arguments.
        """
        refs = self.outer.outputs
        return {
            r: self.traced.flat.inputs[arg]
            for k, arg in self.continues.items()
            if isinstance(r := refs[k], int)
        }


@dataclass(frozen=True, eq=False)
class _ReductionEnd:
    """A callable for `Op.run` that does the last part of a reduction, after the last microbatch.

    For a mean this divides the sum by the number of microbatches.
    """

    reduction: Any
    num_microbatches: int

    def __call__(self, xs: Sequence[Any]) -> list[Any]:
        return [self.reduction.end(xs[0], self.num_microbatches)]
