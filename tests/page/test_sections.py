"""The sections of the page: complete, escaped, and bounded."""

from __future__ import annotations

import math
import re

import pytest
from measured_step import STEP
from run_states import actors, event, new_record, state_of, trained_record

from jaxpp_async.errors import ActorDiedError
from jaxpp_async.page.answers import QUESTIONS, LastStep
from jaxpp_async.page.document import write_document
from jaxpp_async.page.run_state import ActorMemoryUse
from jaxpp_async.page.sections import (
    MOST_ACTORS,
    MOST_CURVES,
    MOST_EVENTS,
    SECTIONS,
    write_curves,
    write_run,
    write_step,
)
from jaxpp_async.protocol.actor_info import Activity
from jaxpp_async.view.history import History
from jaxpp_async.view.palette import USES

EVIL = "<script>alert(1)</script>"


def history() -> History:
    found = History()
    found.add(1, 1.0)
    found.add(2, 2.0)
    return found


def all_sections(run, step=None):
    return write_run(run) | write_curves(run, (), {}) | write_step(run, step)


@pytest.mark.parametrize("step", [None, LastStep(STEP)])
def test_every_section_is_written_and_every_question_is_answered_once(step):
    sections = all_sections(state_of(trained_record()), step)
    assert set(sections) == {section.id for section in SECTIONS}
    found = re.findall(r'data-answer="([\w-]+)"', "".join(sections.values()))
    assert sorted(found) == sorted(question.id for question in QUESTIONS)


def test_a_failed_run_shows_its_first_cause_and_what_followed():
    first = ActorDiedError("actor 1 (host a, pid 5) was killed by SIGKILL\nits last words:\n  out of memory")
    last = RuntimeError("the mesh has failed")
    last.__cause__ = first
    failure = write_run(state_of(trained_record(), error=last, is_closed=True))["failure"]
    assert failure.index("was killed by SIGKILL") < failure.index("the mesh has failed")
    assert "<pre>its last words:\n  out of memory</pre>" in failure
    assert write_run(state_of(trained_record()))["failure"] == ""


def test_nothing_that_others_say_becomes_html():
    record = trained_record()
    record.on_event(event("died", 9.0, EVIL, 1))
    error = ActorDiedError(EVIL)
    error.add_note(EVIL)
    run = state_of(
        record,
        error=error,
        logged={EVIL: (1, 1.0)},
        doing={0: Activity(EVIL)},
        actors=actors(2, EVIL),
        num_under_way=1,
    )
    sections = all_sections(run) | write_curves(run, (), {EVIL: history()})
    assert "<script" not in "".join(sections.values())
    assert "&lt;script" in sections["failure"] and "&lt;script" in sections["curves"]


def test_a_run_of_thousands_of_actors_events_and_names_stays_small():
    record = trained_record()
    for number in range(300):
        record.on_event(event("checkpointed", 9.0, f"checkpoint {number}"))
    run = state_of(record, actors=actors(2000), logged={f"v{k}": (1, 1.0) for k in range(1000)})
    logged = {f"v{k}": history() for k in range(MOST_CURVES + 6)}
    sections = all_sections(run) | write_curves(run, record.curves(), logged)
    assert sections["actors"].count("<tr>") == MOST_ACTORS + 1
    assert "1,744 more actors" in sections["actors"] or "1744 more actors" in sections["actors"]
    assert sections["events"].count("<tr>") == MOST_EVENTS
    assert sections["curves"].count("data-curve") == MOST_CURVES
    assert sum(map(len, sections.values())) < 400_000


def test_curves_of_two_step_functions_are_told_apart():
    record = trained_record()
    from run_states import step

    record.on_step_end(step(4, 9.0, 9.5, name="evaluate"))
    shown = write_curves(state_of(record), record.curves(), {})["curves"]
    assert "step time of train" in shown and "step time of evaluate" in shown
    assert write_curves(state_of(new_record()), (), {})["curves"] == ""


def test_the_bar_of_an_actors_memory_is_relative_to_its_limit_and_absent_without_one():
    memory = {
        0: ActorMemoryUse(0, 4_000_000, 1_000_000, 16_000_000),
        1: ActorMemoryUse(0, 4_000_000, 1_000_000, None),
    }
    shown = write_run(state_of(trained_record(), memory=memory))["actors"]
    assert re.findall(r'class="bar" style="width:([\d.]+)%"', shown) == ["25.0"]
    assert "4 MB of 16 MB" in shown


def test_each_use_of_time_has_a_colour_of_its_own_on_the_page():
    bar = write_run(state_of(trained_record()))["figures"]
    used = set(re.findall(r"background:var\(--([\w-]+)\)", bar))
    assert len(used) > 2 and used <= {f"use-{use}" for use in USES}
    assert all(f"--{name}:" in write_document({}, title="", version="1") for name in used)


def test_a_loss_that_is_not_finite_any_more_has_a_banner():
    logged = {"grad": (9, math.inf), "loss": (9, math.nan), **{f"v{k}": (9, math.nan) for k in range(3)}}
    bad = state_of(trained_record(), logged=logged, not_finite={name: 4 for name in logged} | {"loss": 7})
    shown = write_run(bad)["failure"]
    assert shown.index("loss is not finite since step 7") < shown.index("grad is not finite since step 4")
    assert "2 more values are not finite." in shown and "jax_debug_nans" in shown
