"""The work of executables: operations as XLA counts them, each equal executable counted once."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.roofline import roofline
from jax.sharding import PartitionSpec as P
from planning import f32, plan_step

import jaxpp_async as jpp
from jaxpp_async.compiler import work
from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import Recipe
from jaxpp_async.compiler.trace import trace
from jaxpp_async.session import mesh_options

CPU = Target(None, "cpu", {})


def counted(fn, *shapes, specs=None, target=CPU):
    """The work of a function as one executable; `specs`: of its arguments, then of its results."""
    traced = trace(fn, [jax.ShapeDtypeStruct(s, "float32") for s in shapes])
    recipe = Recipe("fwd0", traced.flat.inputs, traced.flat.outputs, traced.flat.ops)
    found = dict(zip((*recipe.inputs, *recipe.outputs), specs or (), strict=False))
    return work.recipe_work(recipe, traced.types, found, target), traced


def mlp(x, w1, w2):
    def loss(x, w1, w2):
        return jnp.sum(jnp.tanh(x @ w1) @ w2)

    return jax.grad(loss, argnums=(1, 2))(x, w1, w2)


def attention(x, wq, wo):
    def loss(x, wq, wo):
        b, s, d = x.shape
        q, k, v = (a.reshape(b, s, 8, -1) for a in jnp.split(x @ wq, 3, -1))
        p = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
        return (jnp.einsum("bhst,bthd->bshd", p, v).reshape(b, s, d) @ wo).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(x, wq, wo)


def convolution(x, k):
    def loss(x, k):
        y = jax.lax.conv_general_dilated(
            x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), rhs_dilation=(2, 1)
        )
        return (y.sum()) ** 2

    return jax.grad(loss, argnums=(0, 1))(x, k)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (mlp, [(64, 256), (256, 512), (512, 256)]),
        (attention, [(4, 64, 256), (256, 768), (256, 256)]),
        (convolution, [(8, 32, 32, 16), (3, 3, 16, 32)]),
    ],
)
def test_operations_are_counted_as_xla_counts_them(fn, shapes):
    found, traced = counted(fn, *shapes)
    args = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    expected = jax.jit(fn).lower(*args).compile().cost_analysis()
    assert found.flops == pytest.approx(expected["flops"], rel=0.02)
    assert work.count_flops(traced.flat.ops, traced.types) == found.flops


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [(mlp, [(64, 256), (256, 512), (512, 256)]), (attention, [(4, 64, 256), (256, 768), (256, 256)])],
)
def test_products_are_counted_as_jax_s_roofline_counts_them(fn, shapes):
    found, _ = counted(fn, *shapes)
    args = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    _, expected = roofline(fn)(*args)
    assert found.flops == pytest.approx(expected.flops, rel=0.02)


# ---------------------------------------------------------------- control flow


def flops_of(fn, *shapes) -> float:
    return counted(fn, *shapes)[0].flops


def test_the_body_of_a_scan_counts_once_an_iteration():
    def scanned(x, ws):
        return lax.scan(lambda c, w: (c @ w, None), x, ws)[0]

    assert flops_of(scanned, (4, 8), (5, 8, 8)) == 5 * 2 * 4 * 8 * 8


def test_the_body_of_a_while_counts_once():
    def repeated(x, w):
        return lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ w, x)

    assert flops_of(repeated, (4, 8), (8, 8)) == 2 * 4 * 8 * 8


def test_the_largest_branch_of_a_cond_counts():
    def chosen(x, w):
        return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x + 1, x)

    assert flops_of(chosen, (4, 8), (8, 8)) == 2 * 4 * 8 * 8 + 2  # the comparison and its cast to an index


def test_calls_of_all_kinds_count_by_the_operations_inside():
    product = 2 * 4 * 8 * 8

    @jax.custom_vjp
    def custom(x, w):
        return x @ w

    custom.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))
    assert flops_of(custom, (4, 8), (8, 8)) == product
    assert flops_of(jax.checkpoint(jnp.matmul), (4, 8), (8, 8)) == product
    assert flops_of(lambda x, w: jax.nn.relu(x @ w), (4, 8), (8, 8)) == product + 4 * 8
    backward = jax.grad(jax.checkpoint(lambda x, w: jnp.sin(x @ w).sum()))
    assert flops_of(backward, (4, 8), (8, 8)) == pytest.approx(2 * product, rel=0.2)  # computed again


# ---------------------------------------------------------------- bytes


def test_elementwise_operations_are_fused_and_products_are_not():
    def body(x, w):
        return jnp.sin(jnp.tanh(x) + 1) @ w

    sizes = 4 * 8, 8 * 16, 4 * 16
    # The argument is read once, and the product reads what was computed of it.
    assert counted(body, (4, 8), (8, 16))[0].size_bytes == 4 * (sum(sizes) + 4 * 8)
    assert counted(lambda x: x * 2 + 1, (4, 8))[0].size_bytes == 4 * 2 * 4 * 8


def test_an_argument_that_is_not_read_and_what_an_index_skips_cost_nothing():
    assert counted(lambda x, y: x + 1, (4, 8), (1000,))[0].size_bytes == 4 * 2 * 4 * 8
    rows, index = counted(lambda t, i: t[i.astype("int32")], (1000, 8), (4,))[0].size_bytes, 4 * 4
    assert rows <= 4 * (3 * 4 * 8) + 4 * index
    update = counted(lambda x, y: lax.dynamic_update_slice(x, y, (0, 0)), (1000, 8), (4, 8))
    assert update[0].size_bytes == 4 * 2 * 4 * 8


# ---------------------------------------------------------------- temporaries


@pytest.mark.parametrize(
    ("fn", "shapes", "within"),
    [
        (mlp, [(512, 64), (64, 256), (256, 64)], (0.5, 2.0)),
        (attention, [(4, 128, 64), (64, 192), (64, 64)], (0.5, 2.0)),
        (lambda x: jnp.sum(jnp.tanh(x) ** 2), [(512, 512)], (0, 0)),
    ],
    ids=["mlp", "attention", "elementwise"],
)
def test_temporaries_are_about_those_of_xla(fn, shapes, within):
    args = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    analysis = jax.jit(fn).lower(*args).compile().memory_analysis()
    least, most = within
    found = counted(fn, *shapes)[0].temp_bytes
    assert least * analysis.temp_size_in_bytes <= found <= most * analysis.temp_size_in_bytes + 64


def test_attention_does_not_hold_the_scores_of_all_its_layers():
    def layers(n):
        def fn(x, w):
            for _ in range(n):
                p = jax.nn.softmax(jnp.einsum("sd,td->st", x, x))
                x = (p @ x) @ w
            return x

        return counted(fn, (1024, 8), (8, 8))[0].temp_bytes

    assert layers(4) == pytest.approx(layers(1), rel=0.05) and 1 <= layers(1) / (4 * 1024**2) < 2.1


def test_temporaries_of_a_loop_are_those_of_one_iteration_and_sharded_ones_are_parts():
    def body(c, w):
        return jnp.tanh(jnp.tanh(c @ w) @ w), jnp.sum(c)

    def looped(x, ws):
        return lax.scan(body, x, ws)[0] @ ws[0]

    one, many = (counted(looped, (64, 32), (n, 32, 32))[0].temp_bytes for n in (2, 16))
    assert 64 * 32 * 4 <= one == many
    split = mesh_options.make_target({"d": 4}, ["auto"], {}, "cpu")
    whole = counted(lambda x, w: (x @ w) @ w, (64, 32), (32, 32))[0].temp_bytes
    part = counted(lambda x, w: (x @ w) @ w, (64, 32), (32, 32), specs=[("d",), (), ("d",)], target=split)
    assert (whole, part[0].temp_bytes) == (64 * 32 * 4, 64 * 32 * 4 / 4)


# ---------------------------------------------------------------- whole steps


def train_step(layers, schedule):
    def step(ws, xs):
        def loss(ws, x):
            for k, w in enumerate(ws):
                x = jnp.tanh(x @ w)
                x = jpp.pipeline_yield(x) if k < layers - 1 else x
            return jnp.sum(x)

        return jpp.accumulate_grads(lambda mb: jax.grad(loss)(ws, mb), schedule)(xs)

    return step


def by_name(compiled):
    names = [recipe.name for recipe in compiled.placed.recipes]
    return dict(zip(names, compiled.works, strict=True))


def test_equal_tasks_are_counted_once(monkeypatch):
    compiled = plan_step(train_step(24, jpp.Interleaved1F1B(24)), [f32(8, 8)] * 24, f32(8, 4, 8), actors=4)
    counts = []
    count = work.recipe_work
    monkeypatch.setattr(work, "recipe_work", lambda *args: counts.append(args[0].name) or count(*args))
    found = by_name(compiled)
    assert len(counts) <= 8 < 60 < len(found)
    assert found["fwd1"] == found["fwd22"] and found["fwd1"].key != found["bwd1"].key
    number = len(counts)
    assert by_name(compiled) == found and len(counts) == number


def test_the_count_outlives_the_step_and_keeps_only_its_operations():
    compiled = plan_step(train_step(2, jpp.Std1F1B(2)), [f32(8, 8)] * 2, f32(8, 4, 8), actors=2)
    count, ends = compiled.count_works, [weakref.ref(x) for x in (compiled, compiled.placed, compiled.traced)]
    del compiled
    gc.collect()
    assert [end() for end in ends] == [None] * 3
    assert count() is count() and len(count()) > 4


def test_a_task_has_one_key_in_steps_of_all_schedules_and_lowered_or_not():
    one, other = (
        plan_step(train_step(4, s), [f32(8, 8)] * 4, f32(8, 4, 8), actors=a)
        for s, a in ((jpp.Std1F1B(4), 4), (jpp.Interleaved1F1B(4), 2))
    )
    assert by_name(one)["fwd1"] == by_name(other)["fwd2"]
    wider = plan_step(train_step(4, jpp.Std1F1B(4)), [f32(8, 8)] * 4, f32(8, 5, 8), actors=4)
    assert by_name(wider)["fwd1"].key != by_name(one)["fwd1"].key
    sharded = plan_step(
        train_step(4, jpp.Std1F1B(4)),
        [f32(8, 8)] * 4,
        f32(8, 4, 8),
        actors=4,
        spmd_mesh={"data": 2},
        in_shardings=(None, P(None, "data")),
    )
    assert by_name(sharded)["fwd1"].key != by_name(one)["fwd1"].key
    assert by_name(sharded)["fwd1"].flops == by_name(one)["fwd1"].flops / 2


def test_a_task_reads_one_microbatch_of_a_batch():
    few, many = (plan_step(train_step(2, jpp.Std1F1B(2)), [f32(8, 8)] * 2, f32(m, 4, 8)) for m in (2, 200))
    assert by_name(few)["fwd0"].size_bytes == by_name(many)["fwd0"].size_bytes


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_shardings_of_types_count_like_those_that_are_inferred(kind):
    def step(ws, xs):
        def loss(ws, x):
            x = jpp.pipeline_yield(jnp.tanh(x @ ws[0]))
            out = P("data", None) if kind == "explicit" else None
            return jnp.sum(jnp.matmul(x, ws[1], out_sharding=out) ** 2)

        return jpp.accumulate_grads(lambda mb: jax.grad(loss)(ws, mb), jpp.Std1F1B(2))(xs)

    compiled = plan_step(
        step,
        [f32(8, 8)] * 2,
        f32(8, 4, 8),
        spmd_mesh={"data": 2, "model": 2},
        axis_types={"data": kind, "model": kind},
        in_shardings=([P(None, "model"), P("model")], P(None, "data")),
    )
    found = by_name(compiled)
    product, weights = 2 * 4 * 8 * 8 / 4, 8 * 8 / 2 * 4
    assert product <= found["fwd0"].flops < 1.3 * product
    assert 3 * product <= found["fwd_bwd1"].flops < 3.6 * product
    sums = [(c.kind, dict(c.axes), c.size_bytes) for c in found["fwd_bwd1"].collectives]
    assert ("all-reduce", {"model": 2}, 2 * 8 * 4) in sums  # of the product of split rows
    assert ("all-reduce", {"data": 2}, weights) in sums  # of the gradients over the batch
