"""Times, bytes and counts as text."""

from __future__ import annotations

import pytest

from jaxpp_async.base.quantities import count, format_bytes, format_seconds


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (123_456_789, "123 MB"),
        (999_900_000, "1 GB"),
        (1.5e9, "1.5 GB"),
        (2.5e15, "2,500 TB"),
    ],
)
def test_bytes(amount, text):
    assert format_bytes(amount) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.2e-8, "0.042 us"),
        (0.0123456, "12.3 ms"),
        (0.99996, "1 s"),
        (-0.5, "-500 ms"),
        (61.25, "61.2 s"),
        (100, "100 s"),
        (119.7, "2 min 0 s"),
        (125, "2 min 5 s"),
        (3599.7, "1 h 0 min"),
        (3661, "1 h 1 min"),
        (-7200, "-2 h 0 min"),
        (4e6, "1,111 h 7 min"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_seconds_of_more_digits():
    assert format_seconds(0.0123456, digits=4) == "12.35 ms"


def test_counts():
    assert [count(n, "step") for n in (0, 1, 1000)] == ["0 steps", "1 step", "1,000 steps"]
