"""Meshes and memories of this process's devices that a step names: refused while tracing, with the line."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from planning import plan_step

import jaxpp_async as jpp
from jaxpp_async.errors import ShardingError, UnsupportedError
from jaxpp_async.testing import assert_close

WEIGHTS = [np.random.default_rng(seed).normal(size=(4, 4)).astype("float32") for seed in range(2)]
BATCH = np.random.default_rng(2).normal(size=(2, 4, 4)).astype("float32")


def over(size, axis="data", **options):
    mesh = jax.make_mesh((size,), (axis,), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, P(axis), **options)


def in_loop(layer):
    def step(weights, batch):
        def one(x):
            value, grads = jax.value_and_grad(
                lambda ws: jnp.mean(jpp.pipeline_yield(layer(x @ ws[0])) @ ws[1])
            )(weights)
            return grads, value

        return jpp.accumulate_grads(one, jpp.GPipe(2))(batch)

    return step


def outside(layer):
    return lambda weights, batch: layer(batch[0] @ weights[0])


def constrained(sharding):
    return lambda x: jax.lax.with_sharding_constraint(x, sharding)


def scanned(sharding):
    return lambda x: jax.lax.scan(lambda c, _: (constrained(sharding)(c) + 1, None), x, None, length=2)[0]


def on_shards(sharding):
    return jax.shard_map(lambda y: y * 2, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec)


NAMES_A_MESH = {
    "constraint": constrained,
    "nested jit": lambda sharding: jax.jit(jnp.sin, in_shardings=sharding, out_shardings=sharding),
    "shard_map": on_shards,
    "device_put": lambda sharding: lambda x: jax.device_put(x, sharding),
    "in a scan": scanned,
    "in a checkpoint": lambda sharding: jax.checkpoint(constrained(sharding)),
}


@pytest.mark.parametrize("where", [in_loop, outside])
@pytest.mark.parametrize("name", NAMES_A_MESH)
@pytest.mark.parametrize("spmd", [{}, {"data": 2}], ids=["no mesh", "another mesh"])
async def test_a_mesh_that_actors_do_not_have(remote_mesh, where, name, spmd):
    mesh = await remote_mesh(2, launcher="inline", spmd_mesh=spmd)
    fn = where(NAMES_A_MESH[name](over(2, "q")))
    jax.jit(fn).trace(WEIGHTS, BATCH)
    with pytest.raises(ShardingError) as error:
        await mesh.run(mesh.distributed(fn), WEIGHTS, BATCH)
    assert re.match(r".*integration/test_devices_named_in_steps.py:\d+: ", str(error.value))
    assert "give RemoteMesh spmd_mesh={'q': 2}, or" in str(error.value) or "without `mesh=`" in str(
        error.value
    )
    assert not mesh.is_closed


@pytest.mark.parametrize("name", [name for name in NAMES_A_MESH if name != "shard_map"])
async def test_a_mesh_like_the_actors_own(remote_mesh, name):
    mesh, fn = (
        await remote_mesh(2, launcher="inline", spmd_mesh={"data": 2}),
        in_loop(NAMES_A_MESH[name](over(2))),
    )
    got = await mesh.fetch(await mesh.run(mesh.distributed(fn), WEIGHTS, BATCH))
    assert_close(got, jax.device_get(jax.jit(fn)(WEIGHTS, BATCH)))


async def test_a_mesh_of_one_device(remote_mesh):
    mesh, fn = await remote_mesh(2, launcher="inline"), in_loop(constrained(over(1)))
    got = await mesh.fetch(await mesh.run(mesh.distributed(fn), WEIGHTS, BATCH))
    assert_close(got, jax.device_get(jax.jit(fn)(WEIGHTS, BATCH)))


async def test_shard_map_takes_the_actors_mesh(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline", spmd_mesh={"data": 2})
    with pytest.raises(ShardingError, match=r":\d+: .*call shard_map without `mesh=`"):
        await mesh.run(mesh.distributed(outside(on_shards(over(2)))), WEIGHTS, BATCH)
    bare = outside(jax.shard_map(lambda y: y * 2, in_specs=P("data"), out_specs=P("data")))
    assert_close(await (await mesh.run(mesh.distributed(bare), WEIGHTS, BATCH)), BATCH[0] @ WEIGHTS[0] * 2)


def test_a_shard_map_over_an_axis_that_actors_do_not_have():
    """The error has the user's line and says what to write, before anything runs."""
    over_expert = {"in_specs": P("expert"), "out_specs": P("expert")}
    says = r":\d+: .*axes are \['data'\][\s\S]*expert[\s\S]*give spmd_mesh that axis"
    for options in (over_expert, over_expert | {"axis_names": {"expert"}}):
        fn = outside(jax.shard_map(lambda y: y * 2, **options))
        with pytest.raises(ShardingError, match=Path(__file__).name + says):
            plan_step(fn, WEIGHTS, BATCH, spmd_mesh={"data": 2})


def test_a_shard_map_that_leaves_an_axis_of_the_mesh_to_xla_may_not_split_by_it():
    """JAX's own words: the mesh has the axis."""
    options = {"in_specs": P("model"), "out_specs": P(), "axis_names": {"data"}}
    fn = outside(jax.shard_map(lambda y: y.sum(), **options))
    with pytest.raises(ValueError, match="marked as manual") as caught:
        plan_step(fn, WEIGHTS, BATCH, spmd_mesh={"data": 2, "model": 2})
    assert not isinstance(caught.value, ShardingError)


@pytest.mark.parametrize(
    ("sharding", "spmd", "message"),
    [
        (over(2), {}, r"names the axis 'data', but the mesh has no axes; give spmd_mesh that axis"),
        (
            over(4),
            {"data": 2},
            r"is over a mesh {'data': 4} of this process's devices, but each actor has {'data': 2}",
        ),
        (
            over(2, memory_kind="pinned_host"),
            {"data": 2},
            r"'pinned_host' is memory in which actors keep no arrays",
        ),
    ],
    ids=["no mesh", "another mesh", "host memory"],
)
async def test_shardings_of_arguments_and_results(remote_mesh, sharding, spmd, message):
    mesh = await remote_mesh(2, launcher="inline", spmd_mesh=spmd)
    for options in ({"in_shardings": (None, sharding)}, {"out_shardings": sharding}):
        step = mesh.distributed(lambda w, x: x * 2, **options)
        with pytest.raises(
            ShardingError, match=rf"integration/test_devices_named_in_steps.py:\d+: .*{message}"
        ):
            await mesh.run(step, WEIGHTS, BATCH[:, 0])


# ---------------------------------------------------------------- host memory


def offloading(policy):
    return jax.checkpoint(
        lambda x: jnp.sin(checkpoint_name(jnp.sin(x) @ jnp.ones((4, 4), x.dtype), "h")), policy=policy
    )


POLICIES = jax.checkpoint_policies
OFFLOADS = {
    "names": POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "products": POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
OUTLIVES_ITS_TASK = {
    **{name: in_loop(offloading(policy)) for name, policy in OFFLOADS.items()},
    "a result": outside(lambda x: jax.device_put(x, jax.memory.Space.Host)),
    "a result of its device": outside(
        lambda x: jax.device_put(x, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    ),
    "optimizer state": lambda w, x: jax.tree.map(
        lambda w, g: jax.device_put(w - g, jax.memory.Space.Host), w, in_loop(jnp.tanh)(w, x)[0]
    ),
}


@pytest.mark.parametrize("name", OUTLIVES_ITS_TASK)
@pytest.mark.parametrize("spmd", [{}, {"data": 2}], ids=["no mesh", "mesh"])
async def test_arrays_in_host_memory_that_outlive_their_task(remote_mesh, name, spmd):
    """On a mesh of devices they were moved to device memory without a word."""
    mesh = await remote_mesh(2, launcher="inline", spmd_mesh=spmd)
    fn = OUTLIVES_ITS_TASK[name]
    jax.jit(fn)(WEIGHTS, BATCH)
    with pytest.raises(
        UnsupportedError, match=r"integration/test_devices_named_in_steps.py:\d+: `device_put` in task \w+ "
    ) as error:
        await mesh.run(mesh.distributed(fn), WEIGHTS, BATCH)
    assert "save_only_these_names" in str(error.value) or "cannot be exported" in str(error.value)


async def test_arrays_in_host_memory_within_a_task(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    fn = outside(
        lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device) + 1
    )
    got = await (await mesh.run(mesh.distributed(fn), WEIGHTS, BATCH))
    assert_close(got, jax.device_get(jax.jit(fn)(WEIGHTS, BATCH)))


async def test_arguments_in_host_memory(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(lambda state: jax.tree.map(lambda x: x + 1, state))
    array = jax.device_put(WEIGHTS[0], jax.memory.Space.Host)
    for leaf in (array, jax.ShapeDtypeStruct((4, 4), "float32", sharding=array.sharding)):
        with pytest.raises(TypeError, match=r"state\['m'\] lies in host memory"):
            await step.compile({"m": leaf})
    assert_close(
        await (await mesh.run(step, {"m": jax.device_put(array, jax.memory.Space.Device)}))["m"],
        WEIGHTS[0] + 1,
    )
