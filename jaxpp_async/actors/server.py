"""Serve one actor over its control channel: connect to the controller, pass requests to the actor, and end.

The same code runs in an actor process and inline, for an `Actor` or a fake one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, Protocol

import jaxpp_async
from jaxpp_async.base.printable import in_words
from jaxpp_async.base.spinning import LoopSpin
from jaxpp_async.errors import MeshError
from jaxpp_async.protocol.connection import Connection
from jaxpp_async.protocol.frames import Identity, Wire
from jaxpp_async.protocol.messages import Done, Failed, Log, Message, Request, Shutdown, StepDone
from jaxpp_async.protocol.parent_watch import LEASE_S, ExitCode
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.network import Network

_LOG = logging.getLogger("jaxpp_async.control")

CLOSE_S = 3.0
"""How long closing an actor may take."""


class ActorLike(Protocol):
    """An object that answers requests: `actors.actor.Actor`, or a fake in tests."""

    @property
    def current_step(self) -> int | None:
        """The number of the step under way. Any thread may ask."""
        ...

    def handle(self, message: Request) -> None:
        """Begin to answer one request; called in order of arrival. Returns quickly, and raises nothing about
        the request."""
        ...

    async def aclose(self) -> None:
        """Drop all work and release every resource."""
        ...


class MakeActor(Protocol):
    """The type of `Actor`'s constructor."""

    def __call__(
        self,
        process_id: int,
        *,
        make_transport: Callable[[str, Network], Transport],
        send: Callable[[Message], None],
        inline: bool = False,
    ) -> ActorLike: ...


def load_actor_class(name: str) -> Callable[..., ActorLike]:
    """Import the class that `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


async def serve(
    identity: Identity,
    secret: bytes,
    *,
    connect: Callable[[Connection], Awaitable[None]],
    make_actor: MakeActor,
    make_transport: Callable[[str, Network], Transport],
    max_frame_bytes: int,
    lost_s: float = LEASE_S,
    spins: bool = False,
) -> ExitCode:
    """Run one actor until the controller shuts it down or goes away.

    Args:
        identity: the process, for the handshake.
        secret: the mesh's 32 bytes.
        connect: gives the connection its socket.
        make_actor: makes the actor once the handshake is done.
        make_transport: see `Actor`.
        max_frame_bytes: the longest frame that the connection accepts.
        lost_s: see `Connection`.
        spins: the event loop is the actor's own, and stays awake for a moment after each step (`LoopSpin`).

    Raises:
        HandshakeError: the controller could not be trusted, or refused. OSError: it could not be reached.
    """
    dispatcher = _RequestDispatcher()
    wire = Wire(
        "actor", secret, version=jaxpp_async.__version__, identity=identity, max_frame_bytes=max_frame_bytes
    )
    connection = Connection(
        wire, on_message=dispatcher.dispatch, on_closed=lambda error: dispatcher.close(None), lost_s=lost_s
    )
    dispatcher.connection = connection
    try:
        await connect(connection)
        await connection.opened
        actor = make_actor(identity.process_id, make_transport=make_transport, send=dispatcher.reply)
        try:
            dispatcher.open(actor, spins=spins)
            shutdown = await dispatcher.closed
        finally:
            dispatcher.close(None)
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


class _RequestDispatcher:
    """Passes requests to an actor as they are read, without a pass of the event loop in between.

    Requests that come before the actor is made wait for it.

    Attributes:
        connection: carries the replies.
        closed: done with the request to shut down, which is the last one, or with None if the connection is
            over.
    """

    connection: Connection

    def __init__(self) -> None:
        self.closed: asyncio.Future[Shutdown | None] = asyncio.get_running_loop().create_future()
        self._early: list[Any] = []
        self._actor: ActorLike | None = None
        self._loop_spin: LoopSpin | None = None

    def open(self, actor: ActorLike, *, spins: bool) -> None:
        """Pass requests to this actor, first those that wait."""
        self._actor = actor
        if spins:
            self._loop_spin = LoopSpin(asyncio.get_running_loop(), lambda: actor.current_step is None)
        early, self._early = self._early, []
        for message in early:
            self.dispatch(message)

    def dispatch(self, message: Any) -> None:
        """Pass a request to the actor."""
        if self._loop_spin is not None:
            self._loop_spin.end()
        if self._actor is None:
            self._early.append(message)
        elif isinstance(message, Shutdown):
            self.close(message)
        elif not self.closed.done():
            try:
                self._actor.handle(message)
            except Exception as error:  # a bug in the actor: the controller must learn of it
                self.reply(failed_reply(message.request, error))

    def reply(self, message: Message) -> None:
        """Send a reply. After the reply to a step the loop stays awake, since the next step may come soon."""
        try:
            self.connection.send(message)
        except (
            MeshError
        ) as error:  # the reply cannot be encoded: the controller, which waits for it, must learn of that
            _LOG.exception("a message cannot be sent")
            if not isinstance(message, Log):
                request, step = getattr(message, "request", None), getattr(message, "step", None)
                self.connection.send(failed_reply(request, error, step=step))
        if self._loop_spin is not None and type(message) is StepDone:
            self._loop_spin.begin()

    def close(self, last: Shutdown | None) -> None:
        """Pass no more requests."""
        if self._loop_spin is not None:
            self._loop_spin.end()
        if not self.closed.done():
            self.closed.set_result(last)


async def _close_actor(actor: ActorLike) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await actor.aclose()
    except Exception:  # the process ends anyway
        _LOG.exception("the actor did not close cleanly")


def failed_reply(
    request: int | None, error: BaseException, *, step: int | None = None, instruction: str | None = None
) -> Failed:
    """Make the reply that reports an exception: names and text only, nothing that has to be unpickled."""
    words = in_words(error)
    return Failed(request, words.exception_type, words.message, words.printed, step, instruction)
