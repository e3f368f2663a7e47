"""The command `page` (`jaxpp_async.commands.page`): pages of saved steps and plans, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from small_plan import PLAN
from typer.testing import CliRunner

from jaxpp_async.commands import page as command
from jaxpp_async.commands.app import app
from jaxpp_async.planning.plan import KIND
from jaxpp_async.timeline import ActorTimeline, Timeline, TimelineEvent, write_trace
from jaxpp_async.view import page_mark


def step(number: int) -> Timeline:
    run = TimelineEvent(0, 0, "run", "fwd(stage 0, mb 0)", 0.001, 0.011)
    return Timeline(number, "train", 0.0, 0.012, (ActorTimeline(0, (run,)),), ())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with the files of two steps, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    write_trace("steps.json", [step(3), step(4)])
    return tmp_path


def run(*arguments: object):
    return CliRunner().invoke(app, ["page", *map(str, arguments), "--no-open"], env={"COLUMNS": "100"})


def test_a_page_of_a_step_is_written_beside_it(folder):
    done = run("steps.json")
    assert done.exit_code == 0, done.output
    assert (folder / "steps.html").read_text() == step(4).to_html()
    assert done.stdout.startswith("steps.html is a page, ") and f"file://{folder}/steps.html" in done.stdout
    assert run("steps.json").exit_code == 0  # a page of ours is replaced


def test_another_step_and_another_place_can_be_named(folder):
    assert run("steps.json", "--step", 3, "--output", "three.html").exit_code == 0
    assert (folder / "three.html").read_text() == step(3).to_html()
    assert not (folder / "steps.html").exists()


def test_a_page_of_a_plan_is_written(folder):
    PLAN.save("plan.json")
    assert run("plan.json").exit_code == 0
    assert (folder / "plan.html").read_text() == PLAN.to_html()
    assert "--step 0: plan.json is a plan" in run("plan.json", "--step", 0).stderr


def test_a_page_of_a_run_is_shown_as_it_is(folder):
    (folder / "run.html").write_text(f"<!doctype html><html><head>{page_mark()}</head>a run</html>")
    assert run("run.html").stdout.startswith("run.html is a page, 0 kB")
    assert run("run.html", "--output", "copy.html").exit_code == 0
    assert (folder / "copy.html").read_text() == (folder / "run.html").read_text()


OTHER_PAGE = page_mark().replace("page 1", "page 77")


@pytest.mark.parametrize(
    ("name", "text", "status", "says"),
    [
        ("gone.json", None, 2, "page: gone.json: No such file"),
        ("other.html", "<!doctype html><html></html>", 2, "is no page that jaxpp_async wrote"),
        ("later.html", f"<html>{OTHER_PAGE}", 2, "is a page of version 77, and this version of"),
        ("notes.txt", "some notes", 2, "neither a page nor JSON, or it is damaged; it makes pages of steps"),
        ("list.json", "[1]", 2, "neither a page nor JSON"),
        ("other.json", "{}", 2, "other.json is no file that jaxpp_async wrote"),
        ("trace.json", '{"traceEvents": []}', 2, "is a trace of another program"),
        ("costs.json", '{"kind": "jaxpp_async costs"}', 2, "is a file of kind 'jaxpp_async costs', of which"),
        ("later.json", '{"jaxpp_async": {"version": 77, "steps": []}}', 1, "these steps have version 77"),
        ("plan.json", json.dumps({"kind": KIND, "version": 77, "value": {}}), 1, "has version 77"),
        ("none.json", '{"jaxpp_async": {"version": 1, "steps": []}}', 2, "none.json has no steps"),
        ("deep.json", '{"kind": ' + "[" * 5000 + "]" * 5000 + "}", 2, "page: deep.json is n"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_or_version_is_refused(name, text, status, says, folder):
    if text is not None:
        (folder / name).write_text(text)
    done = run(name)
    assert done.exit_code == status and says in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_folders_and_bytes_are_refused(folder):
    (folder / "saved").mkdir()
    assert "saved is a folder; it makes pages of steps" in run("saved").stderr
    (folder / "saved" / "manifest.json").write_text("{}")
    assert "it is a checkpoint: jaxpp-async checkpoint show saved" in run("saved").stderr
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    assert run("bytes").exit_code == 2 and "is no text file" in run("bytes").stderr


def test_files_of_others_are_not_replaced(folder):
    (folder / "steps.html").write_text("<html>my notes</html>")
    done = run("steps.json")
    assert done.exit_code == 2 and "steps.html exists and is no page of jaxpp_async; name" in done.stderr
    assert "my notes" in (folder / "steps.html").read_text()
    assert run("steps.json", "--output", "none/steps.html").exit_code == 2


def test_a_file_is_not_replaced_by_its_own_page(folder):
    before = (folder / "steps.json").read_text()
    done = run("steps.json", "--output", folder / "steps.json")
    assert done.exit_code == 2 and "steps.json is the file itself; name another" in done.stderr
    assert (folder / "steps.json").read_text() == before


def test_a_step_is_of_a_file_of_steps(folder):
    assert "steps.json has no step 9; it has 3, 4" in run("steps.json", "--step", 9).stderr
    (folder / "run.html").write_text(f"<html>{page_mark()}")
    assert "--step 1: run.html is a page" in run("run.html", "--step", 1).stderr


def page_shown(browser: str | None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process with a browser, and without a display."""
    env = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")}
    env |= more if browser is None else {"BROWSER": browser, **more}
    command = [sys.executable, "-m", "jaxpp_async", "page", "steps.json"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_users_browser_is_asked_and_not_waited_for(folder):
    script = folder / "browser"
    script.write_text(
        f'#!/bin/sh\necho "$1" > {folder}/part && mv {folder}/part {folder}/asked\nexec sleep 3\n'
    )
    script.chmod(0o755)
    assert page_shown(str(script)).returncode == 0
    deadline = time.monotonic() + 30
    while not (folder / "asked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (folder / "asked").read_text() == f"file://{folder}/steps.html\n"


def test_without_a_browser_the_command_says_where_the_page_is(folder):
    done = page_shown(None, PATH="/nonexistent")
    assert done.returncode == 0 and done.stderr == "" and "file://" in done.stdout


def test_a_browser_for_terminals_is_not_started(monkeypatch):
    monkeypatch.delenv("BROWSER", raising=False)
    monkeypatch.setattr(command.webbrowser, "get", lambda: command.webbrowser.GenericBrowser("w3m"))
    assert not command.show_in_browser("file:///nothing.html")
