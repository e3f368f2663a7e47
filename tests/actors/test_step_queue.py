"""Direct tests of the order in which an actor runs its steps, and of the one reply that each request gets."""

from __future__ import annotations

import asyncio

import pytest

from jaxpp_async.actors.process_group import DroppedStep
from jaxpp_async.actors.step_queue import StepQueue
from jaxpp_async.actors.step_run import StepFailure
from jaxpp_async.errors import ProtocolError, StepAbortedError
from jaxpp_async.protocol import messages as m

STATS = m.StepStats(0.0, 0.0, 0.0, 0, 0, b"")
PROGRAM, CAUSE = "the loaded program", StepAbortedError("aborted: actor 1 died")


class FakeRun:
    """A step that the test ends.

    Args:
        ends_at_once: whether it has ended when `start` returns.
    """

    begun, ended = 0, False

    def __init__(self, message, on_end, log, *, ends_at_once=False):
        self.message, self.program = message, PROGRAM
        self._on_end, self._log, self._ends_at_once = on_end, log, ends_at_once

    def start(self) -> None:
        self._log.append(m.step_number(self.message.step))
        if self._ends_at_once:
            self.finish()

    def finish(self) -> None:
        if not self.ended:
            self.ended = True
            self._on_end(self, None)

    def fail(self, error: BaseException) -> None:
        if not self.ended:
            self.ended = True
            self._on_end(self, StepFailure(error, 'run "f"'))


class Steps:
    """A queue, with the steps that it has prepared.

    Attributes:
        started: numbers of the steps that have begun, in order.
        replies, numbers: what was sent, and the number of the request that it answers.
        at_once: numbers of steps that end within `start`.
        cannot_prepare, cannot_turn: the error of a step by its number, when it is prepared or has its turn.
        completed: numbers of the steps that have finished, in order.
    """

    def __init__(self):
        self.started, self.replies, self.numbers, self.runs = [], [], [], {}
        self.at_once, self.cannot_prepare, self.cannot_turn = set(), {}, {}
        self.completed = []
        self.queue = StepQueue(
            7,
            {0: PROGRAM},
            prepare=self._prepare,
            on_turn=self._on_turn,
            complete=self._complete,
            send=self._send,
        )

    def _send(self, reply, number):
        self.replies.append(reply)
        self.numbers.append(number)

    def _prepare(self, message, on_end):
        k = m.step_number(message.step)
        if k in self.cannot_prepare:
            raise self.cannot_prepare[k]
        self.runs[k] = FakeRun(message, on_end, self.started, ends_at_once=k in self.at_once)
        return self.runs[k]

    def _on_turn(self, run):
        if m.step_number(run.message.step) in self.cannot_turn:
            raise self.cannot_turn[m.step_number(run.message.step)]

    def _complete(self, run):
        self.completed.append(m.step_number(run.message.step))
        return m.StepDone(run.message.step, STATS)

    def request(self, number: int, step: int, *, epoch: int = 0, program_id: int = 0, frees_after=()) -> None:
        message = m.Step(epoch, m.step_id(step), program_id, {}, {}, frees_after=frees_after)
        self.queue.request(message, number)

    @property
    def answers(self) -> list[tuple[int | None, str]]:
        """Number and outcome of each request that has its reply: `"done"`, or the text of the failure."""
        outcomes = ["done" if isinstance(r, m.StepDone) else r.message for r in self.replies]
        return list(zip(self.numbers, outcomes, strict=True))


async def settle() -> None:
    """Let everything run that the queue has scheduled on the loop."""
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.fixture
def steps() -> Steps:
    return Steps()


# ---------------------------------------------------------------- order


async def test_steps_run_one_after_the_other_in_the_order_of_their_requests(steps):
    for k in range(3):
        steps.request(k, step=10 + k)
    assert steps.started == [10]
    for k in range(3):
        assert steps.queue.current is steps.runs[10 + k]
        steps.runs[10 + k].finish()
        assert steps.queue.current is None
        await settle()
    assert steps.started == steps.completed == [10, 11, 12]
    assert steps.answers == [(0, "done"), (1, "done"), (2, "done")]


async def test_steps_that_end_within_their_start_do_not_keep_the_next_one_from_starting(steps):
    steps.at_once = {1, 2}
    for k in range(4):
        steps.request(k, step=k)
    steps.runs[0].finish()
    await settle()
    assert steps.started == [0, 1, 2, 3]
    assert steps.queue.current is steps.runs[3]
    assert [request for request, _ in steps.answers] == [0, 1, 2]


async def test_the_next_step_starts_only_once_the_loop_is_free_again(steps):
    steps.request(0, step=0)
    steps.request(1, step=1)
    steps.runs[0].finish()
    assert (steps.answers, steps.started) == ([(0, "done")], [0])
    await settle()
    assert steps.started == [0, 1]


async def test_arrays_that_steps_free_at_their_end_are_listed_until_then(steps):
    steps.request(0, step=0, frees_after=(1, 2))
    steps.request(1, step=1, frees_after=(3,))
    assert steps.queue.arrays_to_free() == {1, 2, 3}
    steps.runs[0].finish()
    assert steps.queue.arrays_to_free() == {3}


# ---------------------------------------------------------------- refused and failed steps


async def test_a_step_of_another_epoch_is_refused(steps):
    with pytest.raises(ProtocolError, match=r"^step 0 is of epoch 3, the actor is in 0") as caught:
        steps.request(0, step=0, epoch=3)
    assert (caught.value.actor, caught.value.step) == (7, 0)
    assert (steps.answers, steps.runs) == ([], {})


@pytest.mark.parametrize("step", [3, 2])
async def test_a_step_that_is_not_newer_than_the_last_of_its_epoch_is_refused(steps, step):
    steps.at_once = {3}
    steps.request(0, step=3)
    with pytest.raises(ProtocolError, match=rf"^step {step} was requested after step 3 in the same epoch"):
        steps.request(1, step=step)
    assert (steps.answers, steps.started) == ([(0, "done")], [3])


async def test_a_step_that_is_refused_or_fails_to_start_cannot_come_again(steps):
    steps.cannot_prepare[0] = ValueError("no such array")
    steps.request(0, step=0)
    with pytest.raises(ProtocolError, match="in the same epoch"):
        steps.request(1, step=0)
    assert steps.answers == [(0, "no such array")]


async def test_a_step_that_cannot_be_prepared_fails_alone(steps):
    steps.cannot_prepare[0] = ValueError("no such array")
    steps.request(0, step=0)
    steps.request(1, step=1)
    steps.runs[1].finish()
    assert steps.answers == [(0, "no such array"), (1, "done")]
    assert steps.replies[0].step == m.step_id(0)
    assert steps.replies[0].exception_type == "ValueError"


async def test_after_a_failed_step_nothing_runs_and_later_requests_are_refused(steps):
    for k in range(2):
        steps.request(k, step=k)
    steps.runs[0].fail(RuntimeError("no memory"))
    await settle()
    assert steps.started == [0]
    assert steps.answers == [(0, "no memory")]
    assert (steps.replies[0].step, steps.replies[0].instruction) == (m.step_id(0), 'run "f"')
    with pytest.raises(StepAbortedError, match=r"^not started: step 0 failed on actor 7") as caught:
        steps.request(2, step=2)
    assert (caught.value.actor, caught.value.step) == (7, 2)
    assert 2 not in steps.runs


async def test_a_step_whose_transfers_cannot_begin_fails_before_it_starts(steps):
    steps.cannot_turn[0] = RuntimeError("no link")
    steps.request(0, step=0)
    with pytest.raises(StepAbortedError, match=r"^not started: step 0 failed on actor 7"):
        steps.request(1, step=1)
    assert (steps.started, steps.queue.current) == ([], None)
    assert steps.answers == [(0, "no link")]


async def test_a_step_that_fails_while_it_waits_leaves_the_one_under_way(steps):
    steps.request(0, step=0)
    steps.request(1, step=1)
    steps.runs[1].fail(RuntimeError("no memory"))
    assert steps.queue.current is steps.runs[0]
    steps.runs[0].finish()
    assert steps.answers == [(1, "no memory"), (0, "done")]


# ---------------------------------------------------------------- abort, and the next epoch


async def test_an_abort_fails_the_step_under_way_and_those_that_wait(steps):
    for k in range(3):
        steps.request(k, step=k)
    steps.runs[0].begun = 4
    dropped = steps.queue.abort(CAUSE, epoch=1)
    assert dropped == [DroppedStep(PROGRAM, 4), DroppedStep(PROGRAM, 0), DroppedStep(PROGRAM, 0)]
    await settle()
    assert steps.started == [0]
    assert steps.answers == [(k, "aborted: actor 1 died") for k in range(3)]
    assert (steps.queue.current, steps.queue.arrays_to_free()) == (None, set())
    steps.queue.resume()
    steps.request(3, step=3, epoch=1)
    assert steps.started == [0, 3]


async def test_steps_that_will_not_finish_are_listed_from_the_failed_one_to_the_refused(steps):
    steps.request(0, step=0)
    steps.request(1, step=1)
    steps.runs[0].begun = 2
    steps.runs[0].fail(RuntimeError("no memory"))
    for request, program_id in (
        (2, 0),
        (3, 99),
    ):  # the actor does not have program 99: it has no tasks to skip
        with pytest.raises(StepAbortedError):
            steps.request(request, step=request, program_id=program_id)
    dropped = steps.queue.abort(CAUSE, epoch=1)
    assert [step.begun for step in dropped] == [2, 0, 0]  # failed, waiting, refused
    assert {step.program for step in dropped} == {PROGRAM}
    assert steps.answers == [(0, "no memory"), (1, "aborted: actor 1 died")]


async def test_between_an_abort_and_the_next_epoch_steps_are_refused(steps):
    steps.request(0, step=0)
    steps.queue.abort(CAUSE, epoch=1)
    with pytest.raises(StepAbortedError, match=r"^not started: aborted: actor 1 died"):
        steps.request(0, step=0, epoch=1)
    with pytest.raises(ProtocolError, match=r"^step 1 is of epoch 0, the actor is in 1"):
        steps.request(1, step=1)
    assert steps.queue.abort(CAUSE, epoch=2) == [DroppedStep(PROGRAM, 0)]


async def test_the_next_epoch_counts_its_steps_anew_and_owes_nothing_to_the_last(steps):
    steps.request(0, step=5)
    steps.runs[5].fail(RuntimeError("no memory"))
    steps.queue.abort(CAUSE, epoch=1)
    steps.queue.resume()
    steps.request(1, step=5, epoch=1)
    steps.runs[5].finish()
    assert steps.answers == [(0, "no memory"), (1, "done")]
    assert steps.started == [5, 5]
    assert steps.queue.abort(CAUSE, epoch=2) == []


async def test_closing_drops_every_step_without_a_reply(steps):
    steps.request(0, step=0)
    steps.request(1, step=1)
    steps.queue.close()
    assert steps.runs[0].ended
    steps.runs[0].finish()  # late
    await settle()
    assert (steps.answers, steps.started) == ([], [0])
