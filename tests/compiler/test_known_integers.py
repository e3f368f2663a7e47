"""Integers that are known while a step is traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_async.compiler import known_integers


def computed(fn, *args):
    """The result of the last equation of `fn`, with all equations computed in turn."""
    closed = jax.make_jaxpr(fn)(*args)
    env = dict(zip(closed.jaxpr.invars, map(np.asarray, args), strict=True))

    def run(jaxpr, env):
        for eqn in jaxpr.eqns:
            operands = [env[a] if a in env else np.asarray(a.val) for a in eqn.invars if True]
            if eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"].jaxpr
                results = run(inner, dict(zip(inner.invars, operands, strict=True)))
            else:
                results = [known_integers.compute(eqn, operands)]
            env.update(zip(eqn.outvars, results, strict=True))
        return [env[v] for v in jaxpr.outvars]

    return run(closed.jaxpr, Env(env))[0]


class Env(dict):
    """A dictionary in which literals, which cannot be hashed, are never found."""

    def __contains__(self, key):
        return type(key).__name__ != "Literal" and super().__contains__(key)


@pytest.mark.parametrize(
    "fn",
    [
        lambda i: (i + 3) * 2 - 1,
        lambda i: jnp.where(i < 0, i + 7, i),
        lambda i: jnp.clip(i, 0, 3),
        lambda i: jnp.maximum(i, 4) + jnp.minimum(i, -i),
        lambda i: jax.lax.rem(i, jnp.int32(3)),
        lambda i: jnp.arange(6) * i + 1,
        lambda i: jnp.broadcast_to(i, (3,)).reshape(3, 1),
        lambda i: jnp.arange(4)[::-1] + i,
        lambda i: (i > 1) & (i != 2) | (i == 5),
        lambda i: i.astype(jnp.uint8) + jnp.uint8(250),
    ],
)
@pytest.mark.parametrize("value", [-2, 0, 5])
def test_equals_jax(fn, value):
    i = jnp.int32(value)
    got, wanted = computed(fn, i), fn(i)
    np.testing.assert_array_equal(got, wanted)
    assert got.dtype == wanted.dtype


def test_only_small_integers_are_computed():
    for fn in (lambda: jnp.arange(2000), lambda: jnp.float32(2) + 1, lambda: jnp.zeros((2, 3)) + 1):
        eqn = jax.make_jaxpr(fn)().jaxpr.eqns[0]
        assert known_integers.compute(eqn, [a.val for a in eqn.invars if hasattr(a, "val")]) is None
