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


def check_devices(names: str | None) -> None:
    """See whether this host has the devices that UCX is to use.

    Devices that are left out (`"^docker0"`) need not be there: hosts of one run may differ.

    Args:
        names: as `UCX_NET_DEVICES` has them, such as `"eth0,mlx5_0:1"`; None: it is not set.

    Raises:
        MeshError: one is not there, or is down; none is left; UCX would not take the list.
    """
    listed, are_left_out = _read(names)
    if not listed and not are_left_out:
        raise MeshError(
            f"{DEVICES} (interface=) is empty, with which UCX uses no network at all; unset it, or name a device "
            "(to have none, set UCX_TLS=sm,self)"
        )
    if "all" in listed:
        raise MeshError(f"{DEVICES} (interface=) is {names!r}, but 'all' stands alone; leave it out, or the others")
    rdma = _names_in(_RDMA)
    there = _names_in(_NET) | rdma
    if not there or (are_left_out and not listed):  # no sysfs here; or no word on them
        return
    down = {name for name in there if _is_down(name)}
    devices = [_without_port(name, rdma) for name in listed]
    if are_left_out:
        what = f"{names} leaves no network device" if not there - down - set(devices) else ""
    elif missing := [name for name in devices if name not in there]:
        what = f"there is no network device {', '.join(missing)}"
    elif resting := [name for name in devices if name in down]:
        what = f"the network device {', '.join(resting)} is down"
    else:
        what = ""
    if what:
        also = f", and {', '.join(sorted(down))}, down" if down else ""
        raise MeshError(
            f"{what} on host {os.uname().nodename} (interface=, or {DEVICES}); it has "
            f"{', '.join(sorted(there - down))}{also}"
        )


def is_used(names: str | None, device: str) -> bool:
    """Whether UCX uses a device that is no RDMA device, there being one of that name."""
    listed, are_left_out = _read(names)
    return (device in listed) != are_left_out


def _read(names: str | None) -> tuple[list[str], bool]:
    """The names, as UCX reads them: no pattern, no blank is taken out. And whether these are left out, not taken."""
    text = names if names is not None else "all"
    listed = [name for name in text.removeprefix("^").split(",") if name]
    return ([], True) if listed == ["all"] else (listed, text.startswith("^"))


def _without_port(name: str, rdma: set[str]) -> str:
    """`mlx5_0` of `mlx5_0:1`. Only RDMA devices have ports: `eth0:1` is an address, unknown to UCX."""
    device, _, port = name.partition(":")
    return device if device in rdma and port.isdigit() else name


def _names_in(folder: Path) -> set[str]:
    """Devices are folders; `bonding_masters` is a file."""
    return {entry.name for entry in folder.iterdir() if entry.is_dir()} if folder.is_dir() else set()


def _is_down(name: str) -> bool:
    try:
        return not int((_NET / name / "flags").read_text(), 16) & _UP
    except (OSError, ValueError):  # an RDMA device
        return False
