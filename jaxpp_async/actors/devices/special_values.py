"""special_values: what `jax_debug_nans` and `jax_debug_infs` promise, for tasks. In: a task's results. Out: an error or
nothing.

JAX itself looks only at the first call of a compiled executable: later ones take a path that checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxpp_async import jax_config


def wanted() -> bool:
    """Whether results are to be checked."""
    return jax_config.forbids_nans() or jax_config.forbids_infs()


def call_checked(
    call: Callable[..., Sequence[jax.Array]], arguments: Sequence[jax.Array], *, infs: bool
) -> Sequence[jax.Array]:
    """Call an executable and look at its results.

    Args:
        infs: look for infinities, if they are asked for; an accumulator of `Max` begins with one.

    Raises:
        FloatingPointError: a result has a NaN (or an infinity) and the configuration forbids it.
    """
    nans, infs = jax_config.forbids_nans(), infs and jax_config.forbids_infs()
    # JAX's own check names neither result nor task.
    with jax.debug_nans(False), jax.debug_infs(False):
        outputs = call(*arguments)
    for position, array in enumerate(outputs):
        if not jax.numpy.issubdtype(array.dtype, np.inexact):
            continue
        for shard in array.addressable_shards:
            _check(
                np.asarray(shard.data), f"result {position} ({array.dtype}{list(array.shape)}) of the task", nans, infs
            )
    return outputs


def _check(values: np.ndarray, what: str, nans: bool, infs: bool) -> None:
    if nans and np.isnan(values).any():
        raise FloatingPointError(f"invalid value (nan) in {what}; jax_debug_nans is on")
    if infs and np.isinf(values).any():
        raise FloatingPointError(f"invalid value (inf) in {what}; jax_debug_infs is on")
