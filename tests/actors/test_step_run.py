"""Direct tests of a transfer whose pieces other processes of the actor need as well."""

from __future__ import annotations

import pytest

from jaxpp_async.actors.step_run import TransferRelay
from jaxpp_async.errors import TransferError
from jaxpp_async.layout.array_parts import PieceTransfer
from jaxpp_async.transport.base import Memory

FIRST, SECOND = Memory(64, 8, None), Memory(128, 8, None)
BASE = 1000


class Wire:
    """A transport that notes what is posted; the test ends each receive.

    Args:
        at_once: whether every transfer has ended already when it is posted.
        refuses: peers to which nothing can be sent.
    """

    def __init__(self, *, at_once: bool = False, refuses: tuple[int, ...] = ()):
        self.at_once, self.refuses = at_once, refuses
        self.receives, self.sends = {}, []

    def post_recv(self, memory, peer, tag, done) -> bool:
        self.receives[tag] = (memory, peer, done)
        return self.at_once

    def post_send(self, memory, peer, tag, done) -> bool:
        if peer in self.refuses:
            raise TransferError(f"peer {peer} is gone")
        self.sends.append((memory, peer, tag))
        if not self.at_once:
            done(None)
        return self.at_once

    def arrive(self, tag: int, error: Exception | None = None) -> None:
        self.receives[tag][2](error)


def relay(wire: Wire, ends: list, *, is_over: bool = False) -> TransferRelay:
    return TransferRelay(wire, BASE, lambda: is_over, ends.append)


def test_each_piece_is_received_with_its_own_tag_into_its_own_memory():
    wire, ends = Wire(), []
    relay(wire, ends).receive([FIRST, SECOND], [PieceTransfer(0, 3, 7), PieceTransfer(1, 4, 8)], {})
    assert {tag: entry[:2] for tag, entry in wire.receives.items()} == {1007: (FIRST, 3), 1008: (SECOND, 4)}
    wire.arrive(1007)
    wire.arrive(1008)
    assert (ends, wire.sends) == ([None, None], [])


@pytest.mark.parametrize("at_once", [False, True])
def test_a_piece_that_others_need_is_passed_on_once_it_has_come(at_once):
    wire, ends = Wire(at_once=at_once), []
    relay(wire, ends).receive(
        [FIRST, SECOND], [PieceTransfer(1, 4, 8)], {1: [PieceTransfer(1, 5, 8), PieceTransfer(1, 6, 8)]}
    )
    if not at_once:
        assert wire.sends == []
        wire.arrive(1008)
    assert wire.sends == [(SECOND, 5, 1008), (SECOND, 6, 1008)]
    assert ends == [None] * 3  # one receive, two sends


def test_a_piece_that_did_not_come_is_not_passed_on():
    wire, ends, error = Wire(), [], TransferError("the link is gone")
    relay(wire, ends).receive([FIRST], [PieceTransfer(0, 3, 7)], {0: [PieceTransfer(0, 5, 7)]})
    wire.arrive(1007, error)
    assert (wire.sends, ends) == ([], [error])


def test_nothing_is_passed_on_once_the_transfer_is_over():
    wire, ends = Wire(), []
    relay(wire, ends, is_over=True).receive([FIRST], [PieceTransfer(0, 3, 7)], {0: [PieceTransfer(0, 5, 7)]})
    wire.arrive(1007)
    assert (wire.sends, ends) == ([], [None])


def test_a_send_that_is_refused_ends_the_transfer_with_its_error():
    wire, ends = Wire(refuses=(6,)), []
    relay(wire, ends).receive(
        [FIRST],
        [PieceTransfer(0, 3, 7)],
        {0: [PieceTransfer(0, 5, 7), PieceTransfer(0, 6, 7), PieceTransfer(0, 8, 7)]},
    )
    wire.arrive(1007)
    assert wire.sends == [(FIRST, 5, 1007)]
    assert [str(end) for end in ends] == ["None", "peer 6 is gone"]
