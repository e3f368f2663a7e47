"""Keep what the UCX transport knows of a peer and of an unfinished operation, and word their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport.base import SENDER_BITS, SENDER_SHIFT, Memory, OnEnd, Peer
from jaxpp_async.transport.shared_memory import LocalPeer
from jaxpp_async.transport.ucx.offers import LinkOffers
from jaxpp_async.transport.ucx.tag_api import STATUS_CANCELED, STATUS_OK, STATUS_TRUNCATED

SENDING = -1
"""In the place of the expected size, for a send."""


class UcxLink:
    """A connected peer: its endpoint, why the link has ended if it has, and its process if that is on this
    host.

    Args:
        peer: its id.
        endpoint: of ucxx.
        local_peer: its process, if that is on this host.
        own_bits: this side's id, as peers' `sender_bits`.

    Attributes:
        offers: the receives that it offers; None, as `local_peer`, if it is on another host or the link is
            closed.
        handle: UCX's handle of the endpoint.
        epoch: of its transfers, once there was one.
        failure: why nothing can be posted any more; None while something can.
        has_received: whether any message has come from it.
    """

    __slots__ = (
        "endpoint",
        "epoch",
        "failure",
        "handle",
        "has_received",
        "local_peer",
        "offers",
        "peer",
        "sender_bits",
    )

    def __init__(self, peer: Peer, endpoint: Any, local_peer: LocalPeer | None, own_bits: int):
        self.peer, self.endpoint = peer, endpoint
        self.local_peer: LocalPeer | None = local_peer
        self.offers = LinkOffers(local_peer.ring, own_bits) if local_peer is not None else None
        self.handle: int = endpoint.handle
        self.sender_bits = sender_bits_of(peer)
        self.epoch: int | None = None
        self.failure: str | None = None
        self.has_received = False

    def endpoint_error(self, failures: type[Exception]) -> str:
        """Ask UCX why it has closed the endpoint; ucxx raises the answer as one of `failures`."""
        try:
            self.endpoint.raise_on_error()
        except failures as error:
            return str(error)
        return "closed"


class UcxTransfer:
    """An operation that UCX has not finished. It holds the memory: UCX itself keeps no reference.

    Args:
        link: to whose peer. memory: what is sent, or received into. tag: of the message.
        size_bytes: how many bytes are expected, or SENDING.
        done: is called when it has ended; None for a message of the transport's own protocol.
        number: which message of its tag it is (`offers.MessageNumbers`), taken when it is posted; None: never
            offered. A send that fails afterwards takes its link along, for the peer goes on counting.

    Attributes:
        then: called with status and length when an operation of the transport's own protocol has ended.
        request: UCX's, 0 if UCX has refused it.
        offer: the serial of a receive that was offered, else 0.
    """

    __slots__ = ("done", "link", "memory", "number", "offer", "request", "size_bytes", "tag", "then")

    def __init__(
        self,
        link: UcxLink,
        memory: Memory,
        size_bytes: int,
        tag: int,
        done: OnEnd | None,
        number: int | None = None,
    ):
        self.link, self.memory, self.tag, self.done = link, memory, tag, done
        self.size_bytes, self.number = size_bytes, number
        self.request = 0
        self.offer = 0
        self.then: Callable[[int, int], None] | None = None

    def describe(self, ours: Peer) -> str:
        """Name sender, receiver and tag, as errors begin; `ours` is this side's id."""
        theirs = self.link.peer
        way = f"{ours} to peer {theirs}" if self.size_bytes == SENDING else f"{theirs} to peer {ours}"
        return f"transfer from peer {way}, tag {self.tag:#x}"

    def error(self, ours: Peer, status: int, length: int, text_of: Callable[[int], str]) -> Exception:
        """Make the error with which it ends badly.

        Args:
            ours: this side's id.
            status: UCX's.
            length: how many bytes came.
            text_of: gives UCX's words for a status.
        """
        if status == STATUS_TRUNCATED and self.size_bytes == SENDING:
            return ProtocolError(
                f"{self.describe(ours)}: the peer gave no valid answer to a large message's header"
            )
        if status in (STATUS_OK, STATUS_TRUNCATED):
            return ProtocolError(f"{self.describe(ours)}: expected {self.size_bytes} bytes, got {length}")
        return self.failed(ours, status, text_of)

    def failed(self, ours: Peer, status: int, text_of: Callable[[int], str]) -> TransferError:
        """Make the error of an operation that UCX refused, canceled or lost."""
        cause = self.link.failure or ("UCX canceled it" if status == STATUS_CANCELED else text_of(status))
        return TransferError(f"{self.describe(ours)} failed: {cause}")


def sender_bits_of(peer: Peer) -> int:
    """Shift a peer's id, from -1 on, to its place in the tag on the wire.

    Raises:
        ValueError: the id does not fit its bits.
    """
    if not -1 <= peer < (1 << SENDER_BITS) - 1:
        raise ValueError(f"peer id {peer} is not between -1 and {(1 << SENDER_BITS) - 2}")
    return (peer + 1) << SENDER_SHIFT
