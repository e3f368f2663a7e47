"""The map in docs/architecture.md and the rooms that there are: none is missing, and none is gone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted(path.relative_to(ROOT) for path in (ROOT / "jaxpp_async").rglob("*.py"))
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

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
    assert not missing, (
        "say in docs/architecture.md where these are on the way of a value, a failure or a restart"
    )


def test_the_map_names_every_package():
    packages = {path.parent.name for path in MODULES}
    assert [package for package in sorted(packages) if f"{package}/" not in MAP] == []


def test_a_room_that_says_what_lies_in_it_leaves_nothing_out():
    rooms = [path.parent for path in MODULES if path.name == "__init__.py" and len(path.parts) > 2]
    said = {
        room: ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or "" for room in rooms
    }
    assert len(said) > 20
    left_out = {str(room): _names_in(room) - set(re.findall(r"\w+", text)) for room, text in said.items()}
    assert {room: names for room, names in left_out.items() if names} == {}


def _names_in(room: Path) -> set[str]:
    """Modules and packages that lie in a package."""
    names = {
        path.relative_to(room).parts[0].removesuffix(".py") for path in MODULES if path.is_relative_to(room)
    }
    return names - {"__init__"}


def _sides_in_the_contract() -> dict[str, str]:
    """Rooms of `actors/`, each with the sections that the comments between the layers name."""
    layers = (
        CONTRACTS.split('containers = ["jaxpp_async.actors"]')[1].split("layers = [\n")[1].split("\n]")[0]
    )
    sides: dict[str, str] = {}
    section = ""
    for line in map(str.strip, layers.splitlines()):
        if line.startswith("#"):
            section = " ".join(re.findall(r"(\w+):", line))
        else:
            sides |= dict.fromkeys(re.findall(r"\w+", line), section)
    return sides


def _sides_on_the_map() -> list[tuple[str, str]]:
    """Rooms and the first word of the row that each stands in; what lies in a package's brackets is part of it."""
    table = MAP.split("## The rooms of `actors/`")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\w+): [^|]*\| (.*) \|$", table, flags=re.MULTILINE)
    return [
        (room, side)
        for side, rooms in rows
        for room in re.findall(r"`(\w+)/?`", re.sub(r"\([^)]*\)", "", rooms))
    ]


def test_every_room_of_the_actors_is_on_one_side_and_on_the_same_in_table_and_contract():
    on_the_map, contract = _sides_on_the_map(), _sides_in_the_contract()
    assert sorted(room for room, _ in on_the_map) == sorted(contract)
    wrong = [(room, side, contract[room]) for room, side in on_the_map if side not in contract[room].split()]
    assert wrong == [], "room, side in docs/architecture.md, section in pyproject.toml"


def test_one_module_numbers_the_processes():
    """`process = actor * per_actor + rank`, and back, is said in `seats.py`; the others ask it."""
    counting = re.compile(r"\b(actor|process|id|rank)\w* (\*|//|%)=? [\w.]*(per_actor|size)\b")
    found = {
        path.stem for path in MODULES if "actors" in path.parts and counting.search((ROOT / path).read_text())
    }
    assert found == {"seats"}


def test_the_map_names_no_module_that_is_gone():
    assert FILES - {path.stem for path in MODULES} == set()
