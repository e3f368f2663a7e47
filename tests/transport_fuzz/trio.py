"""Perform a fuzzer's rounds on three UCX transports of one process, and check the contract of transports.

Every transfer ends, with the right bytes or the right error; a send that has ended reads no more; nobody
writes to memory that an abort has given back; and nothing stays under way.
For the last of these there is no public way: `_left` looks into the transport.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import numpy as np
from memory_apart import Buffer, Pool, apart
from traffic import PAIRS, PEERS, SOURCE_BYTES, Ending, Exchange, Message, Round, Turn

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport import shared_memory
from jaxpp_async.transport.base import PROGRAM_CHANNEL, Peer, make_tag
from jaxpp_async.transport.ucx.transport import UCXTransport

STUCK_S = 30.0
"""For what takes milliseconds."""

_MOST_EPOCHS = 60_000
_AFTERWARDS, _OVERWRITTEN = 7, 9
"""Bytes that a receiver finds unchanged after an abort, and that a sender puts into memory that is its own
again."""


class Broken(Exception):
    """A transport did what it never may."""


@dataclass
class Receive:
    """One that was posted, and what it is to get."""

    message: Message
    future: asyncio.Future[None]
    buffer: Buffer
    content: np.ndarray
    is_given_back: bool = False  # by an abort


@dataclass
class UnderWay:
    """What was posted of an exchange."""

    exchange: Exchange
    sends: list[asyncio.Future[None]] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)

    def ended_by(self, ending: Ending) -> tuple[list[asyncio.Future[None]], list[Receive]]:
        """Sends and receives that must have ended by then."""
        sender, receiver = self.exchange.sender, self.exchange.receiver
        sends = self.sends if ending.covers(sender, receiver) else []
        return sends, self.receives if ending.covers(receiver, sender) else []


class Trio:
    """Three transports, made on the running loop.

    Args:
        seed: of the data that they send.

    Attributes:
        tally: what has happened so far, by name.
    """

    def __init__(self, seed: int):
        self.tally: Counter[str] = Counter()
        self._epoch = 0
        self._transports = {peer: UCXTransport(peer) for peer in PEERS}
        self._pool = Pool()
        self._sources = {pair: apart(SOURCE_BYTES) for pair in PAIRS}
        rng = np.random.default_rng(seed)
        for source in self._sources.values():
            source[:] = rng.integers(0, 256, SOURCE_BYTES, dtype=np.uint8)

    async def perform(self, what: Round) -> None:
        """One round, from connecting to aborts.

        Raises:
            Broken: something was not as it has to be.
        """
        self._epoch = self._epoch % _MOST_EPOCHS + 1
        await self._connect(what.unseen)
        num_whole = len(what.bouts) - what.is_cut
        for bout in what.bouts[:num_whole]:
            await self._wait_ended(await self._post(bout))
        cut = [way for bout in what.bouts[num_whole:] for way in await self._post(bout)]
        for receive in _receives(cut):
            self._check_content(receive)
        for ending in what.endings:
            await self._end(ending, cut)
        self._check_ended(cut)
        self.tally["rounds"] += 1

    async def aclose(self) -> None:
        """Close all three."""
        for transport in self._transports.values():
            await transport.aclose()

    # ------------------------------------------------------------ posting

    async def _connect(self, unseen: frozenset[tuple[Peer, Peer]]) -> None:
        for transport in self._transports.values():
            transport.epoch = self._epoch
        addresses = {peer: transport.address for peer, transport in self._transports.items()}
        for who, whom in PAIRS:
            # As in transports' own tests, a peer whose memory cannot be opened seems to be on another host.
            blind = mock.patch.object(shared_memory.LocalPeer, "from_ticket", lambda ticket: None)
            with blind if (who, whom) in unseen else nullcontext():
                await self._transports[who].connect(whom, addresses[whom])

    async def _post(self, bout: Sequence[Exchange]) -> list[UnderWay]:
        posted = [UnderWay(exchange) for exchange in bout]
        async with asyncio.TaskGroup() as sides:
            for one in posted:
                ways = f"peer {one.exchange.sender} to peer {one.exchange.receiver}"
                sides.create_task(self._post_sends(one), name=f"sends from {ways}")
                sides.create_task(self._post_receives(one), name=f"receives from {ways}")
        return posted

    async def _post_sends(self, way: UnderWay) -> None:
        sender, receiver = way.exchange.sender, way.exchange.receiver
        for message in way.exchange.messages:
            await _take_turn(self._transports[sender], message.before_send)
            content = self._content(way.exchange, message)
            buffer = self._pool.take(content.size, in_block=False) if message.is_overwritten else None
            if buffer is not None:
                buffer.array[:] = content
                content = buffer.array
            tag = make_tag(self._epoch, PROGRAM_CHANNEL, message.sequence)
            future = self._transports[sender].send(content, receiver, tag)
            if buffer is not None:
                future.add_done_callback(partial(self._overwrite, buffer))
            way.sends.append(future)

    def _overwrite(self, buffer: Buffer, _: asyncio.Future[None]) -> None:
        buffer.array[:] = _OVERWRITTEN
        self._pool.give(buffer)

    async def _post_receives(self, way: UnderWay) -> None:
        sender, receiver = way.exchange.sender, way.exchange.receiver
        for message in way.exchange.messages:
            await _take_turn(self._transports[receiver], message.before_receive)
            buffer = self._pool.take(message.expected_bytes, message.in_block)
            tag = make_tag(self._epoch, PROGRAM_CHANNEL, message.sequence)
            future = self._transports[receiver].recv(buffer.memory, sender, tag)
            way.receives.append(Receive(message, future, buffer, self._content(way.exchange, message)))
            if message.is_cancelled:
                future.cancel()

    def _content(self, exchange: Exchange, message: Message) -> np.ndarray:
        source = self._sources[exchange.sender, exchange.receiver]
        return source[message.start : message.start + message.sent_bytes]

    # ------------------------------------------------------------ a bout's end

    async def _wait_ended(self, ways: Sequence[UnderWay]) -> None:
        futures = [future for way in ways for future in way.sends] + [one.future for one in _receives(ways)]
        _, pending = await asyncio.wait(futures, timeout=STUCK_S) if futures else (None, ())
        if pending:
            raise Broken(
                f"{len(pending)} of {len(futures)} transfers have not ended in {STUCK_S:.0f} s: {self}"
            )
        for way in ways:
            for future in way.sends:
                if future.exception() is not None:
                    raise Broken(f"a send failed though nothing was aborted: {future.exception()}")
        for receive in _receives(ways):
            self._check_outcome(receive)

    def _check_outcome(self, receive: Receive) -> None:
        if receive.future.cancelled():
            # the transport has its buffer until the message is in, which nothing reports
            self.tally["cancelled"] += 1
            return
        error, message = receive.future.exception(), receive.message
        fits = message.sent_bytes == message.expected_bytes
        if fits == isinstance(error, ProtocolError) or not isinstance(error, ProtocolError | None):
            raise Broken(
                f"expected {message.expected_bytes} bytes of {message.sent_bytes}, and got: {error!r}"
            )
        self._check_content(receive)
        self._pool.give(receive.buffer)

    def _check_content(self, receive: Receive) -> None:
        """Of what has come before anybody gave up."""
        if not receive.future.done() or receive.future.cancelled():
            return
        if receive.future.exception() is not None:
            self.tally["of a wrong size"] += 1
            return
        if not np.array_equal(receive.buffer.array, receive.content):
            raise Broken(f"a message of {receive.content.size} bytes has come with other bytes")
        self.tally["received"] += 1
        self.tally["received where they were offered"] += receive.buffer.was_offered

    # ------------------------------------------------------------ a round's end

    async def _end(self, ending: Ending, ways: Sequence[UnderWay]) -> None:
        transport = self._transports[ending.peer]
        try:
            await (transport.aclose() if ending.is_close else transport.abort(ending.other))
        except TransferError as error:
            raise Broken(f"{ending}: {error}: {self}") from error
        if ending.is_close:
            self._transports[ending.peer] = UCXTransport(ending.peer)
            self.tally["transports made anew"] += 1
        for way in ways:
            sends, receives = way.ended_by(ending)
            if not all(future.done() for future in (*sends, *(receive.future for receive in receives))):
                raise Broken(f"{ending}: it has returned, and transfers have not ended: {self}")
            for receive in receives:
                self._take_back(receive)
        await asyncio.sleep(ending.pause_s)

    def _take_back(self, receive: Receive) -> None:
        if not receive.is_given_back:
            receive.is_given_back = True
            receive.buffer.array[:] = _AFTERWARDS
            error = None if receive.future.cancelled() else receive.future.exception()
            self.tally["aborted"] += isinstance(error, TransferError)

    def _check_ended(self, ways: Sequence[UnderWay]) -> None:
        if any(_left(transport) for transport in self._transports.values()):
            raise Broken(f"all was aborted, and something is under way: {self}")
        for receive in _receives(ways):
            if not np.all(receive.buffer.array == _AFTERWARDS):
                raise Broken(
                    f"memory of a receive of {receive.buffer.array.size} bytes was written after an abort"
                )
            self._pool.give(receive.buffer)

    def __repr__(self) -> str:
        return ", ".join(
            f"{transport} ({_left(transport) or 'idle'})" for transport in self._transports.values()
        )


def _receives(ways: Sequence[UnderWay]) -> list[Receive]:
    return [receive for way in ways for receive in way.receives]


async def _take_turn(transport: UCXTransport, turn: Turn) -> None:
    if turn.pause_s is not None:
        await asyncio.sleep(turn.pause_s)
    if turn.hurry is not None:
        transport.hurry(turn.hurry)


def _left(transport: UCXTransport) -> str:
    """What a transport has under way; empty: nothing."""
    transfers = [f"{way.size_bytes} bytes of {way.memory}" for way in transport._open.values()]
    return ", ".join([*transfers, *["a message of one copy"] * transport._one_copy.busy])
