"""relaying: a transfer whose pieces other processes of the actor need as well: each is received, and passed on.

In: where each piece comes from, and who is next. Out: posts to the transport, and an end for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxpp_async.actors.values.crossings import Leg
from jaxpp_async.errors import TransferError
from jaxpp_async.transport.base import OnEnd, Transport
from jaxpp_async.transport.buffers import Memory


@dataclass(frozen=True, slots=True)
class Relay:
    """One transfer's.

    Args:
        transport: carries the pieces.
        tag_base: of the step's tags.
        is_over: whether nobody needs the transfer any more: nothing more is passed on.
        done: is told the end of each receive and of each send. Until all have ended the memory may be read, but neither
            used again nor given away.
    """

    transport: Transport
    tag_base: int
    is_over: Callable[[], bool]
    done: OnEnd

    def receive(self, pieces: Sequence[Memory], legs: Sequence[Leg], relays: Mapping[int, Sequence[Leg]]) -> None:
        """Post the receives.

        Args:
            pieces: the memory of each piece.
            legs: which piece comes from whom.
            relays: to whom a piece goes on, by its index.
        """
        for piece, peer, sequence in legs:
            onwards = relays.get(piece, ())
            told = partial(self._pass_on, pieces[piece], onwards) if onwards else self.done
            if self.transport.post_recv(pieces[piece], peer, self.tag_base + sequence, told):
                told(None)

    def _pass_on(self, memory: Memory, onwards: Sequence[Leg], error: Exception | None) -> None:
        """A piece has come, or will not."""
        if error is None and not self.is_over():
            for _, peer, sequence in onwards:
                try:
                    if self.transport.post_send(memory, peer, self.tag_base + sequence, self.done):
                        self.done(None)
                except TransferError as failure:
                    self.done(failure)
                    return
        self.done(error)
