"""States of any optimizer, made on the actors by `step.init`."""

from __future__ import annotations

import jax
import optax

import jaxpp_async as jpp
from jaxpp_async.testing import assert_close
from tests.torture.blocks import chain, descended, error
from tests.torture.registry import batch, gradients_of, weights

OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 5)),
    "lion": optax.lion(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.add_noise(0.1, 0.5, 0), optax.adam(0.1)),
    "masked": optax.masked(optax.adam(0.1), lambda params: [k % 2 == 0 for k in range(len(params))]),
    "multi_transform": optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, ["a", "b", "a", "b"]
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 2),
}


def chain_loss(w, mb):
    return error(chain(w, mb["x"]), mb)


def initial(w):
    return {"params": w, **{name: optimizer.init(w) for name, optimizer in OPTIMIZERS.items()}}


async def test_init_of_any_optimizer_state_equals_jit(remote_mesh):
    """All of them in one state: each leaf is made where its parameter lives."""
    mesh = await remote_mesh(2, launcher="inline")

    def train(state, batches):
        grads, losses = gradients_of(chain_loss, 4)(jpp.Std1F1B, state["params"], batches)
        new = jax.tree.map(lambda x: x, state)
        for name in ("momentum", "lion"):
            _, new[name] = OPTIMIZERS[name].update(grads, state[name], state["params"])
        return {**new, "params": descended(state["params"], grads)}, losses

    step = mesh.distributed(train, donate_argnums=0)
    w = weights(4)
    await step.compile(jax.eval_shape(initial, w), batch())
    state = await step.init(0, initial, w)
    assert state["lion"][0].mu[3].actors == state["params"][3].actors == (1,)
    want = jax.jit(initial)(w)
    assert_close(await mesh.fetch(state), want)
    assert_close(await mesh.fetch(await step(state, batch())), jax.jit(train)(want, batch()))
