"""doc"""

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
"""doc"""

OF_HOSTS = OF_PROCESSES | {"control_address"}
"""doc"""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """doc"""

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
        """doc"""
        return self.num_devices if self.platform == "cuda" else 0

    @property
    def given(self) -> tuple[str, ...]:
        """doc"""
        is_given = {
            "hosts": self.hosts is not None,
            "ssh_options": bool(self.ssh_options),
            "control_address": self.control_address is not None,
            "lease_s": self.lease_s != LEASE_S,
            "python": self.python is not None,
            "cpus": self.cpus is not None,
            "devices": self.devices is not None,
            "interface": self.interface is not None,
            "ports": self.ports is not None,
        }
        return tuple(name for name in is_given if is_given[name])

    def settings(self) -> Settings:
        """doc"""
        return Settings(
            python=self.python,
            cpus=_read("cpus", self.cpus, parse_cpus),
            devices=_read("devices", self.devices, parse_devices, str),
            interface=self.interface,
            ports=_read("ports", self.ports, parse_ports),
        )

    def settings_here(self) -> Settings:
        """doc"""
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
        """doc"""
        return {
            "settings": self.settings(),
            "control_address": self.control_address,
            "lease_s": self.lease_s,
        }


@dataclass(frozen=True, slots=True)
class LauncherKind:
    """doc"""

    make: Callable[[LaunchOptions, int], Any]
    phrase: str
    uses: frozenset[str] = frozenset()
    find_hosts: Callable[[LaunchOptions], tuple[tuple[Host, ...] | None, Reach | None]] | None = None
    splits_actors: bool = True


def _read(name: str, value: Any, parse: Any, convert: Any = None) -> Any:
    """doc"""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return parse(value)
        return tuple(map(convert, value)) if convert else tuple(value)
    except (ValueError, TypeError) as error:
        raise MeshError(f"{name}={value!r}: {error}") from None
