"""Operations of each device, and the exchanges between devices, as XLA's partitioner makes them.

The expected exchanges were compared with those in XLA's modules for four by two devices.
"""

from __future__ import annotations

import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpp_async.compiler import work
from jaxpp_async.compiler.export import lowering_context
from jaxpp_async.compiler.ir import Recipe
from jaxpp_async.compiler.sharded_work import ShardedArray, Tally, count_equation
from jaxpp_async.compiler.trace import trace
from jaxpp_async.session import mesh_options

SIZES = {"d": 4, "m": 2}


def target(kind="auto"):
    return mesh_options.make_target(SIZES, (kind, kind), {"batch": "d", "heads": "m"}, "cpu")


def counted(fn, shapes, ins, outs):
    """How many times as many operations all devices together have as one, and the exchanges, in elements."""
    args = [s if isinstance(s, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    with lowering_context(target()):
        traced = trace(fn, args)
    recipe = Recipe("fwd0", traced.flat.inputs, traced.flat.outputs, traced.flat.ops)
    specs = dict(zip((*recipe.inputs, *recipe.outputs), (*ins, *outs), strict=True))
    found = work.recipe_work(recipe, traced.types, specs, target())
    with lowering_context(target()):
        whole = work.count_flops(traced.flat.ops, traced.types)
    exchanges = Counter(
        f"{c.kind} {math.prod(n for _, n in c.axes)}: {c.size_bytes / 4:g}" for c in found.collectives
    )
    return whole / found.flops, dict(exchanges)


def mlp(x, w1, w2):
    return jnp.tanh(x @ w1) @ w2


def mlp_gradients(x, w1, w2):
    return jax.grad(lambda w1, w2: jnp.sum(mlp(x, w1, w2) ** 2), argnums=(0, 1))(w1, w2)


def attention_gradients(x, wq, wk, wv, wo):
    def loss(x, wq, wo):
        b, s, d = x.shape
        q, k, v = ((x @ w).reshape(b, s, 8, -1) for w in (wq, wk, wv))
        p = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
        return ((jnp.einsum("bhst,bthd->bshd", p, v).reshape(b, s, d) @ wo) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(x, wq, wo)


def embedding_gradient(table, i):
    return jax.grad(lambda t: (t[i] ** 2).sum())(table)


def log_loss_gradient(x, w):
    return jax.grad(lambda w: -jax.nn.log_softmax(x @ w)[:, 0].mean())(w)


def convolution_gradients(x, k):
    def loss(x, k):
        y = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y**2).sum()

    return jax.grad(loss, argnums=(0, 1))(x, k)


def labels_loss_gradient(x, w, i):
    def loss(w):
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), i[:, None], axis=1).mean()

    return jax.grad(loss)(w)


def scanned(x, v, w):
    return lax.scan(lambda c, vw: (mlp(c, *vw), None), x, (v, w))[0]


def constrained(x, w1, w2):
    x = lax.with_sharding_constraint(x, P("d", None))
    return lax.with_sharding_constraint(mlp(x, w1, w2), P("d", "m"))


def by_shard_map(x, w):
    def local(x, w):
        return lax.psum(x @ w, "m")

    return jax.shard_map(local, in_specs=(P("d", "m"), P("m")), out_specs=P("d"))(x, w)


WEIGHTS = [(256, 512), (512, 256)]
TENSOR_PARALLEL = [("d",), (None, "m"), ("m",)]
TOKENS = jax.ShapeDtypeStruct((32, 16), "int32")


@pytest.mark.parametrize(
    ("fn", "shapes", "ins", "outs", "times", "expected"),
    [
        pytest.param(
            mlp_gradients,
            [(64, 256), *WEIGHTS],
            TENSOR_PARALLEL,
            TENSOR_PARALLEL[1:],
            8,
            {"all-reduce 4: 65536": 2, "all-reduce 2: 4096": 1},
            id="tensor parallel",
        ),
        pytest.param(
            mlp,
            [(64, 256), *WEIGHTS],
            [("d",), ("d", "m"), ("m", "d")],
            [("d",)],
            8,
            {"all-gather 4: 65536": 2, "all-reduce 2: 4096": 1},
            id="weights gathered",
        ),
        pytest.param(
            mlp_gradients,
            [(64, 256), *WEIGHTS],
            [("d",), ("d", "m"), ("m", "d")],
            [("d", "m"), ("m", "d")],
            8,
            {"all-gather 4: 65536": 2, "reduce-scatter 4: 65536": 2, "all-reduce 2: 4096": 1},
            id="gradients scattered",
        ),
        pytest.param(
            attention_gradients,
            [(8, 64, 256), *[(256, 256)] * 4],
            [("d",), *[(None, "m")] * 3, ("m",)],
            [("d",), (None, "m"), ("m",)],
            8,
            {"all-reduce 2: 32768": 4, "all-reduce 4: 32768": 2},
            id="heads split",
        ),
        pytest.param(
            embedding_gradient,
            [(1024, 64), TOKENS],
            [("m",), ("d",)],
            [("m",)],
            4,
            {"all-reduce 2: 8192": 1, "all-reduce 4: 32768": 1},
            id="embeddings split by row",
        ),
        pytest.param(
            embedding_gradient,
            [(1024, 64), TOKENS],
            [(None, "m"), ("d",)],
            [(None, "m")],
            8,
            {"all-reduce 4: 32768": 1},
            id="embeddings split by column",
        ),
        pytest.param(
            log_loss_gradient,
            [(64, 256), (256, 1024)],
            [("d",), (None, "m")],
            [(None, "m")],
            8,
            {"all-reduce 2: 16": 2, "all-reduce 4: 131072": 1},
            id="classes split",
        ),
        pytest.param(
            labels_loss_gradient,
            [(64, 256), (256, 1024), jax.ShapeDtypeStruct((64,), "int32")],
            [("d",), (), ("d",)],
            [()],
            4,
            {"all-reduce 4: 262144": 1},
            id="each row indexed for itself",
        ),
        pytest.param(
            convolution_gradients,
            [(8, 16, 16, 8), (3, 3, 8, 16)],
            [("d",), (None, None, None, "m")],
            [("d",), (None, None, None, "m")],
            8,
            {"all-reduce 4: 576": 1, "all-reduce 2: 4096": 1},
            id="convolution",
        ),
        pytest.param(
            scanned,
            [(64, 256), (5, 256, 512), (5, 512, 256)],
            [("d",), (None, None, "m"), (None, "m")],
            [("d",)],
            8,
            {"all-reduce 2: 4096": 5},
            id="scan",
        ),
        pytest.param(
            constrained,
            [(64, 256), *WEIGHTS],
            [("d", "m"), (None, "m"), ("m",)],
            [("d", "m")],
            8,
            {"all-gather 2: 4096": 1, "reduce-scatter 2: 4096": 1},
            id="sequence parallel",
        ),
    ],
)
def test_each_device_has_its_part_and_exchanges_what_xla_exchanges(fn, shapes, ins, outs, times, expected):
    ratio, exchanges = counted(fn, shapes, ins, outs)
    assert ratio == pytest.approx(times, rel=0.03)
    assert exchanges == expected


def test_a_shard_map_is_counted_by_its_own_shapes_and_exchanges():
    ratio, exchanges = counted(by_shard_map, [(64, 256), (256, 512)], [("d", "m"), ("m",)], [("d",)])
    assert ratio == 1 and exchanges == {"all-reduce 2: 8192": 1}


def test_each_replica_adds_to_its_own_part_of_an_embedding_s_gradients():
    table = jax.ShapeDtypeStruct((64, 32), "float32")

    def gradients(tokens, table):
        def loss(table, tokens):
            return jnp.sum(table[tokens] ** 2)

        return jax.vmap(jax.grad(loss), in_axes=(None, 0))(table, tokens)

    tokens = jax.ShapeDtypeStruct((4, 16), "int32")
    _, exchanges = counted(gradients, [tokens, table], [("d",), ()], [("d",)])
    assert exchanges == {}


# ---------------------------------------------------------------- single rules


def result_axes(fn, shape, axes):
    """The axes of the results of the last equation of a function whose first argument is split."""
    jaxpr = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(shape, "float32"))
    eqn, tally = jaxpr.eqns[-1], Tally(SIZES)
    arrays = [ShardedArray(tuple(v.aval.shape), 4, ((),) * v.aval.ndim) for v in eqn.invars]
    arrays[0] = ShardedArray(tuple(shape), 4, axes)
    results = [ShardedArray(tuple(v.aval.shape), 4, ((),) * v.aval.ndim) for v in eqn.outvars]
    made = count_equation(tally, eqn.primitive.name, eqn.params, arrays, results)
    return [x.axes for x in made], [c.kind for c in tally.collectives]


D, M, N = ("d",), ("m",), ()


@pytest.mark.parametrize(
    ("fn", "shape", "axes", "expected", "exchanges"),
    [
        (lambda x: x.reshape(8, 4, 2), (8, 8), (D, M), (D, M, N), []),
        (lambda x: x.reshape(64), (8, 8), (D, N), (D,), []),
        (lambda x: x.reshape(64), (8, 8), (N, D), (N,), ["all-gather"]),
        (lambda x: x.reshape(3, 4), (12,), (D,), (N, N), ["all-gather"]),
        (lambda x: x.reshape(1, 8, 8), (8, 8), (D, M), (N, D, M), []),
        (lambda x: x.T, (8, 4), (D, M), (M, D), []),
        (lambda x: jnp.broadcast_to(x, (3, 8, 4)), (8, 4), (D, M), (N, D, M), []),
        (lambda x: lax.slice(x, (0, 0), (8, 2)), (8, 4), (D, M), (D, N), []),
        (lambda x: lax.dynamic_slice(x, (0, 1), (8, 2)), (8, 4), (D, M), (D, N), []),
        (lambda x: lax.dynamic_update_slice(x, jnp.ones((8, 1)), (0, 1)), (8, 4), (D, M), (D, M), []),
        (lambda x: lax.concatenate([x, x], 1), (8, 4), (D, N), (D, N), []),
        (lambda x: lax.squeeze(x, (1,)), (8, 1), (D, N), (D,), []),
        (lambda x: lax.sort(x, dimension=1), (8, 4), (D, M), (D, N), ["all-gather"]),
        (lambda x: lax.cumsum(x, 0), (8, 4), (D, M), (N, M), ["all-gather"]),
        (lambda x: jnp.max(x, 1), (8, 4), (D, M), (D,), ["all-reduce"]),
        (lambda x: x + 1, (8, 4), (D, M), (D, M), []),
        (lambda x: lax.linalg.qr(x)[0], (8, 4), (D, M), (N, N), []),
    ],
)
def test_rules(fn, shape, axes, expected, exchanges):
    found, kinds = result_axes(fn, shape, axes)
    assert found[0] == expected and kinds == exchanges


def test_moving_an_axis_to_another_dimension_is_an_all_to_all():
    tally = Tally(SIZES)
    x = ShardedArray((8, 8), 4, (("d",), ()))
    assert tally.reshard(x, ((), ("d",))).axes == ((), ("d",))
    (found,) = tally.collectives
    assert (found.kind, found.axes, found.size_bytes) == ("all-to-all", (("d", 4),), 8 * 8 * 4 / 4)
    tally.reshard(x, ((), ("d",)))  # a second reader
    assert len(tally.collectives) == 1


def test_more_axes_cost_nothing():
    tally = Tally(SIZES)
    tally.reshard(ShardedArray((8, 8), 4, (("d",), ())), (("d",), ("m",)))
    assert tally.collectives == []
