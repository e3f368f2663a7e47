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

compiler.garbage: holds up Python's search for reference cycles while a step is compiled.

A compilation makes millions of objects that live until it ends. Searching them for cycles finds none and takes a third
of the compiler's time, more in a process that holds much else.

compiler.separate: a traced step and the user's shardings in; out: the same, every result with one sharding.
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
from jaxpp_async.compiler.task_graph import PlacedStep, build
from jaxpp_async.compiler.task_variants import ScheduledLoop, schedule_loop
from jaxpp_async.compiler.trace import trace_settled, warn_of_markers_outside
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, TaskGraph, ValueTable


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within it no cycle is collected, in any thread; nested uses count as the outermost one."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---------------------------------------------------------------- passes

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
    exports: ExportCache = dataclasses.field(default_factory=ExportCache)


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
        any_sharding: unused argument leaves, which may lie in any sharding, unless they are handed back in a given one.
    """

    traced: Traced
    placed: PlacedStep
    programs: tuple[ActorProgram, ...]
    executables: tuple[Emitted, ...]
    passes: PassTexts
    continues: Mapping[int, int]
    settled: frozenset[int] = frozenset()
    any_sharding: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class CompilePlan:
    """Everything decided, nothing lowered: the result of all passes but `emit`. Fields as in `Compiled`.

    Args:
        specs: a sharding for each value id.
    """

    traced: Traced
    placed: PlacedStep
    specs: Mapping[int, Spec]
    programs: tuple[ActorProgram, ...]
    passes: PassTexts
    continues: Mapping[int, int]
    settled: frozenset[int] = frozenset()
    any_sharding: frozenset[int] = frozenset()


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
    return Compiled(
        done.traced,
        done.placed,
        done.programs,
        executables,
        texts,
        done.continues,
        done.settled,
        done.any_sharding,
    )


@uncollected()
def plan(request: StepRequest, passed: Passed = _unobserved) -> CompilePlan:
    """Run every pass but `emit`, checking what each leaves.

    Args:
        passed: as in `compile_step`.

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
    if not request.result_homes:  # a model's own init calls the model; that is no step
        warn_of_markers_outside(traced)
    in_specs, out_specs = request.in_specs(traced), request.out_specs(traced)
    traced = separate_results(traced, in_specs, out_specs)
    passed("trace")
    found = {
        i: partition(item, traced.types) for i, item in enumerate(traced.flat.ops) if isinstance(item, Loop)
    }
    with lowering_context(request.target):  # new values, whose types know the mesh
        staged = {i: minimize_residuals(loop, traced.types) for i, loop in found.items()}
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
    refuse_host_memory(placed)
    passed("place")
    with explained(placed.recipes, placed.types, request.target):
        specs = propagate(traced, placed, request.target, in_specs, out_specs, continues)
    placed = dataclasses.replace(placed, graph=_with_specs(placed, specs))
    passed("shard")
    programs = _lowered(placed.graph, passed)
    texts = _texts(traced, staged, loops, placed, programs)
    free = _any_sharding(traced, placed, in_specs, out_specs)
    return CompilePlan(traced, placed, specs, programs, texts, continues, settled, free)


def _any_sharding(
    traced: Traced, placed: PlacedStep, in_specs: Sequence[Spec | None], out_specs: Sequence[Spec | None]
) -> frozenset[int]:
    """See `Compiled`."""
    leaf_of = {v: arg for arg, v in enumerate(traced.flat.inputs)}
    back = {leaf_of[v]: result for result, v in placed.placement.handed_back.items()}
    asked = {
        arg for arg, result in back.items() if in_specs[arg] is not None or out_specs[result] is not None
    }
    return frozenset(i.arg for i in placed.graph.inputs if not i.actors and i.arg not in asked)


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
) -> PassTexts:
    """Texts of all passes but `emit`. The programs between are made again rather than kept."""
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


# ---------------------------------------------------------------- separate


def separate_results(
    traced: Traced, in_specs: Sequence[Sequence[Any] | None], out_specs: Sequence[Sequence[Any] | None]
) -> Traced:
    """Copy a value that is asked for in several shardings, so that each result is a value of its own.

    Args:
        in_specs, out_specs: the user's, one an argument and one a result leaf.
    """
    asked = {v: _plain(s) for v, s in zip(traced.flat.inputs, in_specs, strict=False) if s is not None}
    ops, outputs = list(traced.flat.ops), list(traced.flat.outputs)
    for k, spec in enumerate(out_specs):
        ref = outputs[k]
        if spec is None or not isinstance(ref, int) or asked.setdefault(ref, _plain(spec)) == _plain(spec):
            continue
        outputs[k] = copy = traced.types.new(traced.types[ref])
        ops.append(Op("copy", (ref,), (copy,), lambda xs: xs, "a result in another sharding"))
    return dataclasses.replace(traced, flat=Flat(traced.flat.inputs, tuple(ops), tuple(outputs)))


def _plain(spec: Sequence[Any]) -> PartitionSpec:
    """Without trailing Nones, and equal if it means the same."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
