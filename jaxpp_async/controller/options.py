"""Define the options of the controller as plain data: how actors are set up, started, watched and replaced.

All classes of `controller` get the same `ControllerOptions` object. Its class also defines the default of
every option. `session.mesh_options` checks the options that a user gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpp_async.controller.failure_detector import DEAD_S, SUSPECT_S
from jaxpp_async.controller.stall_detector import PROGRESS_S
from jaxpp_async.protocol.frames import DEFAULT_MAX_FRAME_BYTES
from jaxpp_async.protocol.messages import Cluster, Configure
from jaxpp_async.transport.base import Transport

LAUNCH_TIMEOUT_S = 120.0
BACKUP_EVERY = 10
"""The number of steps from one replica of the state to the next, with `max_restarts`."""


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """The configuration that every actor of a mesh gets.

    Fields that are not listed here are described at `messages.Configure`.

    Args:
        env, defaults: environment variables for the actors. Variables of `defaults` apply only where neither
            the host's environment nor `env` has them.
        processes_per_actor: the number of processes of each actor.
    """

    spmd_mesh: tuple[tuple[str, int], ...] = ()
    axis_types: tuple[str, ...] = ()
    platform: str = "cpu"
    jax_config: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: str | None = None
    setup: str | None = None
    setup_folder: bytes | None = None
    transport: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    processes_per_actor: int = 1

    @property
    def num_devices(self) -> int:
        """The number of devices of one actor: the size of its SPMD mesh."""
        return math.prod(size for _, size in self.spmd_mesh)

    def message(self, transport: str, epoch: int, cluster: Cluster | None, address: str | None) -> Configure:
        """Return the request that carries this configuration to one process.

        Args:
            transport: the name of the transport between actors.
            epoch: the epoch in which the process begins.
            cluster: how the process joins the other processes of its actor; None if it is the only one.
            address: the address at which other processes can connect to the process's host; None if not
                known.
        """
        own = {"transport": transport, "epoch": epoch, "cluster": cluster, "address": address}
        shared = {name: getattr(self, name) for name in Configure.__struct_fields__ if name not in own}
        return Configure(**shared, **own)


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """The options of one mesh's controller.

    Args:
        actors: the configuration of each actor.
        suspect_s, dead_s: the seconds without a heartbeat after which an actor is suspect (a warning is
            logged), and after which the actor counts as dead.
        progress_s: how many seconds a step or a transfer may make no progress before it counts as stuck.
        max_restarts: how many restarts, which replace lost actors, are allowed within ten minutes; 0: none.
        backup_every: the number of steps between two replicas (copies of the actors' arrays, kept for
            restarts); unused without `max_restarts`.
        launch_timeout_s: the time limit in seconds for each stage of the start of an actor.
        max_frame_bytes: the length of the longest control frame.
        make_transport: makes the controller's own end of the data plane from the transport's name; None: the
            launcher makes it.
    """

    actors: ActorConfig = field(default_factory=ActorConfig)
    suspect_s: float = SUSPECT_S
    dead_s: float = DEAD_S
    progress_s: float = PROGRESS_S
    max_restarts: int = 0
    backup_every: int = BACKUP_EVERY
    launch_timeout_s: float = LAUNCH_TIMEOUT_S
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
    make_transport: Callable[[str], Transport] | None = None

    @property
    def restarts(self) -> bool:
        """Whether lost actors are replaced. If so, the controller has to keep everything that a replacement
        needs.
        """
        return self.max_restarts > 0
