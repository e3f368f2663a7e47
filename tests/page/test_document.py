"""The document loads nothing, runs no script but its own, and replaces a file at once."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from jaxpp_async.page.document import save_document, security_policy, write_document
from jaxpp_async.page.sections import SECTIONS as ALL_SECTIONS
from jaxpp_async.view.html import PAGE_VERSION, page_version

SECTIONS = {"title": "<h1>2 actors</h1>", "events": "nothing"}


def test_a_saved_page_has_no_script_and_loads_nothing():
    text = write_document(SECTIONS, title="a <run>", version="1.2")
    assert "<script" not in text and "<title>a &lt;run&gt;</title>" in text
    assert not re.search(r"(src|href)=|url\((?!#)|@import", text)
    assert page_version(text) == PAGE_VERSION
    assert len(text) < 40_000


def test_every_section_is_there_and_those_that_are_wide_say_so():
    text = write_document(SECTIONS, title="a run", version="1.2")
    found = re.findall(r'<section id="([\w-]+)"( class="wide")?>', text)
    assert found == [(section.id, ' class="wide"' * section.is_wide) for section in ALL_SECTIONS]
    narrow = {section.id for section in ALL_SECTIONS if not section.is_wide}
    assert narrow == {"answers-memory", "answers-state"} and ".wide {" in text


def test_a_live_page_runs_the_one_script_that_its_policy_allows():
    text = write_document(SECTIONS, title="a run", version="1.2", seen=7)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in security_policy()
    assert "default-src 'none'" in security_policy() and 'data-seen="7"' in text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "run.html"
    save_document(path, "first")
    save_document(str(path), "second")
    assert path.read_text() == "second" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        save_document(tmp_path / "missing" / "run.html", "third")

    def fail(*_, **__):
        raise OSError("disk is full")

    monkeypatch.setattr("pathlib.Path.write_text", fail)
    with pytest.raises(OSError, match="disk is full"):
        save_document(path, "third")
    assert path.read_text() == "second" and list(tmp_path.iterdir()) == [path]
