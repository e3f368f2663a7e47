"""Tell the controller every half second that an actor process is alive, and at which instruction of its
program the process is.

A separate thread sends these heartbeats over a separate connection. The thread continues while the actor's
event loop, JAX or a step is blocked. Only an event that stops the whole process stops the thread too, such as
SIGSTOP, swapping, or native code that keeps the GIL.

When the connection breaks, the thread ends the process, since the controller can no longer be reached. The
control connection alone would not notice the loss as long as nothing is sent on it.
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
from jaxpp_async.protocol.actor_info import ExitCode, Position
from jaxpp_async.protocol.clocks import clock_name
from jaxpp_async.protocol.frames import Identity, Wire
from jaxpp_async.protocol.messages import Beat
from jaxpp_async.protocol.parent_watch import LEASE_S

BEAT_S = 0.5
"""The time in seconds between two heartbeats."""

ORDERLY_S = 2.0
"""The time in seconds for which the heartbeat's thread, before it ends the process, waits for the event loop
to end it in an orderly way, since the loop may have noticed the same loss."""

_ATTEMPTS, _PAUSE_S = 20, 0.5
_SETTLED_S = 3.0
"""The time in seconds after which a connection counts as accepted by the controller, so that its loss is
final. If a connection breaks earlier, the thread connects again."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The options of a process's heartbeats.

    Args:
        identity: the identity that the process has used for its control connection. The control connection
            must already be open.
        secret: the 32 bytes that all processes of the mesh share.
        controller: the host and the port of the controller.
        lost_s: how long, in seconds, the controller may take to acknowledge sent bytes or to accept a
            connection before the process considers it unreachable. This is at least as long as the time for
            which the controller may be silent.
    """

    identity: Identity
    secret: bytes = field(repr=False)
    controller: tuple[str, int]
    lost_s: float = LEASE_S


def start_beating(
    heartbeat: Heartbeat, read: Callable[[], Position | None], leave: Callable[[ExitCode], None]
) -> threading.Thread:
    """Start the thread that sends heartbeats to the controller, and return it.

    Args:
        heartbeat: the options.
        read: returns the actor's position in its program, or None; called from the thread.
        leave: ends the process with an exit status; called when the controller cannot be reached.
    """
    thread = threading.Thread(
        target=_run, args=(heartbeat, read, leave), name="jaxpp-async heartbeat", daemon=True
    )
    thread.start()
    return thread


def _run(
    heartbeat: Heartbeat, read: Callable[[], Position | None], leave: Callable[[ExitCode], None]
) -> None:
    reason = ""
    for _ in range(_ATTEMPTS):
        began_s = time.monotonic()
        try:
            with _connect(heartbeat) as sock:
                _beat(sock, _shake_hands(sock, heartbeat), read)
        except (OSError, ProtocolError) as error:
            reason = str(error)
        if time.monotonic() - began_s > _SETTLED_S:
            break
        # The controller accepts a heartbeat connection only after it has seen the process's control
        # connection, which may be established later.
        _pause(_PAUSE_S)
    _pause(ORDERLY_S)
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(f"lost the controller at {heartbeat.controller}: {reason}", file=sys.stderr, flush=True)
    leave(ExitCode.CONNECTION_LOST)


def _connect(heartbeat: Heartbeat) -> socket.socket:
    sock = socket.create_connection(heartbeat.controller, timeout=heartbeat.lost_s)
    keep_from_children(sock.fileno())
    # no timeout: a busy or stopped controller keeps its connections, and the lease limits how long
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):  # some sandboxes do not know the option
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(heartbeat.lost_s * 1000))
    return sock


def _shake_hands(sock: socket.socket, heartbeat: Heartbeat) -> Wire:
    identity = Identity(heartbeat.identity.process_id, heartbeat.identity.incarnation, "beats")
    wire = Wire("actor", heartbeat.secret, version=jaxpp_async.__version__, identity=identity)
    sock.sendall(wire.take_outgoing())
    while wire.state != "open":
        _receive(sock, wire)
        sock.sendall(wire.take_outgoing())
    return wire


def _beat(sock: socket.socket, wire: Wire, read: Callable[[], Position | None]) -> None:
    """Send heartbeats until the connection breaks, which raises an exception.

    Args:
        sock: the socket.
        wire: the encoder of messages, after its handshake.
        read: returns the actor's position in its program, or None.
    """
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    while True:
        sock.sendall(b"".join(wire.encode(Beat(read(), clock_name()))))
        deadline = time.monotonic() + BEAT_S
        while (left_s := deadline - time.monotonic()) > 0:
            if poller.poll(left_s * 1000):
                _receive(sock, wire)


def _receive(sock: socket.socket, wire: Wire) -> None:
    """Receive bytes from the controller and pass them to `wire`; raise an exception if the connection has
    ended.

    After the handshake the controller sends nothing on this connection, so any data is then an error.
    """
    data = sock.recv(4096)
    if not data:
        raise ConnectionResetError("it closed the connection")
    wire.feed(data)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
