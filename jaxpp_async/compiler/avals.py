"""compiler.avals: JAX's avals in, `ValueType`s out. Never looks at a value."""

from __future__ import annotations

from typing import Any

from jaxpp_async import explicit, jax_compat
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.program import Aval


def value_type(aval: Any) -> ValueType:
    """The `ValueType` of a JAX aval (sharding is filled in later)."""
    weak, types = bool(getattr(aval, "weak_type", False)), explicit.of(aval)
    on_host = jax_compat.is_host_memory(aval)
    if jax_compat.is_key_dtype(aval.dtype):
        data, impl = Aval(jax_compat.key_data_shape(aval), "uint32"), jax_compat.key_impl(aval.dtype)
        return ValueType(data, impl, weak, types, on_host)
    return ValueType(Aval(tuple(aval.shape), jax_compat.dtype_name(aval.dtype)), None, weak, types, on_host)
