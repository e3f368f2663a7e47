"""handshake: proofs and keys from a shared secret, as pure functions over bytes. Never prints or stores the secret.

The actor says hello with a nonce; the controller answers with its own nonce and its proof; the actor proves itself.
Both proofs and both keys are HMAC-SHA256, under the secret, of a label and of everything said before (both nonces,
roles, process, incarnation, versions, channel): a proof is good for one conversation, one role, one actor and one
channel only, so it can be neither replayed nor reflected.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from jaxpp_async.actors.protocol.codec import decode_as, pack
from jaxpp_async.errors import HandshakeError, ProtocolError

Role: TypeAlias = Literal["actor", "controller"]

Channel: TypeAlias = Literal["control", "beats"]
"""What a conversation is for: requests and replies, or signs of life alone."""

MAGIC = b"jpp2"
"""Opens every handshake message: `jpp` and the format's number. It grows with every change of handshake or frames, so
that copies of the package that cannot talk to each other say so. `jpp1` had two MACs a frame.
"""

SECRET_BYTES = NONCE_BYTES = 32
MAC_BYTES = 16
_BLOCK_BYTES = 64  # SHA-256's, to which HMAC pads its key


@dataclass(frozen=True, slots=True)
class Hello:
    """Actor to controller, first."""

    role: str
    process_id: int
    incarnation: int
    version: str
    nonce: bytes
    channel: Channel = "control"


@dataclass(frozen=True, slots=True)
class Challenge:
    """Controller to actor: its nonce and its proof."""

    role: str
    version: str
    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    """Actor to controller, last."""

    proof: bytes


class FrameKey:
    """What one direction of a conversation is signed with: HMAC-SHA256, cut to `MAC_BYTES`.

    The hash state behind the padded key is made once and copied for each frame, which for short ones is half of what
    `hmac.digest` takes.

    Args:
        key: 32 secret bytes.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes):
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def sign(self, *pieces: bytes | bytearray | memoryview) -> bytes:
        """The MAC of some bytes, given in pieces."""
        inner, outer = self._inner.copy(), self._outer.copy()
        for piece in pieces:
            inner.update(piece)
        outer.update(inner.digest())
        return outer.digest()[:MAC_BYTES]


@dataclass(frozen=True, slots=True)
class Keys:
    """What an authenticated conversation is signed with, one key a direction."""

    to_actor: FrameKey = field(repr=False)
    to_controller: FrameKey = field(repr=False)


def transcript(hello: Hello, role: str, version: str, nonce: bytes) -> bytes:
    """A digest of all that both sides said before the first proof."""
    return hashlib.sha256(MAGIC + pack((hello, role, version, nonce))).digest()


def prove(secret: bytes, role: Role, said: bytes) -> bytes:
    """The proof of `role` for one conversation."""
    return _mac(secret, f"{role} proof", said)


def check_proof(secret: bytes, role: Role, said: bytes, proof: bytes) -> None:
    """Raises:
    HandshakeError: the peer does not know the secret, or proved another conversation or role.
    """
    if not hmac.compare_digest(prove(secret, role, said), proof):
        raise HandshakeError(f"a peer claimed to be the {role} but does not know this mesh's secret; refused")


def derive_keys(secret: bytes, said: bytes) -> Keys:
    """Both directions' keys."""
    to_actor, to_controller = (_mac(secret, f"key to {side}", said) for side in ("actor", "controller"))
    return Keys(FrameKey(to_actor), FrameKey(to_controller))


def check_greeting(role: str, expected: Role, nonce: bytes) -> None:
    """Raises:
    HandshakeError: a reflected or malformed greeting.
    """
    if role != expected:
        raise HandshakeError(f"expected a greeting of the {expected}, got one of role {role[:20]!r} (reflected?)")
    if len(nonce) != NONCE_BYTES:
        raise HandshakeError(f"a greeting's nonce has {len(nonce)} bytes instead of {NONCE_BYTES}")


def check_versions(process_id: int, actor: str, controller: str) -> None:
    """Raises:
    HandshakeError: actor and controller run different versions of this package.
    """
    if actor != controller:
        raise HandshakeError(
            f"process {process_id} runs jaxpp-async {actor[:40]}, the controller {controller[:40]}; "
            "install the same version on both",
        )


def format_mismatch(version: str, theirs: bytes) -> str | None:
    """What to do about a peer that greets in another format than this side; None if its words are no greeting at all.

    Args:
        version: this side's.
        theirs: the peer's first bytes, at least as many as `MAGIC` has. Nobody has proved anything yet.
    """
    number = theirs[len(MAGIC) - 1 : len(MAGIC)]
    if theirs[: len(MAGIC) - 1] != MAGIC[:-1] or not number.isdigit():
        return None
    with contextlib.suppress(ProtocolError):  # another format's greeting: it may look like anything
        said = decode_as(Hello, theirs[len(MAGIC) + 2 :]).version
        number += f" (its jaxpp-async says it is {said[:40]!r})".encode()
    return (
        f"a peer speaks format {number.decode()} of the control channel, this process, of jaxpp-async {version}, "
        f"format {MAGIC[-1:].decode()}: they run different versions or commits; install the same one on every host"
    )


def version_mismatch(ours: Mapping[str, str], theirs: Mapping[str, str | None], python: str) -> str | None:
    """What to install there, so that both sides run the same; None if they do.

    Args:
        ours, theirs: version by package, None for one that is missing there.
        python: the interpreter there.
    """
    for name, version in ours.items():
        other = theirs.get(name)
        if other != version:
            has = f"has {name} {other[:40]}" if other is not None else f"has no {name}"
            return (
                f"{python} {has}, this machine has {name} {version}; programs are made here and run there, so install "
                f"the same version on both: {python} -m pip install '{name}=={version}'"
            )
    return None


def _mac(secret: bytes, label: str, said: bytes) -> bytes:
    return hmac.digest(secret, b"jaxpp-async " + label.encode() + b"\0" + said, "sha256")
