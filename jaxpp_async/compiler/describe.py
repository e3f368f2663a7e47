"""Describe a compiled step as text: a dump of each compiler pass, and the reasons for placements and
transfers.

Dumps are long and seldom read, so `PassTexts` keeps functions and makes a dump only when it is asked for.
`Explainer` derives the reasons from the task graph, for the step's `report`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxpp_async import schedules
from jaxpp_async.compiler.ir import Flat, Lit, Loop, Op, Recipe, Ref, Traced, Types
from jaxpp_async.compiler.lowering import plan_transfers
from jaxpp_async.compiler.partition import StagedLoop
from jaxpp_async.compiler.task_graph import PlacedStep
from jaxpp_async.compiler.task_variants import ScheduledLoop
from jaxpp_async.program.actor_program import ActorProgram, format_program
from jaxpp_async.program.instructions import ActorId, Node, ValueId
from jaxpp_async.program.task_label import task_kind


class PassTexts(Mapping[str, str]):
    """A read-only mapping from the name of each compiler pass to its text dump, in the order of the passes.

    A dump is made anew each time it is read.

    Args:
        makers: a dictionary. Its keys are the names of passes; its values are functions without arguments
            that make the dumps. The functions must use only values that are never changed later.
    """

    def __init__(self, makers: Mapping[str, Callable[[], str]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> str:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __repr__(self) -> str:
        return f"<texts of {', '.join(self)}>"

    def with_text(self, name: str, maker: Callable[[], str]) -> PassTexts:
        """Return a new mapping with the dump of one more pass at its end."""
        return PassTexts({**self._makers, name: maker})


def format_programs(programs: Sequence[ActorProgram]) -> str:
    """Return a text dump of the programs of all actors."""
    return "\n\n".join(format_program(p) for p in programs)


def format_executables(executables: Sequence[Any]) -> str:
    """Return a text with one line per executable: its number, name and size in bytes."""
    return "\n".join(f"exe {i} {e.name} {len(e.blob)} bytes" for i, e in enumerate(executables))


def format_flat(flat: Flat, types: Types, indent: str = "") -> str:
    """Return a text dump of a body of operations, for `PassTexts` and for tests against stored dumps.

    Args:
        flat: the operations, with inputs and outputs.
        types: the type of every value id.
        indent: spaces at the start of each line.
    """
    lines = [f"{indent}inputs {_format_refs(flat.inputs, types)}"]
    for op in flat.ops:
        left = _format_refs([o for o in op.outputs if o >= 0], types)
        if isinstance(op, Loop):
            n = op.num_microbatches
            lines.append(f"{indent}{left} = loop[{n} microbatches] {_format_refs(op.inputs)} {{")
            lines.append(format_flat(op.body, types, indent + "  "))
            lines.append(f"{indent}}} reduce ({', '.join(type(r).__name__ for r in op.reductions)})")
        else:
            mark = " '" if op.transposed else ""
            lines.append(f"{indent}{left} = {op.name} {_format_refs(op.inputs)}{mark}")
    lines.append(f"{indent}return {_format_refs(flat.outputs)}")
    return "\n".join(lines)


def format_staged(staged: StagedLoop) -> str:
    """Return a text dump of a loop that is split into tasks, with each task's operations and each result."""
    lines = [f"loop of {staged.num_stages} stages, {staged.loop.num_microbatches} microbatches"]
    if (cut := staged.loop.cut) is not None:
        lines.append(f"stage boundaries: marks {cut}")
        lines += [f"stage {k} ends at mark {mark}" for k, mark in enumerate(cut.boundary_marks)]
    else:
        lines += [
            f"stage {k} ends at pipeline_yield {name!r}" for k, name in enumerate(staged.stage_names) if name
        ]
    for (ty, stage), task in staged.tasks.items():
        lines += [f"{ty} stage {stage}", *_format_ops(task.ops)]
    for k, parts in enumerate(staged.outputs):
        joined = " + ".join(f"{_format_ref(p.value)} of {p.task[0]} stage {p.task[1]}" for p in parts)
        lines.append(f"result {k}: {type(staged.loop.reductions[k]).__name__} {joined}")
    return "\n".join(lines)


def format_scheduled(scheduled: ScheduledLoop) -> str:
    """Return a text dump of a loop under its schedule.

    The dump has the grid of tasks by actor and time, then each variant of a task (the whole task, one half of
    it, or two tasks joined, as the schedule asked) with its actor, the values it reads and makes, and its
    operations.
    """
    lines = [schedules.format_grid(scheduled.tasks)]
    for variant, actor in scheduled.variants_on_actors():
        task = variant.task
        reads = _format_refs(scheduled.staged.reads(task))
        lines.append(
            f"{task.key[0]} stage {task.key[1]} on actor {actor} ({reads}) -> ({_format_refs(variant.makes)})"
        )
        lines += _format_ops(task.ops)
        lines += [
            f"  result {k} += {_format_ref(scheduled.staged.outputs[k][j].value)}" for k, j in task.adds
        ]
    return "\n".join(lines)


def _format_ops(ops: Sequence[Op]) -> list[str]:
    return [
        f"  {_format_refs([o for o in op.outputs if o >= 0])} = {op.name} {_format_refs(op.inputs)}"
        for op in ops
    ]


def _format_refs(refs: Iterable[Ref], types: Types | None = None) -> str:
    return " ".join(_format_ref(r, types) for r in refs)


def _format_ref(ref: Ref, types: Types | None = None) -> str:
    """Format an operand, followed by its type if `types` is given."""
    if isinstance(ref, Lit):
        return _format_literal(ref.value)
    return (
        f"%{ref}" if types is None else f"%{ref}:{_format_aval(types[ref].aval.dtype, types[ref].aval.shape)}"
    )


def _format_literal(value: Any) -> str:
    """Format a constant as text that is the same for every class of array in which JAX keeps constants."""
    array = np.asarray(value)
    content = array.tolist() if array.size <= 8 else "..."
    return f"#{content}:{_format_aval(array.dtype.name, array.shape) if array.ndim else array.dtype.name}"


def _format_aval(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def format_graph(placed: PlacedStep) -> str:
    """Return a text dump of a task graph, then one line per recipe (the operations of one executable)."""
    graph = placed.graph
    lines = [f"in  v{i.value} {graph.values[i.value].label} on {list(i.actors)}" for i in graph.inputs]
    for n in graph.nodes:
        ins, outs = " ".join(f"v{v}" for v in n.inputs), " ".join(f"v{v}" for v in n.outputs)
        lines.append(f"actor {n.actor}: {n.label} exe {n.executable} ({ins}) -> ({outs})")
    lines += [f"out {o.result} v{o.value} on {list(o.actors)}" for o in graph.outputs]
    return "\n".join(lines + [_format_recipe(i, r) for i, r in enumerate(placed.recipes)])


def _format_recipe(index: int, recipe: Recipe) -> str:
    signature = f"({_format_refs(recipe.inputs)}) -> ({_format_refs(recipe.outputs)})"
    return f"exe {index} {recipe.name} {signature} ops {len(recipe.ops)}"


def format_specs(placed: PlacedStep) -> str:
    """Return a text with one line per value of the task graph: its label, type and sharding."""
    return "\n".join(
        f"v{i} {value.label} {value.aval.dtype}{list(value.aval.shape)} {value.aval.spec or 'replicated'}"
        for i, value in enumerate(placed.graph.values)
    )


# ---------------------------------------------------------------- explain

IN_LOOP = "in the loop"


@dataclass(frozen=True, slots=True)
class CrossActorArray:
    """One array that is sent from one actor to another, with the reason, for the step's `report`.

    Args:
        value: the id in the task graph of the value that the array holds.
        from_actor, to_actor: the sender and the receiver.
        what: the array's type, and the task or operation that makes it, as text.
        when: the part of the step in which the array is sent, such as `"in the loop"` or `"after the loop"`.
        why: the receiver's tasks, operations or results that need the array, as text.
    """

    value: ValueId
    from_actor: ActorId
    to_actor: ActorId
    what: str
    when: str
    why: str


class Explainer:
    """An object that explains why the values of one compiled step are placed on their actors and sent.

    Args:
        traced: the traced step, for the names of arguments and results.
        placed: the same step after placement, with its task graph.
        continues: a dictionary. Its keys are positions of result leaves; its values are the positions of the
            argument leaves whose next values these results are.
    """

    def __init__(self, traced: Traced, placed: PlacedStep, continues: Mapping[int, int]) -> None:
        self.traced, self.placed, self.continues = traced, placed, continues
        self.graph = placed.graph
        self.maker = {v: n for n in self.graph.nodes for v in n.outputs}
        self.readers: dict[tuple[ValueId, ActorId], list[Node]] = defaultdict(list)
        for n in self.graph.nodes:
            for v in n.inputs:
                self.readers[v, n.actor].append(n)
        self.results: dict[tuple[ValueId, ActorId], list[int]] = defaultdict(list)
        for o in self.graph.outputs:
            for a in o.actors:
                self.results[o.value, a].append(o.result)

    @cached_property
    def _items(self) -> list[tuple[int, Op]]:
        return [(i, item) for i, item in enumerate(self.placed.placement.items) if isinstance(item, Op)]

    @cached_property
    def _producers(self) -> dict[int, Op]:
        return {o: op for _, op in self._items for o in op.outputs if o >= 0}

    @cached_property
    def _users(self) -> dict[tuple[int, ActorId], list[str]]:
        users: dict[tuple[int, ActorId], list[str]] = defaultdict(list)
        for i, op in self._items:
            for r in op.reads:
                for a in self.placed.placement.op_actors[i]:
                    users[r, a].append(op.name)
        return users

    @cached_property
    def _continued(self) -> dict[ValueId, list[int]]:
        """A dictionary from an argument's id in the task graph to the positions of the results that replace
        it."""
        values = {i.arg: i.value for i in self.graph.inputs}
        found: dict[ValueId, list[int]] = defaultdict(list)
        for result, arg in self.continues.items():
            found[values[arg]].append(result)
        return found

    # ---- transfers

    def crossings(self) -> list[CrossActorArray]:
        """List every transfer of the step with its reason, sorted by value."""
        planned = sorted((t.value, t.to_actor, t.from_actor) for t in plan_transfers(self.graph))
        return [
            CrossActorArray(
                v, source, a, self._describe_value(v), self._find_phase(v, a), self._list_readers(v, a)
            )
            for v, a, source in planned
        ]

    def _describe_value(self, value: ValueId) -> str:
        aval = self.graph.values[value].aval
        return f"{aval.dtype}{list(aval.shape)} {self._describe_origin(value)}"

    def _describe_origin(self, value: ValueId) -> str:
        node = self.maker.get(value)
        if node is None:
            return self.graph.values[value].label
        if node.task is not None:
            verb = {"accumulator": "accumulated by", "result": "collected by"}.get(
                self.graph.values[value].kind, "of"
            )
            return f"{verb} {task_kind(node.label)}"
        op = self._producers.get(self.placed.value_ids[value])
        return f"of {node.label}" if op is None else f"{op.name} at {os.path.basename(op.line)}"

    def _find_phase(self, value: ValueId, actor: ActorId) -> str:
        """Return the part of the step in which `value` is sent to `actor`, such as "before the loop"."""
        node = self.maker.get(value)
        readers = self.readers.get((value, actor), [])
        if node is not None and node.task is not None and self.graph.values[value].kind == "temp":
            return IN_LOOP
        outside = [n for n in readers if n.task is None]
        if outside:
            return self.phase(outside[0])
        if node is not None and node.task is None:
            return self.phase(node)
        return self._phases[-1]

    def _list_readers(self, value: ValueId, actor: ActorId) -> str:
        readers = self.readers.get((value, actor), [])
        tasks = list(dict.fromkeys(task_kind(n.label) for n in readers if n.task is not None))
        found = [f"for {join_names(tasks)}"] if tasks else []
        if any(n.task is None for n in readers):
            ops = dict.fromkeys(self._users.get((self.placed.value_ids[value], actor), []))
            found.append(f"for {join_names(ops)} there")
        names = [self.traced.result_name(k) for k in self.results.get((value, actor), [])]
        if names:
            found.append(f"as {join_names(names)}, which lives there")
        return "; ".join(found)

    # ---- parts of the step

    def is_in_loop(self, when: str) -> bool:
        """Return whether a text from `CrossActorArray.when` says that the transfer happens once per
        microbatch."""
        return when == IN_LOOP

    @property
    def num_microbatches(self) -> int:
        """The largest number of microbatches of any loop of the step; 1 for a step without a loop."""
        return max((s.staged.loop.num_microbatches for s in self.placed.loops.values()), default=1)

    @cached_property
    def _loop_levels(self) -> list[int]:
        return sorted(self.placed.placement.loop_levels.values())

    @cached_property
    def _phases(self) -> list[str]:
        count = len(self._loop_levels)
        if count < 2:
            return ["before the loop", "after the loop"] if count else ["in the step"]
        return ["before loop 1", *(f"before loop {k}" for k in range(2, count + 1)), f"after loop {count}"]

    def phase(self, node: Node) -> str:
        """Return the part of the step in which a node outside the loops runs, such as "after the loop"."""
        level = self.placed.outer_levels.get(node.label, 0)
        return self._phases[sum(level > loop for loop in self._loop_levels)]

    # ---- arguments and results

    def why_input(self, value: ValueId, actors: Sequence[ActorId]) -> str:
        """Return the reason why an argument is placed on the given actors, as text.

        Args:
            value: the id of the argument in the task graph.
            actors: the actors that get the argument; empty if no actor uses it.
        """
        if not actors:
            return self._why_unused(value)
        return _join_reasons({a: self._why_input_on(value, a) for a in actors})

    def _why_input_on(self, value: ValueId, actor: ActorId) -> str:
        readers = self.readers.get((value, actor), [])
        tasks = dict.fromkeys(task_kind(n.label) for n in readers if n.task is not None)
        phases = dict.fromkeys(self.phase(n) for n in readers if n.task is None)
        through = self._used_through(value, actor) if any(p.startswith("before") for p in phases) else []
        if through:
            phases = [f"{p} for {join_names(through)}" if p.startswith("before") else p for p in phases]
        users = [*tasks, *phases]
        if users:
            return f"used by {join_names(users)}" if tasks else f"used {join_names(users)}"
        passed = [self.traced.result_name(k) for k in self.results.get((value, actor), [])]
        if passed:
            return f"passed on as {join_names(passed)}"
        if continued := [self.traced.result_name(k) for k in self._continued.get(value, [])]:
            return f"replaced by {join_names(continued)}, which is made there"
        return f"nobody uses it on actor {actor}"

    def _why_unused(self, value: ValueId) -> str:
        argument = self.placed.value_ids[value]
        back = [
            self.traced.result_name(k) for k, v in self.placed.placement.handed_back.items() if v == argument
        ]
        if back:
            return f"not used: stays where it is, and is handed back as {join_names(back)}"
        if continued := [self.traced.result_name(k) for k in self._continued.get(value, [])]:
            return f"not used: stays where it is; {join_names(continued)} replaces it"
        return "not used: stays where it is"

    def _used_through(self, value: ValueId, actor: ActorId) -> list[str]:
        """List an actor's tasks that read the result of an operation outside the loops, such as a cast, on an
        argument.

        Args:
            value: the id of the argument in the task graph.
            actor: the actor.
        """
        argument, homes = self.placed.value_ids[value], self.placed.placement.op_actors
        made = {o for i, op in self._items if actor in homes[i] and argument in op.reads for o in op.outputs}
        here = (n for n in self.graph.nodes if n.actor == actor and n.task is not None)
        return list(
            dict.fromkeys(
                task_kind(n.label) for n in here if any(self.placed.value_ids[v] in made for v in n.inputs)
            )
        )

    def why_result(self, result: int, value: ValueId) -> str:
        """Return the reason why a result is placed on its actors, as text.

        Args:
            result: the position of the result leaf.
            value: the id of the result in the task graph.
        """
        if result in self.placed.placement.handed_back:
            return f"is {self.graph.values[value].label}, handed back where it lies"
        if result in self.placed.placement.caller_placed_results:
            return "asked for by init"
        if result in self.continues:
            return f"continues {self.traced.arg_names[self.continues[result]]}"
        if value not in self.maker:
            return f"is {self.graph.values[value].label}"
        return f"made there: {self._describe_origin(value)}"


def _join_reasons(reasons: Mapping[ActorId, str]) -> str:
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"actor {a}: {reason}" for a, reason in reasons.items())


def join_names(names: Iterable[str], most: int = 4) -> str:
    """Join names for a message; if there are more than `most`, the last ones are counted."""
    shown = list(names)
    return ", ".join(shown if len(shown) <= most else [*shown[: most - 1], f"{len(shown) - most + 1} more"])
