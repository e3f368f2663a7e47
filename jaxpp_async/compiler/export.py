"""Lower recipes to serialized StableHLO with pinned shardings, and explain why a recipe cannot be lowered.

A recipe describes the computation of one executable. Every executable takes and returns flat lists of arrays;
PRNG keys are passed between executables as their uint32 data. Under `jax_debug_nans` or `jax_debug_infs` an
executable returns a second result: see `evaluate.checked_function`.

Errors for steps that cannot be lowered, or whose arrays actors cannot keep, are `UnsupportedError`s that name
the operation, its task and the user's line. To find this operation, each operation is lowered alone, but only
after lowering the step has failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxpp_async.compiler.evaluate import checked_function, recipe_function
from jaxpp_async.compiler.ir import Op, Recipe, Types, ValueType
from jaxpp_async.compiler.task_graph import PlacedStep
from jaxpp_async.errors import JaxppAsyncError, UnsupportedError
from jaxpp_async.jax_bridge import jax_config, private_api
from jaxpp_async.markers import logical_axes, nonfinite
from jaxpp_async.program.instructions import SpecEntry


@dataclass(frozen=True)
class Emitted:
    """One serialized executable.

    Args:
        key: a hash of `blob` that does not depend on `name`.
        blob: the serialized StableHLO.
        name: the name of the recipe (list of operations) that was lowered, such as `"fwd0"`.
    """

    key: str
    blob: bytes
    name: str


@dataclass(frozen=True, eq=False)
class Target:
    """The devices that executables are lowered for.

    Args:
        mesh: the device mesh of each actor, as an abstract mesh; None for actors with one device.
        platform: `"cpu"` or `"cuda"`.
        axis_rules: a dictionary from logical axis name to mesh axis names, for `shard`.
    """

    mesh: AbstractMesh | None
    platform: str
    axis_rules: Mapping[str, Any]

    @property
    def axes(self) -> dict[str, int]:
        """The size of each mesh axis by its name; empty for actors with one device."""
        return dict(self.mesh.shape) if self.mesh is not None else {}


_OWN_CALLS = (export.DisabledSafetyCheck.custom_call("ragged_all_to_all"),)
"""Operations of JAX that are custom calls in StableHLO, and for which JAX promises nothing about later
versions. Actors have the controller's version of JAX."""


def emit(
    recipe: Recipe,
    types: Types,
    specs: Mapping[int, tuple[SpecEntry, ...]],
    target: Target,
    *,
    out_specs: Sequence[tuple[SpecEntry, ...]] | None = None,
) -> Emitted:
    """Lower one recipe (the operations of one executable) to a serialized executable.

    Args:
        recipe: the recipe to lower.
        types: the type of each value id.
        specs: the sharding of each value id; ids without an entry are replicated.
        target: the mesh and platform to lower for.
        out_specs: the sharding of each result; None if these are the shardings in `specs`.
    """
    if out_specs is None:
        out_specs = [specs.get(v, ()) if isinstance(v, int) else () for v in recipe.outputs]
    checked = nonfinite.forbids_nonfinite() and bool(recipe.ops or recipe.accumulates)
    fn = checked_function(recipe, types) if checked else recipe_function(recipe, types)
    fn.__name__ = recipe.stem
    options: dict[str, Any] = {}
    if target.mesh is not None:
        options["in_shardings"] = tuple(_input_shardings(recipe, types, specs, target.mesh))
        options["out_shardings"] = [
            _sharding(target.mesh, spec, types[v] if isinstance(v, int) else None)
            for v, spec in zip(recipe.outputs, out_specs, strict=True)
        ]
        if checked:
            options["out_shardings"] = options["out_shardings"], NamedSharding(target.mesh, PartitionSpec())
    avals = input_types(recipe, types, specs, target)
    with lowering_context(target), jax_config.innermost_locations():
        jitted = jax.jit(fn, keep_unused=True, **options)
        exported = export.export(jitted, platforms=[target.platform], disabled_checks=_OWN_CALLS)(*avals)
    blob = bytes(exported.serialize())
    return Emitted(hashlib.sha256(blob).hexdigest()[:32], blob, recipe.name)


def input_types(
    recipe: Recipe, types: Types, specs: Mapping[int, tuple[SpecEntry, ...]], target: Target
) -> list[jax.ShapeDtypeStruct]:
    """Return the types of a recipe's inputs with which JAX traces the recipe's function.

    Args:
        recipe, types, specs, target: as for `emit`.
    """
    inputs = [types[v] for v in recipe.inputs]
    shardings: Sequence[Any] = [None] * len(inputs)
    if target.mesh is not None and logical_axes.has_explicit_axes(target.mesh):
        shardings = _input_shardings(recipe, types, specs, target.mesh)
    return [
        jax.ShapeDtypeStruct(t.aval.shape, jnp.dtype(t.aval.dtype), sharding=s)
        for t, s in zip(inputs, shardings, strict=True)
    ]


def _input_shardings(
    recipe: Recipe, types: Types, specs: Mapping[int, tuple[SpecEntry, ...]], mesh: AbstractMesh
) -> list[NamedSharding]:
    return [_sharding(mesh, specs.get(v, ()), types[v]) for v in recipe.inputs]


def lowering_context(target: Target) -> Any:
    """Return a context in which JAX traces and lowers for the target.

    The context sets the mesh that bare `PartitionSpec`s refer to, and the axis rules for `shard`.
    """
    stack = contextlib.ExitStack()
    stack.enter_context(logical_axes.axis_rules(target.axis_rules if target.mesh is not None else {}))
    stack.enter_context(jax_config.mesh_context(target.mesh))
    return stack


def _sharding(mesh: AbstractMesh, spec: Sequence[SpecEntry], value_type: ValueType | None) -> NamedSharding:
    """Return the sharding of an argument or a result of an executable.

    Args:
        mesh: the actors' abstract mesh.
        spec: the mesh axes that split each dimension.
        value_type: the value's type. The returned sharding is unreduced over the same mesh axes as the
            sharding in this type. None for a constant, which is unreduced over no axis.
    """
    pending = logical_axes.unreduced_axes(value_type.sharding) if value_type is not None else ()
    return NamedSharding(mesh, PartitionSpec(*spec, unreduced=frozenset(pending)))


# ---------------------------------------------------------------- exportable

_NO_RULE = re.compile(r"rule for primitive '([^']+)' not found")
_FOREIGN = re.compile(r"custom_call @([\w.$-]+)")


@contextlib.contextmanager
def explained(recipes: Sequence[Recipe], types: Types, target: Target) -> Iterator[None]:
    """Turn JAX's lowering errors inside the context into `UnsupportedError`s that name the failing operation.

    An error is raised unchanged if every operation can be lowered alone.

    Args:
        recipes: the recipes of the step that is lowered in the context; each has the operations of one task.
        types: the type of each value id.
        target: the mesh and platform to lower for.
    """
    try:
        yield
    except JaxppAsyncError:
        raise
    except Exception as error:  # lowering rules are anybody's code and raise anything
        found = _find_culprit(recipes, types, target)
        if found is None:
            raise
        recipe, op, why = found
        raise UnsupportedError(_explain(recipe, op, why)) from error


def refuse_host_memory(placed: PlacedStep) -> None:
    """Raise an error if an array in host memory leaves its task, since actors cannot keep such arrays.

    A `jax.checkpoint` with an offloading policy puts its residuals into host memory. This is allowed if the
    backward that reads them is in the same task.

    Raises:
        UnsupportedError: an array in host memory is passed to another task or returned from the step.
    """
    crossing = {v for v in placed.value_ids if placed.types[v].on_host}
    for recipe in placed.recipes if crossing else ():
        for op in recipe.ops:
            if crossing.intersection(op.outputs):
                raise UnsupportedError(
                    f"{op.line}: `{op.name}` in task {recipe.name} puts an array into host memory, and "
                    "another task, "
                    "or the step's caller, gets it; actors keep such arrays in their devices' memory alone. "
                    "For a "
                    "checkpoint write a policy that saves or recomputes (save_only_these_names, "
                    "nothing_saveable) in "
                    "place of one that offloads; leave jax.device_put(..., jax.memory.Space.Host) out of a "
                    "state"
                )


def _find_culprit(
    recipes: Sequence[Recipe], types: Types, target: Target
) -> tuple[Recipe, Op, Exception] | None:
    """Find the first operation of some recipes that JAX cannot lower on its own.

    Returns:
        A tuple of the recipe that contains the operation, the operation, and JAX's error. None if every
        operation can be lowered.
    """
    tried: set[tuple[str, str]] = set()
    for recipe in recipes:
        for op in recipe.ops:
            if (op.name, op.line) in tried:
                continue
            tried.add((op.name, op.line))
            alone = Recipe(
                "alone", tuple(dict.fromkeys(op.reads)), tuple(o for o in op.outputs if o >= 0), (op,)
            )
            try:
                emit(alone, types, {}, target)
            except Exception as error:  # see `explained`
                return recipe, op, error
    return None


def _explain(recipe: Recipe, op: Op, error: Exception) -> str:
    text = str(error)
    where = f"{op.line}: "
    if rule := _NO_RULE.search(text):
        around = f" (inside `{op.name}`)" if rule[1] != op.name else ""
        return (
            f"{where}`{rule[1]}`{around} in task {recipe.name} has no lowering for the actors' platform; "
            "register one "
            "(`jax.interpreters.mlir.register_lowering`), or write it with JAX's own operations"
        )
    if foreign := _FOREIGN.search(text):
        return (
            f"{where}`{op.name}` in task {recipe.name} calls foreign code, {foreign[1]!r}, which cannot be "
            "exported to "
            "the actors; write it with JAX's own operations"
        )
    if private_api.is_missing_gpu_error(error):
        return (
            f"{where}`{op.name}` in task {recipe.name} needs a GPU in this process to be lowered "
            f"({text.splitlines()[0]}); start it where there is one, or use an implementation that can do "
            "without"
        )
    why = text.splitlines()[0] if text else type(error).__name__
    return (
        f"{where}`{op.name}` in task {recipe.name} cannot be exported to the actors: {why}; "
        "write it with other operations"
    )
