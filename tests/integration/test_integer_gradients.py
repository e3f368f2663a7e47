"""Gradients of integers (`allow_int=True`): dtype `float0`, known by their shape, in loops and as results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.dtypes import float0

import jaxpp_async as jpp
from jaxpp_async.testing import assert_close

PARAMS = {
    "a": np.eye(4, dtype="float32"),
    "b": np.eye(4, dtype="float32"),
    "n": np.int32(3),
    "table": np.array([1, 2], "int32"),
    "mask": np.array([True, False, True, True]),
}
BATCH = np.random.default_rng(0).normal(size=(3, 2, 4)).astype("float32")
REDUCE = (jpp.Sum(), {"loss": jpp.Mean(), "stacked": jpp.Stack(), "joined": jpp.Concat(), "mean": jpp.Mean()})


def loss(params, x):
    x = jpp.pipeline_yield(jnp.tanh(x @ params["a"]) * params["mask"])
    return jnp.mean(x @ params["b"] * params["n"]) + params["table"][0]


def train(params, batch):
    def one(x):
        value, grads = jax.value_and_grad(loss, allow_int=True)(params, x)
        same = {"stacked": grads["n"], "joined": grads["table"], "mean": grads["mask"]}
        return grads, {"loss": value, **same}

    grads, rest = jpp.accumulate_grads(one, jpp.Std1F1B(2), reduce=REDUCE)(batch)
    new = jax.tree.map(lambda p, g: p if g.dtype == float0 else p - 0.1 * g, params, grads)
    return new, grads, rest


def by_hand(params, batch):
    """A Python loop."""
    each = [jax.value_and_grad(loss, allow_int=True)(params, x) for x in batch]
    grads = jax.tree.map(lambda *g: g[0] if g[0].dtype == float0 else sum(g), *[g for _, g in each])
    none = {"stacked": (3,), "joined": (6,), "mean": (4,)}
    rest = {"loss": sum(v for v, _ in each) / 3, **{k: np.zeros(s, float0) for k, s in none.items()}}
    return jax.tree.map(lambda p, g: p if g.dtype == float0 else p - 0.1 * g, params, grads), grads, rest


def assert_same(got, want):
    types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731 - read once
    assert types(got) == types(want)
    numbers = lambda tree: [np.asarray(x) for x in jax.tree.leaves(tree) if x.dtype != float0]  # noqa: E731 - as above
    assert_close(numbers(got), numbers(want), atol=1e-6)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_in_plain_jax(transform):
    assert_same(transform(train)(PARAMS, BATCH), jax.jit(by_hand)(PARAMS, BATCH))


def test_without_jit():
    with jax.disable_jit():
        got = train(PARAMS, BATCH)
    assert_same(got, jax.jit(by_hand)(PARAMS, BATCH))


@pytest.mark.parametrize(
    "options", [{}, {"donate_argnums": 0, "out_shardings": None}], ids=["kept", "donated"]
)
async def test_on_actors(remote_mesh, options):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(train, **options)
    params, want = PARAMS, PARAMS
    for _ in range(2):
        results = await mesh.run(step, params, BATCH)
        expected = jax.jit(by_hand)(want, BATCH)
        assert_same(await mesh.fetch(results), expected)
        params, want = results[0], expected[0]


async def test_with_shardings(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline", spmd_mesh={"data": 2})
    whole = jax.sharding.PartitionSpec()
    step = mesh.distributed(train, in_shardings=whole, out_shardings=(None, whole, None))
    assert_same(await mesh.fetch(await mesh.run(step, PARAMS, BATCH)), jax.jit(by_hand)(PARAMS, BATCH))


async def test_nothing_but_integer_gradients(remote_mesh):
    def step(n, batch):
        return jpp.accumulate_grads(
            lambda x: jax.grad(lambda n: jnp.sum(x) * n, allow_int=True)(n), jpp.GPipe(1)
        )(batch)

    mesh = await remote_mesh(1, launcher="inline")
    for got in (step(3, BATCH), jax.jit(step)(3, BATCH), await mesh.run(mesh.distributed(step), 3, BATCH)):
        assert got.shape == () and got.dtype == float0
