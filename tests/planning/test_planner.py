"""Plans for machines that need not exist, and plans that a mesh makes and runs."""

from __future__ import annotations

import asyncio
import functools

import jax
import msgspec
import pytest
from docs_code import doc_code
from uneven_model import WIDTH, arguments, uneven_step

import jaxpp_async as jpp
from jaxpp_async.errors import MissingCost, PlanError
from jaxpp_async.planning.cost_model import CostModel, TaskFormula
from jaxpp_async.planning.memory import memory_needs
from jaxpp_async.planning.plan import Plan, describe_arguments
from jaxpp_async.planning.planner import parse_bytes
from jaxpp_async.planning.samples import LinkCost, Samples
from jaxpp_async.testing import assert_close

COSTS = CostModel(formula=TaskFormula(flops_per_s=1e7), links={"same host": LinkCost(Samples((1e-5,)), 1e9)})
TWO_ACTORS = jpp.Machine(2)


def planned(machine=TWO_ACTORS, *, args=None, **options) -> Plan:
    args = arguments() if args is None else args
    options = {"costs": COSTS, "donate_argnums": 0, "iterations": 100, **options}
    return jpp.plan(uneven_step(), args, machine=machine, **options)


@functools.cache
def plan_of_two() -> Plan:
    return planned(memory="60kB")


# ---------------------------------------------------------------- the plan


def test_the_chosen_candidate_is_the_fastest_compiled_one_and_fits():
    plan = plan_of_two()
    first, *others = plan.candidates
    assert first.verdict == "chosen" and first.is_compiled and first.fits
    assert first.step_s == plan.step_s.p50 and first.peak_bytes == max(plan.memory) <= 60_000
    assert all(first.step_s <= other.step_s for other in others if other.is_compiled and other.fits)
    assert {"Std1F1B(2)", "GPipe(2)", "ZeroBubbleH1(2)"} <= {c.name for c in plan.candidates}
    assert 0 < plan.bound <= plan.loop_s and plan.gap >= 0 and plan.loop_s <= plan.step_s.p50
    assert all("over the cap" in c.verdict or c.verdict == "no cut of it fits" for c in others if not c.fits)


def test_the_figures_are_those_of_the_compiled_step():
    plan, args = plan_of_two(), arguments()
    step = jpp.compile_for(jpp.Machine(2), uneven_step(), args, schedule=plan.schedule, donate_argnums=0)
    assert jpp.simulate(step, COSTS).step_s == plan.step_s


def test_the_same_arguments_give_the_same_plan():
    assert planned(memory="60kB") == plan_of_two()


def test_a_plan_says_where_the_stages_end():
    plan = plan_of_two()
    assert plan.num_microbatches == 6 and len(plan.marks) == 4
    assert "uneven_model.py:" in plan.marks[0]
    stages = plan.schedule.num_stages
    assert len(plan.cut) == stages - 1 and plan.schedule.stages == plan.cut


def test_a_smaller_cap_never_gives_a_shorter_step():
    free = planned()
    assert free.cap_bytes is None and free.step_s.p50 <= plan_of_two().step_s.p50


def test_the_best_of_several_microbatches_and_machines():
    machines = [jpp.Machine(1), jpp.Machine(2)]
    plan = planned(machines, microbatches=[2, 12], global_batch=48)
    assert (plan.num_actors, plan.num_microbatches) == (2, 12)
    assert plan.arguments["argument 1['x']"] == f"float32[12, 4, {WIDTH}]"
    seen = {(c.num_actors, c.num_microbatches) for c in plan.candidates}
    assert seen == {(1, 2), (1, 12), (2, 2), (2, 12)}


def test_a_plan_beats_the_best_named_schedule_on_the_equal_cut():
    fn, args = uneven_step(8, 3), arguments(8, 3)
    equal = [
        jpp.Std1F1B(3, stages=[2, 5]),
        jpp.ZeroBubbleH1(3, stages=[2, 5]),
        jpp.Interleaved1F1B(6, stages=[0, 2, 3, 5, 6]),
    ]
    machine = jpp.Machine(3)
    steps = [jpp.compile_for(machine, fn, args, schedule=s, donate_argnums=0) for s in equal]
    best_s = min(jpp.simulate(step, COSTS).step_s.p50 for step in steps)
    cap = max(needs.total_bytes for needs in memory_needs(steps[0]))  # that of 1F1B
    plan = jpp.plan(fn, args, machine=machine, memory=cap, costs=COSTS, donate_argnums=0, iterations=200)
    assert plan.step_s.p50 < 0.85 * best_s and max(plan.memory) <= cap


def test_what_would_help_next():
    slow = msgspec.structs.replace(COSTS, links={"same host": LinkCost(Samples((1e-2,)))})
    assert planned(costs=slow).advice[0].startswith("transfers that take no time: ")


# ---------------------------------------------------------------- text and files


def test_a_plan_prints_candidates_the_order_and_what_was_assumed():
    text = str(plan_of_two())
    assert "plan of step 'train_step'" in text and "chosen" in text and "actor 1" in text
    assert "bound: no schedule of this cut" in text and "not measured:" in text
    assert max(map(len, text.split("what would help next")[0].splitlines())) <= 110
    assert repr(plan_of_two()).startswith("<Plan of 'train_step': ")


def test_a_plan_is_saved_and_loaded(tmp_path):
    path = tmp_path / "plan.json"
    plan_of_two().save(path)
    assert Plan.load(path) == plan_of_two() and Plan.load(path).schedule == plan_of_two().schedule
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_the_order_is_a_file_of_torch(tmp_path):
    plan = plan_of_two()
    plan.to_csv(tmp_path / "plan.csv")
    again = jpp.schedule_from_csv(tmp_path / "plan.csv", stages=plan.cut)
    assert again.rows == plan.schedule.rows and again.stages == plan.cut


def test_files_that_are_no_plans_of_this_version(tmp_path):
    path = tmp_path / "plan.json"
    plan_of_two().save(path)
    text = path.read_text()
    for wrong, message in (
        (text.replace('"version": 1', '"version": 7'), "this plan has version 7, .* reads 1; plan again"),
        (text.replace('"jaxpp_async plan"', '"other"'), "this file is no plan$"),
        (text[:100], "this file is no plan, or it is damaged"),
        (text.replace("0F0 ", "0Q0 ", 1), "'0Q0' is no task of a plan"),
    ):
        path.write_text(wrong)
        with pytest.raises(PlanError, match=message):
            Plan.load(path)


# ---------------------------------------------------------------- bad input


def test_nothing_fits():
    with pytest.raises(PlanError) as caught:
        planned(memory=1000)
    text = str(caught.value)
    assert "no plan of step 'train_step' fits into 1,000 bytes a device; the least that was found is" in text
    assert "argument params" in text and "buffer table" in text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"costs": None}, PlanError, "there are no costs: of device 'cpu' no figures are published"),
        ({"costs": CostModel()}, MissingCost, "no cost for the task with key"),
        ({"costs": CostModel(formula=TaskFormula(1.0))}, MissingCost, "transfer from actor 0 to actor 1"),
        ({"microbatches": [5]}, PlanError, "a global batch of 48, which cannot be divided into 5"),
        ({"global_batch": 64}, PlanError, "global_batch is 64, and the batch has 6 microbatches of 8"),
        ({"batch_argnums": 2}, PlanError, "batch_argnums is 2, and the step is called with 2 arguments"),
        ({"memory": "lots"}, PlanError, "memory is 'lots'; write bytes, or text such as '70GB'"),
        ({"machine": []}, PlanError, "expected a machine or several"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        planned(**options)


def test_bytes_as_text():
    texts = [7, "7", "70GB", "1.5 MiB", "2kb", "64GiB", "3T"]
    found = [7, 7, 70 * 10**9, 3 * 2**19, 2000, 64 * 2**30, 3 * 10**12]
    assert list(map(parse_bytes, texts)) == found


def test_a_plan_for_something_else_says_so():
    plan = plan_of_two()
    with pytest.raises(PlanError, match="made for the step 'train_step', and the step is 'other'"):
        plan.check_mesh("other", 2, {})
    with pytest.raises(PlanError, match="made for 2 actors, and the mesh has 3"):
        plan.check_mesh("train_step", 3, {})
    with pytest.raises(PlanError, match=r"made for spmd_mesh=\{\}, and the mesh has \{'data': 2\}"):
        plan.check_mesh("train_step", 2, {"data": 2})
    plan.check_mesh("train_step", 2, {})
    plan.check_arguments(arguments())
    with pytest.raises(PlanError, match=r"argument 1\['x'\] is float32\[4, 8, 16\], and was float32\[6, 8"):
        plan.check_arguments(arguments(num_microbatches=4))
    assert describe_arguments([3])["argument 0"] == "3"


# ---------------------------------------------------------------- on a mesh


async def test_a_planned_step_equals_jit(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    fn, (params, batch) = uneven_step(), arguments()
    step = mesh.distributed(fn)
    plan = await mesh.plan(step, params, batch, memory="60kB", costs=COSTS, iterations=100)
    fast = mesh.distributed(fn, plan=plan)
    found = await mesh.fetch(await mesh.run(fast, params, batch))
    assert_close(found, jax.jit(fn)(params, batch))
    with pytest.raises(PlanError, match="made for other arguments"):
        await mesh.run(fast, params, arguments(num_microbatches=4)[1])
    with pytest.raises(PlanError, match="made for 3 actors"):
        mesh.distributed(fn, plan=msgspec.structs.replace(plan, num_actors=3))


async def test_the_page_of_plans(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fn = uneven_step(num_layers=1, schedule=jpp.Std1F1B(2))
    args = arguments(num_layers=1)
    found = await doc_code("planning.md")["train_as_planned"](fn, *args)
    assert found is not None and Plan.load("plan.json").step == "train_step"
    assert "plan of step 'train_step'" in capsys.readouterr().out


def test_more_actors_than_layers():
    plan = planned(jpp.Machine(6))
    assert plan.num_actors == 6 and len(plan.schedule.rows) == 6
    with pytest.raises(PlanError, match="fits into 1,000 bytes a device; the least that was found"):
        planned(jpp.Machine(6), memory=1000)


async def test_a_mesh_plans_by_its_last_steps_and_goes_on_meanwhile():
    params, batch = arguments()
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        step = mesh.distributed(uneven_step(schedule=jpp.Std1F1B(2, stages="balanced")))
        with pytest.raises(PlanError, match=r"0 steps finished in a row here, .* run a few more steps first"):
            await mesh.plan(step, params, batch)
        for _ in range(5):
            await mesh.run(step, params, batch)
        planning = asyncio.create_task(mesh.plan(step, params, batch, iterations=50))
        ticks = 0
        while not planning.done():
            await asyncio.sleep(1e-3)
            ticks += 1
        plan = await planning
    assert ticks > 5
    assert plan.candidates[0].is_compiled and any("fitted to" in text for text in plan.assumed)
