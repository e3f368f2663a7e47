"""Infer a sharding for every value that is passed between executables, without devices.

On a mesh of explicit axes the values' types already contain the shardings. For automatic axes, the whole
step, with one iteration of each loop's body, is lowered on an abstract mesh. All values that are passed
between executables are results of this lowered step. Shardy's propagation chooses the shardings that the user
did not give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpp_async.compiler import evaluate, export
from jaxpp_async.compiler.ir import Loop, Op, Traced, Types, ValueType
from jaxpp_async.compiler.pass_cache import KnownSpecs
from jaxpp_async.compiler.task_graph import PlacedStep
from jaxpp_async.compiler.task_variants import ScheduledLoop
from jaxpp_async.errors import ShardingError
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.markers import logical_axes
from jaxpp_async.program.instructions import Aval, SpecEntry

Spec = tuple[SpecEntry, ...]


def propagate(
    traced: Traced,
    placed: PlacedStep,
    target: export.Target,
    in_specs: Sequence[Spec | None],
    out_specs: Sequence[Spec | None],
    continues: Mapping[int, int],
    known: KnownSpecs | None = None,
) -> dict[int, Spec]:
    """Infer the sharding spec of every value that is passed between executables.

    Args:
        traced: the traced step.
        placed: the same step, placed on actors.
        target: the mesh of each actor's devices, and their platform.
        in_specs: the spec that the user gave for each argument leaf; one that is None is inferred.
        out_specs: the spec that the user gave for each result leaf; one that is None is inferred.
        continues: a dictionary. Its keys are positions of result leaves; its values are the positions of the
            argument leaves whose shardings these results get.
        known: the specs that were inferred earlier for values of the same traced step. If all that are needed
            are known, nothing is inferred; else those that are inferred are added.

    Returns:
        A dictionary from value id to spec. Empty if each actor has one device and no mesh.

    Raises:
        ShardingError: a result is unreduced: each device still has only a part of a sum.
    """
    if target.mesh is None:
        return {}
    _refuse_unreduced_results(traced, placed)
    if set(target.mesh.axis_types) == {AxisType.Explicit}:
        specs = {
            v: t.sharding.spec.partitions if t.sharding is not None else () for v, t in placed.types.items()
        }
    else:
        specs = _inferred(traced, placed, target, in_specs, known or KnownSpecs())
    for result, arg in continues.items():
        specs[placed.output_ids[result]] = specs[traced.flat.inputs[arg]]
    for result, spec in enumerate(out_specs):
        if spec is not None:
            specs[placed.output_ids[result]] = spec
    specs.update((inside, specs[final]) for inside, final in placed.same_sharding.items() if final in specs)
    return specs


def _refuse_unreduced_results(traced: Traced, placed: PlacedStep) -> None:
    for name, v in zip(traced.out_names, placed.output_ids, strict=False):
        if axes := logical_axes.unreduced_axes(placed.types[v].sharding):
            raise ShardingError(
                f"{name} is unreduced over {', '.join(axes)}: each device has a part of a sum; add the "
                "parts up with "
                "jax.sharding.reshard before the step returns it"
            )


def sharded(aval: Aval, value_type: ValueType, spec: Spec) -> Aval:
    """Return an aval with the sharding with which its value is passed between executables.

    Args:
        aval: the aval without a sharding.
        value_type: the type of the value, which tells over which mesh axes the value is unreduced.
        spec: the inferred sharding of the value.
    """
    while spec and spec[-1] is None:  # so that equal shardings compare equal
        spec = spec[:-1]
    return Aval(aval.shape, aval.dtype, spec, logical_axes.unreduced_axes(value_type.sharding))


def _inferred(
    traced: Traced,
    placed: PlacedStep,
    target: export.Target,
    in_specs: Sequence[Spec | None],
    known: KnownSpecs,
) -> dict[int, Spec]:
    mesh = target.mesh
    assert mesh is not None
    boundary = sorted(_boundary_ids(placed) - set(traced.flat.inputs))
    if (specs := known.find(placed.types, [*boundary, *traced.flat.inputs])) is not None:
        return specs
    named = [*in_specs, *[None] * (len(traced.flat.inputs) - len(in_specs))]
    shardings = tuple(
        private_api.unspecified() if s is None else NamedSharding(mesh, PartitionSpec(*s)) for s in named
    )
    avals = [
        jax.ShapeDtypeStruct(t.aval.shape, jnp.dtype(t.aval.dtype), sharding=t.sharding)
        for t in (placed.types[v] for v in traced.flat.inputs)
    ]
    with export.lowering_context(target):
        step = jax.jit(_whole_step(traced, placed, boundary), in_shardings=shardings, keep_unused=True)
        arg_specs, result_specs = private_api.propagated_specs(step, avals, target.platform)
    specs = dict(zip(boundary, result_specs, strict=True))
    specs.update(zip(traced.flat.inputs, arg_specs, strict=True))
    known.add(placed.types, specs)
    return specs


def _boundary_ids(placed: PlacedStep) -> set[int]:
    ids = {v for r in placed.recipes for v in (*r.inputs, *r.outputs) if isinstance(v, int)}
    ids |= set(placed.value_ids)
    return ids - set(placed.same_sharding) - _index_ids(placed)


def _index_ids(placed: PlacedStep) -> set[int]:
    """Return the ids of all microbatch indices, both inside loop bodies and among the step's inputs."""
    hidden = {
        placed.value_ids[i.value]
        for i in placed.graph.inputs[len(placed.graph.inputs) - placed.num_indices :]
    }
    return hidden | {s.staged.loop.body_inputs()[2] for s in placed.loops.values()}


def _whole_step(traced: Traced, placed: PlacedStep, boundary: Sequence[int]) -> Any:
    types = placed.types
    loops = {id(item): position for position, item in enumerate(traced.flat.ops) if isinstance(item, Loop)}

    def run(*args: Any) -> list[Any]:
        env = {v: evaluate.wrap_input(types[v], x) for v, x in zip(traced.flat.inputs, args, strict=True)}
        for item in placed.placement.items:
            if isinstance(item, Op):
                evaluate.run_ops([item], env)
            else:
                _run_loop_once(item, placed.parts[loops[id(item)]], placed.loops[loops[id(item)]], env, types)
        return [evaluate.unwrap_result(env[v]) for v in boundary]

    return run


def _run_loop_once(
    loop: Loop, finals: Sequence[Sequence[int]], scheduled: ScheduledLoop, env: dict[int, Any], types: Types
) -> None:
    invariants, batch, index = loop.body_inputs()
    for v, ref in zip(invariants, loop.invariants, strict=True):
        env[v] = evaluate.read_operand(env, ref)
    for v, ref in zip(batch, loop.batch, strict=True):
        env[v] = lax.index_in_dim(evaluate.read_operand(env, ref), 0, 0, keepdims=False)
    env[index] = jnp.int32(0)
    # Variants run in the order of their first use in the schedule, in which each comes after what it needs.
    for key in dict.fromkeys(key for _, _, key in scheduled.order):
        evaluate.run_ops(scheduled.variants[key].task.ops, env)
    for ids, parts, reduction in zip(finals, scheduled.staged.outputs, loop.reductions, strict=True):
        for final, part in zip(ids, parts, strict=True):
            value = evaluate.key_data(jnp.asarray(evaluate.read_operand(env, part.value)))
            start = reduction.start(value.shape, value.dtype, loop.num_microbatches)
            start = evaluate.key_data(evaluate.wrap_input(types[final], start))
            env[final] = evaluate.wrap_input(types[final], reduction.step(start, value, env[index]))
