"""What this package asks of JAX's own structures."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpp_async.jax_bridge import private_api


def test_which_operands_a_loop_takes_rows_of():
    def fn(w, v, x):
        x = jax.lax.fori_loop(0, 3, lambda i, x: x @ w[i] + jnp.sum(v), x)
        return jax.lax.scan(lambda x, row: (x @ row, None), x, w)[0]

    closed = jax.make_jaxpr(fn)(jnp.ones((3, 2, 2)), jnp.ones(4), jnp.ones((2, 2)))
    jaxpr, _ = private_api.open_jaxpr(closed)
    first, last = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert [first.invars[k] for k in private_api.rows_taken_inside(first)] == [jaxpr.invars[0]]
    assert private_api.rows_taken_inside(last) == set()
