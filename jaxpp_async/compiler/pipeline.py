"""Compile a step function to one program an actor: run all passes, check and print the result of each.

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

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from jaxpp_async import schedules
from jaxpp_async.compiler import lowering, verify
from jaxpp_async.compiler.continued_arguments import continued_arguments
from jaxpp_async.compiler.describe import (
    PassTexts,
    format_executables,
    format_flat,
    format_graph,
    format_programs,
    format_scheduled,
    format_specs,
    format_staged,
)
from jaxpp_async.compiler.export import Emitted, Target, explained, lowering_context, refuse_host_memory
from jaxpp_async.compiler.export_cache import ExportCache
from jaxpp_async.compiler.ir import Flat, Loop, Op, Traced, Types
from jaxpp_async.compiler.partition import StagedLoop, partition
from jaxpp_async.compiler.rematerialization import minimize_residuals
from jaxpp_async.compiler.sharding_propagation import Spec, propagate, sharded
from jaxpp_async.compiler.task_graph import PlacedStep, build_task_graph
from jaxpp_async.compiler.task_variants import ScheduledLoop, schedule_loop
from jaxpp_async.compiler.trace import trace_settled, warn_of_markers_outside
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, TaskGraph, ValueTable

Passed: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class StepRequest:
    """A step that is to be compiled, and everything that the passes need to know of it.

    Args:
        fn: the step function.
        args: its arguments, every leaf a `jax.ShapeDtypeStruct`; static arguments as they are.
        argument_names: `fn`'s parameter names.
        static_argnums: argument numbers that `fn` takes as they are.
        donated: argument numbers.
        in_specs, out_specs: given a traced step, the user's spec (or None) for each argument and each result
            leaf.
        num_actors: actors of the mesh.
        target: the mesh and platform that executables are lowered for.
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
    exports: ExportCache = dataclasses.field(default_factory=ExportCache)


@dataclass(frozen=True, eq=False)
class CompilePlan:
    """The result of all passes but `emit`: everything is decided, nothing is lowered to StableHLO.

    Args:
        traced: the step (trees, names).
        placed: the placed step; its graph carries the shardings.
        specs: a sharding for each value id.
        programs: one an actor.
        passes: pass name to text.
        continues: result leaf to the argument leaf that it continues.
        settled: argument leaves that the step takes weakly typed as well as strongly typed.
        any_sharding: unused argument leaves, which may lie in any sharding, unless they are handed back in a
            given one.
    """

    traced: Traced
    placed: PlacedStep
    specs: Mapping[int, Spec]
    programs: tuple[ActorProgram, ...]
    passes: PassTexts
    continues: Mapping[int, int]
    settled: frozenset[int]
    any_sharding: frozenset[int]


@dataclass(frozen=True, eq=False)
class Compiled(CompilePlan):
    """The result of all passes.

    Args:
        executables: one a recipe.
    """

    executables: tuple[Emitted, ...]


def _ignore_pass(_: str) -> None:
    """Ignore the end of a pass."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's search for reference cycles, in all threads; nested uses count as the outermost one.

    A compilation makes millions of objects that live until it ends. Searching them for cycles finds none and
    takes a third of the compiler's time, more in a process that holds much else.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@gc_paused()
def compile_step(request: StepRequest, passed: Passed = _ignore_pass) -> Compiled:
    """Run all passes.

    Args:
        request: the step.
        passed: called with a pass's name when the pass and its checks are done; for timing.

    Raises:
        UnsupportedError, StageError, ScheduleError, ShardingError: see `errors`.
    """
    done = plan(request, passed)
    with explained(done.placed.recipes, done.traced.types, request.target):
        executables = request.exports.emit(done.placed.recipes, done.traced.types, done.specs, request.target)
    passed("emit")
    texts = done.passes.with_text("emit", functools.partial(format_executables, executables))
    return Compiled(**{**vars(done), "passes": texts}, executables=executables)


@gc_paused()
def plan(request: StepRequest, passed: Passed = _ignore_pass) -> CompilePlan:
    """Run every pass but `emit`, and check the result of each.

    Args:
        request, passed: as in `compile_step`.

    Raises:
        UnsupportedError, StageError, ScheduleError, ShardingError: see `errors`.
    """
    with lowering_context(request.target):
        traced, settled = trace_settled(
            request.fn,
            request.args,
            static_argnums=request.static_argnums,
            argument_names=request.argument_names,
        )
    if not request.result_homes:  # a model's own init calls the model outside of a step
        warn_of_markers_outside(traced)
    in_specs, out_specs = request.in_specs(traced), request.out_specs(traced)
    traced = _separate_results(traced, in_specs, out_specs)
    passed("trace")
    found = {
        i: partition(item, traced.types) for i, item in enumerate(traced.flat.ops) if isinstance(item, Loop)
    }
    with lowering_context(request.target):  # both passes make new values, whose types know the mesh
        staged = {i: minimize_residuals(loop, traced.types) for i, loop in found.items()}
        passed("partition")
        loops = {i: _schedule(s, request, traced.types) for i, s in staged.items()}
    passed("schedule")
    continues = continued_arguments(traced)
    placed = build_task_graph(
        traced,
        loops,
        num_actors=request.num_actors,
        continues=continues,
        donated=[arg in request.donated for arg in traced.arg_of],
        result_homes=dict(request.result_homes),
    )
    verify.verify_graph(placed.graph)
    refuse_host_memory(placed)
    passed("place")
    with explained(placed.recipes, placed.types, request.target):
        specs = propagate(traced, placed, request.target, in_specs, out_specs, continues)
    placed = dataclasses.replace(placed, graph=_insert_specs(placed, specs))
    passed("shard")
    programs = _lower_and_verify(placed.graph, passed)
    texts = _pass_texts(traced, staged, loops, placed, programs)
    free = _find_any_sharding(traced, placed, in_specs, out_specs)
    return CompilePlan(traced, placed, specs, programs, texts, continues, settled, free)


def _find_any_sharding(
    traced: Traced, placed: PlacedStep, in_specs: Sequence[Spec | None], out_specs: Sequence[Spec | None]
) -> frozenset[int]:
    """Find the argument leaves of `CompilePlan.any_sharding`."""
    leaf_of = {v: arg for arg, v in enumerate(traced.flat.inputs)}
    back = {leaf_of[v]: result for result, v in placed.placement.handed_back.items()}
    asked = {
        arg for arg, result in back.items() if in_specs[arg] is not None or out_specs[result] is not None
    }
    return frozenset(i.arg for i in placed.graph.inputs if not i.actors and i.arg not in asked)


def _lower_and_verify(graph: TaskGraph, passed: Passed) -> lowering.Programs:
    """Run the three passes from a graph to programs.

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


def _pass_texts(
    traced: Traced,
    staged: Mapping[int, StagedLoop],
    loops: Mapping[int, ScheduledLoop],
    placed: PlacedStep,
    programs: lowering.Programs,
) -> PassTexts:
    """Make the texts of all passes but `emit`. The programs between are made again rather than kept."""
    graph = placed.graph
    return PassTexts(
        {
            "trace": lambda: format_flat(traced.flat, traced.types),
            "partition": lambda: "\n".join(map(format_staged, staged.values())),
            "schedule": lambda: "\n".join(map(format_scheduled, loops.values())),
            "place": lambda: format_graph(placed),
            "shard": lambda: format_specs(placed),
            "transfer": lambda: format_programs(lowering.insert_transfers(graph)),
            "donate": lambda: format_programs(
                lowering.donate_buffers(graph, lowering.insert_transfers(graph))
            ),
            "delete": lambda: format_programs(programs),
        }
    )


def _schedule(staged: StagedLoop, request: StepRequest, types: Types) -> ScheduledLoop:
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


def _insert_specs(placed: PlacedStep, specs: Mapping[int, Spec]) -> TaskGraph:
    if not specs:  # actors of one device
        return placed.graph
    graph, avals = placed.graph, dict[int, Aval]()  # an aval a value id: all microbatches have the same
    assert isinstance(graph.values, ValueTable)
    for aval, ir_id in zip(graph.values.avals, placed.value_ids, strict=True):
        if ir_id not in avals:
            avals[ir_id] = sharded(aval, placed.types[ir_id], specs.get(ir_id, ()))
    return dataclasses.replace(graph, values=graph.values.with_avals([avals[i] for i in placed.value_ids]))


def _separate_results(
    traced: Traced, in_specs: Sequence[Sequence[Any] | None], out_specs: Sequence[Sequence[Any] | None]
) -> Traced:
    """Copy a value that is asked for in several shardings, so that each result is a value of its own.

    Args:
        traced: the step.
        in_specs, out_specs: the user's, one an argument and one a result leaf.
    """
    asked = {v: _strip_spec(s) for v, s in zip(traced.flat.inputs, in_specs, strict=False) if s is not None}
    ops, outputs = list(traced.flat.ops), list(traced.flat.outputs)
    for k, spec in enumerate(out_specs):
        ref = outputs[k]
        if (
            spec is None
            or not isinstance(ref, int)
            or asked.setdefault(ref, _strip_spec(spec)) == _strip_spec(spec)
        ):
            continue
        outputs[k] = copy = traced.types.new(traced.types[ref])
        ops.append(Op("copy", (ref,), (copy,), lambda xs: xs, "a result in another sharding"))
    return dataclasses.replace(traced, flat=Flat(traced.flat.inputs, tuple(ops), tuple(outputs)))


def _strip_spec(spec: Sequence[Any]) -> PartitionSpec:
    """Strip trailing Nones, so that specs of one meaning are equal."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
