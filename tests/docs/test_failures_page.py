"""`docs/failures.md` has all cases and names tests that exist."""

from __future__ import annotations

import re

from paths import TESTS

from jaxpp_async import errors

PAGE = (TESTS.parent / "docs" / "failures.md").read_text()
LINES = [line for line in PAGE.splitlines() if re.match(r"\| \d", line)]
ROWS = [re.split(r" *\| *", line)[1:-1] for line in LINES]


def exists(name: str) -> bool:
    """Whether a file of tests, or a test in it, is there."""
    file, _, test = name.partition("::")
    path = TESTS / file
    return path.exists() and (
        not test or re.search(rf"def {re.escape(test)}\(", path.read_text()) is not None
    )


def test_every_case_has_a_test_that_exists():
    assert {len(row) for row in ROWS} == {5}
    assert sorted({int(row[0]) for row in ROWS}) == list(range(1, 31))
    named = {row[0]: re.findall(r"`([^`]+)`", row[4]) for row in ROWS}
    assert [number for number, names in named.items() if not names] == []
    assert [name for names in named.values() for name in names if not exists(name)] == []


def test_every_error_that_is_named_exists():
    named = set(re.findall(r"`(\w+(?:Error|Exceeded))`", PAGE)) - {
        "ValueError",
        "TimeoutError",
        "MemoryError",
    }
    assert [name for name in sorted(named) if not hasattr(errors, name)] == []
