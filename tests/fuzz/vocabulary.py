"""What generated programs are written with: names they import, and the arguments that they are called with.

A program works on a few shapes, so that programs share their compiled operations. Activations are float32 (2,
4).
"""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp_async as jpp
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules import dependencies

ROWS, WIDTH, WORDS = 2, 4, 5

PARAMS = {
    "w0": (WIDTH, WIDTH),
    "w1": (WIDTH, WIDTH),
    "w2": (WIDTH, WIDTH),
    "b0": (WIDTH,),
    "b1": (WIDTH,),
    "e": (WORDS, WIDTH),
    "k": (2, WIDTH, WIDTH),
    "s": (),
    "unused": (3,),
}

TABLE = np.sin(np.arange(512, dtype=np.float32)).reshape(128, WIDTH)
"""Large enough to become a hidden argument of the step."""


def arguments(microbatches: int, *, momentum: bool = False, old_key: bool = False) -> tuple[Any, ...]:
    """(state, batch, key, count) of a step."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    state = {"p": {name: normal(*shape) / 2 for name, shape in PARAMS.items()}}
    if momentum:
        state["m"] = {name: normal(*shape) / 10 for name, shape in PARAMS.items()}
    batch = {
        "x": normal(microbatches, ROWS, WIDTH),
        "y": normal(microbatches, ROWS, WIDTH),
        "ids": rng.integers(0, WORDS, (microbatches, ROWS)).astype(np.int32),
    }
    return state, batch, jax.random.PRNGKey(7) if old_key else jax.random.key(7), 3


@jax.custom_vjp
def clipped(x):
    """Its gradient is another than that of what it computes."""
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.3, 0.3),))


@jax.custom_jvp
def doubled(x):
    """Its derivative is declared to be 2 everywhere."""
    return 2 * jnp.tanh(x)


doubled.defjvp(lambda primals, tangents: (2 * jnp.tanh(primals[0]), 2 * tangents[0]))


@jax.jit
def block(x, w):
    """One jitted block for several stages."""
    return jnp.tanh(x @ w)


@jax.jit
def stage(x, w):
    """A jitted block that ends its stage."""
    return jpp.pipeline_yield(jnp.tanh(x @ w))


def twice(loss: Any) -> Any:
    """The loss of a microbatch and of its mirror image, side by side."""

    def losses(q, mb, i):
        both = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), mb)
        values, aux = jax.vmap(lambda mb: loss(q, mb, i))(both)
        return jnp.sum(values), jax.tree.map(lambda a: a[1], aux)

    return losses


@jax.jit
def norm(tree: Any) -> jax.Array:
    """The global norm."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(a.astype(jnp.float32))) for a in jax.tree.leaves(tree)))


@jax.jit
def biggest(tree: Any) -> jax.Array:
    """The largest magnitude in a tree."""
    return jnp.max(jnp.stack([jnp.max(jnp.abs(a)).astype(jnp.float32) for a in jax.tree.leaves(tree)]))


@jax.jit
def finite(tree: Any) -> jax.Array:
    """Whether everything in a tree is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(tree)]))


def random_rows(
    stages: int, microbatches: int, actors: int, seed: int, *, backward: bool = True
) -> list[list[Task]]:
    """A random order of all tasks along their dependencies, dealt to a random actor a stage; some backwards
    split."""
    rng = random.Random(seed)
    places = [rng.randrange(actors) for _ in range(stages)]
    pairs = [(s, i) for s in range(stages) for i in range(microbatches)]
    split = {pair for pair in pairs if rng.random() < 0.5} if backward and rng.random() < 0.5 else set()
    left = [Task(i, "fwd", s) for s, i in pairs]
    for s, i in pairs if backward else ():
        left += [Task(i, ty, s) for ty in (("bwd_input", "bwd_weight") if (s, i) in split else ("bwd",))]
    rows: list[list[Task]] = [[] for _ in range(actors)]
    done: set[Task] = set()
    while left:
        task = rng.choice([t for t in left if done.issuperset(dependencies(t, stages, split))])
        left.remove(task)
        done.add(task)
        rows[places[task.stage]].append(task)
    return rows
