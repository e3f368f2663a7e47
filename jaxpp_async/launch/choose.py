"""choosing: options about hosts and launching in, a launcher out. Reads a hostfile, asks Slurm; starts nothing.

Options that contradict each other are errors, also those that would have no effect: never a silent local run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpp_async.base.gpu_inventory import read_visible
from jaxpp_async.errors import MeshError
from jaxpp_async.launch.hosts import (
    Host,
    Settings,
    load_hostfile,
    parse_cpus,
    parse_devices,
    parse_hosts,
    parse_ports,
    place,
    spread,
)
from jaxpp_async.launch.inline import InlineLauncher
from jaxpp_async.launch.local import LocalLauncher
from jaxpp_async.launch.remote import Reach, RemoteLauncher
from jaxpp_async.launch.spawn import check_cpus
from jaxpp_async.protocol.parent_watch import LEASE_S
from jaxpp_async.transport.ucx.net_devices import check_devices

LAUNCHERS = ("local", "inline", "ssh", "slurm", "ray")
_SETTINGS = ("python", "cpus", "devices", "interface", "ports")
_METHODS = ("listen_host", "transports", "make_transport", "start", "aclose")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of `RemoteMesh` that say where and how actors start; see there.

    Args:
        processes_per_actor: of how many processes each actor is; None: as few as the hosts allow.
        num_devices: of one actor. platform: what they are: `"cpu"` or `"cuda"`.
        lease_s: how long actors wait for a sign of life of this process.
        max_restarts: of the mesh: after a restart, ports rest for a minute before they can be taken again.
        env: variables that actors get; here for what they say of where programs are, checked and passed on elsewhere.
    """

    launcher: Any = None
    hosts: Any = None
    python: str | None = None
    cpus: str | Sequence[int] | None = None
    devices: str | Sequence[int | str] | None = None
    interface: str | None = None
    ports: str | tuple[int, int] | None = None
    control_address: str | None = None
    ssh_options: Sequence[str] = ()
    processes_per_actor: int | None = None
    num_devices: int = 1
    platform: str = "cpu"
    lease_s: float = LEASE_S
    max_restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def gpus_per_actor(self) -> int:
        """What a cluster that hands out devices has to set aside."""
        return self.num_devices if self.platform == "cuda" else 0

    @property
    def kind(self) -> str:
        """One of `LAUNCHERS`, or `"own"`.

        Raises:
            MeshError: something else.
        """
        if self.launcher is None:
            return "local" if self.hosts is None else "ssh"
        if isinstance(self.launcher, str) and self.launcher in LAUNCHERS:
            return self.launcher
        missing = [name for name in _METHODS if not hasattr(self.launcher, name)]
        if missing:
            known = ", ".join(map(repr, LAUNCHERS))
            raise MeshError(
                f"launcher {self.launcher!r} is none of {known}, nor a Launcher: it has no {', '.join(missing)}"
            )
        return "own"

    def make(self, num_actors: int) -> tuple[Any, int]:
        """The launcher, and of how many processes each actor is.

        Raises:
            MeshError: options that contradict each other; a wrong hostfile; more actors than slots.
        """
        kind, each = self.kind, self.processes_per_actor or 1
        self._refuse_idle(kind)
        self._refuse_split(kind, each)
        if kind == "own":
            return self.launcher, self._spread(self.launcher, num_actors)
        if kind == "inline":
            return InlineLauncher(), 1
        if kind == "local":
            settings = self._settings_here()
            self._check_ports(settings.ports, num_actors * each, "this machine")
            return LocalLauncher(settings=settings, lease_s=self.lease_s), each
        launcher = self._make_remote(kind, num_actors * each)
        each = self._spread(launcher, num_actors)
        for placement in (
            place(launcher.hosts, num_actors * each, launcher.slots_each) if launcher.hosts else ()
        ):
            ports = placement.host.settings.over(self.settings()).ports
            self._check_ports(ports, placement.count, f"host {placement.host}")
        return launcher, each

    def _spread(self, launcher: Any, num_actors: int) -> int:
        """Have a launcher with hosts place processes by their slots. Returns: of how many each actor is."""
        each = self.processes_per_actor or 1
        if not isinstance(launcher, RemoteLauncher) or not launcher.hosts:  # Ray asks for room later
            return each
        if not launcher.slots_are_processes:
            found = spread(launcher.hosts, num_actors, self.num_devices, self.processes_per_actor)
            launcher.slots_each = found.slots_each
            return found.per_actor
        needed = self.gpus_per_actor // each
        for placement in place(launcher.hosts, num_actors * each, per_actor=each):
            host, count = placement.host, placement.count
            devices = launcher.devices_on(host)
            named = None if devices is None else len(read_visible(",".join(devices), ()).names)
            if named is not None and count * needed > named:
                fits = named // needed
                remedy = f"ask for {fits} (--ntasks-per-node={fits})" if fits else "make spmd_mesh smaller"
                raise MeshError(
                    f"host {host} takes {count} process{'es' * (count != 1)} of {needed} "
                    f"device{'s' * (needed != 1)} each, one a task, and devices= names {named}; {remedy}"
                )
        return each

    def _check_ports(self, ports: tuple[int, int] | None, num_processes: int, where: str) -> None:
        """Refuse a range that has not a port for each process of a host, and with restarts another one."""
        least = num_processes * 2 if self.max_restarts else num_processes
        if ports is None or ports[1] - ports[0] + 1 >= least:
            return
        first, last = ports
        rest = ", and another one after a restart (max_restarts), since what is given back rests for a minute"
        again = rest if self.max_restarts else ""
        raise MeshError(
            f"ports= {first}-{last} has {last - first + 1} and {where} gets {num_processes} processes, each of which "
            f"needs one{again}; give at least {first}-{first + least - 1}"
        )

    def _refuse_split(self, kind: str, each: int) -> None:
        """Refuse actors of several processes where there is no way to have them."""
        if self.num_devices % each:
            raise MeshError(
                f"processes_per_actor={each} does not divide the {self.num_devices} device"
                f"{'s' * (self.num_devices != 1)} of an actor (spmd_mesh); "
                f"give spmd_mesh a product that is a multiple of {each}, for example {{'data': {each}}}"
            )
        if kind == "inline" and each > 1:
            raise MeshError(
                f"processes_per_actor={each} does not work with launcher='inline', whose actors run inside this "
                "process; use launcher='local'"
            )

    def way(self) -> tuple[tuple[Host, ...] | None, Reach | None]:
        """The hosts, and how they are reached: what a launcher would be made of. None, None: this machine alone.

        Raises:
            MeshError: as `make`; and for launchers that have no hosts before they start something.
        """
        kind = self.kind
        self._refuse_idle(kind)
        self._refuse_split(kind, self.processes_per_actor or 1)
        if kind == "local":
            self._settings_here()
            return None, None
        if kind == "slurm":
            from jaxpp_async.launch.slurm import slurm_reach

            return slurm_reach()
        if kind == "ssh":
            from jaxpp_async.launch.ssh import ssh_reach

            return _hosts(self.hosts), ssh_reach(self.ssh_options)
        raise MeshError(f"launcher {self.launcher!r} does not say beforehand which hosts it takes")

    def settings(self) -> Settings:
        """What holds for every host.

        Raises:
            MeshError: a value that cannot be.
        """
        return Settings(
            python=self.python,
            cpus=_read("cpus", self.cpus, parse_cpus),
            devices=_read("devices", self.devices, parse_devices, str),
            interface=self.interface,
            ports=_read("ports", self.ports, parse_ports),
        )

    def _settings_here(self) -> Settings:
        """Those of actors on this machine, where it can be seen at once whether there is what they name."""
        settings = self.settings()
        if settings.cpus is not None:
            check_cpus(settings.cpus)
        check_devices(settings.interface)
        if self.python is not None and shutil.which(self.python, path=self._actors_path()) is None:
            raise MeshError(
                f"python={self.python!r} is no program of this machine; give an interpreter's path"
            )
        return settings

    def _actors_path(self) -> str | None:
        """Where a name without a folder is looked up as an actor starts; None: as in this process."""
        path = self.env.get("PATH", os.environ.get("PATH"))
        return path if isinstance(path, str) else None

    def _make_remote(self, kind: str, num_processes: int) -> RemoteLauncher:
        options: dict[str, Any] = {
            "settings": self.settings(),
            "control_address": self.control_address,
            "lease_s": self.lease_s,
        }
        if kind == "slurm":
            from jaxpp_async.launch.slurm import slurm_launcher

            return slurm_launcher(**options)
        if kind == "ray":
            from jaxpp_async.launch.ray import RayLauncher

            gpus = (
                {"GPU": self.gpus_per_actor / (self.processes_per_actor or 1)} if self.gpus_per_actor else {}
            )
            return RayLauncher(num_processes, bundle={"CPU": 1.0, **gpus}, **options)
        from jaxpp_async.launch.ssh import ssh_launcher

        return ssh_launcher(_hosts(self.hosts), ssh_options=self.ssh_options, **options)

    def _refuse_idle(self, kind: str) -> None:
        """Refuse options that this launcher has no use for."""
        if kind == "ssh" and self.hosts is None:
            raise MeshError(
                "launcher='ssh' needs hosts=: a hostfile's path, or a list such as ['node1 slots=2']"
            )
        idle = {
            "hosts": self.hosts is not None and kind != "ssh",
            "ssh_options": bool(self.ssh_options) and kind != "ssh",
            "control_address": self.control_address is not None and kind in ("local", "inline", "own"),
            "lease_s": self.lease_s != LEASE_S and kind in ("inline", "own"),
        }
        idle |= {name: getattr(self, name) is not None and kind in ("inline", "own") for name in _SETTINGS}
        for name, is_idle in idle.items():
            if is_idle:
                raise MeshError(f"{name}= has no effect with {_WHY[kind]}; leave it out")


_WHY = {
    "local": "launcher='local', whose actors run on this machine",
    "inline": "launcher='inline', whose actors run inside this process",
    "ssh": "launcher='ssh'",
    "slurm": "launcher='slurm', which takes the hosts of the allocation",
    "ray": "launcher='ray', which takes the hosts of the Ray cluster",
    "own": "a launcher of your own, which is already set up",
}


def _hosts(given: Any) -> tuple[Host, ...]:
    if isinstance(given, str | Path):
        return load_hostfile(given)
    if not isinstance(given, Sequence):
        raise MeshError(f"hosts is {given!r}; it is a hostfile's path or a list of hosts")
    return parse_hosts(given)


def _read(name: str, value: Any, parse: Any, convert: Any = None) -> Any:
    """A setting from text or a sequence."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return parse(value)
        return tuple(map(convert, value)) if convert else tuple(value)
    except (ValueError, TypeError) as error:
        raise MeshError(f"{name}={value!r}: {error}") from None
