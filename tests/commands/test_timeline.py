"""The command `timeline` (`jaxpp_async.commands.timeline`): a saved step, shown."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from jaxpp_async.commands.app import app
from jaxpp_async.timeline import ActorTimeline, Timeline, TimelineEvent, write_trace


def step(number: int) -> Timeline:
    run = TimelineEvent(0, 0, "run", "fwd(stage 0, mb 0)", 0.001, 0.011)
    return Timeline(number, "train", 0.0, 0.012, (ActorTimeline(0, (run,)),), ())


@pytest.fixture
def file(tmp_path):
    write_trace(tmp_path / "steps.json", [step(3), step(4)])
    return tmp_path / "steps.json"


def run(*arguments: object):
    return CliRunner().invoke(app, ["timeline", *map(str, arguments)], env={"COLUMNS": "100"})


def test_the_last_step_is_shown_with_its_tables(file):
    done = run(file)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("step 4 of 'train': 12.00 ms on 1 actor\nactor 0  ")
    assert "bill" in done.stdout and "fwd(stage 0)" in done.stdout
    assert done.stdout.count("no cause costs") + done.stdout.count("reply 8%: ") == 1


def test_another_step_is_shown_and_written(file, tmp_path):
    done = run(file, "--step", 3, "--svg", tmp_path / "s.svg", "--html", tmp_path / "s.html")
    assert done.stdout.startswith("step 3 of 'train'")
    assert (tmp_path / "s.svg").as_uri() in done.stdout and (tmp_path / "s.html").as_uri() in done.stdout
    assert (tmp_path / "s.svg").read_text() == step(3).to_svg()
    assert (tmp_path / "s.html").read_text() == step(3).to_html()


def test_wrong_files_and_steps_are_told(file, tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    done = run(other)
    assert done.exit_code == 1 and "no timeline" in done.stderr
    done = run(tmp_path / "gone.json")
    assert done.exit_code == 2 and "gone.json" in done.stderr
    done = run(file, "--step", 9)
    assert done.exit_code == 2 and "has no step 9; it has 3, 4" in done.stderr
