"""gate: where actors come in. Sockets in, authenticated connections of expected actors out.

A peer that cannot prove itself is refused and logged, and the mesh goes on. After the handshake
it never talks to an actor.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TypeAlias

from jaxpp_async.actors.connection import Connection, attach_socket
from jaxpp_async.actors.protocol import Identity, Wire
from jaxpp_async.errors import HandshakeError

_LOG = logging.getLogger("jaxpp_async.control")

MAX_UNPROVEN = 256
"""Connections that may be in their handshake at one time; more are closed at once."""

Arrival: TypeAlias = "asyncio.Future[Connection]"


class Gate:
    """Accepts control connections for one mesh.

    Args:
        secret: the mesh's 32 bytes. version: the package's. max_frame_bytes: for every wire.
    """

    def __init__(self, secret: bytes, *, version: str, max_frame_bytes: int):
        self._secret, self._version, self._max_frame_bytes = secret, version, max_frame_bytes
        self._expected: dict[Identity, Arrival] = {}
        self._unproven: set[Connection] = set()
        self._attaching: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> tuple[str, int]:
        """Accept connections on a free port of `host`'s interface; gives the address."""
        loop = asyncio.get_running_loop()
        # Not serving yet: asyncio would lose the listening socket if this were cancelled at its last wait.
        self._server = await loop.create_server(
            self._make_connection, host, 0, family=socket.AF_INET, start_serving=False
        )
        await self._server.start_serving()
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    def adopt(self, sock: socket.socket) -> None:
        """Take one end of a socket pair as if it had been accepted."""
        connection = self._make_connection()
        task = asyncio.get_running_loop().create_task(attach_socket(connection, sock), name="attach a control socket")
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    def expect(self, identity: Identity) -> Arrival:
        """The future connection of one actor; raises `HandshakeError` if that actor came with another version."""
        arrival: Arrival = asyncio.get_running_loop().create_future()
        self._expected[identity] = arrival
        arrival.add_done_callback(lambda _: self._expected.pop(identity, None))
        return arrival

    async def aclose(self) -> None:
        """Stop accepting and drop every handshake under way. Connections handed out stay open."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._attaching):
            task.cancel()
        left = tuple(self._unproven)
        for connection in left:
            connection.abort()
        for arrival in tuple(self._expected.values()):
            arrival.cancel()
        await asyncio.gather(*(c.wait_closed() for c in left))

    def _make_connection(self) -> Connection:
        wire = Wire("controller", self._secret, version=self._version, max_frame_bytes=self._max_frame_bytes)
        connection = Connection(wire)
        connection.opened.add_done_callback(lambda opened: self._on_opened(connection, opened))
        if len(self._unproven) >= MAX_UNPROVEN:
            _LOG.warning("refused a control connection: %d are already in their handshake", len(self._unproven))
            # The transport exists only after this returns.
            asyncio.get_running_loop().call_soon(connection.abort)
        self._unproven.add(connection)
        return connection

    def _on_opened(self, connection: Connection, opened: asyncio.Future[None]) -> None:
        self._unproven.discard(connection)
        identity = connection.wire.identity
        arrival = self._expected.get(identity) if identity is not None else None
        error = opened.exception()
        if error is None and arrival is not None and not arrival.done():
            arrival.set_result(connection)
            return
        if error is None:
            error = HandshakeError(f"{identity} is not expected (it came before, or belongs to an earlier life)")
        connection.abort()
        _LOG.warning("refused a control connection: %s", error)
        # Only a proven peer may end a launch: anyone can open a socket.
        if isinstance(error, HandshakeError) and arrival is not None and not arrival.done():
            arrival.set_exception(error)
