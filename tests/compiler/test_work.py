"""The work of executables: operations as XLA counts them, each equal executable counted once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxpp_async.compiler import work
from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import Recipe
from jaxpp_async.compiler.trace import trace

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
