"""Direct tests of where one actor's time went, and of why a step took as long as it did."""

from __future__ import annotations

import pytest

from jaxpp_async.timeline.breakdown import (
    StepBreakdown,
    StepReplay,
    TimeShares,
    break_down_step,
    divide_time,
)
from jaxpp_async.timeline.events import ActorTimeline, TimelineEvent, TimelineTransfer


def event(actor, instruction, kind, start_s, end_s, *needs, peer=None, tag=None) -> TimelineEvent:
    return TimelineEvent(actor, instruction, kind, "", start_s, end_s, peer=peer, tag=tag, needs=needs)


SENT = event(0, 1, "send", 2, 3, 0, peer=1, tag=0)
CAME = event(1, 0, "recv", 1, 5, peer=0, tag=0)
FIRST = ActorTimeline(0, (event(0, 0, "run", 0, 2), SENT))
SECOND = ActorTimeline(1, (CAME, event(1, 1, "run", 6, 8, 0)))
WAY = TimelineTransfer(SENT, CAME)


def test_time_before_a_task_is_waiting_until_its_data_was_sent_then_a_transfer_then_dispatch():
    expected = TimeShares(1, compute_s=2, wait_s=1, transfer_s=3, dispatch_s=1, idle_s=1)
    assert divide_time(SECOND, {0: WAY}, span_s=8) == expected


def test_after_the_last_task_transfers_count_and_the_rest_is_idle():
    expected = TimeShares(0, compute_s=2, wait_s=0, transfer_s=1, dispatch_s=0, idle_s=5)
    assert divide_time(FIRST, {}, span_s=8) == expected


def test_data_that_nobody_is_known_to_have_sent_was_waited_for():
    found = divide_time(SECOND, {}, span_s=8)
    assert (found.wait_s, found.transfer_s, found.duration_s) == (4, 0, 8)


def test_tasks_that_overlap_count_once():
    both = ActorTimeline(0, (event(0, 0, "run", 0, 4), event(0, 1, "run", 3, 5)))
    assert divide_time(both, {}, span_s=5).compute_s == 5


def test_a_breakdown_takes_a_step_apart_by_its_causes():
    assert break_down_step([FIRST, SECOND], [WAY], duration_s=10) == StepBreakdown(
        queue_s=0, compute_s=2, imbalance_s=0, schedule_s=2, transfer_s=3, start_s=0, dispatch_s=1, reply_s=2
    )


def test_an_actor_that_began_late_is_an_item_of_its_own():
    late = ActorTimeline(1, (event(1, 0, "run", 4, 5),))
    found = break_down_step([FIRST, late], [], duration_s=5)
    assert (found.start_s, found.dispatch_s, found.bound_s) == (3, 0, 2)


def test_of_a_step_in_which_nothing_happened_nothing_is_lost():
    found = break_down_step([ActorTimeline(0, ())], [], duration_s=3)
    assert (found.total_s, found.reply_s, found.efficiency) == (3, 3, 1.0)


def test_the_critical_path_goes_through_transfers_if_they_are_to_take_time():
    assert StepReplay([FIRST, SECOND], [WAY]).length_s() == 4
    assert StepReplay([FIRST, SECOND], [WAY]).length_s(moves=True) == 7


def test_tasks_that_wait_for_each_other_are_not_of_one_step():
    back = event(1, 2, "send", 8, 9, 1, peer=0, tag=1)
    came_back = event(0, 2, "recv", 0, 1, peer=1, tag=1)
    circle = ActorTimeline(0, (event(0, 0, "run", 0, 2, 2), SENT, came_back))
    with pytest.raises(ValueError, match=r"^tasks wait for each other in a circle$"):
        StepReplay(
            [circle, ActorTimeline(1, (*SECOND.events, back))], [WAY, TimelineTransfer(back, came_back)]
        ).length_s()
