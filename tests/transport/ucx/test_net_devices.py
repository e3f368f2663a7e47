"""Network devices and ports that are not to be had: said before a process starts, and before UCX is asked."""

from __future__ import annotations

import contextlib
import os
import re
import socket

import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import MeshError
from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.transport.ucx import context, net_devices
from jaxpp_async.transport.ucx.context import with_free_port
from jaxpp_async.transport.ucx.net_devices import check_devices
from jaxpp_async.transport.ucx.transport import UCXTransport


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    """A host with `eth0` up, `ib0` down and an InfiniBand card."""
    for name, flags in {"eth0": "0x1003", "ib0": "0x1002", "lo": "0x9"}.items():
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "flags").write_text(f"{flags}\n")
    (tmp_path / "net" / "bonding_masters").touch()
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(net_devices, "_NET", tmp_path / "net")
    monkeypatch.setattr(net_devices, "_RDMA", tmp_path / "infiniband")


@pytest.mark.parametrize(
    "names", [None, "eth0", "eth0,", "mlx5_0:1,eth0", "mlx5_0", "all", "^eth9", "^eth0", "^", "^all"]
)
def test_devices_that_are_there(sysfs, names):
    check_devices(names)


@pytest.mark.parametrize(
    "names, says",
    [
        ("eth9", r"there is no network device eth9 on host .*; it has eth0, lo, mlx5_0, and ib0, down$"),
        ("eth0,eth9,mlx5_1:1", "there is no network device eth9, mlx5_1:1 on host"),
        ("eth0:1", "there is no network device eth0:1 on host"),  # UCX knows it by no such name, as it knows
        ("eth*", r"there is no network device eth\* on host"),  # no patterns
        ("*", r"there is no network device \* on host"),
        ("eth0, lo", "there is no network device  lo on host"),
        ("eth0,^lo", r"there is no network device \^lo on host"),
        (
            "bonding_masters",
            "there is no network device bonding_masters on host .*; it has eth0, lo, mlx5_0, and",
        ),
        ("all,eth0", "'all,eth0', but 'all' stands alone"),
        ("", r"UCX_NET_DEVICES \(interface=\) is empty, with which UCX uses no network"),
        (",", "is empty"),
        ("^eth0,lo,mlx5_0:1", r"\^eth0,lo,mlx5_0:1 leaves no network device on host"),
        ("ib0", r"the network device ib0 is down on host .* \(interface=, or UCX_NET_DEVICES\); it has eth0"),
    ],
)
def test_devices_that_are_not(sysfs, names, says):
    with pytest.raises(MeshError, match=says):
        check_devices(names)


def test_a_device_of_this_machine_is_looked_for_before_anything_starts():
    with pytest.raises(MeshError, match=r"there is no network device eth99 on host .*; it has .*lo"):
        jpp.RemoteMesh(2, interface="eth99")


def test_each_host_looks_for_its_devices_before_it_starts_a_process():
    request = ActorRequest("python", {"UCX_NET_DEVICES": "eth99"}, {})
    with pytest.raises(MeshError, match=f"no network device eth99 on host {re.escape(socket.gethostname())}"):
        request.environment()


# ---------------------------------------------------------------- ports


class UCXXBusyError(Exception):
    """As ucxx has it: the port is taken."""


@pytest.fixture
def three_ports(monkeypatch):
    """Three ports in a row on the loopback device, each with somebody who listens; the range is UCX's."""
    with contextlib.ExitStack() as stack:
        listeners = stack.enter_context(_row_of_listeners(3))
        first = listeners[0].getsockname()[1]
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
        monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{first}-{first + 2}")
        yield listeners


@contextlib.contextmanager
def _row_of_listeners(count):
    for _ in range(100):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            try:
                for k, sock in enumerate(sockets):
                    sock.bind(("127.0.0.1", sockets[0].getsockname()[1] + k if k else 0))
                    sock.listen()
            except (OSError, OverflowError):
                continue
            yield sockets
            return
    pytest.skip("no three free ports in a row")


def given_to_ucx() -> str | None:
    return with_free_port(lambda port: port, os.environ.get("UCX_NET_DEVICES"))


def test_ucx_is_given_a_port_that_is_free(three_ports):
    port = three_ports[1].getsockname()[1]
    three_ports[1].close()
    assert given_to_ucx() == f"{port}-{port}"
    assert with_free_port(lambda port: port, "") is None, "it listens nowhere"


def test_a_port_that_is_taken_meanwhile_is_followed_by_the_next(three_ports):
    for sock in three_ports:
        sock.close()
    tried = []

    def make(port):
        tried.append(port)
        if len(tried) < 3:
            raise UCXXBusyError
        return port

    assert with_free_port(make, "lo") == tried[2]
    assert len(set(tried)) == 3


async def test_a_range_without_a_free_port_is_an_error_at_once_and_ucx_prints_nothing(three_ports, capfd):
    says = r"ports= \d+-\d+ \(UCX_TCP_PORT_RANGE\) has no free port left on host .*; each process there "
    says += "needs one"
    with pytest.raises(MeshError, match=says):
        UCXTransport(0)
    assert capfd.readouterr() == ("", "")


def test_a_port_that_another_process_just_looks_at_is_looked_at_again(three_ports, monkeypatch):
    looks, is_free = [], context._is_free
    monkeypatch.setattr(
        context, "_is_free", lambda *port: looks.append(port) or (len(looks) == 7 or is_free(*port))
    )
    assert re.fullmatch(r"(\d+)-\1", given_to_ucx())
    assert len(looks) == 7


@pytest.mark.parametrize("given", ["{0}", " {0} - {0}", "{0}-{0}x", "+{0}"])
def test_a_range_is_read_as_ucx_reads_it(three_ports, given, monkeypatch):
    port = three_ports[0].getsockname()[1]
    three_ports[0].close()
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", given.format(port))
    assert given_to_ucx() == f"{port}-{port}"


@pytest.mark.parametrize("given", ["70000-70001", "65535-65536", "41005-41004", "41005-0", "70000"])
def test_what_cannot_be_ports_is_an_error(given, monkeypatch):
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", given)
    with pytest.raises(MeshError, match=f"UCX_TCP_PORT_RANGE={given} .* is no range of TCP ports"):
        given_to_ucx()


@pytest.mark.parametrize("excluded, taken", [("lo", True), ("^lo", False)])
def test_only_ports_of_the_devices_that_ucx_uses_are_looked_at(three_ports, excluded, taken, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", excluded)
    with pytest.raises(MeshError, match="ports at rest") if taken else contextlib.nullcontext():
        given_to_ucx()


@pytest.mark.parametrize("given", [None, "0", "0-0", "nonsense"])
def test_without_a_range_ucx_is_left_alone(given, monkeypatch):
    monkeypatch.delenv("UCX_TCP_PORT_RANGE", raising=False)
    if given is not None:
        monkeypatch.setenv("UCX_TCP_PORT_RANGE", given)
    assert given_to_ucx() is None
