"""leaves: the leaves of a step's arguments: their types, and host values as they travel and as users get them back.

In: arrays, scalars, keys, `RemoteArray`s. Out: `jax.ShapeDtypeStruct`s, `ValueType`s, numpy arrays. Sends nothing.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxpp_async import jax_compat
from jaxpp_async.arrays import RemoteArray
from jaxpp_async.compiler.avals import value_type
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.pages import page
from jaxpp_async.tracebacks import deliberate

LeafType: TypeAlias = tuple[tuple[int, ...], str, bool]
"""Shape, dtype, whether weakly typed: what a compiled form depends on."""


def shape_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """What a step is traced with for this leaf.

    Raises:
        TypeError: JAX cannot compute with it; the text goes behind the leaf's name.
    """
    if isinstance(leaf, RemoteArray):
        if leaf.value_type.key_impl is None and jax_compat.canonical_dtype(leaf.dtype) != leaf.dtype:
            raise deliberate(
                TypeError(
                    f"is {leaf.dtype}, made where jax_enable_x64 was on, and here it is off; call the step inside "
                    "`with jax.enable_x64(True)`, too, or switch it on for the whole program"
                )
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    if jax_compat.is_in_host_memory(leaf):
        raise deliberate(
            TypeError(
                "lies in host memory (jax.memory.Space.Host, memory_kind='pinned_host'), where actors keep no arrays; "
                "pass it as numpy, or jax.device_put(..., jax.memory.Space.Device)"
            )
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else _host_aval(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def leaf_type(leaf: Any) -> LeafType:
    """The leaf's part of a step's signature.

    Raises:
        TypeError: as `shape_struct`.
    """
    struct = shape_struct(leaf)
    return struct.shape, str(struct.dtype), struct.weak_type


def kind(leaf: Any) -> Any:
    """What says as much of the leaf's type as a step's signature asks, and costs less: leaves of equal kinds have equal
    types, and not the other way round. None: ask for the type.
    """
    cls = type(leaf)
    if cls is RemoteArray:
        return leaf.value_type
    if cls is np.ndarray:
        return leaf.shape, leaf.dtype
    if cls in _SCALARS:
        return cls
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)  # key arrays have none
    return None


_SCALARS = frozenset((bool, int, float, complex))


def travelling_type(leaf: Any) -> ValueType:
    """The leaf's type as it travels.

    Raises:
        TypeError: as `shape_struct`.
    """
    struct = shape_struct(leaf)
    return value_type(jax_compat.ShapedArray(struct.shape, struct.dtype, weak_type=struct.weak_type))


def host_array(leaf: Any) -> np.ndarray:
    """A host value as it travels: C order, JAX's dtype, keys as their data. May share memory with `leaf`.

    Raises:
        TypeError: as `shape_struct`.
    """
    if isinstance(leaf, jax.Array):
        return np.asarray(jax.random.key_data(leaf) if jax_compat.is_key_dtype(leaf.dtype) else leaf)
    struct = shape_struct(leaf)
    return np.ascontiguousarray(np.asarray(leaf, dtype=struct.dtype)).reshape(struct.shape)


def as_user_sees(array: np.ndarray, value_type: ValueType) -> Any:
    """A value that has travelled, as the user gets it: numpy, or a JAX key array."""
    if value_type.key_impl is None:
        return array
    return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=value_type.key_impl)


def _host_aval(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float | complex):
        return jax.typeof(leaf)
    array = np.asarray(leaf)
    if array.dtype.kind in "OUSMm":
        if inspect.isawaitable(leaf):
            raise deliberate(TypeError("is a coroutine or a step under way, and no array: `await` it first"))
        what = f"a {type(leaf).__name__}" + (f" of dtype {array.dtype}" if isinstance(leaf, np.ndarray) else "")
        raise deliberate(
            TypeError(
                f"is {what}, which JAX cannot compute with; "
                + (
                    f"pass a model's arrays only and close over the rest ({page('models.md')})"
                    if callable(leaf)
                    else "make the argument static or leave it out"
                )
            )
        )
    return jax_compat.ShapedArray(array.shape, jax_compat.canonical_dtype(array.dtype))
