"""The command line `jaxpp-async`, which is also `python -m jaxpp_async`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import typer
from paths import ROOT
from typer.testing import CliRunner

import jaxpp_async
from jaxpp_async.commands.app import app
from jaxpp_async.launch.run_module import command_here

COMMANDS = ("demo", "doctor", "page", "plan", "simulate", "timeline")


def test_the_program_is_the_command_line():
    command = [*command_here("jaxpp_async.__main__"), "--help"]
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert "python -m jaxpp_async" in done.stdout and all(name in done.stdout for name in COMMANDS)
    assert command[0] == sys.executable
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"jax", "numpy", "jaxpp_async.mesh", "jaxpp_async.doctor"}  # it answers at once


def test_the_version_is_that_of_the_package():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"jaxpp-async {jaxpp_async.__version__}\n")


SUBCOMMANDS = ("checkpoint ls", "checkpoint show", "checkpoint verify", "schedule compare", "schedule show")


def test_these_are_all_commands():
    found = [
        f"{name} {below}" if below else name
        for name, command in vars(typer.main.get_command(app))["commands"].items()
        for below in getattr(command, "commands", [""])
    ]
    assert sorted(found) == sorted((*COMMANDS, *SUBCOMMANDS))


@pytest.mark.parametrize("command", COMMANDS + SUBCOMMANDS)
def test_each_command_has_an_example(command):
    done = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    examples = done.stdout[done.stdout.index("Examples:") :].splitlines()[1:]
    assert examples[0].startswith(f"    jaxpp-async {command}")
    assert max(map(len, done.stdout.splitlines())) <= 90


@pytest.mark.parametrize("command", sorted({*COMMANDS, "schedule show", "schedule compare", "checkpoint ls"}))
def test_options_have_a_word_for_their_value(command):
    shown = CliRunner().invoke(app, [*command.split(), "--help"]).stdout
    assert not re.findall(r"^ +--\S+ <(?:str|path|int|float)\b.*", shown, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments", [("--version",), ("schedule", "show", "Std1F1B(2)"), ("doctor", "--help")]
)
def test_an_output_that_cannot_be_written_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        command = [*command_here("jaxpp_async.__main__"), *arguments]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "jaxpp-async: the output cannot be written: No space left on device\n"


def test_ctrl_c_while_the_command_line_is_imported_is_one_line(tmp_path):
    (tmp_path / "typer.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [*command_here("jaxpp_async.__main__"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "jaxpp-async: interrupted\n")
