"""RemoteMesh as a user meets it: the README's way of training, on inline actors and on processes."""

import jax
import jax.numpy as jnp
import pytest

import jaxpp_async as jpp
from jaxpp_async.testing import assert_close


def loss_fn(params, mb):
    x = jnp.tanh(mb["x"] @ params[0])
    x = jpp.pipeline_yield(x)
    return jnp.mean((x @ params[1] - mb["y"]) ** 2)


def train_step(params, batch):
    def grads_of(mb):
        loss, grads = jax.value_and_grad(loss_fn)(params, mb)
        return grads, loss

    grads, losses = jpp.accumulate_grads(grads_of, jpp.Std1F1B(2))(batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses


def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(keys[0], (4, 8)), jax.random.normal(keys[1], (8, 2))]
    batch = {"x": jax.random.normal(keys[2], (4, 3, 4)), "y": jax.random.normal(keys[3], (4, 3, 2))}
    return params, batch


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_five_steps_equal_jit(remote_mesh, launcher):
    mesh = await remote_mesh(2, launcher=launcher)
    params, batch = problem()
    step = mesh.distributed(train_step, donate_argnums=0)
    plain, remote = params, params
    for _ in range(5):
        plain, plain_losses = jax.jit(train_step)(plain, batch)
        remote, losses = await mesh.run(step, remote, batch)
        assert_close(await losses, plain_losses)
    assert_close(await mesh.fetch(remote), plain)
