"""sharding: logical axis names on values, the user's shardings as plain specs, and the shardings of explicit axes.

`shard` marks an array; lowering for a mesh turns the mark into a constraint through `axis_rules`. Without a mesh it is
the identity. `leaf_specs` reads `in_shardings` and `out_shardings`.
On axes of type explicit a sharding is part of a value's type (`explicit`), and `shard` a `jax.sharding.reshard`.

explicit: shardings in the types of values, on meshes with explicit axes (JAX's "sharding in types").

In: avals and traced values. Out: the shardings that stand in their types, and values brought to them. On meshes whose
axes are all automatic every function here does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpp_async.errors import ShardingError
from jaxpp_async.jax_bridge import private_api, tracebacks
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames

# What `jax.jit` has traced and lowered under one mesh's rules must not serve another's: JAX keys its caches by this.
_rules = jax.make_user_context(default_value=None)

_FREE = "(any)"
"""Stands for a dimension that `jax.vmap` added: how it lies is not for `shard` to say."""


@contextmanager
def axis_rules(rules: Mapping[str, Any]) -> Iterator[None]:
    """While a step is traced or lowered: `shard` becomes a constraint through these rules (on the mesh in context)."""
    frozen = tuple(sorted((name, tuple(e) if isinstance(e, list) else e) for name, e in rules.items()))
    with _rules(frozen):
        yield


# ---------------------------------------------------------------- shard


def _shard_reference(x, *, names):
    # Reached when a computation is lowered.
    rules = _rules.value
    if rules is None:
        return [x]
    spec = resolve(names, dict(rules))
    types = _axis_types()
    if AxisType.Explicit in types.values():
        # Explicit axes are in `x`'s type, and `shard` has seen to them.
        spec = tuple(_only(entry, types, AxisType.Auto) for entry in spec)
        explicit = any(jax.typeof(x).sharding.spec.partitions)
        free = None if explicit else PartitionSpec.UNCONSTRAINED
    else:
        free = PartitionSpec.UNCONSTRAINED
    if not any(spec):
        return [x]
    entries = [free if name == _FREE else entry for name, entry in zip(names, spec, strict=True)]
    return [jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))]


def _reshard_explicit(x: Any, names: Sequence[str | None]) -> Any:
    """`x` with the explicit ones among its axes as the rules say."""
    types = _axis_types()
    spec = resolve(names, dict(_rules.value or ()))
    now = jax.typeof(x).sharding.spec
    entries = [_only(entry, types, AxisType.Explicit) for entry in spec]
    return jax.sharding.reshard(x, PartitionSpec(*entries, unreduced=now.unreduced, reduced=now.reduced))


def _axis_types() -> dict[str, AxisType]:
    mesh = jax.sharding.get_abstract_mesh()
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _only(entry: Any, types: Mapping[str, AxisType], kind: AxisType) -> Any:
    """The part of a spec's entry that is of this kind of axes."""
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    kept = tuple(a for a in axes if types[a] == kind)
    return None if not kept else kept[0] if len(kept) == 1 else kept


def _shard_jvp(primals, tangents, *, names):
    (x,), (t,) = primals, tangents
    out = shard_p.bind(x, names=names)
    return out, ([t] if isinstance(t, private_api.Zero) else shard_p.bind(t, names=names))


def _shard_transpose(cotangents, x, *, names):
    (ct,) = cotangents
    return [ct] if isinstance(ct, private_api.Zero) else shard_p.bind(ct, names=names)


def _shard_batch(operands, dims, *, names):
    (x,), (dim,) = operands, dims
    if dim is not None:
        names = (*names[:dim], _FREE, *names[dim:])
    return shard_p.bind(x, names=names), [dim]


shard_p = private_api.new_primitive(
    "shard",
    abstract_eval=lambda x, *, names: [x],
    reference=_shard_reference,
    jvp=_shard_jvp,
    transpose=_shard_transpose,
    batch=_shard_batch,
)


def shard(x: Any, names: Sequence[str | None]) -> Any:
    """Constrain `x` by logical axis names, one a dimension (None: not split).

    The mesh's `axis_rules` map a logical name to a mesh axis; a name without a rule is not split.

    Args:
        x: an array.
        names: logical names, at most `x.ndim`; missing trailing ones are None.

    Returns:
        `x`.

    Raises:
        ShardingError: more names than dimensions.
    """
    with HiddenFrames():
        return _constrained(x, names)


def _constrained(x: Any, names: Sequence[str | None]) -> Any:
    ndim = jax.typeof(x).ndim
    if len(names) > ndim:
        raise ShardingError(
            f"{tracebacks.caller_line()}: shard got {len(names)} names {tuple(names)} "
            f"for an array of {ndim} dimensions"
        )
    names = (*names, *[None] * (ndim - len(names)))
    types = set(_axis_types().values())
    if _rules.value is not None and AxisType.Explicit in types:
        x = _reshard_explicit(x, names)
        if types == {AxisType.Explicit}:
            return x
    return shard_p.bind(x, names=names)[0]


def resolve(names: Sequence[str | None], axis_rules: Mapping[str, Any]) -> tuple[Any, ...]:
    """Logical names to mesh axes. A mesh axis is used at most once; later uses stay unsplit."""
    used: set[str] = set()
    spec = []
    for name in names:
        axes = axis_rules.get(name) if name is not None else None
        wanted = (axes,) if isinstance(axes, str) else tuple(axes or ())
        free = tuple(a for a in wanted if a not in used)
        used.update(free)
        spec.append(None if not free else free[0] if len(free) == 1 else free)
    return tuple(spec)


# ---------------------------------------------------------------- in_shardings and out_shardings

Spec = tuple[Any, ...]
"""One entry a dimension, as in `PartitionSpec`: a mesh axis, several, or None."""


def _is_spec(x: Any) -> bool:
    if x is None or isinstance(x, PartitionSpec | jax.sharding.NamedSharding):
        return True
    names = isinstance(x, tuple) and all(e is None or isinstance(e, str) for e in x)
    return names and any(isinstance(e, str) for e in x)


def leaf_specs(
    prefix: Any,
    tree: Any,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    *,
    axes: Mapping[str, int],
    rules: Mapping[str, Any],
    what: str,
) -> list[Spec | None]:
    """The spec of every leaf, from a tree prefix of `PartitionSpec`s, `NamedSharding`s, logical names and Nones.

    Args:
        prefix: what the user gave.
        tree: the tree it is a prefix of.
        names: what to call each leaf in errors.
        shapes: of each leaf.
        axes: mesh axis to size.
        rules: logical name to mesh axis.
        what: `"in_shardings"` or `"out_shardings"`.

    Raises:
        ShardingError: no prefix of the tree; an unknown axis; a dimension that an axis does not divide.
    """
    found: list[Any] = []
    try:
        jax.tree.map(
            lambda spec, subtree: found.extend([spec] * len(jax.tree.leaves(subtree))),
            prefix,
            tree,
            is_leaf=_is_spec,
        )
    except (ValueError, TypeError) as error:
        raise ShardingError(f"{what} is not a tree prefix of what it describes: {error}") from None
    return [
        _plain_spec(spec, name, shape, axes, rules, what)
        for spec, name, shape in zip(found, names, shapes, strict=True)
    ]


def _plain_spec(
    spec: Any, name: str, shape: tuple[int, ...], axes: Mapping[str, int], rules: Mapping[str, Any], what: str
) -> Spec | None:
    if spec is None:
        return None
    if not _is_spec(spec):
        raise ShardingError(
            f"{what} of {name}: {spec!r} is no PartitionSpec, NamedSharding, tuple of names or None"
        )
    if (mesh := getattr(spec, "mesh", None)) is not None:
        _check_mesh(mesh, spec, name, axes, what)
    given = getattr(spec, "spec", spec)
    if getattr(given, "unreduced", None) or getattr(given, "reduced", None):
        raise ShardingError(
            f"{what} of {name}: {spec} is reduced or unreduced over an axis, which only values inside a step can be; "
            "use jax.sharding.reshard in the step"
        )
    plain = isinstance(spec, tuple) and not isinstance(spec, PartitionSpec)
    entries = resolve(spec, rules) if plain else tuple(getattr(spec, "spec", spec))
    if len(entries) > len(shape):
        raise ShardingError(
            f"{what} of {name}: {spec} has {len(entries)} entries for an array of shape {shape}"
        )
    for dimension, entry in enumerate(entries):
        used = (entry,) if isinstance(entry, str) else tuple(entry or ())
        for axis in used:
            if axis not in axes:
                raise ShardingError(
                    f"{what} of {name} names the axis {axis!r}, but the mesh has {sorted(axes) or 'no axes'}; "
                    "give spmd_mesh that axis or correct the sharding"
                )
        size = math.prod(axes[a] for a in used)
        if shape[dimension] % size:
            raise ShardingError(
                f"{what} of {name}: dimension {dimension} of shape {shape} is not divisible by {size} ({entry!r}); "
                "give it such a size, or shard another dimension"
            )
    return entries


def _check_mesh(mesh: Any, given: Any, name: str, axes: Mapping[str, int], what: str) -> None:
    """Raise a `ShardingError` for a sharding over other devices, or in other memory, than actors have."""
    if private_api.is_host_kind(given.memory_kind):
        raise ShardingError(
            f"{what} of {name}: {given.memory_kind!r} is memory in which actors keep no arrays; leave memory_kind out"
        )
    named = dict(mesh.shape)
    used = [a for entry in given.spec for a in ((entry,) if isinstance(entry, str) else tuple(entry or ()))]
    if any(named[a] != axes.get(a, named[a]) for a in used):
        raise ShardingError(
            f"{what} of {name} is over a mesh {named} of this process's devices, but each actor has {dict(axes)}; give "
            f"RemoteMesh spmd_mesh={named}, or write {given.spec}"
        )


# ---------------------------------------------------------------- explicit

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
