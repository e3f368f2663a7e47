"""addresses: which of this machine's addresses other hosts reach it by. Blocks on name lookups: call it in a thread."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from jaxpp_async.errors import MeshError
from jaxpp_async.transport.network import is_loopback

ANY = "0.0.0.0"
"""As a control address: listen on every interface, and tell each host the address that reaches it."""

_ELSEWHERE = "192.0.2.1"  # RFC 5737: nobody has it, so the default route leads there


def address_towards(host: str) -> str | None:
    """This machine's IPv4 address on the way to `host`; None if there is no way, or no such name.

    Nothing is sent: connecting a datagram socket only asks the routing table.
    """
    way = _way_to(host)
    return way and way[0]


def _way_to(host: str) -> tuple[str, str] | None:
    """Our address on the way to a host, and the host's; the same, if the host is this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return probe.getsockname()[0], probe.getpeername()[0]


def addresses_of_hosts(ends: Sequence[tuple[str, str]]) -> list[str]:
    """Addresses by which the hosts of some processes reach each other.

    Args:
        ends: of the connection of each process with this one: its address, and ours.
    """
    outside = [own for theirs, own in ends if not is_loopback(theirs)]
    if not outside:
        return [theirs for theirs, _ in ends]
    # Those on this machine may have come by its loopback, where the others would look for them on their own.
    return [outside[0] if is_loopback(theirs) else theirs for theirs, _ in ends]


def control_address(hosts: Sequence[str]) -> str:
    """The one address by which all hosts reach this machine: loopback if all of them are this machine.

    Args:
        hosts: names or addresses. Names that cannot be looked up here are left out: reaching them will say why.

    Raises:
        MeshError: they reach this machine by different addresses.
    """
    ways = {host: way for host in hosts if (way := _way_to(host)) is not None}
    if ways and all(ours == theirs or is_loopback(theirs) for ours, theirs in ways.values()):
        return "127.0.0.1"
    found = {host: ours for host, (ours, _) in ways.items()}
    outside = {a: host for host, a in found.items() if not is_loopback(a)}
    if len(outside) > 1:
        ways = ", ".join(f"{address} for {host}" for address, host in outside.items())
        raise MeshError(
            f"hosts reach this machine by different addresses ({ways}); choose one with control_address=, "
            f"or listen on all of them with control_address={ANY!r}"
        )
    if outside:
        return next(iter(outside))
    return next(iter(found.values()), None) or address_towards(_ELSEWHERE) or "127.0.0.1"
