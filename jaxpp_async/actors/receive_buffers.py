"""receive_pool: avals in, memory to receive into and the arrays that lie in it out. No I/O.

Making a JAX array costs as much as a small task, so it is made once for each receive buffer and not once for each
message: on CPUs the array aliases host memory that the transport writes; on other devices the transport writes where
the array lies, in memory of JAX's own allocator. Nobody but the executor knows when no one reads the array any more; it
is the executor's `Drop` that gives a buffer back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_async.actors.cuda import DeviceCopy
from jaxpp_async.actors.shards import (
    Layout,
    Layouts,
    aligned_bytes,
    buffer_addresses,
    device_memories,
    device_parts,
    joined,
    place,
    private,
)
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.program.instructions import Aval
from jaxpp_async.transport.base import Memory, memory_of
from jaxpp_async.transport.shared_memory import SharedBlock
from jaxpp_async.transport.ucx.one_copy import MIN_ONE_COPY_BYTES


class ReceiveBuffer:
    """Memory for one array.

    Attributes:
        layout: how the array lies on the devices.
        memory: a flat uint8 array for each distinct shard; none if it lies on devices.
        pieces: what the transport writes, for each distinct shard.
        array: the array whose memory that is, or None where it cannot be (then each message is copied).
        replicas: what has to be copied between devices once the data is in.
    """

    __slots__ = ("_bin", "array", "layout", "memory", "pieces", "replicas")

    def __init__(
        self,
        owner: FreeBuffers,
        layout: Layout,
        pieces: tuple[Memory, ...],
        array: jax.Array | None,
        replicas: tuple[DeviceCopy, ...] = (),
    ):
        self._bin = owner
        self.layout, self.pieces, self.array, self.replicas = layout, pieces, array, replicas
        self.memory = tuple(_bytes_of(piece) for piece in pieces if not piece.on_device)

    def received(self, *, private_copy: bool) -> jax.Array:
        """The array, now that the data is in.

        Args:
            private_copy: it is to share no memory with this buffer.
        """
        if private_copy or self.array is None:
            return _copied(self)
        return self.array

    def give_back(self) -> None:
        """For the next message; the caller uses neither the memory nor the array any more."""
        self._bin.give(self)


class FreeBuffers:
    """The buffers of one aval that nobody uses: at most as many as were asked for with `reserve`."""

    __slots__ = ("_layout", "_layouts", "_most", "_on_devices", "free")

    def __init__(self, layout: Layout, layouts: Layouts, on_devices: bool):
        self._layout, self._layouts, self._on_devices = layout, layouts, on_devices
        self._most = 0
        self.free: list[ReceiveBuffer] = []

    def reserve(self, count: int) -> None:
        """Allocate so many, unless they are there."""
        self._most = max(self._most, count)
        while len(self.free) < count:
            self.free.append(self._make())

    def take(self) -> ReceiveBuffer:
        """A buffer that nobody uses."""
        return self.free.pop() if self.free else self._make()

    def give(self, buffer: ReceiveBuffer) -> None:
        """Take a buffer back."""
        if len(self.free) < self._most:
            self.free.append(buffer)

    def _make(self) -> ReceiveBuffer:
        layout = self._layout
        if self._on_devices:
            array = _on_devices(layout)
            return ReceiveBuffer(
                self, layout, tuple(device_memories(array, layout)), array, _replicas(array, layout)
            )
        pieces = tuple(_memory(int(np.prod(s.shape)) * layout.dtype.itemsize) for s in layout.shards)
        memory = tuple(_bytes_of(piece) for piece in pieces)
        array = _alias(layout, memory, self._layouts) if self._layouts.devices.is_cpu else None
        return ReceiveBuffer(self, layout, pieces, array)


class ReceivePool:
    """Receive buffers by aval, reused from step to step.

    Args:
        on_devices: the transport writes into the devices' memory.
    """

    def __init__(self, layouts: Layouts, *, on_devices: bool = False):
        self._layouts, self._on_devices = layouts, on_devices
        self._bins: dict[Aval, FreeBuffers] = {}

    def bin(self, aval: Aval) -> FreeBuffers:
        """Where buffers of an aval are. Programs look theirs up once: an aval takes longer to hash than to receive."""
        if aval not in self._bins:
            self._bins[aval] = FreeBuffers(self._layouts.of(aval), self._layouts, self._on_devices)
        return self._bins[aval]

    @property
    def free_buffers(self) -> int:
        """How many buffers lie ready."""
        return sum(len(place.free) for place in self._bins.values())

    @property
    def free_bytes(self) -> int:
        """Their bytes."""
        return sum(aval.size_bytes * len(place.free) for aval, place in self._bins.items())


def _memory(size_bytes: int) -> Memory:
    """Memory to receive into; where it is large, such as a peer on this host can write into itself."""
    block = SharedBlock.make(size_bytes) if size_bytes >= MIN_ONE_COPY_BYTES else None
    return memory_of(aligned_bytes(size_bytes) if block is None else block, writable=True)


def _bytes_of(memory: Memory) -> np.ndarray:
    owner = memory.owner
    return owner.array if isinstance(owner, SharedBlock) else owner


@jax_config.with_exact_types
def _alias(layout: Layout, memory: tuple[np.ndarray, ...], layouts: Layouts) -> jax.Array | None:
    """An array whose shards lie in `memory`, replicas in the same; None if JAX made a copy of any."""
    devices = layout.devices
    parts: dict[int, jax.Array] = {}
    for shard, part in zip(layout.shards, memory, strict=True):
        host = part.view(layout.dtype).reshape(shard.shape)
        for position in shard.positions:
            parts[position] = jax.device_put(host, devices[position])
    array = jax.make_array_from_single_device_arrays(
        layout.aval.shape, layout.sharding, [parts[k] for k in sorted(parts)]
    )
    array.block_until_ready()
    starts = [0] * len(devices)
    for shard, part in zip(layout.shards, memory, strict=True):
        for position in shard.positions:
            starts[position] = part.ctypes.data
    if array.nbytes and buffer_addresses(array) != starts:
        return None
    return array


@jax_config.with_exact_types
def _on_devices(layout: Layout) -> jax.Array:
    """An array of no particular contents, with memory of its own on every device."""
    shape = layout.shards[0].shape
    parts = [jnp.empty(shape, layout.dtype, device=device) for device in layout.devices]
    array = jax.make_array_from_single_device_arrays(layout.aval.shape, layout.sharding, parts)
    array.block_until_ready()  # JAX fills it, and what is written before that would be lost
    return array


def _replicas(array: jax.Array, layout: Layout) -> tuple[DeviceCopy, ...]:
    """Where each distinct shard has to go from the device that receives it."""
    parts, devices = device_parts(array, layout), layout.devices
    copies = []
    for shard, piece in zip(layout.shards, device_memories(array, layout), strict=True):
        first, *others = shard.positions
        for k in others:
            target = parts[k].unsafe_buffer_pointer()
            copies.append(DeviceCopy(target, devices[k], piece.address, devices[first], piece.size_bytes))
    return tuple(copies)


@jax_config.with_exact_types
def _copied(buffer: ReceiveBuffer) -> jax.Array:
    layout = buffer.layout
    if layout.is_whole:
        return place(buffer.memory[0].view(layout.dtype).reshape(layout.aval.shape), layout)
    if layout.aval.unreduced or not layout.is_here:  # no array on the host says what each device has
        parts = [
            m.view(layout.dtype).reshape(s.shape) for m, s in zip(buffer.memory, layout.shards, strict=True)
        ]
        return private(joined(parts, layout), [*buffer.memory])
    whole = np.empty(layout.aval.shape, layout.dtype)
    for shard, part in zip(layout.shards, buffer.memory, strict=True):
        whole[shard.index] = part.view(layout.dtype).reshape(shard.shape)
    return private(jax.device_put(whole, layout.sharding), [whole])
