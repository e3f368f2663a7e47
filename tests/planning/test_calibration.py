"""Layers that were not measured by themselves have times by the measured stages that contain them."""

from __future__ import annotations

import functools
import pickle
import random
import re

import jax
import jax.numpy as jnp
import msgspec
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import MissingCost
from jaxpp_async.planning import mesh_planner
from jaxpp_async.planning.calibration import TaskTimes, formula_error, layer_factors
from jaxpp_async.planning.cost_model import CostModel, TaskFormula
from jaxpp_async.planning.measurements import MeasuredCut
from jaxpp_async.planning.mesh_planner import WARM_UP_STEPS, MeshPlanner
from jaxpp_async.planning.samples import LinkCost, Samples
from jaxpp_async.program.task_label import TASK_TRAITS
from jaxpp_async.program.work import LoopCut, TaskWork
from jaxpp_async.session.step_request import StepDefinition, make_options

MARKS = ("a.py:1", "a.py:2", "a.py:3")
LINKS = {"same host": LinkCost(Samples((1e-5,)), 1e9)}


def measured(boundaries, flops=(1.0, 1.0, 2.0, 4.0), **seconds):
    """Return a cut whose tasks are of 10 FLOPs each, and the measured times of the tasks."""
    names = {name: re.sub(r"_(\d)$", r"(stage \1)", name) for name in seconds}
    works = {names[name]: TaskWork(f"{boundaries} {name}", 10.0, 0.0) for name in seconds}
    tasks = {f"{boundaries} {name}": Samples((x,)) for name, x in seconds.items()}
    return MeasuredCut(LoopCut(MARKS, boundaries, flops), works), tasks


def model(*cuts):
    tasks = {key: each for _, given in cuts for key, each in given.items()}
    return CostModel(
        tasks, tuple(cut for cut, _ in cuts), formula=TaskFormula(flops_per_s=1.0), formula_error=0.2
    )


ONE = measured((1,), fwd_0=12.0, bwd_0=8.0, fwd_bwd_1=15.0)


def test_layers_have_the_ratios_of_their_stages():
    found = layer_factors(model(ONE), MARKS)
    assert found is not None and found.flops == (1, 1, 2, 4)
    first, last = {"fwd": 1.2, "bwd_input": 0.8, "bwd_weight": 0.8}, {}
    last = dict.fromkeys(("fwd", "bwd_input", "bwd_weight"), 1.5)
    assert [dict(each) for each in found.factors] == [first, first, last, last]


def test_a_task_has_the_mean_of_its_layers_weighted_by_their_work():
    found = layer_factors(model(ONE), MARKS)
    assert found is not None
    assert found.task_factor(TASK_TRAITS["fwd"].parts, range(3)) == pytest.approx((1.2 + 1.2 + 2 * 1.5) / 4)
    assert found.task_factor(TASK_TRAITS["bwd"].parts, range(1, 4)) == pytest.approx((0.8 + 6 * 1.5) / 7)
    assert found.task_factor(TASK_TRAITS["fwd_bwd"].parts, range(2)) == pytest.approx((1.2 + 0.8 + 0.8) / 3)


def test_halves_that_were_measured_count_for_themselves_and_a_finer_cut_counts_most():
    halves = measured((0,), fwd_0=10.0, bwd_input_1=20.0, bwd_weight_1=30.0, bwd_1=99.0)
    finer = measured((1, 2), fwd_0=11.0, fwd_1=13.0)
    found = layer_factors(model(halves, ONE, finer), MARKS)
    assert found is not None
    assert [each["fwd"] for each in found.factors] == pytest.approx([1.1, 1.1, 1.3, 1.5])
    assert [each["bwd_weight"] for each in found.factors] == pytest.approx([0.8, 0.8, 1.5, 1.5])  # the latest
    earlier = layer_factors(model(ONE, halves), MARKS)
    assert earlier is not None and earlier.factors[3]["bwd_input"] == 2.0
    assert earlier.factors[3]["bwd_weight"] == 3.0 and earlier.factors[3]["fwd"] == 1.5


def test_other_marks_and_a_model_without_formula_have_no_factors():
    assert layer_factors(model(ONE), MARKS[1:]) is None
    assert layer_factors(msgspec.structs.replace(model(ONE), formula=None), MARKS) is None


def test_a_stage_that_was_not_measured_keeps_the_formula():
    half = model(measured((1,), fwd_0=12.0, bwd_0=8.0))
    times, work = TaskTimes(half, LoopCut(MARKS, (0,))), TaskWork("new", 100.0, 0.0)
    assert times.task_s(work, "fwd(stage 0, mb 3)") == pytest.approx(120)
    assert times.task_s(work, "fwd(stage 1, mb 3)") == pytest.approx(100 * (1.2 + 6) / 7)
    assert times.is_known(work, "fwd(stage 0, mb 3)") and not times.is_known(work, "fwd(stage 1, mb 3)")
    assert times.task_s(work, "outer") == TaskTimes(half, None).task_s(work, "fwd(stage 0, mb 0)") == 100
    assert formula_error(half, LoopCut(MARKS, ())) == formula_error(half, None) == 0.2
    assert formula_error(model(ONE), LoopCut(MARKS, ())) == 0.0


def test_a_measured_task_keeps_its_time_and_a_missing_cost_names_the_task():
    costs = model(ONE)
    times, work = TaskTimes(costs, LoopCut(MARKS, (1,))), TaskWork("(1,) fwd_0", 10.0, 0.0)
    assert times.task_s(work, "fwd(stage 0, mb 0)") == 12.0 and times.is_known(work, "anything")
    with pytest.raises(MissingCost, match=r"^task 'fwd\(stage 2\)' of the step: there is no cost for a task"):
        TaskTimes(CostModel(), None).samples(work, "fwd(stage 2, mb 1)")


def test_measured_cuts_are_saved(tmp_path):
    model(ONE).save(tmp_path / "costs.json")
    assert CostModel.load(tmp_path / "costs.json") == model(ONE)


# ---------------------------------------------------------------- steps whose layers differ in speed

WIDTHS = (8, 24, 40, 12, 32, 20, 16)


def layered_step(schedule=None):
    """Return a train step of layers that are all of another size, and its arguments."""

    def loss(params, x):
        for k, (a, b) in enumerate(params):
            x = jnp.tanh(x @ a) @ b
            x = jpp.pipeline_yield(x) if k + 1 < len(params) else x
        return jnp.mean(x**2)

    def train_step(params, batch):
        used = jpp.Auto() if schedule is None else schedule
        grads = jpp.accumulate_grads(lambda x: jax.grad(loss)(params, x), used)(batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, "float32")

    return train_step, ([(array(16, n), array(n, 16)) for n in WIDTHS], array(8, 8, 16))


def true_costs(form, factors):
    """Return costs under which each layer takes longer than its FLOPs say, by a factor of its own."""
    cut, tasks = form.compiled.find_cut(), {}
    for program in form.compiled.programs:
        for i in program.instructions:
            match = re.match(r"\w+\(stage (\d+)", getattr(i, "label", ""))
            if match is not None and hasattr(i, "executable"):
                layers, work = cut.layers_of(int(match[1])), form.works[i.executable]
                whole = sum(cut.flops[n] for n in layers)
                factor = sum(cut.flops[n] * factors[n] for n in layers) / whole
                tasks[work.key] = Samples((factor * work.flops / 1e7,))
    return CostModel(tasks, formula=TaskFormula(flops_per_s=1e7), links=LINKS)


def test_a_timeline_knows_the_cut_of_its_step():
    fn, args = layered_step(jpp.GPipe(3, stages=[1, 4]))
    form = jpp.compile_for(jpp.Machine(1), fn, args)
    line = jpp.simulate(form, CostModel(formula=TaskFormula(1.0))).timeline
    assert line.cut is not None and line.cut.boundaries == (1, 4)
    assert [list(line.cut.layers_of(k)) for k in range(3)] == [[0, 1], [2, 3, 4], [5, 6]]
    assert line.cut.flops[2] > 1.5 * line.cut.flops[1] > 3 * line.cut.flops[0]
    assert pickle.loads(pickle.dumps(line)).cut == line.cut
    (found,) = CostModel.from_timelines([line]).cuts
    assert found.cut == line.cut and "fwd(stage 1)" in found.works
    plain = jpp.compile_for(jpp.Machine(1), *layered_step(jpp.GPipe(7)))
    assert plain.compiled.cut is not None and plain.compiled.cut.boundaries == tuple(range(6))


def test_the_error_of_the_fitted_formula_is_kept():
    form = jpp.compile_for(jpp.Machine(2), *layered_step(jpp.GPipe(7)))
    for factors, low, high in (([1.0] * 7, 0.0, 1e-6), ([1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1], 0.05, 0.12)):
        line = jpp.simulate(form, true_costs(form, factors)).timeline
        assert low <= CostModel.from_timelines([line]).formula_error <= high


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_as_fast_as_predicted_where_layers_differ_from_their_flops(seed, monkeypatch):
    monkeypatch.setattr(mesh_planner, "plan", functools.partial(mesh_planner.plan, iterations=20))
    rng = random.Random(seed)
    factors = [rng.uniform(0.9, 1.1)] * 3 + [rng.uniform(0.9, 1.1)] * 4
    fn, args = layered_step()
    machine = jpp.Machine(2)
    form = jpp.compile_for(machine, fn, args)
    truth = true_costs(form, factors)
    lines = [jpp.simulate(form, truth, seed=k).timeline for k in range(WARM_UP_STEPS)]
    given = make_options(
        fn, in_shardings=None, out_shardings=None, donate_argnums=(), static_argnums=(), caller="test"
    )
    step, planner = StepDefinition(machine, fn, given), MeshPlanner(machine)
    choice = planner.choose(step, form, args, lines, lambda _: None)
    before_s = jpp.simulate(form, truth).step_s.p50
    assert choice.plan is not None and choice.measured_s is not None
    planned = jpp.compile_for(machine, fn, args, schedule=choice.plan.schedule)
    took_s = jpp.simulate(planned, true_costs(planned, factors)).step_s.p50
    assert took_s <= 1.01 * before_s
    assert choice.plan.step_s.p50 == pytest.approx(took_s, rel=0.03)
    assert choice.plan.assumed[0] == "7 of 7 layers by the times of the measured stages that contain them"
    again = jpp.simulate(planned, CostModel.from_timelines(lines[2:]))
    assert again.step_s == pytest.approx(choice.plan.step_s)  # the same times, with and without a plan
    assert sum("and the measured stages that had their layers" in x for x in again.assumed) == 1
