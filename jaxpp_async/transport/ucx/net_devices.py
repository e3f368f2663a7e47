"""net_devices: the network devices that UCX is to use, looked for before UCX does. Names in, errors out.

UCX only warns of a device that is not there, or is down, and goes on with what is left: perhaps nothing that leaves the
host. Imports no UCX: launchers ask too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from jaxpp_async.errors import MeshError

DEVICES: Final = "UCX_NET_DEVICES"

_NET, _RDMA = Path("/sys/class/net"), Path("/sys/class/infiniband")
_UP = 1  # IFF_UP


def check_devices(names: str) -> None:
    """See whether this host has the devices that UCX is to use.

    Args:
        names: as `UCX_NET_DEVICES` has them, such as `"eth0,mlx5_0:1"`.

    Raises:
        MeshError: one is not there, or is down.
    """
    there = _names_in(_NET) | _names_in(_RDMA)
    if not there:  # no sysfs here
        return
    asked = named_devices(names) or []
    missing, down = [name for name in asked if name not in there], {name for name in there if _is_down(name)}
    if missing:
        what = f"there is no network device {', '.join(missing)}"
    elif resting := [name for name in asked if name in down]:
        what = f"the network device {', '.join(resting)} is down"
    else:
        return
    also = f", and {', '.join(sorted(down))}, down" if down else ""
    raise MeshError(
        f"{what} on host {os.uname().nodename} (interface=, or {DEVICES}); it has "
        f"{', '.join(sorted(there - down))}{also}"
    )


def named_devices(names: str) -> list[str] | None:
    """The devices that are named one by one; None: all, or all but some."""
    if not names or any(name == "all" or set("*^") & set(name) for name in names.split(",")):
        return None
    return [name.partition(":")[0] for name in names.split(",") if name]


def _names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _is_down(name: str) -> bool:
    try:
        return not int((_NET / name / "flags").read_text(), 16) & _UP
    except (OSError, ValueError):  # an RDMA device
        return False
