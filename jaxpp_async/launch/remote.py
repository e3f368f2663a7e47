"""Start actors on other hosts, through a host agent (a program that starts and ends actors) on each host.

A `Reach` is an object that starts the agent by ssh, srun, Ray, or any command that runs a program on another
host and passes on its stdin and stdout. Hosts start in parallel, and at most `MAX_HANDSHAKES` of them log in
at a time. If a host does not start, a `LaunchError` says which host, why, and what to do. If a host has other
versions of packages than this machine, a `HandshakeError` says so. Only agents that have sent their greeting
get the mesh's secret.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

import jaxpp_async
from jaxpp_async.base.install_hints import SAME_VERSIONS
from jaxpp_async.errors import HandshakeError, LaunchError
from jaxpp_async.launch.host_agent_client import HostAgentClient, ProgramNotStartedError, Reach, Stream
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
from jaxpp_async.launch.launcher import DEFAULT_ACTOR, ActorHandle, LaunchSpec, ProcessLauncher
from jaxpp_async.launch.login_errors import Explanation, explain_python
from jaxpp_async.launch.process_supervisor import Death, ProcessSupervisor, SupervisedProcess, print_to_stderr
from jaxpp_async.launch.run_module import command_here, command_there, inherited_environment
from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.protocol.frames import version_mismatch
from jaxpp_async.protocol.parent_watch import LEASE_S, Lease

HOST_AGENT = "jaxpp_async.launch.host_agent"
"""The name of the module that runs on other hosts to start actors there."""

MAX_HANDSHAKES = 8
"""The greatest number of hosts that may be between the first packet and the login at the same time. By
default, sshd drops connections when there are more than ten.
"""

CLOSE_S = 1.0
"""The longest time in seconds that host agents may take to end in an orderly way."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits on how long the parts of a host's start may take, in seconds.

    Args:
        login_s: the time until the login shell on the host answers.
        python_s: the time from then until the Python program on the host answers.
    """

    login_s: float = 12.0
    python_s: float = 60.0


class RemoteLauncher(ProcessLauncher):
    """A launcher that starts actors on other hosts, through a host agent on each.

    Args:
        reach: the object that starts host agents, such as by ssh.
        hosts: the hosts, whose slots are filled in order.
        settings: the settings of all hosts; a host's own settings override them.
        control_address: the name or address on which the controller listens; `"0.0.0.0"` for every interface.
            None for the address by which the hosts can connect to this machine (loopback if all of them are
            this machine).
        actor: the actor class as `module:name`, for tests of the control plane.
        forward: a function that is called with each line that an actor or a host prints, prefixed with its
            name; None to print the lines to `sys.stderr`.
        lease_s: the number of seconds after which actors and host agents end themselves if the driver (the
            user's process) sends no heartbeat.
        timeouts: the limits on how long hosts may take to start.

    Attributes:
        slots_each: the number of slots of one host that each process takes; must be set before the first
            process starts.
        slots_are_processes: whether each slot of a host stands for a process instead of a device.
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
        self.slots_are_processes = reach.agent_per_process
        self._control_address = control_address
        self._forward = forward or print_to_stderr
        self._lease = reach.lease = Lease(lease_s)
        self._timeouts = timeouts or Timeouts()
        self._handshakes = asyncio.Semaphore(MAX_HANDSHAKES)
        self._links: dict[Hashable, asyncio.Task[HostAgentClient]] = {}
        self._lines = HostLines()
        self._left_to_start: set[int] | None = None

    @property
    def listen_host(self) -> str | None:
        """The address on which the controller listens. If neither the user nor `prepare` has set it, it is
        looked up now, which may block.
        """
        return self._control_address or control_address([host.name for host in self.hosts])

    def devices_on(self, host: Host) -> tuple[str, ...] | None:
        """Return the names of the GPUs that `devices=` gives to the actors of a host, in the form of
        `CUDA_VISIBLE_DEVICES`; None if the option was not given.
        """
        return host.settings.merged_over(self._settings).devices

    async def prepare(self) -> None:
        """Find the address on which the controller listens for the actors, so that `listen_host` does not
        have to look it up.

        Raises:
            MeshError: no single address of this machine works for all hosts.
        """
        if self._control_address is None:
            names = await self._reach.resolve(self.hosts)
            self._control_address = await asyncio.to_thread(control_address, names)

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> ActorHandle:
        """Start one process of an actor on its host. If the host's agent does not run yet, it is started
        first; see `Launcher.start`.

        Raises:
            LaunchError: the host agent, or the process, did not start.
            HandshakeError: the host has other versions of packages than this machine.
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
        """End all actors and host agents, and close the connections to them; see `Launcher.aclose`."""
        tasks, self._links = tuple(self._links.values()), {}
        self._lines.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks) if tasks else None
        links = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        await asyncio.gather(*(link.aclose(CLOSE_S) for link in links))
        await self._reach.aclose()

    # ------------------------------------------------------------ host agents

    async def _link(self, placement: ProcessPlacement, spec: LaunchSpec) -> HostAgentClient:
        """Return the client that controls the host agent which is to start a process.

        If that agent does not run yet, or has ended, the first caller starts it, and other callers wait until
        it has started.
        """
        key: Hashable = spec.process_id if self._reach.agent_per_process else placement.host.where
        task = self._links.get(key)
        if task is None or (task.done() and _is_over(task)):
            work = self._open(placement, spec.process_rank.actor)
            task = self._links[key] = asyncio.get_running_loop().create_task(
                work, name=f"reach {placement.host}"
            )
        return await asyncio.shield(task)

    async def _open(self, placement: ProcessPlacement, actor_id: int) -> HostAgentClient:
        host = placement.host
        settings = host.settings.merged_over(self._settings)
        python = settings.python or sys.executable
        command = command_there(python, HOST_AGENT, f"{self._lease.seconds:g}")
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
        except BaseException as error:  # also a cancellation: nobody else owns the stream yet
            await link.aclose(0.0)
            if isinstance(error, OSError):
                error = self._failure(host, actor_id, Explanation(f"could not be reached: {error}", ""), ())
            elif isinstance(error, ProgramNotStartedError):
                found = self._reach.explain(host, error) or explain_python(
                    python, error.said, error.exit_status
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
        ours = {"jaxpp-async": jaxpp_async.__version__} | {
            name: metadata.version(name) for name in SAME_VERSIONS
        }
        mismatch = version_mismatch(ours, hello.versions, hello.python)
        if mismatch is not None:
            raise HandshakeError(f"host {host}: {mismatch}", actor=actor_id, host=host.name)

    # ------------------------------------------------------------ actors

    async def _request(
        self, placement: ProcessPlacement, spec: LaunchSpec, hello: AgentHello
    ) -> ActorRequest:
        settings = placement.host.settings.merged_over(
            replace(self._settings, env={**self._settings.env, **spec.env})
        )
        config = spec.config(actor=self._actor, lease_s=self._lease.seconds)
        if config["controller"][0] == ANY:
            names = await self._reach.resolve([placement.host])
            address = await asyncio.to_thread(address_towards, names[0])
            config["controller"] = [address or socket.gethostname(), config["controller"][1]]
        return ActorRequest(
            python=hello.python,
            env=environment(settings, spec.platform),
            config=config,
            index=placement.index,
            count=placement.count,
            cpus=settings.cpus,
            gpus=spec.gpus,
            gpus_are_its_own=self._reach.agent_per_process,
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
    """A `Reach` (an object that starts programs on hosts) that starts host agents by a command such as
    `docker exec -i` or `kubectl exec -i`. The command has to run a program on a host and to pass on the
    program's stdin and stdout.

    Args:
        command: a function that makes the argument vector of the command, which runs on this machine, from
            the placement and the argument vector of the host agent.
    """

    agent_per_process = False
    login_mark: str | None = None
    lease = Lease()

    def __init__(self, command: Callable[[ProcessPlacement, Sequence[str]], Sequence[str]]):
        self._command = command
        self._supervisor: ProcessSupervisor | None = None

    async def resolve(self, hosts: Sequence[Host]) -> list[str]:
        """Return the hosts' names, because nothing else is known about their addresses; see
        `Reach.resolve`.
        """
        return [host.name for host in hosts]

    async def open(
        self, placement: ProcessPlacement, host_agent: Sequence[str], on_line: Callable[[str], None]
    ) -> Stream:
        """Run the command that starts a host agent, and return a stream connected to the agent; see
        `Reach.open`.
        """
        if self._supervisor is None:
            self._supervisor = ProcessSupervisor(self.lease.beat_s)
        command = self._command(placement, host_agent)
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        # The command ends with this process, even where a forked worker of this process holds its stdin open.
        with_parent = command_here("jaxpp_async.protocol.parent_watch", str(os.getpid()))
        spawned = self._supervisor.spawn([*with_parent, *command], inherited_environment(), b"", on_line)
        return ProcessStream(self._supervisor, await asyncio.wrap_future(spawned))

    def explain(self, host: Host, error: ProgramNotStartedError) -> Explanation | None:
        """Return None, because nothing is known about the command's errors; see `Reach.explain`."""
        return None

    async def aclose(self) -> None:
        """Kill the commands that still run; see `Reach.aclose`."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            await asyncio.wrap_future(supervisor.close())


class ProcessStream:
    """A `Stream` to a program on a host through a local process, such as ssh, that a `ProcessSupervisor`
    started.
    """

    def __init__(self, supervisor: ProcessSupervisor, process: SupervisedProcess):
        self._supervisor, self._process = supervisor, process
        self._dead = asyncio.wrap_future(process.dead)

    def write(self, data: bytes) -> None:
        """Write bytes to the stdin of the local process, which passes them on; see `Stream.write`."""
        self._supervisor.write(self._process, data)

    def kill(self) -> None:
        """Kill the local process, and with it the stream; see `Stream.kill`."""
        self._process.signal_group(9)

    async def wait_ended(self) -> Death:
        """Wait until the local process has ended, and return how it ended; see `Stream.wait_ended`."""
        return await asyncio.shield(self._dead)


def _is_over(task: asyncio.Task[HostAgentClient]) -> bool:
    if task.cancelled() or task.exception() is not None:
        return True
    return task.result().is_over


# ---------------------------------------------------------------- display

_LOG = logging.getLogger("jaxpp_async")

MAX_LINES = 24
"""The greatest number of hosts for which the display has one line each. For more hosts it shows counts by
state, because a live display that is taller than its terminal flickers.
"""


class HostLines:
    """A display of how the launch proceeds, with one line for each host.

    The lines are updated live on a terminal, and written as log records otherwise. All methods must be called
    from the same thread.

    Args:
        console: the console to write to; None for stderr.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console(file=sys.stderr)
        self._lines: dict[str, str] = {}
        self._live: Any = None

    def set(self, host: str, text: str) -> None:
        """Show a new state of a host, such as "connecting"."""
        self._lines[host] = text
        if not self._console.is_terminal:
            _LOG.info("host %s: %s", host, text)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self.render(), refresh=True)

    def render(self) -> Text:
        """Return the text of all lines; with more than `MAX_LINES` hosts, the number of hosts in each state
        instead.
        """
        if len(self._lines) <= MAX_LINES:
            width = max(map(len, self._lines), default=0)
            return Text("\n".join(f"{host:<{width}}  {text}" for host, text in self._lines.items()))
        counts = Counter(self._lines.values())
        return Text("\n".join(f"{count} hosts  {text}" for text, count in counts.items()))

    def close(self) -> None:
        """End the live display, which leaves the last states on the terminal. A second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._lines.clear()
