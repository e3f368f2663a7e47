"""Run a planned step on meshes of this process's devices, without actors: what is compiled, how arrays are
split.

In: a step, a mesh's axes, shardings. Out: its results, and for each task the collectives in its compiled HLO.
    Every
executable is checked against the plan: one that takes or gives an array split in another way fails the run.

    ran = run_on_devices(step, params, batch, axes={"data": 2}, in_shardings=(P(), P(None, "data")))
    assert ran.collectives["bwd0"] == ["all-reduce 8x16", "all-reduce 8x16"]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from interpret import _one_of, run_programs
from planning import plan_step

from jaxpp_async.actors.executables import Executable, check_signature, compile_blob
from jaxpp_async.actors.jax_runtime import Devices
from jaxpp_async.actors.shards import Layouts
from jaxpp_async.compiler.export import emit
from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.session import mesh_options

_COLLECTIVE = re.compile(
    r"= (\S+|\([^)]*\)) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"\w+\[([\d,]+)\]")


@dataclass(frozen=True)
class Ran:
    """A step that has run.

    Args:
        results: as the step returns them.
        collectives: of each task that has any: an entry an array that one device gets out of it, such as
            `"all-reduce 8x16"`, in alphabetical order. Sizes in ascending order, since XLA transposes as it
            likes, and arrays singly, since it joins operations as it likes. Scalars (losses) are left out.
        split: global shape of every value between tasks to its specs.
    """

    results: Any
    collectives: dict[str, list[str]]
    split: dict[tuple[int, ...], set[tuple]]


def mesh_of(axes: dict[str, int], axis_types: dict[str, str] | None = None) -> jax.sharding.Mesh:
    """A mesh of this process's first devices."""
    target = mesh_options.make_target(axes, mesh_options.check_axis_types(axis_types or {}, axes), {}, "cpu")
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(devices, tuple(axes), axis_types=target.mesh.axis_types)  # pyright: ignore


def run_on_devices(
    fn: Callable,
    *args: Any,
    axes: dict[str, int],
    axis_types: dict[str, str] | None = None,
    axis_rules: dict[str, Any] | None = None,
    in_shardings: Any = None,
    schedule: Any = None,
) -> Ran:
    """Plan a step, compile its tasks for devices here and run every actor's program on them."""
    options = {
        "axis_types": axis_types,
        "axis_rules": axis_rules,
        "in_shardings": in_shardings,
        "schedule": schedule,
    }
    done = plan_step(fn, *args, spmd_mesh=axes, **options)
    target = mesh_options.make_target(
        axes, mesh_options.check_axis_types(axis_types or {}, axes), axis_rules or {}, "cpu"
    )
    devices = Devices(mesh_of(axes, axis_types))
    recipes = done.placed.recipes
    compiled = [
        compile_blob(emit(r, done.traced.types, done.specs, target).blob, (), devices) for r in recipes
    ]
    _check_signatures(done, compiled, devices)
    graph = done.placed.graph
    hosts = [
        *jax.tree.leaves(args),
        *(c.value for c in done.traced.captured),
        *range(done.placed.num_indices),
    ]
    inputs: list[Any] = [None] * len(hosts)
    for i in graph.inputs:
        aval = graph.values[i.value].aval
        inputs[i.arg] = jax.device_put(np.asarray(hosts[i.arg], aval.dtype), devices.sharding_of(aval))
    copies = run_programs(done.programs, inputs, lambda k: compiled[k].call)
    results = [_one_of(copies[k], name) for k, name in enumerate(done.traced.out_names)]
    collectives = {r.name: _collectives(c.call.as_text()) for r, c in zip(recipes, compiled, strict=True)}  # pyright: ignore
    split: dict[tuple[int, ...], set[tuple]] = {}
    for value in graph.values:
        split.setdefault(value.aval.shape, set()).add(value.aval.spec)
    results = jax.tree.unflatten(done.traced.out_tree, results)
    return Ran(results, {name: found for name, found in collectives.items() if found}, split)


def _collectives(text: str) -> list[str]:
    return sorted(
        f"{kind} {'x'.join(sorted(shape.split(','), key=int))}"
        for shapes, kind in _COLLECTIVE.findall(text)
        for shape in _ARRAY.findall(shapes)
    )


def _check_signatures(done: CompilePlan, compiled: Sequence[Executable], devices: Devices) -> None:
    """What each executable takes and gives is split as the plan says."""
    graph, layouts = done.placed.graph, Layouts(devices)
    for node in {node.executable: node for node in graph.nodes}.values():
        taken, made = compiled[node.executable].inputs, compiled[node.executable].outputs
        check_signature(taken, [layouts.of(graph.values[v].aval) for v in node.inputs], f"{node.label} takes")
        check_signature(made, [layouts.of(graph.values[v].aval) for v in node.outputs], f"{node.label} gives")
