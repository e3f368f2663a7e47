"""base: what a launcher is. It gets one actor's `LaunchSpec` and gives an `ActorHandle`. It knows nothing of programs.

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
    """What a launcher needs to start one process of an actor.

    Args:
        process_id: counted from 0. num_processes: of the whole mesh, for sharing out cores.
        processes_per_actor: processes of one actor are neighbours; they should be near each other.
        incarnation: which life of the actor this is.
        secret: the mesh's 32 bytes.
        controller: host and port to connect to, or None if the launcher does without (`Launcher.listen_host`).
        platform: `"cpu"` or `"cuda"`.
        env: environment variables to add.
        max_frame_bytes: the longest control frame.
        gpus: how many GPUs the process needs; 0: none.
        defaults: environment variables for where neither its host's environment nor `env` has them.
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
        """Which process of which actor it is; its text is what to call it in lines that people read."""
        return ProcessRank(self.process_id, self.processes_per_actor)

    def config(self, *, actor: str = DEFAULT_ACTOR, lease_s: float = LEASE_S) -> dict[str, Any]:
        """What the process `python -m jaxpp_async.actors` reads on the first line of its stdin, as JSON.

        It holds the secret, so it travels over pipes and authenticated channels only. A launcher may add `parent_pid`
        (the process then ends with the thread that spawned it), `cores` (CPU numbers to run on) and `progress_page`.

        Args:
            actor: `module:name` of the actor class.
            lease_s: seconds of silence on its stdin after which it ends itself.
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
    """One started actor."""

    @property
    def host(self) -> str:
        """Name of the machine it runs on."""
        ...

    @property
    def pid(self) -> int:
        """Its process id there."""
        ...

    async def wait_dead(self) -> Death:
        """Wait until it has ended; may be awaited any number of times, and cancelled."""
        ...

    def terminate(self) -> None:
        """Ask it and what it started to end (SIGTERM). Nothing happens if it is dead."""
        ...

    def kill(self) -> None:
        """End it and what it started (SIGKILL). Nothing happens if it is dead."""
        ...

    def output_tail(self) -> tuple[str, ...]:
        """The last lines that it printed."""
        ...

    def progress(self) -> Position | None:
        """Where it was last in its program, also after its death; None if that is not known."""
        ...


class Launcher(Protocol):
    """Starts actors. One launcher serves one mesh at a time, and may serve another after `aclose`."""

    @property
    def listen_host(self) -> str | None:
        """The interface on which the controller must listen, or None if sockets are handed over instead."""
        ...

    @property
    def transports(self) -> tuple[str, ...]:
        """The data planes that its actors can use; the first is the default."""
        ...

    def make_transport(self, kind: str, network: Network) -> Transport:
        """The controller's own end of the data plane, which listens on that network."""
        ...

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> ActorHandle:
        """Start one actor; returns when it exists, before it has connected.

        Args:
            adopt: takes a connected socket, for launchers that need no listening controller.

        Raises:
            OSError, LaunchError, HandshakeError: it could not be started; the message says where and why.
        """
        ...

    async def aclose(self) -> None:
        """Kill what is left and give back threads and descriptors. A second call does nothing."""
        ...
