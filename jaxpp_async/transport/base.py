"""transport.base: the contract that every transport keeps, and the layout of tags. No jax, no I/O.

A transport moves plain buffers between peers. It knows nothing of programs, steps or arrays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from jaxpp_async.errors import TransferError

if TYPE_CHECKING:
    from jaxpp_async.transport.buffers import Memory

Peer: TypeAlias = int
"""A process's number in the mesh, or `program.CONTROLLER`."""

OnEnd: TypeAlias = Callable[[Exception | None], object]
"""Told how a posted transfer ended: None, or what a future would have raised. Must not raise."""

Post: TypeAlias = "Callable[[Memory, Peer, int, OnEnd], bool]"
"""`Transport.post_send` or `Transport.post_recv`."""

EPOCH_BITS, SENDER_BITS, CHANNEL_BITS, SEQUENCE_BITS = 16, 16, 8, 24

PROGRAM_CHANNEL, HOST_CHANNEL, COPY_CHANNEL = 1, 2, 3
"""Channels: transfers of a program; values between controller and actors; copies for restarts."""


def make_tag(epoch: int, channel: int, sequence: int) -> int:
    """Pack a 64-bit tag: epoch 16, sender 16 (left zero), channel 8, sequence 24 bits.

    `epoch` changes at every restart and abort, so that a late message of an old life never matches. The sender's bits
    belong to the transport: a medium that matches by tag alone (UCX) tells its peers apart with them.

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
    return epoch << EPOCH_SHIFT | channel << SEQUENCE_BITS | sequence


SENDER_SHIFT = CHANNEL_BITS + SEQUENCE_BITS
EPOCH_SHIFT = SENDER_BITS + SENDER_SHIFT
MISPLACED_TAG_BITS = ~((1 << EPOCH_SHIFT + EPOCH_BITS) - 1) | ((1 << SENDER_BITS) - 1) << SENDER_SHIFT
"""Bits that no tag of `make_tag` has (all of them in a negative number)."""


def check_tag(tag: int) -> None:
    """Raises ValueError for a tag that `make_tag` cannot have made."""
    if tag & MISPLACED_TAG_BITS:
        raise ValueError(f"tag {tag:#x} has bits outside epoch, channel and sequence; make it with make_tag")


class Transport(Protocol):
    """Awaitable point-to-point transfers on one event loop.

    Every method is called on the loop's thread. Buffers are C-contiguous numpy arrays (or device arrays with
    `__cuda_array_interface__` where the transport can take them); a receive's must be writable. A buffer belongs to
    the transport until the transfer has ended, also after its future was cancelled: a cancelled receive stays posted
    and takes its message, and only `abort` and `aclose` end it early. A misused call (a read-only or strided buffer, a
    malformed tag) raises ValueError at once; everything that happens later is raised on the future.

    `send` and `recv` are `post_send` and `post_recv` with a future made for each. Whoever moves thousands of messages a
    second posts: a future costs more than a small message does, and its callbacks run a pass of the loop later.

    Attributes:
        epoch: of the mesh, 0 at first. Whoever made the transport sets it before `address` is read and `connect` is
            called: an address is good in its epoch only, so that one of a transport that is gone is never taken.

    Messages of one (peer, tag) pair arrive in the order they were sent and match receives in the order they were
    posted. A completed send means "the buffer may be reused", not "delivered".
    """

    epoch: int

    @property
    def address(self) -> bytes:
        """What a peer needs to connect here; opaque."""
        ...

    def admit(self, addresses: Iterable[bytes]) -> None:
        """Let the peers of these addresses connect here, and nobody else, where strangers could. Before any connects.

        Raises:
            TransferError: the system does not allow it.
        """
        ...

    async def connect(self, peer: Peer, address: bytes) -> None:
        """Make `peer` reachable. Both sides connect before either sends.

        Raises:
            ValueError: `peer` is this transport itself, or is connected already.
            ProtocolError: `address` is damaged, of another kind of transport, another peer's, or of another epoch.
            TransferError: the medium could not make the link, or the transport has closed.
        """
        ...

    def routes(self, peer: Peer) -> tuple[str, ...]:
        """The ways that it has chosen for messages to and from a connected peer, by the medium's names for them
        (`"posix"`, `"cuda_ipc"`, `"rc_mlx5"`, `"tcp"`), sorted; none if the medium has but one, or does not say."""
        ...

    def send(self, buffer: Any, peer: Peer, tag: int) -> asyncio.Future[None]:
        """Start sending the whole of `buffer`.

        Raises (on the future):
            TransferError: the link failed or was aborted. ProtocolError: the receiver expected another size, where
                the medium tells the sender so (UCX does not: there only the receive fails).
        """
        ...

    def recv(self, buffer: Any, peer: Peer, tag: int) -> asyncio.Future[None]:
        """Post a receive of exactly `buffer`'s size.

        Raises (on the future):
            TransferError: the link failed or was aborted. ProtocolError: another size arrived.
        """
        ...

    def post_send(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        """Start sending the whole of `memory`, without a future.

        Args:
            memory: of `buffers.memory_of`; it belongs to the transport until the transfer has ended.
            done: called exactly once, with None or with what `send` would raise on its future, and only where the
                result is False: on the loop's thread, from the transport's own progress or its `abort`, never inside a
                post call. It may post, and may not wait.

        Returns:
            True: the send has completed already, and `done` is never called.

        Raises:
            TransferError: `peer` is not connected, its link has failed, or the medium refuses. ValueError: a malformed
                tag. `done` is not called then, and the memory is the caller's.
        """
        ...

    def post_recv(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        """Post a receive of exactly `memory`'s size, without a future.

        Args:
            memory: of `memory_of(..., writable=True)`.
            done: as for `post_send`; its error may be a ProtocolError, where another size arrived.

        Returns:
            True: the data is in already, and `done` is never called.

        Raises:
            TransferError, ValueError: as `post_send`.
        """
        ...

    def hurry(self, on: bool) -> None:
        """Say whether the caller has nothing to compute and waits for transfers only. A hint, off at first.

        While it is on, the transport may look for messages for up to a millisecond before the loop sleeps, where that
        has helped lately. And it may hold a large send back for as long, with what follows under its tag, if it can be
        carried faster once the peer has posted the receive. The core is offered to others meanwhile, and the loop's
        other work is not kept waiting.
        """
        ...

    async def abort(self, peer: Peer | None = None) -> None:
        """End every open transfer with `peer` (with all peers: None) with `TransferError`, and forget the peer.

        When it returns, no buffer of those transfers belongs to the transport any more. Memory that another transfer of
        this process has as well, with whichever peer, may be waited for until that ends (UCX does so). `connect` works
        again afterwards, with a new epoch in every tag. After a peer's death, close and make a new transport instead:
        a process that is killed may leave what it shared with this one (UCX's shared-memory queues) beyond repair.

        Raises:
            TransferError: the medium still holds buffers after 5 s. Leave the process; do not reuse the buffers.
        """
        ...

    async def aclose(self) -> None:
        """Abort everything and give back descriptors and memory. A second call does nothing."""
        ...


def post_future(
    loop: asyncio.AbstractEventLoop, post: Post, memory: Memory, peer: Peer, tag: int
) -> asyncio.Future[None]:
    """Post a transfer and return a future of it: what a transport's `send` and `recv` do.

    Every TransferError, also that the peer is not connected, is raised on the future.
    """
    future: asyncio.Future[None] = loop.create_future()

    def done(error: Exception | None) -> None:
        if future.done():  # its await was cancelled
            return
        if error is None:
            future.set_result(None)
            return
        future.set_exception(error)
        if isinstance(error, TransferError):
            future.exception()  # marks it as seen: a failed link ends many transfers, most of which nobody awaits

    try:
        if post(memory, peer, tag, done):
            future.set_result(None)
    except TransferError as error:
        done(error)
    return future
