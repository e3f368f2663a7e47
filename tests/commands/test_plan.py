"""The command `plan` (`jaxpp_async.commands.plan`): what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess

import pytest
from typer.testing import CliRunner
from user_folder import TRAIN, process_restored

import jaxpp_async as jpp
from jaxpp_async.commands.app import app
from jaxpp_async.launch.run_module import command_here
from jaxpp_async.planning.cost_model import CostModel, TaskFormula
from jaxpp_async.planning.samples import LinkCost, Samples

COSTS = CostModel(formula=TaskFormula(flops_per_s=1e7), links={"same host": LinkCost(Samples((1e-5,)), 1e9)})
STEP, QUICK = "train.py:train_step", ["--costs", "costs.json", "--iterations", "20"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder with a step and measured costs, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "raises.py").write_text("raise ValueError('imported before the options were checked')")
    COSTS.save(tmp_path / "costs.json")
    with process_restored(tmp_path):
        yield tmp_path


def run(*arguments: str, width: int = 110):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": str(width)})


def test_a_plan_is_printed_and_written(folder):
    done = run(STEP, "--actors", "2", *QUICK, "--save", "plan.json", "--csv", "order.csv")
    assert done.exit_code == 0, done.output
    plan = jpp.Plan.load(folder / "plan.json")
    assert done.stdout.split() == plan.as_text(all_shown_by="--all shows all").split()
    assert plan.num_actors == 2 and "`" not in done.stdout
    read = jpp.schedule_from_csv(folder / "order.csv", stages=plan.cut)
    assert read.tasks(4, 2) == plan.schedule.tasks(4, 2)


def test_the_output_is_as_wide_as_the_terminal():
    narrow, wide = (run(STEP, "--actors", "2", *QUICK, width=width).stdout for width in (80, 120))
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines())) <= 120
    table = slice(wide.index("schedule  "), wide.index("the order"))
    numbers = [word for word in wide[table].split() if word[:1].isdigit()]
    assert [number for number in numbers if number not in narrow.split()] == []  # none is broken


def test_json_is_the_plan_alone():
    done = run(STEP, "--actors", "2", *QUICK, "--json")
    found = json.loads(done.stdout)
    assert found["num_actors"] == 2 and found["candidates"][0]["verdict"] == "chosen"
    assert "this module prints" in done.stderr


def test_the_options_reach_the_planner():
    several = ("--actors", "1,2", "--microbatches", "2,4", "--num-stages", "2", "--memory", "1MB")
    found = json.loads(run(STEP, *several, *QUICK, "--json", "--donate", "0", "--seed", "3").stdout)
    tried = {(c["num_actors"], c["num_microbatches"]) for c in found["candidates"]}
    assert tried <= {(1, 2), (1, 4), (2, 2), (2, 4)} and len(tried) > 1
    assert len(found["cut"]) == 1 and found["cap_bytes"] == 10**6


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([STEP, "--actors", "2", "--memory", "1kB", *QUICK], 1, "plan: no plan of step 'train_step' fits"),
        (["train:unmarked_step", "--actors", "2", *QUICK], 1, "'unmarked_step' has no pipeline_yield"),
        ([STEP, "--actors", "2", "--num-stages", "9", *QUICK], 1, "plan: num_stages is 9"),
        ([STEP, "--actors", "2"], 2, "plan: --device cpu: no rates of it are published"),
        (["raises.py:step", "--actors", "2"], 2, "Write --device with one of "),
        (["raises.py:step", "--actors", "2", "--costs", "none.json"], 2, "plan: none.json: No such file"),
        ([STEP, "--actors", "two", *QUICK], 2, "plan: --actors 'two': write whole numbers"),
        ([STEP, *QUICK], 2, "--actors"),
        ([STEP, "--actors", "2", "--donate", "3", *QUICK], 2, "plan: --donate 3: the step is called with 2"),
        (["trian:train_step", "--actors", "2", *QUICK], 2, "did you mean train?"),
        ([STEP, "--actors", "2", "--costs", "none.json"], 2, "plan: none.json: No such file or directory"),
    ],
)  # fmt: skip
def test_errors_are_lines_with_an_exit_status(arguments, status, says):
    done = run(*arguments)
    assert done.exit_code == status and says in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_plan_is_printed_even_if_it_cannot_be_written():
    done = run(STEP, "--actors", "2", *QUICK, "--save", "none/plan.json")
    assert done.exit_code == 2 and "No such file or directory" in done.stderr
    assert done.stdout.startswith("plan of step 'train_step'")


def test_an_error_of_the_step_is_printed_with_the_users_frames():
    done = run("train.py:broken_step", "--actors", "2", *QUICK)
    assert done.exit_code == 1 and done.stdout == ""
    assert "in broken_step" in done.stderr and "jaxpp_async/" not in done.stderr


def test_with_more_actors_than_stages_the_last_ones_idle(folder):
    done = run(STEP, "--actors", "4", "--num-stages", "2", *QUICK, "--save", "plan.json")
    rows = jpp.Plan.load(folder / "plan.json").schedule.rows
    assert [bool(row) for row in rows] == [True, True, False, False]
    assert "2 of 4 actors have no task in this plan; ask for 2" in done.stdout


def test_all_candidates_and_assumptions_can_be_shown(folder):
    several = ("--actors", "1,2", "--microbatches", "2,4", "--device", "h100-sxm", "--iterations", "20")
    first = run(STEP, *several, "--save", "plan.json").stdout
    plan = jpp.Plan.load(folder / "plan.json")
    assert f"and {len(plan.candidates) - 12} more; --all shows all" in first
    shown = run(STEP, *several, "--all").stdout
    assert "--all" not in shown and shown.split() == plan.as_text(shows_all=True).split()
    assert all(" ".join(text.split()) in " ".join(shown.split()) for text in plan.assumed)


SLOW = """
import signal

import jax

import train
from train import *


def train_step(params, batch):
    signal.raise_signal(signal.SIGINT)
    return train.train_step(params, batch)
"""
"""A module with a step whose trace is interrupted as by Ctrl-C."""


def test_ctrl_c_ends_the_command_with_a_line(folder):
    (folder / "slow.py").write_text(SLOW)
    command = [*command_here("jaxpp_async.__main__"), "plan", "slow:train_step", "--actors", "2", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "this module prints\nplan: interrupted\n"


def test_ctrl_c_is_not_lost_in_the_garbage_collector(folder):
    collected = SLOW.replace(
        "    signal.raise_signal(signal.SIGINT)",
        "    import gc\n"
        "    gc.callbacks.append(lambda phase, info: phase == 'stop' and signal.raise_signal(2))\n"
        "    gc.collect()\n"
        "    del gc.callbacks[-2]",
    )
    (folder / "slow.py").write_text(collected)
    command = [*command_here("jaxpp_async.__main__"), "plan", "slow:train_step", "--actors", "2", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "this module prints\nplan: interrupted\n"


def test_ctrl_c_while_a_module_is_imported_ends_the_command_at_once(folder):
    """A module may catch the exception, or be of those that abort Python if they are imported in part."""
    lines = "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (folder / "slow.py").write_text(f"{lines}{SLOW}")
    command = [*command_here("jaxpp_async.__main__"), "plan", "slow:train_step", "--actors", "2", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "plan: interrupted\n")


def test_a_second_ctrl_c_ends_the_command_at_once(folder):
    twice = SLOW.replace(
        "    signal.raise_signal(signal.SIGINT)",
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    finally:\n"
        "        signal.raise_signal(signal.SIGINT)",
    )
    (folder / "slow.py").write_text(twice)
    command = [*command_here("jaxpp_async.__main__"), "plan", "slow:train_step", "--actors", "2", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "this module prints\n")


def test_the_program_plans(folder):
    command = [*command_here("jaxpp_async.__main__"), "plan", "train:train_step", "--actors", "2", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan of step 'train_step': ") and "\x1b" not in done.stderr
