"""Keep copies of actors' arrays as bytes in host memory, and move these copies between processes.

A process keeps a copy of its own arrays, and one of another actor's arrays, which outlives that actor if it
fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from jaxpp_async.errors import ProtocolError
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.messages import ReceiveReplica, ReplicaArray, SendReplica
from jaxpp_async.transport.base import COPY_CHANNEL, SEQUENCE_BITS, Transport, make_tag

Bytes: TypeAlias = np.ndarray[Any, Any]
"""A flat uint8 array."""


@dataclass(frozen=True, slots=True, eq=False)
class StateReplica:
    """A copy of all arrays of one process, as they were at one time.

    Args:
        arrays: id, aval and sizes of each array.
        shards: the bytes of each distinct shard of each array.
    """

    arrays: tuple[ReplicaArray, ...]
    shards: tuple[tuple[Bytes, ...], ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of the whole copy."""
        return sum(shard.nbytes for shards in self.shards for shard in shards)

    def tagged(self, epoch: int) -> list[tuple[Bytes, int]]:
        """List the shards that have any bytes, each with the wire tag under which it travels in this
        epoch."""
        return [
            (shard, make_tag(epoch, COPY_CHANNEL, k % (1 << SEQUENCE_BITS)))
            for k, shard in enumerate(shard for shards in self.shards for shard in shards)
            if shard.nbytes
        ]


class ReplicaStore:
    """The copies that one process has, its own and those of other processes, by generation and process."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, ProcessId], StateReplica] = {}

    def put(self, generation: int, of: ProcessId, copy: StateReplica) -> None:
        """Keep a copy of a process's arrays."""
        self._copies[generation, of] = copy

    def get(self, generation: int, of: ProcessId) -> StateReplica:
        """Return a copy of a process's arrays.

        Raises:
            ProtocolError: there is no such copy here.
        """
        if (generation, of) not in self._copies:
            raise ProtocolError(f"copy {generation} of process {of}'s arrays is not here")
        return self._copies[generation, of]

    def forget(self, generation: int) -> None:
        """Drop all copies but those of this generation."""
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] == generation}

    @property
    def size_bytes(self) -> int:
        """The bytes of host memory that all copies take."""
        return sum(copy.size_bytes for copy in self._copies.values())

    async def send(self, transport: Transport, message: SendReplica) -> None:
        """Send a copy to a peer that receives it.

        Raises:
            ProtocolError: the copy is not here. TransferError: the link failed.
        """
        copy = self.get(message.generation, message.owner)
        await _finish([transport.send(data, message.to, tag) for data, tag in copy.tagged(message.epoch)])

    async def receive(self, transport: Transport, message: ReceiveReplica) -> None:
        """Receive a copy from a peer, and keep it.

        Raises:
            TransferError: the link failed.
        """
        shards = tuple(tuple(np.empty(n, np.uint8) for n in array.shard_bytes) for array in message.arrays)
        copy = StateReplica(message.arrays, shards)
        await _finish([transport.recv(data, message.source, tag) for data, tag in copy.tagged(message.epoch)])
        self.put(message.generation, message.owner, copy)


def holders(hosts: Sequence[Sequence[str]]) -> dict[int, int]:
    """Choose for each actor another one that holds the copy of its arrays.

    Args:
        hosts: for each actor, in order of id, the host of each of its processes, in order of rank; at least
            two actors.

    Returns:
        Actor to holder. Each actor holds one copy; holders are the actors shifted by the number that leaves
        the fewest pairs on one host, since a host may be lost as a whole.
    """
    count = len(hosts)

    def count_pairs_on_one_host(shift: int) -> int:
        shifted = zip(hosts, [*hosts[shift:], *hosts[:shift]], strict=True)
        return sum(one == other for pair in shifted for one, other in zip(*pair, strict=True))

    shift = min(range(1, count), key=count_pairs_on_one_host)
    return {k: (k + shift) % count for k in range(count)}


async def _finish(transfers: list[asyncio.Future[None]]) -> None:
    """Wait for every transfer, also when one fails: until then the transport owns the memory."""
    if transfers:
        await asyncio.wait(transfers)
    while transfers:  # this frame goes with an error, and must not hold the future that has the error
        transfers.pop(0).result()
