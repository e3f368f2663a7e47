"""Keep copies of actors' arrays in host memory for restarts, and move these copies between processes.

A process keeps a copy of its own arrays and a copy of another actor's arrays. The second copy survives if
that other actor fails.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from jaxpp_async.errors import ProtocolError
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.messages import ReceiveReplica, ReplicaArray, SendReplica
from jaxpp_async.transport.base import COPY_CHANNEL, SEQUENCE_BITS, Transport, make_tag

Bytes: TypeAlias = np.ndarray[Any, Any]
"""A flat uint8 array."""

_SHARD_BITS = 14
"""The bits of a tag's sequence number that tell the shards of a copy apart. The others tell generations
apart. Shards with equal tags are matched in order.
"""


@dataclass(frozen=True, slots=True, eq=False)
class StateReplica:
    """A copy of all arrays of one process, in host memory, from which a restart continues after a failure.

    The copy is made between two requests to the process, so it contains the effects of all earlier requests
    and of no later ones.

    Args:
        arrays: the id, the aval and the shard sizes of each array.
        shards: for each array, the bytes of each of its distinct shards.
    """

    arrays: tuple[ReplicaArray, ...]
    shards: tuple[tuple[Bytes, ...], ...]

    @property
    def size_bytes(self) -> int:
        """The total size of the copy in bytes."""
        return sum(shard.nbytes for shards in self.shards for shard in shards)

    def shards_with_tags(self, epoch: int, generation: int) -> list[tuple[Bytes, int]]:
        """List the nonempty shards of all arrays in the order of sending, each with its wire tag.

        The transport uses the tag to match a send with its receive. If one end of a move fails, the other end
        may stay open until the next epoch. The replica that is made next must not get its bytes, so the tag
        contains the generation.

        Args:
            epoch: the mesh's current epoch, which counts restarts.
            generation: the number of the round of copying to which the copy belongs.
        """
        first = generation << _SHARD_BITS
        return [
            (shard, make_tag(epoch, COPY_CHANNEL, (first | k % (1 << _SHARD_BITS)) % (1 << SEQUENCE_BITS)))
            for k, shard in enumerate(shard for shards in self.shards for shard in shards)
            if shard.nbytes
        ]


class ReplicaStore:
    """A store of the copies of arrays that one process keeps in host memory for restarts.

    A copy is found by its generation and by the process whose arrays were copied. The generation is the
    number of a round of copying: in each round the controller has all processes copy their arrays.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, ProcessId], StateReplica] = {}

    def put(self, generation: int, of: ProcessId, copy: StateReplica) -> None:
        """Keep a copy of a process's arrays; an earlier copy of the same generation and process is replaced.

        Args:
            generation: the number of the round of copying to which the copy belongs.
            of: the process whose arrays were copied.
            copy: the copy to keep.
        """
        self._copies[generation, of] = copy

    def get(self, generation: int, of: ProcessId) -> StateReplica:
        """Return the copy of a process's arrays that was made in one generation (round of copying).

        Args:
            generation: the number of the round of copying.
            of: the process whose arrays were copied.

        Raises:
            ProtocolError: this store does not contain the copy.
        """
        if (generation, of) not in self._copies:
            raise ProtocolError(f"copy {generation} of process {of}'s arrays is not here")
        return self._copies[generation, of]

    def keep_only(self, generation: int) -> None:
        """Drop all copies except those of the given generation (round of copying)."""
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] == generation}

    @property
    def size_bytes(self) -> int:
        """The total size in bytes of all copies in this store."""
        return sum(copy.size_bytes for copy in self._copies.values())

    async def send(self, transport: Transport, message: SendReplica) -> None:
        """Send a copy of arrays to another process, which must call `receive` for the same copy.

        Args:
            transport: carries the bytes.
            message: the controller's request, which names the copy and the receiving process.

        Raises:
            ProtocolError: this store does not contain the copy.
            TransferError: the link failed.
        """
        copy = self.get(message.generation, message.owner)
        await _finish(
            [
                transport.send(data, message.to, tag)
                for data, tag in copy.shards_with_tags(message.epoch, message.generation)
            ]
        )

    async def receive(self, transport: Transport, message: ReceiveReplica) -> None:
        """Receive a copy of arrays from another process, and keep it in this store.

        Args:
            transport: carries the bytes.
            message: the controller's request, which names the copy, the copied arrays and the sending
                process.

        Raises:
            TransferError: the link failed.
        """
        shards = tuple(tuple(np.empty(n, np.uint8) for n in array.shard_bytes) for array in message.arrays)
        copy = StateReplica(message.arrays, shards)
        await _finish(
            [
                transport.recv(data, message.source, tag)
                for data, tag in copy.shards_with_tags(message.epoch, message.generation)
            ]
        )
        self.put(message.generation, message.owner, copy)


async def _finish(transfers: list[asyncio.Future[None]]) -> None:
    """Wait until every transfer has ended, even if one fails; then raise the first error, if there was one.

    This protects the memory of a transfer, which the transport uses until the transfer has ended.
    """
    if transfers:
        await asyncio.wait(transfers)
    while transfers:  # emptied, since an error refers to this frame and would form a cycle with its future
        transfers.pop(0).result()
