"""numpy_types: a dtype's name, as `Aval` carries it, in; numpy's dtype out. No jax."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def numpy_dtype(name: str) -> np.dtype[Any]:
    """A dtype by the name that `Aval` carries."""
    return np.dtype(getattr(ml_dtypes, name, name))
