"""The dtypes that checkpoints hold, and an array of each."""

from __future__ import annotations

import ml_dtypes
import numpy as np

INTEGERS = [f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in ("int", "uint")]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2"]
NATIVE = ["bool", *INTEGERS, *FLOATS]
"""Those that safetensors has a name for."""

AS_BYTES = [
    "complex128",
    "int2",
    "uint2",
    "int4",
    "uint4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
]
"""Those that are stored as bytes."""


def example(dtype: str, shape: tuple[int, ...] = (3, 2)) -> np.ndarray:
    """Return an array of small numbers, 0 and 1 alone where the dtype has no more."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    numbers = (
        np.arange(int(np.prod(shape))).reshape(shape) % 2
        if dtype == "bool"
        else np.arange(int(np.prod(shape)))
    )
    return np.asarray(numbers % 2 if "2" in dtype[-2:] else numbers).reshape(shape).astype(kind)
