"""sharding: logical axis names on values. In: an array and names. Out: the array with a mark that the compiler turns into a
sharding constraint through the mesh's `axis_rules`. Without a mesh it is the identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_async import jax_compat
from jaxpp_async.errors import ShardingError

_rules: ContextVar[Mapping[str, Any] | None] = ContextVar("axis_rules", default=None)


@contextmanager
def axis_rules(rules: Mapping[str, Any]) -> Iterator[None]:
    """While a task is lowered: `shard` becomes a constraint through these rules (on the mesh in JAX's context)."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def _shard_reference(x, *, names):
    # Reached when a computation is lowered, so a `jit` cached before the mesh existed still gets its constraints.
    rules = _rules.get()
    if rules is None:
        return [x]
    spec = resolve(names, rules)
    return [jax.lax.with_sharding_constraint(x, PartitionSpec(*spec)) if any(spec) else x]


def _shard_jvp(primals, tangents, *, names):
    (x,), (t,) = primals, tangents
    out = shard_p.bind(x, names=names)
    return out, ([t] if isinstance(t, jax_compat.Zero) else shard_p.bind(t, names=names))


def _shard_transpose(cotangents, x, *, names):
    (ct,) = cotangents
    return [ct] if isinstance(ct, jax_compat.Zero) else shard_p.bind(ct, names=names)


def _shard_batch(operands, dims, *, names):
    (x,), (dim,) = operands, dims
    if dim is not None:
        names = (*names[:dim], None, *names[dim:])
    return shard_p.bind(x, names=names), [dim]


shard_p = jax_compat.new_primitive(
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
    ndim = jax.typeof(x).ndim
    if len(names) > ndim:
        raise ShardingError(
            f"{jax_compat.caller_line()}: shard got {len(names)} names {tuple(names)} for an array of {ndim} dimensions"
        )
    return shard_p.bind(x, names=(*names, *[None] * (ndim - len(names))))[0]


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
