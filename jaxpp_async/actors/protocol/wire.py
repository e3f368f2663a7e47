"""wire: bytes in, messages out, and back. Sans-I/O: no sockets, no clock, no asyncio, no pickle.

A `Wire` is one side of one conversation. Feed it what came from the peer; send what `take_outgoing` and `encode` give.

    actor                                   controller
    greeting   --- Hello(nonce) --------->  greeting
               <-- Challenge(nonce, proof)  proving
    open       --- Proof ---------------->  open
               <=== frames, both ways ===>

A frame is: length 8, sequence number 8; payload; MAC of all before. Where the payload is longer than `SHORT_BYTES` a
MAC of the first 16 bytes stands before it, which is checked while the frame is not whole yet: of what nobody has proved
to have sent no more than `SHORT_BYTES` are kept. Any error is final: the wire then refuses everything. What was
verified before it is handed over all the same: it may say why the rest is broken.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from jaxpp_async.actors.messages import Beat, Log, Message, Reply, Request
from jaxpp_async.actors.protocol import codec
from jaxpp_async.actors.protocol.handshake import (
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    SECRET_BYTES,
    Challenge,
    Channel,
    FrameKey,
    Hello,
    Keys,
    Proof,
    Role,
    check_greeting,
    check_proof,
    check_versions,
    derive_keys,
    format_mismatch,
    prove,
    transcript,
)
from jaxpp_async.errors import HandshakeError, ProtocolError

State: TypeAlias = Literal["greeting", "proving", "open", "failed"]

MAX_HANDSHAKE_BYTES: Final = 4096
HANDSHAKE_TIMEOUT_S: Final = 5.0
"""What the caller allows a peer until the wire is open."""

DEFAULT_MAX_FRAME_BYTES: Final = 1 << 30
"""Programs travel in frames, so this is generous; only an authenticated peer may use it."""

MAX_BEAT_BYTES: Final = 256
"""The longest frame of a channel that carries signs of life alone."""

_GREETING = struct.Struct(">4sH")
_HEADER = struct.Struct(">QQ")
_PREFIX_BYTES: Final = _HEADER.size + MAC_BYTES
_JOIN_BYTES: Final = 1 << 16  # below this, one copy is cheaper than one more write

SHORT_BYTES: Final = 4096
"""A payload of at most so many bytes comes without a MAC of its length."""

TO_ACTOR = codec.message_types(Request)
TO_CONTROLLER = codec.message_types(Reply | Log)
BEATS = codec.message_types(Beat)


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process, which life of it, and which channel a conversation belongs to."""

    process_id: int
    incarnation: int
    channel: Channel = "control"


class Wire:
    """One side of one conversation.

    Args:
        role: which side this is.
        secret: the mesh's 32 bytes.
        version: this side's package version.
        identity: who this actor is; the controller leaves it None and learns it.
        max_frame_bytes: the longest payload to accept or send.
        nonce: 32 fresh random bytes; given only by tests.

    Attributes:
        state: `"greeting"`, `"proving"`, `"open"` or `"failed"`.
        identity: the actor's identity; on the controller's side None until the actor has proved itself.
        error: what was wrong behind the last messages that `feed` gave, or None.
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
        self._known = TO_ACTOR if role == "actor" else TO_CONTROLLER
        self._encoder = codec.Encoder(max_frame_bytes)
        self._buffer = bytearray()
        self._outgoing: list[bytes] = []
        self._hello: Hello | None = None
        self._said = b""
        self._send_key: FrameKey | None = None
        self._receive_key: FrameKey | None = None
        self._num_sent = self._num_received = 0
        self._is_prefix_checked = False  # that of the frame at the buffer's head
        if identity is not None:
            life = (identity.process_id, identity.incarnation)
            self._hello = Hello("actor", *life, version, self._nonce, identity.channel)
            if identity.channel == "beats":
                self._known = {}  # the controller has nothing to say there
            self._greet(self._hello)

    def take_outgoing(self) -> bytes:
        """Handshake bytes to send now, perhaps none."""
        data = b"".join(self._outgoing)
        self._outgoing.clear()
        return data

    def feed(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Take bytes from the peer, in any pieces; give the messages that are now complete.

        Where something is wrong behind one of them they are given, the wire has failed, and `error` says what it was.

        Raises:
            HandshakeError: the peer is not of this mesh, or of another version (then `identity` says who).
            ProtocolError: a wrong length, sequence number, MAC or message. Both leave the wire failed.
        """
        if self.state == "failed":
            raise ProtocolError("this conversation has already failed")
        messages: list[Message] = []
        try:
            if self.state == "open" and type(data) is bytes and len(data) <= _JOIN_BYTES and not self._buffer:
                self._take_whole(data, messages)
            else:
                self._buffer += data
                self._parse(messages)
        except BaseException as error:  # whatever it is, the stream is out of step from here: nothing may be trusted
            self.state = "failed"
            self._buffer = bytearray()
            self._send_key = self._receive_key = None
            if not messages or not isinstance(error, ProtocolError):
                raise
            self.error = error.with_traceback(None)  # its frames hold this wire
        return messages

    def encode(self, message: Message) -> list[bytes]:
        """A message as a frame, in pieces to be written in order.

        Raises:
            ProtocolError: the wire is not open. MeshError: the message cannot be encoded; the wire goes on.
        """
        return self.frame(self._encoder.encode(message))

    def frame(self, payload: bytes) -> list[bytes]:
        """An encoded message as a frame, in pieces to be written in order.

        Raises:
            ProtocolError: the wire is not open.
        """
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

    def _parse(self, messages: list[Message]) -> None:
        while self.state != "open":
            body = self._take_greeting()
            if body is None:
                return
            _STEPS[self.role, self.state](self, body)
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
            raise HandshakeError(f"a peer sent a greeting of {size} bytes; at most {MAX_HANDSHAKE_BYTES} are allowed")
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
        check_greeting(hello.role, "actor", hello.nonce)
        self._hello = hello
        self._said = transcript(hello, "controller", self._version, self._nonce)
        proof = prove(self._secret, "controller", self._said)
        self._greet(Challenge("controller", self._version, self._nonce, proof))
        self.state = "proving"

    def _on_challenge(self, body: bytes) -> None:
        challenge = _read_greeting(Challenge, body)
        check_greeting(challenge.role, "controller", challenge.nonce)
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
            self._known, self._max_frame_bytes = BEATS, min(MAX_BEAT_BYTES, self._max_frame_bytes)
        check_versions(hello.process_id, hello.version, self._version)
        self._open()

    def _open(self) -> None:
        keys: Keys = derive_keys(self._secret, self._said)
        to_peer, from_peer = keys.to_controller, keys.to_actor
        if self.role == "controller":
            to_peer, from_peer = from_peer, to_peer
        self._send_key, self._receive_key = to_peer, from_peer
        self.state = "open"

    # ------------------------------------------------------------ frames

    def _take_whole(self, data: bytes, messages: list[Message]) -> None:
        """Frames of which each has come in one piece, as those of a step do; what is left waits in the buffer."""
        at, count = 0, len(data)
        while count - at >= _HEADER.size:
            size, sequence = _HEADER.unpack_from(data, at)
            start = at + (_HEADER.size if size <= SHORT_BYTES else _PREFIX_BYTES)
            end = start + size
            if end + MAC_BYTES > count:
                break
            self._check_frame(data[at:end], data[end : end + MAC_BYTES], size, sequence)
            messages.append(codec.decode(data[start:end], self._known))
            self._num_received += 1
            at = end + MAC_BYTES
        if at < count:
            self._buffer += data[at:]
            self._take_frames(messages)

    def _take_frames(self, messages: list[Message]) -> None:
        buffer = self._buffer
        while len(buffer) >= _HEADER.size:
            size, sequence = _HEADER.unpack_from(buffer)
            start = _HEADER.size if size <= SHORT_BYTES else _PREFIX_BYTES
            frame_bytes = start + size + MAC_BYTES
            if len(buffer) < frame_bytes:
                self._check_beginning(size, sequence)
                return
            # All of it is here, and its MAC says as much as that of its prefix, which need not be computed then.
            messages.append(self._read_frame(start, frame_bytes, size, sequence))
            del buffer[:frame_bytes]  # a bytearray drops its head without moving the rest
            self._is_prefix_checked = False
            self._num_received += 1

    def _check_beginning(self, size: int, sequence: int) -> None:
        """Before more of a frame is kept: that the peer has sent this length, or that it is short."""
        if self._is_prefix_checked or (size > SHORT_BYTES and len(self._buffer) < _PREFIX_BYTES):
            return
        if size > SHORT_BYTES:
            header, mac = bytes(self._buffer[: _HEADER.size]), self._buffer[_HEADER.size : _PREFIX_BYTES]
            if not hmac.compare_digest(self._key().sign(header), mac):
                raise ProtocolError(f"frame {self._num_received}: the MAC of its length does not match")
            self._is_prefix_checked = True
        self._check_header(size, sequence)

    def _check_header(self, size: int, sequence: int) -> None:
        if sequence != self._num_received:
            raise ProtocolError(f"expected frame {self._num_received}, got frame {sequence} (replayed or lost)")
        if size > self._max_frame_bytes:
            raise ProtocolError(
                f"frame {sequence} has {size} bytes, at most {self._max_frame_bytes} are allowed; raise max_frame_bytes"
            )

    def _read_frame(self, start: int, frame_bytes: int, size: int, sequence: int) -> Message:
        end = frame_bytes - MAC_BYTES
        with memoryview(self._buffer) as whole, whole[:end] as signed, whole[end:frame_bytes] as mac:
            self._check_frame(signed, mac, size, sequence)
            with signed[start:] as payload:
                return codec.decode(payload, self._known)

    def _check_frame(self, signed: bytes | memoryview, mac: bytes | memoryview, size: int, sequence: int) -> None:
        key = self._receive_key
        assert key is not None  # the wire is open
        if not hmac.compare_digest(key.sign(signed), mac):
            raise ProtocolError(f"frame {self._num_received}: its MAC does not match")
        if sequence != self._num_received or size > self._max_frame_bytes:
            self._check_header(size, sequence)

    def _key(self) -> FrameKey:
        assert self._receive_key is not None  # the wire is open
        return self._receive_key


_STEPS: Final[dict[tuple[Role, State], Callable[[Wire, bytes], None]]] = {
    ("controller", "greeting"): Wire._on_hello,
    ("controller", "proving"): Wire._on_proof,
    ("actor", "greeting"): Wire._on_challenge,
}
"""What a handshake message means, by side and state."""


def _read_greeting(cls, body: bytes):
    try:
        return codec.decode_as(cls, body)
    except ProtocolError as error:
        raise HandshakeError(f"bad greeting: {error}") from None
