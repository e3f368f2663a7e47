"""Actors of several processes: who holds and sends what, and that a mesh of them computes what `jax.jit`
does."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp_async as jpp
from jaxpp_async.actors.host_values import HostCopy, HostValues
from jaxpp_async.checkpoint.stored import load_manifest
from jaxpp_async.errors import ActorDiedError, ActorUnresponsiveError, CheckpointError, MeshError
from jaxpp_async.launch.hosts import addresses_of_hosts, parse_hosts, place, spread
from jaxpp_async.layout import array_parts
from jaxpp_async.layout.array_parts import Gathering, Scattering, parts_of
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.actor_info import (
    ActorInfo,
    Position,
    ProcessRank,
    Topology,
    furthest_behind,
    merge_processes,
)
from jaxpp_async.protocol.messages import Fetch

AXES = (("data", 2), ("model", 2))

# ---------------------------------------------------------------- numbers


def test_an_actors_processes_are_neighbours():
    processes = Topology(3, 2)
    assert [(processes.actor_of(p), processes.rank_of(p)) for p in processes.everyone] == [
        (actor, rank) for actor in range(3) for rank in range(2)
    ]
    assert list(processes.processes_of(1)) == [2, 3]
    assert processes.processes_of_all([2, 0]) == [0, 1, 4, 5]
    assert processes.peers_of(3) == {2, 1, 5}
    process_rank = ProcessRank(3, 2)
    assert (
        process_rank.actor,
        process_rank.rank,
        process_rank.process_of_rank(0),
        process_rank.counterpart_in(2),
        str(process_rank),
    ) == (
        1,
        1,
        2,
        5,
        "actor 1 (process 1 of 2)",
    )
    assert Topology(4).peers_of(2) == {0, 1, 3} and str(ProcessRank(3)) == "actor 3"


def test_an_actor_is_as_its_worst_process():
    infos = [
        ActorInfo(1, "a", 7, ("cpu:0",), "ready", 0, 2),
        ActorInfo(1, "b", 8, ("cpu:1",), "failed", 1, 2),
    ]
    actor = merge_processes(infos)
    assert (actor.id, actor.host, actor.pid, actor.devices, actor.state) == (
        1,
        "a",
        7,
        ("cpu:0", "cpu:1"),
        "failed",
    )
    assert [p.process for p in actor.processes] == [2, 3]
    assert str(infos[1]) == "actor 1 (process 1 of 2: host b, pid 8)"
    assert repr(actor) == (
        "<actor 1: failed cpu:0 cpu:1; 2 processes: host a pid 7 ready, host b pid 8 failed>"
    )
    assert (
        repr(merge_processes([ActorInfo(0, "a", 7, ("cpu:0",), "ready")]))
        == "<actor 0 (host a, pid 7): ready cpu:0>"
    )


def test_where_an_actor_is_says_the_hindmost():
    behind, ahead = Position(3, 0, 5, waiting=True), Position(3, 0, 5, waiting=False, computing=True)
    assert furthest_behind([ahead, behind]) == behind and furthest_behind([ahead, None]) is None


def test_hosts_reach_each_other_from_outside():
    assert addresses_of_hosts([("127.0.0.1", "127.0.0.1")] * 2) == ["127.0.0.1"] * 2
    assert addresses_of_hosts([("127.0.0.1", "127.0.0.1"), ("10.0.0.2", "10.0.0.1")]) == [
        "10.0.0.1",
        "10.0.0.2",
    ]


# ---------------------------------------------------------------- parts and their owners


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 4), ("data", "model")),
        ((8, 4), (("data", "model"), None)),
        ((8, 4), (("model", "data"),)),
        ((4,), ("model",)),
        ((), ()),
        ((3,), (None,)),
    ],
)
def test_parts_are_where_jax_has_them(shape, spec):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    found = NamedSharding(mesh, P(*spec)).devices_indices_map(shape)
    devices = list(mesh.devices.flat)
    parts = parts_of(Aval(shape, "float32", spec), AXES, 2)
    assert sorted(p for part in parts for p in part.positions) == [0, 1, 2, 3]
    for part in parts:
        for position in part.positions:
            assert np.arange(np.prod(shape, dtype=int)).reshape(shape)[part.index].tolist() == (
                np.arange(np.prod(shape, dtype=int)).reshape(shape)[found[devices[position]]].tolist()
            )
        assert part.ranks == tuple(sorted({position // 2 for position in part.positions}))


def test_owners_take_turns():
    (whole,) = parts_of(Aval((3,), "float32", (None,)), AXES, 2)
    assert [whole.owner(salt) for salt in range(4)] == [0, 1, 0, 1]
    columns = parts_of(Aval((4,), "float32", ("model",)), AXES, 2)
    assert [[part.owner(salt) for part in columns] for salt in (0, 1)] == [[0, 1], [1, 0]]


@pytest.mark.parametrize("spec", [(None, None), ("data", None), (None, "model"), ("data", "model")])
def test_each_part_crosses_once_and_reaches_everyone(spec):
    parts, k = parts_of(Aval((4, 4), "float32", spec), AXES, 2), 2
    for tag in range(4):
        sent: list[tuple[int, int, int]] = []
        received: list[tuple[int, int, int]] = []
        for rank in range(k):
            held = [part for part in parts if rank in part.ranks]
            one, other = ProcessRank(rank, k), ProcessRank(k + rank, k)
            out = array_parts.plan_sends(one, held, tag, 1, 4)
            assert all(leg.peer == k + rank for leg in out)
            sent += [(rank, leg.peer, leg.sequence) for leg in out]
            for legs in array_parts.plan_relays(other, held, tag, 4).values():
                sent += [(other.process, leg.peer, leg.sequence) for leg in legs]
            legs = array_parts.plan_receives(other, held, tag, 0, 4)
            assert [leg.part_index for leg in legs] == list(range(len(held)))
            received += [(leg.peer, other.process, leg.sequence) for leg in legs]
        assert sorted(sent) == sorted(received) and len(set(sent)) == len(sent)
        assert sum(source < k for source, _, _ in sent) == len(parts)


@pytest.mark.parametrize("spec", [(None, None), ("data", None), (None, "model"), ("data", "model")])
def test_a_value_is_taken_apart_and_put_together(spec):
    aval, how = Aval((4, 6), "float32", spec), Scattering(AXES, 2)
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    pieces = how.pieces(5, aval, value)
    assert sum(data.nbytes for _, _, data in pieces) == value.nbytes
    gathering = Gathering([(1, 5, aval)], how)
    answers: dict[int, list[Any]] = {}
    for process, asked in gathering.requests.items():
        data = np.concatenate([data for rank, _, data in pieces if rank == process - 2])
        assert [(i, a.size_bytes) for i, a in asked] == [(5, data.nbytes)]
        answers[process] = [data]
    np.testing.assert_array_equal(gathering.arrays(answers)[0], value)


async def test_no_loop_waits_for_parts_that_are_still_on_a_device():
    told: list[threading.Thread] = []

    class OnItsWay:
        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            told.append(threading.current_thread())
            return np.arange(2, dtype=np.uint8)

    shard: Any = SimpleNamespace(part=SimpleNamespace(owner=lambda array_id: 0))
    layout: Any = SimpleNamespace(is_on_one_process=False, shards=[shard, shard])
    look = HostCopy(layout, asyncio.get_running_loop().create_future())
    look.shards.set_result([OnItsWay(), OnItsWay()])
    with ThreadPoolExecutor(1) as workers:
        nothing: Any = None
        values = HostValues(nothing, nothing, nothing, workers, nothing, ProcessRank(0))
        fetched = await values._fetched(Fetch((5,), (0,)), [look], 0)
    assert fetched.arrays == (((4,), "uint8", b"\0\1\0\1"),)
    assert len(told) == 2 and threading.main_thread() not in told


# ---------------------------------------------------------------- placement


@pytest.mark.parametrize(
    ("lines", "actors", "devices", "asked", "found"),
    [
        (["a slots=4", "b slots=4"], 2, 4, None, (1, 4)),
        (["a slots=4", "b slots=4"], 1, 8, None, (2, 4)),
        (["a slots=2", "b slots=2", "c slots=2", "d slots=2"], 2, 4, None, (2, 2)),
        (["a slots=3", "b slots=3"], 1, 6, None, (2, 3)),
        (["a slots=3", "b slots=3"], 1, 4, None, (2, 2)),
        (["a slots=4"], 1, 4, 2, (2, 2)),
        (["a", "b"], 2, 8, None, (1, 1)),
        (["a", "b"], 1, 8, 2, (2, 1)),
        (["a slots=2"], 2, 1, None, (1, 1)),
    ],
)
def test_actors_take_as_many_processes_as_hosts_call_for(lines, actors, devices, asked, found):
    spread_out = spread(parse_hosts(lines), actors, devices, asked)
    assert (spread_out.per_actor, spread_out.slots_each) == found
    placements = place(parse_hosts(lines), actors * spread_out.per_actor, spread_out.slots_each)
    hosts = [p.host.name for p in placements]
    assert hosts == sorted(hosts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"processes_per_actor": 2}, "processes_per_actor=2 does not divide the 1 device of an actor"),
        (
            {"processes_per_actor": 3, "spmd_mesh": {"data": 4}},
            "=3 does not divide the 4 devices of an actor",
        ),
        ({"processes_per_actor": 0}, "processes_per_actor is 0; give a whole number of at least 1"),
        (
            {"processes_per_actor": 2, "spmd_mesh": {"x": 2}, "launcher": "inline"},
            "not work with launcher='inline'",
        ),
        (
            {"hosts": ["a slots=2", "b slots=2"], "spmd_mesh": {"x": 6}},
            "2 actors of 6 devices do not fit 4 slots on 2",
        ),
        (
            {"hosts": ["a slots=3"], "spmd_mesh": {"x": 2}, "processes_per_actor": 2},
            "in 2 processes of 1 each do not",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(options, said):
    with pytest.raises(MeshError, match=said):
        jpp.RemoteMesh(2, **options)


# ---------------------------------------------------------------- a mesh of two actors of two processes of
# two devices


def loss_fn(params: Any, mb: Any) -> Any:
    x = jpp.pipeline_yield(jnp.tanh(mb["x"] @ params["w1"] + params["b"]))
    return jnp.mean((x @ params["w2"] - mb["y"]) ** 2)


def train_step(schedule: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        def grads_of(mb: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, mb)
            return grads, loss

        grads, losses = jpp.accumulate_grads(grads_of, schedule)(batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses

    return step


def problem() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    sizes = {"w1": (16, 32), "b": (32,), "w2": (32, 16)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in sizes.items()}
    return params, {name: rng.normal(size=(4, 256, 16)).astype(np.float32) for name in ("x", "y")}


DP = ({"w1": P(), "b": P(), "w2": P()}, P(None, ("data", "model")))
TP = ({"w1": P(None, ("data", "model")), "b": P(("data", "model")), "w2": P(("data", "model"), None)}, P())
BOTH = ({"w1": P(None, "model"), "b": P("model"), "w2": P("model", None)}, P(None, "data"))
FSDP = ({"w1": P("data", "model"), "b": P("data"), "w2": P("data", "model")}, P(None, "data"))


def close(got: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


async def test_a_mesh_of_them_computes_what_jit_does(remote_mesh, tmp_path):
    """One mesh for all: across its processes lie the data axis, and with it all of dp, tp and sharded
    parameters."""
    mesh = await remote_mesh(2, spmd_mesh={"data": 2, "model": 2}, processes_per_actor=2, launcher="local")
    assert [len(actor.processes) for actor in mesh.actors] == [2, 2]
    assert len({p.pid for actor in mesh.actors for p in actor.processes}) == 4
    assert all(len(p.devices) == 2 for actor in mesh.actors for p in actor.processes)
    params, batch = problem()
    for schedule, shardings in (
        (jpp.Std1F1B(2), DP),
        (jpp.Std1F1B(2), TP),
        (jpp.GPipe(2), BOTH),
        (jpp.Std1F1B(2), FSDP),
    ):
        step = mesh.distributed(train_step(schedule), in_shardings=shardings, donate_argnums=0)
        state, expected = params, params
        for _ in range(2):
            state, losses = await mesh.run(step, state, batch)
            expected, wanted = jax.jit(train_step(schedule))(expected, batch)
        close(await mesh.fetch((state, losses)), (expected, wanted))
    await one_request_a_process_and_step(mesh, step, state, batch)
    await saved_and_restored(mesh, state, tmp_path)


async def one_request_a_process_and_step(mesh: Any, step: Any, state: Any, batch: Any) -> None:
    again = mesh.distributed(train_step(jpp.Std1F1B(2)), in_shardings=FSDP)
    held = await mesh.put(batch, like=(step, 1))
    kept = [await mesh.run(again, state, held)]
    wires = [link.connection.wire for link in mesh._controller._actor_group.links.values()]
    before = [(wire._num_sent, wire._num_received) for wire in wires]
    for _ in range(3):
        kept.append(await mesh.run(again, state, held))
    assert [(wire._num_sent, wire._num_received) for wire in wires] == [(s + 3, r + 3) for s, r in before]


def reader_of_the_docs() -> Any:
    docs = (pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", docs, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "def load" in block), names)
    return names["load"]


async def saved_and_restored(mesh: Any, state: Any, folder: Any) -> None:
    """Each process writes what it owns, and reads what it holds; any other mesh reads all of it."""
    before = await mesh.fetch(state)
    await mesh.save(folder, {"state": state, "step": 3})
    pieces = {path: len(array.pieces) for path, array in load_manifest(str(folder)).arrays.items()}
    assert pieces == {"state/w1": 4, "state/b": 2, "state/w2": 4}
    written_by = {
        file.written_by.partition(" on host")[0] for file in load_manifest(str(folder)).files.values()
    }
    assert written_by == {f"actor {actor} (process {rank} of 2)" for actor in range(2) for rank in range(2)}
    plain = reader_of_the_docs()(folder)
    jax.tree.map(np.testing.assert_array_equal, {name: plain[f"state/{name}"] for name in before}, before)
    restored = await mesh.restore(folder, {"state": state, "step": 0})
    assert restored["step"] == 3 and restored["state"]["w1"].spec == state["w1"].spec
    jax.tree.map(np.testing.assert_array_equal, await mesh.fetch(restored["state"]), before)
    async with jpp.RemoteMesh(1, launcher="inline", spmd_mesh={"data": 2}) as other:
        like = {"state": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), before), "step": 0}
        elsewhere = await other.restore(folder, like)
        jax.tree.map(np.testing.assert_array_equal, await other.fetch(elsewhere["state"]), before)
    (folder / next(iter(load_manifest(str(folder)).files))).write_bytes(b"")
    with pytest.raises(CheckpointError, match="the file was cut off after 0 bytes"):
        await mesh.restore(folder, {"state": state, "step": 0})


async def test_the_death_of_one_process_is_told_with_its_name(remote_mesh):
    mesh = await remote_mesh(2, spmd_mesh={"data": 4}, processes_per_actor=2, launcher="local")
    params, batch = problem()
    step = mesh.distributed(train_step(jpp.Std1F1B(2)), in_shardings=(P(), P(None, "data")))
    state, _ = await mesh.run(step, params, batch)
    victim = mesh.actors[1].processes[1]
    with pytest.raises(ActorDiedError) as raised:
        for k in range(1000):
            state, _ = await mesh.run(step, state, batch)
            if k == 3:
                os.kill(victim.pid, signal.SIGKILL)
    said = f"actor 1 (process 1 of 2: host {victim.host}, pid {victim.pid}) was killed by SIGKILL"
    assert str(raised.value).startswith(said)
    assert (raised.value.actor, raised.value.pid) == (1, victim.pid)
    assert [actor.state for actor in mesh.actors] == ["closed", "failed"]


async def test_a_process_that_hangs_is_told_with_its_name():
    mesh = jpp.RemoteMesh(2, spmd_mesh={"data": 4}, processes_per_actor=2, launcher="local", max_restarts=0)
    mesh._options = replace(mesh._options, suspect_s=1.0, dead_s=2.0)
    async with mesh:
        params, batch = problem()
        step = mesh.distributed(train_step(jpp.Std1F1B(2)), in_shardings=(P(), P(None, "data")))
        state, _ = await mesh.run(step, params, batch)
        victim = mesh.actors[1].processes[1]
        os.kill(victim.pid, signal.SIGSTOP)
        with pytest.raises(ActorUnresponsiveError) as raised:
            while True:
                state, _ = await mesh.run(step, state, batch)
    assert f"actor 1 (process 1 of 2: host {victim.host}, pid {victim.pid})" in str(raised.value)


async def test_an_actor_that_lost_a_process_comes_back_with_the_same_numbers(remote_mesh):
    """One mesh, three times the same ten steps: undisturbed, and with either process of an actor lost."""
    options: Any = {"spmd_mesh": {"data": 4}, "processes_per_actor": 2, "launcher": "local"}
    mesh = await remote_mesh(2, max_restarts=2, backup_every=3, **options)
    params, batch = problem()
    step = mesh.distributed(train_step(jpp.Std1F1B(2)), in_shardings=(P(), P(None, "data")), donate_argnums=0)
    results: list[Any] = []
    for rank in (None, 0, 1):
        before = {p.pid for actor in mesh.actors for p in actor.processes}
        state, losses = params, []
        for k in range(10):
            state, loss = await mesh.run(step, state, batch)
            losses.append(loss)
            if rank is not None and k == 5:
                os.kill(mesh.actors[1].processes[rank].pid, signal.SIGKILL)
        results.append(await mesh.fetch((state, losses)))
        pids = {p.pid for actor in mesh.actors for p in actor.processes}
        assert len(pids) == 4 and all(actor.state == "ready" for actor in mesh.actors)
        assert (pids == before) == (rank is None)
        jax.tree.map(np.testing.assert_array_equal, results[0], results[-1])
    await mesh.aclose()
