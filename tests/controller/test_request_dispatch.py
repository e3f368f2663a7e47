"""Direct tests of how requests are sent, remembered and sent again, and how replies come home. No JAX."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sent_steps import STATS, sent_step

from jaxpp_async.controller.recovery import FailureFound, MeshStarted, Recovery, Resume
from jaxpp_async.controller.request_history import OutgoingRequest
from jaxpp_async.controller.requests import ActorLink, FreeList, PendingRequest, Requests
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorDiedError, ProtocolError, RemoteError, StepAbortedError
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import ActorInfo, Topology
from jaxpp_async.protocol.codec import Encoder
from tests.controller.test_recovery import carry_out


class FakeConnection:
    """Takes note of what is sent over it."""

    on_message: Any = None
    on_closed: Any = None

    def __init__(self) -> None:
        self.sent: dict[int, Any] = {}

    def send(self, message: Any, number: int) -> None:
        self.sent[number] = message

    async def drain(self) -> None: ...


class Mesh:
    """Two actors that answer when told to, and the controller's requests to them.

    Args:
        max_restarts: with 0, no request is remembered.
        max_frame_bytes: of the longest request.
    """

    def __init__(self, max_restarts: int = 9, max_frame_bytes: int = 1 << 20) -> None:
        self.failures: list[Any] = []
        self.links = {actor: self.link(actor) for actor in range(2)}
        self.recovery = Recovery(Topology(2), max_restarts=max_restarts, replica_every=10)
        self.recovery.handle(MeshStarted(), 0.0)
        self.requests = Requests(self.links, self.recovery, lambda: None, max_frame_bytes)
        self.num_steps = 0

    def link(self, actor: int) -> ActorLink:
        info = ActorInfo(actor, "here", 1, (), "ready")
        link = ActorLink(info, SimpleNamespace(), FakeConnection())  # type: ignore[arg-type]
        link.listen(lambda link, failed: self.failures.append(failed), lambda link, error: None)
        return link

    def step(self) -> SubmittedStep:
        step = sent_step(m.step_id(self.num_steps), (0, 1))
        message = m.Step(self.recovery.epoch, step.id, 0, {}, {})
        self.requests.post(*(OutgoingRequest(actor, message, step) for actor in self.links))
        self.num_steps += 1
        return step

    def answer(self, reply: m.Message, actor: int = 0, number: int | None = None) -> None:
        """Answer a request of an actor: the oldest that has no answer, if no number is given."""
        link: Any = self.links[actor]
        link.connection.on_message(reply, min(link.open, default=None) if number is None else number)

    def finish(self, step: SubmittedStep, stats: m.StepStats = STATS) -> None:
        for actor in self.links:
            self.answer(m.StepDone(step.id, stats), actor)

    def asked(self, actor: int = 0) -> list[Any]:
        """The requests of an actor that have no answer, in order."""
        return [request.message for _, request in sorted(self.links[actor].open.items())]

    def restart(self) -> int:
        """Let a restart happen, and return how many finished steps run again."""
        commands = self.recovery.handle(FailureFound(ActorDiedError("lost", actor=1)), 0.0)
        self.requests.hold_back()
        (resume,) = carry_out(self.recovery, commands)
        assert isinstance(resume, Resume)
        return self.requests.resume(resume.requests, self.recovery.epoch)


# ---------------------------------------------------------------- replies


async def test_a_reply_ends_the_request_with_its_number():
    mesh = Mesh()
    first, second = mesh.requests.send(0, m.Inspect()), mesh.requests.send(0, m.Report())
    mesh.answer(m.Reported(None, now_s=1.0), number=1)
    mesh.answer(m.Inspected({"a": 1}), number=0)
    assert ((await first).numbers, (await second).now_s) == ({"a": 1}, 1.0)
    assert mesh.links[0].open == {} and mesh.failures == []


async def test_each_request_gets_the_next_number_also_when_it_is_sent_again():
    mesh = Mesh()
    request = OutgoingRequest(0, m.Inspect(), PendingRequest())
    encoded = Encoder(100).encode_message(request.message)
    for each in (None, encoded, None):
        mesh.links[0].send(request, each)
    sent: Any = mesh.links[0].connection
    assert sent.sent == {0: m.Inspect(), 1: encoded, 2: m.Inspect()}


async def test_a_failure_of_one_request_is_its_own_and_that_of_a_step_concerns_the_mesh():
    mesh = Mesh()
    question = mesh.requests.send(0, m.Inspect())
    mesh.answer(m.Failed("builtins.ValueError", "no", ""))
    with pytest.raises(RemoteError, match="ValueError: no"):
        await question
    step, failed = mesh.step(), m.Failed("builtins.ValueError", "no", "")
    mesh.answer(failed)
    assert mesh.failures == [failed] and not step.done
    consequence = m.Failed("jaxpp_async.errors.TransferError", "link lost", "")
    question = mesh.requests.send(1, m.Fetch((), ()))
    mesh.answer(consequence, 1, number=1)
    assert mesh.failures == [failed, consequence] and not question.done  # a restart may make it again
    own = m.Failed("builtins.MemoryError", "", "")
    mesh.links[0].connection.on_message(own, None)  # type: ignore[misc]
    assert mesh.failures[-1] is own


async def test_a_wrong_reply_fails_its_request_and_one_to_a_step_breaks_the_protocol():
    mesh = Mesh()
    question = mesh.requests.send(0, m.Inspect())
    mesh.answer(m.Done())
    with pytest.raises(ProtocolError, match="answered Inspect with Done, expected Inspected"):
        await question
    mesh.step()
    for reply in (m.Done(), m.StepDone(m.step_id(8), STATS)):
        mesh.answer(reply, number=1)
        assert isinstance(mesh.failures.pop(), ProtocolError)
    for number in (None, 77, -1):
        mesh.links[0].connection.on_message(m.Done(), number)  # type: ignore[misc]
        assert f"answered request {number}, which nobody made" in str(mesh.failures.pop())


async def test_late_replies_to_what_a_restart_has_made_again_are_ignored():
    mesh = Mesh()
    question = mesh.requests.send(0, m.Fetch((), ()))
    mesh.restart()
    for late in (m.Fetched(()), m.Failed("builtins.ValueError", "no", "")):
        mesh.answer(late, number=0)
    assert not question.done and mesh.failures == []
    mesh.answer(m.Fetched(()), number=1)
    assert await question == m.Fetched(())


# ---------------------------------------------------------------- restarts


async def test_what_changes_an_actor_is_made_again_and_questions_only_without_an_answer():
    mesh = Mesh()
    mesh.requests.send(0, m.Store((), (1,)))
    mesh.answer(m.Done())
    ran = mesh.step()
    mesh.finish(ran)
    mesh.requests.send(0, m.Inspect())
    mesh.answer(m.Inspected({}))
    open_question, open_step = mesh.requests.send(0, m.Inspect()), mesh.step()
    assert mesh.restart() == 1
    assert [type(message).__name__ for message in mesh.asked()] == ["Store", "Step", "Inspect", "Step"]
    assert [message.epoch for message in mesh.asked() if isinstance(message, m.Step)] == [1, 1]
    assert not open_question.done and open_step.waits_for(0) and open_step.waits_for(1)
    mesh.answer(m.Done())  # nobody waits for these any more
    mesh.finish(ran, m.StepStats(9.0, 9.0, 9.0, 9, 9))
    assert ran.stats() == [STATS, STATS]
    mesh.answer(m.Inspected({"a": 1}))
    assert (await open_question).numbers == {"a": 1}


async def test_requests_that_are_not_repeated_are_sent_in_a_restart_and_others_wait():
    mesh = Mesh()
    mesh.step()
    mesh.recovery.handle(FailureFound(ActorDiedError("lost", actor=1)), 0.0)
    mesh.requests.hold_back()
    mesh.requests.send(0, m.Abort(1, "lost"))
    waiting = mesh.requests.send(0, m.Store((), (7,)))
    mesh.requests.send(0, m.Store((), (8,)), in_restart=True)
    assert mesh.asked() == [m.Abort(1, "lost"), m.Store((), (8,))]
    assert [request.message for request in mesh.recovery.history.needed()][-1] == m.Store((), (7,))
    assert not waiting.done


async def test_a_request_that_a_restart_does_not_make_again_fails_when_it_begins():
    mesh = Mesh()
    report, load = mesh.requests.send(0, m.Report()), mesh.requests.send(1, m.Store((), ()), in_restart=True)
    repeated = mesh.requests.send(0, m.Inspect())
    mesh.restart()
    for waiter in (report, load):
        with pytest.raises(StepAbortedError, match=r"was not answered by actor . .* before a restart began"):
            await waiter
    assert not repeated.done


async def test_a_step_that_one_actor_has_finished_is_run_by_all():
    mesh = Mesh()
    step = mesh.step()
    mesh.answer(m.StepDone(step.id, STATS))
    assert not step.waits_for(0)
    mesh.restart()
    assert step.waits_for(0) and len(mesh.asked(1)) == 1
    mesh.finish(step)
    assert set(await step) == {0, 1}


async def test_without_restarts_nothing_is_remembered():
    mesh = Mesh(max_restarts=0)
    mesh.step()
    assert len(mesh.recovery.history) == 0


@pytest.mark.parametrize("max_restarts", [0, 1])
async def test_the_end_reaches_everyone_once(max_restarts):
    mesh = Mesh(max_restarts)
    report, question, first, second = (
        mesh.requests.send(0, m.Report()), mesh.requests.send(0, m.Inspect()), mesh.step(), mesh.step()
    )  # fmt: skip
    assert mesh.requests.fail_all(ActorDiedError("gone", step=0), first.id)
    for waiter, kind in (
        (report, ActorDiedError), (question, ActorDiedError), (first, ActorDiedError),
        (second, StepAbortedError),
    ):  # fmt: skip
        with pytest.raises(kind):
            await waiter
    assert not mesh.requests.fail_all(ActorDiedError("gone"), None)


async def test_an_error_that_nobody_awaits_is_not_seen():
    mesh = Mesh()
    mesh.requests.send(0, m.Inspect(), awaited=False)
    assert not mesh.requests.fail_all(ActorDiedError("gone"), None)
    pending = PendingRequest()
    pending.fail(ActorDiedError("gone"))
    assert pending.is_refused and not pending.error_is_seen


# ---------------------------------------------------------------- frees


def test_what_is_to_be_freed_is_taken_once_by_actor_and_in_order():
    frees = FreeList()
    for actor, array_id in [(1, 10), (0, 5), (1, 8)]:
        frees.add(actor, array_id)
    assert frees.take() == {1: (10, 8), 0: (5,)}
    assert frees.take() == {}


def test_what_no_request_took_along_is_freed_later():
    frees = FreeList()
    frees.add(0, 1)
    frees.add(0, 2)
    taken = frees.take()
    frees.add(0, 3)
    frees.give_back(taken)
    assert frees.take() == {0: (3, 1, 2)}
