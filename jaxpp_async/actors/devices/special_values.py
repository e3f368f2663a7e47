"""special_values: keeps for tasks the promise of `jax_debug_nans` and `jax_debug_infs`: an error for a result that has
one, with what the task says of its operations.

JAX itself looks only at the first call of a compiled executable: later ones take a path that checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp_async import jax_config, nonfinite


def call_checked(
    call: Callable[..., Sequence[jax.Array]],
    arguments: Sequence[jax.Array],
    *,
    infs: bool,
    explain: Callable[[], str | None],
) -> Sequence[jax.Array]:
    """Call an executable and look at its results.

    Args:
        infs: look for infinities, if they are asked for; an accumulator of `Max` begins with one.
        explain: says, once `call` has returned, which operation is to blame; None: nobody knows.

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
            kind = _kind(np.asarray(shard.data), nans, infs)
            if kind is not None:
                what = f"invalid value ({kind}) in result {position} ({array.dtype}{list(array.shape)}) of the task"
                raise FloatingPointError(f"{explain() or what}; jax_debug_{kind}s is on")
    return outputs


def _kind(values: np.ndarray, nans: bool, infs: bool) -> str | None:
    if nans and np.isnan(values).any():
        return "nan"
    return "inf" if infs and np.isinf(values).any() else None


class SelfChecked:
    """An executable that also says which of its operations make NaNs or infinities, as one that does not.

    Args:
        call: to the results and, under one name, what was seen.
        places: what it looked at.
        names: of its arguments, the user's; None: it has none.
    """

    __slots__ = ("_call", "_names", "_places", "_seen")

    def __init__(self, call: Callable[..., Any], places: Sequence[str], names: Sequence[str | None]):
        self._call, self._places, self._names = call, places, names
        self._seen: jax.Array | None = None

    def __call__(self, *arguments: jax.Array) -> Sequence[jax.Array]:
        outputs, seen = self._call(*arguments)
        (self._seen,) = seen.values()
        return outputs

    def explain(self) -> str | None:
        """Which operation made the first NaN or infinity of the last call, and which arguments came with one."""
        if self._seen is None:
            return None
        return nonfinite.blame(self._seen.addressable_shards[0].data, self._places, self._names)
