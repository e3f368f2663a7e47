"""Backward tasks in two parts, the fused last stage, scans unrolled at markers: what each form computes and
takes."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpret import check_step
from planning import sent

import jaxpp_async as jpp
from jaxpp_async.compiler.evaluate import recipe_function
from jaxpp_async.jax_bridge import private_api

D, ROWS, MICROBATCHES = 4, 3, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(MICROBATCHES, ROWS, D)).astype(np.float32)


def weights(*shape):
    return (RNG.normal(size=(*shape, D, D)) * 0.5).astype(np.float32)


def layer(w, x):
    return jnp.tanh(x @ w)


def sgd(loss, num_stages=3):
    def step(params, batch):
        def microbatch_grads(mb):
            value, grads = jax.value_and_grad(loss)(params, mb)
            return grads, value

        grads, losses = jpp.accumulate_grads(microbatch_grads, jpp.GPipe(num_stages))(batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses

    return step


def stages_of(block):
    """A loss of three stages, each `block(weights, x)`."""

    def loss(params, x):
        for i, w in enumerate(params):
            x = block(w, x)
            if i + 1 < len(params):
                x = jpp.pipeline_yield(x)
        return jnp.sum(x**2)

    return loss


def plain(w, x):
    return layer(w[1], layer(w[0], x))


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def scanned_checkpoint(w, x):
    return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), jnp.sum(x)), x, w)[0]


def scanned_with_shared(w, x):
    """The second layer's weight is used by every iteration, and a second carry counts."""

    def body(carry, w0):
        x, n = carry
        return (layer(w[1], layer(w0, x)) * jnp.cos(n), n + 1.0), None

    return jax.lax.scan(body, (x, jnp.float32(0)), w)[0][0]


def scan_of_scans(w, x):
    return jax.lax.scan(lambda x, w: (scanned(w, x), None), x, w.reshape(2, 1, D, D))[0]


def checkpoint_in_a_scanned_scan(w, x):
    def inner(x, w):
        return jax.checkpoint(layer)(w, x), None

    return jax.lax.scan(lambda x, w: (jax.lax.scan(inner, x, w)[0], None), x, w.reshape(1, 2, D, D))[0]


BLOCKS = {
    "scan of scans": scan_of_scans,
    "checkpoint in a scan of scans": checkpoint_in_a_scanned_scan,
    "plain": plain,
    "checkpoint": jax.checkpoint(plain),
    "checkpoint of checkpoint": jax.checkpoint(lambda w, x: jax.checkpoint(layer)(w[1], layer(w[0], x))),
    "scan": scanned,
    "scan of checkpoint": scanned_checkpoint,
    "checkpoint of scan": jax.checkpoint(scanned),
    "scan with a shared weight": scanned_with_shared,
    "cond": lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: layer(w[0], x), lambda: layer(w[1], x)),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_equals_jit_under_every_form(block):
    check_step(
        sgd(stages_of(BLOCKS[block])),
        [weights(2) for _ in range(3)],
        X,
        actors=3,
        schedules=(jpp.GPipe(3), jpp.Std1F1B(3), jpp.ZeroBubbleH1(3), mixed(3, 3)),
    )


def mixed(num_stages, num_actors):
    """Split for even microbatches, whole for odd ones."""
    rows = [[] for _ in range(num_actors)]
    for i in range(MICROBATCHES):
        for s in range(num_stages):
            rows[s % num_actors].append(jpp.Task(i, "fwd", s))
        for s in reversed(range(num_stages)):
            rows[s % num_actors] += (
                [jpp.Task(i, "bwd", s)]
                if i % 2
                else [jpp.Task(i, "bwd_input", s), jpp.Task(i, "bwd_weight", s)]
            )
    return rows


def products(plan, name):
    """Matrix products of one executable, those of its loops counted once an iteration."""
    types = plan.traced.types
    recipe = next(r for r in plan.placed.recipes if r.name == name)
    avals = [jax.ShapeDtypeStruct(types[v].aval.shape, types[v].aval.dtype) for v in recipe.inputs]
    return count(jax.make_jaxpr(recipe_function(recipe, types))(*avals).jaxpr)


def count(jaxpr, times=1):
    total = 0
    for eqn in jaxpr.eqns:
        total += times * (eqn.primitive.name == "dot_general")
        for inner in private_api.sub_jaxprs(eqn):
            total += count(inner, times * eqn.params.get("length", 1))
    return total


@pytest.mark.parametrize(
    ("block", "in_input", "in_weight"),
    # Of two layers, the backward has two products for inputs and two for weights; a checkpoint computes both
    # layers again, once.
    [
        ("plain", 2, 2),
        ("checkpoint", 4, 2),
        ("checkpoint of checkpoint", 4, 2),
        ("scan", 2, 2),
        ("scan of checkpoint", 4, 2),
        ("checkpoint of scan", 4, 2),
        ("scan of scans", 2, 2),
        ("checkpoint in a scan of scans", 4, 2),
    ],
)
def test_nothing_that_costs_is_computed_in_both_parts(block, in_input, in_weight):
    whole, split = check_step(
        sgd(stages_of(BLOCKS[block])),
        [weights(2) for _ in range(3)],
        X,
        actors=3,
        schedules=(jpp.GPipe(3), jpp.ZeroBubbleH1(3)),
    )

    assert products(split, "bwd_input1") == in_input
    assert products(split, "bwd_weight1") == in_weight
    assert products(whole, "bwd1") == in_input + in_weight


def test_first_stage_and_frozen_stages_have_one_part():
    """Stage 0 has no input gradient to make, a frozen stage no weight gradient: what is left is the whole
    task."""

    def loss(params, x):
        frozen = jax.lax.stop_gradient(params[1])
        x = jpp.pipeline_yield(layer(params[0], x))
        x = jpp.pipeline_yield(layer(frozen, x))
        return jnp.sum(layer(params[2], x))

    (done,) = check_step(
        sgd(loss), [weights() for _ in range(3)], X, actors=3, schedules=(jpp.ZeroBubbleH1(3),)
    )
    labels = Counter(n.label.partition(",")[0] for n in done.placed.graph.nodes)
    assert labels["bwd(stage 0"] == labels["bwd(stage 1"] == MICROBATCHES
    assert "bwd_weight(stage 1" not in labels and "bwd_input(stage 0" not in labels
    assert labels["fwd_bwd_input(stage 2"] == labels["bwd_weight(stage 2"] == MICROBATCHES


def test_forward_and_backward_of_the_last_stage_are_one_where_they_follow_each_other():
    gpipe, std, split = check_step(
        sgd(stages_of(plain)),
        [weights(2) for _ in range(3)],
        X,
        actors=3,
        schedules=(jpp.GPipe(3), jpp.Std1F1B(3), jpp.ZeroBubbleH1(3)),
    )

    def last(plan):
        return {n.label.partition("(")[0] for n in plan.placed.graph.nodes if "stage 2, mb" in n.label}

    assert last(gpipe) == {"fwd", "bwd"}
    assert last(std) == {"fwd_bwd"}
    assert last(split) == {"fwd_bwd_input", "bwd_weight"}


# ---------------------------------------------------------------- markers in a scan


def scan_of_stages(params, x):
    """A stage a layer, and the head."""
    x, means = jax.lax.scan(lambda x, w: (jpp.pipeline_yield(layer(w, x)), jnp.mean(x)), x, params["layers"])
    return jnp.sum((x @ params["head"]) ** 2) + jnp.sum(means)


def scan_of_scans(params, x):
    """Two stages of three layers each, and the head."""

    def stage(x, layers):
        return jpp.pipeline_yield(scanned(layers, x)), None

    x, _ = jax.lax.scan(stage, x, params["layers"])
    return jnp.sum((x @ params["head"]) ** 2)


def scan_of_checkpoints(params, x):
    x, _ = jax.lax.scan(
        jax.checkpoint(lambda x, w: (jpp.pipeline_yield(layer(w, x)), None)), x, params["layers"]
    )
    return jnp.sum((x @ params["head"]) ** 2)


def scan_backwards(params, x):
    x, _ = jax.lax.scan(
        lambda x, w: (jpp.pipeline_yield(layer(w, x)), None), x, params["layers"], reverse=True
    )
    return jnp.sum((x @ params["head"]) ** 2)


@pytest.mark.parametrize(
    ("loss", "layers"),
    [
        (scan_of_stages, (2,)),
        (scan_of_scans, (2, 3)),
        (scan_of_checkpoints, (2,)),
        (jax.jit(scan_of_stages), (2,)),
        (scan_backwards, (2,)),
    ],
    ids=["stage a layer", "scan of scans", "checkpoint", "in a jit", "reverse"],
)
def test_a_scan_is_unrolled_at_its_markers(loss, layers):
    params = {"layers": weights(*layers), "head": weights()}
    for done in check_step(
        sgd(loss), params, X, actors=3, schedules=(jpp.GPipe(3), jpp.Std1F1B(3), jpp.ZeroBubbleH1(3))
    ):
        shapes = Counter(shape for *_, shape in sent(done))
        # Each layer lives with its stage: no gradient and no weight travels.
        assert not any(len(shape) > 1 and shape[-2:] == (D, D) for shape in shapes)
        assert shapes[ROWS, D] == 4 * MICROBATCHES


def test_a_stage_a_scan_of_stages_holds_only_its_layer():
    """One stack a stage instead of one for all: nothing of a weight's size travels."""

    def loss(params, x):
        for i, layers in enumerate(params["stages"]):
            x = scanned(layers, x)
            if i < 2:
                x = jpp.pipeline_yield(x)
        return jnp.sum(x**2)

    (done,) = check_step(
        sgd(loss), {"stages": [weights(2) for _ in range(3)]}, X, actors=3, schedules=(jpp.Std1F1B(3),)
    )
    assert {shape for *_, shape in sent(done)} == {(ROWS, D)}


# ---------------------------------------------------------------- ends of sums behind the loop


def tied(use):
    def loss(params, x):
        w = params["tied"]
        x = jpp.pipeline_yield(layer(w, x))
        x = jpp.pipeline_yield(layer(params["own"], x))
        return jnp.sum(use(w, x))

    return loss


TIED = {
    "as it is": layer,
    "transposed": lambda w, x: layer(w.T, x),
    "scaled": lambda w, x: layer(2 * w, x),
    "a slice": lambda w, x: x[:, :2] @ w[:2],
    "reshaped": lambda w, x: layer(w.reshape(-1).reshape(D, D).T, x),
}


@pytest.mark.parametrize("use", TIED)
def test_no_weight_travels_inside_the_loop(use):
    params = {"tied": weights(), "own": weights()}
    for done in check_step(
        sgd(tied(TIED[use])),
        params,
        X,
        actors=3,
        schedules=(jpp.GPipe(3), jpp.Std1F1B(3), jpp.ZeroBubbleH1(3)),
    ):
        assert Counter(shape for *_, shape in sent(done) if shape != (ROWS, D)) in (
            Counter({(D, D): 2}),  # a partial gradient one way, the new weight the other
            Counter({(D, D): 1, (2, D): 1}),
        )


def test_casts_stay_inside_the_stages():
    """Each stage's part of a tied gradient is accumulated in float32, though stages compute in bfloat16."""

    def loss(params, x):
        w = params["tied"].astype(jnp.bfloat16)
        x = jpp.pipeline_yield(layer(w, x.astype(jnp.bfloat16)))
        x = jpp.pipeline_yield(layer(params["own"].astype(jnp.bfloat16), x))
        return jnp.sum(layer(w.T, x).astype(jnp.float32))

    params = {"tied": weights(), "own": weights()}
    for done in check_step(
        sgd(loss), params, X, actors=3, schedules=(jpp.GPipe(3), jpp.Std1F1B(3)), rtol=2e-2
    ):
        weight_sized = [
            v for v in done.placed.graph.values if v.kind == "accumulator" and v.aval.shape == (D, D)
        ]
        assert weight_sized and {v.aval.dtype for v in weight_sized} == {"float32"}
        assert Counter(shape for *_, shape in sent(done))[(D, D)] == 2


def test_a_penalty_is_added_where_its_weight_lives():
    """Weight decay inside the loss: a term that no stage computes goes to the stage that holds the weight."""

    def loss(params, x):
        penalty = 0.1 * sum(jnp.sum(w * w) for w in params)
        return stages_of(layer)(params, x) + penalty

    for done in check_step(
        sgd(loss), [weights() for _ in range(3)], X, actors=3, schedules=(jpp.GPipe(3), jpp.Std1F1B(3))
    ):
        assert (D, D) not in [shape for *_, shape in sent(done)]


# ---------------------------------------------------------------- what no stage may do on its own part


def of_two_stages(join):
    """The sum over microbatches of what `join` makes of a value of each of two stages."""

    def step(scale, batch):
        def one(x):
            first = jnp.cumsum(x) * scale
            second = jnp.cumsum(jpp.pipeline_yield(first))
            return join(first, second)

        return jpp.accumulate_grads(one, jpp.GPipe(2), reduce=jpp.Sum())(batch)

    return step


NOT_LINEAR = {
    "whole numbers divided": lambda a, b: (a.astype(jnp.uint32) + b.astype(jnp.uint32)) // 2,
    "signed ones": lambda a, b: jax.lax.div(a.astype(jnp.int32) + b.astype(jnp.int32), jnp.int32(2)),
    "a sum that fits where its terms do not": lambda a, b: (
        (1e6 * a + (a - 1e6 * a)).astype(jnp.float16) + 0 * b
    ),
    "in a narrow type": lambda a, b: ((a + 1e5) + -(b + 1e5)).astype(jnp.float16),
    "terms that cancel": lambda a, b: (a + 1e5) + -(b + 1e5),
}


@pytest.mark.parametrize("join", NOT_LINEAR)
def test_only_what_is_linear_is_accumulated_apart(join):
    batch = np.arange(20, dtype=np.float32).reshape(4, 5) / 8
    check_step(
        of_two_stages(NOT_LINEAR[join]),
        np.float32(1.5),
        batch,
        schedules=(jpp.GPipe(2), jpp.Std1F1B(2)),
        rtol=1e-5,
    )
