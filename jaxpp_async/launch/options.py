"""Hold the options of `RemoteMesh` that say where and how actors start, and describe each kind of launcher:
which options it uses and how to make it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpp_async.errors import MeshError
from jaxpp_async.launch.host_agent_client import Reach
from jaxpp_async.launch.hosts import Host, Settings, parse_cpus, parse_devices, parse_ports
from jaxpp_async.launch.spawn import check_cpus
from jaxpp_async.protocol.parent_watch import LEASE_S
from jaxpp_async.transport.ucx.net_devices import check_devices

OF_PROCESSES = frozenset({"lease_s", "python", "cpus", "devices", "interface", "ports"})
"""The names of the options that every launcher which starts processes uses."""

OF_HOSTS = OF_PROCESSES | {"control_address"}
"""The names of the options that every launcher which starts processes on other hosts uses."""

_OF_SOME = ("hosts", "ssh_options", *sorted(OF_HOSTS))


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of `RemoteMesh` that say where and how actors start.

    `RemoteMesh` documents the options that are not listed below.

    Args:
        processes_per_actor: the number of processes of each actor; None for as few as the hosts allow.
        num_devices: the number of devices of one actor.
        platform: the JAX platform of the devices, `"cpu"` or `"cuda"`.
        lease_s: the number of seconds after which actors end themselves if they hear nothing from this
            process.
        max_restarts: the number of restarts that the mesh allows. With restarts a host needs more ports,
            since a freed port cannot be used again for a minute.
        env: the environment variables that actors get. This object uses only their `PATH`, to find programs;
            other code checks the variables and passes them on.
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
        """The number of GPUs to reserve for one actor in a cluster that assigns devices to processes; 0 if
        the platform is the CPU.
        """
        return self.num_devices if self.platform == "cuda" else 0

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the options that only some launchers use and that the user has set."""
        is_given = {"lease_s": self.lease_s != LEASE_S, "ssh_options": len(self.ssh_options) > 0}
        return tuple(n for n in _OF_SOME if is_given.get(n, getattr(self, n) is not None))

    def settings(self) -> Settings:
        """Make the settings that apply to every host.

        Raises:
            MeshError: an option has a value that is not possible.
        """
        return Settings(
            python=self.python,
            cpus=_read("cpus", self.cpus, parse_cpus),
            devices=_read("devices", self.devices, parse_devices, str),
            interface=self.interface,
            ports=_read("ports", self.ports, parse_ports),
        )

    def settings_here(self) -> Settings:
        """Make the settings of actors on this machine. First check that this machine has the CPUs, the
        network device and the interpreter that the options name.

        Raises:
            MeshError: a value is not possible, or names something that this machine does not have.
        """
        settings = self.settings()
        if settings.cpus is not None:
            check_cpus(settings.cpus)
        check_devices(settings.interface)
        path = self.env.get("PATH", os.environ.get("PATH"))  # where actors' interpreters are looked up
        if self.python is not None and not shutil.which(
            self.python, path=path if isinstance(path, str) else None
        ):
            raise MeshError(
                f"python={self.python!r} is no program of this machine; give an interpreter's path"
            )
        return settings

    def remote_options(self) -> dict[str, Any]:
        """Return the keyword arguments for `RemoteLauncher` that follow from these options."""
        return {"settings": self.settings(), "control_address": self.control_address, "lease_s": self.lease_s}


@dataclass(frozen=True, slots=True)
class LauncherKind:
    """A description of one kind of launcher: how to make it, and which options it uses.

    Each launcher's module defines one, and `choose.LAUNCHERS` lists them all.

    Args:
        make: a function that makes the launcher from the options and the number of processes of the mesh.
        phrase: a phrase that names the launcher in errors, such as `"launcher='local', whose actors run on
            this machine"`.
        uses: the names of the options in `LaunchOptions.given` that the launcher uses. If the user sets
            another one of the options in `given`, that is an error.
        find_hosts: a function that returns the hosts and the `Reach` that runs programs on them, without
            starting anything; it returns (None, None) for this machine alone. None if launchers of this kind
            know their hosts only once they have started something.
        splits_actors: whether an actor may consist of several processes; if not, a `processes_per_actor`
            above 1 is an error.
    """

    make: Callable[[LaunchOptions, int], Any]
    phrase: str
    uses: frozenset[str] = frozenset()
    find_hosts: Callable[[LaunchOptions], tuple[tuple[Host, ...] | None, Reach | None]] | None = None
    splits_actors: bool = True


def _read(name: str, value: Any, parse: Any, convert: Any = None) -> Any:
    """Return as a tuple the value of an option that the user gave as a string or as a sequence.

    Args:
        name: the name of the option, for error messages.
        value: the value that the user gave; None if the option was not given.
        parse: a function that reads the value from a string, and raises ValueError if it cannot.
        convert: a function to apply to each element of a sequence; None to keep the elements as they are.

    Returns:
        A tuple, or None if the option was not given.

    Raises:
        MeshError: the value cannot be read.
    """
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return parse(value)
        return tuple(map(convert, value)) if convert else tuple(value)
    except (ValueError, TypeError) as error:
        raise MeshError(f"{name}={value!r}: {error}") from None
