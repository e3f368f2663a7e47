"""Plans for machines that need not exist, and plans that a mesh makes and runs."""

from __future__ import annotations

import asyncio
import functools
import random
import re

import jax
import msgspec
import pytest
from docs_code import doc_code
from uneven_model import WIDTH, arguments, uneven_step

import jaxpp_async as jpp
from jaxpp_async.errors import MissingCost, PlanError
from jaxpp_async.planning.cost_model import CostModel, TaskFormula
from jaxpp_async.planning.memory import memory_needs
from jaxpp_async.planning.named import named_schedules
from jaxpp_async.planning.plan import Plan
from jaxpp_async.planning.planner import NOTHING_ELSE_FITS
from jaxpp_async.planning.samples import LinkCost, Samples
from jaxpp_async.session import move_programs
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


def test_the_picture_of_a_plan_has_memory_that_reaches_the_plans_and_stays_below_the_cap():
    plan = plan_of_two()
    drawing = plan.to_drawing()
    for row, most in zip(drawing.rows, plan.memory, strict=True):
        held = [size for _, size in row.memory]
        assert max(held) == most <= plan.cap_bytes and len(set(held)) > 2
        assert held[0] == pytest.approx(held[-1])  # every microbatch's bytes have gone


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
    fn, args = uneven_step(16, 4), arguments(16, 4, num_microbatches=12)
    equal = [jpp.Std1F1B(4, stages=[3, 7, 11]), jpp.ZeroBubbleH1(4, stages=[3, 7, 11])]
    machine = jpp.Machine(4)
    steps = [jpp.compile_for(machine, fn, args, schedule=s, donate_argnums=0) for s in equal]
    best_s = min(jpp.simulate(step, COSTS).step_s.p50 for step in steps)
    cap = max(needs.total_bytes for needs in memory_needs(steps[0]))  # that of 1F1B
    plan = jpp.plan(fn, args, machine=machine, memory=cap, costs=COSTS, donate_argnums=0, iterations=1000)
    assert plan.step_s.p50 < 0.85 * best_s and max(plan.memory) <= cap


def test_in_tight_memory_a_searched_order_is_corrected_until_its_compiled_form_fits():
    fn, args = uneven_step(16, 4), arguments(16, 4, num_microbatches=12)
    machine, told = jpp.Machine(4), list[str]()
    first = jpp.compile_for(machine, fn, args, schedule=jpp.Std1F1B(4, stages=[3, 7, 11]), donate_argnums=0)
    cap = max(needs.total_bytes for needs in memory_needs(first))
    plan = jpp.plan(
        fn,
        args,
        machine=machine,
        memory=cap,
        costs=COSTS,
        donate_argnums=0,
        iterations=300,
        on_progress=told.append,
    )
    named = [c.step_s for c in plan.candidates if c.is_compiled and c.fits and c.name != "searched"]
    assert plan.name == "searched" and max(plan.memory) <= cap
    assert plan.step_s.p50 < 0.92 * min(named)
    assert told.count("compiling searched") > 1
    assert f"order takes {1e3 * plan.step_s.p50:.4g} ms" in plan.search


def test_a_schedule_that_needs_exactly_the_cap_is_found():
    free = planned()
    named = next(c for c in free.candidates if c.is_compiled and c.name != "searched")
    plan = planned(memory=int(named.peak_bytes))
    assert plan.step_s.p50 <= named.step_s and max(plan.memory) <= named.peak_bytes


@pytest.mark.parametrize("seed", range(10))
def test_no_named_schedule_beats_the_plan_and_no_candidate_beats_the_bound(seed):
    rng = random.Random(seed)
    layers, num_actors = rng.randint(3, 7), rng.randint(1, 3)
    head, rows = rng.randint(1, 4), rng.randint(2, 8)
    fn, args = uneven_step(layers, head), arguments(layers, head, rows)
    links = {"same host": LinkCost(Samples((rng.choice((1e-6, 1e-4)),)), 1e9)}
    formula = TaskFormula(rng.choice((0.0, 1e-4)), 1e8, rng.choice((1e7, 1e8)))
    costs, machine = CostModel(formula=formula, links=links), jpp.Machine(num_actors)
    options = {"machine": machine, "costs": costs, "donate_argnums": 0, "iterations": 100}
    plan = jpp.plan(fn, args, **options)
    assert plan.bound <= plan.loop_s * (1 + 1e-9)
    for schedule in named_schedules(layers + 1, num_actors):
        chosen = type(schedule)(schedule.num_stages, stages="balanced")
        step = jpp.compile_for(machine, fn, args, schedule=chosen, donate_argnums=0)
        assert plan.step_s.p50 <= 1.01 * jpp.simulate(step, costs).step_s.p50, schedule


def test_fewer_stages_than_actors_and_the_plan_says_that_some_are_idle():
    links = {"same host": LinkCost(Samples((0.05,)))}
    plan = planned(jpp.Machine(4), costs=msgspec.structs.replace(COSTS, links=links))
    assert plan.schedule.num_stages == 1
    assert plan.advice[0] == "3 of 4 actors have no task in this plan; ask for 1"
    assert plan.advice[0] in str(plan).split("predicted")[0]


def test_of_machines_that_are_as_fast_the_smaller_one_is_chosen():
    links = {"same host": LinkCost(Samples((0.05,)))}
    machines = [jpp.Machine(2), jpp.Machine(1)]
    plan = planned(machines, costs=msgspec.structs.replace(COSTS, links=links))
    assert plan.num_actors == 1


def test_estimates_are_shown_as_compiled_candidates_correct_them():
    for candidate in plan_of_two().candidates:
        if candidate.fits and candidate.verdict != "chosen":
            longer = candidate.step_s / plan_of_two().step_s.p50 - 1
            assert candidate.verdict.startswith(f"{round(longer, 3) + 0.0:+.1%}: ")


def test_equal_stages_have_nothing_to_win_and_the_plan_says_so():
    fn, args = uneven_step(15, 1), arguments(15, 1, num_microbatches=24)
    plan = jpp.plan(fn, args, machine=jpp.Machine(2), costs=COSTS, donate_argnums=0, iterations=100)
    assert plan.name != "searched" and "search: a search has nothing to win" in str(plan)


def test_what_would_help_next():
    slow = msgspec.structs.replace(COSTS, links={"same host": LinkCost(Samples((1e-2,)))})
    assert planned(costs=slow, num_stages=2).advice[0].startswith("transfers that take no time: ")


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
def test_a_plan_of_so_many_stages(num_stages):
    plan = planned(num_stages=num_stages)
    assert {len(c.cut) + 1 for c in plan.candidates} == {num_stages}
    assert plan.schedule.num_stages == num_stages


def test_what_the_planner_does_is_told():
    told: list[str] = []
    plan = planned(memory="60kB", on_progress=told.append)
    assert plan == plan_of_two()
    for beginning in ("profiling", "timing named schedules", "searching", "compiling"):
        assert any(text.startswith(beginning) for text in told)


@pytest.mark.parametrize("error", [InterruptedError, ValueError])
def test_an_error_of_who_is_told_ends_the_planning(error):
    def refuse(text):
        if text.startswith("searching"):
            raise error(text)

    with pytest.raises(error, match="searching, "):
        planned(on_progress=refuse)


def test_machines_that_differ_in_actors_alone_have_the_same_layers():
    told: list[str] = []
    machines = [jpp.Machine(actors, device="h100-sxm") for actors in (2, 3)]
    planned(machines, costs=None, on_progress=told.append)
    assert sum(text.startswith("profiling") for text in told) == 1


# ---------------------------------------------------------------- bad input


def test_nothing_fits():
    with pytest.raises(PlanError) as caught:
        planned(memory=1000)
    text = str(caught.value)
    assert "no plan of step 'train_step' fits into 1,000 bytes a device; the least that was found is" in text
    assert "argument params" in text and "buffer table" in text


@pytest.mark.parametrize("actors", [2, 3])
def test_the_least_that_is_stated_is_the_least_that_fits(actors):
    with pytest.raises(PlanError) as caught:
        planned(jpp.Machine(actors), memory=1000)
    text = re.search(r"the least that was found is ([\d,]+) bytes", str(caught.value))
    least = int(text[1].replace(",", ""))
    plan = planned(jpp.Machine(actors), memory=least, iterations=10)
    assert max(plan.memory) == least and plan.search == NOTHING_ELSE_FITS
    with pytest.raises(PlanError, match="fits into"):
        planned(jpp.Machine(actors), memory=int(0.97 * least), iterations=400)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"costs": None}, PlanError, "there are no costs: of device 'cpu' no rate of bfloat16"),
        (
            {"costs": CostModel()},
            MissingCost,
            r"^task 'fwd\(stage 0\)' of the step: there is no cost for a task",
        ),
        ({"costs": CostModel(formula=TaskFormula(1.0))}, MissingCost, "transfer from actor 0 to actor 1"),
        ({"microbatches": [5]}, PlanError, "a global batch of 48, which cannot be divided into 5"),
        ({"global_batch": 64}, PlanError, "global_batch is 64, and the batch has 6 microbatches of 8"),
        ({"batch_argnums": 2}, PlanError, "batch_argnums is 2, and the step is called with 2 arguments"),
        ({"memory": "lots"}, PlanError, "memory is 'lots'; write bytes, or text such as '70GB'"),
        ({"machine": []}, PlanError, "expected a machine or several"),
        ({"num_stages": 6}, PlanError, "num_stages is 6, and the step's 4 marks can end 1 to 5 stages"),
        ({"num_stages": 0}, PlanError, "num_stages is 0, and"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        planned(**options)


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

    def train_step(params, batch):
        return fn(fn(params, batch)[0], batch)

    with pytest.raises(PlanError, match="for a step with one loop, and the step has 2 loops"):
        await mesh.run(mesh.distributed(train_step, plan=plan), params, batch)
    with pytest.raises(PlanError, match="made for 3 actors"):
        mesh.distributed(fn, plan=msgspec.structs.replace(plan, num_actors=3))


async def test_the_state_moves_in_the_first_call_of_a_planned_step_without_a_warning(
    remote_mesh, caplog, monkeypatch
):
    monkeypatch.setattr(move_programs, "WARN_BYTES", 0)
    caplog.set_level("INFO", "jaxpp_async")
    mesh = await remote_mesh(2, launcher="inline")
    fn, (params, batch) = uneven_step(), arguments()
    plan = planned(num_stages=2)
    other = 0 if plan.cut != (0,) else 1
    state, _ = await mesh.run(
        mesh.distributed(uneven_step(schedule=jpp.Std1F1B(2, stages=[other]))), params, batch
    )
    caplog.clear()
    await mesh.run(mesh.distributed(fn, plan=plan), state, batch)
    levels = [r.levelname for r in caplog.records if "carried" in r.message or "moved" in r.message]
    assert levels == ["INFO"]


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


async def test_a_planning_that_is_cancelled_leaves_no_thread():
    params, batch = arguments()
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        step = mesh.distributed(uneven_step())
        planning = asyncio.create_task(mesh.plan(step, params, batch, costs=COSTS, iterations=10**9))
        await asyncio.sleep(0.2)
        planning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await planning
        plan = await mesh.plan(step, params, batch, costs=COSTS, num_stages=2, iterations=20)
    assert plan.schedule.num_stages == 2


@pytest.mark.parametrize(
    "change",
    [
        {"orders": []},
        {"orders": ["", ""]},
        {"memory": []},
        {"memory": [-1, -5]},
        {"bound": -1.0},
        {"step_s": [-1.0, -1.0, -1.0]},
        {"num_microbatches": -7},
        {"num_actors": 3},
        {"marks": []},
        {"zzz": 1},
        {"cut": [-1]},
        {"cut": [2, 2]},
        {"cut": [10**18]},
    ],
)
def test_a_damaged_plan_is_not_loaded(tmp_path, change):
    path = tmp_path / "plan.json"
    plan_of_two().save(path)
    data = msgspec.json.decode(path.read_bytes())
    orders = data["value"]["orders"]
    for wrong in (change, {"orders": [f"{orders[0]} {orders[0].split()[0]}", *orders[1:]]}):
        damaged = {**data, "value": {**data["value"], **wrong}}
        path.write_bytes(msgspec.json.encode(damaged))
        with pytest.raises(PlanError, match=r"damaged: .*plan again"):
            Plan.load(path)
    path.write_text('{"kind": "jaxpp_async plan", "version": 2, "value": ' + "[" * 100_000)
    with pytest.raises(PlanError, match="damaged"):
        Plan.load(path)
