"""bringup: from a launcher to connected, configured actors. `Crew` uses one for the
mesh's life: to start actors, and to replace those that were lost.

All actors come up in parallel; the first that fails ends the launch, and the caller stops what has started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any, Final, TypeVar

from jaxpp_async.actors.control.connection import Connection
from jaxpp_async.actors.control.gate import Gate
from jaxpp_async.actors.crew.rpc import ActorLink
from jaxpp_async.actors.failures.failure import describe_end, launch_error, remote_error
from jaxpp_async.actors.launch import ActorHandle, Launcher, LaunchSpec
from jaxpp_async.actors.messages import Configure, Ready, Request, Reserve, Reserved
from jaxpp_async.actors.processes.actor_info import ActorInfo
from jaxpp_async.actors.processes.exit_codes import ExitCode
from jaxpp_async.actors.processes.seats import Seat
from jaxpp_async.actors.protocol.wire import Identity
from jaxpp_async.errors import (
    ActorError,
    HandshakeError,
    InstallError,
    JaxppAsyncError,
    LaunchError,
    MeshError,
    RemoteError,
)
from jaxpp_async.program import ProcessId

_LOG = logging.getLogger("jaxpp_async")
_VERSIONED = ("jax", "jaxlib")
_LAST_WORDS_S = 0.3

_PLAIN: Final[dict[str, type[JaxppAsyncError]]] = {"InstallError": InstallError, "MeshError": MeshError}
"""What an actor may raise that says all that there is to say."""

T = TypeVar("T")


class Bringup:
    """Starts one mesh's actors.

    Args:
        launcher: starts them. gate: lets them in.
        timeout_s: until every actor is ready.
        say: told what is going on.

    Attributes:
        handles: every process started so far, for whoever has to stop them.
    """

    def __init__(self, launcher: Launcher, gate: Gate, *, timeout_s: float, say: Callable[[str], None]):
        self._launcher, self._gate, self._timeout_s, self._say = launcher, gate, timeout_s, say
        self.handles: dict[ProcessId, ActorHandle] = {}

    async def start(self, spec: LaunchSpec) -> ActorLink:
        """Start one process and wait for its connection.

        Raises:
            LaunchError: it did not start, died, or did not connect in time. HandshakeError: it runs another version.
        """
        arrival, seat = self._gate.expect(Identity(spec.process_id, spec.incarnation)), spec.seat
        try:
            async with asyncio.timeout(self._timeout_s):
                handle = self.handles[spec.process_id] = await self._launcher.start(spec, self._gate.adopt)
                connection = await self._unless_dead(seat, arrival, _way_back(spec.controller))
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise self._late(seat, "did not connect", _way_back(spec.controller)) from None
            raise launch_error(seat, f"could not be started: {error}") from error
        return make_link(seat, handle, connection)

    async def reserve(self, link: ActorLink, message: Reserve) -> int:
        """Have a process find a free port for those that join it.

        Raises:
            LaunchError: it could not, died or took too long.
        """
        reserved: Reserved = await self._asked(link, message, Reserved, "connected but did not find a free port")
        return reserved.port

    async def configure(self, link: ActorLink, message: Configure) -> Ready:
        """Start JAX and the transport in one process.

        Returns:
            What it tells of itself.

        Raises:
            LaunchError: it failed, died or took too long. HandshakeError: its JAX is another version.
            InstallError, MeshError: it lacks a package, or devices.
        """
        ready: Ready = await self._asked(link, message, Ready, "connected but did not start JAX and the transport")
        check_library_versions(link.info, ready.versions)
        link.info = replace(link.info, devices=ready.devices, gpus=ready.hardware.gpus, state="ready")
        link.address = ready.address
        self._say(f"{link.info} is ready: {', '.join(ready.devices)}")
        return ready

    async def _asked(self, link: ActorLink, message: Request, expected: type, late: str) -> Any:
        seat = Seat(link.info.process, link.info.size)
        task = asyncio.get_running_loop().create_task(link.call(message, expected), name=f"configure {seat}")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._unless_dead(seat, task)
        except TimeoutError:
            raise self._late(seat, late) from None
        except RemoteError as error:
            raise unready_error(link.info, error) from None
        finally:
            task.cancel()

    async def _unless_dead(self, seat: Seat, wanted: asyncio.Future[T], unconnected: str = "") -> T:
        """Wait for `wanted`, or raise if the process dies first; `unconnected` is the remedy if it cannot reach us."""
        handle = self.handles[seat.process]
        dead = asyncio.get_running_loop().create_task(handle.wait_dead(), name=f"watch the start of {seat}")
        try:
            await asyncio.wait([wanted, dead], return_when=asyncio.FIRST_COMPLETED)
            # What it said and its death come by different ways: the other one may be a moment behind.
            if not wanted.done():
                await asyncio.wait([wanted], timeout=_LAST_WORDS_S)
            elif not wanted.cancelled() and isinstance(wanted.exception(), LaunchError):
                await asyncio.wait([dead], timeout=_LAST_WORDS_S)
            if dead.done() and not _has_answer(wanted):
                death = dead.result()
                remedy = unconnected if death.returncode == ExitCode.CONNECTION_LOST else ""
                what = f"{describe_end(death.returncode, death.output_tail)} before it was ready{remedy}"
                raise launch_error(seat, what, death.output_tail)
            return await wanted
        finally:
            dead.cancel()

    def _late(self, seat: Seat, what: str, remedy: str = "") -> ActorError:
        handle = self.handles.get(seat.process)
        tail = handle.output_tail() if handle is not None else ()
        return launch_error(seat, f"{what} within {self._timeout_s:g} s (launch_timeout_s){remedy}", tail)


def unready_error(actor: ActorInfo, error: RemoteError) -> JaxppAsyncError:
    """The error for an actor that could not be configured: plain, where it is for its user to put right.

    Args:
        error: what it answered, with its traceback.
    """
    text, _, _ = str(error).partition("\n\nTraceback on the actor")
    plain = _PLAIN.get(error.exception_type.rpartition(".")[2])
    if plain is not None:
        return plain(text.replace(f"{error.exception_type}: ", "", 1))
    where = {"actor": actor.id, "host": actor.host, "pid": actor.pid}
    if error.exception_type.rpartition(".")[2] == LaunchError.__name__:  # it says what failed; the traceback, where
        return LaunchError(str(error).replace(f"{error.exception_type}: ", "", 1), **where)
    return LaunchError(f"could not start JAX and the transport on {error}", **where)


def _way_back(controller: tuple[str, int] | None) -> str:
    """What to look at when an actor on another host was started but never came."""
    if controller is None or controller[0].startswith("127."):
        return ""
    return (
        f"; its host has to reach this machine at {controller[0]}, on any port: is a firewall between? "
        "choose another address with control_address="
    )


def make_link(seat: Seat, handle: ActorHandle, connection: Connection) -> ActorLink:
    """The controller's end of a process that has just connected."""
    info = ActorInfo(seat.actor, handle.host, handle.pid, (), "starting", seat.rank, seat.size)
    link = ActorLink(info, handle, connection)
    connection.on_message = lambda message: _on_message(link, message)
    connection.on_closed = lambda error: _lose(link, error)
    return link


def _has_answer(wanted: asyncio.Future[Any]) -> bool:
    """It succeeded, or failed for a reason of its own: not because the actor went away."""
    return wanted.done() and not wanted.cancelled() and not isinstance(wanted.exception(), LaunchError)


def _on_message(link: ActorLink, message: Any) -> None:
    failed = link.settle(message)
    if failed is not None:  # the actor itself failed: whatever was asked of it gets the reason
        for waiter in link.waiters.values():
            waiter.fail(remote_error(link.info, failed))


def _lose(link: ActorLink, error: Exception | None) -> None:
    seat = Seat(link.info.process, link.info.size)
    for waiter in link.waiters.values():
        waiter.fail(launch_error(seat, f"closed its control connection before it was ready: {error}"))


def check_library_versions(actor: ActorInfo, versions: Mapping[str, str]) -> None:
    """Raises:
    HandshakeError: an actor runs another JAX than the controller, which exports programs for its own.
    """
    for name in _VERSIONED:
        theirs = versions.get(name)
        ours = metadata.version(name) if theirs is not None else None
        if theirs != ours:
            raise HandshakeError(
                f"{actor} runs {name} {theirs}, the controller {ours}; install the same version on both",
                actor=actor.id,
                host=actor.host,
                pid=actor.pid,
            )


async def all_of(coroutines: Mapping[int, Coroutine[Any, Any, T]], what: str) -> dict[int, T]:
    """Run a coroutine for each actor, or process, at once. The first error ends the others and is raised as it is."""
    loop = asyncio.get_running_loop()
    tasks = {number: loop.create_task(c, name=f"{what} {number}") for number, c in coroutines.items()}
    if not tasks:
        return {}
    try:
        done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return {number: task.result() for number, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
