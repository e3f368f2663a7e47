"""Simulated steps against measured ones: bytes are equal, and costs come from timelines of real steps."""

from __future__ import annotations

import pytest
from built_in import every_schedule
from models import grads_step, mlp

import jaxpp_async as jpp
from jaxpp_async.planning.cost_model import TaskFormula
from jaxpp_async.planning.samples import LinkCost, Samples

GUESS = jpp.CostModel(
    formula=TaskFormula(1e-3), links={kind: LinkCost(Samples((1e-4,))) for kind in ("memory", "same host")}
)


@pytest.mark.parametrize("schedule", every_schedule(4), ids=lambda s: type(s).__name__)
async def test_simulated_bytes_are_measured_bytes(remote_mesh, schedule):
    mesh, model = await remote_mesh(2, launcher="inline"), mlp(4)
    step = mesh.distributed(grads_step(model, schedule), donate_argnums=0)
    params, batch = model.init(0), model.batch(0, 6)
    compiled = await step.compile(params, batch)
    await mesh.run(step, params, batch)
    measured = tuple(s.peak_bytes for s in mesh.last_step_stats())
    assert jpp.simulate(compiled, GUESS, draws=1).peak_bytes == measured
    assert min(measured) > 0
    assert mesh.last_step_timeline().count_works is compiled.compiled.count_works  # not of the compiled step


async def test_costs_of_measured_steps_simulate_another_schedule(remote_mesh, tmp_path):
    mesh, model = await remote_mesh(2), mlp(4)
    step = mesh.distributed(grads_step(model, jpp.Std1F1B(4)))
    params, batch = model.init(0), model.batch(0, 4)
    timelines = []
    for _ in range(4):
        await mesh.run(step, params, batch)
        timelines.append(mesh.last_step_timeline())
    compiled = await step.compile(params, batch)
    for timeline in timelines:
        assert timeline.works == compiled.works
        runs = [e for a in timeline.actors for e in a.runs]
        assert [timeline.works_of(e) for e in runs] == [compiled.works[e.executable or 0] for e in runs]
        assert all(
            e.executable is None and timeline.works_of(e) is None for e in timeline.events if e.kind != "run"
        )
    costs = jpp.CostModel.from_timelines(timelines[2:])
    assert set(costs.tasks) == {w.key for w in compiled.works} and "same host" in costs.links
    costs.save(tmp_path / "costs.json")
    other = await step.with_schedule(jpp.Eager1F1B(4)).compile(params, batch)
    simulated = jpp.simulate(other, jpp.CostModel.load(tmp_path / "costs.json"))
    assert not any("FLOPs and bytes" in text for text in simulated.assumed)  # every task was measured
    labels = [e.label for a in simulated.timeline.actors for e in a.runs]
    await mesh.run(step.with_schedule(jpp.Eager1F1B(4)), params, batch)
    assert labels == [e.label for a in mesh.last_step_timeline().actors for e in a.runs]
    assert simulated.step_s.p50 > max(sum(e.duration_s for e in a.runs) for a in simulated.timeline.actors)


async def test_the_timeline_of_a_future_has_works_too(remote_mesh):
    mesh, model = await remote_mesh(2, launcher="inline"), mlp(2)
    step = mesh.distributed(grads_step(model, jpp.GPipe(2)))
    future = await mesh.submit(step, model.init(0), model.batch(0, 4))
    await future
    assert future.timeline().works == (await step.compile(model.init(0), model.batch(0, 4))).works != ()
