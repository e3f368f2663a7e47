"""A process stays awake for a message as long as that helps, and no longer (`base/spinning.py`)."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_async.base.spinning import LONGEST_S, SHORTEST_S, AdaptiveSpin, LoopSpin, has_spare_core


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
