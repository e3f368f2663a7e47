"""Compute integers that are known while a step is traced, such as the number of a layer in an unrolled scan.

`jnp` computes the position of a row even where the user wrote a number: negative positions are counted from
the end, and a loop over layers counts in its carry. Where all operands are known, so is the result. The
compiler then knows which rows an operation reads, and on which actors they have to live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_MOST_ELEMENTS = 1024
"""The most elements of an array that is computed; positions of layers are few."""


def compute(eqn: Any, operands: Sequence[Any]) -> np.ndarray | None:
    """Return the result of an equation whose operands are known.

    Args:
        eqn: the equation; its primitive is in `FUNCTIONS`.
        operands: the values of its operands.

    Returns:
        The result; None if it is not a small array of integers or booleans, or an operand is not.
    """
    (made,) = eqn.outvars
    aval = made.aval
    if not _is_known_kind(getattr(aval, "dtype", None)) or aval.size > _MOST_ELEMENTS:
        return None
    arrays = [np.asarray(x) for x in operands]
    if not all(_is_known_kind(x.dtype) and x.size <= _MOST_ELEMENTS for x in arrays):
        return None
    with np.errstate(over="ignore"):
        found = FUNCTIONS[eqn.primitive.name](eqn.params, *arrays)
    return None if np.shape(found) != aval.shape else np.asarray(found).astype(aval.dtype)


def _is_known_kind(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "iub"


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *arrays: function(*arrays)


def _select(params: Mapping[str, Any], which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(which.astype(int), cases)


def _iota(params: Mapping[str, Any]) -> np.ndarray | None:
    (length,) = params["shape"] if len(params["shape"]) == 1 else (None,)
    return None if length is None else np.arange(length)


def _broadcast(params: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    shape = params["shape"]
    dims = params["broadcast_dimensions"]
    expanded = x.reshape([x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))])
    return np.broadcast_to(expanded, shape)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _plain(np.add),
    "and": _plain(np.bitwise_and),
    "broadcast_in_dim": _broadcast,
    "clamp": _plain(lambda low, x, high: np.clip(x, low, high)),
    "convert_element_type": _plain(lambda x: x),
    "eq": _plain(np.equal),
    "ge": _plain(np.greater_equal),
    "gt": _plain(np.greater),
    "iota": _iota,
    "le": _plain(np.less_equal),
    "lt": _plain(np.less),
    "max": _plain(np.maximum),
    "min": _plain(np.minimum),
    "mul": _plain(np.multiply),
    "ne": _plain(np.not_equal),
    "neg": _plain(np.negative),
    "or": _plain(np.bitwise_or),
    "rem": _plain(lambda x, y: np.fmod(x, y) if np.all(y) else None),
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "select_n": _select,
    "squeeze": lambda params, x: x.squeeze(tuple(params["dimensions"])),
    "sub": _plain(np.subtract),
}
"""For each primitive, a function of the parameters of an equation and of its operands."""
