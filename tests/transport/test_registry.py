"""The registry of transports (`transport/registry.py`): names, capabilities, a transport that is not of the
package, and the transports of one actor's process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from models import grads_step, mlp

import jaxpp_async as jpp
from jaxpp_async.errors import MeshError, ProtocolError, TransferError
from jaxpp_async.launch.inline import InlineLauncher
from jaxpp_async.launch.local import LocalLauncher
from jaxpp_async.transport.memory import MemoryNetwork, MemoryTransport
from jaxpp_async.transport.network import Network
from jaxpp_async.transport.registry import (
    TRANSPORTS,
    ActorTransports,
    TransportKind,
    kind_of,
    make_inline_transport,
    make_process_transport,
    open_transports,
)

# ---------------------------------------------------------------- a transport of a user's own


class CountingTransport(MemoryTransport):
    """A transport of a user's own: the memory transport, which counts the sends of each peer."""

    num_sends: ClassVar[dict[int, int]] = {}

    def post_send(self, memory, peer, tag, done):
        self.num_sends[self.peer_id] = self.num_sends.get(self.peer_id, 0) + 1
        return super().post_send(memory, peer, tag, done)


def make_counting(peer_id, network, shared):
    return CountingTransport(shared.setdefault("counting", MemoryNetwork()), peer_id)


COUNTING = TransportKind(f"{__name__}:make_counting", within_process=True, device_memory=False)


async def test_a_transport_with_a_line_in_the_registry_carries_the_steps_of_an_inline_mesh(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "counting", COUNTING)
    monkeypatch.setattr(CountingTransport, "num_sends", {})
    model, schedule = mlp(num_stages=2), jpp.Std1F1B(2)
    params, batch = model.init(0), model.batch(1, 4)
    expected = grads_step(model, schedule)(params, batch)
    async with jpp.RemoteMesh(2, launcher="inline", transport="counting") as mesh:
        got = await mesh.fetch(await mesh.distributed(grads_step(model, schedule))(params, batch))
    from_actors = {peer: n for peer, n in CountingTransport.num_sends.items() if peer >= 0}
    assert from_actors.keys() == {0, 1}, "activations go one way, their gradients the other"
    for one, other in zip(_leaves(got), _leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def _leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_launchers_offer_every_transport_of_the_registry_that_fits_them(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "counting", COUNTING)
    monkeypatch.setitem(TRANSPORTS, "pigeon", TransportKind("nowhere:make"))
    assert InlineLauncher().transports == ("memory", "counting"), "the first is the default"
    assert LocalLauncher().transports == ("ucx", "nccl", "pigeon")


async def test_a_mesh_refuses_a_transport_that_does_not_fit_its_launcher(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "pigeon", TransportKind("nowhere:make"))
    with pytest.raises(MeshError, match=r"transport 'pigeon' does not work inside one process.*'memory'"):
        await jpp.RemoteMesh(2, launcher="inline", transport="pigeon").__aenter__()


# ---------------------------------------------------------------- names and capabilities


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (
            make_process_transport,
            "memory",
            'transport "memory" does not leave a process: use it with launcher="inline", or "ucx" here',
        ),
        (make_process_transport, "pigeon", 'unknown transport \'pigeon\': choose "ucx" or "nccl"'),
        (
            lambda name, peer: make_inline_transport(name, peer, {}),
            "ucx",
            'transport \'ucx\' does not work inline: use "memory", or launcher="local"',
        ),
    ],
)
def test_a_transport_of_the_other_side_of_a_process_is_refused_with_those_that_fit(make, name, message):
    with pytest.raises(MeshError) as caught:
        make(name, 0)
    assert str(caught.value) == message


async def test_the_transports_of_one_inline_mesh_reach_each_other_and_no_others():
    one_mesh, other_mesh = {}, {}
    a, b = (make_inline_transport("memory", peer, one_mesh) for peer in (0, 1))
    c = make_inline_transport("memory", 1, other_mesh)
    await a.connect(1, b.address)
    await b.connect(0, a.address)
    received = np.zeros(3, np.uint8)
    receive = b.recv(received, 0, 7)
    await a.send(np.array([1, 2, 3], np.uint8), 1, 7)
    await receive
    assert received.tolist() == [1, 2, 3]
    with pytest.raises(TransferError, match="nobody is at"):
        await c.connect(0, a.address)


def test_only_an_ordered_transport_needs_another_for_host_values():
    """Memory of GPUs that moves in a program's order cannot carry values that have no order."""
    for name, kind in TRANSPORTS.items():
        assert kind.ordered == (kind.host_transport is not None), name
        if kind.host_transport is not None:
            host = TRANSPORTS[kind.host_transport]
            assert not host.ordered
            assert host.within_process == kind.within_process


def test_a_transport_of_a_launchers_own_has_no_line_and_carries_everything():
    kind = kind_of("pigeon")
    assert (kind.ordered, kind.host_transport, kind.environment) == (False, None, None)
    assert kind.device_memory


# ---------------------------------------------------------------- the transports of one actor's process


HERE = Network(())


class RecordedTransport:
    """A transport that records the calls that it gets.

    Args:
        name: in the registry.
        network: on which it listens.
        fails: whether it cannot be aborted or closed.
    """

    epoch = -1

    def __init__(self, name: str = "ucx", network: Network = HERE, *, fails: bool = False):
        self.name, self.network, self.fails = name, network, fails
        self.calls: list[Any] = []

    def admit(self, addresses) -> None:
        self.calls.append(("admit", tuple(addresses)))

    async def connect(self, peer, address) -> None:
        self.calls.append(("connect", peer, address))

    async def abort(self) -> None:
        self.calls.append("abort")
        if self.fails:
            raise TransferError("the transport keeps a buffer")

    async def aclose(self) -> None:
        self.calls.append("aclose")
        if self.fails:
            raise TransferError("the transport keeps a buffer")


def transports_of(programs: Any, host: Any) -> Any:
    return ActorTransports(programs, host)


@pytest.mark.parametrize(
    ("name", "kind", "names"),
    [
        ("ucx", None, ["ucx"]),
        ("memory", None, ["memory"]),
        ("nccl", None, ["nccl", "ucx"]),
        ("pigeon", None, ["pigeon"]),
        ("counting", replace(COUNTING, host_transport="memory", ordered=True), ["counting", "memory"]),
        ("counting", replace(COUNTING, host_transport="memory"), ["counting", "memory"]),
    ],
)
def test_an_actor_opens_the_transports_that_the_registrys_line_names(monkeypatch, name, kind, names):
    if kind is not None:
        monkeypatch.setitem(TRANSPORTS, name, kind)
    made: list[RecordedTransport] = []

    def make(name: str, network: Network) -> Any:
        made.append(RecordedTransport(name, network))
        return made[-1]

    network = Network(("192.0.2.1",))
    transports = open_transports(name, 7, network, make)
    assert [one.name for one in made] == names
    assert (transports.programs, transports.host) == (made[0], made[-1])
    assert {(one.epoch, one.network) for one in made} == {(7, network)}
    assert transports.ordered is (made[0] if kind_of(name).ordered else None)


def test_links_are_given_only_by_an_ordered_transport():
    one: Any = RecordedTransport("nccl")
    assert ActorTransports(one, one, ordered=one).required_ordered is one
    with pytest.raises(ProtocolError, match=r"^links are asked for, but this actor's transport has none$"):
        _ = transports_of(one, one).required_ordered


async def test_peers_are_connected_for_host_values_and_admitted_to_both_transports():
    transports = transports_of(RecordedTransport("nccl"), RecordedTransport())
    transports.admit([b"a", b"b"])
    await transports.connect({1: b"a"})
    assert transports.programs.calls == [("admit", (b"a", b"b"))]
    assert transports.host.calls == [("admit", (b"a", b"b")), ("connect", 1, b"a")]


async def test_one_transport_for_everything_gets_each_call_once():
    one = RecordedTransport()
    transports = transports_of(one, one)
    transports.admit([b"a"])
    await transports.abort()
    await transports.aclose()
    assert one.calls == [("admit", (b"a",)), "abort", "aclose"]


async def test_the_second_transport_is_ended_though_the_first_one_fails():
    transports = transports_of(RecordedTransport("nccl", fails=True), RecordedTransport())
    with pytest.raises(TransferError, match=r"^the transport keeps a buffer$"):
        await transports.abort()
    with pytest.raises(TransferError, match=r"^the transport keeps a buffer$"):
        await transports.aclose()
    assert transports.host.calls == ["abort", "aclose"]
