"""Compile a step function to one program per actor: run all passes, and check and print the result of each.

The passes, each with what it reads and what it makes:

trace       step function          -> flat operations with markers and loops
hoist       each loop's body       -> a smaller body, and operations before and after the loop
cut         each loop's marks      -> the same loop, with only the marks that are stage boundaries
divide      stacked leaves         -> the same step, in which each stage's layers are values of their own
partition   each loop's body       -> forward and backward tasks
schedule    each loop's schedule   -> tasks in order, one row per actor, and the variants that run
place       all of these           -> task graph on actors, and one recipe per executable
shard       task graph             -> the same graph, with a sharding for every value
transfer    task graph             -> one program per actor: inputs, runs, sends, receives, outputs
donate      programs               -> the same programs, where runs reuse buffers not needed afterwards
delete      programs               -> the same programs, where every other buffer is freed after its last use
emit        recipes                -> serialized StableHLO

A variant is the version of a task that a schedule asks for, such as half of a split backward; a recipe is the
list of operations of one executable. `plan` runs every pass but `emit`, which takes longest and changes no
decision; `compile_step` runs them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec
from msgspec import structs

from jaxpp_async import schedules
from jaxpp_async.compiler import lowering, verify
from jaxpp_async.compiler.continued_arguments import continued_arguments
from jaxpp_async.compiler.cut import count_layers, cut_choice_of, cut_loops, cut_of
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
from jaxpp_async.compiler.divide import divide, expand_leaves, expand_pairs
from jaxpp_async.compiler.export import Emitted, Target, explained, lowering_context, refuse_host_memory
from jaxpp_async.compiler.export_cache import ExportCache
from jaxpp_async.compiler.ir import Flat, Loop, Op, Traced, Types
from jaxpp_async.compiler.loop_invariants import hoist_invariants
from jaxpp_async.compiler.partition import StagedLoop, partition
from jaxpp_async.compiler.pass_cache import PassCache
from jaxpp_async.compiler.rematerialization import minimize_residuals
from jaxpp_async.compiler.sharding_propagation import Spec, propagate, sharded
from jaxpp_async.compiler.stack_division import find_division
from jaxpp_async.compiler.task_graph import PlacedStep, StepBuilder
from jaxpp_async.compiler.task_variants import ScheduledLoop, schedule_loop
from jaxpp_async.compiler.trace import trace_ignoring_weak_types, warn_of_markers_outside
from jaxpp_async.compiler.work import CountedWorks
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, TaskGraph, ValueTable
from jaxpp_async.program.leaf_parts import Parts, part_positions
from jaxpp_async.program.work import CutChoice, LoopCut, TaskWork

Passed: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class StepRequest:
    """A step that is to be compiled, with everything that the passes need to know about it.

    Args:
        fn: the step function.
        args: the arguments of `fn`. Every leaf is a `jax.ShapeDtypeStruct`, except that static arguments are
            the values themselves.
        argument_names: the names of the parameters of `fn`.
        static_argnums: the positions of the static arguments in `args`.
        donated: the positions in `args` of the arguments that the step may overwrite.
        in_specs: a function that takes the traced step and returns, for each argument leaf, the sharding spec
            that the user gave, or None.
        out_specs: a function that takes the traced step and returns, for each result leaf, the sharding spec
            that the user gave, or None.
        num_actors: the number of actors in the mesh.
        target: the mesh and platform that executables are lowered for.
        schedule: the schedule that replaces the schedule of every loop; None keeps those written in the step.
        result_homes: a dictionary. Its keys are positions of result leaves; its values are the actors that
            must hold these leaves when the step ends, or, for a leaf in `result_parts`, a tuple with the
            actors of each part. Placement chooses the actors of all other leaves.
        result_parts: a dictionary. Its keys are positions of result leaves; its values are the parts in which
            the step must make these leaves. The leaves of both dictionaries are those of the result tree.
        exports: a cache of executables that were lowered earlier; this step's executables are added to the
            cache.
        shared: a cache of what compilations of this step under other schedules share with this one.
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
    result_homes: Mapping[int, frozenset[int] | tuple[frozenset[int], ...]] = dataclasses.field(
        default_factory=dict
    )
    result_parts: Mapping[int, Parts] = dataclasses.field(default_factory=dict)
    exports: ExportCache = dataclasses.field(default_factory=ExportCache)
    shared: PassCache = dataclasses.field(default_factory=PassCache)


@dataclass(frozen=True, eq=False)
class CompilePlan:
    """The result of all passes but `emit`: every decision of a compilation, but no StableHLO yet.

    Args:
        traced: the traced step, with its argument and result trees and the names of their leaves.
        placed: the step placed on actors, as a task graph whose values have shardings.
        specs: the sharding of each value id.
        programs: one program per actor.
        passes: the printed result of each pass, by the name of the pass.
        continues: a dictionary for results that are the next values of arguments, such as a training state.
            Its keys are positions of result leaves; its values are the positions of the argument leaves.
        weak_or_strong: the positions of argument leaves for which callers may pass weakly or strongly typed
            arrays.
        any_sharding: the positions of argument leaves that the step does not use, and for which callers may
            pass arrays of any sharding. Leaves that the step returns are left out if the user gave a spec for
            the leaf or for the result.
        target: the mesh and platform that the step was compiled for.
        find_cut: a function that returns the cut of the step's one loop with the work of its layers, or None
            if the step has no loop or several.
    """

    traced: Traced
    placed: PlacedStep
    specs: Mapping[int, Spec]
    programs: tuple[ActorProgram, ...]
    passes: PassTexts
    continues: Mapping[int, int]
    weak_or_strong: frozenset[int]
    any_sharding: frozenset[int]
    target: Target
    find_cut: Callable[[], LoopCut | None]

    @functools.cached_property
    def count_works(self) -> CountedWorks:
        """A function that returns the work of each executable, and that keeps little of the plan alive."""
        return CountedWorks(self.placed.recipes, self.placed.types, self.specs, self.target)

    @property
    def works(self) -> tuple[TaskWork, ...]:
        """The work of each executable, for each device of an actor; counted when first read."""
        return self.count_works()

    @property
    def cut(self) -> LoopCut | None:
        """The cut of the step's one loop, without the work of its layers; None if it has none or several."""
        return cut_of(self.traced.flat)

    @functools.cached_property
    def cut_choice(self) -> CutChoice:
        """How the cuts of the step's loops were chosen."""
        return cut_choice_of(self.traced.flat)


@dataclass(frozen=True, eq=False)
class Compiled(CompilePlan):
    """The result of all passes: a `CompilePlan` together with its executables.

    Args:
        executables: the lowered executables, one per recipe (list of operations) of the placed step.
    """

    executables: tuple[Emitted, ...]


def _ignore_pass(_: str) -> None:
    """Do nothing; this is the default of the callback that is called at the end of each pass."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's search for reference cycles, in all threads, while the context is open.

    Opening the context again while it is open does nothing. A compilation makes millions of objects that live
    until it ends. A search finds no cycles among them, but takes a third of the compiler's time, or more if
    the process has many other objects.
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
    """Compile a step completely: run every pass, check its result, and lower the executables to StableHLO.

    Args:
        request: the step to compile.
        passed: a callback for timing, called with the name of each pass after the pass and its checks.

    Raises:
        UnsupportedError: the step cannot be pipelined.
        StageError: a stage needs a value of a later stage, or a loop has no usable microbatch axis.
        ScheduleError: a schedule is invalid.
        ShardingError: a sharding is invalid.
    """
    done = plan(request, passed)
    with explained(done.placed.recipes, done.traced.types, request.target):
        executables = request.exports.emit(done.placed.recipes, done.traced.types, done.specs, request.target)
    passed("emit")
    texts = done.passes.with_text("emit", functools.partial(format_executables, executables))
    return Compiled(**{**vars(done), "passes": texts}, executables=executables)


@gc_paused()
def plan(request: StepRequest, passed: Passed = _ignore_pass) -> CompilePlan:
    """Make all decisions of a compilation, without lowering: run every pass but `emit`, checking each result.

    Args:
        request: the step to compile.
        passed: a callback for timing, called with the name of each pass after the pass and its checks.

    Raises:
        UnsupportedError: the step cannot be pipelined.
        StageError: a stage needs a value of a later stage, or a loop has no usable microbatch axis.
        ScheduleError: a schedule is invalid.
        ShardingError: a sharding is invalid.
    """
    traced, weak_or_strong = trace_step(request)
    known = request.shared.specs(traced, request.target.mesh)
    if not request.result_homes:  # `init` has them, and calls the model outside a loop
        warn_of_markers_outside(traced)
    in_specs, out_specs = request.in_specs(traced), request.out_specs(traced)
    traced = _separate_results(traced, in_specs, out_specs)
    passed("trace")
    whole = traced.flat
    with lowering_context(request.target):
        traced = hoist_invariants(traced)
        hoisted = traced.flat
        traced = cut_loops(traced, request.schedule, request.num_actors)
    found, continues = _partition(traced), continued_arguments(traced)
    shardings = dict(zip(traced.flat.inputs, in_specs, strict=False))
    shardings |= {r: s for r, s in zip(traced.flat.outputs, out_specs, strict=False) if isinstance(r, int)}
    division = find_division(traced, found, continues, shardings, _made_together(request))
    traced = divide(traced, division, request.result_parts)
    if traced.argument_parts or traced.result_parts:  # `init` may have no argument
        found, continues = _partition(traced), expand_pairs(continues, traced)
        in_specs = expand_leaves(in_specs, traced.argument_parts)
        out_specs = expand_leaves(out_specs, traced.result_parts)
    with lowering_context(request.target):  # both passes make new values, whose types know the mesh
        staged = {i: minimize_residuals(loop, traced.types) for i, loop in found.items()}
        passed("partition")
        loops = {i: _schedule(s, request.num_actors, traced.types) for i, s in staged.items()}
    passed("schedule")
    placed = StepBuilder(
        traced,
        loops,
        num_actors=request.num_actors,
        continues=continues,
        donated=[arg in request.donated for arg in traced.arg_of],
        result_homes=_homes_of_parts(request.result_homes, traced),
    ).build()
    verify.verify_graph(placed.graph)
    refuse_host_memory(placed)
    passed("place")
    with explained(placed.recipes, placed.types, request.target):
        specs = propagate(traced, placed, request.target, in_specs, out_specs, continues, known)
    placed = dataclasses.replace(placed, graph=_insert_specs(placed, specs))
    passed("shard")
    programs = _lower_and_verify(placed.graph, passed)
    texts = _pass_texts(whole, hoisted, traced.types, staged, loops, placed, programs)
    free = _find_any_sharding(traced, placed, in_specs, out_specs)
    return CompilePlan(
        traced,
        placed,
        specs,
        programs,
        texts,
        continues,
        weak_or_strong,
        free,
        request.target,
        functools.cache(
            functools.partial(count_layers, cut_of(traced.flat), hoisted, traced.types, request.target)
        ),
    )


def _partition(traced: Traced) -> dict[int, StagedLoop]:
    """Split each loop of a step into the tasks of its stages; the keys are the positions of the loops."""
    items = enumerate(traced.flat.ops)
    return {i: partition(item, traced.types) for i, item in items if isinstance(item, Loop)}


def _made_together(request: StepRequest) -> dict[int, Parts]:
    """Return the parts in which results of `StepRequest.result_parts` are computed, by their positions.

    Neighbouring parts on the same actors are computed as one, and then cut: the initial values of all layers
    are one operation.
    """
    pairs = ((k, parts, request.result_homes.get(k)) for k, parts in request.result_parts.items())
    return {k: parts.joined(homes) if isinstance(homes, tuple) else parts for k, parts, homes in pairs}


def _homes_of_parts(
    homes: Mapping[int, frozenset[int] | tuple[frozenset[int], ...]], traced: Traced
) -> dict[int, frozenset[int]]:
    """Return the actors that must hold each part of a result, from `StepRequest.result_homes`."""
    positions = part_positions(traced.result_parts or (None,) * len(traced.out_names))
    found: dict[int, frozenset[int]] = {}
    for leaf, actors in homes.items():
        of_parts = (actors,) if isinstance(actors, frozenset) else actors
        found.update(zip(positions[leaf], of_parts, strict=True))
    return found


def trace_step(request: StepRequest) -> tuple[Traced, frozenset[int]]:
    """Trace the step of a request, unless it has been traced for these types and devices; see `trace`."""

    def trace() -> tuple[Traced, frozenset[int]]:
        with lowering_context(request.target):
            return trace_ignoring_weak_types(
                request.fn,
                request.args,
                static_argnums=request.static_argnums,
                argument_names=request.argument_names,
            )

    leaves, treedef = jax.tree.flatten(
        [a for i, a in enumerate(request.args) if i not in request.static_argnums]
    )
    return request.shared.trace((treedef, *leaves, request.target.mesh, request.target.platform), trace)


def _find_any_sharding(
    traced: Traced, placed: PlacedStep, in_specs: Sequence[Spec | None], out_specs: Sequence[Spec | None]
) -> frozenset[int]:
    """Return the positions of unused argument leaves that may have any sharding; see `CompilePlan`."""
    leaf_of = {v: arg for arg, v in enumerate(traced.flat.inputs)}
    back = {leaf_of[v]: result for result, v in placed.placement.handed_back.items()}
    asked = {
        arg for arg, result in back.items() if in_specs[arg] is not None or out_specs[result] is not None
    }
    return frozenset(i.arg for i in placed.graph.inputs if not i.actors and i.arg not in asked)


def _lower_and_verify(graph: TaskGraph, passed: Passed) -> lowering.Programs:
    """Lower a task graph to one program per actor by the passes transfer, donate and delete, and check them.

    Each program is checked on its own only once, after `delete`. This still finds an error that `transfer` or
    `donate` made.
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
    whole: Flat,
    hoisted: Flat,
    types: Types,
    staged: Mapping[int, StagedLoop],
    loops: Mapping[int, ScheduledLoop],
    placed: PlacedStep,
    programs: lowering.Programs,
) -> PassTexts:
    """Return the printed results of all passes but `emit`, each made when it is first read.

    The programs that the passes `transfer` and `donate` return are not stored. When their texts are read,
    these passes run again.
    """
    graph = placed.graph
    return PassTexts(
        {
            "trace": lambda: format_flat(whole, types),
            "hoist": lambda: "as traced" if hoisted is whole else format_flat(hoisted, types),
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


def _schedule(staged: StagedLoop, num_actors: int, types: Types) -> ScheduledLoop:
    tasks = schedules.resolve(
        staged.loop.schedule,
        num_stages=staged.num_stages,
        num_microbatches=staged.loop.num_microbatches,
        num_actors=num_actors,
        where=staged.loop.line,
        forward_only=not any(ty == "bwd" for ty, _ in staged.tasks),
        markers=staged.boundaries,
    )
    return schedule_loop(staged, tasks, types)


def _insert_specs(placed: PlacedStep, specs: Mapping[int, Spec]) -> TaskGraph:
    if not specs:  # actors of one device
        return placed.graph
    graph, avals = placed.graph, dict[int, Aval]()  # one aval per value id: all microbatches have the same
    assert isinstance(graph.values, ValueTable)
    for aval, ir_id in zip(graph.values.avals, placed.value_ids, strict=True):
        if ir_id not in avals:
            avals[ir_id] = sharded(aval, placed.types[ir_id], specs.get(ir_id, ()))
    return structs.replace(graph, values=graph.values.with_avals([avals[i] for i in placed.value_ids]))


def _separate_results(
    traced: Traced, in_specs: Sequence[Sequence[Any] | None], out_specs: Sequence[Sequence[Any] | None]
) -> Traced:
    """Return a traced step in which each value needs only one sharding.

    If the user asks for a value in several shardings, the value is copied, so that there is one value per
    sharding.

    Args:
        traced: the traced step.
        in_specs: for each argument leaf, the sharding spec that the user gave, or None.
        out_specs: for each result leaf, the sharding spec that the user gave, or None.
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
    """Return a sharding spec without its trailing Nones, so that specs of the same meaning compare equal."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
