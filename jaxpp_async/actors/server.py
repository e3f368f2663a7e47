"""serve: the actor's side of the control channel: connects, hands requests to an `Actor` one by one, ends.

The same code runs in an actor process and inline. It knows the life of a connection and nothing of programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, Protocol

import jaxpp_async
from jaxpp_async.base.printable import printable
from jaxpp_async.errors import MeshError
from jaxpp_async.protocol.connection import Connection
from jaxpp_async.protocol.frames import Identity, Wire
from jaxpp_async.protocol.loop_spin import LoopSpin
from jaxpp_async.protocol.messages import Done, Failed, Log, Message, Request, Shutdown, StepDone
from jaxpp_async.protocol.parent_watch import LEASE_S, ExitCode
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.network import Network

_LOG = logging.getLogger("jaxpp_async.control")

CLOSE_S = 3.0
"""What an actor may take to close itself."""


class ActorLike(Protocol):
    """What answers requests (`actors.actor.Actor`, or a fake in tests)."""

    @property
    def current_step(self) -> int | None:
        """The number of the step under way. Any thread may ask."""
        ...

    def handle(self, message: Request) -> None:
        """Take one request, in order of arrival. Returns quickly and never raises for the request's sake."""
        ...

    async def aclose(self) -> None:
        """Drop all work and give everything back."""
        ...


class MakeActor(Protocol):
    """`Actor` itself, in form."""

    def __call__(
        self,
        process_id: int,
        *,
        make_transport: Callable[[str, Network], Transport],
        send: Callable[[Message], None],
        inline: bool = False,
    ) -> ActorLike: ...


def load_actor_class(name: str) -> Callable[..., ActorLike]:
    """The class that `module:name` names."""
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
    keeps_vigil: bool = False,
) -> ExitCode:
    """Run one actor until the controller shuts it down or goes away.

    Args:
        connect: gives the connection its socket.
        make_actor: called once the handshake is done.
        lost_s: see `Connection`.
        keeps_vigil: the loop, which is the actor's own, stays awake for a moment behind each step (`vigil`).

    Raises:
        HandshakeError: the controller could not be trusted, or refused. OSError: it was not there.
    """
    desk = _Desk()
    wire = Wire(
        "actor", secret, version=jaxpp_async.__version__, identity=identity, max_frame_bytes=max_frame_bytes
    )
    connection = Connection(
        wire, on_message=desk.take, on_closed=lambda error: desk.close(None), lost_s=lost_s
    )
    desk.connection = connection
    try:
        await connect(connection)
        await connection.opened
        actor = make_actor(identity.process_id, make_transport=make_transport, send=desk.reply)
        try:
            desk.open(actor, keeps_vigil=keeps_vigil)
            shutdown = await desk.closed
        finally:
            desk.close(None)
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


class _Desk:
    """Hands requests to an actor as they are read, with no pass of the event loop between; those that came before the
    actor, when it has come.

    Attributes:
        connection: where replies go.
        closed: the request to shut down, which is the last; None if the connection is over.
    """

    connection: Connection

    def __init__(self) -> None:
        self.closed: asyncio.Future[Shutdown | None] = asyncio.get_running_loop().create_future()
        self._early: list[Any] = []
        self._actor: ActorLike | None = None
        self._loop_spin: LoopSpin | None = None

    def open(self, actor: ActorLike, *, keeps_vigil: bool) -> None:
        """The actor is here."""
        self._actor = actor
        if keeps_vigil:
            self._loop_spin = LoopSpin(asyncio.get_running_loop(), lambda: actor.current_step is None)
        early, self._early = self._early, []
        for message in early:
            self.take(message)

    def take(self, message: Any) -> None:
        """A request has come."""
        if self._loop_spin is not None:
            self._loop_spin.end()
        if self._actor is None:
            self._early.append(message)
        elif isinstance(message, Shutdown):
            self.close(message)
        elif not self.closed.done():
            try:
                self._actor.handle(message)
            except Exception as error:  # a bug in the actor: the controller must hear of it, whatever it is
                self.reply(failed(message.request, error))

    def reply(self, message: Message) -> None:
        """A reply goes out. Behind a step's the next step may come soon."""
        try:
            self.connection.send(message)
        except MeshError as error:  # it cannot be encoded: whoever waits for it must hear of that
            _LOG.exception("a message cannot be sent")
            if not isinstance(message, Log):
                request, step = getattr(message, "request", None), getattr(message, "step", None)
                self.connection.send(failed(request, error, step=step))
        if self._loop_spin is not None and type(message) is StepDone:
            self._loop_spin.begin()

    def close(self, last: Shutdown | None) -> None:
        """Hand nothing over any more."""
        if self._loop_spin is not None:
            self._loop_spin.end()
        if not self.closed.done():
            self.closed.set_result(last)


async def _close_actor(actor: ActorLike) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await actor.aclose()
    except Exception:  # it ends anyway, and must end
        _LOG.exception("the actor did not close cleanly")


def failed(
    request: int | None, error: BaseException, *, step: int | None = None, instruction: str | None = None
) -> Failed:
    """An exception as a reply: names and text only, nothing that has to be unpickled."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = "".join(traceback.format_exception(error))
    return Failed(request, printable(name), printable(str(error)), printable(text), step, instruction)
