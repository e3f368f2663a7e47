"""The registry of transports: names, capabilities, and a transport from outside the package."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import jax
import numpy as np
import pytest
from models import grads_step, mlp

import jaxpp_async as jpp
from jaxpp_async.errors import MeshError, ProtocolError
from jaxpp_async.launch.inline import InlineLauncher
from jaxpp_async.launch.local import LocalLauncher
from jaxpp_async.transport.memory import MemoryNetwork, MemoryTransport
from jaxpp_async.transport.network import Network
from jaxpp_async.transport.registry import (
    TRANSPORTS,
    TransportKind,
    kind_of,
    make_inline_transport,
    make_process_transport,
    open_transports,
)


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


def test_a_transport_is_made_for_processes_or_within_one_as_its_line_says(monkeypatch):
    with pytest.raises(MeshError, match=r'"memory" does not leave a process: .* or "ucx" here'):
        make_process_transport("memory", 0)
    with pytest.raises(MeshError, match=r'unknown transport \'pigeon\': choose "ucx" or "nccl"$'):
        make_process_transport("pigeon", 0)
    with pytest.raises(MeshError, match=r'\'ucx\' does not work inline: use "memory", or launcher="local"'):
        make_inline_transport("ucx", 0, {})


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
    with pytest.raises(jpp.errors.TransferError, match="nobody is at"):
        await c.connect(0, a.address)


def test_only_an_ordered_transport_needs_another_for_host_values():
    """A transport of GPU memory in a program's order carries no host values, which have no order."""
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


@pytest.mark.parametrize(
    ("host_transport", "ordered", "made"),
    [(None, False, ["counting"]), ("memory", True, ["counting", "memory"])],
)
async def test_an_actor_opens_the_transports_that_the_line_names(monkeypatch, host_transport, ordered, made):
    kind = replace(COUNTING, host_transport=host_transport, ordered=ordered)
    monkeypatch.setitem(TRANSPORTS, "counting", kind)
    names, network = [], MemoryNetwork()

    def make(name, _):
        names.append(name)
        return MemoryTransport(network, len(names))

    transports = open_transports("counting", 3, Network(()), make)
    assert names == made
    assert (transports.host is transports.programs) == (host_transport is None)
    assert transports.programs.epoch == transports.host.epoch == 3
    if ordered:
        assert transports.required_ordered is transports.programs
    else:
        with pytest.raises(ProtocolError, match="links are asked for"):
            _ = transports.required_ordered
    await transports.aclose()
    assert transports.programs._closed
    assert transports.host._closed
