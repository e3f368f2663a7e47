"""Give array axes logical names, and turn such names and the user's shardings into specs over mesh axes.

`shard` marks an array with logical names. On automatic mesh axes, lowering turns the mark into a sharding
constraint through `axis_rules`. On explicit mesh axes (JAX's "sharding in types"), where a sharding is part
of a value's type, `shard` is a `jax.sharding.reshard`. Without a mesh, `shard` is the identity. `leaf_specs`
reads the user's `in_shardings` and `out_shardings`.

The functions below the heading "explicit axes" read shardings from types and reshard values to these
shardings. On meshes whose axes are all automatic these functions do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpp_async.errors import ShardingError
from jaxpp_async.jax_bridge import private_api, tracebacks
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames

# JAX keys its caches by this context value: a function that `jax.jit` traced and lowered under one mesh's
# rules must not be used for another mesh's.
_rules = jax.make_user_context(default_value=None)

_UNCONSTRAINED = "(any)"
"""The name that stands for a dimension that `jax.vmap` added, whose sharding `shard` does not constrain."""


@contextmanager
def axis_rules(rules: Mapping[str, Any]) -> Iterator[None]:
    """Return a context in which `shard` constrains shardings by these rules, for tracing or lowering a step.

    The constraint applies to the mesh that is set in JAX at that time.

    Args:
        rules: for each logical name, the mesh axis, or axes, that split a dimension of this name.
    """
    frozen = tuple(sorted((name, tuple(e) if isinstance(e, list) else e) for name, e in rules.items()))
    with _rules(frozen):
        yield


# ---------------------------------------------------------------- shard


def _shard_reference(x, *, names):
    # JAX calls this when a computation is lowered.
    rules = _rules.value
    if rules is None:
        return [x]
    spec = resolve_names(names, dict(rules))
    types = _axis_types()
    free = PartitionSpec.UNCONSTRAINED
    if AxisType.Explicit in types.values():
        # `shard` has put the explicit axes into `x`'s type already.
        spec = tuple(_keep_axes(entry, types, AxisType.Auto) for entry in spec)
        free = None if any(jax.typeof(x).sharding.spec.partitions) else free
    if not any(spec):
        return [x]
    entries = [free if name == _UNCONSTRAINED else entry for name, entry in zip(names, spec, strict=True)]
    return [jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))]


def _reshard_explicit(x: Any, names: Sequence[str | None]) -> Any:
    """Reshard `x` over the explicit mesh axes that the axis rules give for its logical names.

    Args:
        x: an array.
        names: one logical name per dimension; None for a dimension that is not split.
    """
    types = _axis_types()
    spec = resolve_names(names, dict(_rules.value or ()))
    now = jax.typeof(x).sharding.spec
    entries = [_keep_axes(entry, types, AxisType.Explicit) for entry in spec]
    return jax.sharding.reshard(x, PartitionSpec(*entries, unreduced=now.unreduced, reduced=now.reduced))


def _axis_types() -> dict[str, AxisType]:
    mesh = jax.sharding.get_abstract_mesh()
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _axes_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes that an entry of a `PartitionSpec` names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _entry_of(axes: Sequence[str]) -> Any:
    """Return the entry of a `PartitionSpec` for a dimension that the given mesh axes split."""
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _keep_axes(entry: Any, types: Mapping[str, AxisType], kind: AxisType) -> Any:
    """Return an entry of a `PartitionSpec` without the mesh axes whose type is not `kind`.

    Args:
        entry: the entry.
        types: the type of each mesh axis, by the name of the axis.
        kind: the type of the axes to keep, automatic or explicit.
    """
    return _entry_of([a for a in _axes_of(entry) if types[a] == kind])


def constrained_axes(
    names: Sequence[str | None], now: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that split each dimension of an array behind `shard`, under the axis rules in
    context.

    Args:
        names: the logical names that `shard` was given.
        now: the mesh axes that split each dimension before `shard`.
    """
    spec = resolve_names(names, dict(_rules.value or ()))
    if not any(spec):
        return tuple(now)
    return tuple(
        axes if name == _UNCONSTRAINED else _axes_of(entry)
        for name, entry, axes in zip(names, spec, now, strict=True)
    )


def _shard_jvp(primals, tangents, *, names):
    return shard_p.bind(*primals, names=names), _shard_transpose(tangents, None, names=names)


def _shard_transpose(cotangents, x, *, names):
    (ct,) = cotangents
    return [ct] if isinstance(ct, private_api.Zero) else shard_p.bind(ct, names=names)


def _shard_batch(operands, dims, *, names):
    (x,), (dim,) = operands, dims
    if dim is not None:
        names = (*names[:dim], _UNCONSTRAINED, *names[dim:])
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
    """Constrain the sharding of `x` by one logical axis name per dimension.

    The mesh's `axis_rules` map a logical name to a mesh axis. A dimension is not split if its name is None or
    has no rule. Without a mesh this is the identity.

    Args:
        x: an array.
        names: logical names, at most `x.ndim`; missing trailing ones are None.

    Returns:
        `x`, with the same values.

    Raises:
        ShardingError: there are more names than dimensions, or a name is that of a mesh axis and has no rule.
    """
    with HiddenFrames():
        ndim = jax.typeof(x).ndim
        if len(names) > ndim:
            raise ShardingError(
                f"{tracebacks.caller_line()}: shard got {len(names)} names {tuple(names)} "
                f"for an array of {ndim} dimensions"
            )
        names = (*names, *[None] * (ndim - len(names)))
        types = set(_axis_types().values())
        if _rules.value is not None:
            _check_rules(names, dict(_rules.value), _axis_types(), f"{tracebacks.caller_line()}: shard")
        if _rules.value is not None and AxisType.Explicit in types:
            x = _reshard_explicit(x, names)
            if types == {AxisType.Explicit}:
                return x
        return shard_p.bind(x, names=names)[0]


def resolve_names(names: Sequence[str | None], axis_rules: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the entries of the `PartitionSpec` that the axis rules give for logical names.

    If the rules give one mesh axis for several dimensions, only the first of these is split by it.

    Args:
        names: one logical name per dimension; None for a dimension that is not split.
        axis_rules: for each logical name, the mesh axis or axes that split a dimension of this name.
    """
    used: set[str] = set()
    spec = []
    for name in names:
        free = [a for a in _axes_of(axis_rules.get(name) if name is not None else None) if a not in used]
        used.update(free)
        spec.append(_entry_of(free))
    return tuple(spec)


def _check_rules(
    names: Sequence[str | None], rules: Mapping[str, Any], axes: Collection[str], where: str
) -> None:
    """Raise a `ShardingError` if a logical name is that of a mesh axis and has no rule.

    A name without a rule splits nothing, which nobody wants who writes the name of a mesh axis.

    Args:
        names: the logical names that the user wrote, one per dimension.
        rules: for each logical name, the mesh axis or axes that split a dimension of this name.
        axes: the names of the mesh axes.
        where: the text that begins the error message: the user's line, and what has the names.
    """
    for name in names:
        if name in axes and name not in rules:
            raise ShardingError(
                f"{where} names {name!r}, an axis of the mesh, but axis_rules has no entry for it; give "
                f"RemoteMesh axis_rules={{{name!r}: {name!r}, ...}}, or {name!r}: None to split nothing"
            )


# ---------------------------------------------------------------- in_shardings and out_shardings

Spec = tuple[Any, ...]
"""The sharding of an array, as in `PartitionSpec`: one entry per dimension, which is a mesh axis, a tuple of
mesh axes, or None."""


def _is_leaf_spec(x: Any) -> bool:
    if x is None or isinstance(x, PartitionSpec | jax.sharding.NamedSharding):
        return True
    return isinstance(x, tuple) and {str} <= {type(e) for e in x} <= {str, type(None)}


def leaf_specs(
    prefix: Any,
    tree: Any,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    *,
    axes: Mapping[str, int],
    rules: Mapping[str, Any],
    where: str,
) -> list[Spec | None]:
    """Return the spec of every leaf of a tree, as given by the user's `in_shardings` or `out_shardings`.

    Args:
        prefix: the user's tree prefix of `PartitionSpec`s, `NamedSharding`s, tuples of logical names, and
            Nones.
        tree: the whole tree.
        names: one name per leaf, for error messages.
        shapes: one shape per leaf.
        axes: the size of each mesh axis, by the name of the axis.
        rules: for each logical name, the mesh axis or axes that split a dimension of this name.
        where: the text that begins each error message: the step's line, and `in_shardings` or
            `out_shardings`.

    Returns:
        One spec per leaf; None for a leaf whose sharding the user left open.

    Raises:
        ShardingError: `prefix` is no prefix of the tree, names an unknown axis, splits a dimension by an
            axis that does not divide it, or has a logical name that is a mesh axis and has no rule.
    """
    found: list[Any] = []
    try:
        jax.tree.map(
            lambda spec, subtree: found.extend([spec] * len(jax.tree.leaves(subtree))),
            prefix,
            tree,
            is_leaf=_is_leaf_spec,
        )
    except (ValueError, TypeError) as error:
        raise ShardingError(f"{where} is not a tree prefix of what it describes: {error}") from None
    return [
        _plain_spec(spec, name, shape, axes, rules, where)
        for spec, name, shape in zip(found, names, shapes, strict=True)
    ]


def _plain_spec(
    spec: Any,
    name: str,
    shape: tuple[int, ...],
    axes: Mapping[str, int],
    rules: Mapping[str, Any],
    where: str,
) -> Spec | None:
    if spec is None:
        return None
    if not _is_leaf_spec(spec):
        raise ShardingError(
            f"{where} of {name}: {spec!r} is no PartitionSpec, NamedSharding, tuple of names or None"
        )
    if (mesh := getattr(spec, "mesh", None)) is not None:
        _check_mesh(mesh, spec, name, axes, where)
    given = getattr(spec, "spec", spec)
    if getattr(given, "unreduced", None) or getattr(given, "reduced", None):
        raise ShardingError(
            f"{where} of {name}: {spec} is reduced or unreduced over an axis, which only values inside a "
            "step can be; use jax.sharding.reshard in the step"
        )
    plain = isinstance(spec, tuple) and not isinstance(spec, PartitionSpec)
    if plain:
        _check_rules(spec, rules, axes, f"{where} of {name}")
    entries = resolve_names(spec, rules) if plain else tuple(getattr(spec, "spec", spec))
    if len(entries) > len(shape):
        raise ShardingError(
            f"{where} of {name}: {spec} has {len(entries)} entries for an array of shape {shape}"
        )
    for dimension, entry in enumerate(entries):
        used = _axes_of(entry)
        for axis in used:
            if axis not in axes:
                raise ShardingError(
                    f"{where} of {name} names the axis {axis!r}, but the mesh has "
                    f"{sorted(axes) or 'no axes'}; give spmd_mesh that axis or correct the sharding"
                )
        size = math.prod(axes[a] for a in used)
        if shape[dimension] % size:
            raise ShardingError(
                f"{where} of {name}: dimension {dimension} of shape {shape} is not divisible by {size} "
                f"({entry!r}); give it such a size, or shard another dimension"
            )
    return entries


def _check_mesh(mesh: Any, given: Any, name: str, axes: Mapping[str, int], where: str) -> None:
    """Raise a `ShardingError` if a sharding has mesh axis sizes or a memory kind that actors do not have.

    Args:
        mesh: the mesh of the user's sharding.
        given: the user's sharding.
        name: the name of the leaf that has this sharding.
        axes: the size of each axis of an actor's mesh, by the name of the axis.
        where: the text that begins the error message.
    """
    if private_api.is_host_kind(given.memory_kind):
        raise ShardingError(
            f"{where} of {name}: {given.memory_kind!r} is memory in which actors keep no arrays; "
            "leave memory_kind out"
        )
    named = dict(mesh.shape)
    used = [a for entry in given.spec for a in _axes_of(entry)]
    if any(named[a] != axes.get(a, named[a]) for a in used):
        raise ShardingError(
            f"{where} of {name} is over a mesh {named} of this process's devices, but each actor has "
            f"{dict(axes)}; give RemoteMesh spmd_mesh={named}, or write {given.spec}"
        )


# ---------------------------------------------------------------- explicit axes

AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
"""A map from the names that users give to the types of mesh axes to JAX's types."""


def has_explicit_axes(mesh: Any) -> bool:
    """Return whether a mesh has an axis of type Explicit, so that types contain shardings; False if `mesh` is
    None."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def explicit_axes(mesh: Any) -> frozenset[str]:
    """Return the names of the axes of type Explicit of a mesh."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind == AxisType.Explicit)


def explicit_sharding(aval: Any) -> NamedSharding | None:
    """Return the sharding in a value's type; None if the mesh in context has no explicit axes."""
    mesh = aval.sharding.mesh
    if mesh.empty or not has_explicit_axes(jax.sharding.get_abstract_mesh()):
        return None
    return aval.sharding


def reshard_to(x: Any, to: NamedSharding | None) -> Any:
    """Return `x` resharded so that its type has the sharding `to`; None leaves `x` as it is."""
    if to is None:
        return x
    now = jax.typeof(x).sharding
    if now.mesh == to.mesh and now.spec == to.spec:
        return x
    # Inside `jax.sharding.auto_axes` the mesh in context is another one.
    with jax.sharding.use_abstract_mesh(to.mesh.abstract_mesh):
        return jax.sharding.reshard(x, to.spec)


def replicate_unless_given(leaf: Any) -> Any:
    """Return the type under which an argument is traced, with the sharding "replicated" if it has none.

    An argument that has a sharding is returned as it is, and so is every argument on a mesh without explicit
    axes, since only explicit axes need a sharding before the trace.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not has_explicit_axes(mesh) or getattr(leaf, "sharding", None) is not None:
        return leaf
    return struct_with_spec(leaf, mesh, ())


def result_type(fn: Callable[[Any], Any], x: Any) -> jax.ShapeDtypeStruct:
    """Return the type of `fn(x)` without computing it, including its sharding over explicit mesh axes.

    `jax.eval_shape` would drop that sharding on a mesh that has both explicit and other axes.
    """
    aval: Any = jax.make_jaxpr(fn)(x).out_avals[0]
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=explicit_sharding(aval), weak_type=aval.weak_type
    )


def struct_with_spec(leaf: Any, mesh: Any, spec: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """Return a leaf's `jax.ShapeDtypeStruct` with a sharding by `spec` in its type."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def unreduced_axes(sharding: NamedSharding | None) -> tuple[str, ...]:
    """Return the mesh axes over which a value is unreduced, that is, each device has one summand of the
    value.

    Returns:
        The names of the axes, in the mesh's order; () if `sharding` is None.
    """
    if sharding is None:
        return ()
    return tuple(a for a in sharding.mesh.axis_names if a in sharding.spec.unreduced)
