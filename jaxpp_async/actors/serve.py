"""serve: the actor's side of the control channel: connects, hands requests to an `Actor` one by one, ends.

The same code runs in an actor process and inline. It knows the life of a connection and nothing of programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import jaxpp_async
from jaxpp_async.actors.connection import Connection
from jaxpp_async.actors.exit_codes import ExitCode
from jaxpp_async.actors.messages import Done, Failed, Message, Request, Shutdown
from jaxpp_async.actors.protocol import Identity, Wire
from jaxpp_async.transport.base import Transport

_LOG = logging.getLogger("jaxpp_async.control")

CLOSE_S = 3.0
"""What an actor may take to close itself."""


class ActorLike(Protocol):
    """What answers requests (`actors.actor.Actor`, or a fake in tests)."""

    @property
    def current_step(self) -> int | None:
        """The number of the step under way. Any thread may ask."""
        ...

    async def handle(self, message: Request) -> None:
        """Take one request, in order of arrival. Returns quickly and never raises for the request's sake."""
        ...

    async def aclose(self) -> None:
        """Drop all work and give everything back."""
        ...


class MakeActor(Protocol):
    """`Actor` itself, in form."""

    def __call__(
        self,
        actor_id: int,
        *,
        make_transport: Callable[[str], Transport],
        send: Callable[[Message], None],
        inline: bool = False,
    ) -> ActorLike: ...


async def serve(
    identity: Identity,
    secret: bytes,
    *,
    connect: Callable[[Connection], Awaitable[None]],
    make_actor: MakeActor,
    make_transport: Callable[[str], Transport],
    max_frame_bytes: int,
) -> ExitCode:
    """Run one actor until the controller shuts it down or goes away.

    Args:
        connect: gives the connection its socket.
        make_actor: called once the handshake is done.

    Raises:
        HandshakeError: the controller could not be trusted, or refused. OSError: it was not there.
    """
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    wire = Wire("actor", secret, version=jaxpp_async.__version__, identity=identity, max_frame_bytes=max_frame_bytes)
    connection = Connection(wire, on_message=inbox.put_nowait, on_closed=lambda error: inbox.put_nowait(None))
    try:
        await connect(connection)
        await connection.opened
        actor = make_actor(identity.actor_id, make_transport=make_transport, send=connection.send)
        try:
            shutdown = await _answer(actor, inbox, connection)
        finally:
            await _close_actor(actor)
        if shutdown is None:
            return ExitCode.CONNECTION_LOST
        connection.send(Done(shutdown.request))
        return ExitCode.OK
    finally:
        connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await connection.wait_closed()
        connection.abort()


async def _answer(actor: ActorLike, inbox: asyncio.Queue[Any], connection: Connection) -> Shutdown | None:
    """Hand over requests until the last one, which is returned; None if the connection is over."""
    while True:
        message = await inbox.get()
        if message is None or isinstance(message, Shutdown):
            return message
        try:
            await actor.handle(message)
        except Exception as error:  # a bug in the actor: the controller must hear of it, whatever it is
            text = "".join(traceback.format_exception(error))
            connection.send(Failed(message.request, type(error).__qualname__, str(error), text))


async def _close_actor(actor: ActorLike) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await actor.aclose()
    except Exception:  # it ends anyway, and must end
        _LOG.exception("the actor did not close cleanly")
