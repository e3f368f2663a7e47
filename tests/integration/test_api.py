"""Every name of the public API as a user types it, on inline actors unless processes matter."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from resources import inspect_actors

import jaxpp_async as jpp
from jaxpp_async.errors import ArrayError, MeshError
from jaxpp_async.testing import assert_close

MODEL = models.mlp(num_stages=2, width=4)


async def inline(remote_mesh, num_actors=2):
    return await remote_mesh(num_actors, launcher="inline")


def problem(num_microbatches=4):
    return MODEL.init(0), MODEL.batch(0, num_microbatches)


def sgd(schedule=None):
    """(parameters, batch) to (parameters, losses)."""
    step = models.grads_step(MODEL, schedule or jpp.Std1F1B(2))

    def train_step(params, batch):
        params, _, losses = step(params, batch)
        return params, losses

    return train_step


async def numbers(mesh, what):
    """One of the actors' numbers, over all of them."""
    return sum(n[what] for n in (await inspect_actors(mesh._controller)).values())


async def same_as_jit(mesh, fn, *args, **options):
    """Run once on the mesh and compare with plain `jax.jit`."""
    static = options.get("static_argnums", ())
    want = jax.jit(fn, static_argnums=static)(*args)
    got = await mesh.run(mesh.distributed(fn, **options), *args)
    assert_close(await mesh.fetch(got), want)
    return got


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "actual, expected, message",
    [
        ([1.0, 2.0], [1.0, 2.00001], None),
        ([1.0, 2.0], [1.0, 2.0001], "value: differs by 0.0001"),
        ([1e-9, 2.0], [0.0, 2.0], None),
        ([NAN, 1.0, INF], [NAN, 1.0, INF], None),
        ([NAN, 1.0], [NAN, 1.1], "differs by 0.1"),
        ([1.0, 1.0], [INF, 1.0], "differs by inf"),
        ([-INF, 1.0], [INF, 1.0], "differs by inf"),
        ([NAN, 1.0], [1.0, 1.0], "differs by nan"),
        ([INF, 1.0], [INF, 1.1], "differs by 0.1"),
        ([1.0], [1.0, 1.0], r"float64\(1,\), expected float64\(2,\)"),
    ],
)
def test_assert_close(actual, expected, message):
    if message is None:
        assert_close(np.array(actual), np.array(expected))
        return
    with pytest.raises(AssertionError, match=message):
        assert_close(np.array(actual), np.array(expected))


# ---------------------------------------------------------------- run, submit, await


async def test_awaiting_a_step_runs_it(remote_mesh):
    mesh = await inline(remote_mesh)
    step, (params, batch) = mesh.distributed(sgd()), problem()
    want = await mesh.fetch(await mesh.run(step, params, batch))
    assert_close(await mesh.fetch(await step(params, batch)), want)


async def test_submit_hands_on_outputs_before_they_exist(remote_mesh):
    mesh = await inline(remote_mesh)
    params, batch = problem()
    step = mesh.distributed(sgd(), donate_argnums=0)
    want = params
    for _ in range(6):
        want, want_losses = jax.jit(sgd())(want, batch)
    state, futures = params, []
    for _ in range(6):
        futures.append(await mesh.submit(step, state, batch))
        state, _ = futures[-1].outputs
    got = await futures[-1]
    assert got is futures[-1].outputs and all(f.done() for f in futures)
    assert_close(await mesh.fetch(got), (want, want_losses))


async def test_outputs_under_way_are_fetched_deleted_and_dropped(remote_mesh):
    mesh = await inline(remote_mesh)
    params, batch = problem()
    step = mesh.distributed(sgd())
    want = jax.jit(sgd())(params, batch)
    await step(params, batch)
    gc.collect()
    before = await numbers(mesh, "store_arrays")
    future = await mesh.submit(step, params, batch)
    assert_close(await future.outputs[1], want[1])  # fetching waits for the value alone
    await future
    future = await mesh.submit(step, params, batch)
    await asyncio.gather(*(x.delete() for x in jax.tree.leaves(future.outputs)))
    await future
    future = await mesh.submit(step, params, batch)
    batch["x"][:] = np.nan  # it has left: changing it now changes nothing
    losses, future = future.outputs[1], None
    gc.collect()
    assert_close(await losses, want[1])
    del losses
    await step(params, batch)  # steps end in order: the one before is over as well
    gc.collect()
    assert await numbers(mesh, "store_arrays") == before


async def test_max_inflight_holds_back(remote_mesh):
    params, batch = problem(1)
    async with jpp.RemoteMesh(2, launcher="inline", max_inflight=2) as mesh:
        step = mesh.distributed(sgd())
        await step.compile(params, batch)
        for _ in range(8):
            await mesh.submit(step, params, batch)
            assert len(mesh._controller._under_way) <= 2
        # Admission is first come, first served, and waits only for a step to end.
        futures = await asyncio.gather(*(mesh.submit(step, params, batch) for _ in range(4)))
        results = await asyncio.gather(*futures)
    assert len(results) == 4
    with pytest.raises(MeshError, match="max_inflight is 0"):
        jpp.RemoteMesh(2, launcher="inline", max_inflight=0)


# ---------------------------------------------------------------- init, put, fetch


async def test_init_makes_each_leaf_where_it_lives(remote_mesh):
    mesh = await inline(remote_mesh)
    model = models.gpt(num_stages=2, layers=2, tied=True)

    def init(key, scale):
        leaves, tree = jax.tree.flatten(model.init(0))
        made = [
            jnp.sin(jnp.arange(x.size) * 0.1 * (i + 1)).reshape(x.shape) * scale for i, x in enumerate(leaves)
        ]
        params = jax.tree.unflatten(tree, made)
        return {**params, "embed": jax.random.normal(key, params["embed"].shape) * scale}

    args = (jax.random.key(3), 0.5)
    step = mesh.distributed(models.grads_step(model, jpp.GPipe(2)), donate_argnums=0)
    await step.compile(jax.eval_shape(init, *args), model.batch(0, 2))
    state = await step.init(0, init, *args)
    where = [slot.actors for slot in jax.tree.leaves(step.argument(0, ""))]
    assert [leaf.actors for leaf in jax.tree.leaves(state)] == where
    assert state["embed"].actors == (0, 1) and state["blocks"][1]["up"].actors == (1,)
    want = jax.jit(init)(*args)
    assert_close(await mesh.fetch(state), want, rtol=1e-6)
    # The tied weight is one value: both actors hold the same bits, also after steps.
    for _ in range(2):
        on_each = [
            await mesh._controller.fetch([(a, state["embed"]._id, state["embed"]._type.aval)]) for a in (0, 1)
        ]
        assert on_each[0][0].tobytes() == on_each[1][0].tobytes()
        state, _, _ = await mesh.run(step, state, model.batch(0, 2))


async def test_init_of_something_else_says_which_leaf(remote_mesh):
    mesh = await inline(remote_mesh)
    step, (params, batch) = mesh.distributed(sgd()), problem()
    with pytest.raises(MeshError, match="compile it first"):
        await step.init(0, lambda: params)
    await step.compile(params, batch)
    with pytest.raises(
        ArrayError, match=r"result\['head'\] is .*float16.* but params\['head'\] is .*float32"
    ):
        await step.init(0, lambda: {**params, "head": params["head"].astype(jnp.float16)})


async def test_put_like_a_step_argument_or_a_tree(remote_mesh):
    mesh = await inline(remote_mesh)
    step, (params, batch) = mesh.distributed(sgd()), problem()
    await step.compile(params, batch)
    placed = await mesh.put(params, like=(step, 0))
    assert [x.actors for x in jax.tree.leaves(placed)] == [
        slot.actors for slot in jax.tree.leaves(step.argument(0, ""))
    ]
    again = await mesh.put(jax.tree.map(lambda x: x + 1, params), like=placed)
    assert [x.actors for x in jax.tree.leaves(again)] == [x.actors for x in jax.tree.leaves(placed)]
    assert_close(await mesh.fetch((placed, again)), (params, jax.tree.map(lambda x: x + 1, params)))
    sent = await mesh.run(step, placed, batch)
    assert_close(await mesh.fetch(sent), jax.jit(sgd())(params, batch))
    with pytest.raises(ArrayError, match="the values have 1 leaves, like has 5"):
        await mesh.put(params["head"], like=(step, 0))


async def test_put_without_like_waits_for_its_first_use(remote_mesh):
    mesh = await inline(remote_mesh)
    step, (params, batch) = mesh.distributed(sgd()), problem()
    source = np.array(batch["x"])
    waiting = await mesh.put({"x": source, "y": batch["y"]})
    source[:] = 0  # a copy was taken
    assert waiting["x"].actors == ()
    assert_close(await mesh.fetch(waiting), batch)
    assert_close(await mesh.fetch(await mesh.run(step, params, waiting)), jax.jit(sgd())(params, batch))
    assert waiting["x"].actors == (0,) and waiting["y"].actors == (1,)
    assert_close(await waiting["x"], batch["x"])


VALUES = {
    "float32": np.linspace(0, 1, 5, dtype=np.float32),
    "bfloat16": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3) / 3,
    "float8_e4m3fn": jnp.arange(4, dtype=jnp.float8_e4m3fn),
    "bool": np.array([True, False, True]),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(2.5),
    "complex64": np.array([1 + 2j], np.complex64),
    "uint8": np.arange(256, dtype=np.uint8),
    "large": np.arange(20_000, dtype=np.int32),
    "new key": jax.random.key(7),
    "new keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
    "old key": jax.random.PRNGKey(9),
    "fortran": np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3)),
    "strided": np.arange(10, dtype=np.float32)[::2],
}


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_values_survive_the_round_trip(remote_mesh, launcher):
    mesh = await remote_mesh(2, launcher=launcher)

    def move_and_copy(values, step_count):
        return values, jax.tree.map(jnp.copy, values), step_count + 1

    out, copied, count = await mesh.run(mesh.distributed(move_and_copy), VALUES, 1)
    want = jax.tree.map(jnp.asarray, VALUES)
    assert_close(await mesh.fetch(out), want)
    assert_close(await mesh.fetch(copied), want)
    assert int(await count) == 2
    for name, value in want.items():
        assert (out[name].shape, out[name].dtype) == (value.shape, value.dtype), name
        assert (await out[name]).dtype == value.dtype
    # Leaves that are no RemoteArrays stay as they are.
    fetched = await mesh.fetch([out["bool"], "text", 3])
    assert fetched[1:] == ["text", 3] and fetched[0].tolist() == [True, False, True]


async def test_host_values_of_any_kind_are_arguments(remote_mesh):
    mesh = await inline(remote_mesh)

    def fn(x, i, f, b, wide, key, old_key):
        noise = jax.random.normal(key, (3,)) + jax.random.uniform(old_key, (3,))
        return {
            "x": x * f + i,
            "b": jnp.where(b, noise, 0),
            "wide": wide,
            "half": jnp.ones(2, jnp.bfloat16) * f,
        }

    args = (
        jnp.arange(3.0),
        3,
        0.5,
        True,
        {"i": np.arange(3, dtype=np.int64), "f": np.arange(3, dtype=np.float64), "s": np.float64(0.1)},
        jax.random.key(1),
        jax.random.PRNGKey(2),
    )
    out = await same_as_jit(mesh, fn, *args)
    assert (out["wide"]["i"].dtype, out["wide"]["s"].dtype) == (np.int32, np.float32)
    assert out["half"].dtype == jnp.bfloat16  # 0.5 is weakly typed, as in JAX


# ---------------------------------------------------------------- compile, report, schedules


async def test_compile_from_shapes_alone(remote_mesh):
    mesh = await inline(remote_mesh)
    step, (params, batch) = mesh.distributed(sgd()), problem()
    shapes = jax.eval_shape(lambda: (params, batch))
    compiled = await step.compile(*shapes)
    before = await numbers(mesh, "compilations")
    assert_close(await mesh.fetch(await step(params, batch)), jax.jit(sgd())(params, batch))
    assert await numbers(mesh, "compilations") == before
    assert await step.compile(params, batch) is compiled
    with pytest.raises(ArrayError, match="ShapeDtypeStruct"):
        await mesh.run(step, *shapes)


async def test_what_a_compiled_step_says(remote_mesh):
    mesh = await inline(remote_mesh)
    compiled = await mesh.distributed(sgd()).compile(*problem())
    text = compiled.as_text()
    labels = [
        f"{task}, mb {i})" for task in ("fwd(stage 0", "fwd_bwd(stage 1", "bwd(stage 0") for i in range(4)
    ]
    assert all(label in text for label in labels)
    assert list(compiled.passes)[:3] == ["trace", "hoist", "partition"]
    assert all(isinstance(t, str) and t for t in compiled.passes.values())
    report = compiled.report()
    assert [dict(a.tasks) for a in report.actors] == [
        {"fwd": 4, "start": 1, "bwd": 4, "outer": 1},
        {"start": 2, "fwd_bwd": 4, "outer": 1},
    ]
    activation = 4 * 4 * 4  # (microbatch of 4, width 4) float32
    assert {(t.from_actor, t.to_actor): (t.size_bytes, t.count) for t in report.transfers} == {
        (0, 1): (activation, 4),
        (1, 0): (activation, 4),
    }
    assert (
        [a.sent_bytes for a in report.actors]
        == [4 * activation] * 2
        == [a.received_bytes for a in report.actors]
    )
    assert all(a.peak_bytes > 0 for a in report.actors)
    places = {p.name: p.actors for p in (*report.inputs, *report.outputs)}
    assert places["params['blocks'][0]['w']"] == places["result[0]['blocks'][0]['w']"] == (0,)
    assert places["params['head']"] == places["result[1]"] == places["batch['y']"] == (1,)
    assert places["batch['x']"] == (0,)
    assert all(line in str(report) for line in ("arguments", "results", "batch['x'] "))


async def test_another_schedule_compiles_no_task_again(remote_mesh):
    mesh = await inline(remote_mesh)
    step, (params, batch) = mesh.distributed(sgd()), problem()
    want = await mesh.fetch(await step(params, batch))

    async def compiled_by(schedule):
        before = await numbers(mesh, "compilations")
        assert_close(await mesh.fetch(await step.with_schedule(schedule)(params, batch)), want)
        return await numbers(mesh, "compilations") - before

    assert await compiled_by(jpp.Eager1F1B(2)) == 0
    # Here the last stage's forward and backward do not follow each other: they were one executable and become
    # two.
    assert await compiled_by(jpp.GPipe(2)) == 2
    assert [await compiled_by(s) for s in (jpp.GPipe(2).tasks(4, 2), jpp.LoopedBFS(2), jpp.Std1F1B(2))] == [
        0,
        0,
        0,
    ]


async def test_a_state_that_loses_its_weak_types_compiles_once(remote_mesh):
    mesh = await inline(remote_mesh)
    params, batch = problem()
    params["blocks"][0]["b"] = jnp.full((4,), 0.1)
    assert params["blocks"][0]["b"].weak_type

    def train_step(state, batch):
        params, losses = sgd()(state["params"], batch)
        return {
            "params": params,
            "step": state["step"] + 1,
            "scale": state["scale"] * jnp.float32(0.5),
        }, losses

    step = mesh.distributed(train_step)
    state = plain = {"params": params, "step": 0, "scale": 1.0}
    traces = []
    for _ in range(3):
        state, _ = await mesh.run(step, state, batch)
        plain, _ = jax.jit(train_step)(plain, batch)
        traces.append((len({id(c) for c in step._compiled.values()}), await numbers(mesh, "compilations")))
    assert traces[0] == traces[1] == traces[2] and traces[0][0] == 1
    assert_close(await mesh.fetch(state), plain)


async def test_weak_types_that_matter_are_kept(remote_mesh):
    """A weak float32 leaves bfloat16 alone, a strong one does not: two forms are needed, as under jit."""
    mesh = await inline(remote_mesh)

    def fn(scale, x):
        return scale * jnp.float32(2), x * scale

    step, scale, plain = mesh.distributed(fn), 1.5, 1.5
    x = jnp.ones(3, jnp.bfloat16)
    for dtype in (jnp.bfloat16, jnp.float32):
        scale, y = await step(scale, x)
        plain, want = jax.jit(fn)(plain, x)
        assert y.dtype == want.dtype == dtype
        assert_close(await y, want)


async def test_static_arguments(remote_mesh):
    mesh = await inline(remote_mesh)
    step = mesh.distributed(lambda x, n, name: {name: x * n}, static_argnums=(1, 2))
    for n, name in ((2, "a"), (3, "a"), (3, "b")):
        assert_close(await mesh.fetch(await step(jnp.ones(2), n, name)), {name: jnp.ones(2) * n})
    assert len({id(c) for c in step._compiled.values()}) == 3


# ---------------------------------------------------------------- arrays: life and death


async def test_properties_of_a_remote_array(remote_mesh):
    mesh = await inline(remote_mesh)
    params, losses = await mesh.run(mesh.distributed(sgd()), *problem())
    w = params["blocks"][1]["w"]
    assert (w.shape, w.dtype, w.ndim, w.nbytes, w.actors) == ((4, 4), np.float32, 2, 64, (1,))
    assert isinstance(w.sharding, jax.sharding.NamedSharding) and w.sharding.is_fully_replicated
    assert repr(w) == "RemoteArray(float32[4, 4], actors=[1])"
    fetched = await losses
    assert isinstance(fetched, np.ndarray) and fetched.shape == (4,)
    fetched[:] = 0  # the user's own copy
    assert (await losses).any()


async def test_mesh_actors(remote_mesh):
    for launcher in ("inline", "local"):
        mesh = await remote_mesh(2, launcher=launcher)
        assert [a.id for a in mesh.actors] == [0, 1]
        assert all(a.host and a.pid and a.devices and a.state == "ready" for a in mesh.actors)
        assert len({a.pid for a in mesh.actors}) == (1 if launcher == "inline" else 2)


async def test_deleted_arrays_cannot_be_used(remote_mesh):
    mesh = await inline(remote_mesh)
    step, (params, batch) = mesh.distributed(sgd()), problem()
    state, losses = await step(params, batch)
    before = await numbers(mesh, "store_arrays")
    await state["head"].delete()
    await state["head"].delete()
    assert state["head"].is_deleted() and not losses.is_deleted()
    assert await numbers(mesh, "store_arrays") == before - 1
    with pytest.raises(ArrayError, match=r"params\['head'\] cannot be used: it was deleted"):
        await step(state, batch)
    with pytest.raises(ArrayError, match="it was deleted"):
        await state["head"]
    with pytest.raises(ArrayError, match="it was deleted"):
        await mesh.fetch(state)


async def test_donation(remote_mesh):
    mesh = await inline(remote_mesh)
    fn, (params, batch) = sgd(), problem()
    step = mesh.distributed(fn, donate_argnums=0)
    numpy_params = jax.tree.map(np.array, params)
    kept = jax.tree.map(np.copy, numpy_params)
    first, _ = await step(numpy_params, batch)
    assert_close(numpy_params, kept)  # a host array is the user's
    params = jax.tree.map(jnp.asarray, params)
    from_jax, _ = await step(params, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))
    assert_close(await mesh.fetch(first), await mesh.fetch(from_jax))
    second, _ = await step(first, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    with pytest.raises(ArrayError, match=r"params\['blocks'\]\[0\]\['b'\].*donated to step 'train_step'"):
        await step(first, batch)
    want = jax.jit(fn)(jax.jit(fn)(params, batch)[0], batch)[0]
    assert_close(await mesh.fetch(second), want)
    with pytest.raises(ArrayError, match="donated and passed twice"):
        await mesh.run(mesh.distributed(lambda a, b: (a + 1, b), donate_argnums=0), *[second["head"]] * 2)
    assert not second["head"].is_deleted()  # refused before anything ran
    # An array that is not donated can be used again.
    for _ in range(2):
        assert_close(
            await mesh.fetch((await mesh.run(mesh.distributed(fn), second, batch))[0]),
            jax.jit(fn)(want, batch)[0],
        )


async def test_donation_of_an_array_put_without_like(remote_mesh):
    mesh = await inline(remote_mesh)
    params, batch = problem()
    step = mesh.distributed(sgd(), donate_argnums=0)
    waiting = await mesh.put(params)
    got, _ = await step(waiting, batch)
    assert waiting["head"].is_deleted()
    assert_close(await mesh.fetch(got), jax.jit(sgd())(params, batch)[0])


async def test_garbage_is_freed_on_the_actors(remote_mesh):
    mesh = await inline(remote_mesh)
    step, (params, batch) = mesh.distributed(sgd()), problem()
    state, _ = await step(params, batch)
    gc.collect()
    before = await numbers(mesh, "store_arrays")
    for _ in range(3):
        state, _ = await step(state, batch)
    gc.collect()
    assert await numbers(mesh, "store_arrays") == before
    more = [(await step(state, batch))[0] for _ in range(2)]
    assert await numbers(mesh, "store_arrays") == before + 2 * len(jax.tree.leaves(state))
    cycle = [more]
    cycle.append(cycle)
    del more, cycle
    await asyncio.to_thread(gc.collect)  # another thread may run it
    assert await numbers(mesh, "store_arrays") == before


async def test_an_array_that_lies_elsewhere_is_moved_and_reported(remote_mesh, caplog):
    mesh = await inline(remote_mesh)
    params, batch = problem()
    step = mesh.distributed(sgd())
    placed, _ = await step(params, batch)
    rows = jpp.GPipe(2).tasks(4, 2)
    swapped = step.with_schedule(rows[::-1])
    with caplog.at_level(logging.INFO, logger="jaxpp_async"):
        got, _ = await swapped(placed, batch)
    assert "moving params['head'] (48 bytes) from actor 1 to [0]" in caplog.text
    assert got["head"].actors == (0,) and placed["head"].actors == (0, 1)
    want = jax.jit(sgd())(jax.jit(sgd())(params, batch)[0], batch)[0]
    assert_close(await mesh.fetch(got), want)
    again, _ = await step(placed, batch)  # still where it was, too
    assert_close(await mesh.fetch(again), want)


async def test_moved_and_donated(remote_mesh):
    mesh = await inline(remote_mesh)
    params, batch = problem()
    step = mesh.distributed(sgd(), donate_argnums=0)
    swapped = step.with_schedule(jpp.GPipe(2).tasks(4, 2)[::-1])
    state, want, held = params, params, []
    for turn in (step, swapped, step, swapped):
        state, _ = await turn(state, batch)
        want, _ = jax.jit(sgd())(want, batch)
        gc.collect()
        held.append(await numbers(mesh, "store_arrays"))
    assert held[1] == held[2] == held[3]  # from the second on: each step keeps its microbatch indices
    assert_close(await mesh.fetch(state), want)


async def test_arrays_of_another_mesh_are_refused(remote_mesh):
    one, two = await inline(remote_mesh, 2), await inline(remote_mesh, 1)
    x = await one.run(one.distributed(lambda x: x + 1), jnp.ones(2))
    with pytest.raises(ArrayError, match="x is a RemoteArray of another mesh"):
        await two.run(two.distributed(lambda x: x), x)
    with pytest.raises(MeshError):
        await two.run(one.distributed(lambda x: x), jnp.ones(2))


# ---------------------------------------------------------------- programs of every shape


async def test_captured_and_constant_values(remote_mesh):
    mesh = await inline(remote_mesh)
    table = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)  # large: becomes an argument
    on_device, key = jnp.asarray(table) * 2, jax.random.key(5)

    def fn(w, batch):
        def per_microbatch(x):
            h = jpp.pipeline_yield(x @ table @ w)
            return jnp.sum(h @ on_device * jax.random.normal(key, (64,))), jnp.float32(3)

        total, constants = jpp.accumulate_grads(per_microbatch, jpp.GPipe(2))(batch)
        return total, constants, 7, jnp.arange(3), np.float32(1.5), table[:2], key, on_device

    out = await same_as_jit(mesh, fn, jnp.eye(64) / 64, table.reshape(4, 16, 64))
    assert int(await out[2]) == 7


async def test_one_step_after_another_with_captured_values_frees_nothing_needed(remote_mesh):
    mesh = await inline(remote_mesh)
    table = jnp.arange(1000.0)
    step = mesh.distributed(lambda x: x + table.sum())
    for _ in range(3):
        assert_close(await (await step(jnp.ones(()))), jnp.ones(()) + table.sum())
        gc.collect()


async def test_integer_and_key_leaves_pass_a_stage_boundary(remote_mesh):
    mesh = await inline(remote_mesh)

    def fn(w, key, batch):
        def per_microbatch(mb, i):
            def loss(w):
                state = {
                    "h": mb["x"] @ w,
                    "count": jnp.sum(mb["n"] * 2),
                    "mask": mb["n"] > 2,
                    "key": jax.random.fold_in(key, i),
                    "none": None,
                }
                state = jpp.pipeline_yield(state)
                h = state["h"] * state["mask"][:, None] + jax.random.normal(state["key"], state["h"].shape)
                return jnp.sum(h**2) / state["count"], (state["count"], state["key"], state["mask"])

            (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(w)
            return grads, value, extra

        return jpp.accumulate_grads(per_microbatch, jpp.Std1F1B(2), pass_index=True)(batch)

    batch = {"x": jnp.ones((4, 3, 2)), "n": jnp.arange(12).reshape(4, 3)}
    await same_as_jit(mesh, fn, jnp.ones((2, 2)), jax.random.key(0), batch)


async def test_all_reductions_with_the_index(remote_mesh):
    mesh = await inline(remote_mesh)

    def fn(w, batch):
        def per_microbatch(mb, i):
            h = jpp.pipeline_yield(mb @ w)
            top = jnp.max(h)
            return {
                "sum": (h, jnp.sum(h)),
                "mean": jnp.mean(h),
                "max": (top, i, h > 0),
                "min": (jnp.min(mb), -i),
                "rows": h,
                "columns": mb[None],
                "stack": {"i": i * i, "bool": top > 0, "half": h.astype(jnp.bfloat16)},
            }

        reduce = {
            "sum": jpp.Sum(),
            "mean": jpp.Mean(),
            "max": jpp.Max(),
            "min": jpp.Min(),
            "rows": jpp.Concat(),
            "columns": jpp.Concat(axis=-1),
            "stack": jpp.Stack(),
        }
        return jpp.accumulate_grads(per_microbatch, jpp.Std1F1B(2), reduce=reduce, pass_index=True)(batch)

    batch = np.random.default_rng(1).normal(size=(3, 2, 4)).astype(np.float32)
    out = await same_as_jit(mesh, fn, jnp.eye(4) - 0.5, batch)
    assert (out["rows"].shape, out["columns"].shape, out["stack"]["half"].shape) == (
        (6, 4),
        (1, 2, 12),
        (3, 2, 4),
    )


async def test_an_evaluation_loop_has_no_backward(remote_mesh):
    mesh = await inline(remote_mesh)
    params, batch = problem()

    def evaluate(params, batch):
        loss = jpp.accumulate_grads(lambda mb: MODEL.loss(params, mb), jpp.Std1F1B(2), reduce=jpp.Mean())(
            batch
        )
        return {"loss": loss, "perplexity": jnp.exp(loss)}

    await same_as_jit(mesh, evaluate, params, batch)
    compiled = await mesh.distributed(evaluate).compile(params, batch)
    assert "bwd(" not in compiled.as_text()


async def test_a_step_without_a_loop(remote_mesh):
    mesh = await inline(remote_mesh)

    def fn(tree, x):
        return jax.tree.map(lambda w: jnp.tanh(w) + x, tree), jnp.linalg.norm(tree["a"]), x

    await same_as_jit(mesh, fn, {"a": jnp.arange(6.0).reshape(2, 3), "b": [jnp.ones(2), 2]}, 0.25)


async def test_two_loops_in_one_step(remote_mesh):
    mesh = await inline(remote_mesh)
    params, batch = problem()

    def fn(params, batch, held_out):
        params, losses = sgd()(params, batch)
        after = jpp.accumulate_grads(lambda mb: MODEL.loss(params, mb), jpp.GPipe(2), reduce=jpp.Mean())(
            held_out
        )
        return params, losses, after

    await same_as_jit(mesh, fn, params, batch, MODEL.batch(5, 2))


CASES = [
    ("one microbatch", 2, 2, 1),
    ("fewer microbatches than stages", 4, 4, 2),
    ("more stages than actors", 4, 2, 3),
    ("stages that actors do not divide", 4, 3, 3),
    ("fewer stages than actors", 2, 4, 3),
    ("one stage, two actors", 1, 2, 2),
    ("one actor", 2, 1, 2),
]


@pytest.mark.parametrize(
    "num_stages, num_actors, num_microbatches", [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
@pytest.mark.parametrize("kind", [jpp.Std1F1B, jpp.Interleaved1F1B])
async def test_counts_that_do_not_match(remote_mesh, kind, num_stages, num_actors, num_microbatches):
    mesh = await inline(remote_mesh, num_actors)
    model = models.mlp(num_stages=num_stages, width=4)
    params, batch = model.init(0), model.batch(0, num_microbatches)
    await same_as_jit(mesh, models.grads_step(model, kind(num_stages)), params, batch)


async def test_results_that_are_arguments(remote_mesh):
    """One array returned twice, an argument returned as it came, one that nobody uses."""
    mesh = await inline(remote_mesh)

    def fn(a, b, unused):
        c = a + b
        return c, c, a, (b, unused)

    out = await same_as_jit(mesh, fn, jnp.ones(3), jnp.zeros(3), jnp.arange(4))
    await out[0].delete()
    assert_close(await out[1], jnp.ones(3))  # two results, two arrays
    out = await same_as_jit(mesh, fn, jnp.ones(3), jnp.zeros(3), jnp.arange(4), donate_argnums=(0, 1, 2))
    step = mesh.distributed(fn, donate_argnums=(0, 1, 2))
    first = await step(jnp.ones(3), jnp.zeros(3), jnp.arange(4))
    second = await step(first[2], first[3][0], first[3][1])
    assert_close(await mesh.fetch(second), jax.jit(fn)(jnp.ones(3), jnp.zeros(3), jnp.arange(4)))


async def test_frozen_parameters_and_stop_gradient(remote_mesh):
    """Only the last stage trains: no backward task for the first."""
    mesh = await inline(remote_mesh)
    params, batch = problem()

    def fn(params, batch):
        def microbatch_grads(mb):
            def loss(head):
                return MODEL.loss({**params, "head": head}, mb)

            value, grads = jax.value_and_grad(loss)(params["head"])
            return grads, value

        grads, losses = jpp.accumulate_grads(microbatch_grads, jpp.Std1F1B(2))(batch)
        return {**params, "head": params["head"] - 0.1 * grads}, losses

    await same_as_jit(mesh, fn, params, batch, donate_argnums=0)
    compiled = await mesh.distributed(fn).compile(params, batch)
    assert "bwd(stage 0" not in compiled.as_text() and "bwd(stage 1" in compiled.as_text()


# ---------------------------------------------------------------- configuration and event loops


async def test_jax_config_reaches_processes(remote_mesh):
    """64-bit and matmul precision as set here before the mesh starts."""
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        async with jpp.RemoteMesh(2) as mesh:
            params, batch = problem()
            params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
            batch = jax.tree.map(lambda x: x.astype(np.float64), batch)
            out, losses = await mesh.run(mesh.distributed(sgd()), params, batch)
            want, want_losses = jax.jit(sgd())(params, batch)
            assert losses.dtype == np.float64
            assert_close(await mesh.fetch((out, losses)), (want, want_losses), rtol=1e-13)
    finally:
        jax.config.update("jax_enable_x64", False)
        jax.config.update("jax_default_matmul_precision", None)


SCRIPT = """
    import asyncio, jax, sys
    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp
    import jaxpp_async as jpp

    def step(w, batch):
        def grads(mb):
            return jax.grad(lambda w: jnp.sum(jpp.pipeline_yield(mb @ w) ** 2))(w)
        return jpp.accumulate_grads(grads, jpp.GPipe(2))(batch)

    async def main():
        async with jpp.RemoteMesh(2, launcher=sys.argv[2]) as mesh:
            batch = jnp.ones((2, 3, 4))
            got = await (await mesh.run(mesh.distributed(step), jnp.ones((4, 4)), batch))
            difference = abs(got - step(jnp.ones((4, 4)), batch)).max()
            print(type(asyncio.get_running_loop()).__module__, float(difference))

    if sys.argv[1] == "uvloop":
        import uvloop
        uvloop.run(main())
    else:
        asyncio.run(main())
"""


@pytest.mark.parametrize("loop, launcher", [("uvloop", "local"), ("uvloop", "inline"), ("asyncio", "local")])
def test_the_driver_may_run_on_either_loop(loop, launcher):
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(SCRIPT), loop, launcher],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0].startswith(loop) and done.stdout.split()[1] == "0.0"
    assert done.stderr == ""
