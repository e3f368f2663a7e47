"""network: plain data that says on which of this machine's addresses one end of a data plane listens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True, slots=True)
class Network:
    """Where an end of a data plane listens.

    Args:
        addresses: IP addresses of this machine by which the other processes reach it: it listens on their interfaces
            and on no other. Empty: every process is on this machine, and no network is needed. None: nobody knows, so
            that it listens wherever its medium does.
    """

    addresses: tuple[str, ...] | None = None


def is_loopback(address: str) -> bool:
    """Whether an IP address never leaves its machine."""
    return ip_address(address).is_loopback


def network_by(address: str | None) -> Network:
    """The network of a process that the others reach by one address (`messages.Configure.address`).

    Args:
        address: loopback, if every process is on one machine; None: not known.
    """
    if address is None:
        return Network(None)
    return Network(() if is_loopback(address) else (address,))


def leave_machine(addresses: Iterable[str]) -> bool:
    """Whether any of these addresses can be reached from other machines."""
    return not all(map(is_loopback, addresses))
