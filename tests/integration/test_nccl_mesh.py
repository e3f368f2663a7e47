"""Whole meshes whose programs transfer over NCCL, on the library that stands in for it: steps, failures,
restarts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fake_nccl import FakeNccl
from models import grads_step, mlp
from waiting import until

import jaxpp_async as jpp
from jaxpp_async.controller.deploy import LinkSetup, links_of
from jaxpp_async.errors import ActorDiedError, ActorError, MeshError, ProtocolError, TransferError
from jaxpp_async.launch import LaunchSpec, LocalLauncher
from jaxpp_async.launch.inline import InlineLauncher
from jaxpp_async.layout.array_parts import Scattering
from jaxpp_async.mesh import RemoteMesh
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Recv, Send
from jaxpp_async.protocol.messages import LinksOffered
from jaxpp_async.transport.memory import MemoryNetwork, MemoryTransport
from jaxpp_async.transport.nccl.library import NcclFailure
from jaxpp_async.transport.nccl.order import NcclLink
from jaxpp_async.transport.nccl.transport import NcclTransport
from tests.transport.nccl.test_transport import reply_handlers


class Nccl(InlineLauncher):
    """Actors inside this process: programs transfer over the library that stands in for NCCL, the rest over
    memory.

    Attributes:
        library: what all actors share.
        made: every transport of programs, in the order they were made, with its actor.
    """

    transports = ("memory", "nccl")

    def __init__(self, **library):
        super().__init__(make_transport=self._make)
        self.library, self.made = FakeNccl(**library), []
        self._memory = MemoryNetwork()
        self.host_kinds = set()

    def _make(self, kind, peer_id):
        if kind != "nccl":
            self.host_kinds.add(kind)
            return MemoryTransport(self._memory, peer_id)
        transport = NcclTransport(peer_id, self.library)
        self.made.append(transport)
        return transport


@pytest.fixture
def launcher():
    launcher = Nccl(busy_polls=1)
    yield launcher
    assert launcher.library.violations == []
    assert not reply_handlers(), "threads of communicators are left"
    assert launcher.library.num_pending == 0


MODEL = mlp(num_stages=4)
SCHEDULES = [jpp.Std1F1B(4), jpp.Interleaved1F1B(4), jpp.ZeroBubbleV(4)]


def _values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _check(got, expected):
    for one, other in zip(_values(got), _values(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


async def test_steps_are_those_of_plain_jax_under_every_schedule(launcher):
    params, batch = MODEL.init(0), MODEL.batch(1, 8)
    expected = jax.jit(grads_step(MODEL, SCHEDULES[0]))(params, batch)
    async with RemoteMesh(2, launcher=launcher, transport="nccl") as mesh:
        told = mesh._running()._actor_group.hardware.values()
        assert {each.nccl for each in told} == {launcher.library.version}, (
            "to be compared before anything is compiled"
        )
        step = mesh.distributed(grads_step(MODEL, SCHEDULES[0]))
        for schedule in SCHEDULES:
            scheduled = step.with_schedule(schedule)
            for _ in range(2):
                before = launcher.library.num_messages
                outputs = await mesh.run(scheduled, params, batch)
                _check(await mesh.fetch(outputs), expected)
                assert launcher.library.num_messages > before
    assert launcher.library.num_joined == 4, "two directions, two ends; made once for all schedules"
    assert launcher.library.num_aborted == 4
    assert launcher.host_kinds == {"ucx"}, "host values take another plane"


async def test_each_device_has_links_of_its_own(launcher):
    model = mlp(num_stages=2, width=8)
    params, batch = model.init(0), model.batch(1, 4)
    expected = jax.jit(grads_step(model, jpp.Std1F1B(2)))(params, batch)
    async with RemoteMesh(2, launcher=launcher, transport="nccl", spmd_mesh={"data": 2}) as mesh:
        batch_spec = jax.tree.map(lambda leaf: jax.P(None, "data"), batch)
        step = mesh.distributed(grads_step(model, jpp.Std1F1B(2)), in_shardings=(None, batch_spec))
        _check(await mesh.fetch(await mesh.run(step, params, batch)), expected)
    assert launcher.library.num_joined == 8


async def test_a_death_while_receives_pend_leaves_nobody_hanging(launcher):
    library = launcher.library
    async with RemoteMesh(3, launcher=launcher, transport="nccl") as mesh:
        step = mesh.distributed(grads_step(MODEL, jpp.Std1F1B(4)))
        params, batch = MODEL.init(0), MODEL.batch(1, 8)
        await mesh.run(step, params, batch)
        library.stalled = True
        running = await mesh.submit(step, params, batch)
        await until(lambda: library.num_pending >= 2)
        mesh._running()._actor_group.handles[1].kill()
        with pytest.raises(ActorDiedError):
            await running
        await until(lambda: library.num_pending == 0)
    assert library.num_aborted == library.num_joined


async def _train(mesh, before):
    step = mesh.distributed(grads_step(MODEL, jpp.Std1F1B(4)), donate_argnums=0)
    params, found = MODEL.init(0), []
    for i in range(6):
        await before(i)
        async with asyncio.timeout(30):
            params, _, losses = await mesh.run(step, params, MODEL.batch(i, 8))
            found.append(await losses)
    return [*found, *jax.tree.leaves(await mesh.fetch(params))]


async def test_restarts_make_every_link_anew(launcher):
    async def nothing(i):
        pass

    async def kill(i):
        if i in (1, 3, 4):
            asyncio.get_running_loop().call_later(0.002 * i, mesh._running()._actor_group.handles[i % 2].kill)

    async with RemoteMesh(2, launcher="inline") as mesh:
        expected = await _train(mesh, nothing)
    async with RemoteMesh(2, launcher=launcher, transport="nccl", max_restarts=10, backup_every=2) as mesh:
        found = await _train(mesh, kill)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert launcher.library.num_joined >= 12, "four at first, four after each restart"
    assert len(launcher.library.made) * 2 >= launcher.library.num_joined


async def test_a_communicator_that_fails_is_a_failed_transfer(launcher, monkeypatch):
    monkeypatch.setattr("jaxpp_async.transport.nccl.link_end._CHECK_S", 0.01)
    async with RemoteMesh(2, launcher=launcher, transport="nccl") as mesh:
        step = mesh.distributed(grads_step(MODEL, jpp.Std1F1B(4)))
        params, batch = MODEL.init(0), MODEL.batch(1, 8)
        await mesh.run(step, params, batch)
        launcher.library.stalled = True
        running = await mesh.submit(step, params, batch)
        await until(lambda: launcher.library.num_pending > 0)
        for made in launcher.library.made.values():
            for channel in made.channels.values():
                channel.error = "ncclRemoteError (injected)"
        with pytest.raises(ActorError, match="ncclRemoteError"):
            await running


async def _unlinked(launcher, said, caplog):
    """A mesh whose links cannot be made says so, once, naming both ends."""
    async with RemoteMesh(2, launcher=launcher, transport="nccl") as mesh:
        step = mesh.distributed(grads_step(MODEL, jpp.Std1F1B(4)))
        async with asyncio.timeout(30):
            named = rf"communicator from actor \d to actor \d, device 0 could not be made: {said}"
            with pytest.raises(TransferError, match=named):
                await mesh.run(step, MODEL.init(0), MODEL.batch(1, 8))
    assert not [record for record in caplog.records if record.levelname == "ERROR"], (
        "what is raised is not logged"
    )


@pytest.mark.parametrize("error", [NcclFailure, AttributeError], ids=["NCCL refuses", "a defect"])
async def test_links_that_cannot_be_made_fail_the_mesh_before_a_step(launcher, monkeypatch, caplog, error):
    def refuse(unique_id, rank, device):
        raise error("InvalidUsage (injected)")

    monkeypatch.setattr(launcher.library, "join", refuse)
    await _unlinked(launcher, ".*InvalidUsage", caplog)


async def test_a_link_to_which_nobody_comes_fails_the_mesh_before_a_step(launcher, monkeypatch, caplog):
    join = launcher.library.join

    def alone(unique_id, rank, device):
        channel = join(unique_id, rank, device)
        channel.is_ready = lambda: False
        return channel

    monkeypatch.setattr(launcher.library, "join", alone)
    monkeypatch.setitem(NcclTransport.join.__kwdefaults__, "timeout_s", 0.01)
    await _unlinked(launcher, r"actor \d did not come within 0.01 s", caplog)


class _Asked:
    """An actor group whose processes offer and join at once, and remember what they were asked together."""

    transport_kind, epoch, scattering = "nccl", 0, Scattering((), 1)

    def __init__(self):
        self.together = []

    async def wait_open(self):
        """No restart is under way."""

    async def call_each(self, requests, what):
        if what == "offer links":
            return {p: LinksOffered(b"", (b"",) * r.num_ids) for p, r in requests.items()}
        self.together.append({process: request.links for process, request in requests.items()})
        return {}


async def test_nobody_is_told_to_join_a_link_while_its_peer_makes_others():
    """A star: its centre has a link with each leaf, in both directions, and makes one after the other. The
    deadline of a leaf's link must not run meanwhile."""
    leaves = range(1, 9)
    sends = [Send(0, leaf, leaf) for leaf in leaves]
    parts = {0: _part(0, *sends, *(Recv(1, leaf, 10 + leaf) for leaf in leaves))}
    parts |= {leaf: _part(leaf, Recv(0, 0, leaf), Send(1, 0, 10 + leaf)) for leaf in leaves}
    actor_group = _Asked()
    linking = LinkSetup(actor_group, actor_group, SimpleNamespace(parts=lambda program_id: parts))
    await linking.link(0)
    for asked in actor_group.together:
        assert all(len(links) == 1 for links in asked.values())
        ends = [NcclLink(k.sender, k.receiver, k.from_device, k.to_device) for (k,) in asked.values()]
        assert sorted(ends) == sorted(2 * sorted(set(ends))), "both ends at once"
    assert len(actor_group.together) == 2 * len(leaves)
    await linking.link(0)
    assert len(actor_group.together) == 2 * len(leaves), "made once"


async def test_a_step_without_its_links_fails_and_hangs_nobody(launcher, monkeypatch):
    async def link(self, program_id):
        """Forgets it (injected)."""

    monkeypatch.setattr(LinkSetup, "link", link)
    async with RemoteMesh(2, launcher=launcher, transport="nccl") as mesh:
        step = mesh.distributed(grads_step(MODEL, jpp.Std1F1B(4)))
        with pytest.raises(ActorError, match=r"link to peer \d: not connected"):
            await mesh.run(step, MODEL.init(0), MODEL.batch(1, 8))


async def test_a_death_while_links_are_made_is_mended(launcher):
    """The survivor is in the middle of joining; its half is given up, and the load ends as if nothing had
    been."""
    library, join = launcher.library, launcher.library.join
    held = []

    def hold(unique_id, rank, device):
        if rank == 1 and not held:
            held.append(unique_id)
            raise NcclFailure("this rank dies (injected)")
        return join(unique_id, rank, device)

    library.join = hold
    params, batch = MODEL.init(0), MODEL.batch(1, 8)
    async with RemoteMesh(2, launcher=launcher, transport="nccl", max_restarts=3) as mesh:
        step = mesh.distributed(grads_step(MODEL, jpp.Std1F1B(4)))
        running = asyncio.ensure_future(mesh.run(step, params, batch))
        await until(lambda: bool(held))
        mesh._running()._actor_group.handles[1].kill()
        async with asyncio.timeout(30):
            outputs = await running
        _check(await mesh.fetch(outputs), jax.jit(grads_step(MODEL, jpp.Std1F1B(4)))(params, batch))


# ---------------------------------------------------------------- what is asked for and cannot be


def test_actors_without_a_gpu_are_an_error_before_anything_starts():
    with pytest.raises(
        MeshError, match=r"actors 0 to 2 have none: their platform is 'cpu'; .*platform='cuda'"
    ):
        RemoteMesh(3, transport="nccl")
    with pytest.raises(MeshError, match=r"'nccl' does not work inside one process"):
        RemoteMesh(2, transport="nccl", launcher="inline")


def test_actors_with_gpus_get_the_environment_that_waiting_kernels_need(monkeypatch):
    options = {"spmd_mesh": {"data": 2}, "processes_per_actor": 2}
    mesh = RemoteMesh(2, transport="nccl", platform="cuda", env={"CUDA_MODULE_LOADING": "LAZY"}, **options)
    config = mesh._options.actors
    assert config.env == {"CUDA_MODULE_LOADING": "LAZY"}
    assert config.defaults == {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    spec = LaunchSpec(0, 2, 0, b"", ("127.0.0.1", 1), env=config.env, defaults=config.defaults)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")  # what its host says counts more than a default
    request = LocalLauncher()._request(spec)
    assert [request.environment()[name] for name in config.defaults] == ["16", "LAZY"]


AVAL, OTHER, SPLIT = Aval((4,), "float32"), Aval((6,), "float32"), Aval((4,), "float32", ("data",))


def _part(actor, *instructions, avals=(AVAL, AVAL)):
    return ActorProgram(actor, instructions, avals)


@pytest.mark.parametrize(
    ("parts", "links"),
    [
        ([_part(0, Send(0, 1, 5)), _part(1, Recv(0, 0, 5))], [NcclLink(0, 1)]),
        ([_part(0), _part(1)], []),
        (
            [_part(0, Send(0, 1, 5), avals=(SPLIT,)), _part(1, Recv(0, 0, 5), avals=(SPLIT,))],
            [NcclLink(0, 1), NcclLink(0, 1, 1, 1)],
        ),
        (
            [_part(1, Send(0, 0, 0), Recv(1, 0, 1)), _part(0, Recv(0, 1, 0), Send(1, 1, 1))],
            [NcclLink(0, 1), NcclLink(1, 0)],
        ),
    ],
)
def test_the_links_of_a_program(parts, links):
    assert links_of({part.actor: part for part in parts}, Scattering((("data", 2),), 1)) == links


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([_part(0, Send(0, 1, 5)), _part(1)], "sends tag 5.*receives nothing"),
        ([_part(0), _part(1, Recv(0, 0, 5))], "sends nothing.*receives tag 5"),
        (
            [_part(0, Send(0, 1, 5)), _part(1, Recv(0, 0, 5), avals=(OTHER,))],
            "transfer 0 from actor 0 to actor 1",
        ),
        (
            [_part(0, Send(0, 1, 5), Send(1, 1, 6)), _part(1, Recv(0, 0, 6), Recv(1, 0, 5))],
            "transfer 0 .*sends tag 5.*receives tag 6",
        ),
    ],
)
def test_programs_that_disagree_are_refused_when_they_are_loaded(parts, said):
    with pytest.raises(ProtocolError, match=said):
        links_of({part.actor: part for part in parts}, Scattering((("data", 2),), 1))
