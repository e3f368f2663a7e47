"""Every question has an answer in every state of a run, and docs/page.md lists the questions."""

from __future__ import annotations

import re
from dataclasses import replace

import made_steps
import pytest
from measured_step import STEP
from paths import ROOT
from run_states import actors, event, new_record, state_of, trained_record

from jaxpp_async.page.answers import GROUPS, QUESTIONS, LastStep
from jaxpp_async.page.run_state import ActorMemoryUse
from jaxpp_async.protocol.actor_info import Activity
from jaxpp_async.session.logger_delivery import LoggerState
from jaxpp_async.timeline import Timeline

BY_ID = {question.id: question for question in QUESTIONS}
LAST = LastStep(
    replace(
        STEP,
        actors=tuple(
            replace(
                actor,
                events=tuple(
                    replace(e, label=f"fwd(stage {actor.actor}, mb 0)") if e.kind == "run" else e
                    for e in actor.events
                ),
            )
            for actor in STEP.actors
        ),
    )
)


def answer(question: str, run=None, step=LAST):
    return BY_ID[question].answer(run or state_of(trained_record()), step)


def test_there_are_twenty_questions_and_each_has_its_own_id():
    assert len(BY_ID) == len(QUESTIONS) >= 20
    assert {question.group for question in QUESTIONS} == set(GROUPS)


def test_docs_list_the_questions():
    rows = re.findall(
        r"^\| ([^|]+\?) \| `([\w-]+)` \|", (ROOT / "docs" / "page.md").read_text(), re.MULTILINE
    )
    assert [(name, text) for text, name in rows] == [(q.id, q.text) for q in QUESTIONS]


@pytest.mark.parametrize("question", BY_ID)
def test_each_question_has_an_answer_in_every_state(question):
    died = trained_record()
    died.on_event(event("died", 9.0, "actor 1 was killed", 1))
    failed = state_of(died, error=ValueError("a bug"), is_closed=True, actors=actors(2, "failed"))
    empty = Timeline(0, "train", 0.0, 0.0, (), ())
    for run in (state_of(new_record(), actors=(), memory={}, logged={}), state_of(died), failed):
        for step in (None, LAST, LastStep(empty)):
            assert answer(question, run, step).short


def test_answers_about_the_last_step():
    assert answer("slow-stage") == (
        "stage 1",
        "5.62 s in the step, 2.25 times as long as stage 0 (2.5 s)",
        False,
    )
    assert answer("busy-actor").short == "actor 1"
    assert answer("idle-actor").short == "actor 0"
    assert answer("network").more.endswith("1 transfer of 100 B together take 1.75 s")
    short, more, _ = answer("faster")
    assert re.fullmatch(r"\w+ \d+%", short) and more.startswith("in this step: ")


def test_the_slow_stage_may_not_be_that_of_the_actor_that_holds_the_step_up():
    three = made_steps.step(
        [made_steps.run(0, k, f"fwd(stage {k}, mb 0)", k, k + 1) for k in range(2)],
        [made_steps.run(1, 0, "fwd(stage 2, mb 0)", 0, 1.25)],
    )
    short, more, _ = answer("slow-stage", step=LastStep(three))
    assert short == "stage 2" and more.endswith("but actor 0, which does not run it, computes most")
    assert "from stage 0 to stage 2" in answer("faster", step=LastStep(three)).more
    assert answer("busy-actor", step=LastStep(three)).short == "actor 0"


def test_a_stage_whose_tasks_took_no_time_is_no_error():
    nothing = made_steps.step(
        [made_steps.run(0, 0, "fwd(stage 0, mb 0)", 0, 0)], [made_steps.run(1, 0, "fwd(stage 1, mb 0)", 0, 1)]
    )
    assert answer("slow-stage", step=LastStep(nothing)).more.startswith("1 s in the step, 1 s longer than")


def test_a_step_that_was_submitted_ahead_is_not_told_to_be_submitted_earlier():
    queued = replace(LAST.timeline, duration_s=200.0)
    actors = tuple(
        replace(a, events=tuple(replace(e, start_s=e.start_s + 100, end_s=e.end_s + 100) for e in a.events))
        for a in queued.actors
    )
    moved = {(e.actor, e.instruction): e for a in actors for e in a.events}
    transfers = tuple(
        replace(
            t,
            send=moved[t.send.actor, t.send.instruction],
            receive=moved[t.receive.actor, t.receive.instruction],
        )
        for t in queued.transfers
    )
    step = LastStep(replace(queued, actors=actors, transfers=transfers))
    assert step.advice[0].item == "queue" and len(step.advice) > 1
    assert not answer("faster", step=step).short.startswith("queue ")


def test_answers_about_speed():
    run = state_of(trained_record())
    assert answer("step", run) == ("step 3", "of 'train', counted from 0; 4 steps ended", False)
    assert answer("rate", run).short == "0.909 steps a second"
    assert answer("goodput", run).short == "40.0%"
    assert answer("lost-start", run).short == "2 s"
    assert answer("lost-compile", run).more.startswith("20.0% of the time")
    assert answer("steady", run).short == "yes"


def test_a_logger_that_blocks_or_raises_is_named():
    record = trained_record()
    assert answer("loggers", state_of(record)).short == "no loggers"
    good = LoggerState("Printed", num_waiting=1)
    assert answer("loggers", state_of(record, loggers=(good,))) == (
        "yes", "at most 1 step waits, for Printed", False,
    )  # fmt: skip
    blocked = LoggerState("Files", num_waiting=1000, num_dropped=2, busy_s=30.0)
    raising = LoggerState("Cloud", num_failed=1, last_error="OSError: no connection")
    assert answer("loggers", state_of(record, loggers=(good, blocked, raising))) == (
        "no",
        "Files did not get 2 steps, has been busy for 30 s; Cloud raised 1 error, the last: OSError: no "
        "connection",
        True,
    )


def test_answers_about_memory():
    run = state_of(trained_record())
    assert answer("memory", run).short == "actor 1"
    assert answer("fits", run) == (
        "yes",
        "actor 1 needs 6 MB of 16 MB a device; microbatches could be about 6.0 times as large",
        False,
    )
    full = state_of(trained_record(), memory={0: ActorMemoryUse(0, 20_000_000, 4_000_000, 16_000_000)})
    assert answer("fits", full).short == "no" and answer("fits", full).is_alarming
    unknown = state_of(trained_record(), memory={0: ActorMemoryUse(0, 20_000_000, 4_000_000, None)})
    assert answer("fits", unknown).short == "not known"
    assert answer("sent", run) == ("1 MB a step", "4 MB since the start", False)


def test_answers_about_the_state():
    record = trained_record()
    doing = {0: Activity("waiting for data is its text"), 1: Activity("run fwd(stage 1, mb 3)", True)}
    run = state_of(record, doing=doing, num_under_way=1)
    assert answer("alive", run).short == "yes" and answer("where", run).short == "2 hosts"
    assert answer("pending", run).short == "1 actor for data"
    assert answer("stopped", run).short == "it has not stopped"
    assert answer("logged", run) == ("loss 2.5", "at step 3; lr 0.1", False)
    assert answer("logged", state_of(record, logged={"loss": (1, float("nan"))})).is_alarming
    assert answer("saved", run).short == "not yet"
    record.on_event(event("checkpointed", 9.0, "checkpoint 3"))
    for _ in range(300):
        record.on_event(event("suspect", 9.5))
    assert answer("saved", state_of(record)) == ("03:04:05 UTC", "checkpoint 3", False)
    failed = state_of(record, error=ValueError("a bug\nand more"), is_closed=True)
    assert answer("stopped", failed)[:1] == ("ValueError: a bug",)
    assert answer("stopped", state_of(record, is_closed=True)).short == "it was closed"
    assert answer("alive", state_of(record, actors=actors(2, "restarting"))).is_alarming
