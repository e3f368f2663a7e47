"""The command `simulate` (`jaxpp_async.commands.simulate`): what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner
from user_folder import TRAIN, process_restored

import jaxpp_async as jpp
from jaxpp_async.commands.app import app
from jaxpp_async.commands.load_step import load_step
from jaxpp_async.planning.cost_model import CostModel, TaskFormula
from jaxpp_async.planning.memory import memory_needs
from jaxpp_async.planning.samples import LinkCost, Samples

COSTS = CostModel(formula=TaskFormula(flops_per_s=1e7), links={"same host": LinkCost(Samples((1e-5,)), 1e9)})
STEP, TWO = "train.py:train_step", ["--costs", "costs.json", "--actors", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder with a step and measured costs, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    COSTS.save(tmp_path / "costs.json")
    (tmp_path / "junk.json").write_text("{}")
    with process_restored(tmp_path):
        yield tmp_path


def run(*arguments: str, width: int = 110):
    return CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": str(width)})


def simulated(schedule=None):
    fn, args, _ = load_step(STEP)
    step = jpp.compile_for(jpp.Machine(2), fn, args, schedule=schedule)
    return jpp.simulate(step, COSTS), memory_needs(step)


def test_the_steps_own_schedule_is_simulated(folder):
    done = run(STEP, *TWO, "--trace", "trace.json")
    assert done.exit_code == 0, done.output
    simulation, needs = simulated()
    summary, assumed = simulation.summary("--json has the causes"), "\n".join(simulation.assumed_lines())
    assert done.stdout.startswith(f"{summary}\n\nmemory of each device, at most:\n  actor 0: ")
    assert (
        done.stdout.split()[-len(assumed.split()) :] == assumed.split()
        and "assumed, not measured:\n  " in assumed
    )
    assert f"{simulation}".endswith(assumed) and "`" not in done.stdout
    assert "buffer table" in done.stdout and len(needs) == 2
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["traceEvents"]


def test_json_has_the_figures():
    found = json.loads(run(STEP, *TWO, "--json", "--memory", "1MB").stdout)
    simulation, needs = simulated()
    assert found["step_s"] == simulation.step_s._asdict()
    assert [actor["memory_bytes"] for actor in found["actors"]] == [each.total_bytes for each in needs]
    assert [actor["peak_bytes"] for actor in found["actors"]] == list(simulation.peak_bytes)
    assert {actor["limit_bytes"] for actor in found["actors"]} == {10**6}
    assert found["bill"]["compute_s"] == simulation.timeline.bill.compute_s
    assert found["assumed"] == list(simulation.assumed)


def test_another_schedule_is_simulated():
    found = json.loads(run(STEP, *TWO, "--json", "--schedule", "GPipe(3, stages=[0, 2])").stdout)
    assert found["step_s"] == simulated(jpp.GPipe(3, stages=[0, 2]))[0].step_s._asdict()


def test_a_saved_plan_is_simulated(folder):
    fn, args, _ = load_step(STEP)
    plan = jpp.plan(fn, args, machine=jpp.Machine(2), costs=COSTS, microbatches=[8], iterations=20)
    plan.save("plan.json")
    done = run(STEP, "--plan", "plan.json", "--costs", "costs.json", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step_s"] == plan.step_s._asdict()
    other = run(STEP, "--plan", "plan.json", *TWO[:2], "--actors", "4")
    assert other.exit_code == 1 and "was made for 2 actors, and the mesh has 4" in other.stderr


def test_a_step_that_does_not_fit_is_an_exit_status():
    done = run(STEP, *TWO, "--memory", "10kB", width=80)
    assert done.exit_code == 1 and "of 10.0 kB, which does not fit" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([STEP], 2, "simulate: give --actors N, or a saved plan: --plan FILE"),
        ([STEP, *TWO, "--plan", "p", "--schedule", "s"], 2, "simulate: give --schedule or --plan, not both"),
        ([STEP, *TWO, "--spmd", "a=1", "--spmd", "b=1"], 2, "simulate: give --spmd once"),
        ([STEP, "--plan", "costs.json"], 2, "simulate: --plan: 'costs.json' is no file of kind"),
        ([STEP, "--plan", "junk.json"], 2, "'junk.json' is no file of kind 'jaxpp_async plan'; plan again"),
        ([STEP, *TWO, "--memory", "10"], 2, "simulate: --memory 10 is 10 bytes; did you mean 10GB?"),
        ([STEP, *TWO, "--donate", "3"], 2, "--donate 3: the step is called with 2 arguments"),
        ([STEP, *TWO, "--batch-argnums", "2"], 2, "--batch-argnums 2: the step is called with 2 arguments"),
        ([STEP, *TWO, "--efficiency", "0.5"], 2, "for published figures; leave out --costs"),
        ([STEP, *TWO, "--schedule", "Std1F1B(9)"], 1, "9 stages"),
        ([STEP, *TWO, "--microbatches", "3"], 1, "cannot be divided into 3 microbatches"),
        ([STEP, "--actors", "2"], 2, "simulate: --device cpu: no rates of it are published"),
    ],
)  # fmt: skip
def test_errors_are_lines_with_an_exit_status(arguments, status, says):
    done = run(*arguments)
    assert done.exit_code == status and says in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr


def test_actors_without_a_stage_are_told():
    done = run(STEP, "--costs", "costs.json", "--actors", "4")
    assert "2 of 4 actors without a stage; ask for 2 actors, or cut the step into more stages" in done.stdout
    idle = [line for line in done.stdout.splitlines() if line.endswith("peak 0 bytes of buffers")]
    assert [line[:7] for line in idle] == ["actor 2", "actor 3"]


def test_published_figures_have_an_efficiency_and_a_dispatch():
    machine = jpp.Machine(2, device="h100-sxm")
    costs = CostModel.for_machine(machine, matmul=0.5, memory=0.5, links=0.5, dispatch_s=40e-6)
    fn, args, _ = load_step(STEP)
    expected = jpp.simulate(jpp.compile_for(machine, fn, args), costs)
    options = ("--actors", "2", "--device", "h100-sxm", "--efficiency", "0.5", "--dispatch-us", "40")
    found = json.loads(run(STEP, *options, "--json").stdout)
    assert found["step_s"] == expected.step_s._asdict() and found["assumed"] == list(expected.assumed)


NOISY = """
import atexit, os, subprocess, sys

os.write(1, b"written\\n")
subprocess.run(["echo", "of a process"], check=True)
atexit.register(os.write, 1, b"at exit\\n")
"""


def test_json_is_all_that_the_standard_output_has(folder):
    (folder / "noisy.py").write_text(NOISY + TRAIN)
    command = [sys.executable, "-m", "jaxpp_async", "simulate", "noisy.py:train_step", *TWO, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["actors"]
    assert {"written", "of a process", "at exit", "this module prints"} <= set(done.stderr.splitlines())


def test_a_step_that_ends_python_while_it_is_traced_is_an_error(folder):
    (folder / "ending.py").write_text(TRAIN + "\n\ndef ends(params, batch):\n    raise SystemExit(0)\n")
    done = run("ending.py:ends", *TWO, "--json")
    assert done.exit_code == 1 and done.stdout == ""
    assert "simulate: the code of the step ends Python: sys.exit(0); a step has to return" in done.stderr
    assert "in ends" in done.stderr
