"""Hold the options of this package as plain data: how actors are set up, started, watched and replaced.

`ControllerOptions` is the one value that the constructors of this package hand on, and it has every default.
`session.mesh_options` checks what a user gives before it comes here.
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
"""How many steps lie between two copies of the state, with `max_restarts`."""


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """The configuration that every actor of a mesh gets; `messages.Configure` describes most fields.

    Args:
        env, defaults: environment variables, as of `LaunchSpec`.
        processes_per_actor: how many processes each actor has.
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
        """How many devices an actor has."""
        return math.prod(size for _, size in self.spmd_mesh)

    def message(
        self, request: int, transport: str, epoch: int, cluster: Cluster | None, address: str | None
    ) -> Configure:
        """Make the request that carries this configuration to one process."""
        return Configure(
            request=request,
            spmd_mesh=self.spmd_mesh,
            axis_types=self.axis_types,
            platform=self.platform,
            jax_config=dict(self.jax_config),
            cache_dir=self.cache_dir,
            setup=self.setup,
            setup_folder=self.setup_folder,
            transport=transport,
            epoch=epoch,
            cluster=cluster,
            address=address,
        )


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """The options of one mesh's controller.

    Args:
        actors: how each actor is set up.
        suspect_s, dead_s: after how many seconds of silence an actor is suspect, and dead.
        progress_s: how many seconds a step or a transfer may stand still.
        max_restarts: how often actors may be replaced within ten minutes.
        backup_every: how many steps lie between two copies of the state, with `max_restarts`.
        launch_timeout_s: how many seconds the whole launch may take, and the replacement of one actor.
        max_frame_bytes: the length of the longest control frame.
        make_transport: makes the controller's own end of the data plane; None: the launcher does.
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
        """Whether lost actors are replaced, so that whatever a successor needs has to be kept."""
        return self.max_restarts > 0
