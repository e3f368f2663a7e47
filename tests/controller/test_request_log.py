"""Direct tests of which requests are remembered, and which are sent again, in which order. No JAX."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpp_async.controller.error_messages import ActorInfo
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import PendingRequest, RequestLog, SentRequest, StepHandle
from jaxpp_async.errors import ActorDiedError, StepAbortedError
from jaxpp_async.protocol import messages as m

STATS = m.StepStats(0.0, 0.0, 0.0, 0, 0)


class Link:
    """Takes note of what it is asked, and answers when told to."""

    def __init__(self, actor: int) -> None:
        self.info = ActorInfo(actor, "here", 1, (), "ready")
        self.asked: list[Any] = []
        self.reply_handlers: dict[int, Any] = {}

    def request(self, message: Any, reply_handler: Any, encoded: Any = None) -> None:
        self.asked.append(message)
        self.reply_handlers[max(self.reply_handlers, default=-1) + 1] = reply_handler

    def drop_reply_handlers(self) -> None:
        self.reply_handlers.clear()
        self.asked.clear()

    def answer(self, reply: Any = m.Done()) -> None:  # noqa: B008
        """Answer the oldest request that has no answer."""
        self.reply_handlers.pop(min(self.reply_handlers)).on_reply(self, reply)


class Requests:
    """A log of requests over two links, which posts one request of each kind."""

    def __init__(self, *, remembers: bool = True) -> None:
        self.links = {0: Link(0), 1: Link(1)}
        self.request_log = RequestLog(
            self.links, lambda: None, ControllerOptions(max_restarts=int(remembers))
        )
        self.num_steps = 0

    def post(self, kind: type, *fields: Any, actor: int = 0, reply: type = m.Done) -> PendingRequest:
        call = PendingRequest(reply)
        self.request_log.post(SentRequest(actor, kind(*fields), call))
        return call

    def step(self) -> StepHandle:
        handle = StepHandle(self.num_steps, 0, (0, 1))
        for actor in handle._processes:
            self.request_log.post(SentRequest(actor, m.Step(0, self.num_steps, 0, {}, {}), handle))
        self.num_steps += 1
        return handle

    def finish(self, step: int) -> None:
        for link in self.links.values():
            link.answer(m.StepDone(step, STATS))

    def again(self, epoch: int = 1) -> list[str]:
        """What actor 0 is asked after a restart."""
        self.request_log.hold_back()
        self.request_log.replay(epoch)
        return [type(message).__name__ for message in self.links[0].asked]


async def test_what_changes_an_actor_is_made_again_and_questions_only_without_an_answer():
    requests = Requests()
    requests.post(m.Store, (), (1,))
    requests.links[0].answer()
    ran = requests.step()
    requests.finish(0)
    heard_s = dict(ran.heard_s)
    requests.post(m.Inspect, reply=m.Inspected)
    requests.links[0].answer(m.Inspected({}))
    open_question, open_step = requests.post(m.Inspect, reply=m.Inspected), requests.step()
    assert requests.again() == ["Store", "Step", "Inspect", "Step"]
    assert [message.epoch for message in requests.links[0].asked if isinstance(message, m.Step)] == [1, 1]
    assert not open_question.done and open_step.waits_for(0) and open_step.waits_for(1)
    requests.links[0].answer()  # nobody waits for these any more
    requests.finish(0)
    assert ran.heard_s == heard_s
    requests.links[0].answer(m.Inspected({"a": 1}))
    assert (await open_question.future).numbers == {"a": 1}


async def test_what_is_asked_meanwhile_goes_behind_what_is_made_again():
    requests = Requests()
    requests.step()
    requests.request_log.hold_back()
    requests.post(m.Store, (), (7,))
    assert requests.links[0].asked == []
    assert requests.request_log.replay(1) == 0  # the step had not been run
    assert [type(message).__name__ for message in requests.links[0].asked] == ["Step", "Store"]


async def test_a_step_that_one_actor_has_finished_is_run_by_all():
    requests = Requests()
    handle = requests.step()
    requests.links[0].answer(m.StepDone(0, STATS))
    assert not handle.waits_for(0)
    requests.again()
    assert handle.waits_for(0) and len(requests.links[1].asked) == 1
    requests.finish(0)
    assert set(await handle) == {0, 1}


async def test_nothing_before_a_copy_is_needed():
    requests = Requests()
    requests.step()
    requests.finish(0)
    mark = requests.request_log.new_mark()
    requests.step()
    assert requests.request_log.unanswered(mark) == ()
    assert len(requests.request_log.unanswered(requests.request_log.new_mark())) == 2
    requests.request_log.forget_before(mark)
    assert requests.again() == ["Step"]
    assert requests.links[0].asked[0].step == 1
    requests.request_log.forget_before(mark)  # of before the restart: what was made again lies behind it
    assert requests.again() == ["Step"]


async def test_arrays_that_a_save_has_taken_are_taken_again_until_it_is_over():
    requests = Requests()
    for _ in range(2):  # the second save goes to the folder of the first
        requests.post(m.BeginSnapshot, b"/folder", (1,))
        assert requests.request_log.has_snapshot
        requests.links[0].answer()
        requests.post(m.Sweep, b"/folder")
        assert requests.request_log.has_snapshot
        requests.links[0].answer()
        assert not requests.request_log.has_snapshot
    requests.post(m.BeginSnapshot, b"/folder", (1,))
    requests.links[0].answer()
    assert requests.again() == ["BeginSnapshot"]


async def test_files_are_needed_until_a_copy_has_what_was_read():
    requests = Requests()
    requests.post(m.ReadFile, b"/file", ())
    requests.links[0].answer()
    mark = requests.request_log.new_mark()
    assert requests.request_log.needs_files
    requests.request_log.forget_before(mark)
    assert not requests.request_log.needs_files


async def test_what_an_actor_refused_is_not_made_again():
    requests = Requests()
    requests.post(m.Store, (), (1,)).fail(ActorDiedError("refused"))
    requests.step()
    assert requests.again() == ["Step"]


async def test_answered_questions_do_not_pile_up():
    requests = Requests()
    for _ in range(2000):
        requests.post(m.Inspect, reply=m.Inspected)
        requests.links[0].answer(m.Inspected({}))
    assert len(requests.request_log._sent) < 600
    forgetful = Requests(remembers=False)
    forgetful.step()
    assert forgetful.request_log._sent == []


@pytest.mark.parametrize("remembers", [True, False])
async def test_the_end_reaches_everyone_once(remembers):
    requests = Requests(remembers=remembers)
    question, first, second = requests.post(m.Inspect), requests.step(), requests.step()
    if remembers:
        requests.request_log.hold_back()  # also in the middle of a restart
    assert requests.request_log.fail_all(ActorDiedError("gone", step=0), 0)
    for reply_handler, kind in (
        (question, ActorDiedError),
        (first, ActorDiedError),
        (second, StepAbortedError),
    ):
        with pytest.raises(kind):
            await reply_handler
    assert not requests.request_log.fail_all(ActorDiedError("gone"), None)
