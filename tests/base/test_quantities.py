"""Times, bytes and counts as text, and bytes read from text."""

from __future__ import annotations

import pytest

from jaxpp_async.base.quantities import count, format_bytes, format_seconds, parse_bytes
from jaxpp_async.errors import PlanError


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


# ---------------------------------------------------------------- reading


def test_bytes_as_text():
    texts = [7, "7", "70GB", "1.5 MiB", "2kb", "64GiB", "3T"]
    found = [7, 7, 70 * 10**9, 3 * 2**19, 2000, 64 * 2**30, 3 * 10**12]
    assert list(map(parse_bytes, texts)) == found


WRONG = ["lots", "", "0", 0, -5, True, "5 XB", None, 1.5, 10**400, float("nan")]


@pytest.mark.parametrize("wrong", [*WRONG, "1.5", "0.1B", "0.0001", "10\nGB", "9" * 400])
def test_no_number_of_bytes(wrong):
    with pytest.raises(PlanError, match="write bytes, or text such as '70GB' or '64GiB'"):
        parse_bytes(wrong)
