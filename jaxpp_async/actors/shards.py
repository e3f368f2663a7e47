"""Compute how an array is distributed over a process's devices, and move arrays between host memory and the
devices.

Transfers move each distinct shard once, in the order of the first device of the mesh that stores it. Sender
and receiver have meshes of the same shape and the same `Aval`, so both compute the same list of shards. In an
actor of several processes, each process handles only the shards on its own devices.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpp_async.actors.jax_runtime import Devices
from jaxpp_async.jax_bridge import jax_config, private_api
from jaxpp_async.layout.array_parts import Part, numpy_dtype, parts_of
from jaxpp_async.program.instructions import Aval
from jaxpp_async.transport.base import Memory, memory_of

ALIGNMENT = 64
"""The alignment in bytes of host memory that becomes a CPU device buffer without a copy."""

_SMALL_BYTES = 1 << 16
"""The size in bytes up to which copying an array takes less time than the call that makes the array."""

_PACKED = ("int2", "int4", "uint2", "uint4", "float4", "float6")
"""The dtypes of which a device may store several elements in one byte."""


Put: TypeAlias = Callable[[np.ndarray], jax.Array]


@dataclass(frozen=True, slots=True)
class Shard:
    """One distinct part (slice) of an array that this process stores, possibly on several of its devices.

    Args:
        part: the position of the part in the array, with all devices and processes of the actor that store
            the part.
        positions: the devices of this process that store the part, as indices into `Layout.devices`.
    """

    part: Part
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The distribution of arrays of one aval over the devices of one process.

    Args:
        aval: the aval.
        dtype: the numpy dtype of the arrays.
        sharding: the JAX sharding on the actor's mesh.
        shards: the distinct shards that this process's devices store, in the order of transfer.
        devices: the devices of this process.
        is_on_one_process: whether this process alone has all devices of the actor, and so all of each array.
        is_whole: whether the array is not split, so that its only part is the whole array.
        is_plain: whether arrays can be used as numpy arrays without conversion, because the devices are CPUs
            and each element has the same format as in numpy, with at least one byte.
        size_bytes: the size in bytes of the whole array as a numpy array.
        is_small: whether the array is on a single CPU device and so small that calling `put` takes a
            noticeable share of the time.
        put: puts a host array on the devices; the result may share the memory of the host array.
    """

    aval: Aval
    dtype: np.dtype
    sharding: NamedSharding
    shards: tuple[Shard, ...]
    devices: tuple[Any, ...]
    is_on_one_process: bool
    is_whole: bool
    is_plain: bool
    size_bytes: int
    is_small: bool
    put: Put = field(compare=False, repr=False)

    def shard_bytes(self, shard: Shard) -> int:
        """Return the size in bytes of a shard as a numpy array."""
        return math.prod(shard.part.shape) * self.dtype.itemsize

    def views(self, memory: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return arrays of the shards' dtype and shapes that use the given memory.

        Args:
            memory: one flat uint8 array per distinct shard.
        """
        return [
            data.view(self.dtype).reshape(shard.part.shape)
            for data, shard in zip(memory, self.shards, strict=True)
        ]


class Layouts:
    """A cache of how arrays of each aval are distributed over a process's devices.

    Args:
        devices: the devices of the actor, and which of them belong to this process.

    Attributes:
        of: a function that takes an aval and returns its `Layout`.
    """

    def __init__(self, devices: Devices):
        self.devices = devices
        self.of = lru_cache(maxsize=None)(jax_config.without_transfer_guard(self._layout))

    def same(self, one: Aval, other: Aval) -> bool:
        """Return whether arrays of both avals are distributed in the same way, even if their specs are
        written differently."""
        if (one.shape, one.dtype, one.unreduced) != (other.shape, other.dtype, other.unreduced):
            return False
        return self.of(one).sharding.is_equivalent_to(self.of(other).sharding, len(one.shape))

    def _layout(self, aval: Aval) -> Layout:
        """Compute the layout of an aval.

        Raises:
            ValueError: the spec does not divide the shape, or names an axis that the mesh does not have.
        """
        devices = self.devices
        parts = parts_of(aval, tuple(devices.mesh.shape.items()), devices.size // len(devices.devices))
        first = devices.first
        here = range(first, first + len(devices.devices))
        shards = tuple(
            Shard(part, tuple(position - first for position in part.positions if position in here))
            for part in parts
            if any(position in here for position in part.positions)
        )
        dtype = numpy_dtype(aval.dtype)
        sharding, is_plain = devices.sharding_of(aval), devices.is_cpu and not aval.dtype.startswith(_PACKED)
        size_bytes = math.prod(aval.shape) * dtype.itemsize
        # 64-bit types need a setting of JAX that costs time. For large arrays only the time of the copy
        # matters.
        is_small = is_plain and devices.size == 1 and dtype.itemsize <= 4 and size_bytes <= _SMALL_BYTES
        return Layout(
            aval=aval,
            dtype=dtype,
            sharding=sharding,
            shards=shards,
            devices=devices.devices,
            is_on_one_process=devices.size == len(devices.devices),
            is_whole=len(parts) == 1,
            is_plain=is_plain,
            size_bytes=size_bytes,
            is_small=is_small,
            put=private_api.quick_put(aval.shape, dtype, sharding)
            if is_small
            else jax_config.with_exact_types(partial(jax.device_put, device=sharding)),
        )


# ---------------------------------------------------------------- memory that transports read and write


def send_memories(array: jax.Array, layout: Layout) -> list[Memory]:
    """Return the memory of each distinct shard of an array, for sending from host memory.

    If the array is not split and is stored in numpy's format (`Layout.is_plain`), this is the array's own
    memory, without a copy; for other arrays the shards may be copied. This function waits until the array is
    computed.
    """
    array.block_until_ready()  # asking for an array's address does not wait for its values
    if layout.is_plain and layout.is_whole:
        if len(layout.shards[0].positions) > 1 or not layout.is_on_one_process:
            array = array.addressable_data(0)
        return [Memory(array.unsafe_buffer_pointer(), layout.size_bytes, array)]
    return [memory_of(host_bytes(shard), writable=False) for shard in fetch_shards(array, layout)]


def device_memories(array: jax.Array, layout: Layout) -> list[Memory]:
    """Return the memory of each distinct shard on the first device that stores it, to send it or to receive
    into it.

    The array should be computed already: with some JAX clients this call otherwise blocks until it is.
    """
    parts = device_parts(array, layout)
    return [_device_memory(parts[shard.positions[0]]) for shard in layout.shards]


def device_parts(array: jax.Array, layout: Layout) -> list[jax.Array]:
    """Return the parts of an array on this process's devices as single-device arrays, in the order of the
    devices.

    The single-device arrays share the memory of the array.
    """
    if len(array.sharding.device_set) == 1:
        return [array]
    by_device = {part.device: part.data for part in array.addressable_shards}
    return [by_device[device] for device in layout.devices]


def _device_memory(part: jax.Array) -> Memory:
    # `nbytes` would be wrong, since a device stores two int4 in a byte.
    size_bytes: int = part.on_device_size_in_bytes()  # pyright: ignore[reportAttributeAccessIssue]
    return Memory(part.unsafe_buffer_pointer(), size_bytes, part, on_device=True)


def host_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array in C order as a flat uint8 array, which is a view if the array is
    contiguous.

    Arrays are sent as bytes, since the buffer protocol supports neither bfloat16 nor float8.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# ---------------------------------------------------------------- from devices to the host


def fetch_shards(array: jax.Array, layout: Layout) -> list[np.ndarray]:
    """Return each distinct shard of an array that this process stores as a host array.

    As long as these host arrays exist, JAX does not reuse the memory of the array.
    """
    return [np.asarray(array.addressable_data(shard.positions[0])) for shard in layout.shards]


def start_host_copies(array: jax.Array, layout: Layout) -> list[jax.Array]:
    """Start to copy each distinct shard of an array to host memory, and return the copies, which may not be
    complete yet.

    The array may be donated as soon as this function has returned, since a device does its work in order.
    This function does not block the event loop.
    """
    host = jax.local_devices(backend="cpu")[0]
    return [jax.device_put(array.addressable_data(shard.positions[0]), host) for shard in layout.shards]


def join_on_host(shards: Sequence[Any], layout: Layout) -> np.ndarray:
    """Join a whole array from its distinct shards in host memory. All parts of the array must be on this
    process.

    If the shards are copies that `start_host_copies` has started, this function waits for them. This is used
    instead of `numpy.asarray` of a sharded array, which would cache the result inside the array.

    Args:
        shards: the distinct shards, in the order of `layout.shards`.
        layout: the distribution of the array over the devices.
    """
    if layout.is_whole:
        return np.asarray(shards[0])
    whole = np.empty(layout.aval.shape, layout.dtype)
    for data, shard in zip(shards, layout.shards, strict=True):
        whole[shard.part.index] = data
    return whole


# ---------------------------------------------------------------- from the host to devices


@jax_config.with_exact_types
def join_shards(shards: Sequence[np.ndarray], layout: Layout) -> jax.Array:
    """Make an array on the devices from its distinct shards in host memory. The array may share the memory of
    the shards.

    Args:
        shards: the distinct shards, in the order of `layout.shards`.
        layout: the distribution of the array over the devices.
    """
    by_position = {
        position: data
        for shard, data in zip(layout.shards, shards, strict=True)
        for position in shard.positions
    }
    parts = [jax.device_put(by_position[k], device) for k, device in enumerate(layout.devices)]
    return jax.make_array_from_single_device_arrays(layout.aval.shape, layout.sharding, parts)


def join_privately(shards: Sequence[np.ndarray], layout: Layout) -> jax.Array:
    """Make an array on the devices from its distinct shards in host memory. The array never shares the memory
    of the shards.

    Args:
        shards: the distinct shards, in the order of `layout.shards`.
        layout: the distribution of the array over the devices.
    """
    return ensure_private(join_shards(shards, layout), shards)


@jax_config.without_transfer_guard
def place(host: np.ndarray, layout: Layout) -> jax.Array:
    """Put a whole host array on the devices, and return the resulting JAX array.

    The result shares no memory with `host`, so the result may be donated and `host` may be overwritten.
    """
    if host.nbytes <= _SMALL_BYTES and _address(host) % ALIGNMENT == 0:
        # JAX would use this memory for the result, even with may_alias=False, and one more copy would be
        # needed.
        host = _misaligned_copy(host)
    if layout.is_small:
        return layout.put(host).block_until_ready()
    # For an array on devices of several processes, `put` would make JAX check that all put the same value.
    if not layout.is_on_one_process:
        return ensure_private(join_shards([host[s.part.index] for s in layout.shards], layout), [host])
    return ensure_private(layout.put(host), [host])


def _address(host: np.ndarray) -> int:
    return host.__array_interface__["data"][0]  # `host.ctypes.data` takes three times as long


def _misaligned_copy(host: np.ndarray) -> np.ndarray:
    memory = aligned_bytes(host.nbytes + host.itemsize)[host.itemsize :]
    copy = memory.view(host.dtype).reshape(host.shape)
    copy[...] = host
    return copy


def ensure_private(array: jax.Array, memory: Sequence[np.ndarray]) -> jax.Array:
    """Return an array that shares no memory with the given host memory: `array` itself, or a copy if `array`
    uses that memory."""
    if next(iter(array.sharding.device_set)).platform != "cpu":
        return array  # it is not in host memory; JAX keeps `memory` alive until it has read it
    array.block_until_ready()
    if not any(_lies_in(array, part) for part in memory):
        return array
    copy = duplicate(array)
    copy.block_until_ready()
    return copy


def is_ready(array: jax.Array) -> bool:
    """Return whether an array is computed, without waiting."""
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


@jax_config.with_exact_types
def duplicate(array: jax.Array) -> jax.Array:
    """Return a copy of an array with the same sharding and memory of its own."""
    if array.is_fully_addressable:
        return jax.device_put(array, array.sharding, may_alias=False)
    parts = [jax.device_put(part.data, part.device, may_alias=False) for part in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def aligned_bytes(size_bytes: int) -> np.ndarray:
    """Allocate a flat uint8 array whose memory starts at a multiple of `ALIGNMENT`."""
    memory = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size_bytes]


def buffer_addresses(array: jax.Array) -> list[int]:
    """Return the memory address of each part of an array, one per device of this process that stores a
    part."""
    if len(array.sharding.device_set) == 1:
        # Asking for the parts would make a second array of the same memory, which lives as long as this one.
        return [array.unsafe_buffer_pointer()]
    parts: Any = array.addressable_shards
    return [part.data.unsafe_buffer_pointer() for part in parts]


def count_memory(arrays: Iterable[jax.Array]) -> tuple[int, int]:
    """Return the number of arrays that have memory of their own, and the total size of this memory in bytes.

    An array that is replicated on several devices is counted once, with its size as a numpy array.
    `jax.live_arrays` also lists single-device views, which JAX makes when the part of an array on one device
    is requested. These views have no memory of their own and are not counted.
    """
    whole: dict[tuple[int, ...], int] = {}
    for array in arrays:
        with contextlib.suppress(RuntimeError):  # a run has just consumed the array
            if array.nbytes:
                addresses = tuple(buffer_addresses(array))
                whole[addresses] = max(array.nbytes, whole.get(addresses, 0))
    parts = {address for addresses in whole if len(addresses) > 1 for address in addresses}
    held = [
        size for addresses, size in whole.items() if len(addresses) > 1 or not parts.issuperset(addresses)
    ]
    return len(held), sum(held)


def _lies_in(array: jax.Array, memory: np.ndarray) -> bool:
    if not memory.nbytes:
        return False
    start = memory.ctypes.data
    return any(start <= address < start + memory.nbytes for address in buffer_addresses(array))
