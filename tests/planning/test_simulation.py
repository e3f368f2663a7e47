"""Direct tests of simulated steps, on steps that are compiled and never run."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import pytest
from built_in import every_schedule
from layer_steps import layer_step
from planning import f32, plan_step

import jaxpp_async as jpp
from jaxpp_async.errors import MissingCost
from jaxpp_async.planning.cost_model import TaskFormula
from jaxpp_async.planning.samples import LinkCost, Samples
from jaxpp_async.planning.simulation import Simulation, simulate
from jaxpp_async.session import report
from jaxpp_async.view import format_time

SCHEDULES = every_schedule(4)


@functools.cache
def compiled(schedule, actors: int = 2, num_microbatches: int = 4, width: int = 8):
    """A compiled step of four layers, with the attributes of a `CompiledStep` that a simulation reads."""

    args = [f32(width, width)] * 4, f32(num_microbatches, 4, width)
    done = plan_step(layer_step(4, schedule), *args, actors=actors, donate=(0,))
    return SimpleNamespace(compiled=done, works=done.works)


def fixed(**given) -> jpp.CostModel:
    """Costs without any spread: a second a task, and links of half a second."""
    costs = {
        "formula": TaskFormula(1.0),
        "links": {"same host": LinkCost(Samples((0.5,)))},
        **given,
    }
    return jpp.CostModel(**costs)


SPREAD = fixed(spread=Samples((0.5, 1.0, 1.5)), dispatch=Samples((0.0, 0.25)), queue=Samples((0.0, 1.0)))


def test_a_simulated_step_has_the_length_that_is_worked_out_by_hand():
    sim = simulate(
        compiled(jpp.GPipe(4), actors=1, num_microbatches=1),
        fixed(dispatch=Samples((0.25,)), queue=Samples((2.0,)), reply=Samples((3.0,))),
    )
    runs = sim.timeline.actors[0].runs
    assert sim.step_s == (2 + 1.25 * len(runs) + 3,) * 3
    assert sim.timeline.duration_s == sim.step_s.p50
    assert sim.timeline.bill.queue_s == 2 and sim.timeline.bill.reply_s == pytest.approx(3)


def test_constant_costs_are_drawn_once():
    step, costs = compiled(jpp.GPipe(4)), fixed(dispatch=Samples((0.25,)))
    assert costs.is_constant and not SPREAD.is_constant
    many, one = simulate(step, costs, draws=9), simulate(step, costs, draws=1)
    assert many.step_s == one.step_s and many.loop_s == one.loop_s
    assert not fixed(tasks={"a": Samples((1.0, 2.0))}).is_constant


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_a_step_is_never_shorter_than_its_work_and_its_critical_path(schedule):
    step = compiled(schedule, num_microbatches=6)
    sim = simulate(step, SPREAD, draws=5)
    timeline = sim.timeline
    for actor, program in zip(timeline.actors, step.compiled.programs, strict=True):
        runs = [i for i in program.instructions if type(i).__name__ == "Run"]
        assert [e.label for e in actor.runs] == [run.label for run in runs]  # no task is lost, in order
        assert sum(e.duration_s for e in actor.runs) <= timeline.duration_s
        for before, after in zip(actor.runs, actor.runs[1:], strict=False):
            assert after.start_s >= before.end_s
    for t in timeline.transfers:
        assert t.receive.end_s >= t.send.start_s + 0.5 and t.send.needs
    ends = {(a.actor, e.instruction): e.end_s for a in timeline.actors for e in a.events}
    for e in timeline.events:
        assert all(e.start_s >= ends[e.actor, need] or e.kind != "run" for need in e.needs)
    bill = timeline.bill
    assert timeline.duration_s >= bill.bound_s and bill.dispatch_s >= -1e-9
    assert bill.total_s == pytest.approx(timeline.duration_s)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_bytes_are_those_of_the_report(schedule):
    step = compiled(schedule, num_microbatches=6)
    reported = report.make(step.compiled, {}, {})
    assert simulate(step, SPREAD, draws=1).peak_bytes == tuple(a.peak_bytes for a in reported.actors)


def test_the_same_seed_gives_the_same_simulation_and_another_seed_another():
    step = compiled(jpp.Std1F1B(4), actors=4)
    one, same, other = (simulate(step, SPREAD, seed=seed) for seed in (3, 3, 4))
    assert one.step_s == same.step_s != other.step_s
    assert isinstance(one, Simulation) and one.timeline == same.timeline and str(one) == str(same)


@pytest.mark.parametrize("draws", [1, 2, 15])
def test_the_timeline_is_that_of_the_median_draw(draws):
    sim = simulate(compiled(jpp.Std1F1B(4), actors=4), SPREAD, draws=draws)
    assert sim.step_s.p10 <= sim.step_s.p50 <= sim.step_s.p90
    assert sim.timeline.duration_s == sim.step_s.p50
    assert (sim.step_s.p10 < sim.step_s.p90) == (draws > 1)


def test_costs_that_are_read_from_a_simulated_step_are_those_it_was_made_with():
    step = compiled(jpp.Interleaved1F1B(4), num_microbatches=6)
    costs = fixed(
        dispatch=Samples((0.125,)),
        wake=Samples((0.25,)),
        post=Samples((0.0625,)),
        queue=Samples((2.0,)),
        reply=Samples((3.0,)),
    )
    sim = simulate(step, costs)
    found = jpp.CostModel.from_timelines([sim.timeline])
    for name in ("dispatch", "wake", "post", "queue", "skew", "reply"):
        assert getattr(found, name).mean == pytest.approx(getattr(costs, name).mean), name
    assert found.links["same host"].latency.seconds == pytest.approx(
        [0.5] * len(found.links["same host"].latency.seconds)
    )
    again = simulate(step, found)
    assert again.step_s == pytest.approx(sim.step_s)
    assert {text.split(":")[0] for text in again.assumed} >= {
        "the bytes of a transfer (same host) take no time"
    }


def test_arguments_that_come_late_delay_the_actors_that_read_them():
    step = compiled(jpp.Std1F1B(4), actors=4)
    late = simulate(step, fixed(arguments={4: Samples((10.0,))}))  # the batch, which the first actor reads
    assert late.step_s.p50 == simulate(step, fixed()).step_s.p50 + 10


def test_every_assumed_time_is_listed_and_a_measured_one_is_not():
    step = compiled(jpp.Std1F1B(4), actors=4)
    sim = simulate(step, fixed(actors_per_host=2))
    (computed,) = [text for text in sim.assumed if "by FLOPs and bytes" in text]
    assert re.fullmatch(r"\d+ runs of \d+ tasks, by FLOPs and bytes: .*fwd\(stage 0\).* more", computed)
    assert (
        "a transfer of the kind 'between hosts' takes as long as one of the kind 'same host'" in sim.assumed
    )
    measured = simulate(step, fixed(tasks={w.key: Samples((1.0,)) for w in step.works}))
    assert measured.assumed == ()
    assert measured.step_s == simulate(step, fixed()).step_s


def test_what_has_no_cost_is_named_with_its_task():
    step = compiled(jpp.Std1F1B(4), actors=4)
    with pytest.raises(MissingCost, match=r"^task 'fwd\(stage 0\)' of the step: there is no cost"):
        simulate(step, fixed(formula=None, tasks={w.key: Samples((1.0,)) for w in step.works[1:]}))
    with pytest.raises(MissingCost, match="transfer from actor 0 to actor 1"):
        simulate(step, fixed(links={}))


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ValueError, match="draws=0: a simulation needs at least one draw"):
        simulate(compiled(jpp.GPipe(4)), fixed(), draws=0)
    with pytest.raises(TypeError, match="simulate takes a compiled step"):
        simulate(lambda x: x, fixed())  # pyright: ignore[reportArgumentType]


def test_a_simulation_prints_a_short_report():
    sim = simulate(compiled(jpp.Std1F1B(4), actors=2), fixed())
    lines = str(sim).splitlines()
    p50 = format_time(sim.step_s.p50, "s")
    assert lines[0] == f"simulated: {p50} a step (p10 {p50}, p90 {p50}) on 2 actors"
    assert lines[2].startswith("actor 0: ") and lines[2].endswith(
        f"peak {sim.peak_bytes[0]:,} bytes of buffers"
    )
    assert "assumed, not measured:" in lines
    assert repr(sim).startswith(f"<Simulation: {p50} a step")
    assert sim.timeline.to_chrome_trace()["traceEvents"]


def test_a_step_for_a_machine_that_need_not_exist_is_simulated_with_published_figures():
    machine = jpp.Machine(actors=2, spmd_mesh={"model": 8}, device="h100-sxm")
    done = jpp.compile_for(machine, layer_step(2, jpp.Std1F1B(2)), ([f32(1024, 1024)] * 2, f32(4, 64, 1024)))
    sim = simulate(done, jpp.CostModel.from_device("h100-sxm", devices_per_actor=8, matmul=0.5))
    assert 0 < sim.step_s.p10 == sim.step_s.p90 < 1e-3
    assert "nothing else takes time, and no time varies" in sim.assumed
    assert sim.peak_bytes == tuple(a.peak_bytes for a in done.report().actors)


def test_a_step_of_short_tasks_says_that_dispatch_will_be_most_of_it():
    step = compiled(jpp.Std1F1B(4), actors=4)

    def says(**changes):
        return any("which was assumed to be 0" in text for text in simulate(step, fixed(**changes)).assumed)

    assert says(formula=TaskFormula(overhead_s=49e-6)) and not says(formula=TaskFormula(overhead_s=51e-6))
    assert not says(formula=TaskFormula(overhead_s=1e-6), dispatch=Samples((1e-6,)))
