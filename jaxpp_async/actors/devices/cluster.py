"""cluster: joins the processes of one actor by `jax.distributed`. A `Cluster` in; a JAX that knows all its devices out.

The first process opens the service where they find each other, on a port that it has held since it was asked for one.
JAX ends a process whose fellows it takes for dead; here that is the controller's to decide, so JAX waits for days.
Must run before JAX's first use. Reserving blocks nothing; joining does, for as long as the others take to come.
"""

from __future__ import annotations

import socket

import jax

from jaxpp_async import jax_config
from jaxpp_async.actors.messages import Cluster
from jaxpp_async.errors import MeshError

JOIN_S = 60
"""How long the others may take to come."""

_NEVER_S = 10**6
"""When JAX itself takes a silent process for dead."""


def reserve_port() -> socket.socket:
    """A socket that keeps a free TCP port from everyone but this user's processes that name it. It does not listen."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the service has it, which then shares the port
        held.bind(("0.0.0.0", 0))
    except OSError:
        held.close()
        raise
    return held


def join(cluster: Cluster, platform: str) -> None:
    """Join this process with the others of its actor.

    Raises:
        MeshError: they did not find each other.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax_config.let_gloo_listen_on(cluster.addresses[cluster.rank])
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.size,
            cluster.rank,
            cluster_detection_method="deactivate",
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=_NEVER_S,
            coordinator_bind_address=cluster.coordinator,
        )
    except RuntimeError as error:
        raise MeshError(
            f"process {cluster.rank} of {cluster.size} of this actor did not find the others at {cluster.coordinator} "
            f"within {JOIN_S} s: {error}; can the hosts of one actor reach each other there, on any port?"
        ) from error


def agree(name: str, mine: int, cluster: Cluster, timeout_s: float) -> int:
    """The greatest of the numbers that the actor's processes give.

    Args:
        name: of what they agree on; each is used once.
        mine: this process's number.
        timeout_s: how long the others may take.

    Raises:
        MeshError: one of them said nothing.
    """
    client = jax_config.distributed_client()
    found = [mine]
    try:
        client.key_value_set(f"jaxpp-async/{name}/{cluster.rank}", str(mine))
        for rank in range(cluster.size):
            if rank != cluster.rank:
                key = f"jaxpp-async/{name}/{rank}"
                found.append(int(client.blocking_key_value_get(key, int(timeout_s * 1000))))
    except RuntimeError as error:
        raise MeshError(f"a process of this actor did not say how far it is: {error}") from error
    return max(found)
