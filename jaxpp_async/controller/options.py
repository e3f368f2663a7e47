"""options: how a mesh's actors are set up, started, watched and replaced, as plain data.

Every default stands here. What a user gives is checked before (`mesh_options`).
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
    """What every actor of a mesh is configured with; see `messages.Configure`.

    Args:
        env, defaults: as of `LaunchSpec`.
        processes_per_actor: of how many processes each is.
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
        self,
        request: int,
        transport: str,
        epoch: int,
        cluster: Cluster | None = None,
        address: str | None = None,
    ) -> Configure:
        """The request that carries it."""
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
class Deadlines:
    """In seconds: how long actors may be silent until they are suspect and dead; how long a step may stand still."""

    suspect_s: float = SUSPECT_S
    dead_s: float = DEAD_S
    progress_s: float = PROGRESS_S


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """What a controller is told about its actors.

    Args:
        actors: how each is set up.
        patience: how long actors may be silent, and steps stand still.
        max_restarts: how often actors may be replaced within ten minutes.
        backup_every: how many steps lie between two copies of the state, with `max_restarts`.
        launch_timeout_s: how long all of the launch may take, and the replacement of one actor.
        max_frame_bytes: the longest control frame.
        make_transport: the controller's own end of the data plane; None: the launcher's.
    """

    actors: ActorConfig = field(default_factory=ActorConfig)
    deadlines: Deadlines = field(default_factory=Deadlines)
    max_restarts: int = 0
    backup_every: int = BACKUP_EVERY
    launch_timeout_s: float = LAUNCH_TIMEOUT_S
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
    make_transport: Callable[[str], Transport] | None = None

    @property
    def restarts(self) -> bool:
        """Whether lost actors are replaced: what they would need again is kept then."""
        return self.max_restarts > 0
