"""nonfinite: a jaxpr and arrays in; out: an error for the first operation that makes a NaN or an infinity.

For the loop in plain JAX; tasks on actors are checked by `actors.devices.special_values`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp_async import jax_compat, jax_config, jax_origins


def find_special(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a closed jaxpr on arrays, operation by operation.

    Raises:
        FloatingPointError: one makes a NaN or an infinity that JAX's options forbid; names it and the user's line.
    """
    env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax_compat.Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        operands, inner = [read(a) for a in eqn.invars], jax_compat.inner_jaxpr(eqn)
        results = _looked_at(eqn, operands) if inner is None else find_special(inner, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in closed.jaxpr.outvars]


def _looked_at(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """An equation's results, if none is one that JAX's options forbid."""
    what = None
    try:
        results = jax_compat.bind_eqn(eqn, operands)
        kind = next(filter(None, map(_special, results)), None)  # JAX itself does not look at all of them
        what = kind and f"invalid value ({kind}) encountered in {eqn.primitive.name}"
    except FloatingPointError as error:
        results, what = [], str(error)
    if what:
        raise FloatingPointError(f"{jax_origins.source_line(eqn)}: {what}")
    return results


def _special(value: Any) -> str | None:
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return None
    array = np.asarray(value)
    array = array if array.dtype.kind in "fc" else array.astype(np.float32)
    if jax_config.forbids_nans() and np.isnan(array).any():
        return "nan"
    return "inf" if jax_config.forbids_infs() and np.isinf(array).any() else None
