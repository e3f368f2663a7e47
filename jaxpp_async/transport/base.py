"""transport.base: the contract that every transport keeps, and the layout of tags. No jax, no I/O.

A transport moves plain buffers between peers. It knows nothing of programs, steps or arrays.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, TypeAlias

Peer: TypeAlias = int
"""An actor's id, or `program.CONTROLLER`."""

EPOCH_BITS, CHANNEL_BITS, SEQUENCE_BITS = 16, 24, 24

PROGRAM_CHANNEL, HOST_CHANNEL = 1, 2
"""Channels: transfers of a program; values between controller and actors."""


def make_tag(epoch: int, channel: int, sequence: int) -> int:
    """Pack a 64-bit tag: epoch 16, channel 24, sequence 24 bits.

    `epoch` changes at every restart and abort, so that a late message of an old life never matches.

    Raises:
        ValueError: a part does not fit its bits.
    """
    for name, part, bits in (
        ("epoch", epoch, EPOCH_BITS),
        ("channel", channel, CHANNEL_BITS),
        ("sequence", sequence, SEQUENCE_BITS),
    ):
        if not 0 <= part < 1 << bits:
            raise ValueError(f"{name} {part} does not fit {bits} bits of a tag")
    return epoch << (CHANNEL_BITS + SEQUENCE_BITS) | channel << SEQUENCE_BITS | sequence


class Transport(Protocol):
    """Awaitable point-to-point transfers on one event loop.

    Every method is called on the loop's thread. Buffers are C-contiguous numpy arrays (or device arrays with
    `__cuda_array_interface__` where the transport can take them); a receive's must be writable. A buffer belongs to
    the transport until its future is done, also after the future was cancelled.

    Messages of one (peer, tag) pair arrive in the order they were sent and match receives in the order they were
    posted. A completed send means "the buffer may be reused", not "delivered".
    """

    @property
    def address(self) -> bytes:
        """What a peer needs to connect here; opaque."""
        ...

    async def connect(self, peer: Peer, address: bytes) -> None:
        """Make `peer` reachable. Both sides connect before either sends."""
        ...

    def send(self, buffer: Any, peer: Peer, tag: int) -> asyncio.Future[None]:
        """Start sending the whole of `buffer`.

        Raises (on the future):
            TransferError: the link failed. ProtocolError: the receiver expected another size.
        """
        ...

    def recv(self, buffer: Any, peer: Peer, tag: int) -> asyncio.Future[None]:
        """Post a receive of exactly `buffer`'s size.

        Raises (on the future):
            TransferError: the link failed or was aborted. ProtocolError: another size arrived.
        """
        ...

    async def abort(self, peer: Peer | None = None) -> None:
        """End every open transfer with `peer` (with all peers: None) with `TransferError`, and forget the peer.

        When it returns, no buffer of those transfers belongs to the transport any more. `connect` works again
        afterwards.
        """
        ...

    async def aclose(self) -> None:
        """Abort everything and give back descriptors and memory. A second call does nothing."""
        ...
