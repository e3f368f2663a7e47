"""Machines that need not exist, and steps compiled for them: the programs of a mesh, and nothing started."""

from __future__ import annotations

import gc
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from layer_steps import layer_step
from planning import f32

import jaxpp_async as jpp
from jaxpp_async.compiler.pipeline import Compiled
from jaxpp_async.errors import MeshError, ScheduleError, ShardingError
from jaxpp_async.planning.devices import DEVICES, LINKS, Device, Link
from jaxpp_async.planning.machine import Machine, compile_for

TWO = layer_step(2, jpp.Std1F1B(2))
ARGS = ([f32(8, 8)] * 2, f32(4, 2, 8))


# ---------------------------------------------------------------- machines


def test_a_machine_takes_its_figures_from_the_table():
    machine = Machine(16, {"data": 2, "model": 4}, "h100-sxm", {"between hosts": "infiniband-ndr"})
    assert machine.device == DEVICES["h100-sxm"] and machine.memory == 80e9
    assert machine.links == {
        "devices": LINKS["nvlink4"],
        "same host": LINKS["nvlink4"],
        "between hosts": LINKS["infiniband-ndr"],
    }
    assert machine.devices_per_actor == 8 and machine.target.platform == "cuda"
    assert machine == Machine(16, {"data": 2, "model": 4}, "h100-sxm", {"between hosts": "infiniband-ndr"})


def test_a_machine_may_have_devices_and_links_of_the_user_s_own():
    wire = Link("wire", 1e9, None)
    machine = Machine(2, device=Device("mine", "cpu"), links={"same host": wire}, memory=2**30)
    assert machine.links == {"same host": wire} and machine.memory == 2**30
    assert machine.devices_per_actor == 1 and machine.target.mesh is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"actors": 0}, MeshError, "num_actors is an int of at least 1"),
        ({"actors": 2, "device": "h100"}, MeshError, "device is 'h100'.*did you mean 'h100-"),
        (
            {"actors": 2, "links": {"within": "pcie5"}},
            MeshError,
            "links has 'within'; its keys are 'devices'",
        ),
        ({"actors": 2, "links": {"devices": "pcie9"}}, MeshError, "link is 'pcie9'.*did you mean 'pcie"),
        ({"actors": 2, "memory": 1.5}, MeshError, "memory is 1.5; write bytes"),
        ({"actors": 2, "spmd_mesh": {"x": 0}}, MeshError, "spmd_mesh has 'x': 0"),
        ({"actors": 2, "axis_rules": {"embed": "y"}}, ShardingError, "names the axis 'y'"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Machine(**options)


# ---------------------------------------------------------------- steps


def test_the_programs_are_those_of_a_mesh_of_this_shape():
    machine = Machine(2)
    planned = compile_for(machine, TWO, ARGS, donate_argnums=0)
    real = compile_for(machine, TWO, ARGS, donate_argnums=0, lower=True)
    assert isinstance(real.compiled, Compiled) and not isinstance(planned.compiled, Compiled)
    assert planned.as_text() == real.as_text() and planned.works == real.works
    assert planned.passes["delete"] == real.passes["delete"]
    assert [a.tasks for a in planned.report().actors] == [a.tasks for a in real.report().actors]
    assert (
        repr(planned).startswith("<PlannedStep: Std1F1B(num_stages=2), 2 actors, ")
        and planned.name == "train_step"
    )


async def test_a_mesh_compiles_the_same_programs_and_counts_the_same_work():
    ws, xs = [jnp.ones((8, 8))] * 2, jnp.ones((4, 2, 8))
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        compiled = await mesh.distributed(TWO, donate_argnums=0).compile(ws, xs)
        planned = compile_for(Machine(2), TWO, (ws, xs), donate_argnums=0)
        assert compiled.as_text() == planned.as_text()
        assert compiled.works == planned.works and repr(compiled).startswith(
            "<CompiledStep: Std1F1B(num_stages=2), 2 actors, "
        )


def test_compiling_for_gpus_needs_none_and_takes_no_memory():
    gc.collect()  # arrays and idle threads of earlier tests may go meanwhile, but none may come
    before, threads = len(jax.live_arrays()), threading.active_count()
    machine = Machine(2, {"data": 2, "model": 2}, "b200")
    shardings = ([P(None, "model"), P("model")], P(None, "data"))
    planned = compile_for(machine, TWO, ARGS, in_shardings=shardings, donate_argnums=0, lower=True)
    assert planned.compiled.target.platform == "cuda" and len(planned.works) == len(
        planned.compiled.executables
    )
    assert len(jax.live_arrays()) <= before and threading.active_count() <= threads


def test_many_actors_of_many_devices():
    machine = Machine(64, {"data": 2, "model": 4}, "h100-sxm")
    planned = compile_for(
        machine,
        layer_step(64, jpp.Std1F1B(64)),
        ([f32(8, 8)] * 64, f32(64, 4, 8)),
        in_shardings=(P(None, "model"), P(None, "data")),
    )
    assert len(planned.compiled.programs) == 64
    assert len({work.key for work in planned.works}) < 16 < len(planned.works)


def test_another_schedule_is_compiled_without_a_change_of_the_step():
    planned = compile_for(Machine(2), TWO, ARGS, schedule=jpp.GPipe(2))
    assert planned.as_text() == compile_for(Machine(2), layer_step(2, jpp.GPipe(2)), ARGS).as_text()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: compile_for(Machine(2), 3, ()), TypeError, "compile_for takes a step function; got 3"),
        (lambda: compile_for(Machine(2), TWO, ARGS[:1]), TypeError, "missing a required argument: 'xs'"),
        (lambda: compile_for(Machine(2), TWO, ("a", ARGS[1])), TypeError, "step 'train_step': ws"),
        (lambda: compile_for(Machine(2), TWO, ARGS, donate_argnums=5), ValueError, "donate_argnums names"),
        (lambda: compile_for(Machine(2), TWO, ARGS, schedule=jpp.Std1F1B(3)), ScheduleError, "stages"),
        (
            lambda: compile_for(Machine(2, {"x": 2}), TWO, ARGS, in_shardings=P("z")),
            ShardingError,
            r"test_machine\.py:\d+: in_shardings",
        ),
    ],
)
def test_errors_are_those_of_a_mesh_and_name_the_user_s_line(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_memory_may_be_text_and_links_are_a_dictionary():
    assert Machine(2, memory="70GB").memory == 70 * 10**9
    for links in (["ethernet-100g"], {3: "ethernet-100g"}):
        with pytest.raises(MeshError, match=r"links (is|has)"):
            Machine(2, links=links)
