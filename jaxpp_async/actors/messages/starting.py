"""starting: what is said while actors start, connect and end. Plain frozen data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpp_async.program import ProcessId


@dataclass(frozen=True, slots=True)
class Cluster:
    """Several processes that are one actor, for one of them.

    Args:
        coordinator: host and port where they find each other; the first process opens it.
        addresses: of each process's host, by which the others reach it.
        rank: which of them this is.
    """

    coordinator: str
    addresses: tuple[str, ...]
    rank: int

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.addresses)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ahead of `Configure`, to the first of an actor's processes: find a port for the others. Answer: `Reserved`."""

    request: int


@dataclass(frozen=True, slots=True)
class Configure:
    """First request: start JAX and the transport. Answer: `Ready`.

    Args:
        spmd_mesh: (axis name, size) pairs; () is one device.
        axis_types: `"auto"` or `"explicit"`, one an axis.
        jax_config: `jax.config` names and plain values to set before JAX makes a backend.
        cache_dir: JAX's persistent compilation cache: a folder, `compilation_cache.DEFAULT`, or None.
        setup: `"module:function"` called before JAX starts, or None.
        setup_folder: where to look for its module after all else, or None.
        transport: `"ucx"`, `"memory"` or `"nccl"`.
        epoch: first epoch of the tags.
        cluster: the other processes of this actor, which start with this one; None: there are none.
        address: of this process's host, by which the others reach it; loopback: all are on one machine; None: not
            known.
    """

    request: int
    spmd_mesh: tuple[tuple[str, int], ...]
    axis_types: tuple[str, ...]
    platform: str
    jax_config: dict[str, Any]
    cache_dir: str | None
    setup: str | None
    setup_folder: bytes | None
    transport: str
    epoch: int
    cluster: Cluster | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Admit:
    """Ahead of every `Connect`, where other machines can reach the data plane: let these peers connect to it, and
    nobody else. Answer: `Done`.

    Args:
        addresses: of the peers' transports.
    """

    request: int
    addresses: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect the transport to these peers (the process skips itself). Answer: `Connected`."""

    request: int
    epoch: int
    addresses: dict[ProcessId, bytes]


@dataclass(frozen=True, slots=True)
class OfferLinks:
    """Say how programs reach this process, and make ids for communicators. Only with transport `"nccl"`. Answer:
    `LinksOffered`.

    Args:
        num_ids: how many: one for each new link that this process is the `maker` of.
    """

    request: int
    num_ids: int


@dataclass(frozen=True, slots=True)
class JoinLink:
    """One direction between two processes, from a device to a device (`transport.nccl.plan.Link`).

    Args:
        unique_id: made by the lower of the two.
    """

    sender: ProcessId
    receiver: ProcessId
    from_device: int
    to_device: int
    unique_id: bytes


@dataclass(frozen=True, slots=True)
class JoinLinks:
    """Connect the programs' plane to peers that are new, then make these links, one after the other. Answer: `Done`,
    once a message has passed on each.

    Args:
        addresses: of every peer of `links`.
    """

    request: int
    addresses: dict[ProcessId, bytes]
    links: tuple[JoinLink, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Close the transport and end the process. Answer: `Done`, then end of file."""

    request: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """A TCP port that is this process's."""

    request: int
    port: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices of an actor.

    Args:
        kind: as JAX names them, such as `"cpu"` or `"NVIDIA H100 80GB HBM3"`.
        count: how many the actor has.
        memory_bytes: of one; 0: not known, or the host's.
        cuda: version of the CUDA that JAX's plugin is for, such as `"13.0"`, or `"13"`; empty without GPUs.
        driver: the newest CUDA that the host's driver knows, written alike.
        gpus: the UUIDs of GPUs, or of parts of one (MIG); empty without GPUs.
        memory_fraction: how much of each GPU's memory JAX takes beforehand; 0: none.
        nccl: version of the NCCL that programs transfer over, such as `"2.32.3"`; empty with other transports.
        nccl_shares: whether that takes two ranks on one GPU.
    """

    kind: str
    count: int
    memory_bytes: int = 0
    cuda: str = ""
    driver: str = ""
    gpus: tuple[str, ...] = ()
    memory_fraction: float = 0.0
    nccl: str = ""
    nccl_shares: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The actor's JAX and transport are up.

    Args:
        address: the transport's address.
        devices: one text a device, such as `"cpu:0"`.
        versions: package name to version, for the mismatch check.
        hardware: what the devices are.
    """

    request: int
    address: bytes
    devices: tuple[str, ...]
    versions: dict[str, str]
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Connected:
    """The transport is connected.

    Args:
        routes: by which of its ways the transport reaches each peer, as it names them (`"cuda_ipc"`, `"rc_mlx5"`,
            `"tcp"`); empty where it does not say, or where only host memory travels.
    """

    request: int
    routes: dict[ProcessId, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class LinksOffered:
    """The address of the programs' plane, and new ids."""

    request: int
    address: bytes
    ids: tuple[bytes, ...]
