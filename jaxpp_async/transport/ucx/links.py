"""Define two classes of the UCX transport: a link to a connected peer, and an operation that UCX has not
finished. Both also provide the texts of their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport.base import SENDER_BITS, SENDER_SHIFT, Memory, OnEnd, Peer
from jaxpp_async.transport.shared_memory import LocalPeer
from jaxpp_async.transport.ucx.offers import LinkOffers
from jaxpp_async.transport.ucx.tag_api import STATUS_CANCELED, STATUS_OK, STATUS_TRUNCATED

SENDING = -1
"""A value for the expected size of a transfer which marks the transfer as a send."""


_COPYING_ROUTES = frozenset({"posix", "sysv", "self", "tcp"})
"""UCX's transports that copy data only while UCX makes progress."""


class UcxLink:
    """The connection to one peer: UCX's endpoint, the reason for a failure, and the peer's process if the
    peer is on this host.

    Args:
        peer: the peer's id.
        endpoint: the endpoint of ucxx.
        local_peer: the peer's process if it is on this host; otherwise None.
        own_bits: the transport's own id as it is stored in tags; see `sender_bits_of`.
        routes: UCX's transports of the endpoint, such as `"posix"` and `"tcp"`.

    Attributes:
        sender_bits: the peer's id as it is stored in tags.
        offers: the peer's offers, which tell where this process may write a message directly into the peer's
            memory. None if the peer is on another host or the link is closed.
        handle: UCX's handle of the endpoint.
        epoch: the epoch (the number of aborts of the whole mesh so far) in the tag of the link's latest
            transfer; None before the first transfer.
        failure: the reason why no transfer can be posted any more; None while transfers can be posted.
        has_received: whether any message from the peer has arrived.
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
        "routes",
        "sender_bits",
    )

    def __init__(
        self,
        peer: Peer,
        endpoint: Any,
        local_peer: LocalPeer | None,
        own_bits: int,
        routes: tuple[str, ...] = (),
    ):
        self.peer, self.endpoint, self.routes = peer, endpoint, routes
        self.local_peer: LocalPeer | None = local_peer
        self.offers = LinkOffers(local_peer.ring, own_bits) if local_peer is not None else None
        self.handle: int = endpoint.handle
        self.sender_bits = sender_bits_of(peer)
        self.epoch: int | None = None
        self.failure: str | None = None
        self.has_received = False

    @property
    def is_moved_by_cpu(self) -> bool:
        """Whether all data of this link is copied by the processor while UCX makes progress, and none by a
        network adapter or a GPU at any time."""
        return bool(self.routes) and _COPYING_ROUTES.issuperset(self.routes)

    def endpoint_error(self, failures: type[Exception]) -> str:
        """Return UCX's reason for having closed the endpoint; "closed" if UCX reports none.

        Args:
            failures: the class of the errors that ucxx raises to report a reason.
        """
        try:
            self.endpoint.raise_on_error()
        except failures as error:
            return str(error)
        return "closed"


class UcxTransfer:
    """An operation that UCX has not finished. This object keeps the operation's memory alive, because UCX
    keeps no reference to it.

    Args:
        link: the link to the peer.
        memory: the memory to send or to receive into.
        size_bytes: the number of bytes expected, or `SENDING` for a send.
        tag: the message's tag.
        done: the callback for the outcome; None for a message of the transport's own one-copy protocol.
        number: the message's position, from 0, among all messages with the same tag on this link. Sender and
            receiver count alike (`offers.MessageNumbers`), so that an offer of memory and its message have
            the same number. None if memory is never offered for the message.

    Attributes:
        then: for an operation of the one-copy protocol, the callback that gets the status and the length when
            the operation has ended; otherwise None.
        request: UCX's request handle; 0 if UCX has refused the operation.
        offer: the serial number of the offer that lets the sender write directly into this receive's memory;
            0 if there is none.
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
        """Return the beginning of an error message, which names the sender, the receiver and the tag.

        Args:
            ours: the transport's own id.
        """
        theirs = self.link.peer
        way = f"{ours} to peer {theirs}" if self.size_bytes == SENDING else f"{theirs} to peer {ours}"
        return f"transfer from peer {way}, tag {self.tag:#x}"

    def error(self, ours: Peer, status: int, length: int, text_of: Callable[[int], str]) -> Exception:
        """Return the error for an operation that has failed or got a message of the wrong size.

        Args:
            ours: the transport's own id.
            status: UCX's status.
            length: the number of bytes that arrived.
            text_of: a function that returns UCX's description of a status.
        """
        if status == STATUS_TRUNCATED and self.size_bytes == SENDING:
            return ProtocolError(
                f"{self.describe(ours)}: the peer gave no valid answer to a large message's header"
            )
        if status in (STATUS_OK, STATUS_TRUNCATED):
            return ProtocolError(f"{self.describe(ours)}: expected {self.size_bytes} bytes, got {length}")
        return self.failed(ours, status, text_of)

    def failed(self, ours: Peer, status: int, text_of: Callable[[int], str]) -> TransferError:
        """Return the error for an operation that UCX refused, cancelled or lost.

        Args:
            ours: the transport's own id.
            status: UCX's status.
            text_of: a function that returns UCX's description of a status.
        """
        cause = self.link.failure or ("UCX canceled it" if status == STATUS_CANCELED else text_of(status))
        return TransferError(f"{self.describe(ours)} failed: {cause}")


def sender_bits_of(peer: Peer) -> int:
    """Return the bits that stand for a peer in the tags that UCX sends: the peer's id plus 1 (ids begin at
    -1), shifted to the sender's position in a tag.

    Raises:
        ValueError: the id does not fit its bits.
    """
    if not -1 <= peer < (1 << SENDER_BITS) - 1:
        raise ValueError(f"peer id {peer} is not between -1 and {(1 << SENDER_BITS) - 2}")
    return (peer + 1) << SENDER_SHIFT
