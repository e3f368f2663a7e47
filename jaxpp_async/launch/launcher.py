"""Define the interface of every launcher: it gets the `LaunchSpec` of a process and returns an `ActorHandle`.

The interface is public: `docs/launching.md` says what a launcher of one's own has to do, and shows one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxpp_async.launch.process_supervisor import Death
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.actor_info import Position, ProcessRank
from jaxpp_async.protocol.frames import DEFAULT_MAX_FRAME_BYTES
from jaxpp_async.protocol.log_forwarding import package_level
from jaxpp_async.protocol.parent_watch import LEASE_S
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.network import Network

DEFAULT_ACTOR = "jaxpp_async.actors.actor:Actor"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """All that a launcher needs to start one process of an actor.

    Args:
        process_id: number of the process, counted from 0.
        num_processes: of the whole mesh, for sharing out cores.
        incarnation: which life of the process this is, counted from 0.
        secret: the mesh's 32 bytes.
        controller: host and port to connect to; None for launchers that hand sockets over
            (`Launcher.listen_host`).
        platform: `"cpu"` or `"cuda"`.
        env: environment variables to add.
        max_frame_bytes: the longest control frame.
        processes_per_actor: the processes of one actor have consecutive numbers, and should be near each
            other.
        gpus: number of GPUs that the process needs; 0: none.
        defaults: environment variables that apply where neither the host's environment nor `env` has them.
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
        """The process's place in its actor. Its text names the process to users."""
        return ProcessRank(self.process_id, self.processes_per_actor)

    def config(self, *, actor: str = DEFAULT_ACTOR, lease_s: float = LEASE_S) -> dict[str, Any]:
        """Make the configuration that `python -m jaxpp_async.actors` reads as JSON from the first line of its
        stdin.

        The configuration holds the secret, so it may travel over pipes and authenticated channels only. A
        launcher may add `parent_pid` (the process then ends with the thread that spawned it), `cores` (CPU
        numbers to run on) and `progress_page`.

        Args:
            actor: `module:name` of the actor class.
            lease_s: seconds of silence on its stdin after which the process ends itself.
        """
        assert self.controller is not None  # the launcher has a `listen_host`
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
    """Controls one started process of an actor."""

    @property
    def host(self) -> str:
        """Name of the machine on which it runs."""
        ...

    @property
    def pid(self) -> int:
        """Its process id there."""
        ...

    async def wait_dead(self) -> Death:
        """Wait until the process has ended. May be awaited any number of times, and cancelled."""
        ...

    def terminate(self) -> None:
        """Ask the process, and what it started, to end (SIGTERM). Does nothing if it is dead."""
        ...

    def kill(self) -> None:
        """End the process, and what it started (SIGKILL). Does nothing if it is dead."""
        ...

    def output_tail(self) -> tuple[str, ...]:
        """Give the last lines that the process printed."""
        ...

    def progress(self) -> Position | None:
        """Give its last position in its program, also after its death; None if the position is not known."""
        ...


class Launcher(Protocol):
    """Starts actors. One launcher serves one mesh at a time, and may serve another after `aclose`."""

    @property
    def listen_host(self) -> str | None:
        """The interface on which the controller must listen; None if sockets are handed over instead."""
        ...

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that its actors can use; the first one is the default."""
        ...

    def make_transport(self, kind: str, network: Network) -> Transport:
        """Make the controller's own transport, which listens on that network."""
        ...

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> ActorHandle:
        """Start one process; returns when the process exists, before it has connected.

        Args:
            spec: describes the process.
            adopt: takes a connected socket, from launchers that need no listening controller.

        Raises:
            OSError, LaunchError, HandshakeError: it could not be started; the message says where and why.
        """
        ...

    async def aclose(self) -> None:
        """Kill what is left and give back threads and descriptors. A second call does nothing."""
        ...
