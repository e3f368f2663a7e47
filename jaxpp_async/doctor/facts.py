"""Define the plain data of the doctor, the command that checks whether a run would work: the run that the
user asked for, the facts about hosts and their links, and the findings (statements with a verdict and a
remedy).

The function `find_process_slots` computes, from this data, how many processes each host gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

import msgspec

from jaxpp_async.base.gpu_inventory import VISIBLE, Visible, read_visible
from jaxpp_async.base.install_hints import pip_install
from jaxpp_async.launch.hosts import Host, place, spread
from jaxpp_async.launch.login_errors import Explanation

Platform: TypeAlias = Literal["cpu", "cuda"]
Plane: TypeAlias = Literal["ucx", "nccl", "tcp"]

UNLIMITED = -1


class RequestedRun(msgspec.Struct, frozen=True):
    """The run that the user wants to start, and that the doctor checks.

    Args:
        platform: the JAX platform of the actors.
        transport: the name of the transport that carries arrays between processes; `"tcp"` means UCX over TCP
            alone.
        num_actors: the number of actors; None for as many as the hosts have slots for.
        devices_per_actor: the number of devices of one actor, the product of the sizes in `spmd_mesh`.
        processes_per_actor: the number of processes of one actor; None for as few as the hosts allow.
        slots_are_processes: whether one slot of a host holds one process, as a task of Slurm does; otherwise
            one slot is one device.
    """

    platform: Platform = "cpu"
    transport: Plane = "ucx"
    num_actors: int | None = None
    devices_per_actor: int = 1
    processes_per_actor: int | None = None
    slots_are_processes: bool = False


class Gpu(msgspec.Struct, frozen=True):
    """The facts about one GPU of a host.

    Args:
        index: the number of the GPU in the output of NVIDIA's tools, such as `nvidia-smi`.
        name: the model of the GPU.
        uuid: the unique id of the GPU.
        memory_bytes: the size of its memory.
        used_bytes: the amount of its memory that is in use.
        mode: the processes that may compute on the GPU: all (`"default"`), one at a time (`"exclusive"`) or
            none (`"prohibited"`).
        mig: whether the GPU is divided into several instances (MIG).
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int
    used_bytes: int
    mode: str = "default"
    mig: bool = False


class Driver(msgspec.Struct, frozen=True):
    """The facts about the NVIDIA driver of a host.

    Args:
        version: the version of the driver.
        cuda: the newest CUDA version that the driver supports, such as (13, 0).
        has_peer_memory: whether RDMA devices may read GPU memory, either through the module `nvidia_peermem`
            or through dma-buf with the open kernel modules.
    """

    version: str
    cuda: tuple[int, int]
    has_peer_memory: bool = False


class UcxResource(msgspec.Struct, frozen=True):
    """A transport of UCX on a device, such as `rc_mlx5` on `mlx5_0:1`."""

    transport: str
    device: str


class Ucx(msgspec.Struct, frozen=True):
    """The facts about the UCX library that a process on the host loads with the settings of an actor.

    Args:
        version: the version of UCX.
        library: the path of the library file that was loaded.
        resources: the transports that UCX found, each with its device.
    """

    version: str
    library: str
    resources: tuple[UcxResource, ...]


class IbPort(msgspec.Struct, frozen=True):
    """The facts about one port of an RDMA device.

    Args:
        device: the name of the device, such as `"mlx5_0"`.
        port: the number of the port on the device.
        state: the state of the port, such as `"ACTIVE"` or `"DOWN"`.
        rate_gbits: the rate in Gbit/s, as the port reports it.
        link_layer: `"InfiniBand"`, or `"Ethernet"` (RoCE).
    """

    device: str
    port: int
    state: str
    rate_gbits: float
    link_layer: str

    def __str__(self) -> str:
        return f"{self.device}:{self.port}"


class JaxStart(msgspec.Struct, frozen=True):
    """The result of a successful test start of JAX on the platform that the user asked for.

    Args:
        platform: the platform of the devices, as JAX names it.
        num_devices: the number of devices that JAX found.
        device_kind: the model of the devices.
        cache_error: the reason why actors on the host could not use the default folder of the compilation
            cache; empty if they could.
    """

    platform: str
    num_devices: int
    device_kind: str
    cache_error: str = ""


class HostFacts(msgspec.Struct, frozen=True):
    """The facts about one host, as one of its processes sees them.

    Args:
        executable: the path of the Python interpreter.
        python: the version of Python.
        packages: a dictionary. Its keys are the names of the installed distributions that matter to a run;
            its values are their versions.
        num_cpus: the number of CPUs that a process may use.
        memory_bytes: the size of the host's memory.
        shm_bytes: the number of free bytes in /dev/shm.
        memlock_bytes: the number of bytes that a process may lock in memory, or `UNLIMITED`.
        gpu_error: the reason why no NVIDIA driver was found; empty if one was found.
        ucx_error: the reason why UCX did not start; empty if it started.
        jax_error: the reason why JAX did not start; empty if it started.
        verbs_devices: the number of devices /dev/infiniband/uverbs* that this process may open.
        settings: the environment variables that configure JAX, UCX, NCCL and CUDA.
        source: the pip requirement that installs the same copy of this package (`install_hints.pip_source`).
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
    jax: JaxStart | None = None
    jax_error: str = ""
    settings: dict[str, str] = {}
    source: str = "jaxpp-async"

    def install(self, extra: str) -> str:
        """Return the command that installs an extra of this package, such as `"cuda13"`, on the host."""
        return pip_install(extra, self.executable, self.source)

    @property
    def cuda(self) -> tuple[int, int] | None:
        """The newest CUDA version that the host's driver supports, such as (13, 0); None without a driver."""
        return self.driver.cuda if self.driver is not None else None

    @property
    def visible_gpus(self) -> Visible:
        """The GPUs that actors on the host may use. `CUDA_VISIBLE_DEVICES` names them; if the variable is not
        set, actors may use all GPUs of the host.
        """
        return read_visible(self.settings.get(VISIBLE), [gpu.uuid for gpu in self.gpus])


class ClockDifference(msgspec.Struct, frozen=True):
    """The measured difference between a host's wall clock and that of this machine.

    Args:
        ahead_s: the difference in seconds; negative if the host's clock is behind.
        error_s: the number of seconds by which `ahead_s` may be wrong.
    """

    ahead_s: float
    error_s: float


class HostReport(msgspec.Struct, frozen=True):
    """A report of all that could be found out about one host.

    Args:
        name: the name of the host as the user wrote it.
        slots: the number of slots that the hostfile gives the host.
        facts: the facts about the host; None if the host could not be asked.
        trouble: the reason why the host could not be asked; None if the host could be asked.
        clock: the difference between the host's clock and this machine's clock; None if the host could not be
            asked.
        calls_back: the reason why the host could not connect to this machine; empty if the host could
            connect, None if that was not tried.
        names_gpus: whether the user chose by `devices=` or `env=` which GPUs the actors get; if so,
            `CUDA_VISIBLE_DEVICES` in `facts.settings` names these GPUs.
    """

    name: str
    slots: int = 1
    facts: HostFacts | None = None
    trouble: Explanation | None = None
    clock: ClockDifference | None = None
    calls_back: str | None = None
    names_gpus: bool = False


class LinkReport(msgspec.Struct, frozen=True):
    """A report on the network link between two hosts. The link was measured with the transport that carries
    arrays, from host memory to host memory.

    Args:
        first: the name of one host.
        second: the name of the other host. If the link connects two processes of one host, `first` and
            `second` are equal.
        transport: the name of the transport, `"ucx"` or `"tcp"`.
        latency_s: half the duration of a round trip of 8 bytes, in seconds.
        bytes_per_s: the rate of large messages in one direction.
        error: the reason why nothing could be measured; empty if the measurement succeeded.
    """

    first: str
    second: str
    transport: str
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


class Examination(msgspec.Struct, frozen=True):
    """The facts about a run and its hosts, from which the doctor makes its findings (statements with a
    verdict and a remedy).

    Args:
        asked: the run that the user wants to start.
        here: the report of this machine, on which the user's script would run.
        hosts: the reports of the hosts on which actors would run. If the run uses this machine alone, `here`
            is the only entry.
        links: the reports of the links that were measured.
        control_error: the reason why this machine could not listen for connections from all hosts; empty if
            it could.
    """

    asked: RequestedRun
    here: HostReport
    hosts: tuple[HostReport, ...]
    links: tuple[LinkReport, ...] = ()
    control_error: str = ""

    @property
    def is_local(self) -> bool:
        """Whether the run uses this machine alone."""
        return self.hosts == (self.here,)


# ---------------------------------------------------------------- processes on each host


class ProcessSlots(msgspec.Struct, frozen=True):
    """The number of processes that a run would start on each host, and the size of each process.

    Args:
        num_processes: the number of processes on each host, with one entry per host.
        per_actor: the number of processes of each actor.
        devices_each: the number of devices of each process.
        slots_each: the number of slots of a host that each process takes.
    """

    num_processes: tuple[int, ...]
    per_actor: int
    devices_each: int
    slots_each: int = 1


def find_process_slots(found: Examination) -> ProcessSlots:
    """Place the actors of the examined run on its hosts as a launcher would, and return how many processes
    each host gets.

    If the user gave no number of actors, as many as fit are placed.

    Raises:
        MeshError: the actors do not fit on the hosts.
    """
    asked, each = found.asked, found.asked.processes_per_actor or 1
    if found.is_local:  # a slot is an actor on this machine: the user has named no hosts
        return ProcessSlots((found.here.slots * each,), each, asked.devices_per_actor // each)
    # The names do not matter to the placement.
    hosts = [Host(f"host{index}", report.slots) for index, report in enumerate(found.hosts)]
    slots_each = 1
    if not asked.slots_are_processes:
        how = spread(hosts, asked.num_actors or 1, asked.devices_per_actor, asked.processes_per_actor)
        each, slots_each = how.per_actor, how.slots_each
    num_actors = asked.num_actors or max(1, sum(host.slots // slots_each for host in hosts) // each)
    placements = place(hosts, num_actors * each, slots_each, per_actor=each)
    counts = tuple(sum(placement.host is host for placement in placements) for host in hosts)
    return ProcessSlots(counts, each, asked.devices_per_actor // each, slots_each)


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
"""The titles of the sections of the doctor's findings, by key, in the order in which they are shown."""


class Finding(msgspec.Struct, frozen=True):
    """A statement of the doctor (the command that checks whether a run would work) about a host, a link, or
    all hosts.

    Args:
        level: how serious the finding is. If the level is `"error"`, the run would not work.
        section: the part of the doctor's output to which the finding belongs, a key of `SECTIONS`.
        host: the name of the host that the finding is about; `ALL` for all hosts; for a link, the names of
            the two hosts that it connects.
        what: the fact that was found.
        remedy: the advice on what to do; empty if nothing has to be done.
    """

    level: Level
    section: str
    host: str
    what: str
    remedy: str = ""


def ok(section: str, host: str, what: str) -> Finding:
    """Make a `Finding` of the level "ok". Such a finding says that something is as it should be."""
    return Finding("ok", section, host, what)


def note(section: str, host: str, what: str, remedy: str) -> Finding:
    """Make a `Finding` of the level "note". Such a finding is useful to know, but does not affect the run."""
    return Finding("note", section, host, what, remedy)


def warning(section: str, host: str, what: str, remedy: str) -> Finding:
    """Make a `Finding` of the level "warning". The run works with what was found, but not as well as it
    could.
    """
    return Finding("warning", section, host, what, remedy)


def error(section: str, host: str, what: str, remedy: str) -> Finding:
    """Make a `Finding` of the level "error". The run that the user asked for does not work with what was
    found.
    """
    return Finding("error", section, host, what, remedy)


def describe_differences(by_host: Mapping[str, object]) -> str:
    """Return a text that says which hosts have which value, such as "1.20 on a, b; 1.21 on c". The text is
    empty if all hosts have the same value.

    Args:
        by_host: a dictionary. Its keys are the names of the hosts; its values are their values, None for a
            host whose value is not known, which the text leaves out.
    """
    hosts_by_value: dict[object, list[str]] = {}
    for host, value in by_host.items():
        if value is not None:
            hosts_by_value.setdefault(value, []).append(host)
    if len(hosts_by_value) < 2:
        return ""
    return "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in hosts_by_value.items())
