"""The layout keeps its rules (docs/architecture.md): sizes, names, docstrings, and tests for every module."""

from __future__ import annotations

import re

import layout
import pytest
from layout import PACKAGE
from paths import ROOT, TESTS

MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_a_module_is_one_idea_of_a_size_that_can_be_read():
    sizes = {module.name: module.num_code_lines for module in layout.modules()}
    assert len(sizes) <= 290  # 170 and those of planning/, commands/, view/ and page/
    assert {name: size for name, size in sizes.items() if size > 500} == {}
    assert sum(size < 50 for size in sizes.values()) <= 40


def test_the_top_level_shows_what_users_hold_and_packages():
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert files == {"__init__", "__main__", "mesh", "errors", "testing"}
    assert {"actors", "transport"} <= PACKAGES


def test_no_public_class_name_is_used_twice():
    assert layout.classes_named_twice() == {}


def test_every_module_is_imported_by_a_test():
    assert layout.untested_modules() == []


def test_docstrings_open_with_a_sentence():
    assert layout.badly_opened_docstrings() == []


def test_sentences_of_docstrings_say_what_they_are_about():
    assert layout.badly_begun_sentences() == []


def test_import_rules_stay_short_enough_to_be_read():
    assert layout.num_import_rule_lines() < 70


def test_each_package_has_a_folder_of_tests_named_like_it():
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()}
    assert PACKAGES - folders == set()


def test_lines_fit_on_a_screen():
    assert layout.long_lines() == []
    assert layout.long_markdown_lines() == []


def test_the_map_is_short_and_names_every_package():
    assert layout.num_architecture_lines() <= 195
    assert [package for package in sorted(PACKAGES) if f"`{package}/`" not in MAP] == []


def test_the_map_names_no_module_that_is_gone():
    files = set(re.findall(r"[\w/]+\.py\b", MAP))
    there = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    gone = [name for name in files if not any(f"/{path}".endswith(f"/{name}") for path in there)]
    assert len(files) > 10
    assert gone == []


def test_one_module_numbers_the_processes():
    """`process = actor * per_actor + rank`, and back, is computed by `Topology`; the others ask it."""
    counting = re.compile(r"\b(actor|process|id|rank)\w* (\*|//|%)=? [\w.]*(per_actor|size)\b")
    assert [m.path.name for m in layout.modules() if counting.search(m.source)] == ["actor_info.py"]


@pytest.mark.parametrize(
    ("docstring", "is_bad"),
    [
        ("Choose which values to keep.", False),
        ("A launcher that starts actors over ssh.", False),
        ("crew: the actors of one mesh.", True),
        ("What executables are lowered for.", True),
        ("A class in, a dataclass of it out.", True),
        ("It was done.", True),
    ],
)
def test_an_opening_that_is_no_sentence_is_found(monkeypatch, docstring, is_bad):
    module = layout.Module(PACKAGE.relative_to(ROOT) / "x.py", f'"""{docstring}"""\n')
    monkeypatch.setattr(layout, "all_files", lambda: [module])
    assert bool(layout.badly_opened_docstrings()) == is_bad


@pytest.mark.parametrize(
    ("docstring", "is_bad"),
    [
        ("Return the plan. It can be saved.", True),
        ("Return the plan.\n\n    What is saved can be loaded.", True),
        ("Return the plan!\n    They are few.", True),
        ("Return the plan, since it is small. Its size is bounded: it never grows.", False),
        ("Return texts.\n\n    Returns:\n        What was wrong.", False),  # no sentence
    ],
)
def test_a_sentence_that_begins_with_a_pronoun_is_found(monkeypatch, docstring, is_bad):
    module = layout.Module(PACKAGE.relative_to(ROOT) / "x.py", f'"""{docstring}"""\n')
    monkeypatch.setattr(layout, "all_files", lambda: [module])
    assert bool(layout.badly_begun_sentences()) == is_bad


def test_lines_of_code_are_counted_without_comments_and_docstrings():
    source = '"""One.\n\nTwo."""\n\nx = [\n    1,  # a comment\n]\n# another\ndef f():\n    """Three."""\n'
    assert layout.Module(PACKAGE, source).num_code_lines == 4
