"""Say on which addresses a process listens, and refuse connections from any others than its peers.

A medium that opens its own sockets (UCX, gloo, the coordinator of `jax.distributed`) lets everybody connect.
The kernel lets every process, without any right, say which connections a socket of its own refuses: a
listening socket may require that packets from a range of addresses are signed (TCP's MD5 option, RFC 2385).
Here all addresses are in such ranges but those of peers, and nobody has the key. So a stranger's first packet
is dropped before there is a connection, and packets of peers are neither signed nor checked, which costs
nothing. (A socket filter would say the same, but since 2026 Linux lets only administrators attach one to a
TCP socket.)

This does not tell users of one machine apart, and believes the address that a packet bears.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network, summarize_address_range
from typing import Any, Final, NamedTuple, TypeAlias

from jaxpp_async.base.descriptors import borrowed_socket, is_tcp, open_descriptors


@dataclass(frozen=True, slots=True)
class Network:
    """The network on which a process's transports listen.

    Args:
        addresses: IP addresses of this machine by which the other processes reach it: transports listen on
            their interfaces and on no other. Empty: every process is on this machine, and no network is
            needed. None: not known, so that transports listen wherever their medium does.
    """

    addresses: tuple[str, ...] | None = None


def is_loopback(address: str) -> bool:
    """Whether an IP address never leaves its machine."""
    return ip_address(address).is_loopback


def network_by(address: str | None) -> Network:
    """Make the network of a process that the others reach by one address (`messages.Configure.address`).

    Args:
        address: an IP address, loopback if every process is on one machine; None: not known.
    """
    if address is None:
        return Network(None)
    return Network(() if is_loopback(address) else (address,))


def leave_machine(addresses: Iterable[str]) -> bool:
    """Whether any of these addresses can be reached from other machines."""
    return not all(map(is_loopback, addresses))


# ---------------------------------------------------------------- listening

IPNetwork: TypeAlias = IPv4Network | IPv6Network

_LOG = logging.getLogger("jaxpp_async")

_TCP_MD5SIG_EXT: Final = 32
_FLAG_PREFIX: Final = 1  # TCP_MD5SIG_FLAG_PREFIX
_KEY_BYTES: Final = 80
_PREFIX_LENGTHS: Final = {4: (32, 28, 24, 20, 16, 12, 8, 0), 6: (128, 96, 64, 48, 32, 0)}
"""Lengths of the prefixes of admitted networks, by IP version. The next shorter one is tried where the ranges
that remain to be refused are more than the kernel keeps for a socket."""


_MAX_RANGES: Final = 256
"""How many ranges one socket refuses at most: each costs memory that the kernel counts, and time when a
connection begins."""

_IPV4_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The prefix of an IPv4 address for a socket that takes both versions."""


class ListeningSocket(NamedTuple):
    """A socket on which this process listens.

    Args:
        descriptor: of the socket.
        inode: of the socket, by which it is known whether the descriptor is still the same one's.
        address, port: on which it listens.
    """

    descriptor: int
    inode: int
    address: str
    port: int


def listening_sockets() -> set[ListeningSocket]:
    """List the TCP sockets on which this process listens now; none where the system does not say (no
    /proc)."""
    found: set[ListeningSocket] = set()
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError), borrowed_socket(descriptor) as sock:
            if is_tcp(sock) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(ListeningSocket(descriptor, os.fstat(descriptor).st_ino, *_own_end(sock)))
    return found


class AddressFilter:
    """A filter of the addresses from which peers may connect to some listening sockets of this process: at
    first none.

    Args:
        sockets: which sockets.

    Attributes:
        admitted: the networks whose addresses may connect; wider than was asked for where the kernel keeps no
            more ranges for a socket.

    Raises:
        OSError: the kernel cannot refuse connections (built without TCP's MD5 option).
    """

    def __init__(self, sockets: Iterable[ListeningSocket]):
        self._sockets = tuple(sockets)
        self._key = os.urandom(_KEY_BYTES)
        self._shut: dict[ListeningSocket, set[IPNetwork]] = {one: set() for one in self._sockets}
        self.admitted: frozenset[IPNetwork] = frozenset()
        for one in self._sockets:
            self._set(one, complement((), _version(one.address)))

    @classmethod
    def for_reached(cls, sockets: Iterable[ListeningSocket]) -> AddressFilter | None:
        """Make the filter of those sockets that other machines reach. None: there are none, or the kernel
        cannot refuse connections, which is logged."""
        reached = [one for one in sockets if not is_loopback(one.address)]
        try:
            return cls(reached) if reached else None
        except OSError as error:
            _LOG.warning(
                "the kernel here does not let this process refuse strangers' connections (%s): keep them "
                "from %s by a firewall",
                error,
                ", ".join(f"{one.address}:{one.port}" for one in reached),
            )
            return None

    def admit(self, addresses: Iterable[str]) -> None:
        """Let these addresses connect, and nobody else. Connections that exist stay.

        Raises:
            OSError: the kernel refuses.
        """
        wanted = {ip_network(address) for address in addresses}
        self.admitted = frozenset()
        for one in self._sockets:
            version = _version(one.address)
            own = [net for net in wanted if net.version == version]
            for prefix in _PREFIX_LENGTHS[version]:
                admitted = {
                    net if net.prefixlen <= prefix else net.supernet(new_prefix=prefix) for net in own
                }
                others, is_last = complement(admitted, version), prefix == _PREFIX_LENGTHS[version][-1]
                if len(others) > _MAX_RANGES and not is_last:
                    continue
                try:
                    self._set(one, others)
                except OSError as error:
                    if error.errno != errno.ENOMEM or is_last:
                        raise
                else:
                    self.admitted |= admitted
                    break

    def _set(self, one: ListeningSocket, wanted: set[IPNetwork]) -> None:
        """Refuse exactly these ranges on a socket. Meanwhile, and where that fails, it refuses everybody."""
        shut, everybody = self._shut[one], complement((), _version(one.address))
        if shut == wanted:
            return
        with contextlib.suppress(_GoneError), _open_own(one) as sock:
            for nets, key in (
                (everybody - shut, self._key),
                (shut - wanted - everybody, b""),
                (wanted - shut - everybody, self._key),
                (everybody - wanted, b""),
            ):
                for net in nets:
                    _require_signature(sock, net, key)
                    shut.symmetric_difference_update({net})

    def has_connections(self) -> bool:
        """Whether anybody has connected to one of the sockets, or is about to be accepted. It is asked before
        any peer knows of the sockets."""
        places = {(one.address, one.port) for one in self._sockets}
        for one in self._sockets:
            with contextlib.suppress(_GoneError), _open_own(one) as sock:
                queue = select.poll()
                queue.register(sock, select.POLLIN)
                if queue.poll(0):
                    return True
        for descriptor in open_descriptors():
            with contextlib.suppress(OSError), borrowed_socket(descriptor) as sock:
                listens = is_tcp(sock) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_tcp(sock) and not listens and _own_end(sock) in places:
                    return True
        return False


def refuse_strangers(sockets: Iterable[ListeningSocket], addresses: Iterable[str]) -> None:
    """Let only these addresses connect to some sockets, for good; where the kernel cannot, that is logged.

    Raises:
        OSError: the kernel refuses what it has allowed before.
    """
    own = AddressFilter.for_reached(sockets)
    if own is not None:
        own.admit(addresses)


def complement(admitted: Iterable[IPNetwork], version: int) -> set[IPNetwork]:
    """Compute the fewest ranges that hold every address of an IP version but the admitted ones."""
    everybody = ip_network("0.0.0.0/0" if version == 4 else "::/0")
    ends = sorted((int(net.network_address), int(net.broadcast_address)) for net in admitted)
    kind: Any = type(everybody.network_address)
    left, start = set[IPNetwork](), 0
    for first, last in [*ends, (int(everybody.broadcast_address) + 1, 0)]:
        if start < first:
            left.update(summarize_address_range(kind(start), kind(first - 1)))
        start = max(start, last + 1)
    return left


def _version(address: str) -> int:
    return 6 if ":" in address else 4


def _require_signature(sock: socket.socket, net: IPNetwork, key: bytes) -> None:
    """Have a socket take packets from a network only if they are signed with a key (`struct tcp_md5sig` of
    `linux/tcp.h`); with an empty key, take them again unsigned."""
    packed = net.network_address.packed
    if sock.family == socket.AF_INET:
        place = struct.pack("=HH4s", socket.AF_INET, 0, packed)
    else:
        place = struct.pack(
            "=HHI16s", socket.AF_INET6, 0, 0, packed if net.version == 6 else _IPV4_MAPPED + packed
        )
    option = struct.pack("=128sBBHi80s", place, _FLAG_PREFIX, net.prefixlen, len(key), 0, key)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, option)


class _GoneError(Exception):
    """The socket was closed by its owner."""


@contextlib.contextmanager
def _open_own(one: ListeningSocket):
    try:
        if os.fstat(one.descriptor).st_ino != one.inode:
            raise _GoneError
    except OSError:
        raise _GoneError from None
    with borrowed_socket(one.descriptor) as sock:
        yield sock


def _own_end(sock: socket.socket) -> tuple[str, int]:
    """Return address and port of a socket's own end; an IPv4 address as such, also where the socket is for
    both versions."""
    address, port = sock.getsockname()[:2]
    return address.partition("%")[0].removeprefix("::ffff:"), port
