"""Check the pages of the site: each is in the index, tutorials are notebooks, the reference has all names."""

from __future__ import annotations

import re

from paths import ROOT

import jaxpp_async as jpp
from jaxpp_async import schedules

DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in DOCS.rglob("*.md")}


def read(name: str) -> str:
    return PAGES[name].read_text(encoding="utf-8")


def in_toctrees(name: str) -> list[str]:
    """The pages that the toctrees of a page list."""
    blocks = re.findall(r"^```{toctree}\n(.*?)^```", read(name), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]


def test_every_page_is_in_the_index_once():
    listed = in_toctrees("index") + [f"reference/{name}" for name in in_toctrees("reference/index")]
    assert sorted(listed) == sorted(set(PAGES) - {"index"})


def test_the_index_and_the_readme_lead_to_every_guide():
    guides = set(PAGES) - {"index"} - {name for name in PAGES if name.startswith("reference/")}
    index, readme = read("index"), (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(guides) if f"]({name}.md" not in index] == []
    assert [name for name in sorted(guides) if f"](docs/{name}.md" not in readme] == []


def test_links_between_pages_lead_to_files():
    for name, path in [*PAGES.items(), ("README", ROOT / "README.md")]:
        links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", path.read_text(encoding="utf-8"))
        assert (name, [link for link in links if not (path.parent / link).exists()]) == (name, [])


def test_tutorials_are_notebooks_that_the_build_runs():
    tutorials = [name for name in PAGES if name.startswith("tutorials/")]
    assert len(tutorials) == 5
    for name in tutorials:
        text = read(name)
        assert text.startswith("---\nfile_format: mystnb\n") and text.count("```{code-cell}") >= 3
        for cell in re.findall(r"^```{code-cell}.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            compile(cell, name, "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def test_the_reference_has_every_public_name():
    text = "".join(read(name) for name in PAGES if name.startswith("reference/"))
    listed = set(re.findall(r"^\.\. auto(?:class|function):: (?:[a-z_.]+\.)?(\w+)$", text, re.MULTILINE))
    assert sorted(set(jpp.__all__) - {"errors"} - listed) == []
    assert sorted({name.__name__ for name in schedules.NAMED} - listed) == []
    assert "automodule:: jaxpp_async.errors" in text
