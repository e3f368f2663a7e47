"""The example of a launcher of one's own trains, and what it computes is what `jax.jit` computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import own_launcher
from resources import nothing_left

from jaxpp_async.testing import assert_close


async def test_the_example_equals_jit(caplog, capsys):
    async with nothing_left(caplog):
        losses = await own_launcher.main()
    weights, batch, expected = [jnp.full((8, 8), 0.1), jnp.full((8, 8), 0.2)], jnp.ones((4, 2, 8)), []
    for _ in range(3):
        weights, loss = jax.jit(own_launcher.train_step)(weights, batch)
        expected.append(float(loss))
    assert_close(losses, expected)
    assert capsys.readouterr().out.startswith("losses")
