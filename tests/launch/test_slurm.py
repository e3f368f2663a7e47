"""Slurm: inside an allocation, with stand-ins for `scontrol` and `srun` that behave like them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fake_actor import start_fakes
from resources import nothing_left

import jaxpp_async as jpp
from jaxpp_async.controller.controller import Controller
from jaxpp_async.errors import LaunchError, MeshError
from jaxpp_async.launch.hosts import Host, Settings, place
from jaxpp_async.launch.remote import Timeouts
from jaxpp_async.launch.slurm import (
    allocation,
    explain_srun,
    parse_tasks_per_node,
    parse_version,
    slurm_launcher,
    srun_command,
)
from tests.launch.test_local import HERE

STAND_INS = HERE / "stand_ins"


@pytest.fixture
def slurm(monkeypatch, tmp_path) -> Path:
    """An allocation of four hosts, one of which takes two actors; gives srun's log."""
    monkeypatch.setenv("PATH", f"{STAND_INS}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost,node[08-10]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2,1(x3)")
    monkeypatch.setenv("SRUN_LOG", str(tmp_path / "srun.log"))
    return tmp_path / "srun.log"


def launcher(**options):
    settings = Settings(python=options.pop("python", None), env={"PYTHONPATH": str(HERE)})
    return slurm_launcher(
        actor="fake_actor:FakeActor", settings=settings, control_address="127.0.0.1", **options
    )


async def start(made, num_actors=2) -> Controller:
    return await start_fakes(num_actors, made)


def test_the_hosts_are_the_allocations(slurm):
    assert allocation(os.environ) == (Host("localhost", 2), Host("node08"), Host("node09"), Host("node10"))


@pytest.mark.parametrize(("text", "tasks"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])])
def test_tasks_per_node(text, tasks):
    assert parse_tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "0", "two", "2(x"])
def test_tasks_per_node_that_are_none(text):
    with pytest.raises(MeshError, match="not of Slurm's form"):
        parse_tasks_per_node(text)


def test_outside_an_allocation():
    with pytest.raises(
        MeshError, match=r"inside an allocation, and this process is in none .* salloc or sbatch"
    ):
        allocation({"PATH": "/"})


def test_without_slurms_commands(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MeshError, match="needs Slurm's command 'scontrol', which is not in PATH"):
        allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"})


def test_steps_overlap_since_they_can():
    (placement,) = place([Host("n1")], 1)
    assert "--overlap" in srun_command(placement, ["py"], parse_version("slurm 22.05.8"))
    assert "--overlap" not in srun_command(placement, ["py"], parse_version("slurm-wlm 19.05.5"))
    assert "--overlap" not in srun_command(placement, ["py"], parse_version("?"))


SAID_BY_SRUN = [
    (
        "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)",
        "retrying .*busy",
    ),
    (
        "srun: error: Unable to create step for job 7: Job/step already completing or completed",
        "Unable to create",
    ),
    (
        "srun: error: Unable to confirm allocation for job 7: Invalid job id specified",
        "the allocation has ended",
    ),
    (
        "slurmstepd: error: execve(): /no/py: No such file or directory\n"
        "srun: error: n1: task 0: Exited with ...",
        None,
    ),
    ("bash: hello", None),
]


@pytest.mark.parametrize(("said", "what"), SAID_BY_SRUN)
def test_what_srun_says_is_explained(said, what):
    found = explain_srun(said.splitlines(), is_late=False)
    if what is None:
        assert found is None
    else:
        assert found is not None and re.search(what, found.what)


async def test_one_task_an_actor(slurm, caplog, monkeypatch):
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1(x4)")
    async with nothing_left(caplog):
        controller = await start(launcher())
        assert len({info.pid for info in controller.actors}) == 2
        environments = [psutil.Process(info.pid).environ() for info in controller.actors]
        assert [e["SLURMD_NODENAME"] for e in environments] == ["localhost", "node08"]
        await controller.aclose()
    calls = [json.loads(line) for line in slurm.read_text().splitlines()]
    assert sorted(call[2] for call in calls) == ["--nodelist=localhost", "--nodelist=node08"]
    assert all("--ntasks=1" in call and "--overlap" in call for call in calls)


async def test_no_python_there(slurm, caplog):
    async with nothing_left(caplog):
        with pytest.raises(LaunchError, match=r"host \w+: there is no Python at /no/python .*; install it"):
            await start(launcher(python="/no/python"), 1)


async def test_an_allocation_that_is_full(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node08")
    monkeypatch.setenv("SRUN_BUSY", "node08")
    monkeypatch.setenv("SRUN_VERSION", "slurm 19.05.5")
    says = r"host node08: Slurm did not start a task there: .*busy.*; the allocation has no room"
    with pytest.raises(LaunchError, match=says):
        await start(launcher(timeouts=Timeouts(python_s=1.5)), 1)


def test_a_mesh_in_an_allocation(slurm):
    with pytest.raises(MeshError, match="6 actors do not fit 5 slots on 4 hosts"):
        jpp.RemoteMesh(6, launcher="slurm")
    with pytest.raises(MeshError, match=r"hosts= has no effect with launcher='slurm'"):
        jpp.RemoteMesh(2, launcher="slurm", hosts=["a"])
    gpus = {"launcher": "slurm", "platform": "cuda", "spmd_mesh": {"model": 4}, "devices": "0-3"}
    with pytest.raises(
        MeshError, match=r"takes 2 processes of 4 devices each, .* names 4; .*--ntasks-per-node=1"
    ):
        jpp.RemoteMesh(2, **gpus)
    jpp.RemoteMesh(2, **{**gpus, "devices": "0-7"})


def test_the_doctor_looks_at_the_hosts_of_an_allocation(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost")
    command = [
        sys.executable,
        "-m",
        "jaxpp_async",
        "doctor",
        "--slurm",
        "--control-address",
        "127.0.0.1",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    told = json.loads(done.stdout)
    assert (done.returncode, [host["name"] for host in told["hosts"]]) == (0, ["localhost"])
    assert (
        told["hosts"][0]["slots"] == 2
        and told["hosts"][0]["calls_back"] == ""
        and not told["links"][0]["error"]
    )
    assert len(slurm.read_text().splitlines()) == 2  # the second for measuring between two processes
