"""When a form whose schedule is `Auto` is replaced, with a planner and a loader that do nothing else."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_async.errors import RemoteError, UnsupportedError
from jaxpp_async.session.auto_steps import AutoSteps, choose_form


@dataclass
class Form:
    """A compiled form, of which only the measured steps and the plan are there."""

    auto: AutoSteps | None = None
    plan: Any = None


@dataclass
class Planner:
    """A planner that wants three measured steps."""

    plan: Any = None
    calls: list[int] = field(default_factory=list)
    is_measured: bool = False
    reason: str | None = None

    def can_choose(self, num_measured):
        return num_measured >= 3

    def choose(self, step, form, args, timelines, on_progress):
        self.calls.append(len(timelines))
        on_progress("planning")
        measured_s = 1.0 if self.is_measured else None
        return SimpleNamespace(plan=self.plan, text="chosen", level=logging.INFO, measured_s=measured_s)

    def can_judge(self, num_measured):
        return num_measured >= 2

    def why_not(self, name, choice, timelines):
        assert (name, choice.plan, len(timelines)) == ("train", self.plan, 2)
        return self.reason


@dataclass(frozen=True)
class Request:
    args: tuple[Any, ...] = ()
    schedule: Any = None


class Step:
    """A step that records which form took whose place."""

    __name__ = "train"

    def __init__(self):
        self.replaced = []

    def request(self, args):
        return Request(tuple(args))

    def replace(self, old, new):
        self.replaced.append((old, new))


async def load(request, settings):
    await asyncio.sleep(0)
    return Form(plan=request.schedule)


def measured(count):
    form = Form(AutoSteps())
    for _ in range(count):
        form.auto.note_end(SimpleNamespace(timeline=object))
    return form


PLAN = SimpleNamespace(schedule="planned")


async def choose(form, planner, step=None, load=load) -> Any:
    return await choose_form(step or Step(), form, (1,), planner, load)  # pyright: ignore[reportArgumentType]


async def test_another_schedule_and_too_few_steps_stay():
    planner = Planner(PLAN)
    for form in (Form(), measured(2)):
        assert await choose(form, planner) is form
    assert planner.calls == []


async def test_a_form_is_replaced_once_by_its_plan():
    form, planner, step = measured(3), Planner(PLAN), Step()
    first = await choose(form, planner, step)
    assert first.plan is PLAN and step.replaced == [(form, first)]
    form.auto.note_end(SimpleNamespace())  # a step that was under way
    assert form.auto.finished == []
    assert await choose(form, planner, step) is first and planner.calls == [3]


async def test_a_form_that_stays_is_not_planned_again():
    form, planner = measured(4), Planner()
    assert await choose(form, planner) is form and await choose(form, planner) is form
    assert planner.calls == [4] and form.auto.planned is None


async def test_calls_at_once_get_the_same_form():
    form, planner = measured(3), Planner(PLAN)
    first, *others = await asyncio.gather(*(choose(form, planner) for _ in range(4)))
    assert all(other is first for other in others) and planner.calls == [3]


async def test_a_cancelled_call_leaves_the_choice_to_one_that_waits():
    form, planner = measured(3), Planner(PLAN)
    first, second = (asyncio.create_task(choose(form, planner)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).plan is PLAN


@pytest.mark.parametrize("kind", [UnsupportedError, RemoteError])
async def test_a_plan_that_cannot_be_compiled_is_told_of(caplog, kind):
    async def fail(request, settings):
        raise kind("train.py:3: no such operation\nmore")

    form = measured(3)
    assert await choose(form, Planner(PLAN), load=fail) is form
    text = "step 'train' (jpp.Auto) stays as it is: its plan failed: train.py:3: no such operation"
    assert text in [r.getMessage() for r in caplog.records]


# ---------------------------------------------------------------- a plan on trial


async def on_trial(planner, step, finished):
    """Return a form, and the planned form that has replaced it, after some steps of the latter."""
    form = measured(3)
    planned = await choose(form, planner, step)
    for _ in range(finished):
        planned.auto.note_end(SimpleNamespace(timeline=object))
    return form, planned


async def test_a_plan_that_was_not_measured_against_anything_is_not_on_trial():
    _, planned = await on_trial(Planner(PLAN), Step(), 0)
    assert planned.auto is None


async def test_a_plan_stays_that_is_as_good_as_predicted():
    planner, step = Planner(PLAN, is_measured=True), Step()
    form, planned = await on_trial(planner, step, 1)
    assert await choose(planned, planner, step) is planned and len(planned.auto.finished) == 1
    planned.auto.note_end(SimpleNamespace(timeline=object))
    assert await choose(planned, planner, step) is planned and planned.auto.finished == []
    assert planned.auto.replaced is None  # the earlier form can be forgotten
    assert step.replaced == [(form, planned)] and planner.calls == [3]


async def test_a_plan_that_disappoints_gives_way_to_the_earlier_form_for_good(caplog):
    planner, step = Planner(PLAN, is_measured=True, reason="it is slow"), Step()
    form, planned = await on_trial(planner, step, 2)
    assert await choose(planned, planner, step) is form
    assert step.replaced == [(form, planned), (planned, form)]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == ["it is slow"]
    for _ in range(4):
        form.auto.note_end(SimpleNamespace())
        assert await choose(form, planner, step) is form  # nor is it planned again
    assert await choose(planned, planner, step) is form  # by a call that began before
    assert planner.calls == [3] and len(step.replaced) == 2 and form.plan is None
