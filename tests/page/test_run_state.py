"""The record of a run: counts, times, failures; bounded however long the run is."""

from __future__ import annotations

import gc
import itertools
import tracemalloc

import pytest
from run_states import BEGUN_S, Stats, actors, event, new_record, state_of, step, trained_record

from jaxpp_async.errors import ActorDiedError, RestartBudgetExceeded
from jaxpp_async.page.run_state import STEP_BUCKETS, ActorMemoryUse, EndedStep, Totals, causes_of


def test_a_run_that_goes_on():
    run = state_of(trained_record())
    (main,) = run.steps
    assert run.status == "running" and run.age_s == 10.0
    assert (main.name, main.count, main.last) == ("train", 4, 3)
    assert main.last_s == pytest.approx(1.0) and main.per_s == pytest.approx(1 / 1.1)
    assert main.idle == pytest.approx(0.25)
    assert run.goodput.spent_s["steps"] == pytest.approx(4.0) and run.goodput.ratio == pytest.approx(0.4)
    assert run.totals == Totals(
        num_compiled=1, compile_s=2.0, step_s=pytest.approx(4.0), sent_bytes=4_000_000
    )
    assert run.memory[1].peak_bytes == 4096 and run.memory[1].needed_bytes == 6_000_001
    assert run.step_counts[-1] == 4 and run.step_counts[STEP_BUCKETS.index(0.5)] == 0


def test_steps_that_overlap_are_counted_by_the_time_between_their_ends():
    record = new_record()
    record.on_step_end(step(0, 0.0, 2.0))
    record.on_step_end(step(1, 0.5, 3.0))
    assert state_of(record).steps[0].last_s == 1.0


def test_a_run_before_its_first_step():
    run = state_of(new_record(), actors=(), memory={})
    assert run.status == "starting" and run.main is None and run.goodput.ratio == 0.0


def test_a_restart_that_replaces_two_actors_counts_once():
    record = trained_record()
    record.on_event(event("died", 9.0, "actor 1 was killed", 1))
    assert state_of(record).status == "restarting"
    record.on_event(event("died", 9.1, "actor 0 was killed", 0))
    for actor in range(2):
        record.on_event(event("restarted", 9.5, "at work again", actor, num_steps=1, seconds=0.5))
    run = state_of(record)
    assert (run.status, run.totals.num_restarts, run.totals.num_deaths) == ("running", 1, 2)
    assert run.restart_steps == (3,)
    record.on_event(
        event("restarted", 9.8, "the mesh is at work again", num_steps=0, seconds=0.1)
    )  # a link broke
    assert state_of(record).totals.num_restarts == 2


def test_a_run_that_was_closed_stays_as_it_was():
    record = trained_record()
    record.on_event(event("closed", 9.0, "the mesh is closed"))
    run = state_of(record, at_s=500.0, is_closed=True)
    assert (run.status, run.age_s) == ("closed", 9.0)
    assert run.goodput.total_s == pytest.approx(9.0)


def test_the_first_cause_comes_first():
    first = ActorDiedError("actor 1 was killed by SIGKILL", actor=1, step=7)
    first.add_note("a note")
    last = RestartBudgetExceeded("3 restarts in ten minutes")
    last.__cause__ = first
    causes = state_of(trained_record(), error=last, is_closed=True).causes
    assert [cause.kind for cause in causes] == ["ActorDiedError", "RestartBudgetExceeded"]
    assert (causes[0].actor, causes[0].step, causes[0].notes) == (1, 7, ("a note",))
    assert state_of(trained_record(), error=last).status == "failed"


def test_an_error_without_a_text_is_named():
    assert causes_of(KeyboardInterrupt())[0].text == "KeyboardInterrupt"


def test_ten_thousand_further_steps_take_no_more_memory():
    record = new_record()

    def run_steps(first: int, last: int) -> None:
        for number in range(first, last):
            record.on_step_end(step(number, number, number + 0.5))
            if number % 100 == 0:
                record.on_event(event("checkpointed", number))

    tracemalloc.start()
    try:
        run_steps(0, 16_000)  # until every history is full
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        run_steps(16_000, 26_000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000


def test_many_names_of_steps_become_others():
    record = new_record()
    for number in range(40):
        record.on_step_end(step(number, number, number + 0.5, name=f"step{number % 20}"))
    run = state_of(record, at_s=40)
    assert len(run.steps) == 9 and sum(each.count for each in run.steps) == 40


def test_states_do_not_change_afterwards():
    record = trained_record()
    run = state_of(record, actors=actors(3))
    record.on_step_end(step(4, 9.0, 9.5))
    assert run.steps[0].count == run.step_counts[-1] == 4 and run.totals.step_s == pytest.approx(4.0)
    assert len(run.mesh.actors) == 3


def test_the_latest_event_of_a_kind_is_known_however_many_followed():
    record = trained_record()
    record.on_event(event("checkpointed", 9.0, "checkpoint 1"))
    for number in range(300):
        record.on_event(event("suspect", 9.5, f"actor 0 is not heard, {number}"))
    run = state_of(record)
    assert run.latest["checkpointed"].text == "checkpoint 1"
    assert "checkpointed" not in {found.kind for found in run.events}


def test_what_a_device_needs_is_told_before_what_its_buffers_held():
    assert ActorMemoryUse(5, 7).most_bytes == 7 and ActorMemoryUse(5).most_bytes == 5


def test_time_before_a_failure_is_not_the_restarts_if_no_step_was_under_way():
    """Ten minutes of evaluation on the driver, a restart of three seconds, and a step that waits a second."""
    record = new_record()
    record.on_started(BEGUN_S)
    record.on_event(event("died", 600.0, "actor 1 was killed", 1))
    for actor in range(2):
        record.on_event(event("restarted", 603.0, "at work again", actor, num_steps=1, seconds=3.0))
    stats = {0: Stats(total_s=4.0)}  # the actors repeated steps for a second before they began
    record.on_step_end(EndedStep(0, "train", BEGUN_S + 610.0, BEGUN_S + 615.0, stats, 0))
    assert state_of(record, at_s=615.0).goodput.decided_s == {
        "start": 0, "compile": 0, "steps": 4, "restarts": 4, "between": 607,
    }  # fmt: skip


def test_a_restart_of_which_no_failure_was_told_takes_its_own_time():
    record = new_record()
    record.on_started(BEGUN_S)
    record.on_event(event("restarted", 100.0, "the mesh is at work again", num_steps=0, seconds=3.0))
    assert state_of(record, at_s=100.0).goodput.decided_s["restarts"] == 3.0


def test_what_is_decided_about_time_never_decreases():
    record, published = new_record(), []

    def scrape(at_s: float) -> None:
        goodput = state_of(record, at_s=at_s).goodput
        assert sum(goodput.decided_s.values()) + goodput.undecided_s == pytest.approx(at_s)
        published.append(goodput.decided_s)

    scrape(5.0)
    record.on_started(BEGUN_S + 10.0)
    scrape(69.0)  # during a compilation, which nobody has told of
    record.on_event(event("compiled", 70.0, seconds=60.0))
    scrape(100.0)
    record.on_event(event("died", 101.0), under_way_since_s=BEGUN_S + 75.0)
    scrape(102.0)
    record.on_event(event("restarted", 103.0, num_steps=0, seconds=2.0))
    scrape(104.0)
    stats = {0: Stats(total_s=3.0)}
    record.on_step_end(EndedStep(0, "train", BEGUN_S + 105.0, BEGUN_S + 110.0, stats, 0))
    scrape(111.0)
    for before, after in itertools.pairwise(published):
        assert all(before[item] <= after[item] for item in before)
    assert published[-1] == {"start": 10, "compile": 60, "steps": 3, "restarts": 32, "between": 5}
