"""Pages of failed runs are kept in a folder of the user, and the oldest ones are deleted."""

from __future__ import annotations

from jaxpp_async.page import failed_runs
from jaxpp_async.page.failed_runs import default_folder, keep_page


def test_the_newest_pages_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(failed_runs, "MOST_FILES", 3)
    paths = [keep_page(f"run {number}") for number in range(5)]
    assert sorted(default_folder().iterdir()) == paths[2:]
    assert [path.read_text() for path in paths[2:]] == ["run 2", "run 3", "run 4"]


def test_the_folder_is_in_the_users_home_unless_the_environment_says(monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_folder()) == "/home/someone/.local/state/jaxpp_async/failed_runs"
