"""compiler.passes: THE list of passes, from a step function to one program an actor. Runs, checks and prints each.

trace       step function          -> flat operations with markers and loops
partition   each loop's body       -> forward and backward tasks
schedule    each loop's schedule   -> tasks in order, an actor a row, and the forms in which they run
place       all of it              -> task graph on actors, and a recipe an executable
shard       task graph             -> the same, with a sharding for every value
transfer    task graph             -> programs, an actor each: inputs, runs, sends, receives, outputs
donate      programs               -> the same, runs reusing the buffers that nothing needs afterwards
delete      programs               -> the same, every other buffer freed right after its last use
emit        recipes                -> serialized StableHLO

`plan` runs all but the last, which takes longest and changes no decision; `compile_step` runs them all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxpp_async import schedules
from jaxpp_async.compiler import lowering, verify
from jaxpp_async.compiler.columns import ValueTable
from jaxpp_async.compiler.emit import Emitted, Target, lowering_context
from jaxpp_async.compiler.exportable import explained
from jaxpp_async.compiler.garbage import uncollected
from jaxpp_async.compiler.graph import PlacedStep, build
from jaxpp_async.compiler.ir import Loop, Traced, Types
from jaxpp_async.compiler.partition import StagedLoop, partition
from jaxpp_async.compiler.propagate import Spec, propagate, sharded
from jaxpp_async.compiler.recipes import literal_type
from jaxpp_async.compiler.residuals import keep_less
from jaxpp_async.compiler.separate import separate_results
from jaxpp_async.compiler.sharing import Exports
from jaxpp_async.compiler.texts import (
    Texts,
    format_executables,
    format_flat,
    format_graph,
    format_programs,
    format_scheduled,
    format_specs,
    format_staged,
)
from jaxpp_async.compiler.tracing import trace, warn_of_markers_outside
from jaxpp_async.compiler.variants import ScheduledLoop, schedule_loop
from jaxpp_async.compiler.weak import trace_settled
from jaxpp_async.program import ActorProgram, Aval, TaskGraph

Passed: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class StepRequest:
    """What is to be compiled.

    Args:
        fn: the step function.
        args: its arguments, every leaf a `jax.ShapeDtypeStruct`; static arguments as they are.
        argument_names: `fn`'s parameter names.
        donated: argument numbers.
        in_specs, out_specs: given a traced step, the user's spec (or None) for each argument and each result leaf.
        schedule: replaces the schedule of every loop; None keeps what the step says.
        result_homes: actors that must hold a result leaf in the end, by leaf.
        exports: the executables known so far; those of this step are added.
    """

    fn: Callable
    args: Sequence[Any]
    argument_names: tuple[str, ...]
    static_argnums: tuple[int, ...]
    donated: tuple[int, ...]
    in_specs: Callable[[Traced], Sequence[Spec | None]]
    out_specs: Callable[[Traced], Sequence[Spec | None]]
    num_actors: int
    target: Target
    schedule: Any = None
    result_homes: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    exports: Exports = dataclasses.field(default_factory=Exports)


@dataclass(frozen=True, eq=False)
class Compiled:
    """The compiler's result.

    Args:
        traced: the step (trees, names).
        placed: the placed step; its graph carries the shardings.
        programs: one an actor.
        executables: one a recipe.
        passes: pass name to text.
        continues: result leaf to the argument leaf it continues.
        settled: argument leaves that it takes weakly typed as well as strongly typed.
    """

    traced: Traced
    placed: PlacedStep
    programs: tuple[ActorProgram, ...]
    executables: tuple[Emitted, ...]
    passes: Texts
    continues: Mapping[int, int]
    settled: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything decided, nothing lowered: the result of all passes but `emit`. Fields as in `Compiled`.

    Args:
        specs: a sharding for each value id.
    """

    traced: Traced
    placed: PlacedStep
    specs: Mapping[int, Spec]
    programs: tuple[ActorProgram, ...]
    passes: Texts
    continues: Mapping[int, int]
    settled: frozenset[int] = frozenset()


def _unobserved(_: str) -> None:
    """Nobody listens for the end of a pass."""


@uncollected()
def compile_step(request: StepRequest, passed: Passed = _unobserved) -> Compiled:
    """Run all passes.

    Args:
        passed: called with a pass's name when it and its checks are done; for timing.

    Raises:
        UnsupportedError, StageError, ScheduleError, ShardingError: see `errors`.
    """
    done = plan(request, passed)
    with explained(done.placed.recipes, done.traced.types, request.target):
        executables = request.exports.emit(done.placed.recipes, done.traced.types, done.specs, request.target)
    passed("emit")
    texts = done.passes.with_text("emit", functools.partial(format_executables, executables))
    return Compiled(done.traced, done.placed, done.programs, executables, texts, done.continues, done.settled)


@uncollected()
def plan(request: StepRequest, passed: Passed = _unobserved) -> Plan:
    """Run every pass but `emit`, checking what each leaves.

    Args:
        passed: as in `compile_step`.

    Raises:
        UnsupportedError, StageError, ScheduleError, ShardingError: see `errors`.
    """
    with lowering_context(request.target):
        traced, settled = trace_settled(
            functools.partial(
                trace, request.fn, static_argnums=request.static_argnums, argument_names=request.argument_names
            ),
            request.args,
            request.static_argnums,
            continued_arguments,
        )
    if not request.result_homes:  # a model's own init calls the model; that is no step
        warn_of_markers_outside(traced)
    in_specs, out_specs = request.in_specs(traced), request.out_specs(traced)
    traced = separate_results(traced, in_specs, out_specs)
    passed("trace")
    found = {i: partition(item, traced.types) for i, item in enumerate(traced.flat.ops) if isinstance(item, Loop)}
    with lowering_context(request.target):  # new values, whose types know the mesh
        staged = {i: keep_less(loop, traced.types) for i, loop in found.items()}
    passed("partition")
    with lowering_context(request.target):  # cutting a backward makes new values, whose types know the mesh
        loops = {i: _scheduled(s, request, traced.types) for i, s in staged.items()}
    passed("schedule")
    continues = continued_arguments(traced)
    placed = build(
        traced,
        loops,
        num_actors=request.num_actors,
        continues=continues,
        donated=[arg in request.donated for arg in traced.arg_of],
        result_homes=dict(request.result_homes),
    )
    verify.verify_graph(placed.graph)
    passed("place")
    with explained(placed.recipes, placed.types, request.target):
        specs = propagate(traced, placed, request.target, in_specs, out_specs, continues)
    placed = dataclasses.replace(placed, graph=_with_specs(placed, specs))
    passed("shard")
    programs = _lowered(placed.graph, passed)
    texts = _texts(traced, staged, loops, placed, programs)
    return Plan(traced, placed, specs, programs, texts, continues, settled)


def _lowered(graph: TaskGraph, passed: Passed) -> lowering.Programs:
    """The three passes from a graph to programs.

    Each program by itself is checked once, at the end: `Delete`s hide nothing of what is wrong without them.
    """
    programs = lowering.insert_transfers(graph)
    verify.verify_together(programs)
    passed("transfer")
    programs = lowering.donate_buffers(graph, programs)
    passed("donate")
    donated, programs = programs, lowering.delete_buffers(programs)
    verify.verify_alone(programs)
    verify.verify_only_deletes(donated, programs)
    passed("delete")
    return programs


def _texts(
    traced: Traced,
    staged: Mapping[int, StagedLoop],
    loops: Mapping[int, ScheduledLoop],
    placed: PlacedStep,
    programs: lowering.Programs,
) -> Texts:
    """Texts of all passes but `emit`. The programs between are made again rather than kept."""
    graph = placed.graph
    return Texts(
        {
            "trace": lambda: format_flat(traced.flat, traced.types),
            "partition": lambda: "\n".join(map(format_staged, staged.values())),
            "schedule": lambda: "\n".join(map(format_scheduled, loops.values())),
            "place": lambda: format_graph(placed),
            "shard": lambda: format_specs(placed),
            "transfer": lambda: format_programs(lowering.insert_transfers(graph)),
            "donate": lambda: format_programs(lowering.donate_buffers(graph, lowering.insert_transfers(graph))),
            "delete": lambda: format_programs(programs),
        }
    )


def continued_arguments(traced: Traced) -> dict[int, int]:
    """Result leaf to argument leaf, where a whole subtree of the result has the structure and types of an argument.

    So a state keeps its place and sharding from step to step, donated or not, and a donated one stands for its result
    where a cancelled `run` cannot return it. Arguments that are alike are continued in their order. An argument most of
    whose leaves keep their types (beside its parameters a cache grows) is continued in those.
    """
    from jax import tree_util

    results = list(range(len(traced.out_names)))
    out = tree_util.tree_unflatten(traced.out_tree, results)
    args = tree_util.tree_unflatten(traced.in_tree, list(range(len(traced.arg_names))))
    flat = [tree_util.tree_flatten(arg) for arg in args]
    trees = [(leaves, treedef) for leaves, treedef in flat if len(leaves) > 1]
    single = [(leaves, treedef) for leaves, treedef in flat if len(leaves) == 1]  # last: they fit in many a place
    found: dict[int, int] = {}
    taken: set[int] = set()
    for some, is_enough in ((trees, all), (trees, _are_most), (single, all)):
        for leaves, treedef in some:

            def fits(candidate: list[int], leaves: list[int] = leaves, is_enough: Callable = is_enough) -> bool:
                pairs = zip(candidate, leaves, strict=True)
                return taken.isdisjoint(candidate) and is_enough([_same_type(traced, *pair) for pair in pairs])

            if found.keys().isdisjoint(leaves) and (match := _find_subtree(out, treedef, fits)) is not None:
                taken.update(match)
                pairs = zip(match, leaves, strict=True)
                found.update({arg: result for result, arg in pairs if _same_type(traced, result, arg)})
    return {result: arg for arg, result in found.items()}


def _are_most(flags: Sequence[bool]) -> bool:
    return 2 * sum(flags) > len(flags)


def changed_arguments(traced: Traced, donated: Sequence[int], continues: Mapping[int, int]) -> list[str]:
    """Of the donated arguments whose memory no result takes over, though one of another shape or dtype stands in their
    place: each such leaf and that result, as words.

    Args:
        donated: argument numbers.
        continues: as of `continued_arguments`.
    """
    from jax import tree_util

    results = list(range(len(traced.out_names)))
    out = tree_util.tree_unflatten(traced.out_tree, results)
    args = tree_util.tree_unflatten(traced.in_tree, list(range(len(traced.arg_names))))
    several = type(out) is tuple
    found: list[str] = []
    for position, arg in enumerate(args):
        leaves, treedef = tree_util.tree_flatten(arg)
        if not leaves or traced.arg_of[leaves[0]] not in donated or set(leaves) & set(continues.values()):
            continue
        # In the same place among the results, or, unless it is a single array, wherever its tree is.
        place = out if not several and position == 0 else out[position] if several and position < len(out) else None
        match = [place] if isinstance(place, int) and isinstance(arg, int) else None
        if not isinstance(arg, int):
            match = _find_subtree(place, treedef, _anything) or _find_subtree(
                out, treedef, lambda candidate: not set(candidate) & continues.keys()
            )
        for leaf, result in zip(leaves, match or (), strict=False):
            was, now = (_described(traced, ref) for ref in (traced.flat.inputs[leaf], traced.flat.outputs[result]))
            if was != now:
                found.append(f"{traced.arg_names[leaf]} {was} as {traced.out_names[result]} {now}")
    return found


def _anything(_: list[int]) -> bool:
    return True


def _described(traced: Traced, ref: Any) -> str:
    aval = traced.types[ref].aval if isinstance(ref, int) else literal_type(ref).aval
    return f"{aval.dtype}{list(aval.shape)}"


def _find_subtree(tree: Any, treedef: Any, fits: Callable[[list[int]], bool]) -> list[int] | None:
    from jax import tree_util

    leaves, found = tree_util.tree_flatten(tree)
    if found == treedef and fits(leaves):
        return leaves
    if tree_util.all_leaves([tree]):
        return None
    children = tree_util.default_registry.flatten_one_level(tree)
    for child in children[0] if children else ():
        if (match := _find_subtree(child, treedef, fits)) is not None:
            return match
    return None


def _same_type(traced: Traced, result: int, arg: int) -> bool:
    ref, argument = traced.flat.outputs[result], traced.types[traced.flat.inputs[arg]]
    if isinstance(ref, int):
        return traced.types[ref].aval == argument.aval and traced.types[ref].key_impl == argument.key_impl
    shape, dtype = getattr(ref.value, "shape", ()), str(getattr(ref.value, "dtype", ""))
    return (tuple(shape), dtype) == (argument.aval.shape, argument.aval.dtype)


def _scheduled(staged: StagedLoop, request: StepRequest, types: Types) -> ScheduledLoop:
    schedule = request.schedule if request.schedule is not None else staged.loop.schedule
    tasks = schedules.resolve(
        schedule,
        num_stages=staged.num_stages,
        num_microbatches=staged.loop.num_microbatches,
        num_actors=request.num_actors,
        where=staged.loop.line,
        forward_only=not any(ty == "bwd" for ty, _ in staged.tasks),
        markers=staged.boundaries,
    )
    return schedule_loop(staged, tasks, types)


def _with_specs(placed: PlacedStep, specs: Mapping[int, Spec]) -> TaskGraph:
    if not specs:  # actors of one device
        return placed.graph
    graph, avals = placed.graph, dict[int, Aval]()  # an aval a value id: all microbatches have the same
    assert isinstance(graph.values, ValueTable)
    for aval, ir_id in zip(graph.values.avals, placed.value_ids, strict=True):
        if ir_id not in avals:
            avals[ir_id] = sharded(aval, placed.types[ir_id], specs.get(ir_id, ()))
    return dataclasses.replace(graph, values=graph.values.with_avals([avals[i] for i in placed.value_ids]))
