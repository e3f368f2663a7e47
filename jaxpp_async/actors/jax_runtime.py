"""Configure and start JAX as the controller's `Configure` message says, and arrange the actor's devices as a
mesh.

The mesh contains the devices of the whole actor; in an actor of several processes, each process has some of
them. In an actor process this module configures JAX. An inline actor runs in the user's process and uses the
user's JAX, so nothing is configured there, and all inline actors share the devices of that JAX.

`join` connects the processes of one actor by `jax.distributed`, before JAX is first used. The first process
runs the service through which the processes find each other, on a port that `reserve_port` has reserved. By
default JAX would end a process if it considers another process of the actor dead. In this project only the
controller decides which processes are dead, so JAX is told to wait for days. `reserve_port` returns
immediately; `join` blocks until the other processes have connected.
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_async.base.install_hints import SAME_VERSIONS, cuda_error, cuda_install
from jaxpp_async.errors import InstallError, LaunchError, MeshError
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.jax_bridge.compilation_cache import SHARED_CACHE, make_cache
from jaxpp_async.markers.logical_axes import AXIS_TYPES
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.messages import Cluster, Configure, Hardware
from jaxpp_async.transport.network import listening_sockets, refuse_strangers
from jaxpp_async.transport.ucx.net_devices import interface_with

ONE_DEVICE_AXIS = "device"
"""The name of the only axis of an actor's mesh if the user gave no `spmd_mesh`."""


INLINE_DEVICES = threading.Lock()
"""A lock that an inline actor with several devices holds while an executable runs. All inline actors share
one set of devices, and XLA's CPU collectives of two executables that run at the same time can block each
other's threads for ever."""


class Devices:
    """The devices of one actor as a JAX mesh, and which of them belong to this process.

    Args:
        mesh: the actor's mesh, even if the actor has a single device. The devices of one process must be
            consecutive in the mesh.

    Attributes:
        size: the number of devices of the whole actor.
        devices: the devices of this process, in the order of the mesh.
        first: the index in the mesh of the first device of this process.
    """

    def __init__(self, mesh: Mesh):
        self.mesh, self.size = mesh, mesh.devices.size
        everyone, own = list(mesh.devices.flat), mesh.devices.flat[0].client.process_index()
        self.devices: tuple[Any, ...] = tuple(device for device in everyone if device.process_index == own)
        self.first = everyone.index(self.devices[0])
        self.sharding_of = lru_cache(maxsize=None)(self._sharding_of)

    @property
    def is_cpu(self) -> bool:
        """True if the devices are CPUs, so that arrays are in host memory."""
        return self.devices[0].platform == "cpu"

    def _sharding_of(self, aval: Aval) -> NamedSharding:
        """Return the sharding on this mesh that the spec of an aval describes."""
        return NamedSharding(self.mesh, PartitionSpec(*aval.spec, unreduced=frozenset(aval.unreduced)))


def start_devices(configure: Configure, *, inline: bool) -> Devices:
    """Configure and start JAX, and return the actor's devices, arranged as a mesh.

    Args:
        configure: the controller's options.
        inline: whether the actor shares the controller's process, whose JAX is then not configured (except by
            `share_cache`).

    Raises:
        MeshError: the process has fewer devices than `spmd_mesh` needs.
        InstallError: the module of the user's setup hook is not installed, or JAX has no GPU support.
        LaunchError: the setup hook raised an exception.
        ValueError: an axis type does not exist.
    """
    jax_config.write_cache_whole()  # inline as well: actors that share a process compile at the same time
    if not inline:
        if configure.platform == "cuda" and (missing := cuda_error("platform='cuda'")) is not None:
            raise missing
        _configure_jax(configure)
        _confine_nccl(configure)
    if configure.setup:
        _run_setup(configure.setup, configure.setup_folder)
    if configure.cluster is None:
        return Devices(_make_mesh(configure))
    before = listening_sockets()
    join(configure.cluster, configure.platform)
    devices = Devices(_make_mesh(configure))
    # these are the sockets of the coordinator and of gloo
    refuse_strangers(listening_sockets() - before, configure.cluster.addresses)
    return devices


def _devices_each(configure: Configure) -> int:
    """Return how many of the actor's devices belong to each of its processes."""
    processes = configure.cluster.size if configure.cluster is not None else 1
    return math.prod(size for _, size in configure.spmd_mesh) // processes


def package_versions() -> dict[str, str]:
    """Return this process's version of each package that must be the same on controller and actors."""
    return {name: metadata.version(name) for name in SAME_VERSIONS}


def plain_hardware(devices: Devices) -> Hardware:
    """Return a description of devices whose arrays pass through host memory."""
    return Hardware(kind=devices.devices[0].device_kind, count=len(devices.devices))


def _configure_jax(configure: Configure) -> None:
    settings = {
        # Executables already run on a thread of the actor. Handing them to one of XLA's threads as well
        # would cost as much as a small task.
        "jax_cpu_enable_async_dispatch": False,
        **configure.jax_config,
    }
    if configure.platform == "cpu":
        settings["jax_num_cpu_devices"] = _devices_each(configure)
        settings["jax_platforms"] = "cpu"
    elif configure.platform:
        settings["jax_platforms"] = f"{configure.platform},cpu"
    if configure.cache_dir:
        settings |= jax_config.cache_settings(make_cache(configure.cache_dir))
    for name, value in settings.items():
        jax.config.update(name, value)


def _confine_nccl(configure: Configure) -> None:
    """Make NCCL use only the network interface through which peers reach this host, unless the user chose
    one."""
    if configure.platform == "cuda" and configure.address is not None:
        interface = interface_with(configure.address)
        if interface is not None:
            # "=" makes NCCL use exactly this name, and not every name that begins with it
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def share_cache(configure: Configure) -> AbstractContextManager[None]:
    """Return a context manager that makes JAX in the controller's process use the mesh's compilation cache.
    Inline actors share this JAX.

    If the user has configured a compilation cache, the context manager changes nothing.

    Raises:
        MeshError: the folder of the cache cannot be created.
    """
    if not configure.cache_dir or SHARED_CACHE.is_users_own:
        return nullcontext()
    return SHARED_CACHE.use(make_cache(configure.cache_dir))


def _run_setup(setup: str, folder: bytes | None) -> None:
    if folder is not None and os.fsdecode(folder) not in sys.path:
        sys.path.append(os.fsdecode(folder))  # at the end, so that no file in it hides an installed module
    module_name, _, function_name = setup.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InstallError(
            f"setup={setup!r}: the actor cannot import {error.name!r}; install it there or add its folder "
            "to PYTHONPATH"
        ) from None
    except Exception as error:  # the user's module may raise anything
        raise LaunchError(f"setup={setup!r}: importing it raised {type(error).__name__}: {error}") from error
    if not callable(function := getattr(module, function_name, None)):
        raise InstallError(f"setup={setup!r}: {module_name} has no function {function_name!r}")
    try:
        function()
    except Exception as error:  # the user's function may raise anything
        raise LaunchError(f"setup={setup!r} raised {type(error).__name__}: {error}") from error


def _make_mesh(configure: Configure) -> Mesh:
    axes = configure.spmd_mesh or ((ONE_DEVICE_AXIS, 1),)
    kinds = configure.axis_types or ("auto",) * len(axes)
    unknown = [kind for kind in kinds if kind not in AXIS_TYPES]
    if unknown or len(kinds) != len(axes):
        raise ValueError(f"axis_types {kinds} for the axes {axes}: give 'auto' or 'explicit' for each axis")
    shape = tuple(size for _, size in axes)
    needed = _devices_each(configure)
    try:
        devices = jax.local_devices(backend=configure.platform or None)
    except RuntimeError as error:
        if configure.platform != "cuda":
            raise
        raise MeshError(
            f"JAX finds no GPU here ({error}); is the driver loaded, and JAX's CUDA plugin installed? If "
            f"not: {cuda_install()}. `jaxpp-async doctor --platform cuda` there says what is "
            "missing; without GPUs, use platform='cpu'"
        ) from error
    if len(devices) < needed:
        raise MeshError(
            f"spmd_mesh {dict(axes)} needs {needed} devices in each process, this one has {len(devices)} of "
            f"platform {devices[0].platform!r}; on CPU, call "
            f"jax.config.update('jax_num_cpu_devices', {needed}) before JAX's first use"
        )
    if configure.cluster is not None:  # in order of rank, which is the order in which hosts are filled
        devices = [
            device
            for rank in range(configure.cluster.size)
            for device in jax.local_devices(process_index=rank, backend=configure.platform or None)[:needed]
        ]
    return Mesh(
        np.array(devices[: math.prod(shape)]).reshape(shape),
        tuple(name for name, _ in axes),
        axis_types=tuple(AXIS_TYPES[kind] for kind in kinds),
    )


# ---------------------------------------------------------------- the processes of one actor

JOIN_S = 60
"""The longest time in seconds that a process waits for the other processes of its actor to join."""

_NEVER_S = 10**6
"""The time in seconds after which JAX itself assumes that a silent process is dead. The value is so long that
this never happens, since the mesh detects dead processes itself."""


def reserve_port() -> socket.socket:
    """Reserve a free TCP port for a later service.

    Returns:
        A socket that is bound to the port but does not listen. While the socket is open, other programs
        cannot use the port, except programs of this user that bind to the same port explicitly.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # the coordinator's socket also has this option and can therefore share the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("0.0.0.0", 0))
    except OSError:
        held.close()
        raise
    return held


def join(cluster: Cluster, platform: str) -> None:
    """Connect this process with the other processes of its actor by `jax.distributed`.

    Args:
        cluster: the processes, and the address at which they find each other.
        platform: `"cpu"`, `"cuda"`, or empty for JAX's default.

    Raises:
        MeshError: the processes did not find each other in time.
    """
    jax.config.update("jax_enable_preemption_service", False)  # the service would handle SIGTERM itself
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
            f"process {cluster.rank} of {cluster.size} of this actor did not find the others at "
            f"{cluster.coordinator} within {JOIN_S} s: {error}; can the hosts of one actor reach each other "
            "there, on any port?"
        ) from error


def agree(name: str, mine: int, cluster: Cluster, timeout_s: float) -> int:
    """Exchange one number with each of the other processes of the actor, and return the greatest of all the
    numbers.

    Args:
        name: the name of this exchange, which is the same in all processes and is used once.
        mine: the number that this process sends to the others.
        cluster: the processes.
        timeout_s: how long to wait for the others, in seconds.

    Raises:
        MeshError: another process sent no number in time.
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
