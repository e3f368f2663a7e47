"""Carry device memory between processes over NCCL.

For each direction between two devices of different processes there is one link, which is an NCCL communicator
with its own stream (`order.py`). `NcclTransport.join` makes a link before the first step that uses it. The
controller gets the link's id from one end and passes the id to the other end. On each link, transfers go in
the program's order (`NcclTransport.begin`). Threads call NCCL and wait for its calls; the event loop never
does (`link_end.py`).

NCCL does not report that a peer has died, and its kernels wait for data for ever. `abort` therefore ends
every communicator with `ncclCommAbort`, waits until the communicators' streams are empty, and only then gives
buffers back to their owners. A communicator that NCCL itself reports as broken is ended in the same way. NCCL
cannot match messages by tag, complete a send that nobody receives, or notice that the two ends of a transfer
differ in size. Programs are therefore checked for such cases when they are loaded
(`controller.deploy.links_of`).

NCCL does not report which route it uses (but `NCCL_DEBUG=INFO` logs the route), and it opens its sockets
itself. Host values, replicas (copies of the state kept for restarts) and all transfers without an order go
over the host transport (`registry.TransportKind`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport.base import SEQUENCE_BITS, Memory, OnEnd, Peer, Transport, check_tag, seal, unseal
from jaxpp_async.transport.nccl.library import NcclFailure, NcclLibrary, load_library
from jaxpp_async.transport.nccl.link_end import LinkEnd, NcclTransfer
from jaxpp_async.transport.nccl.order import NO_TRANSFERS, NcclLink, StepOrder, TransferDirection
from jaxpp_async.transport.network import Network

MEDIUM = "nccl"
"""The name of this transport in its addresses."""

JOIN_TIMEOUT_S = 60.0
"""The longest time in seconds that making one communicator may take. For the first one NCCL examines the
topology of the whole machine."""

_SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1


class NcclTransport(Transport):
    """A transport over NCCL, on the running event loop, which has to know the order of a program's transfers
    before each step. NCCL cannot match messages by tag, complete a send that nobody receives, or notice that
    sizes differ.

    Transfers with a peer can be posted once the peer is connected and `join` has made the links to it.

    Args:
        peer_id: the transport's own id.
        library: the calls of NCCL in this process.

    Attributes:
        name: a function that returns the name of a process, used in the error message if a link to that
            process cannot be made.
    """

    def __init__(self, peer_id: Peer, library: NcclLibrary):
        super().__init__(peer_id)
        self.name: Callable[[Peer], str] = "peer {}".format
        self._library = library
        self._peers: set[Peer] = set()
        self._ends: dict[NcclLink, LinkEnd] = {}
        self._joined: dict[NcclLink, LinkEnd] = {}
        self._order = StepOrder({}, {})
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        num_open = sum(end.num_open for end in self._ends.values())
        return f"<NcclTransport of peer {self.peer_id}: {len(self._ends)} links, {num_open} open transfers>"

    # ------------------------------------------------------------ connecting

    @property
    def version(self) -> str:
        """The version of NCCL; all processes need the same one."""
        return self._library.version

    @property
    def address(self) -> bytes:
        return seal(MEDIUM, self._library.version.encode("ascii"), self.peer_id, self.epoch)

    async def connect(self, peer: Peer, address: bytes) -> None:
        """Check that `address` is the address of `peer` in this epoch (the number of aborts of the whole mesh
        so far) and that the peer has the same version of NCCL, and remember the peer. Links to the peer are
        made later, by `join`.

        Raises:
            ValueError: `peer` is this transport itself, or is connected already.
            ProtocolError: `address` is not valid (see `unseal`), or the peer's version of NCCL differs.
            TransferError: the transport has closed.
        """
        self._check_connectable(peer, self._closing is not None, self._peers)
        theirs = unseal(MEDIUM, address, peer, self.epoch).decode("ascii", "replace")
        if theirs != self._library.version:
            raise ProtocolError(
                f"peer {peer} has NCCL {theirs}, peer {self.peer_id} has {self._library.version}; install "
                "the same version of NCCL (nvidia-nccl-cu13 or -cu12) on all hosts"
            )
        self._peers.add(peer)

    def is_connected(self, peer: Peer) -> bool:
        """Return whether `connect` has been called for a peer."""
        return peer in self._peers

    def make_id(self) -> bytes:
        """Make the id of a new link whose `maker` is this process. The first call takes long, so call this
        method on a thread other than the event loop's.

        Raises:
            TransferError: NCCL did not make the id.
        """
        try:
            return self._library.make_id()
        except NcclFailure as error:
            raise TransferError(f"peer {self.peer_id}: NCCL makes no id: {error}") from error

    async def join(self, link: NcclLink, unique_id: bytes, *, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Make this process's end of a link, while the peer makes the other end, and return once a first
        message has passed between the two ends.

        Args:
            link: a link of which this process is one end.
            unique_id: the link's id, made by `make_id` on the link's `maker`.
            timeout_s: how long to wait for the other end, in seconds.

        Raises:
            ValueError: the link does not end at this process, or exists already.
            TransferError: the peer is not connected, did not make its end in time, or used another id; or
                NCCL refused to make the link.
        """
        if self.peer_id not in (link.sender, link.receiver):
            raise ValueError(f"the {link} does not end at peer {self.peer_id}")
        if link in self._ends:
            raise ValueError(f"there is a {link} already; abort it before making another")
        peer = link.peer_of(self.peer_id)
        if self._closing or peer not in self._peers:
            raise self._why_unusable(peer, None)
        end = self._ends[link] = LinkEnd(link, self.peer_id)
        try:
            async with asyncio.timeout(timeout_s):
                await end.open(self._library, unique_id, _greeting(link, self.epoch))
        except TimeoutError:
            raise await self._end_failed(
                end, f"{self.name(peer)} did not come within {timeout_s:g} s"
            ) from None
        except NcclFailure as error:
            raise await self._end_failed(end, str(error)) from error
        except asyncio.CancelledError:  # do not leave a communicator behind that nobody waits for
            await self._end_failed(end, "given up")
            raise
        if self._ends.get(link) is not end:  # an abort came after the first message
            raise self._join_error(end)
        self._joined[link] = end

    def _forget(self, end: LinkEnd) -> None:
        for ends in (self._ends, self._joined):
            if ends.get(end.link) is end:
                del ends[end.link]

    async def _end_failed(self, end: LinkEnd, cause: str) -> TransferError:
        await end.end(cause)
        self._forget(end)
        return self._join_error(end)

    def _join_error(self, end: LinkEnd) -> TransferError:
        return TransferError(f"{end.link.text(self.name)} could not be made: {end.failure}")

    # ------------------------------------------------------------ transferring

    def begin(self, order: StepOrder) -> None:
        """Begin a step by setting the order in which its transfers go on each link. The caller may still post
        the transfers in any order.

        From then on, posting a transfer that `order` does not contain raises ProtocolError, because NCCL
        would match the transfer with a different one.

        Args:
            order: the order of this process's transfers in the step.

        Raises:
            TransferError: the step has transfers on a link that was never made.
            ProtocolError: not all transfers of the previous step have been posted.
        """
        for link in order.orders:
            if link not in self._joined:
                raise self._why_unusable(link.peer_of(self.peer_id), None)
        for link, end in self._joined.items():
            end.begin(order.orders.get(link, NO_TRANSFERS))
        self._order = order

    def post_send(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        return self._post(TransferDirection(peer, True), memory, tag, done)

    def post_recv(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        return self._post(TransferDirection(peer, False), memory, tag, done)

    def _post(self, direction: TransferDirection, memory: Memory, tag: int, done: OnEnd) -> bool:
        check_tag(tag)
        sequence = tag & _SEQUENCE_MASK
        links = self._order.links.get(direction)
        link = links.get(sequence) if links else None
        if link is None and any(self._direction_of(joined) == direction for joined in self._joined):
            raise ProtocolError(
                f"a transfer with sequence {sequence} is not one of the program's here: it has no link"
            )
        end = self._joined.get(link) if link else None
        if end is None or end.failure is not None:
            raise self._why_unusable(direction.peer, end)
        end.post(sequence, NcclTransfer(memory, tag, done))
        return False

    def _direction_of(self, link: NcclLink) -> TransferDirection:
        return TransferDirection(link.peer_of(self.peer_id), link.sender == self.peer_id)

    # ------------------------------------------------------------ ending

    async def abort(self, peer: Peer | None = None) -> None:
        ends = [end for end in self._ends.values() if peer is None or end.peer == peer]
        for end in ends:
            self._forget(end)
        self._peers = {other for other in self._peers if peer is not None and other != peer}
        outcomes = await asyncio.gather(*(end.end("aborted") for end in ends), return_exceptions=True)
        failed = [
            (end.num_open, o) for end, o in zip(ends, outcomes, strict=True) if isinstance(o, BaseException)
        ]
        if failed:
            raise max(failed, key=lambda pair: pair[0])[1]

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = self._loop.create_task(self.abort(), name=f"close NCCL of peer {self.peer_id}")
        await asyncio.shield(self._closing)

    def _why_unusable(self, peer: Peer, end: LinkEnd | None) -> TransferError:
        if end is not None:
            why = end.failure
        elif self._closing:
            why = "the transport has closed"
        elif peer in self._peers:
            why = "it has no communicator; call join first"
        else:
            why = "not connected; call connect first"
        return TransferError(f"peer {self.peer_id}, link to peer {peer}: {why}")


def make_transport(peer_id: Peer, network: Network | None, shared: MutableMapping[str, Any]) -> NcclTransport:
    """Make a process's NCCL transport; this is a `registry.Factory`. `network` is ignored, because NCCL
    itself chooses the network."""
    return NcclTransport(peer_id, load_library())


def _greeting(link: NcclLink, epoch: int) -> int:
    """Return the 64-bit content of the first message on a link, which is different for every link and every
    epoch (the epoch counts aborts of the whole mesh)."""
    devices = (link.from_device & 0xFF) << 8 | link.to_device & 0xFF
    return (epoch & 0xFFFF) << 48 | (link.sender & 0xFFFF) << 32 | (link.receiver & 0xFFFF) << 16 | devices
