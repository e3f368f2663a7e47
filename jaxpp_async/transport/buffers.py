"""buffers: a user's buffer in, its `Memory` out, after checking. Never copies.

Accepts numpy arrays of any dtype (bfloat16 and the like too) and device arrays with
`__cuda_array_interface__`. What is not C-contiguous, or read-only where bytes will arrive, is refused: UCX would take
it and write over other memory.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np

from jaxpp_async.transport.shared import SharedBlock

_Start = ctypes.c_char * 0
"""A window of no bytes: enough to read where a buffer starts, whatever its size."""


class Memory(NamedTuple):
    """Bytes that a transport may read or, if they were checked for it, write. Made by `memory_of`.

    Whoever sends or receives from the same buffer again and again keeps one: checking costs more than posting.

    Args:
        address: of the first byte, on the host or on a device.
        size_bytes: how many.
        owner: keeps the bytes alive; the transport holds it for as long as it holds the memory.
        on_device: they are in a GPU's memory, which this process itself cannot read or write.
    """

    address: int
    size_bytes: int
    owner: Any
    on_device: bool = False


def memory_of(buffer: Any, *, writable: bool) -> Memory:
    """The memory of a numpy or device array, or of a shared block, which owns it.

    Args:
        buffer: C-contiguous, of any dtype without references.
        writable: it is to receive.

    Raises:
        ValueError: as `locate`.
    """
    if type(buffer) is SharedBlock:
        return Memory(buffer.address, buffer.size_bytes, buffer)
    address, size_bytes = locate(buffer, writable=writable)
    return Memory(address, size_bytes, buffer, not isinstance(buffer, np.ndarray))


def locate(buffer: Any, *, writable: bool) -> tuple[int, int]:
    """Address and size in bytes of a numpy or device array.

    Raises:
        ValueError: neither of the two, not C-contiguous, or read-only though `writable` is asked.
    """
    if type(buffer) is np.ndarray and not buffer.dtype.hasobject:
        try:
            # A third of the cost of __array_interface__; takes only contiguous, writable arrays of plain dtypes.
            return ctypes.addressof(_Start.from_buffer(buffer)), buffer.nbytes  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError, BufferError):
            pass
    elif (interface := getattr(buffer, "__cuda_array_interface__", None)) is not None:
        return _locate_on_device(interface, writable)
    _check_array(buffer, writable)
    return buffer.__array_interface__["data"][0], buffer.nbytes


def _check_array(buffer: Any, writable: bool) -> None:
    if not isinstance(buffer, np.ndarray):
        raise ValueError(f"a transfer takes numpy or device arrays, not {type(buffer).__name__}; use numpy.asarray")
    if buffer.dtype.hasobject:
        raise ValueError(f"an array of {buffer.dtype} holds references, which mean nothing to a peer")
    if not buffer.flags.c_contiguous:
        raise ValueError(f"{_describe(buffer)} is not C-contiguous; copy it with numpy.ascontiguousarray")
    if writable and not buffer.flags.writeable:
        raise ValueError(f"{_describe(buffer)} is read-only and cannot receive; pass an array that owns its memory")


def _describe(buffer: np.ndarray) -> str:
    return f"array {buffer.dtype}{list(buffer.shape)}"


def _locate_on_device(interface: dict[str, Any], writable: bool) -> tuple[int, int]:
    address, read_only = interface["data"]
    shape, itemsize = interface["shape"], np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    if strides is not None and tuple(strides) != _c_strides(shape, itemsize):
        raise ValueError(f"device array {interface['typestr']}{list(shape)} is not C-contiguous; copy it first")
    if writable and read_only:
        raise ValueError(f"device array {interface['typestr']}{list(shape)} is read-only and cannot receive")
    return address, math.prod(shape) * itemsize


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for length in reversed(shape):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))
