"""direct: large messages between processes of one host, as one copy: the sender writes where the receiver waits.

UCX copies such a message twice, into a queue in shared memory and out of it. Here UCX only carries what is said:

    receiver  OFFER     when it posts a receive: the block to write to, in a ring that the sender reads (`offers.py`)
    sender    (writes)  where it holds the offer for its message
    sender    EMPTY     in place of the message, under its tag; the block says that it is written

A sender may hold no offer, for the receive is not posted yet or has no such block. Where the message is so large that
it is written in pieces, and waiting for an answer costs little beside, it asks:

    sender    HEADER    in place of the message, under its tag: how large it is, and a serial number
    receiver  ANSWER    the block to write to, or "as a message, please", or "that is not the size"
    sender    (writes)  a piece at a time, so that the event loop is never held up for long
    sender    END       it is written, or: the block cannot be reached, a message follows

It holds a smaller one back if it is in a hurry (`Transport.hurry`): for 1 ms at most it looks for the offer in each
pass of its loop, and what is sent under the tag meanwhile waits behind. Where that was in vain a few times, it is done
now and then only. After that, or at once, such a message goes like any other.

Messages whose offers are there are written where they are posted, up to a piece's size in one pass of the loop; any
more wait for the next passes in the same way, and what is sent under their tags behind them.

So messages match in the order of all others, and each side has one operation of UCX's open at any time, which fails as
all do when the peer dies or is aborted. The sender writes only between two passes of its own loop or where it posts,
and `drop` ends it at once; a receiver whose transfer fails puts other memory in the place of what the sender might
still write to, and so does one that was offered in vain.

So that no HEADER comes to who cannot tell it, a sender announces a message by one only to peers whose boards say that
they see its own; the announcement stands on its board too, for a receive that was too short for the HEADER.

The two sides are `direct_send.py` and `direct_receive.py`, with no state in common; what they say stands in
`direct_words.py`. Here is what belongs to both: the board, and neighbours. It never sends, copies or receives itself.
"""

from __future__ import annotations

import asyncio

from jaxpp_async.transport.shared import Board, Neighbour
from jaxpp_async.transport.ucx.direct_receive import Receiver
from jaxpp_async.transport.ucx.direct_send import Sender
from jaxpp_async.transport.ucx.direct_words import Carrier
from jaxpp_async.transport.ucx.links import Link
from jaxpp_async.transport.ucx.offers import OfferRing


class Direct:
    """One transport's direct messages.

    Args:
        carrier: the transport. loop: on which copies are made. own_bits: this side's id, as peers' `sender_bits`.

    Attributes:
        sender, receiver: its two sides.
    """

    def __init__(self, carrier: Carrier, loop: asyncio.AbstractEventLoop, own_bits: int):
        try:
            self._board: Board | None = Board()
        except (OSError, AttributeError):  # not Linux, or nothing to be had: every message goes through UCX
            self._board = None
        self.sender = Sender(carrier, loop, self._board)
        self.receiver = Receiver(carrier, OfferRing(self._board.ring) if self._board is not None else None, own_bits)

    @property
    def ticket(self) -> bytes:
        """For peers, to find out whether they are on this host; empty if that does not help them."""
        return self._board.ticket if self._board is not None else b""

    @property
    def busy(self) -> bool:
        """Whether offers are looked for, or something is being copied, by this side or by a peer. That takes far longer
        than looking for messages may, and looking takes memory bandwidth from whoever copies."""
        return self.sender.busy or self.receiver.num_written > 0

    def meet(self, ticket: bytes) -> Neighbour | None:
        """The process of a peer's ticket, if it is on this host. It is told that it may announce messages."""
        neighbour = Neighbour.of(ticket) if self._board is not None else None
        if self._board is not None and neighbour is not None:
            self._board.see(neighbour)
        return neighbour

    def drop(self, link: Link) -> None:
        """Copy nothing more for a link: its buffers are their owners' again when this returns, and no block of the
        peer's is kept."""
        self.sender.drop(link)
        if self._board is not None and link.neighbour is not None:
            self._board.unsee(link.neighbour)
            link.neighbour.forget()

    def close(self) -> None:
        """Give back what peers could read. Every link has been dropped."""
        if self._board is not None:
            self._board.close()
