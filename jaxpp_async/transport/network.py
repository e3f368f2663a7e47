"""Choose the addresses on which a process listens, and refuse connections from everybody except its peers.

Libraries that open their own sockets (UCX, gloo, the coordinator of `jax.distributed`) accept connections
from everybody. The Linux kernel lets an unprivileged process choose which connections its own sockets refuse:
a listening socket may require that packets from a range of addresses are signed (TCP's MD5 option, RFC 2385).
This module requires signatures from all addresses except those of peers, with a key that nobody has. A
stranger's first packet is therefore dropped before a connection exists. Packets of peers are neither signed
nor checked, so that the protection does not slow them down. (A socket filter could do the same, but since
2026 Linux lets only administrators attach one to a TCP socket.)

This protection does not tell users of one machine apart, and it trusts the source address in each packet.
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
        addresses: the IP addresses at which the other processes reach this process; transports listen only on
            the network interfaces that have these addresses. Empty: every process is on this machine, and no
            network is needed. None: the addresses are not known, so that each transport listens where its
            medium (such as UCX) listens by default.
    """

    addresses: tuple[str, ...] | None = None


def is_loopback(address: str) -> bool:
    """Return whether an IP address is a loopback address, by which only processes of the same machine can
    connect."""
    return ip_address(address).is_loopback


def network_by(address: str | None) -> Network:
    """Return the `Network` of a process, given the one address at which the other processes reach it
    (`messages.Configure.address`).

    Args:
        address: an IP address, which is a loopback address if every process is on one machine; None if it is
            not known.
    """
    if address is None:
        return Network(None)
    return Network(() if is_loopback(address) else (address,))


def leave_machine(addresses: Iterable[str]) -> bool:
    """Return whether other machines can connect to any of these addresses."""
    return not all(map(is_loopback, addresses))


# ---------------------------------------------------------------- listening

IPNetwork: TypeAlias = IPv4Network | IPv6Network

_LOG = logging.getLogger("jaxpp_async")

_TCP_MD5SIG_EXT: Final = 32
_FLAG_PREFIX: Final = 1  # TCP_MD5SIG_FLAG_PREFIX
_KEY_BYTES: Final = 80
_PREFIX_LENGTHS: Final = {4: (32, 28, 24, 20, 16, 12, 8, 0), 6: (128, 96, 64, 48, 32, 0)}
"""The prefix lengths of admitted networks to try, by IP version. If admitting networks of one length leaves
more ranges to refuse than the kernel can keep for a socket, the next shorter length is tried."""


_MAX_RANGES: Final = 256
"""The greatest number of address ranges that one socket refuses. Each range costs memory, which the kernel
limits, and time when a connection begins."""

_IPV4_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The prefix with which a socket that serves both IP versions represents an IPv4 address."""


class ListeningSocket(NamedTuple):
    """A socket on which this process listens.

    Args:
        descriptor: the socket's file descriptor.
        inode: the socket's inode, which shows whether the descriptor still belongs to the same socket.
        address, port: the address and the port on which it listens.
    """

    descriptor: int
    inode: int
    address: str
    port: int


def listening_sockets() -> set[ListeningSocket]:
    """Return the TCP sockets on which this process listens now; an empty set if the system does not list
    descriptors (has no /proc)."""
    found: set[ListeningSocket] = set()
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError), borrowed_socket(descriptor) as sock:
            if is_tcp(sock) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(ListeningSocket(descriptor, os.fstat(descriptor).st_ino, *_own_end(sock)))
    return found


class AddressFilter:
    """A filter that lets only admitted IP addresses connect to some listening sockets of this process. At
    first no address is admitted.

    Args:
        sockets: the sockets to protect.

    Attributes:
        admitted: the networks whose addresses may connect. If the kernel cannot keep enough ranges for a
            socket, these networks contain more addresses than `admit` was given.

    Raises:
        OSError: the kernel cannot refuse connections (it was built without TCP's MD5 option).
    """

    def __init__(self, sockets: Iterable[ListeningSocket]):
        self._sockets = tuple(sockets)
        self._key = os.urandom(_KEY_BYTES)
        self._refused: dict[ListeningSocket, set[IPNetwork]] = {listener: set() for listener in self._sockets}
        self.admitted: frozenset[IPNetwork] = frozenset()
        for listener in self._sockets:
            self._refuse(listener, complement((), _version(listener.address)))

    @classmethod
    def for_reachable(cls, sockets: Iterable[ListeningSocket]) -> AddressFilter | None:
        """Make a filter for those of the sockets to which other machines can connect.

        Returns:
            The filter. None if there are no such sockets, or if the kernel cannot refuse connections, which
            is logged.
        """
        reachable = [listener for listener in sockets if not is_loopback(listener.address)]
        try:
            return cls(reachable) if reachable else None
        except OSError as error:
            _LOG.warning(
                "the kernel here does not let this process refuse strangers' connections (%s): keep them "
                "from %s by a firewall",
                error,
                ", ".join(f"{listener.address}:{listener.port}" for listener in reachable),
            )
            return None

    def admit(self, addresses: Iterable[str]) -> None:
        """Allow connections from these addresses and from nobody else. Existing connections stay open.

        Raises:
            OSError: the kernel refuses the change.
        """
        wanted = {ip_network(address) for address in addresses}
        self.admitted = frozenset()
        for listener in self._sockets:
            version = _version(listener.address)
            own = [net for net in wanted if net.version == version]
            for prefix in _PREFIX_LENGTHS[version]:
                admitted = {
                    net if net.prefixlen <= prefix else net.supernet(new_prefix=prefix) for net in own
                }
                others, is_last = complement(admitted, version), prefix == _PREFIX_LENGTHS[version][-1]
                if len(others) > _MAX_RANGES and not is_last:
                    continue
                try:
                    self._refuse(listener, others)
                except OSError as error:
                    if error.errno != errno.ENOMEM or is_last:
                        raise
                else:
                    self.admitted |= admitted
                    break

    def _refuse(self, listener: ListeningSocket, wanted: set[IPNetwork]) -> None:
        """Make a socket refuse exactly the given address ranges. While the change is being made, and after a
        change that failed, the socket refuses everybody.

        Args:
            listener: the socket.
            wanted: the address ranges to refuse.
        """
        refused, everybody = self._refused[listener], complement((), _version(listener.address))
        if refused == wanted:
            return
        with contextlib.suppress(_GoneError), _open_own(listener) as sock:
            for nets, key in (
                (everybody - refused, self._key),
                (refused - wanted - everybody, b""),
                (wanted - refused - everybody, self._key),
                (everybody - wanted, b""),
            ):
                for net in nets:
                    _require_signature(sock, net, key)
                    refused.symmetric_difference_update({net})

    def has_connections(self) -> bool:
        """Return whether anybody has connected to one of the sockets or is waiting to be accepted. This is
        called before any peer knows the sockets' addresses, so any connection is a stranger's."""
        places = {(listener.address, listener.port) for listener in self._sockets}
        for listener in self._sockets:
            with contextlib.suppress(_GoneError), _open_own(listener) as sock:
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
    """Let only these addresses connect to the sockets, for as long as the sockets exist. If the kernel cannot
    refuse connections, log a warning instead.

    Raises:
        OSError: the kernel reports an error although it can refuse connections.
    """
    own = AddressFilter.for_reachable(sockets)
    if own is not None:
        own.admit(addresses)


def complement(admitted: Iterable[IPNetwork], version: int) -> set[IPNetwork]:
    """Return the fewest address ranges that together contain every address of an IP version except the
    admitted ones.

    Args:
        admitted: the networks to leave out.
        version: the IP version, 4 or 6.
    """
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
    """Make a socket accept packets from a network only if they are signed with a key (`struct tcp_md5sig` of
    `linux/tcp.h`). If the key is empty, make the socket accept unsigned packets from the network again."""
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
    """The error for a socket that its owner has closed."""


@contextlib.contextmanager
def _open_own(listener: ListeningSocket):
    try:
        if os.fstat(listener.descriptor).st_ino != listener.inode:
            raise _GoneError
    except OSError:
        raise _GoneError from None
    with borrowed_socket(listener.descriptor) as sock:
        yield sock


def _own_end(sock: socket.socket) -> tuple[str, int]:
    """Return the local address and port of a socket. An IPv4 address is returned in its dotted form (such as
    `10.0.0.1`) even if the socket serves both IP versions."""
    address, port = sock.getsockname()[:2]
    return address.partition("%")[0].removeprefix("::ffff:"), port
