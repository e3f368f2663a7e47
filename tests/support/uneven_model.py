"""A tiny model whose head is heavier than its layers, with a mark behind each layer."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp_async as jpp

WIDTH, ROWS = 16, 8


def uneven_step(num_layers=4, head=2, schedule=None):
    """Return a train step whose last layer is as heavy as `head` others."""

    def loss_fn(params, mb):
        x = mb["x"]
        for w in params["layers"]:
            x = jpp.pipeline_yield(jnp.tanh(x @ w))
        for w in params["head"]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - mb["y"]) ** 2)

    def train_step(params, batch):
        def microbatch_grads(mb):
            loss, grads = jax.value_and_grad(loss_fn)(params, mb)
            return grads, loss

        used = jpp.Std1F1B(num_layers + 1) if schedule is None else schedule
        grads, losses = jpp.accumulate_grads(microbatch_grads, used)(batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), losses

    return train_step


def arguments(num_layers=4, head=2, num_microbatches=6):
    """Return the parameters and a batch of the step."""
    random = np.random.default_rng(0)

    def array(*shape):
        return random.standard_normal(shape).astype("float32")

    params = {
        "layers": [array(WIDTH, WIDTH) for _ in range(num_layers)],
        "head": [array(WIDTH, WIDTH) for _ in range(head)],
    }
    return params, {name: array(num_microbatches, ROWS, WIDTH) for name in "xy"}
