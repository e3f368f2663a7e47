"""Provide memory to receive arrays into, together with JAX arrays that use this memory.

Making a JAX array costs as much as a small task, so an array is made once per receive buffer and not once per
message. On CPUs the array aliases host memory that the transport writes. On other devices the transport
writes into the array's own memory, which JAX's allocator provides. Only the executor knows when nothing reads
the array any more, so its `Drop` command returns the buffer to the pool.
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
    ensure_private,
    join_on_host,
    join_privately,
    join_shards,
    place,
)
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.program.instructions import Aval
from jaxpp_async.transport.base import Memory, memory_of
from jaxpp_async.transport.shared_memory import SharedBlock
from jaxpp_async.transport.ucx.one_copy import MIN_ONE_COPY_BYTES


class ReceiveBuffer:
    """Memory to receive one array into, with the JAX array that uses this memory.

    Attributes:
        layout: the distribution of the array over the devices.
        memory: one flat uint8 array per distinct shard; empty if the memory is on devices.
        pieces: the memory that the transport writes, one per distinct shard.
        array: the JAX array that uses this memory. None if JAX cannot use the memory without copying it; a
            new array is then made for each message.
        replicas: the copies to make between devices once the data has arrived.
    """

    __slots__ = ("_owner", "array", "layout", "memory", "pieces", "replicas")

    def __init__(
        self,
        owner: FreeBuffers,
        layout: Layout,
        pieces: tuple[Memory, ...],
        array: jax.Array | None,
        replicas: tuple[DeviceCopy, ...] = (),
    ):
        self._owner = owner
        self.layout, self.pieces, self.array, self.replicas = layout, pieces, array, replicas
        self.memory = tuple(_bytes_of(piece) for piece in pieces if not piece.on_device)

    @jax_config.with_exact_types
    def copied(self) -> jax.Array:
        """Return an array of the received data that shares no memory with this buffer; call this once all
        data has arrived."""
        layout = self.layout
        shards = layout.views(self.memory)
        if layout.is_whole:
            return place(shards[0], layout)
        if layout.aval.unreduced or not layout.is_on_one_process:
            # no single host array has the data of all devices
            return join_privately(shards, layout)
        whole = join_on_host(shards, layout)
        return ensure_private(jax.device_put(whole, layout.sharding), [whole])

    def give_back(self) -> None:
        """Return this buffer to the pool for later messages. The caller must no longer use its memory or its
        array."""
        self._owner.put_back(self)


class FreeBuffers:
    """The unused receive buffers for arrays of one aval. `reserve` sets the greatest number of unused buffers
    to keep."""

    __slots__ = ("_layout", "_layouts", "_most", "_on_devices", "free")

    def __init__(self, layout: Layout, layouts: Layouts, on_devices: bool):
        self._layout, self._layouts, self._on_devices = layout, layouts, on_devices
        self._most = 0
        self.free: list[ReceiveBuffer] = []

    def reserve(self, count: int) -> None:
        """Allocate receive buffers until at least `count` are unused, and keep up to `count` unused buffers
        from now on (or more, if an earlier call asked for more)."""
        self._most = max(self._most, count)
        while len(self.free) < count:
            self.free.append(self._make())

    def take(self) -> ReceiveBuffer:
        """Return an unused buffer; allocate a new one if there is none."""
        return self.free.pop() if self.free else self._make()

    def put_back(self, buffer: ReceiveBuffer) -> None:
        """Add a buffer to the unused ones. If as many as `reserve` allows are kept already, free the buffer
        instead."""
        if len(self.free) < self._most:
            self.free.append(buffer)

    def _make(self) -> ReceiveBuffer:
        layout = self._layout
        if self._on_devices:
            array = _allocate_on_devices(layout)
            pieces = tuple(device_memories(array, layout))
            return ReceiveBuffer(self, layout, pieces, array, _plan_replicas(array, layout, pieces))
        pieces = tuple(_allocate(layout.shard_bytes(shard)) for shard in layout.shards)
        memory = tuple(_bytes_of(piece) for piece in pieces)
        array = _alias(layout, memory) if self._layouts.devices.is_cpu else None
        return ReceiveBuffer(self, layout, pieces, array)


class ReceivePool:
    """The receive buffers of one process, by aval, which are reused from step to step.

    Args:
        layouts: the distributions of arrays over this process's devices.
        on_devices: whether the transport writes directly into the memory of the devices.
    """

    def __init__(self, layouts: Layouts, *, on_devices: bool = False):
        self._layouts, self._on_devices = layouts, on_devices
        self._buffers: dict[Aval, FreeBuffers] = {}

    def buffers_of(self, aval: Aval) -> FreeBuffers:
        """Return the free buffers for arrays of an aval.

        This is called once per receive when a program is loaded, and not in each step, since hashing an aval
        takes longer than receiving a small array.
        """
        if aval not in self._buffers:
            self._buffers[aval] = FreeBuffers(self._layouts.of(aval), self._layouts, self._on_devices)
        return self._buffers[aval]

    @property
    def free_buffers(self) -> int:
        """The number of unused buffers."""
        return sum(len(buffers.free) for buffers in self._buffers.values())

    @property
    def free_bytes(self) -> int:
        """The total size of the unused buffers in bytes."""
        return sum(aval.size_bytes * len(buffers.free) for aval, buffers in self._buffers.items())


def _allocate(size_bytes: int) -> Memory:
    """Allocate host memory to receive into. Large memory is shared memory, so that a peer on this host can
    write into it."""
    block = SharedBlock.make(size_bytes) if size_bytes >= MIN_ONE_COPY_BYTES else None
    return memory_of(aligned_bytes(size_bytes) if block is None else block, writable=True)


def _bytes_of(memory: Memory) -> np.ndarray:
    owner = memory.owner
    return owner.array if isinstance(owner, SharedBlock) else owner


@jax_config.with_exact_types
def _alias(layout: Layout, memory: tuple[np.ndarray, ...]) -> jax.Array | None:
    """Make an array whose shards use the given memory without copying it.

    Args:
        layout: the distribution of the array over the devices.
        memory: one flat uint8 array per distinct shard; devices that store the same shard use the same
            memory.

    Returns:
        The array, or None if JAX copied any of the memory.
    """
    array = join_shards(layout.views(memory), layout)
    array.block_until_ready()
    starts = [0] * len(layout.devices)
    for shard, part in zip(layout.shards, memory, strict=True):
        for position in shard.positions:
            starts[position] = part.ctypes.data
    if array.nbytes and buffer_addresses(array) != starts:
        return None
    return array


@jax_config.with_exact_types
def _allocate_on_devices(layout: Layout) -> jax.Array:
    """Make an array to receive into, with unspecified contents and with memory of its own on every device."""
    shape = layout.shards[0].part.shape
    parts = [jnp.empty(shape, layout.dtype, device=device) for device in layout.devices]
    array = jax.make_array_from_single_device_arrays(layout.aval.shape, layout.sharding, parts)
    array.block_until_ready()  # JAX first fills the array, which would overwrite received bytes
    return array


def _plan_replicas(array: jax.Array, layout: Layout, pieces: tuple[Memory, ...]) -> tuple[DeviceCopy, ...]:
    """List the copies to make between devices after a receive. A shard that several devices store is received
    on the first of these devices, and then copied to the others."""
    parts, devices = device_parts(array, layout), layout.devices
    copies = []
    for shard, piece in zip(layout.shards, pieces, strict=True):
        first, *others = shard.positions
        for k in others:
            target = parts[k].unsafe_buffer_pointer()
            copies.append(DeviceCopy(target, devices[k], piece.address, devices[first], piece.size_bytes))
    return tuple(copies)
