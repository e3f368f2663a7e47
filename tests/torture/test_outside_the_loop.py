"""What a step does outside its loops: optimizers, reductions over all stages, skipped steps, casts,
preprocessing.

Each equals plain JAX over three steps, the second on a batch with a NaN, and sends only scalars outside the
loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eager import Once
from interpret import run_plan
from planning import f32, plan_step

import jaxpp_async as jpp
from jaxpp_async.compiler.export import Target, emit
from jaxpp_async.compiler.ir import Op
from jaxpp_async.session import report
from jaxpp_async.testing import assert_close

WIDTH, MB, ROWS = 20, 3, 2  # a bias has 80 bytes: more than what counts as a scalar
SCALAR_BYTES = 64


def parameters(stages: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(stages)
    w = rng.normal(size=(stages, WIDTH, WIDTH)).astype("float32") / 4
    return [{"w": w[s], "b": np.full(WIDTH, 0.1, "float32")} for s in range(stages)]


def batches() -> list[np.ndarray]:
    """Three batches; the second has a NaN."""
    x = np.random.default_rng(0).normal(size=(3, MB, ROWS, WIDTH)).astype("float32")
    x[1, 0, 0, 0] = np.nan
    return list(x)


def loss(params: Any, x: Any) -> Any:
    for p in params[:-1]:
        x = jpp.pipeline_yield(jnp.tanh(x @ p["w"] + p["b"]))
    return jnp.mean(jnp.square(x @ params[-1]["w"] + params[-1]["b"]))


def gradients(params: Any, batch: Any, scale: Any = 1.0) -> Any:
    def of_one(x):
        value, grads = jax.value_and_grad(lambda p: loss(p, x) * scale)(params)
        return grads, value

    return jpp.accumulate_grads(of_one, jpp.Std1F1B(len(params)), reduce=(jpp.Mean(), jpp.Stack()))(batch)


def training(optimizer: optax.GradientTransformation) -> Callable:
    def step(state, batch):
        params, opt = state
        grads, losses = gradients(params, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), losses

    return step


def check(step: Callable, state: Any, actors: int, rtol: float = 1e-5, export: bool = False) -> Any:
    """Equal to plain JAX on the three batches, one after the other, with nothing but scalars sent outside the
    loop."""
    data = batches()
    plan = plan_step(step, state, data[0], actors=actors, donate=(0,))
    for recipe in plan.placed.recipes:  # what runs eagerly may still not be lowered
        if export and recipe.name.startswith("outer"):
            emit(recipe, plan.traced.types, plan.specs, Target(None, "cpu", {}))
    plain, got, want = Once(step, state, data[0]), state, state
    for batch in data:
        got, got_extra = run_plan(plan, got, batch)
        want, want_extra = plain.run(want, batch)
        assert_close((got, got_extra), (want, want_extra), rtol=rtol, atol=1e-6)
    assert large_transfers(plan) == []
    return plan


def outside(plan: Any) -> list[report.TransferLine]:
    return [t for t in report.make(plan, {}, {}).transfers if t.when != "in the loop"]


def large_transfers(plan: Any) -> list[report.TransferLine]:
    return [t for t in outside(plan) if t.size_bytes > SCALAR_BYTES]


def operations(plan: Any, name: str) -> dict[tuple[int, ...], int]:
    """How many outer operations of a name run on which actors."""
    placement, found = plan.placed.placement, {}
    for i, item in enumerate(placement.items):
        if isinstance(item, Op) and item.name == name:
            actors = tuple(sorted(placement.op_actors[i]))
            found[actors] = found.get(actors, 0) + 1
    return found


# ---------------------------------------------------------------- optax

LR = 1e-2
adam = functools.partial(optax.adam, LR)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def clipped_adam() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.1), adam())


def by_kind(params: Any) -> Any:
    return [{"w": "adam" if k % 2 else "sgd", "b": "fixed"} for k in range(len(params))]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd, momentum": lambda: optax.sgd(LR, momentum=0.9, nesterov=True),
    "adam": adam,
    "adamw, masked decay": lambda: optax.adamw(LR, weight_decay=0.1, mask=matrices),
    "lion": lambda: optax.lion(LR),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=4, momentum=0.9),
    "global norm": clipped_adam,
    "adaptive clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), adam()),
    "masked": lambda: optax.chain(optax.masked(optax.add_decayed_weights(0.1), matrices), optax.sgd(LR)),
    "multi_transform": lambda: optax.multi_transform(
        {"adam": adam(), "sgd": optax.sgd(LR), "fixed": optax.set_to_zero()}, by_kind
    ),
    "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, LR, 2, 10)),
    "injected schedule": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(LR, 0, 5)),
    "ema": lambda: optax.chain(optax.sgd(LR), optax.ema(0.9)),
    "lamb": lambda: optax.lamb(LR),
    "MultiSteps": lambda: optax.MultiSteps(adam(), 2),
    "MultiSteps that skips": lambda: optax.MultiSteps(adam(), 2, should_skip_update_fn=optax.skip_not_finite),
    "MultiSteps that skips large ones": lambda: optax.MultiSteps(
        clipped_adam(),
        2,
        should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=10.0),
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 2),
    "apply_if_finite, global norm": lambda: optax.apply_if_finite(clipped_adam(), 2),
    "MultiSteps, apply_if_finite, global norm": lambda: optax.MultiSteps(
        optax.apply_if_finite(clipped_adam(), 2), 2
    ),
    "every second step": lambda: optax.conditionally_mask(adam(), lambda step: step % 2 == 0),
}


@pytest.mark.parametrize("actors", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name, actors):
    optimizer, params = OPTIMIZERS[name](), parameters(actors)
    plan = check(training(optimizer), (params, optimizer.init(params)), actors, export="finite" in name)
    if name in ("adam", "MultiSteps", "schedule", "every second step"):
        assert outside(plan) == []


# ---------------------------------------------------------------- updates that users write


def finite(tree: Any) -> Any:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def largest(tree: Any) -> Any:
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)]))


def sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def scaled(state, batch):
    """Dynamic loss scaling; a step that is not finite is skipped."""
    grads, losses = gradients(state["params"], batch, state["scale"])
    grads = jax.tree.map(lambda g: g / state["scale"], grads)
    good = finite(grads)
    params = jax.tree.map(functools.partial(jnp.where, good), sgd(state["params"], grads), state["params"])
    count = jnp.where(good, state["count"] + 1, 0)
    scale = jnp.where(good, jnp.where(count % 2 == 0, state["scale"] * 2, state["scale"]), state["scale"] / 2)
    return {"params": params, "scale": scale, "count": count}, losses


def skipped(state, batch):
    """The whole update in a cond, the new state built in it."""
    grads, losses = gradients(state["params"], batch)

    def update(state):
        return {"params": sgd(state["params"], grads), "count": state["count"] + 1, "scale": state["scale"]}

    return jax.lax.cond(
        finite(grads), update, lambda state: state | {"scale": state["scale"] / 2}, state
    ), losses


def chosen(state, batch):
    """A switch over three updates, one of which has a cond in it, and a norm over all stages in that."""
    grads, losses = gradients(state["params"], batch)

    def clipped(params):
        norm = optax.global_norm(grads)
        return jax.lax.cond(
            norm > 1,
            lambda p: sgd(p, jax.tree.map(lambda g: g / norm, grads)),
            lambda p: sgd(p, grads),
            params,
        )

    branches = [clipped, lambda params: sgd(params, grads), lambda params: params]
    params = jax.lax.switch(state["count"], branches, state["params"])
    return {"params": params, "scale": state["scale"], "count": state["count"] + 1}, losses


def averaged(state, batch):
    """An average of the parameters, and a copy of them every second step, which depends on no gradient."""
    grads, losses = gradients(state["params"], batch)
    params = sgd(state["params"], grads)
    mean = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, state["mean"], params)
    old = jax.lax.cond(state["count"] % 2 == 0, lambda p, o: p, lambda p, o: o, state["params"], state["old"])
    return {"params": params, "mean": mean, "old": old, "count": state["count"] + 1}, losses


def measured(state, batch):
    """Statistics of gradients and parameters, from all stages."""
    grads, losses = gradients(state["params"], batch)
    params = sgd(state["params"], grads)
    numbers = {
        "grad norm": optax.global_norm(grads),
        "norm before": optax.global_norm(state["params"]),
        "norm after": optax.global_norm(params),
        "largest": largest(grads),
        "finite": finite(grads),
        "ratios": jnp.stack(
            [
                jnp.linalg.norm(g) / jnp.linalg.norm(p)
                for p, g in zip(*map(jax.tree.leaves, (state["params"], grads)), strict=True)
            ]
        ),
    }
    return {**state, "params": params}, (losses, numbers)


def wrapped(state, batch):
    """Updates inside calls: a checkpoint, a function with a derivative of its own."""

    @jax.custom_jvp
    def update(params, grads):
        return sgd(params, grads)

    update.defjvp(lambda primals, tangents: (update(*primals), tangents[0]))
    grads, losses = gradients(state["params"], batch)
    params = jax.checkpoint(update)(state["params"], grads)
    return {**state, "params": params}, losses


UPDATES = [scaled, skipped, chosen, averaged, measured, wrapped]


def start(stages: int) -> dict[str, Any]:
    params = parameters(stages)
    return {"params": params, "scale": np.float32(4), "count": np.int32(0), "mean": params, "old": params}


def state_of(step: Callable, stages: int) -> dict[str, Any]:
    """What the step returns is what it takes."""
    full = start(stages)
    names = {"averaged": ("params", "mean", "old", "count"), "measured": ("params",), "wrapped": ("params",)}
    return {k: full[k] for k in names.get(step.__name__, ("params", "scale", "count"))}


@pytest.mark.parametrize("actors", [2, 3])
@pytest.mark.parametrize("step", UPDATES, ids=lambda f: f.__name__)
def test_update(step, actors):
    check(step, state_of(step, actors), actors, export=True)


# ---------------------------------------------------------------- how conds are cut


def test_a_cond_is_one_a_stage_where_its_branches_share_nothing():
    plan = plan_step(skipped, state_of(skipped, 3), f32(MB, ROWS, WIDTH), actors=3)
    assert operations(plan, "cond") == {(0,): 1, (1,): 1, (2,): 1}


def test_a_cond_whose_branch_joins_all_stages_computes_both_and_selects():
    optimizer, params = optax.apply_if_finite(clipped_adam(), 2), parameters(2)
    plan = plan_step(training(optimizer), (params, optimizer.init(params)), f32(MB, ROWS, WIDTH))
    assert operations(plan, "cond") == {(0,): 1}, "that of the count alone"
    assert set(operations(plan, "select_n")) >= {(0,), (1,)}


def test_a_cond_on_one_actor_stays_one():
    """Its branches share a product, and choosing saves computing it."""

    def step(params, batch):
        grads, losses = gradients(params, batch)

        def heavy(g):
            product = g @ g
            return product @ product, jnp.sum(product)

        return grads, jax.lax.cond(losses[0] > 0, heavy, lambda g: (g, 0.0), grads[1]["w"])

    plan = plan_step(step, parameters(2), f32(MB, ROWS, WIDTH))
    assert operations(plan, "cond") == {(1,): 1}
    assert outside(plan) == []


def test_a_branch_that_may_not_end_is_not_run_for_nothing():
    """So its cond runs on one actor, and the arrays it joins are sent there."""

    def step(params, batch):
        grads, losses = gradients(params, batch)

        def halved(g):
            return jax.lax.while_loop(
                lambda g: optax.global_norm(g) > 1, lambda g: jax.tree.map(lambda x: x / 2, g), g
            )

        return jax.lax.cond(finite(grads), halved, lambda g: g, grads), losses

    plan = plan_step(step, parameters(2), f32(MB, ROWS, WIDTH))
    assert operations(plan, "cond") == {(0,): 1}
    assert {t.from_actor for t in large_transfers(plan)} == {0, 1}
    params, batch = parameters(2), batches()[0]
    assert_close(run_plan(plan, params, batch), Once(step, params, batch).run(params, batch))


def test_arrays_that_a_branch_closes_over_are_arguments():
    table = np.arange(WIDTH * WIDTH, dtype="float32").reshape(WIDTH, WIDTH)

    def step(params, batch):
        grads, losses = gradients(params, batch)
        add = lambda g: jax.tree.map(lambda x: x + table[: len(x)] if x.ndim > 1 else x, g)  # noqa: E731
        return jax.lax.cond(losses[0] > 0, add, lambda g: g, grads), losses

    params, batch = parameters(2), batches()[0]
    plan = plan_step(step, params, batch)
    assert_close(run_plan(plan, params, batch), Once(step, params, batch).run(params, batch))


def test_a_decided_cond_is_its_branch():
    optimizer, params = optax.MultiSteps(adam(), 2), parameters(2)
    plan = plan_step(training(optimizer), (params, optimizer.init(params)), f32(MB, ROWS, WIDTH))
    assert operations(plan, "cond") == {}


def test_a_norm_of_parameters_draws_none_of_them_elsewhere():
    plan = plan_step(measured, state_of(measured, 3), f32(MB, ROWS, WIDTH), actors=3)
    homes = {p.name: p.actors for p in report.make(plan, {}, {}).inputs}
    assert [homes[f"state['params'][{s}]['w']"] for s in range(3)] == [(0,), (1,), (2,)]


# ---------------------------------------------------------------- before the loop


def half_precision(params, batch):
    """float32 masters, bfloat16 computation."""
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    grads, losses = gradients(half, batch.astype(jnp.bfloat16))
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads), losses


def test_parameters_are_cast_once_a_step_where_they_live():
    plan = check(half_precision, parameters(2), 2, rtol=1e-2)
    values = plan.placed.graph.values
    before = [n for n in plan.placed.graph.nodes if n.label.startswith("outer(0,")]
    assert [(n.actor, {values[v].aval.dtype for v in n.outputs}) for n in before] == [
        (a, {"bfloat16"}) for a in (0, 1)
    ]
    (forward,) = [r for r in plan.placed.recipes if r.name == "fwd0"]
    assert "convert_element_type" not in {op.name for op in forward.ops}


def tied(params, batch):
    """One table at both ends, cast on each of its homes: the master, updated once, is what travels."""
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def loss(p, x):
        x = jpp.pipeline_yield(jnp.tanh(x @ p["table"]))
        return jnp.mean(jnp.square(jpp.pipeline_yield(x @ p["w"]) @ p["table"].T)).astype("float32")

    def of_one(x):
        return jax.grad(loss)(half, x)

    grads = jpp.accumulate_grads(of_one, jpp.Std1F1B(3))(batch.astype(jnp.bfloat16))
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads), ()


def test_a_tied_parameter_is_cast_on_each_of_its_homes():
    params = {"table": parameters(1)[0]["w"], "w": parameters(1)[0]["w"]}
    plan = plan_step(tied, params, f32(MB, ROWS, WIDTH), actors=3)
    made = report.make(plan, {}, {})
    assert {p.name: p.actors for p in made.inputs}["params['table']"] == (0, 2)
    # One partial gradient one way, the new table the other; nothing before the loop.
    assert [(t.from_actor, t.to_actor, t.count) for t in large_transfers(plan)] == [(0, 2, 1), (2, 0, 1)]
    assert {t.when for t in outside(plan)} == {"after the loop"}


def preprocessed(params, batch):
    """Normalise by statistics of the whole batch, labels one-hot, and cut microbatches inside the step."""
    x = batch["x"].astype(jnp.float32)
    x = (x - jnp.mean(x)) / jnp.std(x)
    y = jax.nn.one_hot(batch["y"], WIDTH)
    x, y = (a.reshape(MB, ROWS, WIDTH) for a in (x, y))

    def of_one(one):
        x, y = one

        def loss(p):
            h = jpp.pipeline_yield(jnp.tanh(x @ p[0]["w"]))
            return optax.softmax_cross_entropy(h @ p[1]["w"], y).mean()

        return jax.grad(loss)(params)

    return sgd(params, jpp.accumulate_grads(of_one, jpp.Std1F1B(2))((x, y))), ()


def test_the_batch_is_prepared_where_it_is_used():
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.integers(0, 255, (MB * ROWS, WIDTH)).astype("uint8"),
        "y": rng.integers(0, WIDTH, MB * ROWS),
    }
    batch["y"] = batch["y"].astype("int32")
    params = parameters(2)
    plan = plan_step(preprocessed, params, batch)
    assert_close(run_plan(plan, params, batch), Once(preprocessed, params, batch).run(params, batch))
    assert outside(plan) == []
    homes = {p.name: p.actors for p in report.make(plan, {}, {}).inputs}
    assert (homes["batch['x']"], homes["batch['y']"]) == ((0,), (1,))
