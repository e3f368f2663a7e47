"""Serve one actor over its control channel: connect to the controller, pass requests to the actor, and close
it.

The same code runs in actor processes and, for inline actors, in the user's process. Tests use it to serve
fake actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from importlib import import_module
from typing import Any, Protocol, TypeAlias, TypeVar

import jaxpp_async
from jaxpp_async.base.printable import in_words
from jaxpp_async.base.spinning import LoopSpin
from jaxpp_async.errors import MeshError, ProtocolError
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import ExitCode
from jaxpp_async.protocol.connection import Connection
from jaxpp_async.protocol.frames import Identity, Wire
from jaxpp_async.protocol.parent_watch import LEASE_S
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.network import Network

_LOG = logging.getLogger("jaxpp_async.control")

CLOSE_S = 3.0
"""The longest time in seconds that closing an actor may take."""


class ActorLike(Protocol):
    """The interface of an object that answers requests: `actors.actor.Actor`, or a fake in tests."""

    @property
    def current_step(self) -> int | None:
        """The number of the step that is under way, or None. Any thread may read it."""
        ...

    def handle(self, message: m.Request, number: int) -> None:
        """Start to carry out one request; called in the order in which requests arrive.

        This call returns quickly. For a request that fails, this call raises no exception, but sends a reply
        that says so.

        Args:
            message: the request.
            number: the number of the request, which goes with its reply.
        """
        ...

    async def aclose(self) -> None:
        """Cancel all work and release every resource."""
        ...


class SendMessage(Protocol):
    """The type of a function that sends a message to the controller.

    Args:
        message: the message.
        number: the number of the request that the message answers; None if it answers none.
    """

    def __call__(self, message: m.Message, number: int | None = None) -> None: ...


Handler: TypeAlias = Callable[[Any], m.Reply | Coroutine[Any, Any, m.Reply]]
"""A function that carries out a request, and returns the reply or a coroutine that does the rest of the work
and returns the reply.
"""

H = TypeVar("H", bound=Callable[..., object])

_REQUEST_TYPE = "_request_type"
"""The name of the attribute of a method that `handles` sets."""

_unused_components: set[str] = set()
"""The names of the classes of this package that declare handlers, and that `handlers_of` has not been asked
about. When an actor is ready there must be none: their handlers would never be called.
"""


def handles(kind: type[m.Request]) -> Callable[[H], H]:
    """Declare that a method is the `Handler` of all requests of one type.

    Args:
        kind: the type of the requests.

    Raises:
        TypeError: the type's rules demand an order with steps, and the method is an `async def`, which begins
            only after later requests may have been handled.
    """

    def declare(method: H) -> H:
        if kind.rules.ordered and inspect.iscoroutinefunction(method):
            what = f"{method.__qualname__} is an `async def`, but {kind.__name__} is ordered with steps"
            raise TypeError(f"{what}: do that part in a function that returns a coroutine for the rest")
        setattr(method, _REQUEST_TYPE, kind)
        if method.__module__.startswith(f"{jaxpp_async.__name__}."):
            _unused_components.add(method.__qualname__.rpartition(".")[0])
        return method

    return declare


def handlers_of(component: object) -> dict[type[m.Request], Handler]:
    """Return the methods of an object that `handles` declares, by the type of their requests."""
    _unused_components.difference_update(cls.__qualname__ for cls in type(component).__mro__)
    methods = inspect.getmembers_static(type(component), inspect.isfunction)
    declared = {name: getattr(method, _REQUEST_TYPE, None) for name, method in methods}
    return {kind: getattr(component, name) for name, kind in declared.items() if kind is not None}


def load_actor_class(name: str) -> Callable[..., ActorLike]:
    """Import and return the class that a text of the form `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


async def serve(
    identity: Identity,
    secret: bytes,
    *,
    connect: Callable[[Connection], Awaitable[None]],
    make_actor: Callable[..., ActorLike],
    make_transport: Callable[[str, Network], Transport],
    max_frame_bytes: int,
    lost_s: float = LEASE_S,
    spins: bool = False,
) -> ExitCode:
    """Run one actor until the controller shuts it down or the connection ends.

    Args:
        identity: the number of the process, and its incarnation (how many processes had this number before);
            both are reported in the handshake.
        secret: the 32 bytes that all processes of the mesh share.
        connect: opens a socket to the controller for the connection.
        make_actor: makes the actor from the process's number, `make_transport` and `send`, as `actor.Actor`
            does; called after the handshake.
        make_transport: makes the transport of a given name on a given network.
        max_frame_bytes: the length of the longest frame that the connection accepts.
        lost_s: how long the controller may fail to acknowledge bytes before the connection fails, in seconds.
        spins: whether the event loop belongs to the actor alone. If so, the loop keeps looking for messages
            for a moment after each step instead of sleeping (`LoopSpin`).

    Returns:
        The exit status that an actor process should end with.

    Raises:
        HandshakeError: the controller could not be trusted, or it refused the connection.
        OSError: the controller could not be reached.
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
        actor = make_actor(identity.process_id, make_transport=make_transport, send=dispatcher.send)
        try:
            dispatcher.open(actor, spins=spins)
            shut_down_by = await dispatcher.closed
        finally:
            dispatcher.close(None)
            await _close_actor(actor)
        if shut_down_by is None:
            return ExitCode.CONNECTION_LOST
        connection.send(m.Done(), shut_down_by)
        return ExitCode.OK
    finally:
        connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await connection.wait_closed()
        connection.abort()


class _RequestDispatcher:
    """A component that passes requests to an actor as soon as they are read, in the same pass of the event
    loop.

    Requests that arrive before the actor has been made are kept until `open`.

    Attributes:
        connection: carries the replies to the controller.
        closed: a future that is done when no more requests follow. Its result is the number of the request to
            shut down, or None if the connection has ended.
    """

    connection: Connection

    def __init__(self) -> None:
        self.closed: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._early: list[tuple[Any, int]] = []
        self._actor: ActorLike | None = None
        self._loop_spin: LoopSpin | None = None

    def open(self, actor: ActorLike, *, spins: bool) -> None:
        """Pass requests to this actor from now on, starting with those that have arrived already.

        Args:
            actor: the actor.
            spins: whether the event loop keeps looking for messages for a moment after each step instead of
                sleeping.
        """
        self._actor = actor
        if spins:
            self._loop_spin = LoopSpin(asyncio.get_running_loop(), lambda: actor.current_step is None)
        early, self._early = self._early, []
        for message, number in early:
            self.dispatch(message, number)

    def dispatch(self, message: Any, number: int | None) -> None:
        """Pass a request to the actor, or keep it until there is an actor. A `Shutdown` ends the dispatching
        instead.

        Raises:
            ProtocolError: the request has no number, so it could not be answered.
        """
        if number is None:
            raise ProtocolError(f"the controller sent {type(message).__name__} without a number")
        if self._loop_spin is not None:
            self._loop_spin.end()
        if self._actor is None:
            self._early.append((message, number))
        elif isinstance(message, m.Shutdown):
            self.close(number)
        elif not self.closed.done():
            try:
                self._actor.handle(message, number)
            except Exception as error:  # a bug in the actor, which the controller must be told
                self.send(failed_reply(error), number)

    def send(self, message: m.Message, number: int | None = None) -> None:
        """Send a message to the controller (see `SendMessage`). If a reply cannot be encoded, send a `Failed`
        reply instead; likewise if an actor is ready, but does not use the handlers of some component.

        If `open` was called with `spins`, the event loop keeps looking for messages for a moment after the
        reply to a step, since the next step may be requested soon.
        """
        if type(message) is m.Ready and _unused_components and handlers_of(self._actor):
            unused = f"{', '.join(sorted(_unused_components))}: no actor calls the handlers declared there"
            message = failed_reply(TypeError(f"{unused}; pass the component to `handlers_of`"))
        try:
            self.connection.send(message, number)
        except MeshError as error:
            # it cannot be encoded: the controller, which waits for it, must learn that
            _LOG.exception("a message cannot be sent")
            if not isinstance(message, m.Log):
                self.connection.send(failed_reply(error, step=getattr(message, "step", None)), number)
        if self._loop_spin is not None and type(message) is m.StepDone:
            self._loop_spin.begin()

    def close(self, shut_down_by: int | None) -> None:
        """Pass no more requests to the actor, and set the result of `closed`.

        Args:
            shut_down_by: the number of the request to shut down, which becomes the result; None if the
                connection has ended.
        """
        if self._loop_spin is not None:
            self._loop_spin.end()
        if not self.closed.done():
            self.closed.set_result(shut_down_by)


async def _close_actor(actor: ActorLike) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await actor.aclose()
    except Exception:  # the process ends in any case
        _LOG.exception("the actor did not close cleanly")


def failed_reply(
    error: BaseException, *, step: int | None = None, instruction: str | None = None
) -> m.Failed:
    """Return the reply that reports an exception to the controller, as names and text only, so that nothing
    has to be unpickled.

    Args:
        error: the exception.
        step: the number of the step that failed; None if the request was not a step.
        instruction: the text of the instruction that failed; None if no instruction failed.
    """
    words = in_words(error)
    return m.Failed(words.exception_type, words.message, words.printed, step, instruction)
