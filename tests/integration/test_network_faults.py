"""Actors on hosts of their own (network namespaces): links that are cut or slow, firewalls, addresses.
`make test-net`.

After each: no process is left on the hosts, nothing here, and the driver's next mesh works.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import namespaces
import numpy as np
import psutil
import pytest
from fake_actor import scripted, start_fakes
from jax.sharding import PartitionSpec as P
from namespaces import Host, Network
from resources import nothing_left

import jaxpp_async as jpp
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import (
    ActorUnresponsiveError,
    LaunchError,
    MeshClosedError,
    MeshError,
    RestartBudgetExceeded,
    TransferError,
)
from jaxpp_async.launch.hosts import Settings, parse_hosts
from jaxpp_async.launch.ssh import ssh_launcher
from jaxpp_async.testing import assert_close
from tests.launch.test_local import HERE

REASON = namespaces.skip_reason()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.filterwarnings("error")]

CACHE: str = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
PORTS = (47000, 47100)
WIDTH = 128


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jpp.pipeline_yield(jnp.tanh(x @ params[0])) @ params[1])


def train_step(params: Any, batch: Any) -> Any:
    def grads(mb: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(params, mb)
        return grad, value

    grad, losses = jpp.accumulate_grads(grads, jpp.Std1F1B(2))(batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad), losses


def arguments(rows: int = 512, microbatches: int = 4) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(WIDTH, n)).astype(np.float32) / 16 for n in (WIDTH, 4)]
    return params, rng.normal(size=(microbatches, rows, WIDTH)).astype(np.float32)


# ---------------------------------------------------------------- hosts and meshes


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with namespaces.network(tmp_path_factory.mktemp("net"), 3) as made:
        yield made


@pytest.fixture(autouse=True)
async def hosts_are_left_clean(
    net: Network, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> AsyncIterator[None]:
    """Whole links for each test; afterwards nothing is on the hosts that was not there before."""
    net.heal()
    monkeypatch.setenv("UCX_TLS", "tcp")  # all hosts share this machine's memory, which UCX would find out
    monkeypatch.setenv("UCX_NET_DEVICES", namespaces.INTERFACE["data"])
    before = {host.name: host.pids() for host in net.hosts}
    yield
    net.heal()
    deadline = time.monotonic() + 5
    for host in net.hosts:
        while left := host.pids() - before[host.name]:
            assert time.monotonic() < deadline, [command(pid) for pid in left]
            await asyncio.sleep(0.05)


def command(pid: int) -> str:
    """The command line of a process; nothing, if it has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def control_addresses(hosts: Sequence[Host]) -> list[str]:
    return [host.address["control"] for host in hosts]


def new_mesh(net: Network, hosts: Sequence[Host], **options: Any) -> jpp.RemoteMesh:
    """An actor a host, unless `num_actors=` and `at=`, the addresses, say otherwise."""
    return jpp.RemoteMesh(
        options.pop("num_actors", len(hosts)),
        hosts=options.pop("at", None) or control_addresses(hosts),
        ssh_options=net.ssh_options,
        interface=namespaces.INTERFACE["data"],
        ports=PORTS,
        compilation_cache=CACHE,
        **{"env": {"UCX_TLS": "tcp"}, **options},
    )


@pytest.fixture(scope="module")
async def shared(net: Network) -> AsyncIterator[tuple[jpp.RemoteMesh, Any, Any]]:
    """A mesh on hosts 0 and 1, its step, and what plain JAX computes. Tests that break something break it on
    host 2."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("UCX_TLS", "tcp")
        monkeypatch.setenv("UCX_NET_DEVICES", namespaces.INTERFACE["data"])
        mesh = await new_mesh(net, net.hosts[:2]).__aenter__()
    try:
        yield mesh, mesh.distributed(train_step), jax.jit(train_step)(*arguments())
    finally:
        await mesh.aclose()


@contextlib.asynccontextmanager
async def fakes(
    net: Network, hosts: Sequence[str], control_address: str | None = None, **options: Any
) -> AsyncIterator[Controller]:
    """Actors that need no JAX and no data plane, one at each of these addresses."""
    launcher = ssh_launcher(
        parse_hosts(list(hosts)),
        ssh_options=net.ssh_options,
        actor="fake_actor:FakeActor",
        settings=Settings(env={"PYTHONPATH": str(HERE)}),
        control_address=control_address,
    )
    await launcher.prepare()
    controller = await start_fakes(len(launcher.hosts), launcher, **options)
    try:
        yield controller
    finally:
        await controller.aclose()


async def refused(net: Network, hosts: Sequence[str], **options: Any) -> None:
    """A launch that fails, as the caller expects."""
    async with fakes(net, hosts, **options):
        pass


async def hanging_step(controller: Controller) -> Any:
    program, _ = await controller.load(LoadableProgram(scripted("hang", len(controller.actors))))
    return controller.start_step(SubmittedStep(program), {}, {})


# ---------------------------------------------------------------- addresses


async def test_two_hosts_train_as_plain_jax_does(shared):
    mesh, step, expected = shared
    assert [actor.host for actor in mesh.actors]
    assert_close(await mesh.fetch(await mesh.run(step, *arguments())), expected)


async def test_actors_that_lie_on_two_hosts_each(net):
    """Of each actor one process on either host: its collectives and its transfers go over the network."""
    # Each host by both of its addresses, a slot each time.
    hosts = [host.address[link] for link in ("control", "data") for host in net.hosts[:2]]
    expected = jax.jit(train_step)(*arguments())
    async with new_mesh(
        net,
        net.hosts[:2],
        num_actors=2,
        at=hosts,
        control_address="0.0.0.0",
        spmd_mesh={"data": 2},
        processes_per_actor=2,
        max_restarts=1,
    ) as mesh:
        for actor in mesh.actors:
            assert all(p.pid in host.pids() for p, host in zip(actor.processes, net.hosts[:2], strict=True))
        step = mesh.distributed(train_step, in_shardings=(None, P(None, "data")))
        for form in (step, step.with_schedule(jpp.GPipe(2))):
            assert_close(await mesh.fetch(await mesh.run(form, *arguments())), expected, rtol=2e-5)
        undisturbed = await bits_of_losses(mesh, step, lambda k: None)
        assert await bits_of_losses(mesh, step, lambda k: k == 2 and kill(net, 1, mesh)) == undisturbed
        assert [e.actor async for e in until_restarted(mesh)] == [1]
        for actor in mesh.actors:
            assert all(p.pid in host.pids() for p, host in zip(actor.processes, net.hosts[:2], strict=True))
        victim = mesh.actors[1].processes[1]
        with pytest.raises(
            RestartBudgetExceeded, match=rf"actor 1 \(process 1 of 2: host .*pid {victim.pid}\)"
        ):
            kill(net, 1, mesh)
            for _ in range(100):
                await mesh.run(step, *arguments())


def kill(net: Network, host: int, mesh: jpp.RemoteMesh) -> None:
    """The process of actor 1 on one of the hosts."""
    net.hosts[host].run("kill", "-KILL", str(mesh.actors[1].processes[host].pid))


async def until_restarted(mesh: jpp.RemoteMesh) -> AsyncIterator[Any]:
    """What happened so far, the `restarted` of it; waits for the first."""
    async for event in mesh.events():
        if event.kind == "restarted":
            yield event
            return


async def bits_of_losses(mesh: jpp.RemoteMesh, step: Any, disturb: Callable[[int], object]) -> list[bytes]:
    """Of five steps from the beginning; `disturb` is called before each."""
    params, batch = arguments()
    bits = []
    for k in range(5):
        disturb(k)
        params, losses = await mesh.run(step, params, batch)
        bits.append((await losses).tobytes())
    return bits


async def test_everything_listens_where_the_documentation_says(net, shared):
    """Docs/launching.md: control on the address that reaches the hosts, data on `interface=` and `ports=`."""
    mesh, step, _ = shared
    await mesh.run(step, *arguments())
    for host, actor in zip(net.hosts, mesh.actors, strict=False):
        (listening,) = host.listening()[actor.pid]
        address, _, port = listening.rpartition(":")
        assert address == host.address["data"] and PORTS[0] <= int(port) <= PORTS[1]
    here = {address.rpartition(":")[0] for address in namespaces.listening()[os.getpid()]}
    # its control listener, and its own end of the data plane
    assert here == {net.address("control"), net.address("data")}
    established = "\n".join(host.run("ss", "-Htn", "state", "established") for host in net.hosts)
    from_to = {
        (local.rpartition(":")[0], remote.rpartition(":")[0]) for local, remote in _sockets(established)
    }
    for a, b in from_to:
        assert a.rpartition(".")[0] == b.rpartition(".")[0], f"{a} talks to {b}"


@contextlib.asynccontextmanager
async def a_plain_mesh(net: Network, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[jpp.RemoteMesh]:
    """On hosts 0 and 1, with nothing said of interfaces and ports."""
    monkeypatch.delenv("UCX_NET_DEVICES")
    at = control_addresses(net.hosts[:2])
    async with jpp.RemoteMesh(
        2,
        hosts=at,
        ssh_options=net.ssh_options,
        compilation_cache=CACHE,
        env={"UCX_TLS": "tcp"},
        max_restarts=1,
    ) as mesh:
        yield mesh


def data_sockets(net: Network, mesh: jpp.RemoteMesh, earlier: set[str]) -> tuple[set[str], str]:
    """Where actors and the driver listen for data; and the driver's control listener.

    Args:
        earlier: sockets of the driver's other meshes.
    """
    controller: Any = mesh._controller
    listener = ":".join(map(str, controller._actor_group._address))
    found = {
        a for host, actor in zip(net.hosts, mesh.actors, strict=False) for a in host.listening()[actor.pid]
    }
    here = namespaces.listening()[os.getpid()] - earlier
    assert listener in here
    return found | here - {listener}, listener


CONNECT = """
import json, select, socket, sys, time
begun, answered = [], set()
for host, port in json.loads(sys.argv[1]):
    for _ in range(int(sys.argv[2])):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex((host, port))
        begun.append((f"{host}:{port}", sock))
time.sleep(0.5)
for place, sock in begun:
    try:
        sock.getpeername()
        sock.sendall(bytes(range(64)))
        answered.add(place)
    except OSError:
        pass
print(json.dumps(sorted(answered)))
"""
"""Many connections, and a first message on each that is answered."""


def answered(host: Host, sockets: Iterable[str], count: int) -> set[str]:
    """Which of the sockets let a host in."""
    places = [(address, int(port)) for address, _, port in (one.rpartition(":") for one in sockets)]
    return set(json.loads(host.run(sys.executable, "-c", CONNECT, json.dumps(places), str(count))))


async def test_a_plain_mesh_listens_on_one_interface_and_answers_its_hosts_alone(net, monkeypatch):
    """A stranger's message killed driver and actors, another wrote where it said, and a thousand idle
    connections left an actor no descriptor. Now they are not answered, also after a restart."""
    earlier = namespaces.listening().get(os.getpid(), set())
    async with a_plain_mesh(net, monkeypatch) as mesh:
        step, expected = mesh.distributed(train_step), jax.jit(train_step)(*arguments())
        for kills in (0, 1):
            for _ in range(kills):
                net.hosts[1].run("kill", "-KILL", str(mesh.actors[1].pid))
            assert_close(await mesh.fetch(await mesh.run(step, *arguments())), expected)
            sockets, listener = data_sockets(net, mesh, earlier)
            ends = {*control_addresses(net.hosts[:2]), net.address("control")}
            assert {one.rpartition(":")[0] for one in sockets} == ends
            assert len(sockets) == 3
            before = [psutil.Process(actor.pid).num_fds() for actor in mesh.actors]
            training = asyncio.create_task(mesh.run(step, *arguments()))
            assert await asyncio.to_thread(answered, net.hosts[2], {*sockets, listener}, 300) == {listener}
            assert_close(await mesh.fetch(await training), expected)
            assert [psutil.Process(actor.pid).num_fds() for actor in mesh.actors] == before
        # Hosts of the mesh are answered, or this would show nothing.
        for host in net.hosts[:2]:
            others = {one for one in sockets if not one.startswith(f"{host.address['control']}:")}
            assert {one for one in others if host.run(*connecting(one)) == "in\n"} == others
        assert_close(await mesh.fetch(await mesh.run(step, *arguments())), expected)


def connecting(place: str) -> tuple[str, ...]:
    address, _, port = place.rpartition(":")
    program = f"import socket; socket.create_connection(({address!r}, {port}), 2).close(); print('in')"
    return sys.executable, "-c", program


def _sockets(listing: str) -> list[tuple[str, str]]:
    return [(words[2], words[3]) for line in listing.splitlines() if len(words := line.split()) >= 4]


async def test_hosts_that_reach_us_by_different_addresses(net, caplog):
    hosts = [net.hosts[0].address["control"], net.hosts[1].address["data"]]
    async with nothing_left(caplog):
        with pytest.raises(MeshError, match=r"10.213.0.1 for 10.213.0.10, 10.214.0.1 for .*control_address="):
            await refused(net, hosts)
        async with fakes(net, hosts, control_address="0.0.0.0"):
            for host, link in ((net.hosts[0], "control"), (net.hosts[1], "data")):
                assert f"{net.address(link)}:{_gate_port()}" in host.run("ss", "-Htn", "state", "established")


def _gate_port() -> str:
    (port,) = {a.rpartition(":")[2] for a in namespaces.listening()[os.getpid()] if a.startswith("0.0.0.0:")}
    return port


# ---------------------------------------------------------------- launches that fail


async def test_a_host_that_is_down(net, caplog):
    """And the hosts that had started are stopped (the fixture looks)."""
    down = net.hosts[2]
    net.cut(down, "control")
    began = time.monotonic()
    async with nothing_left(caplog):
        with pytest.raises(
            LaunchError, match=f"host {down.address['control']}: cannot be reached .*leave it out"
        ):
            await refused(net, control_addresses(net.hosts))
    assert time.monotonic() - began < 15


FIREWALLS = {
    "rejects": "ip daddr 10.213.0.1 tcp sport != 22 reject with icmp type admin-prohibited",
    "drops": "ip daddr 10.213.0.1 tcp sport != 22 drop",
}


@pytest.mark.parametrize("how", list(FIREWALLS))
async def test_a_firewall_on_the_way_back(net, caplog, how):
    """Ssh comes through, and the actor's own connection does not."""
    behind = net.hosts[2]
    async with nothing_left(caplog):
        with behind.firewall(FIREWALLS[how]):
            began = time.monotonic()
            with pytest.raises(LaunchError, match=r"actor 1 .*10\.213\.0\.1.*firewall.*control_address="):
                await refused(net, control_addresses(net.hosts[1:]), launch_timeout_s=4.0)
            assert time.monotonic() - began < 10


def test_the_doctor_finds_what_does_not_come_through(net, tmp_path):
    """A firewall on one host's way back, and a cut data link to it; what is well is said as well. The cut
    lasts longer than UCX keeps an idle connection alive, so it is none of the shared mesh's."""
    (tmp_path / "hosts").write_text(
        "".join(f"{address} env=UCX_TLS=tcp\n" for address in control_addresses(net.hosts))
    )
    names = control_addresses(net.hosts)
    command = [sys.executable, "-m", "jaxpp_async", "doctor", "--json", "--hosts", str(tmp_path / "hosts")]
    command += ["--interface", namespaces.INTERFACE["data"], "--ports", f"{PORTS[0]}-{PORTS[1]}"]
    net.cut_between(net.hosts[1], net.hosts[2], "data")
    with net.hosts[2].firewall(FIREWALLS["rejects"]):
        done = subprocess.run(
            [*command, "--ssh-options", shlex.join(net.ssh_options)],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
    told = json.loads(done.stdout)
    wrong = {(f["section"], f["host"]): f for f in told["findings"] if f["level"] == "error"}
    assert done.returncode == 1 and set(wrong) == {
        ("control", names[2]),
        ("transfer", f"{names[1]} to {names[2]}"),
    }
    assert net.address("control") in wrong["control", names[2]]["what"]
    assert [link["error"] == "" for link in told["links"]] == [True, False] and told["links"][0][
        "bytes_per_s"
    ] > 0


async def test_no_route_back(net, caplog):
    """The host's data network is not the controller's, and nobody routes between them."""
    there = net.hosts[2]
    net.cut(there, "control")
    hosts = [net.hosts[0].address["control"], there.address["data"]]
    there.run("ip", "route", "add", "prohibit", net.address("control"))
    try:
        async with nothing_left(caplog):
            with pytest.raises(LaunchError, match=r"actor 1 .*10\.213\.0\.1.*control_address="):
                await refused(net, hosts, launch_timeout_s=10.0, control_address=net.address("control"))
    finally:
        there.run("ip", "route", "del", "prohibit", net.address("control"))


@pytest.mark.parametrize("lost", ["between the actors", "with everyone"])
async def test_a_data_network_that_lets_nobody_through(net, caplog, lost):
    """The first step says so. Meanwhile no event loop stands still: UCX's connects wait for nobody."""
    net.cut_between(*net.hosts[1:], "data") if lost == "between the actors" else net.cut(net.hosts[2], "data")
    async with nothing_left(caplog), longest_pause() as pause, new_mesh(net, net.hosts[1:]) as mesh:
        began = time.monotonic()
        with pytest.raises(
            TransferError, match=r"(?s)actor [01] .* (send +b\d+ to|recv +b\d+ from) [01] .*timeout"
        ):
            await mesh.run(mesh.distributed(train_step), *arguments())
        assert time.monotonic() - began < 15
    assert pause() < 3


@contextlib.asynccontextmanager
async def longest_pause() -> AsyncIterator[Callable[[], float]]:
    """How long this event loop has been kept from its work at most, in seconds."""
    pauses: list[float] = []

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.02)
            pauses.append(time.monotonic() - began)

    task = asyncio.create_task(watch(), name="watch the event loop")
    try:
        yield lambda: max(pauses)
    finally:
        task.cancel()
        await asyncio.wait([task])


# ---------------------------------------------------------------- slow links (case 11), short cuts


async def test_a_slow_reader_gets_everything_and_memory_stays_bounded(net, shared):
    """Case 11. What is sent ahead waits in the sender's own buffers, which are no more than planned."""
    mesh, step, _ = shared
    (params, batch), sent_bytes = arguments(rows=4096, microbatches=16), 32 << 20
    expected = jax.jit(train_step)(params, batch)
    plan = (await step.compile(params, batch)).report().actors
    assert plan[0].sent_bytes >= sent_bytes > 2 * plan[0].peak_bytes
    batch = await mesh.put(batch, like=(step, 1))
    await mesh.run(step, params, batch)
    before = [psutil.Process(actor.pid).memory_info().rss for actor in mesh.actors]
    net.slow(net.hosts[1], "data", 100)
    began = time.monotonic()
    assert_close(await mesh.fetch(await mesh.run(step, params, batch)), expected)
    assert time.monotonic() - began > 0.8 * sent_bytes * 8 / 100e6  # it was slow
    assert [stats.peak_bytes for stats in mesh.last_step_stats()] == [actor.peak_bytes for actor in plan]
    grown = [psutil.Process(a.pid).memory_info().rss - b for a, b in zip(mesh.actors, before, strict=True)]
    assert max(grown) < sent_bytes / 4


@pytest.mark.parametrize("link", ["data", "control"])
async def test_a_link_that_is_gone_for_two_seconds(net, shared, link):
    """The step only takes longer."""
    mesh, step, expected = shared
    await mesh.run(step, *arguments())
    net.cut(net.hosts[1], link)
    running = asyncio.create_task(mesh.run(step, *arguments()))
    done, _ = await asyncio.wait([running], timeout=2.0)
    assert not done
    net.restore(net.hosts[1], link)
    async with asyncio.timeout(6):
        assert_close(await mesh.fetch(await running), expected)


# ---------------------------------------------------------------- links that stay cut (cases 9, 10)


async def test_a_data_link_is_cut_in_the_middle_of_steps(net, caplog):
    """Case 9. The two actors lose each other; both still talk to the controller, and the driver's next mesh
    works."""
    async with nothing_left(caplog), new_mesh(net, net.hosts[1:]) as mesh:
        step = mesh.distributed(train_step)
        await mesh.run(step, *arguments())
        net.cut_between(*net.hosts[1:], "data")
        began = time.monotonic()
        with pytest.raises(TransferError, match=r"(?s)actor [01] .*actor [01] .*\bb\d+\b") as raised:
            async with asyncio.timeout(20):
                while True:
                    await mesh.run(step, *arguments())
        assert time.monotonic() - began < 15
        assert re.search("actor 0", str(raised.value)) and re.search("actor 1", str(raised.value))
        with pytest.raises(MeshClosedError):
            await mesh.run(step, *arguments())
        closing = time.monotonic()
    assert time.monotonic() - closing < 10
    net.heal()
    async with new_mesh(net, net.hosts[1:]) as mesh:
        step = mesh.distributed(train_step)
        assert_close(await mesh.fetch(await mesh.run(step, *arguments())), jax.jit(train_step)(*arguments()))


async def test_a_control_link_is_cut(net, caplog):
    """Case 10. Nobody can tell the actor anything any more: it ends by itself, and so does its host agent."""
    host, hosts = net.hosts[2], control_addresses(net.hosts[1:])
    async with nothing_left(caplog):
        async with fakes(net, hosts) as controller:
            step = await hanging_step(controller)
            net.cut(host, "control")
            began = time.monotonic()
            with pytest.raises(
                ActorUnresponsiveError, match=r"actor 1 .*not been heard of for 1\d\.\d s"
            ) as raised:
                async with asyncio.timeout(20):
                    await step
            assert time.monotonic() - began < 12
            assert (raised.value.actor, raised.value.step) == (1, 0)
            closing = time.monotonic()
        assert time.monotonic() - closing < 10
        while left := [pid for pid in host.pids() if "jaxpp_async" in command(pid)]:
            assert time.monotonic() - began < 20, [command(pid) for pid in left]
            await asyncio.sleep(0.1)
        host.hang_up()
        net.heal()
        async with fakes(net, hosts):
            pass
