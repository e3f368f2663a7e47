"""Cases: `jax.checkpoint` around blocks, around markers, nested, with policies."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tests.torture.blocks import chain, cut, dense, error
from tests.torture.registry import loss

policies = jax.checkpoint_policies


def block(x, w):
    return jnp.sin(dense(x, w))


@loss(stages=3)
def checkpoint_around_blocks(w, mb):
    x = mb["x"]
    for k in range(3):
        x = jax.checkpoint(block)(cut(x) if k else x, w[k])
    return error(x, mb)


@loss(stages=3)
def checkpoint_around_several_blocks_of_a_stage(w, mb):
    x = mb["x"]
    for k in range(3):
        x = cut(x) if k else x
        x = jax.checkpoint(lambda x, k=k: block(block(x, w[2 * k]), w[2 * k + 1]))(x)
    return error(x, mb)


@loss(stages=2)
def checkpoint_around_a_marker(w, mb):
    @jax.checkpoint
    def both(x):
        return block(cut(block(x, w[0])), w[1])

    return error(both(mb["x"]), mb)


@loss(stages=4, on="inline")
def checkpoint_around_several_markers(w, mb):
    return error(jax.checkpoint(chain)(w[:4], mb["x"]), mb)


@loss(stages=3)
def checkpoint_around_the_whole_loss(w, mb):
    return jax.checkpoint(lambda w: error(chain(w, mb["x"]), mb))(w[:3])


@loss(stages=3)
def checkpoint_inside_checkpoint_around_markers(w, mb):
    @jax.checkpoint
    def outer(w, x):
        x = jax.checkpoint(block)(x, w[0])
        x = jax.checkpoint(lambda x: block(cut(x), w[1]))(x)
        return jax.checkpoint(block)(cut(x), w[2])

    return error(outer(w, mb["x"]), mb)


@loss(stages=3)
def checkpoint_inside_jit_inside_checkpoint(w, mb):
    @jax.checkpoint
    @jax.jit
    def outer(w, x):
        return cut(jax.checkpoint(jax.jit(block))(x, w[0])) @ w[1]

    return error(cut(outer(w, mb["x"])) @ w[2], mb)


@loss(stages=3)
def jit_around_checkpoint_around_markers(w, mb):
    return jax.jit(jax.checkpoint(lambda w: error(chain(w, mb["x"]), mb)))(w[:3])


@loss(stages=3)
def checkpoint_without_cse_barriers(w, mb):
    return error(jax.checkpoint(chain, prevent_cse=False)(w[:3], mb["x"]), mb)


def with_policy(policy, around):
    def fn(w, mb):
        remat = functools.partial(jax.checkpoint, policy=policy)
        if around == "markers":
            return error(remat(chain)(w[:3], mb["x"]), mb)
        x = mb["x"]
        for k in range(3):
            x = remat(block)(cut(x) if k else x, w[k])
        return error(x, mb)

    return fn


for policy_name, around in [
    ("nothing_saveable", "markers"),
    ("everything_saveable", "markers"),
    ("dots_saveable", "blocks"),
    ("dots_with_no_batch_dims_saveable", "markers"),
]:
    fn = with_policy(getattr(policies, policy_name), around)
    fn.__name__ = f"checkpoint_policy_{policy_name}_around_{around}"
    loss(stages=3)(fn)


@loss(stages=2)
def checkpoint_policy_that_saves_names(w, mb):
    @functools.partial(jax.checkpoint, policy=policies.save_only_these_names("kept"))
    def both(x):
        x = checkpoint_name(jnp.tanh(x @ w[0]), "kept")
        return block(cut(jnp.sin(x)), w[1])

    return error(both(mb["x"]), mb)


@loss(stages=2)
def checkpoint_with_a_static_argument(w, mb):
    @functools.partial(jax.checkpoint, static_argnums=1)
    def both(x, train):
        return cut(jnp.sin(x @ w[0])) @ w[1] if train else x

    return error(both(mb["x"], True), mb)


@loss(stages=3)
def checkpoint_and_a_tied_weight(w, mb):
    return error(jax.checkpoint(lambda w, x: chain([w[0], w[1], w[0]], x))(w, mb["x"]), mb)


@loss(stages=3)
def checkpoint_around_a_skip_over_markers(w, mb):
    @jax.checkpoint
    def fn(x):
        early = block(x, w[0])
        late = cut(block(cut(early), w[1]))
        return block(late + early, w[2])

    return error(fn(mb["x"]), mb)


@loss(stages=2)
def checkpoint_with_dropout(w, mb):
    @jax.checkpoint
    def fn(x, key):
        return block(x, w[0]) * jax.random.bernoulli(key, 0.5, x.shape)

    key = jax.random.key(3)
    return error(cut(fn(mb["x"], key)) @ w[1], mb)
