"""`docs/programs.md` names tests that exist."""

from __future__ import annotations

import fnmatch
import pathlib
import re

from tests.torture.test_programs import CASES

TESTS = pathlib.Path(__file__).parents[1]
TABLE = (TESTS.parent / "docs" / "programs.md").read_text()
ROWS = [
    line.strip("|").split(" | ")
    for line in TABLE.splitlines()
    if line.startswith("| ") and "what |" not in line
]
# A name alone is a case of this suite.
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[-1])})


def exists(name: str) -> bool:
    """Whether a test, a file of tests, or a case of this suite is there."""
    if not name.endswith(".py") and "::" not in name:
        return bool(fnmatch.filter(CASES, name))
    file, _, test = name.partition("::")
    path = TESTS / file
    return path.exists() and (
        not test or re.search(rf"def {re.escape(test)}\(", path.read_text()) is not None
    )


def test_the_tests_of_the_table_exist():
    assert [name for name in NAMED if not exists(name)] == []


def test_every_row_names_a_test_and_every_case_has_a_row():
    assert [row[0] for row in ROWS if "`" not in row[-1]] == []
    patterns = [name for name in NAMED if "::" not in name]
    assert [c for c in CASES if not any(fnmatch.fnmatch(c, p) for p in patterns)] == []
