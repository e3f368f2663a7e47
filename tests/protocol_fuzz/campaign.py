"""Conversations and changes in, a verdict out: what an attacker must never get from a `Wire`, checked trial
by trial.

Each trial depends on the campaign's seed and its own number only, so one that fails can be run again by
itself.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from conversations import DECODERS, GREETINGS, Conversation, converse, draw_number, framed
from message_examples import draw
from msgspec import msgpack
from mutations import bombs, mutate_bytes, mutate_pieces, mutate_value, split

from jaxpp_async.errors import HandshakeError, ProtocolError
from jaxpp_async.protocol.codec import Encoder
from jaxpp_async.protocol.frames import MAX_HANDSHAKE_BYTES, Wire
from jaxpp_async.protocol.messages import accepted_messages

_ENCODER = Encoder(1 << 20)

_EACH = 50
"""Trials that share their conversations: making one costs more than a trial."""


class Broken(Exception):
    """Something got through, or the wrong thing came out."""


@dataclass
class Tally:
    """What became of the trials, by how they ended."""

    trials: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0  # CPU time of one trial


class Campaign:
    """Trials of one seed, by number."""

    def __init__(self, seed: int):
        self.seed = seed
        self._scenes: dict[int, tuple[Conversation, ...]] = {}
        self._bombs = bombs()

    def run(self, start: int, stop: int) -> Tally:
        """Run the trials from `start` up to `stop`; raise `Broken` with the number of the first failure."""
        tally = Tally()
        for number in range(start, stop):
            began_s = time.process_time()
            try:
                tally.ends[self.trial(number)] += 1
            except Exception as error:
                raise Broken(f"seed {self.seed}, trial {number}: {type(error).__name__}: {error}") from error
            tally.trials += 1
            tally.slowest_s = max(tally.slowest_s, time.process_time() - began_s)
        return tally

    def trial(self, number: int) -> str:
        """One trial; how it ended."""
        rng = random.Random(f"{self.seed}/{number}")
        here, *others = self._scene(number // _EACH)
        role = rng.choice(("actor", "controller"))
        if rng.random() < 0.4:
            return _authenticated(here, role, rng, self._bombs)
        return _attack(here, rng.choice(others), role, rng)

    def _scene(self, index: int) -> tuple[Conversation, ...]:
        """A conversation, another of the same mesh, and one of another mesh."""
        if index not in self._scenes:
            rng = random.Random(f"{self.seed}/scene {index}")
            first = converse(rng)
            self._scenes = {index: (first, converse(rng, first.secret), converse(rng))}
        return self._scenes[index]


# ---------------------------------------------------------------- without the keys


def _attack(here: Conversation, elsewhere: Conversation, role: str, rng: random.Random) -> str:
    """Somebody without the secret changes what comes to `role`, in any of its states."""
    pieces, greetings = list(here.pieces(role)), GREETINGS[role]
    kept = rng.randrange(greetings + 2)  # what comes as it was: the state in which the change hits the wire
    wire = here.wire(role)
    wire.take_outgoing()
    got: list[Any] = []
    for piece in pieces[:kept]:
        got += wire.feed(piece)
        wire.take_outgoing()
    state = wire.state
    hostile = mutate_pieces(pieces[kept:], role, elsewhere, here, rng)
    error = _feed(wire, b"".join(hostile), rng, got)
    _check_received(here, role, got)
    if wire.identity not in (None, here.identity):
        raise Broken(f"took the peer for {wire.identity}, but it was {here.identity}")
    return f"{role} {state}: {_end(error, got)}"


def _check_received(here: Conversation, role: str, got: list[Any]) -> None:
    true = here.messages(role)
    if len(got) > len(true) or any(a != b for a, b in zip(got, true, strict=False)):
        raise Broken(f"received what nobody sent: {got[-1]!r}")


# ---------------------------------------------------------------- with the keys


def _authenticated(here: Conversation, role: str, rng: random.Random, all_bombs: tuple[bytes, ...]) -> str:
    """The peer itself is wrong: frames with right MACs and wrong payloads."""
    payload = _payload(here, role, rng, all_bombs)
    wire = here.wire(role)
    wire.take_outgoing()
    for piece in here.pieces(role)[: GREETINGS[role]]:
        wire.feed(piece)
    got: list[Any] = []
    error = _feed(wire, framed(here.keys[role == "controller"], payload), rng, got)
    if isinstance(error, HandshakeError):
        raise Broken(f"a frame failed as a greeting: {error}")
    if error is None and len(got) != 1:
        raise Broken(f"a whole frame was neither taken nor refused: {len(payload)} bytes")
    for number, message in got:
        if type(message) not in here.known(role) or type(number) not in (int, type(None)):
            raise Broken(f"received {number!r} with a {type(message)}")
        # A message that was taken is a message: it can be sent again, and means the same.
        again = _ENCODER.encode(message, number)
        decoded_number, decoded = DECODERS[role, here.identity.channel].decode(again)
        # A NaN does not equal itself, and equal sets may be encoded in different orders.
        same = decoded == message or _ENCODER.encode(decoded, decoded_number) == again
        if decoded_number != number or not same:
            raise Broken(f"does not round-trip: {message!r}")
    return f"{role} payload: {_end(error, got)}"


def _payload(here: Conversation, role: str, rng: random.Random, all_bombs: tuple[bytes, ...]) -> bytes:
    choice = rng.random()
    if choice < 0.1:
        return rng.choice(all_bombs)
    known = here.known(role) or accepted_messages("actor")  # where nothing may come, anything is wrong
    data = _ENCODER.encode(draw(rng.choice(known), rng), draw_number(rng))
    if choice < 0.45:
        return mutate_bytes(data, rng)
    return msgpack.encode(mutate_value(msgpack.decode(data), rng))


# ---------------------------------------------------------------- both


def _feed(wire: Wire, data: bytes, rng: random.Random, got: list[Any]) -> ProtocolError | None:
    """Feed data in pieces, up to the refusal, and check that a refusal is for good and keeps nothing."""
    for piece in split(data, rng):
        try:
            got += wire.feed(piece)
            if wire.error is not None:  # behind what it gave
                raise wire.error
        except ProtocolError as error:  # HandshakeError is one
            if wire.state != "failed" or wire._buffer or wire._send_key or wire._receive_key:
                raise Broken(
                    f"a refusal that keeps something: {wire.state}, {len(wire._buffer)} bytes"
                ) from error
            if not str(error) or len(str(error)) > 2000:
                raise Broken(f"an error of {len(str(error))} characters") from error
            _check_failed(wire)
            return error
        most = MAX_HANDSHAKE_BYTES if wire.state != "open" else wire._max_frame_bytes + 64
        if len(wire._buffer) > most:
            raise Broken(f"{len(wire._buffer)} bytes are kept while {wire.state}")
    return None


def _check_failed(wire: Wire) -> None:
    try:
        wire.feed(b"x")
    except ProtocolError:
        return
    raise Broken("a failed conversation went on")


def _end(error: ProtocolError | None, got: list[Any]) -> str:
    if error is not None:
        return "refused"
    return "taken" if got else "waits"
