"""Ten thousand mutated frames against a `Wire`, in every state and role, with and without the keys (case 23).

`make fuzz-protocol` goes on from another seed. A trial that fails names itself: `--seed 1 --only N` runs it
alone.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import struct
import tracemalloc
import typing

import pytest
from campaign import Campaign
from conversations import DECODERS, GREETINGS, KNOWN, Conversation, converse, framed
from message_examples import draw, subclasses
from msgspec import msgpack
from mutations import LOG, bombs, mutate_value

from jaxpp_async.errors import HandshakeError, ProtocolError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol import codec
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.codec import Encoder
from jaxpp_async.protocol.frames import _HEADER, MAX_HANDSHAKE_BYTES, Challenge, Hello, Proof

ENCODER = Encoder(1 << 20)
TO_ACTOR, TO_CONTROLLER = DECODERS["actor", "control"], DECODERS["controller", "control"]
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


@pytest.mark.parametrize("side", KNOWN, ids="-".join)
def test_every_message_type_is_among_the_frames(side):
    rng = random.Random(0)
    for cls in KNOWN[side]:
        for number in range(20):
            message = draw(cls, rng)
            assert DECODERS[side].decode(ENCODER.encode(message, number)) == (number, message)


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
                wire.feed(b"jpp3" + struct.pack(">H", len(bomb[:4000])) + bomb[:4000])

    def as_payload() -> None:
        for role in ("actor", "controller"):
            wire = conversation.wire(role)
            wire.take_outgoing()
            for piece in conversation.pieces(role)[: GREETINGS[role]]:
                wire.feed(piece)
            data = framed(conversation.keys[role == "controller"], bomb)
            if b"Log" in bomb and role == "controller" and index == _TWICE:
                assert wire.feed(data) == [(None, m.Log(1, "a", "b", None, {"a": 2}))]
                continue
            with pytest.raises(ProtocolError):
                wire.feed(data)

    as_greeting(), as_payload()  # the decoders are made
    assert peak_bytes(as_greeting) < 4 * MIB
    # Bytes to a buffer, to an array of references, and what reads ahead of it.
    assert peak_bytes(as_payload) < 3 * MIB + 16 * len(bomb)


_TWICE = next(i for i, bomb in enumerate(bombs()) if bomb.endswith(b"\x82\xa1a\x01\xa1a\x02"))
"""A key that stands twice is no error: the last one counts, as in a dict."""


@pytest.mark.parametrize("header", [b"\x91", b"\x81\xa1a"])
@pytest.mark.parametrize("depth", [1, 32, 510, 1020, 9000, 100_000])
def test_no_field_of_a_message_nests_deeper_than_its_type(header, depth):
    said = r"Log.fields\[...\]: expected int \| float \| str, got|not a message"
    with pytest.raises(ProtocolError, match=said):
        TO_CONTROLLER.decode(LOG + b"\x81\xa1a" + header * depth + b"\xc0")


def test_no_field_of_a_message_can_be_anything():
    """A field of the type `Any` would take values of any depth, for which this package's code is not made."""
    hints = [hint for cls in subclasses(m.MessagePart) for hint in typing.get_type_hints(cls).values()]
    assert len(hints) > 100 and not any("Any" in str(hint) for hint in hints)


@pytest.mark.parametrize("count", [0, 15, 16, 17, 255, 256, 257, 5000])
def test_long_arrays_are_no_bombs(count):
    store = m.Store((), tuple(range(count)))
    assert TO_ACTOR.decode(ENCODER.encode(store, 1)) == (1, store)
    kept = m.ReplicaTaken((m.ReplicaArray(2, Aval((3,), "float32"), (12,)),) * count)
    assert TO_CONTROLLER.decode(ENCODER.encode(kept, 1)) == (1, kept)


def test_a_long_array_that_is_wrong_is_refused_by_name():
    data = msgpack.encode([1, ["Store", [], [0] * 5000 + ["x"]]])
    with pytest.raises(ProtocolError, match=r"Store.frees\[5000\]: expected int, got str"):
        TO_ACTOR.decode(data)
    with pytest.raises(ProtocolError, match="not msgpack"):
        TO_ACTOR.decode(data[:-2])
    with pytest.raises(ProtocolError, match="not msgpack"):
        TO_ACTOR.decode(msgpack.encode([1, ["Inspect"]]) + b"\0")


LENGTHS = {
    "array": (b"\xdc\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xdd\xff\xff\xff\xff"),
    "map": (b"\xde\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff"),
    "text": (b"\xd9\xff", b"\xda\xff\xff", b"\xdb\xff\xff\xff\xff"),
    "bytes": (b"\xc4\xff", b"\xc5\xff\xff", b"\xc6\xff\xff\xff\xff"),
    "extension": (b"\xc7\xff\x01", b"\xc8\xff\xff\x01", b"\xc9\xff\xff\xff\xff\x01"),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_length_that_is_announced_anywhere_takes_no_memory(kind):
    """Behind each byte of a message of each type, as if a value there were long."""
    rng = random.Random(3)
    cut = [
        (decoder, data[:end])
        for side, decoder in (("actor", TO_ACTOR), ("controller", TO_CONTROLLER))
        for cls in m.accepted_messages(side)
        for data in [ENCODER.encode(draw(cls, rng), 1)]
        for end in sorted(rng.sample(range(len(data)), min(len(data), 20)))
    ]

    def decode_all() -> None:
        for decoder, before in cut:
            for header in LENGTHS[kind]:
                with contextlib.suppress(ProtocolError):  # it may be the end of a text
                    decoder.decode(before + header)

    decode_all()  # what the first errors load and cache is no leak
    assert peak_bytes(decode_all) < MIB


@pytest.mark.parametrize("part", [Hello, Challenge, Proof])
def test_greetings_are_decoded_strictly_and_take_no_memory(part):
    """Anybody can send a greeting: it is decoded before its sender has proven anything."""
    rng, good = random.Random(4), codec.pack(draw(part, random.Random(4)))
    headers = [header for headers in LENGTHS.values() for header in headers]
    hostile = [good[:end] + header for end in range(len(good)) for header in headers]
    hostile += [b"\x91" * 4000, b"\x81\xa1a" * 1300, good + b"\xc0", b"", b"\x96" + b"\x91" * 4000]
    hostile += [msgpack.encode(mutate_value(msgpack.decode(good), rng)) for _ in range(300)]

    def decode_all() -> int:
        taken = 0
        for data in hostile:
            with contextlib.suppress(ProtocolError):
                assert type(codec.decode_as(part, data)) is part
                taken += 1
        return taken

    assert decode_all() < len(hostile) / 5
    assert peak_bytes(decode_all) < MIB


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
        stranger.feed(b"jpp3\xff\xff")
