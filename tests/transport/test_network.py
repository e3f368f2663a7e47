"""Where a mesh listens: nowhere, if all of it is on this machine. And what a process may lack for the data
plane.

Hosts of their own: `integration/test_network_faults.py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from transport_conformance import data, join, tag, transfer, within

import jaxpp_async as jpp
from jaxpp_async.actors import jax_runtime
from jaxpp_async.base.descriptors import check_descriptors, num_descriptors
from jaxpp_async.errors import MeshError, TransferError
from jaxpp_async.transport import network as network_module
from jaxpp_async.transport.base import hosts_of
from jaxpp_async.transport.network import Network, listening_sockets, network_by
from jaxpp_async.transport.ucx import context, net_devices
from jaxpp_async.transport.ucx.context import shared_memory_folder
from jaxpp_async.transport.ucx.net_devices import addresses_of_devices, devices_with, is_used
from jaxpp_async.transport.ucx.transport import UCXTransport

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("UCX tests need the package ucxx", allow_module_level=True)

CACHE = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
LOOPBACK = ("127.0.0.1",)


@pytest.fixture(autouse=True)
def no_settings_of_the_users(monkeypatch):
    for name in ("UCX_NET_DEVICES", "UCX_TCP_PORT_RANGE", "UCX_POSIX_DIR"):
        monkeypatch.delenv(name, raising=False)
    if os.environ.get("UCX_TLS") != "^sysv":  # as a transport that was made before has set it
        monkeypatch.delenv("UCX_TLS", raising=False)


def inet_sockets(pid: int) -> list[tuple[str, str]]:
    """State and own address of every TCP socket of a process that listens, and of every UDP socket."""
    found = psutil.Process(pid).net_connections("inet")
    found = [one for one in found if one.status == "LISTEN" or one.type == socket.SOCK_DGRAM]
    return [(one.status, one.laddr.ip.removeprefix("::ffff:")) for one in found]


def pair(addresses: tuple[str, ...]) -> tuple[UCXTransport, UCXTransport]:
    network = Network(addresses)
    return UCXTransport(0, network=network), UCXTransport(1, network=network)


# ---------------------------------------------------------------- meshes of this machine


async def test_a_mesh_of_this_machine_listens_for_its_control_channel_alone():
    """One unauthenticated message to a data port killed driver and actors, another wrote 16 chosen bytes at a
    chosen address, idle connections used up an actor's descriptors. There is none to send them to."""
    before = inet_sockets(os.getpid())
    async with jpp.RemoteMesh(2, compilation_cache=CACHE) as mesh:
        assert [inet_sockets(actor.pid) for actor in mesh.actors] == [[], []]
        now = inet_sockets(os.getpid())
        for one in before:
            now.remove(one)
        assert now == [("LISTEN", "127.0.0.1")]


async def test_processes_of_one_actor_meet_on_loopback_alone():
    options = {"spmd_mesh": {"data": 2}, "processes_per_actor": 2, "compilation_cache": CACHE}
    async with jpp.RemoteMesh(1, **options) as mesh:
        pids = {child.pid for child in psutil.Process().children(recursive=True)}
        assert len(mesh.actors) == 1
        found = {one for pid in pids for one in inet_sockets(pid)}
        assert found <= {("LISTEN", "127.0.0.1")}


async def test_a_user_who_asks_for_tcp_or_an_interface_gets_it(monkeypatch):
    async with jpp.RemoteMesh(1, interface="lo", compilation_cache=CACHE) as mesh:
        assert inet_sockets(mesh.actors[0].pid) == [("LISTEN", "127.0.0.1")]
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    a, b = UCXTransport(0, network=Network(())), UCXTransport(1, network=Network(()))
    assert {one.address for one in a._listening} == {"127.0.0.1"}
    await join(a, b)
    await transfer(a, b, 1 << 16, 1)
    await within(a.aclose(), b.aclose())


def test_nccl_meets_its_peers_on_the_same_interface(monkeypatch):
    def chosen(platform: str, address: str | None) -> str | None:
        configure: Any = SimpleNamespace(platform=platform, address=address)
        jax_runtime._confine_nccl(configure)
        return os.environ.get("NCCL_SOCKET_IFNAME")

    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert [chosen("cpu", "127.0.0.1"), chosen("cuda", None), chosen("cuda", "192.0.2.77")] == [None] * 3
    assert chosen("cuda", "127.0.0.1") == "=lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    assert chosen("cuda", "127.0.0.1") == "eth"


# ---------------------------------------------------------------- several contexts in one process


async def test_a_process_holds_transports_that_listen_beside_transports_that_do_not():
    before = listening_sockets()
    local = pair(())
    assert listening_sockets() == before
    assert [hosts_of(transport.address) for transport in local] == [(), ()]
    remote = pair(LOOPBACK)
    assert [hosts_of(transport.address) for transport in remote] == [LOOPBACK, LOOPBACK]
    assert {one.address for one in listening_sockets() - before} == {"127.0.0.1"}
    for epoch in (0, 1):
        for both in (local, remote):
            await join(*both)
        for size in (8, 1 << 20):
            await asyncio.gather(transfer(*local, size, 1, epoch), transfer(*remote, size, 2, epoch))
        for both in (local, remote):
            await within(*(transport.abort() for transport in both))
    await within(*(transport.aclose() for transport in remote))
    assert listening_sockets() == before, "closing frees the context, and its sockets"
    await join(*local)
    await transfer(*local, 1 << 20, 3)
    await within(*(transport.aclose() for transport in local))


# ---------------------------------------------------------------- hosts: the interface, and who comes in


def test_a_process_takes_the_interface_by_which_the_others_reach_it(monkeypatch):
    pairs = [
        ("lo", "127.0.0.1"),
        ("eth0", "10.0.0.1"),
        ("eth0", "10.0.0.2"),
        ("ib0", "10.1.0.1"),
        ("x", "169.254.0.1"),
    ]
    monkeypatch.setattr(net_devices, "_interface_addresses", lambda: pairs)
    monkeypatch.setattr(net_devices, "_with_ipv6", lambda: {"lo", "eth1"})
    monkeypatch.setattr(net_devices, "_is_running", lambda name: name != "eth1")
    assert devices_with(()) == ""
    assert devices_with(["10.0.0.2"]) == "^ib0,lo"
    assert devices_with(["10.0.0.1", "10.1.0.1"]) == "^lo"
    assert is_used(devices_with(["10.1.0.1"]), "mlx5_0:1"), "RDMA devices stay"
    assert devices_with(["10.0.0.9"]) is None, "an address behind which this machine is hidden"
    assert addresses_of_devices("^ib0,lo,x") == ["10.0.0.1", "10.0.0.2"]
    assert [network_by(address).addresses for address in (None, "127.0.0.1", "10.0.0.1")] == [
        None,
        (),
        ("10.0.0.1",),
    ]


def own_addresses() -> list[str]:
    return [address for address in addresses_of_devices("^lo") if not address.startswith("127.")]


@pytest.mark.skipif(not own_addresses(), reason="this machine has no network")
async def test_peers_come_in_when_they_are_let_in_and_strangers_never(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    address = own_addresses()[0]
    transports = pair((address,))
    place = next((one.address, one.port) for one in transports[0]._listening)
    assert place[0] == address
    assert [one.address for transport in transports for one in transport._listening] == [address, address]
    with socket.socket() as stranger:  # from this machine's own address: it is the mesh's, later
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.connect(place)
    for transport in transports:
        transport.admit([other.address for other in transports])
    await join(*transports)
    await transfer(*transports, 1 << 20, 1)
    with socket.socket() as stranger:
        stranger.settimeout(0.2)
        stranger.bind(("127.0.0.1", 0))
        with pytest.raises(OSError):
            stranger.connect(place)
    await within(*(transport.aclose() for transport in transports))


@pytest.mark.skipif(not own_addresses(), reason="this machine has no network")
async def test_a_kernel_that_shuts_no_sockets_is_said(monkeypatch, caplog):
    def refuse(*_):
        raise OSError(92, "Protocol not available")

    monkeypatch.setattr(network_module, "_require_signature", refuse)
    with caplog.at_level(logging.WARNING, "jaxpp_async"):
        transport = UCXTransport(0, network=Network((own_addresses()[0],)))
    assert "does not let this process refuse strangers' connections (" in caplog.text
    assert f"keep them from {own_addresses()[0]}:" in caplog.text
    transport.admit([])
    await transport.aclose()


@pytest.mark.skipif(not own_addresses(), reason="this machine has no network")
async def test_a_stranger_who_connects_before_the_filter_is_there_gets_nothing(monkeypatch):
    """The worker is thrown away with his connection before UCX has read a byte of it."""
    seen = []
    monkeypatch.setattr(
        network_module.AddressFilter, "has_connections", lambda self: seen.append(1) or len(seen) < 3
    )
    transport = UCXTransport(0, network=Network((own_addresses()[0],)))
    assert len(seen) == 3
    await transport.aclose()
    seen.clear()
    monkeypatch.setattr(network_module.AddressFilter, "has_connections", lambda self: True)
    before = listening_sockets()
    with pytest.raises(MeshError, match="strangers connect to the data plane"):
        UCXTransport(0, network=Network((own_addresses()[0],)))
    assert listening_sockets() == before


async def test_an_address_of_nobody_is_said_and_listens_everywhere(caplog):
    transport = UCXTransport(0, network=Network(("192.0.2.77",)))
    assert (
        "no network interface here has the address 192.0.2.77, by which the others reach this" in caplog.text
    )
    await transport.aclose()


# ---------------------------------------------------------------- descriptors


@pytest.fixture
def few_descriptors():
    """A limit of this process's, this much above what it uses."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(left: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors() + left, most[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_descriptors_are_counted(few_descriptors):
    few_descriptors(20)
    check_descriptors(20, "this")
    says = r"^this takes about 21 file descriptors, and this process on host \S+ has 20 left: "
    says += r"it uses \d+ of \d+; raise"
    with pytest.raises(MeshError, match=says + r".*`ulimit -n 1024`"):
        check_descriptors(21, "this")


async def test_a_driver_with_too_few_descriptors_starts_nothing(few_descriptors):
    few_descriptors(30)
    with pytest.raises(
        MeshError, match="a mesh of 2 processes takes about 40 file descriptors, and this process on"
    ):
        await jpp.RemoteMesh(2, compilation_cache=CACHE).__aenter__()


@pytest.mark.parametrize("left", [10, 14, 18])
async def test_ucx_is_not_asked_where_there_are_too_few(few_descriptors, left, capfd):
    few_descriptors(left)
    with pytest.raises(
        MeshError, match=r"the data plane \(UCX\) takes about 24 file descriptors, and this process"
    ):
        UCXTransport(0, network=Network(()))
    assert capfd.readouterr() == ("", "")


async def test_an_actor_with_too_few_descriptors_says_so(tmp_path):
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nulimit -n 30\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    says = (
        r"actor 0 .*: the data plane \(UCX\) takes about 24 file descriptors, .* it uses \d+ of 30; raise the"
    )
    with pytest.raises(MeshError, match=says):
        await jpp.RemoteMesh(1, python=str(wrapper), compilation_cache=CACHE).__aenter__()


async def test_what_ucx_itself_says_comes_with_the_limits(monkeypatch):
    monkeypatch.setattr(UCXTransport, "admit", lambda *_: None)
    a, b = UCXTransport(0, network=Network(())), UCXTransport(1, network=Network(LOOPBACK))
    monkeypatch.setattr(context, "num_descriptors", lambda: 7)

    def refuse(*_):
        raise a._ucxx.UCXError("Input/output error")

    monkeypatch.setattr(a, "_worker", type("Worker", (), {"create_endpoint_from_worker_address": refuse})())
    with pytest.raises(
        TransferError, match=r"Input/output error \(\d+ of \d+ descriptors in use; shared memory: /"
    ):
        await a.connect(1, b.address)
    monkeypatch.undo()
    await within(a.aclose(), b.aclose())


# ---------------------------------------------------------------- shared memory


def test_a_folder_that_is_not_fit_is_not_taken(monkeypatch, tmp_path):
    assert shared_memory_folder() == ("/dev/shm", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "not there"))
    monkeypatch.setattr(context, "SHARED_MEMORY", "/proc")
    folder, why = shared_memory_folder()
    assert folder is not None
    assert os.path.isdir(folder)
    assert why.startswith("/proc ")
    monkeypatch.setattr(context, "_unfit", lambda folder: f"{folder} is read-only")
    assert shared_memory_folder() == (None, "/proc is read-only")


async def test_without_dev_shm_files_elsewhere_are_shared(monkeypatch, tmp_path, caplog):
    unfit = context._unfit
    monkeypatch.setattr(context, "_unfit", lambda f: "/dev/shm is read-only" if f == "/dev/shm" else unfit(f))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    a, b = UCXTransport(0, network=Network(())), UCXTransport(1, network=Network(()))
    says = f"no shared memory for the data plane: /dev/shm is read-only; it uses files in {tmp_path} instead"
    assert says in caplog.messages
    assert [*tmp_path.iterdir()] == [], "their names are gone before anybody else could open them"
    await join(a, b)
    received = np.zeros(100_000, np.uint8)
    await within(a.send(data(100_000, 1), 1, tag(1)), b.recv(received, 0, tag(1)))
    assert (received == data(100_000, 1)).all()
    await within(a.aclose(), b.aclose())


async def test_where_nothing_can_be_shared_a_local_mesh_says_what_to_do(monkeypatch):
    monkeypatch.setattr(context, "_unfit", lambda folder: f"{folder} has 4 KiB left, and UCX wants 16 MiB")
    says = r"exchange data in shared memory, and there is none to be had: /dev/shm has 4 KiB left"
    says += ".*interface='lo'"
    with pytest.raises(MeshError, match=says):
        UCXTransport(0, network=Network(()))
    a = UCXTransport(0, network=Network(LOOPBACK))
    await a.aclose()


def can_mount() -> bool:
    try:
        return not subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
    except OSError:
        return False


@pytest.mark.skipif(not can_mount(), reason="only root can mount")
def test_a_mesh_runs_where_dev_shm_is_read_only():
    program = (
        "import asyncio, numpy as np, jax, jaxpp_async as jpp\n"
        "async def main():\n"
        f"    async with jpp.RemoteMesh(2, compilation_cache={CACHE!r}) as mesh:\n"
        "        print('runs', len(mesh.actors))\n"
        "asyncio.run(main())\n"
    )
    shell = 'mount -t tmpfs -o ro none /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", shell, "sh", sys.executable, "-c", program],
        capture_output=True, text=True, timeout=100, check=False, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert "runs 2" in done.stdout, done.stderr
    assert "; it uses files in " in done.stderr
