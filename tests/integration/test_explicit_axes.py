"""Explicit axes inside actors: shardings stand in the types of values, from the arguments to the
accumulators."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import parallel_model as model
import pytest
from docs_code import doc_code
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from on_devices import mesh_of, run_on_devices
from planning import f32, plan_step
from program_text import parse_aval

import jaxpp_async as jpp
from jaxpp_async.actors.jax_runtime import Devices
from jaxpp_async.actors.receive_buffers import ReceivePool
from jaxpp_async.actors.shards import Layouts, fetch_shards
from jaxpp_async.errors import RemoteError, ShardingError
from jaxpp_async.program.actor_program import format_aval
from jaxpp_async.program.instructions import Aval
from jaxpp_async.testing import assert_close

BOTH = {"data": 2, "model": 2}
DATA, MODEL = {"data": 2}, {"model": 2}
EXPLICIT = {"data": "explicit", "model": "explicit"}
RULES = {"batch": "data", "mlp": "model"}

docs = doc_code("sharding.md")


def down_to(*spec):
    """The product that ends a block: explicit axes ask where a contraction over a split dimension goes."""
    return lambda h, w: jnp.einsum("bsh,hd->bsd", h, w, out_sharding=P(*spec))


def shard_hidden(x, what):
    return jpp.shard(x, ("batch", None, "mlp")) if what == "hidden" else x


def typed(axes):
    return {axis: "explicit" for axis in axes}


# ---------------------------------------------------------------- kinds of parallelism

W, HEAD, ACT = "8x16", "4x8", "4x6x8"
ONCE = {
    "outer1_actor0": [f"all-reduce {W}"] * 2,
    "outer1_actor1": [f"all-reduce {HEAD}", *[f"all-reduce {W}"] * 2],
}
once = model.make_step(docs["unreduced_grads"](model.make_loss()), docs["like_params"])
# step; axes, types, in_shardings; collectives; specs of values between tasks
PARALLEL = {
    "data": (
        model.make_step(model.plain_grads(model.make_loss())),
        (DATA, typed(DATA), (P(), P(None, "data"))),
        {"bwd0": [f"all-reduce {W}"] * 2, "fwd_bwd1": [f"all-reduce {HEAD}", *[f"all-reduce {W}"] * 2]},
        {"act": ("data",), "hidden": ("data",), "up": (), "down": ()},
    ),
    "data, gradients added once": (
        once,
        (DATA, typed(DATA), (P(), P(None, "data"))),
        ONCE,
        {"act": ("data",), "up": ()},
    ),
    "fully sharded, gradients added once": (
        once,
        (DATA, typed(DATA), (P("data"), P(None, "data"))),
        {
            "fwd0": [f"all-gather {W}"] * 2,
            "fwd_bwd1": [f"all-gather {HEAD}", *[f"all-gather {W}"] * 2],
            "bwd0": [f"all-gather {W}"],
            **ONCE,
        },
        {"act": ("data",), "hidden": ("data",)},
    ),
    "tensor": (
        model.make_step(model.plain_grads(model.make_loss(shard_hidden, down_to()))),
        (MODEL, typed(MODEL), (model.TENSOR_PARALLEL, P())),
        {"fwd0": [f"all-reduce {ACT}"], "fwd_bwd1": [f"all-reduce {ACT}"] * 2},
        {"act": (), "hidden": (None, None, "model"), "up": (None, "model"), "down": ("model",)},
    ),
    "tensor on an automatic axis, data on an explicit one": (
        model.make_step(model.plain_grads(model.make_loss(shard_hidden))),
        (BOTH, typed(DATA), (model.TENSOR_PARALLEL, P(None, "data"))),
        {
            "fwd0": ["all-reduce 2x6x8"],
            "fwd_bwd1": [*["all-reduce 2x6x8"] * 2, *["all-reduce 8x8"] * 2, f"all-reduce {HEAD}"],
            "bwd0": ["all-reduce 8x8"] * 2,
        },
        {"act": ("data",), "hidden": ("data", None, "model"), "up": (None, "model"), "down": ("model",)},
    ),
}


@pytest.mark.parametrize("kind", PARALLEL)
def test_parallelism_inside_actors(kind):
    step, (axes, types, shardings), collectives, split = PARALLEL[kind]
    args = model.make_params(), model.make_batch()
    rules = {name: axis for name, axis in RULES.items() if axis in axes}
    ran = run_on_devices(step, *args, axes=axes, axis_types=types, axis_rules=rules, in_shardings=shardings)
    assert ran.collectives == {task: sorted(found) for task, found in collectives.items()}
    assert {what: ran.split[model.SHAPES[what]] for what in split} == {k: {v} for k, v in split.items()}
    assert_close(ran.results, jax.jit(model.make_step(model.plain_grads(model.make_loss())))(*args))


def test_the_docs_run_it_under_plain_jit_on_one_device():
    args = model.make_params(), model.make_batch()
    got = docs["under_jit"](once, args, (P(), P(None, "data")))
    assert_close(got, jax.jit(model.make_step(model.plain_grads(model.make_loss())))(*args))


# ---------------------------------------------------------------- on actors


async def get_mesh(remote_mesh):
    return await remote_mesh(2, launcher="inline", spmd_mesh=BOTH, axis_types=EXPLICIT, axis_rules=RULES)


def placed(mesh, tree, specs):
    """Arrays for plain JAX, split as `specs` (a prefix of `tree`) says."""
    return jax.tree.map(
        lambda spec, part: jax.device_put(part, NamedSharding(mesh, spec)),
        specs,
        tree,
        is_leaf=lambda s: isinstance(s, P),
    )


async def test_steps_equal_jit_on_the_same_mesh(remote_mesh):
    mesh = await get_mesh(remote_mesh)
    step_fn = model.make_step(model.plain_grads(model.make_loss(down=down_to("data"))))
    shardings = (model.TENSOR_PARALLEL, P(None, "data"))
    step = mesh.distributed(step_fn, in_shardings=shardings, donate_argnums=0)
    params, batch = model.make_params(), model.make_batch()
    here = mesh_of(BOTH, EXPLICIT)
    with jax.sharding.set_mesh(here):
        plain, plain_batch = placed(here, params, shardings[0]), placed(here, batch, shardings[1])
        for _ in range(2):
            params, losses = await step(params, batch)
            plain, plain_losses = jax.jit(step_fn)(plain, plain_batch)
            assert_close(await mesh.fetch((params, losses)), (plain, plain_losses))
        want = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, plain)
    assert jax.tree.map(lambda a: P(*a.spec, *[None] * (len(a.shape) - len(a.spec))), params) == want


def reduced_over_data(w):
    return jax.sharding.reshard(w, jax.typeof(w).sharding.spec.update(reduced={"data"}))


def tied_step(schedule):
    """One weight in two stages, with partial gradients that are not added up over data when they meet."""

    def loss(w, x):
        return jnp.sum(jpp.pipeline_yield(jnp.tanh(x @ w)) @ w)

    def step(w, batch):
        def grads_of(x):
            plain_mesh = jax.sharding.get_abstract_mesh().empty
            return jax.grad(loss)(w if plain_mesh else reduced_over_data(w), x)

        grads = jpp.accumulate_grads(grads_of, schedule)(batch)
        return grads if jax.sharding.get_abstract_mesh().empty else jax.sharding.reshard(grads, P())

    return step


@pytest.mark.parametrize("schedule", [jpp.GPipe(2), jpp.Std1F1B(2)], ids=["GPipe", "Std1F1B"])
async def test_an_unreduced_value_goes_to_another_actor(remote_mesh, schedule):
    mesh = await get_mesh(remote_mesh)
    w, batch = model.make_params()["blocks"][0]["up"][:, :8], model.make_batch()["x"][:, :, 0]
    step = mesh.distributed(tied_step(schedule), in_shardings=(P(), P(None, "data")))
    assert_close(await (await step(w, batch)), jax.jit(tied_step(schedule))(w, batch))
    text = (await step.compile(w, batch)).as_text()
    assert "recv" in text and "f32[8,8]{|data}" in text


async def test_values_to_be_added_over_devices_are_not_looked_at_for_nans(remote_mesh):
    """JAX computes no `any` of them; what stands before and behind them is looked at."""
    before = jax.config.jax_debug_nans
    jax.config.update("jax_debug_nans", True)
    try:
        # one of its own: the failure ends it
        options = {"spmd_mesh": BOTH, "axis_types": EXPLICIT, "max_inflight": 1}
        mesh = await remote_mesh(2, launcher="inline", **options)
        w, batch = model.make_params()["blocks"][0]["up"][:, :8], model.make_batch()["x"][:, :, 0]
        step = mesh.distributed(tied_step(jpp.GPipe(2)), in_shardings=(P(), P(None, "data")))
        assert_close(await (await step(w, batch)), jax.jit(tied_step(jpp.GPipe(2)))(w, batch))
        batch[-1, 0] = np.nan
        with pytest.raises(
            RemoteError, match=r"mb 3\): .*explicit_axes.py:\d+: invalid value \(nan\) encountered"
        ):
            await step(w, batch)
    finally:
        jax.config.update("jax_debug_nans", before)


async def test_an_array_brings_its_sharding_along(remote_mesh):
    """Without in_shardings: host values lie whole, remote arrays as they are."""
    mesh = await get_mesh(remote_mesh)
    seen = []

    def fn(x):
        seen.append(jax.typeof(x).sharding.spec)
        return jax.sharding.reshard(x * 2, P("data", "model"))

    step = mesh.distributed(fn)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    split = await step(x)
    assert split.spec == () and seen == [P(None, None)]  # it continues the argument, and lies like it
    spread = await mesh.distributed(fn, out_shardings=P("data", "model"))(x)
    again = await step(spread)
    assert spread.spec == again.spec == ("data", "model") and seen[-1] == P("data", "model")
    assert_close(await again, x * 4)


async def test_keys_integers_scalars_and_every_reduction(remote_mesh):
    mesh = await get_mesh(remote_mesh)

    def fn(key, count, batch):
        def noisy(x, i):
            x, n = jpp.pipeline_yield((x * 2, jnp.sum(x > 0)))
            noise = jax.random.normal(jax.random.fold_in(key, i), (4, 1, 1))
            return jnp.sum(x * noise), n, jax.random.fold_in(key, i), x, x, x, x

        reduce = (jpp.Sum(), jpp.Stack(), jpp.Stack(), jpp.Max(), jpp.Mean(), jpp.Concat(1), jpp.Stack())
        return jpp.accumulate_grads(noisy, jpp.GPipe(2), reduce=reduce, pass_index=True)(batch), count + 1

    args = (jax.random.key(2), 3, model.make_batch()["x"])
    step = mesh.distributed(fn, in_shardings=(P(), P(), P(None, "data")))
    out = await step(*args)
    assert_close(await mesh.fetch(out), jax.jit(fn)(*args))
    *_, largest, mean, joined, stacked = out[0]
    assert [a.spec for a in (largest, mean, joined, stacked)] == [
        ("data",),
        ("data",),
        ("data",),
        (None, "data"),
    ]
    with jax.sharding.set_mesh(mesh_of(BOTH, EXPLICIT)):
        split = jax.device_put(args[2], NamedSharding(jax.sharding.get_mesh(), P(None, "data")))
        plain = jax.jit(lambda batch: fn(args[0], 3, batch)[0][3:])(split)
    assert [x.sharding.spec for x in plain] == [P("data", None, None)] * 3 + [P(None, "data", None, None)]


UNREDUCED = Aval((4, 2), "float32", ("model",), ("data",))


@pytest.mark.parametrize("spec", [(), (None, "model"), (("model", "x y"),)])
@pytest.mark.parametrize("unreduced", [("data",), ("data", "x|y")])
def test_unreduced_axes_as_text(spec, unreduced):
    aval = Aval((4, 2), "float32", spec, unreduced)
    assert parse_aval(format_aval(aval)) == aval
    assert format_aval(UNREDUCED) == "f32[4,2]{model|data}"


@pytest.mark.parametrize("private_copy", [False, True])
def test_each_device_receives_its_part_of_a_sum(private_copy):
    layouts = Layouts(Devices(mesh_of(BOTH, EXPLICIT)))
    layout = layouts.of(UNREDUCED)
    assert [(s.part.shape, s.positions) for s in layout.shards] == [((2, 2), (k,)) for k in range(4)]
    buffer = ReceivePool(layouts).buffers_of(UNREDUCED).take()
    for k, memory in enumerate(buffer.memory):
        memory.view(np.float32)[:] = k
    array = buffer.copied() if private_copy else buffer.array
    assert array.sharding == layout.sharding
    assert [float(shard.ravel()[0]) for shard in fetch_shards(array, layout)] == [0, 1, 2, 3]


# ---------------------------------------------------------------- types


def traced_types(fn, *specs, shape=(4, 6)):
    """Specs of the results of `fn` on arrays of `shape`, traced on the mesh."""
    mesh = mesh_of(BOTH, EXPLICIT).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        args = [jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, s)) for s in specs]
        return [a.sharding.spec for a in jax.make_jaxpr(fn)(*args).out_avals]


def total(x):
    return jnp.sum(jpp.pipeline_yield(jnp.sin(x)) ** 2)


def product(w):
    rows = jax.sharding.reshard(jnp.ones((2, 4)), P("data"))
    return jnp.sum(rows @ jpp.pipeline_yield(w))


X = P("data", "model")
TYPES = {
    "yield": (jpp.pipeline_yield, [X], [X]),
    "gradient": (jax.grad(total), [X], [X]),
    "tangent": (lambda x, t: jax.jvp(lambda x: jpp.pipeline_yield(jnp.sin(x)), (x,), (t,)), [X, X], [X, X]),
    "vmap over a split dimension": (jax.vmap(jax.grad(total)), [X], [X]),
    "vmap over another one": (jax.vmap(jpp.pipeline_yield, in_axes=1, out_axes=1), [X], [X]),
    "checkpoint": (jax.grad(jax.checkpoint(total)), [X], [X]),
    "a reduced value's gradient": (
        jax.grad(product),
        [P(reduced={"data"})],
        [P(None, None, unreduced={"data"})],
    ),
    "sum and stack of a loop": (
        jpp.accumulate_grads(lambda row: (row, row), jpp.GPipe(1)),
        [P(None, "model")],
        [P("model"), P(None, "model")],
    ),
}


@pytest.mark.parametrize("case", TYPES)
def test_marks_keep_shardings_in_types(case):
    fn, specs, want = TYPES[case]
    assert traced_types(fn, *specs) == want


def test_shard_reshards_and_leaves_what_vmap_adds():
    def planned(fn, rules):
        spec = (P("data"),)
        done = plan_step(
            fn, f32(4, 6), actors=1, spmd_mesh=BOTH, axis_types=EXPLICIT, axis_rules=rules, in_shardings=spec
        )
        return [done.traced.types[v].sharding.spec for v in done.traced.flat.outputs]

    inner = jax.jit(lambda x: jpp.shard(x, (None, "mlp")))  # traced anew under other rules
    assert planned(inner, RULES) == [P(None, "model")]
    assert planned(inner, {"mlp": "data"}) == [P(None, "data")]
    assert planned(jax.vmap(lambda row: jpp.shard(row, ("mlp",))), RULES) == [P("data", "model")]


# ---------------------------------------------------------------- what is refused

REFUSED = {
    "an ambiguous product": (
        lambda x: x.T @ x,
        P("data"),
        r"integration/test_explicit_axes.py:\d+: .*ambiguous",
    ),
    "a result that is not added up": (
        lambda x: jax.grad(lambda w: jnp.sum(x @ w))(
            jax.sharding.reshard(jnp.ones((6, 2)), P(reduced={"data"}))
        ),
        P("data"),
        r"result is unreduced over data: .*jax.sharding.reshard",
    ),
    "an argument that is not added up": (
        lambda x: x,
        P(unreduced={"data"}),
        r"reduced or unreduced over an axis",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    fn, spec, says = REFUSED[case]
    with pytest.raises(ShardingError, match=says):
        plan_step(fn, f32(4, 6), actors=1, spmd_mesh=BOTH, axis_types=EXPLICIT, in_shardings=(spec,))


# ---------------------------------------------------------------- split backwards


BLOCKS = {
    "checkpoint": jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])),
    "scan": lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0],
}


@pytest.mark.parametrize("block", BLOCKS)
def test_what_a_split_backward_keeps_is_split_as_on_automatic_axes(block):
    """Values made while a checkpoint or a scan is cut in two have shardings in their types as all others."""

    def loss(params, mb):
        x = jpp.pipeline_yield(BLOCKS[block](params[0], mb["x"]))
        return jnp.mean((BLOCKS[block](params[1], x) - mb["y"]) ** 2)

    def step(params, batch):
        return jpp.accumulate_grads(lambda mb: jax.grad(loss)(params, mb), jpp.ZeroBubbleH1(2))(batch)

    def kept(axis_types):
        params, batch = [f32(2, 8, 8)] * 2, {"x": f32(4, 4, 8), "y": f32(4, 4, 8)}
        shardings = (None, P(None, "data"))
        done = plan_step(step, params, batch, spmd_mesh=DATA, axis_types=axis_types, in_shardings=shardings)
        values = {
            v for n in done.placed.graph.nodes if n.label.startswith("fwd_bwd_input") for v in n.outputs
        }
        return sorted(
            (done.placed.graph.values[v].aval.shape, done.placed.graph.values[v].aval.spec) for v in values
        )

    assert kept(typed(DATA)) == kept({})
    assert {spec for _, spec in kept(typed(DATA))} <= {("data",), (None, "data")}
