"""Run actors inside this process, for notebooks and debugging.

Controller, protocol and actor code are the same as with many processes. Only two parts differ: the control
connection is a socket pair, and the transport passes arrays in memory.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from jaxpp_async.actors.server import load_actor_class, serve
from jaxpp_async.launch.launcher import DEFAULT_ACTOR, ActorHandle, LaunchSpec
from jaxpp_async.launch.options import LauncherKind
from jaxpp_async.launch.process_supervisor import Death
from jaxpp_async.program.instructions import CONTROLLER
from jaxpp_async.protocol.actor_info import ExitCode, Position
from jaxpp_async.protocol.connection import attach_socket
from jaxpp_async.protocol.frames import Identity
from jaxpp_async.protocol.log_forwarding import name_actor
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.network import Network
from jaxpp_async.transport.registry import make_inline_transport, transport_names


class InlineLauncher:
    """A launcher that runs actors as asyncio tasks on the controller's event loop.

    Args:
        actor: the actor class as `module:name`, for tests of the control plane.
        make_transport: a function that makes the transport of one peer from the transport's name and the
            peer's id, for tests; None to look the transport up by its name.
    """

    listen_host = None

    def __init__(
        self, *, actor: str = DEFAULT_ACTOR, make_transport: Callable[[str, int], Transport] | None = None
    ):
        self._actor = actor
        self._make_transport = make_transport or self._make_own_transport
        self._shared: dict[str, Any] = {}  # state that the transports of one mesh share
        self._handles: set[_InlineHandle] = set()

    @property
    def transports(self) -> tuple[str, ...]:
        """The names of the transports that work between actors in one process; the first is the default."""
        return transport_names(within_process=True)

    def make_transport(self, kind: str, network: Network) -> Transport:
        """Make the controller's own transport; see `Launcher.make_transport`."""
        return self._make_transport(kind, CONTROLLER)

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> ActorHandle:
        """Start an actor as a task on this event loop. The actor and the controller each get one end of a new
        socket pair; see `Launcher.start`.
        """
        here, there = socket.socketpair()
        adopt(here)
        # An inline actor does not configure JAX, and shares JAX and its devices with other actors.
        make_actor = functools.partial(load_actor_class(self._actor), inline=True)
        serving = serve(
            Identity(spec.process_id, spec.incarnation),
            spec.secret,
            connect=lambda connection: attach_socket(connection, there),
            make_actor=make_actor,
            make_transport=lambda kind, network: self._make_transport(kind, spec.process_id),
            max_frame_bytes=spec.max_frame_bytes,
        )
        loop, name = asyncio.get_running_loop(), f"inline actor {spec.process_id}"
        task = loop.create_task(serving, name=name, context=name_actor(spec.process_id))
        handle = _InlineHandle(task)
        self._handles.add(handle)
        # Drop the task when it ends: a cancelled task keeps its frames alive, and with them its actor.
        task.add_done_callback(lambda _: self._handles.discard(handle))
        # Close the socket here too: a task that is cancelled before it has started does not close it.
        task.add_done_callback(lambda _: there.close())
        return handle

    async def aclose(self) -> None:
        """Cancel the tasks of all actors and wait until they have ended; see `Launcher.aclose`."""
        handles, self._handles, self._shared = self._handles, set(), {}
        for handle in handles:
            handle.kill()
        for handle in handles:
            await handle.wait_dead()

    def _make_own_transport(self, kind: str, peer_id: int) -> Transport:
        return make_inline_transport(kind, peer_id, self._shared)


class _InlineHandle:
    """An `ActorHandle` on the asyncio task of an actor. `kill` cancels the task, since there is no process to
    signal.
    """

    def __init__(self, task: asyncio.Task[ExitCode]):
        self._task, self.host, self.pid = task, socket.gethostname(), os.getpid()

    async def wait_dead(self) -> Death:
        await asyncio.wait([self._task])
        if self._task.cancelled():
            return Death(-9, ())
        error = self._task.exception()
        if error is not None:
            return Death(ExitCode.CRASH, tuple("".join(traceback.format_exception(error)).splitlines()[-50:]))
        return Death(int(self._task.result()), ())

    def terminate(self) -> None:
        self._task.cancel()

    def kill(self) -> None:
        self._task.cancel()

    def progress(self) -> Position | None:
        return None

    def output_tail(self) -> tuple[str, ...]:
        return ()


KIND = LauncherKind(
    make=lambda options, num_processes: InlineLauncher(),
    phrase="launcher='inline', whose actors run inside this process",
    splits_actors=False,
)
