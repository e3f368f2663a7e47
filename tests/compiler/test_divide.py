"""Stacked leaves live in parts: what is divided, what stays whole, and numbers that equal `jax.jit`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from docs_code import doc_code
from interpret import check_step, run_plan
from planning import plan_step, sent

import jaxpp_async as jpp
from jaxpp_async.compiler import divided_axis, stack_division, stage_cuts
from jaxpp_async.compiler import trace as trace_module
from jaxpp_async.compiler.continued_arguments import continued_arguments
from jaxpp_async.compiler.cut import cut_loops
from jaxpp_async.compiler.ir import Loop
from jaxpp_async.compiler.partition import partition
from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.compiler.trace import trace
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.testing import assert_close

NUM_LAYERS, WIDTH = 4, 8
SCHEDULES = (
    jpp.Std1F1B(2, stages=[1]),
    jpp.Interleaved1F1B(4, stages=[0, 1, 2]),
    jpp.ZeroBubbleV(4, stages=[0, 1, 2]),
)


def layer(x: jax.Array, w: Any) -> jax.Array:
    return jnp.tanh(x @ w["kernel"] + w["bias"])


def scanned(p: Any, x: jax.Array) -> jax.Array:
    """Marks inside a scan over the layers."""

    def body(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jpp.pipeline_yield(layer(x, w)), None

    return jax.lax.scan(body, x, p)[0]


def sliced(p: Any, x: jax.Array) -> jax.Array:
    """Each stage takes a slice of layers, and scans over it."""
    for k in range(0, NUM_LAYERS):
        part = jax.tree.map(lambda w: w[k : k + 1], p)  # noqa: B023
        x = jax.lax.scan(lambda x, w: (layer(x, w), None), x, part)[0]
        x = jpp.pipeline_yield(x)
    return x


def indexed(p: Any, x: jax.Array) -> jax.Array:
    """A Python loop takes one layer at a time."""
    for k in range(NUM_LAYERS):
        x = jpp.pipeline_yield(layer(x, jax.tree.map(lambda w: w[k], p)))  # noqa: B023
    return x


def rematerialized(p: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jpp.pipeline_yield(jax.checkpoint(layer)(x, w)), None

    return jax.lax.scan(body, x, p)[0]


def params() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    stacked = {
        "kernel": 0.4 * jax.random.normal(keys[0], (NUM_LAYERS, WIDTH, WIDTH)),
        "bias": 0.1 * jax.random.normal(keys[1], (NUM_LAYERS, WIDTH)),
    }
    return {"layers": stacked, "out": jax.random.normal(keys[2], (WIDTH, 1))}


def batch() -> Any:
    keys = jax.random.split(jax.random.key(1), 2)
    return {"x": jax.random.normal(keys[0], (4, 2, WIDTH)), "y": jax.random.normal(keys[1], (4, 2, 1))}


def step_of(tx: Any, model: Callable = scanned, loss_extra: Callable = lambda p: 0.0) -> Callable:
    def step(state: Any, batch: Any) -> Any:
        p, opt = state

        def microbatch(b: Any) -> Any:
            def loss(p: Any) -> jax.Array:
                return jnp.mean((model(p["layers"], b["x"]) @ p["out"] - b["y"]) ** 2) + loss_extra(p)

            value, grads = jax.value_and_grad(loss)(p)
            return grads, value

        grads, losses = jpp.accumulate_grads(microbatch, schedule=jpp.Std1F1B(2, stages=[1]))(batch)
        updates, opt = tx.update(grads, opt, p)
        return (optax.apply_updates(p, updates), opt), losses

    return step


def check(tx: Any, *, steps: int = 2, schedules: Any = SCHEDULES, **options: Any) -> list[CompilePlan]:
    state = (params(), tx.init(params()))
    return check_step(step_of(tx, **options), state, batch(), schedules=schedules, steps=steps, donate=(0,))


@pytest.fixture
def single_rows(monkeypatch):
    """Layers that are taken one at a time are parts of their own, though these are small."""
    monkeypatch.setattr(stage_cuts, "SMALL_ROW_BYTES", 0)


@pytest.mark.parametrize("model", [scanned, sliced, indexed, rematerialized])
@pytest.mark.parametrize(
    "tx", [optax.adam(1e-2), optax.lamb(1e-2), optax.adafactor(1e-2)], ids=["adam", "lamb", "adafactor"]
)
def test_large_layers_that_are_taken_one_at_a_time_are_parts_of_their_own(single_rows, model, tx):
    for done in check(tx, model=model, schedules=SCHEDULES[::2]):
        leaves = [parts for parts in done.traced.argument_parts if parts is not None]
        assert leaves and {parts.count for parts in leaves} == {NUM_LAYERS}


def divided(done: CompilePlan) -> list[str]:
    return [name for name in done.traced.arg_names if "][" in name and name.endswith("]") and ":" in name]


def in_loop_bytes(done: CompilePlan) -> int:
    return max((size for *_, size in sent(done)), default=0)


@pytest.mark.parametrize(
    ("model", "schedules"),
    [
        (scanned, SCHEDULES),
        (sliced, SCHEDULES[:1]),  # each stage joins slices
        (indexed, SCHEDULES[1:2]),
        (rematerialized, SCHEDULES[2:]),  # its backward tasks are split
    ],
    ids=["scanned", "sliced", "indexed", "rematerialized"],
)
def test_layers_live_with_their_stages(model, schedules):
    for done in check(optax.sgd(0.1), model=model, schedules=schedules):
        parts = done.traced.argument_parts
        leaves = [p for p in parts if p is not None]
        assert len(leaves) == 2, done.traced.arg_names
        homes = [i.actors for i in done.placed.graph.inputs[: len(done.traced.arg_names)]]
        assert all(
            len(actors) == 1
            for name, actors in zip(done.traced.arg_names, homes, strict=True)
            if "layers" in name
        )


INTERLEAVED = SCHEDULES[1:2]
"""Each layer is a part of its own."""


@pytest.mark.parametrize(
    ("tx", "schedules", "steps"),
    [
        (optax.adamw(1e-2), SCHEDULES, 2),
        (optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), INTERLEAVED, 2),
        (optax.adafactor(1e-2, min_dim_size_to_factor=4), INTERLEAVED, 2),
        (optax.lamb(1e-2), INTERLEAVED, 2),
        (optax.lion(1e-2), INTERLEAVED, 2),
        (optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1, momentum=0.9)), INTERLEAVED, 2),
        (optax.MultiSteps(optax.adam(1e-2), 2), INTERLEAVED, 3),  # the second step updates
        (optax.apply_if_finite(optax.adam(1e-2), 3), INTERLEAVED, 2),
    ],
    ids=["adamw", "clip", "adafactor", "lamb", "lion", "agc", "multisteps", "finite"],
)
def test_optimizers(tx, schedules, steps):
    for done in check(tx, steps=steps, schedules=schedules):
        names = [n for n, v in zip(done.traced.arg_names, done.traced.flat.inputs, strict=False)]
        whole = [
            n
            for n, v in zip(names, done.traced.flat.inputs, strict=False)
            if "layers" in n and done.traced.types[v].aval.shape[:1] == (NUM_LAYERS,)
        ]
        assert whole == []


def count_whole(done: CompilePlan, leaf: str) -> int:
    return sum(name == leaf for name in done.traced.arg_names)


def with_update(update: Callable) -> Callable:
    """A step whose new parameters are `update(params, gradients)`."""

    def step(p: Any, batch: Any) -> Any:
        def microbatch(b: Any) -> Any:
            def loss(p: Any) -> jax.Array:
                return jnp.mean((scanned(p["layers"], b["x"]) @ p["out"] - b["y"]) ** 2)

            value, grads = jax.value_and_grad(loss)(p)
            return grads, value

        grads, losses = jpp.accumulate_grads(microbatch, schedule=jpp.Std1F1B(2, stages=[1]))(batch)
        return jax.tree.map(update, p, grads), losses

    return step


def norm_in_map(w: jax.Array, g: jax.Array) -> jax.Array:
    norms = jax.lax.map(jnp.linalg.norm, g)
    return w - 0.1 * g / (1 + norms.reshape(-1, *[1] * (g.ndim - 1)))


def carried(w: jax.Array, g: jax.Array) -> jax.Array:
    def body(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = total + jnp.sum(x**2)
        return total, x / (1 + total)

    total, scaled = jax.lax.scan(body, jnp.float32(0), g)
    return w - 0.1 * scaled / (1 + total)


def carried_back(w: jax.Array, g: jax.Array) -> jax.Array:
    def body(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return total + jnp.sum(x**2), x / (1 + total)

    return w - 0.1 * jax.lax.scan(body, jnp.float32(0), g, reverse=True)[1]


def joined_rows(w: jax.Array, g: jax.Array) -> jax.Array:
    return w - 0.1 * jnp.concatenate([g[: len(g) // 2], 2 * g[len(g) // 2 :]])


def padded(w: jax.Array, g: jax.Array) -> jax.Array:
    """The first layer is frozen."""
    return w - 0.1 * jnp.pad(g[1:], [(1, 0), *[(0, 0)] * (g.ndim - 1)])


def raveled(w: jax.Array, g: jax.Array) -> jax.Array:
    return w - 0.1 * g / (1 + jnp.vdot(g, g)) * jnp.max(jnp.abs(w))


def orthogonal(w: jax.Array, g: jax.Array) -> jax.Array:
    """A step of Newton-Schulz, as in Muon."""
    if g.ndim < 3 or g.shape[0] != NUM_LAYERS:
        return w - 0.1 * g
    g = g / (1 + jnp.linalg.norm(g, axis=(1, 2), keepdims=True))
    gram = jnp.einsum("lij,lkj->lik", g, g)
    return w - 0.1 * (1.5 * g - 0.5 * jnp.einsum("lik,lkj->lij", gram, g))


def of_half_precision(w: jax.Array, g: jax.Array) -> jax.Array:
    return (w - 0.1 * g.astype(jnp.bfloat16).astype(jnp.float32)).astype(w.dtype)


def by_depth(w: jax.Array, g: jax.Array) -> jax.Array:
    depth = jnp.arange(len(g), dtype=g.dtype).reshape(-1, *[1] * (g.ndim - 1))
    return w - 0.1 * g / (1 + depth)


@pytest.mark.parametrize(
    "update",
    [
        norm_in_map,
        carried,
        carried_back,
        joined_rows,
        padded,
        raveled,
        orthogonal,
        of_half_precision,
        by_depth,
    ],
)
def test_updates_run_in_parts(update):
    for done in check_step(with_update(update), params(), batch(), schedules=SCHEDULES[:2], steps=2):
        assert not count_whole(done, "p['layers']['kernel']")
        assert max(math.prod(shape) for *_, shape in sent(done)) <= WIDTH * WIDTH


def test_what_needs_all_layers_keeps_the_leaf_whole(monkeypatch):
    monkeypatch.setattr(stack_division, "JOINED_BYTES", 0)

    def update(w: jax.Array, g: jax.Array) -> jax.Array:
        return w - 0.1 * g - 0.01 * (jnp.cumsum(w, axis=0) if w.ndim == 3 else 0)

    for done in check_step(with_update(update), params(), batch(), schedules=SCHEDULES[:2]):
        assert count_whole(done, "p['layers']['kernel']") and not count_whole(done, "p['layers']['bias']")
        ((kept,),) = [done.traced.kept_whole]
        assert done.traced.arg_names.index("p['layers']['kernel']") >= 0
        assert kept.leaf == 1 and re.fullmatch(
            r"cumsum at \S+test_divide.py:\d+ is not computed in parts", kept.why
        )


def test_a_loop_inside_stages_that_counts_its_layers_keeps_the_leaf_whole(monkeypatch):
    monkeypatch.setattr(stack_division, "JOINED_BYTES", 0)

    def model(p: Any, x: jax.Array) -> jax.Array:
        def layers(first: int, x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(first, first + 2, lambda i, x: jnp.tanh(x @ p["kernel"][i]), x)

        return layers(2, jpp.pipeline_yield(layers(0, x)))

    def step(p: Any, batch: Any) -> Any:
        def microbatch(b: Any) -> Any:
            return jax.grad(lambda p: jnp.mean((model(p["layers"], b["x"]) @ p["out"] - b["y"]) ** 2))(p)

        grads = jpp.accumulate_grads(microbatch, schedule=jpp.Std1F1B(2))(batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)

    (done,) = check_step(step, params(), batch())
    (kept,) = done.traced.kept_whole
    assert "test_divide.py:" in kept.why and "takes layers by an index that it counts" in kept.why
    assert done.traced.arg_names[kept.leaf] == "p['layers']['kernel']" and "scan over" in kept.instead


@pytest.mark.parametrize("take", [lambda x: x[::-1], lambda x: jnp.repeat(x[::2], 2)], ids=["flip", "stride"])
def test_elements_of_a_flattened_leaf_are_not_moved_one_by_one(monkeypatch, take):
    monkeypatch.setattr(stack_division, "JOINED_BYTES", 0)
    monkeypatch.setattr(divided_axis, "MOST_COPIED_ROWS", NUM_LAYERS)

    def update(w: jax.Array, g: jax.Array) -> jax.Array:
        return w - 0.1 * take(g.reshape(-1)).reshape(g.shape)

    (done,) = check_step(with_update(update), params(), batch())
    assert any("is not computed in parts" in kept.why for kept in done.traced.kept_whole)
    assert max(len(recipe.ops) for recipe in done.placed.recipes) < 200


def test_small_values_are_joined():
    """Norms of layers are small: they meet on one actor, and the layers stay where they are."""

    def update(w: jax.Array, g: jax.Array) -> jax.Array:
        norms = jnp.cumsum(jnp.sum(g.reshape(len(g), -1) ** 2, axis=1))
        return w - 0.1 * g / (1 + norms.reshape(-1, *[1] * (g.ndim - 1)))

    for done in check_step(with_update(update), params(), batch(), schedules=SCHEDULES[:2]):
        assert not count_whole(done, "p['layers']['kernel']") and done.traced.kept_whole == ()


@pytest.mark.parametrize("is_argument", [False, True])
def test_a_constant_is_divided_too(monkeypatch, is_argument):
    """A large constant is a hidden argument, a small one stands in the operation."""
    monkeypatch.setattr(trace_module, "CAPTURE_BYTES", 16 if is_argument else 1 << 20)
    mask = np.arange(NUM_LAYERS * WIDTH * WIDTH, dtype=np.float32).reshape(NUM_LAYERS, WIDTH, WIDTH) % 3

    def update(w: jax.Array, g: jax.Array) -> jax.Array:
        return w - 0.1 * (g * mask if w.ndim == 3 else g)

    (done,) = check_step(with_update(update), params(), batch())
    captured = [c.value for c in done.traced.captured]
    assert [np.shape(value) for value in captured] == [(2, WIDTH, WIDTH)] * 2 * is_argument
    assert not is_argument or np.array_equal(np.concatenate(captured), mask)
    assert not count_whole(done, "p['layers']['kernel']")


def test_layers_stacked_along_another_axis():
    def model(p: Any, x: jax.Array) -> jax.Array:
        return scanned(jax.tree.map(lambda w: jnp.moveaxis(w, -1, 0), p), x)

    def step(p: Any, batch: Any) -> Any:
        def microbatch(b: Any) -> Any:
            def loss(p: Any) -> jax.Array:
                return jnp.mean((model(p["layers"], b["x"]) @ p["out"] - b["y"]) ** 2)

            return jax.grad(loss)(p)

        grads = jpp.accumulate_grads(microbatch, schedule=jpp.Std1F1B(2, stages=[1]))(batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)

    state = params()
    state["layers"] = jax.tree.map(lambda w: jnp.moveaxis(w, 0, -1), state["layers"])
    for done in check_step(step, state, batch(), schedules=SCHEDULES, steps=2):
        assert not count_whole(done, "p['layers']['kernel']")
        assert {p.axis for p in done.traced.argument_parts if p is not None} == {1, 2}


def test_evaluation_divides_as_training_does():
    def step(p: Any, batch: Any) -> Any:
        def microbatch(b: Any) -> Any:
            return jnp.mean((scanned(p["layers"], b["x"]) @ p["out"] - b["y"]) ** 2)

        return jpp.accumulate_grads(microbatch, schedule=jpp.Std1F1B(2, stages=[1]))(batch)

    (done,) = check_step(step, params(), batch())
    assert [p and p.bounds for p in done.traced.argument_parts] == [(0, 2, 4), (0, 2, 4), None, None, None]


def test_a_sharding_along_the_layers_keeps_the_leaf_whole():
    fn = with_update(lambda w, g: w - 0.1 * g)
    known = find_division_of(fn, shardings={"p['layers']['kernel']": ("x",)})
    (kept,) = known.kept_whole
    assert kept.why == "its sharding divides axis 0, on which the layers are, over an actor's devices"
    assert "P(None" in kept.instead


def find_division_of(fn: Callable, shardings: Any) -> stack_division.Division:
    traced = plan_step(fn, params(), batch(), schedule=SCHEDULES[0]).traced
    whole = trace(fn, (params(), batch()), argument_names=("p", "batch"))
    assert traced.argument_parts
    cut = cut_loops(whole, SCHEDULES[0], 2)
    staged = {i: partition(op, cut.types) for i, op in enumerate(cut.flat.ops) if isinstance(op, Loop)}
    specs = {v: shardings.get(name) for v, name in zip(cut.flat.inputs, cut.arg_names, strict=True)}
    return stack_division.find_division(cut, staged, continued_arguments(cut), specs, {})


def test_an_optimizer_may_work_on_one_vector_of_all_parameters(single_rows):
    """Its parts are as many as those of all leaves together, more than shifted rows may make."""
    num_leaves, num_layers = 16, 36
    p = {f"w{k:02}": np.full((num_layers, 2), 0.1 * k + 0.1, np.float32) for k in range(num_leaves)}

    def step(p: Any, batch: Any) -> Any:
        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return jpp.pipeline_yield(jnp.tanh(x + sum(layer.values()))), None

        def loss(p: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(body, x, p)[0])

        schedule = jpp.Std1F1B(2, stages=[17])
        grads = jpp.accumulate_grads(lambda x: jax.grad(loss)(p, x), schedule=schedule)(batch)
        flat, back = jax.flatten_util.ravel_pytree(p)
        return back(flat - 0.1 * jax.flatten_util.ravel_pytree(grads)[0])

    assert num_leaves * num_layers > stack_division.MOST_PARTS
    (done,) = check_step(step, p, np.ones((2, 1, 2), np.float32))
    assert done.traced.kept_whole == ()
    assert {parts.count for parts in done.traced.argument_parts if parts} == {num_layers}


def test_initial_values_of_layers_on_one_actor_are_computed_together():
    """A step that takes layers one at a time wants them in single rows."""

    def make(key: jax.Array) -> jax.Array:
        return jax.vmap(lambda k: jax.random.normal(k, (WIDTH, WIDTH)))(jax.random.split(key, NUM_LAYERS))

    wanted = {0: Parts(0, (0, 1, 2, 3, 4))}
    homes = {0: tuple(frozenset({actor}) for actor in (1, 1, 0, 0))}
    done = plan_step(make, jax.random.key(0), result_parts=wanted, result_homes=homes)
    assert_close(run_plan(done, jax.random.key(0)), jax.jit(make)(jax.random.key(0)))
    ops = [op.name for recipe in done.placed.recipes for op in recipe.ops]
    assert ops.count("erf_inv") == 2
    assert [o.actors for o in done.placed.graph.outputs] == [(1,), (1,), (0,), (0,)]
    assert sent(done) == []


def test_results_that_the_caller_wants_in_parts():
    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, NUM_LAYERS)
        return jax.vmap(lambda k: jax.random.normal(k, (WIDTH, WIDTH)))(keys), jnp.cumsum(
            jnp.ones(NUM_LAYERS)
        )

    wanted = {0: Parts(0, (0, 1, 4)), 1: Parts(0, (0, 3, 4))}
    homes = {0: (frozenset({1}), frozenset({0})), 1: (frozenset({0}), frozenset({1}))}
    done = plan_step(make, jax.random.key(0), result_parts=wanted, result_homes=homes)
    assert_close(run_plan(done, jax.random.key(0)), jax.jit(make)(jax.random.key(0)))
    assert done.traced.result_parts == (wanted[0], wanted[1])
    assert [o.actors for o in done.placed.graph.outputs] == [(1,), (0,), (0,), (1,)]
    assert sent(done) == []


def test_the_example_of_the_page():
    kernel = SimpleNamespace(name="state[0]['layers']['kernel']", parts=())
    compiled = SimpleNamespace(report=lambda: SimpleNamespace(transfers=(), inputs=(kernel,)))
    loss = doc_code("placement.md", compiled=compiled)["loss_of_stacked_layers"]

    def step(p: Any, batch: Any) -> Any:
        grads = jpp.accumulate_grads(lambda b: jax.grad(loss)(p, b), schedule=jpp.Std1F1B(2, stages=[1]))(
            batch
        )
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)

    data = {"x": batch()["x"], "y": batch()["x"]}
    (done,) = check_step(step, {"layers": {"kernel": params()["layers"]["kernel"]}}, data)
    assert done.traced.argument_parts[0] == Parts(0, (0, 2, 4))


def test_rows_of_a_microbatch_are_not_divided():
    """Marks inside a map over examples: their activations meet again, and nothing of it lives on actors."""

    def step(p: Any, batch: Any) -> Any:
        def loss(p: Any, b: Any) -> jax.Array:
            rows = jax.lax.map(
                lambda row: jpp.pipeline_yield(jnp.tanh(row @ p["layers"]["kernel"][0])), b["x"]
            )
            return jnp.mean((rows @ p["out"] - b["y"]) ** 2)

        return jpp.accumulate_grads(lambda b: jax.grad(loss)(p, b), schedule=jpp.Std1F1B(2, stages=[0]))(
            batch
        )

    (done,) = check_step(step, params(), batch())
    assert not any(done.traced.argument_parts)


def test_a_leaf_of_the_batch_beside_a_divided_one():
    """A mask of the microbatch has a row per layer, too: it is whole, and each stage slices it."""

    def step(p: Any, batch: Any) -> Any:
        def loss(p: Any, b: Any) -> jax.Array:
            layers = jax.tree.map(lambda w: w * b["gate"].reshape(-1, *[1] * (w.ndim - 1)), p["layers"])
            return jnp.mean((scanned(layers, b["x"]) @ p["out"] - b["y"]) ** 2)

        return jpp.accumulate_grads(lambda b: jax.grad(loss)(p, b), schedule=jpp.Std1F1B(2, stages=[1]))(
            batch
        )

    gates = jax.random.normal(jax.random.key(3), (4, NUM_LAYERS))
    (done,) = check_step(step, params(), batch() | {"gate": gates})
    assert not count_whole(done, "p['layers']['kernel']") and count_whole(done, "batch['gate']")


# ---------------------------------------------------------------- statistics of all layers


def scaled_by_norm(p: Any) -> Any:
    return {"w": p["w"] / (1 + jnp.linalg.norm(p["w"]))}


def training(tx: Any, weights: Callable = lambda p: p) -> Callable:
    """A step that trains a stack of layers and nothing else; `weights` makes the loss's weights of `p`."""

    def step(state: Any, batch: Any) -> Any:
        p, opt = state

        def loss(p: Any, x: jax.Array) -> jax.Array:
            def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return jpp.pipeline_yield(jnp.tanh(x @ w)), None

            return jnp.mean((jax.lax.scan(body, x, weights(p)["w"])[0] - x) ** 2)

        def microbatch(b: jax.Array) -> Any:
            return jax.value_and_grad(loss)(p, b)[::-1]

        grads, losses = jpp.accumulate_grads(microbatch, schedule=jpp.Std1F1B(2, stages=[3]))(batch)
        updates, opt = tx.update(grads, opt, p)
        return (optax.apply_updates(p, updates), opt), losses

    return step


def of_layers(statistic: Callable) -> optax.GradientTransformation:
    """Divides gradients by a statistic over the layers' axis of gradients and weights, beside a momentum."""

    def update(grads: Any, p: Any) -> Any:
        return jax.tree.map(lambda g, w: g / (1 + statistic(g) + statistic(w)), grads, p)

    return optax.chain(optax.stateless(update), optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize(
    "step, tx",
    [
        (training, optax.chain(optax.adaptive_grad_clip(0.01), optax.adam(1e-2))),
        (training, of_layers(lambda x: jnp.var(x, axis=0))),
        (training, of_layers(lambda x: jax.nn.logsumexp(x, axis=0))),
        (training, of_layers(lambda x: jnp.max(x, axis=0) - jnp.min(x, axis=0))),
        (lambda tx: training(tx, scaled_by_norm), optax.adamw(1e-2)),
    ],
    ids=["agc", "var", "logsumexp", "range", "norm in the loss"],
)
@pytest.mark.parametrize(
    "schedule",
    [
        jpp.Std1F1B(2, stages=[3]),
        jpp.Std1F1B(4, stages=[1, 3, 5]),
        jpp.Std1F1B(8, stages=range(7)),
        jpp.Interleaved1F1B(4, stages=[1, 3, 5]),
    ],
    ids=["2", "4", "8", "interleaved"],
)
def test_a_statistic_of_all_layers_draws_none_to_its_actor(step, tx, schedule):
    p = {"w": 0.4 * jax.random.normal(jax.random.key(0), (WIDTH, WIDTH, WIDTH))}
    (done,) = check_step(step(tx), (p, tx.init(p)), batch()["x"], schedules=[schedule], steps=2)
    graph = done.placed.graph
    held = dict[int, int]()
    for i in graph.inputs:
        if graph.values[i.value].label.startswith("state") and i.actors:
            for a in i.actors:
                held[a] = held.get(a, 0) + graph.values[i.value].aval.size_bytes
    whole = sum(x.nbytes for x in jax.tree.leaves((p, tx.init(p))))
    assert max(held.values()) <= whole / len(held) + 16, held
