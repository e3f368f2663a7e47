"""Start actors as processes of this machine."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable

from jaxpp_async.launch.hosts import Settings, defaults, environment
from jaxpp_async.launch.launcher import DEFAULT_ACTOR, ActorHandle, LaunchSpec, ProcessLauncher
from jaxpp_async.launch.options import OF_PROCESSES, LauncherKind, LaunchOptions
from jaxpp_async.launch.process_supervisor import Death, ProcessSupervisor, print_to_stderr
from jaxpp_async.launch.spawn import ActorProcess, ActorRequest, spawn_actor
from jaxpp_async.protocol.actor_info import ProgressPage
from jaxpp_async.protocol.parent_watch import LEASE_S, Lease


class LocalLauncher(ProcessLauncher):
    """A launcher that starts the processes of actors on this machine.

    Args:
        settings: the interpreter, devices, CPUs and network of the actors.
        actor: the actor class as `module:name`, for tests of the control plane.
        forward: a function that is called with each line that an actor prints, prefixed with the actor's
            name; None to print the lines to `sys.stderr`.
        lease_s: the number of seconds after which an actor ends itself if its stdin is silent.
    """

    listen_host = "127.0.0.1"

    def __init__(
        self,
        *,
        settings: Settings | None = None,
        actor: str = DEFAULT_ACTOR,
        forward: Callable[[str], None] | None = None,
        lease_s: float = LEASE_S,
    ):
        self._settings, self._actor = settings or Settings(), actor
        self._forward = forward or print_to_stderr
        self._lease = Lease(lease_s)
        self._supervisor: ProcessSupervisor | None = None
        self._pages: list[ProgressPage] = []

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> ActorHandle:
        """Start one process of an actor by `python -m jaxpp_async.actors`; see `Launcher.start`."""
        if self._supervisor is None:
            self._supervisor = ProcessSupervisor(self._lease.beat_s)
        prefix = f"[{spec.process_rank}] "
        started = spawn_actor(
            self._supervisor, self._request(spec), lambda line: self._forward(prefix + line)
        )
        actor = await asyncio.wrap_future(started)
        self._pages.append(actor.page)
        return _LocalHandle(actor)

    async def aclose(self) -> None:
        """Kill the processes that still run, and release threads and descriptors; see `Launcher.aclose`."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            await asyncio.wrap_future(supervisor.close())
        for page in self._pages:
            page.close()
        self._pages.clear()

    def _request(self, spec: LaunchSpec) -> ActorRequest:
        return ActorRequest(
            python=self._settings.python or sys.executable,
            env=environment(self._settings, spec.platform) | dict(spec.env),
            config=spec.config(actor=self._actor, lease_s=self._lease.seconds),
            index=spec.process_id,
            count=spec.num_processes,
            cpus=self._settings.cpus,
            gpus=spec.gpus,
            defaults={**defaults(self._settings), **spec.defaults},
        )


class _LocalHandle:
    """A handle on an actor process that runs as a child process on this machine (see `ActorHandle`)."""

    def __init__(self, actor: ActorProcess):
        self._process, self.host, self.pid = actor.process, socket.gethostname(), actor.process.pid
        self.progress = actor.page.read
        self._dead = asyncio.wrap_future(actor.process.dead)

    async def wait_dead(self) -> Death:
        return await asyncio.shield(self._dead)

    def terminate(self) -> None:
        self._process.signal_group(15)

    def kill(self) -> None:
        self._process.signal_group(9)

    def output_tail(self) -> tuple[str, ...]:
        return self._process.output_tail()


def _make(options: LaunchOptions, num_processes: int) -> LocalLauncher:
    return LocalLauncher(settings=options.settings_here(), lease_s=options.lease_s)


def _find_hosts(options: LaunchOptions) -> tuple[None, None]:
    options.settings_here()
    return None, None


KIND = LauncherKind(
    make=_make,
    find_hosts=_find_hosts,
    uses=OF_PROCESSES,
    phrase="launcher='local', whose actors run on this machine",
)
