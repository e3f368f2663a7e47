"""Direct tests of an actor's two ways to its peers, and of transports by their names."""

from __future__ import annotations

import pytest

from jaxpp_async.errors import MeshError, ProtocolError, TransferError
from jaxpp_async.transport.network import Network
from jaxpp_async.transport.registry import (
    HOST_PLANE,
    ActorTransports,
    host_kind,
    is_ordered,
    make_process_transport,
    open_planes,
)

HERE = Network(())


class End:
    """One end of a plane that notes what it is asked for."""

    epoch = -1

    def __init__(self, kind: str = "ucx", network: Network = HERE, *, fails: bool = False):
        self.kind, self.network, self.fails, self.log = kind, network, fails, []

    def admit(self, addresses) -> None:
        self.log.append(("admit", tuple(addresses)))

    async def connect(self, peer, address) -> None:
        self.log.append(("connect", peer, address))

    async def abort(self) -> None:
        self.log.append("abort")
        if self.fails:
            raise TransferError("it holds on")

    async def aclose(self) -> None:
        self.log.append("aclose")
        if self.fails:
            raise TransferError("it holds on")


@pytest.mark.parametrize(
    ("kind", "host", "ordered"), [("nccl", "ucx", True), ("ucx", "ucx", False), ("memory", "memory", False)]
)
def test_host_values_take_the_programs_plane_unless_that_has_an_order(kind, host, ordered):
    assert (host_kind(kind), is_ordered(kind), HOST_PLANE) == (host, ordered, "ucx")
    opened = open_planes(kind, 7, HERE, End)
    assert (opened.programs.kind, opened.host.kind) == (kind, host)
    assert (opened.host is opened.programs) is not ordered
    assert {opened.programs.epoch, opened.host.epoch} == {7}
    assert opened.programs.network is opened.host.network is HERE


async def test_peers_are_connected_for_host_values_and_admitted_on_both_planes():
    transports = ActorTransports(End("nccl"), End())
    transports.admit([b"a", b"b"])
    await transports.connect({1: b"a"})
    assert transports.programs.log == [("admit", (b"a", b"b"))]
    assert transports.host.log == [("admit", (b"a", b"b")), ("connect", 1, b"a")]


async def test_one_plane_for_both_is_asked_once():
    end = End()
    transports = ActorTransports(end, end)
    transports.admit([b"a"])
    await transports.abort()
    await transports.aclose()
    assert end.log == [("admit", (b"a",)), "abort", "aclose"]


async def test_the_second_plane_is_ended_though_the_first_one_fails():
    transports = ActorTransports(End("nccl", fails=True), End())
    with pytest.raises(TransferError, match=r"^it holds on$"):
        await transports.abort()
    with pytest.raises(TransferError, match=r"^it holds on$"):
        await transports.aclose()
    assert transports.host.log == ["abort", "aclose"]


def test_links_are_asked_for_only_where_there_are_some():
    transports = ActorTransports(End(), End())
    assert transports.ordered is None
    with pytest.raises(ProtocolError, match=r"^links are asked for, but this actor's transport has none$"):
        _ = transports.with_links


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "memory",
            'transport "memory" does not leave a process: use it with launcher="inline", or "ucx" here',
        ),
        ("tcp", 'unknown transport \'tcp\': choose "ucx" or "nccl"'),
    ],
)
def test_a_transport_that_joins_no_processes_is_refused_with_those_that_do(kind, says):
    with pytest.raises(MeshError) as caught:
        make_process_transport(kind, 0)
    assert str(caught.value) == says
