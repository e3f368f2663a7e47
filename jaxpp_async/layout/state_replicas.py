"""copies: copies of actors' arrays, as bytes in host memory: an actor's own, and a neighbour's that would outlive it.

Takes them from a transport and gives them to one. Knows no devices, and neither decides what is copied nor when.
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
    """The arrays of one process at one time.

    Args:
        arrays: what they are.
        shards: the bytes of each distinct shard of each array.
    """

    arrays: tuple[ReplicaArray, ...]
    shards: tuple[tuple[Bytes, ...], ...]

    @property
    def size_bytes(self) -> int:
        """Of all of it."""
        return sum(shard.nbytes for shards in self.shards for shard in shards)

    @property
    def _flat(self) -> list[Bytes]:
        return [shard for shards in self.shards for shard in shards]


class ReplicaStore:
    """The copies that one process has, by generation and process."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, ProcessId], StateReplica] = {}

    def put(self, generation: int, of: ProcessId, copy: StateReplica) -> None:
        """Keep a copy."""
        self._copies[generation, of] = copy

    def get(self, generation: int, of: ProcessId) -> StateReplica:
        """A copy.

        Raises:
            ProtocolError: there is none.
        """
        if (generation, of) not in self._copies:
            raise ProtocolError(f"copy {generation} of process {of}'s arrays is not here")
        return self._copies[generation, of]

    def forget(self, generation: int) -> None:
        """Drop all but this generation's."""
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] == generation}

    @property
    def size_bytes(self) -> int:
        """Host memory of all copies."""
        return sum(copy.size_bytes for copy in self._copies.values())

    async def lend(self, transport: Transport, message: SendReplica) -> None:
        """Send a copy to a peer that holds out for it.

        Raises:
            ProtocolError: it is not here. TransferError: the link failed.
        """
        flat = self.get(message.generation, message.owner)._flat
        await _all(
            [
                transport.send(data, message.to, _tag(message.epoch, k))
                for k, data in enumerate(flat)
                if data.nbytes
            ]
        )

    async def hold(self, transport: Transport, message: ReceiveReplica) -> None:
        """Receive a copy from a peer.

        Raises:
            TransferError: the link failed.
        """
        shards = tuple(tuple(np.empty(n, np.uint8) for n in array.shard_bytes) for array in message.arrays)
        copy = StateReplica(message.arrays, shards)
        await _all(
            [
                transport.recv(data, message.source, _tag(message.epoch, k))
                for k, data in enumerate(copy._flat)
                if data.nbytes
            ]
        )
        self.put(message.generation, message.owner, copy)


def holders(hosts: Sequence[Sequence[str]]) -> dict[int, int]:
    """Who holds the copies of whom.

    Args:
        hosts: for each actor, in order of id, the host of each of its processes; at least two actors.

    Returns:
        Actor to holder: one each, by the shift that leaves the fewest pairs on one host: a host may be lost as a whole.
    """
    count = len(hosts)

    def together(shift: int) -> int:
        pairs = [
            pair for k in range(count) for pair in zip(hosts[k], hosts[(k + shift) % count], strict=True)
        ]
        return sum(one == other for one, other in pairs)

    shift = min(range(1, count), key=together)
    return {k: (k + shift) % count for k in range(count)}


def _tag(epoch: int, index: int) -> int:
    return make_tag(epoch, COPY_CHANNEL, index % (1 << SEQUENCE_BITS))


async def _all(transfers: list[asyncio.Future[None]]) -> None:
    """Wait for every transfer, also when one fails: until then the transport owns the memory."""
    if transfers:
        await asyncio.wait(transfers)
    for transfer in transfers:
        transfer.result()
