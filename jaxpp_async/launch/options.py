"""Hold the options of `RemoteMesh` that say where and how actors start, and describe what a kind of launcher
makes of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from jaxpp_async.errors import MeshError
from jaxpp_async.launch.host_agent_client import Reach
from jaxpp_async.launch.hosts import Host, Settings, parse_cpus, parse_devices, parse_ports
from jaxpp_async.launch.spawn import check_cpus
from jaxpp_async.protocol.parent_watch import LEASE_S
from jaxpp_async.transport.ucx.net_devices import check_devices

OF_PROCESSES = frozenset({"lease_s", "python", "cpus", "devices", "interface", "ports"})
"""Options that every launcher uses which starts processes."""

OF_HOSTS = OF_PROCESSES | {"control_address"}
"""Options that every launcher uses which starts processes on other hosts."""

_OF_SOME = ("hosts", "ssh_options", *sorted(OF_HOSTS))


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of `RemoteMesh` that say where and how actors start; `RemoteMesh` documents those that are
    not listed here.

    Args:
        processes_per_actor: number of processes of each actor; None: as few as the hosts allow.
        num_devices: number of devices of one actor.
        platform: of the devices: `"cpu"` or `"cuda"`.
        lease_s: how long actors go on without a sign of life from this process, in seconds.
        max_restarts: of the mesh; after a restart, ports cannot be used again for a minute.
        env: variables that actors get. They matter here for where programs are found; other code checks them
            and passes them on.
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
        """Number of GPUs that a cluster which hands out devices has to reserve for an actor."""
        return self.num_devices if self.platform == "cuda" else 0

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the given options that some launchers do not use."""
        default = {f.name: f.default for f in fields(self)}
        names = [name for name in _OF_SOME if getattr(self, name) != default[name]]
        return tuple(name for name in names if name != "ssh_options" or self.ssh_options)  # it may be []

    def settings(self) -> Settings:
        """Make the settings that hold for every host.

        Raises:
            MeshError: a value is not possible.
        """
        return Settings(
            python=self.python,
            cpus=_read("cpus", self.cpus, parse_cpus),
            devices=_read("devices", self.devices, parse_devices, str),
            interface=self.interface,
            ports=_read("ports", self.ports, parse_ports),
        )

    def settings_here(self) -> Settings:
        """Make the settings of actors on this machine, after a check that the machine has what they name.

        Raises:
            MeshError: a value is not possible, or this machine does not have it.
        """
        settings = self.settings()
        if settings.cpus is not None:
            check_cpus(settings.cpus)
        check_devices(settings.interface)
        path = self.env.get("PATH", os.environ.get("PATH"))  # actors are looked up in it as they start
        if self.python is not None and not shutil.which(
            self.python, path=path if isinstance(path, str) else None
        ):
            raise MeshError(
                f"python={self.python!r} is no program of this machine; give an interpreter's path"
            )
        return settings

    def of_remote(self) -> dict[str, Any]:
        """Give the options of `RemoteLauncher`."""
        return {
            "settings": self.settings(),
            "control_address": self.control_address,
            "lease_s": self.lease_s,
        }


@dataclass(frozen=True, slots=True)
class LauncherKind:
    """Describes one kind of launcher. The launcher's module makes one, and `choose.LAUNCHERS` has a line for
    it.

    Args:
        make: called with the options and the number of processes; makes the launcher.
        phrase: names the launcher in errors, such as `"launcher='local', whose actors run on this machine"`.
        uses: names of the options (of those in `LaunchOptions.given`) that it uses; others are errors.
        find_hosts: finds the hosts and the way to reach them without starting anything. It returns (None,
            None) for this machine. None: such a launcher knows its hosts only once it has started something.
        splits_actors: whether an actor may be of several processes.
    """

    make: Callable[[LaunchOptions, int], Any]
    phrase: str
    uses: frozenset[str] = frozenset()
    find_hosts: Callable[[LaunchOptions], tuple[tuple[Host, ...] | None, Reach | None]] | None = None
    splits_actors: bool = True


def _read(name: str, value: Any, parse: Any, convert: Any = None) -> Any:
    """Read a setting that is given as text or as a sequence."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return parse(value)
        return tuple(map(convert, value)) if convert else tuple(value)
    except (ValueError, TypeError) as error:
        raise MeshError(f"{name}={value!r}: {error}") from None
