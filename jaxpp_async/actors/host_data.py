"""host_data: host values to `Put`s and transfers, and fetched bytes back to numpy. No jax.

Small values ride in control frames; larger ones take the data plane, where the controller is a peer like any actor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxpp_async.actors.messages import INLINE_BYTES, ArrayId, Put
from jaxpp_async.errors import ProtocolError
from jaxpp_async.program import Aval


@dataclass(frozen=True, slots=True, eq=False)
class HostValue:
    """A value to be kept on an actor as `array_id`. Must not change before its step's `wait_sent`."""

    array_id: ArrayId
    aval: Aval
    value: np.ndarray[Any, Any]


def prepare_put(host: HostValue, sequence: int) -> tuple[Put, np.ndarray[Any, Any] | None]:
    """The `Put` for a value, and the bytes to send over the data plane with `sequence`, or None.

    Raises:
        ProtocolError: the value has another size than its aval says.
    """
    array = np.ascontiguousarray(host.value)
    if array.nbytes != host.aval.size_bytes:
        raise ProtocolError(f"array {host.array_id} has {array.nbytes} bytes; {host.aval} has {host.aval.size_bytes}")
    if array.nbytes <= INLINE_BYTES:
        return Put(host.array_id, host.aval, array.tobytes()), None
    return Put(host.array_id, host.aval, None, sequence), array.reshape(-1).view(np.uint8)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """A dtype by the name that `Aval` carries."""
    return np.dtype(getattr(ml_dtypes, name, name))


def from_bytes(data: bytes | np.ndarray[Any, Any], shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """A fetched array.

    Raises:
        ProtocolError: the bytes do not fill the shape.
    """
    kind = numpy_dtype(dtype)
    expected = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if len(data) != expected:
        raise ProtocolError(f"fetched {len(data)} bytes, expected {expected} for {dtype}{list(shape)}")
    if isinstance(data, bytes):
        return np.frombuffer(bytearray(data), dtype=kind).reshape(shape)  # bytearray: users may write to it
    return data.view(kind).reshape(shape)
