"""compiler.emit: recipes in, serialized StableHLO with pinned shardings out. Runs nothing.

Every executable takes and returns flat lists of arrays. PRNG keys stand as their data at the boundary. Under
`jax_debug_nans` or `jax_debug_infs` it returns a second result: see `evaluate.checked_function`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxpp_async import explicit, jax_config, nonfinite, sharding
from jaxpp_async.compiler.evaluate import checked_function, recipe_function
from jaxpp_async.compiler.ir import Types, ValueType
from jaxpp_async.compiler.recipes import Recipe
from jaxpp_async.program import SpecEntry


@dataclass(frozen=True)
class Emitted:
    """One executable: a key that depends on nothing but its content, and its bytes."""

    key: str
    blob: bytes
    name: str


@dataclass(frozen=True, eq=False)
class Target:
    """What executables are lowered for.

    Args:
        mesh: the actors' mesh, abstract; None for actors of one device.
        platform: `"cpu"` or `"cuda"`.
        axis_rules: logical to mesh axis names, for `shard`.
    """

    mesh: AbstractMesh | None
    platform: str
    axis_rules: Mapping[str, Any]

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis name to size; empty for actors of one device."""
        return dict(self.mesh.shape) if self.mesh is not None else {}


def emit(
    recipe: Recipe,
    types: Types,
    specs: Mapping[int, tuple[SpecEntry, ...]],
    target: Target,
    *,
    out_specs: Sequence[tuple[SpecEntry, ...]] | None = None,
) -> Emitted:
    """Lower one recipe.

    Args:
        specs: sharding of each value id; missing ones are replicated.
        out_specs: of the results, where they differ from the values' own.
    """
    if out_specs is None:
        out_specs = [specs.get(v, ()) if isinstance(v, int) else () for v in recipe.outputs]
    inputs = [types[v] for v in recipe.inputs]
    checked = nonfinite.wanted() and bool(recipe.ops or recipe.accumulates)
    fn = checked_function(recipe, types) if checked else recipe_function(recipe, types)
    fn.__name__ = recipe.stem
    options: dict[str, Any] = {}
    shardings: Sequence[Any] = [None] * len(inputs)
    if target.mesh is not None:
        shardings = [_named(target.mesh, specs.get(v, ()), types[v]) for v in recipe.inputs]
        options["in_shardings"] = tuple(shardings)
        options["out_shardings"] = [
            _named(target.mesh, spec, types[v] if isinstance(v, int) else None)
            for v, spec in zip(recipe.outputs, out_specs, strict=True)
        ]
        if checked:
            options["out_shardings"] = options["out_shardings"], NamedSharding(target.mesh, PartitionSpec())
    in_types = shardings if explicit.has_axes(target.mesh) else [None] * len(inputs)
    avals = [
        jax.ShapeDtypeStruct(t.aval.shape, jnp.dtype(t.aval.dtype), sharding=s)
        for t, s in zip(inputs, in_types, strict=True)
    ]
    with lowering_context(target), jax_config.innermost_locations():
        jitted = jax.jit(fn, keep_unused=True, **options)
        exported = export.export(jitted, platforms=[target.platform])(*avals)
    blob = bytes(exported.serialize())
    return Emitted(hashlib.sha256(blob).hexdigest()[:32], blob, recipe.name)


def lowering_context(target: Target) -> Any:
    """For tracing steps and lowering tasks: the mesh for bare `PartitionSpec`s, the rules for `shard`."""
    stack = contextlib.ExitStack()
    stack.enter_context(sharding.axis_rules(target.axis_rules if target.mesh is not None else {}))
    stack.enter_context(jax_config.mesh_context(target.mesh))
    return stack


def _named(mesh: AbstractMesh, spec: Sequence[SpecEntry], value_type: ValueType | None) -> NamedSharding:
    """How a value lies between executables."""
    pending = explicit.unreduced(value_type.sharding) if value_type is not None else ()
    return NamedSharding(mesh, PartitionSpec(*spec, unreduced=frozenset(pending)))
