"""shards: how an array lies on a process's devices, as seen by transfers. Arrays in, host views out and back; no I/O.

Replicas are sent once: a transfer is one message for each distinct shard, in the order in which the mesh's devices
first hold them. Sender and receiver have meshes of one shape and the same `Aval`, so both derive the same list. Of an
actor of several processes each sees the shards on its own devices only.
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
"""Host memory aligned like this becomes a CPU device buffer without a copy."""

_SMALL_BYTES = 1 << 16
"""Copying so much takes less time than making an array."""

_PACKED = ("int2", "int4", "uint2", "uint4", "float4", "float6")
"""Types of which devices may keep several elements in a byte."""


Put: TypeAlias = Callable[[np.ndarray], jax.Array]


@dataclass(frozen=True, slots=True)
class Shard:
    """One distinct part of an array that this process holds.

    Args:
        part: it, as the whole actor sees it.
        positions: the devices of this process that hold it, by their place among these.
    """

    part: Part
    positions: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """Which part of the global array."""
        return self.part.index

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.part.shape


@dataclass(frozen=True, slots=True)
class Layout:
    """An aval on a process's devices: the distinct shards that they hold, in transfer order.

    Args:
        devices: this process's.
        is_here: no other process holds anything of it.
        is_whole: it is not split.
        is_plain: its elements lie in a device's memory as in numpy's: a byte or more each, on a CPU.
        size_bytes: of the whole array in numpy.
        is_small: one device's, on a CPU, and of few bytes: what counts is how quickly `put` returns.
        put: puts a host array there; it may come to share the host's memory.
    """

    aval: Aval
    dtype: np.dtype
    sharding: NamedSharding
    shards: tuple[Shard, ...]
    devices: tuple[Any, ...]
    is_here: bool
    is_whole: bool
    is_plain: bool
    size_bytes: int
    is_small: bool
    put: Put = field(compare=False, repr=False)


class Layouts:
    """Layouts of avals on a process's devices, worked out once each."""

    def __init__(self, devices: Devices):
        self.devices = devices
        self.of = lru_cache(maxsize=None)(jax_config.without_transfer_guard(self._layout))

    def same(self, one: Aval, other: Aval) -> bool:
        """Whether arrays of both lie alike, though their specs may be written differently."""
        if (one.shape, one.dtype, one.unreduced) != (other.shape, other.dtype, other.unreduced):
            return False
        return self.of(one).sharding.is_equivalent_to(self.of(other).sharding, len(one.shape))

    def _layout(self, aval: Aval) -> Layout:
        """The layout of `aval`.

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
        # 64-bit types take a setting that costs time, and of large ones the copy is all that counts.
        is_small = is_plain and devices.size == 1 and dtype.itemsize <= 4 and size_bytes <= _SMALL_BYTES
        return Layout(
            aval=aval,
            dtype=dtype,
            sharding=sharding,
            shards=shards,
            devices=devices.devices,
            is_here=devices.size == len(devices.devices),
            is_whole=len(parts) == 1,
            is_plain=is_plain,
            size_bytes=size_bytes,
            is_small=is_small,
            put=private_api.quick_put(aval.shape, dtype, sharding)
            if is_small
            else jax_config.with_exact_types(partial(jax.device_put, device=sharding)),
        )


def send_views(array: jax.Array, layout: Layout) -> list[np.ndarray]:
    """The bytes of each distinct shard, without copying where the array lies in host memory."""
    return [host_bytes(np.asarray(array.addressable_data(shard.positions[0]))) for shard in layout.shards]


def send_memories(array: jax.Array, layout: Layout) -> list[Memory]:
    """The memory of each distinct shard, to be sent: where it lies, without a copy and without a view being made."""
    array.block_until_ready()  # asking where an array lies does not wait for what is in it
    if layout.is_plain and layout.is_whole:
        if len(layout.shards[0].positions) > 1 or not layout.is_here:
            array = array.addressable_data(0)
        return [Memory(array.unsafe_buffer_pointer(), layout.size_bytes, array)]
    return [memory_of(view, writable=False) for view in send_views(array, layout)]


def device_memories(array: jax.Array, layout: Layout) -> list[Memory]:
    """The memory of each distinct shard on the device that holds it first, to be sent or received into.

    Only of an array that is computed: some of JAX's clients wait here until it is.
    """
    parts = device_parts(array, layout)
    return [_device_memory(parts[shard.positions[0]]) for shard in layout.shards]


def device_parts(array: jax.Array, layout: Layout) -> list[jax.Array]:
    """The part on each of this process's devices, in their order. They share the array's memory."""
    if len(array.sharding.device_set) == 1:
        return [array]
    by_device = {part.device: part.data for part in array.addressable_shards}
    return [by_device[device] for device in layout.devices]


def _device_memory(part: jax.Array) -> Memory:
    # Not `nbytes`: a device keeps two int4 in a byte.
    size_bytes: int = part.on_device_size_in_bytes()  # pyright: ignore[reportAttributeAccessIssue]
    return Memory(part.unsafe_buffer_pointer(), size_bytes, part, on_device=True)


def host_bytes(array: np.ndarray) -> np.ndarray:
    """The array's C-order bytes as a flat uint8 array: a view where it is contiguous. What travels has no dtype, since
    buffer protocols know neither bfloat16 nor float8."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@jax_config.with_exact_types
def joined(parts: Sequence[np.ndarray], layout: Layout) -> jax.Array:
    """An array on the devices from its distinct shards on the host."""
    by_position = {
        position: part
        for shard, part in zip(layout.shards, parts, strict=True)
        for position in shard.positions
    }
    pieces = [jax.device_put(by_position[k], device) for k, device in enumerate(layout.devices)]
    return jax.make_array_from_single_device_arrays(layout.aval.shape, layout.sharding, pieces)


def join_privately(parts: Sequence[np.ndarray], layout: Layout) -> jax.Array:
    """The same, sharing no memory with the parts."""
    return private(joined(parts, layout), parts)


def fetch_pieces(array: jax.Array, layout: Layout) -> list[np.ndarray]:
    """Each distinct shard on the host. While these are held, JAX does not reuse the array's memory."""
    return [np.asarray(array.addressable_data(shard.positions[0])) for shard in layout.shards]


def host_copies(array: jax.Array, layout: Layout) -> list[jax.Array]:
    """Copies of each distinct shard on their way to host memory. The array may be donated at once: a device keeps the
    order of what it was asked, and the event loop does not wait for it."""
    host = jax.local_devices(backend="cpu")[0]
    return [jax.device_put(array.addressable_data(shard.positions[0]), host) for shard in layout.shards]


def hold_pieces(devices: Devices) -> Callable[[jax.Array, Layout], Sequence[Any]]:
    """Takes hold of an array's distinct shards, so that a later step may be given the array."""
    return fetch_pieces if devices.is_cpu else host_copies


def join_pieces(pieces: Sequence[Any], layout: Layout) -> np.ndarray:
    """The whole array from `fetch_pieces`, where all of it is here, or from `host_copies`, which are waited for.
    (`numpy.asarray` of a sharded array would cache the result in the array.)"""
    if layout.is_whole:
        return np.asarray(pieces[0])
    whole = np.empty(layout.aval.shape, layout.dtype)
    for piece, shard in zip(pieces, layout.shards, strict=True):
        whole[shard.index] = piece
    return whole


@jax_config.without_transfer_guard
def place(host: np.ndarray, layout: Layout) -> jax.Array:
    """A (whole) host array on the devices. It shares no memory with `host`: it may be donated, and `host` reused."""
    if host.nbytes <= _SMALL_BYTES and _address(host) % ALIGNMENT == 0:
        # JAX would use this memory itself (also with may_alias=False), and another array would have to be made of it.
        host = _misaligned_copy(host)
    if layout.is_small:
        return layout.put(host).block_until_ready()
    # With devices elsewhere JAX would ask all processes whether they put the same.
    array = (
        layout.put(host) if layout.is_here else joined([host[shard.index] for shard in layout.shards], layout)
    )
    return private(array, [host])


def _address(host: np.ndarray) -> int:
    return host.__array_interface__["data"][0]  # `host.ctypes.data` takes three times as long


def _misaligned_copy(host: np.ndarray) -> np.ndarray:
    memory = aligned_bytes(host.nbytes + host.itemsize)[host.itemsize :]
    copy = memory.view(host.dtype).reshape(host.shape)
    copy[...] = host
    return copy


def private(array: jax.Array, memory: Sequence[np.ndarray]) -> jax.Array:
    """`array` itself if it lies outside all of `memory`, else a copy."""
    if not _is_on_cpu(array):
        return array  # never in host memory; JAX holds on to `memory` until it has read it
    array.block_until_ready()
    if not any(_lies_in(array, part) for part in memory):
        return array
    copy = duplicate(array)
    copy.block_until_ready()
    return copy


def _is_on_cpu(array: jax.Array) -> bool:
    return next(iter(array.sharding.device_set)).platform == "cpu"


def is_ready(array: jax.Array) -> bool:
    """Whether it is computed; does not wait."""
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


@jax_config.with_exact_types
def duplicate(array: jax.Array) -> jax.Array:
    """A copy with the same sharding."""
    if array.is_fully_addressable:
        return jax.device_put(array, array.sharding, may_alias=False)
    parts = [jax.device_put(part.data, part.device, may_alias=False) for part in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def aligned_bytes(size_bytes: int) -> np.ndarray:
    """A flat uint8 array whose memory starts at a multiple of `ALIGNMENT`."""
    memory = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size_bytes]


def buffer_addresses(array: jax.Array) -> list[int]:
    """Where each device's part lies."""
    if len(array.sharding.device_set) == 1:
        # Asking for the parts would make a second array of the same memory and keep it as long as this one.
        return [array.unsafe_buffer_pointer()]
    parts: Any = array.addressable_shards
    return [part.data.unsafe_buffer_pointer() for part in parts]


def memory_held(arrays: Iterable[jax.Array]) -> tuple[int, int]:
    """How many of these arrays have memory of their own, and its bytes, replicas counted once.

    `jax.live_arrays` also lists the views of one device's part that JAX keeps inside an array once somebody has asked
    for it; they hold nothing.
    """
    whole: dict[tuple[int, ...], int] = {}
    for array in arrays:
        with contextlib.suppress(RuntimeError):  # a run has just consumed it
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
