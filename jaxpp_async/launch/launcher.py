"""Define the interface of launchers, which start the processes of actors. A launcher gets a `LaunchSpec`,
which describes a process, starts the process, and returns an `ActorHandle`, which controls the process.

The interface is public: `docs/launching.md` says what a user's own launcher has to do, and shows an example.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxpp_async.launch.process_supervisor import Death
from jaxpp_async.program.instructions import CONTROLLER, ProcessId
from jaxpp_async.protocol.actor_info import Position, ProcessRank
from jaxpp_async.protocol.frames import DEFAULT_MAX_FRAME_BYTES
from jaxpp_async.protocol.log_forwarding import package_level
from jaxpp_async.protocol.parent_watch import LEASE_S
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.network import Network
from jaxpp_async.transport.registry import make_process_transport, transport_names

DEFAULT_ACTOR = "jaxpp_async.actors.actor:Actor"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A description of one process of an actor, with all that a launcher needs to start it.

    Args:
        process_id: the number of the process in the mesh, counted from 0.
        num_processes: the number of processes of the whole mesh, so that launchers can give each process its
            share of the CPU cores.
        incarnation: the number of times that the mesh has restarted the process; 0 at the first start.
        secret: the mesh's shared secret, 32 bytes, with which processes prove that they belong to it.
        controller: the host and port of the controller, to which the process connects; None for launchers
            that give the controller a connected socket instead (`Launcher.listen_host`).
        platform: the JAX platform of the process, `"cpu"` or `"cuda"`.
        env: environment variables to add to those of the host.
        max_frame_bytes: the size in bytes of the longest message on the control connection.
        processes_per_actor: the number of processes of each actor. The processes of one actor have
            consecutive numbers, and should run on the same host or on neighbouring ones.
        gpus: the number of GPUs that the process needs; 0 if it needs none.
        defaults: environment variables that apply where neither the host's environment nor `env` sets them.
    """

    process_id: ProcessId
    num_processes: int
    incarnation: int
    secret: bytes = field(repr=False)
    controller: tuple[str, int] | None
    platform: str = "cpu"
    env: Mapping[str, str] = field(default_factory=dict)
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
    processes_per_actor: int = 1
    gpus: int = 0
    defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def process_rank(self) -> ProcessRank:
        """The process's position in its actor, whose string form names the process in messages to users."""
        return ProcessRank(self.process_id, self.processes_per_actor)

    def config(self, *, actor: str = DEFAULT_ACTOR, lease_s: float = LEASE_S) -> dict[str, Any]:
        """Make the configuration that `python -m jaxpp_async.actors` reads as JSON from the first line of its
        stdin.

        The configuration contains the secret, so it may travel over pipes and authenticated channels only. A
        launcher may add three entries: `parent_pid`, the process id of the parent, so that the process ends
        when its parent does; `cores`, the numbers of the CPUs to run on; and `progress_page`, the file
        descriptor of the shared memory page where the process writes its progress.

        Args:
            actor: the actor class as `module:name`.
            lease_s: the number of seconds after which the process ends itself if its stdin is silent.
        """
        assert self.controller is not None  # it is None only for launchers without a `listen_host`
        return {
            "process_id": self.process_id,
            "incarnation": self.incarnation,
            "secret": self.secret.hex(),
            "controller": list(self.controller),
            "lease_s": lease_s,
            "actor": actor,
            "max_frame_bytes": self.max_frame_bytes,
            "log_level": package_level(),
        }


class ActorHandle(Protocol):
    """A handle on one started process of an actor, which controls the process and reports how it ended."""

    @property
    def host(self) -> str:
        """The name of the machine on which the process runs."""
        ...

    @property
    def pid(self) -> int:
        """The process id of the process on its machine."""
        ...

    async def wait_dead(self) -> Death:
        """Wait until the process has ended, and return how it ended.

        May be awaited any number of times; cancelling the wait does not affect the process.
        """
        ...

    def terminate(self) -> None:
        """Send SIGTERM to the process and to the processes that it started. Does nothing if the process is
        dead.
        """
        ...

    def kill(self) -> None:
        """Send SIGKILL to the process and to the processes that it started. Does nothing if the process is
        dead.
        """
        ...

    def output_tail(self) -> tuple[str, ...]:
        """Return the last lines that the process printed."""
        ...

    def progress(self) -> Position | None:
        """Return the process's last reported position in its program (the instruction that it had reached),
        also after its death; None if no position is known.
        """
        ...


class Launcher(Protocol):
    """The interface of the objects that start the actors of a mesh.

    One launcher serves one mesh at a time, and may serve another mesh after `aclose`.
    """

    @property
    def listen_host(self) -> str | None:
        """The address on which the controller must listen for its actors; None if the launcher gives the
        controller connected sockets instead.
        """
        ...

    @property
    def transports(self) -> tuple[str, ...]:
        """The names of the transports that the launcher's actors can use; the first one is the default."""
        ...

    def make_transport(self, kind: str, network: Network) -> Transport:
        """Make the controller's own transport, which carries arrays between the controller and the actors.

        Args:
            kind: the name of the transport, one of `transports`.
            network: the addresses on which the transport listens.
        """
        ...

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> ActorHandle:
        """Start one process of an actor, and return its handle once the process exists, before it has
        connected to the controller.

        Args:
            spec: the description of the process.
            adopt: a function that gives a connected socket to the controller; only launchers without a
                `listen_host` call it.

        Raises:
            OSError: this machine could not start the process.
            LaunchError: a host could not start the process; the message says which host and why.
            HandshakeError: a host has other versions of packages than this machine.
        """
        ...

    async def aclose(self) -> None:
        """Kill the processes that still run, and release threads and file descriptors. A second call does
        nothing.
        """
        ...


class ProcessLauncher:
    """The part that launchers have in common whose actors run in processes of their own."""

    @property
    def transports(self) -> tuple[str, ...]:
        """The names of the transports that work between processes; the first one is the default."""
        return transport_names(within_process=False)

    def make_transport(self, kind: str, network: Network) -> Transport:
        """Make the controller's own transport; see `Launcher.make_transport`."""
        return make_process_transport(kind, CONTROLLER, network)
