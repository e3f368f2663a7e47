"""Direct tests of the clocks of actors on other hosts: which are ours, and what their readings say."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from jaxpp_async.protocol.clocks import DRIFT, FORGET_S, NUM_READINGS, Clocks, Offset, clock_name


def test_processes_of_one_host_share_a_clock():
    code = "from jaxpp_async.protocol.clocks import clock_name; print(clock_name())"
    assert clock_name() != ""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == clock_name()


@pytest.mark.parametrize(
    ("own", "name", "offset"),
    [("a", "a", Offset(0.0, 0.0)), ("a", "b", None), ("", "", None), ("a", "", None)],
    ids=["ours", "another", "neither can be told", "theirs cannot be told"],
)
def test_only_one_and_the_same_clock_needs_no_reading(own, name, offset):
    clocks = Clocks(own)
    clocks.name(1, name)
    assert clocks.clock_of(1).offset(5.0) == offset and clocks.clock_of(1).is_own == (offset is not None)
    assert clocks.clock_of(2).offset(5.0) is None


def test_the_answer_that_came_back_soonest_says_most():
    clocks = Clocks("a")
    clocks.note(1, 10.0, 62.0, 14.0)  # 50 ahead, and half of 4 s may be wrong
    assert clocks.clock_of(1).offset(14.0) == Offset(50.0, 2.0)
    clocks.note(1, 20.0, 70.25, 21.0)
    assert clocks.clock_of(1).offset(21.0) == Offset(49.75, 0.5)
    clocks.note(1, 30.0, 89.0, 40.0)
    offset = clocks.clock_of(1).offset(31.0)
    assert offset is not None and offset.offset_s == 49.75
    # it is ten seconds old: the clocks have parted since
    assert offset.error_s == pytest.approx(0.5 + 10 * DRIFT)


def test_errors_bound_what_is_wrong_whatever_the_way_takes():
    """A clock ahead by 1000 s that gains 50 millionths, ways of 0.1 to 30 ms that are not alike there and
    back."""
    rng = random.Random(7)
    clocks = Clocks("a")
    for k in range(3 * NUM_READINGS):
        sent, there, back = k * 0.5, rng.uniform(1e-4, 3e-2), rng.uniform(1e-4, 3e-2)
        clocks.note(1, sent, 1000 + (sent + there) * (1 + 50e-6), sent + there + back)
        now = sent + there + back
        offset = clocks.clock_of(1).offset(now)
        assert offset is not None and abs(offset.offset_s - (1000 + now * 50e-6)) <= offset.error_s < 0.031
    assert offset.error_s < 0.01


def test_another_process_is_another_clock():
    clocks = Clocks("a")
    clocks.name(1, "b")
    clocks.note(1, 0.0, 7.0, 1.0)
    clocks.name(1, "b")
    assert clocks.clock_of(1).offset(1.0) is not None
    clocks.name(1, "c")  # a successor on another host
    assert clocks.clock_of(1).offset(1.0) is None
    clocks.note(1, 0.0, 7.0, 1.0)
    clocks.forget(1)
    assert clocks.clock_of(1).offset(1.0) is None


def test_a_clock_that_is_kept_stays_that_of_its_process():
    clocks = Clocks("a")
    clocks.name(1, "b")
    clocks.note(1, 0.0, 7.0, 1.0)
    kept = clocks.clock_of(1)
    clocks.forget(1)
    clocks.note(1, 1.0, 99.0, 1.0)
    assert kept.offset(1.0) == Offset(6.5, 0.5) and clocks.clock_of(1).offset(1.0) == Offset(98.0, 0.0)


def test_readings_of_then_say_more_than_those_of_much_later():
    clocks = Clocks("a")
    clocks.note(1, 0.0, 7.0, 1.0)
    kept = clocks.clock_of(1).readings
    for k in range(NUM_READINGS):
        clocks.note(1, 1e5 + k, 1e5 + k + 8.0, 1e5 + k)
    clock = clocks.clock_of(1)
    assert len(clock.readings) == NUM_READINGS and kept[0] not in clock.readings
    assert clock.offset(1.0, kept) == Offset(6.5, 0.5) != clock.offset(1.0)


@pytest.mark.parametrize(
    ("events", "asked", "offset_s"),
    [
        ([("beat", 0.0, "a"), ("beat", 0.5, "a")], [], 0.0),
        ([("beat", 0.0, "b"), ("beat", 0.5, "b")], [0.0], None),
        ([("beat", 0.0, "b"), ("answer", 1.0, 0.0, 50.5), ("beat", 1.0, "b")], [0.0, 1.0], 50.0),
        ([("beat", 0.0, "b"), ("answer", 1.0, 0.0, None), ("beat", 1.0, "b")], [0.0, 1.0], None),
        ([("beat", 0.0, "b"), ("beat", FORGET_S, "b")], [0.0, FORGET_S], None),
        # the answer to a question that was given up
        ([("beat", 0.0, "b"), ("beat", FORGET_S, "b"), ("answer", 6.0, 0.0, 50.0)], [0.0, FORGET_S], None),
        ([("beat", 0.0, "b"), ("forget", 0.5), ("beat", 1.0, "b")], [0.0, 1.0], None),
        ([("beat", 0.0, "b"), ("forget", 0.5), ("answer", 1.0, 0.0, 50.0)], [0.0], None),
        ([("beat", 0.0, "b"), ("beat", 0.5, "c"), ("answer", 1.0, 0.0, 50.0)], [0.0, 0.5], None),
    ],
    ids=[
        "ours is never read",
        "one question is open",
        "a reading, and the next",
        "no time in the answer",
        "no answer",
        "an answer that comes too late",
        "a successor is asked too",
        "an answer of a predecessor",
        "an answer of a predecessor on another host",
    ],
)
def test_when_another_clock_is_read(events, asked, offset_s):
    clocks, found = Clocks("a"), list[float]()
    for what, now_s, *more in events:
        if what == "beat" and clocks.begin_reading(1, *more, now_s):
            found.append(now_s)
        elif what == "answer":
            clocks.end_reading(1, *more, now_s)
        elif what == "forget":
            clocks.forget(1)
    offset = clocks.clock_of(1).offset(1.0)
    assert found == asked
    assert offset_s == (offset.offset_s if offset is not None else None)
