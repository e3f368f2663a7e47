"""Data and tensor parallelism inside actors: the numbers, and that arrays are really split."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import parallel_model
import pytest
from docs_code import doc_code
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from on_devices import run_on_devices
from planning import plan_step

import jaxpp_async as jpp
from jaxpp_async.actors.executables import compile_blob
from jaxpp_async.actors.jax_runtime import Devices
from jaxpp_async.testing import assert_close

DIM, HIDDEN, OUT, ROWS = 8, 12, 4, 6
RULES = {"batch": "data", "mlp": "model"}
BOTH = {"data": 2, "model": 2}
DATA, MODEL = {"data": 2}, {"model": 2}

SPECS = {"act": ("data", None), "hidden": ("data", "model")}
NAMES = {"act": ("batch", None), "hidden": ("batch", "mlp")}


def make_step(constrain=lambda x, what: x):
    """Two stages of a residual block, a head in the second; (parameters, batch) to (parameters, gradients,
    losses)."""

    def loss(params, mb):
        x = constrain(mb["x"], "act")
        for i, block in enumerate(params["blocks"]):
            h = constrain(jax.nn.relu(x @ block["up"]), "hidden")
            x = constrain(x + h @ block["down"], "act")
            if i == 0:
                x = jpp.pipeline_yield(x)
        return jnp.mean((x @ params["head"] - mb["y"]) ** 2)

    def train_step(params, batch):
        def microbatch_grads(mb):
            value, grads = jax.value_and_grad(loss)(params, mb)
            return grads, value

        grads, losses = jpp.accumulate_grads(microbatch_grads, jpp.Std1F1B(2))(batch)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), grads, losses

    return train_step


def make_params(scale=1.0):
    def wave(n, *shape):
        return jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32) * (n + 0.7)).reshape(shape) * 0.4 * scale

    blocks = [{"up": wave(i, DIM, HIDDEN), "down": wave(i + 2, HIDDEN, DIM)} for i in range(2)]
    return {"blocks": blocks, "head": wave(4, DIM, OUT)}


def make_batch():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(4, ROWS, DIM)).astype(np.float32),
        "y": rng.normal(size=(4, ROWS, OUT)).astype(np.float32),
    }


def limited(entries, axes):
    """A spec with the axes that there are."""
    return P(*(e if e in axes else None for e in entries))


def constraint(axes):
    return lambda x, what: jax.lax.with_sharding_constraint(x, limited(SPECS[what], axes))


def in_shardings(kind, axes):
    """The same shardings written in three ways, as tree prefixes."""
    if kind == "names":
        return ({"blocks": {"up": (None, "mlp"), "down": ("mlp", None)}, "head": None}, (None, "batch"))

    def spec(*entries):
        found = limited(entries, axes)
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
        return NamedSharding(mesh, found) if kind == "NamedSharding" else found

    return (
        {"blocks": {"up": spec(None, "model"), "down": spec("model", None)}, "head": spec()},
        spec(None, "data"),
    )


def spread(shardings):
    """`blocks` is a list: a prefix has to name its entries."""
    params, batch = shardings
    return ({**params, "blocks": [params["blocks"]] * 2}, batch)


WAYS = ("PartitionSpec", "NamedSharding", "names")
VARIANTS = {
    "with_sharding_constraint": lambda axes: (make_step(constraint(axes)), None),
    "shard": lambda axes: (make_step(lambda x, what: jpp.shard(x, NAMES[what])), None),
    "PartitionSpec": lambda axes: (make_step(), spread(in_shardings("PartitionSpec", axes))),
}


async def get_mesh(remote_mesh, axes, launcher="inline"):
    rules = {name: axis for name, axis in RULES.items() if axis in axes}
    return await remote_mesh(2, launcher=launcher, spmd_mesh=axes, axis_rules=rules)


def held(shape, axes):
    """How the live arrays of a shape are split on the devices of inline actors, which are those of this
    process."""
    arrays = [a for a in jax.live_arrays() if a.shape == shape and isinstance(a.sharding, NamedSharding)]
    return {a.addressable_data(0).shape for a in arrays if dict(a.sharding.mesh.shape) == axes}


def devices_of(mesh):
    shape, names = tuple(mesh.spmd_mesh.values()), tuple(mesh.spmd_mesh)
    count = int(np.prod(shape))
    return Devices(jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(shape), names))


def hlo_of(mesh, compiled, name):
    """The compiled text of one task."""
    (blob,) = {e.blob for e in compiled.compiled.executables if e.name == name}
    return compile_blob(blob, (), devices_of(mesh)).call.as_text()


@pytest.mark.parametrize("variant", VARIANTS)
async def test_equals_jit(remote_mesh, variant):
    axes = BOTH
    mesh = await get_mesh(remote_mesh, axes)
    fn, shardings = VARIANTS[variant](axes)
    step = mesh.distributed(fn, in_shardings=shardings, donate_argnums=0)
    params = plain = make_params()
    for _ in range(3):
        params, grads, losses = await mesh.run(step, params, make_batch())
        plain, plain_grads, plain_losses = jax.jit(make_step())(plain, make_batch())
        assert_close(await mesh.fetch((grads, losses)), (plain_grads, plain_losses))
    assert_close(await mesh.fetch(params), plain)
    up = limited((None, "model"), axes)
    for block in params["blocks"]:
        assert block["up"].sharding.is_equivalent_to(NamedSharding(block["up"].sharding.mesh, up), 2)
    # On the devices, too: weights, gradients and their accumulators are split over "model" and nothing else.
    assert held((DIM, HIDDEN), axes) == {(DIM, HIDDEN // axes.get("model", 1))}
    assert held((HIDDEN, DIM), axes) == {(HIDDEN // axes.get("model", 1), DIM)}


async def test_equals_jit_across_processes(remote_mesh):
    mesh = await get_mesh(remote_mesh, BOTH, "local")
    step = mesh.distributed(make_step(lambda x, what: jpp.shard(x, NAMES[what])), donate_argnums=0)
    params = plain = make_params()
    for _ in range(2):
        params, grads, losses = await mesh.run(step, params, make_batch())
        plain, plain_grads, plain_losses = jax.jit(make_step())(plain, make_batch())
        assert_close(await mesh.fetch((params, grads, losses)), (plain, plain_grads, plain_losses))
    assert params["blocks"][1]["up"].spec == ((None, "model"))
    assert all(len(a.devices) == 4 for a in mesh.actors)


def test_one_sharding_written_in_three_ways():
    def planned(way):
        shardings = spread(in_shardings(way, BOTH))
        return plan_step(
            make_step(), make_params(), make_batch(), spmd_mesh=BOTH, axis_rules=RULES, in_shardings=shardings
        )

    first, *others = (planned(way).passes["shard"] for way in WAYS)
    assert "(None, 'model')" in first and all(text == first for text in others)


# ---------------------------------------------------------------- kinds of parallelism, from docs/sharding.md

docs = doc_code("sharding.md")
plain_loss = parallel_model.make_loss()


def shard_names(**names):
    return lambda x, what: jpp.shard(x, names[what])


# step; axes; rules; in_shardings; collectives in forward, backward and update tasks; specs of activations and
# weights
W, HEAD, ACT = "8x16", "4x8", "4x6x8"
PARALLEL = {
    "data": (
        parallel_model.make_step(parallel_model.plain_grads(plain_loss)),
        (DATA, {}, (P(), P(None, "data"))),
        {"bwd0": [f"all-reduce {W}"] * 2, "fwd_bwd1": [f"all-reduce {HEAD}", *[f"all-reduce {W}"] * 2]},
        {"act": ("data",), "hidden": ("data",), "up": (), "down": ()},
    ),
    "data, gradients added once": (
        parallel_model.make_step(docs["grads_by_device"](plain_loss), docs["added_over_devices"]),
        (DATA, {"batch": "data"}, (P(), P(None, "data"))),
        {
            "outer1_actor0": [f"all-reduce {W}"] * 2,
            "outer1_actor1": [f"all-reduce {HEAD}", *[f"all-reduce {W}"] * 2],
        },
        {"shards of act": ("data",), "shards of up": ("data",), "up": (), "down": ()},
    ),
    "tensor": (
        parallel_model.make_step(parallel_model.plain_grads(plain_loss)),
        (MODEL, {}, (parallel_model.TENSOR_PARALLEL, P())),
        {"fwd0": [f"all-reduce {ACT}"], "fwd_bwd1": [f"all-reduce {ACT}"] * 2},
        {"act": (), "hidden": (None, None, "model"), "up": (None, "model"), "down": ("model",)},
    ),
    "fully sharded": (
        parallel_model.make_step(parallel_model.plain_grads(docs["gathered"](plain_loss))),
        (DATA, {}, (P("data"), P(None, "data"))),
        {
            "fwd0": [f"all-gather {W}"] * 2,
            "fwd_bwd1": [
                *[f"all-gather {HEAD}", *[f"all-gather {W}"] * 2],
                *[f"all-reduce {HEAD}", *[f"all-reduce {W}"] * 2],
            ],
            "bwd0": [f"all-gather {W}", *[f"all-reduce {W}"] * 2],
        },
        {"act": ("data",), "hidden": ("data",), "up": ("data",), "down": ("data",)},
    ),
    "fully sharded, gradients added once": (
        parallel_model.make_step(
            docs["grads_by_device"](docs["gathered"](plain_loss)), docs["added_over_devices"]
        ),
        (DATA, {"batch": "data"}, (P("data"), P(None, "data"))),
        {
            "fwd0": [f"all-gather {W}"] * 2,
            "fwd_bwd1": [f"all-gather {HEAD}", *[f"all-gather {W}"] * 2],
            "bwd0": [f"all-gather {W}"],
            "outer1_actor0": [f"all-reduce {W}"] * 2,
            "outer1_actor1": [f"all-reduce {HEAD}", *[f"all-reduce {W}"] * 2],
        },
        {"shards of act": ("data",), "shards of up": ("data",), "up": ("data",), "down": ("data",)},
    ),
    "sequence": (
        parallel_model.make_step(
            parallel_model.plain_grads(
                parallel_model.make_loss(shard_names(act=(None, "sequence"), hidden=(None, None, "mlp")))
            )
        ),
        (
            MODEL,
            {"sequence": "model", "mlp": "model"},
            (parallel_model.TENSOR_PARALLEL, P(None, None, "model")),
        ),
        {
            "fwd0": [f"all-gather {ACT}", f"all-reduce {ACT}"],
            "fwd_bwd1": [*[f"all-gather {ACT}"] * 2, f"all-reduce {HEAD}", *[f"all-reduce {ACT}"] * 2],
            "bwd0": [f"all-gather {ACT}"] * 2,
        },
        {"act": (None, "model"), "hidden": (None, None, "model"), "up": (None, "model"), "down": ("model",)},
    ),
}


@pytest.mark.parametrize("kind", PARALLEL)
def test_parallelism_inside_actors(kind):
    """The numbers, what XLA makes of each task (a CPU has no reduce-scatter), and that nothing is a whole
    copy."""
    step, (axes, rules, shardings), collectives, split = PARALLEL[kind]
    args = parallel_model.make_params(), parallel_model.make_batch()
    ran = run_on_devices(step, *args, axes=axes, axis_rules=rules, in_shardings=shardings)
    assert ran.collectives == {task: sorted(found) for task, found in collectives.items()}
    assert {what: ran.split[parallel_model.SHAPES[what]] for what in split} == {
        k: {v} for k, v in split.items()
    }
    assert_close(
        ran.results, jax.jit(parallel_model.make_step(parallel_model.plain_grads(plain_loss)))(*args)
    )


@pytest.mark.parametrize("schedule", [jpp.GPipe(2), jpp.ZeroBubbleH1(2)], ids=["GPipe", "ZeroBubbleH1"])
def test_parallelism_under_other_schedules(schedule):
    """Tasks whose forms differ: forward and backward of the last stage apart, or its backward in two."""
    step, (axes, rules, shardings), _, split = PARALLEL["sequence"]
    args = parallel_model.make_params(), parallel_model.make_batch()
    ran = run_on_devices(step, *args, axes=axes, axis_rules=rules, in_shardings=shardings, schedule=schedule)
    assert {what: ran.split[parallel_model.SHAPES[what]] for what in split} == {
        k: {v} for k, v in split.items()
    }
    assert_close(
        ran.results, jax.jit(parallel_model.make_step(parallel_model.plain_grads(plain_loss)))(*args)
    )


async def test_every_boundary_value_is_pinned_split(remote_mesh):
    """Nothing that depends on the batch is silently whole on every device."""
    mesh = await get_mesh(remote_mesh, BOTH)
    fn, shardings = VARIANTS["PartitionSpec"](BOTH)
    compiled = await mesh.distributed(fn, in_shardings=shardings).compile(make_params(), make_batch())
    specs = {v.aval.shape: set() for v in compiled.compiled.placed.graph.values}
    for value in compiled.compiled.placed.graph.values:
        specs[value.aval.shape].add(value.aval.spec)
    assert specs[4, ROWS, DIM] == specs[4, ROWS, OUT] == {(None, "data")}  # the batch
    assert specs[ROWS, DIM] == {("data",)}  # activations and cotangents between stages
    assert specs[ROWS, HIDDEN] == {("data", "model")}  # what the backward keeps
    assert specs[DIM, HIDDEN] == {(None, "model")} and specs[HIDDEN, DIM] == {("model",)}
    places = {p.name: p.type for p in compiled.report().inputs}
    assert "'model'" in places["params['blocks'][0]['up']"] and "'data'" in places["batch['x']"]


async def test_tasks_have_the_collectives_that_their_shardings_ask_for(remote_mesh):
    mesh = await get_mesh(remote_mesh, BOTH)
    fn, shardings = VARIANTS["PartitionSpec"](BOTH)
    compiled = await mesh.distributed(fn, in_shardings=shardings).compile(make_params(), make_batch())
    forward, backward = hlo_of(mesh, compiled, "fwd0"), hlo_of(mesh, compiled, "bwd0")
    # Over "model" after the row-split matrix; over "data" for gradients. Never a gather: everything fits as
    # it lies.
    assert "all-reduce" in forward and "all-reduce" in backward
    assert "all-gather" not in forward and "all-gather" not in backward
    # One device's part of microbatch and hidden units, and never the whole.
    assert f"f32[{ROWS // 2},{HIDDEN // 2}]" in forward and f"f32[{ROWS},{HIDDEN}]" not in forward


async def test_out_shardings(remote_mesh):
    mesh = await get_mesh(remote_mesh, BOTH)

    def fn(x):
        return {"split": x * 2, "named": x + 1, "whole": x - 1, "free": x.sum()}

    out_shardings = {"split": P("model", "data"), "named": ("mlp", None), "whole": P(), "free": None}
    step = mesh.distributed(fn, in_shardings=P("data"), out_shardings=out_shardings)
    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    out = await step(x)
    assert_close(await mesh.fetch(out), jax.jit(fn)(x))
    assert {name: a.spec for name, a in out.items()} == {
        "split": ("model", "data"),
        "named": ("model",),
        "whole": (),
        "free": (),
    }
    assert out["split"].sharding.shard_shape(out["split"].shape) == (6, 2)
    assert out["whole"].sharding.is_fully_replicated
    assert {(6, 2), (12, 4)} <= held((12, 4), BOTH)


async def test_one_value_asked_for_in_several_shardings(remote_mesh):
    mesh = await get_mesh(remote_mesh, BOTH)

    def fn(x):
        y = x * 2
        return x, y, y, x + 1

    step = mesh.distributed(
        fn, in_shardings=P("data"), out_shardings=(P("model"), P("data"), P(None, "model"), None)
    )
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    out = await step(x)
    assert_close(await mesh.fetch(out), jax.jit(fn)(x))
    assert [a.spec for a in out] == [("model",), ("data",), (None, "model"), ("data",)]
    places = {p.name: p.type for p in (await step.compile(x)).report().inputs}
    assert "('data',)" in places["x"]


async def test_an_array_split_another_way_is_split_anew_and_reported(remote_mesh, caplog):
    mesh = await get_mesh(remote_mesh, BOTH)
    rows = mesh.distributed(lambda x: x + 1, out_shardings=P("data"))
    columns = mesh.distributed(lambda x: (x * 2, x.sum()), in_shardings=P(None, "model"), donate_argnums=0)
    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    between = await rows(x)
    assert between.spec == ("data",)
    with caplog.at_level(logging.INFO, logger="jaxpp_async"):
        y, total = await columns(between)
    assert "resharding x from ('data',) to (None, 'model')" in caplog.text
    assert y.spec == (None, "model") and between.is_deleted()
    assert_close(await mesh.fetch((y, total)), ((x + 1) * 2, (x + 1).sum()))


async def test_put_like_a_split_argument(remote_mesh):
    mesh = await get_mesh(remote_mesh, BOTH)
    fn, shardings = VARIANTS["PartitionSpec"](BOTH)
    step, params = mesh.distributed(fn, in_shardings=shardings), make_params()
    await step.compile(params, make_batch())
    placed = await mesh.put(params, like=(step, 0))
    assert placed["blocks"][0]["up"].spec == (None, "model") and placed["blocks"][1]["down"].spec == (
        "model",
    )
    assert_close(await mesh.fetch(placed), params)
    got = await step(placed, make_batch())
    assert_close(await mesh.fetch(got), jax.jit(make_step())(params, make_batch()))


async def test_init_and_optimizer_state_follow_their_parameters(remote_mesh):
    mesh = await get_mesh(remote_mesh, BOTH)
    sgd = make_step(lambda x, what: jpp.shard(x, NAMES[what]))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def init(scale):
        params = make_params(scale)
        return {"params": params, "opt": optimizer.init(params)}

    def fn(state, batch):
        _, grads, losses = sgd(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, losses

    step = mesh.distributed(fn, donate_argnums=0)
    await step.compile(jax.eval_shape(init, 0.5), make_batch())
    state, plain = await step.init(0, init, 0.5), jax.jit(init)(0.5)
    assert_close(await mesh.fetch(state), plain, rtol=1e-6)
    for _ in range(3):
        state, losses = await step(state, make_batch())
        plain, plain_losses = jax.jit(fn)(plain, make_batch())
        assert_close(await losses, plain_losses)
    adam = state["opt"][1][0]
    for tree in (state["params"], adam.mu, adam.nu):
        assert [b["up"].spec for b in tree["blocks"]] == [(None, "model")] * 2
        assert [b["down"].spec for b in tree["blocks"]] == [("model",)] * 2
        assert [b["up"].actors for b in tree["blocks"]] == [(0,), (1,)]


async def test_a_boundary_that_devices_do_not_divide(remote_mesh):
    """Propagation may want to split five columns over two devices; the boundary then has to lie whole."""
    mesh = await get_mesh(remote_mesh, BOTH)

    def fn(w, batch):
        def loss(w, x):
            h = jpp.pipeline_yield(jnp.tanh(x @ w)[:, :5])
            return jnp.sum(h.reshape(-1) ** 2)

        return jpp.accumulate_grads(lambda x: jax.value_and_grad(loss)(w, x)[::-1], jpp.GPipe(2))(batch)

    w = make_params()["blocks"][0]["up"]
    step = mesh.distributed(fn, in_shardings=(P(None, "model"), P(None, "data")))
    got = await step(w, make_batch()["x"])
    assert_close(await mesh.fetch(got), jax.jit(fn)(w, make_batch()["x"]))


async def test_keys_integers_and_scalars_on_a_split_mesh(remote_mesh):
    mesh = await get_mesh(remote_mesh, BOTH)

    def fn(key, count, batch):
        def noisy(x, i):
            x = jpp.shard(x, ("batch", "mlp"))
            x, n = jpp.pipeline_yield((x, jnp.sum(x > 0)))
            noise = jax.random.normal(jax.random.fold_in(key, i), x.shape)
            return jnp.sum(x * noise), n, jax.random.fold_in(key, i)

        return jpp.accumulate_grads(noisy, jpp.GPipe(2), pass_index=True)(batch), count + 1

    args = (jax.random.key(2), 3, make_batch()["x"])
    assert_close(await mesh.fetch(await mesh.run(mesh.distributed(fn), *args)), jax.jit(fn)(*args))


async def test_the_program_in_the_docs():
    docs = doc_code("sharding.md")
    params = {"first": np.eye(4, dtype=np.float32), "second": np.ones((4, 1), np.float32)}
    batch = {"x": np.ones((4, 2, 4), np.float32), "y": np.ones((4, 2, 1), np.float32)}
    got = await docs["train"](params, batch, steps=1, launcher="inline")
    assert_close(got, jax.jit(docs["train_step"])(params, batch))
