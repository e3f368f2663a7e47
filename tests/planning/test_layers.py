from functools import partial

import jax
import pytest
from loop_models import MODELS, batch, chain_loss, trained, weights
from uneven_model import ROWS, WIDTH, arguments, uneven_step

import jaxpp_async as jpp
from jaxpp_async.errors import PlanError
from jaxpp_async.planning.cost_model import CostModel, TaskFormula
from jaxpp_async.planning.layers import profile_layers, resized, shortened
from jaxpp_async.planning.machine import StepCompiler
from jaxpp_async.planning.samples import LinkCost, Samples

WEIGHT, ACTIVATION = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
COSTS = CostModel(
    formula=TaskFormula(1e-3, flops_per_s=1e9),
    links={"same host": LinkCost(Samples((1e-4,)), 1e8)},
    dispatch=Samples((2e-3,)),
    wake=Samples((5e-3,)),
    post=Samples((1e-3,)),
)


def profile(step, args, costs=COSTS):
    compiler = StepCompiler(step, "plan", donate_argnums=0)
    return profile_layers(compiler, args, jpp.Machine(2), costs, 2, lambda argnum: argnum == 1)


def test_layers_have_the_times_and_bytes_of_the_finest_cut():
    found = profile(uneven_step(), arguments(num_microbatches=2))
    assert len(found.layers) == 5 and len(found.marks) == 4
    by = "0 of 5 layers by the times of the measured stages that contain them; 5 by FLOPs at 1 GFLOP/s"
    assert found.assumed[0] == by
    first, *middle, last = found.layers
    assert first.input_gradient_s == 0 and last.sent_bytes == 0
    product_s = 2 * ROWS * WIDTH * WIDTH / 1e9
    for layer in middle:
        times = layer.forward_s, layer.input_gradient_s, layer.weight_gradient_s
        assert all(product_s <= t <= 1.2 * product_s for t in times)  # and the tanh
        assert layer.sent_bytes == ACTIVATION
        assert layer.static_bytes == 2 * WEIGHT  # a weight and the sum of its gradients
        assert ACTIVATION <= layer.kept_bytes <= 2 * ACTIVATION
        assert layer.weight_kept_bytes == 2 * ACTIVATION  # the input and the output's gradient
    assert 1.9 < last.work_s / middle[0].work_s < 2.2
    assert last.static_bytes >= 4 * WEIGHT


def test_the_time_of_scaling_gradients_is_weight_gradients_time():
    steps, args = (MODELS["clipped_gradients"].step, chain), (weights(3), batch(2))
    clipped, plain = (profile(partial(step, jpp.Std1F1B), args) for step in steps)
    by_weight = [
        a.weight_gradient_s - b.weight_gradient_s for a, b in zip(clipped.layers, plain.layers, strict=True)
    ]
    assert all(more > 0 for more in by_weight[1:])


def chain(pipe, params, batches):
    return trained(chain_loss, pipe, 3, params, batches)


def test_what_does_not_depend_on_the_work_is_dispatch_and_latency():
    found = profile(uneven_step(), arguments(num_microbatches=2))
    assert found.dispatch_s == pytest.approx(3e-3)  # a task's overhead, and the way to it
    assert found.latency_s == pytest.approx(1e-4 + 1e-3 + 3e-3)  # latency, post, and wake instead of dispatch
    assert found.bytes_per_s == 1e8


def test_a_problem_has_the_batch_of_its_microbatches_and_no_reserve():
    found = profile(uneven_step(), arguments(num_microbatches=2))
    small, large = found.problem(2, 2, 1e6), found.problem(2, 10, 1e6)
    grown = [b.static_bytes - a.static_bytes for a, b in zip(small.layers, large.layers, strict=True)]
    assert grown == [8 * ACTIVATION, 0, 0, 0, 8 * ACTIVATION]  # x and y
    assert small.cap_bytes == 1e6 - found.reserve_bytes > 0


def test_a_value_that_skips_layers_crosses_all_marks_between_and_sums_do_not_count():
    def loss_fn(w, mb):
        x = first = jax.numpy.tanh(mb @ w)
        x, first = jpp.pipeline_yield((x, first))
        x = jpp.pipeline_yield(jax.numpy.tanh(x @ w))
        return jax.numpy.sum(x * first)

    def step(w, batch):
        return jpp.accumulate_grads(lambda mb: jax.grad(loss_fn)(w, mb), jpp.Std1F1B(3))(batch)

    params, batch = arguments(num_microbatches=2)
    found = profile(step, (params["layers"][0], batch["x"]))
    assert [layer.sent_bytes for layer in found.layers] == [2 * ACTIVATION, ACTIVATION, 0]


def test_a_step_without_marks_has_no_layers():
    def step(w, batch):
        grads = jpp.accumulate_grads(lambda mb: jax.grad(lambda w: ((mb @ w) ** 2).sum())(w), jpp.Std1F1B(1))
        return grads(batch)

    params, batch = arguments(num_microbatches=2)
    with pytest.raises(PlanError, match="'step' has no pipeline_yield inside accumulate_grads"):
        profile(step, (params["layers"][0], batch["x"]))


def test_a_global_batch_is_divided_into_other_microbatches():
    args = arguments(num_microbatches=6)
    _, batch = resized(args, (1,), 12)
    assert {leaf.shape for leaf in batch.values()} == {(12, 4, WIDTH)}
    _, batch = shortened(args, (1,), 2)
    assert {leaf.shape for leaf in batch.values()} == {(2, ROWS, WIDTH)}
    with pytest.raises(PlanError, match="a global batch of 48, which cannot be divided into 5 microbatches"):
        resized(args, (1,), 5)


def test_a_step_with_several_loops_of_marks_is_refused():
    def step(w, batch):
        def grads(mb):
            return jax.grad(lambda w: (jpp.pipeline_yield(mb @ w) @ w).sum())(w)

        return [jpp.accumulate_grads(grads, jpp.Std1F1B(2))(batch) for _ in range(2)]

    params, batch = arguments(num_microbatches=2)
    with pytest.raises(PlanError, match=r"'step' has 2 loops with pipeline_yield, at .*py:\d+ and "):
        profile(step, (params["layers"][0], batch["x"]))
