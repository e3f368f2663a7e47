"""Real conversations of the control protocol, drawn from a seed: handshakes, and frames of every message
type.

What a message type carries is read from its type hints, so a new type is fuzzed without a line here.
"""

from __future__ import annotations

import dataclasses
import random
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any

from jaxpp_async.protocol.frames import (
    _HEADER,
    BEATS,
    SHORT_BYTES,
    TO_ACTOR,
    TO_CONTROLLER,
    FrameKey,
    Identity,
    Wire,
)

VERSION = "1.2.3"
INTEGERS = (
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**64 - 1,
    -1,
    -33,
    -(2**63),
)
FLOATS = (0.0, -0.0, 0.5, 1e300, -1e-300, float("inf"), float("nan"))


@dataclass(frozen=True)
class Conversation:
    """What two wires said, each piece a greeting or a frame.

    Args:
        nonces: of actor and controller: a wire made with its nonce again can be brought to any point of it.
        to_actor, to_controller: the pieces. messages_to_actor, messages_to_controller: what is in the frames.
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
        """What came to this side in frames."""
        return self.messages_to_actor if role == "actor" else self.messages_to_controller

    def known(self, role: str) -> dict[str, type]:
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


KNOWN: dict[tuple[str, str], dict[str, type]] = {
    ("actor", "control"): TO_ACTOR,
    ("controller", "control"): TO_CONTROLLER,
    ("actor", "beats"): {},
    ("controller", "beats"): BEATS,
}

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
        tuple(draw(rng.choice(list(known)), rng) for _ in range(num_frames)) if known else ()
        for known in (blank.known("actor").values(), blank.known("controller").values())
    )
    to_actor += [b"".join(controller.encode(message)) for message in down]
    to_controller += [b"".join(actor.encode(message)) for message in up]
    assert controller._send_key is not None and actor._send_key is not None
    keys = (controller._send_key, actor._send_key)
    return Conversation(secret, identity, nonces, tuple(to_actor), tuple(to_controller), down, up, keys)


def draw(hint: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value of a message's type hint; also of a whole message type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        cls = typing.cast(type, hint)
        return cls(**{name: draw(of, rng, depth + 1) for name, of in _fields(cls).items()})
    if origin in (typing.Union, types.UnionType):
        return draw(rng.choice(args), rng, depth)
    if origin is typing.Literal:
        return rng.choice(args)
    few = 0 if depth > 6 else rng.choice((0, 1, 2, 3))
    if origin is tuple and args[-1:] == (Ellipsis,):
        return tuple(draw(args[0], rng, depth + 1) for _ in range(few))
    if origin is tuple:
        return tuple(draw(of, rng, depth + 1) for of in args)
    if origin is dict:
        return {draw(args[0], rng, depth + 1): draw(args[1], rng, depth + 1) for _ in range(few)}
    if hint is Any:
        return draw(
            rng.choice((int, str, bytes, bool, float, type(None), tuple[Any, ...], dict[str, Any])),
            rng,
            depth,
        )
    return _plain(hint, rng)


@cache
def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _plain(hint: Any, rng: random.Random) -> Any:
    if hint is int:
        return rng.choice(INTEGERS) if rng.random() < 0.2 else rng.randrange(1000)
    if hint is float:
        return rng.choice(FLOATS[:-1])  # without NaN, a message equals itself
    if hint is bool:
        return rng.random() < 0.5
    if hint is str:
        return "".join(
            rng.choices("abcdefgh \n\0\N{GREEK SMALL LETTER PI}\N{ROCKET}", k=rng.choice((0, 1, 5, 40)))
        )
    if hint is bytes:
        return rng.randbytes(rng.choice((0, 1, 16, 300)))
    if hint is type(None):
        return None
    raise TypeError(f"teach the protocol fuzzer about {hint!r}")
