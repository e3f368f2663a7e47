"""Run one conversation of the control channel (a `frames.Wire`) over a stream socket with asyncio. The
controller and the actor processes both use this module.

Each message that arrives is passed to a callback, in order. Messages to send wait in a buffer of limited size
until the socket accepts them. A second callback is called once, when the conversation is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from msgspec import Raw

from jaxpp_async.base.descriptors import keep_from_children
from jaxpp_async.errors import HandshakeError, ProtocolError
from jaxpp_async.protocol.frames import HANDSHAKE_TIMEOUT_S, Wire
from jaxpp_async.protocol.messages import Log, Message
from jaxpp_async.protocol.parent_watch import LEASE_S
from jaxpp_async.protocol.task_group import retrieve

_LOG = logging.getLogger("jaxpp_async.control")

_GRACE_S = 5.0
"""The seconds for which a control connection may be without contact beyond the limit for the heartbeat
connection. The heartbeat connection is to be lost first, since its loss says what is wrong.
"""

DRAIN_ABOVE_BYTES = 1 << 20
LOG_ABOVE_BYTES = 1 << 20
"""The number of unsent bytes above which log records are dropped, so that they never delay a reply."""

MAX_UNSENT_BYTES = 4 << 30
"""The number of unsent bytes above which the peer is taken to be stuck, and the connection is closed."""


OnMessage: TypeAlias = Callable[[Any, int | None], None]


class Connection(asyncio.Protocol):
    """An authenticated conversation between controller and actor process over one socket.

    Args:
        wire: the state machine of this process's side of the conversation, in its initial state (before the
            handshake).
        on_message: called with each message that arrives, in order, and with the number of the request that
            the message makes or answers (None if it does neither); may be replaced at any time.
        on_closed: called once, when the socket is closed, with the error that ended the conversation, or None
            if either side closed the connection without an error.
        lost_s: about how many seconds sent data may stay without an acknowledgement before the peer counts as
            lost.

    Attributes:
        opened: a future that completes when both sides have authenticated themselves, or raises the reason if
            they could not.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        on_message: OnMessage | None = None,
        on_closed: Callable[[Exception | None], None] | None = None,
        lost_s: float = LEASE_S,
    ):
        loop = asyncio.get_running_loop()
        self.wire, self.on_message, self.on_closed = wire, on_message, on_closed
        self.opened: asyncio.Future[None] = loop.create_future()
        self.opened.add_done_callback(retrieve)
        self._closed: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._error: Exception | None = None
        self._lost_s = lost_s + _GRACE_S
        self._is_aborted = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._handshake_timer = loop.call_later(HANDSHAKE_TIMEOUT_S, self._on_handshake_timeout)

    # ------------------------------------------------------------ for owners

    @property
    def is_open(self) -> bool:
        """Whether both sides have authenticated themselves and the socket is still open."""
        return self.wire.state == "open" and self._transport is not None and not self._transport.is_closing()

    @property
    def ends(self) -> tuple[str, str]:
        """The network addresses of the peer and of this process, in this order; available while the socket is
        open.
        """
        assert self._transport is not None
        return self._transport.get_extra_info("peername")[0], self._transport.get_extra_info("sockname")[0]

    @property
    def source(self) -> str:
        """The network address of the peer. This is an empty text if there is no connection yet, or if the
        peer has no address (for example, a socket made by `socket.socketpair`).
        """
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return peer[0] if peer else ""

    def send(self, message: Message | Raw, number: int | None = None) -> None:
        """Send a message without waiting. If the conversation is over, the message is dropped without an
        error, because `on_closed` reports the reason. A `Log` message is also dropped while a lot of data is
        waiting to be sent.

        Args:
            message: the message, or what `codec.Encoder.encode_message` returned for it.
            number: the number of the request that the message makes or answers; None if it does neither.

        Raises:
            MeshError: the message cannot be encoded. The connection can still be used.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        unsent = transport.get_write_buffer_size()
        if unsent > LOG_ABOVE_BYTES and type(message) is Log:
            return
        if unsent > MAX_UNSENT_BYTES:
            self.fail(ProtocolError(f"the peer does not read: {unsent} bytes wait to be sent"))
            return
        pieces = self.wire.encode(message, number)
        if len(pieces) == 1:
            transport.write(pieces[0])
        else:
            transport.writelines(pieces)

    async def drain(self) -> None:
        """Wait until the amount of unsent data is small, so that the caller may send more, or until the
        conversation is over.
        """
        await self._writable.wait()

    def close(self) -> None:
        """Close the socket after all unsent data has been sent. This method returns immediately;
        `wait_closed` waits for the end.
        """
        self._handshake_timer.cancel()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the socket immediately and lose unsent data. A connection that has no socket yet is closed as
        soon as it gets one.
        """
        self._handshake_timer.cancel()
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._closed)

    # ------------------------------------------------------------ for asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(
            asyncio.Transport, transport
        )  # uvloop's transports do not inherit from it
        if self._is_aborted:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=DRAIN_ABOVE_BYTES)
        sock = transport.get_extra_info("socket")
        keep_from_children(sock.fileno())
        _tune(sock, self._lost_s)
        self._send_greeting()

    def data_received(self, data: bytes) -> None:
        try:
            messages = self.wire.feed(data)
        except ProtocolError as error:
            self._send_greeting()  # with this proof the peer, too, can name a version mismatch
            self.fail(error)
            return
        if not self.opened.done():
            self._send_greeting()
            if self.wire.error is not None:  # no owner has the connection yet that could get messages
                self.fail(self.wire.error)
                return
            if self.wire.state == "open":
                self._handshake_timer.cancel()
                self.opened.set_result(None)
        for number, message in messages:
            if self.on_message is None:
                self.fail(ProtocolError(f"unexpected {type(message).__name__}"))
                return
            try:
                self.on_message(message, number)
            except ProtocolError as error:  # an authenticated peer breaks the protocol
                self.fail(error)
                return
        if self.wire.error is not None:
            self.fail(self.wire.error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._handshake_timer.cancel()
        self._writable.set()
        error = self._error or exc
        if not self.opened.done():
            said = "closed the connection during the handshake (a wrong secret, or another version?)"
            self.opened.set_exception(error or HandshakeError(f"the peer {said}"))
        if not self._closed.done():
            self._closed.set_result(None)
        if self.on_closed is not None:
            self.on_closed(error)
        self.on_message = self.on_closed = None  # their owners refer to this connection: a cycle

    # ------------------------------------------------------------ inside

    def _send_greeting(self) -> None:
        data = self.wire.take_outgoing()
        if data and self._transport is not None:
            self._transport.write(data)

    def fail(self, error: Exception) -> None:
        """End the conversation because of `error`. If this is called more than once, `on_closed` receives the
        first error.
        """
        if self._error is None:
            self._error = error
        if not self.opened.done():
            self.opened.set_exception(self._error)
        if isinstance(error, HandshakeError):
            self.close()  # what was sent so far may still reach the peer
        else:
            self.abort()

    def _on_handshake_timeout(self) -> None:
        self.fail(HandshakeError(f"a peer did not prove itself within {HANDSHAKE_TIMEOUT_S:g} s; refused"))


async def connect_tcp(connection: Connection, host: str, port: int) -> None:
    """Connect to a listening controller, and wait until both sides have authenticated themselves.

    Args:
        connection: the connection to open.
        host, port: the controller's address.

    Raises:
        HandshakeError: the peer refused this process, or does not belong to this mesh.
        OSError: no process listens at this address.
    """
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: connection, host, port)
    await connection.opened


async def attach_socket(connection: Connection, sock: socket.socket) -> None:
    """Start a conversation over one end of a `socket.socketpair()`, without waiting for the handshake.

    The descriptor is detached from `sock` immediately, so that the owner of `sock` may close it at any time.
    """
    taken = socket.socket(fileno=sock.detach())
    taken.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: connection, sock=taken)


def _tune(sock: Any, lost_s: float) -> None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            # Some sandboxes do not know the option; then the kernel's default holds.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_s * 1000))
