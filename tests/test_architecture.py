"""The map in docs/architecture.md and the rooms that there are: none is missing, and none is gone."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted(path.relative_to(ROOT) for path in (ROOT / "jaxpp_async").rglob("*.py"))
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

FILES = set(re.findall(r"\w+(?=\.py\b)", MAP))
"""The names that are written as files, in pictures and in text."""


def _in_backticks() -> set[str]:
    text = re.sub(r"^```.*?^```$", "", MAP, flags=re.MULTILINE | re.DOTALL)
    return {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", span)}


def _is_named_with_its_package(path: Path) -> bool:
    """What has a namesake elsewhere is not known by its name alone, unless it lies at the top."""
    in_package = len(path.parts) > 2 and path.stem != "__init__"
    return not in_package or f"{path.parent.name}/{path.name}" in MAP


def test_the_map_names_every_module():
    named = FILES | _in_backticks() | {"__init__"}
    stems = Counter(path.stem for path in MODULES)
    missing = [
        str(path)
        for path in MODULES
        if path.stem not in named or (stems[path.stem] > 1 and not _is_named_with_its_package(path))
    ]
    assert not missing, "say in docs/architecture.md where these are on the way of a value, a failure or a restart"


def test_the_map_names_every_package():
    packages = {path.parent.name for path in MODULES}
    assert [package for package in sorted(packages) if f"{package}/" not in MAP] == []


def test_every_module_of_the_actors_has_a_side():
    """In the table of rooms, where a newcomer looks for it."""
    table = MAP.split("## The rooms of `actors/`")[1].split("\n## ")[0]
    words = set(re.findall(r"\w+", table)) | {"__init__"}
    assert [str(path) for path in MODULES if "actors" in path.parts and path.stem not in words] == []


def test_one_module_numbers_the_processes():
    """`process = actor * per_actor + rank`, and back, is said in `processes.py`; the others ask it."""
    counting = re.compile(r"\b(actor|process|id|rank)\w* (\*|//|%)=? [\w.]*(per_actor|size)\b")
    found = {path.stem for path in MODULES if "actors" in path.parts and counting.search((ROOT / path).read_text())}
    assert found == {"processes"}


def test_the_map_names_no_module_that_is_gone():
    assert FILES - {path.stem for path in MODULES} == set()
