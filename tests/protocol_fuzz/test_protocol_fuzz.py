"""Ten thousand mutated frames against a `Wire`, in every state and role, with and without the keys (case 23).

`make fuzz-protocol` goes on from another seed. A trial that fails names itself: `--seed 1 --only N` runs it
alone.
"""

from __future__ import annotations

import itertools
import random
import struct
import tracemalloc

import msgpack
import pytest
from campaign import Campaign
from conversations import GREETINGS, KNOWN, Conversation, converse, draw, framed
from mutations import bombs

from jaxpp_async.errors import HandshakeError, ProtocolError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol import codec
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.codec import MAX_DEPTH
from jaxpp_async.protocol.frames import _HEADER, MAX_HANDSHAKE_BYTES, TO_ACTOR, TO_CONTROLLER

NUM_FRAMES = 10_000
MIB = 1 << 20


def peak_bytes(work) -> int:
    """The most memory that Python had at one time while `work` ran, above what it had before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_ten_thousand_mutated_frames():
    campaign = Campaign(seed=1)
    tally = campaign.run(0, NUM_FRAMES - 500)
    assert tally.trials == NUM_FRAMES - 500 and tally.slowest_s < 5
    # The last ones under a tracing allocator, which makes them slow.
    assert peak_bytes(lambda: campaign.run(NUM_FRAMES - 500, NUM_FRAMES)) < 16 * MIB
    tried = {end.rpartition(":")[0] for end in tally.ends}
    states = itertools.product(("actor", "controller"), ("greeting", "open", "payload"))
    assert tried == {f"{role} {state}" for role, state in states} | {"controller proving"}
    for where in tried:
        refused, taken = tally.ends[f"{where}: refused"], tally.ends[f"{where}: taken"]
        assert refused > 300 and refused > 5 * taken > 0, where


@pytest.mark.parametrize("known", KNOWN.values(), ids=map("-".join, KNOWN))
def test_every_message_type_is_among_the_frames(known):
    rng = random.Random(0)
    for cls in known.values():
        for _ in range(20):
            message = draw(cls, rng)
            assert codec.decode(codec.encode(message), known) == message


def control() -> Conversation:
    """A conversation of requests and replies."""
    return next(
        c for seed in range(100) if (c := converse(random.Random(seed))).identity.channel == "control"
    )


# ---------------------------------------------------------------- msgpack bombs


@pytest.mark.parametrize("index", range(len(bombs())))
def test_a_bomb_takes_no_memory(index):
    bomb, conversation = bombs()[index], control()

    def as_greeting() -> None:
        for role in ("actor", "controller"):
            wire = conversation.wire(role)
            with pytest.raises(HandshakeError):
                wire.feed(b"jpp2" + struct.pack(">H", len(bomb[:4000])) + bomb[:4000])

    def as_payload() -> None:
        for role in ("actor", "controller"):
            wire = conversation.wire(role)
            wire.take_outgoing()
            for piece in conversation.pieces(role)[: GREETINGS[role]]:
                wire.feed(piece)
            data = framed(conversation.keys[role == "controller"], bomb)
            if b"Log" in bomb and role == "controller" and index == _TWICE:
                assert wire.feed(data) == [m.Log(1, "a", "b", None, {"a": 2})]
                continue
            with pytest.raises(ProtocolError):
                wire.feed(data)

    as_greeting(), as_payload()  # the decoders are made
    assert peak_bytes(as_greeting) < 4 * MIB
    # Bytes to a buffer, to an array of references, and what reads ahead of it.
    assert peak_bytes(as_payload) < 3 * MIB + 16 * len(bomb)


_TWICE = next(i for i, bomb in enumerate(bombs()) if bomb.endswith(b"\x82\xa1a\x01\xa1a\x02"))
"""A key that stands twice is no error: the last one counts, as in a dict."""


@pytest.mark.parametrize("header", [b"\x91", b"\x81\x01"])
def test_plain_values_have_a_depth(header):
    def log(depth: int) -> bytes:
        return b"\x96\xa3Log\x01\xa1a\xa1b\xc0\x81\xa1a" + header * depth + b"\xc0"

    assert codec.decode(log(MAX_DEPTH), TO_CONTROLLER).level == 1
    for depth in (MAX_DEPTH + 1, 200, 490, 510, 900, 1020):
        with pytest.raises(
            ProtocolError, match=f"Log.fields: expected at most {MAX_DEPTH} levels|not msgpack"
        ):
            codec.decode(log(depth), TO_CONTROLLER)


@pytest.mark.parametrize("count", [0, 255, 256, 257, 5000])
def test_long_arrays_are_no_bombs(count):
    frees = tuple(range(count))
    assert codec.decode(codec.encode(m.Store(1, (), frees)), TO_ACTOR) == m.Store(1, (), frees)
    kept = m.ReplicaTaken(1, (m.ReplicaArray(2, Aval((3,), "float32"), (12,)),) * count)
    assert codec.decode(codec.encode(kept), TO_CONTROLLER) == kept


def test_a_long_array_that_is_wrong_is_refused_by_name():
    data = msgpack.packb(["Store", 1, [], [0] * 5000 + ["x"]])
    with pytest.raises(ProtocolError, match=r"Store.frees: expected int, got str"):
        codec.decode(data, TO_ACTOR)
    with pytest.raises(ProtocolError, match="not msgpack"):
        codec.decode(data[:-1], TO_ACTOR)
    with pytest.raises(ProtocolError, match="not msgpack"):
        codec.decode(data + b"\0", TO_ACTOR)


def test_lengths_up_to_2_to_the_64_are_refused_before_a_byte_is_kept():
    conversation = control()
    for role, size in itertools.product(
        ("actor", "controller"), (1 << 20 | 1, 2**31, 2**62, 2**63, 2**64 - 1)
    ):
        wire = conversation.wire(role)
        wire.take_outgoing()
        for piece in conversation.pieces(role)[: GREETINGS[role]]:
            wire.feed(piece)
        header = _HEADER.pack(size, 0)
        with pytest.raises(ProtocolError, match=f"has {size} bytes, at most {1 << 20}"):
            wire.feed(header + conversation.keys[role == "controller"].sign(header))
        assert not wire._buffer
    stranger = conversation.wire("controller")
    with pytest.raises(HandshakeError, match=f"at most {MAX_HANDSHAKE_BYTES}"):
        stranger.feed(b"jpp2\xff\xff")
