"""explicit: shardings in the types of values, on meshes with explicit axes (JAX's "sharding in types").

In: avals and traced values. Out: the shardings that stand in their types, and values brought to them. On meshes whose
axes are all automatic every function here does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
"""The types of axes by the names that users give them."""


def has_axes(mesh: Any) -> bool:
    """Whether some axis of a mesh (or of None) puts shardings into types."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def of(aval: Any) -> NamedSharding | None:
    """The sharding in a value's type, if the mesh in context has explicit axes; None: nothing to carry on."""
    mesh = aval.sharding.mesh
    if mesh.empty or not has_axes(jax.sharding.get_abstract_mesh()):
        return None
    return aval.sharding


def bring(x: Any, to: NamedSharding | None) -> Any:
    """`x` with the sharding `to` in its type (None: any)."""
    if to is None:
        return x
    now = jax.typeof(x).sharding
    if now.mesh == to.mesh and now.spec == to.spec:
        return x
    with jax.sharding.use_abstract_mesh(to.mesh.abstract_mesh):  # another one inside `jax.sharding.auto_axes`
        return jax.sharding.reshard(x, to.spec)


def replicated_unless_given(leaf: Any) -> Any:
    """What a step is traced with for an argument whose sharding nobody gave: whole on every device.

    Only explicit axes need to know before the trace.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not has_axes(mesh) or getattr(leaf, "sharding", None) is not None:
        return leaf
    return typed(leaf, mesh, ())


def result_type(fn: Callable[[Any], Any], x: Any) -> jax.ShapeDtypeStruct:
    """`jax.eval_shape` of one array, which forgets explicit axes where the mesh has others too."""
    aval: Any = jax.make_jaxpr(fn)(x).out_avals[0]
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=of(aval), weak_type=aval.weak_type)


def typed(leaf: Any, mesh: Any, spec: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """A `jax.ShapeDtypeStruct` with a sharding in its type."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def unreduced(sharding: NamedSharding | None) -> tuple[str, ...]:
    """Mesh axes over whose devices a value's parts are still to be added, in the mesh's order."""
    if sharding is None:
        return ()
    return tuple(a for a in sharding.mesh.axis_names if a in sharding.spec.unreduced)
