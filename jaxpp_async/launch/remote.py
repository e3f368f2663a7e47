"""remote: actors on other hosts, through a keeper on each. How a host is reached is a `Reach`: ssh, srun, Ray, or any
command that runs a program elsewhere with its stdin and stdout connected.

Hosts come up in parallel, at most `MAX_HANDSHAKES` at once. One that does not is a `LaunchError` (another version: a
`HandshakeError`) with host, reason and remedy; the secret goes to none that has not said hello.

display: how the launch goes, a line a host: live where somebody watches a terminal, as log records elsewhere.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

import jaxpp_async
from jaxpp_async.errors import HandshakeError, LaunchError
from jaxpp_async.launch.commands import command_here, command_there, inherited_environment
from jaxpp_async.launch.host_agent import VERSIONED
from jaxpp_async.launch.host_agent_client import HostAgentClient, NotUpError, Stream
from jaxpp_async.launch.host_agent_protocol import AgentHello
from jaxpp_async.launch.hosts import (
    ANY,
    Host,
    ProcessPlacement,
    Settings,
    address_towards,
    control_address,
    defaults,
    environment,
    place,
)
from jaxpp_async.launch.launcher import DEFAULT_ACTOR, ActorHandle, LaunchSpec
from jaxpp_async.launch.local import print_to_stderr
from jaxpp_async.launch.login_errors import Explanation, explain_python
from jaxpp_async.launch.process_supervisor import Death, ProcessSupervisor, SupervisedProcess
from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.program.instructions import CONTROLLER
from jaxpp_async.protocol.frames import version_mismatch
from jaxpp_async.protocol.parent_watch import LEASE_S, beat_s_of
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.network import Network
from jaxpp_async.transport.registry import make_process_transport, transport_names

KEEPER = "jaxpp_async.launch.host_agent"
"""The program that holds actors on other hosts."""

MAX_HANDSHAKES = 8
"""Hosts that may be between the first packet and the login at one time: sshd drops connections past ten by default."""

CLOSE_S = 1.0
"""What keepers may take to end in order."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """What a host may take, in seconds: `login_s` until its shell answers, `python_s` from there until Python does."""

    login_s: float = 12.0
    python_s: float = 60.0


class Reach(Protocol):
    """How a program is run on a host."""

    keeper_each: bool
    """Whether every process has a keeper, and so a stream, of its own, instead of one a host. A slot is a process there
    (a task, a bundle), elsewhere a device."""

    login_mark: str | None
    """A line that tells that the host let us in, before Python starts; None if there is none."""

    lease_s: float
    """How long what it runs waits for a sign of life; its launcher sets it."""

    async def resolve(self, hosts: Sequence[Host]) -> list[str]:
        """Names or addresses by which to find the route to the hosts."""
        ...

    async def open(
        self, placement: ProcessPlacement, host_agent: Sequence[str], on_line: Callable[[str], None]
    ) -> Stream:
        """Run `keeper` (an argument vector) on the placement's host.

        Args:
            on_line: to be called with each line of its stdout, and of whatever complains on the way; from any thread.

        Raises:
            OSError: not even that could begin.
        """
        ...

    def explain(self, host: Host, error: NotUpError) -> Explanation | None:
        """Why there is no keeper, if it has to do with the way there."""
        ...

    async def aclose(self) -> None:
        """Give everything back."""
        ...


class RemoteLauncher:
    """Actors on other hosts.

    Args:
        reach: how.
        hosts: their slots are filled in order.
        settings: of all hosts; a host's own win.
        control_address: name or address to listen on; `"0.0.0.0"`: every interface. None: the one that reaches the
            hosts (loopback, if all are this machine).
        actor: `module:name` of the actor class, for tests of the control plane.
        forward: called with each line that an actor or a host prints, prefixed; default: to `sys.stderr`.
        lease_s: see `LocalLauncher`; `reach` gets it too. timeouts: of hosts.

    Attributes:
        slots_each: how many slots of one host a process takes; to be set before the first is started.
        slots_are_processes: whether a slot is a process instead of a device.
    """

    def __init__(
        self,
        reach: Reach,
        hosts: Sequence[Host],
        *,
        settings: Settings | None = None,
        control_address: str | None = None,
        actor: str = DEFAULT_ACTOR,
        forward: Callable[[str], None] | None = None,
        lease_s: float = LEASE_S,
        timeouts: Timeouts | None = None,
    ):
        self.hosts, self.slots_each = tuple(hosts), 1
        self._reach, self._settings, self._actor = reach, settings or Settings(), actor
        self.slots_are_processes = reach.keeper_each
        self._control_address = control_address
        self._forward = forward or print_to_stderr
        self._lease_s = reach.lease_s = lease_s
        self._timeouts = timeouts or Timeouts()
        self._handshakes = asyncio.Semaphore(MAX_HANDSHAKES)
        self._links: dict[Hashable, asyncio.Task[HostAgentClient]] = {}
        self._lines = HostLines()
        self._left_to_start: set[int] | None = None

    @property
    def listen_host(self) -> str | None:
        """The control address. `prepare` has found it, or it is looked for now, which may block."""
        return self._control_address or control_address([host.name for host in self.hosts])

    def devices_on(self, host: Host) -> tuple[str, ...] | None:
        """What `devices=` gives the actors of a host; None: it was not said."""
        return host.settings.over(self._settings).devices

    async def prepare(self) -> None:
        """Find the control address.

        Raises:
            MeshError: there is not one for all hosts.
        """
        if self._control_address is None:
            names = await self._reach.resolve(self.hosts)
            self._control_address = await asyncio.to_thread(control_address, names)

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that join processes."""
        return transport_names(within_process=False)

    def make_transport(self, kind: str, network: Network) -> Transport:
        """Make the controller's end of the transport."""
        return make_process_transport(kind, CONTROLLER, network)

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> ActorHandle:
        """Start one process on its host; see `Launcher.start`.

        Raises:
            LaunchError: its host, or the actor there, did not come up. HandshakeError: other versions there.
        """
        placement = place(self.hosts, spec.num_processes, self.slots_each)[spec.process_id]
        host = placement.host
        link = await self._link(placement, spec)
        key, prefix = f"{spec.process_id}.{spec.incarnation}", f"[{spec.process_rank}, {host}] "
        request = await self._request(placement, spec, link.hello.result())
        try:
            handle = await link.start(key, request, os.getcwd(), lambda line: self._forward(prefix + line))
        except OSError as error:
            self._lines.set(str(host), f"failed: {error}")
            raise LaunchError(
                f"host {host}: {error}", actor=spec.process_rank.actor, host=host.name
            ) from None
        self._note_started(placement, spec)
        return handle

    async def aclose(self) -> None:
        """See `Launcher.aclose`."""
        tasks, self._links = tuple(self._links.values()), {}
        self._lines.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks) if tasks else None
        links = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        await asyncio.gather(*(link.aclose(CLOSE_S) for link in links))
        await self._reach.aclose()

    # ------------------------------------------------------------ keepers

    async def _link(self, placement: ProcessPlacement, spec: LaunchSpec) -> HostAgentClient:
        """The keeper that a process belongs to: started by the first that asks; one that is gone is replaced."""
        key: Hashable = spec.process_id if self._reach.keeper_each else placement.host.where
        task = self._links.get(key)
        if task is None or (task.done() and _is_over(task)):
            work = self._open(placement, spec.process_rank.actor)
            task = self._links[key] = asyncio.get_running_loop().create_task(
                work, name=f"reach {placement.host}"
            )
        return await asyncio.shield(task)

    async def _open(self, placement: ProcessPlacement, actor_id: int) -> HostAgentClient:
        host = placement.host
        settings = host.settings.over(self._settings)
        python = settings.python or sys.executable
        command = command_there(python, KEEPER, f"{self._lease_s:g}")
        prefix = f"[host {host}] "
        link = HostAgentClient(
            str(host), lambda line: self._forward(prefix + line), login_mark=self._reach.login_mark
        )
        try:
            async with self._handshakes:
                self._lines.set(str(host), "connecting")
                link.attach(await self._reach.open(placement, command, link.on_line))
                if self._reach.login_mark is not None:
                    await link.wait_login(self._timeouts.login_s)
            self._lines.set(str(host), "starting Python")
            hello = await link.wait_hello(self._timeouts.python_s)
            self._check_versions(host, hello, actor_id)
            return link
        except BaseException as error:  # also a cancellation: the stream is nobody else's yet
            await link.aclose(0.0)
            if isinstance(error, OSError):
                error = self._failure(host, actor_id, Explanation(f"could not be reached: {error}", ""), ())
            elif isinstance(error, NotUpError):
                found = self._reach.explain(host, error) or explain_python(
                    host, python, error.said, error.ended
                )
                error = self._failure(host, actor_id, found, error.said)
            if not isinstance(error, asyncio.CancelledError):
                self._lines.set(str(host), f"failed: {str(error).splitlines()[0]}")
            raise error from None

    def _failure(self, host: Host, actor_id: int, found: Explanation, said: Sequence[str]) -> LaunchError:
        remedy = f"; {found.remedy}" if found.remedy else ""
        tail = "".join(f"\n  {line}" for line in said[-12:])
        text = f"host {host}: {found.what}{remedy}" + (f"\nWhat came from there:{tail}" if tail else "")
        return LaunchError(text, actor=actor_id, host=host.name)

    def _check_versions(self, host: Host, hello: AgentHello, actor_id: int) -> None:
        ours = {"jaxpp-async": jaxpp_async.__version__} | {name: metadata.version(name) for name in VERSIONED}
        mismatch = version_mismatch(ours, hello.versions, hello.python)
        if mismatch is not None:
            raise HandshakeError(f"host {host}: {mismatch}", actor=actor_id, host=host.name)

    # ------------------------------------------------------------ actors

    async def _request(
        self, placement: ProcessPlacement, spec: LaunchSpec, hello: AgentHello
    ) -> ActorRequest:
        settings = placement.host.settings.over(
            replace(self._settings, env={**self._settings.env, **spec.env})
        )
        config = spec.config(actor=self._actor, lease_s=self._lease_s)
        if config["controller"][0] == ANY:
            names = await self._reach.resolve([placement.host])
            address = await asyncio.to_thread(address_towards, names[0])
            config["controller"] = [address or socket.gethostname(), config["controller"][1]]
        return ActorRequest(
            python=hello.python,
            env=environment(settings, placement, spec.platform),
            config=config,
            index=placement.index,
            count=placement.count,
            cpus=settings.cpus,
            gpus=spec.gpus,
            gpus_are_its_own=self._reach.keeper_each,
            defaults={**defaults(settings), **spec.defaults},
        )

    def _note_started(self, placement: ProcessPlacement, spec: LaunchSpec) -> None:
        if self._left_to_start is None:
            self._left_to_start = set(range(spec.num_processes))
        self._left_to_start.discard(spec.process_id)
        count = placement.count
        what = f"process{'es' * (count != 1)}" if spec.process_rank.size > 1 else f"actor{'s' * (count != 1)}"
        self._lines.set(str(placement.host), f"{count} {what} started")
        if not self._left_to_start:
            self._lines.close()


class CommandReach:
    """Any command that runs a program elsewhere, with stdin and stdout connected: `docker exec -i`, `kubectl exec -i`.

    Args:
        command: (placement, argument vector of the keeper) to the argument vector of a process here.
    """

    keeper_each = False
    login_mark: str | None = None
    lease_s = LEASE_S

    def __init__(self, command: Callable[[ProcessPlacement, Sequence[str]], Sequence[str]]):
        self._command = command
        self._supervisor: ProcessSupervisor | None = None

    async def resolve(self, hosts: Sequence[Host]) -> list[str]:
        """See `Reach`: their names."""
        return [host.name for host in hosts]

    async def open(
        self, placement: ProcessPlacement, host_agent: Sequence[str], on_line: Callable[[str], None]
    ) -> Stream:
        """See `Reach`."""
        if self._supervisor is None:
            self._supervisor = ProcessSupervisor(beat_s_of(self.lease_s))
        command = self._command(placement, host_agent)
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        # The command ends with this process, even where a forked worker of this process holds its stdin open.
        with_parent = command_here("jaxpp_async.protocol.parent_watch", str(os.getpid()))
        spawned = self._supervisor.spawn([*with_parent, *command], inherited_environment(), b"", on_line)
        return ProcessStream(self._supervisor, await asyncio.wrap_future(spawned))

    def explain(self, host: Host, error: NotUpError) -> Explanation | None:
        """See `Reach`: nothing is known of this way."""
        return None

    async def aclose(self) -> None:
        """See `Reach`."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            await asyncio.wrap_future(supervisor.close())


class ProcessStream:
    """A `Stream` through a process of a warden."""

    def __init__(self, supervisor: ProcessSupervisor, process: SupervisedProcess):
        self._supervisor, self._process = supervisor, process
        self._dead = asyncio.wrap_future(process.dead)

    def write(self, data: bytes) -> None:
        """See `Stream`."""
        self._supervisor.write(self._process, data)

    def kill(self) -> None:
        """See `Stream`."""
        self._process.signal_group(9)

    async def wait_over(self) -> Death:
        """See `Stream`."""
        return await asyncio.shield(self._dead)


def _is_over(task: asyncio.Task[HostAgentClient]) -> bool:
    if task.cancelled() or task.exception() is not None:
        return True
    return task.result().is_over


# ---------------------------------------------------------------- display

_LOG = logging.getLogger("jaxpp_async")

MAX_LINES = 24
"""More hosts than this are summed up: a live display taller than its terminal flickers."""


class HostLines:
    """One line a host. Used from one thread.

    Args:
        console: default: stderr.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console(file=sys.stderr)
        self._lines: dict[str, str] = {}
        self._live: Any = None

    def set(self, host: str, text: str) -> None:
        """What a host is at now."""
        self._lines[host] = text
        if not self._console.is_terminal:
            _LOG.info("host %s: %s", host, text)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self.render(), refresh=True)

    def render(self) -> Text:
        """All lines; the states of many hosts are counted instead."""
        if len(self._lines) <= MAX_LINES:
            width = max(map(len, self._lines), default=0)
            return Text("\n".join(f"{host:<{width}}  {text}" for host, text in self._lines.items()))
        counts: dict[str, int] = {}
        for text in self._lines.values():
            counts[text] = counts.get(text, 0) + 1
        return Text("\n".join(f"{count} hosts  {text}" for text, count in counts.items()))

    def close(self) -> None:
        """Leave the last state on the terminal. A second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._lines.clear()
