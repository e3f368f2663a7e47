"""facts: what a host is and has, and how the ways between hosts are, as plain data. Asks nothing of any machine.

finding: one thing that the doctor has to say. Plain data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from jaxpp_async.base.gpu_inventory import VISIBLE, Visible, read_visible
from jaxpp_async.base.install_hints import pip_install
from jaxpp_async.launch.login_errors import Explanation

Platform: TypeAlias = Literal["cpu", "cuda"]
Plane: TypeAlias = Literal["ucx", "nccl", "tcp"]

UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class Asked:
    """The run that is to work.

    Args:
        platform: of the actors. transport: `"tcp"` is UCX over TCP alone.
        num_actors: None: as many as there is room for. devices_per_actor: as many as `spmd_mesh` has.
        processes_per_actor: None: as few as the hosts allow.
        slots_are_processes: as under Slurm, where they are tasks; else they are devices.
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
        mode: who may use it: `"default"`, `"exclusive"` (one process), `"prohibited"`. mig: cut into instances.
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
        cuda: newest CUDA version that it runs, such as (13, 0).
        has_peer_memory: RDMA devices may read GPU memory: by `nvidia_peermem`, or by dma-buf (open kernel modules).
    """

    version: str
    cuda: tuple[int, int]
    has_peer_memory: bool = False


@dataclass(frozen=True, slots=True)
class UcxResource:
    """A transport on a device, such as `rc_mlx5` on `mlx5_0:1`."""

    transport: str
    device: str


@dataclass(frozen=True, slots=True)
class Ucx:
    """UCX as a process here loads it, with the settings of an actor.

    Args:
        library: the file that was loaded.
    """

    version: str
    library: str
    resources: tuple[UcxResource, ...]


@dataclass(frozen=True, slots=True)
class IbPort:
    """A port of an RDMA device.

    Args:
        state: `"ACTIVE"`, `"DOWN"`, ... rate_gbits: per second, by its own word.
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
    """A network interface. `speed_mbits`: per second; 0 where it is not known."""

    name: str
    is_up: bool
    speed_mbits: int


@dataclass(frozen=True, slots=True)
class JaxStart:
    """What JAX found when it was started on the asked platform.

    Args:
        cache_error: why actors there do not take the compilation cache that they have by default; empty if they do.
    """

    platform: str
    num_devices: int
    device_kind: str
    cache_error: str = ""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One host, as one of its processes sees it.

    Args:
        packages: those that matter and are installed, by the name of their distribution.
        shm_bytes: free in /dev/shm. memlock_bytes: what a process may lock, or `UNLIMITED`.
        gpu_error, ucx_error, jax_error: why there is none, in words; empty if nothing was wrong.
        verbs_devices: /dev/infiniband/uverbs* that this process may open.
        settings: environment variables that steer JAX, UCX, NCCL and CUDA.
        source: where pip gets this package from there (`extras.source_here`).
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
        """The command that installs an extra of this package there."""
        return pip_install(extra, self.executable, self.source)

    @property
    def cuda(self) -> tuple[int, int] | None:
        """The newest CUDA that the driver runs."""
        return self.driver.cuda if self.driver is not None else None

    @property
    def visible_gpus(self) -> Visible:
        """Those that `CUDA_VISIBLE_DEVICES` leaves, as actors there read it."""
        return read_visible(self.settings.get(VISIBLE), [gpu.uuid for gpu in self.gpus])


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """How far a host's wall clock is ahead of this machine's, and how far off that may be, in seconds."""

    ahead_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class HostReport:
    """What could be found out about one host.

    Args:
        name: as the user wrote it. slots: of the hostfile.
        trouble: why nothing could be asked.
        calls_back: what came of connecting from there to this machine: empty if it did, None if it was not tried.
        names_gpus: the run says which GPUs its actors get (`devices=`, `env=`): as its `CUDA_VISIBLE_DEVICES`.
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
    """The way between two hosts, measured over the data plane in host memory.

    Args:
        transport: what was measured, `"ucx"` or `"tcp"`.
        latency_s: half a round trip of 8 bytes. bytes_per_s: of large messages, one way.
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
    """Everything that was found out.

    Args:
        here: this machine, from which a run is driven. hosts: where actors would run; for a local run that is `here`.
        control_error: why there is no one address by which all hosts reach this machine; empty if there is.
    """

    asked: Asked
    here: HostReport
    hosts: tuple[HostReport, ...]
    links: tuple[LinkReport, ...] = ()
    control_error: str = ""

    @property
    def is_local(self) -> bool:
        """No other host takes part."""
        return self.hosts == (self.here,)


# ---------------------------------------------------------------- finding

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
    """One line.

    Args:
        section: of `SECTIONS`. host: its name, or whom it is about.
        remedy: what to do; empty where there is nothing to do.
    """

    level: Level
    section: str
    host: str
    what: str
    remedy: str = ""


def ok(section: str, host: str, what: str) -> Finding:
    """It is well."""
    return Finding("ok", section, host, what)


def note(section: str, host: str, what: str, remedy: str) -> Finding:
    """It is worth knowing."""
    return Finding("note", section, host, what, remedy)


def warning(section: str, host: str, what: str, remedy: str) -> Finding:
    """A run works, but not as well as it could."""
    return Finding("warning", section, host, what, remedy)


def error(section: str, host: str, what: str, remedy: str) -> Finding:
    """A run of the asked kind does not work."""
    return Finding("error", section, host, what, remedy)
