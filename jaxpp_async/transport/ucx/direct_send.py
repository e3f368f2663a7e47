"""direct_send: large messages in, written where their receives wait; the sender's side of `direct.py`. On one loop.

It never writes without an OFFER or an ANSWER, never uses a block whose key it has not read, and never writes past a
block's end.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
from collections import deque
from functools import partial
from time import monotonic
from typing import NamedTuple

from jaxpp_async.transport.buffers import Memory
from jaxpp_async.transport.shared import BlockTicket, Board, Neighbour, Placed
from jaxpp_async.transport.ucx import direct_words as words
from jaxpp_async.transport.ucx.links import Link, Transfer
from jaxpp_async.transport.ucx.offers import Offer
from jaxpp_async.transport.ucx.ucp import STATUS_CANCELED, STATUS_OK, STATUS_TRUNCATED

_PATIENCE_S, _MOST_IN_VAIN, _TRY_AGAIN = 1e-3, 3, 32
"""How long a sender in a hurry waits for an offer, how often in a row in vain, and which message after that waits all
the same. A receiver who posts again where a message came is a moment later than a sender who sends again where one
went: then each message would come too early. With 0.2 ms up to every fifth of 1 MiB did."""


_SWEEP_S = 1.0
"""How often a sender, however idle, looks whether blocks that it has mapped are still their owners'."""


class _Wait(NamedTuple):
    """Of a message that is held back: until when for its offer, or for its turn to be written where that has come."""

    until_s: float
    offer: Offer | None = None


class _Copy(NamedTuple):
    transfer: Transfer
    target: Placed  # held: it stays mapped, also when its owner has let go of it meanwhile
    data_tag: int


class Sender:
    """One transport's direct messages to others.

    Args:
        carrier: the transport. loop: on which copies are made. board: where messages are announced, if there is one.
    """

    def __init__(self, carrier: words.Carrier, loop: asyncio.AbstractEventLoop, board: Board | None):
        self._carrier, self._loop, self._board = carrier, loop, board
        self._serials = itertools.count(1)
        self._copies: deque[_Copy] = deque()
        self._written_bytes = 0  # of the first of them
        self._scheduled = False
        self._ended: deque[Transfer] = deque()
        self._waiting: dict[Transfer, _Wait] = {}
        self._filled_bytes = 0  # in this pass of the loop
        self._looking = False
        self._mapped: set[Neighbour] = set()  # whose blocks are mapped here

    @property
    def busy(self) -> bool:
        """Whether offers are looked for, or something is being copied."""
        return bool(self._copies) or bool(self._waiting)

    @property
    def holds_back(self) -> bool:
        """Whether messages wait: what is sent under their tags, however small, has to go behind them."""
        return bool(self._waiting)

    def send(self, transfer: Transfer, hurried: bool) -> bool:
        """Send a large message this way, or any that waiting ones of its tag are ahead of.

        Args:
            hurried: there is nothing to do but wait, so that it may be waited for an offer for a moment.

        Returns:
            False: not possible now; nothing has been sent.
        """
        if self._waiting and any(w.tag == transfer.tag and w.link is transfer.link for w in self._waiting):
            self._hold_back(transfer)
            return True
        if not words.may_be_written(transfer):
            return False
        offer = self._offer_for(transfer)
        if offer is not None and (self._is_full(transfer) or any(wait.offer for wait in self._waiting.values())):
            self._hold_back(transfer, offer)
            return True
        if (offer is not None and self._fill(transfer, offer)) or self._announce(transfer):
            return True
        offers = transfer.link.offers
        if offers is None or not words.may_be_offered(transfer):
            return False
        if not hurried or (offers.in_vain > _MOST_IN_VAIN and offers.in_vain % _TRY_AGAIN):
            offers.in_vain += 1
            return False
        self._hold_back(transfer)
        return True

    def _hold_back(self, transfer: Transfer, offer: Offer | None = None) -> None:
        self._waiting[transfer] = _Wait(monotonic() + _PATIENCE_S, offer)
        self._look_soon()

    def _offer_for(self, transfer: Transfer) -> Offer | None:
        number, offers = transfer.number, transfer.link.offers
        if number is None or offers is None or not words.may_be_offered(transfer):
            return None
        offer = offers.take(transfer.tag, number)
        return offer if offer is not None and offer.ticket.size_bytes == transfer.memory.size_bytes else None

    def _is_full(self, transfer: Transfer) -> bool:
        """Whether a message is written in a later pass of the loop, for enough was in this one."""
        return 0 < self._filled_bytes > words.PIECE_BYTES - transfer.memory.size_bytes

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Look for offers, write what has them, and send what has waited for long enough."""
        self._looking, now_s = False, monotonic()
        ahead: set[tuple[int, int]] = set()  # link and tag of what goes on waiting
        for transfer, wait in list(self._waiting.items()):
            key = (id(transfer.link), transfer.tag)
            # What is told to one may drop others.
            if transfer in self._waiting and (key in ahead or not self._leaves(transfer, wait, now_s)):
                ahead.add(key)
        if self._waiting:
            if not self._filled_bytes:
                os.sched_yield()  # to the receiver, which may be on this core
            self._look_soon()

    def _leaves(self, transfer: Transfer, wait: _Wait, now_s: float) -> bool:
        """Send what waits, if it is time. Returns: whether it was."""
        if transfer.link.failure is not None:
            del self._waiting[transfer]
            self._carrier.finish(transfer, STATUS_CANCELED, 0)
            return True
        is_large = words.may_be_written(transfer)
        offer = wait.offer or (self._offer_for(transfer) if is_large else None)
        if offer is not None and self._is_full(transfer):
            self._waiting[transfer] = wait._replace(offer=offer)
            return False
        if offer is None and now_s < wait.until_s and is_large and words.may_be_offered(transfer):
            return False
        del self._waiting[transfer]
        if offer is not None and self._fill(transfer, offer):
            return True
        if not (is_large and self._announce(transfer)):
            if transfer.link.offers is not None:
                transfer.link.offers.in_vain += is_large and words.may_be_offered(transfer)
            self._carrier.post_own_send(transfer.link, transfer.memory, transfer.tag, transfer)
        return True

    def _fill(self, transfer: Transfer, offer: Offer) -> bool:
        """Write to where a receive waits. False: it cannot be reached, or the link has failed; nothing was sent."""
        memory, link, (serial, ticket) = transfer.memory, transfer.link, offer
        assert link.neighbour is not None
        assert link.offers is not None
        link.offers.in_vain = 0
        try:
            placed = link.neighbour.place(ticket)
        except (OSError, ValueError):
            return False
        ctypes.memmove(placed.address, memory.address, memory.size_bytes)
        placed.mark.value = serial
        if not self._carrier.post_own_send(link, words.EMPTY, transfer.tag, None):
            return False
        self._filled_bytes += memory.size_bytes
        # Told in the loop's next pass: whoever awaits one send after another would wait for no offer otherwise.
        self._ended.append(transfer)
        if len(self._ended) == 1:
            self._loop.call_soon(self._tell_ended)
        return True

    def _tell_ended(self) -> None:
        ended, self._ended, self._filled_bytes = self._ended, deque(), 0
        for transfer in ended:
            self._carrier.finish(transfer, STATUS_OK, 0)
            self._forget_freed(transfer.link)

    def _forget_freed(self, link: Link) -> None:
        if link.neighbour is not None:
            link.neighbour.forget_freed()
            if not self._mapped:
                self._loop.call_later(_SWEEP_S, self._sweep)
            self._mapped.add(link.neighbour)

    def _sweep(self) -> None:
        for neighbour in self._mapped:
            neighbour.forget_freed()
        self._mapped = {neighbour for neighbour in self._mapped if neighbour.has_blocks}
        if self._mapped:
            self._loop.call_later(_SWEEP_S, self._sweep)

    def _announce(self, transfer: Transfer) -> bool:
        """Send a header, if the message is large enough. False: not possible now; nothing has been sent."""
        memory, link = transfer.memory, transfer.link
        if self._board is None or link.neighbour is None or memory.size_bytes < words.ANSWER_BYTES:
            return False
        if not link.neighbour.sees(self._board):
            return False
        serial = next(self._serials)
        row = self._board.announce(serial, transfer.tag | link.sender_bits, memory.size_bytes)
        if row is None:
            return False
        answer = words.memory_with(words.ANSWER.size)
        header = words.memory_with(words.HEADER_BYTES, words.HEADER.pack(self._board.key, serial, memory.size_bytes))
        if not self._carrier.post_own_send(link, header, transfer.tag, None):
            self._board.withdraw(row)
            return False
        tag = words.own_tag(transfer.tag, words.ANSWER_CHANNEL, serial)
        self._carrier.post_own_recv(link, answer, tag, partial(self._hear_answer, transfer, row, serial, answer))
        return True

    def _hear_answer(self, transfer: Transfer, row: int, serial: int, answer: Memory, status: int, length: int) -> None:
        assert self._board is not None
        self._board.withdraw(row)
        if status != STATUS_OK or transfer.link.failure is not None:
            self._carrier.finish(transfer, status or STATUS_CANCELED, 0)
            return
        verdict, descriptor, key, size_bytes = words.ANSWER.unpack(answer.owner)
        is_sound = length == words.ANSWER.size and (verdict != words.WRITE or size_bytes == transfer.memory.size_bytes)
        data_tag = words.own_tag(transfer.tag, words.DATA_CHANNEL, serial)
        if not is_sound or verdict not in (words.REFUSED, words.AS_MESSAGE, words.WRITE):
            self._carrier.finish(transfer, STATUS_TRUNCATED, 0)
        elif verdict == words.REFUSED:
            self._carrier.finish(transfer, STATUS_OK, 0)  # UCX does not tell a sender of wrong sizes either
        elif verdict == words.AS_MESSAGE:
            self._carrier.post_own_send(transfer.link, transfer.memory, data_tag, transfer)
        else:
            self._begin(transfer, data_tag, BlockTicket(descriptor, key, size_bytes))

    def _begin(self, transfer: Transfer, data_tag: int, ticket: BlockTicket) -> None:
        assert transfer.link.neighbour is not None
        try:
            target = transfer.link.neighbour.place(ticket)
        except (OSError, ValueError):
            end = words.memory_with(words.END.size, words.END.pack(words.MESSAGE_FOLLOWS))
            self._carrier.post_own_send(transfer.link, end, data_tag, None)
            self._carrier.post_own_send(transfer.link, transfer.memory, data_tag, transfer)
            return
        self._copies.append(_Copy(transfer, target, data_tag))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._copy_piece)

    def _copy_piece(self) -> None:
        self._scheduled = False
        if not self._copies:
            return
        transfer, target, data_tag = self._copies[0]
        if transfer.link.failure is not None:
            self._end_first(STATUS_CANCELED)
        else:
            memory, start = transfer.memory, self._written_bytes
            size_bytes = min(words.PIECE_BYTES, memory.size_bytes - start)
            ctypes.memmove(target.address + start, memory.address + start, size_bytes)
            self._written_bytes = start + size_bytes
            if self._written_bytes == memory.size_bytes:
                # Told first: whoever waits posts his next send before the transport looks for messages.
                self._end_first(STATUS_OK)
                end = words.memory_with(words.END.size, words.END.pack(words.WRITTEN))
                self._carrier.post_own_send(transfer.link, end, data_tag, None)
        if self._copies and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._copy_piece)

    def _end_first(self, status: int) -> None:
        transfer = self._copies.popleft().transfer
        self._written_bytes = 0
        self._carrier.finish(transfer, status, 0)
        self._forget_freed(transfer.link)

    def drop(self, link: Link) -> None:
        """Copy nothing more for a link: its buffers are their owners' again when this returns."""
        first = self._copies[0] if self._copies else None
        dropped = [copy for copy in self._copies if copy.transfer.link is link]
        waiting = [transfer for transfer in self._waiting if transfer.link is link]
        self._waiting = {transfer: until for transfer, until in self._waiting.items() if transfer.link is not link}
        self._copies = deque(copy for copy in self._copies if copy.transfer.link is not link)
        if first in dropped:
            self._written_bytes = 0
        for transfer in [copy.transfer for copy in dropped] + waiting:
            self._carrier.finish(transfer, STATUS_CANCELED, 0)
        self._tell_ended()
