"""The command lines of docs/planning.md work as printed, from the clone."""

from __future__ import annotations

import re
import shlex

import jax
import pytest
from docs_code import doc_code
from paths import ROOT
from typer.testing import CliRunner
from uneven_model import arguments, uneven_step
from user_folder import process_restored

import jaxpp_async as jpp
from jaxpp_async.commands.app import app

PAGE = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def command_lines() -> list[list[str]]:
    block = re.search(r"^```sh\n(jaxpp-async plan .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    return [shlex.split(line) for line in block[1].splitlines()]


def test_the_command_lines_work_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with process_restored(ROOT / "examples"):
        for program, command, *options in command_lines():
            assert program == "jaxpp-async"
            shorter = ["--iterations", "20"] if command == "plan" else []  # the only change
            done = CliRunner().invoke(app, [command, *options, *shorter])
            assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"examples", "plan.json", "step.json"}


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_options_of_the_page_are_there(command):
    text = CliRunner().invoke(app, [command, "--help"]).stdout
    table = PAGE[PAGE.index("| `MODULE:STEP` |") : PAGE.index("`--help` has the others")]
    named = set(re.findall(r"--[a-z-]+", table)) - {"--all", "--save", "--csv", "--trace"}
    assert len(named) > 8 and [option for option in sorted(named) if option not in text] == []


def test_the_time_of_a_schedule_is_simulated():
    state, batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments())
    step = uneven_step(schedule=jpp.Std1F1B(4, stages="balanced"))
    median_s, peaks = doc_code("planning.md")["time_of_a_schedule"](step, state, batch)
    assert median_s > 0 and len(peaks) == 4


async def test_costs_are_measured_without_the_first_two_steps(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(uneven_step(schedule=jpp.Std1F1B(2, stages="balanced")))
    costs = await doc_code("planning.md")["measured_costs"](mesh, step, *arguments())
    assert costs.tasks and costs.links
