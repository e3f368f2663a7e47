"""`docs/failures.md` has all cases and names tests that exist."""

from __future__ import annotations

import re

from paths import TESTS

from jaxpp_async import errors

PAGE = (TESTS.parent / "docs" / "failures.md").read_text()
CASES, TESTED = PAGE.split("## The tests\n")


def rows(text: str) -> list[list[str]]:
    """The cells of the table rows that begin with a case, such as `4` or `19a`."""
    return [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if re.match(r"\| \d", line)]


def exists(name: str) -> bool:
    """Whether a file of tests, or a test in it, is there."""
    file, _, test = name.partition("::")
    path = TESTS / file
    return path.exists() and (
        not test or re.search(rf"def {re.escape(test)}\(", path.read_text()) is not None
    )


def test_every_case_has_a_test_that_exists():
    cases, tested = rows(CASES), rows(TESTED)
    assert {len(row) for row in cases} == {4} and {len(row) for row in tested} == {2}
    names = [row[0] for row in cases]
    assert sorted(names) == sorted(row[0] for row in tested) and len(set(names)) == len(names)
    assert sorted({int(name.rstrip("abc")) for name in names}) == list(range(1, 31))
    named = {case: re.findall(r"`([^`]+)`", tests) for case, tests in tested}
    assert [case for case, tests in named.items() if not tests] == []
    assert [test for tests in named.values() for test in tests if not exists(test)] == []


def test_every_error_that_is_named_exists():
    named = set(re.findall(r"`(\w+(?:Error|Exceeded))`", PAGE)) - {
        "ValueError",
        "TimeoutError",
        "MemoryError",
    }
    assert [name for name in sorted(named) if not hasattr(errors, name)] == []
