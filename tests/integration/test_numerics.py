"""A pipelined step computes what plain `jax.jit` does: every schedule, three models, one to four actors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

import jaxpp_async as jpp
from jaxpp_async.testing import assert_close

NUM_MICROBATCHES, NUM_STEPS = 4, 5


class Backwards:
    """A user's own lists: stages on actors from the last to the first, microbatches from the last on."""

    def __init__(self, num_stages):
        self.num_stages = num_stages

    def rows(self, num_actors):
        rows = [[] for _ in range(num_actors)]
        stages = range(self.num_stages)
        for i in reversed(range(NUM_MICROBATCHES)):
            tasks = [jpp.Task(i, "fwd", s) for s in stages] + [
                jpp.Task(i, "bwd", s) for s in reversed(stages)
            ]
            for task in tasks:
                rows[(num_actors - 1 - task.stage) % num_actors].append(task)
        return rows


SCHEDULES = [jpp.GPipe, jpp.Std1F1B, jpp.Eager1F1B, jpp.Interleaved1F1B, jpp.LoopedBFS, Backwards]


def schedule_for(kind, num_stages, num_actors):
    schedule = kind(num_stages)
    return schedule.rows(num_actors) if isinstance(schedule, Backwards) else schedule


@functools.cache
def model_named(name):
    return {
        "mlp": models.mlp,
        "gpt": lambda: models.gpt(num_stages=2, layers=2),
        "gpt4": lambda: models.gpt(num_stages=4, layers=4),
        "uneven": models.uneven,
    }[name]()


@functools.cache
def expected(name):
    """Results of plain `jax.jit`, a step after the other."""
    model = model_named(name)
    # A strict reference: a value that crosses a stage as bfloat16 is rounded to it.
    step = jax.jit(
        models.grads_step(model, jpp.GPipe(model.num_stages)),
        compiler_options={"xla_allow_excess_precision": False},
    )
    params, found = model.init(0), []
    for seed in range(NUM_STEPS):
        found.append(step(params, model.batch(seed, NUM_MICROBATCHES)))
        params = found[-1][0]
    return jax.device_get(found)


async def check_five_steps(mesh, name, kind):
    model = model_named(name)
    schedule = schedule_for(kind, model.num_stages, mesh.num_actors)
    step = mesh.distributed(models.grads_step(model, schedule), donate_argnums=0)
    params, found = model.init(0), []
    for seed in range(NUM_STEPS):
        params, grads, losses = await mesh.run(step, params, model.batch(seed, NUM_MICROBATCHES))
        found.append(await mesh.fetch((grads, losses)))
    for (grads, losses), (_, plain_grads, plain_losses) in zip(found, expected(name), strict=True):
        assert_close(losses, plain_losses)
        assert_close(grads, plain_grads)
    assert_close(await mesh.fetch(params), expected(name)[-1][0])


INLINE = [
    *[(n, "mlp", kind) for n in (2, 4) for kind in SCHEDULES],
    *[(3, "mlp", kind) for kind in (jpp.Std1F1B, jpp.Interleaved1F1B, Backwards)],
    *[(1, "mlp", kind) for kind in (jpp.Std1F1B, jpp.LoopedBFS)],
    *[(2, name, kind) for name in ("gpt", "uneven") for kind in SCHEDULES],
    (1, "gpt", Backwards),
    (3, "gpt4", jpp.Interleaved1F1B),
    (4, "gpt4", jpp.Eager1F1B),
    (1, "uneven", jpp.GPipe),
    (3, "uneven", jpp.Std1F1B),
    (4, "uneven", Backwards),
]


@pytest.mark.parametrize("num_actors, name, kind", INLINE)
async def test_equals_jit(remote_mesh, num_actors, name, kind):
    await check_five_steps(await remote_mesh(num_actors, launcher="inline"), name, kind)


@pytest.mark.parametrize(
    "num_actors, name, kind",
    [
        (2, "mlp", jpp.Interleaved1F1B),
        (2, "gpt", jpp.Std1F1B),
        (2, "uneven", Backwards),
        (4, "mlp", jpp.Eager1F1B),
        (4, "mlp", jpp.LoopedBFS),
        (4, "uneven", jpp.GPipe),
    ],
)
async def test_equals_jit_across_processes(remote_mesh, num_actors, name, kind):
    await check_five_steps(await remote_mesh(num_actors), name, kind)


# ---------------------------------------------------------------- a real optimizer


def adamw_step(model):
    """AdamW, clipping by the global norm (which needs every actor), a warm-up and cosine schedule (a step
    count)."""
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 5e-3, 2, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, weight_decay=0.01))

    def init(seed):
        params = model.init(seed)
        return {"params": params, "opt": optimizer.init(params), "step": 0}

    def step(state, batch):
        def microbatch_grads(mb):
            loss, grads = jax.value_and_grad(model.loss)(state["params"], mb)
            return grads, loss

        grads, losses = jpp.accumulate_grads(microbatch_grads, jpp.Std1F1B(model.num_stages))(batch)
        grads = jax.tree.map(lambda g: g / NUM_MICROBATCHES, grads)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        state = {
            "params": optax.apply_updates(state["params"], updates),
            "opt": opt,
            "step": state["step"] + 1,
        }
        return state, {
            "losses": losses,
            "norm": optax.tree_utils.tree_norm(grads),
            "lr": schedule(state["step"]),
        }

    return init, step


@pytest.mark.parametrize("num_actors, launcher", [(2, "inline"), (2, "local")])
async def test_adamw_with_clipping_and_tied_embedding(remote_mesh, num_actors, launcher):
    mesh = await remote_mesh(num_actors, launcher=launcher)
    model = models.gpt(num_stages=2, layers=2, tied=True)
    init, fn = adamw_step(model)
    step, plain_step = mesh.distributed(fn, donate_argnums=0), jax.jit(fn)
    state = plain = init(1)
    for seed in range(NUM_STEPS):
        batch = model.batch(seed, NUM_MICROBATCHES)
        plain, plain_metrics = plain_step(plain, batch)
        state, metrics = await mesh.run(step, state, batch)
        assert_close(await mesh.fetch(metrics), plain_metrics)
    assert state["params"]["embed"].actors == tuple(range(num_actors))
    assert (await mesh.fetch(state))["step"] == NUM_STEPS
    count = optax.tree_utils.tree_get_all_with_path(await mesh.fetch(state["opt"]), "count")
    assert [int(value) for _, value in count] == [NUM_STEPS] * len(count) and count
    # Adam turns rounding into real differences where a gradient is nearly zero; a wrong update would be far
    # off.
    assert_close(await mesh.fetch(state["params"]), plain["params"], rtol=1e-3)


async def test_a_gradient_that_no_stage_needs_stays_zero(remote_mesh):
    """Parameters that the loss does not touch get zero gradients of the right type, also in bfloat16."""
    mesh = await remote_mesh(2, launcher="inline")

    def fn(params, batch):
        def grads_of(mb):
            def loss(p):
                x = jpp.pipeline_yield(mb @ p["used"])
                return jnp.sum(x**2)

            return jax.grad(loss)(params)

        return jpp.accumulate_grads(grads_of, jpp.GPipe(2))(batch)

    params = {"used": jnp.ones((3, 2)), "unused": jnp.ones((4,), jnp.bfloat16)}
    batch = jnp.arange(12.0).reshape(2, 2, 3)
    assert_close(
        await mesh.fetch(await mesh.run(mesh.distributed(fn), params, batch)), jax.jit(fn)(params, batch)
    )


# ---------------------------------------------------------------- what people write


def trained(loss, schedule=None, after=None):
    """(weights, batch, *more) to `after(gradients, losses, weights, *more)`."""

    def step(weights, batch, *more):
        def grads_of(mb):
            value, grads = jax.value_and_grad(loss)(weights, mb)
            return grads, value

        grads, losses = jpp.accumulate_grads(grads_of, schedule or jpp.Std1F1B(2))(batch)
        return (grads, losses) if after is None else (after(grads, weights, *more), losses)

    return step


def two_stages(w, x):
    return jnp.sum(jpp.pipeline_yield(jnp.sin(x @ w[0])) @ w[1])


def skipping(w, x):
    return jnp.sum((jpp.pipeline_yield(jnp.sin(x @ w[0])) @ w[1] + x @ w[2]) ** 2)


def with_auxiliary_loss(w, x):
    h = jnp.sin(x @ w[0])
    return jnp.sum(jpp.pipeline_yield(h) @ w[1]) + jnp.mean(h**2)


def shared_by_three_stages(w, x):
    for k, cut in ((0, True), (0, True), (1, True), (0, False)):
        x = jnp.sin(x @ w[k])
        x = jpp.pipeline_yield(x) if cut else x
    return jnp.sum(x)


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.1, 0.1),))


def dropout_step(w, batch, key):
    def grads_of(mb, i):
        def loss(w):
            keys = jax.random.split(jax.random.fold_in(key, i))
            h = jnp.sin(mb @ w[0])
            h = jpp.pipeline_yield(h * jax.random.bernoulli(keys[0], 0.5, h.shape)) @ w[1]
            return jnp.sum((h * jax.random.bernoulli(keys[1], 0.5, h.shape)) ** 2)

        return jax.grad(loss)(w)

    return jpp.accumulate_grads(grads_of, jpp.Std1F1B(2), pass_index=True)(batch), jax.random.split(key)[0]


def unscaled(grads, weights, scale):
    """Loss scaling: nothing is updated, and the scale falls, unless every gradient is finite."""
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    new = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g / scale, p), weights, grads)
    return new, jnp.where(finite, scale * 2, scale / 2)


def every_other_step(grads, weights, count):
    updated = jax.tree.map(lambda p, g: p - g, weights, grads)
    return jax.lax.cond(count % 2 == 0, lambda: updated, lambda: weights), count + 1


def hessian_times_vector(w, batch):
    def product(mb):
        def gradient(first):
            return jax.grad(lambda x: jnp.sum(jpp.pipeline_yield(jnp.sin(mb @ x)) @ w[1] ** 2))(first)

        return jax.jvp(gradient, (w[0],), (w[2],))[1]

    return jpp.accumulate_grads(product, jpp.GPipe(2))(batch)


def updated_by(optimizer):
    def after(grads, weights, state):
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return trained(two_stages, after=after), optimizer.init


def scanned(w, x):
    x = jax.lax.scan(lambda c, m: (jnp.tanh(c @ m), None), x, jnp.stack(w[:2]))[0]
    return jnp.sum(jpp.pipeline_yield(x) @ w[2])


PROGRAMS = {
    "skip connection": (trained(skipping),),
    "auxiliary loss": (trained(with_auxiliary_loss),),
    "weight of three stages": (trained(shared_by_three_stages, jpp.Interleaved1F1B(4)),),
    "checkpoint": (trained(jax.checkpoint(two_stages)),),
    "vmap": (trained(lambda w, x: jnp.sum(jax.vmap(lambda row: two_stages(w, row[None]))(x))),),
    "scan in a stage": (trained(scanned),),
    "custom gradient": (
        trained(lambda w, x: jnp.sum(clipped(jpp.pipeline_yield(clipped(x @ w[0])) @ w[1]))),
    ),
    "dropout": (dropout_step, lambda w: jax.random.key(4)),
    "dropout, old key": (dropout_step, lambda w: jax.random.PRNGKey(4)),
    "loss scaling": (trained(two_stages, after=unscaled), lambda w: np.float32(8)),
    "overflow": (trained(two_stages, after=unscaled), lambda w: np.float32(np.nan)),
    "conditional update": (trained(two_stages, after=every_other_step), lambda w: 1),
    "Hessian": (hessian_times_vector,),
    "computed batch": (lambda w, x: trained(two_stages)(w, x * 2 + w[0][0]),),
    "momentum": updated_by(optax.sgd(0.1, momentum=0.9)),
    "accumulating optimizer": updated_by(optax.MultiSteps(optax.sgd(0.1), 2)),
    "trust ratio": updated_by(optax.lamb(1e-3)),
    "noise": updated_by(optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_programs(remote_mesh, name):
    mesh = await remote_mesh(2, launcher="inline")
    fn, *make_more = PROGRAMS[name]
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(4, 4)).astype(np.float32) / 2 for _ in range(3)]
    args = (weights, rng.normal(size=(4, 3, 4)).astype(np.float32), *(make(weights) for make in make_more))
    assert_close(await mesh.fetch(await mesh.run(mesh.distributed(fn), *args)), jax.jit(fn)(*args))
