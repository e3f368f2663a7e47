"""compiler.emit: recipes in, serialized StableHLO with pinned shardings out. Runs nothing.

Every executable takes and returns flat lists of arrays. PRNG keys stand as their data at the boundary.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxpp_async import explicit, jax_compat, sharding
from jaxpp_async.compiler.ir import Lit, Op, Ref, Types, ValueType
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
    fn = recipe_function(recipe, types)
    # One name for every stage: identical stages become identical bytes, and so one executable.
    fn.__name__ = recipe.name.rstrip("0123456789")
    options: dict[str, Any] = {}
    shardings: Sequence[Any] = [None] * len(inputs)
    if target.mesh is not None:
        shardings = [_named(target.mesh, specs.get(v, ()), types[v]) for v in recipe.inputs]
        options["in_shardings"] = tuple(shardings)
        options["out_shardings"] = [
            _named(target.mesh, spec, types[v] if isinstance(v, int) else None)
            for v, spec in zip(recipe.outputs, out_specs, strict=True)
        ]
    in_types = shardings if explicit.has_axes(target.mesh) else [None] * len(inputs)
    avals = [
        jax.ShapeDtypeStruct(t.aval.shape, jnp.dtype(t.aval.dtype), sharding=s)
        for t, s in zip(inputs, in_types, strict=True)
    ]
    with lowering_context(target), jax_compat.innermost_locations():
        jitted = jax.jit(fn, keep_unused=True, **options)
        exported = export.export(jitted, platforms=[target.platform])(*avals)
    blob = bytes(exported.serialize())
    return Emitted(hashlib.sha256(blob).hexdigest()[:32], blob, recipe.name)


def lowering_context(target: Target) -> Any:
    """For tracing steps and lowering tasks: the mesh for bare `PartitionSpec`s, the rules for `shard`."""
    stack = contextlib.ExitStack()
    stack.enter_context(sharding.axis_rules(target.axis_rules if target.mesh is not None else {}))
    if target.mesh is not None:
        stack.enter_context(jax.sharding.use_abstract_mesh(target.mesh))
    return stack


def _named(mesh: AbstractMesh, spec: Sequence[SpecEntry], value_type: ValueType | None) -> NamedSharding:
    """How a value lies between executables."""
    pending = explicit.unreduced(value_type.sharding) if value_type is not None else ()
    return NamedSharding(mesh, PartitionSpec(*spec, unreduced=frozenset(pending)))


def recipe_function(recipe: Recipe, types: Types) -> Callable[..., list[Any]]:
    """The recipe as a function of its inputs."""

    def run(*args: Any) -> list[Any]:
        env: dict[int, Any] = {v: lit.value for v, lit in recipe.literals.items()}
        env.update((v, wrap(types[v], x)) for v, x in zip(recipe.inputs, args, strict=True))
        index = env[recipe.index] if recipe.index is not None else None
        for whole, part in recipe.slices:
            env[part] = lax.dynamic_index_in_dim(read(env, whole), index, 0, keepdims=False)
        for start in recipe.starts:
            dtype = jnp.dtype(start.aval.dtype)
            accumulator = start.reduction.start(start.aval.shape, dtype, start.num_microbatches)
            env[start.result] = wrap(types[start.result], accumulator)
        run_ops(recipe.ops, env)
        for a in recipe.accumulates:
            old = unwrap(env[a.accumulator])
            value = jnp.asarray(read(env, a.value))
            env[a.result] = a.reduction.step(old, unwrap(value), index)
        return [leave(env[r]) if isinstance(r, int) else jnp.asarray(r.value) for r in recipe.outputs]

    return run


def run_ops(ops: Sequence[Op], env: dict[int, Any]) -> None:
    """Run operations under a JAX trace, reading and writing `env`."""
    for op in ops:
        results = op.run([read(env, r) for r in op.inputs])
        env.update((o, x) for o, x in zip(op.outputs, results, strict=True) if o >= 0)


def read(env: Mapping[int, Any], ref: Ref) -> Any:
    """An operand's array."""
    return ref.value if isinstance(ref, Lit) else env[ref]


def wrap(value_type: ValueType, x: Any) -> Any:
    """A value at the boundary as its operations know it: key data as keys, with the sharding of its type."""
    keyed = jax.random.wrap_key_data(x, impl=value_type.key_impl) if value_type.key_impl else x
    return explicit.bring(keyed, value_type.sharding)


def leave(x: Any) -> Any:
    """The reverse of `wrap`: keys as key data; what is whole on every device, for whatever use, is just whole."""
    x = jnp.asarray(x)
    mesh, known = jax.sharding.get_abstract_mesh(), explicit.of(jax.typeof(x))
    if known is not None and (known.mesh != mesh or known.spec.reduced):
        x = explicit.bring(x, NamedSharding(mesh, known.spec.update(reduced=frozenset())))
    return unwrap(x)


def unwrap(x: Any) -> Any:
    """Keys to key data; anything else as it is."""
    return jax.random.key_data(x) if jax_compat.is_key_dtype(x.dtype) else x
