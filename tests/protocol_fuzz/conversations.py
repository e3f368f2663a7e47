"""Real conversations of the control protocol, drawn from a seed: handshakes, and frames of every message
type.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from message_examples import draw

from jaxpp_async.protocol.codec import Decoder
from jaxpp_async.protocol.frames import _HEADER, SHORT_BYTES, FrameKey, Identity, Wire
from jaxpp_async.protocol.messages import Beat, Message, accepted_messages

VERSION = "1.2.3"


@dataclass(frozen=True)
class Conversation:
    """What two wires said, each piece a greeting or a frame.

    Args:
        nonces: of actor and controller: a wire made with its nonce again can be brought to any point of it.
        to_actor, to_controller: the pieces. messages_to_actor, messages_to_controller: the envelopes in the
            frames.
        keys: the frame keys to actor and to controller.
    """

    secret: bytes
    identity: Identity
    nonces: tuple[bytes, bytes]
    to_actor: tuple[bytes, ...]
    to_controller: tuple[bytes, ...]
    messages_to_actor: tuple[Any, ...]
    messages_to_controller: tuple[Any, ...]
    keys: tuple[FrameKey, FrameKey]

    def pieces(self, role: str) -> tuple[bytes, ...]:
        """What came to this side."""
        return self.to_actor if role == "actor" else self.to_controller

    def messages(self, role: str) -> tuple[Any, ...]:
        """What came to this side in frames, as pairs of a number and a message."""
        return self.messages_to_actor if role == "actor" else self.messages_to_controller

    def known(self, role: str) -> tuple[type[Message], ...]:
        """The message types that this side takes."""
        return KNOWN[role, self.identity.channel]

    def wire(self, role: str, max_frame_bytes: int = 1 << 20) -> Wire:
        """This side's wire again, as it was before the first word."""
        actor_nonce, controller_nonce = self.nonces
        if role == "actor":
            return Wire(
                "actor",
                self.secret,
                version=VERSION,
                identity=self.identity,
                nonce=actor_nonce,
                max_frame_bytes=max_frame_bytes,
            )
        return Wire(
            "controller",
            self.secret,
            version=VERSION,
            nonce=controller_nonce,
            max_frame_bytes=max_frame_bytes,
        )


KNOWN: dict[tuple[str, str], tuple[type[Message], ...]] = {
    ("actor", "control"): accepted_messages("actor"),
    ("controller", "control"): accepted_messages("controller"),
    ("actor", "beats"): (),
    ("controller", "beats"): (Beat,),
}

DECODERS = {side: Decoder(known) for side, known in KNOWN.items()}

GREETINGS = {"actor": 1, "controller": 2}
"""How many of the pieces that come to a side are its handshake."""


def framed(key: FrameKey, payload: bytes) -> bytes:
    """A payload as the first frame of a conversation."""
    prefix = _HEADER.pack(len(payload), 0)
    if len(payload) > SHORT_BYTES:
        prefix += key.sign(prefix)
    return prefix + payload + key.sign(prefix, payload)


def converse(rng: random.Random, secret: bytes | None = None, num_frames: int = 4) -> Conversation:
    """A conversation of two wires that trust each other."""
    secret = rng.randbytes(32) if secret is None else secret
    channel = "beats" if rng.random() < 0.2 else "control"
    identity = Identity(rng.choice((0, 3, 511)), rng.choice((0, 1, 7)), channel)
    nonces = (rng.randbytes(32), rng.randbytes(32))
    blank = Conversation(secret, identity, nonces, (), (), (), (), (b"", b""))
    actor, controller = blank.wire("actor"), blank.wire("controller")
    to_actor: list[bytes] = []
    to_controller = [actor.take_outgoing()]
    controller.feed(to_controller[0])
    to_actor.append(controller.take_outgoing())
    actor.feed(to_actor[0])
    to_controller.append(actor.take_outgoing())
    controller.feed(to_controller[1])
    down, up = (
        tuple((draw_number(rng), draw(rng.choice(known), rng)) for _ in range(num_frames)) if known else ()
        for known in (blank.known("actor"), blank.known("controller"))
    )
    to_actor += [b"".join(controller.encode(message, number)) for number, message in down]
    to_controller += [b"".join(actor.encode(message, number)) for number, message in up]
    assert controller._send_key is not None and actor._send_key is not None
    keys = (controller._send_key, actor._send_key)
    return Conversation(secret, identity, nonces, tuple(to_actor), tuple(to_controller), down, up, keys)


def draw_number(rng: random.Random) -> int | None:
    """A number of a request, or none."""
    return draw(int | None, rng)
