"""Authenticate both sides of a control connection and sign every message on it. The code is a pure state
machine over bytes, without any I/O.

A `Wire` is one side of one conversation. Pass the bytes that the peer has sent to `feed`; send the bytes that
`take_outgoing` and `encode` return.

    actor                                   controller
    greeting   --- Hello(nonce) --------->  greeting
               <-- Challenge(nonce, proof)  proving
    open       --- Proof ---------------->  open
               <=== frames, both ways ===>

In the handshake, the actor sends a nonce, the controller answers with its own nonce and its proof, and the
actor sends its proof. The two proofs, and the two keys that sign the later messages, are computed by
HMAC-SHA256 with the mesh's secret. Each of these is the HMAC of a label and of everything that was sent
before: the nonces, roles and versions of both sides, the actor process's number, how many processes had this
number before, and the channel. A proof is therefore valid only for one conversation, one role, one actor
process and one channel, and can be neither replayed nor reflected. The secret is never printed or stored.

After the handshake, each message is one frame: the payload's length (8 bytes), a sequence number (8 bytes),
the payload, and a MAC of all of these. If the payload is longer than `SHORT_BYTES`, another MAC, of the
length and the sequence number alone, comes before the payload and is checked before the payload has arrived.
A stranger can therefore make a process store at most `SHORT_BYTES`. After any error the wire refuses all
further data. Messages that were verified before the error are still returned, since they may explain the
error.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

from msgspec import Raw

from jaxpp_async.errors import HandshakeError, ProtocolError
from jaxpp_async.protocol import codec
from jaxpp_async.protocol.codec import Envelope, decode_as, decoder_of, pack
from jaxpp_async.protocol.messages import Beat, Message, MessagePart, accepted_messages

T = TypeVar("T")

Role: TypeAlias = Literal["actor", "controller"]

Channel: TypeAlias = Literal["control", "beats"]
"""The purpose of a conversation: `"control"` carries requests and replies, `"beats"` carries heartbeats
alone.
"""

MAGIC = b"jpp3"
"""The first bytes of every handshake message: `jpp` and the number of the format. The number grows with every
change of handshake or frames, so that copies of the package that cannot talk to each other report it. The
format `jpp1` had two MACs per frame; in `jpp2`, a request's number was a field of its message.
"""

SECRET_BYTES = NONCE_BYTES = 32
MAC_BYTES = 16
_BLOCK_BYTES = 64  # the block size of SHA-256, to which HMAC pads its key

State: TypeAlias = Literal["greeting", "proving", "open", "failed"]

MAX_HANDSHAKE_BYTES: Final = 4096
HANDSHAKE_TIMEOUT_S: Final = 5.0
"""The most seconds that a handshake may take; the owner of the wire enforces this limit."""

DEFAULT_MAX_FRAME_BYTES: Final = 1 << 30
"""The most bytes of a frame after the handshake. The limit is high, since programs are sent in frames, and
only authenticated peers can use it.
"""

MAX_BEAT_BYTES: Final = 256
"""The most bytes of a frame on a channel that carries only heartbeats."""

_GREETING = struct.Struct(">4sH")
_HEADER = struct.Struct(">QQ")
_PREFIX_BYTES: Final = _HEADER.size + MAC_BYTES
_JOIN_BYTES: Final = 1 << 16  # below this size one copy is cheaper than one more write

SHORT_BYTES: Final = 4096
"""The most bytes of a payload whose length is sent without a MAC of its own."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The process and the channel to which a conversation belongs.

    Args:
        process_id: the number of the actor process in the mesh.
        incarnation: how many processes of the mesh had the number `process_id` before this one. A process
            that replaces a lost one gets the number of the lost one.
        channel: the purpose of the conversation: `"control"` for requests and replies, or `"beats"` for
            heartbeats.
    """

    process_id: int
    incarnation: int
    channel: Channel = "control"


class Wire:
    """One side of an authenticated conversation between controller and actor process, without any I/O: it
    consumes and returns bytes.

    Args:
        role: the side of this wire: `"actor"` or `"controller"`.
        secret: the secret that all processes of the mesh share, 32 bytes.
        version: the version of this package in this process.
        identity: the identity of this actor process; the controller passes None and learns it from the peer.
        max_frame_bytes: the longest payload to accept or send, in bytes.
        nonce: 32 random bytes for the handshake. Only tests pass it; None to generate them.

    Attributes:
        state: `"greeting"` (waiting for the peer's first handshake message), `"proving"` (the controller is
            waiting for the actor's proof), `"open"` (both sides are authenticated) or `"failed"`.
        identity: the actor process's identity; on the controller's side None until the actor has
            authenticated itself.
        error: the error that `feed` found in the bytes after the messages that it returned; None if it found
            no error.
    """

    error: ProtocolError | None = None

    def __init__(
        self,
        role: Role,
        secret: bytes,
        *,
        version: str,
        identity: Identity | None = None,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        nonce: bytes | None = None,
    ):
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a mesh's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        if (role == "actor") != (identity is not None):
            raise ValueError("an actor's wire is made with its identity, a controller's without")
        self.role: Role = role
        self.state: State = "greeting"
        self.identity = identity
        self._secret, self._version, self._max_frame_bytes = secret, version, max_frame_bytes
        self._nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        self._decoder = decoder_of(accepted_messages(role))
        self._encoder = codec.Encoder(max_frame_bytes)
        self._buffer = bytearray()
        self._outgoing: list[bytes] = []
        self._hello: Hello | None = None
        self._said = b""
        self._send_key: FrameKey | None = None
        self._receive_key: FrameKey | None = None
        self._num_sent = self._num_received = 0
        self._is_prefix_checked = False  # concerns the first frame in the buffer
        if identity is not None:
            life = (identity.process_id, identity.incarnation)
            self._hello = Hello("actor", *life, version, self._nonce, identity.channel)
            if identity.channel == "beats":
                self._decoder = decoder_of(())  # the controller sends nothing over this channel
            self._greet(self._hello)

    def take_outgoing(self) -> bytes:
        """Return the handshake bytes that have to be sent now, and remove them from the wire. The result is
        empty if nothing has to be sent.
        """
        data = b"".join(self._outgoing)
        self._outgoing.clear()
        return data

    def feed(self, data: bytes | bytearray | memoryview) -> list[Envelope]:
        """Process bytes from the peer, and return the messages that are now complete, each with its request's
        number. The bytes may begin and end anywhere in a message.

        If the bytes contain complete messages followed by an error, the messages are returned, the attribute
        `error` is set, and the wire has failed.

        Raises:
            HandshakeError: the peer does not belong to this mesh, or runs another version of this package. In
                the second case the controller finds the peer's identity in the attribute `identity`. The wire
                has failed.
            ProtocolError: a length, sequence number, MAC or message is wrong, and no message was complete
                before the error. The wire has failed.
        """
        if self.state == "failed":
            raise ProtocolError("this conversation has already failed")
        messages: list[Envelope] = []
        try:
            if self.state == "open" and type(data) is bytes and len(data) <= _JOIN_BYTES and not self._buffer:
                self._take_whole(data, messages)
            else:
                self._buffer += data
                self._parse(messages)
        except BaseException as error:
            # Whatever went wrong, the rest of the stream cannot be trusted.
            self.state = "failed"
            self._buffer = bytearray()
            self._send_key = self._receive_key = None
            if not messages or not isinstance(error, ProtocolError):
                raise
            self.error = error.with_traceback(None)  # its frames refer to this wire
        return messages

    def encode(self, message: Message | Raw, number: int | None = None) -> list[bytes]:
        """Return the frame of a message, as pieces of bytes to be written in order.

        Args:
            message: the message, or what `codec.Encoder.encode_message` returned for it.
            number: the number of the request that the message makes or answers; None if it does neither.

        Raises:
            ProtocolError: the wire is not open.
            MeshError: the message cannot be encoded; the wire can still be used.
        """
        payload = self._encoder.encode(message, number)
        key, size = self._send_key, len(payload)
        if self.state != "open" or key is None:
            raise ProtocolError(f"cannot send a message: the conversation is {self.state}, not open")
        header = _HEADER.pack(size, self._num_sent)
        self._num_sent += 1
        if size <= SHORT_BYTES:
            signed = header + payload
            return [signed + key.sign(signed)]
        prefix = header + key.sign(header)
        pieces = [prefix, payload, key.sign(prefix, payload)]
        return [b"".join(pieces)] if size <= _JOIN_BYTES else pieces

    # ------------------------------------------------------------ handshake

    def _parse(self, messages: list[Envelope]) -> None:
        while self.state != "open":
            body = self._take_greeting()
            if body is None:
                return
            _HANDSHAKE_STEPS[self.role, self.state](self, body)
        self._take_frames(messages)

    def _take_greeting(self) -> bytes | None:
        buffer = self._buffer
        if not MAGIC.startswith(buffer[: len(MAGIC)]):
            mismatch = format_mismatch(self._version, bytes(buffer[:MAX_HANDSHAKE_BYTES]))
            raise HandshakeError(mismatch or "a peer does not speak this protocol; refused")
        if len(buffer) < _GREETING.size:
            return None
        _, size = _GREETING.unpack_from(buffer)
        end = _GREETING.size + size
        if end > MAX_HANDSHAKE_BYTES:
            raise HandshakeError(
                f"a peer sent a greeting of {size} bytes; at most {MAX_HANDSHAKE_BYTES} are allowed"
            )
        if len(buffer) < end:
            return None
        body = bytes(buffer[_GREETING.size : end])
        del buffer[:end]
        return body

    def _greet(self, message: Hello | Challenge | Proof) -> None:
        body = codec.pack(message)
        self._outgoing.append(_GREETING.pack(MAGIC, len(body)) + body)

    def _on_hello(self, body: bytes) -> None:
        hello = _read_greeting(Hello, body)
        check_handshake_message(hello.role, "actor", hello.nonce)
        self._hello = hello
        self._said = transcript(hello, "controller", self._version, self._nonce)
        proof = prove(self._secret, "controller", self._said)
        self._greet(Challenge("controller", self._version, self._nonce, proof))
        self.state = "proving"

    def _on_challenge(self, body: bytes) -> None:
        challenge = _read_greeting(Challenge, body)
        check_handshake_message(challenge.role, "controller", challenge.nonce)
        hello = self._hello
        assert hello is not None
        self._said = transcript(hello, challenge.role, challenge.version, challenge.nonce)
        check_proof(self._secret, "controller", self._said, challenge.proof)
        # The proof goes out before the versions are compared, so that both sides can name the mismatch.
        self._greet(Proof(prove(self._secret, "actor", self._said)))
        check_versions(hello.process_id, hello.version, challenge.version)
        self._open()

    def _on_proof(self, body: bytes) -> None:
        hello = self._hello
        assert hello is not None
        check_proof(self._secret, "actor", self._said, _read_greeting(Proof, body).proof)
        self.identity = Identity(hello.process_id, hello.incarnation, hello.channel)
        if hello.channel == "beats":
            self._decoder = decoder_of((Beat,))
            self._max_frame_bytes = min(MAX_BEAT_BYTES, self._max_frame_bytes)
        check_versions(hello.process_id, hello.version, self._version)
        self._open()

    def _open(self) -> None:
        keys = derive_keys(self._secret, self._said)
        self._receive_key = keys[self.role]
        self._send_key = keys["actor" if self.role == "controller" else "controller"]
        self.state = "open"

    # ------------------------------------------------------------ frames

    def _take_whole(self, data: bytes, messages: list[Envelope]) -> None:
        """Decode the complete frames in `data` without copying them to the buffer; append the rest of `data`
        to the buffer. Most messages arrive as complete frames, so this saves most copies.

        Args:
            data: bytes from the peer, which begin with a frame.
            messages: a list to which the decoded messages are appended.
        """
        at, count = 0, len(data)
        while count - at >= _HEADER.size:
            size, sequence = _HEADER.unpack_from(data, at)
            start = at + (_HEADER.size if size <= SHORT_BYTES else _PREFIX_BYTES)
            end = start + size
            if end + MAC_BYTES > count:
                break
            self._check_frame(data[at:end], data[end : end + MAC_BYTES], size, sequence)
            messages.append(self._decoder.decode(data[start:end]))
            self._num_received += 1
            at = end + MAC_BYTES
        if at < count:
            self._buffer += data[at:]
            self._take_frames(messages)

    def _take_frames(self, messages: list[Envelope]) -> None:
        buffer = self._buffer
        while len(buffer) >= _HEADER.size:
            size, sequence = _HEADER.unpack_from(buffer)
            start = _HEADER.size if size <= SHORT_BYTES else _PREFIX_BYTES
            frame_bytes = start + size + MAC_BYTES
            if len(buffer) < frame_bytes:
                self._check_beginning(size, sequence)
                return
            # The frame is whole, and its MAC covers its prefix, whose own MAC need not be computed then.
            messages.append(self._read_frame(start, frame_bytes, size, sequence))
            del buffer[:frame_bytes]  # a bytearray drops its head without moving the rest
            self._is_prefix_checked = False
            self._num_received += 1

    def _check_beginning(self, size: int, sequence: int) -> None:
        """Check the beginning of an incomplete frame before more of it is stored: the frame must be short, or
        the peer must have signed its length.

        Args:
            size: the length of the payload, from the frame's header.
            sequence: the sequence number, from the frame's header.

        Raises:
            ProtocolError: the MAC of the length, the sequence number or the length is wrong.
        """
        if self._is_prefix_checked or (size > SHORT_BYTES and len(self._buffer) < _PREFIX_BYTES):
            return
        if size > SHORT_BYTES:
            header, mac = bytes(self._buffer[: _HEADER.size]), self._buffer[_HEADER.size : _PREFIX_BYTES]
            assert self._receive_key is not None  # the wire is open
            if not hmac.compare_digest(self._receive_key.sign(header), mac):
                raise ProtocolError(f"frame {self._num_received}: the MAC of its length does not match")
            self._is_prefix_checked = True
        self._check_header(size, sequence)

    def _check_header(self, size: int, sequence: int) -> None:
        if sequence != self._num_received:
            raise ProtocolError(
                f"expected frame {self._num_received}, got frame {sequence} (replayed or lost)"
            )
        if size > self._max_frame_bytes:
            raise ProtocolError(
                f"frame {sequence} has {size} bytes, at most {self._max_frame_bytes} are allowed; raise "
                "max_frame_bytes"
            )

    def _read_frame(self, start: int, frame_bytes: int, size: int, sequence: int) -> Envelope:
        end = frame_bytes - MAC_BYTES
        with memoryview(self._buffer) as whole, whole[:end] as signed, whole[end:frame_bytes] as mac:
            self._check_frame(signed, mac, size, sequence)
            with signed[start:] as payload:
                return self._decoder.decode(payload)

    def _check_frame(
        self, signed: bytes | memoryview, mac: bytes | memoryview, size: int, sequence: int
    ) -> None:
        key = self._receive_key
        assert key is not None  # the wire is open
        if not hmac.compare_digest(key.sign(signed), mac):
            raise ProtocolError(f"frame {self._num_received}: its MAC does not match")
        if sequence != self._num_received or size > self._max_frame_bytes:
            self._check_header(size, sequence)


_HANDSHAKE_STEPS: Final[dict[tuple[Role, State], Callable[[Wire, bytes], None]]] = {
    ("controller", "greeting"): Wire._on_hello,
    ("controller", "proving"): Wire._on_proof,
    ("actor", "greeting"): Wire._on_challenge,
}
"""The method that handles the next handshake message, by role and state."""


# ---------------------------------------------------------------- greetings, proofs and keys


class Hello(MessagePart):
    """The first handshake message, from the actor to the controller: the actor's identity, version and
    nonce.
    """

    role: str
    process_id: int
    incarnation: int
    version: str
    nonce: bytes
    channel: Channel = "control"


class Challenge(MessagePart):
    """The second handshake message, from the controller to the actor: the controller's version, nonce and
    proof that it knows the secret.
    """

    role: str
    version: str
    nonce: bytes
    proof: bytes


class Proof(MessagePart):
    """The last handshake message, from the actor to the controller: the proof that the actor knows the
    secret.
    """

    proof: bytes


class FrameKey:
    """A key that signs one direction of a conversation with HMAC-SHA256, truncated to `MAC_BYTES`.

    The hash state after the padded key is computed once and copied for each frame. For short frames this
    takes half the time of `hmac.digest`.

    Args:
        key: 32 secret bytes.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes):
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def sign(self, *pieces: bytes | bytearray | memoryview) -> bytes:
        """Return the MAC (message authentication code) of some bytes, which are given in pieces."""
        inner, outer = self._inner.copy(), self._outer.copy()
        for piece in pieces:
            inner.update(piece)
        outer.update(inner.digest())
        return outer.digest()[:MAC_BYTES]


def transcript(hello: Hello, role: str, version: str, nonce: bytes) -> bytes:
    """Return the hash of everything that both sides sent before the first proof. Proofs and keys are computed
    from it, so that they hold for this handshake only.

    Args:
        hello: the actor's handshake message.
        role, version, nonce: the fields of the controller's answer (`Challenge`).
    """
    return hashlib.sha256(MAGIC + pack((hello, role, version, nonce))).digest()


def prove(secret: bytes, role: Role, transcript_hash: bytes) -> bytes:
    """Return a proof that one side of a handshake knows the mesh's secret. The proof is valid for this
    handshake only.

    Args:
        secret: the mesh's secret.
        role: the side that knows the secret and sends the proof.
        transcript_hash: the hash of the handshake's first messages, from `transcript`.
    """
    return _mac(secret, f"{role} proof", transcript_hash)


def check_proof(secret: bytes, role: Role, transcript_hash: bytes, proof: bytes) -> None:
    """Check the proof that a peer has sent in a handshake, which must show that the peer knows the secret.

    Args:
        secret: the mesh's secret.
        role: the peer's role.
        transcript_hash: the hash of the handshake's first messages, from `transcript`.
        proof: the proof that the peer has sent.

    Raises:
        HandshakeError: the peer does not know the secret, or its proof is for another handshake or role.
    """
    if not hmac.compare_digest(prove(secret, role, transcript_hash), proof):
        raise HandshakeError(f"a peer claimed to be the {role} but does not know this mesh's secret; refused")


def derive_keys(secret: bytes, transcript_hash: bytes) -> dict[Role, FrameKey]:
    """Derive the two keys of a conversation, and return the key that signs the messages to each side.

    Args:
        secret: the mesh's secret.
        transcript_hash: the hash of the handshake's first messages, from `transcript`.
    """
    sides: tuple[Role, Role] = ("actor", "controller")
    return {side: FrameKey(_mac(secret, f"key to {side}", transcript_hash)) for side in sides}


def check_handshake_message(role: str, expected: Role, nonce: bytes) -> None:
    """Check the role and the nonce in a peer's handshake message.

    Args:
        role: the role that the message names.
        expected: the role that the peer must have.
        nonce: the nonce in the message.

    Raises:
        HandshakeError: the message names another role, or its nonce has a wrong length. The role is wrong,
            for example, if an attacker sends this process's own message back to it.
    """
    if role != expected:
        raise HandshakeError(
            f"expected a greeting of the {expected}, got one of role {role[:20]!r} (reflected?)"
        )
    if len(nonce) != NONCE_BYTES:
        raise HandshakeError(f"a greeting's nonce has {len(nonce)} bytes instead of {NONCE_BYTES}")


def check_versions(process_id: int, actor: str, controller: str) -> None:
    """Check that an actor process and the controller run the same version of this package.

    Args:
        process_id: the number of the actor process, for the error.
        actor, controller: the version on each side.

    Raises:
        HandshakeError: the versions differ.
    """
    if actor != controller:
        raise HandshakeError(
            f"process {process_id} runs jaxpp-async {actor[:40]}, the controller {controller[:40]}; "
            "install the same version on both",
        )


def format_mismatch(version: str, theirs: bytes) -> str | None:
    """Return an error text for users about a peer whose handshake message has another format than the
    messages of this process. The text says what to install. The caller has found already that the formats
    differ.

    Args:
        version: the version of this package in this process.
        theirs: the first bytes that the peer sent, at least as many as `MAGIC` has; the peer is not
            authenticated yet.

    Returns:
        The text; None if the bytes are not the beginning of a handshake message of this package in any
        format.
    """
    number = theirs[len(MAGIC) - 1 : len(MAGIC)]
    if theirs[: len(MAGIC) - 1] != MAGIC[:-1] or not number.isdigit():
        return None
    with contextlib.suppress(ProtocolError):  # the greeting of another format may look like anything
        said = decode_as(Hello, theirs[len(MAGIC) + 2 :]).version
        number += f" (its jaxpp-async says it is {said[:40]!r})".encode()
    return (
        f"a peer speaks format {number.decode()} of the control channel, this process, of jaxpp-async "
        f"{version}, format {MAGIC[-1:].decode()}: they run different versions or commits; install the same "
        "one on every host"
    )


def version_mismatch(ours: Mapping[str, str], theirs: Mapping[str, str | None], python: str) -> str | None:
    """Return a text that tells users what to install on another host, so that both sides run the same
    versions.

    Args:
        ours: the version of each package on this host.
        theirs: the version of each package on the other host; None for a package that is missing.
        python: the interpreter on the other host.

    Returns:
        The text; None if the versions agree.
    """
    for name, version in ours.items():
        other = theirs.get(name)
        if other != version:
            has = f"has {name} {other[:40]}" if other is not None else f"has no {name}"
            return (
                f"{python} {has}, this machine has {name} {version}; programs are made here and run there, "
                f"so install the same version on both: {python} -m pip install '{name}=={version}'"
            )
    return None


def _mac(secret: bytes, label: str, transcript_hash: bytes) -> bytes:
    return hmac.digest(secret, b"jaxpp-async " + label.encode() + b"\0" + transcript_hash, "sha256")


def _read_greeting(cls: type[T], body: bytes) -> T:
    try:
        return codec.decode_as(cls, body)
    except ProtocolError as error:
        raise HandshakeError(f"bad greeting: {error}") from None
