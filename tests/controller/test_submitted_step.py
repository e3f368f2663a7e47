"""Direct tests of one step on the controller, from its call to its timeline, and of who waits behind it."""

from __future__ import annotations

import asyncio
import struct
import weakref

import pytest
from sent_steps import STATS, answer, link, sent_step

from jaxpp_async.controller.submitted_step import PATIENCE_S, SubmittedStep, UnfinishedSteps
from jaxpp_async.errors import MeshError, ProtocolError, StepAbortedError
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Run, Send
from jaxpp_async.protocol.clocks import Clock, Reading
from jaxpp_async.protocol.messages import StepDone, StepStats, step_id

STEP = step_id(7)

ONE_TASK = ActorProgram(0, (Run("f", 0, (), (0,)),), (Aval((), "float32"),))

# ---------------------------------------------------------------- replies


async def test_a_step_is_done_once_each_of_its_processes_has_answered():
    step = sent_step(STEP, [0, 1])
    answer(step, 0)
    assert (step.done, step.waits_for(0), step.waits_for(1)) == (False, False, True)
    answer(step, 1)
    assert step.done
    assert await step == {0: STATS, 1: STATS}


async def test_the_first_process_speaks_for_its_actor():
    step, other = sent_step(STEP, [2, 3]), StepStats(9.0, 9.0, 9.0, 9, 9)
    answer(step, 1, rank=0, size=2)
    answer(step, 1, other, rank=1, size=2)
    assert step.result() == {1: STATS}


async def test_the_end_of_another_step_is_refused():
    with pytest.raises(ProtocolError) as caught:
        sent_step(STEP).on_reply(link(0), StepDone(step_id(6), STATS))
    assert str(caught.value) == "actor 0 (host host, pid 1) answered step 7 with the end of step 6"
    assert caught.value.actor == 0


async def test_a_failed_step_raises_its_error_at_every_await_and_stays_as_it_failed():
    step, error = sent_step(STEP), StepAbortedError("ended")
    step.fail(error)
    step.fail(StepAbortedError("later"))
    for _ in range(2):
        with pytest.raises(StepAbortedError, match="ended") as caught:
            await step
        assert caught.value is error
    assert not step.error_is_seen
    answer(step)
    assert step.error is error


async def test_callbacks_come_in_order_at_once_and_one_that_raises_stops_nobody():
    loop, reported, called = asyncio.get_running_loop(), [], []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, said: reported.append((said["message"], str(said["exception"]))))
    try:
        step = sent_step(STEP)

        def broken() -> None:
            raise ValueError("not now")

        for callback in (lambda: called.append("first"), broken, lambda: called.append("last")):
            step.when_done(callback)
        step.finish()
        step.when_done(lambda: called.append("late"))
    finally:
        loop.set_exception_handler(before)
    assert called == ["first", "last", "late"]
    assert reported == [("a callback at the end of step 7 failed", "not now")]


async def test_who_waits_is_woken_and_who_was_cancelled_leaves_the_step_running():
    step = sent_step(STEP)
    gone, stays = asyncio.ensure_future(_await(step)), asyncio.ensure_future(_await(step))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    assert not step.done
    answer(step)
    assert await stays == {0: STATS}
    assert gone.cancelled()


async def test_a_step_that_is_reset_waits_for_all_its_processes_anew():
    step = sent_step(STEP, [0, 1])
    answer(step, 0)
    step.reset()
    assert step.waits_for(0)
    answer(step, 1)
    assert not step.done


async def test_a_step_that_is_withdrawn_has_ended_and_one_that_was_sent_runs_on():
    step, sent, ended = SubmittedStep(0, "train"), sent_step(STEP), []
    step.when_done(lambda: ended.append("withdrawn"))
    step.withdraw()
    step.withdraw()
    sent.withdraw()
    assert (step.done, sent.done, ended) == (True, False, ["withdrawn"])
    with pytest.raises(MeshError, match=r"^step 'train' was not sent$"):
        await step


async def test_waiting_until_values_have_left_ends_with_the_last_of_them_or_with_the_step():
    loop = asyncio.get_running_loop()
    step = sent_step(STEP)
    await step.wait_sent()  # there are none
    step.sends = [loop.create_future(), loop.create_future()]
    sent = asyncio.ensure_future(step.wait_sent())
    await asyncio.sleep(0)
    step.sends[0].set_result(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not sent.done()
    step.sends[1].set_result(None)
    await sent
    step.sends.append(loop.create_future())
    left = asyncio.ensure_future(step.wait_sent())
    await asyncio.sleep(0)
    step.fail(StepAbortedError("ended"))
    await left


async def _await(step: SubmittedStep) -> object:
    return await step


# ---------------------------------------------------------------- timelines

PROGRAMS = {0: ActorProgram(0, (), (Aval((), "int32"),)), 1: ActorProgram(1, (), ())}


async def test_a_step_under_way_and_a_failed_one_have_no_timeline():
    step = sent_step(STEP, programs=PROGRAMS)
    assert step.title == "step 7 ('train')"
    with pytest.raises(MeshError, match=r"^a step has a timeline once it has finished; await it first$"):
        step.timeline()
    step.fail(StepAbortedError("actor 1 died\nand more"))
    with pytest.raises(MeshError, match=r"^step 7 \('train'\) failed, so it has no timeline: actor 1 died$"):
        step.timeline()


async def test_a_timeline_knows_the_step_who_ran_it_and_since_when():
    step = sent_step(STEP, programs=PROGRAMS)
    answer(step, pid=4711)
    timeline = step.timeline()
    assert (timeline.step, timeline.name, timeline.origin_s) == (7, "train", step.sent_s)
    assert timeline.duration_s > 0
    assert [(actor.actor, actor.host, actor.pid) for actor in timeline.actors] == [(0, "host", 4711)]
    assert timeline.clock_error_s == 0.0


async def test_a_step_that_ran_again_has_the_timeline_of_its_last_run():
    step = sent_step(STEP, [0, 1], PROGRAMS)
    first_s = step.sent_s
    answer(step, 0, pid=10)
    step.reset()
    answer(step, 0, pid=20)
    answer(step, 1, pid=21)
    timeline = step.timeline()
    assert timeline.origin_s == step.sent_s > first_s
    assert [actor.pid for actor in timeline.actors] == [20, 21]


async def test_clocks_are_kept_as_they_were_when_the_actor_answered():
    clock = Clock()
    step = sent_step(STEP, programs={0: ONE_TASK}, clock=clock)
    clock.note(Reading(step.sent_s, step.sent_s + 100.0, step.sent_s))
    began_s = step.sent_s + 100.0
    answer(step, 0, StepStats(0, 0, 0, 0, 0, struct.pack("<dd", began_s, began_s)))
    before = step.timeline()
    assert before.events[0].start_s == pytest.approx(0.0, abs=1e-6)
    clock.readings = (Reading(step.sent_s, step.sent_s + 300.0, step.sent_s + 1.0),)
    assert step.timeline() == before


@pytest.mark.parametrize("end", [answer, lambda step: step.fail(StepAbortedError("ended"))])
async def test_a_step_that_has_ended_does_not_keep_the_controller(end):
    class Clocks:
        def clock_of(self, process: int) -> Clock:
            return Clock(is_own=True)

    clocks = Clocks()
    step, gone = SubmittedStep(0, "train"), weakref.ref(clocks)
    step.assign(STEP, [0], PROGRAMS, clocks.clock_of)
    del clocks
    assert gone() is not None
    end(step)
    assert step.done and gone() is None


async def test_statistics_come_in_the_order_of_the_actors_whichever_answers_first():
    step, stats = sent_step(STEP, [0, 1]), [StepStats(k, 0, 0, 0, 0) for k in range(2)]
    with pytest.raises(MeshError, match=r"^a step has stats once it has finished; await it first$"):
        step.stats()
    answer(step, 1, stats[1])
    answer(step, 0, stats[0])
    assert step.stats() == stats


# ---------------------------------------------------------------- steps that were left


class Loop:
    """A loop on which time passes only when a test says so."""

    def __init__(self):
        self.now_s, self.timers = 0.0, []

    def time(self) -> float:
        return self.now_s

    def is_closed(self) -> bool:
        return False

    def call_later(self, delay_s, callback, *args):
        assert delay_s > 0
        self.timers.append((self.now_s + delay_s, callback, args))

    def pass_s(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := [timer for timer in self.timers if timer[0] <= end_s]:
            timer = min(due, key=lambda timer: timer[0])
            self.timers.remove(timer)
            self.now_s, callback, args = timer
            callback(*args)
        self.now_s = end_s


class Line:
    """Steps that wait for each other, by name, and what was told of them and when."""

    def __init__(self, names: str = ""):
        self.loop, self.told, self.steps = Loop(), [], {}
        self.unfinished = UnfinishedSteps(
            lambda ahead, waiting: self.told.append(
                f"{waiting.name} behind {ahead.name}, {self.loop.now_s:g} s"
            )
        )
        self.begin(names)

    def begin(self, names: str) -> None:
        for name in names:
            step = self.steps[name] = SubmittedStep(0, name)
            step.loop, step.begun_s = self.loop, self.loop.time()
            self.unfinished.add(step)

    def act(self, action: str) -> None:
        """`+a`: it is sent; `!a`: its caller goes; `-a`: it ends, or, not yet sent, will not be."""
        step = self.steps[action[1]]
        if action[0] == "+":
            step.assign(step_id(0), [0], {}, lambda process: Clock())
            step.is_sent = True
        elif action[0] == "!":
            self.unfinished.mark_abandoned(step)
        elif step.is_sent:
            answer(step)
        else:
            step.withdraw()


# What happens to the steps a, b and c, in this order; then what is told.
LINES = [
    ("", []),
    ("+a +b +c", []),  # nobody was left
    ("+a !a", ["b behind a"]),  # b waits already, to be sent
    ("+a +b +c !a", ["b behind a"]),
    ("+a !a -b", ["c behind a"]),
    ("+a +b !a !b", ["c behind a", "c behind b"]),
    ("+a +b +c !b", ["c behind b"]),
    ("+a !a -b -c", []),
    ("+a +b !a -a", []),
    ("+a -a !a", []),
]


@pytest.mark.parametrize(("actions", "told"), LINES)
async def test_whose_wait_is_told_once_after_some_seconds(actions, told):
    line = Line("abc")
    for action in actions.split():
        line.act(action)
    line.loop.pass_s(PATIENCE_S - 0.1)
    assert line.told == []
    line.loop.pass_s(100.0)
    assert line.told == [f"{text}, {PATIENCE_S:g} s" for text in told]
    for name, step in line.steps.items():
        if not step.done:
            line.act(f"-{name}")
    line.loop.pass_s(PATIENCE_S)
    assert not line.unfinished._steps and not line.loop.timers


async def test_a_wait_is_timed_from_its_own_beginning():
    line = Line("a")
    line.act("+a")
    line.act("!a")
    line.loop.pass_s(3.0)
    line.begin("b")
    line.loop.pass_s(1.0)
    line.begin("c")
    line.act("-b")  # it is refused, so it has not waited
    line.loop.pass_s(4.9)
    assert line.told == []
    line.loop.pass_s(100.0)
    assert line.told == ["c behind a, 9 s"]


async def test_steps_that_do_not_wait_for_long_are_not_told_of():
    line = Line("a")
    line.act("+a")
    line.act("!a")
    for name in "bcdefghij":  # on other actors, for one
        line.begin(name)
        line.act(f"+{name}")
        line.loop.pass_s(2.0)
        line.act(f"-{name}")
    assert line.told == []


async def test_a_step_that_was_left_when_its_loop_was_closed_needs_no_timer(monkeypatch):
    line = Line("ab")
    line.act("+a")
    monkeypatch.setattr(Loop, "is_closed", lambda self: True)
    line.act("!a")
    assert not line.loop.timers


async def test_sent_bytes_are_those_of_the_programs_sends():
    avals = Aval((4, 2), "float32"), Aval((3,), "float64")
    sends = ActorProgram(0, (Send(0, 1, 0), Send(1, 1, 1), Send(0, 1, 2)), avals)
    assert sent_step(STEP, [0, 1], {0: sends, 1: ActorProgram(1, (), ())}).sent_bytes() == 32 + 24 + 32
