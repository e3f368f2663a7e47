"""Direct tests of which requests are remembered, and which of them a restart makes again. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jaxpp_async.controller.request_history import PRUNE_AFTER, RequestHistory
from jaxpp_async.protocol import messages as m


@dataclass(eq=False)
class Remembered:
    """A request to process 0, unless another is named."""

    message: m.Request
    process: int = 0
    is_answered: bool = False
    is_refused: bool = False
    size_bytes: int = 0
    serial: int = -1


STORE, INSPECT = m.Store((), (1,)), m.Inspect()
STEP = m.Step(0, 0, 0, {}, {})
BEGIN, SWEEP, READ = m.BeginSnapshot(b"/folder", (1,)), m.Sweep(b"/folder"), m.ReadFile(b"/file", ())


def remembered(*requests: Remembered) -> RequestHistory:
    history = RequestHistory()
    for request in requests:
        history.add(request)
    return history


def needed(*requests: Remembered) -> list[m.Request]:
    return [request.message for request in remembered(*requests).needed()]


@pytest.mark.parametrize(
    ("message", "unanswered", "answered", "refused"),
    [
        # whether it is made again if it has no answer, was answered, was refused
        (STORE, True, True, False),
        (STEP, True, True, False),
        (READ, True, True, False),
        (BEGIN, True, True, False),
        (INSPECT, True, False, False),
        (m.Fetch((), ()), True, False, False),
        (m.WriteFile(b"/folder", "f", (), {}), True, False, False),
        (SWEEP, True, False, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_requests_are_made_again(message, unanswered, answered, refused):
    assert bool(needed(Remembered(message))) == unanswered
    assert bool(needed(Remembered(message, is_answered=True))) == answered
    assert bool(needed(Remembered(message, is_answered=True, is_refused=True))) == refused


def test_requests_are_made_again_in_their_order():
    requests = [Remembered(message) for message in (INSPECT, STORE, STEP, INSPECT, STORE)]
    assert needed(*requests) == [INSPECT, STORE, STEP, INSPECT, STORE]


def test_a_save_is_begun_again_until_it_is_over():
    begin, sweep = Remembered(BEGIN, is_answered=True), Remembered(SWEEP)
    history = remembered(begin, sweep)
    assert history.needed() == [begin, sweep] and history.blocks_replicas
    sweep.is_answered = True
    assert history.needed() == [] and not history.blocks_replicas
    again = Remembered(BEGIN, is_answered=True)  # the second save goes to the folder of the first
    history.add(again)
    assert history.needed() == [again] and history.blocks_replicas


@pytest.mark.parametrize("other", [Remembered(m.Sweep(b"/other"), is_answered=True),
                                   Remembered(SWEEP, process=1, is_answered=True)])  # fmt: skip
def test_the_end_of_another_save_ends_none(other):
    begin = Remembered(BEGIN, is_answered=True)
    assert remembered(begin, other).needed() == [begin]


def test_a_save_that_is_over_without_an_answer_to_its_beginning_is_made_again_to_its_end():
    begin, sweep = Remembered(BEGIN), Remembered(SWEEP, is_answered=True)
    assert remembered(begin, sweep).needed() == [begin, sweep]


def test_nothing_from_before_a_whole_replica_is_needed():
    before, after = Remembered(STEP, is_answered=True), Remembered(STEP)
    history = remembered(before)
    mark = history.new_mark()
    history.add(after)
    assert history.unanswered(mark) == [] and history.unanswered(history.new_mark()) == [after]
    history.forget_before(mark)
    assert history.take_again() == [after]
    history.forget_before(mark)  # it is of before the restart: what was made again comes after it
    assert history.needed() == [after]


def test_files_are_needed_until_a_replica_has_what_was_read():
    history = remembered(Remembered(READ, is_answered=True))
    assert history.needs_files
    history.forget_before(history.new_mark())
    assert not history.needs_files


def test_answered_questions_do_not_pile_up():
    history = RequestHistory()
    for _ in range(20 * PRUNE_AFTER):
        history.add(Remembered(INSPECT, is_answered=True))
    assert len(history) <= 2 * PRUNE_AFTER + 1


def test_the_bytes_that_are_kept_alive_are_counted():
    history = remembered(Remembered(STORE, size_bytes=8), Remembered(STEP, size_bytes=4))
    assert history.size_bytes == 12
    history.clear()
    assert (history.size_bytes, len(history)) == (0, 0)
