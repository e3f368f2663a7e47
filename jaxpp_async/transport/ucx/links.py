"""links: what the UCX transport knows of one peer, and of one operation that UCX has not finished; the words of their
errors. Posts nothing and ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport.base import SENDER_BITS, SENDER_SHIFT, Memory, OnEnd, Peer
from jaxpp_async.transport.shared_memory import LocalPeer
from jaxpp_async.transport.ucx.offers import LinkOffers
from jaxpp_async.transport.ucx.tag_api import STATUS_CANCELED, STATUS_OK, STATUS_TRUNCATED

SENDING = -1
"""In the place of the size that is expected."""


class UcxLink:
    """One connected peer: its endpoint, why it ended if it did, and its process if that is on this host."""

    __slots__ = (
        "endpoint",
        "epoch",
        "failure",
        "handle",
        "local_peer",
        "offers",
        "peer",
        "sender_bits",
        "was_heard",
    )

    def __init__(self, peer: Peer, endpoint: Any, local_peer: LocalPeer | None, own_bits: int):
        self.peer, self.endpoint = peer, endpoint
        self.local_peer: LocalPeer | None = local_peer  # None, as `offers`, also once the link is closed
        self.offers = LinkOffers(local_peer.ring, own_bits) if local_peer is not None else None
        self.handle: int = endpoint.handle
        self.sender_bits = sender_bits_of(peer)
        self.epoch: int | None = None  # of its transfers
        self.failure: str | None = None
        self.was_heard = False  # something has come from the peer

    def endpoint_error(self, failures: type[Exception]) -> str:
        """Why UCX has closed the endpoint, in its words, which it raises as one of `failures`."""
        try:
            self.endpoint.raise_on_error()
        except failures as error:
            return str(error)
        return "closed"


class UcxTransfer:
    """An operation that UCX has not finished. Holds the memory: UCX itself keeps no reference.

    Its end is told to `done`, or, for what only the transport itself says, to `then`: status and length.

    Attributes:
        size_bytes: expected, or SENDING.
        number: which message of its tag it is (see `offers.Numbers`), taken when it is posted; None: never offered. A
            send that fails afterwards takes its link along, for the peer counts on.
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
        self.offer = 0  # its serial, for a receive that was offered
        self.then: Callable[[int, int], None] | None = None

    def describe(self, ours: Peer) -> str:
        """From whom to whom, as errors begin; `ours` is this side's id."""
        theirs = self.link.peer
        way = f"{ours} to peer {theirs}" if self.size_bytes == SENDING else f"{theirs} to peer {ours}"
        return f"transfer from peer {way}, tag {self.tag:#x}"

    def error(self, ours: Peer, status: int, length: int, text_of: Callable[[int], str]) -> Exception:
        """What its owner is told of a bad end.

        Args:
            ours: this side's id.
            status: UCX's.
            length: the bytes that came.
            text_of: a status in UCX's words.
        """
        if status == STATUS_TRUNCATED and self.size_bytes == SENDING:
            return ProtocolError(
                f"{self.describe(ours)}: the peer gave no valid answer to a large message's header"
            )
        if status in (STATUS_OK, STATUS_TRUNCATED):
            return ProtocolError(f"{self.describe(ours)}: expected {self.size_bytes} bytes, got {length}")
        return self.failed(ours, status, text_of)

    def failed(self, ours: Peer, status: int, text_of: Callable[[int], str]) -> TransferError:
        """The same, where nothing came: UCX refused it, say."""
        cause = self.link.failure or ("UCX canceled it" if status == STATUS_CANCELED else text_of(status))
        return TransferError(f"{self.describe(ours)} failed: {cause}")


def sender_bits_of(peer: Peer) -> int:
    """A peer's id, at its place in the tag on the wire."""
    if not -1 <= peer < (1 << SENDER_BITS) - 1:
        raise ValueError(f"peer id {peer} is not between -1 and {(1 << SENDER_BITS) - 2}")
    return (peer + 1) << SENDER_SHIFT
