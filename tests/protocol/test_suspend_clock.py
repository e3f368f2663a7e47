"""Direct tests of the clock that counts only the time in which this process could have heard others."""

from __future__ import annotations

from jaxpp_async.protocol.clocks import SuspendAwareClock


def test_time_between_close_ticks_counts_in_full():
    clock = SuspendAwareClock(10.0, tick_s=0.5)
    assert [clock.tick(now) for now in (10.5, 11.0, 12.0)] == [0.5, 1.0, 2.0]


def test_a_long_stop_counts_as_two_ticks_only():
    clock = SuspendAwareClock(0.0, tick_s=0.5)
    assert clock.tick(100.0) == 1.0
    assert clock.tick(100.25) == 1.25


def test_reading_between_ticks_changes_nothing():
    clock = SuspendAwareClock(0.0, tick_s=1.0)
    assert [clock.read(0.5), clock.read(5.0), clock.read(0.25)] == [0.5, 2.0, 0.25]
    assert clock.tick(1.0) == 1.0
