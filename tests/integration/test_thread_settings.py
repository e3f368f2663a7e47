"""Settings of JAX that hold for the caller's thread: a step's numbers are those of `jax.jit` in the same
context."""

from __future__ import annotations

import asyncio
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import MeshError
from jaxpp_async.testing import assert_close

WEIGHTS = [np.random.default_rng(seed).normal(size=(64, 64)) for seed in range(2)]
BATCH = np.random.default_rng(2).normal(size=(2, 3, 64))
KEY = np.array([1, 2], np.uint32)


def step(weights, batch, key):
    def one(x):
        noise = jax.random.normal(jax.random.wrap_key_data(key, impl="threefry2x32"), (5,))
        value = jnp.mean(jpp.pipeline_yield(jnp.tanh(x @ weights[0])) @ weights[1])
        return value, jnp.sum(noise), jnp.arange(3) * 2

    return *jpp.accumulate_grads(one, jpp.GPipe(2))(batch), jnp.sum(batch)


SETTINGS = {
    "64 bits": lambda: jax.enable_x64(True),
    "precision": lambda: jax.default_matmul_precision("bfloat16"),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "random bits": lambda: jax.threefry_partitionable(False),
    "leaks": lambda: jax.check_tracer_leaks(True),
    "device": lambda: jax.default_device(jax.devices()[1]),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((2,), ("q",))),
    "abstract mesh": lambda: jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("q",))),
    "no jit": jax.disable_jit,
}


async def same_as_jit(mesh, distributed):
    want = jax.device_get(jax.jit(step)(WEIGHTS, BATCH, KEY))
    got = await mesh.fetch(await mesh.run(distributed, WEIGHTS, BATCH, KEY))
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]
    assert_close(got, want, rtol=1e-12 if want[0].dtype == np.float64 else 1e-6)
    return got


@pytest.mark.parametrize("name", SETTINGS)
async def test_inside_of_a_context_and_outside_of_it(remote_mesh, name):
    mesh = await remote_mesh(2, launcher="inline")
    distributed = mesh.distributed(step)
    for setting in (SETTINGS[name], contextlib.nullcontext, SETTINGS[name]):
        with setting():
            if name in ("abstract mesh", "no jit"):  # plain JAX takes no such step itself
                got = await mesh.fetch(await mesh.run(distributed, WEIGHTS, BATCH, KEY))
            else:
                await same_as_jit(mesh, distributed)
    if name in ("abstract mesh", "no jit"):
        assert_close(got, jax.device_get(jax.jit(step)(WEIGHTS, BATCH, KEY)))


async def test_the_default_kind_of_keys(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    distributed = mesh.distributed(lambda seed: jax.random.key_data(jax.random.key(seed)))
    for impl, shape in (("threefry2x32", (2,)), ("rbg", (4,)), ("threefry2x32", (2,))):
        with jax.default_prng_impl(impl):
            got = await (await mesh.run(distributed, 3))
            assert got.shape == shape
            assert_close(got, np.asarray(jax.random.key_data(jax.random.key(3))))


async def test_by_processes(remote_mesh):
    mesh = await remote_mesh(2)
    distributed = mesh.distributed(step)
    bits = []
    for name in ("random bits", "64 bits", None):
        with SETTINGS[name]() if name else contextlib.nullcontext():
            bits.append((await same_as_jit(mesh, distributed))[1])
    assert len({float(b[0]) for b in bits}) == 3, "each context has numbers of its own"
    with jax.enable_x64(True):
        wide = await mesh.put({"a": np.arange(3, dtype=np.int64) << 40, "b": np.full((300, 300), 1 / 3)})
        double = mesh.distributed(lambda tree: jax.tree.map(lambda x: x * 2, tree))
        moved = await mesh.run(double, await mesh.run(double, wide))
        assert_close(await mesh.fetch(moved), {"a": np.arange(3) << 42, "b": np.full((300, 300), 4 / 3)})
    with pytest.raises(TypeError, match=r"tree\['a'\] is int64, made where jax_enable_x64 was on"):
        await mesh.run(double, moved)


async def test_a_transfer_guard_is_about_the_users_own_transfers(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    for guard in ("disallow", "disallow_explicit"):
        shape = (3 + len(guard), 64)  # a form of its own
        with jax.transfer_guard(guard):
            future = await mesh.submit(
                mesh.distributed(lambda x, n: x * n), np.ones(shape, "float32"), np.float32(2)
            )
            assert_close(await mesh.fetch(await future), np.full(shape, 2, "float32"))


@pytest.mark.parametrize("check", [jax.debug_nans, jax.debug_infs])
@pytest.mark.parametrize("options", [{"launcher": "inline"}, {}], ids=["inline", "processes"])
async def test_checks_that_actors_would_not_make_are_refused(remote_mesh, check, options):
    mesh = await remote_mesh(2, **options)
    divide = mesh.distributed(lambda x: x / x)
    with check(True), pytest.raises(MeshError, match=r"jax_debug_.* is True here and False on the actors"):
        await mesh.run(divide, np.zeros(2, "float32"))
    assert np.isnan(await (await mesh.run(divide, np.zeros(2, "float32")))).all()


async def test_settings_that_change_before_a_step_is_compiled(remote_mesh):
    """A `with` of one task holds for all of a thread: what was asked for is not what would be compiled."""
    mesh = await remote_mesh(2, launcher="inline")
    async with mesh._runner.compiler._compile_lock:  # another step is being compiled
        with jax.enable_x64(True):
            waiting = asyncio.ensure_future(mesh.run(mesh.distributed(step), WEIGHTS, BATCH, KEY))
            await asyncio.sleep(0)
    with pytest.raises(MeshError, match="other settings of JAX than hold now"):
        await waiting
