"""compiler.passes: THE list of passes, from a step function to one program an actor. Runs, checks and prints each.

trace       step function          -> flat operations with markers and loops
partition   each loop's body       -> forward and backward tasks
schedule    each loop's schedule   -> tasks in order, an actor a row
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
from typing import Any

from jaxpp_async import schedules
from jaxpp_async.compiler import lowering, verify
from jaxpp_async.compiler.emit import Emitted, Target, emit, lowering_context
from jaxpp_async.compiler.graph import PlacedStep, build
from jaxpp_async.compiler.ir import Loop, Traced, format_flat
from jaxpp_async.compiler.partition import StagedLoop, partition
from jaxpp_async.compiler.propagate import Spec, propagate
from jaxpp_async.compiler.recipes import Recipe
from jaxpp_async.compiler.tracing import separate_results, trace
from jaxpp_async.compiler.unroll import ScheduledLoop
from jaxpp_async.compiler.weak import trace_settled
from jaxpp_async.program import ActorProgram, TaskGraph


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
    passes: Mapping[str, str]
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
    passes: Mapping[str, str]
    continues: Mapping[int, int]
    settled: frozenset[int] = frozenset()


def compile_step(request: StepRequest) -> Compiled:
    """Run all passes.

    Raises:
        UnsupportedError, StageError, ScheduleError, ShardingError: see `errors`.
    """
    done = plan(request)
    executables = tuple(emit(r, done.traced.types, done.specs, request.target) for r in done.placed.recipes)
    texts = {**done.passes, "emit": _format_executables(executables)}
    return Compiled(done.traced, done.placed, done.programs, executables, texts, done.continues, done.settled)


def plan(request: StepRequest) -> Plan:
    """Run every pass but `emit`, checking what each leaves.

    Raises:
        UnsupportedError, StageError, ScheduleError, ShardingError: see `errors`.
    """
    texts: dict[str, str] = {}
    with lowering_context(request.target):
        traced, settled = trace_settled(
            functools.partial(
                trace, request.fn, static_argnums=request.static_argnums, argument_names=request.argument_names
            ),
            request.args,
            request.static_argnums,
            continued_arguments,
        )
    in_specs, out_specs = request.in_specs(traced), request.out_specs(traced)
    traced = separate_results(traced, in_specs, out_specs)
    texts["trace"] = format_flat(traced.flat, traced.types)
    staged = {i: partition(item) for i, item in enumerate(traced.flat.ops) if isinstance(item, Loop)}
    texts["partition"] = "\n".join(_format_staged(s) for s in staged.values())
    loops = {i: _scheduled(s, request) for i, s in staged.items()}
    texts["schedule"] = "\n".join(schedules.format_grid(s.tasks) for s in loops.values())
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
    texts["place"] = _format_graph(placed)
    specs = propagate(traced, placed, request.target, in_specs, out_specs, continues)
    placed = dataclasses.replace(placed, graph=_with_specs(placed, specs))
    verify.verify_graph(placed.graph)
    texts["shard"] = _format_specs(placed)
    programs = _lowered(placed.graph, texts)
    return Plan(traced, placed, specs, programs, texts, continues, settled)


def _lowered(graph: TaskGraph, texts: dict[str, str]) -> lowering.Programs:
    """The three passes from a graph to programs. Only the last leaves none of its buffers behind."""
    programs = lowering.insert_transfers(graph)
    verify.verify_programs(programs, complete=False)
    texts["transfer"] = _format_programs(programs)
    programs = lowering.donate_buffers(graph, programs)
    verify.verify_programs(programs, complete=False)
    texts["donate"] = _format_programs(programs)
    programs = lowering.delete_buffers(programs)
    verify.verify_programs(programs)
    texts["delete"] = _format_programs(programs)
    return programs


def continued_arguments(traced: Traced) -> dict[int, int]:
    """Result leaf to argument leaf, where a whole subtree of the result has the structure and types of an argument.

    So a state keeps its place and sharding from step to step, donated or not.
    """
    from jax import tree_util

    results = list(range(len(traced.out_names)))
    out = tree_util.tree_unflatten(traced.out_tree, results)
    args = tree_util.tree_unflatten(traced.in_tree, list(range(len(traced.arg_names))))
    found: dict[int, int] = {}
    for arg in args:
        leaves, treedef = tree_util.tree_flatten(arg)
        match = _find_subtree(out, treedef, lambda candidate, leaves=leaves: _same_types(traced, candidate, leaves))
        if leaves and match is not None and not found.keys() & set(match):
            found.update(zip(match, leaves, strict=True))
    return found


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


def _same_types(traced: Traced, results: Sequence[int], args: Sequence[int]) -> bool:
    for k, arg in zip(results, args, strict=True):
        ref = traced.flat.outputs[k]
        argument = traced.types[traced.flat.inputs[arg]]
        if not isinstance(ref, int):
            shape, dtype = getattr(ref.value, "shape", ()), str(getattr(ref.value, "dtype", ""))
            if (tuple(shape), dtype) != (argument.aval.shape, argument.aval.dtype):
                return False
        elif traced.types[ref].aval != argument.aval or traced.types[ref].key_impl != argument.key_impl:
            return False
    return True


def _scheduled(staged: StagedLoop, request: StepRequest) -> ScheduledLoop:
    schedule = request.schedule if request.schedule is not None else staged.loop.schedule
    tasks = schedules.resolve(
        schedule,
        num_stages=staged.num_stages,
        num_microbatches=staged.loop.num_microbatches,
        num_actors=request.num_actors,
        where=staged.loop.line,
        forward_only=not any(ty == "bwd" for ty, _ in staged.tasks),
    )
    tasks = schedules.join_backwards(tasks)  # stages have one backward task each
    return ScheduledLoop(staged, tasks, schedules.stage_actors(tasks))


def _with_specs(placed: PlacedStep, specs: Mapping[int, Spec]) -> TaskGraph:
    graph = placed.graph
    values = tuple(
        dataclasses.replace(value, aval=dataclasses.replace(value.aval, spec=_trimmed(specs.get(ir_id, ()))))
        for value, ir_id in zip(graph.values, placed.value_ids, strict=True)
    )
    return dataclasses.replace(graph, values=values)


def _trimmed(spec: Spec) -> Spec:
    """Without trailing Nones, so that equal shardings compare equal."""
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return spec


# ---------------------------------------------------------------- texts


def _format_programs(programs: Sequence[ActorProgram]) -> str:
    return "\n\n".join(str(p) for p in programs)


def _format_executables(executables: Sequence[Emitted]) -> str:
    return "\n".join(f"exe {i} {e.name} {len(e.blob)} bytes" for i, e in enumerate(executables))


def _format_staged(staged: StagedLoop) -> str:
    lines = [f"loop at {staged.num_stages} stages, {staged.loop.num_microbatches} microbatches"]
    for (ty, stage), task in staged.tasks.items():
        lines.append(f"{ty} stage {stage}")
        lines += [f"  {' '.join(f'%{o}' for o in op.outputs)} = {op.name} {_refs(op)}" for op in task.ops]
    for k, parts in enumerate(staged.outputs):
        joined = " + ".join(f"{_ref(p.value)} of {p.task[0]} stage {p.task[1]}" for p in parts)
        lines.append(f"result {k}: {type(staged.loop.reductions[k]).__name__} {joined}")
    return "\n".join(lines)


def _refs(op: Any) -> str:
    return " ".join(_ref(r) for r in op.inputs)


def _ref(ref: Any) -> str:
    return f"%{ref}" if isinstance(ref, int) else "const"


def _format_graph(placed: PlacedStep) -> str:
    graph = placed.graph
    lines = [f"in  v{i.value} {graph.values[i.value].label} on {list(i.actors)}" for i in graph.inputs]
    for n in graph.nodes:
        ins, outs = " ".join(f"v{v}" for v in n.inputs), " ".join(f"v{v}" for v in n.outputs)
        lines.append(f"actor {n.actor}: {n.label} exe {n.executable} ({ins}) -> ({outs})")
    lines += [f"out {o.result} v{o.value} on {list(o.actors)}" for o in graph.outputs]
    return "\n".join(lines + [_format_recipe(i, r) for i, r in enumerate(placed.recipes)])


def _format_recipe(index: int, recipe: Recipe) -> str:
    ins, outs = " ".join(f"%{v}" for v in recipe.inputs), " ".join(_ref(v) for v in recipe.outputs)
    return f"exe {index} {recipe.name} ({ins}) -> ({outs}) ops {len(recipe.ops)}"


def _format_specs(placed: PlacedStep) -> str:
    return "\n".join(
        f"v{i} {value.label} {value.aval.dtype}{list(value.aval.shape)} {value.aval.spec or 'replicated'}"
        for i, value in enumerate(placed.graph.values)
    )
