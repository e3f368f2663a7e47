"""The protocol without sockets: what round-trips, what is refused, and what that costs."""

from __future__ import annotations

import contextlib
import enum
import hmac
import random
import struct
import tracemalloc
from typing import Any, Literal

import numpy as np
import pytest
from message_examples import examples
from msgspec import msgpack

from jaxpp_async.errors import HandshakeError, MeshError, ProtocolError
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol import codec
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.frames import (
    MAX_HANDSHAKE_BYTES,
    SHORT_BYTES,
    FrameKey,
    Identity,
    Wire,
)

SECRET = bytes(range(32))
AVAL = Aval((4, 2), "bfloat16", ("data", None, ("data", "model")))
NONE = [None] * 3  # no cache, no hook, no folder of one
REQUESTS, REPLIES = examples("actor"), examples("controller")
TO_ACTOR = codec.decoder_of(m.accepted_messages("actor"))


def pair(actor: dict[str, Any] | None = None, controller: dict[str, Any] | None = None) -> tuple[Wire, Wire]:
    """An actor's wire and a controller's, not yet greeted."""
    left = {"secret": SECRET, "version": "1", "identity": Identity(3, 1), **(actor or {})}
    right = {"secret": SECRET, "version": "1", **(controller or {})}
    return Wire("actor", **left), Wire("controller", **right)


def greet(actor: Wire, controller: Wire) -> tuple[Wire, Wire]:
    controller.feed(actor.take_outgoing())
    actor.feed(controller.take_outgoing())
    controller.feed(actor.take_outgoing())
    return actor, controller


def frame(wire: Wire, message: Any, number: int | None = None) -> bytes:
    return b"".join(wire.encode(message, number))


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("message", REQUESTS + REPLIES, ids=lambda message: type(message).__name__)
def test_every_message_round_trips_exactly(message):
    actor, controller = greet(*pair())
    sender, receiver = (controller, actor) if message in REQUESTS else (actor, controller)
    for number in (0, 2**40, None):
        assert receiver.feed(frame(sender, message, number)) == [(number, message)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (7, "not a message"),
        ([], "not a message"),
        ([1], "not a message"),
        (["Inspect"], "not a message"),
        ([1, []], "not a message"),
        ([1, [2]], "not a message"),
        ([1, {"type": "Inspect"}], "not a message"),
        ([1, ["Nonsense", 1]], "unknown message 'Nonsense'; expected one of Abort, Admit,"),
        ([1, ["Nonsense" * 1000]], "unknown message 'NonsenseNon.{49}'; expected"),
        ([1, ["Done"]], "unknown message 'Done'"),  # a reply, where requests are expected
        ([1, ["TakeReplica"]], r"TakeReplica: expected 1 fields \(generation\), got fewer"),
        ([1, ["TakeReplica", 1, 2]], r"TakeReplica: expected 1 fields \(generation\), got more"),
        ([1, ["TakeReplica", "1"]], "TakeReplica.generation: expected int, got str$"),
        ([1, ["TakeReplica", True]], "TakeReplica.generation: expected int, got bool"),
        ([1, ["TakeReplica", 1.0]], "expected int, got float"),
        ([1, ["TakeReplica", None]], "expected int, got None"),
        ([1.0, ["TakeReplica", 1]], "a frame is not a message: expected a number"),
        ([True, ["TakeReplica", 1]], "a frame is not a message: expected a number"),
        ([1, ["TakeReplica", 1], 2], "not a message"),
        ([1, ["Abort", 2, b"cause"]], "Abort.cause: expected str, got bytes"),
        ([1, ["Connect", 2, {"a": b""}]], r"Connect.addresses \(a key\): expected int, got str"),
        ([1, ["Connect", 2, {1: 2}]], r"Connect.addresses\[...\]: expected bytes, got int"),
        ([1, ["Connect", 2, [b""]]], "Connect.addresses: expected object, got array"),
        ([1, ["Fetch", [1, "2"], [1]]], r"Fetch.array_ids\[1\]: expected int, got str"),
        ([1, ["Store", [[1]], []]], r"Store.puts\[0\]: expected 4 fields \(array_id, aval, data, sequence\)"),
        (
            [1, ["Configure", [["a"]], [], "cpu", {}, *NONE, "ucx", 0, None, None]],
            r"Configure.spmd_mesh\[0\]: expected array of length 2, got 1",
        ),
        (
            [1, ["Configure", [], [], "cpu", {"a": msgpack.Ext(4, b"x")}, *NONE, "ucx", 0, None, None]],
            r"Configure.jax_config\[...\]: expected .* got ext",
        ),
        (
            [1, ["Configure", [], [], "cpu", {}, 5, *NONE[1:], "ucx", 0, None, None]],
            r"Configure.cache_dir: expected str \| null, got int",
        ),
        (
            [1, ["Configure", [], [], "cpu", {}, *NONE, "ucx", 0, ["a", [1], 0], None]],
            r"Configure.cluster.addresses\[0\]: expected str, got int",
        ),
    ],
)
def test_bad_messages_are_refused_by_name(values, said):
    with pytest.raises(ProtocolError, match=said) as caught:
        TO_ACTOR.decode(msgpack.encode(values))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93", b"\x81\x90\x01", b"\xa2\xff\xff", b"\x91" * 5000])
def test_bytes_that_are_not_msgpack_are_refused(data):
    with pytest.raises(ProtocolError):
        TO_ACTOR.decode(data)


def test_types_that_no_message_has_yet():
    class Inner(m.MessagePart):
        path: str

    class Choice(m.MessagePart):
        kind: Literal["a", "b"]
        inner: Inner | None
        parts: tuple[tuple[int, str], ...]
        seconds: float

    globals()["Inner"] = Inner  # type hints of a local class are looked up in its module
    for value in (Choice("a", Inner("p"), ((1, "x"), (2, "y")), 0.5), Choice("b", None, (), 2.0)):
        assert codec.decode_as(Choice, codec.pack(value)) == value
    with pytest.raises(ProtocolError, match=r"Choice.kind: invalid enum value 'c'"):
        codec.decode_as(Choice, msgpack.encode(["c", None, [], 0.0]))
    with pytest.raises(ProtocolError, match=r"Choice.inner.path: expected str, got int"):
        codec.decode_as(Choice, msgpack.encode(["a", [1], [], 0.0]))
    with pytest.raises(ProtocolError, match=r"Choice: expected 4 fields .*got fewer"):
        codec.decode_as(Choice, msgpack.encode([]))
    assert codec.decode_as(Choice, msgpack.encode(["a", None, [], 3])) == Choice("a", None, (), 3.0)


def test_our_own_mistakes_are_errors_that_name_the_type():
    with pytest.raises(TypeError, match=r"cannot carry a builtins.object"):
        codec.pack(object())
    with pytest.raises(MeshError, match=r"Abort cannot be sent: a message cannot carry a builtins.object"):
        codec.Encoder(100).encode(m.Abort(object(), ""), 1)  # type: ignore[arg-type]


def test_types_that_are_derived_from_plain_ones_travel_as_those():
    class Level(enum.IntEnum):
        HIGH = 3

    done = m.Loaded(np.float64(0.5), {Level.HIGH: np.str_("x")})  # type: ignore[dict-item]
    assert msgpack.decode(codec.pack(done)) == ["Loaded", 0.5, {3: "x"}]


# ---------------------------------------------------------------- handshake


def test_handshake_opens_both_sides():
    actor, controller = greet(*pair())
    assert actor.state == controller.state == "open"
    assert controller.identity == Identity(3, 1)


def test_handshake_in_single_bytes():
    actor, controller = pair()
    for _ in range(3):
        for sender, receiver in ((actor, controller), (controller, actor)):
            for byte in sender.take_outgoing():
                receiver.feed(bytes([byte]))
    assert actor.state == controller.state == "open"


def test_wrong_secret_is_refused_by_both():
    actor, controller = pair(controller={"secret": b"\1" * 32})
    controller.feed(actor.take_outgoing())
    with pytest.raises(HandshakeError, match="does not know this mesh's secret") as error:
        actor.feed(controller.take_outgoing())
    assert SECRET.hex() not in str(error.value) and repr(SECRET) not in str(error.value)
    assert actor.state == "failed"


def test_an_actor_without_the_secret_is_refused():
    actor, controller = pair(actor={"secret": b"\1" * 32})
    controller.feed(actor.take_outgoing())
    controller.take_outgoing()
    forged = codec.pack([b"\0" * 32])
    with pytest.raises(HandshakeError, match="claimed to be the actor"):
        controller.feed(b"jpp3" + len(forged).to_bytes(2, "big") + forged)
    assert controller.identity is None and controller.state == "failed"


def test_reflected_greetings_are_refused():
    actor, controller = pair()
    hello = actor.take_outgoing()
    with pytest.raises(HandshakeError):
        actor.feed(hello)
    controller.feed(hello)
    challenge = controller.take_outgoing()
    with pytest.raises(HandshakeError):
        controller.feed(challenge)


def test_a_replayed_handshake_is_refused():
    actor, controller = pair()
    hello = actor.take_outgoing()
    controller.feed(hello)
    actor.feed(controller.take_outgoing())
    proof = actor.take_outgoing()
    controller.feed(proof)
    assert controller.state == "open"
    _, later = pair()  # a new nonce
    later.feed(hello)
    with pytest.raises(HandshakeError, match="secret"):
        later.feed(proof)


def test_a_proof_is_for_one_actor_only():
    actor, controller = pair()
    hello = bytearray(actor.take_outgoing())
    other = pair(actor={"identity": Identity(4, 1), "nonce": actor._nonce})[0].take_outgoing()
    controller.feed(other)
    with pytest.raises(HandshakeError):
        actor.feed(controller.take_outgoing())  # the controller proved a conversation with actor 4
    assert bytes(hello) != other


def test_version_mismatch_is_said_to_both_in_plain_words():
    actor, controller = pair(actor={"version": "0.2.0"}, controller={"version": "0.1.0"})
    controller.feed(actor.take_outgoing())
    said = "process 3 runs jaxpp-async 0.2.0, the controller 0.1.0; install the same version"
    with pytest.raises(HandshakeError, match=said):
        actor.feed(controller.take_outgoing())
    with pytest.raises(HandshakeError, match=said):
        controller.feed(actor.take_outgoing())
    assert controller.identity == Identity(3, 1)  # proved, so that the launch of actor 3 can name it


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak"),
        (b"j", None),
        (b"jx", "does not speak"),
        (b"jppx", "does not speak"),
        (
            b"jpp2\x00\x00",
            "speaks format 2 of .* of jaxpp-async 1, format 3: .* install the same one on every host",
        ),
        (b"jpp3\xff\xff", f"at most {MAX_HANDSHAKE_BYTES}"),
        (b"jpp3\x00\x01\xc0", "bad greeting"),
        (b"jpp3\x00\x00", "bad greeting"),
    ],
)
def test_strangers_are_refused_early(data, said):
    _, controller = pair()
    if said is None:
        assert controller.feed(data) == []
        return
    with pytest.raises(HandshakeError, match=said):
        controller.feed(data)
    with pytest.raises(ProtocolError, match="already failed"):
        controller.feed(b"x")


def test_a_greeting_in_another_format_names_the_versions():
    actor, controller = pair(actor={"version": "0.0.9"}, controller={"version": "0.1.0"})
    hello = actor.take_outgoing()
    assert hello[:4] == b"jpp3"
    said = r"format 2 \(its jaxpp-async says it is '0.0.9'\) .*this process, of jaxpp-async 0.1.0, format 3"
    with pytest.raises(HandshakeError, match=said):
        controller.feed(b"jpp2" + hello[4:])


def test_secrets_have_32_bytes():
    with pytest.raises(ValueError, match="32 bytes"):
        Wire("controller", b"short", version="1")


# ---------------------------------------------------------------- frames


def test_frames_arrive_in_any_pieces():
    actor, controller = greet(*pair())
    data = b"".join(frame(controller, request, number) for number, request in enumerate(REQUESTS))
    rng = random.Random(0)
    received, start = [], 0
    while start < len(data):
        end = start + rng.randint(1, 40)
        received += actor.feed(data[start:end])
        start = end
    assert received == list(enumerate(REQUESTS))


def test_a_large_frame_in_pieces_takes_linear_time_and_memory():
    actor, controller = greet(*pair())
    message = m.Load(0, ActorProgram(0, (), ()), {}, {"a": b"z" * (8 << 20)})
    pieces = controller.encode(message)
    assert len(pieces) == 3  # the payload is not copied to join it with its header
    data = b"".join(pieces)
    tracemalloc.start()
    try:
        received = [x for i in range(0, len(data), 1 << 14) for x in actor.feed(data[i : i + (1 << 14)])]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert received == [(None, message)]
    assert peak < 4 * len(data)


def test_replayed_and_reflected_and_reordered_frames_are_refused():
    for attack in ("replayed", "reflected", "reordered", "other conversation"):
        actor, controller = greet(*pair())
        first, second = frame(controller, REQUESTS[7]), frame(controller, REQUESTS[8])
        with pytest.raises(ProtocolError):
            if attack == "replayed":
                actor.feed(first)
                actor.feed(first)
            elif attack == "reflected":
                controller.feed(first)
            elif attack == "reordered":
                actor.feed(second)
            else:
                greet(*pair())[0].feed(first)


@pytest.mark.parametrize("broken", [b"\xff" * 60, b"\0" * 5000, bytes(15) + b"\2" + bytes(40)])
@pytest.mark.parametrize("first", [0, 1, 40])
def test_what_was_verified_before_a_broken_frame_is_handed_over(broken, first):
    actor, controller = greet(*pair())
    failed, log = (
        m.Failed("ValueError", "the cause", "Traceback", None, "run x"),
        m.Log(20, "a", "b", 3, {}),
    )
    data = frame(actor, failed) + frame(actor, log) + broken
    received = controller.feed(data[:first])  # in one piece, and in two
    assert received + controller.feed(data[first:]) == [(None, failed), (None, log)]
    assert controller.state == "failed" and str(controller.error).startswith(
        ("frame 2: ", "expected frame 2")
    )
    with pytest.raises(ProtocolError, match="already failed"):
        controller.feed(b"")


def test_frames_longer_than_allowed_are_refused_by_both():
    actor, controller = greet(*pair(actor={"max_frame_bytes": 100}))
    with pytest.raises(ProtocolError, match="at most 100 are allowed"):
        actor.feed(frame(controller, m.Abort(0, "x" * 200))[:16])  # the payload is not waited for
    actor, controller = greet(*pair(controller={"max_frame_bytes": 100}))
    with pytest.raises(MeshError, match=r"Abort takes .* a frame at most 100"):
        controller.encode(m.Abort(0, "x" * 200))
    assert actor.feed(frame(controller, m.Inspect(), 1)) == [(1, m.Inspect())]  # and the conversation goes on


@pytest.mark.parametrize("size", [SHORT_BYTES, SHORT_BYTES + 1])
def test_of_an_unproved_length_little_is_kept(size):
    """A short frame's length is proved with the frame, a longer one's before more of it is kept."""
    actor, controller = greet(*pair())
    forged = struct.pack(">QQ", size, 0) + bytes(size)
    if size > SHORT_BYTES:
        with pytest.raises(ProtocolError, match="MAC of its length does not match"):
            actor.feed(forged[:32])
        return
    assert actor.feed(forged) == []
    with pytest.raises(ProtocolError, match="frame 0: its MAC does not match"):
        actor.feed(bytes(16))
    assert controller.feed(b"") == []


@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_frames_about_as_long_as_a_short_one_arrive(more):
    actor, controller = greet(*pair())
    empty = len(codec.Encoder(100).encode(m.Abort(0, ""), None))
    message = m.Abort(0, "x" * (SHORT_BYTES - empty - 2 + more))
    data = frame(controller, message)
    assert len(data) == SHORT_BYTES + more + 32 + (16 if more > 0 else 0)
    assert actor.feed(data) == [(None, message)]
    data = frame(controller, message)
    assert actor.feed(data[:20]) + actor.feed(data[20:]) == [(None, message)]


def test_a_mac_of_a_length_is_none_of_a_frame():
    """The other kind of frame never comes out of one: both begin with a length that says which it is."""
    actor, controller = greet(*pair())
    data = frame(controller, m.Abort(0, "x" * 2 * SHORT_BYTES))
    with pytest.raises(ProtocolError):
        actor.feed(struct.pack(">QQ", 0, 0) + data[16:32])


def test_a_stranger_takes_little_memory():
    tracemalloc.start()
    try:
        wires = [pair()[1] for _ in range(20)]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < len(wires) * (16 << 10)
    assert greet(*pair())[1].encode(m.Inspect())


def test_nothing_is_sent_before_the_handshake():
    _, controller = pair()
    with pytest.raises(ProtocolError, match="greeting, not open"):
        controller.encode(m.Inspect())


@pytest.mark.parametrize("size", [0, 16, 63, 64, 65, 100_000])
def test_frames_are_signed_with_hmac_sha256(size):
    key, data = bytes(range(100, 132)), bytes(k % 251 for k in range(size))
    expected = hmac.digest(key, data, "sha256")[:16]
    for cut in (0, size // 3, size):
        assert FrameKey(key).sign(data[:cut], memoryview(data)[cut:]) == expected


def test_2000_mutated_frames_are_refused_and_leave_no_memory():
    rng = random.Random(1)
    actor, controller = greet(*pair())
    good = [frame(controller, request) for request in REQUESTS[:5]]
    hello = pair()[0].take_outgoing()
    keys = actor._receive_key
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for trial in range(2000):
            index = rng.randrange(len(good))
            data = bytearray(good[index])
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] ^= rng.randint(1, 255)
            if trial % 10 == 0:
                data[:8] = (2**63).to_bytes(8, "big")
            if bytes(data) == good[index]:
                continue
            wire = pair()[0]
            wire.take_outgoing()
            wire.state, wire._receive_key, wire._num_received = "open", keys, index
            with pytest.raises(ProtocolError):
                assert wire.feed(bytes(data)) == [] and len(wire._buffer) < SHORT_BYTES
                wire.feed(bytes(SHORT_BYTES))  # what a short frame still lacks, if its length was changed
            assert not wire._buffer and wire.state == "failed"
            greeting = bytearray(hello)
            greeting[rng.randrange(6)] ^= rng.randint(1, 255)
            stranger = pair()[1]
            with contextlib.suppress(HandshakeError):
                assert stranger.feed(bytes(greeting)) == [] and len(stranger._buffer) <= MAX_HANDSHAKE_BYTES
            assert stranger.identity is None
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 20 and peak - before < 16 << 20
