"""A process stays awake for a message as long as that helps, and no longer (`base/spinning.py`)."""

from __future__ import annotations

import os
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_async.base.spinning import (
    LONGEST_S,
    SHORTEST_S,
    AdaptiveSpin,
    LoopSpin,
    has_spare_core,
    sleep_until,
)


@pytest.mark.parametrize(
    ("waits_us", "limit_us"),
    [
        ([], 200),
        ([50] * 3, 200),
        ([1000], 100),
        ([1000] * 3, 25),
        ([1000] * 8, 0),
        ([1000] * 8 + [50], 20),  # looking would have helped
        ([1000] * 8 + [50] * 9, 200),
        ([1000, 50] * 4, 200),
    ],
)
def test_an_adaptive_spin_follows_the_waits(waits_us, limit_us):
    adaptive_spin, now_s = AdaptiveSpin(200e-6), 7.0
    for wait_us in waits_us:
        adaptive_spin.should_spin(now_s)
        now_s += wait_us * 1e-6
        adaptive_spin.record_message(now_s)
    assert adaptive_spin.limit_s == pytest.approx(limit_us * 1e-6)
    assert adaptive_spin.limit_s == 0 or SHORTEST_S <= adaptive_spin.limit_s <= 200e-6


def test_an_adaptive_spin_ends_with_its_wait():
    adaptive_spin = AdaptiveSpin(200e-6)
    assert adaptive_spin.should_spin(1.0) and adaptive_spin.should_spin(1.0 + 100e-6)
    assert not adaptive_spin.should_spin(1.0 + 400e-6)
    adaptive_spin.cancel_wait()
    assert adaptive_spin.should_spin(2.0)
    adaptive_spin.record_message(2.0)
    adaptive_spin.record_message(9.0)  # nobody waited
    assert adaptive_spin.limit_s == 200e-6


class Loop:
    """Counts the passes in which somebody keeps it awake; each takes a tenth of the longest spin."""

    def __init__(self) -> None:
        self.now_s, self.yields, self._soon = 5.0, 0, []

    def call_soon(self, callback: Any) -> None:
        self._soon.append(callback)

    def run(self, passes: int) -> int:
        """Some passes; gives how many had something to do."""
        busy = 0
        for _ in range(passes):
            soon, self._soon = self._soon, []
            busy += bool(soon)
            for callback in soon:
                callback()
            self.now_s += LONGEST_S / 10
        return busy


@pytest.fixture
def loop_spin(monkeypatch):
    loop, actor = Loop(), SimpleNamespace(is_idle=True)
    monkeypatch.setattr(os, "sched_yield", lambda: setattr(loop, "yields", loop.yields + 1))
    return LoopSpin(loop, lambda: actor.is_idle, lambda: loop.now_s), loop, actor  # type: ignore[arg-type]


def test_a_loop_stays_awake_until_a_request_comes(loop_spin):
    loop_spin, loop, _ = loop_spin
    assert loop.run(5) == 0  # nobody has been answered yet
    for _ in range(3):
        loop_spin.begin()
        assert loop.run(4) == loop.run(4) == 4
        loop_spin.end()
        assert loop.run(9) == 1  # the pass that was asked for already
    assert loop.yields == 3 * 8


def test_a_loop_sleeps_where_nothing_comes(loop_spin):
    loop_spin, loop, _ = loop_spin
    kept = []
    for _ in range(8):
        loop_spin.begin()
        kept.append(loop.run(100))
        loop_spin.end()  # much later
    assert 10 <= kept[0] <= 12 and kept == sorted(kept, reverse=True)
    assert kept[-1] == 1 and loop.yields < sum(kept)
    loop_spin.begin()
    loop.run(1)
    loop_spin.end()  # at once: looking would have helped
    loop_spin.begin()
    assert loop.run(100) > 1


def test_a_spin_does_not_hold_up_the_next_step(loop_spin):
    """The next step was there before the reply to the last one had left."""
    loop_spin, loop, actor = loop_spin
    actor.is_idle = False
    for _ in range(20):
        loop_spin.begin()
        assert loop.run(3) == 1
    assert loop.yields == 0
    actor.is_idle = True
    loop_spin.begin()
    assert loop.run(5) == 5


def test_a_wait_that_a_step_interrupts_does_not_count_for_the_next_one(loop_spin):
    loop_spin, loop, actor = loop_spin
    loop_spin.begin()
    assert loop.run(2) == 2
    actor.is_idle = False
    assert loop.run(1000) == 1
    actor.is_idle = True
    loop_spin.begin()
    assert loop.run(5) == 5


@pytest.mark.parametrize(
    ("cores", "hosts", "is_spare"),
    [
        (2, ["here", "here"], False),
        (2, ["here"], True),
        (3, ["here", "here"], True),
        (1, ["there", "there"], True),
        (1, ["here"], False),
    ],
)
def test_a_core_is_spare_where_actors_leave_one(monkeypatch, cores, hosts, is_spare):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    assert has_spare_core(hosts) is is_spare


class Sleeper:
    """A clock that only sleeping and looking at it move; sleeps are late, as Linux's are.

    Args:
        late_s: by how much.
    """

    def __init__(self, late_s: float = 60e-6):
        self.time_s, self.late_s, self.slept = 100.0, late_s, list[float]()

    def now_s(self) -> float:
        self.time_s += 1e-6
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time_s += seconds + (self.late_s if seconds else 0.0)

    def until(self, end_s: float, is_over=lambda: False) -> float:
        return sleep_until(end_s, is_over, now_s=self.now_s, sleep=self.sleep)


@pytest.mark.parametrize("wait_s", [1e-5, 1e-4, 0.0123, 0.02, 0.0201, 0.5])
def test_a_sleep_ends_on_time_and_polls_for_a_moment_only(wait_s):
    sleeper = Sleeper()
    ended_s = sleeper.until(100.0 + wait_s)
    assert 100.0 + wait_s <= ended_s <= 100.0 + wait_s + 5e-6
    assert max(sleeper.slept) <= 0.02
    assert sleeper.slept.count(0) <= 100, "it polls for a tenth of a millisecond"


def test_a_sleep_that_is_woken_late_ends_at_once():
    sleeper = Sleeper(late_s=0.003)
    assert sleeper.until(100.01) == pytest.approx(100.01 + 0.003 - 100e-6, abs=5e-6)
    assert len(sleeper.slept) == 1


def test_a_time_that_has_passed_is_not_waited_for():
    sleeper = Sleeper()
    assert sleeper.until(99.0) == pytest.approx(100.0, abs=5e-6)
    assert sleeper.slept == []


def test_a_long_sleep_ends_early_when_it_is_told_to():
    sleeper = Sleeper()
    ended_s = sleeper.until(float("inf"), lambda: sleeper.time_s > 107.0)
    assert 107.0 < ended_s < 107.03


def test_a_real_sleep_is_never_too_short():
    for wait_s in (0.0, 0.0001, 0.004, 0.03):
        end_s = time.monotonic() + wait_s
        assert end_s <= sleep_until(end_s, lambda: False) <= time.monotonic()
