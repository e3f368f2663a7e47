"""interfaces: finds the network devices, in UCX's words, that have some IP addresses of this machine, and the other
way round. Starts no UCX.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from collections.abc import Collection

from jaxpp_async.transport.ucx.net_devices import is_used

_GIVE_ADDRESSES = 0x8912  # SIOCGIFCONF
_IFREQ = struct.Struct("16s4x4s16x")  # `struct ifreq` with an IPv4 address, where pointers have 64 bits
_MOST_ADDRESSES = 1024

_GIVE_FLAGS = 0x8913  # SIOCGIFFLAGS
_RUNNING = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
_LINK_LOCAL = 0x20  # IPV6_ADDR_LINKLOCAL


def devices_with(addresses: Collection[str]) -> str | None:
    """The list for UCX that leaves it the interfaces of some addresses, and all RDMA devices.

    Args:
        addresses: IPv4 addresses of this machine; none: it is to use no network.

    Returns:
        As `UCX_NET_DEVICES` has it; None: some address is of no interface here, so that nobody can say.
    """
    if not addresses:
        return ""
    pairs = _interface_addresses()
    if not set(addresses) <= {address for _, address in pairs}:
        return None
    taken = {name for name, address in pairs if address in addresses}
    # Only those that UCX would use: it warns of others.
    others = {name for name, address in pairs if not address.startswith("169.254.")} | _with_ipv6()
    others = {name for name in others - taken if _is_running(name)}
    return "^" + ",".join(sorted(others)) if others else "all"


def interface_with(address: str) -> str | None:
    """Name of the interface that has an IPv4 address; None: there is none."""
    return next((name for name, own in _interface_addresses() if own == address), None)


def addresses_of_devices(names: str | None) -> list[str]:
    """IPv4 addresses of the devices on which UCX will listen; UCX takes IPv6 only where there is none."""
    return [address for name, address in _interface_addresses() if is_used(names, name)]


def _interface_addresses() -> list[tuple[str, str]]:
    """Name and address of each interface that has an IPv4 address; once for each address."""
    room = ctypes.create_string_buffer(_MOST_ADDRESSES * _IFREQ.size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("iP", len(room), ctypes.addressof(room))
        size_bytes = struct.unpack("iP", fcntl.ioctl(sock.fileno(), _GIVE_ADDRESSES, asked))[0]
    entries = _IFREQ.iter_unpack(room.raw[: size_bytes // _IFREQ.size * _IFREQ.size])
    # A second address of an interface may have a label: `eth0:1`.
    return [(name.partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(ip)) for name, ip in entries]


def _with_ipv6() -> set[str]:
    """Names of the interfaces that have an IPv6 address which is good beyond its link."""
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
        except OSError:  # it has gone
            return False
    return struct.unpack_from("H", answer, 16)[0] & _RUNNING == _RUNNING
