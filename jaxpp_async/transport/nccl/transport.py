"""Carry device memory between processes over NCCL.

There is a communicator and a stream for each direction to each peer (`order.py`), made by `join` before the
first step; ids are exchanged by the maker of the transport. On each, transfers go in the program's order
(`begin`); threads call NCCL and wait, the event loop never does (`link_end.py`).

A peer that is gone is no error to NCCL: its kernels look for data for ever. So `abort` ends every
communicator with `ncclCommAbort`, waits until their streams are empty, and only then gives buffers back; a
communicator that NCCL itself reports broken is ended in the same way. NCCL cannot match by tag, complete a
send that nobody receives, or notice that the two ends differ in size: programs are checked for that when they
are loaded (`controller.deploy.links_of`).

NCCL does not say which way it takes (`NCCL_DEBUG=INFO` logs it), and opens its sockets itself. Host values,
replicas and all transfers without an order take the host transport (`registry.TransportKind`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport.base import (
    SEQUENCE_BITS,
    Memory,
    OnEnd,
    Peer,
    TransportBase,
    check_tag,
    seal,
    unseal,
)
from jaxpp_async.transport.nccl.library import NcclFailure, NcclLibrary, load_library
from jaxpp_async.transport.nccl.link_end import LinkEnd, NcclTransfer
from jaxpp_async.transport.nccl.order import NO_TRANSFERS, NcclLink, StepOrder, TransferDirection
from jaxpp_async.transport.network import Network

MEDIUM = "nccl"
"""Names this transport in its addresses."""

JOIN_TIMEOUT_S = 60.0
"""How long one communicator may take. NCCL looks at the machine's whole topology for the first."""

_SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1


class NcclTransport(TransportBase):
    """The `registry.OrderedTransport` contract over NCCL, on the running event loop, but for what NCCL cannot
    do (see above).

    A peer can be reached once it is connected and `join` has made the links to it.

    Args:
        peer_id: this side's id.
        library: NCCL's calls in this process.

    Attributes:
        name: gives the words for a process in the error that a link to it cannot be made.
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
        """The version of NCCL; all ends need the same one."""
        return self._library.version

    @property
    def address(self) -> bytes:
        return seal(MEDIUM, self._library.version.encode("ascii"), self.peer_id, self.epoch)

    async def connect(self, peer: Peer, address: bytes) -> None:
        """Check that `peer` is of this mesh and epoch, and has the same NCCL. Links are made by `join`."""
        self._check_connectable(peer, self._closing is not None, self._peers)
        theirs = unseal(MEDIUM, address, peer, self.epoch).decode("ascii", "replace")
        if theirs != self._library.version:
            raise ProtocolError(
                f"peer {peer} has NCCL {theirs}, peer {self.peer_id} has {self._library.version}; install "
                "the same version of NCCL (nvidia-nccl-cu13 or -cu12) on all hosts"
            )
        self._peers.add(peer)

    def is_connected(self, peer: Peer) -> bool:
        """Whether `connect` has been called for it."""
        return peer in self._peers

    def make_id(self) -> bytes:
        """Make an id for a link whose `maker` this process is. The first one takes long: call it on a thread.

        Raises:
            TransferError: NCCL refused.
        """
        try:
            return self._library.make_id()
        except NcclFailure as error:
            raise TransferError(f"peer {self.peer_id}: NCCL makes no id: {error}") from error

    async def join(self, link: NcclLink, unique_id: bytes, *, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Make this end of a link; the other end does the same meanwhile. Returns when a first message has
        passed.

        Args:
            link: one of this side's.
            unique_id: from the link's `maker`.
            timeout_s: how long the other end may take to come, in seconds.

        Raises:
            ValueError: the link is not this side's, or there is one already.
            TransferError: the peer is not connected, did not come in time, has another id, or NCCL refused.
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
        except asyncio.CancelledError:  # a communicator that nobody waits for is not left behind
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
        """Begin a step: on each link, transfers go in this order from here on, whenever they are posted.

        Posting a transfer that is in no order raises ProtocolError: NCCL would match it with another one.

        Raises:
            TransferError: the program has transfers on a link that was never made.
            ProtocolError: the step before has not posted all of its transfers.
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
    """Make a process's transport; NCCL chooses the network itself. A `registry.Factory`."""
    return NcclTransport(peer_id, load_library())


def _greeting(link: NcclLink, epoch: int) -> int:
    """Make the content of the first message on a link, which differs on every link of every epoch."""
    devices = (link.from_device & 0xFF) << 8 | link.to_device & 0xFF
    return (epoch & 0xFFFF) << 48 | (link.sender & 0xFFFF) << 32 | (link.receiver & 0xFFFF) << 16 | devices
