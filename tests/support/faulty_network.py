"""A network in memory that delays messages, loses them, and loses links, as a test says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from jaxpp_async.transport.base import Peer
from jaxpp_async.transport.memory import EAGER_BYTES, MemoryMessage, MemoryNetwork, MemoryTransport

Where: TypeAlias = tuple[Peer, Peer, int, int]
"""A message's sender, receiver, tag and size in bytes, which rules are called with."""


class FaultyNetwork(MemoryNetwork):
    """A `MemoryNetwork` whose attributes tests may set at any time.

    Attributes:
        eager_bytes: the size up to which a send completes immediately; None: every send does.
        delay: returns a message's delay in seconds; None: no delay. Messages of one sender, receiver and tag
            keep their order even if their delays differ.
        drop: returns whether a message is lost; None: none is. The send of a small one completes even so.
    """

    def __init__(
        self,
        *,
        eager_bytes: int | None = EAGER_BYTES,
        delay: Callable[..., float] | None = None,
        drop: Callable[..., bool] | None = None,
    ):
        super().__init__()
        self.eager_bytes, self.delay, self.drop = eager_bytes, delay, drop
        self._under_way: dict[tuple[MemoryTransport, Peer, int], deque[list]] = {}

    def is_eager(self, size_bytes: int) -> bool:
        return self.eager_bytes is None or size_bytes <= self.eager_bytes

    def carry(self, receiver: MemoryTransport, sender: Peer, tag: int, message: MemoryMessage) -> None:
        where: Where = (sender, receiver.peer_id, tag, message.size_bytes)
        if self.drop is not None and self.drop(*where):
            return
        delay_s = self.delay(*where) if self.delay is not None else 0.0
        queue = self._under_way.setdefault((receiver, sender, tag), deque())
        queue.append([message, False])
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self._arrive, receiver, sender, tag, queue[-1])
        else:
            self._arrive(receiver, sender, tag, queue[-1])

    def _arrive(self, receiver: MemoryTransport, sender: Peer, tag: int, entry: list) -> None:
        """Let a message through, and those behind it that have waited for it."""
        entry[1] = True
        queue = self._under_way[receiver, sender, tag]
        while queue and queue[0][1]:
            receiver.accept(sender, tag, queue.popleft()[0])

    def fail_link(self, one: Peer, other: Peer) -> None:
        """End every transfer between two peers with `TransferError`; later transfers fail too until both have
        aborted and connected again."""
        for transport in self._transports.values():
            for here, there in ((one, other), (other, one)):
                if transport.peer_id == here and there in transport._links:
                    transport._links[there].failure = "link lost (injected)"
                    transport._end_transfers(there, "link lost (injected)")
