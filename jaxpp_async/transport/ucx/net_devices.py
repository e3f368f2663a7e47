"""Check the network devices that UCX is told to use, and find the devices that have given IP addresses.

If a device does not exist or is down, UCX only logs a warning and continues with the other devices, even if
none of them can send to other hosts. Launchers need these checks too, so this module does not import UCX.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Final

from jaxpp_async.errors import MeshError

DEVICES: Final = "UCX_NET_DEVICES"

_NET, _RDMA = Path("/sys/class/net"), Path("/sys/class/infiniband")
_UP = 1  # IFF_UP


def check_devices(names: str | None) -> None:
    """Check that this host has the network devices that UCX is told to use.

    Devices that are excluded (`"^docker0"`) need not exist, because the hosts of one mesh may differ.

    Args:
        names: the devices as in the environment variable `UCX_NET_DEVICES`, such as `"eth0,mlx5_0:1"`; None:
            the variable is not set.

    Raises:
        MeshError: a device does not exist or is down, no device is left, or UCX would reject the list.
    """
    listed, are_left_out = _read(names)
    if not listed and not are_left_out:
        raise MeshError(
            f"{DEVICES} (interface=) is empty, with which UCX uses no network at all; unset it, or name a "
            "device (to have none, set UCX_TLS=sm,self)"
        )
    if "all" in listed:
        raise MeshError(
            f"{DEVICES} (interface=) is {names!r}, but 'all' stands alone; leave it out, or the others"
        )
    rdma = _names_in(_RDMA)
    there = _names_in(_NET) | rdma
    if not there or (are_left_out and not listed):  # no sysfs, or all are allowed
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
    """Return whether UCX uses a network device. Call this only for a device that exists and is not an RDMA
    device.

    Args:
        names: the devices as in the environment variable `UCX_NET_DEVICES`; None: the variable is not set.
        device: the name of the device.
    """
    listed, are_left_out = _read(names)
    return (device in listed) != are_left_out


def _read(names: str | None) -> tuple[list[str], bool]:
    """Split a list of network devices as UCX does: without patterns, and without stripping blanks.

    Args:
        names: the list as in the environment variable `UCX_NET_DEVICES`; None: the variable is not set.

    Returns:
        The names, and whether UCX excludes these devices (True) or uses only these (False). If UCX uses all
        devices, an empty list and True.
    """
    text = names if names is not None else "all"
    listed = [name for name in text.removeprefix("^").split(",") if name]
    return ([], True) if listed == ["all"] else (listed, text.startswith("^"))


def _without_port(name: str, rdma: set[str]) -> str:
    """Remove the port from a device's name: `mlx5_0:1` becomes `mlx5_0`. Only RDMA devices have ports;
    `eth0:1` is the label of an address, which UCX does not know.

    Args:
        name: the name as the user gave it.
        rdma: the names of this host's RDMA devices.
    """
    device, _, port = name.partition(":")
    return device if device in rdma and port.isdigit() else name


def _names_in(folder: Path) -> set[str]:
    """Return the names of the devices in a folder of sysfs. Each device is a subfolder; other entries, such
    as the file `bonding_masters`, are left out."""
    return {entry.name for entry in folder.iterdir() if entry.is_dir()} if folder.is_dir() else set()


def _is_down(name: str) -> bool:
    try:
        return not int((_NET / name / "flags").read_text(), 16) & _UP
    except (OSError, ValueError):  # an RDMA device has no such file
        return False


# ---------------------------------------------------------------- addresses of interfaces

_GIVE_ADDRESSES = 0x8912  # SIOCGIFCONF
_IFREQ = struct.Struct("16s4x4s16x")  # `struct ifreq` with an IPv4 address, where pointers have 64 bits
_MOST_ADDRESSES = 1024

_GIVE_FLAGS = 0x8913  # SIOCGIFFLAGS
_RUNNING = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
_LINK_LOCAL = 0x20  # IPV6_ADDR_LINKLOCAL


def devices_with(addresses: Collection[str]) -> str | None:
    """Return the list of devices that makes UCX use only the interfaces with the given addresses, and all
    RDMA devices.

    Args:
        addresses: IPv4 addresses of this machine; if this is empty, the result is an empty text, which makes
            UCX use no network.

    Returns:
        The list in the form of the environment variable `UCX_NET_DEVICES`; None if one of the addresses
        belongs to no interface of this machine.
    """
    if not addresses:
        return ""
    pairs = _interface_addresses()
    if not set(addresses) <= {address for _, address in pairs}:
        return None
    taken = {name for name, address in pairs if address in addresses}
    # Exclude only interfaces that UCX would otherwise use: it warns of others.
    others = {name for name, address in pairs if not address.startswith("169.254.")} | _with_ipv6()
    others = {name for name in others - taken if _is_running(name)}
    return "^" + ",".join(sorted(others)) if others else "all"


def interface_with(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address; None if there is none."""
    return next((name for name, own in _interface_addresses() if own == address), None)


def addresses_of_devices(names: str | None) -> list[str]:
    """Return the IPv4 addresses of the devices on which UCX will listen. UCX uses IPv6 only if there is no
    IPv4 address.

    Args:
        names: the devices as in the environment variable `UCX_NET_DEVICES`; None: the variable is not set.
    """
    return [address for name, address in _interface_addresses() if is_used(names, name)]


def _interface_addresses() -> list[tuple[str, str]]:
    """Return (interface name, IPv4 address) for each IPv4 address of this machine's interfaces."""
    buffer = ctypes.create_string_buffer(_MOST_ADDRESSES * _IFREQ.size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("iP", len(buffer), ctypes.addressof(buffer))
        size_bytes = struct.unpack("iP", fcntl.ioctl(sock.fileno(), _GIVE_ADDRESSES, asked))[0]
    entries = _IFREQ.iter_unpack(buffer.raw[: size_bytes // _IFREQ.size * _IFREQ.size])
    # A second address of an interface may have a label: `eth0:1`.
    return [
        (name.partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(ip)) for name, ip in entries
    ]


def _with_ipv6() -> set[str]:
    """Return the names of the interfaces that have an IPv6 address that is not link-local."""
    try:
        with open("/proc/net/if_inet6") as file:
            rows = [line.split() for line in file]  # address, index, prefix, scope, flags, name
    except OSError:  # this machine has no IPv6
        return set()
    return {row[-1] for row in rows if int(row[3], 16) != _LINK_LOCAL}


def _is_running(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _GIVE_FLAGS, struct.pack("40s", name.encode()[:15]))
        except OSError:  # the interface does not exist any more
            return False
    return struct.unpack_from("H", answer, 16)[0] & _RUNNING == _RUNNING
