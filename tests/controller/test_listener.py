"""Direct tests of how many refusals are logged."""

from __future__ import annotations

import pytest

from jaxpp_async.controller.listener import MOST, WINDOW_S, RateLimitedLog


@pytest.fixture
def clock():
    class Clock:
        now_s = 100.0

    return Clock()


def test_of_many_refusals_some_are_logged_and_the_rest_counted(clock):
    lines = []
    refusals = RateLimitedLog(lines.append, lambda: clock.now_s)
    for k in range(MOST + 3):
        refusals.write(f"refused {k}")
    assert lines == [f"refused {k}" for k in range(MOST)]
    refusals.flush()
    refusals.flush()
    assert lines[MOST:] == ["refused 3 more connections"]


def test_a_new_window_begins_with_the_count_of_the_last_one(clock):
    lines = []
    refusals = RateLimitedLog(lines.append, lambda: clock.now_s)
    for _ in range(MOST + 2):
        refusals.write("x")
    clock.now_s += WINDOW_S
    refusals.write("still hidden")
    clock.now_s += 0.5
    refusals.write("again")
    assert lines[MOST:] == ["refused 3 more connections", "again"]
