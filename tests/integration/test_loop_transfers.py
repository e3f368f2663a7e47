"""What crosses between actors in the loop: gradients, penalties, projections, clipping; and the numbers."""

from __future__ import annotations

import cProfile
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpret import check_step, run_plan
from jax.sharding import PartitionSpec as P
from loop_models import (
    BUCKETS,
    HEADS,
    LENGTH,
    LINEAR_ENDS,
    MODELS,
    ROWS,
    WEIGHT_BYTES,
    WIDTH,
    batch,
    chain_loss,
    combined,
    in_loop,
    outside,
    trained,
    usual,
    weights,
)
from planning import plan_step, sent

import jaxpp_async as jpp
from jaxpp_async.session import report
from jaxpp_async.testing import assert_close

ACTIVATION_BYTES = 4 * ROWS * LENGTH * WIDTH
SCHEDULES = {
    "Std1F1B": (jpp.Std1F1B, None),
    "Interleaved1F1B": (jpp.Interleaved1F1B, 2),
    "ZeroBubbleH1": (jpp.ZeroBubbleH1, None),
}


def planned(name, kind=jpp.Std1F1B, actors=None):
    model = MODELS[name]
    return plan_step(model.under(kind), *model.make_args(), actors=actors or model.stages)


@functools.cache
def plain(name):
    """What plain JAX computes."""
    return jax.device_get(jax.jit(MODELS[name].under(jpp.GPipe))(*MODELS[name].make_args()))


def weights_sent(done):
    """What is sent in the loop that is as large as a weight; activations are smaller here."""
    return [t for t in in_loop(done) if t.size_bytes >= WEIGHT_BYTES]


def homes(done):
    """Where each argument lives, by its name."""
    return {line.name: line.actors for line in report.make(done, {}, {}).inputs}


# ---------------------------------------------------------------- linear ends of gradients


@pytest.mark.parametrize("name", LINEAR_ENDS)
def test_a_linear_end_of_gradients_is_joined_behind_the_loop(name):
    args = (*usual(3)(), np.float32(2))
    expected = jax.device_get(jax.jit(partial(combined(LINEAR_ENDS[name]), jpp.GPipe))(*args))
    for kind, actors in SCHEDULES.values():
        done = plan_step(partial(combined(LINEAR_ENDS[name]), kind), *args, actors=actors or 3)
        assert not weights_sent(done)
        assert_close(run_plan(done, *args), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_tied_weight_s_gradient_that_is_returned_twice_is_joined_behind_the_loop(kind):
    assert not weights_sent(planned("tied_weight_returned_twice", *SCHEDULES[kind]))


def test_differences_from_a_mean_need_no_more_accumulators_than_gradients():
    def step(name):
        return partial(combined({"gradients": lambda g, *_: g, **LINEAR_ENDS}[name]), jpp.Std1F1B)

    first, second = (
        {start.result for recipe in done.placed.recipes for start in recipe.starts}
        for name in ("gradients", "differences from a mean")
        for done in [plan_step(step(name), *usual(3)(), actors=3)]
    )
    assert len(first) == len(second)


@pytest.mark.parametrize("axis", ["auto", "explicit"])
async def test_linear_ends_on_actors(remote_mesh, axis):
    def every(g, *more):
        return {name: combine(g, *more) for name, combine in LINEAR_ENDS.items()}

    options = {"spmd_mesh": {"data": 2}, "axis_types": {"data": axis}}
    mesh, args = await remote_mesh(2, launcher="inline", **options), (*usual(3)(), np.float32(2))
    step = mesh.distributed(partial(combined(every), jpp.Interleaved1F1B), in_shardings=P())
    expected = jax.device_get(jax.jit(partial(combined(every), jpp.GPipe))(*args))
    assert_close(await mesh.fetch(await mesh.run(step, *args)), expected, rtol=2e-5, atol=1e-6)


# ---------------------------------------------------------------- projections of an earlier value


@pytest.mark.parametrize("kind", ["Std1F1B", "ZeroBubbleH1"])
@pytest.mark.parametrize("name", ["encoder_decoder", "decoder_of_two_stages"])
def test_an_encoder_s_output_is_sent_once_and_no_projection_of_it(name, kind):
    done, last = planned(name, SCHEDULES[kind][0]), MODELS[name].stages - 1
    to_last = sum(t.per_microbatch for t in in_loop(done) if t.to_actor == last)
    from_last = sum(t.per_microbatch for t in in_loop(done) if t.from_actor == last)
    assert (to_last, from_last) == (2, 2), "the decoder's input and the encoder's output, and their gradients"
    assert {t.size_bytes for t in in_loop(done)} == {ACTIVATION_BYTES}


@pytest.mark.parametrize("name", ["encoder_decoder", "decoder_of_two_stages"])
def test_a_projection_s_weights_live_with_the_layer_that_uses_it(name):
    marks = {"encoder_decoder": (1, 1, 1), "decoder_of_two_stages": (1, 2, 2)}[name]
    done = homes(planned(name))
    for layer, stage in enumerate(marks):
        for kind in ("query", "key", "value", "out", "bias"):
            assert done[f"params['{kind}{layer}']"] == (stage,)
    assert done["params['encode']"] == (0,)


# ---------------------------------------------------------------- penalties, and values of weights alone

PENALTIES = ("orthogonal_penalty", "penalty_that_the_loss_weighs", "elastic_weight_consolidation")


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_is_computed_where_the_weights_live(name, kind):
    pipe, actors = SCHEDULES[kind]
    done = planned(name, pipe, actors)
    assert {t.size_bytes for t in in_loop(done)} == {ACTIVATION_BYTES}
    assert {t.size_bytes for t in outside(done)} == {4}
    weights = {k: where for k, where in homes(done).items() if k.startswith(("params", "old", "fisher"))}
    assert all(len(where) == 1 for where in weights.values()) and len(set(weights.values())) == (actors or 3)


def test_a_penalty_adds_no_argument_to_the_last_actor():
    with_penalty = report.make(planned("orthogonal_penalty"), {}, {}).actors
    without = report.make(plan_step(partial(chain, jpp.Std1F1B), *usual(3)(), actors=3), {}, {}).actors
    for actor, same in zip(with_penalty, without, strict=True):
        assert actor.argument_bytes == same.argument_bytes
        assert actor.peak_bytes - same.peak_bytes <= 3 * 4  # a scalar from each weight


def chain(pipe, params, batches):
    return trained(chain_loss, pipe, 3, params, batches)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("name", ["position_bias", "cholesky_factor", "product_of_one_stage"])
def test_what_depends_on_weights_alone_is_not_sent_in_the_loop(name, kind):
    pipe, actors = SCHEDULES[kind]
    done = planned(name, pipe, min(actors or 3, MODELS[name].stages))
    assert {t.size_bytes for t in in_loop(done)} == {ACTIVATION_BYTES}


def test_it_is_computed_once_a_step():
    tasks = planned("cholesky_factor").placed.recipes
    found = [r.stem for r in tasks for op in r.ops if op.name == "cholesky"]
    assert len(found) == 1 and found[0].startswith("outer")
    assert all(r.stem.startswith("outer") for r in tasks for op in r.ops if op.name == "triangular_solve")


def test_of_a_table_and_what_is_gathered_from_it_the_smaller_is_sent():
    done = planned("position_bias")
    table = 4 * BUCKETS * HEADS
    assert [t.size_bytes for t in outside(done)] == [table] * 4  # two sums of gradients, two new tables
    assert homes(done)["params['table']"] == (0, 1, 2)


def test_a_factor_as_large_as_its_matrix_is_computed_on_one_actor():
    done = planned("cholesky_factor")
    assert homes(done)["params[2]"] == (0,)
    # The factor before the loop, and the sum of its gradient after it.
    assert [(t.when, t.size_bytes) for t in outside(done)] == [
        ("after the loop", WEIGHT_BYTES),
        ("before the loop", WEIGHT_BYTES),
    ]


def test_one_product_is_kept_for_all_microbatches():
    step = MODELS["product_of_one_stage"].under(jpp.GPipe)
    made = [report.make(plan_step(step, weights(2), batch(n), actors=2), {}, {}) for n in (4, 8)]
    first, second = (one.actors[0].peak_bytes for one in made)
    assert second - first < 4 * 4 * ACTIVATION_BYTES  # nothing of a weight's size for each microbatch more


# ---------------------------------------------------------------- clipping in the loop

CLIPPED = ("clipped_gradients", "clipped_rows", "clipped_by_optax", "clipped_with_noise")


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_sends_norms_and_scales_and_no_gradient(name, kind):
    pipe, actors = SCHEDULES[kind]
    done = planned(name, pipe, actors)
    assert not weights_sent(done)
    assert all(t.size_bytes in (ACTIVATION_BYTES, 4 * ROWS, 4, 1) for t in in_loop(done))
    assert not outside(done), "sums of gradients and new weights stay where they are"
    assert len(set(homes(done)[f"params[{k}]"] for k in range(3))) == (actors or 3)
    assert all(len(homes(done)[f"params[{k}]"]) == 1 for k in range(3))


def test_few_gradients_wait_for_their_scale_however_many_microbatches():
    for kind in (jpp.GPipe, jpp.Std1F1B):
        for actor in (1, 2):
            peaks = [
                report.make(plan_step(partial(step, kind), weights(3), batch(12), actors=3), {}, {})
                .actors[actor]
                .peak_bytes
                for step in (MODELS["clipped_gradients"].step, chain)
            ]
            # Three of the last stage's gradients, and less before it.
            assert peaks[0] - peaks[1] < 3.1 * WEIGHT_BYTES


def test_noise_is_made_where_it_is_added():
    names = ("clipped_gradients", "clipped_with_noise")
    first, second = ([a.peak_bytes for a in report.make(planned(n), {}, {}).actors] for n in names)
    assert first == second


def test_a_finish_is_a_task_of_the_report():
    tasks = [a.tasks for a in report.make(planned("clipped_gradients"), {}, {}).actors]
    assert [t.get("finish") for t in tasks] == [None, 4, 4]


# ---------------------------------------------------------------- what compiling costs


def test_compiling_costs_in_proportion_to_the_stages():
    """Counted in Python calls, of a model with a penalty, clipping and a value that all stages use."""

    def step(pipe, params, batches):
        def loss(params, mb):
            x, shared = mb["x"], jnp.tanh(mb["x"] @ params[0])
            for w in params[1:]:
                x = jpp.pipeline_yield(jnp.tanh(x @ w)) + shared @ w @ (w @ w.T)
            return jnp.mean(x) + sum(jnp.sum(jnp.square(w.T @ w)) for w in params)

        def of_one(mb):
            value, grads = jax.value_and_grad(loss)(params, mb)
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads))
            return [g / norm for g in grads], value

        return jpp.accumulate_grads(of_one, pipe)(batches)

    calls = {}
    for stages in (4, 8, 16, 32):  # the first one fills JAX's caches
        profiler = cProfile.Profile()
        args = weights(stages), batch()
        profiler.runcall(plan_step, partial(step, jpp.Std1F1B(stages)), *args, actors=stages)
        calls[stages] = sum(entry.callcount for entry in profiler.getstats())
    assert calls[32] - calls[16] < 2.4 * (calls[16] - calls[8]), calls


# ---------------------------------------------------------------- equality with plain JAX


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_plain_jax(name, kind):
    pipe, actors = SCHEDULES[kind]
    args = MODELS[name].make_args()
    found = run_plan(planned(name, pipe, actors), *args)
    assert_close(found, plain(name), rtol=MODELS[name].rtol, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["decoder_of_two_stages", "penalty_that_the_loss_weighs", "position_bias", "clipped_rows"]
)
async def test_a_model_equals_plain_jax_across_processes(remote_mesh, name):
    mesh, model = await remote_mesh(2), MODELS[name]
    step = mesh.distributed(model.under(jpp.Interleaved1F1B), donate_argnums=0)
    args = model.make_args()
    compiled = await step.compile(*args)
    assert all(t.size_bytes < WEIGHT_BYTES for t in compiled.report().transfers if t.in_loop)
    assert_close(await mesh.fetch(await mesh.run(step, *args)), plain(name), rtol=model.rtol, atol=1e-6)


@pytest.mark.parametrize("axis", ["auto", "explicit"])
@pytest.mark.parametrize("name", ["cholesky_factor", "clipped_gradients", "position_bias"])
async def test_a_model_equals_plain_jax_over_devices(remote_mesh, name, axis):
    """The batch's rows are on two devices of each actor."""
    options = {"spmd_mesh": {"data": 2}, "axis_types": {"data": axis}}
    mesh, model = await remote_mesh(2, launcher="inline", **options), MODELS[name]
    step = mesh.distributed(model.under(jpp.Interleaved1F1B), in_shardings=(P(), P(None, "data")))
    args = model.make_args()
    assert_close(await mesh.fetch(await mesh.run(step, *args)), plain(name), rtol=model.rtol, atol=1e-6)


def test_the_weight_gradient_of_a_first_stage_that_is_one_product_stays_there():
    """It reads the gradient of an activation and the batch alone, and scales no gradient of a later stage."""

    def loss(params, x):
        return jnp.sum((jpp.pipeline_yield(x @ params[0]) @ params[1]) ** 2)

    def step(params, batches):
        grads = jpp.accumulate_grads(lambda x: jax.grad(loss)(params, x), jpp.Std1F1B(2))(batches)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = [np.eye(8, dtype=np.float32), np.ones((8, 8), np.float32)]
    (done,) = check_step(step, params, np.ones((2, 4, 8), np.float32))
    assert {node.label.partition("(")[0] for node in done.placed.graph.nodes} <= {
        "fwd",
        "bwd",
        "fwd_bwd",
        "start",
        "outer",
    }
    assert all(shape == (4, 8) for *_, shape in sent(done))
