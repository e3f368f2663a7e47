"""Describe, as plain data, the asked run, hosts and their links, and what the doctor says of them.

`find_process_slots` deduces from an examination how many processes each host gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from jaxpp_async.base.gpu_inventory import VISIBLE, Visible, read_visible
from jaxpp_async.base.install_hints import pip_install
from jaxpp_async.launch.hosts import Host, place, spread
from jaxpp_async.launch.login_errors import Explanation

Platform: TypeAlias = Literal["cpu", "cuda"]
Plane: TypeAlias = Literal["ucx", "nccl", "tcp"]

UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class Asked:
    """The run that the user wants to start.

    Args:
        platform: the platform of the actors.
        transport: the data plane; `"tcp"` is UCX over TCP alone.
        num_actors: None for as many as the hosts have slots for.
        devices_per_actor: the number of devices of `spmd_mesh`.
        processes_per_actor: None for as few as the hosts allow.
        slots_are_processes: whether a slot is a process (a task of Slurm); else it is a device.
    """

    platform: Platform = "cpu"
    transport: Plane = "ucx"
    num_actors: int | None = None
    devices_per_actor: int = 1
    processes_per_actor: int | None = None
    slots_are_processes: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Args:
        memory_bytes: its memory. used_bytes: what of it is in use.
        mode: who may compute on it: all (`"default"`), one process (`"exclusive"`), none (`"prohibited"`).
        mig: whether it is cut into instances.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int
    used_bytes: int
    mode: str = "default"
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver.

    Args:
        cuda: the newest CUDA version that it runs, such as (13, 0).
        has_peer_memory: whether RDMA devices may read GPU memory: by `nvidia_peermem`, or by dma-buf with the
            open kernel modules.
    """

    version: str
    cuda: tuple[int, int]
    has_peer_memory: bool = False


@dataclass(frozen=True, slots=True)
class UcxResource:
    """A transport of UCX on a device, such as `rc_mlx5` on `mlx5_0:1`."""

    transport: str
    device: str


@dataclass(frozen=True, slots=True)
class Ucx:
    """The UCX that a process on the host loads with the settings of an actor.

    Args:
        library: the path of the file that was loaded.
        resources: the transports that UCX found.
    """

    version: str
    library: str
    resources: tuple[UcxResource, ...]


@dataclass(frozen=True, slots=True)
class IbPort:
    """A port of an RDMA device.

    Args:
        state: `"ACTIVE"`, `"DOWN"`, ...
        rate_gbits: Gbit/s, as the port reports it.
        link_layer: `"InfiniBand"`, or `"Ethernet"` (RoCE).
    """

    device: str
    port: int
    state: str
    rate_gbits: float
    link_layer: str

    def __str__(self) -> str:
        return f"{self.device}:{self.port}"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    Args:
        speed_mbits: Mbit/s; 0 where the kernel does not know.
    """

    name: str
    is_up: bool
    speed_mbits: int


@dataclass(frozen=True, slots=True)
class JaxStart:
    """The devices that JAX found when it was started on the asked platform.

    Args:
        cache_error: why actors on the host refuse their default compilation cache; empty if they accept it.
    """

    platform: str
    num_devices: int
    device_kind: str
    cache_error: str = ""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One host, as one of its processes sees it.

    Args:
        packages: the version of each installed package that matters, by the name of its distribution.
        shm_bytes: free bytes in /dev/shm.
        memlock_bytes: how much memory a process may lock, or `UNLIMITED`.
        gpu_error, ucx_error, jax_error: why the host has none, in words; empty if nothing was wrong.
        verbs_devices: how many of /dev/infiniband/uverbs* this process may open.
        settings: environment variables that steer JAX, UCX, NCCL and CUDA.
        source: from where pip gets this package on that host (`install_hints.source_here`).
    """

    hostname: str
    executable: str
    python: str
    system: str
    packages: dict[str, str]
    num_cpus: int
    memory_bytes: int
    shm_bytes: int
    memlock_bytes: int
    driver: Driver | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    ucx: Ucx | None = None
    ucx_error: str = ""
    ib_ports: tuple[IbPort, ...] = ()
    verbs_devices: int = 0
    interfaces: tuple[Interface, ...] = ()
    jax: JaxStart | None = None
    jax_error: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    source: str = "jaxpp-async"

    def install(self, extra: str) -> str:
        """Return the command that installs an extra of this package on the host."""
        return pip_install(extra, self.executable, self.source)

    @property
    def cuda(self) -> tuple[int, int] | None:
        """The newest CUDA version that the driver runs; None without a driver."""
        return self.driver.cuda if self.driver is not None else None

    @property
    def visible_gpus(self) -> Visible:
        """The GPUs that `CUDA_VISIBLE_DEVICES` leaves, as actors on the host read it."""
        return read_visible(self.settings.get(VISIBLE), [gpu.uuid for gpu in self.gpus])


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """How many seconds a host's wall clock is ahead of this machine's.

    Args:
        error_s: by how many seconds `ahead_s` may be wrong.
    """

    ahead_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class HostReport:
    """All that could be found out about one host.

    Args:
        name: as the user wrote it.
        slots: how many slots the hostfile gives it.
        trouble: why the host could not be asked; None if it could.
        calls_back: why the host could not connect to this machine; empty if it could, None if nobody tried.
        names_gpus: whether the run says by `devices=` or `env=` which GPUs its actors get; the facts then
            have these in `CUDA_VISIBLE_DEVICES`.
    """

    name: str
    slots: int = 1
    facts: HostFacts | None = None
    trouble: Explanation | None = None
    clock: ClockDifference | None = None
    calls_back: str | None = None
    names_gpus: bool = False


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The link between two hosts, measured over the data plane in host memory.

    Args:
        transport: the data plane that was measured, `"ucx"` or `"tcp"`.
        latency_s: half a round trip of 8 bytes.
        bytes_per_s: the rate of large messages in one direction.
        error: why there are no figures; empty if there are.
    """

    first: str
    second: str
    transport: str
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """All facts about a run and its hosts.

    Args:
        here: this machine, which drives the run.
        hosts: the hosts on which actors would run; for a local run `here` alone.
        control_error: why no single address of this machine is reachable by all hosts; empty if one is.
    """

    asked: Asked
    here: HostReport
    hosts: tuple[HostReport, ...]
    links: tuple[LinkReport, ...] = ()
    control_error: str = ""

    @property
    def is_local(self) -> bool:
        """Whether no other host takes part."""
        return self.hosts == (self.here,)


# ---------------------------------------------------------------- processes on each host


@dataclass(frozen=True, slots=True)
class ProcessSlots:
    """How many processes each host gets.

    Args:
        num_processes: the number of processes on each host.
        per_actor: the number of processes of an actor.
        devices_each: the number of devices of a process.
        slots_each: how many slots of a host a process takes.
    """

    num_processes: tuple[int, ...]
    per_actor: int
    devices_each: int
    slots_each: int = 1


def find_process_slots(found: Examination) -> ProcessSlots:
    """Place the asked number of actors on the hosts, or as many as fit, in the order of the launcher.

    Raises:
        MeshError: the actors do not fit.
    """
    asked, each = found.asked, found.asked.processes_per_actor or 1
    if found.is_local:  # a slot is an actor on this machine: the user has named no hosts
        return ProcessSlots((found.here.slots * each,), each, asked.devices_per_actor // each)
    # Placing does not look at names.
    hosts = [Host(f"host{index}", report.slots) for index, report in enumerate(found.hosts)]
    num_actors = asked.num_actors or max(1, _count_actors_that_fit(hosts, asked))
    slots_each = 1
    if not asked.slots_are_processes:
        how = spread(hosts, num_actors, asked.devices_per_actor, asked.processes_per_actor)
        each, slots_each = how.per_actor, how.slots_each
    placements = place(hosts, num_actors * each, slots_each, per_actor=each)
    counts = tuple(sum(placement.host is host for placement in placements) for host in hosts)
    return ProcessSlots(counts, each, asked.devices_per_actor // each, slots_each)


def _count_actors_that_fit(hosts: Sequence[Host], asked: Asked) -> int:
    """Count the actors that fit on the hosts, each of as few processes as possible."""
    devices, given = asked.devices_per_actor, asked.processes_per_actor
    if asked.slots_are_processes or devices == 1 or all(host.slots == 1 for host in hosts):
        return sum(host.slots for host in hosts) // (given or 1)
    for each in [given] if given else [k for k in range(1, devices + 1) if devices % k == 0]:
        most = sum(host.slots // (devices // each) for host in hosts) // each
        if most:
            return most
    return 0


# ---------------------------------------------------------------- findings

Level: TypeAlias = Literal["ok", "note", "warning", "error"]

ALL: Final = "all hosts"

SECTIONS: Final = {
    "hosts": "Hosts",
    "python": "Python",
    "packages": "Packages",
    "versions": "Versions",
    "jax": "JAX",
    "gpu": "GPUs",
    "nccl": "NCCL",
    "ucx": "UCX",
    "infiniband": "InfiniBand",
    "memory": "Memory and settings",
    "clock": "Clocks",
    "control": "Control connection",
    "transfer": "Transfers",
}
"""Key and title, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of what the doctor says.

    Args:
        section: a key of `SECTIONS`.
        host: the name of the host that it is about, or `ALL`, or the two ends of a link.
        what: the fact.
        remedy: what to do; empty where there is nothing to do.
    """

    level: Level
    section: str
    host: str
    what: str
    remedy: str = ""


def ok(section: str, host: str, what: str) -> Finding:
    """Make a finding about something that is as it should be."""
    return Finding("ok", section, host, what)


def note(section: str, host: str, what: str, remedy: str) -> Finding:
    """Make a finding that is worth knowing and changes nothing."""
    return Finding("note", section, host, what, remedy)


def warning(section: str, host: str, what: str, remedy: str) -> Finding:
    """Make a finding with which a run works, but not as well as it could."""
    return Finding("warning", section, host, what, remedy)


def error(section: str, host: str, what: str, remedy: str) -> Finding:
    """Make a finding with which the asked run does not work."""
    return Finding("error", section, host, what, remedy)
