"""heartbeat: an actor process tells the controller that it lives and where it is, every half second, over a connection
of its own from a thread of its own.

Neither the actor's event loop, nor JAX, nor a step can hold the thread up, only what stops the whole process: SIGSTOP,
swapping, native code that keeps the GIL. When the connection breaks the thread ends the process: its controller is out
of reach, and the control connection would not notice as long as nobody sends on it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jaxpp_async
from jaxpp_async.base.descriptors import keep_from_children
from jaxpp_async.errors import ProtocolError
from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.clocks import clock_name
from jaxpp_async.protocol.frames import Identity, Wire
from jaxpp_async.protocol.messages import Beat
from jaxpp_async.protocol.parent_watch import LEASE_S, ExitCode

BEAT_S = 0.5
"""Between two signs of life."""

ORDERLY_S = 2.0
"""What the event loop, which may have noticed as well, gets to end in order."""

_ATTEMPTS, _PAUSE_S = 20, 0.5
_SETTLED_S = 3.0
"""A connection that lasted longer was let in; one that did not is tried again."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Who beats, and to whom.

    Args:
        identity: of the control connection, which is open already.
        secret: the mesh's 32 bytes.
        controller: its host and port.
        lost_s: how long what was sent may stay without an acknowledgement, and how long connecting may take, before
            the controller is out of reach: at least as long as it may be silent.
    """

    identity: Identity
    secret: bytes = field(repr=False)
    controller: tuple[str, int]
    lost_s: float = LEASE_S


def start_beating(
    beating: Heartbeat, read: Callable[[], Position | None], leave: Callable[[ExitCode], None]
) -> threading.Thread:
    """Start the thread.

    Args:
        read: where the actor is now; called from the thread.
        leave: ends the process, when the controller is out of reach.
    """
    thread = threading.Thread(
        target=_live, args=(beating, read, leave), name="jaxpp-async heartbeat", daemon=True
    )
    thread.start()
    return thread


def _live(beating: Heartbeat, read: Callable[[], Position | None], leave: Callable[[ExitCode], None]) -> None:
    said = ""
    for _ in range(_ATTEMPTS):
        began_s = time.monotonic()
        try:
            with _connect(beating) as sock:
                _beat(sock, _greet(sock, beating), read)
        except (OSError, ProtocolError) as error:
            said = str(error)
        if time.monotonic() - began_s > _SETTLED_S:
            break
        # The controller lets in nobody whose control connection it has not seen open, and that news may come later.
        _pause(_PAUSE_S)
    _pause(ORDERLY_S)
    with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more
        print(f"lost the controller at {beating.controller}: {said}", file=sys.stderr, flush=True)
    leave(ExitCode.CONNECTION_LOST)


def _connect(beating: Heartbeat) -> socket.socket:
    sock = socket.create_connection(beating.controller, timeout=beating.lost_s)
    keep_from_children(sock.fileno())
    # a controller that is busy or stopped keeps its connections; the lease is about that
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):  # some sandboxes do not know the option
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(beating.lost_s * 1000))
    return sock


def _greet(sock: socket.socket, beating: Heartbeat) -> Wire:
    identity = Identity(beating.identity.process_id, beating.identity.incarnation, "beats")
    wire = Wire("actor", beating.secret, version=jaxpp_async.__version__, identity=identity)
    sock.sendall(wire.take_outgoing())
    while wire.state != "open":
        _receive(sock, wire)
        sock.sendall(wire.take_outgoing())
    return wire


def _beat(sock: socket.socket, wire: Wire, read: Callable[[], Position | None]) -> None:
    """Beat until the connection breaks."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    while True:
        at = read()
        position = (
            (at.step, at.program_id, at.instruction, at.waiting, at.computing) if at is not None else None
        )
        sock.sendall(b"".join(wire.encode(Beat(position, clock_name()))))
        deadline = time.monotonic() + BEAT_S
        while (left_s := deadline - time.monotonic()) > 0:
            if poller.poll(left_s * 1000):
                _receive(sock, wire)


def _receive(sock: socket.socket, wire: Wire) -> None:
    """Take what the controller says. After the handshake that is nothing, so it can only be an end or an error."""
    data = sock.recv(4096)
    if not data:
        raise ConnectionResetError("it closed the connection")
    wire.feed(data)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
