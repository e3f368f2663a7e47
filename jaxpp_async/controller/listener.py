"""Accept the control connections that a mesh's actors open, and the connections for their heartbeats.

A peer that cannot prove that it belongs to the mesh is refused and logged, and the mesh is not affected.
After the handshake, a control connection is given to the caller that expects it. Heartbeat connections stay
with the listener, which passes each heartbeat to `on_beat`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from jaxpp_async.base.descriptors import free_descriptors, keep_from_children
from jaxpp_async.errors import HandshakeError, ProtocolError
from jaxpp_async.protocol.connection import Connection, attach_socket
from jaxpp_async.protocol.frames import Identity, Wire
from jaxpp_async.protocol.messages import Beat

_LOG = logging.getLogger("jaxpp_async.control")

MAX_UNPROVEN = 256
"""The most connections that may be in their handshake at one time. The limit is lower where this process may
not open so many descriptors. If there is one more, the oldest connection of the address with the most of them
is closed: it had the most time, and silent peers could otherwise keep all others out until their own
handshakes time out.
"""

BACKLOG = 100
"""The most connections that may wait to be accepted. asyncio accepts up to this number together before it
reports any of them, so all of them have descriptors before the first is closed for being one too many.
"""

Arrival: TypeAlias = "asyncio.Future[Connection]"


class ControlListener:
    """A listener that accepts the control and heartbeat connections of one mesh's actor processes.

    Args:
        secret: 32 bytes that only processes of this mesh know, and with which a peer proves that it is one of
            them.
        version: the version of this package, which peers must have as well.
        max_frame_bytes: the length of the longest frame on each connection.

    Attributes:
        on_beat: called with every heartbeat of an actor whose control connection is open, and with the
            identity of its sender; None: heartbeats are dropped. May be set at any time.
    """

    def __init__(self, secret: bytes, *, version: str, max_frame_bytes: int):
        self._secret, self._version, self._max_frame_bytes = secret, version, max_frame_bytes
        self.on_beat: Callable[[Identity, Beat], None] | None = None
        self._expected: dict[Identity, Arrival] = {}
        self._accepted: dict[int, Connection] = {}  # the latest control connection, by process
        self._beating: dict[int, Connection] = {}
        self._unproven: dict[Connection, None] = {}  # in order of arrival
        self._refusals = RateLimitedLog(lambda text: _LOG.warning("%s", text), time.monotonic)
        self._attaching: set[asyncio.Task[None]] = set()
        self._most_unproven = MAX_UNPROVEN
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> tuple[str, int]:
        """Accept connections on a free port of the interface with the address `host`; return the address and
        port.
        """
        loop = asyncio.get_running_loop()
        # Leave most of this process's file descriptors for other uses.
        self._most_unproven = max(1, min(MAX_UNPROVEN, free_descriptors() // 4))
        # Serving starts below: if this call did it, a cancellation could make asyncio lose the open socket.
        self._server = await loop.create_server(
            self._make_connection,
            host,
            0,
            family=socket.AF_INET,
            backlog=min(BACKLOG, self._most_unproven),
            start_serving=False,
        )
        keep_from_children(*(sock.fileno() for sock in self._server.sockets))
        await self._server.start_serving()
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    def adopt(self, sock: socket.socket) -> None:
        """Treat one end of a socket pair like an accepted connection.

        The other end belongs to an inline actor, which runs in this process.
        """
        connection = self._make_connection()
        task = asyncio.get_running_loop().create_task(
            attach_socket(connection, sock), name="attach a control socket"
        )
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    def expect(self, identity: Identity) -> Arrival:
        """Expect a control connection from an actor process, and return a future of the connection.

        The future raises `HandshakeError` if the process has another version of this package.

        Args:
            identity: the process number and its incarnation. When a process is replaced, the new process has
                the same number and another incarnation.
        """
        arrival: Arrival = asyncio.get_running_loop().create_future()
        self._expected[identity] = arrival
        arrival.add_done_callback(lambda _: self._expected.pop(identity, None))
        return arrival

    async def aclose(self) -> None:
        """Stop accepting connections. Close all heartbeat connections and all connections whose handshake has
        not ended.

        Control connections that have been accepted stay open.
        """
        self._refusals.flush()
        for listening in self._server.sockets if self._server is not None else ():
            asyncio.get_running_loop().remove_reader(listening)
        try:
            # A connection that was accepted a moment ago must get its transport first. Without one it cannot
            # be closed, and closing the server would leave its socket open (python/cpython#109564).
            await asyncio.gather(asyncio.sleep(0), *self._attaching)
        finally:
            if self._server is not None:
                self._server.close()
        left = (*self._unproven, *self._beating.values())
        self._accepted.clear()
        for connection in left:
            connection.abort()
        for arrival in tuple(self._expected.values()):
            arrival.cancel()
        await asyncio.gather(*(c.wait_closed() for c in left))

    def _make_connection(self) -> Connection:
        wire = Wire("controller", self._secret, version=self._version, max_frame_bytes=self._max_frame_bytes)
        connection = Connection(wire)
        connection.on_message = partial(self._on_message, connection)
        connection.opened.add_done_callback(lambda opened: self._on_opened(connection, opened))
        if len(self._unproven) >= self._most_unproven:
            source = {connection: connection.source for connection in self._unproven}
            most_common, count = Counter(source.values()).most_common(1)[0]
            oldest = next(connection for connection in source if source[connection] == most_common)
            del self._unproven[oldest]
            oldest.abort()
            self._refusals.write(
                f"refused a control connection: {len(source)} later ones are in their handshake, "
                f"{count} of them from {most_common or 'this process'}"
            )
        self._unproven[connection] = None
        return connection

    def _on_opened(self, connection: Connection, opened: asyncio.Future[None]) -> None:
        if connection not in self._unproven:
            return
        del self._unproven[connection]
        identity = connection.wire.identity
        if identity is not None and identity.channel == "beats" and opened.exception() is None:
            self._accept_heartbeats(connection, identity)
            return
        arrival = self._expected.get(identity) if identity is not None else None
        error = opened.exception()
        if error is None and arrival is not None and not arrival.done():
            assert identity is not None
            self._accepted[identity.process_id] = connection
            arrival.set_result(connection)
            return
        if error is None:
            error = HandshakeError(
                f"{identity} is not expected (it came before, or belongs to an earlier life)"
            )
        connection.abort()
        self._refusals.write(f"refused a control connection: {error}")
        # Only a peer that has proven its identity may end a launch, since anyone can open a socket.
        if isinstance(error, HandshakeError) and arrival is not None and not arrival.done():
            arrival.set_exception(error)

    # ------------------------------------------------------------ beats

    def _accept_heartbeats(self, connection: Connection, identity: Identity) -> None:
        """Accept a heartbeat connection, or close it if its process has no open control connection.

        A new heartbeat connection replaces an earlier one of the same process.
        """
        if not self._is_connected(identity):
            connection.abort()
            self._refusals.write(f"refused a heartbeat connection: {identity} is not here (any more)")
            return
        before = self._beating.get(identity.process_id)
        if before is not None:
            before.abort()
        self._beating[identity.process_id] = connection
        connection.on_closed = lambda error: self._on_heartbeats_closed(identity.process_id, connection)

    def _on_heartbeats_closed(self, process_id: int, connection: Connection) -> None:
        if self._beating.get(process_id) is connection:
            del self._beating[process_id]

    def _on_message(self, connection: Connection, message: Any, number: int | None) -> None:
        """Pass a heartbeat to `on_beat`. Close a control connection that sends a message too early.

        A control connection may send messages only after it has been given to the caller of `expect`. From
        then on, its messages are passed to that caller and not to this method.
        """
        identity = connection.wire.identity
        assert identity is not None  # no message is decoded before the handshake has set it
        if identity.channel != "beats":
            connection.fail(ProtocolError(f"unexpected {type(message).__name__}"))
            return
        # The first heartbeat may arrive together with the end of the handshake.
        self._on_opened(connection, connection.opened)
        if (
            self.on_beat is not None
            and self._beating.get(identity.process_id) is connection
            and self._is_connected(identity)
        ):
            self.on_beat(identity, message)

    def _is_connected(self, identity: Identity) -> bool:
        """Return whether a process has an open control connection, in the same incarnation (one life of the
        process).
        """
        control = self._accepted.get(identity.process_id)
        return (
            control is not None
            and control.is_open
            and control.wire.identity == replace(identity, channel="control")
        )


# ---------------------------------------------------------------- refusals

MOST = 20
WINDOW_S = 10.0
"""The most lines about refused connections that are logged in each period, and the period in seconds."""


class RateLimitedLog:
    """A log of refused connections that writes at most `MOST` lines in `WINDOW_S` seconds.

    Further lines are only counted, and their number is logged later. A peer that can connect to the port can
    be refused as often as it likes, and must not be able to fill the log.

    Args:
        log: called with each line to write.
        clock: returns a monotonic time in seconds.
    """

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float]):
        self._log, self._clock = log, clock
        self._began_s, self._num_written, self._num_hidden = clock(), 0, 0

    def write(self, text: str) -> None:
        """Log a line about a refused connection, or only count it if `MOST` lines have already been logged in
        this period.
        """
        now_s = self._clock()
        if now_s - self._began_s > WINDOW_S:
            self.flush()
            self._began_s, self._num_written = now_s, 0
        if self._num_written < MOST:
            self._num_written += 1
            self._log(text)
        else:
            self._num_hidden += 1

    def flush(self) -> None:
        """Log how many refused connections were only counted, if there are any."""
        if self._num_hidden:
            self._log(f"refused {self._num_hidden} more connections")
            self._num_hidden = 0
