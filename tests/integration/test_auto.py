"""Steps whose schedule is `Auto`: their first steps, the switch to the plan, and all that may happen then."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from docs_code import doc_code
from jax.sharding import PartitionSpec
from msgspec import structs
from uneven_model import arguments, uneven_step

import jaxpp_async as jpp
from jaxpp_async.planning import mesh_planner
from jaxpp_async.planning.cost_model import CostModel, TaskFormula
from jaxpp_async.planning.mesh_planner import TRIAL_STEPS, WARM_UP_STEPS, MeshPlanner
from jaxpp_async.planning.plan import Plan
from jaxpp_async.planning.samples import LinkCost, Samples
from jaxpp_async.session.array_moves import Mover
from jaxpp_async.testing import assert_close

KNOWN = CostModel(formula=TaskFormula(flops_per_s=1e8), links={"same host": LinkCost(Samples((1e-5,)), 1e9)})
"""Costs with links, by which a step is planned at its first call."""


SLOW = CostModel(formula=TaskFormula(flops_per_s=1e7))
"""Costs without links: tasks last long enough to be worth several stages, and a plan needs measured steps."""


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    """Let the search end soon: these tests do not depend on how good a plan is."""
    plan = functools.partial(mesh_planner.plan, iterations=20)
    monkeypatch.setattr(mesh_planner, "plan", plan)


@pytest.fixture
async def known_device():
    async with jpp.RemoteMesh(2, launcher="inline", device_model=KNOWN) as mesh:
        yield mesh


@pytest.fixture
def always_worthwhile(monkeypatch):
    """Let any plan take the place of the first steps' schedule, however long its step is."""
    monkeypatch.setattr(mesh_planner, "WORTHWHILE", -1e6)


@pytest.fixture
def choices(monkeypatch):
    """Return the list of the choices that planners make."""
    made, choose = [], MeshPlanner.choose

    def noted(*args):
        made.append(choose(*args))
        return made[-1]

    monkeypatch.setattr(MeshPlanner, "choose", noted)
    return made


@pytest.fixture
def swapped(monkeypatch):
    """Let every plan have its stages on the other one of two actors, so that the whole state moves."""
    choose = MeshPlanner.choose

    def other_actors(*args):
        choice = choose(*args)
        return replace(choice, plan=structs.replace(choice.plan, orders=choice.plan.orders[::-1]))

    monkeypatch.setattr(MeshPlanner, "choose", other_actors)


def auto_step(**options):
    return uneven_step(schedule=jpp.Auto(**options))


def texts(caplog, level):
    return [r.getMessage() for r in caplog.records if r.levelno == level and "jpp.Auto" in r.getMessage()]


def trained(fn, params, batch, count):
    step = jax.jit(fn)
    losses = []
    for _ in range(count):
        params, loss = step(params, batch)
        losses.append(np.asarray(loss))
    return params, losses


# ---------------------------------------------------------------- the switch


async def test_known_costs_are_planned_by_at_the_first_call(known_device, caplog):
    caplog.set_level(logging.INFO, "jaxpp_async")
    fn, (params, batch) = auto_step(), arguments()
    step = known_device.distributed(fn)
    assert step.plan is None
    found = await known_device.fetch(await known_device.run(step, params, batch))
    assert_close(found, jax.jit(fn)(params, batch))
    plan = step.plan
    assert isinstance(plan, Plan)
    begins, text = texts(caplog, logging.INFO)
    assert begins.endswith("planning begins, and this call waits for it")
    assert (
        text.startswith("step 'train_step' (jpp.Auto): by the device model, ") and " with stages at " in text
    )
    compiled = await step.compile(params, batch)
    assert compiled.plan is plan and plan.name in str(compiled.report()) and plan.name in str(compiled)
    assert known_device.distributed(fn, plan=plan).plan is plan


async def test_the_switch_after_measured_steps_keeps_the_numbers(caplog, always_worthwhile, swapped, choices):
    caplog.set_level(logging.INFO, "jaxpp_async")
    fn, (params, batch) = auto_step(), arguments()
    expected, losses = trained(fn, params, batch, WARM_UP_STEPS + 4)
    async with jpp.RemoteMesh(2, launcher="inline", max_inflight=2, device_model=SLOW) as mesh:
        step = mesh.distributed(fn, donate_argnums=0)
        state, futures = params, []
        for k in range(WARM_UP_STEPS + 4):  # submitted while earlier steps run, with donated state
            if k == WARM_UP_STEPS:
                assert step.plan is None and not choices
                await futures[-1]
            futures.append(await mesh.submit(step, state, batch))
            state = futures[-1].outputs[0]
        found = [await mesh.fetch((await future)[1]) for future in futures[-4:]]
        assert_close(await mesh.fetch(state), expected)
    assert_close(found, losses[-4:])
    assert futures[WARM_UP_STEPS].moves and not futures[WARM_UP_STEPS + 1].moves
    assert len(choices) == 1 and step.plan is choices[0].plan is not None
    _, text = texts(caplog, logging.INFO)
    assert f"after {WARM_UP_STEPS} measured steps, " in text and " ms measured" in text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


class SlowerLater:
    """A device model for which the tasks of forms that are loaded after `is_late` take four times as long."""

    is_late = False

    def task_s(self, work):
        return (4 if self.is_late else 1) * work.flops / 1e7


async def test_a_plan_that_is_much_slower_than_predicted_is_given_up(always_worthwhile, choices, caplog):
    fn, (params, batch) = auto_step(), arguments()
    count, model = WARM_UP_STEPS + TRIAL_STEPS + 2, SlowerLater()
    expected, losses = trained(fn, params, batch, count)
    async with jpp.RemoteMesh(2, launcher="inline", device_model=model) as mesh:
        step, state, plans, found, moves = mesh.distributed(fn, donate_argnums=0), params, [], [], []
        for _ in range(count):
            future = await mesh.submit(step, state, batch)
            state, loss = await future
            model.is_late = True
            plans.append(step.plan)
            found.append(await mesh.fetch(loss))
            moves.append(bool(future.moves))
        assert_close(await mesh.fetch(state), expected)
        assert (await step.compile(params, batch)).plan is None
    assert_close(found, losses)
    (choice,) = choices
    assert plans == [*[None] * WARM_UP_STEPS, *[choice.plan] * TRIAL_STEPS, None, None]
    # State moves where the form changes, if the plan has other stages than the first steps.
    moving = [k for k, moved in enumerate(moves) if moved]
    assert moving in ([], [WARM_UP_STEPS, WARM_UP_STEPS + TRIAL_STEPS])
    (text,) = texts(caplog, logging.WARNING)
    assert text.startswith("step 'train_step' (jpp.Auto) goes back to the schedule of its first steps, ")


async def test_state_that_is_not_donated_stays_usable(known_device, swapped):
    fn, (params, batch) = auto_step(), arguments()
    before = await known_device.put(params)
    step = known_device.distributed(fn)
    for _ in range(2):
        found = await known_device.fetch(await known_device.run(step, before, batch))
        assert_close(found, jax.jit(fn)(params, batch))
    assert_close(await known_device.fetch(before), params)


async def test_each_shape_has_first_steps_and_a_plan_of_its_own(always_worthwhile, choices):
    fn, (params, batch) = auto_step(), arguments()
    short = arguments(num_microbatches=3)[1]
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        step = mesh.distributed(fn)
        for _ in range(WARM_UP_STEPS + 1):
            await mesh.run(step, params, batch)
            await mesh.run(step, params, short)
    assert [choice.plan.num_microbatches for choice in choices] == [6, 3]
    assert step.plan is choices[1].plan


async def test_a_state_that_begins_weakly_typed_is_planned_once(known_device, choices):
    plain, (params, batch) = auto_step(), arguments()

    def train_step(state, batch):
        params, losses = plain(state[0], batch)
        return (params, state[1] + 1), losses

    step, state = known_device.distributed(train_step), (params, 0)
    for _ in range(3):
        state, _ = await known_device.run(step, state, batch)
    assert len(choices) == 1 and int(await state[1]) == 3
    assert (await step.compile((params, 0), batch)).plan is step.plan is choices[0].plan


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
async def test_actors_of_several_devices_with_exchanges(always_worthwhile, axis_types, choices):
    plain, (params, batch) = auto_step(), arguments()

    def train_step(name, params, batch):
        return plain(params, batch)

    slow = SimpleNamespace(task_s=lambda work: 1e-7 * work.flops)
    rows = {name: PartitionSpec(None, "data") for name in batch}
    options = {"spmd_mesh": {"data": 2}, "axis_types": [axis_types], "device_model": slow}
    async with jpp.RemoteMesh(2, launcher="inline", **options) as mesh:
        step = mesh.distributed(train_step, in_shardings=(None, None, rows), static_argnums=0)
        for _ in range(WARM_UP_STEPS + 1):
            found = await mesh.run(step, "a", params, batch)
        assert_close(await mesh.fetch(found), jax.jit(plain)(params, batch))
    assert len(choices) == 1 and step.plan is choices[0].plan is not None, choices[0].text
    assert mesh_planner.EXCHANGES in step.plan.assumed


async def test_callbacks_are_called_once_a_step(known_device):
    seen, (params, batch) = [], arguments()
    plain = auto_step()

    def train_step(params, batch):
        new, losses = plain(params, batch)
        jax.debug.callback(lambda x: seen.append(float(x)), losses.sum())
        return new, losses

    step = known_device.distributed(train_step)
    for _ in range(3):
        await known_device.run(step, params, batch)
    assert len(seen) == 3 and step.plan is not None


async def test_the_page_of_plans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fn, (params, batch) = auto_step(), arguments()
    count = WARM_UP_STEPS + 2
    state = await doc_code("planning.md")["train_with_auto"](fn, params, [batch] * count)
    assert all(array.shape for array in jax.tree.leaves(state))


# ---------------------------------------------------------------- it stays as it is


async def test_nothing_fits_and_the_training_goes_on(caplog, choices):
    fn, (params, batch) = auto_step(memory="1kB"), arguments()
    async with jpp.RemoteMesh(2, launcher="inline", device_model=KNOWN) as mesh:
        step = mesh.distributed(fn)
        for _ in range(3):
            found = await mesh.fetch(await mesh.run(step, params, batch))
            assert_close(found, jax.jit(fn)(params, batch))
    first, second = texts(caplog, logging.WARNING)
    assert "its first steps, under Std1F1B(num_stages=2, stages='balanced'), need " in first
    assert "stays with Std1F1B(num_stages=2, stages='balanced'): no plan of step 'train_step' fits" in second
    assert len(choices) == 1 and step.plan is None


async def test_a_plan_that_cannot_be_compiled_leaves_the_step_as_it_is(caplog, known_device, monkeypatch):
    fn, (params, batch) = auto_step(), arguments()
    step = known_device.distributed(fn)
    choose = MeshPlanner.choose

    def for_another_step(*args):
        choice = choose(*args)
        other = choice.plan.schedule.__class__(choice.plan.schedule.rows[:1], choice.plan.cut, "wrong")
        structs.force_setattr(choice.plan, "schedule", other)
        return choice

    monkeypatch.setattr(MeshPlanner, "choose", for_another_step)
    found = await known_device.fetch(await known_device.run(step, params, batch))
    assert_close(found, jax.jit(fn)(params, batch))
    assert step.plan is None
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("step 'train_step' (jpp.Auto) stays as it is: its plan failed: " in text for text in found)


async def test_a_step_without_a_gradient(known_device):
    params, batch = arguments()

    def evaluate(params, batch):
        def loss(mb):
            x = mb["x"]
            for w in params["layers"]:
                x = jpp.pipeline_yield(jnp.tanh(x @ w))
            return jnp.mean((x - mb["y"]) ** 2)

        return jpp.accumulate_grads(loss, jpp.Auto(), reduce=jpp.Stack())(batch)

    step = known_device.distributed(evaluate)
    found = await known_device.fetch(await known_device.run(step, params, batch))
    assert_close(found, jax.jit(evaluate)(params, batch))
    assert step.plan is not None
    train = known_device.distributed(auto_step())
    state, _ = await known_device.run(train, params, batch)
    again = known_device.distributed(evaluate).with_schedule(train.plan.schedule)
    future = await known_device.submit(again, state, batch)
    assert_close(
        await known_device.fetch(await future), jax.jit(evaluate)(await known_device.fetch(state), batch)
    )
    assert future.moves == ()


async def test_a_step_without_marks(known_device, caplog):
    def train_step(w, batch):
        grads = jpp.accumulate_grads(lambda x: jax.grad(lambda w: jnp.sum(x @ w))(w), jpp.Auto())(batch)
        return w - grads

    args = np.ones((4, 4), np.float32), np.ones((3, 2, 4), np.float32)
    step = known_device.distributed(train_step)
    assert_close(await known_device.fetch(await known_device.run(step, *args)), jax.jit(train_step)(*args))
    (text,) = texts(caplog, logging.WARNING)
    assert "has no pipeline_yield inside accumulate_grads" in text


# ---------------------------------------------------------------- several callers


async def test_of_two_callers_one_plans(known_device, choices):
    fn, (params, batch) = auto_step(), arguments()
    step = known_device.distributed(fn)
    found = await asyncio.gather(*(known_device.run(step, params, batch) for _ in range(3)))
    expected = jax.jit(fn)(params, batch)
    for each in found:
        assert_close(await known_device.fetch(each), expected)
    assert len(choices) == 1 and step.plan is choices[0].plan


async def test_a_cancelled_call_leaves_the_choice_to_the_next_one(known_device, monkeypatch):
    fn, (params, batch) = auto_step(), arguments()
    step, begun = known_device.distributed(fn), asyncio.Event()
    loop, choose = asyncio.get_running_loop(), MeshPlanner.choose

    def slow(self, step, form, args, timelines, on_progress):
        loop.call_soon_threadsafe(begun.set)
        return choose(self, step, form, args, timelines, on_progress)

    monkeypatch.setattr(MeshPlanner, "choose", slow)
    first = asyncio.create_task(known_device.run(step, params, batch))
    await begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert step.plan is None
    await known_device.run(step, params, batch)
    assert step.plan is not None


# ---------------------------------------------------------------- with the rest of a mesh


async def test_a_state_made_by_init_and_restored_goes_on(tmp_path, always_worthwhile):
    fn, (params, batch) = auto_step(), arguments()
    expected, _ = trained(fn, params, batch, WARM_UP_STEPS + 3)
    async with jpp.RemoteMesh(2, launcher="inline", device_model=SLOW) as mesh:
        step = mesh.distributed(fn, donate_argnums=0)
        await step.compile(params, batch)
        state = await step.init(0, lambda: jax.tree.map(jnp.asarray, params))
        for k in range(WARM_UP_STEPS + 1):
            if k == WARM_UP_STEPS - 1:
                await mesh.save(tmp_path / "before", state)
            state, _ = await mesh.run(step, state, batch)
        assert step.plan is not None
        again = await mesh.restore(tmp_path / "before", (step, 0))  # placed as the plan has it
        for each, want in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
            assert each.actors == want.actors
        again, _ = await mesh.run(step, again, batch)
        again, _ = await mesh.run(step, again, batch)
        assert_close(await mesh.fetch(again), await mesh.fetch(state))
        for _ in range(2):
            state, _ = await mesh.run(step, state, batch)
        assert_close(await mesh.fetch(state), expected)


async def test_with_schedule_to_auto_and_back(known_device):
    fn, (params, batch) = uneven_step(), arguments()
    step = known_device.distributed(fn).with_schedule(jpp.Auto())
    found = await known_device.fetch(await known_device.run(step, params, batch))
    assert_close(found, jax.jit(fn)(params, batch))
    assert step.plan is not None
    back = step.with_schedule(jpp.GPipe(2, stages=[1]))
    assert back.plan is None
    assert_close(await known_device.fetch(await known_device.run(back, params, batch)), found)
    assert back.plan is None
    # `Auto` written in the step: its cut is balanced
    cut = known_device.distributed(auto_step()).with_schedule(jpp.GPipe(2))
    assert_close(await known_device.fetch(await known_device.run(cut, params, batch)), found)


async def test_a_mesh_plans_a_step_with_auto_as_any_other(known_device):
    fn, (params, batch) = auto_step(memory="1kB"), arguments()
    step = known_device.distributed(fn)
    assert isinstance(await known_device.plan(step, params, batch, iterations=20), Plan)


@pytest.mark.parametrize("when", ["planning", "loading", "moving"])
async def test_an_actor_that_dies_while_the_form_changes(always_worthwhile, swapped, monkeypatch, when):
    fn, (params, batch) = auto_step(), arguments()
    expected, _ = trained(fn, params, batch, WARM_UP_STEPS + 2)
    options = {"launcher": "inline", "max_restarts": 1, "backup_every": 2, "device_model": SLOW}
    async with jpp.RemoteMesh(2, **options) as mesh:
        step, loop, planned = mesh.distributed(fn, donate_argnums=0), asyncio.get_running_loop(), []

        def kill():
            mesh._running()._actor_group.handles[1].kill()

        choose, load, bring = MeshPlanner.choose, mesh._runner.compiler.load, Mover.bring

        def killed_while_planning(*args):
            planned.append(choose(*args))
            if when == "planning":
                loop.call_soon_threadsafe(kill)
            return planned[-1]

        async def killed_while_loading(*args):
            if planned and when == "loading":
                loop.call_soon(kill)
            return await load(*args)

        async def killed_while_moving(*args):
            if planned and when == "moving" and len(planned) == 1:
                planned.append(None)
                loop.call_soon(kill)
            return await bring(*args)

        monkeypatch.setattr(MeshPlanner, "choose", killed_while_planning)
        monkeypatch.setattr(mesh._runner.compiler, "load", killed_while_loading)
        monkeypatch.setattr(Mover, "bring", killed_while_moving)
        state = params
        for _ in range(WARM_UP_STEPS + 2):
            state, _ = await mesh.run(step, state, batch)
        assert_close(await mesh.fetch(state), expected)
        assert step.plan is not None


# ---------------------------------------------------------------- across processes


async def test_a_restart_goes_on_with_the_plan(always_worthwhile, choices):
    fn, (params, batch) = auto_step(), arguments()
    expected, _ = trained(fn, params, batch, WARM_UP_STEPS + 4)
    async with jpp.RemoteMesh(2, max_restarts=1, backup_every=2, device_model=SLOW) as mesh:
        step = mesh.distributed(fn, donate_argnums=0)
        state = params
        for k in range(WARM_UP_STEPS + 4):
            if k == WARM_UP_STEPS + 2:
                os.kill(mesh.actors[1].pid, signal.SIGKILL)
            state, _ = await mesh.run(step, state, batch)
        assert_close(await mesh.fetch(state), expected)
    assert len(choices) == 1 and step.plan is choices[0].plan is not None
