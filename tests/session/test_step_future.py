"""Direct tests of what is known of a step that was sent: its timeline, its prints, who waits behind it."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpp_async.base.printable import first_line
from jaxpp_async.compiler.ir import Print, PrintOperand, ValueType
from jaxpp_async.controller.requests import StepHandle
from jaxpp_async.errors import MeshError, StepAbortedError
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Run
from jaxpp_async.protocol.actor_info import ActorInfo, Topology
from jaxpp_async.protocol.clocks import Clock, Reading
from jaxpp_async.protocol.messages import StepDone, StepStats, step_id
from jaxpp_async.session.abandoned_steps import PATIENCE_S, AbandonedSteps
from jaxpp_async.session.remote_array import RemoteArray
from jaxpp_async.session.step_future import Printer, Recording, StepFuture

STEP = step_id(7)
INFO = ActorInfo(0, "node1", 4711, (), "ready")


def finish(handle: StepHandle, stats: StepStats | None = None, actor: int = 0) -> None:
    done = StepDone(handle.step, stats or StepStats(0, 0, 0, 0, 0))
    handle.on_reply(SimpleNamespace(info=ActorInfo(actor, "node1", 4711, (), "ready")), done)


# ---------------------------------------------------------------- timelines


def controller(clock: Clock) -> SimpleNamespace:
    """What a recording asks of the controller, which may serve other actors afterwards."""
    request_log = SimpleNamespace(info=lambda process: INFO)
    return SimpleNamespace(clock=lambda actor: clock, processes=Topology(1), request_log=request_log)


def recording(handle: StepHandle, clock: Clock | None = None, *instructions) -> Recording:
    programs = [ActorProgram(0, instructions, (Aval((), "int32"),)), ActorProgram(1, (), ())]
    return Recording("train", handle, programs, controller(clock or Clock(is_own=True)))


async def test_a_step_under_way_and_a_failed_one_have_no_timeline():
    handle = StepHandle(STEP, 0, [0])
    recorded = recording(handle)
    assert recorded.title == "step 7 ('train')"
    with pytest.raises(MeshError, match=r"^a step has a timeline once it has finished; await it first$"):
        recorded.timeline()
    handle.fail(StepAbortedError("actor 1 died\nand more"))
    with pytest.raises(MeshError, match=r"^step 7 \('train'\) failed, so it has no timeline: actor 1 died$"):
        recorded.timeline()


async def test_a_timeline_knows_the_step_who_ran_it_and_since_when():
    handle = StepHandle(STEP, 0, [0])
    recorded = recording(handle)
    finish(handle)
    timeline = recorded.timeline()
    assert (timeline.step, timeline.name, timeline.origin_s) == (7, "train", handle.sent_s)
    assert timeline.duration_s == handle.heard_s[0] - handle.sent_s
    assert [(actor.actor, actor.host, actor.pid) for actor in timeline.actors] == [(0, "node1", 4711)]
    assert timeline.clock_error_s == 0.0


async def test_clocks_are_kept_as_they_were_when_the_step_ended():
    clock = Clock()
    handle = StepHandle(STEP, 0, [0])
    clock.note(Reading(handle.sent_s, handle.sent_s + 100.0, handle.sent_s))
    recorded = recording(handle, clock, Run("f", 0, (), (0,)))
    began_s = handle.sent_s + 100.0
    finish(handle, StepStats(0, 0, 0, 0, 0, struct.pack("<dd", began_s, began_s)))
    before = recorded.timeline()
    assert before.events[0].start_s == pytest.approx(0.0, abs=1e-6)
    clock.readings = (Reading(handle.sent_s, handle.sent_s + 300.0, handle.sent_s + 1.0),)
    assert recorded.timeline() == before


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("a\nb"), "a"), (ValueError(), "ValueError"), (KeyError("k"), "'k'")],
    ids=repr,
)
def test_an_error_is_told_by_its_first_line_or_by_its_type(error, line):
    assert first_line(error) == line


async def test_a_step_tells_what_it_is_at_and_its_statistics_once_it_has_finished():
    handle, stats = StepHandle(STEP, 0, [0]), StepStats(1, 2, 3, 4, 5)
    future = StepFuture("outputs", recording(handle), arrays=None)
    assert (repr(future), future.done()) == ("<StepFuture: step 7 ('train'), under way>", False)
    with pytest.raises(MeshError, match=r"^a step has stats once it has finished; await it first$"):
        _ = future.stats
    finish(handle, stats)
    assert (repr(future), future.done()) == ("<StepFuture: step 7 ('train'), finished>", True)
    assert future.stats == [stats]
    assert await future == "outputs"


async def test_statistics_come_in_the_order_of_the_actors_whichever_answers_first():
    handle, stats = StepHandle(STEP, 0, [0, 1]), [StepStats(k, 0, 0, 0, 0) for k in range(2)]
    future = StepFuture(None, recording(handle), arrays=None)
    finish(handle, stats[1], actor=1)
    finish(handle, stats[0], actor=0)
    assert future.stats == stats


async def test_a_failed_step_says_why_and_has_no_statistics():
    handle = StepHandle(STEP, 0, [0])
    future = StepFuture(None, recording(handle), arrays=None)
    handle.fail(StepAbortedError("link lost"))
    assert repr(future) == "<StepFuture: step 7 ('train'), failed: link lost>"
    with pytest.raises(MeshError, match=r"^step 7 \('train'\) failed, so it has no stats: link lost$"):
        _ = future.stats
    with pytest.raises(StepAbortedError, match="link lost"):
        await future


async def test_a_step_that_prints_is_over_when_it_has_printed():
    handle, printed = StepHandle(STEP, 0, [0]), asyncio.get_running_loop().create_future()
    future = StepFuture(None, recording(handle), None, printing=printed)
    finish(handle)
    assert (future.done(), repr(future)) == (False, "<StepFuture: step 7 ('train'), finished, printing>")
    printed.set_result(None)
    assert future.done()


# ---------------------------------------------------------------- prints


class Values:
    """Fetches arrays: each is its id."""

    def __init__(self):
        self.asked = []

    async def fetch(self, arrays):
        self.asked.append([array.array_id for array in arrays])
        return [np.int32(array.array_id) for array in arrays]

    def release(self, array) -> None: ...


def shown(values: Values, array_id: int) -> RemoteArray:
    return RemoteArray(values, array_id, ValueType(Aval((), "int32")), (0,))


def step_that_prints(said: list) -> SimpleNamespace:
    one = Print(lambda operands: said.append(int(operands[0])), (PrintOperand(3),), "a.py:1")
    return SimpleNamespace(hidden_results=(3,), prints=(one,))


async def test_steps_print_in_the_order_in_which_they_started_whichever_ends_first():
    said, values = [], Values()
    printer, handles = Printer(values), [StepHandle(step_id(k), 0, [0]) for k in range(2)]
    tasks = []
    for k, handle in enumerate(handles):
        tasks.append(printer.start(step_that_prints(said), [shown(values, 10 + k)], handle))
    finish(handles[1])
    for _ in range(5):
        await asyncio.sleep(0)
    assert (said, values.asked) == ([], [[11]])
    finish(handles[0])
    await asyncio.gather(*tasks)
    assert said == [10, 11]


async def test_a_step_that_failed_prints_nothing_and_holds_up_nobody():
    said, values = [], Values()
    printer, failed, well = Printer(values), StepHandle(step_id(0), 0, [0]), StepHandle(step_id(1), 0, [0])
    first = printer.start(step_that_prints(said), [shown(values, 10)], failed)
    second = printer.start(step_that_prints(said), [shown(values, 11)], well)
    failed.fail(StepAbortedError("gone"))
    finish(well)
    await asyncio.gather(first, second)
    assert (said, values.asked) == ([11], [[11]])


# ---------------------------------------------------------------- steps that were left


class Loop:
    """Takes timers, and fires none by itself."""

    def __init__(self):
        self.timers = []

    def is_closed(self) -> bool:
        return False

    def call_later(self, delay_s, callback, *args):
        timer = SimpleNamespace(delay_s=delay_s, fire=lambda: callback(*args), is_cancelled=False)
        timer.cancel = lambda: setattr(timer, "is_cancelled", True)
        self.timers.append(timer)
        return timer


async def begun(line: AbandonedSteps, loop: Loop, name: str, number: int | None = None):
    entry = line.begin(name)
    entry.loop = loop
    if number is not None:
        entry.sent(StepHandle(step_id(number), 0, [0]))
    return entry


async def test_the_first_step_behind_one_that_was_left_is_told_once_when_it_has_waited_long():
    told, loop = [], Loop()
    line = AbandonedSteps(lambda handle, name: told.append((handle.step, name)))
    left = await begun(line, loop, "left", 0)
    waits = await begun(line, loop, "waits", 1)
    await begun(line, loop, "later", 2)
    assert loop.timers == []
    line.mark_abandoned(left.handle)
    (timer,) = loop.timers
    assert timer.delay_s == PATIENCE_S
    timer.fire()
    line.remove(waits)
    assert told == [(step_id(0), "waits")]
    assert len(loop.timers) == 1


async def test_nobody_is_timed_behind_a_step_whose_caller_waits():
    loop = Loop()
    line = AbandonedSteps(lambda handle, name: None)
    await begun(line, loop, "a", 0)
    await begun(line, loop, "b", 1)
    assert loop.timers == []


async def test_when_the_step_that_waits_is_given_up_the_next_one_is_timed_instead():
    told, loop = [], Loop()
    line = AbandonedSteps(lambda handle, name: told.append(name))
    left = await begun(line, loop, "left", 0)
    line.mark_abandoned(left.handle)
    with pytest.raises(ValueError), await begun(line, loop, "gives up"):
        await begun(line, loop, "next")
        raise ValueError("not sent")
    assert [timer.is_cancelled for timer in loop.timers] == [True, False]
    loop.timers[1].fire()
    assert told == ["next"]


async def test_a_step_that_has_ended_holds_up_nobody():
    loop = Loop()
    line = AbandonedSteps(lambda handle, name: None)
    left = await begun(line, loop, "left", 0)
    await begun(line, loop, "waits")
    line.mark_abandoned(left.handle)
    finish(left.handle)
    assert [timer.is_cancelled for timer in loop.timers] == [True]
    await begun(line, loop, "another")
    assert len(loop.timers) == 1
