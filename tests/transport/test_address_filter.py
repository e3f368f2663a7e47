"""Who may connect to a listening socket of this process. Addresses of 127.0.0.0/8 stand in for hosts."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address, ip_network

import pytest

from jaxpp_async.transport import network
from jaxpp_async.transport.network import AddressFilter, ListeningSocket, complement, listening_sockets


def try_to_connect(place: tuple[str, int], source: str) -> bool:
    """Whether a connection from this address is answered."""
    with socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET) as sock:
        sock.bind((source, 0))
        sock.settimeout(0.1)
        try:
            sock.connect(place)
        except TimeoutError:
            return False
        return True


@pytest.fixture(params=["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        with socket.socket(family) as sock:
            if "ffff" in request.param:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind((request.param, 0))
            sock.listen()
            yield sock
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        pytest.skip("this machine has no IPv6")


def own(listener: socket.socket) -> ListeningSocket:
    return next(one for one in listening_sockets() if one.descriptor == listener.fileno())


def test_nobody_is_answered_who_was_not_let_in(listener):
    before = listening_sockets()
    one = own(listener)
    assert one in before
    mine, others = ("::1", []) if one.address == "::1" else ("127.0.0.1", ["127.0.0.2", "127.0.0.9"])
    place = (one.address, one.port)
    assert try_to_connect(place, mine), "everybody comes in at first"
    listener.accept()[0].close()
    own_filter = AddressFilter([one])
    assert not try_to_connect(place, mine)
    assert not own_filter.has_connections()

    own_filter.admit([mine, "127.0.0.9"])
    assert try_to_connect(place, mine)
    accepted, _ = listener.accept()
    with accepted:
        assert own_filter.has_connections(), (
            "a connection that was accepted counts, while nobody should know the socket"
        )
        assert [try_to_connect(place, other) for other in others] == ([False, True] if others else [])
        own_filter.admit(["127.0.0.2", "2001:db8::1"])
        assert not try_to_connect(place, mine)
        assert [try_to_connect(place, other) for other in others] == ([True, False] if others else [])


def test_a_connection_that_nobody_has_accepted_yet_counts(listener):
    one = own(listener)
    with socket.socket(listener.family) as early:
        early.connect((listener.getsockname()[0], one.port))
        assert AddressFilter([one]).has_connections()


def test_a_socket_that_its_owner_closed_is_left_alone():
    first = socket.create_server(("127.0.0.1", 0))
    own_filter = AddressFilter([own(first)])
    number = first.fileno()
    first.close()
    with socket.create_server(("127.0.0.1", 0)) as second:
        assert second.fileno() == number
        own_filter.admit(["127.0.0.9"])
        assert try_to_connect(second.getsockname(), "127.0.0.1")


@pytest.mark.parametrize("version", [4, 6])
def test_ranges_hold_all_addresses_but_the_admitted(version):
    rng = random.Random(version)
    whole = ip_network("0.0.0.0/0" if version == 4 else "::/0")
    bits = whole.max_prefixlen
    assert complement((), version) == {whole}
    for count in (1, 2, 7, 40):
        near = rng.getrandbits(bits - 9) << 9
        places = [
            near + rng.randrange(512) if rng.random() < 0.7 else rng.getrandbits(bits) for _ in range(count)
        ]
        nets = [ip_network((n >> k << k, bits - k)) for n in places for k in [rng.choice([0, 0, 3, 8])]]
        others = complement(nets, version)
        assert (
            sum(net.num_addresses for net in others) + sum(net.num_addresses for net in whole_of(nets))
            == whole.num_addresses
        )
        assert not any(net.overlaps(other) for net in nets for other in others)


def whole_of(nets):
    """The same addresses, none of them twice."""
    return {net for net in nets if not any(net != other and net.subnet_of(other) for other in nets)}


def test_where_the_kernel_has_no_memory_for_all_ranges_adjacent_addresses_are_admitted_too(monkeypatch):
    """A kernel has some 20 KiB for a socket's options, and each range takes a part of it."""
    sign, present = network._require_signature, set()

    def small_kernel(sock, net, key):
        if key and len(present) >= 30:
            raise OSError(errno.ENOMEM, "no room")
        sign(sock, net, key)
        (present.add if key else present.discard)(net)

    monkeypatch.setattr(network, "_require_signature", small_kernel)
    hosts = [f"127.0.{10 * k}.{7 * k + 1}" for k in range(12)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own_filter = AddressFilter([own(listener)])
        own_filter.admit(hosts)
        assert all(any(ip_address(host) in net for net in own_filter.admitted) for host in hosts)
        assert all(20 <= net.prefixlen < 32 for net in own_filter.admitted)
        assert try_to_connect(listener.getsockname(), hosts[5])
        assert not try_to_connect(listener.getsockname(), "127.9.0.1")


def test_a_thousand_hosts_take_no_time():
    hosts = [f"10.{k % 7}.{k // 250}.{k % 250 + 1}" for k in range(1000)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own_filter = AddressFilter([own(listener)])
        own_filter.admit(hosts)
        assert all(any(ip_address(host) in net for net in own_filter.admitted) for host in hosts)
        assert not try_to_connect(listener.getsockname(), "127.0.0.1")


@pytest.mark.skipif(os.geteuid() != 0, reason="these tests run without rights anyway")
def test_it_needs_no_rights():
    """As nobody, without any capability. (A socket filter is refused to him by Linux since 2026.)"""
    program = (
        "import encodings.idna, os, socket\n"
        "from jaxpp_async.transport.network import AddressFilter, listening_sockets\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "found = listening_sockets()\n"
        "os.setgroups([]); os.setresgid(*3 * [65534]); os.setresuid(*3 * [65534])\n"
        "AddressFilter(found).admit(['127.0.0.1'])\n"
        "client = socket.create_connection(listener.getsockname(), 5)\n"
        "probe = socket.socket(); probe.bind(('127.0.0.2', 0)); probe.settimeout(0.2)\n"
        "try:\n    probe.connect(listener.getsockname())\n"
        "except TimeoutError:\n    print('held')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "held\n", done.stderr
