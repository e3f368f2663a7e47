"""The order of a loop's results: `(loss, grads)` is refused where it would sum the loss and stack the
gradients."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import StageError

W = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
PARAMS = {"a": W, "b": W.T}
X = np.linspace(0, 1, 24, dtype=np.float32).reshape(3, 2, 4)


def loss_fn(params, x):
    return jnp.sum(jnp.square(jpp.pipeline_yield(jnp.tanh(x @ params["a"])) @ params["b"]))


def with_aux(params, x):
    return loss_fn(params, x), {"mean": x.mean()}


value_and_grad = jax.value_and_grad(loss_fn)


def clipped(x):
    loss, grads = value_and_grad(PARAMS, x)
    return loss, jax.tree.map(lambda g: jnp.clip(g, -1, 1).astype(jnp.bfloat16), grads)


def scanned(x):
    def row(carry, each):
        return jax.tree.map(jnp.add, carry, value_and_grad(PARAMS, each[None])), None

    return jax.lax.scan(row, (0.0, jax.tree.map(jnp.zeros_like, PARAMS)), x)[0]


def for_each_row(x):
    losses, grads = jax.vmap(lambda row: value_and_grad(PARAMS, row[None]))(x)
    return losses.sum(), jax.tree.map(lambda g: g.sum(axis=0), grads)


def penalized(x):
    def loss(params):
        slope = jax.grad(lambda x: loss_fn(params, x))(x)
        return loss_fn(params, x) + jnp.sum(slope**2)

    return jax.value_and_grad(loss)(PARAMS)


LOSS_FIRST = {
    "value_and_grad": lambda x: value_and_grad(PARAMS, x),
    "of one array": lambda x: jax.value_and_grad(lambda w: jnp.sum(x @ w))(W),
    "with aux": lambda x: jax.value_and_grad(with_aux, has_aux=True)(PARAMS, x),
    "with more behind": lambda x: (*value_and_grad(PARAMS, x), x.mean()),
    "under jit": lambda x: jax.jit(value_and_grad)(PARAMS, x),
    "of a checkpoint": lambda x: jax.value_and_grad(jax.checkpoint(loss_fn))(PARAMS, x),
    "by vjp": lambda x: (lambda value, pull: (value, pull(1.0)[0]))(
        *jax.vjp(lambda p: loss_fn(p, x), PARAMS)
    ),
    "clipped and cast": clipped,
    "summed by a scan": scanned,
    "of each row": for_each_row,
    "of a loss with a gradient in it": penalized,
}


@pytest.mark.parametrize("name", LOSS_FIRST)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_loss_first_is_refused(name, wrap):
    step = wrap(jpp.accumulate_grads(LOSS_FIRST[name], jpp.GPipe(2)))
    with pytest.raises(
        TypeError, match=r"^\S*integration/test_loop_checks.py:\d+: the function returns the loss first"
    ):
        step(X)


@pytest.mark.parametrize("name", LOSS_FIRST)
def test_with_reduce_it_is_what_the_user_says(name):
    """Also what the default would have done."""
    more = 1 if name == "with more behind" else 0
    for reduce in ((jpp.Stack(), jpp.Sum()), (jpp.Sum(), jpp.Stack())):
        got = jpp.accumulate_grads(LOSS_FIRST[name], jpp.GPipe(2), reduce=(*reduce, *[jpp.Stack()] * more))(X)
        each = [LOSS_FIRST[name](x) for x in X]
        joined = [
            jax.tree.map(
                lambda *a, r=r: sum(a) if isinstance(r, jpp.Sum) else jnp.stack(a), *(e[k] for e in each)
            )
            for k, r in enumerate(reduce)
        ]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3), list(got[:2]), joined
        )


SCALARS = {"scale": jnp.float32(2), "shift": jnp.float32(1)}


def adapted(x):
    """A step of training inside an evaluation: the logits depend on gradients, and are none."""
    grads = jax.grad(loss_fn)(PARAMS, x)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads)
    return loss_fn(params, x), x @ params["a"] + params["b"][0]


ANY_ORDER = {
    "gradients first": lambda x: value_and_grad(PARAMS, x)[::-1],
    "a loss alone": lambda x: loss_fn(PARAMS, x),
    "a loss and logits": lambda x: (loss_fn(PARAMS, x), {"logits": x @ W}),
    "a count and losses": lambda x: (jnp.sum(x > 0), jnp.sum(x, axis=1)),
    "scalars": lambda x: (loss_fn(PARAMS, x), {"norm": jnp.sum(jax.grad(loss_fn)(PARAMS, x)["a"] ** 2)}),
    "gradients of scalars": lambda x: jax.value_and_grad(lambda s: jnp.sum(x * s["scale"] + s["shift"]))(
        SCALARS
    )[::-1],
    "an adapted model": adapted,
    "a dict": lambda x: dict(zip(("loss", "grads"), value_and_grad(PARAMS, x), strict=True)),
    "nothing": lambda x: (),
}


@pytest.mark.parametrize("name", ANY_ORDER)
def test_what_is_no_loss_before_gradients_is_joined_as_ever(name):
    jax.eval_shape(jpp.accumulate_grads(ANY_ORDER[name], jpp.GPipe(2)), X)


@pytest.mark.parametrize(
    "wrap", [jax.jit, lambda f: f, jax.disable_jit()], ids=["jit", "eager", "disable_jit"]
)
def test_num_microbatches_is_checked_without_a_mesh(wrap):
    loop = jpp.accumulate_grads(lambda x: loss_fn(PARAMS, x), jpp.GPipe(2), num_microbatches=np.int64(3))
    assert wrap(loop)(X).shape == ()
    for wrong, says in (
        (X.reshape(6, 4), "`batch.reshape(3, 2, 4)`"),
        (X.swapaxes(0, 1), "`jnp.moveaxis(batch, 1, 0)`"),
    ):
        with pytest.raises(StageError, match=re.escape(says)):
            wrap(loop)(wrong)
