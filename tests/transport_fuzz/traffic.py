"""Draw what three transports do in one round of the fuzzer. The drawing touches no transport and no clock.

A round depends on its numbers alone, so that it is the same wherever it is performed; how its parts fall
together in time is not in it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from jaxpp_async.transport.base import Peer
from jaxpp_async.transport.ucx.one_copy import MIN_ONE_COPY_BYTES, MIN_RTS_BYTES, PIECE_BYTES, RTS_BYTES

PEERS: tuple[Peer, ...] = (0, 1, 2)
PAIRS = tuple(itertools.permutations(PEERS, 2))

SIZES = (
    *(0, 8, RTS_BYTES, 60_000),
    *(
        MIN_ONE_COPY_BYTES - 1,
        MIN_ONE_COPY_BYTES,
        MIN_ONE_COPY_BYTES,
        MIN_ONE_COPY_BYTES + 1,
        2 * MIN_ONE_COPY_BYTES,
    ),
    *(MIN_RTS_BYTES - 1, MIN_RTS_BYTES, MIN_RTS_BYTES + 1, 2 * PIECE_BYTES + MIN_ONE_COPY_BYTES),
)
"""On both sides of every threshold: of UCX's own protocols, of what is offered, of what is announced by an
RTS."""

_WRITTEN_SIZES = tuple(size for size in SIZES if size <= RTS_BYTES or size >= MIN_RTS_BYTES)
"""What within a host is never a large message of UCX's own, if it is received into a block."""

FURTHEST_START = 2 * MIN_ONE_COPY_BYTES
SOURCE_BYTES = FURTHEST_START + max(SIZES)
_NUM_TAGS = 3
_PAUSES_S = (0.0, 0.0, 0.0005, 0.002)


@dataclass(frozen=True)
class Turn:
    """What a side does before it posts.

    Attributes:
        pause_s: it lets others go first for so long; None: not at all.
        hurry: what it tells its transport; None: nothing.
    """

    pause_s: float | None
    hurry: bool | None


@dataclass(frozen=True)
class Message:
    """One transfer.

    Attributes:
        sequence: of its tag.
        sent_bytes, expected_bytes: what goes out, and what the receive has room for.
        start: where what goes out begins in the sender's data.
        is_overwritten: the sender puts other data into the memory as soon as the send has ended.
        in_block: it is received into shared memory, as actors do it.
        is_cancelled: the receive's future, as soon as there is one.
        before_send, before_receive: see `Turn`.
    """

    sequence: int
    sent_bytes: int
    expected_bytes: int
    start: int
    is_overwritten: bool
    in_block: bool
    is_cancelled: bool
    before_send: Turn
    before_receive: Turn


@dataclass(frozen=True)
class Exchange:
    """Messages from one peer to another, posted by either side in this order."""

    sender: Peer
    receiver: Peer
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Ending:
    """A transport gives up.

    Attributes:
        peer: which one. other: with whom; None: with all.
        is_close: it closes, and another takes its place, instead of an abort. Only with all.
        pause_s: from then to the next ending.
    """

    peer: Peer
    other: Peer | None
    is_close: bool
    pause_s: float

    def covers(self, peer: Peer, other: Peer) -> bool:
        """Whether it ends what `peer` has under way with `other`."""
        return self.peer == peer and self.other in (None, other)


@dataclass(frozen=True)
class Round:
    """From three connected transports to three that are not.

    Attributes:
        unseen: (who, whom): who may not open whose memory, as on another host or of another user.
        bouts: what is posted at the same time, one after the other; each but the last has ended before the
            next.
        is_cut: the endings come into the middle of the last one.
        endings: each transport's abort or closing with all peers, and aborts with one peer alone.
    """

    unseen: frozenset[tuple[Peer, Peer]]
    bouts: tuple[tuple[Exchange, ...], ...]
    is_cut: bool
    endings: tuple[Ending, ...]


def draw_round(rng: random.Random) -> Round:
    """Any round."""
    # Through shared memory, who closes in the middle of UCX's own large messages both ways may leave the
    # other one's abort without an end (UCX 1.21 keeps receives whose sender's worker is gone; not so over
    # TCP). So closings come after all aborts, or where no message is UCX's own.
    all_written = rng.random() < 0.3
    bouts = tuple(_draw_bout(rng, all_written) for _ in range(rng.choice((1, 1, 2, 3, 5))))
    endings = _draw_endings(rng)
    if not all_written:
        endings = tuple(sorted(endings, key=lambda ending: ending.is_close))
    return Round(frozenset() if all_written else _draw_unseen(rng), bouts, rng.random() < 0.5, endings)


def _draw_unseen(rng: random.Random) -> frozenset[tuple[Peer, Peer]]:
    share = rng.choice((0.0, 0.0, 0.0, 0.3, 1.0))
    return frozenset(pair for pair in PAIRS if rng.random() < share)


def _draw_bout(rng: random.Random, all_written: bool) -> tuple[Exchange, ...]:
    wrong = rng.choice((0.0, 0.0, 0.1))
    pairs = [pair for pair in PAIRS if rng.random() < 0.6]
    return tuple(
        Exchange(
            sender, receiver, tuple(_draw_message(rng, wrong, all_written) for _ in range(rng.randint(2, 10)))
        )
        for sender, receiver in pairs
    )


def _draw_message(rng: random.Random, wrong: float, all_written: bool) -> Message:
    sizes = _WRITTEN_SIZES if all_written else SIZES
    size = rng.choice(sizes)
    expected = rng.choice(sizes) if rng.random() < wrong else size
    if size == RTS_BYTES > expected:
        # Cut short, a message of an RTS's size is taken for the RTS of the next one under its tag, if that
        # was announced already. The next one is refused then, and its own receive waits for ever.
        expected = size
    return Message(
        sequence=rng.randrange(_NUM_TAGS),
        sent_bytes=size,
        expected_bytes=expected,
        start=rng.randrange(FURTHEST_START),
        is_overwritten=rng.random() < 0.3,
        in_block=all_written or rng.random() < 0.8,
        is_cancelled=rng.random() < 0.05,
        before_send=_draw_turn(rng),
        before_receive=_draw_turn(rng),
    )


def _draw_turn(rng: random.Random) -> Turn:
    return Turn(
        rng.choice(_PAUSES_S) if rng.random() < 0.3 else None,
        rng.random() < 0.5 if rng.random() < 0.3 else None,
    )


def _draw_endings(rng: random.Random) -> tuple[Ending, ...]:
    endings = [_draw_ending(rng, peer, None) for peer in rng.sample(PEERS, len(PEERS))]
    for peer, other in PAIRS:
        if rng.random() < 0.1:
            endings.insert(rng.randrange(len(endings)), _draw_ending(rng, peer, other))
    return tuple(endings)


def _draw_ending(rng: random.Random, peer: Peer, other: Peer | None) -> Ending:
    is_close = other is None and rng.random() < 0.2
    return Ending(peer, other, is_close, rng.choice((0.0, 0.003)))
