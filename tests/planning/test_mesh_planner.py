"""Decisions about steps whose schedule is `Auto`, without a mesh."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from msgspec import structs
from uneven_model import arguments, uneven_step

import jaxpp_async as jpp
from jaxpp_async.errors import PlanError
from jaxpp_async.planning.cost_model import CostModel, TaskFormula
from jaxpp_async.planning.memory import memory_needs
from jaxpp_async.planning.mesh_planner import FIRST_STEPS, TRIAL_STEPS, WARM_UP_STEPS, MeshPlanner
from jaxpp_async.planning.samples import LinkCost, Samples
from jaxpp_async.session.step_request import StepDefinition, make_options

FORMULA = TaskFormula(flops_per_s=1e7)
COSTS = CostModel(formula=FORMULA, links={"same host": LinkCost(Samples((1e-5,)), 1e9)})


def decide(fn, args, *, actors=2, costs=COSTS, **options):
    """Return what is chosen for a step by a device model, and the form of its first steps."""
    machine = jpp.Machine(actors)
    given = make_options(
        fn,
        **{"in_shardings": None, "out_shardings": None, "donate_argnums": 0, "static_argnums": (), **options},
        caller="test",
    )
    step = StepDefinition(machine, fn, given)
    form = jpp.compile_for(machine, fn, args, donate_argnums=given.donate_argnums)
    planner = MeshPlanner(machine, costs)
    return planner.choose(step, form, args, [], lambda _: None), form


def test_a_device_model_with_links_needs_no_steps():
    assert WARM_UP_STEPS >= FIRST_STEPS + 2  # what `costs_of` needs
    assert MeshPlanner(jpp.Machine(2), COSTS).can_choose(0)
    for model in (None, CostModel(formula=FORMULA), SimpleNamespace(task_s=lambda work: 0.0)):
        planner = MeshPlanner(jpp.Machine(2), model)
        assert not planner.can_choose(WARM_UP_STEPS - 1) and planner.can_choose(WARM_UP_STEPS)


def test_a_device_model_that_knows_no_links_says_what_a_plan_needs():
    planner, fn = MeshPlanner(jpp.Machine(2), SimpleNamespace(task_s=lambda work: 0.0)), uneven_step()
    given = make_options(
        fn, in_shardings=None, out_shardings=None, donate_argnums=(), static_argnums=(), caller="test"
    )
    with pytest.raises(PlanError, match=r"device_model is no CostModel with links, .* or pass costs="):
        planner.plan(StepDefinition(jpp.Machine(2), fn, given), arguments(), [])


def test_a_shorter_plan_is_chosen_and_the_text_says_what_it_is():
    choice, form = decide(uneven_step(schedule=jpp.Auto()), arguments())
    assert choice.plan is not None and choice.level == logging.INFO
    plan, before_s = choice.plan, jpp.simulate(form, COSTS).step_s.p50
    assert plan.step_s.p50 < 0.99 * before_s
    marks = ", ".join(map(str, plan.cut))
    name = "a searched order" if plan.name == "searched" else plan.name
    assert choice.text == (
        f"step 'train_step' (jpp.Auto): by the device model, {name} with stages at marks {marks}: "
        f"{1e3 * plan.step_s.p50:.4g} ms a step predicted; Std1F1B(num_stages=2, stages='balanced'): "
        f"{1e3 * before_s:.4g} ms predicted"
    )


def test_a_plan_that_wins_nothing_is_not_chosen():
    choice, _ = decide(uneven_step(schedule=jpp.Auto()), arguments(), actors=1)
    assert choice.plan is None and choice.level == logging.INFO
    assert "it stays with Std1F1B(num_stages=1, stages='balanced'): " in choice.text
    assert "; the best plan, " in choice.text


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_number_of_stages_is_kept(num_stages):
    fn = uneven_step(schedule=jpp.Auto(num_stages=num_stages))
    choice, _ = decide(fn, arguments(), actors=2)
    assert choice.plan is not None and choice.plan.schedule.num_stages == num_stages


def test_a_cap_that_the_first_steps_exceed_is_warned_of_and_kept_by_the_plan():
    args, planner = arguments(), MeshPlanner(jpp.Machine(2))

    def form_of(memory):
        fn = uneven_step(schedule=jpp.Auto(memory=memory))
        step = StepDefinition(jpp.Machine(2), fn, choice_options(fn))
        return step, jpp.compile_for(jpp.Machine(2), fn, args, donate_argnums=0)

    needed = max(needs.total_bytes for needs in memory_needs(form_of(None)[1]))
    assert planner.over_cap(*form_of(None)) is None and planner.over_cap(*form_of(needed)) is None
    text = planner.over_cap(*form_of(needed - 1))
    assert text is not None and f"need {needed:,} bytes on each device of actor" in text
    assert f"memory= allows {needed - 1:,}; if they do not fit, plan before the run" in text
    choice, _ = decide(uneven_step(schedule=jpp.Auto(memory=needed - 1)), args)
    assert choice.plan is not None and max(choice.plan.memory) < needed


def choice_options(fn):
    return make_options(
        fn, in_shardings=None, out_shardings=None, donate_argnums=0, static_argnums=(), caller="test"
    )


@pytest.mark.parametrize(
    ("auto", "message"),
    [
        (jpp.Auto(memory="1kB"), "no plan of step 'train_step' fits into 1,000 bytes a device; the least"),
        (jpp.Auto(num_stages=9), "num_stages is 9, and the step's 4 marks can end 1 to 5 stages"),
    ],
)
def test_a_failure_is_a_warning_with_the_reason(auto, message):
    choice, _ = decide(uneven_step(schedule=auto), arguments())
    assert choice.plan is None and choice.level == logging.WARNING
    assert choice.text.startswith("step 'train_step' (jpp.Auto) stays with Std1F1B(")
    assert message in choice.text and "\n" not in choice.text


def test_too_few_measured_steps_and_missing_costs_are_warnings():
    fn, args = uneven_step(schedule=jpp.Auto()), arguments()
    choice, _ = decide(fn, args, costs=None)
    assert choice.level == logging.WARNING and "0 steps finished in a row here" in choice.text
    choice, _ = decide(fn, args, costs=CostModel(links=COSTS.links))
    assert (
        choice.level == logging.WARNING and "task 'fwd(stage 0)' of the step: there is no cost" in choice.text
    )


def test_an_error_of_the_users_function_is_a_warning():
    plain = uneven_step(schedule=jpp.Auto())

    def train_step(params, batch):
        if batch["x"].shape[0] != 6:
            raise RuntimeError("six microbatches, please")
        return plain(params, batch)

    choice, _ = decide(train_step, arguments())
    assert choice.level == logging.WARNING and "RuntimeError: six microbatches, please" in choice.text


def two_loops(first, second):
    def step(params, batch):
        def loss(mb):
            x = jpp.pipeline_yield(jnp.tanh(mb @ params["a"]))
            return jnp.mean((x @ params["b"]) ** 2)

        def grads(mb):
            return jax.grad(lambda p: loss_of(p, mb))(params)

        def loss_of(p, mb):
            x = jpp.pipeline_yield(jnp.tanh(mb @ p["a"]))
            return jnp.mean((x @ p["b"]) ** 2)

        summed = jpp.accumulate_grads(grads, first)(batch)
        losses = jpp.accumulate_grads(loss, second, reduce=jpp.Stack())(batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, summed), losses

    params = {name: jax.ShapeDtypeStruct((16, 16), "float32") for name in "ab"}
    return step, (params, jax.ShapeDtypeStruct((4, 8, 16), "float32"))


@pytest.mark.parametrize("other", [jpp.GPipe(2), jpp.Auto()])
def test_a_step_of_several_loops_is_not_planned(other):
    choice, _ = decide(*two_loops(jpp.Auto(), other))
    assert choice.plan is None and choice.level == logging.WARNING
    assert (
        "the step has several loops, at " in choice.text and choice.text.count("test_mesh_planner.py:") == 2
    )


def test_the_batch_is_the_argument_that_the_loops_read():
    plain = uneven_step(schedule=jpp.Auto())

    def train_step(batch, params):  # the batch is not the last argument
        return plain(params, batch)

    params, batch = arguments()
    choice, _ = decide(train_step, (batch, params), donate_argnums=1)
    assert choice.plan is not None and choice.level == logging.INFO


def test_the_first_steps_of_a_machine_that_need_not_exist():
    form = jpp.compile_for(jpp.Machine(2), uneven_step(schedule=jpp.Auto()), arguments())
    same = jpp.compile_for(
        jpp.Machine(2), uneven_step(schedule=jpp.Std1F1B(2, stages="balanced")), arguments()
    )
    assert list(map(str, form.compiled.programs)) == list(map(str, same.compiled.programs))


def test_a_plan_takes_no_notice_of_auto():
    options = {"machine": jpp.Machine(2), "costs": COSTS, "iterations": 50}
    with_auto = jpp.plan(uneven_step(schedule=jpp.Auto(memory="1kB")), arguments(), **options)
    assert with_auto == jpp.plan(uneven_step(), arguments(), **options)


def steps_of(seconds):
    """Return timelines of a plan's first steps, of which the first two are slow."""
    return [SimpleNamespace(begin_s=1.0, end_s=1.0 + s) for s in (99.0, 99.0, *[seconds] * (TRIAL_STEPS - 2))]


def test_a_step_goes_back_if_its_plan_is_longer_than_predicted_and_than_before():
    choice, _ = decide(uneven_step(schedule=jpp.Auto()), arguments())
    planner, plan = MeshPlanner(jpp.Machine(2)), choice.plan
    assert plan is not None and choice.measured_s is None  # nothing was measured before
    assert planner.why_not("train", choice, steps_of(99.0)) is None
    predicted_s = plan.step_s.p50
    tried = replace(choice, measured_s=1.05 * predicted_s)
    assert planner.why_not("train", tried, steps_of(1.04 * predicted_s)) is None  # nearly as predicted
    tried = replace(choice, measured_s=1.3 * predicted_s)
    assert planner.why_not("train", tried, steps_of(1.2 * predicted_s)) is None  # shorter than before
    text = planner.why_not("train", tried, steps_of(1.4 * predicted_s))
    assert text is not None and text.startswith("step 'train' (jpp.Auto) goes back to the schedule of its")
    assert f"which took {1.3e3 * predicted_s:.4g} ms: by its plan, " in text
    assert f"it takes {1.4e3 * predicted_s:.4g} ms, and {1e3 * predicted_s:.4g} ms were predicted" in text
    assert not planner.can_judge(TRIAL_STEPS - 1) and planner.can_judge(TRIAL_STEPS)


def test_a_gain_within_the_error_of_a_formula_for_layers_that_were_not_measured_is_no_reason():
    fn, args = uneven_step(schedule=jpp.Auto()), arguments()
    choice, form = decide(fn, args)
    assert choice.plan is not None
    gain = 1 - choice.plan.step_s.p50 / jpp.simulate(form, COSTS).step_s.p50
    choice, _ = decide(fn, args, costs=structs.replace(COSTS, formula_error=0.9 * gain))
    assert choice.plan is not None
    choice, _ = decide(fn, args, costs=structs.replace(COSTS, formula_error=1.1 * gain))
    assert choice.plan is None and choice.level == logging.INFO
    assert f"may be wrong by {1.1 * gain:.0%}, since some layers were not measured" in choice.text
